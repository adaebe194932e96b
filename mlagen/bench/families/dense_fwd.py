"""Multi-head attention before absorption: the family `dense_fwd`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from mlagen.bench.check import Reference, error_limit, in_chunks, row_limit
from mlagen.bench.package import BenchPackage
from mlagen.bench.shapes import default_heads, sets_needed
from mlagen.bench.trial import OURS, Call, Entrant, Family, Setting, Trial
from mlagen.work import ITEMSIZE

WRAPPER = "flash_attn_varlen_func"
# Causal prefills: tokens of each request.
LENGTHS = {
    "1x4096": (4096,),
    "4x4096": (4096,) * 4,
    "1x16384": (16384,),
    "mixed": (8192, 4096, 2048, 1024, 512, 256, 128, 128),
}
LSE_BYTES = 4


@dataclass(frozen=True)
class DenseFwdShape:
    """Sizes of one call of multi-head attention, causal, each request without a context.

    Attributes:
        lengths: name of its requests' lengths, a key of LENGTHS.
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
        columns = (self.num_heads + self.num_kv_heads) * (d_qk + d_v)
        return self.tokens * (columns * ITEMSIZE + self.num_heads * LSE_BYTES)


@dataclass(frozen=True)
class DenseFwdInputs:
    """Tensors of a call of multi-head attention: q, k, v [tokens, heads, columns], cu_seqlens i32 [requests + 1]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cu_seqlens: torch.Tensor
    longest: int

    @property
    def scale(self) -> float:
        """Factor of the logits."""
        return float(self.q.shape[2] ** -0.5)


def dense_fwd_shapes(package: BenchPackage, heads: Sequence[int] | None) -> list[DenseFwdShape]:
    """Shapes that a package's multi-head attention is measured at."""
    if not package.has(WRAPPER):
        return []
    own = package.facts.num_heads
    group = own // (package.spec["multi_head"]["num_kv_heads"] or own)
    counts = [count for count in heads or default_heads(own) if count % group == 0]
    return [DenseFwdShape(lengths, count, count // group) for count in counts for lengths in LENGTHS]


def make_dense_fwd_inputs(
    shape: DenseFwdShape, d_qk: int, d_v: int, dtype: torch.dtype, device: torch.device, sets: int
) -> list[DenseFwdInputs]:
    """Rotating input sets, standard normal."""
    starts = torch.tensor([0, *shape.requests], device=device).cumsum(0).to(torch.int32)

    def normal(heads: int, columns: int) -> torch.Tensor:
        return torch.randn(shape.tokens, heads, columns, dtype=dtype, device=device)

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


def dense_fwd_call(function: Callable[..., Any], inputs: DenseFwdInputs) -> Call:
    """A call of our wrapper."""
    lengths = (inputs.cu_seqlens, inputs.cu_seqlens, inputs.longest, inputs.longest)
    return lambda: function(inputs.q, inputs.k, inputs.v, *lengths, softmax_scale=inputs.scale, causal=True)[0]


def dense_fwd_reference(inputs: DenseFwdInputs) -> Reference:
    """Float64 results of one input set."""
    return Reference(partial(_expected, inputs), row_limit(inputs.q.dtype))


def _expected(inputs: DenseFwdInputs) -> torch.Tensor:
    q, k, v = inputs.q, inputs.k, inputs.v
    heads, group = q.shape[1], q.shape[1] // k.shape[1]
    expected = torch.zeros(*q.shape[:2], v.shape[2], dtype=torch.float64, device=q.device)
    for first, end in pairwise(inputs.cu_seqlens.tolist()):
        position = torch.arange(end - first, device=q.device)
        for some in in_chunks(end - first, 3 * (end - first) * expected.itemsize):
            rows, keys = slice(first + some.start, first + some.stop), slice(first, first + some.stop)
            hidden = position[: some.stop] > position[some, None]
            for head in range(heads):
                logits = inputs.scale * (q[rows, head].double() @ k[keys, head // group].double().T)
                weights = logits.masked_fill_(hidden, -torch.inf).softmax(1)
                expected[rows, head] = weights @ v[keys, head // group].double()
    return expected


def dense_fwd_trials(setting: Setting) -> Callable[[DenseFwdShape], Trial[DenseFwdInputs]]:
    """Makes shapes of multi-head attention ready."""
    package, device = setting.package, setting.device
    d_qk, d_v = (package.spec["multi_head"][name] for name in ("qk_head_dim", "v_head_dim"))

    def trial(shape: DenseFwdShape) -> Trial[DenseFwdInputs]:
        moved = shape.bytes_moved(d_qk, d_v)
        sets = sets_needed(moved, setting.l2_bytes)
        inputs = make_dense_fwd_inputs(shape, d_qk, d_v, package.dtype, device, sets)
        return Trial(
            inputs=inputs,
            entrants=[Entrant(OURS, partial(dense_fwd_call, package.wrapper(WRAPPER)))],
            error_of=dense_fwd_reference(inputs[0]).error_of,
            error_limit=error_limit(package.dtype),
            flops=shape.flops(d_qk, d_v),
            bytes_moved=moved,
            roof=setting.roof,
        )

    return trial


BENCHMARKS = {"dense_fwd": Family(dense_fwd_shapes, dense_fwd_trials, ("dense_fwd",))}
