"""The kernels around the cache of the indexer's keys, and their wrappers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from mlagen.backends.parts import indexer_layout, layout, tiles
from mlagen.backends.parts.base import GeneratedFile, Module, generated
from mlagen.backends.parts.common import FULL_ALIGNMENT, TORCH_DTYPES, alignment_of
from mlagen.backends.parts.layout_module import StoredColumns
from mlagen.layout import Field
from mlagen.plan import IndexerCachePlan, IndexerRows, Plan
from mlagen.plan.tiles.chunks import next_power_of_2
from mlagen.work import ITEMSIZE

MODULE = "indexer_cache"
WRITE, GATHER, QUERY, NORMALISE, BOTH = (
    "indexer_k_quant_and_cache",
    "cp_gather_indexer_k_quant_cache",
    "fused_indexer_q_rope_quant",
    "indexer_k_norm_rope_store",
    "indexer_qk_rope_quant_and_cache",
)


def _aligned(nbytes: int) -> str:
    """Return the known alignment of addresses this many bytes from an aligned one, as a constexpr's text."""
    known = math.gcd(nbytes, FULL_ALIGNMENT)
    if known == FULL_ALIGNMENT:
        return "ALIGNMENT"
    return f"{known} if ALIGNMENT == {FULL_ALIGNMENT} else 1" if known > 1 else "1"


def _turn(rows: IndexerRows) -> dict[str, Any]:
    """Template context for RoPE: rotated columns, and how pairs are joined."""
    width, start, neox = rows.indexer.rope_head_dim, rows.rope_start, rows.indexer.rope == "neox"
    half = width // 2
    step = half if neox else 1
    # Position of the angles of a block's first pair in a row of the table. A block has an even number of columns.
    first = start if neox else start // 2
    return {
        "columns": width,
        "start": start,
        "end": start + width,
        "half": half,
        "neox": neox,
        "in_registers": not neox and start % 2 == 0,  # else the columns of a pair may be in different blocks
        "step": step,
        "step_aligned": step * ITEMSIZE % FULL_ALIGNMENT == 0,
        "angles_aligned": math.gcd(half, first) * ITEMSIZE % FULL_ALIGNMENT == 0,
    }


def _pieces(rows: IndexerRows, name: str) -> list[dict[str, Any]]:
    """Return the pieces of a row that kernels load and rotate; empty if they load whole rows."""
    width, indexer, names = rows.piece, rows.indexer, indexer_layout.pieces_of(rows, name)
    if width is None:
        return []
    neox, span = indexer.rope == "neox", indexer.rope_head_dim
    found = []
    for number, piece in enumerate(names):
        start = number * width
        inside = start - rows.rope_start  # columns from the first rotated one on
        turns = 0 <= inside < (span // 2 if neox else span)
        other = names[number + span // 2 // width] if turns and neox else None
        angle = inside if neox else inside // 2
        found.append({"name": piece, "start": start, "turns": turns, "other": other, "angle": angle})
    return found


def _chunks(rows: IndexerRows, chunks: Sequence[StoredColumns], store: Any) -> list[dict[str, Any]]:
    """Return a row's blocks, as kernels load and store them."""
    start, end = rows.rope_start, rows.rope_start + rows.indexer.rope_head_dim
    found = []
    for chunk in chunks:
        block = f"tl.arange(0, {chunk.block})"
        there, inside = "there[:, None]", f"< {chunk.end})[None, :]"
        found.append(
            {
                **vars(chunk),
                "columns_text": f"{chunk.start} + {block}" if chunk.start else block,
                "there": f"{there} & (columns {inside}" if chunk.masked else there,
                "there_named": f"{there} & ({chunk.name}_columns {inside}" if chunk.masked else there,
                "source_alignment": alignment_of(chunk.start),
                "turns": bool(end > start and chunk.start < end and start < chunk.end),
                "store": store(chunk.name),
            }
        )
    return found


def _part(rows: IndexerRows, name: str, field: Field) -> dict[str, Any]:
    """Template context of a field that the gather copies."""
    pointers, alignment = layout.bytes_text(rows.layout, field)
    block = next_power_of_2(field.nbytes)
    return {
        "name": name,
        "bytes": field.nbytes,
        "block": block,
        "masked": block > field.nbytes,
        "rows": pointers,
        "alignment": alignment,
        "out_alignment": "ALIGNMENT" if name == "values" else _aligned(field.nbytes),
    }


def _parts_doc(rows: IndexerRows) -> dict[str, str]:
    """Return descriptions of a gathered key's parts, for docstrings."""
    scales = rows.scales
    assert scales is not None
    taken = f"8-bit [N, {scales.nbytes}]"
    if scales.dtype == "fp32":
        taken += f" or float32 [N{'' if scales.count == 1 else f', {scales.count}'}]"
    return {
        "values": f"{rows.values.dtype}, two a byte" if rows.packed else rows.values.dtype,
        "takes_scales": f"{taken}, any token stride",
        "scales": f"{scales.count} x {scales.dtype}",
    }


def _facts(plan: Plan, family: IndexerCachePlan) -> dict[str, Any]:
    """Return the context of both templates."""
    rows, wrappers = family.rows, plan.spec.wrappers
    scales, query_scales = rows.scales, rows.query.scales_of(rows.query.data[0])
    assert scales is not None  # checked by the plan
    assert query_scales is not None
    return {
        "dtype": plan.spec.model.dtype,
        "layout": rows.layout,
        "writes_keys": WRITE in wrappers,
        "gathers": GATHER in wrappers,
        "quantises_query": QUERY in wrappers,
        "normalises": NORMALISE in wrappers,
        "both": BOTH in wrappers,
        "groups": NORMALISE in wrappers or family.rows.indexer.compress_ratio > 1,
        "writes": not {WRITE, NORMALISE, BOTH}.isdisjoint(wrappers),
        "needs_e4m3": layout.needs_e4m3(rows.layout),
        "query_needs_e4m3": layout.needs_e4m3(rows.query),
        "packed": rows.packed,
        "turns": rows.indexer.rope_head_dim > 0,
        "turn": _turn(rows),
        "query_bytes": rows.query.data[0].nbytes,
        "query_scale_bytes": query_scales.nbytes,
        "key_bytes": rows.values.nbytes,
        "key_scale_bytes": scales.nbytes,
    }


def _kernels(plan: Plan, family: IndexerCachePlan) -> dict[str, Any]:
    """Context of the kernels' template."""
    rows = family.rows
    cached, scales = rows.layout, rows.scales
    assert scales is not None  # checked by the plan
    of_keys, of_query = indexer_layout.keys_context(plan, rows), indexer_layout.query_context(plan, rows)
    query = of_query.stored[0].name
    return {
        **_facts(plan, family),
        **{name: getattr(of_keys, name) for name in ("element", "args", "pads")},
        "stored": _chunks(rows, of_keys.stored, lambda name: layout.store_text(cached, name)),
        "query_stored": _chunks(
            rows,
            of_query.stored,
            lambda name: indexer_layout.query_store_text(rows, indexer_layout.pieces_text(rows, name), "there"),
        ),
        "pieces": _pieces(rows, query),
        "piece_columns": rows.piece,
        "binds_pieces": indexer_layout.binds_pieces(rows, query),
        "pieces_store": layout.store_text(cached, indexer_layout.pieces_text(rows, query)),
        "parts": [_part(rows, "values", rows.values), _part(rows, "scales", scales)],
    }


def _wrappers(plan: Plan, family: IndexerCachePlan) -> dict[str, Any]:
    """Context of the wrappers' template."""
    rows = family.rows
    cached, query, scales, dtype = rows.layout, rows.query, rows.scales, rows.values.dtype
    assert scales is not None  # checked by the plan
    of_keys = indexer_layout.keys_context(plan, rows)
    float_dtype = {"e4m3": "float8_e4m3fn", "e4m3fnuz": "float8_e4m3fnuz"}.get(dtype)
    bytes_dtypes = ["uint8", "int8", *([float_dtype] if float_dtype else [])]
    return {
        **_facts(plan, family),
        **{name: getattr(of_keys, name) for name in ("row_constant", "unit_name", "row_alignment")},
        "indexer": rows.indexer,
        "takes_pages": False,
        "query_padded": query.plane_bytes[0] > query.data[0].nbytes,
        "query_scales": query.scales_of(query.data[0]),
        "scales": scales,
        "scale_alignment": math.gcd(scales.nbytes, FULL_ALIGNMENT),
        "one_scale": (scales.dtype, scales.count) == ("fp32", 1),
        "parts_doc": _parts_doc(rows),
        "cache_dtypes": ", ".join(f"torch.{name}" for name in bytes_dtypes),
        "values_dtype": float_dtype or "uint8",
        "cache_strides": "call.page_stride" if cached.planar else "call.page_stride | call.row_stride",
        "is_ue8m0": scales.rule.rounding == "power_of_two",
        "torch_dtype": TORCH_DTYPES[plan.spec.model.dtype],
    }


def shared(plan: Plan, family: IndexerCachePlan) -> list[GeneratedFile]:
    """Files that the family's module imports."""
    found = [indexer_layout.keys_file(plan, family.rows)]
    if not {QUERY, BOTH}.isdisjoint(plan.spec.wrappers):
        found.append(indexer_layout.query_file(plan, family.rows))
    return [*found, tiles.file(plan), generated(f"_{MODULE}_kernels", _kernels(plan, family))]


def modules(plan: Plan, family: IndexerCachePlan) -> list[Module]:
    """The module of the family's wrappers."""
    names = [name for name in family.WRAPPERS if name in plan.spec.wrappers]
    return [Module(generated(MODULE, _wrappers(plan, family)), names)]
