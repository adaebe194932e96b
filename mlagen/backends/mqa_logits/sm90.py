"""The sm90 kernels of the indexer's logits, in Gluon: two modules next to the portable ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mlagen.backends.parts.common import Signature
from mlagen.backends.parts.gluon import Sm90Kernels, register_split
from mlagen.backends.parts.grouped import Interface, SharedMemory, interface, shared
from mlagen.plan import Plan
from mlagen.plan.sm90.mqa_logits import (
    FLAT_MODULE,
    HEAD_DIM,
    PAGED_MODULE,
    MqaLogitsSm90Plan,
    make_mqa_logits_sm90,
    sm90_modules_of,
)


def _descriptors(q_rows: int, k_rows: int) -> Signature:
    rows = {"q": q_rows, "k": k_rows}
    return tuple((f"{name}_desc", f"tensordesc<fp8e4nv[{each},{HEAD_DIM}],TILE>") for name, each in rows.items())


def _arguments(sm90: MqaLogitsSm90Plan) -> Signature:
    """Return the portable kernel's arguments that the sm90 kernel over flat keys needs."""
    return (
        *(("k_scale_ptr", "*fp32"), ("weights_ptr", "*fp32"), ("start_ptr", "*i32"), ("end_ptr", "*i32")),
        ("out_ptr", "*fp32"),
        *((name, "i32") for name in ("num_tokens", "num_keys", "out_columns", "compressed")),
        *((f"{name}_stride", "i64") for name in ("weights", "out")),
        *_descriptors(sm90.tokens[-1] // 2 * sm90.num_heads, sm90.tile_keys),
    )


def _paged_arguments(sm90: MqaLogitsSm90Plan) -> Signature:
    """Return the portable kernel's arguments that the sm90 kernel over pages needs."""
    strides = ("page", "context_lens", "context_lens_token", "block_table", "weights", "out")
    return (
        *(("cache_ptr", "*u8"), ("weights_ptr", "*fp32"), ("context_lens_ptr", "*i32"), ("block_table_ptr", "*i32")),
        *(("schedule_ptr", "*i32"), ("out_ptr", "*fp32")),
        *((name, "i32") for name in ("num_requests", "next_n", "query_blocks", "unlaunched")),
        *((name, "i32") for name in ("max_keys", "causal", "num_pages")),
        *((f"{name}_stride", "i64") for name in strides),
        *_descriptors(sm90.paged_tokens[-1] * sm90.num_heads, sm90.block_n),
    )


@dataclass(frozen=True)
class Kernel(Interface, SharedMemory):
    """Context of a kernel's template.

    Attributes:
        sm90: the kernel's plan.
        kernel: name of the kernel.
        stages: stages of keys in shared memory.
        tokens: tokens per query block.
        register_split: registers of each warpgroup, as text.
        producers: the warps that load keys, as text.
    """

    sm90: MqaLogitsSm90Plan
    kernel: str
    stages: int
    tokens: Sequence[int]
    register_split: str
    producers: str


@dataclass(frozen=True)
class LogitsModule:
    """A generated module with an sm90 kernel of the indexer's logits.

    Attributes:
        module: name of the module.
        template: name of the template, in `templates/`.
        arguments: run-time arguments and their Triton types.
        stages: stages of keys in shared memory.
        tokens: tokens per query block, a constexpr.
        constexprs: names of the constexprs.
        buffers, barriers: names of those in shared memory.
        register_split: registers of each warpgroup, as text; empty where a program is one.
        producers: the warps that load keys, as text.
        expected_products: number of wgmma instructions in the kernel's code.
    """

    module: str
    template: str
    arguments: Callable[[MqaLogitsSm90Plan], Signature]
    stages: Callable[[MqaLogitsSm90Plan], int]
    tokens: Callable[[MqaLogitsSm90Plan], tuple[int, ...]]
    constexprs: Sequence[str]
    buffers: Sequence[str]
    barriers: Sequence[str]
    register_split: Callable[[MqaLogitsSm90Plan], str]
    producers: str
    expected_products: Callable[[MqaLogitsSm90Plan], int]

    @property
    def kernel(self) -> str:
        """Name of the kernel."""
        return f"{self.module}_kernel"

    def present(self, plan: Plan) -> bool:
        """Whether the package has the kernel."""
        return self.module in sm90_modules_of(plan.spec)

    def context(self, plan: Plan) -> Mapping[str, object]:
        """Template context."""
        sm90 = make_mqa_logits_sm90(plan.spec)
        if sm90 is None:
            raise LookupError("the plan has no such part")
        arguments = self.arguments(sm90)
        return vars(
            Kernel(
                **vars(interface(arguments, *self.constexprs)),
                **vars(shared(self.buffers, self.barriers)),
                sm90=sm90,
                kernel=self.kernel,
                stages=self.stages(sm90),
                tokens=self.tokens(sm90),
                register_split=self.register_split(sm90),
                producers=self.producers,
            )
        )

    def products(self, plan: Plan) -> dict[tuple[str, int | None], int]:
        """Number of wgmma instructions in the kernel's code, in the form of `expected_products`."""
        sm90 = make_mqa_logits_sm90(plan.spec)
        return {} if sm90 is None else {(self.kernel, None): self.expected_products(sm90)}


MQA_LOGITS = LogitsModule(
    module=FLAT_MODULE,
    template="sm90/mqa_logits",
    arguments=_arguments,
    stages=lambda sm90: sm90.stages,
    tokens=lambda sm90: sm90.tokens,
    constexprs=("TOKENS",),
    buffers=("q", "k", "weights", "scales"),
    barriers=("q_ready", "q_free", "k_ready", "k_free"),
    register_split=lambda sm90: register_split(sm90.registers),
    producers="the producer",
    expected_products=lambda sm90: sm90.expected_products,
)
PAGED_MQA_LOGITS = LogitsModule(
    module=PAGED_MODULE,
    template="sm90/paged_mqa_logits",
    arguments=_paged_arguments,
    stages=lambda sm90: sm90.paged_stages,
    tokens=lambda sm90: sm90.paged_tokens,
    constexprs=("TOKENS", "PROGRAMS"),
    buffers=("q", "k", "weights"),
    barriers=("q_ready", "k_ready"),
    register_split=lambda sm90: "",
    producers="",
    expected_products=lambda sm90: sm90.expected_paged_products,
)

KERNELS: tuple[Sm90Kernels, ...] = (MQA_LOGITS, PAGED_MQA_LOGITS)
