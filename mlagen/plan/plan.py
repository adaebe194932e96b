"""The plan of one spec: layout, chunks, tiles and the sizes that follow from them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from mlagen import work
from mlagen.errors import LimitError
from mlagen.layout import CacheLayout, layouts_of
from mlagen.plan import fits
from mlagen.plan.cache import CachePlan, make_cache_plan
from mlagen.plan.chunks import Chunk, make_chunks
from mlagen.plan.dense_decode import DENSE_DECODE_WRAPPERS, DenseDecodePlan, make_dense_decode_plan
from mlagen.plan.dense_fwd import DenseFwdPlan, make_dense_fwd_plan
from mlagen.plan.index_union import IndexUnionPlan, make_index_union
from mlagen.plan.index_union import refusal as union_refusal
from mlagen.plan.merge_states import MergeStatesPlan, make_merge_states_plan
from mlagen.plan.replacements import Replacement, read_replacements, split_table
from mlagen.plan.sm90 import (
    SM90,
    Sm90Plan,
    Sm90Row,
    make_dense_fwd_sm90,
    make_sm90,
    make_swap_ab,
    reads_cache,
    refusal,
)
from mlagen.plan.sparse_decode import (
    SPARSE_DECODE_WRAPPER,
    CachedRow,
    SparseDecodePlan,
    cached_row,
    make_sparse_decode_plan,
    sparse_decode_unaligned,
)
from mlagen.plan.splits import PartialRow, SplitsPlan, make_splits
from mlagen.plan.targets import TARGETS, Target
from mlagen.plan.tiles import RowMaker, Tile, TileRow, default_rows, row_maker, unaligned_row, unaligned_tile
from mlagen.plan.tritons import has_versions
from mlagen.plan.tuned import KINDS, SM90_KINDS, TunedFiles
from mlagen.spec import NEEDS, DenseAttention, SparseAttention, Spec, load

ROWS_WRAPPERS = ("triton_mla_sparse_attention", "flash_mla_sparse_fwd")  # of attention over unquantised rows


Part = TypeVar("Part")


def needed(part: Part | None) -> Part:
    """A part of a plan or a spec, of which the caller knows that it is there."""
    assert part is not None
    return part


@dataclass(frozen=True)
class SparseFwdPlan:
    """Numbers of the sparse attention kernels.

    Attributes:
        chunks: blocks of a row, in lane order.
        tiles: rows of the tile table by target.
        unaligned: the same of calls whose rows or indices are not aligned: one row, or one a run of Tritons.
        sm90: the kernel's of the Gluon back end; None without.
        swap_ab: the one's of few heads, by how many it holds, fewest first; empty without.
        union: those of the kernels in which neighbouring tokens share rows; None without.
    """

    chunks: tuple[Chunk, ...]
    tiles: tuple[tuple[str, tuple[TileRow, ...]], ...]
    unaligned: tuple[tuple[str, tuple[TileRow, ...]], ...]
    sm90: Sm90Plan | None
    swap_ab: tuple[Sm90Plan, ...]
    union: IndexUnionPlan | None


@dataclass(frozen=True)
class Plan:
    """Every number that follows from a spec.

    Attributes:
        spec: the spec.
        layout, extra_layout: bytes of a token of either cache; None without it.
        d_qk, d_v: lanes of a KV row, and of V; 0 without latent rows.
        sparse_fwd: attention over the rows that indices name; None where attention is of another kind.
        sparse_decode: the same over a cache; None without its wrapper.
        dense_decode: attention over all keys of a request; None without its wrappers.
        splits: what all attention kernels share; None without them.
        cache: the cache kernels; None without a cache.
        dense_fwd: multi-head attention; None without its wrapper.
        merge_states: merges of normalised partial results; None without their wrappers.
    """

    spec: Spec
    layout: CacheLayout | None
    extra_layout: CacheLayout | None
    d_qk: int
    d_v: int
    sparse_fwd: SparseFwdPlan | None
    sparse_decode: SparseDecodePlan | None
    dense_decode: DenseDecodePlan | None
    splits: SplitsPlan | None
    cache: CachePlan | None
    dense_fwd: DenseFwdPlan | None
    merge_states: MergeStatesPlan | None

    @property
    def union(self) -> IndexUnionPlan | None:
        """Numbers of the kernels of shared indices; None without."""
        return self.sparse_fwd.union if self.sparse_fwd else None

    @property
    def sparse_attention(self) -> SparseAttention:
        """What the spec says of attention over the rows that indices name; there has to be such."""
        assert isinstance(self.spec.attention, SparseAttention)
        return self.spec.attention

    @property
    def rows_block_size(self) -> int | None:
        """Tokens a page of the unquantised rows that attention reads; None: flat rows."""
        return _rows_block_size(self.spec, self.layout)

    @property
    def fits(self) -> dict[str, str]:
        """What the tables of each family hold for, by its name in `plan.fits.FAMILIES`."""
        cached = self.sparse_decode or self.dense_decode
        return _fits(
            self.spec,
            (self.layout, self.extra_layout),
            self.sparse_fwd.chunks if self.sparse_fwd else None,
            cached.chunks if cached else None,
            self.dense_fwd,
        )

    @property
    def has_versions(self) -> bool:
        """Whether a row of any tile table holds for some Tritons alone."""
        parts = (self.sparse_fwd, self.sparse_decode, self.dense_decode, self.dense_fwd)
        return any(has_versions(part.tiles) or has_versions(part.unaligned) for part in parts if part is not None)

    def flops(self, tokens: int, num_heads: int) -> int:
        """FLOPs of one call with full rows: QKᵀ and PV, two a multiply-add."""
        return work.flops(tokens, num_heads, self.sparse_attention.topk, self.d_qk, self.d_v)

    def bytes_moved(self, tokens: int, num_heads: int, s_kv: int) -> int:
        """Fewest bytes of one call: q, out and indices once, and each KV row that is named once, at most s_kv."""
        topk = self.sparse_attention.topk
        rows = work.distinct_rows(tokens, topk, s_kv)
        row_bytes = self.d_qk * work.ITEMSIZE
        return work.attention_bytes(tokens, num_heads, topk, self.d_qk, self.d_v, rows * row_bytes)

    @property
    def sparse_decode_topks(self) -> tuple[int, ...]:
        """Indices a token that attention over the cache takes, of the cache and of the second one if there is one."""
        attention = self.sparse_attention
        if self.extra_layout is None:
            return (attention.topk + (attention.window or 0),)
        return (attention.window or attention.topk, attention.topk)

    def flops_sparse_decode(self, tokens: int, num_heads: int) -> int:
        """FLOPs of one call of attention over the cache with full rows."""
        return work.flops(tokens, num_heads, sum(self.sparse_decode_topks), self.d_qk, self.d_v)

    def bytes_sparse_decode(self, tokens: int, num_heads: int, *slots: int) -> int:
        """Fewest bytes of one call of attention over caches of so many tokens: as `bytes_moved`, rows as stored."""
        moved = work.attention_bytes(tokens, num_heads, 0, self.d_qk, self.d_v, 0)
        layouts = [layout for layout in (self.layout, self.extra_layout) if layout is not None]
        for layout, topk, count in zip(layouts, self.sparse_decode_topks, slots, strict=True):
            rows = work.distinct_rows(tokens, topk, count)
            moved += work.attention_bytes(tokens, 0, topk, self.d_qk, self.d_v, rows * layout.row_bytes)
        return moved

    def flops_dense_decode(self, tokens: int, num_heads: int, keys: int) -> int:
        """FLOPs of one call of dense attention in which each token sees so many keys."""
        return work.flops(tokens, num_heads, keys, self.d_qk, self.d_v)

    def bytes_dense_decode(self, tokens: int, num_heads: int, keys: int) -> int:
        """Fewest bytes of such a call of one query token a request: q and out once, and each token's keys as stored."""
        row_bytes = needed(self.layout).row_bytes
        return work.attention_bytes(tokens, num_heads, 0, self.d_qk, self.d_v, tokens * keys * row_bytes)


def _rows_block_size(spec: Spec, layout: CacheLayout | None) -> int | None:
    return None if layout is None or layout.quantised or spec.cache is None else spec.cache.block_size


AnyPart = TypeVar("AnyPart", SparseFwdPlan, SparseDecodePlan, DenseDecodePlan, DenseFwdPlan)


def _fits(
    spec: Spec,
    layouts: tuple[CacheLayout | None, CacheLayout | None],
    rows: Sequence[Chunk] | None,
    cached: Sequence[Chunk] | None,
    dense_fwd: DenseFwdPlan | None,
) -> dict[str, str]:
    """What tables hold for, by family: of rows in the blocks `rows`, of cached ones, and of heads; None: of none."""
    layout, extra_layout = layouts
    found = {}
    if rows is not None:
        found[fits.SPARSE_FWD] = fits.sparse_fwd(spec, rows, _rows_block_size(spec, layout))
    if cached is not None and layout is not None:
        if isinstance(spec.attention, DenseAttention):
            found[fits.DENSE_DECODE] = fits.dense_decode(spec, cached, layout)
        else:
            found[fits.SPARSE_DECODE] = fits.sparse_decode(spec, cached, layout, extra_layout)
    if dense_fwd is not None and spec.multi_head is not None:
        described = spec.multi_head.addressing == "descriptors"
        dtype = spec.model.dtype
        found[fits.DENSE_FWD] = fits.dense_fwd(dtype, dense_fwd.k_chunks, dense_fwd.v_chunks, descriptors=described)
    return found


def _split_by_version(plan: Plan, replacements: Sequence[Replacement]) -> Plan:
    """The plan with rows of their own for Tritons under which a tile is replacements."""
    of = plan.fits
    sparse_fwd, sparse_decode, dense_decode, dense_fwd = (
        plan.sparse_fwd,
        plan.sparse_decode,
        plan.dense_decode,
        plan.dense_fwd,
    )
    if sparse_fwd is not None:
        chunks = sparse_fwd.chunks

        def row(like: TileRow, tile: Tile, target: Target, reason: str) -> TileRow:
            return row_maker(chunks)(tile, target, reason, like.max_heads, like.max_tokens)

        def small(like: TileRow, tile: Tile, target: Target, reason: str) -> TileRow:
            return unaligned_row(tile, chunks, target, reason)

        sparse_fwd = _split_part(sparse_fwd, replacements, of[fits.SPARSE_FWD], row, small)
    if sparse_decode is not None:
        sparse_decode = _split_part(
            sparse_decode, replacements, of[fits.SPARSE_DECODE], *_row_makers(sparse_decode.cached)
        )
    if dense_decode is not None:
        dense_decode = _split_part(dense_decode, replacements, of[fits.DENSE_DECODE], *_row_makers(dense_decode.cached))
    if dense_fwd is not None:
        wide, narrow = (functools.partial(dense_fwd.row, aligned=aligned) for aligned in (True, False))
        dense_fwd = _split_part(dense_fwd, replacements, of[fits.DENSE_FWD], wide, narrow)
    return replace(
        plan, sparse_fwd=sparse_fwd, sparse_decode=sparse_decode, dense_decode=dense_decode, dense_fwd=dense_fwd
    )


def _row_makers(cached: CachedRow) -> tuple[Callable[..., TileRow], Callable[..., TileRow]]:
    """Rows like another with a tile of attention over a cache, for calls that are aligned, and for the others."""

    def row(like: TileRow, tile: Tile, target: Target, reason: str) -> TileRow:
        return cached.row(tile, target, reason, like.max_heads, like.max_tokens)

    def small(like: TileRow, tile: Tile, target: Target, reason: str) -> TileRow:
        return sparse_decode_unaligned(tile, cached, target, reason)

    return row, small


def _split_part(
    part: AnyPart, replacements: Sequence[Replacement], of: str, row: Callable[..., Any], small: Callable[..., Any]
) -> AnyPart:
    tiles = split_table(part.tiles, replacements, of, "tiles", row)
    return replace(part, tiles=tiles, unaligned=split_table(part.unaligned, replacements, of, "unaligned", small))


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


def load_plan(path: Path, replacements: Sequence[Replacement] | None = None) -> Plan:
    """Reads a spec and the tuned tiles that fit it, and derives the plan.

    Args:
        path: the spec.
        replacements: tiles that hold under some Tritons alone; None: those of `replacements.yaml`.

    Raises:
        SpecErrors: the spec, or a tuned file, is off.
        LimitError: a target cannot hold any tile of these dims.
    """
    spec = load(path)
    sparse = isinstance(spec.attention, SparseAttention)
    layout, extra_layout = layouts_of(spec.model_dump(mode="json"))
    cached = None
    if layout is not None and set(spec.wrappers) & {SPARSE_DECODE_WRAPPER, *DENSE_DECODE_WRAPPERS}:
        loaded = make_cache_plan(layout, extra_layout, spec.model.v_head_dim).chunks
        cached = cached_row(layout, extra_layout if sparse else None, loaded)
    chunks = row_chunks(spec) if sparse else None
    of = _fits(spec, (layout, extra_layout), chunks, cached.chunks if cached else None, None)
    files = TunedFiles(spec.name, path.parent, spec.model.num_heads)
    makers: dict[str, RowMaker] = {}
    if chunks is not None:
        makers[fits.SPARSE_FWD] = row_maker(chunks)
    if cached is not None:
        makers |= dict.fromkeys((fits.SPARSE_DECODE, fits.DENSE_DECODE), cached.row)
    tuned = {family: files.rows(text, spec.targets, makers[family]) for family, text in of.items()}
    calls = {
        kind: files.sm90_rows(of[family], SM90) for kind, family in zip(SM90_KINDS, KINDS, strict=True) if family in of
    }
    return make_plan(
        spec,
        tuned.get(fits.SPARSE_FWD),
        tuned.get(fits.SPARSE_DECODE),
        calls,
        tuned.get(fits.DENSE_DECODE),
        replacements,
    )


def make_plan(
    spec: Spec,
    tuned: Mapping[str, Sequence[TileRow]] | None = None,
    tuned_sparse_decode: Mapping[str, Sequence[TileRow]] | None = None,
    tuned_sm90: Mapping[str, Sequence[Sm90Row] | None] | None = None,
    tuned_dense_decode: Mapping[str, Sequence[TileRow]] | None = None,
    replacements: Sequence[Replacement] | None = None,
) -> Plan:
    """Derives the plan.

    Args:
        spec: the validated spec.
        tuned: rows of the tile table that a sweep found, by target; targets without take the defaults.
        tuned_sparse_decode: the same of attention over a cache.
        tuned_sm90: which calls run the sm90 kernels, by `tuned.SM90_KINDS`.
        tuned_dense_decode: as `tuned`, of dense attention.
        replacements: tiles that hold under some Tritons alone; None: those of `replacements.yaml`.

    Raises:
        LimitError: the spec asks for the Gluon back end, or for shared indices, and cannot have them; or a target
            cannot hold any tile of these dims; one line with the arithmetic.
    """
    dims = spec.model
    reason = refusal(spec)
    if spec.backend == "gluon" and reason is not None:
        raise LimitError(f"specs/{spec.name}.yaml: backend: got gluon, which cannot be emitted: {reason}")
    layout, extra_layout = layouts_of(spec.model_dump(mode="json"))
    d_qk = dims.kv_lora_rank + dims.qk_rope_head_dim
    cache = None if layout is None else make_cache_plan(layout, extra_layout, dims.v_head_dim)
    partials = PartialRow(spec.partials, dims.v_head_dim)
    sparse_fwd = sparse_decode = dense_decode = splits = None
    if isinstance(spec.attention, SparseAttention):
        sparse_fwd = _make_sparse_fwd(spec, tuned or {}, tuned_sm90 or {})
        if SPARSE_DECODE_WRAPPER in spec.wrappers and layout is not None and cache is not None:
            sparse_decode = _make_sparse_decode(
                spec, layout, extra_layout, cache, tuned_sparse_decode or {}, tuned_sm90 or {}
            )
        tables = [*sparse_fwd.tiles, *(sparse_decode.tiles if sparse_decode else ())]
        splits = make_splits(partials, (row for _, rows in tables for row in rows))
    elif set(spec.wrappers) & set(DENSE_DECODE_WRAPPERS) and layout is not None and cache is not None:
        sm90 = None if layout.quantised else make_sm90(spec, (tuned_sm90 or {}).get(SM90_KINDS[2]))
        dense_decode = make_dense_decode_plan(
            spec, cached_row(layout, None, cache.chunks), cache, sm90, tuned_dense_decode
        )
        splits = make_splits(partials, (row for _, rows in dense_decode.tiles for row in rows))
    dense_fwd, merge_states = _make_dense_fwd(spec), _make_merge_states(spec)
    plan = Plan(
        spec=spec,
        layout=layout,
        extra_layout=extra_layout,
        d_qk=d_qk,
        d_v=dims.v_head_dim,
        sparse_fwd=sparse_fwd,
        sparse_decode=sparse_decode,
        dense_decode=dense_decode,
        splits=splits,
        cache=cache,
        dense_fwd=dense_fwd,
        merge_states=merge_states,
    )
    return _split_by_version(plan, read_replacements() if replacements is None else replacements)


TunedRows = Mapping[str, Sequence[TileRow]]
TunedSm90 = Mapping[str, Sequence[Sm90Row] | None]


def _make_sparse_fwd(spec: Spec, tuned: TunedRows, tuned_sm90: TunedSm90) -> SparseFwdPlan:
    chunks = row_chunks(spec)
    over_rows = bool(set(spec.wrappers) & set(ROWS_WRAPPERS))
    assert isinstance(spec.attention, SparseAttention)
    group = spec.attention.shared_indices
    reason = union_refusal(spec, over_rows=over_rows)
    if group is not None and reason is not None:
        message = f"attention.shared_indices: got {group}, which cannot be emitted: {reason}"
        raise LimitError(f"specs/{spec.name}.yaml: {message}")
    sm90 = make_sm90(spec, tuned_sm90.get(SM90_KINDS[0])) if over_rows else None

    def small_row(name: str) -> TileRow:
        return unaligned_row(unaligned_tile(chunks, TARGETS[name]), chunks, TARGETS[name])

    return SparseFwdPlan(
        chunks=chunks,
        tiles=tuple(
            (name, tuple(tuned.get(name) or default_rows(spec.model.num_heads, chunks, TARGETS[name])))
            for name in spec.targets
        ),
        unaligned=tuple((name, (small_row(name),)) for name in spec.targets),
        sm90=sm90,
        swap_ab=make_swap_ab(sm90, PartialRow(spec.partials, spec.model.v_head_dim)) if sm90 is not None else (),
        union=make_index_union(group, sm90) if group is not None and sm90 is not None else None,
    )


def _make_sparse_decode(
    spec: Spec,
    layout: CacheLayout,
    extra_layout: CacheLayout | None,
    cache: CachePlan,
    tuned: TunedRows,
    tuned_sm90: TunedSm90,
) -> SparseDecodePlan:
    cached = cached_row(layout, extra_layout, cache.chunks)
    sm90 = None
    reads = reads_cache(layout, extra_layout) and spec.model.dtype == "bf16"  # as which the kernel takes Q apart
    caches = layout.name if extra_layout is None else f"{layout.name} beside one of {extra_layout.name}"
    if spec.backend == "gluon" and not reads:
        reason = f"no sm90 kernel reads a cache of {caches} for {spec.model.dtype}"
        raise LimitError(f"specs/{spec.name}.yaml: backend: got gluon, which cannot be emitted: {reason}")
    if reads:
        sm90 = make_sm90(spec, tuned_sm90.get(SM90_KINDS[1]), layout, extra_layout)
    return make_sparse_decode_plan(spec, cached, cache.chunks, tuned, sm90)


def _make_dense_fwd(spec: Spec) -> DenseFwdPlan | None:
    heads = spec.multi_head
    if heads is None or not any(NEEDS[name].multi_head for name in spec.wrappers):
        return None
    targets = [TARGETS[name] for name in spec.targets]
    sm90 = make_dense_fwd_sm90(spec, TARGETS[SM90].shared_limit)
    described = heads.addressing == "descriptors"
    return make_dense_fwd_plan(heads.qk_head_dim, heads.v_head_dim, targets, sm90, descriptors=described)


def _make_merge_states(spec: Spec) -> MergeStatesPlan | None:
    """Parts may be of multi-head attention or of attention over latent rows: a package merges either that it knows."""
    if not any(NEEDS[name].values for name in spec.wrappers):
        return None
    dims = (spec.multi_head.v_head_dim if spec.multi_head else 0, spec.model.v_head_dim)
    return make_merge_states_plan(lanes for lanes in dims if lanes)
