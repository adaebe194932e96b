"""Dense attention over a paged cache: a kernel that shares a batch out by its lengths, and the wrappers."""

from __future__ import annotations

from typing import Any

from mlagen.backends import sm90
from mlagen.backends.triton import layout, splits
from mlagen.backends.triton.common import tables
from mlagen.backends.triton.sparse_decode import cache_context, rows_context
from mlagen.backends.triton.splits import attention_context, dense_decode_signature
from mlagen.plan import DENSE_DECODE_WRAPPERS, Plan, needed

MODULE = "dense_decode"
SHARED = (layout, splits, sm90.DENSE_DECODE)
WRAPPERS = DENSE_DECODE_WRAPPERS
FLASH, DECODE = DENSE_DECODE_WRAPPERS


def present(plan: Plan) -> bool:
    """Whether attention is dense; another family has the sparse one over a cache."""
    return plan.dense_decode is not None


def context(plan: Plan) -> dict[str, Any]:
    """What the template asks for."""
    dense, one = needed(plan.dense_decode), needed(plan.layout)
    cache = cache_context(plan, "", one)
    shared = attention_context(plan)
    return {
        **shared,
        **rows_context(dense),
        "plan": dense,
        **tables(dense),
        "sm90": dense.sm90,
        "cache": {**cache, "module": "_layout"},
        "has_tensor_scale": one.tensor_scale,
        "strides": cache["strides"] if one.planar else "any page, row and head stride",
        "flash": FLASH in plan.spec.wrappers,
        "decode": DECODE in plan.spec.wrappers,
        "empty_lse": "-math.inf" if shared["empty_row_lse"] == "-inf" else "math.inf",
        "arguments": len(dense_decode_signature(plan)),
    }


def exports(wrappers: list[str]) -> list[str]:
    """Names that the package takes from the module, given the spec's wrappers that are its own."""
    flash = ["FlashMLASchedMeta", "get_mla_metadata"] if FLASH in wrappers else []
    return sorted([*wrappers, *flash, "dense_workspace_size"])
