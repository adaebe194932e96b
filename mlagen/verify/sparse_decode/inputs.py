"""The tensors of a call of sparse attention over a paged cache: encoded rows where they count, poison elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from mlagen.layout import CacheLayout, DataField, ScalesField
from mlagen.layout.codec import planes_of, read, write
from mlagen.verify.batched import sparse_attention
from mlagen.verify.call import family
from mlagen.verify.call.facts import Facts
from mlagen.verify.call.memory import NAN, Placed, empty_pages, empty_tensors, every_tensor, seeded, unplaced
from mlagen.verify.call.patterns import IndexLists, draw_indices, named_rows, poison_index, sinks
from mlagen.verify.checks import out_rope, quantised
from mlagen.verify.checks.decode import as_e4m3, place_out, place_tokens
from mlagen.verify.checks.out_rope import Rotation
from mlagen.verify.reference import Attention
from mlagen.verify.sparse_decode.cases import CacheProblem, Listing
from mlagen.verify.sparse_decode.facts import CacheFacts

TENSOR_SCALES = (0.4375, 0.0117)  # of the cache and of the second one
NAN_CODES = {"e4m3": (0x7F, 0xFF), "e4m3fnuz": (0x80,)}


@dataclass
class ListInputs:
    """The tensors of one list of indices and its cache.

    Attributes:
        layout: the cache's.
        cache: [pages, block_size, 1, row].
        indices: i32 [requests, s_q, topk].
        length: i32 [requests] or None.
        scale: f32 [1] where the layout has one scale a tensor.
        any_scales: its scales are no powers of two.
        others: tensors [pages, block_size, row] besides the cache tensor, by name.
    """

    layout: CacheLayout
    cache: torch.Tensor
    indices: torch.Tensor
    length: torch.Tensor | None
    scale: torch.Tensor | None
    any_scales: bool = False
    others: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def slots(self) -> int:
        """Tokens that the cache can hold."""
        return self.cache.shape[0] * self.cache.shape[1]

    def rows(self, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Rows [n, d_qk] of slots i64 [n], as attention multiplies them."""
        block_size = self.cache.shape[1]
        pages = every_tensor(self.cache[:, :, 0], self.others)
        return read(self.layout, pages, block_size, slots, self.scale).to(dtype)


@dataclass
class Inputs(family.Inputs):
    """The tensors of one call.

    Attributes:
        q: [requests, s_q, heads, d_qk].
        lists: of the cache, and of the second one if it is passed.
        scale: softmax_scale; None: not passed.
        sink: f32 [heads] or None.
        q_scale: q is passed as e4m3, in multiples of this; None: as it is.
        rotation: positions and angles; None where attention does not rotate its output.
    """

    q: torch.Tensor
    lists: list[ListInputs]
    scale: float | None
    sink: torch.Tensor | None
    q_scale: float | None = None
    rotation: Rotation | None = None

    def arguments(self) -> dict[str, Any]:
        """Arguments of the wrapper but for metadata."""
        main, *extra = self.lists
        found: dict[str, Any] = {
            "q": self.q,
            "k_cache": main.cache,
            "block_table": None,
            "cache_seqlens": None,
            "is_fp8_kvcache": main.layout.quantised,
            "indices": main.indices,
            **main.others,
        }
        optional = {"softmax_scale": self.scale, "attn_sink": self.sink, "topk_length": main.length}
        optional |= {"k_scale": main.scale, **{name: one.view for name, one in self.given.items()}}
        if self.q_scale is not None:
            found["q"] = as_e4m3(self.q, self.q_scale)
            found["q_scale"] = torch.full((1,), self.q_scale, device=self.q.device)
        for one in extra:
            found |= {"extra_k_cache": one.cache, "extra_indices_in_kvcache": one.indices}
            optional |= {"extra_topk_length": one.length, "extra_k_scale": one.scale}
        found |= self.rotation.arguments() if self.rotation else {}
        return found | {name: value for name, value in optional.items() if value is not None}

    def pick(self, requests: Sequence[int]) -> Inputs:
        """The same call for some of its requests, in another order."""

        def take(tensor: torch.Tensor) -> torch.Tensor:
            return tensor[torch.tensor(requests, device=tensor.device)].contiguous()

        lists = [
            replace(one, indices=take(one.indices), length=None if one.length is None else take(one.length))
            for one in self.lists
        ]
        s_q = self.q.shape[1]
        tokens = [request * s_q + token for request in requests for token in range(s_q)]
        rotation = self.rotation and self.rotation.pick(tokens)
        return replace(self, q=take(self.q), lists=lists, rotation=rotation, given={}, placed={})


def _code(
    field: DataField | ScalesField, shape: tuple[int, ...], scaled: bool, wide: bool, generator: torch.Generator
) -> torch.Tensor:
    """Any bytes of a field, uint8 [rows, bytes], but NaN, and, unless `wide`, without values that drown all others."""
    if isinstance(field, ScalesField):
        exponent = torch.randint(-12, -4, shape, generator=generator)
        if wide:
            exponent += 14 * torch.randint(-1, 2, (shape[0], 1), generator=generator)
        if field.dtype == "ue8m0":
            return (exponent + 127).to(torch.uint8)
        if field.dtype == "e4m3":
            return torch.randint(0, 0x40, shape, generator=generator).to(torch.uint8) | (exponent % 2 << 7).to(
                torch.uint8
            )
        return ((1 + torch.rand(shape, generator=generator)) * torch.exp2(exponent.float())).view(torch.uint8)
    if field.dtype == "e2m1":
        return torch.randint(0, 256, (shape[0], shape[1] // 2), generator=generator).to(torch.uint8)
    if not field.quantised:
        dtype = torch.bfloat16 if field.dtype == "bf16" else torch.float16
        return torch.randn(shape, generator=generator).to(dtype).view(torch.uint8)
    codes = torch.randint(0, 256, shape, generator=generator)
    if not scaled:  # up to 8 in magnitude
        codes = codes % 0x50 | codes & 0x80
    for nan in NAN_CODES[field.dtype]:
        codes[codes == nan] = 0x38
    return codes.to(torch.uint8)


def _fill(
    one: ListInputs, listing: Listing, named: torch.Tensor, dtype: torch.dtype, generator: torch.Generator
) -> None:
    """Writes rows to the `named` slots of a cache."""
    layout, size = one.layout, listing.block_size
    pages, device = every_tensor(one.cache[:, :, 0], one.others), one.cache.device
    named = named.to(device)
    values = torch.randn(len(named), layout.columns, generator=generator).to(dtype).to(device)
    write(layout, pages, size, named, values, one.scale)
    if listing.contents != "encoded":
        for part in layout.fields:
            if isinstance(part, DataField | ScalesField):
                scaled = isinstance(part, DataField) and layout.scales_of(part) is not None
                view = planes_of(layout, pages, size)[part.plane]
                codes = _code(part, (len(named), part.count), scaled, listing.contents == "wide", generator)
                codes = codes.to(device)
                view[named // size, named % size, part.offset : part.offset + part.nbytes] = codes


def _rounds(layout: CacheLayout) -> bool:
    """Whether writers leave scales that are no powers of two."""
    return any(isinstance(part, ScalesField) and part.rule.rounding == "nearest" for part in layout.fields)


def _build_list(
    known: CacheFacts, problem: CacheProblem, number: int, device: str, generator: torch.Generator
) -> tuple[ListInputs, dict[str, Placed]]:
    """A list and its cache, and every buffer by name."""
    listing, layout = problem.listings[number], known.layouts[number]
    dtype = getattr(torch, known.facts.dtype)
    pages = (-(-listing.rows // listing.block_size), listing.block_size, 1)
    empty = empty_pages(layout.parts[0], pages, listing.cache, dtype, listing.poison, device)
    others = empty_tensors(layout, pages[:2], listing.cache, listing.poison, device)
    lists = IndexLists(problem.tokens, listing.topk, pages[0] * pages[1], listing.indices)
    named = named_rows(lists, generator)
    scale = torch.full((1,), TENSOR_SCALES[number], device=device) if layout.tensor_scale else None
    any_scales = listing.contents != "encoded" or _rounds(layout)
    views = {name: placed.view for name, placed in others.items()}
    one = ListInputs(layout, empty.view, torch.empty(0), None, scale, any_scales, views)
    if len(named):
        _fill(one, listing, named, dtype, generator)
    placed = {} if listing.cache == "far" else {f"cache {number}": empty, **others}
    placed = {name: replace(memory, before=memory.buffer.clone()) for name, memory in placed.items()}
    if layout.quantised:
        one.cache = one.cache.view(listing.dtype)
    shape, poison = (problem.requests, problem.s_q), poison_index(listing.indices)
    indices, length = draw_indices(lists, named, listing.length, shape, generator)
    if length is not None:
        one.length = length.to(device)
        placed[f"length {number}"] = unplaced(one.length)
    one.indices, placed[f"indices {number}"] = place_tokens(
        indices.int().to(device), shape, problem.index_layout, poison
    )
    return one, placed


def build(problem: CacheProblem, known: CacheFacts, device: str, seed: int) -> Inputs:
    """The tensors of a problem, the same for the same seed.

    Raises:
        CaseSkippedError: the device has too little memory.
    """
    generator = seeded(seed)
    facts = known.facts
    values = torch.randn(problem.tokens, problem.heads, facts.d_qk, generator=generator)
    if problem.wide_q:
        values *= torch.exp2(16.0 * torch.randint(-1, 2, (problem.tokens, problem.heads, 1), generator=generator))
    if problem.q_scale is not None:
        values = values.to(torch.float8_e4m3fn).float() * problem.q_scale
    values = values.to(getattr(torch, facts.dtype)).to(device)
    q, placed_q = place_tokens(values, (problem.requests, problem.s_q), problem.q, NAN)
    scale = None if problem.scale is None else problem.scale * facts.d_qk**-0.5
    inputs = Inputs(q, [], scale, None, problem.q_scale, placed={"q": placed_q})
    for number in range(len(problem.listings)):
        one, placed = _build_list(known, problem, number, device, generator)
        inputs.lists.append(one)
        inputs.placed |= placed
    if problem.sink is not None:
        topk = max(1, sum(listing.topk for listing in problem.listings))
        inputs.sink = sinks(problem.sink, problem.heads, topk, generator).to(device)
        inputs.placed["attn_sink"] = unplaced(inputs.sink)
    if problem.out is not None and facts.out_heads:
        inputs.given["out"] = quantised.place_given(facts, problem.tokens, problem.heads, problem.out, device)
    elif problem.out is not None:
        inputs.given["out"] = place_out(q, facts.d_v, problem.out)
    inputs.rotation, angles = out_rope.draw(facts, problem.positions, problem.tokens, device, generator)
    inputs.placed |= angles
    return inputs


def attend(inputs: Inputs, facts: Facts) -> Attention:
    """Attention of each token over the rows that its lists name, by mlagen.verify.reference."""
    requests, s_q = inputs.q.shape[:2]
    tables, columns, first = [], [], 0
    for one in inputs.lists:
        indices = one.indices.long().flatten(0, 1)  # [tokens, topk]
        valid = (indices >= 0) & (indices < one.slots)
        if one.length is not None:
            entries = torch.arange(indices.shape[1], device=indices.device)
            valid &= entries < one.length.long().repeat_interleave(s_q)[:, None]
        slots, row = torch.unique(indices[valid], return_inverse=True)
        found = torch.full_like(indices, -1)
        found[valid] = row + first
        tables.append(one.rows(slots, inputs.q.dtype))
        columns.append(found)
        first += len(slots)
    kv = torch.cat(tables)[:, None]
    scale = facts.default_scale if inputs.scale is None else inputs.scale
    q = inputs.q.reshape(requests * s_q, *inputs.q.shape[2:])
    indices = torch.cat(columns, 1)
    options = (inputs.sink, None, facts.lse_base, facts.empty_row_lse)
    whole = sparse_attention(q, kv, indices, scale, facts.d_v, *options)
    return whole if inputs.rotation is None else inputs.rotation.turned(whole)
