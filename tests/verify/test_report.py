"""Results as a table, as Markdown and as errors."""

import io
import math

from rich.console import Console

from mlagen.verify import CaseResult, Figure, mismatches, verify_markdown, verify_table


def result(case: str, *, ok: bool = True, skipped: str | None = None, figures=(), detail: str = "") -> CaseResult:
    return CaseResult("dsv32", case, "sm90", ok, skipped, tuple(figures), 0.5, detail)


RESULTS = [
    result("sparse_fwd: heads: 5", figures=[Figure("out", 1e-3, 4e-3), Figure("lse", 2e-5, 4e-5)]),
    result("sparse_fwd: heads: 6", ok=False, figures=[Figure("out", math.inf, 4e-3)], detail="out is off"),
    result("sparse_fwd: offsets: far", skipped="4.3 GiB are not to be had on cpu"),
    result("concat: block size 1"),
]


def test_markdown_groups_cases_and_lists_what_did_not_pass():
    assert verify_markdown(RESULTS).splitlines() == [
        "| cases | run | failed | skipped | worst error | tolerance | share |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| sparse_fwd: heads | 2 | 1 | 0 | out inf | 0.004 | inf% |",
        "| sparse_fwd: offsets | 0 | 0 | 1 | bits |  |  |",
        "| concat | 1 | 0 | 0 | bits |  |  |",
        "",
        "- failed: dsv32: sparse_fwd: heads: 6, on sm90: out is off",
        "- skipped: sparse_fwd: offsets: far, on sm90: 4.3 GiB are not to be had on cpu",
    ]


def test_the_worst_figure_is_the_largest_share():
    worst = RESULTS[0].worst
    assert worst is not None
    assert (worst.name, worst.share) == ("lse", 0.5)
    assert Figure("out", 0.0, 0.0).share == 0
    assert math.isinf(Figure("out", 1e-9, 0.0).share)


def test_a_mismatch_names_package_case_and_target():
    (error,) = mismatches(RESULTS)
    assert str(error) == "dsv32: sparse_fwd: heads: 6, on sm90: out is off"
    assert error.exit_code == 1


def test_the_table_shows_the_same_rows():
    console = Console(width=120, file=io.StringIO())
    with console.capture() as captured:
        console.print(verify_table(RESULTS))
    text = captured.get()
    assert "dsv32" in text
    assert "sparse_fwd: heads" in text
    assert "50%" not in text
    assert "inf%" in text


def test_infinite_errors_survive_json():
    assert CaseResult.from_json(RESULTS[1].to_json()) == RESULTS[1]
