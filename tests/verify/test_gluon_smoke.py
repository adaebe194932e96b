"""One call of an sm90 kernel in numpy, for the quick run."""

from pathlib import Path

from mlagen.verify import mismatches, verify_package

PACKAGE = Path(__file__).parents[2] / "generated" / "dsv32"


def test_top_k_on_sm90_holds_a_case_in_numpy():
    results = verify_package(PACKAGE, workers=1, targets=["sm90, simulated"], only=["prefill: k: 1"])
    assert [result.case for result in results] == ["prefill: k: 1"]
    assert mismatches(results) == []
