"""The kernels around the indexer's keys: their reference against loops, their cases, and packages run on them."""

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
from mlagen.verify.indexer_cache.cases import KeysCase, KeysGatherCase, KeysQueryCase, QueryCase, cases
from mlagen.verify.indexer_cache.family import INDEXER_CACHE
from mlagen.verify.indexer_cache.reference import normalised_keys, quantise_query
from mlagen.verify.indexer_cache.side import KEYS_QUERY, SHORT, IndexerSide, side_of
from mlagen.verify.paged.rope import codes, rotate

pytestmark = pytest.mark.interpreter

NEOX = {"rope": "neox", "rope_at": "first"}
GPTJ = {"rope": "gptj", "rope_at": "last"}
RULE = {"kind": "scales", "of": "row", "dtype": "fp32", "tile": 128, "floor": 1e-4, "floor_on": "amax"}
FNUZ = {
    "name": "keys_fnuz",
    "fields": (
        {"kind": "row", "dtype": "e4m3fnuz"},
        {**RULE, "rounding": "nearest", "divisor": 224.0},
        {"kind": "pad", "bytes": 12},
    ),
    "page_multiple": 512,
}
ODD = {
    "name": "keys_odd",
    "fields": (
        {"kind": "row", "dtype": "e4m3"},
        {"kind": "pad", "bytes": 3},
        {**RULE, "rounding": "power_of_two", "divisor": 448.0, "floor_on": "scale"},
    ),
}
# Two tiles of four pieces of 16 columns each.
TILES = {
    "name": "keys_tiles",
    "fields": (
        {"kind": "row", "dtype": "e2m1"},
        {
            **RULE,
            "dtype": "e4m3",
            "tile": 64,
            "rounding": "nearest",
            "divisor": 6.0,
            "floor": 0.02,
            "floor_on": "scale",
        },
    ),
}
# Keys in halves and in pairs, of both dtypes; head dims that are no power of two; pairs that begin at an odd column;
# keys and the query in kernels of their own only.
PACKAGES: dict[str, dict[str, Any]] = {
    "halves": {"indexer": {"head_dim": 128, "rope_head_dim": 64, **NEOX}, "layout": "indexer_fp8"},
    "pairs": {"indexer": {"head_dim": 128, "rope_head_dim": 64, **GPTJ}, "layout": "indexer_mxfp4"},
    "fnuz": {
        "indexer": {"head_dim": 80, "rope_head_dim": 20, **NEOX, "rope_at": "last"},
        "layout": FNUZ,
        "dtype": "fp16",
    },
    "blocks": {"indexer": {"head_dim": 96, "rope_head_dim": 40, **NEOX}, "layout": "indexer_mxfp4"},
    "odd": {"indexer": {"head_dim": 97, "rope_head_dim": 30, **GPTJ}, "layout": ODD},
    "tiles": {"indexer": {"head_dim": 128, "rope_head_dim": 32, **NEOX, "rope_at": "last"}, "layout": TILES},
    "apart": {"indexer": {"head_dim": 97, "rope_head_dim": 30, **GPTJ}, "layout": ODD, "apart": True},
    "still": {"indexer": {"head_dim": 64, "rope_head_dim": 0}, "layout": "indexer_fp8"},
}
FIRST = drawn(("halves", "pairs"), 1)  # which a run holds to its cases, another for each commit


def indexed(name: str, wrappers: tuple[str, ...] | None = None, **changes: Any) -> Spec:
    """A spec with an indexer and nothing else."""
    given = PACKAGES[name]
    lacks_keys_query = given.get("apart") or not given["indexer"]["rope_head_dim"]
    return Spec.model_validate(
        {
            "name": name,
            "title": "An indexer",
            "model": {"num_heads": 12, "dtype": given.get("dtype", "bf16")},
            "indexer": {"num_heads": 6, "topk": 64, **given["indexer"], **changes},
            "indexer_cache": {"layout": given["layout"], "block_size": 64},
            "wrappers": wrappers or tuple(one for one in SHORT if one != KEYS_QUERY or not lacks_keys_query),
            "targets": ("sm80", "sm90", "gfx942"),
        }
    )


def write(parent: Path, name: str, *args: Any, **changes: Any) -> Path:
    apply(compare(render(make_plan(indexed(name, *args, **changes))), parent / name))
    return parent / name


def side(name: str, **changes: Any) -> IndexerSide:
    found = side_of(indexed(name, **changes).model_dump(mode="json"))
    assert found is not None
    return found


@pytest.mark.parametrize("name", PACKAGES)
def test_rotated_rows_equal_loops(name):
    of = side(name)
    x, angle = torch.randn(3, of.layout.columns).double(), torch.rand(3, of.rope // 2).double()
    found = rotate(of, x, torch.cat([angle.cos(), angle.sin()], 1))
    half = of.rope // 2
    for row in range(3):
        want = x[row].clone()
        for pair in range(half):
            one, other = (pair, pair + half) if of.neox else (2 * pair, 2 * pair + 1)
            one, other = one + of.first, other + of.first
            turned = complex(x[row, one], x[row, other]) * complex(
                math.cos(angle[row, pair]), math.sin(angle[row, pair])
            )
            want[one], want[other] = turned.real, turned.imag
        torch.testing.assert_close(found[row], want)


def test_a_query_times_its_weights_is_the_query():
    of = side("halves")
    q, weights = torch.randn(2, 6, 128).bfloat16(), torch.ones(2, 6)
    angles = torch.cat([torch.ones(4, 32), torch.zeros(4, 32)], 1)
    values, _, scaled = quantise_query(of, q, torch.tensor([0, 3]), angles, weights, 0.5, 2.0)
    back = values.view(torch.float8_e4m3fn).float() * scaled[..., None]
    assert float((back - q.float()).abs().max()) < 0.1 * float(q.float().abs().max())


def test_the_last_token_of_a_group_writes_a_key_at_the_first_ones_position():
    of = side("halves")
    k, positions = torch.randn(1, 128).bfloat16().expand(6, -1), torch.tensor([0, 1, 2, 3, -1, 400])
    angle = torch.arange(8.0)[:, None].expand(-1, 32)
    keys, ends = normalised_keys(of, k, positions, torch.cat([angle.cos(), angle.sin()], 1), torch.ones(128), 0.0, 2)
    assert ends.tolist() == [False, True, False, True, False, False]
    assert torch.equal(keys[0], keys[1])
    assert not torch.equal(keys[1], keys[3])
    assert abs(float(keys[1].float().square().mean()) - 1) < 0.01


def test_codes_are_in_the_order_of_their_values():
    stored = torch.arange(256, dtype=torch.uint8)
    values = stored.view(torch.float8_e4m3fn).float()
    finite = ~values.isnan()
    order = codes(stored, False)[finite]
    assert torch.equal(values[finite][order.argsort()], values[finite].sort().values)
    assert codes(torch.tensor([0x89, 0x70], dtype=torch.uint8), True).tolist() == [-1, 0, 0, 7]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", PACKAGES)
def test_cases_have_names_and_patterns_of_their_own(name, device):
    of = indexed(name)
    found, both = cases(of.model_dump(mode="json"), device), KEYS_QUERY in of.wrappers
    names = [case.name for case in found]
    assert len(set(names)) == len(names)
    assert {type(case) for case in found} == {*INDEXER_CACHE.kinds, RefusedCase} - (
        {KeysQueryCase} if not both else set()
    )
    checks = {case.check for case in found if not isinstance(case, RefusedCase)}
    assert checks == set(INDEXER_CACHE.checks) - ({"graph"} if device == "cpu" else set()) - (
        {"beside"} if not both else set()
    )
    for case in found:
        assert case.promise[-1] not in " ."
        if isinstance(case, QueryCase):
            assert {case.q, case.weights, case.angles} <= set(LAYOUTS)


def test_the_values_that_break_kernels_are_there():
    found = cases(indexed("halves").model_dump(mode="json"), "cpu")
    keys = [case for case in found if isinstance(case, KeysCase)]
    for wrapper in {case.wrapper for case in keys}:
        mine = [case for case in keys if case.wrapper == wrapper]
        assert {"shuffled", "negative", "beyond", "shorter", "none"} == {case.slots for case in mine}
        assert {0, 4, 8, 512} <= {case.pages.page_gap for case in mine}
        assert any(case.pages.far for case in mine)
    assert {"bits", "tiles", "not finite"} < {case.values for case in keys}
    assert {1, 2, 128} <= {case.ratio for case in keys if case.ratio}
    assert {1, 16, 128} <= {case.heads for case in found if isinstance(case, QueryCase)}
    gathers = [case for case in found if isinstance(case, KeysGatherCase)]
    assert {"garbage", "short", "outside"} == {case.table for case in gathers}


def test_what_a_spec_lacks_is_left_out():
    assert cases(spec(wrappers=["flash_mla_sparse_fwd"]), "cpu") == []
    for wrapper in SHORT:
        found = cases(indexed("halves", (wrapper,)).model_dump(mode="json"), "cpu")
        assert any(isinstance(case, RefusedCase) for case in found)
        assert {case.wrapper for case in found if isinstance(case, RefusedCase | KeysCase)} == {wrapper}


@pytest.mark.parametrize(
    "name", [*FIRST, *(pytest.param(name, marks=pytest.mark.slow) for name in PACKAGES if name not in FIRST)]
)
@by_share
def test_a_package_holds_its_cases(name, tmp_path, choose):
    changes = {"q_scale_rule": {"rounding": "nearest", "floor": 1e-10}} if name == "fnuz" else {}
    # Of targets one without e4m3 and one that rounds to it.
    targets = ["sm80", "sm90"] if name == "halves" else ["sm90"]
    results = verify_package(write(tmp_path, name, **changes), workers=1, targets=targets, choose=choose)
    assert len(results) > 60
    assert [str(error) for error in mismatches(results)] == []


@pytest.mark.parametrize("wrapper", some(SHORT, 1))
@pytest.mark.parametrize("name", ["halves", "pairs"])
def test_each_wrapper_alone_holds_its_cases(name, wrapper, tmp_path):
    package = write(tmp_path, name, (wrapper,))
    results = verify_package(package, workers=1, targets=["sm90"], only=["*: typical", "refuses*"])
    assert len(results) > 10
    assert [str(error) for error in mismatches(results)] == []


@pytest.mark.slow
@pytest.mark.mutants
@pytest.mark.parametrize(("name", "more_than"), [("halves", 45), ("pairs", 45), ("blocks", 4)])
def test_every_mutant_is_reported(name, more_than, tmp_path):
    check_mutants("indexer_cache_mutants.py", write(tmp_path, name), tmp_path, more_than=more_than)
