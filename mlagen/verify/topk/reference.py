"""Reference of the top-k kernels, in plain torch."""

from __future__ import annotations

import torch

INT32_VALUES = 2**31


def top_k(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(indices i32 [..., k], scores f32 [..., k]): each row's k largest, by a stable sort; -1 and -inf behind."""
    columns = scores.shape[-1]
    values = scores.float() + 0.0  # -0 as 0
    counts = values > -torch.inf  # neither does NaN
    order = torch.sort(torch.where(counts, values, -torch.inf), dim=-1, descending=True, stable=True).indices[..., :k]
    picked = torch.where(counts.gather(-1, order), order, columns).sort(-1).values
    there = picked < columns
    shape = (*scores.shape[:-1], k)
    indices = torch.full(shape, -1, dtype=torch.int32, device=scores.device)
    found = torch.full(shape, -torch.inf, device=scores.device)
    if columns:
        indices[..., : order.shape[-1]] = torch.where(there, picked, -1).int()
        best = values.gather(-1, picked.clamp(max=columns - 1))
        found[..., : order.shape[-1]] = torch.where(there, best, -torch.inf)
    return indices, found


def slots(indices: torch.Tensor, pages: torch.Tensor | None, start: int, page_size: int) -> torch.Tensor:
    """Slots i32 of a row's indices through its row of a page table, None where it has none."""
    columns = 0 if pages is None else len(pages)
    if pages is None or not columns or start < 0:
        return torch.full_like(indices, -1, dtype=torch.int32)
    index = indices.long()
    column = start + torch.where(index >= 0, index, 0) // page_size
    page = pages.long()[column.clamp(max=columns - 1)]
    inside = (index >= 0) & (column < columns) & (page >= 0) & ((page + 1) * page_size <= INT32_VALUES)
    return torch.where(inside, page * page_size + index % page_size, -1).int()


def merge(scores: torch.Tensor, ids: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, scores) of the k largest of one row's candidates, in ascending order of ids; of equals the smaller ids."""
    order = ids.argsort()
    order = order[ids[order] >= 0]
    indices, found = top_k(scores[order], k)
    names = torch.where(indices >= 0, ids[order][indices.clamp(min=0).long()] if len(order) else -1, -1)
    return names.int(), found
