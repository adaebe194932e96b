"""Reference of the kernels, in plain torch and float64, a token at a time: no tiles, splits or online softmax."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch


class Attention(NamedTuple):
    """Result of `sparse_attention`, float64 on the inputs' device.

    Attributes:
        out: [tokens, heads, d_v].
        max_logits: [tokens, heads], in units of the log base; -inf for an empty row.
        lse: [tokens, heads], in units of the log base; the spec's value for an empty row.
        noise: [tokens, heads, d_v], root of the sum of squares of all terms that are rounded on the way to an element
            of `out`: the weighted values and the element itself.
        logit_size: [tokens, heads], largest sum of absolute products behind a logit of the row, in natural units.
        spread: [tokens, heads, d_v], root of the sum of squares of the weighted distances of values from an element:
            by how much it moves where each logit is off by 1 with a sign of its own, to first order.
    """

    out: torch.Tensor
    max_logits: torch.Tensor
    lse: torch.Tensor
    noise: torch.Tensor
    logit_size: torch.Tensor
    spread: torch.Tensor


def valid_indices(indices: torch.Tensor, length: int | None, rows: int) -> torch.Tensor:
    """The indices int64[n] of one token, int[topk], that name one of `rows` rows among its first `length` entries."""
    if length is not None:
        indices = indices[: max(length, 0)]
    indices = indices.long()
    return indices[(indices >= 0) & (indices < rows)]


def sparse_attention(
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
    """Attention of each token over the KV rows that its indices name; a row named twice counts twice.

    Args:
        q: [tokens, heads, d_qk].
        kv: [pages, page_size, d_qk]; index i names row i % page_size of page i // page_size. Rows that no valid index
            names are never read.
        indices: i32 [tokens, topk]; a value outside [0, pages * page_size) counts as absent.
        sm_scale: factor of q.k.
        d_v: leading columns of a KV row that are V.
        attn_sink: f32 [heads], natural logits in the denominator, but only of `out`; None: no sink.
        topk_length: i32 [tokens], how many leading indices count; None: all.
        lse_base: "e" or "2", of `lse` and `max_logits`.
        empty_row_lse: "+inf" or "-inf".
    """
    tokens, heads, _ = q.shape
    page_size = kv.shape[1]
    device = q.device

    def full(value: float, *shape: int) -> torch.Tensor:
        return torch.full(shape, value, dtype=torch.float64, device=device)

    result = Attention(
        out=full(0.0, tokens, heads, d_v),
        max_logits=full(-math.inf, tokens, heads),
        lse=full(float(empty_row_lse), tokens, heads),
        noise=full(0.0, tokens, heads, d_v),
        logit_size=full(0.0, tokens, heads),
        spread=full(0.0, tokens, heads, d_v),
    )
    unit = math.log(2) if lse_base == "2" else 1.0
    lengths = [None] * tokens if topk_length is None else topk_length.tolist()
    for token in range(tokens):
        index = valid_indices(indices[token], lengths[token], kv.shape[0] * page_size)
        if not len(index):
            continue
        k = kv[index // page_size, index % page_size].double()  # [n, d_qk]
        v = k[:, :d_v]
        query = q[token].double()  # [heads, d_qk]
        logits = sm_scale * (query @ k.T)  # [heads, n]
        lse = logits.logsumexp(1)  # [heads]
        weights = (logits - lse[:, None]).exp()
        if attn_sink is not None:
            # exp(lse) / (exp(lse) + exp(sink)), without the overflow.
            weights *= torch.sigmoid(lse - attn_sink.double())[:, None]
        out = weights @ v  # [heads, d_v]
        result.out[token] = out
        result.max_logits[token] = logits.amax(1) / unit
        result.lse[token] = lse / unit
        # Indices that name the same row are rounded alike, so their weights add up before they are squared.
        row, entry = torch.unique(index, return_inverse=True)
        of_row = full(0.0, heads, len(row)).index_add_(1, entry, weights)
        v = kv[row // page_size, row % page_size, :d_v].double()
        squares, weighted = of_row.square(), of_row.square() @ v.square()
        result.noise[token] = (weighted + out.square()).sqrt()
        distances = weighted - 2 * out * (squares @ v) + out.square() * squares.sum(1, keepdim=True)
        result.spread[token] = distances.clamp(min=0.0).sqrt()
        result.logit_size[token] = abs(sm_scale) * (query.abs() @ k.abs().T).amax(1)
    return result
