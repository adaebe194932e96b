"""The compressor: states of tokens, and rows of windows of them in attention's cache or the indexer's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mlagen.backends.parts import cache_argument, indexer_layout, layout, tiles
from mlagen.backends.parts.base import GeneratedFile, Module, generated
from mlagen.backends.parts.cache_argument import CacheArgument
from mlagen.backends.parts.common import TORCH_DTYPES, alignment_of, columns_text, fields_of, is_aligned
from mlagen.backends.parts.layout_module import LayoutModule, RowWriter, StoredColumns
from mlagen.layout import CacheLayout
from mlagen.plan import CompressorPlan, Plan
from mlagen.plan.families.compressor import COMPRESS, SAVE
from mlagen.work import FLOAT_BYTES

MODULE, KEYS_MODULE = "compressor", "indexer_compressor"


@dataclass(frozen=True)
class Block:
    """A block of a row's columns as the kernel computes it.

    Attributes:
        name: suffix of its variables.
        block: its width.
        columns_text: its columns, as text.
        alignment: known alignment of its addresses, as text.
        exists: the mask of its loads, as text.
        inside: the mask of its columns, as text; empty without padding.
        turns: whether RoPE rotates some of its columns.
        first_pair: number of its first pair.
    """

    name: str
    block: int
    columns_text: str
    alignment: str
    exists: str
    inside: str
    turns: bool
    first_pair: int


@dataclass(frozen=True)
class StoredBlock:
    """A block of a row as the layout stores it.

    Attributes:
        name: suffix of its variables.
        start, end: its columns.
        block: its width.
        store: arguments of its store_..., as text.
    """

    name: str
    start: int
    end: int
    block: int
    store: str


@dataclass(frozen=True)
class Facts:
    """Facts that both templates take.

    Attributes:
        dtype: the model's dtype.
        layout: bytes of a row.
        layout_module: module of its layout.
        columns, rope: columns of a row, and those that RoPE rotates.
        is_main: whether rows go to attention's cache.
        saves, compresses: the wrappers of the module.
        needs_e4m3: whether kernels depend on the device's e4m3 support.
    """

    dtype: str
    layout: CacheLayout
    layout_module: str
    columns: int
    rope: int
    is_main: bool
    saves: bool
    compresses: bool
    needs_e4m3: bool


@dataclass(frozen=True)
class Kernels(Facts, RowWriter):
    """Context of the kernels' template.

    Attributes:
        stored, blocks: blocks of a row as the layout stores it, and as the kernel computes it.
        whole: whether the kernel computes it as one block; the layout then stores parts of it.
        turns: whether RoPE rotates columns.
    """

    stored: Sequence[StoredBlock]
    blocks: Sequence[Block]
    whole: bool
    turns: bool


@dataclass(frozen=True)
class Wrappers(Facts, CacheArgument):
    """Context of the wrappers' template.

    Attributes:
        rope_start: the first column that RoPE rotates.
        torch_dtype: torch's name of the model's dtype.
        keys_module, keys_columns: module for the indexer's keys, and columns of a key; None without.
        packed: whether a byte of a key holds two columns.
        halves_aligned: whether both halves of a state are aligned.
    """

    rope_start: int
    torch_dtype: str
    keys_module: str | None
    keys_columns: int | None
    packed: bool
    halves_aligned: bool


@dataclass(frozen=True)
class Side:
    """A cache that compressed rows go to.

    Attributes:
        layout: bytes of a row.
        module: module of its wrappers.
        layout_module: module of its layout.
        of_layout: the layout's context.
        rope_start, rope: the first column that RoPE rotates, and how many.
    """

    layout: CacheLayout
    module: str
    layout_module: str
    of_layout: LayoutModule
    rope_start: int
    rope: int

    @property
    def is_main(self) -> bool:
        """Whether it is attention's cache. Its module has all wrappers."""
        return self.module == MODULE


def _sides(plan: Plan, family: CompressorPlan) -> list[Side]:
    """Return the caches that compressed rows go to, attention's first."""
    dims, caches, cache = plan.spec.model, family.caches, family.cache
    layout_module = layout.EXTRA_MODULE if caches.other else layout.MODULE
    of_layout = layout.context(plan, caches, cache)
    start, rope = dims.kv_lora_rank, dims.qk_rope_head_dim
    found = [Side(cache.layout, MODULE, layout_module, of_layout, start, rope)]
    keys = family.keys
    if keys is not None and COMPRESS in plan.spec.wrappers:
        of_keys, rope = indexer_layout.keys_context(plan, keys), keys.indexer.rope_head_dim
        module = indexer_layout.KEYS_MODULE
        found.append(Side(keys.layout, KEYS_MODULE, module, of_keys, keys.rope_start, rope))
    return found


def _block(side: Side, chunk: StoredColumns) -> Block:
    """Return a block of a row's columns as the kernel computes it."""
    first, end = side.rope_start, side.rope_start + side.rope
    return Block(
        name=chunk.name,
        block=chunk.block,
        columns_text=columns_text(chunk.start, chunk.block),
        alignment=alignment_of(chunk.start),
        exists=f"exists[:, None] & (columns < {chunk.end})[None, :]" if chunk.masked else "exists[:, None]",
        inside=f"columns < {chunk.end}" if chunk.masked else "",
        turns=chunk.start < end and first < chunk.end,
        first_pair=(chunk.start - first) // 2,
    )


def _whole(side: Side) -> Block | None:
    """Return one block of all columns, if the first stored one has room for them and the others are parts of it."""
    stored, columns = side.of_layout.stored, side.layout.columns
    if len(stored) < 2 or columns > stored[0].block or any(one.start % one.block for one in stored):
        return None
    return _block(side, replace(stored[0], name="row", end=columns, masked=columns < stored[0].block))


def _facts(plan: Plan, side: Side) -> Facts:
    """Return the facts that both templates take."""
    wrappers = plan.spec.wrappers
    return Facts(
        dtype=plan.spec.model.dtype,
        layout=side.layout,
        layout_module=side.layout_module,
        columns=side.layout.columns,
        rope=side.rope,
        is_main=side.is_main,
        saves=SAVE in wrappers and side.is_main,
        compresses=COMPRESS in wrappers,
        needs_e4m3=layout.needs_e4m3(side.layout),
    )


def _kernels(plan: Plan, side: Side) -> Kernels:
    """Context of the kernels' template."""
    of_layout, whole = side.of_layout, _whole(side)
    blocks = [whole] if whole else [_block(side, one) for one in of_layout.stored]
    return Kernels(
        **vars(_facts(plan, side)),
        **fields_of(RowWriter, vars(of_layout)),
        stored=[
            StoredBlock(one.name, one.start, one.end, one.block, layout.store_text(side.layout, one.name))
            for one in of_layout.stored
        ],
        blocks=blocks,
        whole=whole is not None,
        turns=any(block.turns for block in blocks),
    )


def _wrappers(plan: Plan, side: Side, keys: Side | None) -> Wrappers:
    """Context of the wrappers' template."""
    checked_in = None if side.is_main else indexer_layout.checking_module(plan)
    return Wrappers(
        **vars(_facts(plan, side)),
        **vars(cache_argument.described(plan, side.layout, side.of_layout, checked_in)),
        rope_start=side.rope_start,
        torch_dtype=TORCH_DTYPES[plan.spec.model.dtype],
        keys_module=keys.module if keys else None,
        keys_columns=keys.layout.columns if keys else None,
        packed=side.layout.data[0].dtype == "e2m1" and not side.is_main,
        halves_aligned=is_aligned(side.layout.columns, FLOAT_BYTES),
    )


def private_files(plan: Plan, family: CompressorPlan) -> list[GeneratedFile]:
    """Files that the family's modules import."""
    found = [*layout.files(plan, family.caches), tiles.file(plan)]
    sides = _sides(plan, family)
    if len(sides) > 1 and family.keys is not None:
        found.append(indexer_layout.keys_file(plan, family.keys))
    return [
        *found,
        *(generated(f"_{one.module}_kernels", vars(_kernels(plan, one)), f"_{MODULE}_kernels") for one in sides),
    ]


def modules(plan: Plan, family: CompressorPlan) -> list[Module]:
    """The modules of the wrappers; wrappers of the first call those of the one for the indexer's keys."""
    names = family.wanted(plan.spec)
    sides = _sides(plan, family)
    keys = sides[1] if len(sides) > 1 else None
    contexts = [(one, _wrappers(plan, one, keys if one.is_main else None)) for one in sides]
    return [
        Module(generated(one.module, vars(context), MODULE), names if one.is_main else ()) for one, context in contexts
    ]
