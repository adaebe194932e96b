"""Random cases of pools of keys."""

from __future__ import annotations

from mlagen.verify.call.case import Case
from mlagen.verify.kpool.cases import ExpandCase, PoolsCase, RowsCase, SeedCase, UpdateCase
from mlagen.verify.kpool.side import COMPRESS, EXPAND, QUERY, SEED, SHORT, side_of
from mlagen.verify.random.rows import cache_memory
from mlagen.verify.random.scene import Scene

MEMORY = ("contiguous", "slice", "odd")


def kpool(scene: Scene) -> Case:
    """A call of one of the functions around pools of keys."""
    shape, call = scene.shape, scene.call
    wrapper = shape.pick(*[name for name in SHORT if name in scene.spec["wrappers"]])
    pool = call.pick(1, 2, 4, 4, 16, call.size(1, 40))
    if wrapper == QUERY:
        values = call.pick("random", "random", "zero", "tiny", "large", "one", "nan")
        return RowsCase("", "", call.size(0, 20000 if scene.big else 60), shape.mostly(*MEMORY), values)
    if wrapper == EXPAND:
        return ExpandCase(
            "", "", pool, call.size(0, 500 if scene.big else 6), call.size(0, 600 if scene.big else 40),
            wide=shape.chance(0.5),
            ids=call.pick("random", "random", "none", "outside", "complete"),
            lens=call.pick("random", "random", "zero", "negative", "largest", "short"),
            memory=shape.mostly(*MEMORY),
        )  # fmt: skip
    rows, tail = shape.mostly(*MEMORY), shape.mostly(*MEMORY)
    if wrapper == SEED:
        most = 300 if scene.big else 20
        requests = tuple((call.size(0, 200), call.size(0, most)) for _ in range(call.size(0, 40 if scene.big else 4)))
        slots = call.pick("own", "own", "negative", "beyond")
        memory = (shape.chance(0.5), slots, rows, tail)
        return SeedCase("", "", pool, call.size(1, 3), requests, *memory, further=call.pick(0, 5))
    side = side_of(scene.spec)
    assert side is not None
    pages = cache_memory(scene, ("uint8", "int8", "float8"), planar=side.layout.planar)
    if wrapper == COMPRESS:
        return PoolsCase(
            "", "", pool, call.size(0, 600 if scene.big else 12), pages, rows, shape.mostly(*MEMORY),
            slots=call.pick("shuffled", "shuffled", "negative", "beyond"),
            mask=shape.mostly("", "mixed", "none"),
            scores=call.pick("random", "equal", "large", "infinite", "no"),
        )  # fmt: skip
    first = tuple(call.size(0, 400) for _ in range(call.size(0, 300 if scene.big else 5)))
    wide = shape.pick("", "tail, slots", "tail, slots, positions", "positions", "slots")
    return UpdateCase(
        "", "", pool, call.size(1, 3), first, call.size(1, 9), wide,
        garbage=call.pick("", "", "tail", "slots", "positions", "padding"),
        pages=pages, rows=rows, tail=tail, integers=shape.mostly(*MEMORY),
    )  # fmt: skip
