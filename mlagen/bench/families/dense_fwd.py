"""Multi-head attention and the merges of its parts: the families `heads` and `merge`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from mlagen.bench.batches import relative_error, rotation
from mlagen.bench.check import error_limit
from mlagen.bench.package import BenchPackage
from mlagen.bench.peers import dense_fwd as dense_fwd_peers
from mlagen.bench.shapes import default_heads, sets_needed
from mlagen.bench.trial import OURS, Call, Entrant, Setting, Trial
from mlagen.work import ITEMSIZE

WRAPPER, STATES, PARTS = "flash_attn_varlen_func", "merge_attn_states", "merge_attn_parts"
# Causal prefills: tokens of each request.
LENGTHS = {
    "1x4096": (4096,),
    "4x4096": (4096,) * 4,
    "1x16384": (16384,),
    "mixed": (8192, 4096, 2048, 1024, 512, 256, 128, 128),
}
MERGED_TOKENS = (1, 128, 4096, 32768)
PARTS_MERGED = 8
CHECKED = 8  # rows, of each of as many heads, whose results are checked
LSE_BYTES = 4


@dataclass(frozen=True)
class DenseFwdShape:
    """Sizes of one call of multi-head attention, causal, each request without a context.

    Attributes:
        lengths: what tokens of its requests, a key of LENGTHS.
        num_heads: heads of q, and of k and v if they have heads of their own.
        num_kv_heads: heads of k and v.
    """

    lengths: str
    num_heads: int
    num_kv_heads: int

    @property
    def family(self) -> str:
        """The one family of these shapes."""
        return "dense_fwd"

    @property
    def kind(self) -> str:
        """The one table of these shapes."""
        return "dense_fwd"

    @property
    def requests(self) -> tuple[int, ...]:
        """Tokens of each request."""
        return LENGTHS[self.lengths]

    @property
    def tokens(self) -> int:
        """Tokens of the call."""
        return sum(self.requests)

    def __str__(self) -> str:
        of = "" if self.num_kv_heads == self.num_heads else f" of {self.num_kv_heads}"
        return f"dense_fwd {self.lengths} x h{self.num_heads}{of}"

    def flops(self, d_qk: int, d_v: int) -> int:
        """FLOPs of a call: a row sees half of its request's keys."""
        pairs = sum(length * (length + 1) // 2 for length in self.requests)
        return 2 * pairs * self.num_heads * (d_qk + d_v)

    def bytes_moved(self, d_qk: int, d_v: int) -> int:
        """Fewest bytes of a call: q, k, v and out once, and the LSE."""
        lanes = (self.num_heads + self.num_kv_heads) * (d_qk + d_v)
        return self.tokens * (lanes * ITEMSIZE + self.num_heads * LSE_BYTES)


@dataclass(frozen=True)
class MergeStatesShape:
    """Sizes of one merge.

    Attributes:
        kind: the wrapper.
        tokens, num_heads, lanes: sizes of the result.
        parts: how many are merged.
    """

    kind: str
    tokens: int
    num_heads: int
    lanes: int
    parts: int

    @property
    def family(self) -> str:
        """The one family of these shapes."""
        return "merge_states"

    def __str__(self) -> str:
        return f"{self.kind} {self.tokens} x h{self.num_heads} x {self.lanes}, {self.parts} parts"

    @property
    def bytes_moved(self) -> int:
        """Bytes of a call: every part and the result once, with their LSE."""
        return (self.parts + 1) * self.tokens * self.num_heads * (self.lanes * ITEMSIZE + LSE_BYTES)


@dataclass(frozen=True)
class DenseFwdInputs:
    """Tensors of a call of multi-head attention: q, k, v [tokens, heads, lanes], cu_seqlens i32 [requests + 1]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cu_seqlens: torch.Tensor
    longest: int

    @property
    def scale(self) -> float:
        """Factor of the logits."""
        return float(self.q.shape[2] ** -0.5)


@dataclass(frozen=True)
class MergeStatesInputs:
    """Tensors of a merge: outputs [parts, tokens, heads, lanes], lses f32 [parts, heads, tokens], and room for both."""

    outputs: torch.Tensor
    lses: torch.Tensor
    out: torch.Tensor
    out_lse: torch.Tensor


def dense_fwd_shapes(package: BenchPackage, heads: Sequence[int] | None) -> list[DenseFwdShape]:
    """Shapes that a package's multi-head attention is measured at."""
    if not package.has(WRAPPER):
        return []
    own = package.facts.num_heads
    group = own // (package.spec["multi_head"]["num_kv_heads"] or own)
    counts = [count for count in heads or default_heads(own) if count % group == 0]
    return [DenseFwdShape(lengths, count, count // group) for count in counts for lengths in LENGTHS]


def merge_states_shapes(package: BenchPackage, heads: Sequence[int] | None) -> list[MergeStatesShape]:
    """Shapes that a package's merges are measured at."""
    section = package.spec.get("multi_head")
    lanes = section["v_head_dim"] if section else package.facts.d_v
    return [
        MergeStatesShape(wrapper, tokens, count, lanes, parts)
        for wrapper, parts in ((STATES, 2), (PARTS, PARTS_MERGED))
        if package.has(wrapper)
        for count in heads or [package.facts.num_heads]
        for tokens in MERGED_TOKENS
    ]


def make_dense_fwd_inputs(
    shape: DenseFwdShape, d_qk: int, d_v: int, dtype: torch.dtype, device: torch.device, sets: int
) -> list[DenseFwdInputs]:
    """Rotating input sets, standard normal."""
    starts = torch.tensor([0, *shape.requests], device=device).cumsum(0).to(torch.int32)

    def normal(heads: int, lanes: int) -> torch.Tensor:
        return torch.randn(shape.tokens, heads, lanes, dtype=dtype, device=device)

    return [
        DenseFwdInputs(
            normal(shape.num_heads, d_qk),
            normal(shape.num_kv_heads, d_qk),
            normal(shape.num_kv_heads, d_v),
            starts,
            max(shape.requests),
        )
        for _ in range(sets)
    ]


def make_merge_inputs(
    shape: MergeStatesShape, dtype: torch.dtype, device: torch.device, sets: int
) -> list[MergeStatesInputs]:
    """Rotating input sets, standard normal."""
    size = (shape.tokens, shape.num_heads, shape.lanes)
    return [
        MergeStatesInputs(
            torch.randn(shape.parts, *size, dtype=dtype, device=device),
            torch.randn(shape.parts, shape.num_heads, shape.tokens, device=device),
            torch.empty(size, dtype=dtype, device=device),
            torch.empty(shape.num_heads, shape.tokens, device=device),
        )
        for _ in range(sets)
    ]


def dense_fwd_call(function: Callable[..., Any], inputs: DenseFwdInputs) -> Call:
    """A call of our wrapper."""
    starts, longest = inputs.cu_seqlens, inputs.longest
    return lambda: function(inputs.q, inputs.k, inputs.v, starts, starts, longest, longest, inputs.scale, True)[0]


def merge_call(kind: str, function: Callable[..., Any], inputs: MergeStatesInputs) -> Call:
    """A call of our wrapper, or of a peer with its signature; gives the result."""
    if kind == PARTS:
        return lambda: function(inputs.outputs, inputs.lses, inputs.out, inputs.out_lse)[0]
    (prefix, suffix), (prefix_lse, suffix_lse) = inputs.outputs, inputs.lses

    def call() -> torch.Tensor:
        function(inputs.out, prefix, prefix_lse, suffix, suffix_lse, inputs.out_lse)
        return inputs.out

    return call


def _checked(count: int, device: torch.device) -> torch.Tensor:
    """Some of so many rows, each once."""
    few = min(count, CHECKED)
    return torch.arange(few, device=device) * (count - 1) // max(1, few - 1)


def dense_fwd_error(inputs: DenseFwdInputs, call: Call) -> float:
    """Relative error of some rows and heads of a call; what a first call gave is poisoned, its memory used again."""
    call().fill_(float("nan"))
    got = call()
    rows, heads = _checked(inputs.q.shape[0], got.device), _checked(inputs.q.shape[1], got.device)
    group = inputs.q.shape[1] // inputs.k.shape[1]
    expected = []
    for row in rows.tolist():
        begin = next(first for first, end in pairwise(inputs.cu_seqlens.tolist()) if first <= row < end)
        k, v = (one[begin : row + 1, heads // group].double() for one in (inputs.k, inputs.v))
        logits = inputs.scale * torch.einsum("hl,khl->hk", inputs.q[row, heads].double(), k)
        expected.append(torch.einsum("hk,khl->hl", logits.softmax(1), v))
    return relative_error(got[rows][:, heads], torch.stack(expected))


def merge_error(inputs: MergeStatesInputs, call: Call) -> float:
    """Relative error of some tokens of a merge; what a first call gave is poisoned."""
    call().fill_(float("nan"))
    got = call()
    tokens = _checked(got.shape[0], got.device)
    weights = inputs.lses[:, :, tokens].double().softmax(0).transpose(1, 2)[..., None]
    return relative_error(got[tokens], (weights * inputs.outputs[:, tokens].double()).sum(0))


def dense_fwd_trials(setting: Setting) -> Callable[[DenseFwdShape], Trial[DenseFwdInputs]]:
    """Makes shapes of multi-head attention ready."""
    package, device = setting.package, setting.device
    d_qk, d_v = (package.spec["multi_head"][name] for name in ("qk_head_dim", "v_head_dim"))

    def trial(shape: DenseFwdShape) -> Trial[DenseFwdInputs]:
        moved = shape.bytes_moved(d_qk, d_v)
        sets = sets_needed(moved, setting.l2_bytes)
        inputs = make_dense_fwd_inputs(shape, d_qk, d_v, package.dtype, device, sets)
        entrants: list[Entrant[DenseFwdInputs]] = [Entrant(OURS, partial(dense_fwd_call, package.wrapper(WRAPPER)))]
        if setting.peers:
            entrants.append(Entrant("FA3", dense_fwd_peers.flash_attention_3))
        return Trial(
            inputs=inputs,
            entrants=entrants,
            error_of=partial(dense_fwd_error, inputs[0]),
            error_limit=error_limit(package.dtype),
            flops=shape.flops(d_qk, d_v),
            bytes_moved=moved,
            roof=setting.roof,
        )

    return trial


def merge_states_trials(setting: Setting) -> Callable[[MergeStatesShape], Trial[MergeStatesInputs]]:
    """Makes merges ready."""
    package, device = setting.package, setting.device

    def entrants(shape: MergeStatesShape) -> Iterator[Entrant[MergeStatesInputs]]:
        yield Entrant(OURS, partial(merge_call, shape.kind, package.wrapper(shape.kind)))
        if setting.peers and shape.kind == STATES:
            yield Entrant("vLLM Triton", lambda inputs: merge_call(STATES, dense_fwd_peers.triton_merge(), inputs))
            yield Entrant("vLLM CUDA", lambda inputs: merge_call(STATES, dense_fwd_peers.cuda_merge(), inputs))

    def trial(shape: MergeStatesShape) -> Trial[MergeStatesInputs]:
        moved = shape.bytes_moved
        inputs = make_merge_inputs(shape, package.dtype, device, rotation(moved, setting.l2_bytes))
        return Trial(
            inputs=inputs,
            entrants=list(entrants(shape)),
            error_of=partial(merge_error, inputs[0]),
            error_limit=error_limit(package.dtype),
            flops=0,
            bytes_moved=moved,
            roof=setting.copy_roof,
            graph_only=True,
            launch_bound=shape.tokens == MERGED_TOKENS[0],
        )

    return trial
