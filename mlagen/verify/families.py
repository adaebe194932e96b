"""The families of cases, each with the code that runs them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlagen.verify import cache, checks, dense_decode, dense_fwd, indices, merge_states, sparse_decode
from mlagen.verify import cases as attention
from mlagen.verify.cases import Case
from mlagen.verify.checks import Subject
from mlagen.verify.results import Figure

# A family has cases(spec, device) -> list of its own kinds of Case, KINDS, and run(subject, case) -> figures.
FAMILIES: tuple[Any, ...] = (cache, dense_decode, indices, sparse_decode, merge_states, dense_fwd)


def cases(spec: Mapping[str, Any], device: str) -> list[Case]:
    """All cases of a package.

    Args:
        spec: `SPEC["spec"]` of the package. A case about something that it lacks is left out.
        device: "cpu" gives sizes that the interpreter bears, "cuda" the model's own.
    """
    return [*attention.cases(spec, device), *(case for family in FAMILIES for case in family.cases(spec, device))]


def run(subject: Subject, case: Case) -> list[Figure]:
    """Runs a case; returns its figures, none where it compares bits.

    Raises:
        CaseFailedError: the case does not hold; other exceptions of the package pass through.
        CaseSkippedError: the case cannot run here.
    """
    for family in FAMILIES:
        if isinstance(case, family.KINDS):
            figures: list[Figure] = family.run(subject, case)
            return figures
    return checks.run(subject, case)
