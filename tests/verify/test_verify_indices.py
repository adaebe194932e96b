"""The index kernels: their reference against small loops and by hand, their cases, and packages run on them."""

import importlib
import sys
from pathlib import Path

import pytest
import torch
from broken import check_mutants
from checked_in import package_of, spec_of
from hypothesis import example, given, settings
from hypothesis import strategies as st
from verify_specs import dsv32_text, spec

from mlagen.emit import apply, compare, render
from mlagen.plan import load_plan
from mlagen.verify import mismatches, verify_package
from mlagen.verify.call.invalid import RefusedCase
from mlagen.verify.call.memory import LAYOUTS
from mlagen.verify.chains import indices_attention
from mlagen.verify.indices.cases import CombineCase, MapCase, cases
from mlagen.verify.indices.family import INDICES
from mlagen.verify.indices.invalid import COMBINE, CONVERT, GLOBAL
from mlagen.verify.indices.reference import combine_indices, map_indices

pytestmark = pytest.mark.interpreter

WRAPPERS = [GLOBAL, COMBINE, CONVERT]
DEVICES = ["cpu", "cuda"]
INT32_MAX, INT32_MIN = 2**31 - 1, -(2**31)


@pytest.fixture(scope="module")
def package(tmp_path_factory) -> Path:
    """DeepSeek V3.2's package with the index kernels and nothing else."""
    folder = tmp_path_factory.mktemp("index")
    head, _, rest = dsv32_text().partition("wrappers:")
    tail = rest[rest.index("targets:") :]
    text = "".join([head.replace("name: dsv32", "name: indices"), "wrappers: [", ", ".join(WRAPPERS), "]\n\n", tail])
    (folder / "indices.yaml").write_text(text)
    apply(compare(render(load_plan(folder / "indices.yaml")), folder / "indices"))
    return folder / "indices"


def slot(index, request, table, size):
    """Slot of one index; `table` is a list of rows."""
    if index < 0 or not 0 <= request < len(table) or index >= size * len(table[request]):
        return -1
    first = table[request][index // size] * size
    return first + index % size if first >= 0 and first + size - 1 <= INT32_MAX else -1


@pytest.mark.parametrize("size", [1, 3, 64, 2**30])
def test_mapped_indices_equal_loops(size):
    table = [[5, 0, -1, 2**31 // size - 1], [2147480000, 7, INT32_MIN, 2**31 // size if size > 1 else 3]]
    edges = [size * column + step for column in range(6) for step in (-1, 0, 1) if size * column + step <= INT32_MAX]
    indices = [[*edges, INT32_MIN, INT32_MAX]] * 5
    requests = [0, 1, -1, 2, INT32_MAX]
    slots, lens = map_indices(
        torch.tensor(indices, dtype=torch.int32),
        torch.tensor(requests, dtype=torch.int32),
        torch.tensor(table, dtype=torch.int32),
        size,
    )
    expected = [
        [slot(one, request, table, size) for one in row] for row, request in zip(indices, requests, strict=True)
    ]
    assert slots.tolist() == expected
    assert lens.tolist() == [max((at for at, one in enumerate(row, 1) if one >= 0), default=0) for row in expected]


@pytest.mark.parametrize(
    ("holes", "length"), [([3, -1, 5, 7], 4), ([3, 9999, 5, 7], 4), ([3, 5, -1, -1], 2), ([-1] * 4, 0)]
)
def test_a_length_reaches_past_the_last_slot_or_counts_slots_in_front(holes, length):
    indices, request, table = (torch.tensor(one, dtype=torch.int32) for one in ([holes], [0], [[1]]))
    slots, lens = map_indices(indices, request, table, 64)
    inside = [64 + one for one in holes if 0 <= one < 64]
    assert slots.tolist() == [[64 + one if 0 <= one < 64 else -1 for one in holes]]
    assert lens.tolist() == [length]
    slots, lens = map_indices(indices, request, table, 64, compact=True)
    assert slots.tolist() == [inside + [-1] * (4 - len(inside))]
    assert lens.tolist() == [len(inside)]


@pytest.mark.parametrize(("ranks", "interleave"), [(1, 1), (2, 1), (2, 3), (3, 4), (4, 64)])
def test_each_token_is_one_ranks_and_local_tokens_are_counted_in_order(ranks, interleave):
    tokens, table = torch.arange(100, dtype=torch.int32)[None], torch.arange(30, dtype=torch.int32)[None]
    none = torch.zeros(1, dtype=torch.int32)
    owned = [0] * 100
    for rank in range(ranks):
        slots, _ = map_indices(tokens, none, table, 8, block_rows=20, ranks=ranks, rank=rank, interleave=interleave)
        mine = [token for token, one in enumerate(slots[0].tolist()) if one >= 0]
        assert mine == [token for token in range(100) if token // interleave % ranks == rank]
        assert [slots[0, token] for token in mine] == [at // 8 * 20 + at % 8 for at in range(len(mine))]
        for token in mine:
            owned[token] += 1
    assert owned == [1] * 100


def test_combined_rows_stay_in_the_rows_of_their_request():
    one = (torch.tensor([0, 1]), torch.tensor([40]))
    rows, lens = combine_indices(torch.tensor([[24, 16, 3, -1]]), *one, torch.tensor([8]), 8, 4, 4, 24, 16)
    assert rows[0, :13].tolist() == [-1, -1, 3, -1, *range(16, 24), -1]
    assert lens.tolist() == [12]
    rows, lens = combine_indices(
        torch.tensor([[24, 16, 3, -1]]), *one, torch.tensor([3]), 8, 4, 4, 24, 16, compact=True
    )
    assert rows[0, :5].tolist() == [3, 16, 17, 18, -1]
    assert lens.tolist() == [4]


def test_combined_rows_by_hand():
    rows, lens = combine_indices(
        torch.tensor([[4, 9], [5, 6], [7, -1], [8, 2]], dtype=torch.int32),
        torch.tensor([10, 11, 11, 13], dtype=torch.int32),  # one token, none, two; the fourth has no request
        torch.tensor([6, 3, 5], dtype=torch.int32),
        torch.tensor([6, 3, 4], dtype=torch.int32),
        3,
        2,
        2,
        100,
        50,
    )
    # Request 0, position 5 of 6: rows 4 and 9 of the request, positions 3 to 5 of 0 to 5.
    # Request 2, positions 3 and 4 of 5; 1 to 4 of them are gathered: index -1 stays.
    expected = [[4, 9, 53, 54, 55], [205, 206, 250, 251, 252], [207, -1, 251, 252, 253], []]
    assert [row[: len(want)] for row, want in zip(rows.tolist(), expected, strict=True)] == expected
    assert all(set(row[len(want) :]) == {-1} for row, want in zip(rows.tolist(), expected, strict=True))
    assert rows.shape == (4, 128)
    assert lens.tolist() == [5, 5, 5, 0]


def test_combined_rows_before_the_window_is_full():
    arguments = (torch.tensor([[3, 4]] * 4, dtype=torch.int32), *(torch.tensor(one) for one in ([0, 4], [3], [3])))
    rows, lens = combine_indices(*arguments, 3, 2, 2, 100, 50)
    # The first token stands before the sequence, which is a token shorter than its query.
    assert [row[:5] for row in rows.tolist()] == [
        [-1, -1, -1, -1, -1],
        [50, -1, -1, -1, -1],
        [3, 50, 51, -1, -1],
        [3, 50, 51, 52, -1],
    ]
    assert lens.tolist() == [0, 1, 3, 4]


@pytest.mark.parametrize("device", DEVICES)
def test_cases_have_names_and_patterns_of_their_own(device):
    found = cases(spec(wrappers=WRAPPERS), device)
    names = [case.name for case in found]
    assert len(set(names)) == len(names)
    assert {type(case) for case in found} == {MapCase, CombineCase, RefusedCase}
    attention = ["flash_mla_with_kvcache", "flash_mla_sparse_fwd"]
    chained = indices_attention.cases(spec(wrappers=[*WRAPPERS, *attention]), device)
    assert {case.wrapper for case in chained} == {*WRAPPERS}
    assert indices_attention.cases(spec(wrappers=WRAPPERS), device) == []
    mapped = [case for case in found if isinstance(case, MapCase)]
    combined = [case for case in found if isinstance(case, CombineCase)]
    assert {case.layout for case in (*mapped, *combined)} | {case.table for case in mapped} <= set(LAYOUTS)
    checks = {case.check for case in (*mapped, *combined)}
    assert checks == set(INDICES.checks) - ({"graph", "repeated"} if device == "cpu" else set())
    for case in found:
        assert case.promise[-1] not in " ."


@pytest.mark.parametrize("device", DEVICES)
def test_the_sizes_that_break_kernels_are_there(device):
    found = cases(spec(wrappers=WRAPPERS), device)
    for wrapper in (GLOBAL, CONVERT):
        mine = [case for case in found if isinstance(case, MapCase) and case.wrapper == wrapper]
        assert {0, 1, 17, 100, 2048} <= {case.topk for case in mine}
        assert {1, 2, 53, 64, 69, 256} <= {case.block_size for case in mine}
        assert {0, 1} <= {case.tokens for case in mine}
        assert any(case.repeat * case.topk > 2**31 for case in mine) == (device == "cuda")
    mine = [case for case in found if isinstance(case, CombineCase)]
    assert {1, 4, 128} <= {case.ratio for case in mine}
    assert {0, 1} <= {case.topk for case in mine}
    assert any(case.width is not None and case.width < case.topk for case in mine)
    assert any(query > sequence for case in mine for query, sequence, _ in case.requests)
    assert any(query == 0 for case in mine for query, _, _ in case.requests)
    assert any(case.start for case in mine)


def test_what_a_spec_lacks_is_left_out():
    assert cases(spec(wrappers=["flash_mla_sparse_fwd"]), "cpu") == []
    for wrapper in WRAPPERS:
        found = cases(spec(wrappers=[wrapper]), "cpu")
        assert all(getattr(case, "wrapper", COMBINE) == wrapper for case in found)
        assert any(isinstance(case, RefusedCase) for case in found)


def test_a_package_of_index_kernels_holds_every_case(package):
    results = verify_package(package, workers=1, targets=["sm90"])
    assert len(results) > 200
    assert [str(error) for error in mismatches(results)] == []


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_each_wrapper_alone_holds_its_cases(package, tmp_path, wrapper):
    text = package.with_name("indices.yaml").read_text().replace("name: indices", "name: one")
    (tmp_path / "one.yaml").write_text(text.replace(", ".join(WRAPPERS), wrapper))
    apply(compare(render(load_plan(tmp_path / "one.yaml")), tmp_path / "one"))
    results = verify_package(
        tmp_path / "one", workers=1, targets=["sm90"], only=["*: typical", "*: *defaults", "refuses*"]
    )
    assert len(results) > 10
    assert [str(error) for error in mismatches(results)] == []


SHARED = {  # text of a spec, by the attention that its ranks run
    "rows": ("dsv32", {}),
    "rows in base 2": ("dsv32", {"lse_base: e": 'lse_base: "2"'}),
    "pages": ("dsv32_fp8", {}),
}


def shared_package(folder: Path, which: str) -> Path:
    """A package with an owner filter and attention."""
    name, changes = SHARED[which]
    text = spec_of(name).read_text().replace(f"name: {name}", "name: shared", 1)
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    (folder / "shared.yaml").write_text(text)
    apply(compare(render(load_plan(folder / "shared.yaml")), folder / "shared"))
    return folder / "shared"


@pytest.mark.parametrize("which", SHARED)
def test_ranks_that_share_a_context_merge_to_the_whole(tmp_path, which):
    only = [f"convert: attention of {ranks} ranks by {each}" for ranks, each in ((2, 1), (4, 16), (8, 64))]
    results = verify_package(shared_package(tmp_path, which), workers=1, targets=["sm80"], only=only)
    assert len(results) == 3
    assert [str(error) for error in mismatches(results)] == []


@pytest.mark.mutants
def test_a_rank_that_leaves_slots_out_is_reported(tmp_path):
    package = shared_package(tmp_path, "pages")
    kernels = package / "_indices_kernels.py"
    text = kernels.read_text()
    old = "own = group - turn * ranks == rank\n"
    assert old in text
    kernels.write_text(text.replace(old, old.replace("== rank", "== rank + 1")))
    results = verify_package(package, workers=1, targets=["sm80"], only=["convert: attention of 2 ranks by 1"])
    assert len(mismatches(results)) == 1


def test_a_required_sink_has_no_cases_of_ranks():
    wrappers = [CONVERT, "flash_mla_with_kvcache"]
    for sink, count in (("optional", 9), ("required", 0)):
        of = spec(wrappers=wrappers) | {"attention": {"topk": 64, "attn_sink": sink}}
        assert sum(case.check == "ranks" for case in indices_attention.cases(of, "cpu")) == count


@pytest.mark.slow
@pytest.mark.mutants
def test_every_mutant_is_reported(package, tmp_path):
    check_mutants("indices_mutants.py", package, tmp_path, more_than=30)


@pytest.mark.slow
@pytest.mark.mutants
def test_attention_reports_every_mutant_of_the_chain(tmp_path):
    check_mutants("indices_mutants.py", package_of("dsv32_fp8"), tmp_path, more_than=2)


@settings(max_examples=500, deadline=None, derandomize=True)
@given(divisor=st.integers(1, 2**31 - 1) | st.integers(1, 300), quotient=st.integers(0, 2**31), step=st.integers(-1, 1))
@example(divisor=1, quotient=2**31 - 1, step=0)
@example(divisor=2**31 - 1, quotient=1, step=0)
@example(divisor=2**30 + 1, quotient=1, step=-1)
def test_a_quotient_is_exact_for_every_index(package, divisor, quotient, step):
    sys.path.insert(0, str(package.parent))
    try:
        divider = importlib.import_module("indices._launch").divider
    finally:
        sys.path.remove(str(package.parent))
    multiplier, shift = divider(divisor)
    assert -(2**31) <= multiplier < 2**31
    assert 0 <= shift < 32
    multiplier %= 2**32  # the kernel reads it unsigned
    for number in (divisor * min(quotient, INT32_MAX // divisor) + step, INT32_MAX):
        if 0 <= number <= INT32_MAX:
            assert (2 * number * multiplier >> 32) >> shift == number // divisor
