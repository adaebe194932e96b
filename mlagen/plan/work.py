"""The work of one attention call, by its KV rows."""

from __future__ import annotations

from mlagen.work import ITEMSIZE, attention_bytes, distinct_rows, flops

__all__ = ["ITEMSIZE", "bytes_moved", "distinct_rows", "flops"]


def bytes_moved(tokens: int, num_heads: int, topk: int, d_qk: int, d_v: int, *, kv_rows: int, row_bytes: int) -> int:
    """Fewest bytes of a call: q, out and indices once, and `kv_rows` rows of `row_bytes` bytes."""
    return attention_bytes(tokens, num_heads, topk, d_qk, d_v, kv_rows * row_bytes)
