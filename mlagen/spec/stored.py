"""Layouts of caches: fields, named layouts, and the caches of a spec."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, SerializerFunctionWrapHandler, model_serializer

from mlagen.layout import LayoutError, compose
from mlagen.spec.base import Dtype, Model
from mlagen.spec.marked import dotted, read
from mlagen.spec.rules import refused

DataDtype = Literal["bf16", "fp16", "e4m3", "e4m3fnuz", "e2m1"]
DataKind = Literal["latent", "rope", "row"]
TensorName = Literal["kpe_cache", "ckv_scale_arr"]  # FlashInfer's names


class StoredField(Model):
    """A field with bytes of its own."""

    tensor: Annotated[
        TensorName | None,
        Field(description="tensor of its own that holds the field, an argument of wrappers; default: the cache tensor"),
    ] = None

    @model_serializer(mode="wrap")
    def _names_a_tensor_that_is_there(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out an absent `tensor`: the specs of packages without one, and their digests, are older than it."""
        found: dict[str, Any] = handler(self)
        found.pop("tensor", None)
        return found if self.tensor is None else {**found, "tensor": self.tensor}


class LatentField(StoredField):
    """The latent columns of a KV row."""

    kind: Annotated[Literal["latent"], Field(description="content of the field")]
    dtype: Annotated[
        DataDtype, Field(description="dtype of a column; e2m1 packs two columns per byte, the even one in the low half")
    ]


class RopeField(StoredField):
    """The RoPE columns of a KV row; left out if the model has none."""

    kind: Annotated[Literal["rope"], Field(description="content of the field")]
    dtype: Annotated[
        DataDtype, Field(description="dtype of a column; e2m1 packs two columns per byte, the even one in the low half")
    ]


class RowField(StoredField):
    """Latent and RoPE columns, end to end."""

    kind: Annotated[Literal["row"], Field(description="content of the field")]
    dtype: Annotated[
        DataDtype, Field(description="dtype of a column; e2m1 packs two columns per byte, the even one in the low half")
    ]


ROUNDING = "power_of_two: rounds up to a power of two; nearest: rounds to the stored dtype"
DIVISOR = "the scale is amax / divisor; at most the largest value of the quantised dtype"
FLOOR = "lower bound, so that a tile of zeros has a scale; floor_on names the bounded value"
FLOOR_ON = "amax: floor amax before the division; scale: floor the scale after it"
Rounding = Literal["power_of_two", "nearest"]
Divisor = Annotated[float, Field(ge=1, le=448, allow_inf_nan=False)]
Floor = Annotated[float, Field(gt=0, le=448, allow_inf_nan=False)]
FloorOn = Literal["amax", "scale"]


class ScaleRule(Model):
    """Rule for scales: how writers compute one from amax, the largest magnitude in its tile."""

    rounding: Annotated[Rounding, Field(description=ROUNDING)]
    divisor: Annotated[Divisor, Field(description=DIVISOR)]
    floor: Annotated[Floor, Field(description=FLOOR)]
    floor_on: Annotated[FloorOn, Field(description=FLOOR_ON)]


class ScaleRuleChanges(Model):
    """Changes to a layout's scale rule, for the writers of one cache. Readers accept any scale."""

    rounding: Annotated[Rounding | None, Field(description=ROUNDING)] = None
    divisor: Annotated[Divisor | None, Field(description=DIVISOR)] = None
    floor: Annotated[Floor | None, Field(description=FLOOR)] = None
    floor_on: Annotated[FloorOn | None, Field(description=FLOOR_ON)] = None


class ScalesField(StoredField, ScaleRule):
    """Scales of another field, one per tile of columns."""

    kind: Annotated[Literal["scales"], Field(description="content of the field")]
    of: Annotated[DataKind, Field(description="kind of the scaled field")]
    dtype: Annotated[Literal["fp32", "ue8m0", "e4m3"], Field(description="dtype of a scale")]
    tile: Annotated[Literal[16, 32, 64, 128, 256, 512], Field(description="columns per scale")]
    interleave: Annotated[
        int,
        Field(
            ge=1,
            le=64,
            description="scale s of n is stored at position s % interleave * (n / interleave) + s // interleave",
        ),
    ] = 1


class TensorScaleField(Model):
    """One fp32 scale per tensor, passed by callers. It takes no byte of the row."""

    kind: Annotated[Literal["tensor_scale"], Field(description="content of the field")]
    of: Annotated[DataKind, Field(description="kind of the scaled field")]


class PadField(StoredField):
    """Unused bytes, which writers set to 0."""

    kind: Annotated[Literal["pad"], Field(description="content of the field")]
    bytes: Annotated[int, Field(ge=1, le=4096, description="number of bytes")]


LayoutField = Annotated[
    LatentField | RopeField | RowField | ScalesField | TensorScaleField | PadField, Field(discriminator="kind")
]


class Layout(Model):
    """The fields of a cached token, end to end. `mlagen show layout` prints the position of each byte."""

    name: Annotated[
        str,
        Field(
            pattern=r"^[a-z][a-z0-9_]{0,62}$",
            description="name of the layout, in the package's SPEC and fingerprint",
            json_schema_extra={
                "patternErrorMessage": "a lower-case letter, then up to 62 lower-case letters, digits or underscores"
            },
        ),
    ]
    fields: Annotated[
        tuple[LayoutField, ...],
        Field(min_length=1, max_length=16, description="fields of a token's row, in byte order"),
    ]
    planar_fields: Annotated[
        tuple[LayoutField, ...],
        Field(
            max_length=16,
            description="fields of a token's second row. These rows follow the rows of all tokens of the page",
        ),
    ] = ()
    page_multiple: Annotated[
        Literal["row"] | Annotated[int, Field(ge=1, le=1 << 20)],
        Field(description="bytes of a page are rounded up to a multiple of this; row: the bytes of `fields`"),
    ] = 1

    @property
    def tensors(self) -> tuple[str, ...]:
        """The tensors besides the cache tensor that fields lie in."""
        named = (getattr(field, "tensor", None) for field in self.fields)
        return tuple(dict.fromkeys(name for name in named if name is not None))


def _read_layouts(folder: Path) -> dict[str, Any]:
    documents = [read(path.read_text(encoding="utf-8"), path).data for path in sorted(folder.glob("*.yaml"))]
    return {document["name"]: document for document in documents}


_FOLDER = Path(__file__).parent / "layouts"
_KV, _INDEXER = _read_layouts(_FOLDER), _read_layouts(_FOLDER / "indexer")
# The inline layout behind each name, for KV caches and for indexer caches.
NAMED_LAYOUTS, INDEXER_LAYOUTS = (
    {name: {key: part for key, part in found.items() if key != "dims"} for name, found in documents.items()}
    for documents in (_KV, _INDEXER)
)
# (kv_lora_rank, qk_rope_head_dim) of the models that use a layout; for an indexer's layout, its head_dim and 0.
LAYOUT_DIMS: dict[str, tuple[tuple[int, int], ...]] = {name: found["dims"] for name, found in _KV.items()}
INDEXER_DIMS: dict[str, tuple[tuple[int, int], ...]] = {name: found["dims"] for name, found in _INDEXER.items()}
LayoutName: Any = Literal[tuple(NAMED_LAYOUTS)]
IndexerLayoutName: Any = Literal[tuple(INDEXER_LAYOUTS)]


def _named_layout(value: Any) -> Any:
    return NAMED_LAYOUTS.get(value, value) if isinstance(value, str) else value


def named_indexer_layout(value: Any) -> Any:
    """Return the fields of a named indexer layout; other values unchanged."""
    return INDEXER_LAYOUTS.get(value, value) if isinstance(value, str) else value


@functools.cache
def _named(name: str) -> Layout:
    return Layout.model_validate((NAMED_LAYOUTS | INDEXER_LAYOUTS)[name])


def under_a_name_of_its_own(layout: Layout) -> Layout:
    """Return the layout. Refuse it if its name is that of another layout."""
    if layout.name in NAMED_LAYOUTS | INDEXER_LAYOUTS and layout != _named(layout.name):
        raise refused(f"got '{layout.name}', the name of another layout; takes a new name", "name")
    return layout


class Cache(Model):
    """A KV cache."""

    layout: Annotated[
        Layout,
        BeforeValidator(_named_layout, json_schema_input_type=LayoutName | Layout),
        AfterValidator(under_a_name_of_its_own),
        Field(description="layout of a cached token: a name, or a mapping of fields"),
    ]
    block_size: Annotated[
        int | None,
        Field(
            ge=1,
            le=4096,
            description="page size in tokens. Without it, kernels over unquantised rows take them flat, [s_kv, 1, "
            "d_qk]",
        ),
    ] = None
    scale_rule: Annotated[
        ScaleRuleChanges | None, Field(description="changes to the layout's scale rule, for writers")
    ] = None


def check_one_tensor(cache: Cache) -> None:
    """Refuse fields in tensors of their own, for caches that kernels read as one tensor."""
    for index, field in enumerate(cache.layout.fields):
        if name := getattr(field, "tensor", None):
            raise refused(
                f"got {name}; takes none here: only `cache` may lie in several tensors",
                *("layout", "fields", index, "tensor"),
            )


def check_layout(cache: Cache, dims: tuple[int, int], dtype: Dtype) -> None:
    """Refuse a layout that cannot hold the model's rows, or a scale rule that does not fit the layout.

    Args:
        cache: the cache.
        dims: latent and RoPE columns of a row.
        dtype: dtype of unquantised columns, `model.dtype`.
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
            raise refused(f"{message}; takes {dtype} (model.dtype) or a quantised dtype there", "layout")
    changes = cache.scale_rule.model_dump(exclude_none=True) if cache.scale_rule else {}
    if changes and not any(layout.scales_of(field) for field in layout.data):
        raise refused(f"got a rule; takes none, since {layout.name} has no tile scales", "scale_rule")
    try:
        compose(composition, *dims, changes)
    except LayoutError as error:
        raise refused(str(error), "scale_rule", *(name for name in error.at[-1:] if name in changes)) from None
