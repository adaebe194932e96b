"""Reference of candidate blocks, in plain torch."""

from __future__ import annotations

import torch

from mlagen.verify.topk.reference import top_k

LARGEST = torch.finfo(torch.float32).max


def best_blocks(logits: torch.Tensor, k: int, block: int) -> torch.Tensor:
    """The k best blocks of the logits that a token sees, i32 [k]: the newest, and those with the largest logits."""
    if not len(logits):
        return torch.full((k,), -1, dtype=torch.int32, device=logits.device)
    whole = logits.new_full((-(-len(logits) // block) * block,), -torch.inf, dtype=torch.float32)
    whole[: len(logits)] = torch.where(logits.isnan(), -torch.inf, logits.float())
    scores = whole.view(-1, block).amax(1).clamp(max=LARGEST)
    scores[-1] = torch.inf
    return top_k(scores, k)[0]


def keys_of(blocks: torch.Tensor, block: int, count: int) -> torch.Tensor:
    """The key of each column of a row's compact logits, i64: one of the `count` keys that the token sees, or -1."""
    keys = blocks.long()[:, None] * block + torch.arange(block, device=blocks.device)
    return torch.where((keys >= 0) & (keys < count), keys, -1).flatten()
