"""Trials of candidate blocks, on the CPU, with the reference in a package's place."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mlagen.bench.families.candidates import (
    FLAT,
    PAGED,
    SELECT,
    CandidateInputs,
    CandidateShape,
    candidate_call,
    candidate_shapes,
    select_call,
    select_error,
)
from mlagen.bench.families.indexer_select import FLAT as ONE_FLAT
from mlagen.bench.families.indexer_select import PAGED as ONE_PAGED
from mlagen.bench.families.indexer_select import PickInputs
from mlagen.bench.families.mqa_logits import make_flat_inputs, make_paged_inputs
from mlagen.bench.peers.candidates import candidate_peers
from mlagen.layout import indexer_layout_of
from mlagen.spec.stored import INDEXER_LAYOUTS
from mlagen.verify.chains.candidates.reference import best_blocks

SPEC: dict[str, Any] = {
    "indexer": {
        "num_heads": 32,
        "head_dim": 128,
        "topk": 12,
        "rope_head_dim": 0,
        "candidates": {"block": 8, "count": 5},
    },
    "indexer_cache": {"layout": INDEXER_LAYOUTS["indexer_fp8"], "block_size": 16, "scale_rule": None},
}
KINDS = (SELECT, FLAT, PAGED, ONE_FLAT, ONE_PAGED)


def package(*names: str) -> Any:
    return SimpleNamespace(spec=SPEC, has=lambda name: name in names)


def select(logits: Any, starts: Any, ends: Any, k: int, block: int, out: Any) -> None:
    assert starts is None
    for row, end in enumerate(ends.tolist()):
        out[row] = best_blocks(logits[row, :end], k, block)


def selection() -> CandidateInputs:
    torch.manual_seed(0)
    ends = torch.tensor([120, 33, 3], dtype=torch.int32)
    return CandidateInputs(None, torch.empty(3, 5, dtype=torch.int32), torch.randn(3, 128), ends, 8)


def test_a_package_is_measured_at_the_shapes_of_its_wrappers():
    assert candidate_shapes(package(PAGED, ONE_PAGED), None) == []
    assert {shape.kind for shape in candidate_shapes(package(SELECT, PAGED, FLAT), None)} == {SELECT}
    shapes = candidate_shapes(package(*KINDS), None)
    assert {shape.kind for shape in shapes} == {SELECT, FLAT, PAGED}
    assert {(shape.topk, shape.blocks) for shape in shapes} == {(12, 5)}
    assert {shape.requests for shape in shapes if shape.kind == PAGED} == {1, 16, 64}
    assert len({str(shape) for shape in shapes}) == len(shapes)


def test_the_reference_selects_without_an_error():
    inputs = selection()
    assert select_error(inputs, select_call(select, inputs)) == 0.0


@pytest.mark.parametrize("fault", ["twice", "the newest left out", "nothing"])
def test_wrong_blocks_are_an_error(fault):
    inputs = selection()

    def wrong(*given: Any) -> None:
        select(*given)
        out = given[-1]
        if fault == "twice":
            out[0, 0] = out[0, 1]
        elif fault == "the newest left out":
            out[0, -1] = next(block for block in range(15) if block not in out[0])
        else:
            out.fill_(-1)

    assert select_error(inputs, select_call(wrong, inputs)) > 0.0


@pytest.mark.parametrize("kind", [FLAT, PAGED])
def test_calls_get_the_arguments_of_their_wrapper(kind):
    shape = CandidateShape(kind, 1 if kind == FLAT else 2, 3 if kind == FLAT else 1, 32, 64, 12, 5)
    layout, device = indexer_layout_of(SPEC), torch.device("cpu")
    assert layout is not None
    logits = shape.over_all_keys.logits
    if kind == FLAT:
        (made,) = make_flat_inputs(logits, layout, device, 1)
    else:
        (made,) = make_paged_inputs(logits, layout, 16, device, 1)
    picks = PickInputs(made, torch.empty(shape.tokens, 12, dtype=torch.int32))
    inputs = CandidateInputs(picks, torch.zeros(shape.tokens, 5, dtype=torch.int32), None, made.end, 8)
    found: list[Any] = []
    candidate_call(shape, lambda *given, out: found.extend([*given, out]), inputs)()
    assert found[-3] is inputs.blocks
    assert found[-2:] == [12, picks.indices]
    assert found[0][0].shape == ((3, 32, 128) if kind == FLAT else (2, 1, 32, 128))
    assert [entrant.name for entrant in candidate_peers(package(*KINDS), shape, [inputs])] != []
