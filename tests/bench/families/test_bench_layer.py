"""Trials of a DeepSeek V4 layer, on the CPU, with a step in plain torch in a package's place."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from mlagen.bench.families import layer
from mlagen.bench.families.layer import NEEDED, LayerInputs, LayerShape, layer_error, layer_shapes, layer_trials
from mlagen.bench.families.sparse_decode import SparseDecodeInputs, reference
from mlagen.bench.package import BenchPackage
from mlagen.bench.peers.layer import layer_peers
from mlagen.bench.trial import Setting
from mlagen.layout.codec import read, write
from mlagen.spec import load
from mlagen.verify.call.facts import Facts
from mlagen.verify.prologue.reference import normalise, turned_queries
from mlagen.verify.prologue.side import side_of

SPEC = load(Path(__file__).parents[3] / "specs" / "dsv4_flash_out_rope.yaml").model_dump(mode="json")


def package(spec: dict[str, Any] = SPEC) -> BenchPackage:
    root = ModuleType("dsv4_flash_out_rope")
    root.quantize_and_insert_k_cache = lambda rows, cache, slots, size, *_: write(  # type: ignore[attr-defined]
        made.cached[0], cache, size, slots, rows
    )
    made = BenchPackage(Path("dsv4_flash_out_rope"), root, Facts.of(spec), spec)
    return made


def test_packages_with_the_whole_path_are_measured() -> None:
    shapes = layer_shapes(package(), None)
    assert {(shape.ratio, shape.picked) for shape in shapes} == {(4, 512), (128, 256)}
    assert {shape.requests for shape in shapes} == {1, 16, 128}
    assert len({str(shape) for shape in shapes}) == len(shapes) == 12
    assert layer_shapes(package({**SPEC, "wrappers": NEEDED[1:]}), None) == []
    attention = {**SPEC["attention"], "out_rope": None}
    assert layer_shapes(package({**SPEC, "attention": attention}), None) == []


class Step:
    """A step in plain torch: any compressed rows are picked, and rows are written as they come."""

    def __init__(self, made: BenchPackage, inputs: LayerInputs, **faults: bool) -> None:
        self.package, self.inputs, self.faults = made, inputs, faults

    def __call__(self) -> torch.Tensor:
        one, made = self.inputs, self.package
        torch.manual_seed(0)  # the same picks each time
        if not self.faults.get("no_row"):
            write(one.window.layout, one.window.pages, one.window.block_size, one.slots, one.row)
        rows = torch.randn(len(one.slots), made.facts.d_qk).bfloat16()
        write(one.rows.layout, one.rows.pages, one.rows.block_size, one.made.slots, rows)
        slots = one.rows.indices
        if one.scored is not None:
            for picks, length in zip(one.scored.picks, one.scored.lengths[:, 0].tolist(), strict=True):
                count = min(length, len(picks)) - self.faults.get("one_less", False)
                picks[:count] = torch.randperm(length)[:count]
            size, picks = one.rows.block_size, one.scored.picks
            found = one.table.gather(1, (picks.clamp(min=0) // size).long()) * size + picks % size
            slots = torch.where(picks >= 0, found, -1)[:, None]
        side = side_of(made.spec)
        assert side is not None
        q, _ = turned_queries(side, normalise(one.q.double(), None, 1e-6), one.angles.table, one.angles.positions)
        angles = None if self.faults.get("not_rotated") else one.angles
        given = SparseDecodeInputs(
            q.bfloat16()[:, None], one.window, replace(one.rows, indices=slots), 512, one.scale, one.sink, None, None,
            torch.ones(1), angles,
        )  # fmt: skip
        return reference(given).expected.bfloat16()


@pytest.mark.parametrize("ratio", layer.RATIOS)
def test_a_step_is_checked_over_the_rows_that_it_wrote_and_picked(ratio: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made = package()
    shape = LayerShape(ratio, 2, 3, 1024, 100 if ratio == 4 else 1024 // ratio)
    trial = layer_trials(Setting(made, torch.device("cpu"), 1 << 10))
    monkeypatch.setattr(Setting, "roof", None)
    ready = trial(shape)
    inputs = ready.inputs[0]
    assert inputs.angles.positions.tolist() == [1023, 1022]
    assert (inputs.made.slots >= 0).tolist() == [True, False]
    assert bool(read(inputs.window.layout, inputs.window.pages, 64, inputs.slots).isfinite().all())
    assert layer_error(shape, made, inputs, Step(made, inputs)) < ready.error_limit
    assert not layer_error(shape, made, inputs, Step(made, inputs, no_row=True)) <= ready.error_limit
    assert not layer_error(shape, made, inputs, Step(made, inputs, not_rotated=True)) <= ready.error_limit
    if ratio == 4:
        assert not layer_error(shape, made, inputs, Step(made, inputs, one_less=True)) <= ready.error_limit
    names = [peer.name for peer in layer_peers(made, shape, ready.inputs)]
    assert names == (
        ["vLLM, FlashMLA, top-k per row", "vLLM, FlashMLA, top-k persistent"] if ratio == 4 else ["vLLM, FlashMLA"]
    )
