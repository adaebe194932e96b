"""The indexer's logits over flat keys and over pages, the schedule of paged calls, and their wrappers."""

from __future__ import annotations

from typing import Any

from mlagen.backends.base import GeneratedFile, Module, generated
from mlagen.backends.sm90_logits import MQA_LOGITS, PAGED_MQA_LOGITS
from mlagen.backends.triton import tiles
from mlagen.backends.triton.common import FULL_ALIGNMENT
from mlagen.layout.layout import BITS
from mlagen.plan import MqaLogitsPlan, Plan
from mlagen.plan.chunks import MIN_BLOCK, next_power_of_2
from mlagen.plan.mqa_logits import SCHEDULE_REQUESTS, SCHEDULE_ROWS, SCHEDULE_WARPS, UNIT
from mlagen.plan.mqa_logits_sm90 import BLOCK_N

MODULE = "mqa_logits"
FLAT = ("fp8_mqa_logits", "fp8_fp4_mqa_logits")
PAGED = ("fp8_paged_mqa_logits", "fp8_fp4_paged_mqa_logits")
SCHEDULER = "get_paged_mqa_logits_metadata"
TOO_SMALL = {"e4m3": 8, "e4m3fnuz": 7}  # the fp16 of the same bits has an exponent this much too small
NATIVE_TYPES = {"e4m3": "float8e4nv", "e4m3fnuz": "float8e4b8"}
LEAST_BLOCK = {"e4m3": 32, "e4m3fnuz": 32, "e2m1": 16}  # columns of the narrowest product
TORCH_TYPES = {"e4m3": "float8_e4m3fn", "e4m3fnuz": "float8_e4m3fnuz"}


def _chunks(family: MqaLogitsPlan) -> list[dict[str, Any]]:
    """Template context of a key's blocks."""
    found: list[dict[str, Any]] = []
    dtype = family.keys.dtype
    for chunk in family.rows.chunks:
        suffix = f"_{len(found)}" if len(family.rows.chunks) > 1 else ""
        block = f"D{suffix}"
        arguments = f"{chunk.start}, {chunk.columns}, {block}"
        if family.rows.packed:
            tile = family.scales.tile
            arguments = f"{chunk.start}, {block}, {chunk.columns // 2}, {max(1, chunk.block // tile)}, {tile}"
        begin = chunk.start * BITS[dtype] // 8 + family.keys.offset
        alignment = "config.ALIGNMENT" if begin % FULL_ALIGNMENT == 0 else "1"
        one = {
            "suffix": suffix,
            "block": max(LEAST_BLOCK[dtype], chunk.block),
            "start": chunk.start,
            "end": chunk.start + chunk.columns,
        }
        found.append({**one, "arguments": arguments, "alignment": alignment})
    return found


def _places(family: MqaLogitsPlan) -> dict[str, Any]:
    """Template context for the position of a key and its scales in a page."""
    keys, scales, planes = family.keys, family.scales, family.rows.layout.plane_bytes
    before = f"block_kv * {planes[0]}" if scales.plane > 0 else ""
    offset = str(scales.offset) if scales.offset or not before else ""
    return {
        "key_bytes": planes[keys.plane],
        "key_offset": f" + {keys.offset}" if keys.offset else "",
        "scale_bytes": planes[scales.plane],
        "scales_byte": " + ".join(filter(None, (before, offset))),
        "page_alignment": max(one.itemsize for one in family.rows.layout.fields),
        "row_bytes": family.rows.layout.row_bytes,
    }


def context(plan: Plan, family: MqaLogitsPlan) -> dict[str, Any]:
    """Context of the templates."""
    wrappers, indexer, dtype = plan.spec.wrappers, family.rows.indexer, family.keys.dtype
    chunks, packed = _chunks(family), family.rows.packed
    width = indexer.head_dim // 2 if packed else indexer.head_dim
    num_scales = family.scales.count
    name = "u8" if packed else dtype
    return {
        "wrappers": wrappers,
        **_places(family),
        "flat": [name for name in FLAT if name in wrappers],
        "paged": [name for name in PAGED if name in wrappers],
        "schedules": SCHEDULER in wrappers,
        "sm90_flat": MQA_LOGITS.present(plan),
        "sm90_paged": PAGED_MQA_LOGITS.present(plan),
        "page_keys": BLOCK_N,
        "bf16_logits": FLAT[1] in wrappers or PAGED[1] in wrappers,
        "num_heads": indexer.num_heads,
        "heads_block": max(family.heads_block, 1),
        "least_columns": MIN_BLOCK,
        "masks_heads": family.heads_block > indexer.num_heads,
        "head_dim": indexer.head_dim,
        "width": width,
        "chunks": chunks,
        "q_blocks": ", ".join(f"q{chunk['suffix']}" for chunk in chunks),
        "packed": packed,
        "stored": dtype,
        "native_type": NATIVE_TYPES.get(dtype),
        "key_type": TORCH_TYPES.get(dtype),
        "too_small": TOO_SMALL.get(dtype),
        "decoded": f"{2.0 ** (2 * TOO_SMALL[dtype]):.1f}" if dtype in TOO_SMALL else None,
        "native_targets": family.native,
        "num_scales": num_scales,
        "scales_block": next_power_of_2(num_scales),
        "masks_scales": next_power_of_2(num_scales) > num_scales,
        "scale_tile": family.scales.tile,
        "unit": UNIT,
        "schedule_rows": SCHEDULE_ROWS,
        "schedule_requests": SCHEDULE_REQUESTS,
        "schedule_warps": SCHEDULE_WARPS,
        "key_layout": family.rows.layout,
        "q_shape": f"{name} [num_tokens, heads, {width}]",
        "q_paged_shape": f"{name} [requests, next_n, heads, {width}]",
        "k_shape": f"{name} [num_keys, {width}]",
        "k_scale_shape": f"u8 [num_keys, {num_scales}]" if packed else "f32 [num_keys]",
    }


def shared(plan: Plan, family: MqaLogitsPlan) -> list[GeneratedFile]:
    """Files that the family's module imports."""
    values = context(plan, family)
    tables = [tiles.file(plan)] if values["flat"] or values["paged"] else []
    return [*tables, generated(f"_{MODULE}_kernels", values)]


def modules(plan: Plan, family: MqaLogitsPlan) -> list[Module]:
    """The module of the family's wrappers."""
    names = sorted(name for name in family.WRAPPERS if name in plan.spec.wrappers)
    return [Module(generated(MODULE, context(plan, family)), names)]
