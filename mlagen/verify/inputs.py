"""Builds the tensors of a case: random values where they count, NaN where they must not matter."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from mlagen.verify.cases import SHARES, Problem
from mlagen.verify.facts import Facts

INT32 = torch.iinfo(torch.int32)
INT64 = torch.iinfo(torch.int64)
GUARD = 4096  # elements of poison before and after a buffer: a KV row or two of it is read where a mask is missing
FAR_STRIDE = 2**30 + 8  # elements; twice this is past an int32, and it keeps 16-byte alignment
ODD_STRIDE = 7
TWICE_NAN = 0x7FC07FC0  # two NaN of bf16, which are one of fp32


class CaseSkippedError(Exception):
    """A case cannot run here; the message says why."""


@dataclass(frozen=True)
class Layout:
    """Where a tensor's elements lie.

    Attributes:
        offset: elements by which it begins off alignment.
        row_gap: poisoned elements after each run of the last dimension.
        page_gap: further ones after each entry of the first dimension.
        swap_ab: the first two dimensions are swap_ab in memory.
        far: entries of the first dimension lie FAR_STRIDE apart.
    """

    offset: int = 0
    row_gap: int = 0
    page_gap: int = 0
    swap_ab: bool = False
    far: bool = False


LAYOUTS = {
    "contiguous": Layout(),
    "slice": Layout(row_gap=24, page_gap=64),
    "odd": Layout(offset=1, row_gap=3, page_gap=5),
    "transposed": Layout(swap_ab=True),
    "far": Layout(far=True),
}


@dataclass(frozen=True)
class Placed:
    """A view and the buffer around it, whose other elements are poison.

    Attributes:
        view: the tensor a wrapper gets.
        buffer: 1-D, all elements between and around the view's.
        before: the buffer as it was when placed; None where it is too large to copy.
    """

    view: torch.Tensor
    buffer: torch.Tensor
    before: torch.Tensor | None

    def changed(self) -> bool:
        """Whether any element of the buffer has other bits than when it was placed."""
        return self.before is not None and not torch.equal(bits(self.buffer), bits(self.before))

    def spilled(self) -> bool:
        """Whether any element outside the view has other bits; the view's own are put back to what they were."""
        if self.before is None:
            return False
        self.view.copy_(self.before.as_strided(self.view.shape, self.view.stride(), self.view.storage_offset()))
        return self.changed()


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bit patterns as integers of its size, so that NaN equals NaN."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def allocate(elements: int, dtype: torch.dtype, device: str, fill: float | int | None) -> torch.Tensor:
    """A buffer; with `fill` None its pages are touched only when used.

    Raises:
        CaseSkippedError: the device has not that much memory.
    """
    try:
        if fill is None:
            return torch.empty(elements, dtype=dtype, device=device)
        return torch.full((elements,), fill, dtype=dtype, device=device)
    except (RuntimeError, MemoryError) as error:
        if "memory" not in str(error).lower():
            raise
        gib = elements * dtype.itemsize / 2**30
        raise CaseSkippedError(f"{gib:.1f} GiB are not to be had on {device}") from error


def place_workspace(floats: int, device: str) -> Placed:
    """A workspace [1, 1, floats] whose bits are NaN in fp32 and in either half."""
    values = torch.full((1, 1, floats), TWICE_NAN, dtype=torch.int32, device=device).view(torch.float32)
    return place(values, LAYOUTS["contiguous"], math.nan)


def is_wholly_used(workspace: torch.Tensor, facts: Facts) -> bool:
    """Whether the splits of a call wrote each float of `place_workspace`'s but those that pad rounded rows to 16 bytes.

    Bits tell, not NaN: a last chunk's statistics lie where earlier ones had two halves, as which a float may be NaN.
    """
    untouched = workspace.view(torch.int32) == TWICE_NAN
    floats, padded, stats = facts.d_v, facts.d_v, 2  # of an accumulator; its maximum and sum
    if facts.partials != "fp32":
        floats, padded = -(-facts.d_v // 2), -(-facts.d_v // 8) * 4
    if facts.partials == "fp16":
        stats = 3  # and its power of two
    rows = len(workspace) // (padded + stats)
    accumulators = untouched[: rows * padded].view(rows, padded)[:, :floats]
    return not bool(accumulators.any() | untouched[rows * padded :].any())


def idle_strides(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """The strides, odd in each dimension of one place: such a stride leads nowhere."""
    return tuple(ODD_STRIDE if places == 1 else stride for places, stride in zip(shape, strides, strict=True))


def place(values: torch.Tensor, layout: Layout, fill: float | int) -> Placed:
    """`values`, of two or three dimensions, laid out in a buffer filled with `fill`; the last one is contiguous."""
    shape = values.shape
    order = list(range(values.dim()))
    if layout.swap_ab:
        order[:2] = order[1::-1]
    strides = [0] * values.dim()
    extent = 1
    for dim in reversed(order):
        strides[dim] = extent
        extent *= max(shape[dim], 1)
        if dim == order[-1]:
            extent += layout.row_gap
        if dim == order[1] and values.dim() > 2:
            extent += layout.page_gap
    if layout.far:
        strides[0] = FAR_STRIDE
        extent = FAR_STRIDE * max(shape[0] - 1, 0) + extent
    elements = 2 * GUARD + layout.offset + extent
    buffer = allocate(elements, values.dtype, str(values.device), None if layout.far else fill)
    view = buffer.as_strided(shape, strides, GUARD + layout.offset)
    view.copy_(values)
    return Placed(view, buffer, None if layout.far else buffer.clone())


def _dtype(facts: Facts) -> torch.dtype:
    dtype = getattr(torch, facts.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _randint(low: int, high: int, size: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randint(low, high, size, generator=generator, dtype=torch.int64)


# Patterns of indices: i64 [tokens, topk] from the problem, the rows that hold numbers, and a generator.
IndexPattern = Callable[[Problem, torch.Tensor, torch.Generator], torch.Tensor]


def _full(problem: Problem, named: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return named[_randint(0, len(named), (problem.tokens, problem.topk), generator)]


def _random(problem: Problem, named: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """An eighth of the lanes is absent, in no order."""
    indices = _full(problem, named, generator)
    indices[torch.rand(indices.shape, generator=generator) < 0.125] = -1
    return indices


def _none(problem: Problem, named: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.full((problem.tokens, problem.topk), -1)


def _some_rows_none(problem: Problem, named: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    indices = _random(problem, named, generator)
    indices[::2] = -1
    return indices


def _int32_range(problem: Problem, named: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    rows = problem.rows
    odd = torch.tensor([INT32.min, INT32.max, rows, rows + 1, -2, -rows - 1, INT32.min + 1, INT32.max - 1])
    anything = _randint(INT32.min, INT32.max + 1, (problem.tokens, problem.topk), generator)
    outside = (anything < 0) | (anything >= rows)
    indices = torch.where(outside, anything, -1)
    picked = odd[_randint(0, len(odd), indices.shape, generator)]
    kind = torch.rand(indices.shape, generator=generator)
    indices = torch.where(kind < 0.4, picked, indices)
    return torch.where(kind > 0.7, _full(problem, named, generator), indices) if rows else indices


def _last_lane(problem: Problem, named: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    indices = _none(problem, named, generator)
    indices[:, -1] = _full(problem, named, generator)[:, -1]
    return indices


def _first_lane(problem: Problem, named: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return _last_lane(problem, named, generator).flip(1)


def _late(problem: Problem, named: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Nothing in the first two thirds, and a gap in the rest."""
    indices = _full(problem, named, generator)
    indices[:, : 2 * problem.topk // 3] = -1
    indices[:, -problem.topk // 6 : -1] = -1
    return indices


def _duplicates(problem: Problem, named: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Three rows in uneven numbers."""
    picked = _randint(0, 12, (problem.tokens, problem.topk), generator).clamp(max=2)
    return named[:3][picked]


def _last_row(problem: Problem, named: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """The last row, the one past it, and others."""
    indices = _full(problem, named, generator)
    indices[:, ::3] = problem.rows - 1
    indices[:, 1::3] = problem.rows
    return indices


def _row_zero(problem: Problem, named: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    indices = _random(problem, named, generator)
    indices[:, ::2] = 0
    return indices


def _neighbours(share: int) -> IndexPattern:
    """Distinct rows in no order; a token names `share` per cent of those of the one before, and others."""

    def pattern(problem: Problem, named: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        count = min(problem.topk, len(named) // 2)
        indices = torch.full((problem.tokens, problem.topk), -1)
        current = named[torch.randperm(len(named), generator=generator)[:count]]
        for token in range(problem.tokens):
            current = current[torch.randperm(count, generator=generator)]
            indices[token, :count] = current
            others = named[~torch.isin(named, current)]
            others = others[torch.randperm(len(others), generator=generator)]
            kept = count * share // 100
            current = torch.cat([current[:kept], others[: count - kept]])
        return indices

    return pattern


def _neighbours_repeat(problem: Problem, named: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Some tokens name a row twice or thrice; the neighbours of others name each row once."""
    indices = _neighbours(75)(problem, named, generator)
    indices[1::8, 5] = indices[1::8, 9]
    indices[2::8, 3::50] = indices[2::8, 7:8]
    return indices


INDEX_PATTERNS: dict[str, IndexPattern] = {
    "full": _full,
    "random": _random,
    "none": _none,
    "some rows none": _some_rows_none,
    "int32 range": _int32_range,
    "last lane": _last_lane,
    "first lane": _first_lane,
    "late": _late,
    "duplicates": _duplicates,
    "last row": _last_row,
    "row zero": _row_zero,
    "far": _random,
    **{f"neighbours, {share} % shared": _neighbours(share) for share in SHARES},
    "neighbours, repeats": _neighbours_repeat,
}


def lengths(pattern: str, tokens: int, topk: int, generator: torch.Generator) -> torch.Tensor:
    """topk_length i32 [tokens] of a pattern."""
    if pattern == "random":
        return _randint(0, topk + 1, (tokens,), generator).int()
    cycle = {
        "full": [topk],
        "zero": [0],
        "too long": [topk + 1, INT32.max],
        "negative": [-1, INT32.min],
        "mixed": [topk // 2 + 1, 0, topk, 1, topk + 9, -3, topk - 1],
    }[pattern]
    return torch.tensor((cycle * tokens)[:tokens], dtype=torch.int32)


def sinks(pattern: str, heads: int, topk: int, generator: torch.Generator) -> torch.Tensor:
    """attn_sink f32 [heads] of a pattern; an ordinary one is about as large as a row's LSE, so that it counts."""
    normal = torch.randn(heads, generator=generator) + math.log(topk)
    inf = float("inf")
    cycle = {
        "random": [],
        "+inf": [inf],
        "-inf": [-inf],
        "extreme": [1e4, -1e4, 3e38, -3e38, 88.0, -104.0],
        "mixed": [inf, -inf, 1e4, -1e4, 0.0],
    }[pattern]
    # Mixed: every other head is an ordinary one.
    for head, value in enumerate((cycle * heads)[:heads]):
        if pattern != "mixed" or head % 2 == 0:
            normal[head] = cycle[head // 2 % len(cycle)] if pattern == "mixed" else value
    return normal


@dataclass
class Inputs:
    """The tensors of one attention call.

    Attributes:
        q: [tokens, heads, d_qk].
        kv: [rows, 1, d_qk] or [pages, block_size, d_qk].
        indices: i32 [tokens, 1, topk].
        sm_scale: factor of the logits.
        length: i32 [tokens] or None.
        sink: f32 [heads] or None.
        out: [tokens, heads, d_v] to write to, or None.
        placed: every input's buffer by name.
    """

    q: torch.Tensor
    kv: torch.Tensor
    indices: torch.Tensor
    sm_scale: float
    length: torch.Tensor | None
    sink: torch.Tensor | None
    out: Placed | None
    placed: dict[str, Placed] = field(default_factory=dict)


def _kv(problem: Problem, facts: Facts, named: torch.Tensor, device: str, generator: torch.Generator) -> Placed:
    """KV rows: numbers in the `named` ones, NaN in all others."""
    dtype, size = _dtype(facts), facts.block_size or 1
    pages = -(-problem.rows // size)
    shape = (pages, size, facts.d_qk)
    values = torch.randn(len(named), facts.d_qk, generator=generator).to(dtype).to(device)
    named = named.to(device)
    if problem.kv == "far":
        buffer = allocate(pages * size * facts.d_qk, dtype, device, float("nan") if device == "cuda" else None)
        kv = buffer.view(shape)
        kv[named // size, named % size] = values
        return Placed(kv, buffer, None)
    kv = torch.full(shape, float("nan"), dtype=dtype, device=device)
    kv[named // size, named % size] = values
    return place(kv, LAYOUTS[problem.kv], float("nan"))


def named_rows(problem: Problem, facts: Facts, generator: torch.Generator) -> torch.Tensor:
    """Rows that indices may name; the others stay poisoned, row 0 among them unless the pattern is about it."""
    rows = problem.rows
    if problem.indices == "far":
        far = rows - 1 - torch.randperm(1000, generator=generator)[:40]
        return torch.cat([far, torch.randperm(1000, generator=generator)[:10] + 1])
    named = torch.randperm(rows, generator=generator)
    named = named[(named != 0) & (named != rows - 1)][: max(1, 2 * rows // 3)]
    if problem.indices == "last row":
        named = torch.cat([named, torch.tensor([rows - 1])])
    if problem.indices == "row zero":
        named = torch.cat([torch.tensor([0]), named])
    return named


def build(problem: Problem, facts: Facts, device: str, seed: int) -> Inputs:
    """The tensors of a problem, the same for the same seed.

    Raises:
        CaseSkippedError: the device has too little memory.
    """
    generator = torch.Generator().manual_seed(seed)
    dtype = _dtype(facts)
    if facts.block_size:
        problem = replace(problem, rows=-(-problem.rows // facts.block_size) * facts.block_size)
    named = named_rows(problem, facts, generator)
    nan = float("nan")
    q_values = torch.randn(problem.tokens, problem.heads, facts.d_qk, generator=generator).to(dtype).to(device)
    q = place(problem.q_size * q_values, LAYOUTS[problem.q], nan)
    kv = _kv(problem, facts, named, device, generator)

    indices = INDEX_PATTERNS[problem.indices](problem, named, generator)
    # A lane that does not count names a row of NaN: row 0, or one past what is named.
    poison = 0 if problem.indices != "row zero" else -1
    length = None
    if problem.length is not None:
        length = lengths(problem.length, problem.tokens, problem.topk, generator)
        indices[torch.arange(problem.topk)[None, :] >= length[:, None]] = poison
    index = place(indices.int()[:, None].to(device), LAYOUTS[problem.index_layout], poison)
    sink = None if problem.sink is None else sinks(problem.sink, problem.heads, problem.topk, generator).to(device)
    placed = {"q": q, "kv": kv, "indices": index}
    if length is not None:
        length = length.to(device)
        placed["topk_length"] = Placed(length, length, length.clone())
    if sink is not None:
        placed["attn_sink"] = Placed(sink, sink, sink.clone())
    out = None
    if problem.out is not None:
        empty = torch.full((problem.tokens, problem.heads, facts.d_v), nan, dtype=dtype, device=device)
        out = place(empty, LAYOUTS[problem.out], nan)
    scale = problem.scale * facts.d_qk**-0.5
    return Inputs(q.view, kv.view, index.view, scale, length, sink, out, placed)
