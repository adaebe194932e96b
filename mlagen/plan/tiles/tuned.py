"""Tuned tiles in files: `specs/tuned/<spec>/<target>.yaml`, which people may read, change and check in.

A table is found by its kernels, `plan.fits`, so that specs with the same kernels share it.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, model_validator

from mlagen.errors import LimitError, Place, SpecError
from mlagen.plan.files import place_at, read_checked
from mlagen.plan.targets import SM90, TARGETS
from mlagen.plan.tiles.findings import NAME as FINDINGS
from mlagen.plan.tiles.findings import Findings
from mlagen.plan.tiles.fits import DENSE_DECODE, SPARSE_DECODE, SPARSE_FWD, family_of
from mlagen.plan.tiles.replacements import Replacement, read_replacements
from mlagen.plan.tiles.tile import RowMaker, Sm90Row, Tile, TileRow
from mlagen.spec.base import Model
from mlagen.spec.known import specs_dir
from mlagen.spec.load import read_text
from mlagen.spec.marked import Document, refuse
from mlagen.spec.rules import refused
from mlagen.spec.targets import instead


def _power_of_two(number: int) -> int:
    if number & (number - 1):
        raise refused(f"got {number}; takes a power of two")
    return number


@dataclass(frozen=True)
class Columns:
    """Names of a family's tables in a tuned file, and of the columns that select the calls of a row.

    Attributes:
        family: the family, also the name of its tile table.
        width: the size that programs share: heads or rows.
        length: the other size of a call: tokens or requests.
    """

    family: str
    width: str
    length: str

    @property
    def sm90(self) -> str:
        """Name of the table of calls that run the sm90 kernel."""
        return f"{self.family}_sm90"

    @property
    def max_width(self) -> str:
        """Column of the largest width, in both tables."""
        return f"max_{self.width}"

    @property
    def max_length(self) -> str:
        """Column of the largest length, in the tile table."""
        return f"max_{self.length}"

    @property
    def min_length(self) -> str:
        """Column of the smallest length, in the sm90 kernel's table."""
        return f"min_{self.length}"


COLUMNS = {
    columns.family: columns
    for columns in (
        Columns(SPARSE_FWD, "heads", "tokens"),
        Columns(SPARSE_DECODE, "heads", "tokens"),
        Columns(DENSE_DECODE, "rows", "requests"),
    )
}
TABLES = (*COLUMNS, *(columns.sm90 for columns in COLUMNS.values()))
SPARSE_FWD_NOTES = (
    "# The first row that holds a call's heads and tokens is taken; without max_heads or max_tokens it holds any.",
    "# programs_per_sm is what the split rule plans with; picked so that the rule finds the best splits.",
)
DENSE_DECODE_NOTES = (
    "# The first row that holds a call's rows, which are the heads of its query tokens that share a KV head, and its",
    "# requests is taken; without max_rows or max_requests it holds any.",
    "# programs_per_sm is how many programs a multiprocessor a batch is shared out to.",
)
FITS_LINE = "fits: # which kernels the tables hold for, as `mlagen show plan` tells it; specs of the same take them"
HEAD = "# Tiles of {} on {}, measured on {} with triton {}. Written by `mlagen tune`."
_MEASURED = re.compile(
    r"^# Tiles of .* measured on (?P<device>.+) with triton (?P<triton>[^\s]+)\.(\s|$)", re.MULTILINE
)
TILE_FIELDS = tuple(one.name for one in fields(Tile))

Block = Annotated[int, Field(ge=16, le=256), AfterValidator(_power_of_two)]
Warps = Annotated[int, Field(ge=1, le=8), AfterValidator(_power_of_two)]
MaxRows = Annotated[
    int | None,
    Field(ge=1, le=1 << 30, description="most rows a KV head, heads times query tokens of a request; absent: any"),
]


class _TunedTile(Model):
    block_h: Annotated[Block, Field(description="heads, or rows of dense attention, that a program holds")]
    block_n: Annotated[Block, Field(description="indices, or keys of dense attention, that a program takes a step")]
    num_warps: Annotated[Warps, Field(description="warps a program")]
    num_stages: Annotated[int, Field(ge=1, le=6, description="software-pipeline depth")]
    indices_ahead: Annotated[bool, Field(description="indices, or pages, are loaded a step before they are used")]
    programs_per_sm: Annotated[
        int, Field(ge=1, le=64, description="programs that work is cut for on a multiprocessor at once")
    ]


class TunedRow(_TunedTile):
    """One row of a tile table of sparse attention."""

    max_heads: Annotated[int | None, Field(ge=1, le=128, description="most heads a call may have; absent: any")] = None
    max_tokens: Annotated[int | None, Field(ge=1, le=1 << 30, description="most tokens; absent: any number")] = None


class TunedDenseDecodeRow(_TunedTile):
    """One row of the tile table of dense attention."""

    max_rows: MaxRows = None
    max_requests: Annotated[int | None, Field(ge=1, le=1 << 30, description="most requests; absent: any number")] = None


class TunedSm90Row(Model):
    """Fewest tokens of calls that run the sm90 kernel, by most heads."""

    max_heads: Annotated[int | None, Field(ge=1, le=128, description="most heads a call may have; absent: any")] = None
    min_tokens: Annotated[int | None, Field(ge=1, le=1 << 30, description="fewest tokens; absent: none do")] = None


class TunedDenseDecodeSm90Row(Model):
    """Fewest requests of calls that run the sm90 kernel of dense attention, by most rows per KV head."""

    max_rows: MaxRows = None
    min_requests: Annotated[int | None, Field(ge=1, le=1 << 30, description="fewest requests; absent: none do")] = None


class TunedFits(Model):
    """Kernels that the tables of a file are valid for."""

    sparse_fwd: Annotated[str | None, Field(description="kernels of attention over rows")] = None
    sparse_decode: Annotated[str | None, Field(description="kernels of attention over a cache")] = None
    dense_decode: Annotated[str | None, Field(description="kernels of dense attention")] = None


class TunedTable(Model):
    """Tile tables of one spec on one target. The first row that covers a call is used."""

    fits: Annotated[
        TunedFits, Field(description="kernels that the tables are valid for, as `mlagen show plan` prints them")
    ] = TunedFits()
    heads: Annotated[
        int | None, Field(ge=1, le=128, description="of the model that was swept; of two tables, the nearer is taken")
    ] = None
    sparse_fwd: Annotated[
        tuple[TunedRow, ...] | None,
        Field(min_length=1, description="of attention over rows, by heads, then by tokens, most last"),
    ] = None
    sparse_decode: Annotated[
        tuple[TunedRow, ...] | None, Field(min_length=1, description="of attention over a cache, likewise")
    ] = None
    dense_decode: Annotated[
        tuple[TunedDenseDecodeRow, ...] | None,
        Field(min_length=1, description="of dense attention, by rows a KV head, then by requests, most last"),
    ] = None
    sparse_fwd_sm90: Annotated[
        tuple[TunedSm90Row, ...] | None,
        Field(min_length=1, description="of attention over rows: which calls run the sm90 kernel, by heads"),
    ] = None
    sparse_decode_sm90: Annotated[
        tuple[TunedSm90Row, ...] | None, Field(min_length=1, description="of attention over a cache, likewise")
    ] = None
    dense_decode_sm90: Annotated[
        tuple[TunedDenseDecodeSm90Row, ...] | None,
        Field(min_length=1, description="of dense attention: which calls run the sm90 kernel, by rows a KV head"),
    ] = None

    @model_validator(mode="after")
    def _rows_hold_every_call(self) -> TunedTable:
        if all(getattr(self, name) is None for name in TABLES):
            raise refused(f"has no table; takes one or more of {', '.join(TABLES)}")
        for family, columns in COLUMNS.items():
            for name in (family, columns.sm90):
                if getattr(self, name) is not None and getattr(self.fits, family) is None:
                    raise refused(f"takes fits.{family} as well, the kernels that it is valid for", name)
        for family, columns in COLUMNS.items():
            _check_rows(columns, getattr(self, family) or ())
        for columns in COLUMNS.values():
            _check_sm90_rows(columns, getattr(self, columns.sm90) or ())
        return self


def _check_rows(columns: Columns, rows: tuple[_TunedTile, ...]) -> None:
    name, width, length = columns.family, columns.max_width, columns.max_length
    most = [tuple(getattr(row, limit) or math.inf for limit in (width, length)) for row in rows]
    for index, row in enumerate(rows):
        last = index == len(rows) - 1
        following = (math.inf, math.inf) if last else most[index + 1]
        if not last and following <= most[index]:
            raise refused(
                f"takes rows in the order of their {columns.width}, then of their {columns.length}", name, index + 1
            )
        if last and most[index][0] < math.inf:
            raise refused(f"got {getattr(row, width)}; takes none in the last row", name, index, width)
        if most[index][1] < math.inf and (last or following[0] > most[index][0]):
            message = f"got {getattr(row, length)}; takes none in the last row of its {columns.width}"
            raise refused(message, name, index, length)


def _check_sm90_rows(columns: Columns, rows: tuple[TunedSm90Row | TunedDenseDecodeSm90Row, ...]) -> None:
    name, width = columns.sm90, columns.max_width
    most = [getattr(row, width) or math.inf for row in rows]
    for index, (here, after) in enumerate(itertools.pairwise(most)):
        if after <= here:
            raise refused(f"takes rows in the order of their {columns.width}", name, index + 1)
    if most and most[-1] < math.inf:
        raise refused(f"got {most[-1]}; takes none in the last row", name, len(most) - 1, width)


def tuned_path(spec_name: str, target: str, specs_dir: Path) -> Path:
    """Return the path of a spec's tuned tiles for a target."""
    return specs_dir / "tuned" / spec_name / f"{target}.yaml"


@dataclass(frozen=True)
class _Table:
    """A file with a table for the wanted kernels."""

    path: Path
    table: TunedTable
    document: Document

    @property
    def reason(self) -> str:
        """Spec and target of the rows, with device and Triton of the measurement from the file's first line."""
        found = _MEASURED.search(read_text(self.path))
        measured = f" (measured on {found['device']}, triton {found['triton']})" if found else ""
        return f"tuned: {self.path.parent.name} on {self.path.stem}{measured}"


@dataclass(frozen=True)
class TunedFiles:
    """Search for the tuned tables of a spec: next to the spec, then among mlagen's own.

    In each place, the table of the spec's name comes first. Then come other tables for its kernels: with equal heads,
    with the next larger number of heads, by name.

    Attributes:
        spec_name: the spec's name.
        folder: the spec's folder, which may contain `tuned/`.
        num_heads: heads of the model.
    """

    spec_name: str
    folder: Path
    num_heads: int

    def rows(self, fits: str, targets: Iterable[str], make: RowMaker) -> dict[str, tuple[TileRow, ...]]:
        """Return the tuned tiles of a family's kernels.

        Args:
            fits: the kernels, `plan.fits`.
            targets: targets of the spec.
            make: makes a row of a tile.

        Returns:
            Rows of the tile table by target; no entry for a target without.

        Raises:
            SpecErrors: a file is invalid, or the spec's own is for other kernels: all errors, with line and column.
            LimitError: a tile needs more shared memory than the target gives a program.
        """
        self._check_names()
        kind = family_of(fits)
        found = {target: self._find(fits, target) for target in targets}
        rows = {target: _rows(each, kind, make) for target, each in found.items() if each is not None}
        return {target: each for target, each in rows.items() if each}

    def sm90_rows(self, fits: str, target: str) -> tuple[Sm90Row, ...] | None:
        """Return the calls that run a family's sm90 kernel; None if not tuned.

        Raises:
            SpecErrors: as in `rows`.
        """
        found = self._find(fits, target)
        columns = COLUMNS[family_of(fits)]
        rows = getattr(found.table, columns.sm90) if found else None
        return rows and tuple(
            Sm90Row(getattr(row, columns.max_width), getattr(row, columns.min_length)) for row in rows
        )

    def _find(self, fits: str, target: str) -> _Table | None:
        """Return the file with the table for these kernels, or None."""
        kind = family_of(fits)
        folders = [self.folder]
        if specs_dir().resolve() != self.folder.resolve():
            folders.append(specs_dir())
        for folder in folders:
            own = tuned_path(self.spec_name, target, folder)
            fitting = []
            for path in (own, *sorted(set((folder / "tuned").glob(f"*/{target}.yaml")) - {own})):
                found = self._fitting(path, kind, fits)
                if found is not None and path == own:
                    return found
                if found is not None:
                    fitting.append(found)
            if fitting:
                return min(fitting, key=self._order)
        return None

    def _fitting(self, path: Path, kind: str, fits: str) -> _Table | None:
        """Return the file if it exists and has a table for these kernels."""
        if not path.is_file():
            return None
        table, document = read_checked(path, TunedTable)
        said = getattr(table.fits, kind)
        if said == fits:
            return _Table(path, table, document)
        if said is not None and path == tuned_path(self.spec_name, path.stem, self.folder):
            message = f"fits.{kind}: got '{said}'; takes '{fits}', the kernels of {self.spec_name}"
            hint = "tune the spec again, or delete the tables of other kernels"
            raise refuse([SpecError(message, place=place_at(path, document, "fits", kind), hint=hint)])
        return None

    def _order(self, found: _Table) -> tuple[bool, int, str]:
        heads = found.table.heads or 0
        return heads < self.num_heads, abs(heads - self.num_heads), found.path.parent.name

    def _check_names(self) -> None:
        for path in sorted(tuned_path(self.spec_name, "", self.folder).parent.glob("*.yaml")):
            if path.stem not in (*TARGETS, FINDINGS):
                message = f"'{path.stem}' is not a target; takes a file named after one of {', '.join(TARGETS)}"
                other = instead(path.stem)
                message += f"; {other}" if other else ""
                raise refuse([SpecError(message, place=Place(path))])


def _rows(found: _Table, kind: str, make: RowMaker) -> tuple[TileRow, ...]:
    rows = []
    for index, row in enumerate(getattr(found.table, kind) or ()):
        try:
            rows.append(_row(row, COLUMNS[kind], found, make))
        except LimitError as error:
            place = place_at(found.path, found.document, kind, index)
            raise LimitError(error.message, place=place, hint=error.hint) from None
    return tuple(rows)


def _row(row: _TunedTile, columns: Columns, found: _Table, make: RowMaker) -> TileRow:
    tile = Tile(**{name: getattr(row, name) for name in TILE_FIELDS})
    width, length = getattr(row, columns.max_width), getattr(row, columns.max_length)
    made = make(tile, TARGETS[found.path.stem], found.reason, width, length)
    return replace(made, programs_per_sm=row.programs_per_sm)


@dataclass(frozen=True)
class Tuned:
    """Known tiles of a spec: tuned tables, and tiles that are replaced under some Tritons.

    Attributes:
        tiles: rows of the tile table by family and target; other targets use `files`, or the defaults.
        sm90: calls that run a family's sm90 kernel, by family; other families use `files`, or the defaults.
        files: search for further tables; None: no search.
        replacements: tiles that are replaced under some Tritons.
        findings: findings of builds about the spec's kernels under some Tritons.
    """

    tiles: Mapping[tuple[str, str], Sequence[TileRow]] = field(default_factory=dict)
    sm90: Mapping[str, Sequence[Sm90Row]] = field(default_factory=dict)
    files: TunedFiles | None = None
    replacements: Sequence[Replacement] = field(default_factory=lambda: read_replacements())
    findings: Findings = field(default_factory=Findings)

    def rows(self, fits: str, targets: Iterable[str], make: RowMaker) -> dict[str, tuple[TileRow, ...]]:
        """Rows of a family's tile table by target, none for one without; see `TunedFiles.rows`."""
        given = {target: tuple(rows) for (family, target), rows in self.tiles.items() if family == family_of(fits)}
        return (self.files.rows(fits, targets, make) if self.files else {}) | given

    def sm90_rows(self, fits: str) -> Sequence[Sm90Row] | None:
        """Return the calls that run a family's sm90 kernel; None: the default."""
        found = self.files.sm90_rows(fits, SM90) if self.files else None
        return self.sm90.get(family_of(fits), found)


def dump_tuned(
    spec_name: str, target: str, tuned: Tuned, *, fits: Mapping[str, str], heads: int, device: str, triton: str
) -> str:
    """Return the text of a tuned file. `TunedFiles` reads back the same rows with other reasons.

    Args:
        spec_name, target: spec and target of the tiles.
        tuned: the tables.
        fits: kernels that they are valid for, by family, `Plan.fits`.
        heads: heads of the tuned model.
        device: name of the measured device.
        triton: version of Triton of the measurement.
    """
    tiles = {family: tuned.tiles.get((family, target), ()) for family in COLUMNS}
    calls = {family: tuned.sm90.get(family, ()) for family in COLUMNS}
    lines = [HEAD.format(spec_name, target, device, triton)]
    lines += SPARSE_FWD_NOTES if tiles[SPARSE_FWD] or tiles[SPARSE_DECODE] else ()
    lines += DENSE_DECODE_NOTES if tiles[DENSE_DECODE] else ()
    lines.append(FITS_LINE)
    lines += [f"  {family}: {fits[family]}" for family in COLUMNS if tiles[family] or calls[family]]
    lines += [f"heads: {heads} # of the model that was swept"]
    for family, columns in COLUMNS.items():
        lines += [f"{family}:"] if tiles[family] else []
        for row in tiles[family]:
            limits = {columns.max_width: row.max_heads, columns.max_length: row.max_tokens}
            lines.append(_flow_line({**limits, **asdict(row.tile), "programs_per_sm": row.programs_per_sm}))
    for family, columns in COLUMNS.items():
        size, fewest = columns.length, columns.min_length
        if calls[family]:
            lines.append(
                f"{columns.sm90}: # calls of so many {size} and more run the sm90 kernel; without {fewest} none do"
            )
        for call in calls[family]:
            lines.append(_flow_line({columns.max_width: call.max_heads, fewest: call.min_tokens}))
    return "\n".join(lines) + "\n"


def _flow_line(values: Mapping[str, object]) -> str:
    """Return a row of a table in YAML's flow style, without None values."""
    return f"  - {{{', '.join(f'{name}: {json.dumps(value)}' for name, value in values.items() if value is not None)}}}"
