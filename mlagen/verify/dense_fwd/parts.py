"""Checks of multi-head attention over parts of the keys, which merge to the whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from mlagen.verify import tolerance
from mlagen.verify.call.case import CaseFailedError
from mlagen.verify.call.family import Results, Run
from mlagen.verify.call.memory import NAN
from mlagen.verify.call.patterns import sinks
from mlagen.verify.call.results import Figure
from mlagen.verify.call.subject import Subject
from mlagen.verify.checks import merges, require_tensors
from mlagen.verify.checks.merges import PARTS, STATES
from mlagen.verify.dense_fwd.cases import DenseFwdCase
from mlagen.verify.dense_fwd.inputs import Inputs, starts
from mlagen.verify.dense_fwd.reference import dense_fwd, merged
from mlagen.verify.reference import Attention

DenseFwdRun = Run[DenseFwdCase, Inputs]


def compare(run: DenseFwdRun, results: Results, expected: Attention) -> list[Figure]:
    """Figures of results against attention of each row.

    Raises:
        CaseFailedError: a result has another dtype or shape than it should, or rows of no request were written.
    """
    inputs, q, out, lse = run.inputs, run.inputs.q, results["out"], results["lse"]
    total, heads, d_qk = q.shape
    out_shape = (total, heads, expected.out.shape[2])
    require_tensors(run, results, {"out": (q.dtype, out_shape), "lse": (torch.float32, (heads, total))})
    rows = slice(inputs.cu_q[0], inputs.cu_q[-1])
    others = [*range(rows.start), *range(rows.stop, total)]
    if not out[others].isnan().all() or not lse[:, others].isnan().all():
        raise CaseFailedError("wrote to rows of no request")
    part = Attention(*(tensor[rows] for tensor in expected))
    longest = max((end - begin for begin, end in pairwise(inputs.cu_k)), default=0)
    return [
        *tolerance.out_errors(out[rows], part, d_qk),
        tolerance.lse_error(lse.T[rows], part, d_qk, longest, "e"),
    ]


class Part(NamedTuple):
    """Attention over some of the keys: results, and the expected ones."""

    results: Results
    expected: Attention


def _part(run: DenseFwdRun, spans: Sequence[tuple[int, int]], causal: bool) -> Part:
    """Attention over only keys [first, last) of each request."""
    inputs, given, device = run.inputs, run.inputs.arguments, run.inputs.q.device
    rows = [
        row
        for begin, (first, last) in zip(inputs.cu_k[:-1], spans, strict=True)
        for row in range(begin + first, begin + last)
    ]
    picked, cu = torch.tensor(rows, dtype=torch.int64, device=device), starts([last - first for first, last in spans])
    k, v = given["k"][picked], given["v"][picked]
    cu_seqlens_k = torch.tensor(cu, dtype=torch.int32, device=device)
    results = run.call(k=k, v=v, cu_seqlens_k=cu_seqlens_k, causal=causal)
    return Part(results, dense_fwd(given["q"], k, v, inputs.cu_q, cu, inputs.scale, causal))


def _merge(subject: Subject, first: Results, *rest: Results) -> Results:
    """Parts merged two by two, in their order."""
    whole = first
    for suffix in rest:
        prefix, whole = whole, {name: torch.full_like(tensor, NAN) for name, tensor in whole.items()}
        parts = (prefix["out"], prefix["lse"], suffix["out"], suffix["lse"])
        subject.call(STATES, whole["out"], *parts, whole["lse"], attn_sink=None)
    return whole


def _checked(whole: Attention, plain: Attention) -> Attention:
    """The whole, if both references are the same: then the parts hold each key once."""
    if not torch.allclose(whole.out, plain.out, atol=1e-9) or not torch.allclose(whole.lse, plain.lse, atol=1e-9):
        raise CaseFailedError("the parts are not those of the whole")
    return whole


def chunks(run: DenseFwdRun) -> list[Figure]:
    """As engines prefill: the context, which all rows see, in two chunks; then the rows' own keys, causal."""
    inputs = run.inputs
    s_q, s_k = ([end - begin for begin, end in pairwise(cu)] for cu in (inputs.cu_q, inputs.cu_k))
    contexts = [max(0, keys - rows) for rows, keys in zip(s_q, s_k, strict=True)]
    cuts = [min(context, 50) for context in contexts]
    parts = [
        _part(run, [(0, cut) for cut in cuts], causal=False),
        _part(run, list(zip(cuts, contexts, strict=True)), causal=False),
        _part(run, list(zip(contexts, s_k, strict=True)), causal=True),
    ]
    whole = _checked(merged([part.expected for part in parts]), inputs.expected())
    return compare(run, _merge(run.subject, *(part.results for part in parts)), whole)


def any_number(run: DenseFwdRun) -> list[Figure]:
    """Keys that every row sees, in five parts; the second part is empty."""
    inputs = replace(run.inputs, arguments={**run.inputs.arguments, "causal": False})
    s_k = [end - begin for begin, end in pairwise(inputs.cu_k)]
    parts = [
        _part(run, [(min(first, keys), min(last, keys)) for keys in s_k], causal=False)
        for first, last in pairwise((0, 3, 3, 40, 41, 1 << 20))
    ]
    outs, lses = (torch.stack([part.results[name] for part in parts]) for name in ("out", "lse"))
    out, lse = run.subject.call(PARTS, outs, lses, attn_sink=None)
    whole = _checked(merged([part.expected for part in parts]), inputs.expected())
    return compare(run, {"out": out, "lse": lse}, whole)


def with_sink(run: DenseFwdRun) -> list[Figure]:
    """Keys that every row sees, in the parts of the case, with a sink if it has one, by each merge."""
    inputs, heads = run.inputs, run.inputs.q.shape[1]
    every = replace(inputs, arguments={**inputs.arguments, "causal": False})
    s_k, cuts = [end - begin for begin, end in pairwise(inputs.cu_k)], merges.cuts_of(run.case.name)
    spans = zip(*(merges.positions(cuts, keys) for keys in s_k), strict=True)
    parts = [_part(run, own, causal=False).results for own in spans]
    sink = None
    if run.case.sink is not None:
        sink = sinks(run.case.sink, heads, 64, torch.Generator().manual_seed(1)).to(inputs.q.device)
    expected = merges.with_sink(every.expected(), sink, 1.0)
    return [figure for whole in merges.merged(run, parts, sink) for figure in compare(run, whole, expected)]


def cascade(run: DenseFwdRun) -> list[Figure]:
    """All rows of the batch attend to a prefix of 45 keys as one request, then each request to its own keys."""
    inputs, given, device = run.inputs, run.inputs.arguments, run.inputs.q.device
    generator = torch.Generator().manual_seed(1)
    k, v = (torch.randn(45, *given[name].shape[1:], generator=generator).to(given[name]) for name in ("k", "v"))
    rows = inputs.cu_q[-1]
    shared: dict[str, Any] = {
        "k": k,
        "v": v,
        "cu_seqlens_q": torch.tensor([0, rows], dtype=torch.int32, device=device),
        "cu_seqlens_k": torch.tensor([0, 45], dtype=torch.int32, device=device),
        "max_seqlen_q": rows,
        "max_seqlen_k": 45,
        "causal": False,
    }
    results = _merge(run.subject, run.call(**shared), run.call())
    whole = merged([dense_fwd(given["q"], k, v, [0, rows], [0, 45], inputs.scale, False), inputs.expected()])
    # The same without a cascade: every request with the prefix before its keys.
    spans = list(pairwise(inputs.cu_k))
    every_k, every_v = (
        torch.cat([piece for begin, end in spans for piece in (prefix, given[name][begin:end])])
        for name, prefix in (("k", k), ("v", v))
    )
    cu_k = starts([45 + end - begin for begin, end in spans])
    plain = dense_fwd(given["q"], every_k, every_v, inputs.cu_q, cu_k, inputs.scale, given["causal"])
    return compare(run, results, _checked(whole, plain))
