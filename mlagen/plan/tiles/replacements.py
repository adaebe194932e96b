"""Tiles that exceed a limit under some Tritons. `replacements.yaml` names them and the tiles that replace them.

A table row with such a tile becomes several rows, each for a range of versions. Under each version, the first row that
covers a call is the same as before, except for its tile.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, Field, model_validator

from mlagen.errors import LimitError, Place
from mlagen.plan.files import place_at, read_checked
from mlagen.plan.targets import TARGETS, Target
from mlagen.plan.tiles.fits import DENSE_FWD, TILED, family_of
from mlagen.plan.tiles.tile import AnyTile, DenseFwdRow, DenseFwdTile, Tile, TileRow
from mlagen.plan.tritons import MINORS, Minor, Table, holds, minor, minor_text, span_of
from mlagen.spec.base import Model
from mlagen.spec.rules import refused

PATH = Path(__file__).with_name("replacements.yaml")

Row = TypeVar("Row", TileRow, DenseFwdRow)


@dataclass(frozen=True)
class Replacement:
    """A tile that is replaced under some Tritons.

    Attributes:
        fits: the kernels, `plan.fits`.
        table: "tiles", or "unaligned" for calls that are not aligned.
        target: the target.
        tile: the tile.
        tritons: minor versions under which it exceeds a limit.
        instead: the tile under these versions.
        place: position of the entry; None if it is in no file.
    """

    fits: str
    table: str
    target: str
    tile: AnyTile
    tritons: tuple[Minor, ...]
    instead: AnyTile
    place: Place | None = None


def _known(kind: str, names: Iterable[str]) -> Callable[[str], str]:
    taken = tuple(names)

    def check(name: str) -> str:
        if name not in taken:
            raise refused(f"got '{name}'; takes {kind}: {', '.join(taken)}")
        return name

    return check


def _of_a_family(fits: str) -> str:
    if family_of(fits) not in TILED:
        raise refused(f"got '{fits}'; takes a text that begins with a family: {', '.join(TILED)}")
    return fits


FitsText = Annotated[
    str, AfterValidator(_of_a_family), Field(description="the kernels, as `mlagen show plan` prints them")
]
MinorText = Annotated[str, AfterValidator(_known("minor versions", map(minor_text, MINORS)))]


class _TileEntry(Model):
    block_h: Annotated[int | None, Field(ge=16, le=256, description="heads, or rows, that a program holds")] = None
    block_m: Annotated[int | None, Field(ge=16, le=256, description="of dense_fwd, rows that a program holds")] = None
    block_n: Annotated[int, Field(ge=16, le=256, description="indices or keys that a program takes a step")]
    num_warps: Annotated[int, Field(ge=1, le=8, description="warps a program")]
    num_stages: Annotated[int, Field(ge=1, le=6, description="software-pipeline depth")]
    indices_ahead: Annotated[
        bool | None, Field(description="indices, or pages, are loaded a step before they are used")
    ] = None

    def tile(self) -> AnyTile:
        """The tile."""
        values = self.model_dump(exclude_none=True)
        return DenseFwdTile(**values) if self.block_m is not None else Tile(**values)

    def misses(self, family: str) -> str | None:
        """Return its fault as a tile of a family, or None."""
        given = {name for name in ("block_h", "block_m", "indices_ahead") if getattr(self, name) is not None}
        takes = ("block_m",) if family == DENSE_FWD else ("block_h", "indices_ahead")
        return (
            None if given == set(takes) else f"got {', '.join(sorted(given)) or 'neither'}; takes {' and '.join(takes)}"
        )


class _Entry(Model):
    fits: FitsText
    table: Annotated[Literal["tiles", "unaligned"], Field(description="the table that has the tile")] = "tiles"
    target: Annotated[str, AfterValidator(_known("a target", TARGETS)), Field(description="the target")]
    tile: Annotated[_TileEntry, Field(description="the tile that is replaced")]
    tritons: Annotated[
        tuple[MinorText, ...],
        Field(min_length=1, description="minor versions of Triton under which the tile exceeds a limit"),
    ]
    instead: Annotated[_TileEntry, Field(description="the tile that calls take under these versions")]

    @model_validator(mode="after")
    def _tiles_are_the_familys(self) -> _Entry:
        for name in ("tile", "instead"):
            wrong = getattr(self, name).misses(family_of(self.fits))
            if wrong is not None:
                raise refused(f"{wrong}, as a tile of {family_of(self.fits)}", name)
        if self.tile == self.instead:
            raise refused("takes a tile that differs from the replaced one", "instead")
        return self

    def replacement(self, place: Place) -> Replacement:
        """The entry as the plan has it."""
        tritons = tuple(map(minor, self.tritons))
        return Replacement(self.fits, self.table, self.target, self.tile.tile(), tritons, self.instead.tile(), place)


Entries = Annotated[tuple[_Entry, ...], Field(description="tiles that exceed a limit under some Tritons")]


class ReplacementTable(Model):
    """Entries of `replacements.yaml`, or of another file with such entries."""

    replacements: Entries

    @model_validator(mode="after")
    def _each_tile_has_one_answer(self) -> ReplacementTable:
        keys = [
            {(each.fits, each.table, each.target, each.tile.tile(), triton) for triton in each.tritons}
            for each in self.replacements
        ]
        for index, here in enumerate(keys):
            instead = {(*key[:3], self.replacements[index].instead.tile(), key[4]) for key in here}
            for other, there in enumerate(keys):
                if other < index and here & there:
                    raise refused(f"has a tile and a Triton that replacements[{other}] also has", "replacements", index)
                if instead & there:
                    raise refused(f"got a tile that replacements[{other}] replaces", "replacements", index, "instead")
        return self


def read_replacements(path: Path = PATH) -> tuple[Replacement, ...]:
    """The entries of the file.

    Raises:
        SpecErrors: the file is invalid: all its errors, each with its line and column.
    """
    table, document = read_checked(path, ReplacementTable)
    return tuple(
        each.replacement(place_at(path, document, "replacements", index))
        for index, each in enumerate(table.replacements)
    )


def split_table(
    table: Table[Row],
    replacements: Sequence[Replacement],
    fits: str,
    name: str,
    make: Callable[[Row, Any, Target, str], Row],
) -> tuple[tuple[str, tuple[Row, ...]], ...]:
    """Split the rows of a table by version if their tile is replaced under some versions.

    Args:
        table: the table.
        replacements: entries, for these kernels and for others.
        fits, name: kernels and name of the table; see `Replacement`.
        make: makes a row like the given one with another tile and a reason.

    Raises:
        LimitError: a replacing tile does not fit its target.
    """
    mine = [each for each in replacements if (each.fits, each.table) == (fits, name)]
    return tuple(
        (target, tuple(split for row in rows for split in _split(row, mine, TARGETS[target], make)))
        for target, rows in table
    )


def _split(
    row: Row, replacements: Sequence[Replacement], target: Target, make: Callable[[Row, Any, Target, str], Row]
) -> Iterator[Row]:
    """Return the row, or a row for each range of versions with the same tile."""
    mine = [each for each in replacements if (each.target, each.tile) == (target.name, row.tile)]
    entries = {triton: each for each in mine for triton in each.tritons}
    tritons = [triton for triton in MINORS if holds(row, triton)]

    def tile_under(triton: Minor) -> AnyTile:
        return entries[triton].instead if triton in entries else row.tile

    for tile, run in itertools.groupby(tritons, tile_under):
        here = tuple(run)
        made = row
        if here[0] in entries:
            spills = " and ".join(map(minor_text, here))
            try:
                made = make(row, tile, target, f"instead of {row.tile}, which spills under {spills}")
            except LimitError as error:
                raise LimitError(error.message, place=entries[here[0]].place, hint=error.hint) from None
        yield replace(made, tritons=span_of(here))
