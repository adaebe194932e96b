"""The writers and gathers of a cache: their cases and the code that runs them. Every comparison is exact.

Written caches are compared byte for byte, the bytes around and between rows too, with what the reference writer of
mlagen.layout.codec makes of them; gathered rows with what its reader finds, where any NaN equals any other. Caches
hold random bytes, and so every bit pattern of values and scales; what must not be touched in an output is poisoned.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from mlagen.layout import CacheLayout, PadField, layouts_of
from mlagen.layout.codec import planes_of, read, write
from mlagen.verify.cases import Case
from mlagen.verify.checks import CaseFailedError, Subject
from mlagen.verify.facts import Facts
from mlagen.verify.inputs import GUARD, INT32, INT64, LAYOUTS, Placed, allocate, bits, place
from mlagen.verify.results import Figure

CONCAT, INSERT = "concat_and_cache_mla", "quantize_and_insert_k_cache"
REQUESTS, TOKENS = "dequantize_and_gather_k_cache", "gather_and_maybe_dequant_cache"
SHORT = {CONCAT: "concat", INSERT: "insert", REQUESTS: "requests", TOKENS: "tokens"}
MAIN, EXTRA = "", "extra_cache"  # modules of the package whose wrappers are meant; the package itself
GARBAGE = 2147480000  # what unused entries of a block table hold
TENSOR_SCALE = 0.37
FAR_PAGES = 60_000
POISON = 0xA5  # bytes around a cache

# Magnitudes of tiles about which a scale's rounding and its floor turn, and of which a sixth is an e4m3 number.
AMAX = (
    *(0.0, 1e-5, 1e-4, 0.0447, 0.0448, 447.0, 448.0, 449.0),
    *(448.0 * 2.0**k for k in range(-22, 7)),
    *(6.0 * sixth for sixth in (1.0, 1.125, 1.375, 1.625, 1.875)),
)


@dataclass(frozen=True)
class Pages:
    """How a cache lies in memory.

    Attributes:
        block_size: tokens a page.
        form: "rows" [pages, block_size, row]; "pages" [pages, bytes of a page].
        dtype: torch's name of the dtype of a quantised cache.
        page_gap: further bytes a page.
        row_gap: further bytes a row, of layouts whose rows may lie apart.
        offset: by how many of a row's widest values it begins off 16 bytes.
        far: it is longer than 2^31 bytes, and only its last pages are used.
        single: it has one page.
    """

    block_size: int = 64
    form: str = "rows"
    dtype: str = "uint8"
    page_gap: int = 0
    row_gap: int = 0
    offset: int = 0
    far: bool = False
    single: bool = False


@dataclass(frozen=True)
class CacheCase(Case):
    """A call of a wrapper that writes or gathers tokens.

    Attributes:
        wrapper: the wrapper.
        module: whose: MAIN or EXTRA.
        pages: how the cache lies in memory.
        check: what is asked of it, a key of CHECKS.
    """

    wrapper: str
    module: str
    pages: Pages = Pages()
    check: str = "reference"


@dataclass(frozen=True)
class WriteCase(CacheCase):
    """A call of a writer.

    Attributes:
        tokens: rows of the source; None: as many as `values` needs.
        values: pattern of the rows, a key of VALUES.
        slots: pattern of slot_mapping, a key of SLOTS.
        source: layout in memory of the rows, a key of mlagen.verify.inputs.LAYOUTS.
        k_pe: form of k_pe: "2d", "3d", "none" or "empty".
    """

    tokens: int | None = 20
    values: str = "random"
    slots: str = "shuffled"
    source: str = "contiguous"
    k_pe: str = "2d"


@dataclass(frozen=True)
class GatherCase(CacheCase):
    """A call of a gather.

    Attributes:
        requests: (first position, tokens) that are gathered of each request.
        lens: of a gather by request: "given", or "none": from the first token on, all of them.
        starts: of a gather by token: "given", or "none": from the first token on.
        spare: rows of the output that are not written, and columns of the block table that no token needs.
        offset: where in the output a request's first token goes.
        table: pattern of the block table, a key of TABLES.
        out, memory: layout in memory of the output and of the block table.
        odd: what is odd about the integers: a key of ODD, or nothing.
    """

    requests: tuple[tuple[int, int], ...] = ((0, 9), (70, 5), (128, 0), (61, 14))
    lens: str = "given"
    starts: str = "given"
    spare: int = 3
    offset: int = 0
    table: str = "garbage"
    out: str = "contiguous"
    memory: str = "slice"
    odd: str = ""


@dataclass(frozen=True)
class CacheRefusalCase(Case):
    """A call that a wrapper must refuse with a ValueError or TypeError that names the argument.

    Attributes:
        wrapper: the wrapper.
        module: whose: MAIN or EXTRA.
        argument: the argument that is off.
        apply: makes it so.
        says: what else the error must say.
    """

    wrapper: str
    module: str
    argument: str
    apply: Callable[[dict[str, Any]], None]
    says: str = ""


KINDS = (WriteCase, GatherCase, CacheRefusalCase)


@dataclass(frozen=True)
class Side:
    """One of the caches of a package, and what the model says of its rows."""

    module: str
    layout: CacheLayout
    facts: Facts

    @property
    def dtype(self) -> torch.dtype:
        """The model's dtype."""
        found = getattr(torch, self.facts.dtype)
        assert isinstance(found, torch.dtype)
        return found

    @property
    def unit(self) -> int:
        """Bytes of an element of the cache tensor."""
        return 1 if self.layout.quantised else self.dtype.itemsize

    @property
    def alignment(self) -> int:
        """Bytes of the widest value of a row."""
        return max(1 if isinstance(field, PadField) else field.itemsize for field in self.layout.fields)

    @property
    def own_name(self) -> str:
        """What its wrappers must be called through, for people."""
        return "extra " if self.module == EXTRA else ""


def sides_of(spec: Mapping[str, Any]) -> list[Side]:
    """The caches that have kernels of their own."""
    facts = Facts.of(spec)
    main, extra = layouts_of(spec)
    found = [] if main is None else [Side(MAIN, main, facts)]
    if extra is not None and extra != main:
        found.append(Side(EXTRA, extra, facts))
    return found


def _pages_cases() -> Iterator[tuple[str, str, Pages, str]]:
    """(name, promise, how the cache lies, which layouts: "any", "interleaved", "quantised")."""
    for size in (1, 2, 53, 64, 69, 256, 480, 9 * 64):
        yield f"block size {size}", "any page size", Pages(size), "any"
    yield "page stride", "pages may lie apart; the bytes between them stay", Pages(53, page_gap=160), "any"
    yield "row stride", "rows may lie apart; the bytes between them stay", Pages(53, row_gap=48), "interleaved"
    yield "odd cache", "a cache may begin off 16 bytes", Pages(53, page_gap=8, offset=1), "any"
    yield "int8 cache", "bytes may be given as int8", Pages(dtype="int8"), "quantised"
    yield "float8 cache", "bytes may be given as float8", Pages(dtype="float8"), "quantised"
    yield "one page", "the stride of a single page means nothing", Pages(53, single=True), "any"
    yield "far pages", "page offsets are 64 bits wide", Pages(far=True), "any"


def _fits(which: str, layout: CacheLayout) -> bool:
    return {"any": True, "interleaved": not layout.planar, "quantised": layout.quantised}[which]


def _write_cases(side: Side, wrapper: str, full: bool, big: bool) -> Iterator[WriteCase]:
    has_rope = side.facts.d_rope > 0
    base = WriteCase("", "", wrapper=wrapper, module=side.module, k_pe="2d" if has_rope else "none")
    base = replace(base, tokens=1000 if big else 20)

    def case(name: str, promise: str, **changes: Any) -> WriteCase:
        name = f"{side.own_name}writer: {name} ({SHORT[wrapper]})"
        return replace(base, name=name, promise=promise, **changes)

    yield case("typical", "an ordinary call writes the reference's bytes", every_target=True)
    if full:
        yield case("every value", "every bit pattern of the model's dtype", values="bits", tokens=None)
    if wrapper == INSERT:
        for size in (2, 53, 64):
            pages = Pages(size, "pages", page_gap=32)
            yield case(f"pages of bytes, block size {size}", "a page is a run of bytes", pages=pages)
    if not full:
        return
    if side.layout.quantised:
        yield case("tiles", "scales at their floors and about powers of two", values="tiles", tokens=None)
        promise = "NaN, infinities and zeros of both signs"
        yield case("not finite", promise, values="not finite", tokens=None, every_target=True)
    for name, promise, pages, which in _pages_cases():
        if _fits(which, side.layout):
            tokens = 6 if pages.far else base.tokens
            yield case(name, promise, pages=pages, tokens=tokens)
    yield case("sources are slices", "rows may be slices of a wider projection", source="slice")
    yield case("sources odd", "rows that begin off 16 bytes", source="odd")
    yield case("negative slots", "a negative slot is skipped, INT64_MIN too", slots="negative")
    yield case("slots past the cache", "a slot past the last page is skipped, 2^32 and INT64_MAX too", slots="beyond")
    yield case("fewer slots than tokens", "slot_mapping's length counts", slots="shorter")
    yield case("no slots", "an empty slot_mapping writes nothing", slots="none")
    yield case("no tokens", "an empty batch writes nothing", tokens=0)
    yield case("single token", "a batch of one", tokens=1)
    yield case("odd number of tokens", "the last program is not full", tokens=7)
    if wrapper == CONCAT and has_rope:
        yield case("k_pe with a head dimension", "k_pe may be [tokens, 1, rope]", k_pe="3d")
    elif wrapper == CONCAT:
        yield case("k_pe without lanes", "k_pe may be [tokens, 0]", k_pe="empty")
    if big:
        yield case("graph", "a captured call replays on new inputs", check="graph")


def _gather_cases(side: Side, wrapper: str, big: bool) -> Iterator[GatherCase]:
    base = GatherCase("", "", wrapper=wrapper, module=side.module)
    if big:
        base = replace(base, requests=((0, 700), (70, 5), (128, 0), (61, 1400)))

    def case(name: str, promise: str, **changes: Any) -> GatherCase:
        name = f"{side.own_name}gather: {name} ({SHORT[wrapper]})"
        return replace(base, name=name, promise=promise, **changes)

    yield case("typical", "an ordinary call gives the reference's rows", every_target=True)
    for name, promise, pages, which in _pages_cases():
        if _fits(which, side.layout):
            yield case(name, promise, pages=pages)
    if wrapper == REQUESTS:
        for size in (2, 53, 64):
            pages = Pages(size, "pages", page_gap=32)
            yield case(f"pages of bytes, block size {size}", "a page is a run of bytes", pages=pages)
        yield case("without gather_lens", "without gather_lens all tokens are gathered", lens="none")
        yield case("offset", "a request's rows begin at the offset", offset=5)
        yield case("no room", "an offset at the end of out leaves no room", offset=5, spare=-14, requests=((0, 14),))
        yield case("less room than tokens", "tokens past the end of out are left out", offset=2, spare=-6)
        promise = "tokens past the end of out are left out"
        yield case("few programs, less room", promise, spare=-6, requests=((0, 71),), check="few programs")
        promise = "positions before the first token are left out"
        yield case("before the first token", promise, requests=((0, 9), (3, 6)), odd="gathers too many")
        yield case("negative gather_lens", "a negative length is none", odd="negative lengths")
        yield case("fewer requests than rows", "seq_lens says how many requests there are", odd="fewer requests")
    else:
        yield case("without seq_starts", "without seq_starts requests begin at 0", starts="none")
        yield case("tokens past the last request", "they are left out", odd="past the end")
        yield case("requests that are not there", "a token of no request is left out", odd="no request")
        yield case("fewer tokens than rows", "num_tokens counts", odd="fewer tokens")
        yield case("fewer requests than rows", "cu_seq_lens says how many requests there are", odd="fewer requests")
        yield case("many requests", "any number of requests", requests=tuple((number % 5, 1) for number in range(37)))
    promise = "with more tokens a program takes more blocks of them"
    yield case("few programs", promise, requests=((3, 9), (60, 1), (0, 71)), check="few programs")
    yield case("nothing", "no tokens at all", requests=((5, 0), (0, 0)))
    yield case("single token", "one token", requests=((63, 1),))
    yield case("pages outside the cache", "tokens of pages outside the cache are left out", table="outside")
    promise = "tokens past the block table's columns are left out"
    yield case("table too short", promise, table="short", memory="contiguous")
    for layout in ("slice", "odd"):
        yield case(f"out {layout}", "out may be a view of a wider buffer, whose rest stays", out=layout)
        yield case(f"table {layout}", "the block table may be a view of a wider buffer", memory=layout)
    if big:
        yield case("graph", "a captured call replays on new inputs", check="graph")


def _every_other(tensor: torch.Tensor) -> torch.Tensor:
    """The same shape with a stride of 2 in the last dimension."""
    return tensor.view(torch.uint8).repeat_interleave(2, dim=-1).view(tensor.dtype)[..., ::2]


def _elsewhere(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on another kind of device."""
    return tensor.to("cpu" if tensor.device.type == "cuda" else "meta")


def _wider(tensor: torch.Tensor) -> torch.Tensor:
    """Sixteen lanes more."""
    return tensor.new_zeros(*tensor.shape[:-1], tensor.shape[-1] + 16)


def _longer(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor, tensor[:1]])


def _restrided(tensor: torch.Tensor, page: int, row: int) -> torch.Tensor:
    """The same cache with pages and rows so many elements apart."""
    return tensor.as_strided(tensor.shape, (page, row, 1))


def _constant(value: Any) -> Callable[[Any], Any]:
    return lambda _: value


def _off(cache: torch.Tensor) -> torch.Tensor:
    """A cache that begins a byte late."""
    return cache.new_zeros(cache.shape[0] * cache.stride(0) + 1)[1:].as_strided(cache.shape, cache.stride(), 1)


Change = tuple[str, str, Callable[[Any], Any], str]


def _tensor_changes(argument: str, dtype: torch.dtype, *, first: bool = False, lanes: bool = True) -> Iterator[Change]:
    """What may be wrong with any tensor; `first` says which device the others must be on."""
    name = str(dtype).removeprefix("torch.")
    yield argument, f"dtype {name}", lambda tensor: torch.zeros(tensor.shape, dtype=dtype, device=tensor.device), ""
    yield argument, "not a tensor", lambda tensor: tensor.tolist(), ""
    yield argument, "a dimension short", lambda tensor: tensor[0], ""
    if lanes:
        yield argument, "last dimension not contiguous", _every_other, ""
    if not first:
        yield argument, "another device", _elsewhere, ""


def _cache_changes(side: Side, argument: str, wrapper: str) -> Iterator[Change]:
    """What may be wrong with a cache; errors of its bytes tell the layout."""
    layout, unit = side.layout, side.unit
    row, name = layout.row_bytes // unit, layout.name
    yield from _tensor_changes(argument, torch.float32)
    yield argument, "wider rows", _wider, name
    yield argument, "narrower rows", lambda cache: cache[..., :-1].contiguous(), name
    yield argument, "rows that overlap", lambda cache: _restrided(cache, cache.stride(0), row - 1), name
    yield argument, "pages that overlap", lambda cache: _restrided(cache, cache.stride(0) - row, row), name
    yield argument, "pages of stride 0", lambda cache: _restrided(cache, 0, row), name
    if layout.planar:
        page = layout.page_bytes(4) // unit
        yield argument, "rows apart", lambda cache: _restrided(cache.repeat(3, 1, 1)[:2], 2 * page, row + 2), name
    if side.alignment > unit:
        yield argument, "a begin off its values", _off, name
    if wrapper in (INSERT, REQUESTS):
        size = layout.page_bytes(4) // unit
        yield argument, "pages too small", lambda cache: cache.new_zeros(cache.shape[0], size - 1), name
        yield argument, "another block size", lambda cache: cache.new_zeros(3, 5, row), "block_size"


def _changes(side: Side, wrapper: str) -> Iterator[Change]:
    facts = side.facts
    other_dtype = torch.float32
    if wrapper == CONCAT:
        yield from _tensor_changes("kv_c", other_dtype, first=True)
        yield "kv_c", "wider than the latent", _wider, ""
        if facts.d_rope:
            yield from _tensor_changes("k_pe", other_dtype, lanes=facts.d_rope > 1)
            yield "k_pe", "missing", lambda _: None, ""
            yield "k_pe", "wider than the rope", _wider, ""
            yield "k_pe", "more tokens than kv_c", _longer, ""
        else:
            yield "k_pe", "given to a spec without rope", lambda _: torch.zeros(4, 8, dtype=side.dtype), ""
    elif wrapper == INSERT:
        yield from _tensor_changes("k", other_dtype, first=True)
        yield "k", "wider than a row", _wider, ""
        yield "is_ue8m0", "the other", lambda value: not value, side.layout.name
    elif wrapper == REQUESTS:
        yield from _tensor_changes("out", other_dtype, first=True)
        yield "out", "wider than a row", _wider, ""
        yield "out", "fewer requests than seq_lens", lambda out: out[:1], ""
        for name in ("seq_lens", "gather_lens", "block_table"):
            yield from _tensor_changes(name, torch.int64, lanes=name == "block_table")
        yield "gather_lens", "a request too many", _longer, ""
        yield "block_table", "fewer requests than seq_lens", lambda table: table[:1], ""
        yield "offset", "negative", lambda _: -1, ""
        yield "offset", "past the end", lambda _: 1000, ""
        yield "offset", "None", lambda _: None, ""
    else:
        yield from _tensor_changes("dst", other_dtype, first=True)
        yield "dst", "wider than a row", _wider, ""
        for name in ("cu_seq_lens", "token_to_seq", "seq_starts", "block_table"):
            yield from _tensor_changes(name, torch.int64, lanes=name == "block_table")
        yield "cu_seq_lens", "more requests than block_table", lambda one: torch.cat([one, one, one]), ""
        yield "cu_seq_lens", "no entry", lambda one: one[:0], ""
        yield "seq_starts", "a request too many", _longer, ""
        yield "num_tokens", "more than dst has", lambda _: 1000, ""
        yield "num_tokens", "a float", lambda _: 2.5, ""
        yield "num_tokens", "None", lambda _: None, ""
    if wrapper in (CONCAT, INSERT):
        yield from _tensor_changes("slot_mapping", torch.int32)
        yield "slot_mapping", "longer than the rows", lambda slots: slots.repeat(3), ""
    if wrapper in (INSERT, REQUESTS):
        for value in (0, -1, 2.5, None):
            yield "block_size", str(value), _constant(value), ""
    if wrapper in (CONCAT, TOKENS):
        yield "kv_cache_dtype", "of another layout", lambda _: "fp8_of_another_kind", side.layout.name
    if side.layout.tensor_scale:
        yield "scale", "missing", lambda _: None, ""
        yield "scale", "a number", lambda _: TENSOR_SCALE, ""
        yield "scale", "two of them", lambda scale: scale.repeat(2), ""
        yield "scale", "dtype float64", lambda scale: scale.double(), ""
    cache = {CONCAT: "kv_cache", INSERT: "k_cache", REQUESTS: "k_cache", TOKENS: "src_cache"}[wrapper]
    yield from _cache_changes(side, cache, wrapper)


def _refusals(side: Side, wrapper: str) -> Iterator[CacheRefusalCase]:
    for argument, name, make, says in _changes(side, wrapper):

        def apply(arguments: dict[str, Any], argument: str = argument, make: Callable[[Any], Any] = make) -> None:
            arguments[argument] = make(arguments.get(argument))

        yield CacheRefusalCase(
            f"{side.own_name}refuses: {argument}, {name} ({SHORT[wrapper]})",
            f"{wrapper} names {argument} in a ValueError or TypeError",
            wrapper=wrapper,
            module=side.module,
            argument=argument,
            apply=apply,
            says=says,
        )


def cases(spec: Mapping[str, Any], device: str) -> list[Case]:
    """All cases of a package's writers and gathers; see mlagen.verify.cases."""
    wrappers, big = tuple(spec["wrappers"]), device == "cuda"
    found: list[Case] = []
    for side in sides_of(spec):
        full = True  # both writers are one kernel, so one of them takes all cases
        for wrapper in (CONCAT, INSERT):
            if wrapper in wrappers:
                found += _write_cases(side, wrapper, full, big)
                full = False
        for wrapper in (REQUESTS, TOKENS):
            if wrapper in wrappers:
                found += _gather_cases(side, wrapper, big)
        for wrapper in (CONCAT, INSERT, REQUESTS, TOKENS):
            if wrapper in wrappers:
                found += _refusals(side, wrapper)
    return found


@dataclass(frozen=True)
class CacheMemory:
    """A cache in its buffer.

    Attributes:
        tensor: what a wrapper gets.
        buffer: uint8, all bytes between and around the pages.
        pages: how many there are.
    """

    tensor: torch.Tensor
    buffer: torch.Tensor
    pages: int

    def in_buffer(self, buffer: torch.Tensor) -> torch.Tensor:
        """The same cache, of bytes or of the model's dtype, in another buffer of this size."""
        dtype = self.tensor.dtype if self.tensor.dtype.itemsize > 1 else torch.uint8
        return buffer.view(dtype).as_strided(self.tensor.shape, self.tensor.stride(), self.tensor.storage_offset())


def _torch_dtype(side: Side, name: str) -> torch.dtype:
    """The dtype of a cache."""
    if not side.layout.quantised:
        return side.dtype
    fnuz = any(field.dtype == "e4m3fnuz" for field in side.layout.data)
    eight = torch.float8_e4m3fnuz if fnuz else torch.float8_e4m3fn
    return {"uint8": torch.uint8, "int8": torch.int8, "float8": eight}[name]


def _far_pages(page: int) -> int:
    """Pages of so many bytes that reach past 2^31 of them."""
    return max(FAR_PAGES, 2**31 // page + 1000)


def _cache(side: Side, pages: Pages, count: int, device: str, generator: torch.Generator) -> CacheMemory:
    """A cache of random bytes; one that is far, of memory as it is found."""
    layout, size = side.layout, pages.block_size
    row = layout.row_bytes + pages.row_gap
    page = pages.page_gap + (size * row if pages.row_gap else layout.page_bytes(size))
    count = _far_pages(page) if pages.far else 1 if pages.single else count
    offset = GUARD + pages.offset * side.alignment
    nbytes = -(-(offset + count * page + GUARD) // 8) * 8
    buffer = allocate(nbytes, torch.uint8, device, None if pages.far else POISON)
    if not pages.far:
        buffer.copy_(torch.randint(0, 256, (nbytes,), generator=generator, dtype=torch.uint8))
    unit = side.unit
    shape = (count, page // unit) if pages.form == "pages" else (count, size, layout.row_bytes // unit)
    stride = (page // unit, 1) if pages.form == "pages" else (7 if pages.single else page // unit, row // unit, 1)
    tensor = buffer if layout.quantised else buffer.view(side.dtype)
    tensor = tensor.as_strided(shape, stride, offset // unit).view(_torch_dtype(side, pages.dtype))
    return CacheMemory(tensor, buffer, count)


def _random_bits(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(-(2**15), 2**15, shape, generator=generator).to(torch.int16).view(dtype)


def _every_bit_pattern(side: Side, tokens: int | None, generator: torch.Generator) -> torch.Tensor:
    lanes = side.layout.lanes
    count = -(-(2**16) // lanes) * lanes
    return torch.arange(count).to(torch.int16).view(-1, lanes).view(side.dtype)


def _random_rows(side: Side, tokens: int | None, generator: torch.Generator) -> torch.Tensor:
    """Ordinary rows, each of another magnitude; of an unquantised cache any bits, NaN with their payloads."""
    shape = (tokens or 0, side.layout.lanes)
    if not side.layout.quantised:
        return _random_bits(shape, side.dtype, generator)
    magnitude = torch.exp(3 * torch.randn(shape[0], 1, generator=generator))
    return (torch.randn(shape, generator=generator) * magnitude).to(side.dtype)


def _tiles(side: Side) -> tuple[int, int]:
    """Lanes of the widest tile, and how many hold a row."""
    scales = [one for field in side.layout.data if (one := side.layout.scales_of(field))]
    tile = max([one.tile for one in scales], default=64)
    return tile, -(-side.layout.lanes // tile)


def _tiled_rows(side: Side, patterns: list[torch.Tensor]) -> torch.Tensor:
    """Rows each of whose tiles follows the next pattern: a vector that is cut or repeated."""
    tile, each = _tiles(side)
    rows = torch.zeros(-(-len(patterns) // each), each * tile)
    for number, pattern in enumerate(patterns):
        token, first = number // each, number % each * tile
        rows[token, first : first + tile] = pattern.repeat(-(-tile // len(pattern)))[:tile]
    return rows[:, : side.layout.lanes].to(side.dtype)


def _tiles_of_magnitudes(side: Side, tokens: int | None, generator: torch.Generator) -> torch.Tensor:
    """Tiles with each of AMAX as their largest magnitude, of either sign, and values at simple fractions of it."""
    patterns: list[torch.Tensor] = []
    for amax in AMAX:
        for sign in (1.0, -1.0):
            values = torch.randint(-64, 65, (512,), generator=generator) / 64 * amax
            values[1::2] = torch.tensor([3, -5, 7, -10, 14, -20, 1, -22] * 32) * (amax / 24)  # ties of e2m1 among them
            values[torch.randint(0, 16, (1,), generator=generator) :: 16] = sign * amax
            patterns.append(values)
    return _tiled_rows(side, patterns)


def _not_finite(side: Side, tokens: int | None, generator: torch.Generator) -> torch.Tensor:
    """In each tile of a row, in one row or another, what is no number or a zero of either sign."""
    inf, nan = math.inf, math.nan
    patterns = [
        [nan],
        [-nan],
        [nan, 3.0, -nan, -0.25],
        [inf, 1.0],
        [-inf, -2.0, 0.0],
        [inf, -inf, nan],
        [0.0],
        [-0.0],
        [0.0, -0.0, 1e-30],
        [65504.0, -1e-3],
    ]
    count, (_, each) = len(patterns), _tiles(side)
    numbers = [(row + tile) % count for row in range(count) for tile in range(each)]
    return _tiled_rows(side, [torch.tensor(patterns[number]) for number in numbers])


VALUES: dict[str, Callable[[Side, int | None, torch.Generator], torch.Tensor]] = {
    "random": _random_rows,
    "bits": _every_bit_pattern,
    "tiles": _tiles_of_magnitudes,
    "not finite": _not_finite,
}


def _slots(case: WriteCase, tokens: int, count: int, generator: torch.Generator) -> torch.Tensor:
    """slot_mapping i64 of a pattern: different slots, in no order; of a far cache its last."""
    slots = torch.randperm(min(count, 2 * tokens + 64), generator=generator)[:tokens]
    if case.pages.far:
        slots = count - 1 - slots
        slots[::3] = torch.arange(len(slots[::3]))
    if case.slots == "negative":
        slots[::3] = -1
        slots[1::6] = INT64.min
    elif case.slots == "beyond":
        slots[::3] = count
        slots[1::6] = INT64.max
        slots[4::12] = 2**32 + torch.arange(len(slots[4::12]))
    elif case.slots == "shorter":
        slots = slots[: tokens // 2]
    elif case.slots == "none":
        slots = slots[:0]
    return slots


def _alias(layout: CacheLayout) -> str:
    """What vLLM's kv_cache_dtype says of a layout."""
    if not layout.quantised:
        return "auto"
    return {"fp8_per_tensor": "fp8"}.get(layout.name, layout.name)


def _scale(side: Side, device: str) -> dict[str, torch.Tensor]:
    """The scale of a tensor as an argument, where the layout has one."""
    return {"scale": torch.tensor([TENSOR_SCALE], device=device)} if side.layout.tensor_scale else {}


def _write_arguments(
    case: WriteCase, side: Side, device: str, generator: torch.Generator
) -> tuple[dict[str, Any], dict[str, Placed], CacheMemory, torch.Tensor]:
    """Arguments, the buffers of the rows, the cache, and the rows on the CPU."""
    values = VALUES[case.values](side, case.tokens, generator)
    tokens, size, d_c = values.shape[0], case.pages.block_size, side.facts.d_c
    memory = _cache(side, case.pages, max(3, -(-2 * tokens // size)), device, generator)
    slots = _slots(case, tokens, memory.pages * size, generator).to(device)
    layout = LAYOUTS[case.source]

    def source(lanes: torch.Tensor) -> Placed:
        return place(lanes.to(device), layout, 0.0)

    arguments: dict[str, Any] = {"slot_mapping": slots, **_scale(side, device)}
    placed = {"slot_mapping": Placed(slots, slots, slots.clone())}
    if case.wrapper == INSERT:
        placed["k"] = source(values)
        return (
            {**arguments, "k": placed["k"].view, "k_cache": memory.tensor, "block_size": size},
            placed,
            memory,
            values,
        )
    placed["kv_c"] = source(values[:, :d_c])
    k_pe: torch.Tensor | None = None
    if case.k_pe in ("2d", "3d"):
        placed["k_pe"] = source(values[:, d_c:])
        k_pe = placed["k_pe"].view if case.k_pe == "2d" else placed["k_pe"].view[:, None]
    elif case.k_pe == "empty":
        k_pe = torch.empty(tokens, 0, dtype=side.dtype, device=device)
    arguments |= {"kv_c": placed["kv_c"].view, "k_pe": k_pe, "kv_cache": memory.tensor}
    arguments["kv_cache_dtype"] = _alias(side.layout) if case.values == "random" else side.layout.name
    return arguments, placed, memory, values


def _call(subject: Subject, case: CacheCase | CacheRefusalCase, arguments: dict[str, Any]) -> Any:
    owner = getattr(subject.package, EXTRA) if case.module == EXTRA else subject.package
    with subject.planned_for(None):
        return getattr(owner, case.wrapper)(**arguments)


def _require_none(returned: Any) -> None:
    if returned is not None:
        raise CaseFailedError(f"returned {type(returned).__name__} instead of None")


def _check_untouched(placed: Mapping[str, Placed]) -> None:
    changed = [name for name, one in placed.items() if one.changed()]
    if changed:
        raise CaseFailedError(f"wrote to its input {', '.join(changed)}")


def _compare_rows(side: Side, size: int, got: torch.Tensor, want: torch.Tensor) -> None:
    """Says in which fields rows of two caches differ."""
    found = []
    planes = zip(planes_of(side.layout, got, size), planes_of(side.layout, want, size), strict=True)
    for number, (left, right) in enumerate(planes):
        for field in side.layout.fields:
            if field.plane == number:
                part = slice(field.offset, field.offset + field.nbytes)
                if wrong := int((left[..., part] != right[..., part]).sum()):
                    found.append(f"{wrong} bytes of {field.name}")
    raise CaseFailedError(f"the cache differs from the reference: {', '.join(found) or 'bytes outside its rows'}")


def _check_written(
    side: Side, case: WriteCase, memory: CacheMemory, before: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor
) -> None:
    """Compares a cache with what the reference makes of it as it was `before`."""
    size = case.pages.block_size
    if case.pages.far:
        rows = rows[: len(slots)]
        got = read(side.layout, memory.in_buffer(memory.buffer), size, slots.to(memory.buffer.device), TENSOR_SCALE)
        page = torch.zeros(1, side.layout.page_bytes(len(slots)), dtype=torch.uint8)
        write(side.layout, page, len(slots), torch.arange(len(slots)), rows, TENSOR_SCALE)
        want = read(side.layout, page, len(slots), torch.arange(len(slots)), TENSOR_SCALE)
        if not torch.equal(bits(got.cpu().nan_to_num(nan=1e9)), bits(want.nan_to_num(nan=1e9))):
            raise CaseFailedError("rows past 2^31 bytes differ from the reference")
        return
    expected = before.clone()
    if bool(((slots >= 0) & (slots < memory.pages * size)).any()):
        write(side.layout, memory.in_buffer(expected), size, slots, rows, TENSOR_SCALE)
    if not torch.equal(memory.buffer.cpu(), expected):
        _compare_rows(side, size, memory.in_buffer(memory.buffer.cpu()), memory.in_buffer(expected))


def _run_write(subject: Subject, case: WriteCase, side: Side, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    arguments, placed, memory, rows = _write_arguments(case, side, subject.device, generator)
    before = memory.buffer[:0] if case.pages.far else memory.buffer.cpu().clone()
    slots = arguments["slot_mapping"].cpu()
    _require_none(_call(subject, case, arguments))
    _check_written(side, case, memory, before, slots, rows)
    _check_untouched(placed)
    if case.check == "graph":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            _call(subject, case, arguments)
        memory.buffer.copy_(before)
        sources = [placed[name].view for name in ("k", "kv_c", "k_pe") if name in placed]
        for source in sources:
            source.copy_(source.flip(0))
        graph.replay()
        torch.cuda.synchronize()
        _check_written(side, case, memory, before, slots, rows.flip(0))


def _table(
    case: GatherCase, side: Side, pages: int, columns: int, requests: list[tuple[int, int]], generator: torch.Generator
) -> torch.Tensor:
    """Block table i32 [requests, columns] whose entries that no token needs are garbage, after the case's pattern."""
    size = case.pages.block_size
    free = (pages - 1 - torch.randperm(min(pages, 4096), generator=generator)).tolist()
    table = torch.full((len(requests), columns), GARBAGE, dtype=torch.int64)
    for number, (first, count) in enumerate(requests):
        for column in range(first // size, min(columns, -(-(first + count) // size)) if count > 0 else 0):
            table[number, column] = free.pop() if len(free) > 1 else free[0]
    if case.table == "short":
        table = torch.where(table == GARBAGE, torch.randint(0, pages, table.shape, generator=generator), table)
    if case.table == "outside":
        wrong = torch.tensor([-1, pages, INT32.max, INT32.min, pages + 1])
        used = (table != GARBAGE).nonzero()
        for number, (row, column) in enumerate(used.tolist()[::2]):
            table[row, column] = wrong[number % len(wrong)]
    return table


@dataclass(frozen=True)
class Gathered:
    """A gather's arguments and what must come of them.

    Attributes:
        arguments: by name.
        placed: the inputs' buffers.
        out: the output's.
        memory: the cache.
        rows: (index in the output, slot) of each row that is written.
    """

    arguments: dict[str, Any]
    placed: dict[str, Placed]
    out: Placed
    memory: CacheMemory
    rows: list[tuple[tuple[int, ...], int]]


def _i32(values: list[int], device: str, around: int = 0) -> torch.Tensor:
    """A vector in a buffer of `around`."""
    return place(torch.tensor([values], dtype=torch.int32, device=device), LAYOUTS["contiguous"], around).view[0]


def _build_gather(case: GatherCase, side: Side, device: str, seed: int) -> Gathered:
    generator = torch.Generator().manual_seed(seed)
    by_request, size = case.wrapper == REQUESTS, case.pages.block_size
    from_zero = case.lens == "none" if by_request else case.starts == "none"
    requests = [(0 if from_zero else first, count) for first, count in case.requests]
    if case.pages.single:
        requests = [(first, min(count, size)) for first, count in requests]
        requests = [(0 if from_zero else min(first, size - count), count) for first, count in requests]
    needed = [-(-(first + count) // size) for first, count in requests]
    columns = max(1, max(needed) - 1 if case.table == "short" else max(needed) + 2)
    memory = _cache(side, case.pages, sum(needed) + 3, device, generator)
    table = _table(case, side, memory.pages, columns, requests, generator)
    if case.pages.far:
        view = planes_of(side.layout, memory.in_buffer(memory.buffer), size)
        for page in table[(table >= 0) & (table < memory.pages)].tolist():
            for plane in view:
                plane[page] = torch.randint(0, 256, plane[page].shape, generator=generator, dtype=torch.uint8).to(
                    device
                )
    seq_lens = [first + count for first, count in requests]
    lens = [count for _, count in requests]
    if case.odd == "gathers too many":
        lens = [length + 3 for length in seq_lens]
    if case.odd == "negative lengths":
        lens[::2] = [-1, INT32.min, *lens][: len(lens[::2])]
    rows_of_table = len(requests) + (2 if case.odd == "fewer requests" else 0)
    spare_rows = torch.full((rows_of_table - len(requests), columns), GARBAGE)
    # Past the last request everything looks well, if it is looked at.
    around = 0 if case.odd == "no request" else GARBAGE
    placed_table = place(torch.cat([table, spare_rows]).int().to(device), LAYOUTS[case.memory], around)
    placed = {"block_table": placed_table}
    arguments: dict[str, Any] = {"block_table": placed_table.view, **_scale(side, device)}
    rows: list[tuple[tuple[int, ...], int]] = []

    def found(index: tuple[int, ...], request: int, position: int) -> None:
        if 0 <= position < columns * size and 0 <= int(table[request, position // size]) < memory.pages:
            rows.append((index, int(table[request, position // size]) * size + position % size))

    if by_request:
        room = case.offset + max(*lens, 0) + case.spare
        out = place(
            torch.full((rows_of_table, room, side.layout.lanes), 77.0).to(side.dtype).to(device),
            LAYOUTS[case.out],
            77.0,
        )
        for request, (seq_len, length) in enumerate(zip(seq_lens, lens, strict=True)):
            for number in range(min(length, room - case.offset)):
                found((request, case.offset + number), request, seq_len - length + number)
        arguments |= {
            "out": out.view,
            "k_cache": memory.tensor,
            "seq_lens": _i32(seq_lens, device),
            "gather_lens": None if case.lens == "none" else _i32(lens, device),
            "block_size": size,
            "offset": case.offset,
        }
        return Gathered(arguments, placed, out, memory, rows)
    bounds = [sum(lens[:number]) for number in range(len(lens) + 1)]
    token_to_seq = [number for number, length in enumerate(lens) for _ in range(length)]
    num_tokens = len(token_to_seq)
    if case.odd == "past the end":
        token_to_seq += [len(lens) - 1] * 5
        num_tokens += 5
    elif case.odd == "no request":
        for number, one in enumerate(token_to_seq[::3]):
            token_to_seq[3 * number] = (one - 64, one + 64, -1, len(lens), INT32.max, INT32.min)[number % 6]
    elif case.odd == "fewer tokens":
        num_tokens -= 3
    shape = (len(token_to_seq) + max(0, case.spare), side.layout.lanes)
    out = place(torch.full(shape, 77.0).to(side.dtype).to(device), LAYOUTS[case.out], 77.0)
    for token, request in enumerate(token_to_seq[:num_tokens]):
        if 0 <= request < len(lens) and token < bounds[request + 1]:
            found((token,), request, token - bounds[request] + requests[request][0])
    arguments |= {
        "src_cache": memory.tensor,
        "dst": out.view,
        "cu_seq_lens": _i32(bounds, device, GARBAGE),
        "token_to_seq": _i32(token_to_seq, device),
        "num_tokens": num_tokens,
        "kv_cache_dtype": _alias(side.layout),
        "seq_starts": None if case.starts == "none" else _i32([first for first, _ in requests], device, bounds[-1]),
    }
    return Gathered(arguments, placed, out, memory, rows)


def _check_gathered(side: Side, case: GatherCase, one: Gathered) -> None:
    assert one.out.before is not None
    expected = one.out.before.cpu().clone()
    view = expected.as_strided(one.out.view.shape, one.out.view.stride(), one.out.view.storage_offset())
    if one.rows:
        slots = torch.tensor([slot for _, slot in one.rows], device=one.memory.buffer.device)
        values = read(side.layout, one.memory.in_buffer(one.memory.buffer), case.pages.block_size, slots, TENSOR_SCALE)
        for (index, _), row in zip(one.rows, values.to(side.dtype).cpu(), strict=True):
            view[index] = row
    got = one.out.buffer.cpu()
    wrong = (bits(got) != bits(expected)) & ~(got.isnan() & expected.isnan())
    if bool(wrong.any()):
        raise CaseFailedError(f"{int(wrong.sum())} elements of the output and around it differ from the reference")


def _run_gather(subject: Subject, case: GatherCase, side: Side, seed: int) -> None:
    one = _build_gather(case, side, subject.device, seed)
    module: Any = getattr(subject.package, case.module or "cache")
    sizes = {name: getattr(module, name) for name in ("GATHER_PROGRAMS", "FEW_TOKENS")}
    if case.check == "few programs":
        module.GATHER_PROGRAMS = module.FEW_TOKENS = 0  # one program a request, and the tile of many tokens
    before = one.memory.buffer[:0] if case.pages.far else one.memory.buffer.clone()
    try:
        _require_none(_call(subject, case, one.arguments))
    finally:
        vars(module).update(sizes)
    _check_gathered(side, case, one)
    _check_untouched(one.placed)
    if not case.pages.far and not torch.equal(one.memory.buffer, before):
        raise CaseFailedError("wrote to the cache")
    if case.check == "graph":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            _call(subject, case, one.arguments)
        assert one.out.before is not None
        one.out.buffer.copy_(one.out.before)
        one.memory.buffer.copy_(one.memory.buffer.roll(16 * side.layout.row_bytes))
        graph.replay()
        torch.cuda.synchronize()
        _check_gathered(side, case, one)


def _refusal_arguments(case: CacheRefusalCase, side: Side, device: str) -> dict[str, Any]:
    """Arguments of a call that is right."""
    generator = torch.Generator().manual_seed(0)
    if case.wrapper in (CONCAT, INSERT):
        k_pe = "2d" if side.facts.d_rope else "none"
        one = WriteCase("", "", wrapper=case.wrapper, module=case.module, pages=Pages(4), tokens=4, k_pe=k_pe)
        arguments, _, _, _ = _write_arguments(one, side, device, generator)
        if case.wrapper == INSERT:
            arguments["is_ue8m0"] = any(field.dtype == "ue8m0" for field in side.layout.fields)
        return arguments
    requests = ((0, 3), (2, 4))
    gather = GatherCase("", "", wrapper=case.wrapper, module=case.module, pages=Pages(4), requests=requests)
    return _build_gather(gather, side, device, 0).arguments


def _run_refusal(subject: Subject, case: CacheRefusalCase, side: Side) -> None:
    arguments = _refusal_arguments(case, side, subject.device)
    case.apply(arguments)
    try:
        _call(subject, case, arguments)
    except (ValueError, TypeError) as error:
        for word in (case.argument, case.says):
            if word and not re.search(rf"\b{re.escape(word)}\b", str(error)):
                raise CaseFailedError(f"the {type(error).__name__} does not name {word}: {error}") from error
        return
    raise CaseFailedError(f"took a wrong {case.argument}")


def run(subject: Subject, case: Case, seed: int = 0) -> list[Figure]:
    """Runs a case; returns no figures, since every comparison is exact.

    Raises:
        CaseFailedError: the case does not hold; other exceptions of the package pass through.
        CaseSkippedError: the case cannot run here.
    """
    assert isinstance(case, KINDS)
    (side,) = [one for one in sides_of(subject.package.SPEC["spec"]) if one.module == case.module]
    match case:
        case WriteCase():
            _run_write(subject, case, side, seed)
        case GatherCase():
            _run_gather(subject, case, side, seed)
        case CacheRefusalCase():
            _run_refusal(subject, case, side)
    return []
