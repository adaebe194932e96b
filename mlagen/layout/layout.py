"""CacheLayout: where every byte of a cached token is. Writers, gathers, attention loads, the reference and docs ask it.

A layout is composed of fields (docs/decisions/0003): latent, RoPE or both as one run, scales, and padding. The
fields of a token stand side by side in its row; a page-planar layout has a second row a token behind the rows of all
tokens of the page.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Entry = tuple[int, tuple[str, int], Mapping[str, Any]]  # entry of a composition: plane, path, values

MOST_LOADED, LEAST_LOADED = 16, 8  # bytes of a load, and of a load from less aligned rows
BITS = {"bf16": 16, "fp16": 16, "fp32": 32, "e4m3": 8, "e4m3fnuz": 8, "ue8m0": 8, "e2m1": 4, "u8": 8}
# Largest finite value of each quantised dtype: OCP 8-bit and MX formats; CDNA 3 ISA for fnuz.
LARGEST = {"e4m3": 448.0, "e4m3fnuz": 240.0, "e2m1": 6.0}
# Smallest and largest scale that a floor may give. Exponents come from bits, which takes normal numbers.
SCALES = {
    "fp32": (2.0**-126, LARGEST["e4m3"]),
    "ue8m0": (2.0**-126, LARGEST["e4m3"]),
    "e4m3": (2.0**-9, LARGEST["e4m3"]),
}


class LayoutError(ValueError):
    """An invalid composition. `at` is the path of the wrong entry in the layout's mapping."""

    def __init__(self, message: str, *at: str | int) -> None:
        super().__init__(message)
        self.at = at


@dataclass(frozen=True)
class ScaleRule:
    """Rule for a tile's scale: how a writer computes it from `amax`, the largest magnitude in the tile.

    Attributes:
        rounding: "power_of_two": up to the next power of two; "nearest": to the dtype that stores it.
        divisor: the scale is amax / divisor before rounding.
        floor: lower bound of the value that `floor_on` names.
        floor_on: "amax": the floor is taken before the division; "scale": after it.
    """

    rounding: str
    divisor: float
    floor: float
    floor_on: str


@dataclass(frozen=True)
class Field:
    """A run of bytes in a token's row.

    Attributes:
        name: unique in the layout: `latent`, `rope`, `row`, `latent_scales`, `pad` ...
        dtype: storage dtype, a key of BITS.
        count: values a token.
        plane: 0: the token's row; 1: its row in the second plane; with several tensors, the number of its tensor.
        offset: byte of that row at which the field begins.
    """

    name: str
    dtype: str
    count: int
    plane: int
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the field a token."""
        return self.count * BITS[self.dtype] // 8

    @property
    def itemsize(self) -> int:
        """Bytes at which its values are addressed; packed values, by the byte."""
        return max(1, BITS[self.dtype] // 8)


@dataclass(frozen=True)
class DataField(Field):
    """Columns of the KV row.

    Attributes:
        first_column: column of the KV row at which it begins.
        tensor_scale: its values are divided by one scale a tensor, which callers pass.
    """

    first_column: int
    tensor_scale: bool

    @property
    def quantised(self) -> bool:
        """Whether a value is stored in fewer than 16 bits."""
        return BITS[self.dtype] < 16


@dataclass(frozen=True)
class ScalesField(Field):
    """Scales of a data field, one a tile of columns.

    Attributes:
        of: name of the data field.
        tile: columns a scale covers.
        interleave: scale s is stored at s % interleave * (count / interleave) + s // interleave; 1: in order.
        rule: how writers find a scale. Readers take any.
    """

    of: str
    tile: int
    interleave: int
    rule: ScaleRule

    @property
    def formula(self) -> str:
        """Formula of the stored scale: `2^ceil(log2(max(amax, 0.0001) / 448))`."""
        rule = self.rule
        if rule.floor_on == "amax":
            value = f"max(amax, {rule.floor}) / {rule.divisor:g}"
        else:
            value = f"max(amax / {rule.divisor:g}, {rule.floor})"
        if rule.rounding == "power_of_two":
            return f"2^ceil(log2({value}))"
        return f"{value}, to the nearest {self.dtype}"

    def position(self, scale: int) -> int:
        """Where scale number `scale` is stored, in scales from the field's begin."""
        return scale % self.interleave * (self.count // self.interleave) + scale // self.interleave


@dataclass(frozen=True)
class PadField(Field):
    """Bytes without meaning, written as 0."""


@dataclass(frozen=True)
class CacheLayout:
    """Byte layout of a KV cache.

    Token p of a page of B tokens has its row at `page + p * plane_bytes[0]`, and in a page-planar layout a second one
    at `page + B * plane_bytes[0] + p * plane_bytes[1]`. If fields lie in tensors of their own, each tensor is a plane
    with pages and strides of its own.

    Attributes:
        name: the layout's name in specs and fingerprints.
        fields: all fields, by plane, in byte order.
        page_multiple: a page's bytes are rounded up to a multiple of this.
        tensors: names of the tensors of the planes behind the first; empty if all fields lie in the cache tensor.
    """

    name: str
    fields: tuple[Field, ...]
    page_multiple: int
    tensors: tuple[str, ...] = ()

    @property
    def data(self) -> tuple[DataField, ...]:
        """The fields that hold columns, in column order."""
        found = [field for field in self.fields if isinstance(field, DataField)]
        return tuple(sorted(found, key=lambda field: field.first_column))

    @property
    def columns(self) -> int:
        """Columns of one token's row (d_qk)."""
        return sum(field.count for field in self.data)

    @property
    def plane_bytes(self) -> tuple[int, ...]:
        """Bytes a token in each plane."""
        planes = range(1 + max(field.plane for field in self.fields))
        return tuple(sum(field.nbytes for field in self.fields if field.plane == plane) for plane in planes)

    @property
    def planar(self) -> bool:
        """Whether a page has a second plane."""
        return len(self.plane_bytes) > 1 and not self.tensors

    @property
    def takes_heads(self) -> bool:
        """Whether a page may hold rows of several KV heads: all fields lie in one plane."""
        return len(self.plane_bytes) == 1

    @property
    def parts(self) -> tuple[CacheLayout, ...]:
        """The layout of each tensor: only this one if there is one tensor."""
        if not self.tensors:
            return (self,)
        return tuple(
            CacheLayout(name, tuple(dataclasses.replace(one, plane=0) for one in self.fields if one.plane == number), 1)
            for number, name in enumerate((self.name, *self.tensors))
        )

    @property
    def widest(self) -> int:
        """Bytes of the widest value. Rows begin at multiples of it."""
        return max((one.itemsize for one in self.fields if not isinstance(one, PadField)), default=1)

    @property
    def element(self) -> str:
        """Dtype of a tensor of only these fields: theirs if it is one of 16 or 32 bits, otherwise `u8`."""
        dtypes = {field.dtype for field in self.fields}
        return dtypes.pop() if len(dtypes) == 1 and self.fields[0].itemsize > 1 else "u8"

    @property
    def row_bytes(self) -> int:
        """Bytes a token, all planes together."""
        return sum(self.plane_bytes)

    @property
    def quantised(self) -> bool:
        """Whether any column is stored in fewer than 16 bits; if not, the cache is a tensor of the model's dtype."""
        return any(field.quantised for field in self.data)

    @property
    def loads_at(self) -> int:
        """Alignment of rows, in bytes, that kernels need to load several elements at once."""
        known = math.gcd(MOST_LOADED, self.row_bytes)
        return MOST_LOADED if not self.takes_heads or known < LEAST_LOADED else known

    @property
    def tensor_scale(self) -> bool:
        """Whether callers pass one scale a tensor."""
        return any(field.tensor_scale for field in self.data)

    def scales_of(self, field: DataField) -> ScalesField | None:
        """The scales of a data field, if it has any."""
        found = [one for one in self.fields if isinstance(one, ScalesField) and one.of == field.name]
        return found[0] if found else None

    def page_bytes(self, block_size: int) -> int:
        """Bytes of a page of `block_size` tokens in all tensors, the rounding up included."""
        return -(-block_size * self.row_bytes // self.page_multiple) * self.page_multiple

    @property
    def byte_table(self) -> tuple[str, ...]:
        """One line a field, `[0, 1024)  latent  512 x bf16`, for docstrings and docs."""
        return tuple(self._lines())

    def _lines(self) -> Iterator[str]:
        spans = [f"[{field.offset}, {field.offset + field.nbytes})" for field in self.fields]
        span_width = max(len(span) for span in spans)
        name_width = max(6, *(len(field.name) for field in self.fields))
        for span, field in zip(spans, self.fields, strict=True):
            if field.plane and field.offset == 0:
                place = (
                    f"in the tensor {self.tensors[field.plane - 1]}"
                    if self.tensors
                    else "behind the rows of all tokens of the page"
                )
                yield f"{place}, for each token:"
            yield f"{span:<{span_width}}  {field.name:<{name_width}}  {_contents(field)}"
        if self.page_multiple > 1:
            yield f"a page is rounded up to a multiple of {self.page_multiple} bytes"

    @property
    def fingerprint(self) -> str:
        """Sixteen hex digits of the meaning of the bytes. They tell apart layouts with equal byte counts.

        From a SHA-256 of the name, the page's multiple, the fields without scale rules, which only writers use, and
        the names of further tensors.
        """
        fields = [{**dataclasses.asdict(field), "kind": type(field).__name__} for field in self.fields]
        for field in fields:
            field.pop("rule", None)
            if "first_column" in field:
                field["first_lane"] = field.pop("first_column")  # its name when caches in use were fingerprinted
        tensors = [list(self.tensors)] if self.tensors else []
        text = json.dumps([self.name, self.page_multiple, fields, *tensors], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _contents(field: Field) -> str:
    if isinstance(field, ScalesField):
        order = ""
        if field.interleave > 1:
            step, size = field.count // field.interleave * field.itemsize, field.itemsize
            rest = f"s // {field.interleave}" if size == 1 else f"{size} * (s // {field.interleave})"
            order = f"; scale s at byte {step} * (s % {field.interleave}) + {rest}"
        return f"{field.count} x {field.dtype}, one for {field.tile} columns{order}"
    if isinstance(field, PadField):
        return f"{field.nbytes} byte{'s' if field.nbytes > 1 else ''}, 0"
    assert isinstance(field, DataField)
    packed = ", two a byte, the even column in the low half" if field.dtype == "e2m1" else ""
    scaled = ", one scale a tensor" if field.tensor_scale else ""
    return f"{field.count} x {field.dtype}{packed}{scaled}"


def compose(
    composition: Mapping[str, Any], kv_lora_rank: int, qk_rope_head_dim: int, rule: Mapping[str, Any] | None = None
) -> CacheLayout:
    """Lays the fields of a composition end to end.

    Args:
        composition: a layout as specs say it, `name`, `fields`, `planar_fields`, `page_multiple`; see mlagen.spec.
        kv_lora_rank: latent columns.
        qk_rope_head_dim: RoPE columns; 0 leaves out a `rope` field.
        rule: fields of ScaleRule that replace those of the layout's scales.

    Raises:
        LayoutError: a column is stored twice or not at all, a scale scales nothing, a field would begin off alignment,
            or a scale's rule gives values that its dtype does not hold.
    """
    columns = {"latent": kv_lora_rank, "rope": qk_rope_head_dim, "row": kv_lora_rank + qk_rope_head_dim}
    first = {"latent": 0, "rope": kv_lora_rank, "row": 0}
    entries, tensors = _entries(composition, columns)
    stored = _stored(entries, columns)
    by_tensor = _scaled(entries, stored)
    fields: list[Field] = []
    offsets = [0, 0, *(0 for _ in tensors[1:])]
    pads = 0
    for plane, at, item in entries:
        kind = item["kind"]
        if kind == "tensor_scale" or _absent(item, columns):
            continue
        field: Field
        if kind == "scales":
            of = item["of"]
            field = _scales(item, stored[of], columns[of], (plane, offsets[plane]), rule or {}, at)
        elif kind == "pad":
            field = PadField(f"pad_{pads}" if pads else "pad", "u8", item["bytes"], plane, offsets[plane])
            pads += 1
        else:
            place = (plane, offsets[plane], first[kind])
            field = DataField(kind, item["dtype"], columns[kind], *place, kind in by_tensor)
        if BITS[field.dtype] * field.count % 8:
            message = f"got {field.dtype} for {field.count} columns, which end within a byte; takes an even number"
            raise LayoutError(message, *at, "dtype")
        if field.offset % field.itemsize:
            need = f"a multiple of {field.itemsize}, the bytes of {field.dtype}"
            raise LayoutError(f"{field.name.replace('_', ' ')} would begin at byte {field.offset}; takes {need}", *at)
        offsets[plane] += field.nbytes
        fields.append(field)
    multiple = composition.get("page_multiple", 1)
    fields.sort(key=lambda field: field.plane)
    if tensors and multiple != 1:
        raise LayoutError(
            f"got {multiple}; takes 1, since fields lie in {tensors[0]}, a tensor of its own", "page_multiple"
        )
    _check_pages(fields, offsets, multiple, bool(tensors))
    return CacheLayout(composition["name"], tuple(fields), offsets[0] if multiple == "row" else multiple, tensors)


def _absent(item: Mapping[str, Any], columns: Mapping[str, int]) -> bool:
    """Whether a field is of columns that the model lacks."""
    of = item["kind"] if item["kind"] in columns else item.get("of")
    return of is not None and not columns[of]


def _entries(composition: Mapping[str, Any], columns: Mapping[str, int]) -> tuple[list[Entry], tuple[str, ...]]:
    """The entries of a composition with their planes, and the tensors of the planes behind the first."""
    entries: list[Entry] = []
    tensors: list[str] = []
    for number, key in enumerate(("fields", "planar_fields")):
        for index, item in enumerate(composition.get(key, ())):
            plane, name = number, item.get("tensor")
            if name is not None and not _absent(item, columns):
                if composition.get("planar_fields"):
                    message = f"got {name}; takes none with planar_fields: their bytes lie in the cache tensor"
                    raise LayoutError(message, key, index, "tensor")
                if name not in tensors:
                    tensors.append(name)
                plane = 1 + tensors.index(name)
            entries.append((plane, (key, index), item))
    return entries, tuple(tensors)


def _stored(entries: list[Entry], columns: Mapping[str, int]) -> dict[str, str]:
    """The dtype of each data field; LayoutError where columns are stored twice or not at all."""
    stored: dict[str, str] = {}
    for _, at, item in entries:
        kind = item["kind"]
        if kind in columns:
            overlapping = [other for other in stored if kind == "row" or other in (kind, "row")]
            if overlapping:
                raise LayoutError(
                    f"got {kind}, columns that {overlapping[0]} holds already; takes each once", *at, "kind"
                )
            stored[kind] = item["dtype"]
    for kind in ("latent", "rope"):
        if columns[kind] and kind not in stored and "row" not in stored:
            raise LayoutError(f"stores no {kind} columns; takes a field of kind {kind} or row", "fields")
    return stored


def _scaled(entries: list[Entry], stored: Mapping[str, str]) -> set[str]:
    """The data fields with one scale a tensor; LayoutError where a scale is of nothing, or a second one."""
    scaled: dict[str, str] = {}
    for _, at, item in entries:
        if item["kind"] not in ("scales", "tensor_scale"):
            continue
        of = item["of"]
        if of not in stored:
            takes = " or ".join(stored)
            raise LayoutError(f"got {of}, which this layout does not hold; takes {takes}", *at, "of")
        if BITS[stored[of]] >= 16:
            raise LayoutError(f"got {of}, which is {stored[of]}; takes a field of e4m3, e4m3fnuz or e2m1", *at, "of")
        if of in scaled:
            raise LayoutError(f"got {of}, which has {scaled[of]} already; takes each field once", *at, "of")
        scaled[of] = item["kind"]
    return {of for of, kind in scaled.items() if kind == "tensor_scale"}


def _scales(
    item: Mapping[str, Any],
    of: str,
    columns: int,
    place: tuple[int, int],
    changes: Mapping[str, Any],
    at: tuple[str, int],
) -> ScalesField:
    """The scales of a field of dtype `of`; LayoutError where their order or their rule cannot be."""
    count = math.ceil(columns / item["tile"])
    interleave = item.get("interleave", 1)
    if count % interleave:
        raise LayoutError(f"got {interleave}; takes a divisor of {count}, the number of scales", *at, "interleave")
    names = (field.name for field in dataclasses.fields(ScaleRule))
    rule = ScaleRule(**{name: changes.get(name) or item[name] for name in names})
    dtype = item["dtype"]
    rounding = {"ue8m0": "power_of_two", "e4m3": "nearest"}.get(dtype, rule.rounding)
    if rule.rounding != rounding:
        raise LayoutError(f"got {rule.rounding}; takes {rounding} where scales are {dtype}", *at, "rounding")
    if rule.divisor > LARGEST[of]:
        raise LayoutError(f"got {rule.divisor:g}; takes at most {LARGEST[of]:g}, the largest {of}", *at, "divisor")
    smallest = _fp32(rule.floor)
    if rule.floor_on == "amax":
        smallest = _fp32(smallest / _fp32(rule.divisor))
    low, high = SCALES[dtype]
    if not low <= smallest <= high:
        message = f"got {rule.floor}, so that the smallest scale is {smallest:.4g}; takes a floor"
        message += f" whose scale lies from {low:.4g} to {high:g}, where {dtype} scales are exact"
        raise LayoutError(message, *at, "floor")
    return ScalesField(f"{item['of']}_scales", dtype, count, *place, item["of"], item["tile"], interleave, rule)


def _fp32(x: float) -> float:
    """The nearest fp32 value."""
    return float(struct.unpack("<f", struct.pack("<f", x))[0])


def _check_pages(fields: list[Field], row_bytes: list[int], multiple: int | str, in_tensors: bool) -> None:
    """Rows and pages stand end to end, so each has to keep the alignment of the widest value of its tensor."""
    if not row_bytes[0]:
        where = " in the cache tensor" if in_tensors else ""
        raise LayoutError(f"hold no byte of this model's rows{where}; takes a field that does", "fields")
    for plane, nbytes in enumerate(row_bytes):
        own = [field for field in fields if field.plane == plane or not in_tensors]
        widest = max(own, key=lambda field: field.itemsize, default=fields[0])
        need = f"a multiple of {widest.itemsize}, the bytes of {widest.dtype}"
        key = "planar_fields" if plane and not in_tensors else "fields"
        if nbytes % widest.itemsize:
            raise LayoutError(f"make rows of {nbytes} bytes; takes {need}; a field of kind pad can fill them up", key)
    if multiple not in ("row", 1) and int(multiple) % widest.itemsize:
        raise LayoutError(f"got {multiple}; takes {need}, or 1", "page_multiple")
