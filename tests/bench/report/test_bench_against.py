from __future__ import annotations

from dataclasses import replace

import pytest

from mlagen.bench.report.against import Change, compare
from mlagen.bench.report.rows import Contender, Row
from mlagen.bench.report.tables import markdown


def with_ratio(row: Row, ratio: float | None, seconds: float | None = 8e-6) -> Row:
    """The row with a peer at that ratio. The peer's rounds lie 2 % apart, and ours 3 %."""
    ours = replace(row.ours, seconds=seconds, spread=0.03)
    peer = Contender("FA3 p1", 9e-6, ratio, ratio_spread=0.02)
    return replace(row, contenders=(ours, peer) if ratio else (ours,))


@pytest.mark.parametrize(("now", "verdict"), [(0.97, "slower"), (0.99, ""), (1.01, ""), (1.03, "faster")])
def test_a_ratio_that_moved_by_more_than_its_spread_is_told(row: Row, now: float, verdict: str) -> None:
    assert Change(with_ratio(row, now), with_ratio(row, 1.0)).verdict == verdict


def test_a_hotter_card_is_no_slower_kernel(row: Row) -> None:
    change = Change(with_ratio(row, 1.0, 10e-6), with_ratio(row, 1.0, 8e-6))
    assert change.speedup == pytest.approx(0.8)
    assert change.verdict == ""


def test_without_a_peer_in_both_runs_time_judges(row: Row) -> None:
    assert Change(with_ratio(row, None, 8.2e-6), with_ratio(row, 1.0)).verdict == ""
    assert Change(with_ratio(row, None, 8.3e-6), with_ratio(row, None)).verdict == "slower"
    other = replace(with_ratio(row, 1.0, 8.3e-6), contenders=(with_ratio(row, 1.0, 8.3e-6).ours, row.contenders[1]))
    assert Change(other, with_ratio(row, 1.0)).verdict == "slower"


def test_the_larger_spread_of_the_two_runs_counts(row: Row) -> None:
    steady = with_ratio(row, 1.0)
    calm = replace(steady, contenders=(steady.ours, replace(steady.contenders[1], ratio_spread=0.001)))
    assert Change(with_ratio(row, 0.985), calm).verdict == ""
    unknown = replace(steady, contenders=(steady.ours, replace(steady.contenders[1], ratio_spread=None)))
    assert Change(with_ratio(row, 0.985), unknown).verdict == ""
    assert Change(replace(unknown, contenders=unknown.contenders), unknown).verdict == "not judged"


def test_a_kernel_that_no_longer_runs_is_worse_than_slow(row: Row) -> None:
    gone = replace(row, contenders=(Contender("ours", absent="RuntimeError: x"),))
    found = compare([gone], [with_ratio(row, 1.0)], "then.json")
    assert [each.verdict for each in found.worse] == ["does not run"]
    assert Change(row, gone).verdict == "runs again"


def test_rows_meet_by_device_package_and_shape(row: Row) -> None:
    other = replace(row, shape=replace(row.shape, tokens=4))  # type: ignore[type-var]
    found = compare([row, other], [row, replace(row, package="glm5")], "then.json")
    assert ([each.now for each in found.changes], found.missing, found.new) == ([row], 1, 1)
    assert found.summary.startswith("0 of 1 shapes slower than in then.json")
    elsewhere = compare([row], [replace(row, device="NVIDIA B200")], "then.json")
    assert (elsewhere.changes, elsewhere.missing, elsewhere.new) == ((), 1, 1)


def test_the_report_shows_then_and_now(row: Row) -> None:
    found = compare([with_ratio(row, 0.9)], [with_ratio(row, 1.0)], "then.json")
    text = markdown([with_ratio(row, 0.9)], found)
    assert "1 of 1 shapes slower than in then.json." in text
    assert "| 8.0 | 8.0 | 1.00 | FA3 p1 | 1.00 | 0.90 | -10.0% | 2.0% | slower |" in text
