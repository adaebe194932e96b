"""Index kernels: the family `indices`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from mlagen.bench.check import wrong_share
from mlagen.bench.families.cache import EAGER_TOKENS, block_size_of
from mlagen.bench.package import BenchPackage
from mlagen.bench.shapes import Batch, batches, rotation, shuffled_pages
from mlagen.bench.trial import OURS, Call, Entrant, Family, Setting, Trial
from mlagen.work import combine_bytes, map_bytes

CONTEXT = 128 << 10  # tokens of a request that indices may name
GLOBAL_TOPK = (512, 2048)
COMPRESS_RATIO = 4  # tokens a compressed row stands for
WINDOW = 128  # where the spec names none
COMBINED_MULTIPLE = 128  # indices; FlashMLA takes rows of such a length
GLOBAL, COMBINE, CONVERT = (
    "compute_global_topk_indices_and_lens",
    "combine_topk_swa_indices",
    "triton_convert_req_index_to_global_index",
)


@dataclass(frozen=True)
class MapInputs:
    """Tensors of a call that maps indices to slots.

    Attributes:
        indices: i32 [T, topk], tokens of their own request.
        requests: i32 [T].
        block_table: i32 [R, pages].
        block_size: tokens a page.
        valid: bool [T], all true.
    """

    indices: torch.Tensor
    requests: torch.Tensor
    block_table: torch.Tensor
    block_size: int
    valid: torch.Tensor

    @property
    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots i32 [T, topk], and how many a token has."""
        pages = self.block_table[self.requests.long()[:, None], self.indices.long() // self.block_size]
        slots = pages * self.block_size + self.indices % self.block_size
        return slots, torch.full_like(self.requests, self.indices.shape[1])


@dataclass(frozen=True)
class CombineInputs:
    """Tensors of a call that combines top-k indices with a window.

    Attributes:
        indices: i32 [T, topk].
        query_starts: i32 [R + 1].
        seq_lens, gather_lens: i32 [R].
        window, ratio: size of the window, and tokens that a compressed row stands for.
        rows, compressed: rows a request has in the buffer that was gathered, and how many of them are compressed.
    """

    indices: torch.Tensor
    query_starts: torch.Tensor
    seq_lens: torch.Tensor
    gather_lens: torch.Tensor
    window: int
    ratio: int
    rows: int
    compressed: int

    @property
    def arguments(self) -> tuple[Any, ...]:
        """As the wrapper takes them."""
        sizes = (self.window, self.ratio, self.indices.shape[1], self.rows, self.compressed)
        return self.indices, self.query_starts, self.seq_lens, self.gather_lens, *sizes

    def expected(self, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows i32 [T, width], -1 past the window, and how many a token has; all contexts are long enough."""
        tokens, topk = self.indices.shape
        each = tokens // self.seq_lens.shape[0]
        token = torch.arange(tokens, device=self.indices.device)
        request = token // each
        position = self.seq_lens[request] - each + token % each
        first = position - self.window + 1 - (self.seq_lens - self.gather_lens)[request]
        window = (self.rows * request + self.compressed + first)[:, None] + torch.arange(
            self.window, device=self.indices.device
        )
        out = torch.full((tokens, width), -1, dtype=torch.int32, device=self.indices.device)
        out[:, :topk] = self.indices + (self.rows * request)[:, None]
        out[:, topk : topk + self.window] = window
        return out, torch.full((tokens,), topk + self.window, dtype=torch.int32, device=self.indices.device)


def indices_shapes(package: BenchPackage, heads: Sequence[int] | None) -> list[Batch]:
    """Batches that the package's index kernels are measured at."""
    own = (package.facts.topk,) if package.facts.topk else GLOBAL_TOPK
    topk = {GLOBAL: GLOBAL_TOPK, COMBINE: own, CONVERT: own}
    return [batch for name in topk if package.has(name) for batch in batches("indices", name, topk[name])]


def make_map_inputs(batch: Batch, block_size: int, device: torch.device, sets: int) -> list[MapInputs]:
    """Rotating input sets of a call that maps indices: each has indices and a block table of its own."""
    tables = shuffled_pages(sets, batch.requests, CONTEXT // block_size, device=device)
    shape = (sets, batch.tokens, batch.topk)
    indices = torch.randint(0, CONTEXT // block_size * block_size, shape, dtype=torch.int32, device=device)
    requests = torch.arange(batch.requests, dtype=torch.int32, device=device).repeat_interleave(batch.tokens_each)
    valid = torch.ones(batch.tokens, dtype=torch.bool, device=device)
    return [MapInputs(indices[number], requests, tables[number], block_size, valid) for number in range(sets)]


def make_combine_inputs(batch: Batch, window: int, device: torch.device, sets: int) -> list[CombineInputs]:
    """Rotating input sets of a call that combines. Requests have contexts that are long enough for full rows."""
    each = batch.tokens_each
    length = COMPRESS_RATIO * batch.topk + window + each
    gathered = each + window - 1
    compressed = length // COMPRESS_RATIO
    shape = (sets, batch.tokens, batch.topk)
    indices = torch.randint(0, compressed, shape, dtype=torch.int32, device=device)
    starts = torch.arange(batch.requests + 1, dtype=torch.int32, device=device) * each
    lengths = torch.full((batch.requests,), length, dtype=torch.int32, device=device)
    gather_lengths = torch.full((batch.requests,), gathered, dtype=torch.int32, device=device)
    rows = compressed + gathered
    return [
        CombineInputs(indices[number], starts, lengths, gather_lengths, window, COMPRESS_RATIO, rows, compressed)
        for number in range(sets)
    ]


def global_call(function: Callable[..., Any], inputs: MapInputs) -> Call:
    """A call of `compute_global_topk_indices_and_lens`, ours or a peer's."""
    arguments = (inputs.indices, inputs.requests, inputs.block_table, inputs.block_size, inputs.valid)
    return lambda: function(*arguments)


def convert_call(function: Callable[..., Any], inputs: MapInputs) -> Call:
    """A call of `triton_convert_req_index_to_global_index`, ours or a peer's."""
    arguments, topk = (inputs.requests, inputs.block_table, inputs.indices, inputs.block_size), inputs.indices.shape[1]
    return lambda: function(*arguments, NUM_TOPK_TOKENS=topk)


def combine_call(function: Callable[..., Any], inputs: CombineInputs) -> Call:
    """A call of `combine_topk_swa_indices`, ours or a peer's."""
    arguments = inputs.arguments
    return lambda: function(*arguments)


CALLS: dict[str, Callable[[Callable[..., Any], Any], Call]] = {
    GLOBAL: global_call,
    CONVERT: convert_call,
    COMBINE: combine_call,
}


def _tensors(result: object) -> list[torch.Tensor]:
    found = result if isinstance(result, tuple) else (result,)
    return [each for each in found if isinstance(each, torch.Tensor)]


def _poison(result: object) -> None:
    for each in _tensors(result):
        each.fill_(-2)


def index_error(inputs: MapInputs | CombineInputs, call: Call) -> float:
    """Share of a call's wrong entries. The results of a first call are poisoned, and their memory is reused."""
    _poison(call())
    got = _tensors(call())
    expected = inputs.expected if isinstance(inputs, MapInputs) else inputs.expected(got[0].shape[1])
    return max(wrong_share(one, other) for one, other in zip(got, expected, strict=False))


def combined_width(indices: int) -> int:
    """Columns of a row of so many combined indices."""
    return -(-indices // COMBINED_MULTIPLE) * COMBINED_MULTIPLE


def indices_trials(setting: Setting) -> Callable[[Batch], Trial[Any]]:
    """Makes batches of the index kernels ready."""
    package, device = setting.package, setting.device
    block_size = block_size_of(package)
    window = package.attention_spec.get("window") or WINDOW

    def trial(batch: Batch) -> Trial[Any]:
        inputs: Sequence[MapInputs | CombineInputs]
        if batch.kind == COMBINE:
            width = combined_width(batch.topk + window)
            moved = combine_bytes(batch.tokens, batch.topk, width, batch.requests)
            inputs = make_combine_inputs(batch, window, device, rotation(moved, setting.l2_bytes))
        else:
            pages = batch.requests * (CONTEXT // block_size)
            moved = map_bytes(batch.tokens, batch.topk, pages, counts=batch.kind == GLOBAL)
            inputs = make_map_inputs(batch, block_size, device, rotation(moved, setting.l2_bytes))
        call_of = CALLS[batch.kind]
        return Trial(
            inputs=inputs,
            entrants=[Entrant(OURS, partial(call_of, package.wrapper(batch.kind)))],
            error_of=partial(index_error, inputs[0]),
            error_limit=0.0,
            flops=0,
            bytes_moved=moved,
            roof=setting.copy_roof,
            graph_only=True,
            launch_bound=batch.tokens <= EAGER_TOKENS,
        )

    return trial


BENCHMARKS = {"indices": Family(indices_shapes, indices_trials, ("indices",))}
