"""What the kernel families of the portable back end share."""

from __future__ import annotations

import dataclasses
from typing import Any

from mlagen.plan import Chunk, LatentFamily, MergeStatesPlan, Plan
from mlagen.work import ITEMSIZE

TORCH_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
LINE_LENGTH = 120
FULL_ALIGNMENT = 16

Signature = tuple[tuple[str, str], ...]


def sm90_modules(plan: Plan) -> list[str]:
    """The modules of the sm90 kernels that the package has, those of attention over latent rows first."""
    ordered = sorted(plan.families, key=lambda family: not isinstance(family, LatentFamily))
    return [module for family in ordered for module in family.sm90_modules]


def common(plan: Plan) -> dict[str, Any]:
    """What every template of a package may ask for."""
    spec = plan.spec
    return {
        "wrappers": spec.wrappers,
        "targets": spec.targets,
        "backend": spec.backend,
        "shares": plan.union is not None,
        "layout": plan.layout,
        "d_qk": plan.d_qk,
        "d_v": plan.d_v,
        "dtype": spec.model.dtype,
        "takes_pair": plan.takes_pair,
        "rope_aligned": plan.takes_pair and alignment_of(plan.d_v) == "ALIGNMENT",
        "merges": plan.find(MergeStatesPlan) is not None,
        "torch_dtype": TORCH_DTYPES[spec.model.dtype],
    }


def imported(module: str, names: list[str]) -> str:
    """What follows `import` from a module of the package, as the house formats it: a name a line if a line is short."""
    line = ", ".join(names)
    if len(f"from .{module} import {line}") <= LINE_LENGTH:
        return line
    return "(\n" + "".join(f"    {name},\n" for name in names) + ")"


def stated_scale(scale: float | None) -> str:
    """The softmax scale that a spec states, as text; empty: none."""
    return "" if scale is None else repr(scale)


def alignment_of(column: int) -> str:
    """What may be claimed of addresses that begin `column` columns into an aligned row: ALIGNMENT, or nothing."""
    return "ALIGNMENT" if column * ITEMSIZE % FULL_ALIGNMENT == 0 else "1"


def chunk_of(chunk: Chunk) -> dict[str, Any]:
    """A chunk as templates ask for it."""
    alignment = alignment_of(chunk.start)
    aligned = f"config.{alignment}" if alignment == "ALIGNMENT" else alignment
    return {**dataclasses.asdict(chunk), "masked": chunk.masked, "alignment": alignment, "aligned": aligned}
