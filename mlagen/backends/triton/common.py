"""What the kernel families of the portable back end share."""

from __future__ import annotations

import dataclasses
from typing import Any

from mlagen.plan import TARGETS, CachePlan, Chunk, DenseDecodePlan, IndicesPlan, LatentFamily, Plan, TiledFamily
from mlagen.plan.cache import EARLY_PROGRAMS
from mlagen.plan.tritons import MINORS, has_versions
from mlagen.work import ITEMSIZE

TORCH_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
LINE_LENGTH = 120
FULL_ALIGNMENT = 16

Signature = tuple[tuple[str, str], ...]


def sm90_modules(plan: Plan) -> list[str]:
    """The modules of the sm90 kernels that the package has, those of attention over latent rows first."""
    ordered = sorted(plan.wanted, key=lambda family: not isinstance(family, LatentFamily))
    return [module for family in ordered for module in family.sm90_modules]


def _splits_registers_by_version(plan: Plan) -> bool:
    """Whether an sm90 kernel has another split of registers under some Tritons."""
    return any(registers.under for family in plan.families for registers in family.sm90_registers)


def common(plan: Plan) -> dict[str, Any]:
    """What every template of a package may ask for."""
    spec = plan.spec
    layouts = [layout for layout in (plan.layout, plan.extra_layout) if layout is not None]
    has_caches = any(isinstance(family, CachePlan | IndicesPlan) for family in plan.families)
    indexed = [family for family in plan.latent if not isinstance(family, DenseDecodePlan)]
    return {
        "title": spec.title,
        "wrappers": spec.wrappers,
        "targets": spec.targets,
        "backend": spec.backend,
        "proven": (MINORS[0], MINORS[-1]),
        "sm90_modules": sm90_modules(plan),
        "shares": plan.union is not None,
        "has_versions": plan.has_versions,
        "knows_triton": plan.has_versions or _splits_registers_by_version(plan),
        "has_caches": has_caches,
        "early_programs": EARLY_PROGRAMS,
        "launches_dependents": has_caches or any(isinstance(family, LatentFamily) for family in plan.wanted),
        "dependent_targets": [target for target in spec.targets if TARGETS[target].dependent_launch],
        # They find the page of a slot, whose size is known at run time, and the token of a tile.
        "divides": has_caches or any(family.sm90 for family in plan.latent),
        "places_tiles": any(family.sm90 for family in indexed),
        "needs_e4m3": any(field.dtype == "e4m3" for layout in layouts for field in layout.fields),
        "e4m3_targets": [target for target in spec.targets if TARGETS[target].has_e4m3],
        "e4m3_rounding_targets": [target for target in spec.targets if TARGETS[target].rounds_e4m3],
        "layout": plan.layout,
        "d_qk": plan.d_qk,
        "d_v": plan.d_v,
        "dtype": spec.model.dtype,
        "torch_dtype": TORCH_DTYPES[spec.model.dtype],
    }


def tables(family: TiledFamily[Any]) -> dict[str, Any]:
    """The tile tables of a family as its template asks for them, and which of them have rows of some Tritons alone."""
    return {
        "tiles": family.tiles,
        "unaligned": family.unaligned,
        "tiles_by_version": has_versions(family.tiles),
        "unaligned_by_version": has_versions(family.unaligned),
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
