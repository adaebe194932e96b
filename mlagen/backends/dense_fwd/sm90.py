"""The sm90 kernel of multi-head attention."""

from __future__ import annotations

from typing import Any

from mlagen.backends.parts.common import Signature, chunk_of
from mlagen.backends.parts.gluon import Sm90Kernels, register_split, required, rescaling
from mlagen.backends.parts.grouped import interface, shared
from mlagen.plan import SM90, DenseFwdPlan, Plan
from mlagen.plan.sm90.kernel import RESCALE_THRESHOLD_LOG2, register_columns
from mlagen.work import ITEMSIZE


def _portable_arguments(plan: Plan) -> Signature:
    """Return the run-time arguments of the portable kernel with pointers, and their Triton types."""
    element = f"*{plan.spec.model.dtype}"
    heads = ("num_heads", "heads_per_kv")
    sizes = ("total_q", "total_k", *heads, "num_requests", "request_bits", "num_slots", "head_group")
    strides = (f"{tensor}_{dim}_stride" for tensor in ("q", "out", "k", "v") for dim in ("row", "head"))
    return (
        ("q_ptr", element),
        ("k_ptr", element),
        ("v_ptr", element),
        ("cu_seqlens_q_ptr", "*i32"),
        ("cu_seqlens_k_ptr", "*i32"),
        ("out_ptr", element),
        ("lse_ptr", "*fp32"),
        *((name, "i32") for name in sizes),
        ("scale_log2", "fp32"),
        *((name, "i64") for name in strides),
    )


class DenseFwdModule:
    """The generated module with the sm90 kernel of multi-head attention."""

    module = "_dense_fwd_sm90"
    template = "sm90/dense_fwd"
    KERNEL = "_dense_fwd_sm90_kernel"

    def present(self, plan: Plan) -> bool:
        """Whether the package has the kernel."""
        return bool(plan.of(DenseFwdPlan).sm90)

    def _arguments(self, plan: Plan) -> Signature:
        arguments = (*_portable_arguments(plan), ("num_tiles", "i32"), ("causal", "i32"), ("tile_counter_ptr", "*i32"))
        dense_fwd, dtype = plan.of(DenseFwdPlan), plan.spec.model.dtype
        if SM90 not in dense_fwd.descriptor_targets:
            return arguments
        rows = required(dense_fwd.sm90).block_n
        blocks = [
            *((chunk.name, chunk.block) for chunk in dense_fwd.k_chunks),
            ("v", dense_fwd.d_v),
        ]
        described = ((f"{name}_desc", f"tensordesc<{dtype}[{rows},{columns}],TILE>") for name, columns in blocks)
        return (*arguments, ("described", "i32"), *described)

    def context(self, plan: Plan) -> dict[str, Any]:
        """Template context."""
        family = plan.of(DenseFwdPlan)
        chunks = [chunk_of(chunk) for chunk in family.k_chunks]
        names = [chunk["name"] for chunk in chunks]
        k_chunks = [{**chunk, "constant": chunk["name"].upper()} for chunk in chunks]
        blocks = ", ".join(f"D_{name.upper()}.value" for name in names)
        sm90 = required(family.sm90)
        return {
            "d_qk": family.d_qk,
            "d_v": family.d_v,
            "descriptors": bool(family.descriptor_targets),
            "sm90": sm90,
            "kernel": self.KERNEL,
            **interface(self._arguments(plan)),
            "register_split": register_split(sm90.registers),
            "result_columns": register_columns(family.d_v),
            **rescaling(RESCALE_THRESHOLD_LOG2),
            "itemsize": ITEMSIZE,
            "k_chunks": k_chunks,
            "k_blocks": f"({blocks})" if len(names) > 1 else f"({blocks},)",
            **shared(
                [*(f"q_{name}" for name in names), *names, "v"],
                ("tile_coordinates", "tile_ready", "q_ready", "q_free", "k_ready", "k_free", "v_ready", "v_free"),
            ),
        }

    def products(self, plan: Plan) -> dict[tuple[str, int | None], int]:
        """Number of wgmma instructions in the kernel's code, in the form of `expected_products`."""
        return {(self.KERNEL, None): required(plan.of(DenseFwdPlan).sm90).expected_products}


KERNELS: tuple[Sm90Kernels, ...] = (DenseFwdModule(),)
