"""Tiles that a sweep found, as files: `specs/tuned/<spec>/<target>.yaml`, which people may read, mend and check in."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, ValidationError, model_validator

from mlagen.errors import LimitError, Place, SpecError
from mlagen.plan.chunks import Chunk
from mlagen.plan.targets import TARGETS
from mlagen.plan.tiles import Tile, TileRow, make_row
from mlagen.spec.load import lies_within, place_of, read_text
from mlagen.spec.marked import read, refuse
from mlagen.spec.models import Model, refused
from mlagen.spec.prose import Guide


def _power_of_two(number: int) -> int:
    if number & (number - 1):
        raise refused(f"got {number}; takes a power of two")
    return number


TILE_FIELDS = tuple(field.name for field in fields(Tile))

Block = Annotated[int, Field(ge=16, le=256), AfterValidator(_power_of_two)]
Warps = Annotated[int, Field(ge=1, le=8), AfterValidator(_power_of_two)]


class TunedRow(Model):
    """One row of a tile table."""

    max_heads: Annotated[int | None, Field(ge=1, le=128, description="most heads a call may have; absent: any")] = None
    max_tokens: Annotated[int | None, Field(ge=1, le=1 << 30, description="most tokens; absent: any number")] = None
    block_h: Annotated[Block, Field(description="heads a program holds")]
    block_n: Annotated[Block, Field(description="indices a program takes a step")]
    num_warps: Annotated[Warps, Field(description="warps a program")]
    num_stages: Annotated[int, Field(ge=1, le=6, description="software-pipeline depth")]
    indices_ahead: Annotated[bool, Field(description="indices are loaded a step before they are used")]
    programs_per_sm: Annotated[
        int, Field(ge=1, le=64, description="programs that the split rule gives a multiprocessor at once")
    ]


class TunedTable(Model):
    """The tile table of one spec on one target; the first row that holds a call is taken."""

    rows: Annotated[tuple[TunedRow, ...], Field(min_length=1, description="by heads, then by tokens, most last")]

    @model_validator(mode="after")
    def _rows_hold_every_call(self) -> TunedTable:
        for index, row in enumerate(self.rows):
            last = index == len(self.rows) - 1
            following = (math.inf, math.inf) if last else _most(self.rows[index + 1])
            if not last and following <= _most(row):
                raise refused("takes rows in the order of their heads, then of their tokens", "rows", index + 1)
            if last and row.max_heads is not None:
                raise refused(f"got {row.max_heads}; takes none in the last row", "rows", index, "max_heads")
            if row.max_tokens is not None and (last or following[0] > _most(row)[0]):
                message = f"got {row.max_tokens}; takes none in the last row of its heads"
                raise refused(message, "rows", index, "max_tokens")
        return self


def _most(row: TunedRow) -> tuple[float, float]:
    """Most heads and tokens of a row."""
    return (row.max_heads or math.inf, row.max_tokens or math.inf)


def tuned_path(spec_name: str, target: str, specs_dir: Path) -> Path:
    """Where the tiles of a spec on a target are kept."""
    return specs_dir / "tuned" / spec_name / f"{target}.yaml"


def load_tuned(spec_name: str, specs_dir: Path, chunks: Sequence[Chunk]) -> dict[str, tuple[TileRow, ...]]:
    """Reads the tuned tiles of a spec.

    Args:
        spec_name: the spec's name.
        specs_dir: folder of the specs, which holds `tuned/`.
        chunks: blocks of a row, `plan.sparse.chunks`.

    Returns:
        Rows of the tile table by target; no entry for a target without a file.

    Raises:
        SpecErrors: a file is off: every error of it, at its line and column.
        LimitError: a tile needs more shared memory than the target gives a program.
    """
    folder = tuned_path(spec_name, "", specs_dir).parent
    return {path.stem: _load(path, chunks) for path in sorted(folder.glob("*.yaml"))}


def _load(path: Path, chunks: Sequence[Chunk]) -> tuple[TileRow, ...]:
    if path.stem not in TARGETS:
        message = f"'{path.stem}' is no target; takes a file named after one of {', '.join(TARGETS)}"
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
    rows = []
    for index, row in enumerate(table.rows):
        try:
            rows.append(_row(row, path, chunks))
        except LimitError as error:
            mark = document.values["rows", index]
            raise LimitError(error.message, place=Place(path, mark.line, mark.column), hint=error.hint) from None
    return tuple(rows)


def _row(row: TunedRow, path: Path, chunks: Sequence[Chunk]) -> TileRow:
    tile = Tile(**{name: getattr(row, name) for name in TILE_FIELDS})
    reason = f"tuned: {Path(*path.parts[-3:])}"
    made = make_row(tile, chunks, TARGETS[path.stem], reason, row.max_heads, row.max_tokens)
    return replace(made, programs_per_sm=row.programs_per_sm)


def dump_tuned(spec_name: str, target: str, rows: Sequence[TileRow], *, device: str, triton: str) -> str:
    """The text of a tuned file, which `load_tuned` reads back as the same rows but for their reasons.

    Args:
        spec_name, target: whose tiles.
        rows: rows of the tile table.
        device: name of the device they were measured on.
        triton: version of Triton they were compiled with.
    """
    lines = [
        f"# Tiles of {spec_name} on {target}, measured on {device} with triton {triton}. Written by `mlagen tune`.",
        "# The first row that holds a call's heads and tokens is taken; without max_heads or max_tokens it holds any.",
        "# programs_per_sm is what the split rule plans with; picked so that the rule finds the best splits.",
        "rows:",
    ]
    for row in rows:
        model = TunedRow(
            max_heads=row.max_heads,
            max_tokens=row.max_tokens,
            **asdict(row.tile),
            programs_per_sm=row.programs_per_sm,
        )
        values = model.model_dump(exclude_none=True)
        entries = ", ".join(f"{name}: {json.dumps(value)}" for name, value in values.items())
        lines.append(f"  - {{{entries}}}")
    return "\n".join(lines) + "\n"
