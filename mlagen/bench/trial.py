"""A measurement at one shape: input sets, the kernels that compete on them, and the check of their results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, Protocol, TypeVar

import torch

from mlagen.bench.package import BenchPackage
from mlagen.bench.roofline import Roof, copy_roof, roof_of

OURS = "ours"
BATCH_INVARIANT = "ours, batch-invariant"
APART = "ours, each its own rows"

Inputs = TypeVar("Inputs")


class WrongResultError(ArithmeticError):
    """A result is wrong.

    Args:
        error: its error.
    """

    def __init__(self, error: float) -> None:
        super().__init__(f"wrong result: error {error:.2g}")
        self.error = error


Call = Callable[[], Any]


class Sizes(Protocol):
    """Sizes of a call: a frozen dataclass. Its `str` names it in reports."""

    @property
    def kind(self) -> str:
        """Which table of a report it stands in."""

    @property
    def family(self) -> str:
        """Name of the family of kernels that it is a call of."""

    @property
    def tokens(self) -> int:
        """Tokens of the call."""

    def __hash__(self) -> int:
        """Equal shapes share the objects made of them."""


@dataclass(frozen=True)
class Setting:
    """Settings that the trials of a run share.

    Attributes:
        package: the generated package.
        device: where it runs.
        l2_bytes: size of the device's L2.
    """

    package: BenchPackage
    device: torch.device
    l2_bytes: int

    @cached_property
    def roof(self) -> Roof:
        """The device's ceilings of attention: products and reads."""
        return roof_of(self.device)

    @cached_property
    def copy_roof(self) -> Roof:
        """The device's ceiling of kernels that read and write alike: a large copy, measured in this run."""
        return copy_roof(self.device)


@dataclass(frozen=True)
class Entrant(Generic[Inputs]):
    """A kernel that competes.

    Attributes:
        name: as reports show it.
        prepare: makes a call of one input set, with the work that engines do once (padding, plans). Raises ImportError
            where the kernel is not installed.
        unsupported: why it cannot run the shape, in one line; None if it can.
        error_limit: of its result, where its own arithmetic is coarser than the trial allows.
    """

    name: str
    prepare: Callable[[Inputs], Call]
    unsupported: str | None = None
    error_limit: float | None = None


@dataclass(frozen=True)
class Trial(Generic[Inputs]):
    """A shape made ready.

    Attributes:
        inputs: rotating input sets.
        entrants: ours; others' kernels may join them.
        error_of: poisons the memory that the call writes, runs a call of the first set, and returns the error of the
            whole result; where entrants have limits of their own, it takes that limit behind the call.
        error_limit: error above which a result is wrong.
        flops, bytes_moved: the call's work, least.
        roof: the ceilings that hold for it.
        graph_only: it is timed by graph replay however long it takes, and no result takes the memory of another while
            that is still in L2.
        launch_bound: its time from Python is also of interest.
    """

    inputs: Sequence[Inputs]
    entrants: Sequence[Entrant[Inputs]]
    error_of: Callable[..., float]
    error_limit: float
    flops: int
    bytes_moved: int
    roof: Roof
    graph_only: bool = False
    launch_bound: bool = False

    def checked(self, entrant: Entrant[Inputs], call: Call) -> float:
        """Error of an entrant's call.

        Raises:
            ArithmeticError: it is above the limit that holds for the entrant.
        """
        own = entrant.error_limit
        error = self.error_of(call) if own is None else self.error_of(call, own)
        if not error <= (self.error_limit if own is None else own):
            raise WrongResultError(error)
        return error


@dataclass(frozen=True)
class Family:
    """A benchmark of a family of kernels.

    Attributes:
        shapes: shapes that a package is measured at, for some head counts or, None, the usual ones; none if it has no
            wrapper of the family.
        trials: returns the function that readies shapes, for the trials of one run.
        modules: modules of a package with the measured wrappers; it may lack some.
    """

    shapes: Callable[[BenchPackage, Sequence[int] | None], Sequence[Sizes]]
    trials: Callable[[Setting], Callable[[Any], Trial[Any]]]
    modules: tuple[str, ...]
