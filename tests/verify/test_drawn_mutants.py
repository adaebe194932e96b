"""Verification notices a mutant of each family, another one for each commit; the slow tests try them all."""

from pathlib import Path

import pytest
from broken import check_mutants
from checked_in import package_of
from drawn_mutants import FAMILIES, fitting
from rotation import SEED

from mlagen.proofs.sources import family_names


def test_every_family_has_mutants_to_draw_from() -> None:
    assert set(FAMILIES) == set(family_names())
    for name, found in FAMILIES.values():
        fit = [*fitting(package_of(name), found)]
        assert 2 * len(fit) > len(found), f"{name} has the text of {len(fit)} of {len(found)}"


@pytest.mark.interpreter
@pytest.mark.mutants
def test_a_mutant_of_each_family_is_reported(tmp_path: Path) -> None:
    check_mutants("drawn_mutants.py", tmp_path, str(SEED), more_than=len(FAMILIES) - 1)
