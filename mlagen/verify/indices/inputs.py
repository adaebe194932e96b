"""The tensors of a call of an index kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from mlagen.verify.call import family
from mlagen.verify.call.memory import GARBAGE, LAYOUTS, Layout, place, place_vector, seeded
from mlagen.verify.call.patterns import INT32
from mlagen.verify.indices.cases import CombineCase, MapCase
from mlagen.verify.indices.invalid import CONVERT
from mlagen.verify.indices.reference import INT32_VALUES, ROW_MULTIPLE


@dataclass
class Inputs(family.Inputs):
    """A call's arguments by name, in the order of its signature, and the results that go into attention."""

    arguments: dict[str, Any]


def _randint(low: int, high: int, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randint(low, max(high, low + 1), shape, generator=generator, dtype=torch.int64)


def _picked(values: list[int], shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.tensor(values)[_randint(0, len(values), shape, generator)]


def _int32_range(edges: list[int], shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Any int32; half of them an edge: those given, or one of the range's own."""
    edges = [INT32.min, INT32.min + 1, -2, -1, *edges, INT32.max - 1, INT32.max]
    anything = _randint(INT32.min, INT32.max + 1, shape, generator)
    return torch.where(torch.rand(shape, generator=generator) < 0.5, _picked(edges, shape, generator), anything)


def _index_pattern(case: MapCase, generator: torch.Generator) -> torch.Tensor:
    """Indices i64 [tokens, topk]. A token may name the entries that the block table covers for `limit` tokens."""
    shape, size = (case.tokens, case.topk), case.block_size
    columns = case.columns // 2 if case.blocks == "garbage" else case.columns
    limit = min(columns * size, INT32_VALUES)
    indices = _randint(0, limit, shape, generator)
    indices[torch.rand(shape, generator=generator) < 0.125] = -1
    match case.indices:
        case "none":
            indices[:] = -1
        case "edges":
            begins = [block * size for block in range(columns + 2)]
            edges = [begin + step for begin in begins for step in (-1, 0, 1) if begin + step < INT32_VALUES]
            indices = _picked(edges, shape, generator)
        case "int32 range":
            indices = _int32_range([0, limit - 1, limit, limit + 1], shape, generator)
        case "last column":
            indices[:, :-1] = -1
            indices[:, -1] = limit - 1
    return indices


def _block_pattern(case: MapCase, generator: torch.Generator) -> torch.Tensor:
    """Block table i64 [requests, columns]."""
    shape, limit = (case.requests, case.columns), INT32_VALUES // case.block_size
    blocks = _randint(0, min(limit, 10**6), shape, generator)
    match case.blocks:
        case "negative":
            blocks = torch.where(torch.rand(shape, generator=generator) < 0.5, blocks, -1 - blocks)
            blocks[:, 0] = INT32.min
        case "limit":
            edges = [limit - 2, limit - 1, limit, limit + 1, INT32.max // 2, GARBAGE, INT32.max]
            blocks = _picked([edge for edge in edges if edge <= INT32.max], shape, generator)
        case "garbage":
            blocks[:, case.columns // 2 :] = GARBAGE
        case "apart":
            limit = (INT32_VALUES - case.block_size) // (case.block_rows or case.block_size)
            edges = [0, 1, limit - 1, limit, limit + 1, INT32.max, -1]
            blocks = _picked([edge for edge in edges if edge <= INT32.max], shape, generator)
    return blocks


def build_map(case: MapCase, device: str, seed: int) -> Inputs:
    """The tensors of a case, the same for the same seed."""
    generator = seeded(seed)
    entries = case.tokens + (5 if case.request == "longer" else 0)
    request = _randint(0, case.requests, (entries,), generator)
    if case.request == "outside":
        outside = _picked([-1, case.requests, INT32.min, INT32.max, case.requests + 1], (entries,), generator)
        request[::2] = outside[::2]
    mask = torch.ones(case.tokens, dtype=torch.bool)
    if case.mask == "mixed":
        mask[1::3] = False
    elif case.mask == "none":
        mask[:] = False
    indices = _index_pattern(case, generator).int().to(device)
    blocks = _block_pattern(case, generator).int().to(device)
    placed = {
        "indices": place(indices, LAYOUTS[case.layout], 0),  # an index past a row names something
        "request": place_vector(request.int().to(device), 0),
        "block_table": place(blocks, LAYOUTS[case.table], 7),  # and so does a block past a row
    }
    if case.wrapper == CONVERT:
        arguments: dict[str, Any] = {
            "req_id": placed["request"].view,
            "block_table": placed["block_table"].view,
            "token_indices": placed["indices"].view,
            "BLOCK_SIZE": case.block_size,
            "NUM_TOPK_TOKENS": case.topk,
            "return_valid_counts": case.counts,
        }
        if case.block_rows is not None:
            arguments["BLOCK_STRIDE_ROWS"] = case.block_rows
        if case.ranks != (1, 0, 1):
            names = ("dcp_size", "dcp_rank", "cp_kv_cache_interleave_size")
            arguments |= dict(zip(names, case.ranks, strict=True))
    else:
        arguments = {
            "topk_indices": placed["indices"].view,
            "token_to_req_indices" if case.newer else "token_to_req": placed["request"].view,
            "block_table": placed["block_table"].view,
            "block_size": case.block_size,
            "is_valid_token": mask.to(device),
        }
    given = {}
    if case.out is not None:
        given["indices"] = place(torch.full_like(indices, INT32.max), LAYOUTS[case.out], INT32.max)
        given["lens"] = place_vector(torch.full_like(indices[:, 0], INT32.max), INT32.max)
        arguments |= {"out": given["indices"].view, "valid_counts_out": given["lens"].view}
    if case.compact:
        arguments["compact"] = True
    return Inputs(arguments, placed=placed, given=given)


def build_combine(case: CombineCase, device: str, seed: int) -> Inputs:
    """The tensors of a case, the same for the same seed."""
    generator = seeded(seed)
    queries = [query for query, _, _ in case.requests]
    start = [case.start + sum(queries[:request]) for request in range(len(queries) + 1)]
    shape = (sum(queries) + case.spare, case.topk if case.width is None else case.width)
    indices = _randint(0, max(1, min(case.rows, case.window_row)), shape, generator)
    if case.indices == "none":
        indices[:] = -1
    elif case.indices == "int32 range":
        indices = _int32_range([0, INT32.max - case.rows, INT32.max - case.rows + 1], shape, generator)
    elif case.indices == "edges":
        edges = [-1, 0, case.window_row - 1, case.window_row, case.window_row + 1, case.rows - 1, case.rows]
        indices = _picked(edges, shape, generator)
    lengths = torch.tensor(case.requests, dtype=torch.int32).view(-1, 3)
    placed = {
        "topk_indices": place(indices.int().to(device), LAYOUTS[case.layout], 1),
        "query_start_loc": place_vector(torch.tensor(start, dtype=torch.int32, device=device), INT32.min),
        "seq_lens": place_vector(lengths[:, 1].to(device), 10**6),
        "gather_lens": place_vector(lengths[:, 2].to(device), 10**6),
    }
    arguments: dict[str, Any] = {name: one.view for name, one in placed.items()}
    arguments |= {"window_size": case.window, "compress_ratio": case.ratio, "topk": case.topk}
    arguments |= {"M": case.rows, "N": case.window_row}
    given = {}
    if case.visible is not None:
        most = 9 if case.visible == "random" else INT32.max
        for name in ("left_visible", "right_visible"):
            drawn = _randint(0, most, shape[:1], generator)
            if case.visible != "random":
                drawn = _int32_range([0, case.window, case.window + 1], shape[:1], generator)
            placed[name] = place_vector(drawn.int().to(device), 1)
            arguments[name] = placed[name].view
    if case.images:
        arguments["max_image_tokens"] = case.images
    if case.out is not None:
        columns = -(-(case.topk + case.window + case.images) // ROW_MULTIPLE) * ROW_MULTIPLE
        apart = Layout(row_gap=ROW_MULTIPLE if case.out == "apart" else 0)
        rows = torch.full((shape[0], columns), INT32.max, dtype=torch.int32, device=device)
        given = {"indices": place(rows, apart, INT32.max), "lens": place_vector(rows[:, 0], INT32.max)}
        arguments["out"] = tuple(one.view for one in given.values())
    if case.compact:
        arguments["compact"] = True
    return Inputs(arguments, placed=placed, given=given)
