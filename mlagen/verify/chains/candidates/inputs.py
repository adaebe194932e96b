"""The tensors of calls around candidate blocks. Keys in no block of a token that sees them are poison."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from mlagen.layout.codec import planes_of
from mlagen.verify.call import family
from mlagen.verify.call.memory import LAYOUTS, NAN, Placed, place, place_vector, seeded, unplaced
from mlagen.verify.call.patterns import INT32
from mlagen.verify.chains.candidates.cases import BlocksCase, CandidateCase
from mlagen.verify.chains.candidates.invalid import PICKS, WITHOUT
from mlagen.verify.chains.candidates.reference import keys_of
from mlagen.verify.mqa_logits import inputs as logits
from mlagen.verify.mqa_logits.cases import FlatCase, PagedCase
from mlagen.verify.mqa_logits.facts import FLAT_PAIR, PAGED_PAIR, LogitsFacts, poison_byte
from mlagen.verify.topk.inputs import scores_of

PAST = (3, INT32.max, INT32.min, 5, 2**28)  # blocks that no token has, from its first missing one on


@dataclass(kw_only=True)
class Inputs(family.Inputs):
    """The tensors of one call.

    Attributes:
        arguments: of the wrapper, by name.
        scored: those of the call for logits of all keys; None for the selection of blocks.
        ranges: columns, or keys, that each row or token sees.
    """

    arguments: dict[str, Any]
    scored: logits.Inputs | None = None
    ranges: list[tuple[int, int]] = field(default_factory=list)


def _turns(values: tuple[int, ...], count: int) -> list[int]:
    return [values[at % len(values)] for at in range(count)]


def build_blocks(case: BlocksCase, block: int, device: str, seed: int) -> Inputs:
    """The tensors of a case, the same for the same seed."""
    generator, groups = seeded(seed), case.rows // case.repeat
    ends = _turns((case.columns,) if case.ends is None else case.ends, groups)
    starts = _turns(case.starts or (0,), groups)
    found = torch.full((case.rows, case.columns), NAN)
    found[:, ::2] = torch.inf
    ranges = []
    for row in range(case.rows):
        first = min(max(starts[row // case.repeat], 0), case.columns)
        end = max(first, min(ends[row // case.repeat], case.columns))
        one = scores_of(case.scores, 1, end - first, generator)[0]
        if case.scores == "infinite":
            one = torch.where(torch.arange(end - first) % 2 == 0, torch.inf, one)
        found[row, first:end] = one
        ranges.append((first, end))
    placed = {"logits": place(found.to(getattr(torch, case.dtype)).to(device), LAYOUTS[case.layout], torch.inf)}
    for name, values, given in (("row_ks", starts, case.starts is not None), ("row_ke", ends, True)):
        if given:
            placed[name] = place_vector(torch.tensor(values, dtype=torch.int32, device=device), 1)
    out = torch.full((case.rows, case.k), 7, dtype=torch.int32, device=device)
    taken = {"out": place(out, LAYOUTS[case.out], INT32.max)}
    arguments: dict[str, Any] = {
        "logits": placed["logits"].view,
        "row_ks": placed["row_ks"].view if "row_ks" in placed else None,
        "row_ke": placed["row_ke"].view,
        "topk_blocks": case.k,
        "block_size": block,
        "out": taken["out"].view,
    }
    if case.repeat > 1 or not case.by_name:
        arguments["row_repeat"] = case.repeat
    return Inputs(arguments=arguments, ranges=ranges, placed=placed, given=taken)


def ranges_of(case: FlatCase | PagedCase, arguments: dict[str, Any]) -> list[tuple[int, int]]:
    """The keys that each token sees."""
    if isinstance(case, PagedCase):
        most = arguments["block_table"].shape[1] * case.block_size
        return [(0, min(end, most)) for end in logits.sees(case, arguments["context_lens"]).tolist()]
    starts, ends = (arguments[name].tolist() for name in ("cu_seq_len_k_start", "cu_seq_len_k_end"))
    firsts = [min(max(start, 0), case.keys) for start in starts]
    return [(first, max(first, min(end, case.keys))) for first, end in zip(firsts, ends, strict=True)]


def _blocks(case: CandidateCase, block: int, keys: int, generator: torch.Generator) -> torch.Tensor:
    """The blocks of a token that sees so many keys, i64 [case.blocks]."""
    count = -(-keys // block)
    found = torch.full((case.blocks,), -1)
    if case.pattern == "none" or not case.blocks:
        return found
    order = torch.randperm(count, generator=generator)[: case.blocks]
    if case.pattern == "all":
        order = torch.arange(count)[: case.blocks]
    elif count and case.pattern != "beyond":
        order = torch.unique(torch.cat([order[: case.blocks - 1], torch.tensor([count - 1])]))
    if case.pattern in ("unsorted", "holes"):
        order = order[torch.randperm(len(order), generator=generator)]
    if case.pattern == "holes":
        order[1::3] = -1
    if case.pattern == "beyond":
        past = torch.tensor([count, count + 1, *PAST])[: case.blocks]
        order = torch.cat([order.sort().values[: case.blocks - len(past)], past])
    found[: len(order)] = order
    return found


def build(case: CandidateCase, facts: LogitsFacts, block: int, device: str, seed: int) -> Inputs:
    """The tensors of a case, the same for the same seed."""
    call = replace(case.scored, wrapper=PAGED_PAIR if isinstance(case.scored, PagedCase) else FLAT_PAIR)
    if isinstance(call, PagedCase):
        scored = logits.build_paged(call, facts, device, seed)
    else:
        scored = logits.build_flat(call, facts, device, seed)
    placed = dict(scored.placed)
    arguments = {name: one for name, one in scored.arguments.items() if name not in WITHOUT | {"clean_logits"}}
    dtype = arguments.pop("logits_dtype", None)
    if isinstance(call, PagedCase) and call.tokenwise and case.wrapper in PICKS:
        placed["context_lens"] = unplaced(arguments["context_lens"].contiguous())
        arguments["context_lens"] = placed["context_lens"].view
    ranges, generator = ranges_of(call, arguments), seeded(seed + 1)
    rows = [_blocks(case, block, end - first, generator) for first, end in ranges]
    blocks = torch.stack(rows).int() if rows else torch.empty((0, case.blocks), dtype=torch.int32)
    placed["blocks"] = place(blocks.to(device), LAYOUTS[case.memory], 0)
    arguments["candidate_blocks"] = placed["blocks"].view
    if case.check != "graph":  # which replays on other ranges
        _poison(call, facts, placed, arguments, _referenced(call, blocks, ranges, block))
    given = {}
    if case.wrapper in PICKS:
        arguments["topk"] = case.k
        for name, kind, fill in (("out", torch.int32, INT32.max), ("scores", torch.float32, NAN)):
            if case.out and (name == "out" or name in case.gives):
                values = torch.full((len(rows), case.k), fill, dtype=kind, device=device)
                given[name] = place(values, LAYOUTS[case.out], fill)
                arguments[name] = given[name].view
    elif dtype is not None:
        arguments["logits_dtype"] = dtype
    return Inputs(arguments=arguments, scored=scored, ranges=ranges, placed=placed, given=given)


def _referenced(
    case: FlatCase | PagedCase, blocks: torch.Tensor, ranges: list[tuple[int, int]], block: int
) -> list[torch.Tensor]:
    """Which keys any token refers to, of each request; flat keys are of one."""
    counts = [max(length, 0) for length in case.lengths] if isinstance(case, PagedCase) else [case.keys]
    found = [torch.zeros(count, dtype=torch.bool) for count in counts]
    for token, (first, end) in enumerate(ranges):
        keys = keys_of(blocks[token], block, end - first)
        keys = keys[keys >= 0] + first
        request = token // case.next_n if isinstance(case, PagedCase) else 0
        found[request][keys[keys < counts[request]]] = True
    return found


def _poison(
    case: FlatCase | PagedCase, facts: LogitsFacts, placed: dict[str, Placed], arguments: dict[str, Any],
    referenced: list[torch.Tensor],
) -> None:  # fmt: skip
    """Make keys NaN, or large where their dtype has none, that no token refers to."""
    byte = poison_byte(facts)
    if isinstance(case, FlatCase):
        rows = (~referenced[0]).to(placed["k"].view.device)
        for name, fill in (("k", byte), ("k_scale", 0xFF)):
            view = placed[name].view
            view[rows] = fill
            placed[name] = replace(placed[name], before=placed[name].buffer.clone())
        return
    cache, table, size = placed["cache"], arguments["block_table"].long(), case.block_size
    views = planes_of(facts.layout, cache.view[:, :, 0], size)
    for request, used in enumerate(referenced):
        at = (~used).nonzero()[:, 0].to(table.device)
        pages = table[request, at // size]
        inside = (pages >= 0) & (pages < cache.view.shape[0])
        where = (pages[inside], (at % size)[inside])
        for one, fill in ((facts.keys, byte), (facts.scales, 0xFF)):
            views[one.plane][..., one.offset : one.offset + one.nbytes][where] = fill
    if cache.before is not None:
        placed["cache"] = replace(cache, before=cache.buffer.clone())
