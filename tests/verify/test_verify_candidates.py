"""Candidate blocks: the reference by hand, its cases, and packages run on them."""

from pathlib import Path

import pytest
import torch
from broken import check_mutants
from rotation import by_share
from test_verify_mqa_logits import FNUZ, PACKED
from verify_specs import dsv32_text

from mlagen.emit import apply, compare, render
from mlagen.errors import SpecErrors
from mlagen.plan import load_plan
from mlagen.verify import mismatches, verify_package
from mlagen.verify.call.invalid import RefusedCase
from mlagen.verify.chains.candidates.cases import PATTERNS, CandidateCase, cases
from mlagen.verify.chains.candidates.family import CANDIDATES
from mlagen.verify.chains.candidates.invalid import FLAT, FLAT_PICKS, PAGED_PICKS, SELECT, SHORT
from mlagen.verify.chains.candidates.reference import best_blocks, keys_of
from mlagen.verify.mqa_logits.facts import WRAPPERS

pytestmark = pytest.mark.interpreter

TOPK = "top_k_page_table_transform"
ONE_LEVEL = ("indexer_topk", "paged_indexer_topk")
EVERY = (*WRAPPERS, TOPK, *ONE_LEVEL, *SHORT)


def package_of(
    folder: Path, layout: str = " {layout: indexer_fp8}", wrappers=EVERY, block: int = 8, columns: int = 24
) -> Path:
    """DeepSeek V3.2's package with an indexer of three heads and of two levels, and nothing else."""
    head, _, rest = dsv32_text().partition("wrappers:")
    tail = rest[rest.index("targets:") :].replace("partials: fp16", "#")
    sizes = f"num_heads: 3, head_dim: {columns}, topk: 2048, rope_head_dim: 0"
    indexer = f"indexer: {{{sizes}, candidates: {{block: {block}, count: 600}}}}\n"
    cache = f"indexer_cache:{layout}\n"
    named = f"wrappers: [{', '.join(wrappers)}]\n"
    text = head.replace("name: dsv32", "name: candidates") + indexer + cache + named + tail
    (folder / "candidates.yaml").write_text(text)
    apply(compare(render(load_plan(folder / "candidates.yaml")), folder / "candidates"))
    return folder / "candidates"


@pytest.fixture(scope="module")
def package(tmp_path_factory) -> Path:
    return package_of(tmp_path_factory.mktemp("candidates"))


def spec_of(wrappers) -> dict:
    """DeepSeek V4.1's spec with other wrappers."""
    found = load_plan(Path(__file__).parents[2] / "specs" / "dsv41.yaml").spec.model_dump(mode="json")
    return {**found, "wrappers": wrappers}


def test_blocks_by_hand():
    # Largest logits of blocks of two: 1, 5, 2 (next to NaN), 5, -inf, and 0 in the newest block of one key.
    logits = torch.tensor([0.0, 1, 5, -3, float("nan"), 2, 5, 4, -torch.inf, -torch.inf, 0])
    assert best_blocks(logits, 2, 2).tolist() == [1, 5]
    assert best_blocks(logits, 3, 2).tolist() == [1, 3, 5]
    assert best_blocks(logits, 7, 2).tolist() == [0, 1, 2, 3, 5, -1, -1]
    infinite = torch.full((6,), torch.inf)
    assert best_blocks(infinite, 2, 2).tolist() == [0, 2]
    assert best_blocks(logits[:0], 2, 2).tolist() == [-1, -1]


def test_keys_by_hand():
    assert keys_of(torch.tensor([1, -1, 3, 9]), 2, 7).tolist() == [2, 3, -1, -1, 6, -1, -1, -1]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_cases_have_names_of_their_own_and_every_check(device):
    found = cases(spec_of(EVERY), device)
    names = [case.name for case in found]
    assert len(set(names)) == len(names)
    assert {type(case) for case in found} == {*CANDIDATES.kinds, RefusedCase}
    runs = [case for case in found if not isinstance(case, RefusedCase)]
    assert {case.check for case in runs} == set(CANDIDATES.checks) - ({"graph"} if device == "cpu" else set())
    assert {case.pattern for case in runs if isinstance(case, CandidateCase)} == set(PATTERNS)
    for case in found:
        assert case.promise[-1] not in " ."
    for wrapper in SHORT:
        alone = {case.name for case in cases(spec_of([*WRAPPERS, TOPK, wrapper]), device)}
        assert alone
        assert alone < set(names)


@pytest.mark.parametrize("missing", ["fp8_fp4_paged_mqa_logits", "paged_indexer_topk"])
def test_a_spec_without_the_kernels_that_they_launch_is_refused(tmp_path, missing):
    beside = ["fp8_fp4_paged_mqa_logits", "get_paged_mqa_logits_metadata", TOPK, "paged_indexer_topk"]
    with pytest.raises(SpecErrors, match=f"needs .*{missing}"):
        package_of(tmp_path, wrappers=(*(name for name in beside if name != missing), PAGED_PICKS))


@pytest.mark.parametrize("wrappers", [(TOPK, SELECT), (FLAT, "fp8_mqa_logits")])
def test_a_package_may_have_one_of_them(tmp_path, wrappers):
    made = package_of(tmp_path, wrappers=wrappers)
    results = verify_package(made, workers=1, targets=["sm90"], only=["blocks: typical", "flat candidates: exact"])
    assert len(results) >= 1
    assert [str(error) for error in mismatches(results)] == []


@by_share
def test_packages_hold_the_cases_that_differ_most(package, choose):
    only = ["blocks: typical", "blocks: logits*", "blocks: ends", "blocks: starts*", "*candidate*: exact"]
    only += ["*candidate*: pattern*", "*: all keys", "paged candidate*: next_n*", "*candidate*: block size*"]
    only += ["*candidate*: lengths*", "*picks: blocks: *", "refuses: candidate_blocks*", "*candidate*workspace"]
    results = verify_package(package, workers=1, targets=["sm90"], only=only, choose=choose)
    assert len(results) > 4
    assert [str(error) for error in mismatches(results)] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "block"),
    [(" {layout: indexer_fp8}", 8), (" {layout: indexer_fp8}", 64), (" {layout: indexer_mxfp4}", 16), (FNUZ, 4)],
)
def test_packages_hold_every_case(tmp_path, layout, block):
    logits = PACKED if "mxfp4" in layout else WRAPPERS
    columns = 24 if "indexer_fp8" in layout else 64
    wrappers = (*logits, TOPK, *ONE_LEVEL, *SHORT)
    made = package_of(tmp_path, layout, wrappers, block, columns)
    only = ["blocks: *", "*candidate*", "*picks: blocks*", "refuses: *blocks*"]
    results = verify_package(made, workers=1, targets=["sm90"], only=only)
    assert len(results) > 250
    assert [str(error) for error in mismatches(results)] == []


def test_a_package_without_its_logits_compares_exact_picks():
    found = cases(spec_of([*WRAPPERS, TOPK, *ONE_LEVEL, FLAT_PICKS]), "cpu")
    assert {case.scored.contents for case in found if isinstance(case, CandidateCase)} == {"whole"}


@pytest.mark.slow
@pytest.mark.mutants
def test_every_mutant_is_reported(package, tmp_path):
    check_mutants("candidates_mutants.py", package, tmp_path, more_than=30)
