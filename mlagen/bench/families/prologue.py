"""Norms, RoPE and the insertion of rows in front of attention: the family `prologue`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from mlagen.bench.check import relative_error
from mlagen.bench.measure import GRAPH_CALLS
from mlagen.bench.package import BenchPackage
from mlagen.bench.shapes import (
    BLOCK_SIZE,
    TENSOR_SCALE,
    Batch,
    batches,
    empty_cache,
    rotation,
    rows_of,
    shuffled_pages,
    slots_of,
)
from mlagen.bench.trial import OURS, Call, Entrant, Family, Setting, Trial
from mlagen.layout.codec import decode, encode, read
from mlagen.verify.cache.sides import CONCAT as WRITE_PARTS
from mlagen.verify.cache.sides import INSERT as WRITE_ROWS
from mlagen.verify.prologue.reference import normalise, turned_queries, turned_rows
from mlagen.verify.prologue.side import CONCAT, PADDED, PrologueSide, side_of
from mlagen.work import prologue_bytes

APART = "torch, then our writer"
EPS = 1e-6
POSITIONS = 8192  # of the table of angles
POISON = 255  # a byte that makes any row NaN or far from right
TOLERANCE = 1.1  # times the reference's error
Q_LIMIT = 0.004  # of a Q that is rounded once
CHECKED = 256  # tokens whose results are compared
EAGER_TOKENS = 1


@dataclass(frozen=True)
class PrologueInputs:
    """Tensors of a prologue's call.

    Attributes:
        q: [T, H, columns]: whole heads, or their RoPE columns.
        rows: [T, columns].
        latent, rope: the same columns in tensors of their own.
        positions: i64 [T].
        angles: [any, rope], fp32 for whole heads, else in the model's dtype.
        cache: uint8 [pages, page_bytes], which all sets share.
        slots: i64 [T].
        scale: f32 [1], the tensor's.
    """

    q: torch.Tensor
    rows: torch.Tensor
    latent: torch.Tensor
    rope: torch.Tensor
    positions: torch.Tensor
    angles: torch.Tensor
    cache: torch.Tensor
    slots: torch.Tensor
    scale: torch.Tensor


@dataclass(frozen=True)
class Rows:
    """A package's cache, and RoPE of its rows.

    Attributes:
        package: the package.
        side: the cache.
        block_size: tokens a page.
    """

    package: BenchPackage
    side: PrologueSide
    block_size: int

    def pages(self, cache: torch.Tensor) -> torch.Tensor:
        """A cache [pages, page_bytes] as callers hold it."""
        return rows_of(self.side.layout, cache, self.block_size, self.package.dtype)

    def scale(self, name: str, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        """A tensor's scale as an argument, where the layout has one."""
        return {name: scale} if self.side.layout.tensor_scale else {}


def rows_in(package: BenchPackage) -> Rows:
    """The cache of a package that has a prologue."""
    side = side_of(package.spec)
    assert side is not None
    return Rows(package, side, package.spec["cache"]["block_size"] or BLOCK_SIZE)


def padded_call(function: Callable[..., Any], rows: Rows, inputs: PrologueInputs, **named: Any) -> Call:
    """A call over whole heads, ours or a peer's."""
    table = (inputs.slots, inputs.positions, inputs.angles)
    arguments = (inputs.q, inputs.rows, inputs.cache, *table, inputs.q.shape[1], EPS, rows.block_size)
    return lambda: function(*arguments, **named)


def concat_call(function: Callable[..., Any], rows: Rows, inputs: PrologueInputs, dtype: str) -> Call:
    """A call over Q's RoPE columns, ours or a peer's, with the engine's name of the layout."""
    first = (inputs.positions, inputs.q, inputs.rope, inputs.latent, inputs.angles, rows.side.neox)
    arguments = (*first, inputs.slots, rows.pages(inputs.cache), dtype, inputs.scale)
    return lambda: function(*arguments)


def _ours(kind: str, rows: Rows, inputs: PrologueInputs) -> Call:
    function = rows.package.wrapper(kind)
    if kind == PADDED:
        return padded_call(function, rows, inputs, **rows.scale("scale", inputs.scale))
    return concat_call(function, rows, inputs, rows.side.layout.name)


def _apart(kind: str, rows: Rows, inputs: PrologueInputs) -> Call:
    """Norms and RoPE by torch, then the package's own writer."""
    side, whole = rows.side, kind == PADDED
    scale = rows.scale("scale", inputs.scale)
    write = rows.package.wrapper(WRITE_ROWS if whole else WRITE_PARTS)
    ue8m0 = any(field.dtype == "ue8m0" for field in side.layout.fields)

    def call() -> torch.Tensor:
        q = normalise(inputs.q.float(), None, EPS) if whole else inputs.q.float()
        turned, _ = turned_queries(side, q, inputs.angles, inputs.positions)
        row, _ = turned_rows(side, inputs.rows, inputs.angles, inputs.positions, None, EPS)
        if whole:
            write(row, inputs.cache, inputs.slots, rows.block_size, ue8m0, **scale)
        else:
            latent, rope = row[:, : side.first], row[:, side.first :]
            write(latent, rope, rows.pages(inputs.cache), inputs.slots, scale=inputs.scale)
        return turned.to(inputs.q.dtype)

    return call


def prologue_shapes(package: BenchPackage, heads: Sequence[int] | None) -> list[Batch]:
    """Batches that the package's prologues are measured at."""
    found = [batch for name in (PADDED, CONCAT) if package.has(name) for batch in batches("prologue", name)]
    return [batch for batch in found if batch.requests == 1]


def make_prologue_inputs(batch: Batch, rows: Rows, heads: int, device: torch.device, sets: int) -> list[PrologueInputs]:
    """Rotating input sets: each has tokens, pages and a Q of its own."""
    side, dtype, whole = rows.side, rows.package.dtype, batch.kind == PADDED
    pages = shuffled_pages(sets, batch.requests, batch.pages_each(rows.block_size), device=device)
    cache = empty_cache(side.layout, pages.numel(), rows.block_size, device)
    slots = slots_of(pages, batch.tokens_each, rows.block_size).view(sets, batch.tokens)
    columns = side.layout.columns if whole else side.rope
    angle = torch.rand(POSITIONS, side.rope // 2, device=device) * 6.28
    angles = torch.cat([angle.cos(), angle.sin()], 1).to(torch.float32 if whole else dtype)
    positions = torch.randint(0, POSITIONS, (batch.tokens,), device=device)
    scale = torch.full((1,), TENSOR_SCALE, device=device)
    found = []
    for one in range(sets):
        q = torch.randn(batch.tokens, heads, columns, dtype=dtype, device=device)
        row = torch.randn(batch.tokens, side.layout.columns, dtype=dtype, device=device)
        latent, rope = row[:, : side.first].contiguous(), row[:, side.first :].contiguous()
        found.append(PrologueInputs(q, row, latent, rope, positions, angles, cache, slots[one], scale))
    return found


def prologue_error(rows: Rows, kind: str, inputs: PrologueInputs, call: Call) -> float:
    """Errors of rows, relative to their own quantisation, and of Q, relative to its rounding: the larger one.

    NaN where a row was not written.
    """
    some, side = slice(CHECKED), rows.side
    before = [tensor.clone() for tensor in (inputs.q, inputs.rope)]
    inputs.cache.fill_(POISON)
    result = call()
    got = result if result is not None else inputs.q
    q = before[0][some].double()
    q = normalise(q, None, EPS) if kind == PADDED else q
    want, _ = turned_queries(side, q, inputs.angles, inputs.positions[some])
    parts = inputs.rows if kind == PADDED else torch.cat([inputs.latent, before[1]], 1)
    row, _ = turned_rows(side, parts[some], inputs.angles, inputs.positions[some], None, EPS)
    kept = relative_error(decode(side.layout, encode(side.layout, row, TENSOR_SCALE), TENSOR_SCALE), row)
    found = relative_error(read(side.layout, inputs.cache, rows.block_size, inputs.slots[some], TENSOR_SCALE), row)
    q_error = relative_error(got[some][:, : want.shape[1]], want) / Q_LIMIT
    for tensor, values in zip((inputs.q, inputs.rope), before, strict=True):
        tensor.copy_(values)
    return max(q_error, found / (TOLERANCE * kept) if kept else found)


def prologue_trials(setting: Setting) -> Callable[[Batch], Trial[PrologueInputs]]:
    """Makes batches of the prologues ready."""
    package, device = setting.package, setting.device
    rows, heads = rows_in(package), package.facts.num_heads
    layout, rope = rows.side.layout, rows.side.rope

    def trial(batch: Batch) -> Trial[PrologueInputs]:
        whole = batch.kind == PADDED
        turned, item = (layout.columns, 4) if whole else (rope, 2)
        moved = prologue_bytes(batch.tokens, heads, turned, layout.columns, layout.row_bytes, rope * item)
        sets = rotation(moved, setting.l2_bytes)
        # A call that rotates Q in place would, in a graph, rotate a set of inputs again where there are fewer sets.
        inputs = make_prologue_inputs(batch, rows, heads, device, sets if whole else max(sets, GRAPH_CALLS))
        separate = package.has(WRITE_ROWS if whole else WRITE_PARTS)
        return Trial(
            inputs=inputs,
            entrants=[
                Entrant(OURS, partial(_ours, batch.kind, rows)),
                Entrant(APART, partial(_apart, batch.kind, rows), None if separate else "the package has no writer"),
            ],
            error_of=partial(prologue_error, rows, batch.kind, inputs[0]),
            error_limit=1.0,
            flops=0,
            bytes_moved=moved,
            roof=setting.copy_roof,
            graph_only=True,
            launch_bound=batch.tokens <= EAGER_TOKENS,
        )

    return trial


BENCHMARKS = {"prologue": Family(prologue_shapes, prologue_trials, ("prologue",))}
