"""The work of a call: its FLOPs and the fewest bytes it must move, from plain integers.

Every byte counts once, even if a kernel reads it several times.
"""

from __future__ import annotations

ITEMSIZE = 2  # bytes of an element of q, of out and of a row that is not quantised
INDEX_BYTES = 4
SCORE_BYTES = 4  # fp32
SLOT_BYTES = 8
FLOAT_BYTES = 4


def flops(tokens: int, num_heads: int, keys: int, d_qk: int, d_v: int) -> int:
    """FLOPs of a call with `keys` rows per token: QKᵀ and PV, two per multiply-add."""
    return 2 * tokens * num_heads * keys * (d_qk + d_v)


def distinct_rows(tokens: int, topk: int, s_kv: int) -> int:
    """Most different KV rows that the indices of a call name."""
    return min(tokens * topk, s_kv)


def attention_bytes(tokens: int, num_heads: int, keys: int, d_qk: int, d_v: int, kv_bytes: int) -> int:
    """Bytes of attention: q, out and indices once, and `kv_bytes` of KV rows."""
    return tokens * num_heads * (d_qk + d_v) * ITEMSIZE + tokens * keys * INDEX_BYTES + kv_bytes


def write_bytes(tokens: int, columns: int, row_bytes: int) -> int:
    """Bytes of writing tokens to a cache: their rows as the model computes them, their slots, the rows as stored.

    Args:
        tokens: how many.
        columns: of a row.
        row_bytes: bytes of a row as it is stored.
    """
    return tokens * (columns * ITEMSIZE + SLOT_BYTES + row_bytes)


def gather_bytes(tokens: int, columns: int, row_bytes: int, pages: int, *, integers: int) -> int:
    """Bytes of gathering tokens from a cache: rows as stored and as read, the table of `pages`, other integers."""
    return tokens * (row_bytes + columns * ITEMSIZE) + (pages + integers) * INDEX_BYTES


def keys_bytes(tokens: int, row_bytes: int, pages: int, requests: int) -> int:
    """Bytes of gathering index keys as they are stored: in and out, the table of `pages`, where requests begin."""
    return 2 * tokens * row_bytes + (pages + requests + 1) * INDEX_BYTES


def query_bytes(tokens: int, heads: int, columns: int, rope: int, stored: int) -> int:
    """Bytes of quantising the indexer's query: heads as computed and as stored, weights in and out, positions, angles.

    Args:
        tokens, heads, columns: sizes of the query.
        rope: columns that RoPE rotates.
        stored: bytes of a head as it is stored.
    """
    head = columns * ITEMSIZE + stored + 2 * FLOAT_BYTES
    return tokens * (heads * head + SLOT_BYTES + rope * FLOAT_BYTES)


def normalise_bytes(tokens: int, columns: int, rope: int, row_bytes: int) -> int:
    """Bytes of writing keys that are normalised and rotated: those of a writer, positions and angles of each token."""
    return write_bytes(tokens, columns, row_bytes) + tokens * (SLOT_BYTES + rope * FLOAT_BYTES)


def map_bytes(tokens: int, topk: int, pages: int, *, counts: bool) -> int:
    """Bytes of mapping indices to slots: both of them, each token's request, the table of `pages`; valid ones counted.

    Args:
        tokens, topk: sizes of the call.
        pages: entries of the block table that its indices name, at most.
        counts: each token's flag is read, a byte, and its count written.
    """
    return (2 * tokens * topk + tokens + min(pages, tokens * topk)) * INDEX_BYTES + counts * tokens * (1 + INDEX_BYTES)


def combine_bytes(tokens: int, topk: int, width: int, requests: int) -> int:
    """Bytes of combining full rows of `topk` indices with a window to rows of `width`; three integers a request."""
    return (tokens * (topk + width + 1) + 3 * requests + 1) * INDEX_BYTES


def topk_bytes(scores: int, rows: int, topk: int) -> int:
    """Bytes of a selection: each fp32 score that a row sees once, its picks, and a length a row."""
    return scores * SCORE_BYTES + rows * (topk + 1) * INDEX_BYTES


def logits_flops(heads: int, pairs: int, columns: int) -> int:
    """FLOPs of the lightning indexer's products, of so many pairs of a query token and a key."""
    return 2 * heads * pairs * columns


def logits_bytes(read: int, weights: int, pairs: int) -> int:
    """Fewest bytes of the lightning indexer's logits: q and keys, `read` bytes, weights, and a logit a pair in fp32."""
    return read + 4 * (weights + pairs)


def states_bytes(tokens: int, width: int) -> int:
    """Bytes of saving states: kv and scores of `width` columns in fp32 and as stored, slots and positions."""
    return tokens * (4 * width * 4 + 2 * SLOT_BYTES)


def compress_bytes(tokens: int, rows: int, window: int, columns: int, row_bytes: int, table_bytes: int) -> int:
    """Bytes of compressing: kv and scores of windows in fp32, rows as stored, angles, and integers of all tokens.

    Args:
        tokens: of the call.
        rows: that it makes.
        window: tokens of a row.
        columns: of a row.
        row_bytes: of a row as it is stored.
        table_bytes: of a position's angles.
    """
    return rows * (window * columns * 2 * 4 + row_bytes + table_bytes) + tokens * (3 * SLOT_BYTES + INDEX_BYTES)


def latents_bytes(tokens: int, groups: int, ratio: int, columns: int, saved: int) -> int:
    """Bytes of making latents: kv and scores of groups in fp32, latents, states that are saved, and integers.

    Args:
        tokens: of the call.
        groups: that end in it.
        ratio: tokens of a group. A group of one token has no scores.
        columns: of a latent.
        saved: states that the call stores.
    """
    width = columns * (2 if ratio > 1 else 1) * FLOAT_BYTES
    return groups * (ratio * width + columns * ITEMSIZE) + 2 * saved * width + tokens * (2 * SLOT_BYTES + INDEX_BYTES)


def insert_bytes(tokens: int, groups: int, columns: int, row_bytes: int, table_bytes: int) -> int:
    """Bytes of inserting latents: latents of groups, rows as stored, angles, and integers of all tokens."""
    return groups * (columns * ITEMSIZE + row_bytes + table_bytes) + tokens * 2 * SLOT_BYTES


def rotate_bytes(rows: int, columns: int, row_bytes: int) -> int:
    """Bytes of transforming and quantising rows of the indexer's query: rows as computed and as stored."""
    return rows * (columns * ITEMSIZE + row_bytes)


def pools_bytes(pools: int, size: int, columns: int, row_bytes: int) -> int:
    """Bytes of compressing pools of `size` tokens: keys and scores of these, ape, stored keys and their slots."""
    return pools * (2 * size * columns * ITEMSIZE + row_bytes + SLOT_BYTES) + size * columns * FLOAT_BYTES


def tail_bytes(tokens: int, columns: int) -> int:
    """Bytes of storing tokens in their rings: keys and scores, read and written, and a slot."""
    return tokens * (4 * columns * ITEMSIZE + SLOT_BYTES)


def expand_bytes(rows: int, picked: int, size: int) -> int:
    """Bytes of expanding pools to tokens: picked pools, tokens with those of the last pool, and a length a row."""
    return rows * (picked + (picked + 1) * size) * INDEX_BYTES


def prologue_bytes(tokens: int, heads: int, turned: int, columns: int, row_bytes: int, table_bytes: int) -> int:
    """Bytes of a prologue of attention: Q in and out, a row as computed and as stored, its slot, position and angles.

    Args:
        tokens, heads: sizes of Q.
        turned: columns of a head that are read and written.
        columns: of a row.
        row_bytes: of a row as it is stored.
        table_bytes: of a position's angles.
    """
    q = 2 * heads * turned * ITEMSIZE
    return write_bytes(tokens, columns, row_bytes) + tokens * (q + SLOT_BYTES + table_bytes)


def out_quant_bytes(tokens: int, heads: int, columns: int, table_bytes: int, scale_bytes: int) -> int:
    """Bytes of quantising an output: rows as read and in e4m3, a scale for 128 columns, angles and positions."""
    return tokens * (heads * (columns * (ITEMSIZE + 1) + columns // 128 * scale_bytes) + table_bytes + SLOT_BYTES)
