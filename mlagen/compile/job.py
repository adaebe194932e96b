"""A compilation: one kernel, one variant, one target."""

from __future__ import annotations

from dataclasses import dataclass

from mlagen.backends.parts.common import FULL_ALIGNMENT
from mlagen.errors import Place, ToolError


class KernelError(ToolError):
    """The compiler refuses a kernel.

    Attributes:
        job: the compilation.
        reason: the compiler's message, in one line.
    """

    def __init__(self, job: CompileJob, named: str, reason: str, *, place: Place | None, hint: str | None) -> None:
        super().__init__(f"{named}: {reason}", place=place, hint=hint)
        self.job, self.reason = job, reason


@dataclass(frozen=True)
class CompileJob:
    """One compilation of a generated kernel.

    Attributes:
        module: generated module that holds the kernel, `sparse_attention`.
        kernel: name of the `@triton.jit` function in it.
        target: name in mlagen.plan.targets.TARGETS.
        signature: (argument, Triton type) of each run-time argument: `*bf16`, `i32`, `fp32`.
        constexprs: (argument, value) of each constexpr; an absent optional tensor is a None here.
        num_warps: warps per program.
        num_stages: software-pipeline depth.
        dependent: whether it is launched with programmatic dependent launch.
        registers: limit of registers per thread; None: the compiler's choice.
    """

    module: str
    kernel: str
    target: str
    signature: tuple[tuple[str, str], ...]
    constexprs: tuple[tuple[str, int | float | bool | None], ...]
    num_warps: int
    num_stages: int
    dependent: bool = False
    registers: int | None = None

    @property
    def block_h(self) -> int | None:
        """The constexpr BLOCK_H; None without."""
        found = dict(self.constexprs).get("BLOCK_H")
        return None if found is None else int(found)

    @property
    def tabled(self) -> bool:
        """Whether its tile is in the target's table.

        Calls with unaligned rows or indices, and calls over small pages, take another tile.
        """
        given = dict(self.constexprs)
        aligned = all(given.get(name, FULL_ALIGNMENT) == FULL_ALIGNMENT for name in ("ALIGNMENT", "INDEX_GROUP"))
        return aligned and given.get("WHOLE_PAGES", True) is True

    @property
    def variant(self) -> str:
        """Name of the variant for people: `BLOCK_H=16 INDICES_AHEAD, no lse`."""
        present = [(name, value) for name, value in self.constexprs if value is not None and value is not False]
        given = " ".join(name if value is True else f"{name}={value}" for name, value in present)
        absent = " ".join(name.removesuffix("_ptr") for name, value in self.constexprs if value is None)
        return ", ".join(part for part in (given, f"no {absent}" if absent else "") if part) or "-"
