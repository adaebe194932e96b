"""What a plan knows of one family of kernels."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, Self, TypeVar

from mlagen.plan.replacements import Replacement, Row, split_table
from mlagen.plan.rows import Caches
from mlagen.plan.sm90 import DenseFwdSm90Plan, Sm90Plan
from mlagen.plan.targets import Target
from mlagen.plan.tuned import Tuned
from mlagen.spec import Spec


@dataclass(frozen=True, kw_only=True)
class Family(ABC):
    """The numbers of one family of kernels.

    Attributes:
        NAME: the family's word in every room, such as `sparse_fwd`.
        WRAPPERS: its public functions.
    """

    NAME: ClassVar[str]
    WRAPPERS: ClassVar[tuple[str, ...]]

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
    def wanted(cls, spec: Spec) -> bool:
        """Whether the spec names a wrapper of the family, so that its package has the kernels."""
        return any(name in spec.wrappers for name in cls.WRAPPERS)

    @property
    def sm90_modules(self) -> tuple[str, ...]:
        """Generated modules of its sm90 kernels."""
        return ()


@dataclass(frozen=True, kw_only=True)
class TiledFamily(Family, Generic[Row]):
    """A family whose kernels take their tile from a table.

    Attributes:
        fits: what its tables hold for; see `plan.fits`.
        tiles: rows of the tile table by target.
        unaligned: the same of calls that are not aligned: one row, or one a run of Tritons.
        sm90: the sm90 kernel's numbers; None without one.
    """

    fits: str
    tiles: tuple[tuple[str, tuple[Row, ...]], ...]
    unaligned: tuple[tuple[str, tuple[Row, ...]], ...]
    sm90: Sm90Plan | DenseFwdSm90Plan | None

    @property
    def sm90_modules(self) -> tuple[str, ...]:
        """Generated modules of its sm90 kernels."""
        return () if self.sm90 is None else (f"_{self.NAME}_sm90",)

    @abstractmethod
    def like(self, row: Row, tile: Any, target: Target, reason: str, *, aligned: bool) -> Row:
        """A row like another with this tile, for calls that are aligned or for the others.

        Raises:
            LimitError: the tile needs more shared memory than the target gives a program.
        """

    def replaced(self, replacements: Sequence[Replacement]) -> Self:
        """The same with rows of their own for Tritons under which a tile is replaced.

        Raises:
            LimitError: a tile that calls would take instead does not fit its target.
        """
        wide, small = (functools.partial(self.like, aligned=aligned) for aligned in (True, False))
        return replace(
            self,
            tiles=split_table(self.tiles, replacements, self.fits, "tiles", wide),
            unaligned=split_table(self.unaligned, replacements, self.fits, "unaligned", small),
        )


AnyFamily = TypeVar("AnyFamily", bound=Family)
