"""The indexer's logits over flat keys and over pages, the schedule of paged calls, and their wrappers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlagen.backends.parts import tiles
from mlagen.backends.parts.base import GeneratedFile, Module, generated
from mlagen.backends.parts.common import FULL_ALIGNMENT, TORCH_DTYPES
from mlagen.backends.parts.logits import (
    LogitsFacts,
    facts_of,
    q_blocks_of,
    width_of,
)
from mlagen.layout import CacheLayout
from mlagen.layout.layout import BITS
from mlagen.plan import MqaLogitsPlan, Plan
from mlagen.plan.families.mqa_logits import SCHEDULE_REQUESTS, SCHEDULE_ROWS, SCHEDULE_WARPS, UNIT_KEYS
from mlagen.plan.sm90.mqa_logits import BLOCK_N, FLAT, FLAT_MODULE, PAGED, PAGED_MODULE
from mlagen.plan.sm90.mqa_logits import UNIT_KEYS as SM90_UNIT_KEYS
from mlagen.plan.tiles.chunks import next_power_of_2

MODULE = "mqa_logits"
TOO_SMALL = {"e4m3": 8, "e4m3fnuz": 7}  # the fp16 of the same bits has an exponent this much too small
NATIVE_TYPES = {"e4m3": "float8e4nv", "e4m3fnuz": "float8e4b8"}
LEAST_BLOCK = {"e4m3": 32, "e4m3fnuz": 32, "e2m1": 16}  # columns of the narrowest product


@dataclass(frozen=True)
class KeyBlock:
    """A block of a key's columns.

    Attributes:
        suffix: suffix of its variables.
        start, end: its columns.
        block: its width.
        arguments: arguments of its loads, as text.
        alignment: known alignment of its addresses, as text.
    """

    suffix: str
    start: int
    end: int
    block: int
    arguments: str
    alignment: str


def _chunks(family: MqaLogitsPlan) -> list[KeyBlock]:
    """Return a key's blocks."""
    found: list[KeyBlock] = []
    dtype = family.keys.dtype
    for chunk in family.rows.chunks:
        suffix = f"_{len(found)}" if len(family.rows.chunks) > 1 else ""
        block = f"D{suffix}"
        arguments = f"{chunk.start}, {chunk.columns}, {block}"
        if family.rows.packed:
            tile = family.scales.tile
            arguments = f"{chunk.start}, {block}, {chunk.columns // 2}, {max(1, chunk.block // tile)}, {tile}"
        begin = chunk.start * BITS[dtype] // 8 + family.keys.offset
        found.append(
            KeyBlock(
                suffix=suffix,
                start=chunk.start,
                end=chunk.start + chunk.columns,
                block=max(LEAST_BLOCK[dtype], chunk.block),
                arguments=arguments,
                alignment="config.ALIGNMENT" if begin % FULL_ALIGNMENT == 0 else "1",
            )
        )
    return found


@dataclass(frozen=True)
class Kernels(LogitsFacts):
    """Context of the kernels' template.

    Attributes:
        heads_block: heads of a block, with padding; `masks_heads` if there is any.
        chunks: blocks of a key's columns.
        q_blocks: names of the blocks of Q.
        native_type: Triton's name of the keys' e4m3, or None.
        too_small, decoded: bits that an exponent lacks in fp16, and the factor that gives them back, or None.
        scales_block: scales of a block, with padding; `masks_scales` if there is any.
        key_offset, scale_bytes: position of a key in its plane, and bytes of its scales.
        q_shape, q_paged_shape, k_shape, k_scale_shape: shapes for docstrings.
    """

    heads_block: int
    masks_heads: bool
    chunks: Sequence[KeyBlock]
    q_blocks: str
    native_type: str | None
    too_small: int | None
    decoded: str | None
    scales_block: int
    masks_scales: bool
    key_offset: str
    scale_bytes: int
    q_shape: str
    q_paged_shape: str
    k_shape: str
    k_scale_shape: str


@dataclass(frozen=True)
class Wrappers(LogitsFacts):
    """Context of the wrappers' template.

    Attributes:
        wrappers: the package's wrappers.
        head_dim, width: columns of a key, and elements of its row.
        key_type: torch's name of the keys' dtype, or None.
        key_layout: layout of a cached key.
        row_bytes: bytes of a cached key with its scales.
        page_alignment: bytes at which a page may begin.
        scales_byte: position of a page's scales, as text.
        native_targets: targets that multiply the keys' dtype.
        sm90_flat, sm90_paged: whether the package has these sm90 kernels.
        page_keys: keys of a page that the sm90 kernel takes.
        bf16_logits: whether logits may be bf16.
        unit_keys, sm90_unit_keys: keys in a unit of the schedule, in general and on sm90.
        schedule_rows, schedule_requests, schedule_warps: tile of the scheduler.
    """

    wrappers: Sequence[str]
    head_dim: int
    width: int
    key_type: str | None
    key_layout: CacheLayout
    row_bytes: int
    page_alignment: int
    scales_byte: str
    native_targets: Sequence[str]
    sm90_flat: bool
    sm90_paged: bool
    page_keys: int
    bf16_logits: bool
    unit_keys: int
    sm90_unit_keys: int
    schedule_rows: int
    schedule_requests: int
    schedule_warps: int


def _kernels(plan: Plan, family: MqaLogitsPlan) -> Kernels:
    keys, scales, num_heads = family.keys, family.scales, family.rows.indexer.num_heads
    chunks, dtype, width = _chunks(family), keys.dtype, width_of(family)
    name, block = "u8" if family.rows.packed else dtype, next_power_of_2(scales.count)
    return Kernels(
        **vars(facts_of(plan, family)),
        heads_block=max(family.heads_block, 1),
        masks_heads=family.heads_block > num_heads,
        chunks=chunks,
        q_blocks=q_blocks_of(family),
        native_type=NATIVE_TYPES.get(dtype),
        too_small=TOO_SMALL.get(dtype),
        decoded=f"{2.0 ** (2 * TOO_SMALL[dtype]):.1f}" if dtype in TOO_SMALL else None,
        scales_block=block,
        masks_scales=block > scales.count,
        key_offset=f" + {keys.offset}" if keys.offset else "",
        scale_bytes=family.rows.layout.plane_bytes[scales.plane],
        q_shape=f"{name} [num_tokens, heads, {width}]",
        q_paged_shape=f"{name} [requests, next_n, heads, {width}]",
        k_shape=f"{name} [num_keys, {width}]",
        k_scale_shape=f"u8 [num_keys, {scales.count}]" if family.rows.packed else "f32 [num_keys]",
    )


def _wrappers(plan: Plan, family: MqaLogitsPlan) -> Wrappers:
    """Return the context of the wrappers' template."""
    wrappers, scales, layout = plan.spec.wrappers, family.scales, family.rows.layout
    before = f"block_kv * {layout.plane_bytes[0]}" if scales.plane > 0 else ""
    offset = str(scales.offset) if scales.offset or not before else ""
    return Wrappers(
        **vars(facts_of(plan, family)),
        wrappers=wrappers,
        head_dim=family.rows.indexer.head_dim,
        width=width_of(family),
        key_type=TORCH_DTYPES.get(family.keys.dtype),
        key_layout=layout,
        row_bytes=layout.row_bytes,
        page_alignment=max(one.itemsize for one in layout.fields),
        scales_byte=" + ".join(filter(None, (before, offset))),
        native_targets=family.native,
        sm90_flat=FLAT_MODULE in family.sm90,
        sm90_paged=PAGED_MODULE in family.sm90,
        page_keys=BLOCK_N,
        bf16_logits=FLAT[1] in wrappers or PAGED[1] in wrappers,
        unit_keys=UNIT_KEYS,
        sm90_unit_keys=SM90_UNIT_KEYS,
        schedule_rows=SCHEDULE_ROWS,
        schedule_requests=SCHEDULE_REQUESTS,
        schedule_warps=SCHEDULE_WARPS,
    )


def private_files(plan: Plan, family: MqaLogitsPlan) -> list[GeneratedFile]:
    """Files that the family's module imports."""
    kernels = _kernels(plan, family)
    tables = [tiles.file(plan)] if kernels.flat or kernels.paged else []
    return [*tables, generated(f"_{MODULE}_kernels", vars(kernels))]


def modules(plan: Plan, family: MqaLogitsPlan) -> list[Module]:
    """The module of the family's wrappers."""
    return [Module(generated(MODULE, vars(_wrappers(plan, family))), family.wanted(plan.spec))]
