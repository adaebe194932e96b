"""Numbers of dense attention over a paged cache: tiles, and how a batch's keys are shared out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from mlagen import work
from mlagen.layout import CacheLayout
from mlagen.plan.attention import CachedFamily, Work, splits_of, unaligned_table
from mlagen.plan.ops import Op
from mlagen.plan.rows import Caches
from mlagen.plan.sm90 import swap_ab
from mlagen.plan.sm90.dense_decode import (
    E4M3_REQUEST_OVERHEAD,
    SM90_COMBINE_UNITS,
    SM90_REQUEST_OVERHEAD,
    Rows64Row,
    check_e4m3_p,
    has_e4m3_p,
    make_dense_e4m3,
    make_dense_swap_ab,
    make_q_halves,
    make_rows32,
    rows64_calls,
    rows64_text,
)
from mlagen.plan.sm90.e4m3 import P_MOST_LOG2, reads_e4m3, with_e4m3_p
from mlagen.plan.sm90.kernel import Sm90Plan
from mlagen.plan.sm90.seesaw import DENSE_DECODE, make_sm90
from mlagen.plan.targets import TARGETS, Target
from mlagen.plan.tiles import fits
from mlagen.plan.tiles.cached_row import CachedRow, cached_row
from mlagen.plan.tiles.tile import WIDE_ROWS, Sm90Row, Tile, TileRow
from mlagen.plan.tiles.tuned import Tuned
from mlagen.spec import DenseAttention, Spec

# Query tokens of a request share a tile, so that calls have more rows than the model has heads.
MOST_ROWS = 128
REQUEST_OVERHEAD = 1
COMBINE_UNITS = 6
BATCH_INVARIANT_SPLIT = 1024
BLOCK_B = 256
WINDOW_BLOCK_N = 32
KEYS = 4096  # keys of the request in `flops`


@dataclass(frozen=True, kw_only=True)
class DenseDecodePlan(CachedFamily):
    """Numbers of the kernel of dense attention; its tiles hold rows, a head of a query token each.

    Attributes:
        sm90_rows32: plan of the 32-row kernel over e4m3; None without one.
        sm90_q_halves: plan of the 64-row kernel of a q in two e4m3 halves; None without one.
        sm90_swap_ab: plans of the swap-AB kernel over the model's dtype, by its rows, fewest first; empty without.
        rows64_calls: which calls run a 64-row kernel in place of the 32-row one, by q's dtype.
        window: last keys that a query token sees; None: all.
        request_overhead: fixed cost of a request in a program, in steps of BLOCK_N keys.
        combine_units: cost of sharing a request, partials and their merge, in steps of BLOCK_N keys of a program.
        sm90_request_overhead, sm90_combine_units: likewise with an sm90 kernel.
        batch_invariant_split: keys of a split in batch-invariant mode.
        block_b: requests per read of lengths.
    """

    NAME: ClassVar = fits.DENSE_DECODE
    WRAPPERS: ClassVar = {
        "flash_mla_with_kvcache": Op(
            ("workspace",), {"out": "out", "lse": None}, ("tile_scheduler_metadata", "num_splits")
        ),
        "decode_attention_fwd": Op(("o", "lse", "workspace")),
    }
    SM90_KERNELS: ClassVar = {
        "sm90": "_dense_decode_sm90",
        "sm90_swap_ab": "_dense_decode_sm90_swap_ab",
        "sm90_rows32": "_dense_decode_sm90_rows32",
        "sm90_q_halves": "_dense_decode_sm90_q_halves",
    }

    sm90_rows32: Sm90Plan | None
    sm90_q_halves: Sm90Plan | None
    sm90_swap_ab: tuple[Sm90Plan, ...]
    rows64_calls: tuple[Rows64Row, ...]
    window: int | None
    request_overhead: int = REQUEST_OVERHEAD
    combine_units: int = COMBINE_UNITS
    sm90_request_overhead: int
    sm90_combine_units: int = COMBINE_UNITS
    batch_invariant_split: int = BATCH_INVARIANT_SPLIT
    block_b: int = BLOCK_B

    @classmethod
    def make(cls, spec: Spec, caches: Caches | None, tuned: Tuned) -> DenseDecodePlan | None:
        """Derives the numbers; see `Family`."""
        attention, dims = spec.attention, spec.model
        if caches is None or not isinstance(attention, DenseAttention) or not cls.wanted(spec):
            return None
        layout, window, splits = caches.main.layout, attention.window, splits_of(spec)
        cached = cached_row(layout, None, caches.chunks)
        text = fits.dense_decode(spec, cached.chunks, layout, caches.main.block_size, window)
        found = tuned.rows(text, spec.targets, cached.row)
        sm90 = _make_sm90(spec, layout, tuned.sm90_rows(text))
        rows32 = make_rows32(sm90) if sm90 and layout.quantised else None
        q_halves = make_q_halves(sm90) if sm90 and rows32 else None
        check_e4m3_p(spec, layout, sm90)
        if has_e4m3_p(spec) and sm90 and rows32:
            sm90, rows32 = with_e4m3_p(sm90), with_e4m3_p(rows32)
        of_swap_ab = make_dense_swap_ab(sm90, splits.partials) if sm90 and not layout.quantised else ()
        return cls(
            fits=text,
            tiles=tuple((name, found.get(name) or _untuned(cached, window, TARGETS[name])) for name in spec.targets),
            unaligned=unaligned_table(cached, spec.targets),
            d_qk=dims.d_qk,
            d_v=dims.v_head_dim,
            splits=splits,
            sm90=sm90,
            sm90_rows32=rows32,
            sm90_q_halves=q_halves,
            sm90_swap_ab=of_swap_ab,
            rows64_calls=rows64_calls(q_halves, e4m3_p=has_e4m3_p(spec)) if rows32 else (),
            sm90_request_overhead=E4M3_REQUEST_OVERHEAD if rows32 else SM90_REQUEST_OVERHEAD,
            sm90_combine_units=SM90_COMBINE_UNITS if sm90 else COMBINE_UNITS,
            caches=caches,
            cached=cached,
            window=window,
        )

    def describe_sm90(self) -> Iterator[str]:
        """Yield lines about its sm90 kernels; see `LatentFamily`."""
        yield from super().describe_sm90()
        kernels = ((self.sm90_rows32, "q of either dtype"), (self.sm90_q_halves, "q of 2-byte values"))
        yield from (f"{plan.block_h}-row kernel, {q}: registers {plan.resources}" for plan, q in kernels if plan)
        if self.sm90_rows32 is not None:
            yield from rows64_text(self.rows64_calls, q_halves=self.sm90_q_halves is not None)
        if self.sm90 is not None and self.sm90.v_ahead:
            rule = f"O is rescaled before a P passes 2^{P_MOST_LOG2}"
            yield f"P is e4m3 in the 32-row kernel, and with 64 rows for q of e4m3; there {rule}"
        yield from swap_ab.describe(self.sm90_swap_ab)
        if self.sm90 is not None and not (self.sm90_swap_ab or self.sm90_rows32):
            keys = self.sm90.block_n
            yield f"calls with few rows also run it: its blocks have {keys} keys, swap-AB needs pages of 64"

    def flops(self, tokens: int, num_heads: int, keys: int) -> int:
        """FLOPs of one call, with `keys` keys for each token."""
        return work.flops(tokens, num_heads, keys, self.d_qk, self.d_v)

    def bytes(self, tokens: int, num_heads: int, keys: int) -> int:
        """Fewest bytes of such a call of one query token a request: q and out once, and each token's keys as stored."""
        kv_bytes = tokens * keys * self.caches.main.layout.row_bytes
        return work.attention_bytes(tokens, num_heads, 0, self.d_qk, self.d_v, kv_bytes)

    def one_token(self, num_heads: int) -> Work:
        """The work of a call of one token."""
        return Work(f"one token over {KEYS:,} keys", self.flops(1, num_heads, KEYS), self.bytes(1, num_heads, KEYS))


def _make_sm90(spec: Spec, layout: CacheLayout, rows: Sequence[Sm90Row] | None) -> Sm90Plan | None:
    """The sm90 kernel's numbers; None without one."""
    if not layout.quantised:
        return make_sm90(spec, DENSE_DECODE, rows)
    return make_dense_e4m3(spec, rows) if reads_e4m3(layout) else None


def spills_with_window(tile: Tile, target: Target) -> bool:
    """Return whether a window's bounds spill beside this tile. Its loop's widest wgmma leaves them no registers."""
    return (tile.block_h, target.dot) == (WIDE_ROWS, "wgmma") and tile.block_n > WINDOW_BLOCK_N


def _with_registers(row: TileRow, cached: CachedRow, target: Target) -> TileRow:
    """The row with a tile that leaves registers for the bounds of a window."""
    if not spills_with_window(row.tile, target):
        return row
    tile = replace(row.tile, block_n=WINDOW_BLOCK_N)
    return cached.row(tile, target, "with registers for the bounds of a window", row.max_heads, row.max_tokens)


def _untuned(cached: CachedRow, window: int | None, target: Target) -> tuple[TileRow, ...]:
    """Rows of an untuned target."""
    rows = cached.untuned(MOST_ROWS, target)
    return rows if window is None else tuple(_with_registers(row, cached, target) for row in rows)
