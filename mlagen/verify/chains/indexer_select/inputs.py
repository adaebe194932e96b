"""The tensors of a call that scores and selects: those of its logits, and where results and slots go."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from mlagen.verify.call import family
from mlagen.verify.call.memory import LAYOUTS, NAN, place, place_vector, seeded, unplaced
from mlagen.verify.call.patterns import INT32
from mlagen.verify.chains.indexer_select.cases import PickCase
from mlagen.verify.chains.indexer_select.invalid import PAGED
from mlagen.verify.mqa_logits import inputs as logits
from mlagen.verify.mqa_logits.cases import FlatCase, PagedCase
from mlagen.verify.mqa_logits.facts import FLAT_PAIR, PAGED_PAIR, LogitsFacts

BATCHES = 3  # rows of a page table that tokens share


@dataclass(kw_only=True)
class Inputs(family.Inputs):
    """The tensors of one call.

    Attributes:
        scored: those of the call for its logits.
        arguments: of the wrapper, by name, but for the schedule of a call over pages.
    """

    scored: logits.Inputs
    arguments: dict[str, Any]


def pairwise(case: PickCase) -> FlatCase | PagedCase:
    """The call for logits with q as a pair."""
    return replace(case.scored, wrapper=PAGED_PAIR if isinstance(case.scored, PagedCase) else FLAT_PAIR)


def tokens_of(case: PickCase) -> int:
    """Query tokens of a call."""
    return case.scored.tokens if isinstance(case.scored, FlatCase) else len(case.scored.lengths) * case.scored.next_n


def build(case: PickCase, facts: LogitsFacts, device: str, seed: int) -> Inputs:
    """The tensors of a case, the same for the same seed."""
    call = pairwise(case)
    if isinstance(call, PagedCase):
        scored = logits.build_paged(call, facts, device, seed)
    else:
        scored = logits.build_flat(call, facts, device, seed)
    arguments = {name: one for name, one in scored.arguments.items() if name != "clean_logits"}
    arguments["topk"], placed, given = case.k, dict(scored.placed), {}
    if isinstance(call, PagedCase) and call.tokenwise:  # which top-k reads one behind the other
        placed["context_lens"] = unplaced(arguments["context_lens"].contiguous())
        arguments["context_lens"] = placed["context_lens"].view
    for name, dtype, fill in (
        ("out", torch.int32, INT32.max),
        ("scores", torch.float32, NAN),
        ("slots", torch.int32, 7),
    ):
        if case.out and (name == "out" or name in case.gives):
            values = torch.full((tokens_of(case), case.k), fill, dtype=dtype, device=device)
            given[name] = place(values, LAYOUTS[case.out], fill)
            arguments[name] = given[name].view
    if case.kept:
        values = torch.full((tokens_of(case), case.kept), 7, dtype=torch.int32, device=device)
        given["candidate_blocks"] = place(values, LAYOUTS[case.out], INT32.max)
        arguments["candidate_blocks"] = given["candidate_blocks"].view
    if "slots" in case.gives:
        arguments |= _pages(case, placed, device, seeded(seed + 1))
    return Inputs(scored=scored, arguments=arguments, placed=placed, given=given)


def _pages(case: PickCase, placed: dict[str, Any], device: str, generator: torch.Generator) -> dict[str, Any]:
    """The arguments for slots."""
    tokens, found = tokens_of(case), dict[str, Any]()
    requests = len(case.scored.lengths) if isinstance(case.scored, PagedCase) else BATCHES
    if case.own_table or case.wrapper != PAGED:
        size = case.own_table or 16
        columns = 200 if size > 1 else 9000
        rows = requests if case.mapped else tokens
        table = torch.randint(-1, 1000, (rows, columns), generator=generator).int()
        placed["page_table"] = place(table.to(device), LAYOUTS["slice"], 7)
        found |= {"src_page_table": placed["page_table"].view, "page_size": size}
    if case.mapped:
        each = case.scored.next_n if isinstance(case.scored, PagedCase) else 1
        batches = torch.arange(tokens) // each if case.wrapper == PAGED else torch.arange(tokens) * 2 % BATCHES
        placed["row_to_batch"] = place_vector(batches.int().to(device), 1)
        found["row_to_batch"] = placed["row_to_batch"].view
    return found
