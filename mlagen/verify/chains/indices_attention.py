"""Index kernels before attention: attention over their indices and lengths, against the keys that count."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from mlagen.verify.call.case import Case, CaseFailedError
from mlagen.verify.call.family import Family, Results, Run
from mlagen.verify.call.memory import NAN
from mlagen.verify.call.results import Figure
from mlagen.verify.call.subject import Subject
from mlagen.verify.checks import out_rope
from mlagen.verify.checks.decode import FLASH as CACHE
from mlagen.verify.indices import inputs as indices_inputs
from mlagen.verify.indices.family import INDICES
from mlagen.verify.indices.invalid import COMBINE, CONVERT, GLOBAL, SHORT
from mlagen.verify.indices.reference import combine_indices
from mlagen.verify.sparse_decode.cases import CacheProblem, Listing, SparseDecodeCase
from mlagen.verify.sparse_decode.facts import CacheFacts
from mlagen.verify.sparse_decode.family import SPARSE_DECODE
from mlagen.verify.sparse_decode.inputs import build as build_decode
from mlagen.verify.sparse_fwd.cases import Problem, SparseFwdCase
from mlagen.verify.sparse_fwd.family import SPARSE_FWD
from mlagen.verify.sparse_fwd.inputs import Inputs as RowInputs
from mlagen.verify.sparse_fwd.invalid import FLASH as ROWS

NAME = "indices_attention"
TOKENS, TOPK, HEADS, BLOCK_SIZE = 5, 40, 3, 7
OUTSIDE = (9999, 2**31 - 1)  # indices past any block table and any request's rows


@dataclass
class Attended:
    """Attention that an index kernel's results go into.

    Attributes:
        family: its family.
        case: of that family, how it is called.
        inputs: with the indices that count, where they stand, and no lengths.
    """

    family: Family
    case: Case
    inputs: Any


@dataclass(kw_only=True)
class Inputs(indices_inputs.Inputs):
    """An index kernel's arguments, and the attention over its results."""

    attended: Attended


@dataclass(frozen=True)
class ChainCase(Case):
    """A call that feeds its indices and lengths to the package's own attention.

    Attributes:
        wrapper: the wrapper called.
        holes: entries between the indices that count: "holes" (-1) or "bounds" (indices past their bound).
        compact: compact of the call.
        block_rows: rows from a block to the next, of attention over rows; None: attention over the cache.
        ranks: number of ranks that share the requests' tokens, and of neighbouring tokens on one; None: no ranks.
    """

    wrapper: str
    holes: str
    compact: bool
    block_rows: int | None = None
    ranks: tuple[int, int] | None = None


def cases(spec: Mapping[str, Any], device: str) -> list[Case]:
    """All cases of a package that has index kernels and attention; see mlagen.verify.families."""
    wrappers, found = spec["wrappers"], list[Case]()
    for wrapper in (GLOBAL, CONVERT, COMBINE):
        attention = ROWS if wrapper == COMBINE else CACHE
        for holes, compact in itertools.product(("holes", "bounds"), (False, True)):
            name = f"{SHORT[wrapper]}: attention, {holes}{', compact' if compact else ''}"
            promise = "its lengths are topk_length of the package's attention: no key is dropped, none is added"
            if {wrapper, attention} <= {*wrappers}:
                found.append(ChainCase(name, promise, wrapper, holes, compact, check="chained"))
            if wrapper == CONVERT and {wrapper, ROWS} <= {*wrappers}:
                name = name.replace("attention", "attention over blocks apart")
                found.append(ChainCase(name, promise, wrapper, holes, compact, 14, check="chained"))
    said = spec["attention"] or {}
    ranks = [] if said.get("out_quant") else _rank_cases(wrappers, said.get("attn_sink"))  # parts in e4m3 do not merge
    return [*found, *ranks]


def _rank_cases(wrappers: Collection[str], sink: str | None) -> Iterator[ChainCase]:
    """Cases of ranks that share a context. A sink would have to enter once, in the merge."""
    if CONVERT not in wrappers or sink == "required":
        return
    for count, interleave in itertools.product((2, 4, 8), (1, 16, 64)):
        name = f"{SHORT[CONVERT]}: attention of {count} ranks by {interleave}"
        promise = "attention of each rank over its own slots merges to attention of all, with 0 where a rank has none"
        ranks = (count, interleave)
        if CACHE in wrappers:
            yield ChainCase(name, promise, CONVERT, "holes", True, ranks=ranks, check="ranks")
        elif ROWS in wrappers:
            yield ChainCase(name, promise, CONVERT, "holes", True, 14, ranks, check="ranks")


def _build(subject: Subject, case: ChainCase, seed: int) -> Inputs:
    """An index kernel's arguments, and attention over the keys that its indices should name."""
    if case.wrapper == COMBINE:
        return _combined(case, subject, seed)
    return _mapped(case, subject, _over_rows(subject, seed) if case.block_rows else _over_cache(subject, seed), seed)


def _attention(run: Run[ChainCase, Inputs]) -> list[Figure]:
    """Attention with the kernel's indices and lengths, as attention over the keys that count."""
    attended = run.inputs.attended
    attention: Run[Any, Any] = Run(attended.family, run.subject, attended.case, attended.inputs)
    return attention.compare(attention.on(_given(attended, run.call())).call())


def _given(attended: Attended, found: Results) -> Any:
    """The inputs of attention with a kernel's indices and lengths."""
    slots, lens = found["indices"][:, None], found["lens"]
    if attended.family is SPARSE_DECODE:
        return replace(attended.inputs, lists=[replace(attended.inputs.lists[0], indices=slots, length=lens)])
    return replace(attended.inputs, indices=slots, length=lens)


def _ranks(run: Run[ChainCase, Inputs]) -> list[Figure]:
    """Attention of each rank over its own slots, merged by the LSE as engines do, as attention over all slots."""
    attended, shared = run.inputs.attended, run.case.ranks
    assert shared is not None
    attention: Run[Any, Any] = Run(attended.family, run.subject, attended.case, attended.inputs)
    parts = []
    for rank in range(shared[0]):
        found = run.call(dcp_size=shared[0], dcp_rank=rank, cp_kv_cache_interleave_size=shared[1])
        part = attention.on(_given(attended, found)).call()
        none = found["lens"] == 0
        if not none.any() or part["out"][none].any() or part["lse"][none].isfinite().any():
            raise CaseFailedError("a token without a slot on a rank has another out than 0, or a finite LSE")
        parts.append(part)
    return attention.compare(_merged(parts, run.subject.facts.lse_base))


def _merged(parts: list[Results], base: str) -> Results:
    """The whole of attention over parts of the keys, merged in float64."""
    unit = math.log(2) if base == "2" else 1.0
    lses = torch.stack([part["lse"].double() * unit for part in parts])
    lses = torch.where(lses.isfinite(), lses, -math.inf)
    lse = lses.logsumexp(0)
    weights = (lses - lse).nan_to_num(nan=-math.inf).exp()
    if weights.dim() == 4:  # of pages: [rank, request, head, token]
        weights = weights.transpose(2, 3)
    outs = torch.stack([part["out"].double() for part in parts])
    whole = dict(parts[0])
    whole["out"] = (weights[..., None] * outs).sum(0).to(parts[0]["out"].dtype)
    whole["lse"] = torch.where(lse.isfinite(), (lse / unit).float(), parts[0]["lse"])
    if "max_logits" in whole:
        whole["max_logits"] = torch.stack([part["max_logits"] for part in parts]).amax(0)
    return whole


def _over_cache(subject: Subject, seed: int) -> Attended:
    known = CacheFacts.of(subject.package.SPEC["spec"])
    sink = "random" if known.facts.sink == "required" else None
    heads = subject.fitting(known.facts.whole_groups(HEADS))
    problem = CacheProblem(TOKENS, 1, heads, Listing(TOPK, 60, BLOCK_SIZE), None, sink)
    inputs = build_decode(problem, known, subject.device, seed)
    _punch(inputs.lists[0].indices[:, 0])
    inputs.placed.clear()
    return Attended(SPARSE_DECODE, SparseDecodeCase("", "", problem, multiprocessors=1), inputs)


def _rows_attended(subject: Subject, rows: int, indices: torch.Tensor, seed: int) -> Attended:
    """Attention over rows. Only those that the indices i32 [tokens, any] name are numbers."""
    facts, device, generator = subject.facts, subject.device, torch.Generator().manual_seed(seed)
    dtype, size, heads = getattr(torch, facts.dtype), facts.block_size or 1, subject.fitting(facts.whole_groups(HEADS))
    kv = torch.full((-(-rows // size), size, facts.d_qk), NAN, dtype=dtype, device=device)
    named = torch.unique(indices[indices >= 0].long())
    values = torch.randn(len(named), facts.d_qk, generator=generator).to(dtype).to(device)
    kv[named.to(device) // size, named.to(device) % size] = values
    q = torch.randn(len(indices), heads, facts.d_qk, generator=generator).to(dtype).to(device)
    sink = torch.randn(heads, generator=generator).to(device) if facts.sink == "required" else None
    scale = facts.d_qk**-0.5
    rotation, _ = out_rope.draw(facts, "any", len(indices), device, generator)
    inputs = RowInputs(q, kv, indices[:, None].to(device), scale, scale, None, sink, rotation)
    problem = Problem(len(indices), heads, indices.shape[1], rows)
    return Attended(SPARSE_FWD, SparseFwdCase("", "", ROWS, problem, multiprocessors=1), inputs)


def _over_rows(subject: Subject, seed: int) -> Attended:
    """Rows of pages between which another layer's lie."""
    generator = torch.Generator().manual_seed(seed)
    pages = torch.randint(0, 9, (TOKENS, TOPK), generator=generator)
    slots = pages * 2 * BLOCK_SIZE + torch.randint(0, BLOCK_SIZE, pages.shape, generator=generator)
    _punch(slots)
    return _rows_attended(subject, 9 * 2 * BLOCK_SIZE, slots.int(), seed)


def _punch(slots: torch.Tensor) -> None:
    """Takes out every third index, so that fewer count than the last one's place says, and the last of one token."""
    slots[:, ::3] = -1
    slots[1, TOPK // 2 :] = -1


def _mapped(case: ChainCase, subject: Subject, attended: Attended, seed: int) -> Inputs:
    """Top-k indices that a block table of any order maps to the slots that attention is over."""
    generator = torch.Generator().manual_seed(seed + 1)
    whole = case.block_rows or BLOCK_SIZE
    slots = attended.inputs.lists[0].indices if attended.family is SPARSE_DECODE else attended.inputs.indices
    slots = slots[:, 0].cpu().long()
    pages = -(-int(slots.max() + 1) // whole)
    table = torch.stack([torch.randperm(pages, generator=generator) for _ in range(3)])
    request = torch.arange(TOKENS) % len(table)
    column = table.argsort(1)[request[:, None], (slots // whole).clamp(0)]
    outside = torch.tensor(OUTSIDE)[torch.arange(slots.numel()) % len(OUTSIDE)].view(slots.shape)
    hole = outside if case.holes == "bounds" else torch.full_like(slots, -1)
    own = column * BLOCK_SIZE + slots % whole
    if case.ranks is not None:
        own = _shared_among(case.ranks, own, generator)
    indices = torch.where(slots >= 0, own, hole).int().to(subject.device)
    request, table = request.int().to(subject.device), table.int().to(subject.device)
    if case.wrapper == CONVERT:
        arguments: dict[str, Any] = {"req_id": request, "block_table": table, "token_indices": indices}
        arguments |= {"BLOCK_SIZE": BLOCK_SIZE, "NUM_TOPK_TOKENS": TOPK, "return_valid_counts": True}
        arguments |= {"BLOCK_STRIDE_ROWS": case.block_rows} if case.block_rows else {}
    else:
        arguments = {"topk_indices": indices, "token_to_req": request, "block_table": table, "block_size": BLOCK_SIZE}
        arguments |= {"is_valid_token": torch.ones(TOKENS, dtype=torch.bool, device=subject.device)}
    return Inputs(arguments | {"compact": case.compact}, attended=attended)


def _shared_among(ranks: tuple[int, int], local: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Indices within a request, from indices within a rank. Each query token has no slot on one of the ranks."""
    count, interleave = ranks
    owner = torch.randint(0, count - 1, local.shape, generator=generator)
    owner = (owner + 1 + torch.arange(len(local))[:, None]) % count  # token i has no slot on rank i
    return local // interleave * count * interleave + owner * interleave + local % interleave


def _combined(case: ChainCase, subject: Subject, seed: int) -> Inputs:
    """Three requests' compressed rows and windows. One window is not gathered as far as it reaches."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([(2, 40, 8), (2, 30, 3), (2, 90, 12)], dtype=torch.int32)
    rows, window_row, topk = 24, 12, 10
    indices = torch.randint(0, window_row, (6, topk), generator=generator)
    indices[:, ::3] = -1 if case.holes == "holes" else rows
    if case.holes == "bounds":
        indices[:, 1::3] = window_row
    arguments: dict[str, Any] = {
        "topk_indices": indices.int(),
        "query_start_loc": torch.tensor([0, 2, 4, 6], dtype=torch.int32),
        "seq_lens": lengths[:, 1].contiguous(),
        "gather_lens": lengths[:, 2].contiguous(),
        "window_size": 8,
        "compress_ratio": 2,
        "topk": topk,
        "M": rows,
        "N": window_row,
    }
    named, _ = combine_indices(**arguments)
    attended = _rows_attended(subject, len(lengths) * rows, named, seed)
    given = {name: one.to(subject.device) if isinstance(one, torch.Tensor) else one for name, one in arguments.items()}
    return Inputs({**given, "compact": case.compact}, attended=attended)


INDICES_ATTENTION = Family(
    name=NAME,
    kinds=(ChainCase,),
    cases=cases,
    build=_build,
    call=INDICES.call,
    compare=INDICES.compare,
    checks={"chained": _attention, "ranks": _ranks},
    valid=INDICES.valid,
)
