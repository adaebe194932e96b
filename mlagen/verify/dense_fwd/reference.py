"""Reference of multi-head attention, in plain torch and float64."""

from __future__ import annotations

import math
from itertools import pairwise

import torch

from mlagen.verify.reference import Attention


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
    """Attention of each request's rows over its own keys, in plain torch and float64, a request and a head at a time.

    Args:
        q, k, v: [total_q, heads, d_qk], [total_k, kv_heads, d_qk], [total_k, kv_heads, d_v]; heads is a multiple.
        cu_seqlens_q, cu_seqlens_k: where each request begins, and the last one ends.
        softmax_scale: factor of the logits.
        causal: row i of s_q sees key j of s_k if and only if j <= i + s_k - s_q.
        window: row i sees key j only if j > i + s_k - s_q - window; None: no bound.

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
        spread=full(math.nan, total, heads, d_v),  # no kernel of this family multiplies fp8
    )
    group = heads // k.shape[1]
    for (q_begin, q_end), (k_begin, k_end) in zip(pairwise(cu_seqlens_q), pairwise(cu_seqlens_k), strict=True):
        s_q, s_k = q_end - q_begin, k_end - k_begin
        if not s_q or not s_k:
            continue
        visible = torch.ones(s_q, s_k, dtype=torch.bool, device=device)
        if causal:
            visible = visible.tril(s_k - s_q)
        if window is not None:
            visible = visible.triu(s_k - s_q - window + 1)
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


def merged(parts: list[Attention]) -> Attention:
    """The whole of attention over parts of the keys. Each part is rounded before it is merged."""
    lse = torch.stack([part.lse for part in parts])
    whole = lse.logsumexp(0)
    weights = torch.where(lse == -math.inf, 0.0, (lse - torch.where(whole == -math.inf, 0.0, whole)).exp())[..., None]
    out = (weights * torch.stack([part.out for part in parts])).sum(0)
    noise = (weights * torch.stack([part.noise for part in parts])).square().sum(0) + out.square()
    largest = (torch.stack([getattr(part, name) for part in parts]).amax(0) for name in ("max_logits", "logit_size"))
    max_logits, logit_size = largest
    return Attention(out, max_logits, whole, noise.sqrt(), logit_size, parts[0].spread)
