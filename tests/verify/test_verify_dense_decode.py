"""Dense attention over a paged cache: the scheduler's twin, its reference by hand, and packages run on the cases."""

import math
from pathlib import Path

import pytest
import torch
from broken import check_mutants
from dense_decode_specs import SPECS, write_package, write_spec
from hypothesis import given, settings
from hypothesis import strategies as st
from rotation import by_share, some

from mlagen.layout import compose
from mlagen.spec import load
from mlagen.verify import mismatches, verify_package
from mlagen.verify.call.facts import Facts
from mlagen.verify.call.memory import GARBAGE
from mlagen.verify.dense_decode.cases import TOO_LONG, DenseDecodeCase, DenseDecodeProblem, cases
from mlagen.verify.dense_decode.facts import DenseDecodeFacts
from mlagen.verify.dense_decode.family import DENSE_DECODE
from mlagen.verify.dense_decode.inputs import Inputs, attend, build
from mlagen.verify.dense_decode.schedule import Part, share, splits_of

pytestmark = pytest.mark.interpreter

DEVICES = ["cpu", "cuda"]


def said(name: str, folder: Path) -> dict:
    """`SPEC["spec"]` of a package."""
    return load(write_spec(name, folder)).model_dump(mode="json")


def ran(found: list) -> list[DenseDecodeCase]:
    return [case for case in found if isinstance(case, DenseDecodeCase)]


@pytest.fixture(scope="module")
def packages(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("dense")
    return {name: write_package(name, folder) for name in SPECS}


BATCHES = st.tuples(
    st.lists(st.integers(1, 300), max_size=40), st.integers(0, 5), st.integers(0, 9), st.integers(1, 300)
)


@settings(max_examples=300, deadline=None)
@given(BATCHES, st.booleans())
def test_every_kv_block_is_covered_once_and_in_order(batch, alike):
    kv_blocks, overhead, merge, programs = batch
    parts = [part for own in share(kv_blocks, overhead, merge, programs, alike=alike) for part in own]
    covered = [(part.request, kv_block) for part in parts for kv_block in range(part.first, part.end)]
    assert covered == [(request, kv_block) for request, count in enumerate(kv_blocks) for kv_block in range(count)]


@settings(max_examples=300, deadline=None)
@given(BATCHES)
def test_programs_take_equal_parts_but_for_a_place_and_what_a_merge_costs(batch):
    kv_blocks, overhead, merge, num_programs = batch
    parts = share(kv_blocks, overhead, merge, num_programs)
    total = sum(kv_blocks) + overhead * len(kv_blocks)
    programs = max(min(total, num_programs), 1)
    assert not any(parts[programs:])
    if not kv_blocks:
        return
    shared = any(count > 1 for _, count in splits_of(parts, len(kv_blocks)))
    even = -(-total // programs) + (0 if shared else merge)
    for own in parts[:programs]:
        # A request's overhead may stand in the part before the one with its first KV block.
        begun = sum(part.first == 0 for part in own)
        work = sum(part.end - part.first for part in own)
        assert work <= even
        assert work + overhead * begun <= even + overhead


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 40), st.integers(1, 300), st.integers(0, 5), st.integers(0, 9), st.integers(1, 300))
def test_requests_of_one_length_are_whole_where_programs_leave_that_many_places(
    requests, kv_blocks, overhead, merge, num_programs
):
    splits = splits_of(share([kv_blocks] * requests, overhead, merge, num_programs), requests)
    total = requests * (kv_blocks + overhead)
    programs = min(total, num_programs)
    each = -(-requests // programs)
    if each * (kv_blocks + overhead) * programs <= total + merge * programs:
        assert all(count == 1 for _, count in splits)


@settings(max_examples=300, deadline=None)
@given(BATCHES)
def test_a_program_shares_at_most_the_requests_at_its_ends(batch):
    kv_blocks, overhead, merge, num_programs = batch
    parts = share(kv_blocks, overhead, merge, num_programs)
    for own in parts:
        begun = [part for part in own if part.first == 0 and part.end < kv_blocks[part.request]]
        continued = [part for part in own if part.first > 0]
        assert len(begun) <= 1
        assert len(continued) <= 1
    # Programs of a request have numbers in a row, so that its later splits' slots follow the first.
    for request, (first, count) in enumerate(splits_of(parts, len(kv_blocks))):
        assert all(any(part.request == request for part in own) for own in parts[first : first + count])


def test_a_batch_is_shared_out_as_by_hand():
    # Places: overhead, 3 KV blocks, overhead, 1 KV block, overhead, 5 KV blocks; three programs of 4 places.
    assert share([3, 1, 5], 1, 1, 3) == [
        [Part(0, 0, 3)],
        [Part(1, 0, 1), Part(2, 0, 1)],
        [Part(2, 1, 5)],
    ]
    assert splits_of(share([3, 1, 5], 1, 1, 3), 3) == [(0, 1), (1, 1), (1, 2)]
    # A request a program takes 6 places, 2 more than the 4 above.
    assert share([3, 1, 5], 1, 2, 3) == [[Part(0, 0, 3)], [Part(1, 0, 1)], [Part(2, 0, 5)]]
    # Two requests a program.
    assert share([3, 3, 3], 1, 2, 2) == [[Part(0, 0, 3), Part(1, 0, 3)], [Part(2, 0, 3)]]
    assert share([2], 2, 0, 9) == [[], [], [Part(0, 0, 1)], [Part(0, 1, 2)], *[[]] * 5]
    # Two programs a request, of 2 places each, where three of 3 would begin the second request in the first one's last.
    assert share([4, 3], 1, 0, 4, alike=True) == [
        [Part(0, 0, 2)],
        [Part(0, 2, 4)],
        [Part(1, 0, 2)],
        [Part(1, 2, 3)],
    ]


def test_the_reference_follows_the_block_table_by_hand():
    layout = compose({"name": "r", "fields": [{"kind": "row", "dtype": "bf16"}]}, 2, 0)
    rows = [[9.0, 9.0], [9.0, 9.0], [0.0, 4.0], [math.log(3.0), 8.0], [1.0, 7.0], [9.0, 9.0]]
    cache = torch.tensor(rows, dtype=torch.bfloat16).view(3, 2, 1, 2)
    table = torch.tensor([[1, 2, GARBAGE]], dtype=torch.int32)
    facts = Facts(1, 2, 0, 2, "bfloat16", "dense", 0, "none", "none", "e", "-inf", None, ())
    q = torch.tensor([[[[1.0, 0.0]], [[1.0, 0.0]]]], dtype=torch.bfloat16)  # two query tokens of one request

    def attention(keys: int, causal: bool, window: int | None = None):
        problem = DenseDecodeProblem((keys,), s_q=2, heads=1, block_size=2, causal=causal, window=window)
        lengths = torch.tensor([keys], dtype=torch.int32)
        inputs = Inputs(problem, layout, q, cache, table, lengths, [keys], 1.0, 1.0, False, None, window)
        return attend(inputs, facts, "-inf")

    three = math.exp(float(torch.tensor(math.log(3.0)).bfloat16()))
    whole = (4 + three * 8 + math.e * 7) / (1 + three + math.e)
    torch.testing.assert_close(float(attention(3, causal=False).out[0, 0, 1]), whole)
    torch.testing.assert_close(float(attention(3, causal=True).out[0, 0, 1]), (4 + three * 8) / (1 + three))
    torch.testing.assert_close(float(attention(3, causal=True).out[1, 0, 1]), whole)
    torch.testing.assert_close(float(attention(3, causal=True, window=1).out[1, 0, 1]), 7.0)
    # Of one key and two query tokens, the first sees none.
    alone = attention(1, causal=True)
    assert (float(alone.lse[0, 0]), float(alone.out[0].abs().max())) == (-math.inf, 0.0)
    torch.testing.assert_close(float(alone.out[1, 0, 1]), 4.0)


@pytest.mark.parametrize("name", SPECS)
def test_caches_hold_poison_and_tables_garbage_where_no_key_is(name, tmp_path):
    known = DenseDecodeFacts.of(said(name, tmp_path))
    for cache in ("end to end", "page gap", "odd"):
        problem = DenseDecodeProblem(
            (9, 0, 30), block_size=7, heads=2, cache=cache, window=12 if known.window else "spec"
        )
        inputs = build(problem, known, "cpu", 0)
        first = [inputs.first_key(request) for request in range(3)]
        table = inputs.block_table
        for request, keys in enumerate(inputs.keys):
            used = range(first[request] // 7, -(-keys // 7))
            assert all((int(table[request, column]) == GARBAGE) != (column in used) for column in range(table.shape[1]))
        pages = inputs.cache.view(torch.uint8)[:, :, 0]
        named = {
            int(table[request, key // 7]) * 7 + key % 7
            for request, keys in enumerate(inputs.keys)
            for key in range(first[request], keys)
        }
        others = [slot for slot in range(pages.shape[0] * 7) if slot not in named]
        rows = pages.reshape(-1, pages.shape[2])[others]
        assert bool((rows[:, : known.layout.plane_bytes[0] if known.layout.planar else None] == 0xFF).any())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", SPECS)
def test_names_are_unique_and_what_cases_name_exists(name, device, tmp_path):
    found = cases(said(name, tmp_path), device)
    names = [case.name for case in found]
    assert len(set(names)) == len(names)
    for case in found:
        assert case.name.split(": ")[0] in ("dense_decode", "refuses")
        assert case.promise[-1] not in " ."
    flash = "flash_mla_with_kvcache" in SPECS[name][-1]
    left_out = {"merged", "quantised"} | ({"graph"} if device == "cpu" else set()) | (set() if flash else {"metadata"})
    checks = {case.check for case in ran(found)}
    assert checks == set(DENSE_DECODE.checks) - left_out or not flash


@pytest.mark.parametrize("device", DEVICES)
def test_the_sizes_that_break_kernels_are_there(device, tmp_path):
    found = ran(cases(said("plain", tmp_path), device))
    problems = [case.problem for case in found]
    assert {1, 5, 6, 10, 12, 20, 96, 128} <= {problem.heads for problem in problems}
    assert {1, 2} <= {problem.kv_heads for problem in problems}
    assert {1, 2, 4} <= {problem.s_q for problem in problems}
    assert {1, 2, 53, 64, 480} <= {problem.block_size for problem in problems}
    assert {0, 1, TOO_LONG, 63, 64, 65} <= {length for problem in problems for length in problem.lengths}
    assert {case.wrapper for case in found} == {"flash_mla_with_kvcache", "decode_attention_fwd"}
    assert any(case.batch_invariant for case in found)


def test_what_a_spec_lacks_is_left_out(tmp_path):
    assert cases(said("plain", tmp_path) | {"wrappers": ["concat_and_cache_mla"]}, "cpu") == []
    assert not any("window" in case.name for case in cases(said("plain", tmp_path), "cpu"))
    assert any("window" in case.name for case in cases(said("window", tmp_path), "cpu"))
    assert all(case.problem.kv_heads == 1 for case in ran(cases(said("odd", tmp_path), "cpu")))


@pytest.mark.parametrize(("name", "target"), [pytest.param("window", "sm80", marks=pytest.mark.slow), ("odd", "sm90")])
@by_share
def test_small_packages_hold_their_cases(packages, name, target, choose):
    results = verify_package(packages[name], workers=1, targets=[target], choose=choose)
    assert len(results) > 25
    assert [str(error) for error in mismatches(results)] == []


@pytest.mark.slow
def test_plain_rows_hold_the_cases_without_a_window(packages):
    only = ["*s_q*", "*page size*", "*KV heads*", "*shares*", "*cache:*", "*workspace*", "*contract*", "*refuses*"]
    results = verify_package(packages["plain"], workers=1, targets=["sm90"], only=only)
    assert len(results) > 80
    assert [str(error) for error in mismatches(results)] == []


@pytest.mark.parametrize("name", some(["v3", "tensor", "cpm"], 1))
def test_the_others_hold_what_their_layouts_make_different(packages, name):
    only = ["*typical", "*size: 53", "*poison*", "*int8", "*past 2^31 b*", "*heads: 20", "*refuses*"]
    results = verify_package(packages[name], workers=1, targets=["gfx942"], only=only)
    assert len(results) > 20
    assert [str(error) for error in mismatches(results)] == []


@pytest.mark.slow
@pytest.mark.mutants
@pytest.mark.parametrize(("name", "more_than"), [("window", 25), ("tensor", 4)])
def test_every_mutant_is_reported(packages, tmp_path, name, more_than):
    check_mutants("dense_decode_mutants.py", packages[name], tmp_path, more_than=more_than)
