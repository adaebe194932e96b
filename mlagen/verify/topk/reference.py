"""What the top-k kernels must select, in plain torch, a row at a time."""

from __future__ import annotations

import torch

INT32_VALUES = 2**31


def top_k(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(indices i32 [k], scores f32 [k]) of one row's k largest, by a stable sort; -1 and -inf behind them."""
    values = scores.float() + 0.0  # -0 as 0
    counts = values > -torch.inf  # neither does NaN
    order = torch.sort(torch.where(counts, values, -torch.inf), descending=True, stable=True).indices
    picked = order[counts[order]][:k].sort().values
    indices = torch.full((k,), -1, dtype=torch.int32)
    found = torch.full((k,), -torch.inf)
    indices[: len(picked)] = picked.int()
    found[: len(picked)] = values[picked]
    return indices, found


def slots(indices: torch.Tensor, pages: torch.Tensor | None, start: int, page_size: int) -> torch.Tensor:
    """Slots i32 of a row's indices through its row of a page table, None where it has none; a number at a time."""
    found = []
    for index in indices.tolist():
        column = start + index // page_size
        known = pages is not None and index >= 0 and start >= 0 and column < len(pages)
        page = int(pages[column]) if known and pages is not None else -1
        inside = page >= 0 and (page + 1) * page_size <= INT32_VALUES
        found.append(page * page_size + index % page_size if inside else -1)
    return torch.tensor(found, dtype=torch.int32)


def merge(scores: torch.Tensor, ids: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, scores) of the k largest of one row's candidates, in ascending order of ids; of equals the smaller ids."""
    order = ids.argsort()
    order = order[ids[order] >= 0]
    indices, found = top_k(scores[order], k)
    names = torch.where(indices >= 0, ids[order][indices.clamp(min=0).long()] if len(order) else -1, -1)
    return names.int(), found
