"""The balance of dense attention's schedule: how loads are counted, and the table in the documents."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from mlagen.bench import load_package
from mlagen.bench.report.balance import TRACES, cut, main, markdown, next_free, shared

ROOT = Path(__file__).parents[3]


def test_loads_are_as_by_hand() -> None:
    # Places: overhead, 3 units, overhead, 1 unit, overhead, 5 units; three programs of 4 places.
    assert shared([3, 1, 5], 1, 1, 3) == [4, 4, 5]
    assert shared([2], 2, 4, 3) == [4, 0, 0]
    assert cut([3, 1, 5], 1, 2) == [2, 3, 2, 3, 4]
    assert cut([3, 1, 5], 1, 1) == [4, 2, 6]
    assert sorted(next_free([4, 2, 6], 2)) == [4, 8]


def test_draws_stay_within_the_trace_and_meet_its_median() -> None:
    for lengths in TRACES:
        drawn = sorted(lengths.draw(4001, random.Random(1)))
        assert lengths.quantiles[0] <= drawn[0] <= drawn[-1] <= lengths.quantiles[-1]
        assert lengths.quantiles[9] <= drawn[2000] <= lengths.quantiles[11]


def test_the_documented_table_is_what_the_command_prints() -> None:
    text = (ROOT / "docs" / "balance.md").read_text(encoding="utf-8")
    assert markdown(load_package(ROOT / "generated" / "dsv3")) in text


def test_a_package_without_dense_attention_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--package", str(ROOT / "generated" / "dsv32")]) == 2
    assert "dense attention" in capsys.readouterr().err
