"""Parts of both families of attention over a paged cache: query tokens by request, results, and metadata."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from mlagen.verify import tolerance
from mlagen.verify.call.case import CaseFailedError
from mlagen.verify.call.family import Check, Inputs, Results, Run
from mlagen.verify.call.memory import LAYOUTS, NAN, Placed, place
from mlagen.verify.call.results import Figure
from mlagen.verify.checks import copied, quantised, require_bits, require_tensors
from mlagen.verify.reference import Attention

FLASH = "flash_mla_with_kvcache"
ALIGNMENT = 16  # bytes
E4M3_NAN = 0x7F


def place_tokens(
    values: torch.Tensor, shape: tuple[int, int], layout: str, fill: float | int
) -> tuple[torch.Tensor, Placed]:
    """A tensor by token [tokens, ...] laid out, and its view by request [requests, s_q, ...]."""
    if layout == "by position":
        by_position = values.unflatten(0, shape).transpose(0, 1).flatten(0, 1)  # type: ignore[no-untyped-call]
        placed = place(by_position, LAYOUTS["slice"], fill)
        return placed.view.unflatten(0, shape[::-1]).transpose(0, 1), placed  # type: ignore[no-untyped-call]
    placed = place(values, LAYOUTS[layout], fill)
    return placed.view.unflatten(0, shape), placed  # type: ignore[no-untyped-call]


def as_e4m3(q: torch.Tensor, scale: float) -> torch.Tensor:
    """A q in multiples of a scale, in e4m3, with its strides and as little aligned, and NaN between its rows."""
    first = q.storage_offset() % ALIGNMENT
    last = sum((size - 1) * stride for size, stride in zip(q.shape, q.stride(), strict=True)) if q.numel() else -1
    codes = torch.full((first + last + 1,), E4M3_NAN, dtype=torch.uint8, device=q.device)
    codes = codes.as_strided(q.shape, q.stride(), first)
    codes.copy_((q.float() / scale).to(torch.float8_e4m3fn).view(torch.uint8))
    return codes.view(torch.float8_e4m3fn)


def place_out(q: torch.Tensor, d_v: int, layout: str) -> Placed:
    """A buffer for `out` of the queries [requests, s_q, heads, d_qk], its view by request."""
    requests, s_q, heads, _ = q.shape
    empty = torch.full((requests * s_q, heads, d_v), NAN, dtype=q.dtype, device=q.device)
    view, placed = place_tokens(empty, (requests, s_q), layout, NAN)
    return Placed(view, placed.buffer, placed.before)


def compare(
    run: Run[Any, Any],
    results: Results,
    expected: Attention,
    keys: int,
    k_error: float = 0.0,
    *,
    short: bool = False,
    e4m3_p: bool = False,
) -> list[Figure]:
    """Figures of out [requests, s_q, heads, d_v] and lse [requests, heads, s_q] against attention of each token.

    Args:
        run: a run with `q` among its inputs.
        results: "out" and "lse".
        expected: by token.
        keys: the most that a token sees.
        k_error: relative error of elements of K.
        short: logits are products of fp8 that sm90 adds.
        e4m3_p: P is e4m3.
    """
    facts = run.subject.facts
    requests, s_q, heads, d_qk = run.inputs.q.shape
    outs = quantised.shapes(facts, requests * s_q, heads)
    outs = {name: (dtype, (requests, s_q, *shape[1:])) for name, (dtype, shape) in outs.items()}
    require_tensors(run, results, {**outs, "lse": (torch.float32, (requests, heads, s_q))})
    out = results["out"].flatten(0, 1)
    if facts.out_heads:
        scales = results["out_scales"].flatten(0, 1)
        figures = quantised.errors(facts, out, scales, expected, d_qk, k_error)
    else:
        p_keys = keys if e4m3_p else None
        figures = tolerance.out_errors(out, expected, d_qk, k_error, facts.partials, short=short, p_keys=p_keys)
    lse = results["lse"].transpose(1, 2).reshape(requests * s_q, heads)
    return [*figures, tolerance.lse_error(lse, expected, d_qk, keys, facts.lse_base, k_error, short=short)]


def by_token(results: Results) -> Results:
    """Results of requests as merges take them: out [tokens, heads, d_v], and lse [heads, tokens], a view."""
    return {"out": results["out"].flatten(0, 1), "lse": results["lse"].transpose(1, 2).flatten(0, 1).T}


def by_request(results: Results, requests: int) -> Results:
    """The results of `by_token`, by request again."""
    out, lse = results["out"], results["lse"]
    s_q = out.shape[0] // requests
    return {"out": out.unflatten(0, (requests, s_q)), "lse": lse.T.unflatten(0, (requests, s_q)).transpose(1, 2)}  # type: ignore[no-untyped-call]


def metadata(others: Callable[[Run[Any, Any]], Mapping[str, Inputs]]) -> Check:
    """Metadata serves calls of the sizes of its first one. The error of each of the `others` names the difference."""

    def check(run: Run[Any, Any]) -> list[Figure]:
        package = run.subject.package
        old_form = package.get_mla_metadata(torch.ones(2, dtype=torch.int32), 8, 1, 4, is_fp8_kvcache=True, topk=64)
        recorded, nothing = old_form
        if nothing is not None or package.get_mla_metadata(cache_seqlens=None)[0] is recorded:
            raise CaseFailedError("get_mla_metadata gives something else than a fresh object and None")
        first = copied(run.call(tile_scheduler_metadata=recorded))
        require_bits("second call", first, run.call(tile_scheduler_metadata=recorded))
        for name, other in others(run).items():
            try:
                run.on(other).call(tile_scheduler_metadata=recorded)
            except ValueError as error:
                if not re.search(rf"tile_scheduler_metadata: .*\b(extra_)?{name} ", str(error)):
                    raise CaseFailedError(f"the ValueError does not name {name}: {error}") from error
            else:
                raise CaseFailedError(f"took a call of another {name}")
        return run.compare(first)

    return check
