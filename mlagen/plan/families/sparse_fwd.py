"""Numbers of sparse attention over unquantised rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from mlagen import work
from mlagen.plan.attention import ANY, LatentFamily, Work, splits_of, unaligned_table
from mlagen.plan.ops import Op
from mlagen.plan.rows import Caches, row_chunks, rows_block_size
from mlagen.plan.sm90 import swap_ab
from mlagen.plan.sm90.index_union import MODULE as UNION_MODULE
from mlagen.plan.sm90.index_union import IndexUnionPlan, make_index_union
from mlagen.plan.sm90.kernel import Sm90Plan
from mlagen.plan.sm90.seesaw import SPARSE_FWD, make_sm90
from mlagen.plan.targets import TARGETS
from mlagen.plan.tiles import fits
from mlagen.plan.tiles.tile import PlainRow
from mlagen.plan.tiles.tuned import Tuned
from mlagen.spec import SparseAttention, Spec


@dataclass(frozen=True, kw_only=True)
class SparseFwdPlan(LatentFamily):
    """Numbers of the sparse attention kernels, of any spec with sparse attention.

    Attributes:
        topk: indices a token.
        row: a row as a program holds it.
        sm90_swap_ab: the sm90 kernel's of few heads, by how many it holds, fewest first; empty without.
        sm90_shared: those of the kernels for neighbouring tokens that share rows; None without.
    """

    NAME: ClassVar = fits.SPARSE_FWD
    WRAPPERS: ClassVar = {
        "triton_mla_sparse_attention": Op(("lse", "workspace"), {"out": "out"}),
        "flash_mla_sparse_fwd": Op(("workspace",), {"out": "out", "max_logits": "max_logits", "lse": "lse"}),
    }
    SM90_KERNELS: ClassVar = {
        "sm90": "_sparse_fwd_sm90",
        "sm90_swap_ab": "_sparse_fwd_sm90_swap_ab",
        "sm90_shared": "_sparse_fwd_sm90_shared",
    }

    topk: int
    row: PlainRow
    sm90_swap_ab: tuple[Sm90Plan, ...]
    sm90_shared: IndexUnionPlan | None

    @classmethod
    def make(cls, spec: Spec, caches: Caches | None, tuned: Tuned) -> SparseFwdPlan | None:
        """Derives the numbers; see `Family`."""
        attention, dims = spec.attention, spec.model
        if not isinstance(attention, SparseAttention) or not cls.wanted(spec):
            return None
        row, splits, group = PlainRow(row_chunks(spec)), splits_of(spec), attention.shared_indices
        text = fits.sparse_fwd(spec, row.chunks, rows_block_size(caches))
        found = tuned.rows(text, spec.targets, row.row)
        sm90 = make_sm90(spec, SPARSE_FWD, tuned.sm90_rows(text))
        return cls(
            fits=text,
            tiles=tuple((name, found.get(name) or row.untuned(dims.num_heads, TARGETS[name])) for name in spec.targets),
            unaligned=unaligned_table(row, spec.targets),
            d_qk=dims.d_qk,
            d_v=dims.v_head_dim,
            splits=splits,
            sm90=sm90,
            topk=attention.topk,
            row=row,
            sm90_swap_ab=() if sm90 is None else swap_ab.make_swap_ab(swap_ab.SPARSE_FWD, sm90, splits.partials),
            sm90_shared=None if sm90 is None or group is None else make_index_union(group, sm90),
        )

    def describe(self) -> Iterator[str]:
        """Yield lines about the blocks of a row; see `Family`."""
        for chunk in self.chunks:
            columns = f"columns [{chunk.start}, {chunk.start + chunk.columns}) in a block of {chunk.block}"
            yield f"{chunk.name}: {columns}{', part of V' if chunk.in_v else ''}"

    def describe_sm90(self) -> Iterator[str]:
        """Yield lines about its sm90 kernels; see `LatentFamily`."""
        yield from super().describe_sm90()
        yield from swap_ab.describe(self.sm90_swap_ab)
        if self.sm90_shared is not None:
            yield from self.sm90_shared.describe()

    @property
    def kv_row(self) -> PlainRow:
        """A row as a program holds it."""
        return self.row

    @classmethod
    def all_sm90_modules(cls) -> tuple[str, ...]:
        """Generated modules of the sm90 kernels of any spec."""
        return (*super().all_sm90_modules(), UNION_MODULE)

    @property
    def sm90_modules(self) -> tuple[str, ...]:
        """Those of the spec's package."""
        return (*super().sm90_modules, *((UNION_MODULE,) if self.sm90_shared else ()))

    def flops(self, tokens: int, num_heads: int) -> int:
        """FLOPs of one call with full rows: QKᵀ and PV, two a multiply-add."""
        return work.flops(tokens, num_heads, self.topk, self.d_qk, self.d_v)

    def bytes(self, tokens: int, num_heads: int, s_kv: int) -> int:
        """Fewest bytes of one call: q, out and indices once, and each KV row that is named once, at most s_kv."""
        kv_bytes = work.distinct_rows(tokens, self.topk, s_kv) * self.d_qk * work.ITEMSIZE
        return work.attention_bytes(tokens, num_heads, self.topk, self.d_qk, self.d_v, kv_bytes)

    def one_token(self, num_heads: int) -> Work:
        """The work of a call of one token."""
        return Work("one token", self.flops(1, num_heads), self.bytes(1, num_heads, ANY))
