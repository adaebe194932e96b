"""Dense decode: a kernel that partitions a batch by its lengths, and the wrappers."""

from __future__ import annotations

from typing import Any

from mlagen.backends.base import GeneratedFile, Module, generated
from mlagen.backends.triton import layout, splits, tiles
from mlagen.backends.triton.sparse_decode import cache_context, rows_context
from mlagen.backends.triton.splits import attention_context, kernel_names
from mlagen.plan import DenseDecodePlan, Plan

MODULE = "dense_decode"
FACTS = (
    *("layout", "d_qk", "d_v", "dtype", "takes_pair", "rope_aligned", "merges", "torch_dtype"),
    *("partials", "has_rope", "window", "lse_base", "empty_row_lse", "stated_scale"),
)
FLASH, DECODE = "flash_mla_with_kvcache", "decode_attention_fwd"


def _context(plan: Plan, dense: DenseDecodePlan) -> dict[str, Any]:
    """Template context."""
    one = dense.caches.main.layout
    cache = cache_context(plan, dense.caches, dense.caches.main)
    attention = attention_context(plan, *FACTS)
    return {
        **attention,
        **rows_context(dense),
        "q_blocks": ", ".join(f"q_{chunk.name}" for chunk in dense.chunks),
        "plan": dense,
        "sm90": dense.sm90,
        "cache": {**cache, "module": "_layout"},
        "has_tensor_scale": one.tensor_scale,
        "strides": cache["strides"] if one.planar else "any page, row and head stride",
        "flash": FLASH in plan.spec.wrappers,
        "decode": DECODE in plan.spec.wrappers,
        "empty_lse": "-math.inf" if attention["empty_row_lse"] == "-inf" else "math.inf",
        "kernel_names": ", ".join(f'"{name}"' for name in kernel_names(plan)),
    }


def shared(plan: Plan, family: DenseDecodePlan) -> list[GeneratedFile]:
    """Files that the family's module imports."""
    kernels = generated("_dense_decode_kernels", _context(plan, family))
    return [*layout.files(plan, family.caches), tiles.file(plan), splits.file(plan), kernels]


def modules(plan: Plan, family: DenseDecodePlan) -> list[Module]:
    """The module of the family's wrappers."""
    wrappers = [name for name in family.WRAPPERS if name in plan.spec.wrappers]
    flash = ["FlashMLASchedMeta", "get_mla_metadata"] if FLASH in wrappers else []
    names = sorted([*wrappers, *flash, "dense_workspace_size"])
    return [Module(generated(MODULE, _context(plan, family)), names)]
