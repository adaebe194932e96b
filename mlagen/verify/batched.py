"""The references of attention in batches, for a GPU; the plain ones take a token or a head at a time."""

from __future__ import annotations

import math
from typing import Any

import torch

from mlagen.verify import reference
from mlagen.verify.reference import Attention

ELEMENTS = 1 << 23  # of float64 that a step may take in one tensor


def sparse_attention(q: torch.Tensor, *arguments: Any) -> Attention:
    """Attention of each token over the KV rows that its indices name, on a CPU by the plain reference.

    Its arguments are those of mlagen.verify.reference.sparse_attention.
    """
    attend = in_batches if q.is_cuda else reference.sparse_attention
    return attend(q, *arguments)


def in_batches(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    d_v: int,
    attn_sink: torch.Tensor | None,
    topk_length: torch.Tensor | None,
    lse_base: str,
    empty_row_lse: str,
) -> Attention:
    """The same on any device, tokens together."""
    tokens, heads, d_qk = q.shape
    rows, width = kv.shape[0] * kv.shape[1], indices.shape[1]
    indices = indices.long()
    valid = (indices >= 0) & (indices < rows)  # [tokens, topk]
    columns = torch.arange(width, device=q.device)
    if topk_length is not None:
        valid &= columns < topk_length.long()[:, None]
    named = torch.where(valid, indices, rows).sort(1).values  # the valid ones first, equal ones side by side
    counts = valid.sum(1)
    order = counts.argsort(descending=True)  # tokens of about as many rows together
    sizes, at, found = counts[order].tolist(), 0, []
    while at < tokens:
        each = max(1, ELEMENTS // (max(d_qk, heads) * max(sizes[at], 1)))
        own = order[at : at + each]
        found.append(_tokens(q[own], kv, named[own, : sizes[at]], counts[own], sm_scale, d_v, attn_sink))
        at += each
    back = order.argsort()
    empty = _nothing(0, heads, d_v, q.device)
    whole = Attention(*(torch.cat(parts)[back] for parts in zip(empty, *found, strict=True)))
    unit = math.log(2) if lse_base == "2" else 1.0
    lse = torch.where(counts[:, None] > 0, whole.lse / unit, float(empty_row_lse))
    return whole._replace(lse=lse, max_logits=whole.max_logits / unit)


def _nothing(tokens: int, heads: int, d_v: int, device: torch.device) -> Attention:
    """Results of tokens without a row."""
    wide = torch.zeros(tokens, heads, d_v, dtype=torch.float64, device=device)
    none = torch.full((tokens, heads), -math.inf, dtype=torch.float64, device=device)
    return Attention(wide, none, none, wide, none.new_zeros(none.shape), wide)


def _tokens(
    q: torch.Tensor,
    kv: torch.Tensor,
    named: torch.Tensor,
    counts: torch.Tensor,
    sm_scale: float,
    d_v: int,
    attn_sink: torch.Tensor | None,
) -> Attention:
    """Attention in natural units; `named` rows are sorted, `counts` of them each token's."""
    width = named.shape[1]
    if width == 0:
        return _nothing(len(q), q.shape[1], d_v, q.device)
    there = torch.arange(width, device=q.device) < counts[:, None]  # [tokens, n]
    named = torch.where(there, named, 0)
    k = torch.where(there[..., None], kv[named // kv.shape[1], named % kv.shape[1]], 0.0).double()  # [tokens, n, d_qk]
    query = q.double()
    logits = torch.where(there[:, None], sm_scale * (query @ k.mT), -math.inf)  # [tokens, heads, n]
    some = there[:, :1]
    lse = logits.logsumexp(2)
    weights = torch.where(there[:, None], (logits - torch.where(some, lse, 0.0)[..., None]).exp(), 0.0)
    if attn_sink is not None:
        weights = weights * torch.sigmoid(torch.where(some, lse, 0.0) - attn_sink.double())[..., None]
    v = k[..., :d_v]
    out = weights @ v
    # Indices that name the same row are rounded alike: each weight is squared together with the others of its row.
    first = torch.ones_like(there)
    first[:, 1:] = (named[:, 1:] != named[:, :-1]) | ~there[:, 1:]
    group = (first.cumsum(1) - 1)[:, None].expand_as(weights)
    together = torch.zeros_like(weights).scatter_add_(2, group, weights).gather(2, group)
    squares = weights * together
    weighted = squares @ v.square()
    distances = weighted - 2 * out * (squares @ v) + out.square() * squares.sum(2, keepdim=True)
    sizes = abs(sm_scale) * (query.abs() @ k.abs().mT)
    return Attention(
        out=out,
        max_logits=logits.amax(2),
        lse=lse,
        noise=(weighted + out.square()).sqrt(),
        logit_size=torch.where(there[:, None], sizes, 0.0).amax(2),
        spread=distances.clamp(min=0.0).sqrt(),
    )


def dense_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: list[int],
    cu_seqlens_k: list[int],
    softmax_scale: float,
    causal: bool,
    window: int | None = None,
) -> Attention:
    """Attention of each request's rows over its own keys; see mlagen.verify.dense_fwd.reference.dense_fwd."""
    (total, heads, _), d_v, device = q.shape, v.shape[2], q.device
    result = Attention(*(one.clone() for one in _nothing(total, heads, d_v, device)))
    result.spread.fill_(math.nan)  # no kernel of this family multiplies fp8
    group = heads // k.shape[1] if heads else 1
    for number in range(len(cu_seqlens_q) - 1):
        own, keys = slice(*cu_seqlens_q[number : number + 2]), slice(*cu_seqlens_k[number : number + 2])
        s_q, s_k = own.stop - own.start, keys.stop - keys.start
        each = max(1, ELEMENTS // max(1, s_q * s_k * group))
        for first in range(0, k.shape[1] if s_q and s_k and heads else 0, each):
            some = slice(first * group, min(first + each, k.shape[1]) * group)
            query = q[own, some].double().transpose(0, 1)
            query = query.reshape(-1, group, *query.shape[1:])  # [kv_heads, group, s_q, d_qk]
            key = k[keys, first : first + each].double().transpose(0, 1)[:, None]  # [kv_heads, 1, s_k, d_qk]
            value = v[keys, first : first + each].double().transpose(0, 1)[:, None]
            visible = torch.ones(s_q, s_k, dtype=torch.bool, device=device)
            if causal:
                visible = visible.tril(s_k - s_q)
            if window is not None:
                visible = visible.triu(s_k - s_q - window + 1)
            logits = torch.where(visible, softmax_scale * (query @ key.mT), -math.inf)
            lse = logits.logsumexp(-1)
            finite = torch.where(visible.any(1), lse, 0.0)
            weights = torch.where(visible, (logits - finite[..., None]).exp(), 0.0)
            out = weights @ value
            noise = (weights.square() @ value.square() + out.square()).sqrt()
            sizes = abs(softmax_scale) * (query.abs() @ key.abs().mT)
            size = torch.where(visible, sizes, 0.0).amax(-1)
            for name, tensor in (("out", out), ("noise", noise)):
                getattr(result, name)[own, some] = tensor.flatten(0, 1).transpose(0, 1)
            for name, tensor in (("lse", lse), ("max_logits", logits.amax(-1)), ("logit_size", size)):
                getattr(result, name)[own, some] = tensor.flatten(0, 1).T
    return result
