"""The part of a plan for one family of kernels."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, Self, TypeVar

from mlagen.plan.ops import Op
from mlagen.plan.rows import Caches
from mlagen.plan.sm90.dense_fwd import DenseFwdSm90Plan
from mlagen.plan.sm90.index_union import IndexUnionPlan
from mlagen.plan.sm90.kernel import Registers, Sm90Plan, Split
from mlagen.plan.targets import SM90, Target
from mlagen.plan.tiles.findings import Findings, LeftOut
from mlagen.plan.tiles.replacements import Replacement, Row, split_table
from mlagen.plan.tiles.tuned import Tuned
from mlagen.plan.tritons import Minor
from mlagen.spec import Spec

PORTABLE = "portable"  # the kernel that every target has


@dataclass(frozen=True, kw_only=True)
class Family(ABC):
    """The numbers of one family of kernels.

    Attributes:
        NAME: the family's word in every room, for example `sparse_fwd`.
        WRAPPERS: its public functions, each with its facts as an operator of torch.
    """

    NAME: ClassVar[str]
    WRAPPERS: ClassVar[Mapping[str, Op]]

    @classmethod
    @abstractmethod
    def make(cls, spec: Spec, caches: Caches | None, tuned: Tuned) -> Family | None:
        """Derives the numbers; None where the spec has none.

        Args:
            spec: the validated spec.
            caches: its caches.
            tuned: tiles that were measured.

        Raises:
            LimitError: a target cannot hold any tile; one line with the arithmetic.
            SpecErrors: a tuned file is invalid.
        """

    @classmethod
    def wanted(cls, spec: Spec) -> tuple[str, ...]:
        """Return the family's wrappers that the spec names. Without one, its package has no kernels of the family."""
        return tuple(name for name in cls.WRAPPERS if name in spec.wrappers)

    def describe(self) -> Iterator[str]:
        """Yield lines about its numbers, for readers of `show plan`."""
        yield from ()

    @classmethod
    def all_sm90_modules(cls) -> tuple[str, ...]:
        """Generated modules of the sm90 kernels of any spec."""
        return ()

    @property
    def sm90_modules(self) -> tuple[str, ...]:
        """Those of the spec's package."""
        return ()

    @property
    def kernels(self) -> tuple[str, ...]:
        """Names of the kernels that a call can run, as schedules and `_launch.force` have them."""
        return (PORTABLE, *((SM90,) if self.sm90_modules else ()))


@dataclass(frozen=True, kw_only=True)
class TiledFamily(Family, Generic[Row]):
    """A family with a tile table.

    Attributes:
        fits: kernels that its tables are valid for; see `plan.fits`.
        tiles: rows of the tile table by target.
        unaligned: the same for unaligned calls: one row, or one per range of Tritons.
        sm90: plan of the sm90 kernel; None without one.
        left_out: sm90 kernels that are not used under some Tritons.
        SM90_KERNELS: generated modules of the sm90 kernels, by the kernels' names, which are the attributes with their
            plans.
    """

    SM90_KERNELS: ClassVar[Mapping[str, str]]

    fits: str
    tiles: tuple[tuple[str, tuple[Row, ...]], ...]
    unaligned: tuple[tuple[str, tuple[Row, ...]], ...]
    sm90: Sm90Plan | DenseFwdSm90Plan | None
    left_out: tuple[LeftOut, ...] = ()

    @classmethod
    def all_sm90_modules(cls) -> tuple[str, ...]:
        """Generated modules of the sm90 kernels of any spec."""
        return tuple(cls.SM90_KERNELS.values())

    @property
    def sm90_modules(self) -> tuple[str, ...]:
        """Those of the spec's package."""
        return tuple(self.sm90_kernels.values())

    @property
    def sm90_kernels(self) -> dict[str, str]:
        """Those of SM90_KERNELS that the spec's package has."""
        return {name: module for name, module in self.SM90_KERNELS.items() if getattr(self, name)}

    @property
    def kernels(self) -> tuple[str, ...]:
        """Names of the kernels that a call can run, as schedules and `_launch.force` have them."""
        return (PORTABLE, *self.sm90_kernels)

    @abstractmethod
    def like(self, row: Row, tile: Any, target: Target, reason: str, *, aligned: bool) -> Row:
        """A row like another with this tile, for calls that are aligned or for the others.

        Raises:
            LimitError: the tile needs more shared memory than the target gives a program.
        """

    def replaced(self, replacements: Sequence[Replacement]) -> Self:
        """Return the family with separate rows for Tritons under which a tile is replaced.

        Raises:
            LimitError: a replacing tile does not fit its target.
        """
        wide, small = (functools.partial(self.like, aligned=aligned) for aligned in (True, False))
        return replace(
            self,
            tiles=split_table(self.tiles, replacements, self.fits, "tiles", wide),
            unaligned=split_table(self.unaligned, replacements, self.fits, "unaligned", small),
        )

    def registers(self, kernel: str) -> Registers | None:
        """The split of registers of an sm90 kernel, by the kernel's name in the family; None without one."""
        numbers = getattr(self, kernel) if kernel in self.SM90_KERNELS else None
        numbers = numbers[0] if isinstance(numbers, tuple) and numbers else numbers
        numbers = numbers.sm90 if isinstance(numbers, IndexUnionPlan) else numbers
        return numbers.registers if isinstance(numbers, Sm90Plan | DenseFwdSm90Plan) else None

    def found(self, findings: Findings) -> Self:
        """Return the family with findings: register splits, and unused sm90 kernels."""
        family = self
        for one in findings.registers:
            if one.fits == self.fits and one.kernel in self.SM90_KERNELS:
                numbers = with_registers(getattr(family, one.kernel), one.triton, one.split)
                family = replace(family, **{one.kernel: numbers})
        return replace(family, left_out=tuple(one for one in findings.left_out if one.fits == self.fits))


def with_registers(numbers: Any, triton: Minor, split: Split) -> Any:
    """Numbers of sm90 kernels with another split of registers under a Triton; None, of no kernel, as it is."""
    if isinstance(numbers, tuple):
        return tuple(with_registers(one, triton, split) for one in numbers)
    if isinstance(numbers, IndexUnionPlan):
        return replace(numbers, sm90=with_registers(numbers.sm90, triton, split))
    return numbers and replace(numbers, registers=numbers.registers.instead(triton, split))


AnyFamily = TypeVar("AnyFamily", bound=Family)
