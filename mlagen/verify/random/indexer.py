"""Random cases of the indexer: its logits, top-k, both in one call, and the kernels around its keys."""

from __future__ import annotations

from dataclasses import replace

from mlagen.verify.call.case import Case
from mlagen.verify.chains.indexer_select.cases import PickCase
from mlagen.verify.chains.indexer_select.invalid import FLAT as PICK_FLAT
from mlagen.verify.chains.indexer_select.invalid import PAGED as PICK_PAGED
from mlagen.verify.indexer_cache.cases import KeysCase, KeysGatherCase, KeysQueryCase, QueryCase
from mlagen.verify.indexer_cache.side import GATHER, KEYS_QUERY, NORMALISE, QUERY, WRITE, IndexerSide, side_of
from mlagen.verify.mqa_logits.cases import RANGES, FlatCase, PagedCase, ScheduleCase
from mlagen.verify.mqa_logits.facts import FLAT, FLAT_PAIR, PAGED, PAGED_PAIR, SCHEDULE, LogitsFacts
from mlagen.verify.random.attention import LARGEST
from mlagen.verify.random.rows import cache_memory
from mlagen.verify.random.scene import Scene
from mlagen.verify.topk.cases import SCORE_PROMISES, MergeCase, SelectCase
from mlagen.verify.topk.invalid import DECODE, MERGE, PAGES, PERSISTENT, PREFILL

SCORES = tuple(SCORE_PROMISES)
LONG_ROWS = 8192  # from so many columns on, several programs may share a row
# (warps, halves, capacity, registers, parts) of tiles that hold so little that short rows take the paths of long ones.
SMALL_TILES = ((8, 1, 1024, None, 1), (32, 1, 4096, None, 1), (8, 1, 1024, None, 4))
EDGES = (0, 1, -7, -(2**31), LARGEST, 10**6)


def _topk_sizes(scene: Scene) -> tuple[int, int, int]:
    """(rows, columns, k): many small calls, few of long rows, and of 1 to 32 of these."""
    call = scene.call
    k = call.pick(1, 2048, 512, call.size(1, 4096)) if scene.big else call.size(1, 60)
    if not scene.big:
        return call.size(0, 3), call.size(0, 300), k
    if call.chance(0.3):
        columns = call.size(LONG_ROWS, 2**17 + 5000)
        return call.size(1, min(32, 2**21 // columns)), columns, k
    columns = call.size(0, 20_000)
    return call.size(0, min(300, 2**20 // max(columns, 1))), columns, k


def topk(scene: Scene) -> Case:
    """A call of a top-k kernel."""
    shape, call = scene.shape, scene.call
    wrappers = [name for name in (PREFILL, DECODE, PERSISTENT, PAGES, MERGE) if name in scene.spec["wrappers"]]
    wrapper = shape.pick(*wrappers, *[name for name in wrappers if name != MERGE])
    rows, columns, k = _topk_sizes(scene)
    if wrapper == MERGE:
        most = 2 if not scene.big else 40
        return MergeCase(
            "", "", min(rows, most), columns, k,
            ranks=call.pick(1, 2, 3, 4, 8),
            interleave=call.pick(1, 3, 64),
            scores=call.pick(*SCORES),
            spread=call.chance(0.5),
            layout=shape.mostly("contiguous", "slice", "odd"),
            out=shape.mostly("contiguous", "slice", "odd"),
            given=shape.chance(0.7),
            tile=None if scene.big else (2, 2, 512),
        )  # fmt: skip
    next_n = shape.pick(1, 1, 2, 3, 4) if wrapper in (DECODE, PERSISTENT) else 1
    by_token = wrapper in (DECODE, PERSISTENT) and shape.chance(0.4)
    if wrapper == PERSISTENT and next_n > 1:
        by_token = True
    rows = -(-rows // next_n) * next_n
    lens: tuple[int, ...] | None = tuple(call.size(0, columns) for _ in range(max(rows, 1)))
    if call.chance(0.3):
        lens = tuple(call.pick(length, columns, *EDGES) for length in lens or ())
    elif call.chance(0.4) and not by_token:
        lens = None
    if by_token or wrapper == PERSISTENT:
        lens = tuple(min(max(length, 0), columns) for length in lens or (columns,))
    starts = None
    if wrapper in (PREFILL, PAGES) and shape.chance(0.5):
        starts = tuple(call.pick(0, call.size(0, columns), *((-7, LARGEST) if wrapper == PREFILL else ()))
                       for _ in range(max(rows, 1)))  # fmt: skip
    case = SelectCase(
        "", "", wrapper, rows, columns, k,
        scores=call.pick(*SCORES),
        lens=lens,
        starts=starts,
        next_n=next_n,
        by_token=by_token,
        layout=shape.mostly("contiguous", "slice", "odd"),
        out=shape.mostly("contiguous", "slice", "odd"),
        dtype=shape.pick("float32", "float32", "bfloat16"),
        gives=shape.pick((), ("scores",), ("scores",)),
        tile=None if scene.big else (2, 2, columns > 256),
        sm90_tile=shape.mostly(None, *SMALL_TILES) if scene.big else None,
    )  # fmt: skip
    if wrapper == PERSISTENT:
        return replace(case, most=call.pick(None, columns, call.size(0, columns)))
    return _with_pages(scene, case) if wrapper == PAGES else case


def _with_pages(scene: Scene, case: SelectCase) -> SelectCase:
    shape, call = scene.shape, scene.call
    size = call.pick(1, 64, 64, 53, call.size(1, 1000))
    page_starts = tuple(call.pick(0, call.size(0, 50), -7) for _ in range(max(case.rows, 1)))
    return replace(
        case,
        page_size=size,
        pages=call.pick(-(-case.columns // size) + 1, call.size(0, 20)),
        batches=shape.pick("own", "mapped", "outside"),
        page_starts=page_starts if shape.chance(0.4) else None,
        blocks=call.pick("random", "random", "limit"),
        gives=shape.pick((), ("raw",), ("raw", "scores"), ("scores",)),
    )


def draw_flat(scene: Scene, wrapper: str, most: int) -> FlatCase:
    """A call over flat keys of at most so many logits."""
    shape, call = scene.shape, scene.call
    tokens = call.size(0, 300 if scene.big else 5)
    keys = call.size(0, min(20_000, most // max(tokens, 1)) if scene.big else 200)
    clean = shape.chance(0.5)
    return FlatCase(
        "", "", wrapper, tokens, keys,
        ranges=call.pick(*RANGES) if keys > 2 else "whole",
        clean=clean,
        compressed=0 if clean or not shape.chance(0.4) else call.size(1, keys + 300),
        bf16=wrapper == FLAT_PAIR and shape.chance(0.4),
        contents=call.pick("normal", "codes", "whole"),
        q=shape.mostly("contiguous", "slice", "odd", "transposed"),
        weights=shape.mostly("contiguous", "slice", "odd"),
        k=shape.mostly("contiguous", "slice", "odd"),
        multiprocessors=shape.mostly(None, 1, 3, 1000),
    )  # fmt: skip


def draw_paged(scene: Scene, wrapper: str, most: int) -> PagedCase:
    """A call over pages of at most so many logits."""
    shape, call = scene.shape, scene.call
    next_n = shape.pick(1, 1, 2, 3, 4)
    requests = call.size(0, 40 if scene.big else 3)
    longest = max(1, min(20_000, most // max(requests * next_n, 1) // max(requests, 1))) if scene.big else 150
    lengths = tuple(call.size(0, longest) for _ in range(requests))
    if call.chance(0.1):
        lengths = tuple(call.pick(length, -5, -(2**31), 0) for length in lengths)
    return PagedCase(
        "", "", wrapper, lengths, next_n=next_n,
        tokenwise=shape.chance(0.3),
        block_size=shape.mostly(64, 1, 16, 53, 128),
        memory=shape.mostly("end to end", "page gap", "odd"),
        table=shape.mostly("slice", "contiguous", "odd"),
        blocks="garbage",
        columns=call.pick(5, 0, 300),
        ranges=call.pick(132, 4, 1, call.size(1, 300)),
        three=shape.chance(0.3),
        clean=shape.chance(0.5),
        bf16=wrapper == PAGED_PAIR and shape.chance(0.4),
        contents=call.pick("normal", "codes", "whole"),
        q=shape.mostly("contiguous", "slice", "odd"),
        weights=shape.mostly("contiguous", "slice", "odd"),
    )  # fmt: skip


def most_logits(facts: LogitsFacts) -> int:
    """Logits of a call that the float64 reference bears."""
    return 2**25 // facts.heads


def mqa_logits(scene: Scene) -> Case:
    """A call of the indexer's logits."""
    facts = LogitsFacts.of(scene.spec)
    assert facts is not None
    shape, call = scene.shape, scene.call
    wrapper = shape.pick(*facts.wrappers)
    if wrapper == SCHEDULE:
        lengths = tuple(call.size(0, 20_000) for _ in range(call.size(0, 300 if scene.big else 9)))
        if call.chance(0.2):
            lengths = tuple(call.pick(length, -9, -(2**31), 0) for length in lengths)
        return ScheduleCase("", "", lengths, shape.pick(0, 1, 3), call.pick(132, call.size(1, 400)))
    if wrapper in (FLAT, FLAT_PAIR):
        case: FlatCase | PagedCase = draw_flat(scene, wrapper, most_logits(facts))
    else:
        case = draw_paged(scene, wrapper, most_logits(facts))
    words = facts.packed and facts.scales.count == 4 and shape.chance(0.3)
    return replace(case, words=words, q="contiguous" if words else case.q)


def indexer_select(scene: Scene) -> Case:
    """A call that scores and selects."""
    facts = LogitsFacts.of(scene.spec)
    assert facts is not None
    shape, call = scene.shape, scene.call
    wrapper = shape.pick(*[name for name in (PICK_FLAT, PICK_PAGED) if name in scene.spec["wrappers"]])
    scored: FlatCase | PagedCase
    if wrapper == PICK_FLAT:
        scored = replace(draw_flat(scene, FLAT, most_logits(facts)), clean=False, compressed=0, multiprocessors=None)
        scored = replace(scored, tokens=min(scored.tokens, 64))
    else:
        scored = replace(draw_paged(scene, PAGED, most_logits(facts)), clean=False, blocks="garbage")
    scored = replace(scored, bf16=False)
    gives = shape.pick((), ("scores",), ("slots",), ("scores", "slots"))
    own_table = shape.pick(0, 7, 16, 64) if "slots" in gives and wrapper == PICK_PAGED else 16
    several = isinstance(scored, PagedCase) and (scored.next_n > 1 or not own_table)
    return PickCase(
        "", "", wrapper, scored,
        k=call.pick(2048, 512, call.size(1, 4096)) if scene.big else call.size(1, 60),
        gives=gives,
        out=shape.mostly("contiguous", "slice", "odd"),
        own_table=own_table if "slots" in gives else 0,
        mapped="slots" in gives and (shape.chance(0.5) or several),
        room=shape.mostly(None, 1, 3, 16),
    )  # fmt: skip


def _side(scene: Scene) -> IndexerSide:
    side = side_of(scene.spec)
    assert side is not None
    return side


def indexer_cache(scene: Scene) -> Case:
    """A call of a kernel around the indexer's keys."""
    shape, call, side = scene.shape, scene.call, _side(scene)
    wrapper = shape.pick(
        *[name for name in (WRITE, NORMALISE, QUERY, GATHER, KEYS_QUERY) if name in scene.spec["wrappers"]]
    )
    if wrapper == QUERY:
        return QueryCase(
            "", "",
            tokens=call.size(0, 200 if scene.big else 6),
            heads=shape.pick(side.num_heads, call.size(0, 64)) if scene.big else call.size(0, 5),
            positions=call.pick("random", "zero", "garbage", "longer"),
            q=shape.mostly("contiguous", "slice", "odd", "transposed"),
            weights=shape.mostly("contiguous", "slice", "odd"),
            angles=shape.mostly("contiguous", "slice", "odd"),
            wide=shape.chance(0.4),
            named=shape.chance(0.4),
        )  # fmt: skip
    eight = ("uint8", "int8") if side.packed else ("uint8", "int8", "float8")
    pages = cache_memory(scene, eight, planar=side.layout.planar)
    if wrapper == GATHER:
        forms = ["bytes"] + ["floats"] * (side.scales.dtype == "fp32") + ["float8"] * (not side.packed)
        requests = tuple(call.size(0, 700 if scene.big else 40) for _ in range(call.size(0, 20 if scene.big else 4)))
        return KeysGatherCase(
            "", "", pages,
            heads=shape.chance(0.3),
            requests=requests,
            spare=call.pick(0, 3, 40),
            table=call.pick("garbage", "garbage", "outside"),
            memory=shape.mostly("slice", "odd"),
            out=shape.mostly("contiguous", "slice", "odd"),
            form=shape.pick(*forms),
            rows=call.pick(0, 2),
        )  # fmt: skip
    keys = KeysCase(
        "", "", NORMALISE if wrapper == KEYS_QUERY else wrapper, pages,
        heads=shape.chance(0.3),
        tokens=call.size(0, 500 if scene.big else 20),
        slots=call.pick("shuffled", "shuffled", "negative", "beyond", "shorter", "none"),
        source=shape.mostly("contiguous", "slice", "odd"),
        tables=shape.mostly("contiguous", "slice", "odd"),
        positions=call.pick("random", "garbage", "longer"),
        ratio=shape.pick(None, 1, 2, 4) if wrapper == NORMALISE else None,
        wide=wrapper != KEYS_QUERY and shape.chance(0.4),
        named=wrapper == WRITE and shape.chance(0.4),
    )  # fmt: skip
    if wrapper != KEYS_QUERY:
        return keys
    return KeysQueryCase(
        "", "", keys,
        heads=shape.pick(side.num_heads, call.size(0, 64)) if scene.big else call.size(0, 5),
        layer=call.chance(0.5),
        q=shape.mostly("contiguous", "slice", "odd", "transposed"),
        weights=shape.mostly("contiguous", "slice", "odd"),
        wide=tuple(name for name in ("angles", "norm", "weights") if shape.chance(0.4)),
        spread=shape.chance(0.3),
    )  # fmt: skip
