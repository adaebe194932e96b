"""The tensors of a call of dense attention over a paged cache, and its reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from mlagen.layout import CacheLayout
from mlagen.layout.codec import read, write
from mlagen.verify.batched import sparse_attention
from mlagen.verify.call import family
from mlagen.verify.call.facts import Facts
from mlagen.verify.call.memory import (
    GARBAGE,
    LAYOUTS,
    NAN,
    empty_pages,
    empty_tensors,
    every_tensor,
    place,
    seeded,
    unplaced,
)
from mlagen.verify.checks.decode import FLASH, as_e4m3, place_out, place_tokens
from mlagen.verify.dense_decode.cases import TENSOR_SCALE, DenseDecodeProblem
from mlagen.verify.dense_decode.facts import DenseDecodeFacts
from mlagen.verify.reference import Attention


@dataclass
class Inputs(family.Inputs):
    """The tensors of one call.

    Attributes:
        problem: the problem of the inputs.
        layout: the cache's.
        q: [requests, s_q, heads, d_qk].
        cache: [pages, block_size, kv_heads, row].
        others: tensors [pages, block_size, row] besides the cache tensor, by name.
        block_table: i32 [requests, width].
        lengths: i32 [requests].
        keys: of each request.
        scale: softmax_scale; None: not passed.
        default_scale: the scale of a call that passes None.
        stated: the spec states it, so that decode_attention_fwd also takes None.
        k_scale: f32 [1] where the layout has one scale a tensor.
        window: keys that a query token sees; None: all.
    """

    problem: DenseDecodeProblem
    layout: CacheLayout
    q: torch.Tensor
    cache: torch.Tensor
    block_table: torch.Tensor
    lengths: torch.Tensor
    keys: list[int]
    scale: float | None
    default_scale: float
    stated: bool
    k_scale: torch.Tensor | None
    window: int | None
    others: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def sm_scale(self) -> float:
        """The factor of the logits that the call takes."""
        return self.default_scale if self.scale is None else self.scale

    @property
    def called_q(self) -> torch.Tensor:
        """The q that a call takes: of e4m3 where it has a scale."""
        return self.q if self.problem.q_scale is None else as_e4m3(self.q, self.problem.q_scale)

    def arguments(self, wrapper: str) -> dict[str, Any]:
        """Arguments of a wrapper but for metadata and head_dim_v."""
        optional: dict[str, Any] = {"k_scale": self.k_scale}
        if self.problem.window != "spec":
            optional["window"] = self.window or 2**31 - 1
        optional = {name: value for name, value in optional.items() if value is not None}
        if self.problem.window is None:
            optional["window"] = None
        optional |= self.others
        if wrapper == FLASH:
            found: dict[str, Any] = {
                "q": self.called_q,
                "k_cache": self.cache,
                "block_table": self.block_table,
                "cache_seqlens": self.lengths,
                "causal": self.problem.causal,
                "is_fp8_kvcache": self.layout.quantised,
            }
            if self.problem.q_scale is not None:
                found["q_scale"] = torch.full((1,), self.problem.q_scale, device=self.q.device)
            optional |= {} if self.scale is None else {"softmax_scale": self.scale}
            return found | optional | {name: one.view for name, one in self.given.items()}
        requests, _, heads, _ = self.q.shape
        return optional | {
            "q": self.q[:, 0],
            "k_buffer": self.cache,
            "v_buffer": self.cache[..., : max(1, self.cache.shape[3] // 2)],
            "req_to_token": self.block_table,
            "b_seq_len": self.lengths,
            "attn_logits": torch.full((requests, heads, 4, self.layout.columns), NAN, device=self.q.device),
            "num_kv_splits": 4,
            "sm_scale": self.scale if self.stated else self.sm_scale,
            "page_size": self.problem.block_size,
            "lse": torch.full((requests, heads + 3), NAN, dtype=torch.float32, device=self.q.device)[:, :heads],
        }

    def first_key(self, request: int) -> int:
        """The first key that any query token of a request sees."""
        if self.window is None:
            return 0
        return max(self.keys[request] - self.problem.s_q - self.window + 1, 0)

    def pick(self, requests: Sequence[int]) -> Inputs:
        """The same call for some of its requests, in another order."""
        at = torch.tensor(requests, device=self.q.device)
        return replace(
            self,
            q=self.q[at].contiguous(),
            block_table=self.block_table[at].contiguous(),
            lengths=self.lengths[at].contiguous(),
            keys=[self.keys[request] for request in requests],
            given={},
            placed={},
        )

    def last_tokens(self, s_q: int) -> Inputs:
        """The same call for each request's last query tokens. They see the same keys, if the call is causal."""
        problem = replace(self.problem, s_q=s_q, causal=True)
        return replace(self, q=self.q[:, -s_q:].contiguous(), problem=problem, given={}, placed={})


def _block_table(inputs: Inputs, generator: torch.Generator) -> tuple[torch.Tensor, int]:
    """Block table i32 [requests, width], garbage where no key is seen, and how many pages there are."""
    problem, size = inputs.problem, inputs.problem.block_size
    used = [
        (request, column)
        for request, keys in enumerate(inputs.keys)
        for column in range(inputs.first_key(request) // size, -(-keys // size))
    ]
    pages = len(used) + (3 if problem.cache not in ("far", "idle") else 0)
    order = torch.randperm(pages, generator=generator)
    table = torch.full((problem.requests, problem.width), GARBAGE, dtype=torch.int32)
    if used:
        table[tuple(torch.tensor(used).T)] = order[: len(used)].int()
    return table, pages


def _write_rows(inputs: Inputs, table: torch.Tensor, cache: torch.Tensor, generator: torch.Generator) -> None:
    """Writes a row for each key that is seen."""
    layout, size, dtype = inputs.layout, inputs.problem.block_size, inputs.q.dtype
    requests = len(inputs.keys)
    first = torch.tensor([inputs.first_key(request) for request in range(requests)], dtype=torch.int64)
    counts = (torch.tensor(inputs.keys, dtype=torch.int64) - first).clamp(min=0)
    request = torch.arange(requests).repeat_interleave(counts)
    position = torch.arange(len(request)) - (counts.cumsum(0) - counts)[request] + first[request]
    slots = table[request, position // size].long() * size + position % size
    for head in range(inputs.problem.kv_heads if len(slots) else 0):
        rows = torch.randn(len(slots), layout.columns, generator=generator)
        rows = (rows * (inputs.problem.k_scale / TENSOR_SCALE)).to(dtype)
        pages = every_tensor(cache[:, :, head], inputs.others)
        write(layout, pages, size, slots.to(cache.device), rows.to(cache.device), inputs.k_scale)


def build(problem: DenseDecodeProblem, known: DenseDecodeFacts, device: str, seed: int) -> Inputs:
    """The tensors of a problem, the same for the same seed.

    Raises:
        CaseSkippedError: the device has too little memory.
    """
    generator = seeded(seed)
    facts, layout = known.facts, known.layout
    dtype = getattr(torch, facts.dtype)
    shape = (problem.requests * problem.s_q, problem.heads, facts.d_qk)
    values = torch.randn(*shape, generator=generator)
    if problem.q_scale is not None:
        values = (values / problem.q_scale).to(torch.float8_e4m3fn).float() * problem.q_scale
    values = (values * problem.q_factor).to(dtype).to(device)
    q, placed_q = place_tokens(values, (problem.requests, problem.s_q), problem.q, NAN)
    window = known.window if problem.window == "spec" else problem.window
    assert window is None or isinstance(window, int)
    lengths = torch.tensor(problem.lengths, dtype=torch.int64).clamp(-(2**31), 2**31 - 1).int().to(device)
    inputs = Inputs(
        problem,
        layout,
        q,
        torch.empty(0),
        torch.empty(0),
        lengths,
        problem.keys,
        None if problem.scale is None else problem.scale * facts.d_qk**-0.5,
        facts.default_scale,
        facts.softmax_scale is not None,
        torch.full((1,), problem.k_scale, device=device) if layout.tensor_scale else None,
        window,
        placed={"q": placed_q, "lengths": unplaced(lengths)},
    )
    table, pages = _block_table(inputs, generator)
    cache_shape = (pages, problem.block_size, problem.kv_heads)
    empty = empty_pages(layout.parts[0], cache_shape, problem.cache, dtype, problem.poison, device)
    others = empty_tensors(layout, cache_shape[:2], problem.cache, problem.poison, device)
    inputs.others = {name: one.view for name, one in others.items()}
    _write_rows(inputs, table, empty.view, generator)
    if problem.cache != "far":
        every = {"cache": empty, **others}
        inputs.placed |= {name: replace(one, before=one.buffer.clone()) for name, one in every.items()}
    inputs.cache = empty.view.view(problem.dtype) if layout.quantised else empty.view
    placed_table = place(table[:, None].to(device), LAYOUTS[problem.table], GARBAGE)
    inputs.block_table = placed_table.view[:, 0]
    inputs.placed["block_table"] = placed_table
    if problem.out is not None:
        inputs.given["out"] = place_out(q, facts.d_v, problem.out)
    return inputs


def attend(inputs: Inputs, facts: Facts, empty_row_lse: str) -> Attention:
    """Attention of each token over the keys that it sees, by mlagen.verify.reference."""
    requests, s_q, heads, d_qk = inputs.q.shape
    size, kv_heads = inputs.cache.shape[1:3]
    group, device = heads // kv_heads, inputs.q.device
    first = torch.tensor([inputs.first_key(request) for request in range(requests)], dtype=torch.int64, device=device)
    keys = torch.tensor(inputs.keys, dtype=torch.int64, device=device)
    counts = (keys - first).clamp(min=0)
    width = int(counts.max()) if requests else 0
    key = first[:, None] + torch.arange(width, device=device)  # [requests, width]
    named = key < keys[:, None]
    pages = inputs.block_table.long().gather(1, torch.where(named, key // size, 0)) if width else key
    slots = torch.where(named, pages * size + key % size, 0)[named]
    row = (named.flatten().cumsum(0) - 1).view_as(named)[:, None]  # of the rows that are read, [requests, 1, width]
    own = keys[:, None, None] - s_q + torch.arange(s_q, device=device)[:, None]  # [requests, s_q, 1]
    seen = named[:, None].expand(requests, s_q, width)
    if inputs.problem.causal:
        seen = seen & (key[:, None] <= own)
    if inputs.window is not None:
        seen = seen & (key[:, None] > own - inputs.window)
    indices = torch.where(seen, row, -1).flatten(0, 1)
    found = []
    for head in range(kv_heads):
        rows = torch.zeros(1, d_qk, device=device)
        if len(slots):
            every = every_tensor(inputs.cache[:, :, head], inputs.others)
            rows = read(inputs.layout, every, size, slots, inputs.k_scale)
        q = inputs.q[:, :, head * group : (head + 1) * group].flatten(0, 1)
        args = (indices, inputs.sm_scale, facts.d_v, None, None, facts.lse_base, empty_row_lse)
        found.append(sparse_attention(q, rows.to(q.dtype)[:, None], *args))
    return Attention(*(torch.cat(parts, 1) for parts in zip(*found, strict=True)))
