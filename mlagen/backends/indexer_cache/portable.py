"""The kernels around the cache of the indexer's keys, and their wrappers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mlagen.backends.parts import indexer_layout, layout, tiles
from mlagen.backends.parts.base import GeneratedFile, Module, generated
from mlagen.backends.parts.common import FULL_ALIGNMENT, TORCH_DTYPES, alignment_of, columns_text, is_aligned
from mlagen.backends.parts.layout_module import Arguments, Pad, StoredColumns
from mlagen.layout import CacheLayout, Field, ScalesField
from mlagen.plan import IndexerCachePlan, IndexerRows, Plan
from mlagen.plan.tiles.chunks import next_power_of_2
from mlagen.spec import Indexer

MODULE = "indexer_cache"
WRITE, GATHER, QUERY, NORMALISE, KEYS_QUERY = (
    "indexer_k_quant_and_cache",
    "cp_gather_indexer_k_quant_cache",
    "fused_indexer_q_rope_quant",
    "indexer_k_norm_rope_store",
    "indexer_qk_rope_quant_and_cache",
)


@dataclass(frozen=True)
class Rope:
    """Template context for RoPE.

    Attributes:
        columns: number of rotated columns.
        start, end: these columns.
        half: number of their pairs.
        neox: whether a pair's columns are `half` apart, not neighbours.
        in_registers: whether both columns of a pair are always in one block.
        step: columns from one of a pair to the other.
        step_aligned, angles_aligned: whether that step and the angles of a block begin at aligned addresses.
    """

    columns: int
    start: int
    end: int
    half: int
    neox: bool
    in_registers: bool
    step: int
    step_aligned: bool
    angles_aligned: bool


@dataclass(frozen=True)
class Slice:
    """A slice of a row.

    Attributes:
        name: its variable.
        start: its first column.
        turns: whether it has the first columns of rotated pairs.
        other: the slice with the second columns; None if they are in the same one.
        angle: number of its first angle.
    """

    name: str
    start: int
    turns: bool
    other: str | None
    angle: int


@dataclass(frozen=True)
class Block:
    """A block of a row as kernels load and store it.

    Attributes:
        name: suffix of its variables.
        start, end: its columns.
        block: its width.
        masked: whether it has padding.
        columns_text: its columns, as text.
        exists, exists_named: masks of its loads, as text, with columns in a variable `columns` or of the block's name.
        source_alignment: known alignment of its addresses, as text.
        turns: whether it has rotated columns.
        store: arguments of its store_..., as text.
    """

    name: str
    start: int
    end: int
    block: int
    masked: bool
    columns_text: str
    exists: str
    exists_named: str
    source_alignment: str
    turns: bool
    store: str


@dataclass(frozen=True)
class CopiedField:
    """A field that the gather copies.

    Attributes:
        name: suffix of its variables, "values" or "scales".
        bytes: its bytes.
        block: bytes of its block, with padding if `masked`.
        rows: addresses in each row, as text.
        alignment, out_alignment: known alignment of these and of the addresses in the output, as text.
    """

    name: str
    bytes: int
    block: int
    masked: bool
    rows: str
    alignment: str | None
    out_alignment: str


@dataclass(frozen=True)
class PartsDoc:
    """Descriptions of a gathered key's parts, for docstrings.

    Attributes:
        values, scales: the parts.
        takes_scales: accepted tensors for scales.
    """

    values: str
    takes_scales: str
    scales: str


@dataclass(frozen=True)
class Facts:
    """Facts that both templates take.

    Attributes:
        dtype: the model's dtype.
        layout: layout of the keys.
        writes_keys, gathers, quantises_query, normalises, keys_query: the wrappers of the package.
        groups: whether keys may be those of groups of tokens.
        writes: whether a wrapper writes keys.
        needs_e4m3, query_needs_e4m3: whether keys and the query depend on the device's e4m3 support.
        packed: whether a byte holds two columns.
        turns: whether RoPE rotates columns.
        turn: RoPE.
        query_bytes, query_scale_bytes, key_bytes, key_scale_bytes: bytes of values and of scales.
    """

    dtype: str
    layout: CacheLayout
    writes_keys: bool
    gathers: bool
    quantises_query: bool
    normalises: bool
    keys_query: bool
    groups: bool
    writes: bool
    needs_e4m3: bool
    query_needs_e4m3: bool
    packed: bool
    turns: bool
    turn: Rope
    query_bytes: int
    query_scale_bytes: int
    key_bytes: int
    key_scale_bytes: int


@dataclass(frozen=True)
class Kernels(Facts):
    """Context of the kernels' template.

    Attributes:
        element: Triton's name of the model's dtype.
        args: text for argument lists of the layout's helpers.
        pads: padding that writers store.
        stored, query_stored: blocks of a key and of a head of the query.
        slices: slices of a row that kernels load and rotate; empty if they load whole rows.
        slice_columns: columns of a slice; None for whole rows.
        binds_slices: whether a variable holds the tuple of the slices.
        slices_store: arguments of store_slices, as text.
        parts: fields that the gather copies.
    """

    element: str
    args: Arguments
    pads: Sequence[Pad]
    stored: Sequence[Block]
    query_stored: Sequence[Block]
    slices: Sequence[Slice]
    slice_columns: int | None
    binds_slices: bool
    slices_store: str
    parts: Sequence[CopiedField]


@dataclass(frozen=True)
class Wrappers(Facts):
    """Context of the wrappers' template.

    Attributes:
        indexer: the spec's indexer.
        row_constant: name of the constant with a row's elements.
        unit_name: "bytes" or "columns", the elements of the cache tensor.
        row_alignment: rows begin at multiples of this many elements.
        takes_pages: whether a page may also be one row of bytes.
        checked_in: None; this module has the check of the cache.
        query_padded: whether the query's bytes have padding.
        scales, query_scales: scales of a key and of a head of the query.
        scale_alignment: known alignment of a row of gathered scales, in bytes.
        one_scale: whether a key has one scale, in fp32.
        parts_doc: the outputs of the gather.
        cache_dtypes: accepted dtypes, as entries of a tuple.
        values_dtype: torch's name of the dtype of values.
        cache_strides: the strides, joined by |.
        is_ue8m0: whether scales are powers of two.
        torch_dtype: torch's name of the model's dtype.
    """

    indexer: Indexer
    row_constant: str
    unit_name: str
    row_alignment: int
    takes_pages: bool
    checked_in: None
    query_padded: bool
    scales: ScalesField
    query_scales: ScalesField | None
    scale_alignment: int
    one_scale: bool
    parts_doc: PartsDoc
    cache_dtypes: str
    values_dtype: str
    cache_strides: str
    is_ue8m0: bool
    torch_dtype: str


def _aligned(nbytes: int) -> str:
    """Return the known alignment of addresses this many bytes from an aligned one, as a constexpr's text."""
    known = math.gcd(nbytes, FULL_ALIGNMENT)
    if known == FULL_ALIGNMENT:
        return "ALIGNMENT"
    return f"{known} if ALIGNMENT == {FULL_ALIGNMENT} else 1" if known > 1 else "1"


def _turn(rows: IndexerRows) -> Rope:
    """Template context for RoPE: rotated columns, and how pairs are joined."""
    width, start, neox = rows.indexer.rope_head_dim, rows.rope_start, rows.indexer.rope == "neox"
    half = width // 2
    step = half if neox else 1
    # Position of the angles of a block's first pair in a row of the table. A block has an even number of columns.
    first = start if neox else start // 2
    return Rope(
        columns=width,
        start=start,
        end=start + width,
        half=half,
        neox=neox,
        in_registers=not neox and start % 2 == 0,  # else the columns of a pair may be in different blocks
        step=step,
        step_aligned=is_aligned(step),
        angles_aligned=is_aligned(math.gcd(half, first)),
    )


def _slices(rows: IndexerRows, name: str) -> list[Slice]:
    """Return the slices of a row that kernels load and rotate; empty if they load whole rows."""
    width, indexer, names = rows.slice_columns, rows.indexer, indexer_layout.slices_of(rows, name)
    if width is None:
        return []
    neox, span = indexer.rope == "neox", indexer.rope_head_dim
    found = []
    for number, found_name in enumerate(names):
        start = number * width
        inside = start - rows.rope_start  # columns from the first rotated one on
        turns = 0 <= inside < (span // 2 if neox else span)
        other = names[number + span // 2 // width] if turns and neox else None
        angle = inside if neox else inside // 2
        found.append(Slice(found_name, start, turns, other, angle))
    return found


def _chunks(rows: IndexerRows, chunks: Sequence[StoredColumns], store: Callable[[str], str]) -> list[Block]:
    """Return a row's blocks, as kernels load and store them. `store` returns the arguments of a block's store_..."""
    start, end = rows.rope_start, rows.rope_start + rows.indexer.rope_head_dim
    found = []
    for chunk in chunks:
        exists, inside = "exists[:, None]", f"< {chunk.end})[None, :]"
        found.append(
            Block(
                name=chunk.name,
                start=chunk.start,
                end=chunk.end,
                block=chunk.block,
                masked=chunk.masked,
                columns_text=columns_text(chunk.start, chunk.block),
                exists=f"{exists} & (columns {inside}" if chunk.masked else exists,
                exists_named=f"{exists} & ({chunk.name}_columns {inside}" if chunk.masked else exists,
                source_alignment=alignment_of(chunk.start),
                turns=end > start and chunk.start < end and start < chunk.end,
                store=store(chunk.name),
            )
        )
    return found


def _part(rows: IndexerRows, name: str, field: Field) -> CopiedField:
    """Template context of a field that the gather copies."""
    pointers, alignment = layout.bytes_text(rows.layout, field)
    block = next_power_of_2(field.nbytes)
    return CopiedField(
        name=name,
        bytes=field.nbytes,
        block=block,
        masked=block > field.nbytes,
        rows=pointers,
        alignment=alignment,
        out_alignment="ALIGNMENT" if name == "values" else _aligned(field.nbytes),
    )


def _parts_doc(rows: IndexerRows) -> PartsDoc:
    """Return descriptions of a gathered key's parts."""
    scales = rows.scales
    assert scales is not None
    taken = f"8-bit [N, {scales.nbytes}]"
    if scales.dtype == "fp32":
        taken += f" or float32 [N{'' if scales.count == 1 else f', {scales.count}'}]"
    return PartsDoc(
        values=f"{rows.values.dtype}, two a byte" if rows.packed else rows.values.dtype,
        takes_scales=f"{taken}, any token stride",
        scales=f"{scales.count} x {scales.dtype}",
    )


def _facts(plan: Plan, family: IndexerCachePlan) -> Facts:
    """Return the facts that both templates take."""
    rows, wrappers = family.rows, plan.spec.wrappers
    scales, query_scales = rows.scales, rows.query.scales_of(rows.query.data[0])
    assert scales is not None  # checked by the plan
    assert query_scales is not None
    return Facts(
        dtype=plan.spec.model.dtype,
        layout=rows.layout,
        writes_keys=WRITE in wrappers,
        gathers=GATHER in wrappers,
        quantises_query=QUERY in wrappers,
        normalises=NORMALISE in wrappers,
        keys_query=KEYS_QUERY in wrappers,
        groups=NORMALISE in wrappers or family.rows.indexer.compress_ratio > 1,
        writes=not {WRITE, NORMALISE, KEYS_QUERY}.isdisjoint(wrappers),
        needs_e4m3=layout.needs_e4m3(rows.layout),
        query_needs_e4m3=layout.needs_e4m3(rows.query),
        packed=rows.packed,
        turns=rows.indexer.rope_head_dim > 0,
        turn=_turn(rows),
        query_bytes=rows.query.data[0].nbytes,
        query_scale_bytes=query_scales.nbytes,
        key_bytes=rows.values.nbytes,
        key_scale_bytes=scales.nbytes,
    )


def _kernels(plan: Plan, family: IndexerCachePlan) -> Kernels:
    """Context of the kernels' template."""
    rows = family.rows
    cached, scales = rows.layout, rows.scales
    assert scales is not None  # checked by the plan
    of_keys, of_query = indexer_layout.keys_context(plan, rows), indexer_layout.query_context(plan, rows)
    query = of_query.stored[0].name
    return Kernels(
        **vars(_facts(plan, family)),
        element=of_keys.element,
        args=of_keys.args,
        pads=of_keys.pads,
        stored=_chunks(rows, of_keys.stored, lambda name: layout.store_text(cached, name)),
        query_stored=_chunks(
            rows,
            of_query.stored,
            lambda name: indexer_layout.query_store_text(rows, indexer_layout.slices_text(rows, name), "exists"),
        ),
        slices=_slices(rows, query),
        slice_columns=rows.slice_columns,
        binds_slices=indexer_layout.binds_slices(rows, query),
        slices_store=layout.store_text(cached, indexer_layout.slices_text(rows, query)),
        parts=[_part(rows, "values", rows.values), _part(rows, "scales", scales)],
    )


def _wrappers(plan: Plan, family: IndexerCachePlan) -> Wrappers:
    """Context of the wrappers' template."""
    rows = family.rows
    cached, query, scales, dtype = rows.layout, rows.query, rows.scales, rows.values.dtype
    assert scales is not None  # checked by the plan
    of_keys = indexer_layout.keys_context(plan, rows)
    float_dtype = TORCH_DTYPES.get(dtype)
    bytes_dtypes = ["uint8", "int8", *([float_dtype] if float_dtype else [])]
    return Wrappers(
        **vars(_facts(plan, family)),
        indexer=rows.indexer,
        row_constant=of_keys.row_constant,
        unit_name=of_keys.unit_name,
        row_alignment=of_keys.row_alignment,
        takes_pages=False,
        checked_in=None,
        query_padded=query.plane_bytes[0] > query.data[0].nbytes,
        scales=scales,
        query_scales=query.scales_of(query.data[0]),
        scale_alignment=math.gcd(scales.nbytes, FULL_ALIGNMENT),
        one_scale=(scales.dtype, scales.count) == ("fp32", 1),
        parts_doc=_parts_doc(rows),
        cache_dtypes=", ".join(f"torch.{name}" for name in bytes_dtypes),
        values_dtype=float_dtype or "uint8",
        cache_strides="call.page_stride" if cached.planar else "call.page_stride | call.row_stride",
        is_ue8m0=scales.rule.rounding == "power_of_two",
        torch_dtype=TORCH_DTYPES[plan.spec.model.dtype],
    )


def private_files(plan: Plan, family: IndexerCachePlan) -> list[GeneratedFile]:
    """Files that the family's module imports."""
    found = [indexer_layout.keys_file(plan, family.rows)]
    if not {QUERY, KEYS_QUERY}.isdisjoint(plan.spec.wrappers):
        found.append(indexer_layout.query_file(plan, family.rows))
    return [*found, tiles.file(plan), generated(f"_{MODULE}_kernels", vars(_kernels(plan, family)))]


def modules(plan: Plan, family: IndexerCachePlan) -> list[Module]:
    """The module of the family's wrappers."""
    return [Module(generated(MODULE, vars(_wrappers(plan, family))), family.wanted(plan.spec))]
