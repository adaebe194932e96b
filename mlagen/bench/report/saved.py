"""Rows of an earlier run, read from its JSON: a file that anyone may have written."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PositiveInt, TypeAdapter
from pydantic import ValidationError as Invalid

from mlagen.bench.families.candidates import CandidateShape
from mlagen.bench.families.dense_decode import DenseDecodeShape
from mlagen.bench.families.dense_fwd import DenseFwdShape
from mlagen.bench.families.indexer_select import PickShape
from mlagen.bench.families.layer import LayerShape
from mlagen.bench.families.merge_states import MergeStatesShape
from mlagen.bench.families.mqa_logits import LogitsShape
from mlagen.bench.families.sparse_decode import SparseDecodeShape
from mlagen.bench.families.sparse_fwd import SharedShape, SparseFwdShape
from mlagen.bench.families.topk import TopkShape
from mlagen.bench.report.rows import Contender, Key, Row
from mlagen.bench.roofline import Roof
from mlagen.bench.shapes import Batch
from mlagen.bench.trial import OURS, Sizes
from mlagen.errors import Place, UsageError


def _printable(text: str) -> str:
    return "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text)


_Text = Annotated[str, Field(min_length=1, max_length=500), AfterValidator(_printable)]
_Seconds = Annotated[float, Field(gt=1e-9, lt=1e6)]
_Ratio = Annotated[float, Field(gt=1e-6, lt=1e6)]
_Spread = Annotated[float, Field(ge=0, lt=1e6)]
_Rate = Annotated[float, Field(gt=1, lt=1e24)]

_CONFIG = ConfigDict(strict=True, allow_inf_nan=False, extra="ignore")
# Classes with more fields come first.
_SHAPES: tuple[type[Any], ...] = (
    SharedShape,
    SparseFwdShape,
    SparseDecodeShape,
    DenseDecodeShape,
    MergeStatesShape,
    DenseFwdShape,
    CandidateShape,
    LayerShape,
    TopkShape,
    PickShape,
    LogitsShape,
    Batch,
)
_RENAMED = {"lanes": "columns"}  # fields of shapes, in older files
_ORIGIN = re.compile(r"(?:([1-9][\d,]{0,9}) TFLOP/s, )?([1-9][\d,]{0,9}) GB/s")  # all that older files say of a roof


class _Contender(BaseModel):
    model_config = _CONFIG

    name: _Text
    seconds: _Seconds | None = None
    ratio: _Ratio | None = None
    method: _Text | None = None
    eager_seconds: _Seconds | None = None
    error: float | None = None
    absent: _Text | None = None
    spread: _Spread | None = None
    ratio_spread: _Spread | None = None
    cool_seconds: _Seconds | None = None
    behind_seconds: _Seconds | None = None
    behind_ratio: _Ratio | None = None
    behind_spread: _Spread | None = None


class _Row(BaseModel):
    model_config = _CONFIG

    package: _Text
    device: _Text
    shape: dict[str, _Text | Annotated[int, Field(ge=0, lt=2**48)]]
    flops: int = Field(ge=0, lt=10**24)
    bytes_moved: int = Field(ge=1, lt=10**24)
    roof_origin: _Text
    roof_flops_per_s: _Rate | None = None
    roof_bytes_per_s: _Rate | None = None
    contenders: list[_Contender] = Field(min_length=1)
    torch: _Text | None = None
    triton: _Text | None = None
    rounds: PositiveInt | None = None
    driver: _Text | None = None
    date: _Text | None = None
    commit: _Text | None = None
    peers: list[_Text] | None = None
    kernels: _Text | None = None


def read_rows(path: Path) -> list[Row]:
    """The rows of a file that `mlagen bench --json` wrote, also of versions that wrote less.

    Raises:
        UsageError: it cannot be read, or holds something else; names the row and the key.
    """
    try:
        saved = TypeAdapter(list[_Row]).validate_json(path.read_bytes())
        rows = []
        for number, each in enumerate(saved):
            try:
                rows.append(_row(each))
            except ValueError as error:
                raise ValueError(f"[{number}].{error}") from error
    except OSError as error:
        raise UsageError(f"cannot be read: {error.strerror}", place=Place(path)) from error
    except Invalid as error:
        first = error.errors(include_url=False)[0]
        where = "".join(f"[{part}]" if isinstance(part, int) else f".{_printable(part)}" for part in first["loc"])
        message = f"{where or 'the file'}: {first['msg']}; takes what `mlagen bench --json` wrote"
        raise UsageError(message, place=Place(path)) from error
    except ValueError as error:
        raise UsageError(str(error), place=Place(path)) from error
    if not rows:
        raise UsageError("holds no rows; takes what `mlagen bench --json` wrote", place=Place(path))
    return rows


def rows_of_files(paths: Iterable[Path]) -> list[Row]:
    """The rows of several files; of a shape that is measured in two of them, the later one's row.

    Raises:
        UsageError: a file does not read, or they are of several devices.
    """
    rows: dict[Key, Row] = {row.key: row for path in paths for row in read_rows(path)}
    devices = sorted({row.device for row in rows.values()})
    if len(devices) > 1:
        raise UsageError(f"rows of several devices: {', '.join(devices)}; takes those of one")
    return list(rows.values())


def _row(saved: _Row) -> Row:
    contenders = tuple(Contender(**each.model_dump()) for each in saved.contenders)
    if contenders[0].name != OURS:
        raise ValueError(f"contenders[0].name: got {contenders[0].name!r}; takes {OURS!r}")
    given = {"package", "device", "flops", "bytes_moved", "torch", "triton", "rounds", "driver", "date", "commit"}
    given.add("kernels")
    return Row(
        **saved.model_dump(include=given),
        shape=_shape(saved.shape),
        roof=_roof(saved),
        contenders=contenders,
        peers=None if saved.peers is None else tuple(saved.peers),
    )


def _shape(given: Mapping[str, Any]) -> Sizes:
    """The shape of a class with fields of the given names; a class's properties may be among them."""
    given = {_RENAMED.get(name, name): value for name, value in given.items()}
    for kind in _SHAPES:
        names = {field.name for field in fields(kind)}
        if names - {field.name for field in fields(kind) if field.default is not MISSING} <= given.keys():
            try:
                # As JSON, since strict Python would take only a SparseFwdShape.
                text = json.dumps({name: given[name] for name in names & given.keys()})
                shape: Sizes = TypeAdapter(kind).validate_json(text, strict=True)
            except Invalid as error:
                first = error.errors(include_url=False)[0]
                raise ValueError(f"shape.{first['loc'][0]}: {first['msg']}") from error
            return shape
    raise ValueError(f"shape: got the keys {', '.join(map(repr, given))}; takes those of a shape")


def _roof(saved: _Row) -> Roof:
    if saved.roof_bytes_per_s is not None:
        return Roof(saved.roof_flops_per_s or math.inf, saved.roof_bytes_per_s, saved.roof_origin)
    found = _ORIGIN.match(saved.roof_origin)
    if not found:
        raise ValueError(f"roof_origin: got {saved.roof_origin!r}; takes '690 TFLOP/s, 4,445 GB/s: ...'")
    tera, giga = (float(text.replace(",", "")) if text else math.inf for text in found.groups())
    return Roof(tera * 1e12, giga * 1e9, saved.roof_origin)
