"""The top-k kernels: their reference by hand, their cases, and a package run on them."""

from pathlib import Path

import pytest
import torch
from broken import check_mutants
from verify_specs import dsv32_text, spec

from mlagen.emit import apply, compare, render
from mlagen.plan import load_plan
from mlagen.plan.families.topk import COLUMNS
from mlagen.verify import mismatches, verify_package
from mlagen.verify.call.invalid import RefusedCase
from mlagen.verify.call.subject import FORCED
from mlagen.verify.topk.cases import SCORE_PROMISES, MergeCase, cases
from mlagen.verify.topk.family import TOPK
from mlagen.verify.topk.invalid import SHORT
from mlagen.verify.topk.reference import merge, slots, top_k
from mlagen.verify.worker import selected

pytestmark = pytest.mark.interpreter

WRAPPERS = [*SHORT]
INF, NAN = float("inf"), float("nan")


@pytest.fixture(scope="module")
def package(tmp_path_factory) -> Path:
    """DeepSeek V3.2's package with the top-k kernels and nothing else."""
    folder = tmp_path_factory.mktemp("topk")
    head, _, rest = dsv32_text().partition("wrappers:")
    tail = rest[rest.index("targets:") :]
    text = "".join([head.replace("name: dsv32", "name: picks"), "wrappers: [", ", ".join(WRAPPERS), "]\n\n", tail])
    (folder / "picks.yaml").write_text(text)
    apply(compare(render(load_plan(folder / "picks.yaml")), folder / "picks"))
    return folder / "picks"


def test_tiles_of_the_sm90_kernel_run_where_it_runs():
    found = cases(spec(wrappers=WRAPPERS), "cuda")
    pairs = selected(found, ["cuda", *FORCED], None)
    assert {target for case, target in pairs if case.only_sm90} == {"cuda", "cuda sm90", "cuda sm90_collect"}


def test_the_reference_by_hand():
    row = torch.tensor([NAN, 2.0, -0.0, 0.0, -INF, 2.0, INF, -1e-45])
    assert top_k(row, 1)[0].tolist() == [6]
    assert top_k(row, 2)[0].tolist() == [1, 6]
    assert top_k(row, 4)[0].tolist() == [1, 2, 5, 6]
    indices, scores = top_k(row, 8)
    assert indices.tolist() == [1, 2, 3, 5, 6, 7, -1, -1]
    assert scores.tolist() == [2.0, 0.0, 0.0, 2.0, INF, pytest.approx(-1e-45), -INF, -INF]
    assert top_k(row[:0], 2)[0].tolist() == [-1, -1]


def test_slots_by_hand():
    indices, pages = torch.tensor([0, 3, 4, 11, -1]), torch.tensor([7, -1, 5, 2**29])
    assert slots(indices, pages, 0, 4).tolist() == [28, 31, -1, 23, -1]
    assert slots(indices, pages, 2, 4).tolist() == [20, 23, -1, -1, -1]
    assert slots(indices, None, 0, 4).tolist() == [-1] * 5


def test_merges_by_hand():
    scores, ids = torch.tensor([1.0, 3.0, 1.0, 9.0, NAN]), torch.tensor([8, 5, 2, -1, 1], dtype=torch.int32)
    assert merge(scores, ids, 2)[0].tolist() == [2, 5]
    assert merge(scores, ids, 4)[0].tolist() == [2, 5, 8, -1]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_cases_have_names_of_their_own_and_every_pattern(device):
    found = cases(spec(wrappers=WRAPPERS), device)
    names = [case.name for case in found]
    assert len(set(names)) == len(names)
    assert {type(case) for case in found} == {*TOPK.kinds, RefusedCase}
    selected = [case for case in found if not isinstance(case, RefusedCase)]
    assert {case.scores for case in selected} == set(SCORE_PROMISES)
    assert {case.check for case in selected} == set(TOPK.checks) - ({"graph"} if device == "cpu" else set())
    assert {1, 2048, 4096} <= {case.k for case in selected}
    for case in found:
        assert case.promise[-1] not in " ."
    for wrapper in WRAPPERS:
        alone = {case.name for case in cases(spec(wrappers=[wrapper]), device)}
        assert alone
        assert alone < set(names)


def test_a_package_of_top_k_kernels_holds_the_cases_that_differ_most(package):
    only = ["*: typical", "*scores: ties", "*scores: special", "*scores: equal", "*k: 500", "*both starts", "*ranges"]
    results = verify_package(package, workers=1, targets=["sm90"], only=[*only, "*next_n: 3*", "*ranks: 8*"])
    assert len(results) > 15
    assert [str(error) for error in mismatches(results)] == []


@pytest.mark.slow
def test_a_package_of_top_k_kernels_holds_every_case(package):
    results = verify_package(package, workers=1, targets=["sm90"])
    assert len(results) > 300
    assert [str(error) for error in mismatches(results)] == []


@pytest.mark.slow
@pytest.mark.mutants
def test_every_mutant_is_reported(package, tmp_path):
    check_mutants("topk_mutants.py", package, tmp_path, more_than=30)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_merges_end_since_a_tile_holds_the_picks_of_two_groups(device: str) -> None:
    merges = [case for case in cases({"wrappers": WRAPPERS}, device) if isinstance(case, MergeCase) and case.tile]
    assert [case.name for case in merges if 2 * case.k > case.tile[0] * case.tile[1] * COLUMNS] == []
    assert [case.name for case in merges if case.k > case.tile[2]] == []
