"""How a cache is stored: layouts of known fields, those that have a name, and the caches of a spec."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from mlagen.layout import LayoutError, compose
from mlagen.spec.base import Dtype, Model
from mlagen.spec.marked import dotted, read
from mlagen.spec.rules import refused

DataDtype = Literal["bf16", "fp16", "e4m3", "e4m3fnuz", "e2m1"]
DataKind = Literal["latent", "rope", "row"]


class LatentField(Model):
    """The latent columns of a KV row."""

    kind: Annotated[Literal["latent"], Field(description="what the field holds")]
    dtype: Annotated[
        DataDtype, Field(description="how a column is stored; e2m1: two a byte, the even column in the low half")
    ]


class RopeField(Model):
    """The RoPE columns of a KV row; left out where the model has none."""

    kind: Annotated[Literal["rope"], Field(description="what the field holds")]
    dtype: Annotated[
        DataDtype, Field(description="how a column is stored; e2m1: two a byte, the even column in the low half")
    ]


class RowField(Model):
    """Latent and RoPE columns as one run."""

    kind: Annotated[Literal["row"], Field(description="what the field holds")]
    dtype: Annotated[
        DataDtype, Field(description="how a column is stored; e2m1: two a byte, the even column in the low half")
    ]


ROUNDING = "power_of_two: up to the next one, exponent from the bits; nearest: to the stored dtype"
DIVISOR = "the scale is amax / divisor, so divisor is at most the largest value of the scaled dtype"
FLOOR = "smallest value of what floor_on names, so that a tile of zeros has a scale"
FLOOR_ON = "amax: floor before the division; scale: after it"
Rounding = Literal["power_of_two", "nearest"]
Divisor = Annotated[float, Field(ge=1, le=448, allow_inf_nan=False)]
Floor = Annotated[float, Field(gt=0, le=448, allow_inf_nan=False)]
FloorOn = Literal["amax", "scale"]


class ScaleRule(Model):
    """How writers find a scale from amax, the largest magnitude in its tile."""

    rounding: Annotated[Rounding, Field(description=ROUNDING)]
    divisor: Annotated[Divisor, Field(description=DIVISOR)]
    floor: Annotated[Floor, Field(description=FLOOR)]
    floor_on: Annotated[FloorOn, Field(description=FLOOR_ON)]


class ScaleRuleChanges(Model):
    """What of a layout's scale rule a cache's writers do otherwise; readers take any scale."""

    rounding: Annotated[Rounding | None, Field(description=ROUNDING)] = None
    divisor: Annotated[Divisor | None, Field(description=DIVISOR)] = None
    floor: Annotated[Floor | None, Field(description=FLOOR)] = None
    floor_on: Annotated[FloorOn | None, Field(description=FLOOR_ON)] = None


class ScalesField(ScaleRule):
    """One scale for each tile of columns of another field."""

    kind: Annotated[Literal["scales"], Field(description="what the field holds")]
    of: Annotated[DataKind, Field(description="the field whose columns they scale")]
    dtype: Annotated[Literal["fp32", "ue8m0", "e4m3"], Field(description="how a scale is stored")]
    tile: Annotated[Literal[16, 32, 64, 128, 256, 512], Field(description="columns a scale covers")]
    interleave: Annotated[
        int,
        Field(ge=1, le=64, description="scale s of n is stored at s % interleave * (n / interleave) + s // interleave"),
    ] = 1


class TensorScaleField(Model):
    """One fp32 scale a tensor, which callers pass; it takes no byte of the row."""

    kind: Annotated[Literal["tensor_scale"], Field(description="what the field holds")]
    of: Annotated[DataKind, Field(description="the field whose columns it scales")]


class PadField(Model):
    """Bytes without meaning, which writers set to 0."""

    kind: Annotated[Literal["pad"], Field(description="what the field holds")]
    bytes: Annotated[int, Field(ge=1, le=4096, description="how many")]


LayoutField = Annotated[
    LatentField | RopeField | RowField | ScalesField | TensorScaleField | PadField, Field(discriminator="kind")
]


class Layout(Model):
    """A cached token's bytes, field by field, end to end; `mlagen show layout` prints where each one is."""

    name: Annotated[
        str,
        Field(
            pattern=r"^[a-z][a-z0-9_]{0,62}$",
            description="name in the package's SPEC and fingerprint",
            json_schema_extra={
                "patternErrorMessage": "a lower-case letter, then up to 62 lower-case letters, digits or underscores"
            },
        ),
    ]
    fields: Annotated[
        tuple[LayoutField, ...], Field(min_length=1, max_length=16, description="the token's row, in byte order")
    ]
    planar_fields: Annotated[
        tuple[LayoutField, ...],
        Field(max_length=16, description="its second row, behind the rows of all tokens of the page"),
    ] = ()
    page_multiple: Annotated[
        Literal["row"] | Annotated[int, Field(ge=1, le=1 << 20)],
        Field(description="a page's bytes are rounded up to a multiple of this; row: of the bytes of `fields`"),
    ] = 1


def _read_layouts(folder: Path) -> dict[str, Any]:
    documents = [read(path.read_text(encoding="utf-8"), path).data for path in sorted(folder.glob("*.yaml"))]
    return {document["name"]: document for document in documents}


_FOLDER = Path(__file__).parent / "layouts"
_KV, _INDEXER = _read_layouts(_FOLDER), _read_layouts(_FOLDER / "indexer")
# What a spec would say in place of each name, of a KV cache and of an indexer's.
NAMED_LAYOUTS, INDEXER_LAYOUTS = (
    {name: {key: part for key, part in found.items() if key != "dims"} for name, found in documents.items()}
    for documents in (_KV, _INDEXER)
)
# (kv_lora_rank, qk_rope_head_dim) of the models that keep their cache so; of an indexer's, its head_dim and 0.
LAYOUT_DIMS: dict[str, tuple[tuple[int, int], ...]] = {name: found["dims"] for name, found in _KV.items()}
INDEXER_DIMS: dict[str, tuple[tuple[int, int], ...]] = {name: found["dims"] for name, found in _INDEXER.items()}
LayoutName: Any = Literal[tuple(NAMED_LAYOUTS)]
IndexerLayoutName: Any = Literal[tuple(INDEXER_LAYOUTS)]


def _named_layout(value: Any) -> Any:
    return NAMED_LAYOUTS.get(value, value) if isinstance(value, str) else value


def named_indexer_layout(value: Any) -> Any:
    """The fields of an indexer's layout that is given by its name; anything else as it is."""
    return INDEXER_LAYOUTS.get(value, value) if isinstance(value, str) else value


@functools.cache
def _named(name: str) -> Layout:
    return Layout.model_validate((NAMED_LAYOUTS | INDEXER_LAYOUTS)[name])


def under_a_name_of_its_own(layout: Layout) -> Layout:
    """A layout, unless it is another than the one that its name stands for."""
    if layout.name in NAMED_LAYOUTS | INDEXER_LAYOUTS and layout != _named(layout.name):
        raise refused(f"got '{layout.name}', which names another layout; takes a name of its own", "name")
    return layout


class Cache(Model):
    """A KV cache."""

    layout: Annotated[
        Layout,
        BeforeValidator(_named_layout, json_schema_input_type=LayoutName | Layout),
        AfterValidator(under_a_name_of_its_own),
        Field(description="how a cached token is stored: a name, or a mapping of fields"),
    ]
    block_size: Annotated[
        int | None,
        Field(
            ge=1,
            le=4096,
            description="tokens a page; absent: kernels over unquantised rows take them flat, [s_kv, 1, d_qk]",
        ),
    ] = None
    scale_rule: Annotated[
        ScaleRuleChanges | None, Field(description="what of the layout's scale rule writers do otherwise")
    ] = None


def check_layout(cache: Cache, dims: tuple[int, int], dtype: Dtype) -> None:
    """Refuses a layout that cannot hold the model's rows, or a scale rule that cannot be its.

    Args:
        cache: the cache.
        dims: latent and RoPE columns of a row.
        dtype: of columns that are not quantised, `model.dtype`.
    """
    composition = cache.layout.model_dump()
    try:
        layout = compose(composition, *dims)
    except LayoutError as error:
        if cache.layout.name not in NAMED_LAYOUTS | INDEXER_LAYOUTS:
            raise refused(str(error), "layout", *error.at) from None
        message = f"got '{cache.layout.name}', which does not fit the model: {dotted(error.at)}: {error}"
        raise refused(message, "layout") from None
    for field in layout.data:
        if not field.quantised and field.dtype != dtype:
            message = f"got '{layout.name}', which holds {field.name} columns in {field.dtype}"
            raise refused(f"{message}; takes {dtype} there, model.dtype, or fewer bits", "layout")
    changes = cache.scale_rule.model_dump(exclude_none=True) if cache.scale_rule else {}
    if changes and not any(layout.scales_of(field) for field in layout.data):
        raise refused(f"got a rule; takes none: {layout.name} has no scales a tile", "scale_rule")
    try:
        compose(composition, *dims, changes)
    except LayoutError as error:
        raise refused(str(error), "scale_rule", *(name for name in error.at[-1:] if name in changes)) from None
