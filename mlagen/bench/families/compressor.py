"""States of tokens, and rows made of windows of them: the family `compressor`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from mlagen.bench.check import relative_error
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
from mlagen.verify.compressor.reference import Windows, compressed
from mlagen.verify.compressor.side import COMPRESS, SAVE, CompressorSide, sides_of
from mlagen.work import compress_bytes, states_bytes

CONTEXT = 32768  # tokens of the request after the call
EPS = 1e-6
POISON = 255  # a byte that makes any row NaN or far from right
TOLERANCE = 1.1  # times the reference's error
CHECKED = 16  # rows that are compared
EAGER_TOKENS = 1


class Kind(NamedTuple):
    """A call that is measured.

    Attributes:
        wrapper: the wrapper.
        short: the cache, `CompressorSide.short`.
        ratio, overlap: of the windows.
        block: states a page.
    """

    wrapper: str
    short: str
    ratio: int
    overlap: bool
    block: int


# As vLLM's compressors of V4 are: rows of 4 tokens and of 128, and keys of 4.
KINDS = {
    f"{SAVE} of 4": Kind(SAVE, "rows", 4, True, 4),
    f"{COMPRESS} of 4": Kind(COMPRESS, "rows", 4, True, 4),
    f"{COMPRESS} of 128": Kind(COMPRESS, "rows", 128, False, 8),
    f"{COMPRESS} of 4, keys": Kind(COMPRESS, "keys", 4, True, 4),
}


@dataclass(frozen=True)
class CompressorInputs:
    """Tensors of a call.

    Attributes:
        kv, scores, ape: of SAVE, fp32.
        states: fp32 [pages, block, 2 * width].
        requests, positions, state_slots, slots: of the tokens.
        table: i32 [1, pages of the request].
        angles: fp32 [CONTEXT, rope].
        weight: of the norm.
        cache: uint8 [pages, page_bytes].
        scale: f32 [1], the tensor's.
    """

    kv: torch.Tensor
    scores: torch.Tensor
    ape: torch.Tensor
    states: torch.Tensor
    requests: torch.Tensor
    positions: torch.Tensor
    state_slots: torch.Tensor
    slots: torch.Tensor
    table: torch.Tensor
    angles: torch.Tensor
    weight: torch.Tensor
    cache: torch.Tensor
    scale: torch.Tensor


@dataclass(frozen=True)
class Rows:
    """A cache of compressed rows.

    Attributes:
        package: the package.
        side: the cache.
        kind: the call.
        block_size: rows a page.
    """

    package: BenchPackage
    side: CompressorSide
    kind: Kind
    block_size: int

    @property
    def width(self) -> int:
        """Columns of a half of a state."""
        return self.side.columns * (2 if self.kind.overlap else 1)

    def made(self, tokens: int) -> int:
        """Rows that the last tokens of a request make: its last token ends a window."""
        return -(-tokens // self.kind.ratio)


def rows_in(package: BenchPackage, kind: Kind) -> Rows | None:
    """The cache that a call writes to; None without."""
    for side in sides_of(package.spec):
        if side.short == kind.short:
            names = ("indexer_cache",) if kind.short == "keys" else ("extra_cache", "cache")
            cache = next(package.spec[name] for name in names if package.spec.get(name))
            return Rows(package, side, kind, cache["block_size"] or BLOCK_SIZE)
    return None


def save_call(function: Callable[..., Any], rows: Rows, inputs: CompressorInputs) -> Call:
    """A call that saves states, ours or a peer's."""
    tensors = (inputs.kv, inputs.scores, inputs.ape, inputs.positions, inputs.states, inputs.state_slots)
    arguments = (*tensors, rows.kind.block, rows.width, rows.kind.ratio)
    return lambda: function(*arguments)


def compress_call(
    function: Callable[..., Any], rows: Rows, inputs: CompressorInputs, *sizes: int, metadata: bool, **named: Any
) -> Call:
    """A call that compresses, ours or a peer's; `sizes` are the layout's, which the peer takes."""
    kind, side = rows.kind, rows.side
    cache = rows_of(side.layout, inputs.cache, rows.block_size, rows.package.dtype)
    slots = SimpleNamespace(slot_mapping=inputs.slots) if metadata else inputs.slots
    first = (inputs.states, len(inputs.positions), inputs.requests, inputs.positions, inputs.state_slots, inputs.table)
    pdl: dict[str, bool] | None = {} if metadata else None
    where = (kind.block, rows.width, inputs.angles, cache, slots, pdl)
    dims = (side.columns, side.rope, kind.ratio, kind.overlap, side.packed, inputs.weight, EPS)
    arguments = (*first, *where, *dims, *sizes)
    return lambda: function(*arguments, **named)


def _ours(rows: Rows, inputs: CompressorInputs) -> Call:
    function = rows.package.wrapper(rows.kind.wrapper)
    if rows.kind.wrapper == SAVE:
        return save_call(function, rows, inputs)
    named = {"fp8_scale": inputs.scale} if rows.side.layout.tensor_scale else {}
    return compress_call(function, rows, inputs, metadata=False, **named)


def compressor_shapes(package: BenchPackage, heads: Sequence[int] | None) -> list[Batch]:
    """Batches that the package's compressor is measured at: the last tokens of a request."""
    found: list[Batch] = []
    for name, kind in KINDS.items():
        if package.has(kind.wrapper) and rows_in(package, kind) is not None:
            found += [batch for batch in batches("compressor", name) if batch.requests == 1]
    return found


def make_compressor_inputs(batch: Batch, rows: Rows, device: torch.device, sets: int) -> list[CompressorInputs]:
    """Rotating input sets: each has states and rows of its own."""
    side, kind, width, tokens = rows.side, rows.kind, rows.width, batch.tokens
    window = kind.ratio * (2 if kind.overlap else 1)
    first_entry = max(0, CONTEXT - tokens - window) // kind.block  # of the block table, that a window needs
    entries = CONTEXT // kind.block - first_entry
    row_pages = -(-rows.made(tokens) // rows.block_size)
    cache = empty_cache(side.layout, sets * row_pages, rows.block_size, device)
    pages = shuffled_pages(sets, row_pages, device=device)
    positions = torch.arange(CONTEXT - tokens, CONTEXT, device=device)
    works = (positions + 1) % kind.ratio == 0
    angle = torch.rand(CONTEXT, side.rope // 2, device=device) * 6.28
    found = []
    for one in range(sets):
        state_pages = shuffled_pages(entries, device=device)
        table = torch.zeros(1, CONTEXT // kind.block, dtype=torch.int32, device=device)
        table[0, first_entry:] = state_pages
        slots = torch.full((tokens,), -1, device=device)
        slots[works] = slots_of(pages[one], int(works.sum()), rows.block_size)
        found.append(
            CompressorInputs(
                kv=torch.randn(tokens if kind.wrapper == SAVE else 0, width, device=device),
                scores=torch.randn(tokens if kind.wrapper == SAVE else 0, width, device=device),
                ape=torch.randn(kind.ratio, width, device=device),
                states=torch.randn(entries, kind.block, 2 * width, device=device),
                requests=torch.zeros(tokens, dtype=torch.int32, device=device),
                positions=positions,
                state_slots=table[0, positions // kind.block].long() * kind.block + positions % kind.block,
                slots=slots,
                table=table,
                angles=torch.cat([angle.cos(), angle.sin()], 1),
                weight=torch.rand(side.columns, device=device).to(rows.package.dtype) + 0.5,
                cache=cache,
                scale=torch.full((1,), TENSOR_SCALE, device=device),
            )
        )
    return found


def compressor_error(rows: Rows, inputs: CompressorInputs, call: Call) -> float:
    """Error of rows relative to that of their own quantisation; of states, the share of wrong ones."""
    kind, layout = rows.kind, rows.side.layout
    if kind.wrapper == SAVE:
        states = inputs.states.view(-1, inputs.states.shape[2])
        inputs.states.fill_(float("nan"))
        call()
        want = torch.cat([inputs.kv, inputs.scores + inputs.ape[inputs.positions % kind.ratio]], 1)
        return float((states[inputs.state_slots] != want).any(1).float().mean())
    inputs.cache.fill_(POISON)
    call()
    some = torch.nonzero(inputs.slots >= 0)[:CHECKED, 0]
    windows = Windows(
        states=inputs.states.cpu(),
        table=inputs.table.cpu(),
        requests=inputs.requests[some].tolist(),
        positions=inputs.positions[some].tolist(),
        state_slots=inputs.state_slots[some].tolist(),
        slots=inputs.slots[some].tolist(),
        ratio=kind.ratio,
        overlap=kind.overlap,
    )
    wide, slots = compressed(rows.side, windows, inputs.angles.cpu(), inputs.weight.cpu(), EPS, 2**31)
    row = wide.to(rows.package.dtype)
    kept = relative_error(decode(layout, encode(layout, row, TENSOR_SCALE), TENSOR_SCALE), wide)
    got = read(layout, inputs.cache, rows.block_size, slots.to(inputs.cache.device), TENSOR_SCALE)
    return relative_error(got.cpu(), wide) / (TOLERANCE * kept)


def compressor_trials(setting: Setting) -> Callable[[Batch], Trial[CompressorInputs]]:
    """Makes batches of the compressor ready."""
    package, device = setting.package, setting.device

    def trial(batch: Batch) -> Trial[CompressorInputs]:
        rows = rows_in(package, KINDS[batch.kind])
        assert rows is not None
        kind, side = rows.kind, rows.side
        if kind.wrapper == SAVE:
            moved = states_bytes(batch.tokens, rows.width)
        else:
            window = kind.ratio * (2 if kind.overlap else 1)
            made = rows.made(batch.tokens)
            moved = compress_bytes(batch.tokens, made, window, side.columns, side.layout.row_bytes, 4 * side.rope)
        inputs = make_compressor_inputs(batch, rows, device, rotation(moved, setting.l2_bytes))
        return Trial(
            inputs=inputs,
            entrants=[Entrant(OURS, partial(_ours, rows))],
            error_of=partial(compressor_error, rows, inputs[0]),
            error_limit=0.0 if kind.wrapper == SAVE else 1.0,
            flops=0,
            bytes_moved=moved,
            roof=setting.copy_roof,
            graph_only=True,
            launch_bound=batch.tokens <= EAGER_TOKENS,
        )

    return trial


BENCHMARKS = {"compressor": Family(compressor_shapes, compressor_trials, ("compressor",))}
