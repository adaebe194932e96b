"""The module of a cache's layout: its template's context, and the arguments of its helpers in kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from mlagen.backends.parts.base import GeneratedFile, generated
from mlagen.backends.parts.common import FULL_ALIGNMENT, TORCH_DTYPES, TRITON_FLOATS
from mlagen.backends.parts.layout_module import (
    Arguments,
    Columns,
    Decodes,
    Encodes,
    LayoutModule,
    LoadedColumns,
    LoadedScales,
    Pad,
    Scales,
    StoredColumns,
    StoredScales,
    TensorArgument,
)
from mlagen.layout import CacheLayout, DataField, Field, PadField, ScalesField
from mlagen.layout.layout import BITS, LARGEST
from mlagen.plan import Caches, Chunk, DenseDecodePlan, Plan, ProloguePlan, SparseDecodePlan, StoredCache
from mlagen.plan.conversions import (
    EIGHT_BIT_FLOATS,
    AmaxScale,
    Quotient,
    amax_scale_of,
    by_reciprocal,
    quotient_of,
    short_quotients,
)
from mlagen.plan.families.compressor import COMPRESS
from mlagen.plan.families.latents import INSERT
from mlagen.plan.tiles.chunks import next_power_of_2

MODULE, EXTRA_MODULE = "_layout", "_extra_layout"

WRITERS = ("concat_and_cache_mla", "quantize_and_insert_k_cache", *ProloguePlan.WRAPPERS, COMPRESS, INSERT)
READERS = (*DenseDecodePlan.WRAPPERS, "dequantize_and_gather_k_cache", "gather_and_maybe_dequant_cache")
THREAD_COLUMNS = 8  # elements of the model's dtype in a thread's widest load or store
SUM_LENGTH = 80  # most columns of a comment after a constant


def unit_of(layout: CacheLayout, plane: int = 0) -> int:
    """Return the bytes of an element of a plane's tensor: 1, or a column's bytes if no column is quantised."""
    if plane and layout.tensors:
        return max(1, BITS[layout.parts[plane].element] // 8)
    return 1 if layout.quantised else layout.data[0].itemsize


def planes(layout: CacheLayout) -> tuple[str, ...]:
    """Return the names of the addresses of a token's rows in each plane."""
    if layout.tensors:
        return ("rows", *(f"{name.removesuffix('_cache').removesuffix('_arr')}_rows" for name in layout.tensors))
    return ("rows", "plane_rows") if layout.planar else ("rows",)


def places(layout: CacheLayout) -> tuple[str, ...]:
    """Return the arguments of page_pointers after page_stride, as kernels name them."""
    own = [f"{name}_{what}" for name in layout.tensors for what in ("ptr", "page_stride", "row_stride")]
    return () if layout.planar else ("row_stride", *own)


def needs_e4m3(layout: CacheLayout) -> bool:
    """Whether reading and writing depend on the device's e4m3 support."""
    return any(field.dtype == "e4m3" for field in layout.fields)


def rows_text(layout: CacheLayout) -> str:
    """Return the results of row_pointers as text."""
    return ", ".join(planes(layout))


def arguments(layout: CacheLayout) -> Arguments:
    """Return text for argument lists of a layout's helpers in kernels."""
    after = places(layout)
    return Arguments(
        rows=rows_text(layout),
        row_strides="".join(f", {name}" for name in after),
        places=after,
        declared=" row_stride: tl.int64," * (not layout.planar) + "".join(map(_declared, layout.tensors)),
        passed=", row_stride" * (not layout.planar) + "".join(map(_passed, layout.tensors)),
        tensors=[_tensor_argument(layout, number) for number in range(1, len(layout.parts))],
    )


def _declared(name: str) -> str:
    """Return a tensor and its strides as a further line of a kernel's parameters."""
    return f"\n    {name}_ptr, {name}_page_stride: tl.int64, {name}_row_stride: tl.int64,"


def _passed(name: str) -> str:
    """Return a tensor and its strides as a further line of arguments."""
    return f",\n        {name}_ptr, {name}_page_stride, {name}_row_stride"


def _tensor_argument(layout: CacheLayout, number: int) -> TensorArgument:
    """Template context of a tensor of fields besides the cache tensor."""
    part = layout.parts[number]
    width = part.row_bytes // unit_of(layout, number)
    contents = " and ".join(field.name for field in part.fields)
    return TensorArgument(part.name, planes(layout)[number], width, TORCH_DTYPES.get(part.element, "uint8"), contents)


def load_text(
    layout: CacheLayout, scale: str = "tensor_scale", alignment: str = "ALIGNMENT", constants: str = ""
) -> str:
    """Return the arguments of each load_...

    Args:
        layout: the layout.
        scale: name of the scale per tensor.
        alignment: name of the alignment.
        constants: `config.` if a tuple of that name holds the kernel's constexprs.
    """
    scales = f", {scale}" if layout.tensor_scale else ""
    return f"{rows_text(layout)}{scales}, valid{f', {constants}HAS_E4M3' if needs_e4m3(layout) else ''}, {alignment}"


def store_text(layout: CacheLayout, columns: str = "x") -> str:
    """Return the arguments of each store_..., with this name of the columns."""
    scales = ", tensor_scale" if layout.tensor_scale else ""
    e4m3 = ", ROUNDS_E4M3" if needs_e4m3(layout) else ""
    return f"{rows_text(layout)}, {columns}{scales}, valid{e4m3}, ALIGNMENT"


def typed(names: str) -> str:
    """Return names as parameters of a function. Those in UPPER_CASE are constexprs."""
    return ", ".join(f"{name}: tl.constexpr" if name.isupper() else name for name in names.split(", "))


def _rows(layout: CacheLayout, field: Field, skipped: int = 0) -> str:
    """Return the addresses `skipped` bytes into a field, one per row, as a column."""
    rows, unit = planes(layout)[field.plane], unit_of(layout, field.plane)
    begin = (field.offset + skipped) // unit
    if field.itemsize == unit:
        return f"{rows}[:, None] + {begin}" if begin else f"{rows}[:, None]"
    rows = f"({rows} + {begin})" if begin else rows
    return f"{rows}.to(tl.pointer_type({TRITON_FLOATS[field.dtype]}))[:, None]"


def _alignment(layout: CacheLayout, field: Field, skipped: int = 0, most: int = FULL_ALIGNMENT) -> str | None:
    """Return the known alignment of such addresses beyond the element size, as a constexpr's text, or nothing.

    A thread loads and stores aligned bytes at once; `most` is the wanted number.
    """
    known = math.gcd(most, field.offset + skipped, layout.loads_at)
    if layout.planar:
        known = math.gcd(known, *layout.plane_bytes[: field.plane + 1])
    if known <= field.itemsize:
        return None
    return "ALIGNMENT" if known == FULL_ALIGNMENT else f"{known} if ALIGNMENT >= {known} else 1"


def _folded(field: DataField, scales: ScalesField | None) -> bool:
    """Whether e4m3 scales take over the missing factor of decoded e2m1 values. They cannot overflow."""
    return field.dtype == "e2m1" and scales is not None and scales.dtype == "e4m3"


def _scales(layout: CacheLayout, scales: ScalesField, chunk: Chunk) -> tuple[Scales, int]:
    """Template context for the scales of a chunk, and the end of their block in a row, in bytes."""
    first = chunk.start - field_of(layout, chunk).first_column
    tile = first // scales.tile
    count = (first + chunk.columns - 1) // scales.tile - tile + 1
    block = max(1, chunk.block // scales.tile)
    in_order = scales.interleave == 1
    begin = tile if in_order else scales.position(tile) if count == 1 else 0
    skipped = begin * scales.itemsize
    found = Scales(
        tile=scales.tile,
        count=count,
        block=block,
        masked=count < block,
        order="in order" if in_order or count == 1 else "runs" if count == scales.count == block else "scattered",
        first=tile,
        interleave=scales.interleave,
        per_run=scales.count // scales.interleave,
        rows=_rows(layout, scales, skipped),
        alignment=_alignment(layout, scales, skipped),
        dtype=scales.dtype,
    )
    return found, scales.offset + skipped + block * scales.itemsize


def _loaded_scales(layout: CacheLayout, scales: ScalesField, chunk: Chunk) -> LoadedScales:
    """Template context for the scales of a chunk that attention loads."""
    found, end = _scales(layout, scales, chunk)
    return LoadedScales(
        **vars(found),
        one=found.count == 1,
        # Bytes after the scales may also be loaded if they belong to the row.
        selected=found.masked and end <= layout.plane_bytes[scales.plane],
        loaded="scales" if scales.dtype == "fp32" else "stored_scales",
        adds_factor=any(_folded(field, scales) for field in layout.data if field.name == scales.of),
    )


def field_of(layout: CacheLayout, chunk: Chunk) -> DataField:
    """Return the field of a chunk's columns, the first one if there are several."""
    return next(field for field in layout.data if chunk.start < field.first_column + field.count)


def _columns(layout: CacheLayout, chunk: Chunk, most: int = FULL_ALIGNMENT) -> Columns:
    """Template context for a chunk's columns. A thread loads or stores `most` bytes of them at once."""
    field = field_of(layout, chunk)
    skipped = (chunk.start - field.first_column) * BITS[field.dtype] // 8
    return Columns(
        name=chunk.name,
        start=chunk.start,
        end=chunk.start + chunk.columns,
        masked=chunk.masked,
        quantised=field.quantised,
        mask="mask" if chunk.masked else "valid[:, None]",
        tensor_scale=field.tensor_scale,
        rows=_rows(layout, field, skipped),
        alignment=_alignment(layout, field, skipped, most),
        dtype=field.dtype,
    )


def _loaded(layout: CacheLayout, chunk: Chunk) -> LoadedColumns:
    """Template context of a chunk that attention loads."""
    field = field_of(layout, chunk)
    first, scales = chunk.start - field.first_column, layout.scales_of(field)
    packed = field.dtype == "e2m1"
    odd = bool(first % 2 or chunk.columns % 2)
    return LoadedColumns(
        **vars(_columns(layout, chunk)),
        columns=chunk.columns,
        lacks_factor=packed and not _folded(field, scales),
        scales=_loaded_scales(layout, scales, chunk) if scales else None,
        pairs=packed and not odd,
        nibbles=packed and odd,
        first_nibble=first % 2,
    )


def _written_bytes(field: DataField) -> int:
    """Return the bytes that a writer's thread stores at once. In small tiles, its widest load sets their number."""
    return THREAD_COLUMNS * BITS[field.dtype] // 8 if field.dtype == "e2m1" else FULL_ALIGNMENT


def _stored_scales(layout: CacheLayout, scales: ScalesField, chunk: Chunk, pads: list[Field]) -> StoredScales:
    """Template context for the scales of a chunk that writers store. They take padding behind them from `pads`."""
    found, _ = _scales(layout, scales, chunk)
    return StoredScales(
        **vars(found),
        power_of_two=scales.rule.rounding == "power_of_two",
        rounded=scales.dtype == "e4m3",
        of_amax=amax_scale_of(layout, scales),
        by_reciprocal=by_reciprocal(scales),
        divisor=scales.rule.divisor,
        floor=scales.rule.floor,
        largest=LARGEST.get(scales.dtype),
        quotient=quotient_of(layout, field_of(layout, chunk), scales),
        fills_pad=_fills_pad(scales, found, pads),
    )


def _stored(layout: CacheLayout, chunk: Chunk, pads: list[Field]) -> StoredColumns:
    """Template context of a chunk that writers store. Its scales take padding behind them from `pads`."""
    field = field_of(layout, chunk)
    scales = layout.scales_of(field)
    packed = field.dtype == "e2m1"
    doubled = scales is not None and quotient_of(layout, field, scales) is Quotient.DOUBLED
    return StoredColumns(
        **vars(_columns(layout, chunk, _written_bytes(field))),
        scales=_stored_scales(layout, scales, chunk, pads) if scales else None,
        block=chunk.block,
        places=chunk.block // 2 if packed else chunk.block,
        count=chunk.columns // 2 if packed else chunk.columns,
        quotients="doubles" if doubled else "values",
        limited=field.tensor_scale and field.dtype in EIGHT_BIT_FLOATS,
        how=" and their scales" if scales else "",
    )


def _pads(layout: CacheLayout) -> list[Field]:
    """Return runs of padding, in elements of the cache tensor."""
    runs: list[Field] = []
    for field in layout.fields:
        if isinstance(field, PadField):
            unit = unit_of(layout, field.plane)
            dtype = "u8" if unit == 1 else layout.data[0].dtype
            begin, last = field.offset, runs[-1] if runs else None
            if last is not None and (last.plane, last.offset + last.nbytes) == (field.plane, field.offset):
                begin = runs.pop().offset
            runs.append(Field("pad", dtype, (field.offset + field.nbytes - begin) // unit, field.plane, begin))
    return runs


def _fills_pad(scales: ScalesField, stored: Scales, pads: list[Field]) -> bool:
    """Whether the padding after the scales has room for the padding of their block, which it then takes from `pads`."""
    end, extra = scales.offset + scales.nbytes, (stored.block - scales.count) * scales.itemsize
    if not stored.masked or stored.count != scales.count or stored.order != "in order":
        return False
    for number, pad in enumerate(pads):
        if (pad.plane, pad.offset) == (scales.plane, end) and pad.nbytes >= extra:
            rest = Field("pad", pad.dtype, pad.count - extra, pad.plane, pad.offset + extra)
            pads[number : number + 1] = [rest] if pad.count > extra else []
            return True
    return False


def writes_of(layout: CacheLayout, chunks: Sequence[Chunk]) -> tuple[list[StoredColumns], list[Pad]]:
    """Return the chunks that writers store, and the remaining padding."""
    pads = _pads(layout) if chunks else []
    return [_stored(layout, chunk, pads) for chunk in chunks], [_pad(layout, pad) for pad in pads]


def _pad(layout: CacheLayout, pad: Field) -> Pad:
    """Template context of padding."""
    block = next_power_of_2(pad.count)
    masked = f"valid[:, None] & (pad < {pad.count})[None, :]"
    return Pad(
        block=block,
        rows=_rows(layout, pad),
        alignment=_alignment(layout, pad),
        mask=masked if block > pad.count else "valid[:, None]",
    )


def decodes(layout: CacheLayout, *, reads: bool, writes: bool) -> Decodes:
    """Return the dtypes that a module decodes. Writers decode the e4m3 scales that they round."""
    scales = {scales.dtype for field in layout.data if (scales := layout.scales_of(field))}
    found = {field.dtype for field in layout.data} | scales if reads else set()
    return Decodes(
        e4m3="e4m3" in found or (writes and "e4m3" in scales),
        e4m3fnuz="e4m3fnuz" in found,
        e2m1="e2m1" in found,
        ue8m0="ue8m0" in found,
    )


def encodes(layout: CacheLayout, dtype: str, *, writes: bool) -> Encodes:
    """Return the helpers that a module encodes columns of a dtype of the model with."""
    if not writes:
        return Encodes()
    scaled = [(field, scales) for field in layout.data if (scales := layout.scales_of(field))]
    data = {field.dtype for field in layout.data}
    quotients = {quotient_of(layout, field, scales) for field, scales in scaled}
    exact = Quotient.EXACT in quotients or any(
        field.tensor_scale and field.dtype in EIGHT_BIT_FLOATS for field in layout.data
    )
    powers = Quotient.POWER_OF_TWO in quotients
    short = short_quotients(layout)
    short_scales = any(amax_scale_of(layout, scales) is AmaxScale.SHORT for _, scales in scaled)
    halves = short and dtype == "bf16"  # fp16 is as wide as the fp16 columns themselves
    return Encodes(
        e4m3="e4m3" in data | {scales.dtype for _, scales in scaled},
        e4m3fnuz="e4m3fnuz" in data,
        e2m1="e2m1" in data,
        e2m1_halves=halves,
        short=short and (not halves or short_scales),
        exponents=powers,
        reciprocals=powers or exact,
        quotients=exact,
    )


def _row_sum(layout: CacheLayout) -> str:
    """Return the sum that gives a row's size, if it is short enough for a comment."""
    unit = unit_of(layout)
    text = " + ".join(f"{field.name} {field.nbytes // unit}" for field in layout.parts[0].fields)
    text = text if len(text) <= SUM_LENGTH else "the fields above"
    return f"{text}, in the cache tensor" if layout.tensors else text


def context(plan: Plan, caches: Caches, cache: StoredCache) -> LayoutModule:
    """Template context of one of the caches."""
    reads = any(name in plan.spec.wrappers for name in READERS)
    writes = any(name in plan.spec.wrappers for name in WRITERS)
    return replace(
        bytes_context(plan, cache.layout, cache.tiled, reads=reads, writes=writes),
        attends=plan.find(SparseDecodePlan) is not None,
        chunks=caches.chunks,
        loaded=[_loaded(cache.layout, chunk) for chunk in caches.chunks if reads],
    )


def bytes_text(layout: CacheLayout, field: Field) -> tuple[str, str | None]:
    """Return text for the bytes of any field: their addresses as a column, and the alignment of these."""
    run = Field(field.name, "u8", field.nbytes, field.plane, field.offset)
    return _rows(layout, run), _alignment(layout, run)


def bytes_context(
    plan: Plan, layout: CacheLayout, tiled: tuple[Chunk, ...], *, reads: bool, writes: bool
) -> LayoutModule:
    """Template context for a layout's bytes, and the blocks of a row's stores."""
    unit, dtype = unit_of(layout), plan.spec.model.dtype
    unit_name = "bytes" if unit == 1 else "columns"
    stored, pads = writes_of(layout, tiled if writes else ())
    return LayoutModule(
        dtype=dtype,
        layout=layout,
        plane_sizes=[width // unit for width in layout.plane_bytes],
        row_constant=f"ROW_{unit_name.upper()}",
        row_sum=_row_sum(layout),
        row_size=layout.parts[0].row_bytes // unit,
        row_alignment=layout.parts[0].widest // unit,
        page_multiple=math.lcm(layout.page_multiple, unit) // unit,
        unit_name=unit_name,
        element=TRITON_FLOATS[dtype],
        args=arguments(layout),
        load_parameters=typed(load_text(layout)),
        store_parameters=typed(store_text(layout)),
        pad_parameters=typed(f"{rows_text(layout)}, valid, ALIGNMENT"),
        slices_parameters=typed(store_text(layout, "slices")),
        reads=reads,
        stored=stored,
        pads=pads,
        decodes=decodes(layout, reads=reads, writes=writes),
        encodes=encodes(layout, dtype, writes=writes),
    )


def files(plan: Plan, caches: Caches) -> list[GeneratedFile]:
    """Return the modules of the layouts of the cache and, if it has another layout, of the second cache."""
    found = [generated(MODULE, vars(context(plan, caches, caches.main)))]
    if caches.other:
        found.append(generated(EXTRA_MODULE, vars(context(plan, caches, caches.other)), MODULE))
    return found
