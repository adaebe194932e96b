"""Writers and gathers of a cache, and their wrappers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mlagen.backends.parts import cache_argument, layout, tiles
from mlagen.backends.parts.base import GeneratedFile, Module, generated
from mlagen.backends.parts.cache_argument import NamedArgument
from mlagen.backends.parts.common import FULL_ALIGNMENT, TORCH_DTYPES, alignment_of, columns_text
from mlagen.backends.parts.layout_module import Arguments, Pad, StoredColumns
from mlagen.layout import CacheLayout, ScalesField
from mlagen.layout.layout import BITS
from mlagen.plan import CachePlan, Chunk, Plan, StoredCache

MODULE, EXTRA_MODULE = "cache", "extra_cache"
CONCAT, INSERT = "concat_and_cache_mla", "quantize_and_insert_k_cache"
GATHER_REQUESTS, GATHER_TOKENS = "dequantize_and_gather_k_cache", "gather_and_maybe_dequant_cache"


@dataclass(frozen=True)
class Side:
    """One cache of a spec, with its own kernels.

    Attributes:
        cache: the cache.
        module: its generated module.
        layout_module: generated module of its layout.
        which: its name in docstrings.
    """

    cache: StoredCache
    module: str
    layout_module: str
    which: str

    @property
    def layout(self) -> CacheLayout:
        """Bytes of a token."""
        return self.cache.layout


@dataclass(frozen=True)
class SourceBlock:
    """A block of a row as the writer loads and stores it.

    Attributes:
        name: suffix of its variables.
        block: its width.
        masked: whether it has padding.
        source: the argument of its columns, "kv_c" or "k_pe".
        straddles: whether it has columns of both arguments.
        source_columns: its columns in that argument, as text.
        source_end: end of these columns.
        source_alignment: known alignment of their addresses, as text.
        store: arguments of its store_..., as text.
    """

    name: str
    block: int
    masked: bool
    source: str
    straddles: bool
    source_columns: str
    source_end: int
    source_alignment: str
    store: str


@dataclass(frozen=True)
class GatheredBlock:
    """A block of a row as the gather loads and stores it.

    Attributes:
        name: suffix of its variables.
        start, end: its columns.
        masked: whether it has padding.
        load: arguments of its load_..., as text.
        row_alignment: known alignment of its addresses in the output, as text.
    """

    name: str
    start: int
    end: int
    masked: bool
    load: str
    row_alignment: str


@dataclass(frozen=True)
class Facts:
    """Facts that both templates take.

    Attributes:
        dtype: the model's dtype.
        d_qk, d_c, rope: columns of a row, of its latent part, and with RoPE.
        layout: the cache's layout.
        layout_module: generated module of the layout.
        which: the cache's name in docstrings.
        concats, inserts, gathers_requests, gathers_tokens: the wrappers of the package.
        needs_e4m3: whether kernels depend on the device's e4m3 support.
        args: text for argument lists of the layout's helpers.
    """

    dtype: str
    d_qk: int
    d_c: int
    rope: int
    layout: CacheLayout
    layout_module: str
    which: str
    concats: bool
    inserts: bool
    gathers_requests: bool
    gathers_tokens: bool
    needs_e4m3: bool
    args: Arguments


@dataclass(frozen=True)
class Kernels(Facts):
    """Context of the kernels' template.

    Attributes:
        cache: the family's plan.
        module: module of the wrappers.
        unit_name: "bytes" or "columns", the elements of the cache tensor.
        stored, loaded: blocks of a row that the writer and the gather take.
        pads: padding that the writer stores.
    """

    cache: CachePlan
    module: str
    unit_name: str
    stored: Sequence[SourceBlock]
    loaded: Sequence[GatheredBlock]
    pads: Sequence[Pad]


@dataclass(frozen=True)
class Wrappers(Facts, NamedArgument):
    """Context of the wrappers' template.

    Attributes:
        torch_dtype: torch's name of the model's dtype.
        content: the module's functions, for its docstring.
        is_fnuz, is_ue8m0: whether columns are e4m3fnuz, and scales ue8m0.
    """

    torch_dtype: str
    content: str
    is_fnuz: bool
    is_ue8m0: bool


def _stored(plan: Plan, one: CacheLayout, chunks: Sequence[StoredColumns]) -> list[SourceBlock]:
    """Return a row's blocks, as they are written, each with the argument of its columns."""
    d_c, rope = plan.spec.model.kv_lora_rank, plan.spec.model.qk_rope_head_dim
    found = []
    for chunk in chunks:
        straddles = chunk.start < d_c < chunk.end
        behind = d_c if rope and chunk.start >= d_c else 0
        start = chunk.start - behind
        found.append(
            SourceBlock(
                name=chunk.name,
                block=chunk.block,
                masked=chunk.masked,
                source="k_pe" if behind else "kv_c",
                straddles=straddles,
                source_columns=columns_text(start, chunk.block),
                source_end=chunk.end - behind,
                source_alignment=alignment_of(math.gcd(start, d_c if straddles else 0)),
                store=layout.store_text(one, chunk.name),
            )
        )
    return found


def _loaded(one: CacheLayout, chunks: Sequence[Chunk]) -> list[GatheredBlock]:
    """Return the blocks of a row's gather. A thread loads at most as many columns as it can store at once."""
    found = []
    for chunk in chunks:
        most = layout.THREAD_COLUMNS * BITS[layout.field_of(one, chunk).dtype] // 8
        claim = "ALIGNMENT" if most == FULL_ALIGNMENT else f"{most} if ALIGNMENT == {FULL_ALIGNMENT} else 1"
        found.append(
            GatheredBlock(
                name=chunk.name,
                start=chunk.start,
                end=chunk.start + chunk.columns,
                masked=chunk.masked,
                load=layout.load_text(one, alignment=claim),
                row_alignment=alignment_of(chunk.start),
            )
        )
    return found


def _content(wrappers: set[str]) -> str:
    """Return the module's content, for its docstring."""
    parts = [
        ("writers" if {CONCAT, INSERT} <= wrappers else "writer", {CONCAT, INSERT}),
        ("gathers" if {GATHER_REQUESTS, GATHER_TOKENS} <= wrappers else "gather", {GATHER_REQUESTS, GATHER_TOKENS}),
    ]
    return " and ".join(text for text, any_of in parts if any_of & wrappers)


def _facts(plan: Plan, side: Side) -> Facts:
    """Return the facts of one of the spec's caches."""
    wrappers, model = plan.spec.wrappers, plan.spec.model
    return Facts(
        dtype=model.dtype,
        d_qk=plan.d_qk,
        d_c=model.kv_lora_rank,
        rope=model.qk_rope_head_dim,
        layout=side.layout,
        layout_module=side.layout_module,
        which=side.which,
        concats=CONCAT in wrappers,
        inserts=INSERT in wrappers,
        gathers_requests=GATHER_REQUESTS in wrappers,
        gathers_tokens=GATHER_TOKENS in wrappers,
        needs_e4m3=layout.needs_e4m3(side.layout),
        args=layout.arguments(side.layout),
    )


def _kernels(plan: Plan, family: CachePlan, side: Side) -> Kernels:
    """Context of the kernels' template."""
    of_layout = layout.context(plan, family.caches, side.cache)
    return Kernels(
        **vars(_facts(plan, side)),
        cache=family,
        module=side.module,
        unit_name=of_layout.unit_name,
        stored=_stored(plan, side.layout, of_layout.stored),
        loaded=_loaded(side.layout, family.caches.chunks),
        pads=of_layout.pads,
    )


def _wrappers(plan: Plan, family: CachePlan, side: Side) -> Wrappers:
    """Context of the wrappers' template."""
    cached = side.layout
    return Wrappers(
        **vars(_facts(plan, side)),
        **vars(cache_argument.context(plan, family.caches, side.cache)),
        torch_dtype=TORCH_DTYPES[plan.spec.model.dtype],
        content=_content(set(plan.spec.wrappers)),
        is_fnuz=any(field.dtype == "e4m3fnuz" for field in cached.data),
        is_ue8m0=any(isinstance(field, ScalesField) and field.dtype == "ue8m0" for field in cached.fields),
    )


def _sides(family: CachePlan) -> list[Side]:
    """Return the caches of a plan."""
    sides = [Side(family.caches.main, MODULE, layout.MODULE, "the cache")]
    if family.caches.other:
        sides.append(Side(family.caches.other, EXTRA_MODULE, layout.EXTRA_MODULE, "the second cache"))
    return sides


def private_files(plan: Plan, family: CachePlan) -> list[GeneratedFile]:
    """Files that the family's modules import."""
    kernels = [
        generated(f"_{side.module}_kernels", vars(_kernels(plan, family, side)), f"_{MODULE}_kernels")
        for side in _sides(family)
    ]
    return [*layout.files(plan, family.caches), tiles.file(plan), *kernels]


def modules(plan: Plan, family: CachePlan) -> list[Module]:
    """Return the modules of the wrappers of the first and the second cache. Their wrappers have the same names."""
    wrappers = family.wanted(plan.spec)
    return [
        Module(
            generated(side.module, vars(_wrappers(plan, family, side)), MODULE),
            wrappers if side.module == MODULE else (),
        )
        for side in _sides(family)
    ]
