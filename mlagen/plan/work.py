"""The work of one attention call: its FLOPs, and the fewest bytes it must move, from plain integers."""

from __future__ import annotations

ITEMSIZE = 2  # bytes of an element of q and out, bf16 or fp16
INDEX_BYTES = 4


def flops(tokens: int, num_heads: int, keys: int, d_qk: int, d_v: int) -> int:
    """FLOPs of a call whose tokens attend to `keys` rows each: QKᵀ and PV, two a multiply-add."""
    return 2 * tokens * num_heads * keys * (d_qk + d_v)


def distinct_rows(tokens: int, topk: int, s_kv: int) -> int:
    """Most KV rows that the indices of a call name, each counted once."""
    return min(tokens * topk, s_kv)


def bytes_moved(tokens: int, num_heads: int, topk: int, d_qk: int, d_v: int, *, kv_rows: int, row_bytes: int) -> int:
    """Fewest bytes of a call: q, out and indices once, and `kv_rows` rows of `row_bytes` bytes."""
    q_and_out = tokens * num_heads * (d_qk + d_v) * ITEMSIZE
    return q_and_out + tokens * topk * INDEX_BYTES + kv_rows * row_bytes
