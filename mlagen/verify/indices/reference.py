"""Reference of the index kernels, in plain torch, a token or a number at a time."""

from __future__ import annotations

from itertools import pairwise

import torch

INT32_VALUES = 2**31  # slots and rows that an int32 names
ROW_MULTIPLE = 128  # of a combined row's length


def map_indices(
    indices: torch.Tensor,
    request: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    *,
    block_rows: int | None = None,
    ranks: int = 1,
    rank: int = 0,
    interleave: int = 1,
    compact: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots i32 [tokens, topk] and a token's length, i32 [tokens], in plain torch, a token at a time.

    An index is -1 where it is negative, where its block or request is not in the table, where it is another rank's, and
    where its block is negative or has a slot past int32. Blocks begin block_rows apart.
    """
    requests, columns = block_table.shape
    block_rows = block_rows or block_size
    slots = torch.full_like(indices, -1)
    for token, number in enumerate(request[: len(indices)].tolist()):
        if not 0 <= number < requests:
            continue
        index = indices[token].long()
        own = (index >= 0) & (index // interleave % ranks == rank)
        local = index // (ranks * interleave) * interleave + index % interleave
        inside = own & (local // block_size < columns)
        block = block_table[number, (local[inside] // block_size)].long()
        named = (block >= 0) & (block * block_rows + block_size <= INT32_VALUES)
        slots[token, inside] = torch.where(named, block * block_rows + local[inside] % block_size, -1).int()
    return packed(slots) if compact else (slots, lengths(slots))


def lengths(rows: torch.Tensor) -> torch.Tensor:
    """How far each row reaches up to the last index that is not -1, i32 [rows]."""
    columns = torch.arange(1, rows.shape[1] + 1, dtype=torch.int32, device=rows.device)
    reach = torch.where(rows >= 0, columns, 0)
    return reach.amax(1) if rows.shape[1] else rows.new_zeros(len(rows))


def packed(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same rows with their valid indices first, in order, and how many a row has."""
    out = torch.full_like(rows, -1)
    for number, row in enumerate(rows):
        valid = row[row >= 0]
        out[number, : len(valid)] = valid
    return out, (rows >= 0).sum(1).int()


def combine_indices(
    topk_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    gather_lens: torch.Tensor,
    window_size: int,
    compress_ratio: int,
    topk: int,
    M: int,
    N: int,
    *,
    left_visible: torch.Tensor | None = None,
    right_visible: torch.Tensor | None = None,
    max_image_tokens: int = 0,
    compact: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Combined rows i32 [tokens, columns rounded up] and their lengths i32 [tokens], a number at a time."""
    tokens = len(topk_indices)
    columns = -(-(topk + window_size + max_image_tokens) // ROW_MULTIPLE) * ROW_MULTIPLE
    rows = [[-1] * columns for _ in range(tokens)]
    lens = [0] * tokens
    bounds = [bound - int(query_start_loc[0]) for bound in query_start_loc.tolist()]
    for request, (begin, end) in enumerate(pairwise(bounds)):
        seq_len, gather_len = max(int(seq_lens[request]), 0), max(int(gather_lens[request]), 0)
        for token in range(begin, min(end, tokens)):
            position = seq_len - (end - begin) + (token - begin)
            if position < 0:
                continue
            topk_len = min((position + 1) // max(compress_ratio, 1), topk)
            for column, index in enumerate(topk_indices[token, :topk_len].tolist()):
                if 0 <= index < N:
                    rows[token][column] = index + M * request
            first, last = position - window_size + 1, position
            if left_visible is not None and right_visible is not None:
                first = min(first, position - int(left_visible[token]))
                last = min(position + max(int(right_visible[token]), 0), seq_len - 1)
            gathered = seq_len - gather_len
            places = [place - gathered for place in range(max(first, 0), last + 1) if 0 <= place - gathered < M - N]
            places = places[: window_size + max_image_tokens]
            rows[token][topk_len : topk_len + len(places)] = [M * request + N + place for place in places]
            lens[token] = topk_len + len(places)
    found = torch.tensor(rows, dtype=torch.int32).view(tokens, columns)
    return packed(found) if compact else (found, torch.tensor(lens, dtype=torch.int32))
