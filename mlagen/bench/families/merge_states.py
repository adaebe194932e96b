"""Merges of parts of attention by their LSE: the family `merge_states`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from mlagen.bench.check import Reference, error_limit, in_chunks, row_limit
from mlagen.bench.families.dense_fwd import LSE_BYTES
from mlagen.bench.package import BenchPackage
from mlagen.bench.shapes import rotation
from mlagen.bench.trial import OURS, Call, Entrant, Family, Setting, Trial
from mlagen.work import ITEMSIZE

STATES, PARTS = "merge_attn_states", "merge_attn_parts"
TOKENS = (1, 128, 4096, 32768)
PARTS_MERGED = 8


@dataclass(frozen=True)
class MergeStatesShape:
    """Sizes of one merge.

    Attributes:
        kind: the wrapper.
        tokens, num_heads, columns: sizes of the result.
        parts: how many are merged.
    """

    kind: str
    tokens: int
    num_heads: int
    columns: int
    parts: int

    @property
    def family(self) -> str:
        """The one family of these shapes."""
        return "merge_states"

    def __str__(self) -> str:
        return f"{self.kind} {self.tokens} x h{self.num_heads} x {self.columns}, {self.parts} parts"

    @property
    def bytes_moved(self) -> int:
        """Bytes of a call: every part and the result once, with their LSE."""
        return (self.parts + 1) * self.tokens * self.num_heads * (self.columns * ITEMSIZE + LSE_BYTES)


@dataclass(frozen=True)
class MergeStatesInputs:
    """Tensors of a merge: outputs [parts, tokens, heads, columns], lses f32 [parts, heads, tokens], room for both."""

    outputs: torch.Tensor
    lses: torch.Tensor
    out: torch.Tensor
    out_lse: torch.Tensor


def merge_states_shapes(package: BenchPackage, heads: Sequence[int] | None) -> list[MergeStatesShape]:
    """Shapes that a package's merges are measured at."""
    section = package.spec.get("multi_head")
    columns = section["v_head_dim"] if section else package.facts.d_v
    return [
        MergeStatesShape(wrapper, tokens, count, columns, parts)
        for wrapper, parts in ((STATES, 2), (PARTS, PARTS_MERGED))
        if package.has(wrapper)
        for count in heads or [package.facts.num_heads]
        for tokens in TOKENS
    ]


def make_merge_inputs(
    shape: MergeStatesShape, dtype: torch.dtype, device: torch.device, sets: int
) -> list[MergeStatesInputs]:
    """Rotating input sets, standard normal."""
    size = (shape.tokens, shape.num_heads, shape.columns)
    return [
        MergeStatesInputs(
            torch.randn(shape.parts, *size, dtype=dtype, device=device),
            torch.randn(shape.parts, shape.num_heads, shape.tokens, device=device),
            torch.empty(size, dtype=dtype, device=device),
            torch.empty(shape.num_heads, shape.tokens, device=device),
        )
        for _ in range(sets)
    ]


def merge_call(kind: str, function: Callable[..., Any], inputs: MergeStatesInputs) -> Call:
    """A call of our wrapper, or of a peer with its signature; gives the result."""
    if kind == PARTS:
        return lambda: function(inputs.outputs, inputs.lses, inputs.out, inputs.out_lse)[0]
    (prefix, suffix), (prefix_lse, suffix_lse) = inputs.outputs, inputs.lses

    def call() -> torch.Tensor:
        function(inputs.out, prefix, prefix_lse, suffix, suffix_lse, inputs.out_lse)
        return inputs.out

    return call


def merge_reference(inputs: MergeStatesInputs) -> Reference:
    """Float64 results of one input set."""
    return Reference(partial(_expected, inputs), row_limit(inputs.out.dtype))


def _expected(inputs: MergeStatesInputs) -> torch.Tensor:
    parts, tokens = inputs.outputs.shape[:2]
    expected = torch.empty(inputs.out.shape, dtype=torch.float64, device=inputs.out.device)
    for some in in_chunks(tokens, 3 * parts * expected[0].nbytes):
        weights = inputs.lses[:, :, some].double().softmax(0).transpose(1, 2)[..., None]
        expected[some] = (weights * inputs.outputs[:, some].double()).sum(0)
    return expected


def merge_states_trials(setting: Setting) -> Callable[[MergeStatesShape], Trial[MergeStatesInputs]]:
    """Makes merges ready."""
    package, device = setting.package, setting.device

    def trial(shape: MergeStatesShape) -> Trial[MergeStatesInputs]:
        moved = shape.bytes_moved
        inputs = make_merge_inputs(shape, package.dtype, device, rotation(moved, setting.l2_bytes))
        return Trial(
            inputs=inputs,
            entrants=[
                Entrant(OURS, partial(merge_call, shape.kind, partial(package.wrapper(shape.kind), attn_sink=None)))
            ],
            error_of=merge_reference(inputs[0]).error_of,
            error_limit=error_limit(package.dtype),
            flops=0,
            bytes_moved=moved,
            roof=setting.copy_roof,
            graph_only=True,
            launch_bound=shape.tokens == TOKENS[0],
        )

    return trial


BENCHMARKS = {"merge_states": Family(merge_states_shapes, merge_states_trials, ("merge_states",))}
