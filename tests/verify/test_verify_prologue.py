"""Attention's prologue: its reference against loops, its cases, and packages run on them."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from broken import check_mutants
from rotation import by_share, drawn, some
from verify_specs import spec

from mlagen.emit import apply, compare, render
from mlagen.plan import make_plan
from mlagen.spec import Spec
from mlagen.verify import mismatches, verify_package
from mlagen.verify.call.invalid import RefusedCase
from mlagen.verify.call.memory import LAYOUTS
from mlagen.verify.prologue.cases import PrologueCase, cases
from mlagen.verify.prologue.family import PROLOGUE
from mlagen.verify.prologue.reference import normalise, turned_queries, turned_rows
from mlagen.verify.prologue.side import CONCAT, SHORT, PrologueSide, side_of

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
THIN = {"name": "thin", "fields": ({"kind": "row", "dtype": "bf16"},)}
# Every named layout, both styles, both dtypes, dims that are no power of two.
PACKAGES: dict[str, dict[str, Any]] = {
    "v4": {"dims": (448, 64, 512), "rope": "gptj", "layout": "ue8m0_v4"},
    "packed": {"dims": (512, 64, 512), "rope": "neox", "layout": "fp8_ds_mla"},
    "rows": {"dims": (512, 64, 512), "rope": "neox", "layout": "bf16"},
    "whole": {"dims": (448, 64, 512), "rope": "neox", "layout": "mxfp8_v41"},
    "pairs": {"dims": (448, 64, 512), "rope": "gptj", "layout": "nvfp4_v41"},
    "nvfp4": {"dims": (512, 64, 512), "rope": "gptj", "layout": "nvfp4_ds_mla"},
    "tensor": {"dims": (512, 64, 512), "rope": "neox", "layout": "fp8_per_tensor"},
    "halves": {"dims": (512, 64, 512), "rope": "gptj", "layout": "fp16", "dtype": "fp16"},
    "odd": {"dims": (90, 30, 90), "rope": "neox", "layout": FNUZ, "dtype": "fp16"},
    "thin": {"dims": (67, 6, 67), "rope": "gptj", "layout": THIN},
}
FIRST = drawn(("v4", "packed", "odd"), 1)  # which a run holds to its cases, another for each commit


def made(name: str, wrappers: tuple[str, ...] = tuple(SHORT)) -> Spec:
    """A spec with a cache and nothing else."""
    given = PACKAGES[name]
    latent, rope, v = given["dims"]
    dims = {"num_heads": 5, "kv_lora_rank": latent, "qk_rope_head_dim": rope, "rope": given["rope"], "v_head_dim": v}
    return Spec.model_validate(
        {
            "name": name,
            "title": "A prologue",
            "model": {**dims, "dtype": given.get("dtype", "bf16")},
            "cache": {"layout": given["layout"], "block_size": 64},
            "wrappers": wrappers,
            "targets": ("sm80", "sm90", "gfx942"),
        }
    )


def write(parent: Path, name: str, *args: Any) -> Path:
    apply(compare(render(make_plan(made(name, *args))), parent / name))
    return parent / name


def side(name: str) -> PrologueSide:
    found = side_of(made(name).model_dump(mode="json"))
    assert found is not None
    return found


@pytest.mark.parametrize("name", PACKAGES)
def test_turned_queries_equal_loops(name):
    of = side(name)
    half, first = of.rope // 2, of.first
    q, angle = torch.randn(3, 2, of.layout.columns).double(), torch.rand(7, half).double() * 6
    positions = torch.tensor([6, 0, 7])
    found, sizes = turned_queries(of, q, torch.cat([angle.cos(), angle.sin()], 1), positions)
    want = q.clone()
    for token, position in enumerate((6, 0)):
        for pair in range(half):
            one, other = (pair, pair + half) if of.neox else (2 * pair, 2 * pair + 1)
            turn = complex(math.cos(angle[position, pair]), math.sin(angle[position, pair]))
            for head in range(2):
                turned = complex(q[token, head, first + one], q[token, head, first + other]) * turn
                want[token, head, first + one], want[token, head, first + other] = turned.real, turned.imag
    torch.testing.assert_close(found, want)
    assert bool((sizes >= found.abs() - 1e-12).all())


def test_a_weight_of_the_latent_normalises_no_other_column():
    of = side("packed")
    rows = torch.randn(2, 576).bfloat16()
    angles = torch.cat([torch.ones(1, 32), torch.zeros(1, 32)], 1)
    found, known = turned_rows(of, rows, angles, torch.tensor([0, -1]), torch.ones(512).bfloat16(), 0.0)
    assert known.tolist() == [True, False]
    assert torch.equal(found[:, 512:], rows[:, 512:])
    assert abs(float(found[0, :512].float().square().mean()) - 1) < 0.01


def test_the_norm_is_of_mean_square_1():
    x = torch.randn(4, 512).double()
    torch.testing.assert_close(normalise(x, None, 0.0).square().mean(-1), torch.ones(4).double())
    torch.testing.assert_close(normalise(x, torch.full((512,), 3.0), 0.0), 3 * normalise(x, None, 0.0))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", PACKAGES)
def test_cases_have_names_and_patterns_of_their_own(name, device):
    found = cases(made(name).model_dump(mode="json"), device)
    names = [case.name for case in found]
    assert len(set(names)) == len(names)
    assert {type(case) for case in found} == {*PROLOGUE.kinds, RefusedCase}
    checks = {case.check for case in found if not isinstance(case, RefusedCase)}
    assert checks == set(PROLOGUE.checks) - ({"graph"} if device == "cpu" else set())
    for case in found:
        assert case.promise[-1] not in " ."
        if isinstance(case, PrologueCase):
            assert {case.q, case.rows, case.tables} <= set(LAYOUTS)


def test_the_values_that_break_kernels_are_there():
    found = cases(made("v4").model_dump(mode="json"), "cpu")
    for concat in (True, False):
        mine = [case for case in found if isinstance(case, PrologueCase) and (case.wrapper == CONCAT) is concat]
        assert {"shuffled", "negative", "beyond", "shorter", "none"} == {case.slots for case in mine}
        assert {"random", "zero", "garbage", "longer"} == {case.positions for case in mine}
        assert {"random", "tiles", "powers"} == {case.values for case in mine}
        assert {"contiguous", "slice", "odd", "transposed", "far"} == {case.q for case in mine}
        assert any(case.pages.far for case in mine)
        assert {0, 1, 17} <= {case.heads for case in mine}
        assert {True, False} == {case.wide for case in mine}


def test_a_spec_without_the_wrappers_has_no_cases():
    assert cases(spec(wrappers=["flash_mla_sparse_fwd"]), "cpu") == []
    for wrapper in SHORT:
        found = cases(made("v4", (wrapper,)).model_dump(mode="json"), "cpu")
        assert {case.wrapper for case in found if isinstance(case, RefusedCase | PrologueCase)} == {wrapper}


@pytest.mark.parametrize(
    "name", [*FIRST, *(pytest.param(name, marks=pytest.mark.slow) for name in PACKAGES if name not in FIRST)]
)
@by_share
def test_a_package_holds_its_cases(name, tmp_path, choose):
    # Of targets one without e4m3 and one that rounds to it.
    targets = ["sm80", "sm90"] if name == "v4" else ["sm90"]
    results = verify_package(write(tmp_path, name), workers=1, targets=targets, choose=choose)
    assert len(results) > 60
    assert [str(error) for error in mismatches(results)] == []


@pytest.mark.parametrize("wrapper", some(SHORT, 1))
def test_each_wrapper_alone_holds_its_cases(wrapper, tmp_path):
    package = write(tmp_path, "packed", (wrapper,))
    only = ["prologue: typical*", "prologue: norm*", "prologue refuses*"]
    results = verify_package(package, workers=1, targets=["sm90"], only=only)
    assert len(results) > 10
    assert [str(error) for error in mismatches(results)] == []


@pytest.mark.slow
@pytest.mark.mutants
@pytest.mark.parametrize(("name", "more_than"), [("v4", 25), ("packed", 20)])
def test_every_mutant_is_reported(name, more_than, tmp_path):
    check_mutants("prologue_mutants.py", write(tmp_path, name), tmp_path, more_than=more_than)
