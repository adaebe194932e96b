"""What the kernel families of the portable back end share."""

from __future__ import annotations

import dataclasses
from typing import Any

from mlagen.plan import Chunk, DenseFwdPlan, Plan, Sm90Plan, SparseDecodePlan, SparseFwdPlan
from mlagen.plan.tritons import has_versions
from mlagen.plan.work import ITEMSIZE

TORCH_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
LINE_LENGTH = 120
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


def sm90_modules(plan: Plan) -> list[str]:
    """The modules of sm90 kernels that the package has."""
    found = [name for name, sm90 in sm90_kernels(plan).items() if sm90 is not None]
    found += ["_sparse_fwd_sm90_shared", "_index_union_sm90"] if plan.union else []
    return found + (["_dense_fwd_sm90"] if plan.dense_fwd and plan.dense_fwd.sm90 else [])


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
