"""The portable Triton back end: one module per kernel family, and the table of renderers.

A family's module has `shared(plan, family)`, which returns the files that its modules import, and
`modules(plan, family)`, which returns its public modules.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mlagen import GENERATOR
from mlagen.backends import sm90, sm90_dense_decode, sm90_dense_fwd, sm90_logits, sm90_sparse_decode, sm90_topk
from mlagen.backends.base import GeneratedFile, Module, copied, generated
from mlagen.backends.triton import (
    cache,
    dense_decode,
    dense_fwd,
    indexer_cache,
    indexer_select,
    indices,
    merge_states,
    mqa_logits,
    ops,
    signatures,
    sparse_decode,
    sparse_fwd,
    topk,
)
from mlagen.backends.triton.common import imported, kernels_of, sm90_modules
from mlagen.plan import (
    TARGETS,
    CachePlan,
    DenseDecodePlan,
    DenseFwdPlan,
    IndexerCachePlan,
    IndexerSelectPlan,
    IndicesPlan,
    MergeStatesPlan,
    MqaLogitsPlan,
    Plan,
    SparseDecodePlan,
    SparseFwdPlan,
    TopkPlan,
)
from mlagen.plan.families.cache import PDL_MAX_PROGRAMS
from mlagen.plan.family import PORTABLE
from mlagen.plan.tritons import TRITONS, minors
from mlagen.spec import spec_digest

# Facts that are equal in all packages.
COMMON_FACTS = {
    "pdl_max_programs": PDL_MAX_PROGRAMS,
    "e4m3_targets": [name for name, target in TARGETS.items() if target.has_e4m3],
    "e4m3_rounding_targets": [name for name, target in TARGETS.items() if target.rounds_e4m3],
    "pdl_targets": [name for name, target in TARGETS.items() if target.pdl],
}
RUNTIME = ("_internals", "_launch", "_notes", "_calls")  # modules that every package copies
INLINE_LENGTH = 70  # columns of a literal on the line of its key

Sm90Kernels = (
    sm90.Sm90Module | sm90.UnionLists | sm90_dense_fwd.DenseFwdModule | sm90_logits.LogitsModule | sm90_topk.TopkModule
)


@dataclass(frozen=True)
class Renderer:
    """The renderers of a family.

    Attributes:
        shared: returns the files that its modules import, for a plan and the family.
        modules: returns its public modules.
        sm90: modules of its sm90 kernels, which follow the shared files.
    """

    shared: Callable[[Plan, Any], list[GeneratedFile]]
    modules: Callable[[Plan, Any], list[Module]]
    sm90: tuple[Sm90Kernels, ...] = ()

    def present_sm90(self, plan: Plan) -> list[Sm90Kernels]:
        """Modules of sm90 kernels that the package has."""
        return [kernels for kernels in self.sm90 if kernels.present(plan)]

    def imported(self, plan: Plan, family: Any) -> list[GeneratedFile]:
        """All files that its modules import."""
        kernels = [generated(one.MODULE, one.context(plan), one.TEMPLATE) for one in self.present_sm90(plan)]
        return [*self.shared(plan, family), *kernels]


RENDERERS = {
    CachePlan.NAME: Renderer(cache.shared, cache.modules),
    DenseDecodePlan.NAME: Renderer(
        dense_decode.shared,
        dense_decode.modules,
        (
            sm90_dense_decode.DENSE_DECODE,
            sm90_dense_decode.DENSE_DECODE_SWAP_AB,
            sm90_dense_decode.DENSE_DECODE_E4M3,
            sm90_dense_decode.DENSE_DECODE_E4M3_FEW,
            sm90_dense_decode.DENSE_DECODE_E4M3_PARTS,
        ),
    ),
    DenseFwdPlan.NAME: Renderer(
        dense_fwd.shared, dense_fwd.modules, (sm90_dense_fwd.DenseFwdModule(dense_fwd.signature),)
    ),
    IndexerCachePlan.NAME: Renderer(indexer_cache.shared, indexer_cache.modules),
    IndexerSelectPlan.NAME: Renderer(indexer_select.shared, indexer_select.modules),
    IndicesPlan.NAME: Renderer(indices.shared, indices.modules),
    MergeStatesPlan.NAME: Renderer(merge_states.shared, merge_states.modules),
    MqaLogitsPlan.NAME: Renderer(
        mqa_logits.shared, mqa_logits.modules, (sm90_logits.MQA_LOGITS, sm90_logits.PAGED_MQA_LOGITS)
    ),
    SparseDecodePlan.NAME: Renderer(
        sparse_decode.shared,
        sparse_decode.modules,
        (*sm90_sparse_decode.SPARSE_DECODE, sm90_sparse_decode.SPARSE_DECODE_E4M3),
    ),
    SparseFwdPlan.NAME: Renderer(
        sparse_fwd.shared,
        sparse_fwd.modules,
        (sm90.SPARSE_FWD, sm90.SWAP_AB, sm90.INDEX_UNION, sm90.SHARED_FWD),
    ),
    TopkPlan.NAME: Renderer(topk.shared, topk.modules, (sm90_topk.TOPK,)),
}


def files(plan: Plan, tritons: Sequence[str] = TRITONS) -> list[GeneratedFile]:
    """Return the files of the package. Imported files come before their importers.

    Args:
        plan: the plan.
        tritons: the versions under which all kernels of the package are known to compile within their limits.
    """
    families = [(RENDERERS[family.NAME], family) for family in plan.families]
    shared = {file.name: file for renderer, family in families for file in renderer.imported(plan, family)}
    modules = [module for renderer, family in families for module in renderer.modules(plan, family)]
    modules.sort(key=lambda module: module.file.name)
    kernels = [*shared.values(), *(module.file for module in modules)]
    facts = COMMON_FACTS | {
        "targets": plan.spec.targets,
        "wrappers_literal": _literal(list(plan.spec.wrappers)),
        "kernel_modules": ["_launch", *(file.module for file in kernels)],
        "sm90_modules_literal": _literal(sm90_modules(plan)),
        "kernels": [PORTABLE, *(name for name in kernels_of(plan.families) if name != PORTABLE)],
    }
    package = _package(plan, modules, tritons)
    registered = [ops.file(plan, modules)] if plan.ops else []
    first = [generated("_facts", facts), *map(copied, RUNTIME)]
    return [*first, *kernels, signatures.file(), *registered, generated("__init__", package)]


def _package(plan: Plan, modules: list[Module], tritons: Sequence[str]) -> dict[str, Any]:
    """Context of the template of `__init__.py`."""
    exports = [(module.file.module, list(module.exports)) for module in modules]
    names = ["SPEC", "supports", "variants", "warmup"]
    operators = [ops.MODULE] if plan.ops else []
    exported = [*names, *operators, *(name for module, taken in exports for name in taken or [module])]
    return {
        "title": plan.spec.title,
        "modules": exports,
        "submodules": imported("", sorted(["_launch", *operators, *(module for module, _ in exports)])),
        "imports": [
            (module, imported(module, sorted(taken, key=_export_order)))
            for module, taken in [("_launch", ["supports"]), *exports]
            if taken
        ],
        "exported": sorted(exported, key=_export_order),
        "spec_literal": _literal(_spec(plan, tritons)),
    }


def _spec(plan: Plan, tritons: Sequence[str]) -> dict[str, Any]:
    """Return the package's SPEC."""
    spec: dict[str, Any] = {
        "spec": plan.spec.model_dump(mode="json"),
        "spec_sha256": spec_digest(plan.spec),
        "generator": GENERATOR,
        "triton": list(minors(tritons)),
    }
    if plan.layout is not None:
        spec |= {
            "layout": plan.layout.name,
            "layout_fingerprint": plan.layout.fingerprint,
            "row_bytes": plan.layout.row_bytes,
        }
    if plan.extra_layout is not None:
        spec |= {
            "extra_layout": plan.extra_layout.name,
            "extra_layout_fingerprint": plan.extra_layout.fingerprint,
            "extra_row_bytes": plan.extra_layout.row_bytes,
        }
    if plan.indexer_rows is not None:
        layout = plan.indexer_rows.layout
        spec |= {
            "indexer_layout": layout.name,
            "indexer_layout_fingerprint": layout.fingerprint,
            "indexer_row_bytes": layout.row_bytes,
        }
    return spec


def _export_order(name: str) -> tuple[bool, bool, str]:
    """Sort key of exports: constants, then classes, then functions."""
    return not name.isupper(), name[0].islower(), name


def _literal(value: Any, indent: int = 0) -> str:
    """Format a Python literal: scalars in one line, other values with an entry per line."""
    if not isinstance(value, dict | list):
        return json.dumps(value) if isinstance(value, str) else repr(value)
    brackets = "{}" if isinstance(value, dict) else "[]"
    items = list(value.values()) if isinstance(value, dict) else value
    keys = [f"{json.dumps(key)}: " for key in value] if isinstance(value, dict) else [""] * len(items)
    entries = [key + _literal(item, indent + 4) for key, item in zip(keys, items, strict=True)]
    line = brackets[0] + ", ".join(entries) + brackets[1]
    if len(line) <= INLINE_LENGTH and not any(isinstance(item, dict | list) and item for item in items):
        return line
    inner = "".join(f"{' ' * (indent + 4)}{entry},\n" for entry in entries)
    return f"{brackets[0]}\n{inner}{' ' * indent}{brackets[1]}" if entries else brackets


def expected_products(plan: Plan) -> dict[tuple[str, int | None], int]:
    """Return the number of wgmma instructions expected in a kernel's code, by kernel and BLOCK_H (None without one).

    Kernels that are not listed are not checked.
    """
    found: dict[tuple[str, int | None], int] = {}
    for family in plan.families:
        for kernels in RENDERERS[family.NAME].present_sm90(plan):
            found |= kernels.products(plan)
    return found
