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

from mlagen.layout import CacheLayout, Field, PadField, layouts_of
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

# Magnitudes of tiles about which a scale's rounding and its floor turn.
AMAX = (0.0, 1e-5, 1e-4, 0.0447, 0.0448, 447.0, 448.0, 449.0, *(448.0 * 2.0**k for k in range(-22, 7)))


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
    found = [Side(MAIN, main, facts)]
    if extra is not None and extra != main:
        found.append(Side(EXTRA, extra, facts))
    return found


def _pages_cases() -> Iterator[tuple[str, str, Pages, str]]:
    """(name, promise, how the cache lies, which layouts: "any", "interleaved", "quantised")."""
    for size in (1, 2, 53, 64, 69, 256, 480, 576):
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
    yield case(
        "every value", "every bit pattern of the model's dtype", values="bits", tokens=None, every_target=full
    )
    if wrapper == INSERT:
        for size in (2, 53, 64):
            pages = Pages(size, "pages", page_gap=32)
            yield case(f"pages of bytes, block size {size}", "a page is a run of bytes", pages=pages)
    if not full:
        return
    if side.layout.quantised:
        yield case("tiles", "scales at their floors and about powers of two", values="tiles", tokens=None)
        yield case("not finite", "NaN, infinities and zeros of both signs", values="not finite", tokens=None)
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

    short = {"requests": ((0, 9), (70, 5), (128, 0), (61, 14))}
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
        yield case("before the first token", "positions before the first token are left out", odd="gathers too many")
        yield case("negative gather_lens", "a negative length is none", odd="negative lengths")
        yield case("fewer requests than rows", "seq_lens says how many requests there are", odd="fewer requests")
        yield case("many requests", "more blocks of tokens than programs", requests=((3, 2),) * 40, check="few programs")
    else:
        yield case("without seq_starts", "without seq_starts requests begin at 0", starts="none")
        yield case("tokens past the last request", "they are left out", odd="past the end")
        yield case("requests that are not there", "a token of no request is left out", odd="no request")
        yield case("fewer tokens than rows", "num_tokens counts", odd="fewer tokens")
        yield case("fewer requests than rows", "cu_seq_lens says how many requests there are", odd="fewer requests")
    yield case("nothing", "no tokens at all", requests=((5, 0), (0, 0)))
    yield case("single token", "one token", requests=((63, 1),))
    yield case("pages outside the cache", "tokens of pages outside the cache are left out", table="outside", **short)
    yield case("table too short", "tokens past the block table's columns are left out", table="short", **short)
    for layout in ("slice", "odd"):
        yield case(f"out {layout}", "out may be a view of a wider buffer, whose rest stays", out=layout, **short)
        yield case(f"table {layout}", "the block table may be a view of a wider buffer", memory=layout, **short)
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
        yield argument, "a begin off its values", lambda cache: cache.new_zeros(cache.numel() * 4 + 1)[1:].as_strided(
            cache.shape, (4 * cache.stride(0) // 4, cache.stride(1), 1)
        ), name
    if wrapper in (INSERT, REQUESTS):
        size = layout.page_bytes(4) // unit
        yield argument, "pages too small", lambda cache: cache.new_zeros(cache.shape[0], size - 1), name
        yield argument, "another block size", lambda cache: cache.new_zeros(2, layout.page_bytes(5))[:, : 5 * row].view(
            2, 5, row
        ) if False else cache.new_zeros(3, 5, row), "block_size"


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
    if wrapper in (CONCAT, INSERT):
        yield from _tensor_changes("slot_mapping", torch.int32)
        yield "slot_mapping", "longer than the rows", lambda slots: slots.repeat(3), ""
    if wrapper in (INSERT, REQUESTS):
        for value in (0, -1, 2.5, None):
            yield "block_size", str(value), lambda _, value=value: value, ""
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

        def apply(
            arguments: dict[str, Any], argument: str = argument, make: Callable[[Any], Any] = make
        ) -> None:
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
