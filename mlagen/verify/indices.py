"""The index kernels: their cases, their reference and the code that runs them. Every comparison is exact.

What must not matter is poisoned: the elements around and between the rows of a buffer name something, and so do the
entries of a block table past its last column, so that a read out of bounds shows; outputs start as INT32_MAX.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

from mlagen.verify.cases import Case
from mlagen.verify.checks import CaseFailedError, Subject, poisoned_allocations
from mlagen.verify.facts import Facts
from mlagen.verify.inputs import INT32, LAYOUTS, Placed, allocate, place
from mlagen.verify.refusals import Change
from mlagen.verify.results import Figure

GLOBAL = "compute_global_topk_indices_and_lens"
CONVERT = "triton_convert_req_index_to_global_index"
COMBINE = "combine_topk_swa_indices"
SHORT = {GLOBAL: "global", CONVERT: "convert", COMBINE: "combine"}
INT32_VALUES = 2**31  # slots and rows that an int32 names
ROW_MULTIPLE = 128  # of a combined row's length
GARBAGE = 2147480000  # what unused entries of a block table hold


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


@dataclass(frozen=True)
class MapCase(Case):
    """A call that maps a request's indices to slots of the cache.

    Attributes:
        wrapper: the wrapper called.
        tokens, topk: sizes of the indices.
        requests, columns: sizes of the block table.
        block_size: tokens a block.
        indices: pattern of the indices: "random", "none", "edges" (of blocks), "int32 range" or "last lane".
        blocks: pattern of the block table: "random", "negative", "limit" (of int32) or "garbage" in unused columns.
        request: pattern of the tokens' requests: "random", "outside" or "longer" (than the tokens).
        mask: pattern of is_valid_token: "mixed", "all" or "none".
        counts: return_valid_counts.
        repeat: how often the tokens come, without memory of their own but for the results.
        layout, table: layout in memory of the indices and of the block table, a key of mlagen.verify.inputs.LAYOUTS.
        check: what is asked of the result, a key of CHECKS.
    """

    wrapper: str
    tokens: int
    topk: int
    requests: int = 4
    columns: int = 9
    block_size: int = 64
    indices: str = "random"
    blocks: str = "random"
    request: str = "random"
    mask: str = "mixed"
    counts: bool = True
    repeat: int = 1
    layout: str = "contiguous"
    table: str = "slice"
    check: str = "reference"


@dataclass(frozen=True)
class CombineCase(Case):
    """A call of combine_topk_swa_indices.

    Attributes:
        requests: (tokens of the query, of the sequence, gathered) of each request.
        topk, window, ratio: topk, window_size and compress_ratio.
        width: columns of topk_indices; None: topk.
        rows, window_row: M and N.
        start: first value of query_start_loc.
        spare: tokens past the last request.
        indices: pattern of the top-k indices: "random", "none" or "int32 range".
        layout: layout in memory of topk_indices.
        check: what is asked of the result, a key of CHECKS.
    """

    requests: tuple[tuple[int, int, int], ...]
    topk: int = 24
    window: int = 16
    ratio: int = 4
    width: int | None = None
    rows: int = 1000
    window_row: int = 600
    start: int = 0
    spare: int = 0
    indices: str = "random"
    layout: str = "slice"
    check: str = "reference"


@dataclass(frozen=True)
class IndicesRefusalCase(Case):
    """A call that a wrapper must refuse with a ValueError or TypeError that names the argument."""

    wrapper: str
    change: Change


KINDS = (MapCase, CombineCase, IndicesRefusalCase)


def _map_cases(wrapper: str, big: bool) -> Iterator[MapCase]:
    tokens = 67 if big else 4
    base = MapCase("", "", wrapper, tokens, 100)

    def case(name: str, promise: str, **changes: Any) -> MapCase:
        return replace(base, name=f"{SHORT[wrapper]}: {name}", promise=promise, **changes)

    yield case("typical", "an ordinary call gives the reference's slots and counts", topk=512 if big else 100)
    for topk in (1, 17, 512, 516, 1024, 2047, 2048, 2176, 4100):
        yield case(f"topk: {topk}", "any number of indices a token", tokens=tokens if big else 2, topk=topk)
    yield case("topk: none", "no indices a token: nothing to name", topk=0)
    for size in (1, 2, 53, 69, 256, 2**30, 2**31 - 1):
        yield case(f"block size: {size}", "any block size", block_size=size, indices="edges")
    yield case("tokens: one", "a batch of one", tokens=1, topk=2048)
    yield case("tokens: none", "an empty batch gives empty results", tokens=0)
    for pattern, promise in {
        "none": "a batch whose indices are all -1 names nothing",
        "int32 range": "any negative index, and any past the block table's columns, names nothing",
        "edges": "the first and last token of a block, and of the block table's columns",
        "last lane": "the one index that counts stands in the last lane",
    }.items():
        yield case(f"indices: {pattern}", promise, indices=pattern)
    yield case("request: outside", "a request that is not in the block table names nothing", request="outside")
    yield case("request: longer", "requests past the last token are not looked at", request="longer")
    yield case("blocks: negative", "a negative block names nothing", blocks="negative", indices="edges")
    for size in (1, 2, 53):
        yield case(
            f"blocks: limit, size {size}",
            "a block names something if and only if all its slots are int32",
            blocks="limit",
            block_size=size,
            indices="edges",
        )
    yield case("blocks: garbage", "unused entries of the block table do no harm", blocks="garbage")
    yield case("blocks: none", "a block table without columns names nothing", columns=0)
    yield case("requests: none", "a block table without rows names nothing", requests=0)
    for part in ("layout", "table"):
        for layout in ("slice", "odd", "far"):
            what = "indices" if part == "layout" else "block table"
            changes = {part: layout, "topk": 100 if part == "layout" else 99}
            if layout == "far":
                changes |= {"tokens": 3, "requests": 3}
            yield case(f"layout: {what} {layout}", f"rows of the {what} may lie apart, 2^31 elements too", **changes)
    if wrapper == GLOBAL:
        yield case("mask: none", "padding tokens count 0, their indices are mapped all the same", mask="none")
    else:
        yield case("without counts", "slots alone", counts=False)
    yield case("manners: torch's defaults", "torch's default device is neither read nor changed", check="defaults")
    if big:
        for count, topk in ((1025, 512), (1025, 1024), (1030, 2048), (4099, 516), (1025, 2051)):
            yield case(f"many tokens: {count}x{topk}", "a large batch", tokens=count, topk=topk)
        yield case("manners: graph", "a captured call replays on new inputs", check="graph")
        yield case(
            "offsets: slots past 2^31 elements",
            "offsets of the slots are 64 bits wide",
            tokens=1,
            repeat=INT32_VALUES // 2048 + 9,
            topk=2048,
            mask="all",
            check="repeated",
        )


def _combine_cases(topk: int, window: int, big: bool) -> Iterator[CombineCase]:
    mixed = ((3, 3, 3), (1, 400, 17), (7, 90, 60), (2, 17, 17))
    base = CombineCase("", "", mixed)

    def case(name: str, promise: str, **changes: Any) -> CombineCase:
        return replace(base, name=f"combine: {name}", promise=promise, **changes)

    yield case("typical", "an ordinary call gives the reference's rows and lengths")
    yield case(
        "model's own sizes",
        "the model's own topk and window",
        requests=((40, 20000, 500), (30, 30, 30)) if big else ((2, 20000, 130),),
        topk=topk,
        window=window,
    )
    for ratio in (1, 2, 7, 128):
        yield case(f"ratio: {ratio}", "a compressed row holds ratio tokens", ratio=ratio, requests=((5, 258, 258),))
    for count, width in ((0, 24), (0, 0), (1, 1), (24, 7), (24, 16), (24, 40), (17, 17), (120, 100), (112, 112)):
        yield case(f"topk: {count} of {width}", "topk_indices may hold more or fewer columns", topk=count, width=width)
    for size in (0, 1, 104, 105, 300):
        yield case(f"window: {size}", "any window, and a row that is full", window=size)
    yield case("window: nothing at all", "neither top-k nor window", topk=0, window=0)
    longer = tuple((1 + number % 3, 20 + 7 * number, 20) for number in range(21))
    for name, requests in {
        "one": ((9, 30, 30),),
        "single tokens": ((1, 1, 1),) * 17,
        "many": longer,
        "empty ones": ((0, 5, 5), (0, 0, 0), (3, 9, 9), (0, 7, 7), (0, 4, 4), (2, 8, 8), (0, 3, 3)),
        "all empty": ((0, 5, 5), (0, 6, 6)),
        "from the first position": ((20, 20, 20),),
        "sequence shorter than its query": ((6, 4, 4), (3, 0, 0), (2, 2, 2)),
        "gathered in part": ((3, 50, 18), (4, 70, 19)),
        "of a length of two": ((17, 17, 17), (16, 16, 16), (15, 15, 15)),
    }.items():
        yield case(f"requests: {name}", "a token is its own request's, whatever the others are", requests=requests)
    yield case("requests: none", "tokens without a request have nothing", requests=(), spare=3)
    yield case("tokens: none", "an empty batch gives empty results", requests=())
    yield case("tokens: past the last request", "they have nothing", spare=19)
    yield case("start", "query_start_loc counts from its first value", start=12345)
    for pattern, promise in {
        "none": "top-k indices of -1 stay -1",
        "int32 range": "a negative index, and one whose row is no int32, is -1",
    }.items():
        yield case(f"indices: {pattern}", promise, indices=pattern, rows=10**8, requests=longer)
    yield case("rows: 0 and 0", "M and N may be 0", rows=0, window_row=0)
    yield case("rows: to the end of int32", "the largest M", rows=INT32_VALUES // 4, window_row=INT32_VALUES // 8)
    for layout in ("contiguous", "odd", "far"):
        requests = ((2, 40, 40), (1, 50, 50)) if layout == "far" else mixed
        yield case(f"layout: {layout}", "rows may lie apart, 2^31 elements too", layout=layout, requests=requests)
    yield case("manners: torch's defaults", "torch's default device is neither read nor changed", check="defaults")
    if big:
        sizes = {"topk": topk, "window": window}
        yield case("many tokens: one request", "a long prefill", requests=((9000, 9000, 9000),), **sizes)
        many = tuple((n % 5, 300 + 31 * n, 200) for n in range(3000))
        yield case("many tokens: many requests", "thousands of requests", requests=many, rows=600_000, **sizes)
        yield case("manners: graph", "a captured call replays on new inputs", check="graph")


def _every_other(tensor: torch.Tensor) -> torch.Tensor:
    """The same shape with a stride of 2 in the last dimension."""
    return tensor.repeat_interleave(2, dim=-1)[..., ::2]


def _elsewhere(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on another kind of device."""
    return tensor.to("cpu" if tensor.device.type == "cuda" else "meta")


def _constant(value: Any) -> Callable[[Any], Any]:
    return lambda _: value


def _changes() -> Iterator[tuple[str, str, Callable[[Any], Any], tuple[str, ...]]]:
    """(argument, in what way it is wrong, what makes it so, wrappers)."""
    first = {"topk_indices": (GLOBAL, COMBINE), "token_indices": (CONVERT,)}  # says which device the others must be on
    vectors = {
        "token_to_req": (GLOBAL,),
        "req_id": (CONVERT,),
        "is_valid_token": (GLOBAL,),
        "query_start_loc": (COMBINE,),
        "seq_lens": (COMBINE,),
        "gather_lens": (COMBINE,),
    }
    for argument, wrappers in {**first, "block_table": (GLOBAL, CONVERT), **vectors}.items():
        yield argument, "dtype int64", lambda tensor: tensor.long(), wrappers
        yield argument, "not a tensor", lambda tensor: tensor.tolist(), wrappers
        yield argument, "a dimension short", lambda tensor: tensor[0], wrappers
        yield argument, "not contiguous", _every_other, wrappers
        if argument not in first:
            yield argument, "another device", _elsewhere, wrappers
    for argument, wrappers in vectors.items():
        if argument != "seq_lens":  # says how many requests there are
            yield argument, "an entry short", lambda tensor: tensor[:-1], wrappers
        if argument in ("is_valid_token", "query_start_loc", "gather_lens"):
            yield argument, "an entry too many", lambda tensor: torch.cat([tensor, tensor[:1]]), wrappers
    integers = {
        "block_size": (1, (GLOBAL,)),
        "BLOCK_SIZE": (1, (CONVERT,)),
        **dict.fromkeys(("window_size", "topk", "M", "N"), (0, (COMBINE,))),
        "compress_ratio": (1, (COMBINE,)),
    }
    for argument, (least, wrappers) in integers.items():
        for value in (least - 1, 2**31, 2.5, None, True):
            yield argument, str(value), _constant(value), wrappers
    yield "topk", "with the window past int32", _constant(2**31 - 100), (COMBINE,)
    yield "M", "rows past int32", _constant(2**30 + 1), (COMBINE,)
    yield "N", "more than M", _constant(2**31 - 1), (COMBINE,)
    yield "token_indices", "not of NUM_TOPK_TOKENS", lambda tensor: tensor[:, 1:], (CONVERT,)
    yield "NUM_TOPK_TOKENS", "a float", _constant(5.0), (CONVERT,)
    yield "HAS_PREFILL_WORKSPACE", "True", _constant(True), (CONVERT,)
    for argument in ("prefill_workspace_request_ids", "prefill_workspace_starts"):
        yield argument, "given", _constant(torch.zeros(2)), (CONVERT,)


def _refusals(wrappers: tuple[str, ...]) -> Iterator[IndicesRefusalCase]:
    for argument, name, make, refusers in _changes():

        def apply(
            arguments: dict[str, Any], facts: Facts, argument: str = argument, make: Callable[[Any], Any] = make
        ) -> None:
            arguments[argument] = make(arguments.get(argument))

        change = Change(argument, name, apply, refusers)
        for wrapper in refusers:
            if wrapper in wrappers:
                yield IndicesRefusalCase(
                    f"refuses: {argument}, {name} ({SHORT[wrapper]})",
                    f"{wrapper} names {argument} in a ValueError or TypeError",
                    wrapper,
                    change,
                )


def cases(spec: Mapping[str, Any], device: str) -> list[Case]:
    """All cases of a package's index kernels; see mlagen.verify.cases."""
    wrappers, attention, big = tuple(spec["wrappers"]), spec["attention"] or {}, device == "cuda"
    found: list[Case] = []
    for wrapper in (GLOBAL, CONVERT):
        if wrapper in wrappers:
            found += _map_cases(wrapper, big)
    if COMBINE in wrappers:
        found += _combine_cases(attention.get("topk") or 2048, attention.get("window") or 128, big)
    found += _refusals(wrappers)
    return found


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
    """Indices i64 [tokens, topk]; what `limit` tokens the block table covers is theirs to name."""
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
        case "last lane":
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
    return blocks


def _vector(values: torch.Tensor, device: str, fill: int) -> Placed:
    """A vector in a buffer of `fill`; its view is [1, entries]."""
    return place(values[None].to(device), LAYOUTS["contiguous"], fill)


def _build_map(case: MapCase, device: str, seed: int) -> tuple[dict[str, Any], dict[str, Placed]]:
    """Arguments of the case's wrapper by name, and their buffers."""
    generator = torch.Generator().manual_seed(seed)
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
        "request": _vector(request.int(), device, 0),
        "block_table": place(blocks, LAYOUTS[case.table], 7),  # and so does a block past a row
    }
    request = placed["request"].view[0]
    if case.wrapper == CONVERT:
        arguments = {
            "req_id": request,
            "block_table": placed["block_table"].view,
            "token_indices": placed["indices"].view,
            "BLOCK_SIZE": case.block_size,
            "NUM_TOPK_TOKENS": case.topk,
            "return_valid_counts": case.counts,
        }
    else:
        arguments = {
            "topk_indices": placed["indices"].view,
            "token_to_req": request,
            "block_table": placed["block_table"].view,
            "block_size": case.block_size,
            "is_valid_token": mask.to(device),
        }
    return arguments, placed


def _build_combine(case: CombineCase, device: str, seed: int) -> tuple[dict[str, Any], dict[str, Placed]]:
    """Arguments of combine_topk_swa_indices by name, and their buffers."""
    generator = torch.Generator().manual_seed(seed)
    queries = [query for query, _, _ in case.requests]
    start = [case.start + sum(queries[:request]) for request in range(len(queries) + 1)]
    shape = (sum(queries) + case.spare, case.topk if case.width is None else case.width)
    indices = _randint(0, max(1, min(case.rows, case.window_row)), shape, generator)
    if case.indices == "none":
        indices[:] = -1
    elif case.indices == "int32 range":
        indices = _int32_range([0, INT32.max - case.rows, INT32.max - case.rows + 1], shape, generator)
    lengths = torch.tensor(case.requests, dtype=torch.int32).view(-1, 3)
    placed = {
        "topk_indices": place(indices.int().to(device), LAYOUTS[case.layout], 1),
        "query_start_loc": _vector(torch.tensor(start, dtype=torch.int32), device, INT32.min),
        "seq_lens": _vector(lengths[:, 1].contiguous(), device, 10**6),
        "gather_lens": _vector(lengths[:, 2].contiguous(), device, 10**6),
    }
    arguments: dict[str, Any] = {"topk_indices": placed["topk_indices"].view}
    arguments |= {name: placed[name].view[0] for name in ("query_start_loc", "seq_lens", "gather_lens")}
    arguments |= {"window_size": case.window, "compress_ratio": case.ratio, "topk": case.topk}
    return {**arguments, "M": case.rows, "N": case.window_row}, placed


def _expected(case: MapCase | CombineCase, arguments: Mapping[str, Any]) -> list[torch.Tensor]:
    """What the case's wrapper must return."""
    here: dict[str, Any] = {
        name: one.cpu() if isinstance(one, torch.Tensor) else one for name, one in arguments.items()
    }
    if isinstance(case, CombineCase):
        return list(combine_indices(**here))
    if case.wrapper == CONVERT:
        slots, lens = map_indices(here["token_indices"], here["req_id"], here["block_table"], here["BLOCK_SIZE"])
        return [slots, lens] if case.counts else [slots]
    slots, lens = map_indices(here["topk_indices"], here["token_to_req"], here["block_table"], here["block_size"])
    return [slots, torch.where(here["is_valid_token"], lens, 0)]


def _call(subject: Subject, case: MapCase | CombineCase, arguments: Mapping[str, Any]) -> list[torch.Tensor]:
    """Calls the wrapper by position, as callers do; what an allocation holds that the kernel leaves is INT32_MAX."""
    wrapper = COMBINE if isinstance(case, CombineCase) else case.wrapper
    call = getattr(subject.package, wrapper)
    with subject.planned_for(None), poisoned_allocations():
        returned = call(**arguments) if wrapper == CONVERT else call(*arguments.values())
    return [returned] if isinstance(returned, torch.Tensor) else list(returned)


def _compare(got: list[torch.Tensor], expected: list[torch.Tensor], device: str) -> None:
    """Raises CaseFailedError unless both hold the same numbers, dtypes, shapes and devices."""
    if len(got) != len(expected):
        raise CaseFailedError(f"returned {len(got)} tensors instead of {len(expected)}")
    for name, one, want in zip(("indices", "lens"), got, expected, strict=False):
        if one.dtype != want.dtype or one.shape != want.shape or one.device.type != device:
            raise CaseFailedError(
                f"{name} is {one.dtype} {list(one.shape)} on {one.device} instead of {want.dtype} {list(want.shape)}"
            )
        wrong = (one.cpu() != want).nonzero()
        if len(wrong):
            at = tuple(wrong[0].tolist())
            raise CaseFailedError(
                f"{len(wrong)} of {want.numel()} {name} differ, {list(at)} first: {int(one[at])}, not {int(want[at])}"
            )


def _reference(subject: Subject, case: MapCase | CombineCase, arguments: dict[str, Any]) -> None:
    _compare(_call(subject, case, arguments), _expected(case, arguments), subject.device)


def _defaults(subject: Subject, case: MapCase | CombineCase, arguments: dict[str, Any]) -> None:
    expected = _expected(case, arguments)
    torch.set_default_device("meta")
    try:
        got = _call(subject, case, arguments)
        if torch.get_default_device().type != "meta":
            raise CaseFailedError("changed torch's default device")
    finally:
        torch.set_default_device(None)
    _compare(got, expected, subject.device)


def _graph(subject: Subject, case: MapCase | CombineCase, arguments: dict[str, Any]) -> None:
    _call(subject, case, arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = _call(subject, case, arguments)
    indices = next(one for one in arguments.values() if isinstance(one, torch.Tensor) and one.dim() == 2)
    indices.copy_(indices.flip(0))
    for tensor in got:
        tensor.fill_(INT32.max)
    graph.replay()
    torch.cuda.synchronize()
    _compare(got, _expected(case, arguments), subject.device)


def _repeated(subject: Subject, case: MapCase, arguments: dict[str, Any]) -> None:
    """One token many times over."""
    allocate(2 * case.repeat * case.topk, torch.int32, subject.device, None)  # skips the case where memory is short
    expected = _expected(case, arguments)
    for name in arguments.keys() & {"topk_indices", "token_indices"}:
        arguments[name] = arguments[name].expand(case.repeat, -1)
    for name in arguments.keys() & {"token_to_req", "req_id", "is_valid_token"}:
        arguments[name] = arguments[name].repeat(case.repeat)
    got = _call(subject, case, arguments)
    piece = 1 << 16
    for want, one in zip(expected, got, strict=True):
        for first in range(0, case.repeat, piece):
            if not bool((one[first : first + piece] == want.to(subject.device)).all()):
                raise CaseFailedError(f"results from token {first} on differ")


CHECKS: dict[str, Callable[[Subject, Any, dict[str, Any]], None]] = {
    "reference": _reference,
    "defaults": _defaults,
    "graph": _graph,
    "repeated": _repeated,
}


def _refusal(subject: Subject, case: IndicesRefusalCase) -> None:
    if case.wrapper == COMBINE:
        one = CombineCase("", "", ((2, 9, 9), (1, 5, 5)), layout="contiguous")
        arguments, _ = _build_combine(one, subject.device, 0)
    else:
        arguments, _ = _build_map(MapCase("", "", case.wrapper, 3, 16), subject.device, 0)
    case.change.apply(arguments, subject.facts)
    argument = case.change.argument
    with subject.planned_for(None):
        try:
            getattr(subject.package, case.wrapper)(**arguments)
        except (ValueError, TypeError) as error:
            if not re.search(rf"\b{argument}\b", str(error)):
                raise CaseFailedError(f"the {type(error).__name__} does not name {argument}: {error}") from error
            return
    raise CaseFailedError(f"took a wrong {argument}")


def run(subject: Subject, case: Case, seed: int = 0) -> list[Figure]:
    """Runs a case; returns no figures, since every comparison is exact.

    Raises:
        CaseFailedError: the case does not hold; other exceptions of the package pass through.
        CaseSkippedError: the case cannot run here.
    """
    match case:
        case IndicesRefusalCase():
            _refusal(subject, case)
            return []
        case MapCase():
            arguments, placed = _build_map(case, subject.device, seed)
        case CombineCase():
            arguments, placed = _build_combine(case, subject.device, seed)
        case _:
            raise TypeError(f"unknown case {case!r}")
    CHECKS[case.check](subject, case, arguments)
    changed = [name for name, one in placed.items() if case.check != "graph" and one.changed()]
    if changed:
        raise CaseFailedError(f"wrote to its input {', '.join(changed)}")
    return []
