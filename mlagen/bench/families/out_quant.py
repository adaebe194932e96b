"""Attention's output, rotated back and quantised for the output projection: the family `out_quant`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from mlagen.bench.check import relative_error
from mlagen.bench.package import BenchPackage
from mlagen.bench.shapes import Batch, batches, rotation
from mlagen.bench.trial import OURS, Call, Entrant, Family, Setting, Trial
from mlagen.verify.checks.out_quant import GROUP, quantised
from mlagen.verify.out_quant.side import WORD, WRAPPER, OutSide, side_of
from mlagen.verify.paged.rope import rotate
from mlagen.work import out_quant_bytes

POSITIONS = 32768  # of the table
WIDTH = 8  # heads of a group, DeepSeek V4's
TOLERANCE = 1.1  # times the reference's error
CHECKED = 64  # tokens that are compared
EAGER_TOKENS = 1
KINDS = {WRAPPER: False, f"{WRAPPER} packed": True}  # whether scales are packed


@dataclass(frozen=True)
class OutQuantInputs:
    """Tensors of a call.

    Attributes:
        o: [T, heads, columns].
        positions: of the tokens.
        angles: fp32 [POSITIONS, rope].
        found: results of the last checked call.
    """

    o: torch.Tensor
    positions: torch.Tensor
    angles: torch.Tensor
    found: list[Any]


def out_quant_call(function: Callable[..., Any], packed: bool, inputs: OutQuantInputs) -> Call:
    """A call, ours or a peer's. It leaves its results in `found`."""
    width = WIDTH if inputs.o.shape[1] % WIDTH == 0 else 1
    given = (inputs.o, inputs.positions, inputs.angles, inputs.o.shape[1] // width, width)

    def call() -> None:
        inputs.found[:] = function(*given, tma_aligned_scales=packed)

    return call


def out_quant_shapes(package: BenchPackage, heads: Sequence[int] | None) -> list[Batch]:
    """Batches of tokens of one request."""
    side = side_of(package.spec) if package.has(WRAPPER) else None
    kinds = [name for name, packed in KINDS.items() if side and (side.packs or not packed)]
    return [batch for name in kinds for batch in batches("out_quant", name) if batch.requests == 1]


def make_out_quant_inputs(tokens: int, side: OutSide, device: torch.device, sets: int) -> list[OutQuantInputs]:
    """Rotating input sets, with one table."""
    angle = torch.rand(POSITIONS, side.rope // 2, device=device) * 6.28
    angles = torch.cat([angle.cos(), angle.sin()], 1)
    positions = torch.arange(POSITIONS - tokens, POSITIONS, device=device)
    shape = (tokens, side.heads, side.columns)
    return [
        OutQuantInputs(torch.randn(shape, dtype=side.dtype, device=device), positions, angles, []) for _ in range(sets)
    ]


def _values(side: OutSide, out: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Values [T, heads, columns] of results."""
    if scales.dtype == torch.int32:
        scales = torch.exp2(scales.contiguous().view(torch.uint8).double() - 127)
    wide = out.double() * scales.double().repeat_interleave(GROUP, -1)
    return wide.reshape(out.shape[0], -1, side.columns)


def out_quant_error(side: OutSide, packed: bool, inputs: OutQuantInputs, call: Call) -> float:
    """Error of results relative to that of their own quantisation."""
    call()
    some, half = slice(-CHECKED, None), side.rope // 2
    out, scales = (one[some].cpu() for one in inputs.found)
    angles = inputs.angles[inputs.positions[some]].double().cpu()[:, None]
    back = torch.cat([angles[..., :half], -angles[..., half:]], -1)
    exact = rotate(side, inputs.o[some].double().cpu(), back)
    own = quantised(exact.float(), out.shape[-1] // side.columns, packed)
    columns = out.shape[-1] // (GROUP * WORD if packed else GROUP)
    if scales.shape[-1] != columns:
        return float("inf")
    return relative_error(_values(side, out, scales), exact) / (TOLERANCE * relative_error(_values(side, *own), exact))


def out_quant_trials(setting: Setting) -> Callable[[Batch], Trial[OutQuantInputs]]:
    """Makes batches of outputs ready."""
    package, device = setting.package, setting.device

    def trial(batch: Batch) -> Trial[OutQuantInputs]:
        packed, side = KINDS[batch.kind], side_of(package.spec)
        assert side is not None
        moved = out_quant_bytes(batch.tokens, side.heads, side.columns, 4 * side.rope, 1 if packed else 4)
        inputs = make_out_quant_inputs(batch.tokens, side, device, rotation(moved, setting.l2_bytes))
        return Trial(
            inputs=inputs,
            entrants=[Entrant(OURS, partial(out_quant_call, package.wrapper(WRAPPER), packed))],
            error_of=partial(out_quant_error, side, packed, inputs[0]),
            error_limit=1.0,
            flops=0,
            bytes_moved=moved,
            roof=setting.copy_roof,
            graph_only=True,
            launch_bound=batch.tokens <= EAGER_TOKENS,
        )

    return trial


BENCHMARKS = {"out_quant": Family(out_quant_shapes, out_quant_trials, ("out_quant",))}
