"""Cache writers and gathers: the families `cache` and `gather`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from mlagen.bench.check import error_limit, relative_error
from mlagen.bench.package import BenchPackage
from mlagen.bench.shapes import (
    BLOCK_SIZE,
    FILL_TOKENS,
    TENSOR_SCALE,
    Batch,
    batches,
    empty_cache,
    fill,
    rotation,
    rows_of,
    shuffled_pages,
    slots_of,
)
from mlagen.bench.trial import OURS, Call, Entrant, Family, Setting, Trial
from mlagen.layout import CacheLayout, ScalesField
from mlagen.layout.codec import decode, encode, read
from mlagen.work import gather_bytes, write_bytes

EXTRA = "extra_cache."  # module of the second cache's kernels, where they are not the first one's
POISON = 255  # a byte that makes any row NaN or far from right
WRITE_TOLERANCE = 1.1  # times the reference's error that a writer with another rule of scales may have
EAGER_TOKENS = 1


@dataclass(frozen=True)
class WriteInputs:
    """Tensors of a writer's call.

    Attributes:
        latent, rope: [T, d_c] and [T, d_rope], contiguous each; rope is None where the model has none.
        rows: [T, columns], the same columns side by side.
        cache: uint8 [pages, page_bytes], which all sets share.
        slots: i64 [T].
        scale: f32 [1], the tensor's.
    """

    latent: torch.Tensor
    rope: torch.Tensor | None
    rows: torch.Tensor
    cache: torch.Tensor
    slots: torch.Tensor
    scale: torch.Tensor


@dataclass(frozen=True)
class GatherInputs:
    """Tensors of a gather's call.

    Attributes:
        cache: uint8 [pages, page_bytes], which all sets share.
        block_table: i32 [R, pages of a request].
        lengths: i32 [R], tokens of each request.
        starts: i32 [R + 1], where the rows of each request begin in `out`.
        token_to_request: i32 [T].
        scale: f32 [1], the tensor's.
        out: [T, columns].
    """

    cache: torch.Tensor
    block_table: torch.Tensor
    lengths: torch.Tensor
    starts: torch.Tensor
    token_to_request: torch.Tensor
    scale: torch.Tensor
    out: torch.Tensor


@dataclass(frozen=True)
class CacheSide:
    """One of a package's caches, with its own kernels.

    Attributes:
        package: the package.
        prefix: of its kernels' names: nothing, or the module of the second cache's, where they are others.
        layout: its layout.
        block_size: tokens a page.
    """

    package: BenchPackage
    prefix: str
    layout: CacheLayout
    block_size: int

    def kernel(self, name: str) -> Callable[..., Any]:
        """Its own wrapper of that name."""
        return self.package.wrapper(self.prefix + name)

    def scale(self, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        """A tensor's scale as an argument. Kernels have this argument only if the layout has such a scale."""
        return {"scale": scale} if self.layout.tensor_scale else {}

    def rows(self, cache: torch.Tensor) -> torch.Tensor:
        """A cache [pages, page_bytes] as vLLM's callers hold it."""
        return rows_of(self.layout, cache, self.block_size, self.package.dtype)


def block_size_of(package: BenchPackage) -> int:
    """Tokens a page of the package's cache."""
    return package.spec["cache"]["block_size"] or BLOCK_SIZE


def second_side(package: BenchPackage) -> CacheSide:
    """The second cache of a package that has one; its kernels are the first one's, unless the package has others."""
    layout = package.layouts[1]
    assert layout is not None
    prefix = EXTRA if hasattr(package.root, EXTRA.removesuffix(".")) else ""
    return CacheSide(package, prefix, layout, package.spec["extra_cache"]["block_size"] or block_size_of(package))


def sides_of(package: BenchPackage) -> dict[str, CacheSide]:
    """A package's caches that have kernels of their own, by the prefix of those."""
    sides = {"": CacheSide(package, "", package.cached[0], block_size_of(package))}
    if package.layouts[1] is not None:
        second = second_side(package)
        sides.setdefault(second.prefix, second)
    return sides


def side_of(package: BenchPackage, kind: str) -> tuple[CacheSide, str]:
    """Return the side that a batch's kind belongs to, and the kernel's bare name."""
    prefix, _, name = kind.rpartition(".")
    return sides_of(package)[f"{prefix}." if prefix else ""], name


def _concat(side: CacheSide, inputs: WriteInputs) -> Call:
    write, cache = side.kernel("concat_and_cache_mla"), side.rows(inputs.cache)
    return lambda: write(inputs.latent, inputs.rope, cache, inputs.slots, scale=inputs.scale)


def _quantize(side: CacheSide, inputs: WriteInputs) -> Call:
    write = side.kernel("quantize_and_insert_k_cache")
    ue8m0 = any(isinstance(field, ScalesField) and field.dtype == "ue8m0" for field in side.layout.fields)
    arguments, options = (inputs.rows, inputs.cache, inputs.slots, side.block_size, ue8m0), side.scale(inputs.scale)
    return lambda: write(*arguments, **options)


def _dequantize(side: CacheSide, inputs: GatherInputs) -> Call:
    gather = side.kernel("dequantize_and_gather_k_cache")
    out = inputs.out.view(inputs.lengths.shape[0], -1, inputs.out.shape[1])
    arguments, options = (out, inputs.cache, inputs.lengths, None, inputs.block_table), side.scale(inputs.scale)
    return lambda: gather(*arguments, side.block_size, 0, **options)


def _gather(side: CacheSide, inputs: GatherInputs) -> Call:
    gather, cache = side.kernel("gather_and_maybe_dequant_cache"), side.rows(inputs.cache)
    arguments = (cache, inputs.out, inputs.block_table, inputs.starts, inputs.token_to_request, len(inputs.out))
    return lambda: gather(*arguments, scale=inputs.scale)


WRITERS: Mapping[str, Callable[[CacheSide, WriteInputs], Call]] = {
    "concat_and_cache_mla": _concat,
    "quantize_and_insert_k_cache": _quantize,
}
GATHERS: Mapping[str, Callable[[CacheSide, GatherInputs], Call]] = {
    "dequantize_and_gather_k_cache": _dequantize,
    "gather_and_maybe_dequant_cache": _gather,
}


def _shapes(package: BenchPackage, family: str, names: Iterable[str]) -> list[Batch]:
    found = [name for name in names if package.has(name)]
    prefixes = sides_of(package) if found else ()
    return [batch for prefix in prefixes for name in found for batch in batches(family, prefix + name)]


def writer_shapes(package: BenchPackage, heads: Sequence[int] | None) -> list[Batch]:
    """Batches that the package's cache writers are measured at."""
    return _shapes(package, "cache", WRITERS)


def gather_shapes(package: BenchPackage, heads: Sequence[int] | None) -> list[Batch]:
    """Batches that the package's gathers are measured at."""
    return _shapes(package, "gather", GATHERS)


def fill_with(side: CacheSide, pages: torch.Tensor) -> None:
    """Fills a cache [pages, page_bytes] with standard normal rows, by a writer of the package's if it has one."""
    name = next((name for name in WRITERS if side.package.has(name)), None)
    if name is None:
        fill(side.layout, pages, side.block_size)
        return
    slots = pages.shape[0] * side.block_size
    d_c = side.package.facts.d_c
    for first in range(0, slots, FILL_TOKENS):
        slot_mapping = torch.arange(first, min(first + FILL_TOKENS, slots), device=pages.device)
        rows = torch.randn(len(slot_mapping), side.layout.columns, dtype=side.package.dtype, device=pages.device)
        rope = rows[:, d_c:] if side.layout.columns > d_c else None
        scale = torch.full((1,), TENSOR_SCALE, device=pages.device)
        WRITERS[name](side, WriteInputs(rows[:, :d_c], rope, rows, pages, slot_mapping, scale))()


def make_write_inputs(
    batch: Batch, layout: CacheLayout, d_c: int, block_size: int, dtype: torch.dtype, device: torch.device, sets: int
) -> list[WriteInputs]:
    """Rotating input sets of a writer: each has tokens and pages of its own in one cache."""
    pages = shuffled_pages(sets, batch.requests, batch.pages_each(block_size), device=device)
    cache = empty_cache(layout, pages.numel(), block_size, device)
    slots = slots_of(pages, batch.tokens_each, block_size).view(sets, batch.tokens)
    rows = torch.randn(sets, batch.tokens, layout.columns, dtype=dtype, device=device)
    latent = rows[..., :d_c].contiguous()
    rope = rows[..., d_c:].contiguous() if layout.columns > d_c else None
    scale = torch.full((1,), TENSOR_SCALE, device=device)
    return [
        WriteInputs(latent[number], None if rope is None else rope[number], rows[number], cache, slots[number], scale)
        for number in range(sets)
    ]


def make_gather_inputs(
    batch: Batch, layout: CacheLayout, block_size: int, dtype: torch.dtype, device: torch.device, sets: int
) -> list[GatherInputs]:
    """Rotating input sets of a gather: each has requests and an output of its own; all lie in one cache."""
    pages = shuffled_pages(sets, batch.requests, batch.pages_each(block_size), device=device)
    cache = empty_cache(layout, pages.numel(), block_size, device)
    fill(layout, cache, block_size)
    out = torch.empty(sets, batch.tokens, layout.columns, dtype=dtype, device=device)
    lengths = torch.full((batch.requests,), batch.tokens_each, dtype=torch.int32, device=device)
    requests = torch.arange(batch.requests + 1, dtype=torch.int32, device=device)
    starts = requests * batch.tokens_each
    token_to_request = requests[:-1].repeat_interleave(batch.tokens_each)
    scale = torch.full((1,), TENSOR_SCALE, device=device)
    return [
        GatherInputs(cache, pages[number], lengths, starts, token_to_request, scale, out[number])
        for number in range(sets)
    ]


def write_error(layout: CacheLayout, block_size: int, inputs: WriteInputs, call: Call) -> float:
    """Relative error of the cache's contents after a call; NaN where a token was not written."""
    inputs.cache.fill_(POISON)
    call()
    return relative_error(read(layout, inputs.cache, block_size, inputs.slots, TENSOR_SCALE), inputs.rows)


def write_limit(layout: CacheLayout, inputs: WriteInputs) -> float:
    """Largest error of a correct writer: that of the reference's own quantisation, and a little."""
    kept = decode(layout, encode(layout, inputs.rows, TENSOR_SCALE), TENSOR_SCALE)
    return WRITE_TOLERANCE * relative_error(kept, inputs.rows)


def gather_error(layout: CacheLayout, block_size: int, inputs: GatherInputs, call: Call) -> float:
    """Relative error of a call's rows against the reference's."""
    tokens = inputs.out.shape[0] // inputs.lengths.shape[0]
    slots = slots_of(inputs.block_table, tokens, block_size).flatten()
    inputs.out.fill_(float("nan"))
    call()
    return relative_error(inputs.out, read(layout, inputs.cache, block_size, slots, TENSOR_SCALE))


def writer_trials(setting: Setting) -> Callable[[Batch], Trial[WriteInputs]]:
    """Makes batches of the writers ready."""
    package, device = setting.package, setting.device

    def trial(batch: Batch) -> Trial[WriteInputs]:
        side, name = side_of(package, batch.kind)
        layout, block_size = side.layout, side.block_size
        moved = write_bytes(batch.tokens, layout.columns, layout.row_bytes)
        sets = rotation(moved, setting.l2_bytes)
        inputs = make_write_inputs(batch, layout, package.facts.d_c, block_size, package.dtype, device, sets)
        return Trial(
            inputs=inputs,
            entrants=[Entrant(OURS, partial(WRITERS[name], side))],
            error_of=partial(write_error, layout, block_size, inputs[0]),
            error_limit=write_limit(layout, inputs[0]),
            flops=0,
            bytes_moved=moved,
            roof=setting.copy_roof,
            graph_only=True,
            launch_bound=batch.tokens <= EAGER_TOKENS,
        )

    return trial


def gather_trials(setting: Setting) -> Callable[[Batch], Trial[GatherInputs]]:
    """Makes batches of the gathers ready."""
    package, device = setting.package, setting.device

    def trial(batch: Batch) -> Trial[GatherInputs]:
        side, name = side_of(package, batch.kind)
        layout, block_size = side.layout, side.block_size
        pages = batch.requests * batch.pages_each(block_size)
        integers = batch.requests  # lengths; or where requests begin, and each token's request
        if name == "gather_and_maybe_dequant_cache":
            integers += 1 + batch.tokens
        moved = gather_bytes(batch.tokens, layout.columns, layout.row_bytes, pages, integers=integers)
        sets = rotation(moved, setting.l2_bytes)
        inputs = make_gather_inputs(batch, layout, block_size, package.dtype, device, sets)
        return Trial(
            inputs=inputs,
            entrants=[Entrant(OURS, partial(GATHERS[name], side))],
            error_of=partial(gather_error, layout, block_size, inputs[0]),
            error_limit=error_limit(package.dtype),
            flops=0,
            bytes_moved=moved,
            roof=setting.copy_roof,
            graph_only=True,
            launch_bound=batch.tokens <= EAGER_TOKENS,
        )

    return trial


MODULES = ("cache", "extra_cache")
BENCHMARKS = {
    "cache": Family(writer_shapes, writer_trials, MODULES),
    "gather": Family(gather_shapes, gather_trials, MODULES),
}
