"""Wrappers that score and select: their cases, and packages run on them."""

from pathlib import Path

import pytest
from broken import check_mutants
from rotation import by_share
from test_verify_mqa_logits import FNUZ, PACKED, package_of

from mlagen.errors import SpecErrors
from mlagen.plan import load_plan
from mlagen.verify import mismatches, verify_package
from mlagen.verify.call.invalid import RefusedCase
from mlagen.verify.chains.indexer_select.cases import cases
from mlagen.verify.chains.indexer_select.family import INDEXER_SELECT
from mlagen.verify.chains.indexer_select.invalid import FLAT, PAGED
from mlagen.verify.mqa_logits.facts import WRAPPERS

pytestmark = pytest.mark.interpreter

SELECT = "top_k_page_table_transform"


@pytest.fixture(scope="module")
def package(tmp_path_factory) -> Path:
    """Of three heads of 24 columns, with logits, a selection, and both wrappers over them."""
    folder = tmp_path_factory.mktemp("picks")
    return package_of(folder, 3, 24, " {layout: indexer_fp8}", (*WRAPPERS, SELECT, FLAT, PAGED))


def spec_of(wrappers) -> dict:
    """DeepSeek V3.2's spec with other wrappers."""
    found = load_plan(Path(__file__).parents[2] / "specs" / "dsv32.yaml").spec.model_dump(mode="json")
    return {**found, "wrappers": wrappers}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_cases_have_names_of_their_own_and_every_check(device):
    found = cases(spec_of([*WRAPPERS, SELECT, FLAT, PAGED]), device)
    names = [case.name for case in found]
    assert len(set(names)) == len(names)
    assert {type(case) for case in found} == {*INDEXER_SELECT.kinds, RefusedCase}
    picks = [case for case in found if not isinstance(case, RefusedCase)]
    assert {case.check for case in picks} == set(INDEXER_SELECT.checks) - ({"graph"} if device == "cpu" else set())
    assert {case.scored.contents for case in picks} == {"normal", "whole"}
    for case in found:
        assert case.promise[-1] not in " ."
    for wrapper in (FLAT, PAGED):
        alone = {case.name for case in cases(spec_of([*WRAPPERS, SELECT, wrapper]), device)}
        assert alone
        assert alone < set(names)


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_spec_without_the_kernels_that_they_launch_is_refused(tmp_path, missing):
    beside = ["fp8_fp4_paged_mqa_logits", "get_paged_mqa_logits_metadata", "top_k_per_row_decode"]
    named = tuple(name for at, name in enumerate(beside) if at != missing)
    with pytest.raises(SpecErrors, match=f"got {PAGED}, which needs .*{beside[missing]}"):
        package_of(tmp_path, 3, 24, " {layout: indexer_fp8}", (*named, PAGED))


@by_share
def test_packages_hold_the_cases_that_differ_most(package, choose):
    only = ["* picks: typical", "*: exact", "*pieces: 3", "*next_n: 2, *pieces"]
    only += ["* picks: slots*", "paged picks: workspace", "refuses: workspace*picks)", "refuses: out*picks)"]
    results = verify_package(package, workers=1, targets=["sm90"], only=only, choose=choose)
    assert len(results) > 4
    assert [str(error) for error in mismatches(results)] == []


@pytest.mark.slow
@pytest.mark.parametrize("layout", [" {layout: indexer_fp8}", " {layout: indexer_mxfp4}", FNUZ])
def test_packages_hold_every_case(tmp_path, layout):
    logits = PACKED if "mxfp4" in layout else WRAPPERS
    columns = 64 if "mxfp4" in layout or layout == FNUZ else 24
    made = package_of(tmp_path, 3, columns, layout, (*logits, SELECT, FLAT, PAGED))
    results = verify_package(made, workers=1, targets=["sm90"], only=["*picks*"])
    assert len(results) > 150
    assert [str(error) for error in mismatches(results)] == []


@pytest.mark.slow
@pytest.mark.mutants
def test_every_mutant_is_reported(package, tmp_path):
    check_mutants("indexer_select_mutants.py", package, tmp_path, more_than=15)
