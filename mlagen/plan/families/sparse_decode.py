"""Numbers of sparse attention over a paged cache, and over a second one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from mlagen import work
from mlagen.errors import LimitError
from mlagen.layout import CacheLayout
from mlagen.plan.attention import ANY, CachedFamily, Work, splits_of, unaligned_table
from mlagen.plan.ops import Op
from mlagen.plan.rows import Caches
from mlagen.plan.sm90.caches import cache_refusal
from mlagen.plan.sm90.kernel import Sm90Plan, refusal
from mlagen.plan.sm90.seesaw import cached_kernel, make_sm90
from mlagen.plan.sm90.sparse_decode import make_sparse_e4m3
from mlagen.plan.targets import TARGETS
from mlagen.plan.tiles import fits
from mlagen.plan.tiles.cached_row import cached_row
from mlagen.plan.tiles.tuned import Tuned
from mlagen.spec import SparseAttention, Spec


@dataclass(frozen=True)
class IndexedCache:
    """A cache and the indices that name its rows.

    Attributes:
        layout: the cache's.
        topk: indices a token.
    """

    layout: CacheLayout
    topk: int


@dataclass(frozen=True, kw_only=True)
class SparseDecodePlan(CachedFamily):
    """Numbers of the kernels of attention over a cache.

    Attributes:
        indexed: the cache, and the second one if there is one, with their indices.
        sm90_e4m3: the numbers of the sm90 kernel of a q of e4m3; None without one.
    """

    NAME: ClassVar = fits.SPARSE_DECODE
    WRAPPERS: ClassVar = {
        "flash_mla_with_kvcache": Op(
            ("workspace",), {"out": "out", "lse": None}, ("tile_scheduler_metadata", "num_splits")
        ),
    }
    SM90_KERNELS: ClassVar = {"sm90": "_sparse_decode_sm90", "sm90_e4m3": "_sparse_decode_sm90_e4m3"}

    indexed: tuple[IndexedCache, ...]
    sm90_e4m3: Sm90Plan | None

    @classmethod
    def make(cls, spec: Spec, caches: Caches | None, tuned: Tuned) -> SparseDecodePlan | None:
        """Derives the numbers; see `Family`."""
        attention, dims = spec.attention, spec.model
        if caches is None or not isinstance(attention, SparseAttention) or not cls.wanted(spec):
            return None
        layout, extra = caches.main.layout, caches.extra.layout if caches.extra else None
        cached = cached_row(layout, extra, caches.chunks)
        text = fits.sparse_decode(spec, cached.chunks, layout, extra)
        sm90 = _make_sm90(spec, layout, extra, text, tuned)
        found = tuned.rows(text, spec.targets, cached.row)
        return cls(
            fits=text,
            tiles=tuple(
                (name, found.get(name) or cached.untuned(dims.num_heads, TARGETS[name])) for name in spec.targets
            ),
            unaligned=unaligned_table(cached, spec.targets),
            d_qk=dims.d_qk,
            d_v=dims.v_head_dim,
            splits=splits_of(spec),
            sm90=sm90,
            caches=caches,
            indexed=_indexed(attention, layout, extra),
            sm90_e4m3=make_sparse_e4m3(spec, layout, extra, sm90),
            cached=cached,
        )

    def describe_sm90(self) -> Iterator[str]:
        """Yield lines about its sm90 kernels; see `LatentFamily`."""
        yield from super().describe_sm90()
        if self.sm90_e4m3 is not None:
            plan = self.sm90_e4m3
            yield f"with q of e4m3, instead: {plan.step} indices per step; registers {plan.resources}"

    def flops(self, tokens: int, num_heads: int) -> int:
        """FLOPs of one call with full rows: QKᵀ and PV, two a multiply-add."""
        return work.flops(tokens, num_heads, sum(one.topk for one in self.indexed), self.d_qk, self.d_v)

    def bytes(self, tokens: int, num_heads: int, *slots: int) -> int:
        """Fewest bytes of one call over caches of so many tokens: q, out and indices once, and named rows as stored."""
        moved = work.attention_bytes(tokens, num_heads, 0, self.d_qk, self.d_v, 0)
        for one, count in zip(self.indexed, slots, strict=True):
            rows = work.distinct_rows(tokens, one.topk, count)
            moved += work.attention_bytes(tokens, 0, one.topk, self.d_qk, self.d_v, rows * one.layout.row_bytes)
        return moved

    def one_token(self, num_heads: int) -> Work:
        """The work of a call of one token."""
        moved = self.bytes(1, num_heads, *(ANY for _ in self.indexed))
        return Work("one token over the cache", self.flops(1, num_heads), moved)


def _indexed(attention: SparseAttention, layout: CacheLayout, extra: CacheLayout | None) -> tuple[IndexedCache, ...]:
    window, topk = attention.window, attention.topk
    if extra is None:
        return (IndexedCache(layout, topk + (window or 0)),)
    return IndexedCache(layout, window or topk), IndexedCache(extra, topk)


def _make_sm90(spec: Spec, layout: CacheLayout, extra: CacheLayout | None, text: str, tuned: Tuned) -> Sm90Plan | None:
    """The sm90 kernel's numbers; None without one."""
    reason = refusal(spec) or cache_refusal(spec, layout, extra)
    if reason is None:
        return make_sm90(spec, cached_kernel(layout, extra), tuned.sm90_rows(text), layout)
    if spec.backend == "gluon":
        raise LimitError(f"backend: got gluon, which cannot be emitted: {reason}")
    return None
