"""Sparse attention over rows as the model computes them: the families `prefill`, `decode`, `ordered` and `shared`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from mlagen.bench.check import Reference, attention, error_limit, in_chunks, row_limit
from mlagen.bench.package import BenchPackage
from mlagen.bench.rotation import ROTATED_APART, Angles, make_angles, rotate
from mlagen.bench.shapes import L2_MULTIPLE, default_heads, make_indices, sets_needed
from mlagen.bench.trial import APART, BATCH_INVARIANT, OURS, Entrant, Family, Setting, Trial
from mlagen.verify.call.facts import Facts
from mlagen.work import attention_bytes, distinct_rows, flops

WRAPPERS = ("triton_mla_sparse_attention", "flash_mla_sparse_fwd")  # first the one that returns only out
EAGER_TOKENS = 1  # a call of so few tokens is bound by its launch, and eager time shows the launch
PREFILL_TOKENS = 4096
PREFILL_S_KV = (8 << 10, 32 << 10, 128 << 10)
DECODE_TOKENS = (1, 4, 16, 64, 128)
DECODE_S_KV = 128 << 10
SHARES = (0, 50, 75, 90)  # per cent of a token's indices that the next one also names
CHAIN = 64  # tokens in a row; each shares indices with the one before


@dataclass(frozen=True)
class SparseFwdShape:
    """Sizes of one call.

    Attributes:
        kind: `prefill` (the tokens share one context), `ordered` (the same with ascending indices, as a package's
            top-k gives them) or `decode` (each token is a request of its own).
        tokens: query tokens.
        num_heads: query heads.
        s_kv: rows of kv.
        topk: indices a token.
    """

    kind: str
    tokens: int
    num_heads: int
    s_kv: int
    topk: int

    @property
    def family(self) -> str:
        """The kind."""
        return self.kind

    def __str__(self) -> str:
        kv = f"{self.s_kv >> 10}K" if self.s_kv % 1024 == 0 else str(self.s_kv)
        return f"{self.kind} {self.tokens} x h{self.num_heads}, kv {kv}, topk {self.topk}"

    def flops(self, facts: Facts) -> int:
        """FLOPs of a call."""
        return flops(self.tokens, self.num_heads, min(self.topk, self.s_kv), facts.d_qk, facts.d_v)

    def bytes_moved(self, facts: Facts, row_bytes: int) -> int:
        """Fewest bytes of a call; requests share no context, so a decode's rows are counted for each token."""
        rows = distinct_rows(self.tokens, self.topk, self.s_kv)
        if self.kind == "decode":
            rows = self.tokens * min(self.topk, self.s_kv)
        return attention_bytes(self.tokens, self.num_heads, self.topk, facts.d_qk, facts.d_v, rows * row_bytes)

    def draw_indices(self, sets: int, device: torch.device) -> torch.Tensor:
        """Random indices i32 [sets, tokens, topk]."""
        indices = make_indices(sets * self.tokens, self.topk, self.s_kv, device)
        if self.kind == "ordered":
            indices = indices.sort(1).values
        return indices.view(sets, self.tokens, self.topk)


@dataclass(frozen=True)
class SharedShape(SparseFwdShape):
    """Sizes of a prefill with neighbouring tokens that name mostly the same rows.

    Attributes:
        share: per cent of a token's indices that the next one also names.
    """

    share: int

    def __str__(self) -> str:
        return f"{super().__str__()}, {self.share} % shared"

    def draw_indices(self, sets: int, device: torch.device) -> torch.Tensor:
        """As `SparseFwdShape.draw_indices`, with as many indices of each token's in the next one's."""
        drawn = [make_neighbours(self.tokens, self.topk, self.s_kv, self.share, device) for _ in range(sets)]
        return torch.stack(drawn)


def default_shapes(
    facts: Facts, kinds: Sequence[str] = ("prefill", "decode"), heads: Sequence[int] | None = None
) -> list[SparseFwdShape]:
    """Shapes that a spec is measured at: prefill at three context lengths, decode at five batch sizes."""
    shapes = []
    for num_heads in heads or default_heads(facts.num_heads):
        if "prefill" in kinds:
            shapes += [SparseFwdShape("prefill", PREFILL_TOKENS, num_heads, s_kv, facts.topk) for s_kv in PREFILL_S_KV]
        if "decode" in kinds:
            shapes += [SparseFwdShape("decode", tokens, num_heads, DECODE_S_KV, facts.topk) for tokens in DECODE_TOKENS]
    return shapes


@dataclass(frozen=True)
class SparseFwdInputs:
    """Tensors of one call.

    Attributes:
        q: [tokens, num_heads, d_qk].
        kv: [pages, page_size, d_qk]; page_size is 1 where rows are flat.
        indices: i32 [tokens, 1, topk].
        sm_scale: factor of the logits.
        attn_sink: f32 [num_heads] where the spec requires one.
        topk_length: i32 [tokens] where the spec requires one: all of topk.
        angles: positions and angles where attention rotates its output.
    """

    q: torch.Tensor
    kv: torch.Tensor
    indices: torch.Tensor
    sm_scale: float
    attn_sink: torch.Tensor | None
    topk_length: torch.Tensor | None
    angles: Angles | None = None


def shapes_of(kind: str, package: BenchPackage, heads: Sequence[int] | None) -> list[SparseFwdShape]:
    """Shapes that a package's sparse attention is measured at; none if it quantises its output, as no peer does."""
    if package.facts.out_heads or not any(package.has(wrapper) for wrapper in WRAPPERS):
        return []
    return default_shapes(package.facts, (kind,), heads)


def ordered_shapes(package: BenchPackage, heads: Sequence[int] | None) -> list[SparseFwdShape]:
    """Prefills of ascending indices; none where a token names all rows."""
    prefills = shapes_of("prefill", package, heads)
    return [replace(each, kind="ordered") for each in prefills if each.topk < each.s_kv]


def shared_shapes(package: BenchPackage, heads: Sequence[int] | None) -> list[SparseFwdShape]:
    """Prefills of neighbouring tokens that share indices; none if the package loads each token's own rows."""
    group = package.facts.shared_indices
    if group is None:
        return []
    return [
        SharedShape("shared", PREFILL_TOKENS, num_heads, s_kv, package.facts.topk, share)
        for num_heads in heads or (package.module("sparse_fwd").GROUP_HEADS,)
        for s_kv in PREFILL_S_KV
        if s_kv >= package.facts.topk
        for share in SHARES
    ]


def call_of(
    package: BenchPackage, inputs: SparseFwdInputs, *, batch_invariant: bool = False
) -> Callable[[], torch.Tensor]:
    """A call of the plainest wrapper there is; the wrapper allocates out and workspace each time."""
    attention = package.wrapper(next(name for name in WRAPPERS if package.has(name)))
    options: dict[str, Any] = {"enable_batch_invariant": batch_invariant}
    if inputs.attn_sink is not None:
        options["attn_sink"] = inputs.attn_sink
    if inputs.topk_length is not None:
        options["topk_length"] = inputs.topk_length
    if inputs.angles is not None:
        options |= inputs.angles.arguments

    def call() -> torch.Tensor:
        result = attention(inputs.q, inputs.kv, inputs.indices, inputs.sm_scale, **options)
        out = result[0] if isinstance(result, tuple) else result
        assert isinstance(out, torch.Tensor)
        return out

    return call


def call_rotated_apart(package: BenchPackage, inputs: SparseFwdInputs) -> Callable[[], torch.Tensor]:
    """As `call_of` of an output that attention does not rotate, and a launch that does."""
    angles = inputs.angles
    assert angles is not None
    call = call_of(package, replace(inputs, angles=angles.nowhere))
    return lambda: rotate(call(), angles)


def call_apart(package: BenchPackage, inputs: SparseFwdInputs) -> Callable[[], torch.Tensor]:
    """As `call_of`, with each token loading its own rows."""
    module, launch = package.module("sparse_fwd"), package.module("_launch")
    facts, call = package.device_facts(inputs.q.device), call_of(package, inputs)
    sizes = (*inputs.q.shape[:2], inputs.indices.shape[2])
    apart = module.schedule(facts, module.ALIGNED, *sizes, can_sm90=facts.sm90)

    def run() -> torch.Tensor:
        with launch.force(kernel=apart.kernel):
            return call()

    return run


def make_neighbours(
    tokens: int, topk: int, s_kv: int, share: int, device: torch.device | str, generator: torch.Generator | None = None
) -> torch.Tensor:
    """Random indices i32 [tokens, topk]: distinct rows in no order; the next token also has `share` per cent of them.

    Every CHAIN tokens rows are drawn anew. Of fewer than 2 * topk rows more are shared, as few as can be.
    """
    chains = -(-tokens // CHAIN)
    current = make_indices(chains, topk, s_kv, device, generator).long()
    indices = []
    for _ in range(min(CHAIN, tokens)):
        order = torch.rand(chains, topk, device=device, generator=generator).argsort(dim=1)
        current = current.gather(1, order)
        indices.append(current)
        fresh = min(topk - topk * share // 100, s_kv - topk)
        keys = torch.rand(chains, s_kv, device=device, generator=generator).scatter_(1, current, -1.0)
        current = torch.cat([current[:, fresh:], keys.topk(fresh, dim=1).indices], 1)
    return torch.stack(indices, 1).flatten(0, 1)[:tokens].int()


def make_inputs(
    shape: SparseFwdShape, facts: Facts, device: torch.device, l2_bytes: int, sets: int | None = None
) -> list[SparseFwdInputs]:
    """Rotating input sets of one shape; they share kv where it alone exceeds L2.

    Args:
        shape: sizes.
        facts: the spec's.
        device: where the tensors go.
        l2_bytes: size of its L2.
        sets: how many; None: enough that L2 holds none of them at its next turn.
    """
    dtype = getattr(torch, facts.dtype)
    page = facts.block_size or 1
    pages = -(-shape.s_kv // page)
    row_bytes = facts.d_qk * dtype.itemsize
    if sets is None:
        sets = sets_needed(shape.bytes_moved(facts, row_bytes), l2_bytes)
    shared = pages * page * row_bytes >= L2_MULTIPLE * l2_bytes
    sink = torch.randn(shape.num_heads, device=device) if facts.sink == "required" else None
    length = None
    if facts.length == "required":
        length = torch.full((shape.tokens,), shape.topk, dtype=torch.int32, device=device)
    indices = shape.draw_indices(sets, device)[:, :, None]
    inputs: list[SparseFwdInputs] = []
    for number in range(sets):
        kv = inputs[0].kv if inputs and shared else _normal((pages, page, facts.d_qk), dtype, device)
        q = _normal((shape.tokens, shape.num_heads, facts.d_qk), dtype, device)
        angles = make_angles(facts, shape.tokens, device)
        inputs.append(SparseFwdInputs(q, kv, indices[number], facts.d_qk**-0.5, sink, length, angles))
    return inputs


def _normal(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.randn(size, dtype=dtype, device=device)


def reference(inputs: SparseFwdInputs, facts: Facts) -> Reference:
    """Float64 results of one input set."""
    return Reference(partial(_expected, inputs, facts), row_limit(inputs.q.dtype, facts.partials))


def _expected(inputs: SparseFwdInputs, facts: Facts) -> torch.Tensor:
    q, indices = inputs.q, inputs.indices[:, 0]
    tokens, topk = indices.shape
    rows = inputs.kv.flatten(0, 1)  # [s_kv, d_qk]
    expected = torch.zeros(tokens, q.shape[1], facts.d_v, dtype=torch.float64, device=q.device)
    for some in in_chunks(tokens, topk * (rows.shape[1] + 3 * q.shape[1]) * expected.itemsize):
        seen = (indices[some] >= 0) & (indices[some] < len(rows))
        if inputs.topk_length is not None:
            seen &= torch.arange(topk, device=q.device) < inputs.topk_length[some, None]
        kv = rows[indices[some].long().where(seen, 0)]
        expected[some] = attention(q[some], kv, seen, inputs.sm_scale, facts.d_v, inputs.attn_sink)
    return expected if inputs.angles is None else inputs.angles.turned(expected)


def trials(setting: Setting) -> Callable[[SparseFwdShape], Trial[SparseFwdInputs]]:
    """Makes shapes ready."""
    package = setting.package
    facts = package.facts

    def trial(shape: SparseFwdShape) -> Trial[SparseFwdInputs]:
        inputs = make_inputs(shape, facts, setting.device, setting.l2_bytes)
        entrants = [
            Entrant(OURS, partial(call_of, package)),
            Entrant(APART, partial(call_apart, package))
            if isinstance(shape, SharedShape)
            else Entrant(BATCH_INVARIANT, partial(call_of, package, batch_invariant=True)),
        ]
        if facts.out_rope:
            entrants.append(Entrant(ROTATED_APART, partial(call_rotated_apart, package)))
        return Trial(
            inputs=inputs,
            entrants=entrants,
            error_of=reference(inputs[0], facts).error_of,
            error_limit=error_limit(inputs[0].q.dtype, facts.partials),
            flops=shape.flops(facts),
            bytes_moved=shape.bytes_moved(facts, package.row_bytes),
            roof=setting.roof,
            launch_bound=shape.tokens <= EAGER_TOKENS,
        )

    return trial


BENCHMARKS = {
    "prefill": Family(partial(shapes_of, "prefill"), trials, ("sparse_fwd",)),
    "decode": Family(partial(shapes_of, "decode"), trials, ("sparse_fwd",)),
    "ordered": Family(ordered_shapes, trials, ("sparse_fwd",)),
    "shared": Family(shared_shapes, trials, ("sparse_fwd",)),
}
