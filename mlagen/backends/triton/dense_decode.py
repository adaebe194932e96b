"""Dense decode: a kernel that partitions a batch by its lengths, and the wrappers."""

from __future__ import annotations

from typing import Any

from mlagen.backends.base import GeneratedFile, Module, generated
from mlagen.backends.triton import layout, splits, tiles
from mlagen.backends.triton.sparse_decode import cache_context, rows_context
from mlagen.backends.triton.splits import attention_context, kernel_names
from mlagen.plan import DenseDecodePlan, Plan

MODULE = "dense_decode"
# Facts of attention in the templates of both, and of the wrappers.
FACTS = ("layout", "d_qk", "d_v", "dtype", "takes_pair", "partials", "window")
OF_WRAPPERS = ("rope_aligned", "merges", "torch_dtype", "has_rope", "lse_base", "empty_row_lse", "stated_scale")
FLASH, DECODE = "flash_mla_with_kvcache", "decode_attention_fwd"


def _cache(plan: Plan, dense: DenseDecodePlan) -> dict[str, Any]:
    """Return the context of both templates for the cache."""
    return {**cache_context(plan, dense.caches, dense.caches.main), "module": "_layout"}


def _kernels(plan: Plan, dense: DenseDecodePlan) -> dict[str, Any]:
    """Context of the kernels' template."""
    return {
        **attention_context(plan, *FACTS),
        **rows_context(dense),
        "q_blocks": ", ".join(f"q_{chunk.name}" for chunk in dense.chunks),
        "cache": _cache(plan, dense),
    }


def _wrappers(plan: Plan, dense: DenseDecodePlan) -> dict[str, Any]:
    """Context of the wrappers' template."""
    one, cache = dense.caches.main.layout, _cache(plan, dense)
    attention = attention_context(plan, *FACTS, *OF_WRAPPERS)
    return {
        **attention,
        "plan": dense,
        "sm90": dense.sm90,
        "cache": cache,
        "has_tensor_scale": one.tensor_scale,
        "strides": cache["strides"] if one.planar else "any page, row and head stride",
        "flash": FLASH in plan.spec.wrappers,
        "decode": DECODE in plan.spec.wrappers,
        "empty_lse": "-math.inf" if attention["empty_row_lse"] == "-inf" else "math.inf",
        "kernel_names": ", ".join(f'"{name}"' for name in kernel_names(plan)),
    }


def shared(plan: Plan, family: DenseDecodePlan) -> list[GeneratedFile]:
    """Files that the family's module imports."""
    kernels = generated("_dense_decode_kernels", _kernels(plan, family))
    return [*layout.files(plan, family.caches), tiles.file(plan), splits.file(plan), kernels]


def modules(plan: Plan, family: DenseDecodePlan) -> list[Module]:
    """The module of the family's wrappers."""
    wrappers = [name for name in family.WRAPPERS if name in plan.spec.wrappers]
    flash = ["FlashMLASchedMeta", "get_mla_metadata"] if FLASH in wrappers else []
    names = sorted([*wrappers, *flash, "dense_workspace_size"])
    return [Module(generated(MODULE, _wrappers(plan, family)), names)]
