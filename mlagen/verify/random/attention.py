"""Random cases of attention: sizes, patterns and layouts of its calls."""

from __future__ import annotations

import torch

from mlagen.verify.call.case import E4M3, Q_HALVES, SHARED, SM90, SWAP_AB, Case
from mlagen.verify.call.memory import LAYOUTS
from mlagen.verify.call.patterns import INDEX_PATTERNS, LENGTH_PROMISES, SINK_PROMISES
from mlagen.verify.checks.decode import FLASH as DECODE_FLASH
from mlagen.verify.checks.out_rope import PATTERNS
from mlagen.verify.dense_decode.cases import DenseDecodeCase, DenseDecodeProblem
from mlagen.verify.dense_decode.facts import DenseDecodeFacts
from mlagen.verify.dense_decode.invalid import DECODE
from mlagen.verify.dense_fwd.cases import DenseFwdCase
from mlagen.verify.random.dice import Dice
from mlagen.verify.random.scene import Scene
from mlagen.verify.sparse_decode.cases import CacheProblem, Listing, SparseDecodeCase
from mlagen.verify.sparse_decode.facts import CacheFacts
from mlagen.verify.sparse_fwd.cases import Problem, SparseFwdCase
from mlagen.verify.sparse_fwd.invalid import FLASH, VLLM

PLACES = tuple(name for name in LAYOUTS if name != "far")
LENGTHS = (*LENGTH_PROMISES, "random", "full")
SINKS = (*SINK_PROMISES, "mixed")
SCALES = (1.0, 1.0, 1.0, 6.0, 40.0, 4e4, 1e-6, 2.0**-120)
# With a sink: weights below 2**-126, which kernels flush to 0, are no case of precision.
SINK_SCALES = (1.0, 1.0, 6.0, 1e-6, 2.0**-120)
LARGEST = 2**31 - 1


def heads(scene: Scene) -> int:
    """Heads of a call, of a shape."""
    own = scene.facts.num_heads
    found = scene.shape.pick(own, max(1, own // 8), scene.shape.size(1, 128)) if scene.big else scene.shape.size(1, 6)
    return scene.facts.whole_groups(found)


def _indices(scene: Scene, topk: int, rows: int) -> tuple[str, int]:
    """(pattern, rows): a pattern of lists that so many rows can bear."""
    call = scene.call
    if call.chance(0.05):
        return call.pick(("row zero", 1), ("int32 range", 0), ("none", 0))
    patterns = [name for name in INDEX_PATTERNS if name != "far" and not name.startswith("neighbours")]
    if topk >= 16 and call.chance(0.25):
        patterns = [name for name in INDEX_PATTERNS if name.startswith("neighbours")]
    return call.pick("full", "random", *patterns), max(rows, 8)


def _optional(wish: str, shape: Dice) -> bool:
    """Whether an argument that a spec has as "none", "optional" or "required" is passed."""
    return wish == "required" or (wish == "optional" and shape.chance(0.5))


def _topk(scene: Scene, own: int) -> int:
    """Indices a token; a shape has multiples of 16 or any."""
    topk = scene.call.size(1, own + 200 if scene.big else 150)
    return -(-topk // 16) * 16 if scene.shape.chance(0.6) else topk


def _sink(scene: Scene, keys: int) -> str:
    """A pattern of sinks; extreme ones only with so many keys, each another row, that the LSE is above 0."""
    pattern = scene.call.pick(*SINKS)
    return "random" if pattern == "extreme" and keys < 512 else pattern


def _tokens(scene: Scene, topk: int, heads: int) -> int:
    """Tokens that the reference bears."""
    budget = scene.call.mostly(2**20, 2**21, 2**24) // (heads * max(topk, 1))
    return scene.call.size(0, max(1, min(600, budget)) if scene.big else 4)


def sparse_fwd(scene: Scene) -> Case:
    """A call of sparse attention over rows."""
    facts, shape, call = scene.facts, scene.shape, scene.call
    sink, length = _optional(facts.sink, shape), _optional(facts.length, shape)
    fits = [FLASH] if FLASH in facts.wrappers else []
    if VLLM in facts.wrappers and sink == (facts.sink == "required") and length == (facts.length == "required"):
        fits.append(VLLM)
    wrapper = shape.pick(*fits or [VLLM])
    sink, length = (sink, length) if fits else (facts.sink == "required", facts.length == "required")
    own_heads, topk = heads(scene), _topk(scene, facts.topk)
    pattern, rows = _indices(scene, topk, call.size(8, 3 * topk + 2000 if scene.big else 200))
    problem = Problem(
        tokens=_tokens(scene, topk, own_heads),
        heads=own_heads,
        topk=topk,
        rows=rows,
        indices=pattern,
        length=call.pick(*LENGTHS) if length else None,
        sink=_sink(scene, min(topk, rows) if pattern == "full" else 0) if sink else None,
        scale=call.pick(*(SINK_SCALES if sink else SCALES)),
        q=shape.mostly("contiguous", *PLACES),
        kv=shape.mostly("contiguous", "slice", "odd"),
        out=shape.pick(None, "contiguous", "slice", "transposed", "odd"),
        index_layout=shape.pick("slice", "contiguous", "odd"),
        positions=_positions(scene),
    )
    splits = shape.pick(None, None, 0, 1, 2, 3, 7) if wrapper == VLLM else None
    invariant, shares = shape.chance(0.2), scene.kernel == SHARED
    return SparseFwdCase(
        "", "", wrapper, problem,
        splits=None if shares else splits,
        multiprocessors=None if shares else shape.mostly(None, 1, 1000),
        batch_invariant=invariant and not shares,
    )  # fmt: skip


def _positions(scene: Scene) -> str:
    """A pattern of positions, where attention rotates its output; other specs draw nothing."""
    return scene.call.pick(*PATTERNS) if scene.facts.out_rope else "any"


def _listing(scene: Scene, number: int, known: CacheFacts, length: bool, sink: bool) -> Listing:
    """A list of indices and its cache."""
    shape, call, layout = scene.shape, scene.call, known.layouts[number]
    topk = _topk(scene, known.topks[number])
    if call.chance(0.03):
        topk = 0
    pattern, rows = _indices(scene, topk, call.size(8, 2 * topk + 1000 if scene.big else 150))
    contents = ("encoded", "any") if layout.quantised else ("encoded",)
    if layout.quantised and known.facts.dtype == "bfloat16":
        contents = (*contents, "wide")
    eight = (torch.uint8, torch.int8, torch.float8_e4m3fn) if layout.quantised else (torch.uint8,)
    return Listing(
        topk=topk,
        rows=rows,
        block_size=shape.pick(64, 64, 1, 2, 16, 53, 128, shape.size(1, 256)),
        indices="none" if topk == 0 else pattern,
        length=call.pick(*LENGTHS) if length else None,
        cache=shape.mostly("end to end", "page gap", "odd", *([] if layout.planar else ["row gap"])),
        contents=call.pick(*contents) if not sink else "encoded",
        poison=call.pick(0xFF, 0x7F) if layout.quantised else 0xFF,
        dtype=shape.pick(*eight),
    )


def _decode_scales(contents: set[str], *, sink: bool) -> tuple[float | None, ...]:
    """Scales of logits over a cache, small where rounded elements of K move logits by more than first order."""
    if "wide" in contents:
        return (2.0**-60, 2.0**-120)
    if "any" in contents:
        return (None, 1.0, 1e-6, 2.0**-120)
    return (None, *SINK_SCALES) if sink else (None, 1.0, 1.0, 6.0, 40.0, 1e-6, 2.0**-120)


def sparse_decode(scene: Scene) -> Case:
    """A call of sparse attention over a paged cache."""
    facts, shape, call = scene.facts, scene.shape, scene.call
    known = CacheFacts.of(scene.spec)
    length, sink = _optional(facts.length, shape), _optional(facts.sink, shape)
    main = _listing(scene, 0, known, length, sink)
    extra = _listing(scene, 1, known, length, sink) if len(known.layouts) > 1 and shape.chance(0.7) else None
    s_q = shape.pick(1, 1, 2, 3, 4)
    own_heads = heads(scene)
    e4m3 = known.e4m3 and shape.chance(0.5)
    if known.e4m3 and scene.kernel is not None:
        e4m3 = scene.kernel == E4M3
    contents = {one.contents for one in (main, extra) if one is not None}
    problem = CacheProblem(
        requests=-(-_tokens(scene, main.topk + (extra.topk if extra else 0), own_heads) // s_q),
        s_q=s_q,
        heads=own_heads,
        main=main,
        extra=extra,
        sink=_sink(scene, 0) if sink else None,
        scale=call.pick(*_decode_scales(contents, sink=sink)) if not e4m3 else None,
        q_scale=2.0 ** call.pick(-3, -1, 0, 2) if e4m3 else None,
        q=shape.mostly("contiguous", *PLACES, "by position"),
        out=shape.pick(None, "contiguous", "slice", "transposed", "odd"),
        index_layout=shape.pick("slice", "contiguous", "odd", "by position"),
        positions=_positions(scene),
    )
    plan = shape.mostly(None, 1, 20, 1000) if scene.big else shape.mostly(1, 7)
    return SparseDecodeCase("", "", problem, multiprocessors=plan, batch_invariant=shape.chance(0.2))


def _lengths(scene: Scene, keys: int) -> tuple[int, ...]:
    """Keys of each request."""
    call = scene.call
    requests = call.size(0, 64 if scene.big else 3)
    each = max(1, keys // max(requests, 1))
    found = [call.size(0, each) for _ in range(requests)]
    if requests and call.chance(0.3):  # one long request among short ones
        found[call.size(0, requests - 1)] = keys // 2
    if call.chance(0.1):
        found = [call.pick(length, -1, -(2**31), 0, 1) for length in found]
    return tuple(found)


def dense_decode(scene: Scene) -> Case:
    """A call of dense attention over a paged cache."""
    facts, shape, call = scene.facts, scene.shape, scene.call
    known = DenseDecodeFacts.of(scene.spec)
    planar, tensor_scale = known.layout.planar, known.layout.tensor_scale
    wrapper = shape.pick(*[name for name in (DECODE_FLASH, DECODE) if name in facts.wrappers])
    s_q = shape.pick(1, 1, 2, 3, 4) if wrapper == DECODE_FLASH else 1
    own_heads = heads(scene)
    kv_heads = 1 if not known.layout.takes_heads or scene.kernel == SWAP_AB or not shape.chance(0.15) else 2
    e4m3 = tensor_scale and wrapper == DECODE_FLASH and shape.chance(0.5)
    if tensor_scale and scene.kernel in (SM90, Q_HALVES):
        e4m3 = scene.kernel == SM90 and DECODE_FLASH in facts.wrappers  # the other wrapper takes no such q
        wrapper = DECODE_FLASH if e4m3 else wrapper
    size = shape.mostly(64, 1, 16, 32, 53, 128, 256)
    lengths = _lengths(scene, 2**15 if scene.big else 200)
    columns = -(-max([0, *lengths]) // size) + call.pick(0, 2, 40, 4000 if scene.big else 3)
    if lengths and call.chance(0.05) and columns * size * len(lengths) < 2**16:
        lengths = (*lengths[:-1], LARGEST)
    memory = ["page gap", "odd"] + ([] if planar else ["row gap"] + (["head gap", "heads first"] * (kv_heads > 1)))
    problem = DenseDecodeProblem(
        lengths=lengths,
        columns=columns,
        s_q=s_q,
        heads=own_heads * kv_heads,
        kv_heads=kv_heads,
        block_size=size,
        causal=wrapper == DECODE_FLASH and shape.chance(0.5),
        window=call.pick("spec", None, call.size(1, 5000)) if known.window is not None else "spec",
        cache=shape.mostly("end to end", *memory),
        poison=call.pick(0xFF, 0x7F) if known.layout.quantised else 0xFF,
        dtype=shape.pick(torch.uint8, torch.int8, torch.float8_e4m3fn) if known.layout.quantised else torch.uint8,
        scale=call.pick(*_decode_scales({"encoded"}, sink=False)) if not e4m3 else None,
        q_scale=0.5 if e4m3 else None,
        q=shape.mostly("contiguous", *PLACES, *(["by position"] if wrapper == DECODE_FLASH else [])),
        out=shape.pick(None, "contiguous", "slice", "transposed", "odd"),
        table=shape.pick("slice", "contiguous", "odd"),
    )
    plan = shape.mostly(None, 1, 20, 1000) if scene.big else shape.mostly(1, 7)
    return DenseDecodeCase("", "", problem, wrapper, multiprocessors=plan, batch_invariant=shape.chance(0.2))


def dense_fwd(scene: Scene) -> Case:
    """A call of multi-head attention."""
    shape, call = scene.shape, scene.call
    own = scene.spec["multi_head"]["num_kv_heads"]
    group = shape.pick(1, 1, 2, 4)
    kv_heads = shape.pick(own or 8, 1, shape.size(1, 16)) if scene.big else shape.size(1, 3)
    count = call.size(0, 24 if scene.big else 3)
    most = max(1, min(2000, 2**24 // (group * kv_heads * 1500))) if scene.big else 30
    requests = []
    for _ in range(count):
        rows = call.size(0, max(1, most // max(1, count // 4)))
        requests.append((rows, call.pick(rows, call.size(0, 1500 if scene.big else 60))))
    return DenseFwdCase(
        "", "", tuple(requests), group * kv_heads, kv_heads,
        causal=shape.chance(0.6),
        scale=call.pick(None, 1.0, 0.25, 30.0),
        before=call.pick(0, 0, 2, 150),
        after=call.pick(0, 0, 3, 70),
        q=shape.mostly("contiguous", *PLACES),
        k=shape.mostly("contiguous", *PLACES),
        v=shape.mostly("contiguous", *PLACES),
        out=shape.pick(None, "contiguous", "slice", "odd"),
        hint=call.pick(None, None, 1, 1 << 20),
    )  # fmt: skip
