"""Top-k of rows of scores: the family `topk`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from mlagen.bench.check import wrong_share
from mlagen.bench.package import BenchPackage
from mlagen.bench.shapes import rotation
from mlagen.bench.trial import OURS, Call, Entrant, Family, Setting, Trial
from mlagen.work import topk_bytes

PREFILL, DECODE = "top_k_per_row_prefill", "top_k_per_row_decode"
PREFILL_ROWS, PREFILL_COLUMNS = 4096, (8 << 10, 32 << 10, 128 << 10)
DECODES = (
    *((1, columns) for columns in (4 << 10, 32 << 10, 128 << 10)),
    *((16, columns) for columns in (4 << 10, 32 << 10)),
    *((64, columns) for columns in (4 << 10, 32 << 10, 64 << 10)),
    (128, 32 << 10),
)
PICKS = (2048, 512)
EAGER_ROWS = 16  # up to this many rows, a call's time from Python is of interest


@dataclass(frozen=True)
class TopkShape:
    """Sizes of one selection.

    Attributes:
        kind: the wrapper.
        tokens, columns: of the scores; the last token of a prefill sees all columns, each before it one fewer.
        topk: picks a row.
    """

    kind: str
    tokens: int
    columns: int
    topk: int

    @property
    def family(self) -> str:
        """The one family of these shapes."""
        return "topk"

    def __str__(self) -> str:
        return f"{self.kind} {self.tokens} x {self.columns}, topk {self.topk}"

    @property
    def seen(self) -> int:
        """Scores that all rows see."""
        hidden = self.tokens * (self.tokens - 1) // 2 if self.kind == PREFILL else 0
        return self.tokens * self.columns - hidden


@dataclass(frozen=True)
class TopkInputs:
    """Tensors of a selection: scores fp32 [rows, columns], starts and ends i32 [rows], room i32 [rows, topk]."""

    logits: torch.Tensor
    starts: torch.Tensor
    ends: torch.Tensor
    indices: torch.Tensor

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Arguments of vLLM's operators behind the tensors."""
        return len(self.logits), self.logits.stride(0), self.logits.stride(1), self.indices.shape[1]


def topk_shapes(package: BenchPackage, heads: Sequence[int] | None) -> list[TopkShape]:
    """Selections that a package is measured at."""
    found = []
    if package.has(PREFILL):
        found += [TopkShape(PREFILL, PREFILL_ROWS, columns, k) for k in PICKS for columns in PREFILL_COLUMNS]
    if package.has(DECODE):
        found += [TopkShape(DECODE, rows, columns, k) for k in PICKS for rows, columns in DECODES]
    return found


def make_inputs(shape: TopkShape, device: torch.device, sets: int) -> list[TopkInputs]:
    """Rotating input sets: normal scores, as sums over heads are."""
    rows, columns = shape.tokens, shape.columns
    starts = torch.zeros(rows, dtype=torch.int32, device=device)
    ends = torch.full_like(starts, columns)
    if shape.kind == PREFILL:
        ends = torch.arange(columns - rows + 1, columns + 1, dtype=torch.int32, device=device)
    made = []
    for _ in range(sets):
        logits = torch.randn(rows, columns, device=device)
        made.append(TopkInputs(logits, starts, ends, starts.new_full((rows, shape.topk), -2)))
    return made


def call_of(kind: str, function: Callable[..., Any], inputs: TopkInputs) -> Call:
    """A call of either wrapper, ours or a peer's of the same name."""

    def call() -> torch.Tensor:
        if kind == PREFILL:
            function(inputs.logits, inputs.starts, inputs.ends, inputs.indices, *inputs.sizes)
        else:
            function(inputs.logits, 1, inputs.ends, inputs.indices, *inputs.sizes)
        return inputs.indices

    return call


def topk_error(inputs: TopkInputs, call: Call) -> float:
    """Share of a call's picks that are wrong; a peer's may stand in any order, and name any of equal scores."""
    inputs.indices.fill_(-2)
    got = call()
    assert isinstance(got, torch.Tensor)
    columns = torch.arange(inputs.logits.shape[1], device=got.device)
    wrong = 0.0
    for first in range(0, len(got), 256):
        rows = slice(first, first + 256)
        seen = inputs.logits[rows].masked_fill(columns >= inputs.ends[rows, None], -torch.inf)
        expected = seen.topk(got.shape[1], dim=1).values
        picked = seen.gather(1, got[rows].clamp(min=0).long()).masked_fill(got[rows] < 0, -torch.inf)
        wrong = max(wrong, wrong_share(picked.sort(dim=1, descending=True).values, expected))
    return wrong


def topk_trials(setting: Setting) -> Callable[[TopkShape], Trial[Any]]:
    """Makes selections ready."""
    package, device = setting.package, setting.device

    def trial(shape: TopkShape) -> Trial[Any]:
        moved = topk_bytes(shape.seen, shape.tokens, shape.topk)
        inputs = make_inputs(shape, device, rotation(moved, setting.l2_bytes))
        return Trial(
            inputs=inputs,
            entrants=[Entrant(OURS, partial(call_of, shape.kind, package.wrapper(shape.kind)))],
            error_of=partial(topk_error, inputs[0]),
            error_limit=0.0,
            flops=0,
            bytes_moved=moved,
            roof=setting.copy_roof,
            graph_only=True,
            launch_bound=shape.tokens <= EAGER_ROWS,
        )

    return trial


BENCHMARKS = {"topk": Family(topk_shapes, topk_trials, ("topk",))}
