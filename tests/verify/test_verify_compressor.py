"""The compressor: its reference against loops, its cases, and packages run on them."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from broken import check_mutants
from rotation import by_share, drawn, some
from verify_specs import spec

from mlagen.emit import apply, compare, render
from mlagen.errors import MlagenError
from mlagen.plan import make_plan
from mlagen.spec import Spec
from mlagen.verify import mismatches, verify_package
from mlagen.verify.call.invalid import RefusedCase
from mlagen.verify.call.memory import LAYOUTS
from mlagen.verify.compressor.cases import CompressCase, SaveCase, cases
from mlagen.verify.compressor.family import COMPRESSOR
from mlagen.verify.compressor.reference import Windows, compressed
from mlagen.verify.compressor.side import COMPRESS, SAVE, CompressorSide, sides_of

pytestmark = pytest.mark.interpreter

RULE = {"kind": "scales", "of": "row", "dtype": "fp32", "tile": 16, "floor": 1e-4, "floor_on": "amax"}
# One field across the border of latent and RoPE, with columns and pairs that are no powers of two.
FNUZ = {
    "name": "rows_fnuz",
    "fields": (
        {"kind": "row", "dtype": "e4m3fnuz"},
        {**RULE, "rounding": "nearest", "divisor": 224.0},
        {"kind": "pad", "bytes": 4},
    ),
}
GPTJ = {"rope": "gptj", "rope_at": "last"}
KEYS = {"num_heads": 4, "head_dim": 128, "topk": 64, "rope_head_dim": 64, **GPTJ}
PACKAGES: dict[str, dict[str, Any]] = {
    "v4": {"layout": "ue8m0_v4", "keys": "indexer_fp8"},
    "v41": {"layout": "mxfp8_v41", "extra": "nvfp4_v41", "keys": "indexer_mxfp4", "ops": True},
    "odd": {"layout": FNUZ, "dims": (90, 30, 90), "dtype": "fp16", "keys": "indexer_fp8", "indexer": {"head_dim": 96}},
    "plain": {"layout": "bf16"},
    "tensor": {"layout": "fp8_per_tensor"},
    "halves": {"layout": "fp16", "dtype": "fp16"},
    "wide": {"layout": "fp8_ds_mla", "dims": (512, 64, 512)},
}
FIRST = drawn(("v4", "v41", "odd"), 1)  # which a run holds to its cases, another for each commit


def made(name: str, wrappers: tuple[str, ...] = (SAVE, COMPRESS), **changes: Any) -> Spec:
    """A spec with caches and nothing else."""
    given = PACKAGES[name]
    latent, rope, v = given.get("dims", (448, 64, 512))
    dims = {"num_heads": 4, "kv_lora_rank": latent, "qk_rope_head_dim": rope, "rope": "gptj", "v_head_dim": v}
    parts: dict[str, Any] = {}
    if "extra" in given:
        parts["extra_cache"] = {"layout": given["extra"], "block_size": 64}
    if "keys" in given:
        parts["indexer"] = {**KEYS, **given.get("indexer", {})}
        parts["indexer_cache"] = {"layout": given["keys"], "block_size": 64}
    return Spec.model_validate(
        {
            "name": name,
            "title": "A compressor",
            "model": {**dims, "dtype": given.get("dtype", "bf16"), **changes},
            "cache": {"layout": given["layout"], "block_size": 64},
            **parts,
            "wrappers": wrappers,
            "ops": given.get("ops", False),
            "targets": ("sm80", "sm90", "gfx942"),
        }
    )


def write(parent: Path, name: str, *args: Any) -> Path:
    apply(compare(render(make_plan(made(name, *args))), parent / name))
    return parent / name


def sides(name: str) -> list[CompressorSide]:
    return sides_of(made(name).model_dump(mode="json"))


def check_cases(package: Path, **choices: Any) -> None:
    results = verify_package(package, workers=1, **choices)
    assert len(results) > 6
    assert [str(error) for error in mismatches(results)] == []


def test_rows_equal_loops():
    """A window of two halves at position 7, with two tokens before a hole, by sums of Python's numbers."""
    side, ratio, width = sides("v4")[1], 4, 2 * 128
    states = torch.randn(3, 4, 2 * width)
    table = torch.tensor([[2, 1]], dtype=torch.int32)
    call = Windows(states, table, [0, 0], [7, 6], [4, 4], [5, 6], ratio, True)
    angle = torch.rand(9, 32) * 6
    weight = torch.randn(128)
    rows, slots = compressed(side, call, torch.cat([angle.cos(), angle.sin()], 1), weight, 0.5, 100)
    assert slots.tolist() == [5]
    want = []
    for column in range(128):
        total = weighted = 0.0
        for position in range(8):
            state = states[2 if position < 4 else 1, position % 4]
            at = column + (128 if position >= 4 else 0)
            share = math.exp(float(state[width + at]))
            total, weighted = total + share, weighted + share * float(state[at])
        want.append(weighted / total)
    mean = sum(one * one for one in want) / 128
    want = [one / math.sqrt(mean + 0.5) * float(weight[column]) for column, one in enumerate(want)]
    for pair in range(32):
        turned = complex(want[64 + 2 * pair], want[65 + 2 * pair]) * complex(
            float(angle[4, pair].cos()), float(angle[4, pair].sin())
        )
        want[64 + 2 * pair], want[65 + 2 * pair] = turned.real, turned.imag
    torch.testing.assert_close(rows[0], torch.tensor(want, dtype=torch.float64), rtol=1e-6, atol=1e-6)


def test_tokens_outside_make_no_row():
    side, states = sides("v4")[1], torch.randn(2, 4, 512)
    angles, weight = torch.ones(12, 64), torch.ones(128)
    tokens = [
        (0, 3, 3, 0),  # works
        (0, 2, 2, 1),  # within a window
        (1, 3, 3, 2),  # its page is none
        (0, 7, 4, 3),  # past the columns of the block table
        (2, 3, 3, 4),  # no request
        (0, -1, 3, 5),
        (0, 3, -1, 6),
        (0, 3, 8, 7),
        (0, 3, 3, -1),
        (0, 3, 3, 9),
        (0, 15, 3, 8),  # past the angles
    ]
    call = Windows(states, torch.tensor([[0], [-1]]), *map(list, zip(*tokens, strict=True)), 4, True)
    _, slots = compressed(side, call, angles, weight, 0.0, 9)
    assert slots.tolist() == [0]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", PACKAGES)
def test_cases_have_names_and_patterns_of_their_own(name, device):
    found = cases(made(name).model_dump(mode="json"), device)
    names = [case.name for case in found]
    assert len(set(names)) == len(names)
    assert {type(case) for case in found} == {*COMPRESSOR.kinds, RefusedCase}
    checks = {case.check for case in found if not isinstance(case, RefusedCase)}
    assert checks == set(COMPRESSOR.checks) - ({"graph"} if device == "cpu" else set())
    for case in found:
        assert case.promise[-1] not in " ."
        if isinstance(case, SaveCase | CompressCase):
            assert case.states in LAYOUTS


def test_the_values_that_break_kernels_are_there():
    found = cases(made("v4").model_dump(mode="json"), "cpu")
    for short in ("rows", "keys"):
        mine = [case for case in found if isinstance(case, CompressCase) and case.short == short]
        assert {(4, True), (128, False), (1, False), (2, False)} <= {(case.ratio, case.overlap) for case in mine}
        assert {"shuffled", "negative", "beyond", "shorter", "none"} == {case.slots for case in mine}
        assert {"own", "garbage", "longer", "past"} == {case.positions for case in mine}
        assert {"whole", "holes", "narrow", "garbage"} == {case.table for case in mine}
        assert {"random", "equal", "large", "infinite"} == {case.scores for case in mine}
        assert {case.steps for case in mine if case.check == "chain"} == {"chunks", "single", "drafts"}


def test_a_spec_without_the_wrappers_has_no_cases():
    assert cases(spec(wrappers=["flash_mla_sparse_fwd"]), "cpu") == []


def test_pairs_of_other_columns_are_refused():
    for changes in ({"rope": "neox"}, {"kv_lora_rank": 447, "v_head_dim": 511}):
        with pytest.raises((MlagenError, ValueError), match="gptj and an even"):
            made("plain", **changes)


@pytest.mark.parametrize(
    "name", [*FIRST, *(pytest.param(name, marks=pytest.mark.slow) for name in PACKAGES if name not in FIRST)]
)
@by_share
def test_a_package_holds_its_cases(name, tmp_path, choose):
    # Of targets one without e4m3 and one that rounds to it.
    check_cases(write(tmp_path, name), targets=["sm80", "sm90"] if name == "v4" else ["sm90"], choose=choose)


@pytest.mark.parametrize("wrapper", some([SAVE, COMPRESS], 1))
def test_each_wrapper_alone_holds_its_cases(wrapper, tmp_path):
    only = ["compressor: typical*", "compressor: states*", "compressor refuses: state_width*"]
    check_cases(write(tmp_path, "v4", (wrapper,)), targets=["sm90"], only=only)


@pytest.mark.slow
@pytest.mark.mutants
@pytest.mark.parametrize("name", ["v4", "v41"])
def test_every_mutant_is_reported(name, tmp_path):
    check_mutants("compressor_mutants.py", write(tmp_path, name), tmp_path, more_than=30)
