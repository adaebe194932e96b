"""The tensors of a call of a top-k kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mlagen.verify.call import family
from mlagen.verify.call.memory import LAYOUTS, NAN, place, place_vector, seeded
from mlagen.verify.call.patterns import INT32
from mlagen.verify.topk.cases import MergeCase, SelectCase
from mlagen.verify.topk.invalid import DECODE, PERSISTENT, PREFILL
from mlagen.verify.topk.reference import top_k

ONE = 0x3F800000  # bits of 1.0
MANY = 32  # with at least this many rows, scores are drawn over all columns at once, not over each row's own


@dataclass
class Inputs(family.Inputs):
    """A call's arguments by name, in the order of its signature, and the scores that it selects from.

    Attributes:
        arguments: of the call.
        ranges: first column and end of each row, of a selection.
        whole: rows that the candidates are of, fp32 [rows, columns]; None of a selection.
    """

    arguments: dict[str, Any]
    ranges: Sequence[tuple[int, int]] = ()
    whole: torch.Tensor | None = None


def scores_of(pattern: str, rows: int, columns: int, generator: torch.Generator) -> torch.Tensor:
    """Scores fp32 [rows, columns]."""
    shape = (rows, columns)
    normal = torch.randn(shape, generator=generator)
    chance = torch.rand(shape, generator=generator)
    places = torch.arange(columns).float().expand(shape)
    match pattern:
        case "equal":
            return torch.full(shape, 1.5)
        case "ties":
            return (normal * 3).round() / 2
        case "10 bits":
            return (ONE + torch.randint(0, 1024, shape, generator=generator)).int().view(torch.float32)
        case "ascending":
            return places.clone()
        case "descending":
            return -places
        case "special":
            for bound, value in ((0.1, -NAN), (0.2, NAN), (0.3, -torch.inf), (0.35, torch.inf)):
                normal = torch.where((chance < bound) & (chance >= bound - 0.1), value, normal)
            return normal
        case "zeros":
            values = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 2e-40, 0.0, -0.0, -0.0])
            return values[torch.randint(0, len(values), shape, generator=generator)]
        case "wide":
            return torch.ldexp(normal, torch.randint(-148, 127, shape, generator=generator))
        case "negative":
            return -normal.abs() - 1
        case "none":
            return torch.where(chance < 0.5, NAN, -torch.inf)
        case "few":
            return torch.where(places >= columns - 30, normal, -torch.inf)
        case "signs":
            return torch.randint(-1, 2, shape, generator=generator).float()
        case "half":
            return torch.where(chance < 0.5, -torch.inf, normal)
        case "17 orders":
            return normal * torch.pow(10.0, 17 * torch.rand(shape, generator=generator) - 8)
        case "misleading":  # half of the columns that a tile of 512 samples, fewer than k, are the largest
            return torch.where(places % max(columns // 32 * 2, 8) < 8, normal + 100, normal)
    return normal


def _turns(values: Sequence[int], rows: int) -> list[int]:
    return [values[row % len(values)] for row in range(rows)]


def _ranges(case: SelectCase) -> tuple[list[int], list[int], list[tuple[int, int]]]:
    """(starts, lens, ranges): as the call is given them, and the columns of each row."""
    starts, columns = _turns(case.starts or (0,), case.rows), case.columns
    requests = case.rows if case.by_token else case.rows // case.next_n
    lens = _turns(case.lens or (columns,), requests)
    ranges = []
    for row, start in enumerate(starts):
        first = min(max(start, 0), columns)
        if case.wrapper == PREFILL:
            end = min(lens[row], columns)
        elif case.by_token:
            end = first + lens[row]
        else:
            end = first + max(lens[row // case.next_n], 0) - case.next_n + row % case.next_n + 1
        bound = columns if case.most is None else min(columns, case.most)
        ranges.append((first, max(min(end, bound), first)))
    return starts, lens, ranges


def build_select(case: SelectCase, device: str, seed: int) -> Inputs:
    """The tensors of a case, the same for the same seed."""
    generator = seeded(seed)
    starts, lens, ranges = _ranges(case)
    scores = torch.full((case.rows, case.columns), NAN)
    scores[:, ::2] = torch.inf
    if len(ranges) > MANY:
        columns, bounds = torch.arange(case.columns), torch.tensor(ranges)
        inside = (columns >= bounds[:, :1]) & (columns < bounds[:, 1:])
        scores = torch.where(inside, scores_of(case.scores, case.rows, case.columns, generator), scores)
    for row, (first, end) in enumerate(ranges if len(ranges) <= MANY else ()):
        scores[row, first:end] = scores_of(case.scores, 1, end - first, generator)[0]
    placed = {"logits": place(scores.to(getattr(torch, case.dtype)).to(device), LAYOUTS[case.layout], torch.inf)}

    def vector(name: str, values: Sequence[int]) -> torch.Tensor:
        placed[name] = place_vector(torch.tensor(values, dtype=torch.int32, device=device), 1)
        return placed[name].view

    given = {}
    for name, dtype, fill in (
        ("indices", torch.int32, INT32.max),
        ("scores", torch.float32, NAN),
        ("raw", torch.int32, INT32.max),
    ):
        if case.out and (name == "indices" or name in case.gives):
            values = torch.full((case.rows, case.k), fill, dtype=dtype, device=device)
            given[name] = place(values, LAYOUTS[case.out], fill)
    logits = placed["logits"].view
    sizes = {"num_rows": case.rows, "stride0": logits.stride(0), "stride1": logits.stride(1), "topk": case.k}
    arguments: dict[str, Any] = {"logits": logits}
    if case.wrapper == PREFILL:
        arguments |= {"row_starts": vector("starts", starts), "row_ends": vector("ends", lens)}
        arguments |= {"indices": given["indices"].view, **sizes}
    elif case.wrapper == DECODE:
        lengths = vector("lens", lens)
        lengths = lengths.view(-1, case.next_n) if case.by_token else lengths
        arguments |= {"next_n": case.next_n, "seq_lens": lengths, "indices": given["indices"].view, **sizes}
    elif case.wrapper == PERSISTENT:
        lengths = vector("lens", lens)
        arguments |= {"lengths": lengths.view(-1, case.next_n) if case.by_token else lengths}
        arguments |= {"indices": given["indices"].view, "workspace": None, "k": case.k}
        arguments |= {"max_seq_len": case.columns if case.most is None else case.most}
    else:
        arguments = {"input": logits, **_pages(case, starts, lens, generator, vector, placed, device)}
        arguments |= {"out": given["indices"].view} if "indices" in given else {}
        arguments |= {"out_raw_indices": given["raw"].view} if "raw" in given else {}
    if "scores" in given:
        arguments["scores"] = given["scores"].view
    return Inputs(arguments, ranges=ranges, placed=placed, given=given)


def _pages(case, starts, lens, generator, vector, placed, device) -> dict[str, Any]:  # type: ignore[no-untyped-def]
    """The arguments of top_k_page_table_transform between its scores and its results."""
    batches = case.rows if case.batches == "own" else 3
    limit = 2**31 // case.page_size
    table = torch.randint(0, min(limit, 10**6), (batches, case.pages), generator=generator)
    if case.blocks == "limit":
        edges = torch.tensor([0, limit - 1, min(limit, INT32.max), INT32.max, -1, INT32.min])
        table = edges[torch.randint(0, len(edges), table.shape, generator=generator)]
    placed["page_table"] = place(table.int().to(device), LAYOUTS["slice"], 7)
    arguments: dict[str, Any] = {
        "src_page_table": placed["page_table"].view,
        "lengths": vector("lens", lens),
        "k": case.k,
    }
    if case.batches != "own":
        values = (2, 0, 1) if case.batches == "mapped" else (-1, 3, 0, INT32.min, INT32.max)
        arguments["row_to_batch"] = vector("row_to_batch", _turns(values, case.rows))
    if case.starts is not None:
        arguments["row_starts"] = vector("starts", starts)
    if case.page_starts is not None:
        arguments["page_table_row_starts"] = vector("page_starts", _turns(case.page_starts, case.rows))
    return {**arguments, "page_size": case.page_size}


def build_merge(case: MergeCase, device: str, seed: int) -> Inputs:
    """The tensors of a case: each rank's top-k of its own columns of whole rows, the same for the same seed."""
    generator = seeded(seed)
    whole = scores_of(case.scores, case.rows, case.columns, generator)
    shape = (case.rows, case.ranks * case.k)
    ids, scores = torch.full(shape, -1, dtype=torch.int32), torch.full(shape, NAN)
    columns = torch.arange(case.columns)
    for rank in range(case.ranks):
        own = columns[columns // case.interleave % case.ranks == rank]
        indices, found = top_k(whole[:, own], case.k)  # [rows, k]
        at = slice(rank * case.k, (rank + 1) * case.k)
        there = indices >= 0
        if len(own):
            ids[:, at] = torch.where(there, own[indices.clamp(min=0).long()], -1).int()
        scores[:, at] = torch.where(there, found, torch.inf)  # +inf counts nothing at a negative id
    if case.spread:
        order = torch.randperm(shape[1], generator=generator)
        ids, scores = ids[:, order], scores[:, order]
    layout = LAYOUTS[case.layout]
    placed = {"scores": place(scores.to(device), layout, torch.inf), "ids": place(ids.to(device), layout, 1)}
    arguments: dict[str, Any] = {"scores": placed["scores"].view, "ids": placed["ids"].view, "k": case.k}
    given = {}
    if case.given:
        results = (case.rows, case.k)
        filled = torch.full(results, INT32.max, dtype=torch.int32, device=device)
        given["indices"] = place(filled, LAYOUTS[case.out], INT32.max)
        given["scores"] = place(torch.full(results, NAN, device=device), LAYOUTS[case.out], NAN)
        arguments |= {"out": given["indices"].view, "out_scores": given["scores"].view}
    return Inputs(arguments, whole=whole, placed=placed, given=given)
