"""The sm90 kernel of top-k, in Gluon: a module next to the portable one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mlagen.backends.parts.common import Signature
from mlagen.backends.parts.gluon import Sm90Kernels, required
from mlagen.backends.parts.grouped import Interface, Parameters, interface, parameters
from mlagen.plan import Plan, TopkPlan
from mlagen.plan.sm90.topk import MODULE, SHARED_ROW, TopkSm90Plan

VECTORS = ("starts", "lens", "page_table", "row_to_batch", "page_starts", "out")
SIZES = (
    *("num_columns", "k", "next_n", "has_starts", "lens_are_ends", "gives_scores", "gives_raw"),
    *("has_pages", "has_batches", "has_page_starts", "num_batches", "num_pages"),
    *("page_size", "page_limit", "page_multiplier", "page_shift"),
)
CANDIDATES = (("candidates_ptr", "*fp32"), ("candidate_ids_ptr", "*i32"), ("counts_ptr", "*i32"))
STRIDES = ("logits", "page_table", "out", "scores", "raw")
COLLECT_ARGUMENTS = (
    *(("logits_ptr", "*fp32"), ("starts_ptr", "*i32"), ("lens_ptr", "*i32")),
    *CANDIDATES,
    *((name, "i32") for name in ("num_columns", "k", "next_n", "has_starts", "lens_are_ends")),
    ("logits_stride", "i64"),
)
CONSTEXPRS = ("ITEMSIZE", "CAPACITY", "PARTS", "WARPS", "HALVES", "PDL")


@dataclass(frozen=True)
class Kernel(Interface):
    """Context of the kernel's template.

    Attributes:
        sm90: the kernel's plan.
        shared_row: words of a row in shared memory.
        kernel: name of the kernel.
        collect: parameters of the kernel that collects candidates.
    """

    sm90: TopkSm90Plan
    shared_row: int
    kernel: str
    collect: Parameters


class TopkModule:
    """The generated module with the sm90 kernel of top-k."""

    module = MODULE
    template = "sm90/topk"

    def present(self, plan: Plan) -> bool:
        """Whether the package has the kernel."""
        return self._sm90(plan) is not None

    def _sm90(self, plan: Plan) -> TopkSm90Plan | None:
        family = plan.find(TopkPlan)
        return family.sm90 if family else None

    def arguments(self) -> Signature:
        """The portable kernel's run-time arguments that it needs, with their Triton types for fp32 scores."""
        return (
            ("logits_ptr", "*fp32"),
            *((f"{name}_ptr", "*i32") for name in VECTORS),
            *(("scores_ptr", "*fp32"), ("raw_ptr", "*i32")),
            *CANDIDATES,
            *((name, "i32") for name in SIZES),
            *((f"{name}_stride", "i64") for name in STRIDES),
        )

    def context(self, plan: Plan) -> Mapping[str, object]:
        """Template context."""
        context = Kernel(
            **vars(interface(self.arguments(), "IS_LONG", *CONSTEXPRS)),
            sm90=required(self._sm90(plan)),
            shared_row=SHARED_ROW,
            kernel=f"{MODULE}_kernel",
            collect=parameters(COLLECT_ARGUMENTS, *CONSTEXPRS),
        )
        return vars(context)

    def products(self, plan: Plan) -> dict[tuple[str, int | None], int]:
        """None: the kernel has no matrix products."""
        return {}


KERNELS: tuple[Sm90Kernels, ...] = (TopkModule(),)
