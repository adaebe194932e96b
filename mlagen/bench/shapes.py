"""What is measured: the sizes of a call, from a spec, and random inputs of those sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mlagen.verify.facts import Facts
from mlagen.work import attention_bytes, distinct_rows, flops

PREFILL_TOKENS = 4096
PREFILL_S_KV = (8 << 10, 32 << 10, 128 << 10)
DECODE_TOKENS = (1, 4, 16, 64, 128)
DECODE_S_KV = 128 << 10
RANK_HEADS = (64, 16)  # heads a rank holds under tensor parallelism, beside the model's own
SHARES = (0, 50, 75, 90)  # per cent of a token's indices that the next one names too
CHAIN = 64  # tokens in a row of which each shares indices with the one before
MOST_SETS = 64
L2_MULTIPLE = 2  # rotating inputs touch this many times the L2, so that none is left there at its next turn
INDEX_CHUNK = 1 << 28  # random numbers drawn at a time


@dataclass(frozen=True)
class Shape:
    """Sizes of one call.

    Attributes:
        kind: `prefill` (the tokens share one context) or `decode` (each is a request of its own).
        tokens: query tokens.
        num_heads: query heads.
        s_kv: rows of kv.
        topk: indices a token.
    """

    kind: str
    tokens: int
    num_heads: int
    s_kv: int
    topk: int

    @property
    def family(self) -> str:
        """The kind."""
        return self.kind

    def __str__(self) -> str:
        kv = f"{self.s_kv >> 10}K" if self.s_kv % 1024 == 0 else str(self.s_kv)
        return f"{self.kind} {self.tokens} x h{self.num_heads}, kv {kv}, topk {self.topk}"

    def flops(self, facts: Facts) -> int:
        """FLOPs of a call."""
        return flops(self.tokens, self.num_heads, min(self.topk, self.s_kv), facts.d_qk, facts.d_v)

    def bytes_moved(self, facts: Facts, row_bytes: int) -> int:
        """Fewest bytes of a call; requests share no context, so a decode's rows are counted for each token."""
        rows = distinct_rows(self.tokens, self.topk, self.s_kv)
        if self.kind == "decode":
            rows = self.tokens * min(self.topk, self.s_kv)
        return attention_bytes(self.tokens, self.num_heads, self.topk, facts.d_qk, facts.d_v, rows * row_bytes)

    def draw_indices(self, sets: int, device: torch.device) -> torch.Tensor:
        """Random indices i32 [sets, tokens, topk]."""
        return make_indices(sets * self.tokens, self.topk, self.s_kv, device).view(sets, self.tokens, self.topk)


@dataclass(frozen=True)
class SharedShape(Shape):
    """Sizes of a prefill whose neighbouring tokens name much the same rows.

    Attributes:
        share: per cent of a token's indices that the next one names too.
    """

    share: int

    def __str__(self) -> str:
        return f"{super().__str__()}, {self.share} % shared"

    def draw_indices(self, sets: int, device: torch.device) -> torch.Tensor:
        """As `Shape.draw_indices`, with as many indices of each token's in the next one's."""
        drawn = [make_neighbours(self.tokens, self.topk, self.s_kv, self.share, device) for _ in range(sets)]
        return torch.stack(drawn)


def default_heads(num_heads: int) -> list[int]:
    """Head counts measured for a model of `num_heads`, most first."""
    return sorted({num_heads, *(heads for heads in RANK_HEADS if heads < num_heads)}, reverse=True)


def default_shapes(
    facts: Facts, kinds: Sequence[str] = ("prefill", "decode"), heads: Sequence[int] | None = None
) -> list[Shape]:
    """Shapes that a spec is measured at: prefill at three context lengths, decode at five batch sizes."""
    shapes = []
    for num_heads in heads or default_heads(facts.num_heads):
        if "prefill" in kinds:
            shapes += [Shape("prefill", PREFILL_TOKENS, num_heads, s_kv, facts.topk) for s_kv in PREFILL_S_KV]
        if "decode" in kinds:
            shapes += [Shape("decode", tokens, num_heads, DECODE_S_KV, facts.topk) for tokens in DECODE_TOKENS]
    return shapes


@dataclass(frozen=True)
class Inputs:
    """Tensors of one call.

    Attributes:
        q: [tokens, num_heads, d_qk].
        kv: [pages, page_size, d_qk]; page_size is 1 where rows are flat.
        indices: i32 [tokens, 1, topk].
        sm_scale: factor of the logits.
        attn_sink: f32 [num_heads] where the spec requires one.
        topk_length: i32 [tokens] where the spec requires one: all of topk.
    """

    q: torch.Tensor
    kv: torch.Tensor
    indices: torch.Tensor
    sm_scale: float
    attn_sink: torch.Tensor | None
    topk_length: torch.Tensor | None


def make_indices(
    tokens: int, topk: int, s_kv: int, device: torch.device | str, generator: torch.Generator | None = None
) -> torch.Tensor:
    """Random indices i32 [tokens, topk]: distinct rows, spread evenly, in no order; -1 past s_kv of them."""
    rows = min(topk, s_kv)
    step = max(1, INDEX_CHUNK // s_kv)
    indices = torch.full((tokens, topk), -1, dtype=torch.int32, device=device)
    for first in range(0, tokens, step):
        count = min(step, tokens - first)
        keys = torch.rand(count, s_kv, device=device, generator=generator)
        indices[first : first + count, :rows] = keys.topk(rows, dim=1).indices
    return indices


def make_neighbours(
    tokens: int, topk: int, s_kv: int, share: int, device: torch.device | str, generator: torch.Generator | None = None
) -> torch.Tensor:
    """Random indices i32 [tokens, topk]: distinct rows in no order, `share` per cent of them in the next token's too.

    Every CHAIN tokens rows are drawn anew. Of fewer than 2 * topk rows more are shared, as few as can be.
    """
    chains = -(-tokens // CHAIN)
    current = make_indices(chains, topk, s_kv, device, generator).long()
    indices = []
    for _ in range(min(CHAIN, tokens)):
        order = torch.rand(chains, topk, device=device, generator=generator).argsort(dim=1)
        current = current.gather(1, order)
        indices.append(current)
        fresh = min(topk - topk * share // 100, s_kv - topk)
        keys = torch.rand(chains, s_kv, device=device, generator=generator).scatter_(1, current, -1.0)
        current = torch.cat([current[:, fresh:], keys.topk(fresh, dim=1).indices], 1)
    return torch.stack(indices, 1).flatten(0, 1)[:tokens].int()


def sets_needed(touched: int, l2_bytes: int, most: int = MOST_SETS) -> int:
    """Input sets that a rotation takes if one call touches `touched` bytes; at least 2, at most `most`."""
    return max(2, min(most, math.ceil(L2_MULTIPLE * l2_bytes / touched)))


def make_inputs(
    shape: Shape, facts: Facts, device: torch.device, l2_bytes: int, sets: int | None = None
) -> list[Inputs]:
    """Rotating input sets of one shape; they share kv where it alone exceeds L2.

    Args:
        shape: sizes.
        facts: the spec's.
        device: where the tensors go.
        l2_bytes: size of its L2.
        sets: how many; None: enough that L2 holds none of them at its next turn.
    """
    dtype = getattr(torch, facts.dtype)
    page = facts.block_size or 1
    pages = -(-shape.s_kv // page)
    row_bytes = facts.d_qk * dtype.itemsize
    if sets is None:
        sets = sets_needed(shape.bytes_moved(facts, row_bytes), l2_bytes)
    shared = pages * page * row_bytes >= L2_MULTIPLE * l2_bytes
    sink = torch.randn(shape.num_heads, device=device) if facts.sink == "required" else None
    length = None
    if facts.length == "required":
        length = torch.full((shape.tokens,), shape.topk, dtype=torch.int32, device=device)
    indices = shape.draw_indices(sets, device)[:, :, None]
    inputs: list[Inputs] = []
    for number in range(sets):
        kv = inputs[0].kv if inputs and shared else _normal((pages, page, facts.d_qk), dtype, device)
        q = _normal((shape.tokens, shape.num_heads, facts.d_qk), dtype, device)
        inputs.append(Inputs(q, kv, indices[number], facts.d_qk**-0.5, sink, length))
    return inputs


def _normal(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.randn(size, dtype=dtype, device=device)
