"""What a compiled kernel takes of its target, and whether that fits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from mlagen.compile.job import CompileJob
from mlagen.errors import LimitError
from mlagen.plan.hopper import HOPPER_TARGET
from mlagen.plan.targets import TARGETS

# PTX ISA, "Tensor Memory": 512 columns a multiprocessor. Triton compares at the first launch only.
TENSOR_MEMORY_COLUMNS = 512


@dataclass(frozen=True)
class Resources:
    """What one compiled kernel takes.

    Attributes:
        module: generated module that holds the kernel.
        kernel: name of the `@triton.jit` function.
        variant: what tells this compilation from the kernel's others, for people.
        target: name in mlagen.plan.targets.TARGETS.
        num_warps: warps a program, as asked for.
        num_stages: software-pipeline depth, as asked for.
        triton: version of the Triton that compiled it.
        key: what the compilation depends on but for Triton, as 16 hexadecimal digits: the kernel's source, signature,
            constexprs, options and target.
        registers: registers a thread; on AMD vector registers a lane, accumulation registers included.
        scalar_registers: scalar registers a wavefront on AMD; None on NVIDIA.
        spills: what did not fit the registers, in `spill_unit`: bytes of stack a thread on NVIDIA, spilled
            vector registers a lane on AMD.
        loop_spills: instructions inside loops that reach the stack (LDL and STL; scratch loads and stores on AMD); not
            in what stands around or before a loop that multiplies.
        shared: bytes of shared memory (LDS) a program needs.
        shared_limit: bytes of shared memory the target gives one program.
        block_h: the constexpr BLOCK_H; None without.
        tensor_memory: columns of tensor memory a program needs; 0 but on sm100.
        instructions: how often each matrix, stack or scratch instruction stands in the machine code.
        seconds: wall-clock seconds of the compilation, now or when the cache was filled.
        cached: whether the numbers came without compiling.
    """

    module: str
    kernel: str
    variant: str
    target: str
    num_warps: int
    num_stages: int
    triton: str
    key: str
    registers: int
    scalar_registers: int | None
    spills: int
    loop_spills: int
    shared: int
    shared_limit: int
    block_h: int | None
    tensor_memory: int
    instructions: Mapping[str, int] = field(hash=False)
    seconds: float = field(compare=False)
    cached: bool = field(compare=False)

    @property
    def spill_unit(self) -> str:
        """What `spills` counts."""
        return "vector registers" if TARGETS[self.target].backend == "hip" else "stack bytes a thread"

    def to_json(self) -> dict[str, Any]:
        """Plain values for JSON, the same on every run: without `seconds` and `cached`."""
        values = asdict(self)
        del values["seconds"], values["cached"]
        return {**values, "instructions": dict(self.instructions), "spill_unit": self.spill_unit}


def label(compilation: CompileJob | Resources) -> str:
    """Name a compilation in messages: `module.kernel [variant] for target`."""
    return f"{compilation.module}.{compilation.kernel} [{compilation.variant}] for {compilation.target}"


def check_limits(
    resources: Iterable[Resources], expected_products: Mapping[tuple[str, int | None], int] | None = None
) -> list[LimitError]:
    """Compare what kernels take with what their targets give; Triton itself compares at the first launch only.

    Register counts are not judged: they move with every Triton version.

    Args:
        resources: compiled kernels.
        expected_products: warpgroup products that the plan expects in the code, by kernel and BLOCK_H, as
            `mlagen.backends.expected_products` gives them; of kernels that are not named they are not judged.

    Returns:
        An error for each limit that a kernel breaks, in the order of `resources`.
    """
    return [error for taken in resources for error in _errors(taken, expected_products or {})]


def _errors(taken: Resources, products: Mapping[tuple[str, int | None], int]) -> Iterable[LimitError]:
    if taken.shared > taken.shared_limit:
        yield LimitError(
            f"{label(taken)}: shared memory {taken.shared:,} bytes - limit {taken.shared_limit:,} bytes = "
            f"{taken.shared - taken.shared_limit:,} bytes too many",
            hint=f"a smaller tile or fewer stages (now {taken.num_stages}) in the target's tile table",
        )
    # Outside loops a spill is only told: ptxas trades a few bytes of prologue for occupancy, which costs nothing and
    # comes and goes with its version.
    if taken.loop_spills:
        yield LimitError(
            f"{label(taken)}: spills inside loops: {taken.loop_spills:,} stack instructions - limit 0 = "
            f"{taken.loop_spills:,} too many; spills {taken.spills:,} {taken.spill_unit} with "
            f"{taken.registers} registers a thread and {taken.num_warps} warps a program in use",
            hint=f"a smaller tile or more warps (now {taken.num_warps}) in the target's tile table",
        )
    expected, found = products.get((taken.kernel, taken.block_h)), taken.instructions.get("HGMMA", 0)
    if expected is not None and taken.target == HOPPER_TARGET and expected != found:
        yield LimitError(
            f"{label(taken)}: {found} warpgroup products in the code - expected {expected}",
            hint="a product was split, doubled or left out by the compiler",
        )
    if taken.tensor_memory > TENSOR_MEMORY_COLUMNS:
        yield LimitError(
            f"{label(taken)}: tensor memory {taken.tensor_memory} columns - limit {TENSOR_MEMORY_COLUMNS} columns = "
            f"{taken.tensor_memory - TENSOR_MEMORY_COLUMNS} columns too many",
            hint="a narrower accumulator or score tile in the target's tile table",
        )
