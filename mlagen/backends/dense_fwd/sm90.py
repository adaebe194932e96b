"""The sm90 kernel of multi-head attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mlagen.backends.parts.common import Signature, tuple_text
from mlagen.backends.parts.gluon import Rescaling, Sm90Kernels, register_split, required, rescaling
from mlagen.backends.parts.grouped import Interface, SharedMemory, interface, shared
from mlagen.plan import SM90, Chunk, DenseFwdPlan, Plan
from mlagen.plan.sm90.dense_fwd import DenseFwdSm90Plan
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


@dataclass(frozen=True)
class Kernel(Interface, SharedMemory, Rescaling):
    """Context of the kernel's template.

    Attributes:
        d_qk, d_v: columns of Q and K, and of V.
        descriptors: whether K and V can be loaded by tensor descriptors.
        sm90: the kernel's plan.
        kernel: name of the kernel.
        register_split: registers of each warpgroup, as text.
        result_columns: column strides between the registers of a thread in the stored accumulator, from 16 on.
        itemsize: bytes of a column.
        k_chunks: blocks of K's columns.
        k_blocks: their widths, as text.
    """

    d_qk: int
    d_v: int
    descriptors: bool
    sm90: DenseFwdSm90Plan
    kernel: str
    register_split: str
    result_columns: Sequence[int]
    itemsize: int
    k_chunks: Sequence[Chunk]
    k_blocks: str


class DenseFwdModule:
    """The generated module with the sm90 kernel of multi-head attention."""

    module = DenseFwdPlan.SM90_KERNELS["sm90"]
    template = "sm90/dense_fwd"
    KERNEL = f"{module}_kernel"

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

    def context(self, plan: Plan) -> Mapping[str, object]:
        """Template context."""
        family = plan.of(DenseFwdPlan)
        names = [chunk.name for chunk in family.k_chunks]
        sm90 = required(family.sm90)
        barriers = ("tile_ready", "q_ready", "q_free", "k_ready", "k_free", "v_ready", "v_free")
        context = Kernel(
            **vars(interface(self._arguments(plan))),
            **vars(shared([*(f"q_{name}" for name in names), *names, "v"], ("tile_coordinates", *barriers))),
            **vars(rescaling(RESCALE_THRESHOLD_LOG2)),
            d_qk=family.d_qk,
            d_v=family.d_v,
            descriptors=bool(family.descriptor_targets),
            sm90=sm90,
            kernel=self.KERNEL,
            register_split=register_split(sm90.registers),
            result_columns=register_columns(family.d_v),
            itemsize=ITEMSIZE,
            k_chunks=family.k_chunks,
            k_blocks=tuple_text(f"D_{name.upper()}.value" for name in names),
        )
        return vars(context)

    def products(self, plan: Plan) -> dict[tuple[str, int | None], int]:
        """Number of wgmma instructions in the kernel's code, in the form of `expected_products`."""
        return {(self.KERNEL, None): required(plan.of(DenseFwdPlan).sm90).expected_products}


KERNELS: tuple[Sm90Kernels, ...] = (DenseFwdModule(),)
