"""The plan of one spec: layout, chunks, tiles and the sizes that follow from them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlagen.plan import work
from mlagen.plan.chunks import Chunk, make_chunks, next_power_of_2
from mlagen.plan.layout import CacheLayout, make_layout
from mlagen.plan.targets import TARGETS
from mlagen.plan.tiles import TileRow, default_rows, unaligned_row
from mlagen.plan.tuned import load_tuned
from mlagen.spec import Spec, load

SPLIT_OVERHEAD = 2
MERGE_OVERHEAD = 4
MAX_SPLITS = 128
BATCH_INVARIANT_SPLIT = 512
WORKSPACE_BYTES = 256 << 20
MERGE_BLOCK_S = 16
MERGE_BLOCK_D = 128
MERGE_NUM_WARPS = 2
CACHE_MOST_TOKENS = 64
CACHE_NUM_WARPS = 4
CACHE_TILE_BYTES = 8192  # bytes a program of the cache writer moves


@dataclass(frozen=True)
class MergePlan:
    """Numbers of the kernel that merges splits.

    Attributes:
        block_s: splits it adds at a time.
        block_d: lanes of V a program holds.
        d_blocks: programs a row.
        masked: the last of them is not full.
        num_warps: warps a program.
        expected_shared: bytes of shared memory, for the reductions over splits.
    """

    block_s: int
    block_d: int
    d_blocks: int
    masked: bool
    num_warps: int
    expected_shared: int


@dataclass(frozen=True)
class SparsePlan:
    """Numbers of the sparse attention kernels.

    Attributes:
        chunks: blocks of a row, in lane order.
        tiles: rows of the tile table by target.
        unaligned: the tile of calls whose rows or indices are not aligned, by target.
        split_overhead, merge_overhead: fixed cost of a program and of a merge, in steps of BLOCK_N indices.
        max_splits: most splits a call is cut into.
        batch_invariant_split: indices a split where bounds depend on the row alone.
        workspace_bytes: size from which a call goes through its workspace in pieces.
        merge: the merge kernel's.
        partial_alignment: bytes at which each row of the fp32 partials begins.
    """

    chunks: tuple[Chunk, ...]
    tiles: tuple[tuple[str, tuple[TileRow, ...]], ...]
    unaligned: tuple[tuple[str, TileRow], ...]
    split_overhead: int
    merge_overhead: int
    max_splits: int
    batch_invariant_split: int
    workspace_bytes: int
    merge: MergePlan
    partial_alignment: int


@dataclass(frozen=True)
class CachePlan:
    """Numbers of the cache writer: tokens and warps a program."""

    chunks: tuple[Chunk, ...]
    block_t: int
    num_warps: int


@dataclass(frozen=True)
class Plan:
    """Every number that follows from a spec."""

    spec: Spec
    layout: CacheLayout
    d_qk: int
    d_v: int
    sparse: SparsePlan
    cache: CachePlan

    def flops(self, tokens: int, num_heads: int) -> int:
        """FLOPs of one call with full rows: QKᵀ and PV, two a multiply-add."""
        return work.flops(tokens, num_heads, self.spec.attention.topk, self.d_qk, self.d_v)

    def bytes_moved(self, tokens: int, num_heads: int, s_kv: int) -> int:
        """Fewest bytes of one call: q, out and indices once, and each KV row that is named once, at most s_kv."""
        topk = self.spec.attention.topk
        rows = work.distinct_rows(tokens, topk, s_kv)
        row_bytes = self.layout.row_bytes
        return work.bytes_moved(tokens, num_heads, topk, self.d_qk, self.d_v, kv_rows=rows, row_bytes=row_bytes)


def _make_merge(d_v: int) -> MergePlan:
    block_d = min(MERGE_BLOCK_D, next_power_of_2(d_v))
    return MergePlan(
        block_s=MERGE_BLOCK_S,
        block_d=block_d,
        d_blocks=-(-d_v // block_d),
        masked=d_v % block_d != 0,
        num_warps=MERGE_NUM_WARPS,
        expected_shared=MERGE_NUM_WARPS * block_d * 4,
    )


def layout_fingerprint(layout: CacheLayout) -> str:
    """Sixteen hex digits that tell layouts apart, those of equal byte count too: sha256 over the field table."""
    text = "\n".join((layout.name, *layout.byte_table, str(layout.row_bytes)))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def row_chunks(spec: Spec) -> tuple[Chunk, ...]:
    """Blocks of a KV row as attention reads it.

    Where V reaches into the RoPE lanes, the field boundary cuts nothing: the row is one run of lanes of one dtype.
    """
    dims = spec.model
    if dims.v_head_dim > dims.kv_lora_rank:
        return make_chunks([("kv", dims.kv_lora_rank + dims.qk_rope_head_dim)], dims.v_head_dim)
    return make_chunks(_fields(spec), dims.v_head_dim)


def _fields(spec: Spec) -> list[tuple[str, int]]:
    dims = spec.model
    rope = [("rope", dims.qk_rope_head_dim)] if dims.qk_rope_head_dim else []
    return [("nope", dims.kv_lora_rank), *rope]


def load_plan(path: Path) -> Plan:
    """Reads a spec and the tuned tiles beside it, and derives the plan.

    Raises:
        SpecErrors: the spec, or a tuned file, is off.
        LimitError: a target cannot hold any tile of these dims.
    """
    spec = load(path)
    return make_plan(spec, load_tuned(spec.name, path.parent, row_chunks(spec)))


def make_plan(spec: Spec, tuned: Mapping[str, Sequence[TileRow]] | None = None) -> Plan:
    """Derives the plan.

    Args:
        spec: the validated spec.
        tuned: rows of the tile table that a sweep found, by target; targets without take the defaults.

    Raises:
        LimitError: a target cannot hold any tile of these dims; one line with the arithmetic.
    """
    dims = spec.model
    layout = make_layout(spec)
    d_qk = dims.kv_lora_rank + dims.qk_rope_head_dim
    chunks = row_chunks(spec)
    tiles = tuple(
        (name, tuple((tuned or {}).get(name) or default_rows(dims.num_heads, chunks, TARGETS[name])))
        for name in spec.targets
    )
    block_steps = max(row.tile.block_n for _, rows in tiles for row in rows)
    sparse = SparsePlan(
        chunks=chunks,
        tiles=tiles,
        unaligned=tuple((name, unaligned_row(chunks, TARGETS[name])) for name in spec.targets),
        split_overhead=SPLIT_OVERHEAD,
        merge_overhead=MERGE_OVERHEAD,
        max_splits=MAX_SPLITS,
        batch_invariant_split=max(BATCH_INVARIANT_SPLIT, block_steps),
        workspace_bytes=WORKSPACE_BYTES,
        merge=_make_merge(dims.v_head_dim),
        partial_alignment=16 if dims.v_head_dim % 4 == 0 else 4,
    )
    writer_chunks = make_chunks(_fields(spec), dims.kv_lora_rank)
    block_t = max(1, min(CACHE_MOST_TOKENS, next_power_of_2(CACHE_TILE_BYTES // layout.row_bytes)))
    return Plan(spec, layout, d_qk, dims.v_head_dim, sparse, CachePlan(writer_chunks, block_t, CACHE_NUM_WARPS))
