"""The plan of one spec: layout, chunks, tiles and the sizes that follow from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlagen.errors import LimitError
from mlagen.layout import CacheLayout, layouts_of
from mlagen.plan import work
from mlagen.plan.cache import CachePlan, make_cache_plan
from mlagen.plan.chunks import Chunk, make_chunks
from mlagen.plan.hopper import HOPPER_TARGET, HopperPlan, HopperRow, make_hopper, reads_cache, refusal
from mlagen.plan.kvcache import KVCACHE_WRAPPER, KvcachePlan, cached_row, make_kvcache_plan
from mlagen.plan.splits import SplitsPlan, make_splits
from mlagen.plan.targets import TARGETS
from mlagen.plan.tiles import TileRow, default_rows, unaligned_row
from mlagen.plan.tuned import HOPPER_KINDS, load_tuned, load_tuned_hopper, load_tuned_kvcache
from mlagen.spec import Spec, load

ROWS_WRAPPERS = ("triton_mla_sparse_attention", "flash_mla_sparse_fwd")  # of attention over unquantised rows


@dataclass(frozen=True)
class SparsePlan:
    """Numbers of the sparse attention kernels.

    Attributes:
        chunks: blocks of a row, in lane order.
        tiles: rows of the tile table by target.
        unaligned: the tile of calls whose rows or indices are not aligned, by target.
        hopper: the kernel's of the Gluon back end; None without.
    """

    chunks: tuple[Chunk, ...]
    tiles: tuple[tuple[str, tuple[TileRow, ...]], ...]
    unaligned: tuple[tuple[str, TileRow], ...]
    hopper: HopperPlan | None


@dataclass(frozen=True)
class Plan:
    """Every number that follows from a spec."""

    spec: Spec
    layout: CacheLayout
    extra_layout: CacheLayout | None
    d_qk: int
    d_v: int
    sparse: SparsePlan
    kvcache: KvcachePlan | None
    splits: SplitsPlan
    cache: CachePlan

    @property
    def rows_block_size(self) -> int | None:
        """Tokens a page of the unquantised rows that attention reads; None: flat rows."""
        return None if self.layout.quantised else self.spec.cache.block_size

    def flops(self, tokens: int, num_heads: int) -> int:
        """FLOPs of one call with full rows: QKᵀ and PV, two a multiply-add."""
        return work.flops(tokens, num_heads, self.spec.attention.topk, self.d_qk, self.d_v)

    def bytes_moved(self, tokens: int, num_heads: int, s_kv: int) -> int:
        """Fewest bytes of one call: q, out and indices once, and each KV row that is named once, at most s_kv."""
        topk = self.spec.attention.topk
        rows = work.distinct_rows(tokens, topk, s_kv)
        row_bytes = self.d_qk * work.ITEMSIZE
        return work.bytes_moved(tokens, num_heads, topk, self.d_qk, self.d_v, kv_rows=rows, row_bytes=row_bytes)

    @property
    def kvcache_topks(self) -> tuple[int, ...]:
        """Indices a token that attention over the cache takes, of the cache and of the second one if there is one."""
        attention = self.spec.attention
        if self.extra_layout is None:
            return (attention.topk + (attention.window or 0),)
        return (attention.window or attention.topk, attention.topk)

    def flops_kvcache(self, tokens: int, num_heads: int) -> int:
        """FLOPs of one call of attention over the cache with full rows."""
        return work.flops(tokens, num_heads, sum(self.kvcache_topks), self.d_qk, self.d_v)

    def bytes_kvcache(self, tokens: int, num_heads: int, *slots: int) -> int:
        """Fewest bytes of one call of attention over caches of so many tokens: as `bytes_moved`, rows as stored."""
        moved = work.bytes_moved(tokens, num_heads, 0, self.d_qk, self.d_v, kv_rows=0, row_bytes=0)
        layouts = [layout for layout in (self.layout, self.extra_layout) if layout is not None]
        for layout, topk, count in zip(layouts, self.kvcache_topks, slots, strict=True):
            rows = work.distinct_rows(tokens, topk, count)
            moved += work.bytes_moved(tokens, 0, topk, self.d_qk, self.d_v, kv_rows=rows, row_bytes=layout.row_bytes)
        return moved


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
    tuned = load_tuned(spec.name, path.parent, row_chunks(spec))
    calls = {kind: load_tuned_hopper(kind, spec.name, path.parent, HOPPER_TARGET) for kind in HOPPER_KINDS}
    if KVCACHE_WRAPPER not in spec.wrappers:
        return make_plan(spec, tuned, tuned_hopper=calls)
    layouts = layouts_of(spec.model_dump(mode="json"))
    cached = cached_row(*layouts, make_cache_plan(*layouts, spec.model.v_head_dim).chunks)
    return make_plan(spec, tuned, load_tuned_kvcache(spec.name, path.parent, cached), calls)


def make_plan(
    spec: Spec,
    tuned: Mapping[str, Sequence[TileRow]] | None = None,
    tuned_kvcache: Mapping[str, Sequence[TileRow]] | None = None,
    tuned_hopper: Mapping[str, Sequence[HopperRow] | None] | None = None,
) -> Plan:
    """Derives the plan.

    Args:
        spec: the validated spec.
        tuned: rows of the tile table that a sweep found, by target; targets without take the defaults.
        tuned_kvcache: the same of attention over a cache.
        tuned_hopper: which calls run the Hopper kernels, by `tuned.HOPPER_KINDS`.

    Raises:
        LimitError: the spec asks for the Gluon back end and cannot have it; or a target cannot hold any tile of these
            dims; one line with the arithmetic.
    """
    dims = spec.model
    reason = refusal(spec)
    if spec.backend == "gluon" and reason is not None:
        raise LimitError(f"specs/{spec.name}.yaml: backend: got gluon, which cannot be emitted: {reason}")
    layout, extra_layout = layouts_of(spec.model_dump(mode="json"))
    d_qk = dims.kv_lora_rank + dims.qk_rope_head_dim
    chunks = row_chunks(spec)
    tiles = tuple(
        (name, tuple((tuned or {}).get(name) or default_rows(dims.num_heads, chunks, TARGETS[name])))
        for name in spec.targets
    )
    sparse = SparsePlan(
        chunks=chunks,
        tiles=tiles,
        unaligned=tuple((name, unaligned_row(chunks, TARGETS[name])) for name in spec.targets),
        hopper=make_hopper(spec, (tuned_hopper or {}).get(HOPPER_KINDS[0]))
        if set(spec.wrappers) & set(ROWS_WRAPPERS)
        else None,
    )
    cache = make_cache_plan(layout, extra_layout, dims.v_head_dim)
    kvcache = None
    if KVCACHE_WRAPPER in spec.wrappers:
        cached = cached_row(layout, extra_layout, cache.chunks)
        kvcache_hopper = None
        if spec.backend == "gluon" and not reads_cache(layout, extra_layout):
            caches = layout.name if extra_layout is None else f"{layout.name} beside one of {extra_layout.name}"
            raise LimitError(
                f"specs/{spec.name}.yaml: backend: got gluon, which cannot be emitted: "
                f"no Hopper kernel reads a cache of {caches}"
            )
        if reads_cache(layout, extra_layout):
            kvcache_hopper = make_hopper(spec, (tuned_hopper or {}).get(HOPPER_KINDS[1]), dequantises=True)
        kvcache = make_kvcache_plan(spec, cached, cache.chunks, tuned_kvcache, kvcache_hopper)
    tables = [*tiles, *(kvcache.tiles if kvcache else ())]
    splits = make_splits(dims.v_head_dim, (row for _, rows in tables for row in rows))
    return Plan(spec, layout, extra_layout, d_qk, dims.v_head_dim, sparse, kvcache, splits, cache)
