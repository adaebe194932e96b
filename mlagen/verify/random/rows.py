"""Random cases of cache rows, indices and merges."""

from __future__ import annotations

from collections.abc import Sequence

from mlagen.verify.cache.cases import GatherCase, WriteCase
from mlagen.verify.cache.sides import CONCAT, GATHERS, INSERT, REQUESTS, WRITERS, sides_of
from mlagen.verify.call.case import Case
from mlagen.verify.call.patterns import SINK_PROMISES
from mlagen.verify.checks.merges import PARTS, STATES, Conventions
from mlagen.verify.compressor.cases import CompressCase, SaveCase
from mlagen.verify.compressor.side import COMPRESS, SAVE
from mlagen.verify.compressor.side import sides_of as compressed_sides
from mlagen.verify.indices.cases import CombineCase, MapCase
from mlagen.verify.indices.invalid import COMBINE, CONVERT, GLOBAL
from mlagen.verify.latents.cases import InsertCase, PoolCase
from mlagen.verify.latents.side import INSERT as INSERT_LATENTS
from mlagen.verify.latents.side import POOL
from mlagen.verify.latents.side import side_of as latents_side
from mlagen.verify.merge_states.cases import LSE_PROMISES, PartsCase, StatesCase, value_dims
from mlagen.verify.out_quant.cases import FP32, PACKED, WIDE, OutQuantCase
from mlagen.verify.out_quant.inputs import VALUES
from mlagen.verify.out_quant.side import side_of as out_side
from mlagen.verify.paged.pages import Pages
from mlagen.verify.prologue.cases import PrologueCase
from mlagen.verify.prologue.side import CONCAT as ROPE_FUSED
from mlagen.verify.prologue.side import PADDED, SHORT
from mlagen.verify.prologue.side import side_of as prologue_side
from mlagen.verify.random.scene import Scene

ODD_REQUESTS = (-(2**31), 2**31 - 1, -1, 0, 1)


def cache_memory(scene: Scene, eight: Sequence[str], *, planar: bool) -> Pages:
    """How a cache lies in memory; `eight` are the dtypes that it may have."""
    shape = scene.shape
    gap, row_gap = shape.pick((0, 0), (0, 0), (160, 0), (0, 0) if planar else (0, 48))
    size = shape.pick(64, 64, 1, 2, 16, 53, 256)
    return Pages(size, dtype=shape.pick(*eight), page_gap=gap, row_gap=row_gap, offset=shape.mostly(0, 1))


def cache(scene: Scene) -> Case:
    """A call of a writer or a gather."""
    shape, call, wrappers = scene.shape, scene.call, scene.spec["wrappers"]
    side = shape.pick(*sides_of(scene.spec))
    wrapper = shape.pick(*[name for name in (*WRITERS, *GATHERS) if name in wrappers])
    eight = ("uint8", "int8", "float8") if side.layout.quantised else ("uint8",)
    pages = cache_memory(scene, eight, planar=side.layout.planar)
    if wrapper in WRITERS:
        rope = ("2d", "3d") if side.facts.d_rope else ("none", "empty")
        return WriteCase(
            "", "", wrapper, side.module, pages,
            tokens=call.size(0, 400 if scene.big else 20),
            slots=call.pick("shuffled", "shuffled", "negative", "beyond", "shorter", "none"),
            source=shape.mostly("contiguous", "slice", "odd"),
            k_pe=shape.pick(*rope) if wrapper == CONCAT else rope[0],
            newer=shape.chance(0.3) and wrapper in (CONCAT, INSERT),
        )  # fmt: skip
    requests = tuple(
        (call.size(0, 300), call.size(0, 300 if scene.big else 12)) for _ in range(call.size(1, 16 if scene.big else 4))
    )
    return GatherCase(
        "", "", wrapper, side.module, pages,
        requests=requests,
        lens=shape.pick("given", "none"),
        starts=shape.pick("given", "none"),
        spare=call.pick(0, 3, 20),
        offset=call.pick(0, 5) if wrapper == REQUESTS else 0,
        table=call.pick("garbage", "garbage", "outside"),
        out=shape.mostly("contiguous", "slice", "odd"),
        memory=shape.mostly("slice", "odd"),
        expected=call.pick(None, 0, 14, 2**31 - 1) if wrapper == REQUESTS else None,
    )  # fmt: skip


def prologue(scene: Scene) -> Case:
    """A call of a prologue of attention."""
    shape, call, side = scene.shape, scene.call, prologue_side(scene.spec)
    assert side is not None
    wrapper = shape.pick(*[name for name in SHORT if name in scene.spec["wrappers"]])
    eight = ("uint8", "int8", "float8") if side.layout.quantised else ("uint8",)
    return PrologueCase(
        "", "", wrapper, cache_memory(scene, eight, planar=side.layout.planar),
        tokens=call.size(0, 400 if scene.big else 12),
        heads=shape.pick(side.facts.num_heads, call.size(0, 64)) if scene.big else call.size(0, 4),
        padded=shape.pick(0, 3, 16) if wrapper == PADDED else 0,
        given=shape.mostly("", "contiguous", "slice", "odd") if wrapper == PADDED else "",
        slots=call.pick("shuffled", "shuffled", "negative", "beyond", "shorter", "none"),
        positions=call.pick("random", "zero", "garbage", "longer"),
        q=shape.mostly("contiguous", "slice", "odd", "transposed"),
        rows=shape.mostly("contiguous", "slice", "odd"),
        tables=shape.mostly("contiguous", "slice", "odd"),
        k_pe=shape.pick("2d", "3d") if wrapper == ROPE_FUSED else "2d",
        weights=shape.pick("", "kv") if wrapper == ROPE_FUSED else shape.pick("", "q", "kv", "q, kv"),
        wide=shape.chance(0.6),
    )  # fmt: skip


def compressor(scene: Scene) -> Case:
    """A call that saves states, or that compresses them."""
    shape, call = scene.shape, scene.call
    wrapper = shape.pick(*[name for name in (SAVE, COMPRESS) if name in scene.spec["wrappers"]])
    ratio, overlap = call.pick((4, True), (128, False), (1, False), (2, True), (call.size(1, 40), call.chance(0.5)))
    block, states = call.pick(1, 4, 8, call.size(1, 70)), shape.mostly("contiguous", "slice", "odd")
    slots = call.pick("shuffled", "shuffled", "negative", "beyond", "shorter", "none")
    if wrapper == SAVE:
        return SaveCase(
            "", "", columns=call.pick(0, 1, 2), ratio=ratio, tokens=call.size(0, 400 if scene.big else 20), block=block,
            wide=shape.chance(0.6), rows=shape.mostly("contiguous", "slice", "odd"), states=states,
            further=shape.pick(0, 24), slots=slots, positions=call.pick("random", "zero", "garbage", "longer"),
        )  # fmt: skip
    side = shape.pick(*compressed_sides(scene.spec))
    eight = ("uint8", "int8", "float8") if side.layout.quantised and side.layout.data[0].dtype != "e2m1" else ("uint8",)
    chunks = tuple((call.size(0, 200), call.size(0, 150)) for _ in range(call.size(0, 3)))
    return CompressCase(
        "", "", side.short, chunks, ratio, overlap, block, cache_memory(scene, eight, planar=side.layout.planar),
        states=states,
        tables=shape.mostly("contiguous", "slice", "odd"),
        further=shape.pick(0, 24),
        slots=slots,
        state_slots=call.pick("own", "own", "skipped", "shorter"),
        positions=call.pick("own", "own", "garbage", "longer", "past"),
        requests=call.pick("own", "own", "garbage"),
        table=call.pick("whole", "whole", "holes", "narrow", "garbage"),
        scores=call.pick("random", "equal", "large", "infinite"),
        wide=shape.chance(0.6),
    )  # fmt: skip


def latents(scene: Scene) -> Case:
    """A call that makes latents, or that inserts them."""
    shape, call, side = scene.shape, scene.call, latents_side(scene.spec)
    assert side is not None
    wrapper = shape.pick(*[name for name in (POOL, INSERT_LATENTS) if name in scene.spec["wrappers"]])
    ratio, rows = call.pick(1, 2, 2, call.size(1, 9)), shape.mostly("contiguous", "slice", "odd")
    slots = call.pick("own", "own", "negative", "beyond", "shorter", "none")
    if wrapper == POOL:
        most = 120 if scene.big else 12
        chunks = tuple((call.size(0, 3000), call.size(0, most)) for _ in range(call.size(0, 60 if scene.big else 4)))
        return PoolCase(
            "", "", chunks, ratio, ratio + call.size(0, 9), shape.mostly("contiguous", "slice", "odd"), rows,
            slots="own" if ratio == 1 and slots == "beyond" else slots,
            positions=call.pick("own", "own", "garbage", "longer", "last"),
            requests=call.pick("own", "own", "garbage"),
            scores=call.pick("random", "equal", "large", "infinite"),
        )  # fmt: skip
    eight = ("uint8", "int8", "float8") if side.layout.quantised else ("uint8",)
    pages = cache_memory(scene, eight, planar=side.layout.planar)
    return InsertCase(
        "", "", call.size(0, 400 if scene.big else 12), ratio, pages, rows,
        tables=shape.mostly("contiguous", "slice", "odd"),
        slots="shuffled" if slots == "own" else slots,
        positions=call.pick("random", "zero", "garbage", "longer"),
        wide=shape.chance(0.6),
    )  # fmt: skip


def out_quant(scene: Scene) -> Case:
    """A call that quantises attention's output."""
    shape, call, side = scene.shape, scene.call, out_side(scene.spec)
    assert side is not None
    return OutQuantCase(
        "", "", call.size(0, 700 if scene.big else 9), call.size(1, 16 if scene.big else 3),
        call.size(1, 12 if scene.big else 3),
        scales=shape.pick(FP32, FP32, WIDE, *([PACKED, PACKED] if side.packs else [])),
        values=call.pick("random", *VALUES),
        positions=call.pick("random", "zero", "garbage", "longer") if shape.chance(0.7) else "",
        rows=shape.mostly("contiguous", "slice", "odd", "transposed", "same"),
        tables=shape.mostly("contiguous", "slice", "odd"),
        named=call.chance(0.3),
    )  # fmt: skip


def _map(scene: Scene, wrapper: str) -> MapCase:
    shape, call = scene.shape, scene.call
    topk = call.size(0, 2200 if scene.big else 60)
    tokens = call.size(0, 150 if scene.big else 4)
    ranks = shape.pick((1, 0, 1), (2, 1, 1), (3, 1, 4)) if wrapper == CONVERT else (1, 0, 1)
    return MapCase(
        "", "", wrapper, tokens, topk,
        requests=call.size(1, 20),
        columns=call.size(1, 40),
        block_size=call.pick(64, 64, 1, 16, 53, 256),
        indices=call.pick("random", "random", "none", "edges", "int32 range", "last column") if topk else "random",
        blocks=call.pick("random", "random", "negative", "limit", "garbage"),
        request=call.pick("random", "random", "outside", "longer"),
        mask=call.pick("mixed", "all", "none"),
        counts=wrapper == GLOBAL or shape.chance(0.7),
        layout=shape.mostly("contiguous", "slice", "odd"),
        table=shape.mostly("slice", "contiguous", "odd"),
        compact=shape.chance(0.4),
        newer=wrapper == GLOBAL and shape.chance(0.3),
        ranks=ranks,
    )  # fmt: skip


def _combine(scene: Scene) -> CombineCase:
    shape, call = scene.shape, scene.call
    requests = []
    for _ in range(call.size(0, 12 if scene.big else 3)):
        sequence = call.size(0, 5000)
        request = (call.size(0, 30 if scene.big else 2), sequence, call.size(0, sequence))
        requests.append((request[0], *call.mostly(request[1:], (call.pick(*ODD_REQUESTS), call.pick(*ODD_REQUESTS)))))
    topk = call.size(0, 600 if scene.big else 30)
    rows = call.size(0, 3000)
    return CombineCase(
        "", "", tuple(requests),
        topk=topk,
        window=call.size(0, 200 if scene.big else 20),
        ratio=call.pick(1, 4, 128) if topk else 0,
        width=call.mostly(None, call.size(0, topk + 20)),
        rows=rows,
        window_row=call.size(0, rows),
        start=call.pick(0, 12345),
        spare=call.pick(0, 0, 9),
        indices=call.pick("random", "random", "none", "edges"),
        layout=shape.mostly("slice", "contiguous", "odd"),
        compact=shape.chance(0.4),
    )  # fmt: skip


def indices(scene: Scene) -> Case:
    """A call of an index kernel."""
    wrapper = scene.shape.pick(*[name for name in (GLOBAL, CONVERT, COMBINE) if name in scene.spec["wrappers"]])
    return _combine(scene) if wrapper == COMBINE else _map(scene, wrapper)


def merge_states(scene: Scene) -> Case:
    """A call of a merge."""
    shape, call, spec = scene.shape, scene.call, scene.spec
    wrapper = shape.pick(*[name for name in (STATES, PARTS) if name in spec["wrappers"]])
    d_v = shape.pick(*value_dims(spec))
    conventions = Conventions.of(spec)
    tokens = call.size(0, 700 if scene.big else 9)
    heads = shape.pick(scene.facts.num_heads, shape.size(1, 32)) if scene.big else shape.size(1, 5)
    sink = call.pick(*SINK_PROMISES) if conventions.sink != "none" and shape.chance(0.4) else None
    scale = 0.0371 if shape.chance(0.3) else None
    lse_layout, lse = shape.mostly("ht", "th"), call.pick(*[name for name in LSE_PROMISES if name != "NaN"])
    if sink is not None:
        lse = "normal"
    if wrapper == PARTS:
        return PartsCase(
            "", "", call.size(0, 20), min(tokens, 100), heads, d_v, lse,
            lse_base=shape.pick(None, "e", "2"),
            float32=shape.chance(0.4),
            outputs=shape.pick("contiguous", "odd", "swapped"),
            given=shape.pick(None, "contiguous", "slice", "odd"),
            lse_layout=lse_layout, sink=sink, scale=scale,
        )  # fmt: skip
    prefixes = call.size(0, tokens) if shape.chance(0.3) else None
    layouts = [shape.mostly("contiguous", "slice", "odd", "transposed") for _ in range(6)]
    in_place = shape.mostly(None, "prefix", "suffix") if scale is None and prefixes is None else None
    return StatesCase(
        "", "", tokens, heads, d_v, lse,
        prefixes=prefixes, short=shape.chance(0.5),
        prefix=layouts[0], suffix=layouts[1], output=layouts[2],
        lse_layouts=(layouts[3], layouts[4], layouts[5]),
        output_lse=shape.chance(0.7),
        in_place=in_place, lse_layout=lse_layout, sink=sink, scale=scale,
    )  # fmt: skip
