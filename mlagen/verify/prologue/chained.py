"""A prologue, a gather and attention one after the other, against plain torch from the tensors before the prologue."""

from __future__ import annotations

from typing import Any

import torch

from mlagen.layout.codec import decode, encode, read
from mlagen.verify import tolerance
from mlagen.verify.call.case import CaseFailedError
from mlagen.verify.call.facts import Facts
from mlagen.verify.call.family import Run
from mlagen.verify.call.memory import bits
from mlagen.verify.call.results import Figure
from mlagen.verify.call.subject import Subject
from mlagen.verify.checks import quantised
from mlagen.verify.paged.pages import TENSOR_SCALE, alias
from mlagen.verify.prologue.cases import PrologueCase
from mlagen.verify.prologue.inputs import PrologueInputs
from mlagen.verify.prologue.side import CONCAT, POSITIONS_ARGUMENT
from mlagen.verify.reference import Attention, sparse_attention

ATTENTION = "flash_mla_sparse_fwd"
REQUESTS, TOKENS = "dequantize_and_gather_k_cache", "gather_and_maybe_dequant_cache"


def chained(run: Run[PrologueCase, PrologueInputs]) -> list[Figure]:
    """The cache's rows as the package gathers them are the codec's; attention over them is plain torch's."""
    results, inputs, side = run.call(), run.inputs, run.inputs.side
    figures = inputs.compare(results)
    rows, slots = inputs.rows()
    wanted = decode(side.layout, encode(side.layout, rows[: len(slots)], TENSOR_SCALE), TENSOR_SCALE).to(side.dtype)
    gathered = _gather(run.subject, inputs, slots)
    if not torch.equal(bits(gathered.cpu()), bits(wanted)):
        raise CaseFailedError("gathered rows are not those of plain torch")
    return figures if ATTENTION not in run.subject.facts.wrappers else [*figures, *_attend(run, results["q"], gathered)]


def _gather(subject: Subject, inputs: PrologueInputs, slots: torch.Tensor) -> torch.Tensor:
    """The rows of one request that the package gathers from the cache; without a gather, as the codec reads them."""
    side, size, device = inputs.side, inputs.case.pages.block_size, inputs.memory.buffer.device
    tensor, wrappers = inputs.memory.tensor, subject.facts.wrappers
    out = torch.zeros(1, inputs.memory.pages * size, side.layout.columns, dtype=side.dtype, device=device)
    table = torch.arange(inputs.memory.pages, dtype=torch.int32, device=device)[None]
    count = torch.tensor([out.shape[1]], dtype=torch.int32, device=device)
    scale = torch.tensor([TENSOR_SCALE], device=device) if side.layout.tensor_scale else None
    named: dict[str, Any] = {} if scale is None else {"scale": scale}
    if REQUESTS in wrappers:
        subject.call(REQUESTS, out, tensor, count, None, table, size, 0, **named)
    elif TOKENS in wrappers:
        bounds = torch.cat([torch.zeros_like(count), count])
        tokens = torch.zeros(out.shape[1], dtype=torch.int32, device=device)
        subject.call(TOKENS, tensor, out[0], table, bounds, tokens, out.shape[1], alias(side.layout), scale)
    else:
        every = torch.arange(out.shape[1], device=device)
        out = read(side.layout, inputs.memory.in_buffer(inputs.memory.buffer), size, every, TENSOR_SCALE)[None]
    return out[0, slots.to(device)].to(side.dtype)


def _attend(run: Run[PrologueCase, PrologueInputs], q: torch.Tensor, rows: torch.Tensor) -> list[Figure]:
    """Errors of attention over gathered rows, with Q from the prologue, beside that of float64 from before it."""
    inputs, facts = run.inputs, run.subject.facts
    want, _ = inputs.queries()
    heads = want.shape[1]
    want, q = want.to(q.device), q[:, :heads]
    if inputs.case.wrapper == CONCAT:  # Q's latent columns are another projection's
        shape, generator = (len(q), heads, inputs.side.first), torch.Generator().manual_seed(1)
        latent = torch.randn(shape, generator=generator).to(q.dtype).to(q.device)
        want, q = torch.cat([latent.double(), want], 2), torch.cat([latent, q], 2)
    indices = torch.arange(len(rows), dtype=torch.int32, device=q.device).expand(len(q), 1, -1).contiguous()
    sink = torch.zeros(heads, device=q.device) if facts.sink == "required" else None
    size = facts.block_size or 1
    kv = torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % size)).view(-1, size, 1, rows.shape[1])
    given = (q.contiguous(), kv.squeeze(1) if size == 1 else kv, indices, facts.default_scale, facts.d_v, sink)
    if facts.out_rope:
        angles = {"positions": inputs.arguments[POSITIONS_ARGUMENT[inputs.case.wrapper]]}
        angles["cos_sin_cache"] = inputs.arguments["cos_sin_cache"]
        expected = _relative(inputs, rows, sink, facts)
        if facts.out_heads:
            return _quantised(run.subject, given, angles, expected)
        out = run.subject.call(ATTENTION, *given, **angles)[0]
        return tolerance.out_errors(out, expected, facts.d_qk, tolerance.UNIT_ROUNDOFF[q.dtype])
    out = run.subject.call(ATTENTION, *given)[0]
    expected = sparse_attention(
        want,
        kv[:, :, 0],
        indices[:, 0],
        facts.default_scale,
        facts.d_v,
        sink,
        None,
        facts.lse_base,
        facts.empty_row_lse,
    )
    # Q is rounded once, which moves a logit as a rounding of K does.
    return tolerance.out_errors(out, expected, facts.d_qk, tolerance.UNIT_ROUNDOFF[q.dtype])


def _quantised(subject: Subject, given: tuple[Any, ...], angles: dict[str, Any], expected: Attention) -> list[Figure]:
    """Errors of a quantised output. The first head fills the last group of heads."""
    facts, (q, kv, indices, scale, d_v, sink) = subject.facts, given
    heads = [head if head < q.shape[1] else 0 for head in range(facts.whole_groups(q.shape[1]))]
    sink = sink if sink is None else sink[heads]
    out, scales = subject.call(ATTENTION, q[:, heads], kv, indices, scale, d_v, sink, **angles)[0]
    whole = Attention(*(one[:, heads] for one in expected))
    return quantised.errors(facts, out, scales, whole, facts.d_qk, tolerance.UNIT_ROUNDOFF[q.dtype])


def _relative(inputs: PrologueInputs, rows: torch.Tensor, sink: torch.Tensor | None, facts: Facts) -> Attention:
    """Attention that rotates its output back: Q before RoPE over rows that are rotated by differences of positions.

    As complex numbers: a row of position j is rotated back by j, and for a token of position t by j - t.
    """
    first, half = inputs.side.first, inputs.side.rope // 2
    table = inputs.arguments["cos_sin_cache"].double()[inputs.positions.to(rows.device)]
    turn = torch.complex(table[:, :half], table[:, half:])  # [T, half]
    pairs = torch.view_as_complex(rows[:, first:].double().unflatten(1, (-1, 2)).contiguous())  # type: ignore[no-untyped-call]
    pairs = pairs / turn
    q = inputs.unrotated().to(rows.device)
    indices = torch.arange(len(rows), device=rows.device)[None]
    found = []
    for token in range(len(q)):
        relative = torch.view_as_real(pairs * turn * turn[token].conj()).flatten(1)
        kv = torch.cat([rows[:, :first].double(), relative], 1)[:, None]
        options = (facts.default_scale, facts.d_v, sink, None, facts.lse_base, facts.empty_row_lse)
        found.append(sparse_attention(q[token : token + 1], kv, indices, *options))
    return Attention(*map(torch.cat, zip(*found, strict=True)))
