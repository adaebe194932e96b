"""Attention over a cache: its reference by hand, its cases, and packages run on them, whole and broken."""

import math
from pathlib import Path

import pytest
import torch
from broken import check_mutants
from rotation import by_share, some
from sparse_decode_specs import SPECS, write_package, write_spec

from mlagen.layout import compose
from mlagen.spec import load
from mlagen.verify import mismatches, verify_package
from mlagen.verify.call.facts import Facts
from mlagen.verify.call.invalid import RefusedCase
from mlagen.verify.call.memory import LAYOUTS
from mlagen.verify.call.patterns import INDEX_PATTERNS
from mlagen.verify.sparse_decode.cases import CacheProblem, Listing, SparseDecodeCase, cases
from mlagen.verify.sparse_decode.facts import CacheFacts
from mlagen.verify.sparse_decode.family import SPARSE_DECODE
from mlagen.verify.sparse_decode.inputs import Inputs, ListInputs, attend, build

pytestmark = pytest.mark.interpreter

DEVICES = ["cpu", "cuda"]


def said(name: str, folder: Path, **changes: object) -> dict:
    """`SPEC["spec"]` of a package."""
    return load(write_spec(name, folder, **changes)).model_dump(mode="json")


def ran(found: list) -> list[SparseDecodeCase]:
    return [case for case in found if isinstance(case, SparseDecodeCase)]


@pytest.fixture(scope="module")
def packages(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sparse_decode")
    return {name: write_package(name, folder) for name in SPECS}


def test_the_reference_joins_both_lists_in_one_softmax_by_hand():
    layout = compose({"name": "r", "fields": [{"kind": "row", "dtype": "bf16"}]}, 2, 0)

    def listed(rows: list, indices: list, length: list | None) -> ListInputs:
        cache = torch.tensor(rows, dtype=torch.bfloat16).view(-1, 2, 1, 2)
        length = None if length is None else torch.tensor(length, dtype=torch.int32)
        return ListInputs(layout, cache, torch.tensor([indices], dtype=torch.int32), length, None)

    main = listed([[9.0, 9.0], [0.0, 4.0]], [[1, -1, 0], [0, 0, 0]], [2])
    extra = listed([[math.log(3.0), 8.0], [7.0, 7.0]], [[0, 2, 99], [-1, 5, 2]], None)
    q = torch.tensor([[[[1.0, 0.0]], [[1.0, 0.0]]]], dtype=torch.bfloat16)  # two positions of one request
    facts = Facts(1, 2, 0, 2, "bfloat16", "sparse", 3, "none", "optional", "e", "-inf", None, ())
    result = attend(Inputs(q, [main, extra], 1.0, None), facts)
    three = math.exp(float(torch.tensor(math.log(3.0)).bfloat16()))
    # Weights 1 and 3 of rows [0, 4] and [log 3, 8]; the second position sees its first list's [9, 9] twice.
    torch.testing.assert_close(result.out[0, 0, 1], torch.tensor((4 + three * 8) / (1 + three), dtype=torch.float64))
    torch.testing.assert_close(result.lse[0, 0], torch.tensor(math.log(1 + three), dtype=torch.float64))
    torch.testing.assert_close(result.out[1, 0], torch.full((2,), 9.0, dtype=torch.float64))
    torch.testing.assert_close(result.lse[1, 0], torch.tensor(9 + math.log(2), dtype=torch.float64))


@pytest.mark.parametrize("name", SPECS)
def test_caches_hold_poison_where_no_index_points(name, tmp_path):
    known = CacheFacts.of(said(name, tmp_path))
    for cache in ("end to end", "page gap", "odd"):
        for poison in (0xFF, 0x7F):
            listing = Listing(40, 90, 7, cache=cache, poison=poison, contents="any")
            second = listing if len(known.layouts) > 1 else None
            inputs = build(CacheProblem(2, 2, 3, listing, second), known, "cpu", 0)
            for one in inputs.lists:
                named = one.indices[(one.indices >= 0) & (one.indices < one.slots)].long().unique()
                assert 0 < len(named) < one.slots
                assert bool(one.rows(named, torch.float32).isfinite().all())
                pages, page_size = one.cache.shape[:2]
                others = torch.ones(pages * page_size, dtype=torch.bool)
                others[named] = False
                rows = one.cache.view(torch.uint8)[:, :, 0].flatten(0, 1)[others]
                planes = one.layout.plane_bytes[0] if one.layout.planar else None
                assert bool((rows[:, :planes] == poison).any())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", SPECS)
def test_names_are_unique_and_what_cases_name_exists(name, device, tmp_path):
    spec = said(name, tmp_path)
    found = cases(spec, device)
    names = [case.name for case in found]
    assert len(set(names)) == len(names)
    for case in found:
        assert case.name.split(": ")[0] in ("sparse_decode", "refuses")
        assert case.promise[-1] not in " ."
    problems = [case.problem for case in ran(found)]
    listings = [listing for problem in problems for listing in problem.listings]
    assert {listing.indices for listing in listings} <= set(INDEX_PATTERNS)
    layouts = {problem.q for problem in problems} | {problem.out for problem in problems if problem.out}
    assert layouts <= {*LAYOUTS, "by position"}
    # Cases of chains with merges belong to packages with merges, cases of a pair to those that take one.
    without = {"merged", "quantised"} | ({"stream", "graph"} if device == "cpu" else set())
    without |= set() if Facts.of(spec).takes_pair else {check for check in SPARSE_DECODE.checks if "pair" in check}
    assert {case.check for case in ran(found)} == set(SPARSE_DECODE.checks) - without


@pytest.mark.parametrize("device", DEVICES)
def test_the_sizes_that_break_kernels_are_there(device, tmp_path):
    problems = [case.problem for case in ran(cases(said("v4", tmp_path), device))]
    assert {1, 5, 6, 12, 16, 17, 20, 32, 33, 64, 96, 128} <= {problem.heads for problem in problems}
    assert {1, 2, 4} <= {problem.s_q for problem in problems}
    assert {0, 1} <= {problem.requests for problem in problems}
    assert any(problem.extra is None for problem in problems)
    for pick in (lambda problem: problem.main, lambda problem: problem.extra):
        listings = [listing for problem in problems if (listing := pick(problem))]
        assert {1, 2, 53, 64, 69} <= {listing.block_size for listing in listings}
        assert {0, 1, 17, 64} <= {listing.topk for listing in listings}
        assert {0, 1} <= {listing.rows for listing in listings}
        assert {0x7F, 0xFF} <= {listing.poison for listing in listings}
        assert {"zero", "too long", "negative", "mixed"} <= {listing.length for listing in listings}


def test_what_a_spec_lacks_is_left_out_and_what_it_requires_is_passed(tmp_path):
    assert cases(said("plain", tmp_path) | {"wrappers": ["flash_mla_sparse_fwd"]}, "cpu") == []
    lacking = cases(said("plain", tmp_path), "cpu")
    assert not any(case.problem.sink or case.problem.main.length or case.problem.extra for case in ran(lacking))
    assert any(case.name.startswith("refuses: extra_k_cache, given to a spec without") for case in lacking)
    required = ran(cases(said("odd", tmp_path), "cpu"))
    assert all(case.problem.sink and case.problem.main.length for case in required)


def test_main_and_second_lists_have_the_sizes_of_the_model(tmp_path):
    sizes = {name: CacheFacts.of(said(name, tmp_path)).topks for name in ("v32", "v4", "plain")}
    assert sizes == {"v32": (2048,), "v4": (128, 512), "plain": (64,)}


@pytest.mark.parametrize(("name", "target"), [pytest.param("odd", "sm80", marks=pytest.mark.slow), ("plain", "sm90")])
@by_share
def test_small_packages_hold_their_cases(packages, name, target, choose):
    results = verify_package(packages[name], workers=1, targets=[target], choose=choose)
    assert len(results) > 25
    assert [str(error) for error in mismatches(results)] == []


@pytest.mark.parametrize("name", some(["v32", "v32_nvfp4", "v4", "v41", "eight", "mixed", "tensor"], 2))
def test_the_others_hold_what_their_layouts_make_different(packages, name):
    only = ["*typical*", "*size: 53*", "*any codes*", "*: cache past*", "*int32*", "*lists*", "*: 20 *", "*refuses*"]
    results = verify_package(packages[name], workers=1, targets=["sm90"], only=only)
    assert len(results) > 25
    assert [str(error) for error in mismatches(results)] == []


@pytest.mark.parametrize("target", some(["sm80", "gfx942"], 1))
def test_targets_without_e4m3_in_hardware_hold_the_cases_for_every_target(packages, target):
    results = verify_package(packages["v4"], workers=1, targets=[target], only=["*typical*", "*any codes*"])
    assert [str(error) for error in mismatches(results)] == []


@pytest.mark.parametrize("target", ["sm80", pytest.param("sm90", marks=pytest.mark.slow)])
@by_share
def test_a_q_of_e4m3_is_taken_on_every_target_with_its_scale(packages, target, choose):
    results = verify_package(packages["mixed"], workers=1, targets=[target], only=["*e4m3*"], choose=choose)
    assert len(results) > (30 if target == "sm90" else 3) // (1 if choose is list else 3)
    assert [str(error) for error in mismatches(results)] == []


@pytest.mark.slow
@pytest.mark.mutants
@pytest.mark.parametrize(("name", "more_than"), [("v4", 30), ("mixed", 5)])
def test_every_mutant_is_reported(packages, tmp_path, name, more_than):
    check_mutants("sparse_decode_mutants.py", packages[name], tmp_path, more_than=more_than)


def test_refusals_name_the_layout_of_wrong_rows(tmp_path):
    found = [case for case in cases(said("v4", tmp_path), "cpu") if isinstance(case, RefusedCase)]
    named = {case.invalid.argument for case in found if case.invalid.says == "ue8m0_v4"}
    assert named == {"k_cache", "extra_k_cache", "is_fp8_kvcache"}
