"""What the index kernels must compute, in plain torch, a token or a number at a time."""

from __future__ import annotations

from itertools import pairwise

import torch

INT32_VALUES = 2**31  # slots and rows that an int32 names
ROW_MULTIPLE = 128  # of a combined row's length


def map_indices(
    indices: torch.Tensor, request: torch.Tensor, block_table: torch.Tensor, block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots i32 [tokens, topk] and how many a token has, i32 [tokens], in plain torch, a token at a time.

    An index is -1 where it is negative, where its block or request is not in the table, and where its block is negative
    or has a slot past int32.
    """
    requests, columns = block_table.shape
    slots = torch.full_like(indices, -1)
    for token, number in enumerate(request[: len(indices)].tolist()):
        if not 0 <= number < requests:
            continue
        index = indices[token].long()
        inside = (index >= 0) & (index // block_size < columns)
        block = block_table[number, (index[inside] // block_size)].long()
        named = (block >= 0) & ((block + 1) * block_size <= INT32_VALUES)
        slots[token, inside] = torch.where(named, block * block_size + index[inside] % block_size, -1).int()
    return slots, (slots >= 0).sum(1).int()


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
) -> tuple[torch.Tensor, torch.Tensor]:
    """Combined rows i32 [tokens, topk + window_size rounded up] and their lengths i32 [tokens], a number at a time."""
    tokens = len(topk_indices)
    columns = -(-(topk + window_size) // ROW_MULTIPLE) * ROW_MULTIPLE
    rows = [[-1] * columns for _ in range(tokens)]
    lens = [0] * tokens
    bounds = [bound - int(query_start_loc[0]) for bound in query_start_loc.tolist()]
    for request, (begin, end) in enumerate(pairwise(bounds)):
        seq_len, gather_len = int(seq_lens[request]), int(gather_lens[request])
        for token in range(begin, min(end, tokens)):
            position = seq_len - (end - begin) + (token - begin)
            if position < 0:
                continue
            topk_len = min((position + 1) // compress_ratio, topk)
            swa_len = min(position + 1, window_size)
            for column, index in enumerate(topk_indices[token, :topk_len].tolist()):
                if index >= 0 and index + M * request < INT32_VALUES:
                    rows[token][column] = index + M * request
            first = M * request + N + (position - swa_len + 1) - (seq_len - gather_len)
            rows[token][topk_len : topk_len + swa_len] = range(first, first + swa_len)
            lens[token] = topk_len + swa_len
    return torch.tensor(rows, dtype=torch.int32).view(tokens, columns), torch.tensor(lens, dtype=torch.int32)
