"""The module with the tables of all families: kernels and tiles of calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

from mlagen.backends.parts.base import GeneratedFile, generated
from mlagen.backends.parts.common import tuple_text
from mlagen.plan import (
    CachePlan,
    CandidatesPlan,
    CompressorPlan,
    DenseDecodePlan,
    DenseFwdPlan,
    IndexerCachePlan,
    IndicesPlan,
    KpoolPlan,
    LatentFamily,
    LatentsPlan,
    MergeStatesPlan,
    MqaLogitsPlan,
    OutQuantPlan,
    Plan,
    ProloguePlan,
    SparseFwdPlan,
    TiledFamily,
    TopkPlan,
)
from mlagen.plan.families.kpool import KpoolTile
from mlagen.plan.sm90.dense_decode import Rows64Row
from mlagen.plan.sm90.dense_fwd import DenseFwdSm90Plan
from mlagen.plan.sm90.kernel import Sm90Plan
from mlagen.plan.tiles.tile import DenseFwdRow, Sm90Row, TileRow
from mlagen.plan.tritons import Minor, has_versions

MODULE = "_tiles"
AT_16_BYTES = "rows do not begin at 16 bytes"


@dataclass(frozen=True)
class Tables:
    """Tables of a family.

    Attributes:
        prefix: prefix of their names.
        type: class of a tile.
        columns: bounds of a row of `tiles`, in comments.
        tiles, unaligned: rows by target, as text, and those for addresses that are not aligned.
        tiles_by_version, unaligned_by_version: whether these differ between Tritons.
        unaligned_where: calls that take a row of `unaligned`, in comments.
        sm90_calls: calls that run the sm90 kernel; None without.
        sm90_columns: bounds of a row of `sm90_calls`, in comments.
        rows64_calls: calls that run the kernel for all rows, as text.
        swap_ab: plans of the swap-AB kernels.
        costs: costs of the sm90 kernels by number of heads; None: any number.
        union_calls: calls that run the index-union kernels; None without.
        left_out: unused sm90 kernels by minor version of Triton, as text; None if all are used.
        min_queries: fewest rows of a call for the sm90 kernel of multi-head attention; None without.
    """

    prefix: str
    type: str
    columns: str
    tiles: Sequence[tuple[str, Sequence[str]]]
    tiles_by_version: bool
    unaligned: Sequence[tuple[str, Sequence[str]]]
    unaligned_by_version: bool
    unaligned_where: str
    sm90_calls: Sequence[Sm90Row] | None
    sm90_columns: str
    rows64_calls: Sequence[str]
    swap_ab: Sequence[Sm90Plan]
    costs: Sequence[tuple[int | None, tuple[int, int]]]
    union_calls: Sequence[Sm90Row] | None
    left_out: str | None
    min_queries: int | None

    @property
    def by_version(self) -> bool:
        """Whether a table differs between Tritons."""
        return bool(self.tiles_by_version or self.unaligned_by_version or self.rows64_calls or self.left_out)


@dataclass(frozen=True)
class TilesModule:
    """Context of the template: the wrappers, tables of families, plans of other families, and facts of all of them.

    Attributes:
        families: tables of the families with tiles by target.
        latent: whether a family attends over latent rows.
        kpool: tiles of pools of keys.
        merges_states, merges_parts: wrappers of merges in the package.
        by_version: whether a table differs between Tritons.
        sm90_costs: whether a family has costs of sm90 kernels.
    """

    wrappers: Sequence[str]
    families: Sequence[Tables]
    latent: bool
    dense_decode: DenseDecodePlan | None
    dense_fwd: DenseFwdPlan | None
    cache: CachePlan | None
    indexer_cache: IndexerCachePlan | None
    indices: IndicesPlan | None
    merge_states: MergeStatesPlan | None
    topk: TopkPlan | None
    mqa_logits: MqaLogitsPlan | None
    prologue: ProloguePlan | None
    compressor: CompressorPlan | None
    kpool: Sequence[KpoolTile]
    latents: LatentsPlan | None
    out_quant: OutQuantPlan | None
    candidates: CandidatesPlan | None
    merges_states: bool
    merges_parts: bool
    by_version: bool
    sm90_costs: bool


def _text(values: tuple[Any, ...]) -> str:
    return ", ".join("ANY" if value is None else str(value) for value in values)


def _tile(row: TileRow | DenseFwdRow) -> str:
    """Return the text of a row's tile and, if it does not hold for all, of its Tritons."""
    if isinstance(row, TileRow):
        tile = f"Tile({_text((*astuple(row.tile), row.programs_per_sm))})"
    else:
        tile = f"DenseFwdTile({_text(astuple(row.tile))})"
    return f"{tile}, {_text(row.tritons)}" if row.tritons else tile


def _row(row: TileRow | DenseFwdRow) -> str:
    bounds = (row.max_heads, row.max_tokens) if isinstance(row, TileRow) else (row.max_queries,)
    return f"{_text(bounds)}, {_tile(row)}"


def _rows64(row: Rows64Row) -> str:
    fewest = ("ANY + 1" if keys is None else str(keys) for keys in (row.min_keys, row.min_keys_q_halves))
    entries = ", ".join((str(row.max_rows or "ANY"), str(row.max_rate or "ANY"), *fewest))
    return f"{entries}, {_text(row.tritons)}" if row.tritons else entries


def _tables(family: TiledFamily[Any]) -> Tables:
    """Template context of one family's tables."""
    dense_decode, dense_fwd = isinstance(family, DenseDecodePlan), isinstance(family, DenseFwdPlan)
    sm90 = family.sm90 if isinstance(family.sm90, Sm90Plan) else None
    swap_ab = family.sm90_swap_ab if isinstance(family, SparseFwdPlan | DenseDecodePlan) else ()
    union = family.sm90_shared if isinstance(family, SparseFwdPlan) else None
    costs = [*((each.block_h, each.cost) for each in swap_ab), *([(None, sm90.cost)] if sm90 else [])]
    where = f"{AT_16_BYTES}, or indices do not come in groups of 16"
    columns, what = "most heads, most tokens", "tokens"
    if dense_decode:
        columns, what = "most rows, most requests", "requests"
        where = f"{AT_16_BYTES}, or BLOCK_N of the table's does not divide a page"
    elif dense_fwd:
        columns, where = "most rows a request", AT_16_BYTES
    return Tables(
        prefix=family.NAME.upper(),
        type="DenseFwdTile" if dense_fwd else "Tile",
        columns=columns,
        tiles=[(target, [_row(row) for row in rows]) for target, rows in family.tiles],
        tiles_by_version=has_versions(family.tiles),
        unaligned=[(target, [_tile(row) for row in rows]) for target, rows in family.unaligned],
        unaligned_by_version=has_versions(family.unaligned),
        unaligned_where=where,
        sm90_calls=sm90.rows if sm90 else None,
        sm90_columns=f"most {'rows' if dense_decode else 'heads'}, fewest {what}",
        rows64_calls=[_rows64(row) for row in family.rows64_calls] if isinstance(family, DenseDecodePlan) else [],
        swap_ab=swap_ab,
        costs=[] if dense_decode else costs,
        union_calls=union.rows if union else None,
        left_out=left_out_text(family),
        min_queries=family.sm90.min_queries if isinstance(family.sm90, DenseFwdSm90Plan) else None,
    )


def left_out_text(family: TiledFamily[Any]) -> str | None:
    """Return the unused sm90 kernels, by minor version of Triton; None if all are used."""
    kernels: dict[Minor, set[str]] = {}
    for one in family.left_out:
        kernels.setdefault(one.triton, set()).add(one.kernel)
    found = [f"{triton}: {_names(names)}" for triton, names in sorted(kernels.items())]
    return f"{{{', '.join(found)}}}" if found else None


def _names(names: set[str]) -> str:
    """Format names as a tuple of strings."""
    return tuple_text(f'"{name}"' for name in sorted(names))


def file(plan: Plan) -> GeneratedFile:
    """Return the module."""
    families, kpool = [_tables(family) for family in plan.tiled], plan.find(KpoolPlan)
    context = TilesModule(
        wrappers=plan.spec.wrappers,
        families=families,
        latent=any(isinstance(family, LatentFamily) for family in plan.tiled),
        dense_decode=plan.find(DenseDecodePlan),
        dense_fwd=plan.find(DenseFwdPlan),
        cache=plan.find(CachePlan),
        indexer_cache=plan.find(IndexerCachePlan),
        indices=plan.find(IndicesPlan),
        merge_states=plan.find(MergeStatesPlan),
        topk=plan.find(TopkPlan),
        mqa_logits=plan.find(MqaLogitsPlan),
        prologue=plan.find(ProloguePlan),
        compressor=plan.find(CompressorPlan),
        kpool=kpool.tiles if kpool else (),
        latents=plan.find(LatentsPlan),
        out_quant=plan.find(OutQuantPlan),
        candidates=plan.find(CandidatesPlan),
        merges_states="merge_attn_states" in plan.spec.wrappers,
        merges_parts="merge_attn_parts" in plan.spec.wrappers,
        by_version=any(family.by_version for family in families),
        sm90_costs=any(family.costs for family in families),
    )
    return generated(MODULE, vars(context))
