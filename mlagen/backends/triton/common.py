"""What the kernel families of the portable back end share."""

from __future__ import annotations

import dataclasses
from typing import Any

from mlagen.plan import Chunk, Plan
from mlagen.plan.work import ITEMSIZE

TORCH_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
FULL_ALIGNMENT = 16
INDEX_GROUP = 16

Signature = tuple[tuple[str, str], ...]


def common(plan: Plan) -> dict[str, Any]:
    """What every template of a package may ask for."""
    spec = plan.spec
    return {
        "title": spec.title,
        "wrappers": spec.wrappers,
        "targets": spec.targets,
        "layout": plan.layout,
        "d_qk": plan.d_qk,
        "d_v": plan.d_v,
        "dtype": spec.model.dtype,
        "torch_dtype": TORCH_DTYPES[spec.model.dtype],
    }


def alignment_of(lane: int) -> str:
    """What may be claimed of addresses that begin `lane` lanes into an aligned row: ALIGNMENT, or nothing."""
    return "ALIGNMENT" if lane * ITEMSIZE % FULL_ALIGNMENT == 0 else "1"


def chunk_of(chunk: Chunk) -> dict[str, Any]:
    """A chunk as templates ask for it."""
    return {**dataclasses.asdict(chunk), "masked": chunk.masked, "alignment": alignment_of(chunk.start)}
