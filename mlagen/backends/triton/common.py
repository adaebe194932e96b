"""What the kernel families of the portable back end share."""

from __future__ import annotations

import dataclasses
from typing import Any

from mlagen.plan import TARGETS, Chunk, DenseFwdPlan, Plan, Sm90Plan, SparseDecodePlan, SparseFwdPlan
from mlagen.plan.cache import EARLY_PROGRAMS
from mlagen.plan.sm90 import DenseFwdSm90Plan
from mlagen.plan.tritons import MINORS, has_versions
from mlagen.spec import NEEDS
from mlagen.work import ITEMSIZE

TORCH_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
LINE_LENGTH = 120
# Wrappers of the cache and index kernels.
CACHES = tuple(name for name, needs in NEEDS.items() if not (needs.attention or needs.multi_head or needs.values))
ATTENTION = tuple(name for name, needs in NEEDS.items() if needs.attention)
FULL_ALIGNMENT = 16

Signature = tuple[tuple[str, str], ...]


def sm90_kernels(plan: Plan) -> dict[str, Sm90Plan | None]:
    """The modules of sm90 kernels, and the numbers of those that the package has."""
    return {
        "_dense_decode_sm90": plan.dense_decode.sm90 if plan.dense_decode else None,
        "_sparse_decode_sm90": plan.sparse_decode.sm90 if plan.sparse_decode else None,
        "_sparse_fwd_sm90": plan.sparse_fwd.sm90 if plan.sparse_fwd else None,
        "_sparse_fwd_sm90_swap_ab": next(iter(plan.sparse_fwd.swap_ab), None) if plan.sparse_fwd else None,
    }


def _splits_registers_by_version(plan: Plan) -> bool:
    """Whether an sm90 kernel has another split of registers under some Tritons."""
    found: list[Sm90Plan | DenseFwdSm90Plan | None] = [*sm90_kernels(plan).values()]
    found += [part.sm90 for part in (plan.union, plan.dense_fwd) if part is not None]
    return any(sm90.registers.under for sm90 in found if sm90 is not None)


def common(plan: Plan) -> dict[str, Any]:
    """What every template of a package may ask for."""
    spec = plan.spec
    layouts = [layout for layout in (plan.layout, plan.extra_layout) if layout is not None]
    has_caches = any(wrapper in CACHES for wrapper in spec.wrappers)
    return {
        "title": spec.title,
        "wrappers": spec.wrappers,
        "targets": spec.targets,
        "backend": spec.backend,
        "proven": (MINORS[0], MINORS[-1]),
        "sm90_modules": [name for name, sm90 in sm90_kernels(plan).items() if sm90 is not None]
        + (["_sparse_fwd_sm90_shared", "_index_union_sm90"] if plan.union else [])
        + (["_dense_fwd_sm90"] if plan.dense_fwd and plan.dense_fwd.sm90 else []),
        "shares": plan.union is not None,
        "has_versions": plan.has_versions,
        "knows_triton": plan.has_versions or _splits_registers_by_version(plan),
        "has_caches": has_caches,
        "early_programs": EARLY_PROGRAMS,
        "launches_dependents": has_caches or any(wrapper in ATTENTION for wrapper in spec.wrappers),
        "dependent_targets": [target for target in spec.targets if TARGETS[target].dependent_launch],
        # They find the page of a slot, whose size is known at run time, and the token of a tile.
        "divides": has_caches or any(sm90_kernels(plan).values()),
        "places_tiles": any(sm90 for name, sm90 in sm90_kernels(plan).items() if name != "_dense_decode_sm90"),
        "needs_e4m3": any(field.dtype == "e4m3" for layout in layouts for field in layout.fields),
        "e4m3_targets": [target for target in spec.targets if TARGETS[target].has_e4m3],
        "e4m3_rounding_targets": [target for target in spec.targets if TARGETS[target].rounds_e4m3],
        "layout": plan.layout,
        "d_qk": plan.d_qk,
        "d_v": plan.d_v,
        "dtype": spec.model.dtype,
        "torch_dtype": TORCH_DTYPES[spec.model.dtype],
    }


def tables(plan: SparseFwdPlan | SparseDecodePlan | DenseFwdPlan) -> dict[str, Any]:
    """The tile tables of a family as its template asks for them, and which of them have rows of some Tritons alone."""
    return {
        "tiles": plan.tiles,
        "unaligned": plan.unaligned,
        "tiles_by_version": has_versions(plan.tiles),
        "unaligned_by_version": has_versions(plan.unaligned),
    }


def imported(module: str, names: list[str]) -> str:
    """What follows `import` from a module of the package, as the house formats it: a name a line if a line is short."""
    line = ", ".join(names)
    if len(f"from .{module} import {line}") <= LINE_LENGTH:
        return line
    return "(\n" + "".join(f"    {name},\n" for name in names) + ")"


def alignment_of(lane: int) -> str:
    """What may be claimed of addresses that begin `lane` lanes into an aligned row: ALIGNMENT, or nothing."""
    return "ALIGNMENT" if lane * ITEMSIZE % FULL_ALIGNMENT == 0 else "1"


def chunk_of(chunk: Chunk) -> dict[str, Any]:
    """A chunk as templates ask for it."""
    return {**dataclasses.asdict(chunk), "masked": chunk.masked, "alignment": alignment_of(chunk.start)}
