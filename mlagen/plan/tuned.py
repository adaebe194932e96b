"""Tiles that a sweep found, as files: `specs/tuned/<spec>/<target>.yaml`, which people may read, mend and check in."""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, ValidationError, model_validator

from mlagen.errors import LimitError, Place, SpecError
from mlagen.plan.chunks import Chunk
from mlagen.plan.hopper import HopperRow
from mlagen.plan.kvcache import CachedRow
from mlagen.plan.targets import TARGETS, Target
from mlagen.plan.tiles import Tile, TileRow, make_row
from mlagen.spec.load import lies_within, place_of, read_text
from mlagen.spec.marked import Document, read, refuse
from mlagen.spec.models import Model, refused
from mlagen.spec.prose import Guide
from mlagen.spec.targets import instead


def _power_of_two(number: int) -> int:
    if number & (number - 1):
        raise refused(f"got {number}; takes a power of two")
    return number


# Tables by kind of attention, and what says in each which calls a row holds.
LIMITS = {
    "rows": ("max_heads", "max_tokens"),
    "kvcache_rows": ("max_heads", "max_tokens"),
    "dense_rows": ("max_rows", "max_requests"),
}
KINDS = tuple(LIMITS)
SPARSE_NOTES = (
    "# The first row that holds a call's heads and tokens is taken; without max_heads or max_tokens it holds any.",
    "# programs_per_sm is what the split rule plans with; picked so that the rule finds the best splits.",
)
DENSE_NOTES = (
    "# The first row that holds a call's rows, which are the heads of its query tokens that share a KV head, and its",
    "# requests is taken; without max_rows or max_requests it holds any.",
    "# programs_per_sm is how many programs a multiprocessor a batch is shared out to.",
)
# The same of the tables that say which calls run a Hopper kernel.
HOPPER_LIMITS = {
    "hopper_rows": ("max_heads", "min_tokens"),
    "kvcache_hopper_rows": ("max_heads", "min_tokens"),
    "dense_hopper_rows": ("max_rows", "min_requests"),
}
HOPPER_KINDS = tuple(HOPPER_LIMITS)
TILE_FIELDS = tuple(field.name for field in fields(Tile))

RowMaker = Callable[[Tile, Target, str, int | None, int | None], TileRow]

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


class TunedDenseRow(_TunedTile):
    """One row of the tile table of dense attention."""

    max_rows: MaxRows = None
    max_requests: Annotated[int | None, Field(ge=1, le=1 << 30, description="most requests; absent: any number")] = None


class TunedHopperRow(Model):
    """From how many tokens on calls of up to so many heads run the Hopper kernel."""

    max_heads: Annotated[int | None, Field(ge=1, le=128, description="most heads a call may have; absent: any")] = None
    min_tokens: Annotated[int | None, Field(ge=1, le=1 << 30, description="fewest tokens; absent: none do")] = None


class TunedDenseHopperRow(Model):
    """From how many requests on calls of up to so many rows a KV head run the Hopper kernel of dense attention."""

    max_rows: MaxRows = None
    min_requests: Annotated[int | None, Field(ge=1, le=1 << 30, description="fewest requests; absent: none do")] = None


class TunedTable(Model):
    """The tile tables of one spec on one target; the first row that holds a call is taken."""

    rows: Annotated[
        tuple[TunedRow, ...] | None,
        Field(min_length=1, description="of attention over rows, by heads, then by tokens, most last"),
    ] = None
    kvcache_rows: Annotated[
        tuple[TunedRow, ...] | None, Field(min_length=1, description="of attention over a cache, likewise")
    ] = None
    dense_rows: Annotated[
        tuple[TunedDenseRow, ...] | None,
        Field(min_length=1, description="of dense attention, by rows a KV head, then by requests, most last"),
    ] = None
    hopper_rows: Annotated[
        tuple[TunedHopperRow, ...] | None,
        Field(min_length=1, description="of attention over rows: which calls run the Hopper kernel, by heads"),
    ] = None
    kvcache_hopper_rows: Annotated[
        tuple[TunedHopperRow, ...] | None, Field(min_length=1, description="of attention over a cache, likewise")
    ] = None
    dense_hopper_rows: Annotated[
        tuple[TunedDenseHopperRow, ...] | None,
        Field(min_length=1, description="of dense attention: which calls run the Hopper kernel, by rows a KV head"),
    ] = None

    @model_validator(mode="after")
    def _rows_hold_every_call(self) -> TunedTable:
        if all(getattr(self, name) is None for name in (*KINDS, *HOPPER_KINDS)):
            raise refused(f"has no table; takes one or more of {', '.join((*KINDS, *HOPPER_KINDS))}")
        for name in KINDS:
            _check_rows(name, getattr(self, name) or ())
        for name in HOPPER_KINDS:
            _check_hopper_rows(name, getattr(self, name) or ())
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


def _check_hopper_rows(name: str, rows: tuple[TunedHopperRow | TunedDenseHopperRow, ...]) -> None:
    width, _ = HOPPER_LIMITS[name]
    most = [getattr(row, width) or math.inf for row in rows]
    for index, (here, after) in enumerate(itertools.pairwise(most)):
        if after <= here:
            raise refused(f"takes rows in the order of their {width.removeprefix('max_')}", name, index + 1)
    if most and most[-1] < math.inf:
        raise refused(f"got {most[-1]}; takes none in the last row", name, len(most) - 1, width)


def tuned_path(spec_name: str, target: str, specs_dir: Path) -> Path:
    """Where the tiles of a spec on a target are kept."""
    return specs_dir / "tuned" / spec_name / f"{target}.yaml"


def load_tuned(spec_name: str, specs_dir: Path, chunks: Sequence[Chunk]) -> dict[str, tuple[TileRow, ...]]:
    """Reads the tuned tiles of a spec's attention over rows.

    Args:
        spec_name: the spec's name.
        specs_dir: folder of the specs, which holds `tuned/`.
        chunks: blocks of a row, `plan.sparse.chunks`.

    Returns:
        Rows of the tile table by target; no entry for a target without.

    Raises:
        SpecErrors: a file is off: every error of it, at its line and column.
        LimitError: a tile needs more shared memory than the target gives a program.
    """
    return _load_all("rows", spec_name, specs_dir, functools.partial(_sparse_row, chunks))


def load_tuned_kvcache(spec_name: str, specs_dir: Path, cached: CachedRow) -> dict[str, tuple[TileRow, ...]]:
    """Reads the tuned tiles of a spec's attention over a cache, as `load_tuned` does; `cached` is its row's."""
    return _load_all("kvcache_rows", spec_name, specs_dir, cached.row)


def load_tuned_dense(spec_name: str, specs_dir: Path, cached: CachedRow) -> dict[str, tuple[TileRow, ...]]:
    """Reads the tuned tiles of a spec's dense attention, as `load_tuned_kvcache` does."""
    return _load_all("dense_rows", spec_name, specs_dir, cached.row)


def load_tuned_hopper(kind: str, spec_name: str, specs_dir: Path, target: str) -> tuple[HopperRow, ...] | None:
    """Reads which calls run a Hopper kernel, `kind` being one of HOPPER_KINDS; None where no sweep said so.

    Raises:
        SpecErrors: the file is off: every error of it, at its line and column.
    """
    path = tuned_path(spec_name, target, specs_dir)
    if not path.is_file():
        return None
    rows = getattr(_table(path)[0], kind)
    return rows and tuple(HopperRow(*(getattr(row, limit) for limit in HOPPER_LIMITS[kind])) for row in rows)


def _sparse_row(
    chunks: Sequence[Chunk], tile: Tile, target: Target, reason: str, max_heads: int | None, max_tokens: int | None
) -> TileRow:
    return make_row(tile, chunks, target, reason, max_heads, max_tokens)


def _load_all(kind: str, spec_name: str, specs_dir: Path, make: RowMaker) -> dict[str, tuple[TileRow, ...]]:
    folder = tuned_path(spec_name, "", specs_dir).parent
    found = {path.stem: _load(path, kind, make) for path in sorted(folder.glob("*.yaml"))}
    return {target: rows for target, rows in found.items() if rows}


def _load(path: Path, kind: str, make: RowMaker) -> tuple[TileRow, ...]:
    table, document = _table(path)
    rows = []
    for index, row in enumerate(getattr(table, kind) or ()):
        try:
            rows.append(_row(row, LIMITS[kind], path, make))
        except LimitError as error:
            mark = document.values[kind, index]
            raise LimitError(error.message, place=Place(path, mark.line, mark.column), hint=error.hint) from None
    return tuple(rows)


def _table(path: Path) -> tuple[TunedTable, Document]:
    if path.stem not in TARGETS:
        message = f"'{path.stem}' is no target; takes a file named after one of {', '.join(TARGETS)}"
        other = instead(path.stem)
        message += f"; {other}" if other else ""
        raise refuse([SpecError(message, place=Place(path))])
    document = read(read_text(path), path)
    table, findings = None, []
    try:
        table = TunedTable.model_validate(document.data)
    except ValidationError as error:
        guide = Guide(TunedTable.model_json_schema(), document.data, document.plain)
        findings = guide.findings(error.errors(include_url=False))
    errors = list(document.errors)
    for finding in findings:
        if not lies_within(finding.loc, document.unread):
            mark = place_of(finding, document)
            errors.append(SpecError(str(finding), place=Place(path, mark.line, mark.column)))
    if table is None or errors:
        raise refuse(errors)
    return table, document


def _row(row: _TunedTile, limits: Sequence[str], path: Path, make: RowMaker) -> TileRow:
    tile = Tile(**{name: getattr(row, name) for name in TILE_FIELDS})
    reason = f"tuned: {Path(*path.parts[-3:])}"
    width, length = (getattr(row, limit) for limit in limits)
    made = make(tile, TARGETS[path.stem], reason, width, length)
    return replace(made, programs_per_sm=row.programs_per_sm)


def dump_tuned(
    spec_name: str,
    target: str,
    rows: Sequence[TileRow],
    *,
    kvcache_rows: Sequence[TileRow] = (),
    dense_rows: Sequence[TileRow] = (),
    hopper_rows: Sequence[HopperRow] = (),
    kvcache_hopper_rows: Sequence[HopperRow] = (),
    dense_hopper_rows: Sequence[HopperRow] = (),
    device: str,
    triton: str,
) -> str:
    """The text of a tuned file, which `load_tuned` reads back as the same rows but for their reasons.

    Args:
        spec_name, target: whose tiles.
        rows, kvcache_rows, dense_rows: rows of the tile tables of attention over rows, over a cache, and of dense
            attention; each may be empty.
        hopper_rows, kvcache_hopper_rows, dense_hopper_rows: which calls of each run the Hopper kernel; empty: the
            default.
        device: name of the device they were measured on.
        triton: version of Triton they were compiled with.
    """
    lines = [
        f"# Tiles of {spec_name} on {target}, measured on {device} with triton {triton}. Written by `mlagen tune`.",
    ]
    lines += SPARSE_NOTES if rows or kvcache_rows else ()
    lines += DENSE_NOTES if dense_rows else ()
    for name, table in zip(KINDS, (rows, kvcache_rows, dense_rows), strict=True):
        lines += [f"{name}:"] if table else []
        for row in table:
            limits = dict(zip(LIMITS[name], (row.max_heads, row.max_tokens), strict=True))
            values = {**limits, **asdict(row.tile), "programs_per_sm": row.programs_per_sm}
            lines.append(_flow_line({key: value for key, value in values.items() if value is not None}))
    for name, calls in zip(HOPPER_KINDS, (hopper_rows, kvcache_hopper_rows, dense_hopper_rows), strict=True):
        width, fewest = HOPPER_LIMITS[name]
        if calls:
            size = fewest.removeprefix("min_")
            lines += [f"{name}: # calls of so many {size} and more run the Hopper kernel; without {fewest} none do"]
        for call in calls:
            values = {width: call.max_heads, fewest: call.min_tokens}
            lines.append(_flow_line({key: value for key, value in values.items() if value}))
    return "\n".join(lines) + "\n"


def _flow_line(values: Mapping[str, object]) -> str:
    """A row of a table in YAML's flow style."""
    return f"  - {{{', '.join(f'{name}: {json.dumps(value)}' for name, value in values.items())}}}"
