"""Tiles that a sweep found, as files: `specs/tuned/<spec>/<target>.yaml`, which people may read, mend and check in.

A table is found by what it fits, `plan.fits`, so that a spec takes what was measured for another of the same kernels.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, model_validator

from mlagen.errors import LimitError, Place, SpecError
from mlagen.plan.files import place_at, read_checked
from mlagen.plan.fits import family_of
from mlagen.plan.sm90 import Sm90Row
from mlagen.plan.targets import TARGETS
from mlagen.plan.tiles import RowMaker, Tile, TileRow
from mlagen.spec.known import specs_dir
from mlagen.spec.load import read_text
from mlagen.spec.marked import Document, refuse
from mlagen.spec.models import Model, refused
from mlagen.spec.targets import instead


def _power_of_two(number: int) -> int:
    if number & (number - 1):
        raise refused(f"got {number}; takes a power of two")
    return number


# Tables by family, and what says in each which calls a row holds.
LIMITS = {
    "sparse_fwd": ("max_heads", "max_tokens"),
    "sparse_decode": ("max_heads", "max_tokens"),
    "dense_decode": ("max_rows", "max_requests"),
}
KINDS = tuple(LIMITS)
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
# The same of the tables that say which calls run an sm90 kernel.
SM90_LIMITS = {
    "sparse_fwd_sm90": ("max_heads", "min_tokens"),
    "sparse_decode_sm90": ("max_heads", "min_tokens"),
    "dense_decode_sm90": ("max_rows", "min_requests"),
}
SM90_KINDS = tuple(SM90_LIMITS)
SM90_OF = dict(zip(KINDS, SM90_KINDS, strict=True))
TILE_FIELDS = tuple(field.name for field in fields(Tile))

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
    """From how many tokens on calls of up to so many heads run the sm90 kernel."""

    max_heads: Annotated[int | None, Field(ge=1, le=128, description="most heads a call may have; absent: any")] = None
    min_tokens: Annotated[int | None, Field(ge=1, le=1 << 30, description="fewest tokens; absent: none do")] = None


class TunedDenseDecodeSm90Row(Model):
    """From how many requests on calls of up to so many rows a KV head run the sm90 kernel of dense attention."""

    max_rows: MaxRows = None
    min_requests: Annotated[int | None, Field(ge=1, le=1 << 30, description="fewest requests; absent: none do")] = None


class TunedFits(Model):
    """Which kernels the tables of a file hold for."""

    sparse_fwd: Annotated[str | None, Field(description="those of attention over rows")] = None
    sparse_decode: Annotated[str | None, Field(description="those of attention over a cache")] = None
    dense_decode: Annotated[str | None, Field(description="those of dense attention")] = None


class TunedTable(Model):
    """The tile tables of one spec on one target; the first row that holds a call is taken."""

    fits: Annotated[
        TunedFits, Field(description="which kernels the tables hold for, as `mlagen show plan` prints it")
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
        if all(getattr(self, name) is None for name in (*KINDS, *SM90_KINDS)):
            raise refused(f"has no table; takes one or more of {', '.join((*KINDS, *SM90_KINDS))}")
        for kind, sm90_kind in SM90_OF.items():
            for name in (kind, sm90_kind):
                if getattr(self, name) is not None and getattr(self.fits, kind) is None:
                    raise refused(f"takes fits.{kind} beside it: which kernels it holds for", name)
        for name in KINDS:
            _check_rows(name, getattr(self, name) or ())
        for name in SM90_KINDS:
            _check_sm90_rows(name, getattr(self, name) or ())
        return self


def _check_rows(name: str, rows: tuple[_TunedTile, ...]) -> None:
    width, length = LIMITS[name]
    wide, long = width.removeprefix("max_"), length.removeprefix("max_")
    most = [tuple(getattr(row, limit) or math.inf for limit in (width, length)) for row in rows]
    for index, row in enumerate(rows):
        last = index == len(rows) - 1
        following = (math.inf, math.inf) if last else most[index + 1]
        if not last and following <= most[index]:
            raise refused(f"takes rows in the order of their {wide}, then of their {long}", name, index + 1)
        if last and most[index][0] < math.inf:
            raise refused(f"got {getattr(row, width)}; takes none in the last row", name, index, width)
        if most[index][1] < math.inf and (last or following[0] > most[index][0]):
            message = f"got {getattr(row, length)}; takes none in the last row of its {wide}"
            raise refused(message, name, index, length)


def _check_sm90_rows(name: str, rows: tuple[TunedSm90Row | TunedDenseDecodeSm90Row, ...]) -> None:
    width, _ = SM90_LIMITS[name]
    most = [getattr(row, width) or math.inf for row in rows]
    for index, (here, after) in enumerate(itertools.pairwise(most)):
        if after <= here:
            raise refused(f"takes rows in the order of their {width.removeprefix('max_')}", name, index + 1)
    if most and most[-1] < math.inf:
        raise refused(f"got {most[-1]}; takes none in the last row", name, len(most) - 1, width)


def tuned_path(spec_name: str, target: str, specs_dir: Path) -> Path:
    """Where the tiles of a spec on a target are kept."""
    return specs_dir / "tuned" / spec_name / f"{target}.yaml"


@dataclass(frozen=True)
class _Table:
    """A file with a table that fits."""

    path: Path
    table: TunedTable
    document: Document

    @property
    def reason(self) -> str:
        """Whose rows they are, and what they were measured on, as the file's first line tells it."""
        found = _MEASURED.search(read_text(self.path))
        measured = f" (measured on {found['device']}, triton {found['triton']})" if found else ""
        return f"tuned: {self.path.parent.name} on {self.path.stem}{measured}"


@dataclass(frozen=True)
class TunedFiles:
    """Where the tuned tables of a spec are looked for: beside the spec, then among those that come with mlagen.

    In each place a table of the spec's own name goes before others that fit, of these one of a model of as many heads,
    or else of the next more, and then the first by name.

    Attributes:
        spec_name: the spec's name.
        folder: the spec's folder, in which `tuned/` may lie.
        num_heads: the model's.
    """

    spec_name: str
    folder: Path
    num_heads: int

    def rows(self, fits: str, targets: Iterable[str], make: RowMaker) -> dict[str, tuple[TileRow, ...]]:
        """The tuned tiles of a family's kernels.

        Args:
            fits: which kernels, `plan.fits`.
            targets: the spec's.
            make: makes a row of a tile.

        Returns:
            Rows of the tile table by target; no entry for a target without.

        Raises:
            SpecErrors: a file is off, or the spec's own is of other kernels: every error, at its line and column.
            LimitError: a tile needs more shared memory than the target gives a program.
        """
        self._check_names()
        kind = family_of(fits)
        found = {target: self._find(fits, target) for target in targets}
        rows = {target: _rows(each, kind, make) for target, each in found.items() if each is not None}
        return {target: each for target, each in rows.items() if each}

    def sm90_rows(self, fits: str, target: str) -> tuple[Sm90Row, ...] | None:
        """Which calls run a family's sm90 kernel; None where no sweep said so.

        Raises:
            SpecErrors: as of `rows`.
        """
        found = self._find(fits, target)
        kind = SM90_OF[family_of(fits)]
        rows = getattr(found.table, kind) if found else None
        return rows and tuple(Sm90Row(*(getattr(row, limit) for limit in SM90_LIMITS[kind])) for row in rows)

    def _find(self, fits: str, target: str) -> _Table | None:
        """The file whose table of these kernels is taken."""
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
        """The file, if it is there and its table is of these kernels."""
        if not path.is_file():
            return None
        table, document = read_checked(path, TunedTable)
        said = getattr(table.fits, kind)
        if said == fits:
            return _Table(path, table, document)
        if said is not None and path == tuned_path(self.spec_name, path.stem, self.folder):
            message = f"fits.{kind}: got '{said}'; takes '{fits}', which these kernels of {self.spec_name} are"
            hint = "tune the spec anew, or delete what is of other kernels"
            raise refuse([SpecError(message, place=place_at(path, document, "fits", kind), hint=hint)])
        return None

    def _order(self, found: _Table) -> tuple[bool, int, str]:
        heads = found.table.heads or 0
        return heads < self.num_heads, abs(heads - self.num_heads), found.path.parent.name

    def _check_names(self) -> None:
        for path in sorted(tuned_path(self.spec_name, "", self.folder).parent.glob("*.yaml")):
            if path.stem not in TARGETS:
                message = f"'{path.stem}' is no target; takes a file named after one of {', '.join(TARGETS)}"
                other = instead(path.stem)
                message += f"; {other}" if other else ""
                raise refuse([SpecError(message, place=Place(path))])


def _rows(found: _Table, kind: str, make: RowMaker) -> tuple[TileRow, ...]:
    rows = []
    for index, row in enumerate(getattr(found.table, kind) or ()):
        try:
            rows.append(_row(row, LIMITS[kind], found, make))
        except LimitError as error:
            place = place_at(found.path, found.document, kind, index)
            raise LimitError(error.message, place=place, hint=error.hint) from None
    return tuple(rows)


def _row(row: _TunedTile, limits: Sequence[str], found: _Table, make: RowMaker) -> TileRow:
    tile = Tile(**{name: getattr(row, name) for name in TILE_FIELDS})
    width, length = (getattr(row, limit) for limit in limits)
    made = make(tile, TARGETS[found.path.stem], found.reason, width, length)
    return replace(made, programs_per_sm=row.programs_per_sm)


def dump_tuned(
    spec_name: str,
    target: str,
    *,
    sparse_fwd: Sequence[TileRow] = (),
    sparse_decode: Sequence[TileRow] = (),
    dense_decode: Sequence[TileRow] = (),
    sparse_fwd_sm90: Sequence[Sm90Row] = (),
    sparse_decode_sm90: Sequence[Sm90Row] = (),
    dense_decode_sm90: Sequence[Sm90Row] = (),
    fits: Mapping[str, str],
    heads: int,
    device: str,
    triton: str,
) -> str:
    """The text of a tuned file, which `TunedFiles` reads back as the same rows but for their reasons.

    Args:
        spec_name, target: whose tiles.
        sparse_fwd, sparse_decode, dense_decode: rows of the tile tables of each family; each may be empty.
        sparse_fwd_sm90, sparse_decode_sm90, dense_decode_sm90: which calls of each run the sm90 kernel; empty: the
            default.
        fits: which kernels they hold for, by family, `Plan.fits`.
        heads: of the model that was swept.
        device: name of the device they were measured on.
        triton: version of Triton they were compiled with.
    """
    tables = {
        "sparse_fwd": (sparse_fwd, sparse_fwd_sm90),
        "sparse_decode": (sparse_decode, sparse_decode_sm90),
        "dense_decode": (dense_decode, dense_decode_sm90),
    }
    lines = [HEAD.format(spec_name, target, device, triton)]
    lines += SPARSE_FWD_NOTES if sparse_fwd or sparse_decode else ()
    lines += DENSE_DECODE_NOTES if dense_decode else ()
    lines.append(FITS_LINE)
    lines += [f"  {name}: {fits[name]}" for name, pair in tables.items() if any(pair)]
    lines += [f"heads: {heads} # of the model that was swept"]
    for name, table in zip(KINDS, (sparse_fwd, sparse_decode, dense_decode), strict=True):
        lines += [f"{name}:"] if table else []
        for row in table:
            limits = dict(zip(LIMITS[name], (row.max_heads, row.max_tokens), strict=True))
            values = {**limits, **asdict(row.tile), "programs_per_sm": row.programs_per_sm}
            lines.append(_flow_line({key: value for key, value in values.items() if value is not None}))
    for name, calls in zip(SM90_KINDS, (sparse_fwd_sm90, sparse_decode_sm90, dense_decode_sm90), strict=True):
        width, fewest = SM90_LIMITS[name]
        if calls:
            size = fewest.removeprefix("min_")
            lines += [f"{name}: # calls of so many {size} and more run the sm90 kernel; without {fewest} none do"]
        for call in calls:
            values = {width: call.max_heads, fewest: call.min_tokens}
            lines.append(_flow_line({key: value for key, value in values.items() if value}))
    return "\n".join(lines) + "\n"


def _flow_line(values: Mapping[str, object]) -> str:
    """A row of a table in YAML's flow style."""
    return f"  - {{{', '.join(f'{name}: {json.dumps(value)}' for name, value in values.items())}}}"
