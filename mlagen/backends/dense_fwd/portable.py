"""Multi-head attention over requests of any lengths, by pointers or by tensor descriptors, and its wrapper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlagen.backends.parts import tiles
from mlagen.backends.parts.base import GeneratedFile, Module, generated
from mlagen.backends.parts.common import FULL_ALIGNMENT, LINE_LENGTH, TORCH_DTYPES, Block, blocks_of, stated_scale
from mlagen.backends.parts.splits import kernel_names
from mlagen.plan import DenseFwdPlan, MergeStatesPlan, Plan
from mlagen.plan.sm90.dense_fwd import DenseFwdSm90Plan

MODULE = "dense_fwd"


@dataclass(frozen=True)
class Heads:
    """Facts of the heads, which all templates of the family take.

    Attributes:
        dtype: the model's dtype.
        d_qk, d_v: columns of Q and K, and of V.
        k_chunks, v_chunks: blocks of these columns.
        descriptors: whether K and V can be loaded by tensor descriptors.
        window: keys that a row of the model sees, including its own; None: all.
    """

    dtype: str
    d_qk: int
    d_v: int
    k_chunks: Sequence[Block]
    v_chunks: Sequence[Block]
    descriptors: bool
    window: int | None


@dataclass(frozen=True)
class Visible:
    """The keys that a row sees.

    Attributes:
        steps: ranges of keys that a program attends to: first, end, and whether a row may not see some.
        bounds, visible, seen: arguments, a sentence, and the mask, as text.
        window_given: the window as an argument, as text; empty without one.
    """

    steps: Sequence[tuple[str, str, bool]]
    bounds: str
    visible: str
    seen: str
    window_given: str


WITHOUT_WINDOW = Visible(
    steps=(("0", "whole", False), ("whole", "end", True)),
    bounds="visible",
    visible="Each row sees `visible` [BLOCK_M] of them.",
    seen="keys[None, :] < visible[:, None]",
    window_given="",
)
OF_A_WINDOW = Visible(
    steps=(("begin", "tl.minimum(inside, end)", True), ("inside", "whole", False), ("whole", "end", True)),
    bounds="least, visible",
    visible="A row sees keys [`least`, `visible`) [BLOCK_M].",
    seen="(keys[None, :] < visible[:, None]) & (keys[None, :] >= least[:, None])",
    window_given="window, ",
)


@dataclass(frozen=True)
class Kernels(Heads, Visible):
    """Context of the portable kernels' template.

    Attributes:
        chunks: all blocks of columns.
        addressings: whether K and V are loaded by descriptors, for each kernel.
        full_alignment: bytes of an aligned address.
    """

    chunks: Sequence[Block]
    addressings: Sequence[bool]
    full_alignment: int


@dataclass(frozen=True)
class Wrappers(Heads):
    """Context of the wrapper's template.

    Attributes:
        dense_fwd: the family's plan.
        kernel_names: kernels that a schedule names, as text.
        sm90: the sm90 kernel's plan, or None.
        merges: whether the package merges results.
        stated_scale: softmax scale of the spec, as text; empty without one.
        torch_dtype: name of the dtype in torch.
        validated: the wrapper's decorator, with the arguments behind descriptors.
        window_passed: the window behind other arguments, as text; empty without one.
    """

    dense_fwd: DenseFwdPlan
    kernel_names: str
    sm90: DenseFwdSm90Plan | None
    merges: bool
    stated_scale: str
    torch_dtype: str
    validated: str
    window_passed: str


def _validated(of_heads: Heads) -> str:
    """The wrapper's decorator, wrapped as a formatter does."""
    named = [(chunk, "k") for chunk in of_heads.k_chunks] + [(chunk, "v") for chunk in of_heads.v_chunks]
    sources = [f'{chunk.name}_desc="{name}"' for chunk, name in named] if of_heads.descriptors else []
    line = ", ".join(sources)
    if len(line) > LINE_LENGTH - 4:
        line = "\n    " + ",\n    ".join(sources) + ",\n"
    elif len(line) + len("@_calls.validated()") > LINE_LENGTH:
        line = f"\n    {line}\n"
    return f"@_calls.validated({line})"


def heads(plan: Plan) -> Heads:
    """Return the facts of the heads."""
    family = plan.of(DenseFwdPlan)
    return Heads(
        dtype=plan.spec.model.dtype,
        d_qk=family.d_qk,
        d_v=family.d_v,
        k_chunks=blocks_of(family.k_chunks),
        v_chunks=blocks_of(family.v_chunks),
        descriptors=bool(family.descriptor_targets),
        window=family.window,
    )


def private_files(plan: Plan, family: DenseFwdPlan) -> list[GeneratedFile]:
    """Files that the family's module and its sm90 kernel import."""
    of_heads = heads(plan)
    context = Kernels(
        **vars(of_heads),
        chunks=[*of_heads.k_chunks, *of_heads.v_chunks],
        addressings=[True, False] if of_heads.descriptors else [False],
        full_alignment=FULL_ALIGNMENT,
        **vars(OF_A_WINDOW if family.window else WITHOUT_WINDOW),
    )
    return [tiles.file(plan), generated("_dense_fwd_kernels", vars(context))]


def modules(plan: Plan, family: DenseFwdPlan) -> list[Module]:
    """The module of the family's wrappers."""
    multi_head = plan.spec.multi_head
    of_heads = heads(plan)
    context = Wrappers(
        **vars(of_heads),
        validated=_validated(of_heads),
        dense_fwd=family,
        kernel_names=kernel_names([family]),
        sm90=family.sm90,
        merges=plan.find(MergeStatesPlan) is not None,
        stated_scale=stated_scale(multi_head.softmax_scale if multi_head else None),
        torch_dtype=TORCH_DTYPES[plan.spec.model.dtype],
        window_passed=", window" if family.window else "",
    )
    return [Module(generated(MODULE, vars(context)), family.wanted(plan.spec))]
