"""Modules with sm90 kernels (Gluon), and the contexts that several of them share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from mlagen.backends.parts.columns import SwapAbRow, row_context
from mlagen.backends.parts.common import Signature, fields_of
from mlagen.backends.parts.grouped import Interface, SharedMemory, interface, shared
from mlagen.backends.parts.splits import attention_context
from mlagen.plan import LatentFamily, Plan, Sm90Plan
from mlagen.plan.sm90.kernel import Registers
from mlagen.plan.splits import PartialRow
from mlagen.plan.targets import WARP_SIZE

FIRST_BARRIER = 4  # named barriers; Triton uses the lower ones


class Sm90Kernels(Protocol):
    """A generated module with sm90 kernels. `KERNELS` of a family's module `sm90` lists them."""

    @property
    def module(self) -> str:
        """Name of the module."""

    @property
    def template(self) -> str:
        """Name of the template, in `templates/`."""

    def present(self, plan: Plan) -> bool:
        """Whether the package has the module."""

    def context(self, plan: Plan) -> Mapping[str, object]:
        """Template context."""

    def products(self, plan: Plan) -> dict[tuple[str, int | None], int]:
        """Number of wgmma instructions in the code of its kernels, in the form of `expected_products`."""


def register_split(registers: Registers) -> str:
    """Return the text of a kernel's register split, with the splits of other Triton versions."""
    split = str(list(registers.split))
    if not registers.under:
        return split
    others = ", ".join(f"{minor}: {list(other)}" for minor, other in registers.under)
    return f"{{{others}}}.get(TRITON, {split})"


Part = TypeVar("Part")


def required(part: Part | None) -> Part:
    """Return a part of the plan that must exist, since its kernel is in the package."""
    if part is None:
        raise LookupError("the plan has no such part")
    return part


def sm90_of(plan: Plan, kind: type[LatentFamily]) -> Sm90Plan | None:
    """Return the plan of a family's sm90 kernel, or None."""
    family = plan.find(kind)
    return family.sm90 if family else None


@dataclass(frozen=True)
class Rotation:
    """Text for the rotation of RoPE's columns, the last ones of O_R.

    Attributes:
        pairs: number of their pairs.
        halvings: numbers of the halvings that lead from O_R to RoPE's columns.
        steps: distances of a thread's pairs in a product of [heads, columns], from 4 on.
        rows, pair_rows: distances of its columns in a product of [columns, heads], from 64 on, and of their pairs.
        lane_mask: the mask of a thread's pairs without the lane's part.
        thread_pairs, thread_mask: pairs of a row that a thread recomputes, and the mask of their numbers.
        first_pair: RoPE's first pair among those of a row.
    """

    pairs: int
    halvings: Sequence[int]
    steps: Sequence[int]
    rows: Sequence[int]
    pair_rows: Sequence[int]
    lane_mask: int
    thread_pairs: int
    thread_mask: int
    first_pair: int


def rotation_of(plan: Plan, sm90: Sm90Plan) -> Rotation | None:
    """Return the rotation of a kernel's output, or None."""
    columns = plan.out_rope
    if not columns:
        return None
    thread_pairs = plan.d_v // WARP_SIZE // 2
    return Rotation(
        pairs=columns // 2,
        halvings=range((sm90.d_half // columns).bit_length() - 1),
        steps=[1 << bit for bit in range(2, (columns // 2).bit_length() - 1)],
        rows=[1 << bit for bit in range(6, columns.bit_length() - 1)],
        pair_rows=[1 << bit for bit in range(5, columns.bit_length() - 2)],
        lane_mask=columns // 2 - 4,
        thread_pairs=thread_pairs,
        thread_mask=thread_pairs - 1,
        first_pair=(plan.d_v - columns) // 2,
    )


def rotation_arguments(plan: Plan) -> tuple[Signature, Signature, Signature]:
    """Return the pointers, sizes and strides of positions and angles; empty if the output is not rotated."""
    if not plan.out_rope:
        return (), (), ()
    pointers = (("positions_ptr", "*i64"), ("cos_sin_cache_ptr", "*fp32"))
    return pointers, (("num_positions", "i32"),), (("cos_sin_stride", "i64"),)


def out_arguments(plan: Plan, stride: str) -> tuple[Signature, Signature]:
    """Return the pointer of the output, and the last arguments: its strides, of this type, and those of its scales."""
    quant, strides = plan.out_quant, ("out_token_stride", "out_head_stride")
    if quant is None:
        return (("out_ptr", f"*{plan.spec.model.dtype}"),), tuple((name, stride) for name in strides)
    scales = ("out_scales_ptr", "*fp32" if quant.scales == "fp32" else "*i32")
    return (("out_ptr", "*u8"),), (*((name, stride) for name in (*strides, "out_group_stride")), scales)


@dataclass(frozen=True)
class Rescaling:
    """Bounds of the online softmax, base 2.

    Attributes:
        rescale_threshold_log2: the threshold for rescaling O.
        p_limit_log2: the upper bound of rounded P, which is twice the threshold.
    """

    rescale_threshold_log2: int
    p_limit_log2: int


@dataclass(frozen=True)
class Sm90Kernel(Interface, SharedMemory, Rescaling):
    """Context of the template of an sm90 kernel of attention.

    Attributes:
        sm90: the kernel's plan.
        kernel: name of the kernel.
        register_split: registers of each warpgroup, as text.
        splits_constants: constants that the kernel imports from `_splits`, as text.
        scaled: whether partials have exponents of their own.
    """

    sm90: Sm90Plan
    kernel: str
    register_split: str
    splits_constants: str
    scaled: bool


@dataclass(frozen=True)
class SwapAbKernel(Sm90Kernel, SwapAbRow):
    """Context of the template of a swap-AB kernel.

    Attributes:
        most_heads: most heads of a program.
        k_r_free, exchange_ready: numbers of named barriers.
        statistics: values of rows that consumers exchange.
        partials: a row of a split's results.
        takes_pair: whether Q's RoPE columns are in another tensor.
    """

    most_heads: int
    k_r_free: int
    exchange_ready: int
    statistics: Sequence[str]
    partials: PartialRow
    takes_pair: bool


@dataclass(frozen=True)
class Sm90Module:
    """A generated module with the sm90 kernel of one family.

    Attributes:
        module: name of the module.
        template: name of the template, in `templates/`.
        plan_of: returns the kernel's plan, or None if the package has no such kernel.
        arguments: run-time arguments and their Triton types, with every optional tensor given.
        kind: class of the template's context.
        details: fields of it that no other kernel has in the same way.
        constexprs: names of the kernel's constexpr arguments.
    """

    module: str
    template: str
    plan_of: Callable[[Plan], Sm90Plan | None]
    arguments: Callable[[Plan], Signature]
    kind: type[Sm90Kernel]
    details: Callable[[Plan], dict[str, Any]]
    constexprs: tuple[str, ...] = ()

    @property
    def kernel(self) -> str:
        """Name of the kernel."""
        return f"{self.module}_kernel"

    def present(self, plan: Plan) -> bool:
        """Whether the package has the kernel."""
        return self.plan_of(plan) is not None

    def context(self, plan: Plan) -> Mapping[str, object]:
        """Template context."""
        sm90 = required(self.plan_of(plan))
        found = {
            **attention_context(plan, self.kind),
            **fields_of(self.kind, row_context(sm90, takes_pair=plan.takes_pair)),
            **vars(interface(self.arguments(plan), *self.constexprs)),
            **vars(rescaling(plan.rescale_threshold_log2)),
            "sm90": sm90,
            "kernel": self.kernel,
            "register_split": register_split(sm90.registers),
            "splits_constants": constants_of_splits(plan, d_v=names_d_v(sm90)),
            "scaled": plan.splits.partials.scaled,
        }
        return vars(self.kind(**found | self.details(plan)))

    def products(self, plan: Plan) -> dict[tuple[str, int | None], int]:
        """Number of wgmma instructions in the kernel's code, in the form of `expected_products`."""
        return {(self.kernel, None): required(self.plan_of(plan)).expected_products}


def rescaling(threshold_log2: int) -> Rescaling:
    """Return the bounds for a threshold for rescaling O."""
    return Rescaling(threshold_log2, threshold_log2 + 1)


def names_d_v(sm90: Sm90Plan) -> bool:
    """Whether a kernel's text names V's columns, to bound stores or to find the tail."""
    return sm90.pieces.pads_v or sm90.d_tail > 0


def constants_of_splits(plan: Plan, *, d_v: bool) -> str:
    """Return the constants that a kernel imports from `_splits`, as text."""
    return ", ".join([*(["D_V"] if d_v else []), "NEG_LARGE", *(["QUANT_BLOCK"] if plan.out_quant else [])])


def seesaw_shared(sm90: Sm90Plan, *statistics: str, scaled: bool = False) -> list[tuple[str, ...]]:
    """Return groups of names of a seesaw kernel's shared memory, including its `statistics`."""
    tails = ("q_tail", "k0_tail", "k1_tail") if sm90.d_tail else ()
    p0 = () if sm90.p0_in_tail else ("p0",)
    halves = ("q_l", "q_r", "k0_l", "k0_r", "k1_l", "k1_r")
    return [(*halves, *tails), (*p0, "p1", "m0", "m1", "l0", "l1", *statistics, *(("e0", "e1") if scaled else ()))]


def p0_place(sm90: Sm90Plan) -> str:
    """Return the shared memory of local P: that of block 0's tail, which is free by then, or its own."""
    return "shared.k0_tail" if sm90.p0_in_tail else "shared.p0"


def topk_lengths(plan: Plan) -> Signature:
    """Return the argument for the lengths of index lists; empty if the spec has none."""
    return (("topk_length_ptr", "*i32"),) if plan.sparse_attention.topk_length != "none" else ()


def dividers(*names: str) -> Signature:
    """Return the names of run-time divisors' multipliers and shifts, from `_launch.divider`."""
    return tuple((f"{name}_{part}", "i32") for name in names for part in ("multiplier", "shift"))


def of_rope(plan: Plan, arguments: Signature) -> Signature:
    """Return the arguments for Q's RoPE columns, which follow those of Q; empty if Q is one tensor."""
    return tuple((name.replace("q_", "q_rope_", 1), kind) for name, kind in arguments) if plan.takes_pair else ()


@dataclass(frozen=True, kw_only=True)
class SwapAbModule(Sm90Module):
    """The generated module with a swap-AB kernel, for few heads.

    Attributes:
        plans_of: returns the kernel's plans by number of heads; empty if the package has no such kernel.
    """

    plans_of: Callable[[Plan], tuple[Sm90Plan, ...]]

    def products(self, plan: Plan) -> dict[tuple[str, int | None], int]:
        """Number of wgmma instructions, by number of heads per program."""
        return {(self.kernel, one.block_h): one.expected_products for one in self.plans_of(plan)}


def swap_ab_details(plans: tuple[Sm90Plan, ...], statistics: tuple[str, ...], *, scaled: bool) -> dict[str, Any]:
    """Further context of a swap-AB kernel. Its consumers exchange `statistics`."""
    sm90 = plans[0]
    tails = ("q_tail", "k_tail") if sm90.d_tail else ()
    exponents = ("exponents0", "exponents1") if scaled else ()
    halves = ("q_l", "q_r", "k_l", "k_r")
    return {
        "most_heads": plans[-1].block_h,
        "k_r_free": FIRST_BARRIER + sm90.k_l_stages,
        "exchange_ready": FIRST_BARRIER + sm90.k_l_stages + 2,
        "statistics": statistics,
        **vars(shared((*halves, *tails), (*statistics, *exponents), ("q_ready", "k_l_ready", "k_r_ready"))),
    }
