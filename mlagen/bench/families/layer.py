"""The attention of a DeepSeek V4 layer in a decode step, all but its matrix products: the benchmark `layer`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from mlagen.bench.check import error_limit
from mlagen.bench.families import mqa_logits as scored
from mlagen.bench.families.cache import fill_with, second_side, sides_of
from mlagen.bench.families.compressor import EPS, KINDS, POISON, CompressorInputs, compress_call, rows_in, save_call
from mlagen.bench.families.compressor import Rows as CompressedRows
from mlagen.bench.families.indexer_cache import keys_of, query_arguments
from mlagen.bench.families.indexer_select import PAGED
from mlagen.bench.families.sparse_decode import WRAPPER as ATTEND
from mlagen.bench.families.sparse_decode import Cached, SparseDecodeInputs, contexts_needed, reference
from mlagen.bench.package import BenchPackage
from mlagen.bench.rotation import Angles, angle_table
from mlagen.bench.shapes import default_heads, empty_cache, fill, sets_needed, shuffled_pages, slots_of
from mlagen.bench.trial import OURS, Call, Entrant, Family, Setting, Trial
from mlagen.layout.codec import planes_of
from mlagen.verify.compressor.side import COMPRESS, SAVE
from mlagen.verify.indexer_cache.side import QUERY
from mlagen.verify.prologue.reference import normalise, turned_queries
from mlagen.verify.prologue.side import PADDED, side_of
from mlagen.work import attention_bytes, compress_bytes, flops, logits_bytes, logits_flops, prologue_bytes, states_bytes

NEEDED = (PADDED, SAVE, COMPRESS, QUERY, PAGED, scored.SCHEDULE, ATTEND)
CONTEXT = 32 << 10  # tokens of a request
REQUESTS = (1, 16, 128)  # of one token each
EAGER_TOKENS = 1


class Ratio(NamedTuple):
    """How a layer compresses.

    Attributes:
        rows: the call that makes rows for attention, in `KINDS` of the compressor.
        keys: the one that makes the indexer's keys; None: tokens attend to every row.
    """

    rows: str
    keys: str | None


RATIOS = {4: Ratio(f"{COMPRESS} of 4", f"{COMPRESS} of 4, keys"), 128: Ratio(f"{COMPRESS} of 128", None)}


@dataclass(frozen=True)
class LayerShape:
    """Sizes of a step.

    Attributes:
        ratio: tokens that a compressed row stands for.
        requests: of one query token each.
        num_heads: query heads.
        context: tokens of a request.
        picked: compressed rows that a token attends to.
    """

    ratio: int
    requests: int
    num_heads: int
    context: int
    picked: int

    @property
    def kind(self) -> str:
        """Layers of one ratio."""
        return f"layer of {self.ratio}"

    @property
    def family(self) -> str:
        """Name of the benchmark."""
        return "layer"

    @property
    def tokens(self) -> int:
        """Query tokens of the step."""
        return self.requests

    def __str__(self) -> str:
        return f"{self.kind} {self.requests} x h{self.num_heads}, {self.context >> 10}K tokens, {self.picked} rows"


@dataclass(frozen=True)
class Scored:
    """Inputs of a layer's indexer besides keys.

    Attributes:
        q: bf16 [T, heads, columns].
        weights: f32 [T, heads].
        lengths: i32 [T, 1], the keys that a token sees.
        pages: uint8 [pages, page_bytes] of keys.
        made: the inputs of the compressor's calls for keys.
        picks: i32 [T, picked], room for them.
    """

    q: torch.Tensor
    weights: torch.Tensor
    lengths: torch.Tensor
    pages: torch.Tensor
    made: CompressorInputs
    picks: torch.Tensor


@dataclass(frozen=True)
class LayerInputs:
    """Tensors of a step. Its results but the last are inputs of later calls.

    Attributes:
        q: bf16 [T, num_heads, d_qk], neither normalised nor rotated.
        row: bf16 [T, d_qk] of the window, normalised.
        requests: i32 [T].
        slots: i64 [T], where the window's rows go.
        window: the first cache, and the slots of each token's window.
        made: the inputs of the compressor's calls for rows.
        rows: the second cache and room for the slots of the rows that each token attends to, i32 [T, 1, picked].
        table: i32 [T, pages] of the rows and of keys.
        scored: inputs of the indexer; None: tokens attend to every row, and `rows` has the slots.
        angles: positions, and the table of angles.
        sink: f32 [num_heads].
    """

    q: torch.Tensor
    row: torch.Tensor
    requests: torch.Tensor
    slots: torch.Tensor
    window: Cached
    made: CompressorInputs
    rows: Cached
    table: torch.Tensor
    scored: Scored | None
    angles: Angles
    sink: torch.Tensor

    @property
    def scale(self) -> float:
        """Factor of attention's logits."""
        return float(self.q.shape[-1] ** -0.5)


def layer_shapes(package: BenchPackage, heads: Sequence[int] | None) -> list[LayerShape]:
    """Steps that a package is measured at, if it has the whole path and rotates attention's output back, in bf16."""
    if not package.facts.out_rope or package.facts.out_heads or not all(map(package.has, NEEDED)):
        return []
    found = []
    for ratio, calls in RATIOS.items():
        picked = package.facts.topk if calls.keys else CONTEXT // ratio
        for num_heads in heads or default_heads(package.facts.num_heads):
            found += [LayerShape(ratio, requests, num_heads, CONTEXT, picked) for requests in REQUESTS]
    return found


def compressor_calls(
    shape: LayerShape, package: BenchPackage, inputs: LayerInputs, save: Any, compress: Callable[..., Call]
) -> list[Call]:
    """Calls that save states and make rows, and keys where there is an indexer.

    Args:
        shape: the step's sizes.
        package: the package.
        inputs: its tensors.
        save: a function like `save_partial_states`.
        compress: makes a call of rows of one cache from its `Rows` and inputs.
    """
    calls = []
    ratio = RATIOS[shape.ratio]
    for name, made in ((ratio.rows, inputs.made), (ratio.keys, inputs.scored.made if inputs.scored else None)):
        if name is not None and made is not None:
            rows = rows_in(package, KINDS[name])
            assert rows is not None
            calls += [save_call(save, rows, made), compress(rows, made)]
    return calls


def ours(shape: LayerShape, package: BenchPackage, inputs: LayerInputs) -> Call:
    """The step by the package's functions."""
    insert, query, pick, attend = (package.wrapper(name) for name in (PADDED, QUERY, PAGED, ATTEND))
    compress = partial(compress_call, package.wrapper(COMPRESS), metadata=False)
    made = compressor_calls(shape, package, inputs, package.wrapper(SAVE), compress)
    angles, indexed, rows, heads = inputs.angles, inputs.scored, inputs.rows, shape.num_heads
    where = (inputs.window.pages, inputs.slots, angles.positions, angles.table, heads, EPS, inputs.window.block_size)
    metadata, _ = package.wrapper("get_mla_metadata")()
    d_v, dtype = package.facts.d_v, inputs.q.dtype
    attended = {
        "softmax_scale": inputs.scale,
        "is_fp8_kvcache": True,
        "indices": inputs.window.indices,
        "attn_sink": inputs.sink,
        "extra_k_cache": rows.view(dtype),
        "extra_indices_in_kvcache": rows.indices,
        **angles.arguments,
    }
    main = inputs.window.view(dtype)
    if indexed is not None:
        keys = keys_of(package)
        schedule = scored.schedule_of(package.wrapper(scored.SCHEDULE), indexed.lengths, keys.block_size)
        asked = query_arguments(keys, angles.positions, indexed.q, angles.table, indexed.weights)
        pages = keys.rows(indexed.pages)[:, :, None]
        room = {"out": indexed.picks, "slots": rows.indices[:, 0], "row_to_batch": inputs.requests}

    def call() -> Any:
        q = insert(inputs.q, inputs.row, *where)
        for each in made:
            each()
        if indexed is not None:
            values, weights = query(*asked)
            sizes = (indexed.lengths, inputs.table, schedule, shape.context // shape.ratio, shape.picked)
            pick((values[:, None], None), pages, weights, *sizes, **room)
        return attend(q[:, None], main, None, None, d_v, metadata, **attended)[0]

    return call


class _Caches:
    """The caches of many requests, with pages in no order. Input sets are runs of requests."""

    def __init__(self, setting: Setting, shape: LayerShape) -> None:
        self.setting, self.shape, self.package = setting, shape, setting.package
        self.device = setting.device
        self.main, self.extra = sides_of(self.package)[""], second_side(self.package)
        self.keys = keys_of(self.package) if RATIOS[shape.ratio].keys else None
        row_bytes = self.extra.layout.row_bytes + (self.keys.layout.row_bytes if self.keys else 0)
        each = -(-shape.context // shape.ratio // self.extra.block_size)
        self.count = contexts_needed(row_bytes, shape.context // shape.ratio, setting.l2_bytes, 2 * shape.requests)
        self.table = shuffled_pages(self.count, each, device=self.device)
        self.rows = empty_cache(self.extra.layout, self.table.numel(), self.extra.block_size, self.device)
        fill_with(self.extra, self.rows)
        if self.keys is not None:
            self.key_pages = empty_cache(self.keys.layout, self.table.numel(), self.keys.block_size, self.device)
            fill(self.keys.layout, self.key_pages, self.keys.block_size)
        # Of the window, the pages of a request's last tokens.
        self.last = 1 + -(-int(self.package.attention_spec["window"]) // self.main.block_size) + 1
        self.window_table = shuffled_pages(self.count, self.last, device=self.device)
        self.window = empty_cache(self.main.layout, self.window_table.numel(), self.main.block_size, self.device)
        fill_with(self.main, self.window)
        self.angles = angle_table(shape.context, self.package.facts.d_rope, self.device)

    @property
    def sets(self) -> int:
        """Input sets of a rotation."""
        return max(2, self.count // self.shape.requests)

    def _window_slots(self, contexts: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Slots of positions [T, any] in the window's cache. Its tables begin at a request's last pages."""
        size = self.main.block_size
        first = self.shape.context // size - self.last
        pages = self.window_table[contexts[:, None], positions // size - first].long()
        return pages * size + positions % size

    def _compressed(self, name: str, contexts: torch.Tensor, positions: torch.Tensor) -> CompressorInputs:
        """The inputs of the calls that make rows of a cache, with states of their own."""
        rows = rows_in(self.package, KINDS[name])
        assert rows is not None
        kind, width, device, tokens = rows.kind, rows.width, self.device, len(positions)
        entries = kind.ratio * (2 if kind.overlap else 1) // kind.block + 2
        table = torch.zeros(tokens, self.shape.context // kind.block, dtype=torch.int32, device=device)
        table[:, -entries:] = shuffled_pages(tokens, entries, device=device)
        groups, size = positions // kind.ratio, rows.block_size
        slots = self.table[contexts, groups // size].long() * size + groups % size
        states = torch.randn(tokens * entries, kind.block, 2 * width, device=device)
        pages = table[torch.arange(tokens, device=device), positions // kind.block].long()
        return CompressorInputs(
            kv=torch.randn(tokens, width, device=device),
            scores=torch.randn(tokens, width, device=device),
            ape=torch.randn(kind.ratio, width, device=device),
            states=states,
            requests=torch.arange(tokens, dtype=torch.int32, device=device),
            positions=positions,
            state_slots=pages * kind.block + positions % kind.block,
            slots=torch.where((positions + 1) % kind.ratio == 0, slots, -1),
            table=table,
            angles=self.angles,
            weight=torch.rand(rows.side.columns, device=device).to(self.package.dtype) + 0.5,
            cache=self.rows if kind.short == "rows" else self.key_pages,
            scale=torch.ones(1, device=device),
        )

    def inputs(self, number: int) -> LayerInputs:
        """Input set `number`. Requests end at different places of a group, the first one at its end."""
        shape, package, device, dtype = self.shape, self.package, self.device, self.package.dtype
        tokens, facts, ratio = shape.requests, package.facts, RATIOS[shape.ratio]
        requests = torch.arange(tokens, dtype=torch.int32, device=device)
        contexts = (number * tokens + requests.long()) % self.count
        positions = shape.context - 1 - requests.long() % shape.ratio
        window = int(package.attention_spec["window"])
        seen = positions[:, None] - torch.arange(window - 1, -1, -1, device=device)
        table, size = self.table[contexts], self.extra.block_size
        if ratio.keys is None:  # every row of the request, as engines write it once for all layers
            every = slots_of(table, shape.picked, size).int()
            numbers = torch.arange(shape.picked, device=device)
            every[numbers >= (positions[:, None] + 1) // shape.ratio] = -1
        else:
            every = torch.full((tokens, shape.picked), -1, dtype=torch.int32, device=device)
        indexed = None
        if ratio.keys is not None and self.keys is not None:
            side = self.keys.side
            indexed = Scored(
                q=torch.randn(tokens, side.num_heads, side.layout.columns, dtype=dtype, device=device),
                weights=torch.randn(tokens, side.num_heads, device=device),
                lengths=((positions + 1) // shape.ratio).int()[:, None].contiguous(),
                pages=self.key_pages,
                made=self._compressed(ratio.keys, contexts, positions),
                picks=torch.empty(tokens, shape.picked, dtype=torch.int32, device=device),
            )
        slots = self._window_slots(contexts, seen)
        return LayerInputs(
            q=torch.randn(tokens, shape.num_heads, facts.d_qk, dtype=dtype, device=device),
            row=torch.randn(tokens, facts.d_qk, dtype=dtype, device=device),
            requests=requests,
            slots=slots[:, -1].contiguous(),
            window=Cached(self.main.layout, self.main.block_size, self.window, slots.int()[:, None].contiguous()),
            made=self._compressed(ratio.rows, contexts, positions),
            rows=Cached(self.extra.layout, size, self.rows, every[:, None].contiguous()),
            table=table.contiguous(),
            scored=indexed,
            angles=Angles(positions, self.angles),
            sink=torch.randn(shape.num_heads, device=device),
        )


def layer_error(shape: LayerShape, package: BenchPackage, inputs: LayerInputs, call: Call) -> float:
    """Error of attention's output over rows as they are stored and picked; infinity for too few picks.

    Rows that the step writes are NaN before. The values of these rows, and the choice of picks, are compared in the
    benchmarks of each function.
    """
    written = [(inputs.window, inputs.slots), (inputs.rows, inputs.made.slots[inputs.made.slots >= 0])]
    for cached, slots in written:
        for plane in planes_of(cached.layout, cached.pages, cached.block_size):
            plane[slots // cached.block_size, slots % cached.block_size] = POISON
    side, rows, indexed = side_of(package.spec), inputs.rows, inputs.scored
    assert side is not None
    if indexed is not None:
        indexed.picks.fill_(-1)
        call()
        counts = (indexed.picks >= 0).sum(1, keepdim=True)
        if not torch.equal(counts, indexed.lengths.clamp(max=shape.picked).long()):
            return float("inf")
        pages = inputs.table.gather(1, (indexed.picks.clamp(min=0) // rows.block_size).long())
        slots = torch.where(indexed.picks >= 0, pages * rows.block_size + indexed.picks % rows.block_size, -1)
        rows = replace(rows, indices=slots[:, None])
    table = (inputs.angles.table, inputs.angles.positions)
    q, _ = turned_queries(side, normalise(inputs.q.double(), None, EPS), *table)
    given = SparseDecodeInputs(
        q=q.to(inputs.q.dtype)[:, None],
        main=inputs.window,
        extra=rows,
        d_v=package.facts.d_v,
        sm_scale=inputs.scale,
        attn_sink=inputs.sink,
        topk_length=None,
        extra_topk_length=None,
        k_scale=inputs.made.scale,
        angles=inputs.angles,
    )
    return reference(given, package.facts.partials).error_of(call)


def _moved(shape: LayerShape, package: BenchPackage) -> tuple[int, int]:
    """FLOPs and fewest bytes of a step."""
    facts, tokens, (main, extra) = package.facts, shape.tokens, package.cached
    assert extra is not None
    window = int(package.attention_spec["window"])
    keys = window + shape.picked
    kv_bytes = tokens * (window * main.row_bytes + shape.picked * extra.row_bytes)
    moved = attention_bytes(tokens, shape.num_heads, keys, facts.d_qk, facts.d_v, kv_bytes)
    moved += prologue_bytes(tokens, shape.num_heads, facts.d_qk, facts.d_qk, main.row_bytes, 4 * facts.d_rope)
    work = flops(tokens, shape.num_heads, keys, facts.d_qk, facts.d_v)
    found = [rows_in(package, KINDS[name]) for name in RATIOS[shape.ratio] if name is not None]
    for rows in found:
        assert isinstance(rows, CompressedRows)
        made, side = -(-tokens // shape.ratio), rows.side
        group = shape.ratio * (2 if rows.kind.overlap else 1)
        moved += states_bytes(tokens, rows.width)
        moved += compress_bytes(tokens, made, group, side.columns, side.layout.row_bytes, 4 * side.rope)
    if RATIOS[shape.ratio].keys:
        layout, heads = scored.layout_of(package), package.spec["indexer"]["num_heads"]
        pairs = tokens * shape.context // shape.ratio
        moved += logits_bytes((tokens * heads + pairs) * layout.row_bytes, tokens * heads, 0)
        work += logits_flops(heads, pairs, layout.columns)
    return work, moved


def layer_trials(setting: Setting) -> Callable[[LayerShape], Trial[LayerInputs]]:
    """Makes steps ready."""
    package = setting.package

    def trial(shape: LayerShape) -> Trial[LayerInputs]:
        work, moved = _moved(shape, package)
        caches = _Caches(setting, shape)
        inputs = [caches.inputs(number) for number in range(min(caches.sets, sets_needed(moved, setting.l2_bytes)))]
        return Trial(
            inputs=inputs,
            entrants=[Entrant(OURS, partial(ours, shape, package))],
            error_of=partial(layer_error, shape, package, inputs[0]),
            error_limit=error_limit(package.dtype, package.facts.partials),
            flops=work,
            bytes_moved=moved,
            roof=setting.roof,
            graph_only=True,
            launch_bound=shape.tokens <= EAGER_TOKENS,
        )

    return trial


MEASURED = ("prologue", "compressor", "indexer_cache", "indexer_select", "sparse_decode")
BENCHMARKS = {"layer": Family(layer_shapes, layer_trials, MEASURED)}
