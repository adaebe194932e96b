"""Multi-head attention over requests of any lengths: its reference, its cases and the code that runs them.

What must not matter is poisoned: rows of q, k and v before the first request and past the last are NaN, and so are the
elements between and around the rows of a buffer, and what a kernel is to write.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

from mlagen.verify import tolerance
from mlagen.verify.cases import Case
from mlagen.verify.checks import NAN, CaseFailedError, Subject, poisoned_allocations
from mlagen.verify.inputs import LAYOUTS, Placed, bits, place
from mlagen.verify.reference import Attention
from mlagen.verify.results import Figure

WRAPPER = "flash_attn_varlen_func"
STATES, PARTS = "merge_attn_states", "merge_attn_parts"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def dense_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: list[int],
    cu_seqlens_k: list[int],
    softmax_scale: float,
    causal: bool,
) -> Attention:
    """Attention of each request's rows over its own keys, in plain torch and float64, a request and a head at a time.

    Args:
        q, k, v: [total_q, heads, d_qk], [total_k, kv_heads, d_qk], [total_k, kv_heads, d_v]; heads is a multiple.
        cu_seqlens_q, cu_seqlens_k: where each request begins, and the last one ends.
        softmax_scale: factor of the logits.
        causal: row i of s_q sees key j of s_k if and only if j <= i + s_k - s_q.

    Returns:
        Results by row; a row that sees no key has 0 and -inf, and so have rows of no request.
    """
    (total, heads, _), d_v, device = q.shape, v.shape[2], q.device

    def full(value: float, *shape: int) -> torch.Tensor:
        return torch.full(shape, value, dtype=torch.float64, device=device)

    result = Attention(
        out=full(0.0, total, heads, d_v),
        max_logits=full(-math.inf, total, heads),
        lse=full(-math.inf, total, heads),
        noise=full(0.0, total, heads, d_v),
        logit_size=full(0.0, total, heads),
    )
    group = heads // k.shape[1]
    for (q_begin, q_end), (k_begin, k_end) in zip(pairwise(cu_seqlens_q), pairwise(cu_seqlens_k), strict=True):
        s_q, s_k = q_end - q_begin, k_end - k_begin
        if not s_q or not s_k:
            continue
        visible = torch.ones(s_q, s_k, dtype=torch.bool, device=device)
        if causal:
            visible = visible.tril(s_k - s_q)
        for head in range(heads):
            query, key = q[q_begin:q_end, head].double(), k[k_begin:k_end, head // group].double()
            value = v[k_begin:k_end, head // group].double()
            logits = (softmax_scale * (query @ key.T)).masked_fill(~visible, -math.inf)
            lse = logits.logsumexp(1)
            finite = torch.where(visible.any(1), lse, 0.0)
            weights = torch.where(visible, (logits - finite[:, None]).exp(), 0.0)
            out = weights @ value
            result.out[q_begin:q_end, head] = out
            result.max_logits[q_begin:q_end, head] = logits.amax(1)
            result.lse[q_begin:q_end, head] = lse
            result.noise[q_begin:q_end, head] = (weights.square() @ value.square() + out.square()).sqrt()
            sizes = abs(softmax_scale) * (query.abs() @ key.abs().T)
            result.logit_size[q_begin:q_end, head] = torch.where(visible, sizes, 0.0).amax(1)
    return result


@dataclass(frozen=True)
class DenseFwdCase(Case):
    """A call of flash_attn_varlen_func.

    Attributes:
        requests: (rows of q, keys) of each request.
        heads, kv_heads: heads of q, and of k and v.
        causal: the argument.
        scale: softmax_scale as a multiple of d_qk ** -0.5; None: not passed.
        before, after: rows of no request, of q and of k and v each, before the first and past the last.
        q, k, v, out: layout in memory, a key of mlagen.verify.inputs.LAYOUTS; `out` None: the wrapper allocates it.
        hint: max_seqlen_q and max_seqlen_k; None: the longest request's.
        check: what is asked of the result, a key of CHECKS.
    """

    requests: tuple[tuple[int, int], ...]
    heads: int = 2
    kv_heads: int = 2
    causal: bool = True
    scale: float | None = None
    before: int = 0
    after: int = 0
    q: str = "contiguous"
    k: str = "contiguous"
    v: str = "contiguous"
    out: str | None = None
    hint: int | None = None
    check: str = "reference"


@dataclass(frozen=True)
class DenseFwdRefusalCase(Case):
    """A call that flash_attn_varlen_func must refuse with a ValueError or TypeError that names the argument.

    Attributes:
        argument: the argument that is off.
        make: what it is given, from what it was.
    """

    argument: str
    make: Callable[[Any], Any]


KINDS = (DenseFwdCase, DenseFwdRefusalCase)
LENGTHS: dict[str, tuple[tuple[int, int], ...]] = {
    "one row, one key": ((1, 1),),
    "one row, many keys": ((1, 300),),
    "more keys": ((37, 290),),
    "fewer keys": ((150, 37),),
    "equal": ((131, 131),),
    "whole tiles": ((128, 128), (64, 64), (128, 256)),
    "tiles and one": ((129, 129), (65, 65)),
    "tiles less one": ((127, 127), (63, 191)),
    "no keys": ((3, 0),),
    "no rows": ((0, 5),),
    "neither": ((0, 0), (0, 0)),
    "empty ones between": ((0, 3), (2, 2), (0, 0), (0, 4), (3, 0), (4, 9), (0, 1)),
    "many of one row": tuple((1, 1 + 3 * number) for number in range(19)),
}


def _cases(spec: Mapping[str, Any], big: bool) -> Iterator[DenseFwdCase]:
    wrappers, own = spec["wrappers"], spec["model"]["num_heads"]
    own_kv = spec["multi_head"]["num_kv_heads"] or own
    mixed = ((5, 70), (0, 9), (1, 1), (33, 33), (7, 0), (1, 131), (40, 21))
    base = DenseFwdCase("", "", mixed)

    def case(name: str, promise: str, **changes: Any) -> DenseFwdCase:
        return replace(base, name=f"dense_fwd: {name}", promise=promise, **changes)

    for causal, which in ((True, "causal"), (False, "all keys")):
        yield case(f"typical, {which}", "an ordinary batch gives the reference's", causal=causal, every_target=True)
        for name, requests in LENGTHS.items():
            yield case(f"lengths: {name}, {which}", "any lengths on either side", requests=requests, causal=causal)
        yield case(
            f"rows of no request, {which}",
            "NaN before the first request and past the last shows nowhere, and nothing is written there",
            before=150,
            after=70,
            causal=causal,
            every_target=True,
        )
    yield case("requests: none", "a batch of none, with rows of no request", requests=(), before=2)
    yield case("rows: none", "a batch without a row gives empty results", requests=((0, 7), (0, 0)))
    for heads, kv_heads in ((1, 1), (3, 3), (5, 5), (6, 3), (5, 1), (10, 2), (4, 1)):
        promise = "heads of their own or in groups"
        yield case(f"heads: {heads} of {kv_heads}", promise, heads=heads, kv_heads=kv_heads)
    yield case("heads: none", "no head gives empty results", heads=0)
    long = ((700, 3000), (1, 4000), (2500, 2500), (300, 200)) if big else ((7, 60), (2, 3))
    yield case("heads: the model's own", "the model's own heads", requests=long, heads=own, kv_heads=own_kv)
    for scale in (1.0, 0.25, 30.0, 0.0):
        promise = "any factor of the logits from 0 on"
        yield case(f"scale: {scale:g}", promise, scale=scale, requests=((9, 75), (40, 40), (3, 0)))
    for tensor in ("q", "k", "v", "out"):
        for layout in ("slice", "odd", "transposed", "far"):
            changes: dict[str, Any] = {tensor: layout}
            if layout == "far":
                changes |= {"requests": ((3, 3),), "causal": False}
            yield case(f"layout: {tensor} {layout}", "rows may lie apart, 2^31 elements too", **changes)
    yield case("layout: all odd", "no row begins at 16 bytes", q="odd", k="odd", v="odd", out="odd", every_target=True)
    for hint in (0, 1, 64, 65, 1 << 20):
        yield case(f"hint: {hint}", "max_seqlen_q and max_seqlen_k change no result", hint=hint)
    yield case("manners: torch's defaults", "torch's defaults are neither read nor changed", check="defaults")
    yield case("manners: same bits twice", "a second call gives the same bits", check="determinism")
    yield case("manners: out alone", "without return_softmax_lse out is returned alone", check="out alone")
    yield case(
        "values: NaN stays in its request",
        "NaN and infinity in a request show in no other",
        requests=((5, 40), (6, 50), (7, 60)),
        check="neighbours",
        every_target=True,
    )
    if STATES in wrappers:
        yield case("merged: context in chunks", "chunks of a context and the rest merge to the whole", check="chunks")
        yield case(
            "merged: shared prefix",
            "requests attend to a shared prefix as one, then each to its own keys, and the parts merge to the whole",
            requests=((5, 12), (1, 1), (9, 30), (2, 2)),
            check="cascade",
        )
    if PARTS in wrappers:
        yield case("merged: any number of parts", "keys in parts, one of them empty, merge to the whole", check="parts")
    if big:
        yield case("manners: graph", "a captured call replays on new inputs", check="graph")
        yield case("large: one request", "a long prefill", requests=((5000, 9000),), heads=4, kv_heads=4)
        yield case("large: many requests", "hundreds of requests", requests=tuple((n % 9, 7 * n) for n in range(300)))
        yield case("large: decode", "one row of each of many long requests", requests=((1, 5000),) * 40, heads=16)


def _every_other(tensor: torch.Tensor) -> torch.Tensor:
    """The same shape with a stride of 2 in the last dimension."""
    return tensor.repeat_interleave(2, dim=-1)[..., ::2]


def _constant(value: Any) -> Callable[[Any], Any]:
    return lambda _: value


def _changes() -> Iterator[tuple[str, str, Callable[[Any], Any]]]:
    """(argument, in what way it is wrong, what makes it so)."""
    for argument in ("q", "k", "v"):
        yield argument, "dtype float32", lambda tensor: tensor.float()
        yield argument, "not a tensor", lambda tensor: tensor.tolist()
        yield argument, "a dimension short", lambda tensor: tensor[0]
        yield argument, "twice as wide", lambda tensor: torch.cat([tensor, tensor], 2)
        yield argument, "not contiguous", _every_other
        if argument != "q":  # says which device the others must be on
            yield argument, "another device", lambda tensor: tensor.to("meta")
    yield "k", "heads that do not divide q's", lambda tensor: torch.cat([tensor, tensor[:, :1]], 1)
    yield "k", "no head", lambda tensor: tensor[:, :0]
    yield "v", "a row short", lambda tensor: tensor[1:]
    yield "v", "a head short", lambda tensor: tensor[:, 1:]
    for argument in ("cu_seqlens_q", "cu_seqlens_k"):
        yield argument, "dtype int64", lambda tensor: tensor.long()
        yield argument, "None", _constant(None)
        yield argument, "not contiguous", _every_other
    yield "cu_seqlens_q", "empty", lambda tensor: tensor[:0]
    yield "cu_seqlens_k", "an entry short", lambda tensor: tensor[1:]
    for argument in ("max_seqlen_q", "max_seqlen_k"):
        for value in (-1, 2.5, True):
            yield argument, str(value), _constant(value)
    for scale in (-1.0, NAN, "1", torch.ones(())):
        yield "softmax_scale", "a tensor" if isinstance(scale, torch.Tensor) else repr(scale), _constant(scale)
    yield "out", "dtype float32", lambda _: torch.zeros(3, 2, 2)
    yield "out", "another shape", lambda _: torch.zeros(1, 1, 1, dtype=torch.bfloat16)
    for argument, values in {
        "dropout_p": (0.1, NAN),
        "window_size": ((5, 0), (-1, 0)),
        "softcap": (30.0,),
        "num_splits": (2,),
        "alibi_slopes": (torch.ones(2),),
        "block_table": (torch.zeros(1, 1, dtype=torch.int32),),
        "seqused_k": (torch.ones(2, dtype=torch.int32),),
        "q_v": (torch.ones(2),),
        "s_aux": (torch.ones(2),),
    }.items():
        for given in values:
            yield argument, "given" if isinstance(given, torch.Tensor) else str(given), _constant(given)


def cases(spec: Mapping[str, Any], device: str) -> list[Case]:
    """All cases of a package's multi-head attention; see mlagen.verify.cases."""
    if WRAPPER not in spec["wrappers"]:
        return []
    promise = "flash_attn_varlen_func names the argument in a ValueError or TypeError"
    refusals = [
        DenseFwdRefusalCase(f"refuses: {argument}, {name} (dense_fwd)", promise, argument, make)
        for argument, name, make in _changes()
    ]
    return [*_cases(spec, device == "cuda"), *refusals]


@dataclass(frozen=True)
class Call:
    """A call's tensors, their buffers, and the numbers that the reference takes.

    Attributes:
        arguments: of the wrapper, by name.
        cu_q, cu_k: where each request begins, and the last one ends.
        scale: factor of the logits.
        placed: every input's buffer by name.
        out: what the call is to write to; None: the wrapper's allocation.
    """

    arguments: dict[str, Any]
    cu_q: list[int]
    cu_k: list[int]
    scale: float
    placed: dict[str, Placed]
    out: Placed | None

    def expected(self) -> Attention:
        """What the call must give."""
        q, k, v, causal = (self.arguments[name] for name in ("q", "k", "v", "causal"))
        return dense_fwd(q, k, v, self.cu_q, self.cu_k, self.scale, causal)


def starts(lengths: list[int], before: int = 0) -> list[int]:
    """Where each request begins, and the last one ends, behind `before` rows."""
    found = [before]
    for length in lengths:
        found.append(found[-1] + length)
    return found


def build(case: DenseFwdCase, spec: Mapping[str, Any], device: str, seed: int) -> Call:
    """The tensors of a case, the same for the same seed.

    Raises:
        CaseSkippedError: the device has too little memory.
    """
    generator = torch.Generator().manual_seed(seed)
    heads, dtype = spec["multi_head"], DTYPES[spec["model"]["dtype"]]
    cu_q = starts([rows for rows, _ in case.requests], case.before)
    cu_k = starts([keys for _, keys in case.requests], case.before)
    placed = {}
    for name, cu, count, lanes in (
        ("q", cu_q, case.heads, heads["qk_head_dim"]),
        ("k", cu_k, case.kv_heads, heads["qk_head_dim"]),
        ("v", cu_k, case.kv_heads, heads["v_head_dim"]),
    ):
        values = torch.full((cu[-1] + case.after, count, lanes), NAN, dtype=dtype)
        values[cu[0] : cu[-1]] = torch.randn(cu[-1] - cu[0], count, lanes, generator=generator).to(dtype)
        placed[name] = place(values.to(device), LAYOUTS[getattr(case, name)], NAN)
    arguments: dict[str, Any] = {name: one.view for name, one in placed.items()}
    for name, cu in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
        one = torch.tensor(cu, dtype=torch.int32, device=device)
        arguments[name], placed[name] = one, Placed(one, one, one.clone())
    longest = [max((request[side] for request in case.requests), default=0) for side in (0, 1)]
    arguments |= {"max_seqlen_q": longest[0], "max_seqlen_k": longest[1], "causal": case.causal}
    if case.hint is not None:
        arguments |= {"max_seqlen_q": case.hint, "max_seqlen_k": case.hint}
    scale = heads["qk_head_dim"] ** -0.5 * (1.0 if case.scale is None else case.scale)
    if case.scale is not None:
        arguments["softmax_scale"] = scale
    out = None
    if case.out is not None:
        shape = (cu_q[-1] + case.after, case.heads, heads["v_head_dim"])
        out = place(torch.full(shape, NAN, dtype=dtype, device=device), LAYOUTS[case.out], NAN)
        arguments["out"] = out.view
    return Call(arguments, cu_q, cu_k, scale, placed, out)


def attend(subject: Subject, arguments: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Calls the wrapper; what it leaves unwritten of its allocations is NaN."""
    with subject.planned_for(None), poisoned_allocations():
        out, lse = getattr(subject.package, WRAPPER)(**arguments)
    return out, lse


def compare(out: torch.Tensor, lse: torch.Tensor, expected: Attention, call: Call) -> list[Figure]:
    """Figures of results against the reference.

    Raises:
        CaseFailedError: a result has another dtype or shape than it should, or rows of no request were written.
    """
    q = call.arguments["q"]
    for name, tensor, dtype, shape in (
        ("out", out, q.dtype, (*q.shape[:2], expected.out.shape[2])),
        ("lse", lse, torch.float32, (q.shape[1], q.shape[0])),
    ):
        if tensor.dtype != dtype or tensor.shape != shape or tensor.device != q.device:
            raise CaseFailedError(f"{name} is {tensor.dtype} {list(tensor.shape)} instead of {dtype} {list(shape)}")
    rows = slice(call.cu_q[0], call.cu_q[-1])
    others = [*range(rows.start), *range(rows.stop, q.shape[0])]
    if not out[others].isnan().all() or not lse[:, others].isnan().all():
        raise CaseFailedError("wrote to rows of no request")
    part = Attention(*(tensor[rows] for tensor in expected))
    longest = max((end - begin for begin, end in pairwise(call.cu_k)), default=0)
    figures = tolerance.out_errors(out[rows], part, q.shape[2])
    return [*figures, tolerance.lse_error(lse.T[rows], part, q.shape[2], longest, "e")]


def _reference(subject: Subject, call: Call) -> list[Figure]:
    out, lse = attend(subject, call.arguments)
    figures = compare(out, lse, call.expected(), call)
    if call.out is not None:
        if out.data_ptr() != call.out.view.data_ptr():
            raise CaseFailedError("out was given, but another tensor was returned")
        if call.out.spilled():
            raise CaseFailedError("wrote outside out")
    return figures


def _determinism(subject: Subject, call: Call) -> list[Figure]:
    first, second = attend(subject, call.arguments), attend(subject, call.arguments)
    for name, one, other in zip(("out", "lse"), first, second, strict=True):
        if not torch.equal(bits(one), bits(other)):
            raise CaseFailedError(f"a second call gives other bits of {name}")
    return compare(*first, call.expected(), call)


def _defaults(subject: Subject, call: Call) -> list[Figure]:
    expected = call.expected()
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.float64)
    try:
        out, lse = attend(subject, call.arguments)
        if torch.get_default_device().type != "meta" or torch.get_default_dtype() != torch.float64:
            raise CaseFailedError("changed torch's defaults")
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    return compare(out, lse, expected, call)


def _out_alone(subject: Subject, call: Call) -> list[Figure]:
    both = attend(subject, call.arguments)
    wrapper = getattr(subject.package, WRAPPER)
    with subject.planned_for(None):
        alone = wrapper(**call.arguments, return_softmax_lse=False)
        again = wrapper(**call.arguments, return_softmax_lse=False, return_attn_probs=True)
    if not isinstance(alone, torch.Tensor) or not torch.equal(bits(alone), bits(both[0])):
        raise CaseFailedError("return_softmax_lse=False does not give out alone")
    if len(again) != 2 or not torch.equal(bits(again[1]), bits(both[1])):
        raise CaseFailedError("return_attn_probs=True does not give out and lse")
    return []


def _neighbours(subject: Subject, call: Call) -> list[Figure]:
    """The middle request's keys become NaN and its values infinite; the others' results keep their bits."""
    arguments = {**call.arguments, "k": call.arguments["k"].clone(), "v": call.arguments["v"].clone()}
    out, lse = attend(subject, arguments)
    arguments["k"][call.cu_k[1] : call.cu_k[2]] = NAN
    arguments["v"][call.cu_k[1] : call.cu_k[2]] = math.inf
    out_now, lse_now = attend(subject, arguments)
    kept = [*range(call.cu_q[0], call.cu_q[1]), *range(call.cu_q[2], call.cu_q[3])]
    if not torch.equal(bits(out[kept]), bits(out_now[kept])):
        raise CaseFailedError("a request's NaN shows in another's out")
    if not torch.equal(bits(lse[:, kept]), bits(lse_now[:, kept])):
        raise CaseFailedError("a request's NaN shows in another's lse")
    if not out_now[call.cu_q[1] : call.cu_q[2]].isnan().all():
        raise CaseFailedError("a request's NaN does not show in its own out")
    return compare(out, lse, call.expected(), call)


def merged(parts: list[Attention]) -> Attention:
    """The whole of attention over parts of the keys, each of which is rounded before it is merged."""
    lse = torch.stack([part.lse for part in parts])
    whole = lse.logsumexp(0)
    weights = torch.where(lse == -math.inf, 0.0, (lse - torch.where(whole == -math.inf, 0.0, whole)).exp())[..., None]
    out = (weights * torch.stack([part.out for part in parts])).sum(0)
    noise = (weights * torch.stack([part.noise for part in parts])).square().sum(0) + out.square()
    largest = (torch.stack([getattr(part, name) for part in parts]).amax(0) for name in ("max_logits", "logit_size"))
    max_logits, logit_size = largest
    return Attention(out, max_logits, whole, noise.sqrt(), logit_size)


def _part(subject: Subject, call: Call, spans: list[tuple[int, int]], causal: bool) -> tuple[Any, Any, Attention]:
    """Attention over keys [first, last) of each request alone: out, LSE, and what they must be."""
    given, device = call.arguments, call.arguments["q"].device
    rows = [
        row
        for begin, (first, last) in zip(call.cu_k[:-1], spans, strict=True)
        for row in range(begin + first, begin + last)
    ]
    picked, cu = torch.tensor(rows, dtype=torch.int64, device=device), starts([last - first for first, last in spans])
    k, v = given["k"][picked], given["v"][picked]
    cu_seqlens_k = torch.tensor(cu, dtype=torch.int32, device=device)
    out, lse = attend(subject, {**given, "k": k, "v": v, "cu_seqlens_k": cu_seqlens_k, "causal": causal})
    return out, lse, dense_fwd(given["q"], k, v, call.cu_q, cu, call.scale, causal)


def _merge(subject: Subject, *parts: tuple[Any, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Parts merged two by two, in their order."""
    (out, lse), *rest = parts
    for suffix, suffix_lse in rest:
        prefix, prefix_lse, out, lse = out, lse, torch.full_like(out, NAN), torch.full_like(lse, NAN)
        with subject.planned_for(None):
            getattr(subject.package, STATES)(out, prefix, prefix_lse, suffix, suffix_lse, lse)
    return out, lse


def _check_parts(whole: Attention, plain: Attention) -> None:
    """Raises CaseFailedError unless both references are the same: then the parts hold each key once."""
    if not torch.allclose(whole.out, plain.out, atol=1e-9) or not torch.allclose(whole.lse, plain.lse, atol=1e-9):
        raise CaseFailedError("the parts are not those of the whole")


def _chunks(subject: Subject, call: Call) -> list[Figure]:
    """As engines prefill: the context, which all rows see, in two chunks; then the rows' own keys, causal."""
    s_q, s_k = ([end - begin for begin, end in pairwise(cu)] for cu in (call.cu_q, call.cu_k))
    contexts = [max(0, keys - rows) for rows, keys in zip(s_q, s_k, strict=True)]
    cuts = [min(context, 50) for context in contexts]
    parts = [
        _part(subject, call, [(0, cut) for cut in cuts], causal=False),
        _part(subject, call, list(zip(cuts, contexts, strict=True)), causal=False),
        _part(subject, call, list(zip(contexts, s_k, strict=True)), causal=True),
    ]
    whole = merged([expected for _, _, expected in parts])
    _check_parts(whole, call.expected())
    return compare(*_merge(subject, *((out, lse) for out, lse, _ in parts)), whole, call)


def _parts(subject: Subject, call: Call) -> list[Figure]:
    """Keys that every row sees, in five parts, of which the second is empty."""
    call = replace(call, arguments={**call.arguments, "causal": False})
    s_k = [end - begin for begin, end in pairwise(call.cu_k)]
    parts = [
        _part(subject, call, [(min(first, keys), min(last, keys)) for keys in s_k], causal=False)
        for first, last in pairwise((0, 3, 3, 40, 41, 1 << 20))
    ]
    outs, lses = torch.stack([out for out, _, _ in parts]), torch.stack([lse for _, lse, _ in parts])
    with subject.planned_for(None), poisoned_allocations():
        out, lse = getattr(subject.package, PARTS)(outs, lses)
    whole = merged([expected for _, _, expected in parts])
    _check_parts(whole, call.expected())
    return compare(out, lse, whole, call)


def _cascade(subject: Subject, call: Call) -> list[Figure]:
    """All rows of the batch attend to a prefix of 45 keys as one request, then each request to its own keys."""
    given, device = call.arguments, call.arguments["q"].device
    generator = torch.Generator().manual_seed(1)
    k, v = (torch.randn(45, *given[name].shape[1:], generator=generator).to(given[name]) for name in ("k", "v"))
    rows = call.cu_q[-1]
    shared = {
        **given,
        "k": k,
        "v": v,
        "cu_seqlens_q": torch.tensor([0, rows], dtype=torch.int32, device=device),
        "cu_seqlens_k": torch.tensor([0, 45], dtype=torch.int32, device=device),
        "max_seqlen_q": rows,
        "max_seqlen_k": 45,
        "causal": False,
    }
    out, lse = _merge(subject, attend(subject, shared), attend(subject, given))
    whole = merged([dense_fwd(given["q"], k, v, [0, rows], [0, 45], call.scale, False), call.expected()])
    # The same without a cascade: every request with the prefix before its keys.
    spans = list(pairwise(call.cu_k))
    every_k, every_v = (
        torch.cat([piece for begin, end in spans for piece in (prefix, given[name][begin:end])])
        for name, prefix in (("k", k), ("v", v))
    )
    cu_k = starts([45 + end - begin for begin, end in spans])
    _check_parts(whole, dense_fwd(given["q"], every_k, every_v, call.cu_q, cu_k, call.scale, given["causal"]))
    return compare(out, lse, whole, call)


def _graph(subject: Subject, call: Call) -> list[Figure]:
    attend(subject, call.arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = attend(subject, call.arguments)
    for name in ("q", "k", "v"):
        call.arguments[name].copy_(call.arguments[name].flip(0))
        del call.placed[name]  # which it now differs from
    out.fill_(NAN)
    lse.fill_(NAN)
    graph.replay()
    torch.cuda.synchronize()
    return compare(out, lse, call.expected(), call)


CHECKS: dict[str, Callable[[Subject, Call], list[Figure]]] = {
    "reference": _reference,
    "determinism": _determinism,
    "defaults": _defaults,
    "out alone": _out_alone,
    "neighbours": _neighbours,
    "chunks": _chunks,
    "cascade": _cascade,
    "parts": _parts,
    "graph": _graph,
}


def _refusal(subject: Subject, case: DenseFwdRefusalCase) -> None:
    call = build(DenseFwdCase("", "", ((2, 5), (1, 3))), subject.package.SPEC["spec"], subject.device, 0)
    arguments, name = call.arguments, case.argument
    arguments[name] = case.make(arguments.get(name))
    with subject.planned_for(None):
        try:
            getattr(subject.package, WRAPPER)(**arguments)
        except (ValueError, TypeError) as error:
            if not re.search(rf"\b{name}\b", str(error)):
                raise CaseFailedError(f"the {type(error).__name__} does not name {name}: {error}") from error
            return
    raise CaseFailedError(f"took a wrong {name}")


def run(subject: Subject, case: Case, seed: int = 0) -> list[Figure]:
    """Runs a case; returns its figures, none where it compares bits.

    Raises:
        CaseFailedError: the case does not hold; other exceptions of the package pass through.
        CaseSkippedError: the case cannot run here.
    """
    match case:
        case DenseFwdRefusalCase():
            _refusal(subject, case)
            return []
        case DenseFwdCase():
            call = build(case, subject.package.SPEC["spec"], subject.device, seed)
        case _:
            raise TypeError(f"unknown case {case!r}")
    figures = CHECKS[case.check](subject, call)
    changed = [name for name, one in call.placed.items() if one.changed()]
    if changed:
        raise CaseFailedError(f"wrote to its input {', '.join(changed)}")
    return figures
