"""Dense attention over a paged cache: a kernel that shares a batch out by its lengths, and the wrappers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mlagen.backends import gluon
from mlagen.backends.triton import layout, splits
from mlagen.backends.triton.common import FULL_ALIGNMENT, by_tile, tables
from mlagen.backends.triton.kvcache import cache_context, rows_context
from mlagen.backends.triton.splits import attention_context, dense_signature
from mlagen.plan import DENSE_WRAPPERS, TARGETS, CompileJob, Plan, TileRow, needed

MODULE = "dense_attention"
SHARED = (layout, splits, gluon.DENSE)
WRAPPERS = DENSE_WRAPPERS
FLASH, DECODE = DENSE_WRAPPERS


def present(plan: Plan) -> bool:
    """Whether attention is dense; another family has the sparse one over a cache."""
    return plan.dense is not None


def context(plan: Plan) -> dict[str, Any]:
    """What the template asks for."""
    dense, one = needed(plan.dense), needed(plan.layout)
    cache = cache_context(plan, "", one)
    shared = attention_context(plan)
    return {
        **shared,
        **rows_context(dense),
        "plan": dense,
        **tables(dense),
        "hopper": dense.hopper,
        "cache": {**cache, "module": "_layout"},
        "has_tensor_scale": one.tensor_scale,
        "strides": cache["strides"] if one.planar else "any page, row and head stride",
        "flash": FLASH in plan.spec.wrappers,
        "decode": DECODE in plan.spec.wrappers,
        "empty_lse": "-math.inf" if shared["empty_row_lse"] == "-inf" else "math.inf",
        "arguments": len(dense_signature(plan)),
    }


def _jobs(plan: Plan, target: str, rows: tuple[TileRow, ...], small: tuple[TileRow, ...]) -> Iterator[CompileJob]:
    e4m3 = layout.needs_e4m3(needed(plan.layout))
    facts = (("HAS_E4M3", TARGETS[target].has_e4m3),) if e4m3 else ()
    variants = [(row, FULL_ALIGNMENT, True) for row in by_tile((*rows, *small))]
    variants += [(row, alignment, False) for row in by_tile(small) for alignment in (FULL_ALIGNMENT, 1)]
    for row, alignment, whole in variants:
        tile = row.tile
        words = [" ahead"] * tile.indices_ahead + [" small pages"] * (not whole) + [" odd rows"] * (alignment == 1)
        yield CompileJob(
            module=MODULE,
            kernel="_dense_kernel",
            variant=f"{tile.block_h}x{tile.block_n}{''.join(words)}",
            target=target,
            signature=dense_signature(plan),
            constexprs=(
                *facts,
                ("ALIGNMENT", alignment),
                ("WHOLE_PAGES", whole),
                ("BLOCK_B", needed(plan.dense).block_b),
                ("BLOCK_H", tile.block_h),
                ("BLOCK_N", tile.block_n),
                ("PAGES_AHEAD", tile.indices_ahead),
                ("NUM_STAGES", tile.num_stages),
                *splits.dependent_merge(target),
            ),
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            expected_shared=row.expected_shared,
        )


def exports(wrappers: list[str]) -> list[str]:
    """Names that the package takes from the module, given the spec's wrappers that are its own."""
    flash = ["FlashMLASchedMeta", "get_mla_metadata"] if FLASH in wrappers else []
    return sorted([*wrappers, *flash, "dense_workspace_size"])


def jobs(plan: Plan) -> Iterator[CompileJob]:
    """Every tile and alignment on every target."""
    dense = needed(plan.dense)
    unaligned = dict(dense.unaligned)
    for target, rows in dense.tiles:
        yield from _jobs(plan, target, rows, unaligned[target])
