"""The work of an attention call: its FLOPs and the fewest bytes it must move, from plain integers.

Bytes are those that are read or written once; what a kernel reads again costs it time, not credit.
"""

from __future__ import annotations

ITEMSIZE = 2  # bytes of an element of q, of out and of a row that is not quantised
INDEX_BYTES = 4


def flops(tokens: int, num_heads: int, keys: int, d_qk: int, d_v: int) -> int:
    """FLOPs of a call whose tokens attend to `keys` rows each: QKᵀ and PV, two a multiply-add."""
    return 2 * tokens * num_heads * keys * (d_qk + d_v)


def distinct_rows(tokens: int, topk: int, s_kv: int) -> int:
    """Most KV rows that the indices of a call name, each counted once."""
    return min(tokens * topk, s_kv)


def attention_bytes(tokens: int, num_heads: int, keys: int, d_qk: int, d_v: int, kv_bytes: int) -> int:
    """Bytes of attention: q, out and indices once, and `kv_bytes` of KV rows."""
    return tokens * num_heads * (d_qk + d_v) * ITEMSIZE + tokens * keys * INDEX_BYTES + kv_bytes
