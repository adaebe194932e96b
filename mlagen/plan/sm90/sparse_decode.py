"""Numbers of the sm90 kernel of sparse attention that multiplies Q and a cache of e4m3."""

from __future__ import annotations

from mlagen.errors import LimitError
from mlagen.layout import CacheLayout
from mlagen.plan.sm90.caches import dims_refusal
from mlagen.plan.sm90.e4m3 import of_e4m3, reads_e4m3
from mlagen.plan.sm90.kernel import D_V, SWIZZLED_COLUMNS, Registers, Sm90Plan, refusal
from mlagen.plan.splits import PartialRow
from mlagen.spec import SparseAttention, Spec

REGISTERS = Registers((232, 40), (((3, 9), (224, 56)),))


def multiplies_e4m3(spec: Spec) -> bool:
    """Whether a spec asks for the kernel."""
    return isinstance(spec.attention, SparseAttention) and spec.attention.products == "mixed"


def make_sparse_e4m3(
    spec: Spec, layout: CacheLayout, extra_layout: CacheLayout | None, sm90: Sm90Plan | None
) -> Sm90Plan | None:
    """The plan of the kernel; None where the spec does not ask for it.

    Args:
        spec: the spec.
        layout, extra_layout: of its caches.
        sm90: of the kernel that multiplies the model's dtype. This kernel runs in its place.

    Raises:
        LimitError: the spec asks for it, and it cannot be emitted.
    """
    if not multiplies_e4m3(spec):
        return None
    reason = _refusal(spec, layout, extra_layout)
    if reason is not None or sm90 is None:
        message = f"got mixed, which cannot be emitted: {reason or 'the spec has no sm90 kernel'}"
        raise LimitError(f"attention.products: {message}")
    return of_e4m3(sm90, REGISTERS)


def _refusal(spec: Spec, layout: CacheLayout, extra_layout: CacheLayout | None) -> str | None:
    """Why the kernel cannot be emitted for a spec; None if it can."""
    if spec.backend == "triton":
        return "backend is triton"
    if extra_layout is not None:
        return "it reads one cache, and the spec has two"
    if not reads_e4m3(layout):
        return f"it needs e4m3 rows with one scale per tensor, and the cache has layout {layout.name}"
    reason = dims_refusal(spec, {D_V: (SWIZZLED_COLUMNS,)})
    if reason is not None:
        return reason
    if PartialRow(spec.partials, D_V).scaled:
        return f"partials are {spec.partials}, and it supports fp32 and bf16"
    return refusal(spec)
