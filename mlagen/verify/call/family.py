"""A family of kernels as verification sees it, and the run of one of its cases."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import torch

from mlagen.verify.call.case import Case, CaseFailedError
from mlagen.verify.call.invalid import RefusedCase, check_refused
from mlagen.verify.call.kept import CHECK, kept
from mlagen.verify.call.memory import Placed
from mlagen.verify.call.results import Figure
from mlagen.verify.call.subject import Subject

Results = dict[str, torch.Tensor]  # results of a call, by name


@dataclass(kw_only=True)
class Inputs:
    """The tensors of one call; families add their own.

    Attributes:
        placed: every input's buffer by name. The call may change none of them.
        given: every buffer that is handed over for a result, by the result's name.
    """

    placed: dict[str, Placed] = field(default_factory=dict)
    given: dict[str, Placed] = field(default_factory=dict)

    def check_memory(self) -> None:
        """Raises CaseFailedError if an input has changed, or memory around a result."""
        changed = [name for name, one in self.placed.items() if one.changed()]
        if changed:
            raise CaseFailedError(f"wrote to its input {', '.join(changed)}")
        for name, one in self.given.items():
            if one.spilled():
                raise CaseFailedError(f"wrote outside {name}")


CaseT = TypeVar("CaseT", bound=Case)
InputsT = TypeVar("InputsT", bound=Inputs)


@dataclass(frozen=True)
class Run(Generic[CaseT, InputsT]):
    """A case's inputs, and the package that is called with them."""

    family: Family
    subject: Subject
    case: CaseT
    inputs: InputsT

    def call(self, **given: Any) -> Results:
        """Calls the wrapper; `given` holds further arguments by name."""
        return self.family.call(self, **given)

    def compare(self, results: Results) -> list[Figure]:
        """Figures of results against the reference for these inputs.

        Raises:
            CaseFailedError: a result has another dtype or shape than it should, or other bits where bits are compared.
        """
        return self.family.compare(self, results)

    def on(self, inputs: InputsT) -> Run[CaseT, InputsT]:
        """The same with other inputs."""
        return replace(self, inputs=inputs)


Check = Callable[[Run[Any, Any]], list[Figure]]


@dataclass(frozen=True)
class Family:
    """A family of kernels, as the checks use it.

    Attributes:
        name: the family's word.
        kinds: the classes of its cases that run a call.
        cases: all its cases of a package, from `SPEC["spec"]` and the device; see mlagen.verify.families.
        build: a case's inputs, the same for the same seed.
        call: calls the wrapper, with further arguments by name.
        compare: results against the reference, within the tolerance.
        checks: checks of cases, by name.
        valid: arguments of a valid call. A case of refusal makes one of them invalid.
    """

    name: str
    kinds: tuple[type[Case], ...]
    cases: Callable[[Mapping[str, Any], str], list[Case]]
    build: Callable[[Subject, Any, int], Inputs]
    call: Callable[..., Results]
    compare: Callable[[Run[Any, Any], Results], list[Figure]]
    checks: Mapping[str, Check]
    valid: Callable[[Subject, RefusedCase], dict[str, Any]]

    def has(self, case: Case) -> bool:
        """Whether the case is one of this family's."""
        return case.family == self.name if isinstance(case, RefusedCase) else isinstance(case, self.kinds)

    def run(self, subject: Subject, case: Case, seed: int = 0) -> list[Figure]:
        """Runs a case; returns its figures, none where it compares bits.

        Raises:
            CaseFailedError: the case does not hold; other exceptions of the package pass through.
            CaseSkippedError: the case cannot run here.
        """
        if isinstance(case, RefusedCase):
            check_refused(subject, case, self.valid(subject, case))
            return []
        inputs = self.build(subject, case, seed)
        check = kept if case.check == CHECK else self.checks[case.check]
        figures = check(Run(self, subject, case, inputs))
        inputs.check_memory()
        return figures
