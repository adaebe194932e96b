"""Resources of a compiled kernel, and checks against the limits of its target."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mlagen.compile.job import CompileJob
from mlagen.errors import LimitError
from mlagen.plan import SM90, SM90_MODULES, TARGETS
from mlagen.plan.tiles.allowed import allowed_spills
from mlagen.plan.tiles.tuned import tuned_path
from mlagen.plan.tritons import minor, minors

# PTX ISA, "Tensor Memory": 512 columns per multiprocessor. Triton checks this only at the first launch.
TENSOR_MEMORY_COLUMNS = 512

# The table of a tuned file with the tiles of a module's kernels. Calls with unaligned rows or topk, and calls over
# small pages, take a tile that is in no table.
TUNED_TABLES = {
    "_sparse_fwd_kernels": "sparse_fwd",
    "_sparse_decode_kernels": "sparse_decode",
    "_dense_decode_kernels": "dense_decode",
}


@dataclass(frozen=True)
class Resources:
    """Resources of one compiled kernel.

    Attributes:
        module: generated module that holds the kernel.
        kernel: name of the `@triton.jit` function.
        variant: name of the variant for people.
        target: name in mlagen.plan.targets.TARGETS.
        num_warps: warps per program, as requested.
        num_stages: software-pipeline depth, as requested.
        triton: version of the Triton that compiled it.
        key: hash of the compilation's inputs except Triton, 16 hexadecimal digits: the kernel's source, signature,
            constexprs, options and target.
        registers: registers per thread; on AMD vector registers per lane, including accumulation registers.
        scalar_registers: scalar registers per wavefront on AMD; None on NVIDIA.
        spills: spilled registers in `spill_unit`: stack bytes per thread on NVIDIA, vector registers per lane on AMD.
        loop_spills: spill loads and stores inside loops (LDL, and STL except of zero; scratch loads and stores on AMD),
            without code around or before a loop with matrix products.
        shared: bytes of shared memory (LDS) per program.
        shared_limit: most bytes of shared memory per program on the target.
        block_h: the constexpr BLOCK_H; None without.
        tabled: whether its tile is in the target's table. Calls with unaligned rows or indices, and calls over small
            pages, take another tile.
        tensor_memory: columns of tensor memory per program; 0 except on sm100.
        instructions: number of each matrix, stack or scratch instruction in the machine code.
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
    tabled: bool
    tensor_memory: int
    instructions: Mapping[str, int] = field(hash=False)
    seconds: float = field(compare=False)
    cached: bool = field(compare=False)

    @property
    def spill_unit(self) -> str:
        """Unit of `spills`."""
        return "vector registers" if TARGETS[self.target].backend == "hip" else "stack bytes a thread"

    def to_json(self) -> dict[str, Any]:
        """Plain values for JSON, the same on every run: without `seconds` and `cached`."""
        values = asdict(self)
        del values["seconds"], values["cached"], values["block_h"], values["tabled"]
        return {**values, "instructions": dict(self.instructions), "spill_unit": self.spill_unit}


def label(compilation: CompileJob | Resources) -> str:
    """Name a compilation in messages: `module.kernel [variant] for target`."""
    return f"{compilation.module}.{compilation.kernel} [{compilation.variant}] for {compilation.target}"


def check_limits(
    resources: Iterable[Resources],
    expected_products: Mapping[tuple[str, int | None], int] = MappingProxyType({}),
    *,
    holds_under: Mapping[str, Sequence[str]] = MappingProxyType({}),
    spec: str = "NAME",
    targets: Sequence[str] = (),
) -> list[LimitError]:
    """Compare kernels with the limits of their targets. Triton itself checks only at the first launch.

    Register counts are not checked: they change with every Triton version.

    Args:
        resources: compiled kernels.
        expected_products: number of wgmma instructions in the code, by kernel and BLOCK_H, from
            `mlagen.backends.expected_products`. Other kernels are not checked for it.
        holds_under: versions of Triton under which a kernel is within its limits, by `Resources.key`.
        spec: name of the spec, for hints.
        targets: targets of the spec.

    Returns:
        An error for each limit that a kernel exceeds, in the order of `resources`, with a hint for the user.
    """
    errors = []
    for taken in resources:
        holds = [version for version in holds_under.get(taken.key, ()) if version != taken.triton]
        named = f"{label(taken)} under Triton {taken.triton}"
        known = f"; within the limits under Triton {', '.join(holds)}" if holds else ""
        for broken, other_tile in _broken(taken, expected_products):
            hint = f"fix with one of: {'; '.join(_remedies(taken, other_tile, spec, targets, holds))}"
            errors.append(LimitError(f"{named}: {broken}{known}", hint=hint))
    return errors


def _broken(taken: Resources, products: Mapping[tuple[str, int | None], int]) -> Iterator[tuple[str, str]]:
    """Yield (message, advice for another tile) of each limit that a kernel exceeds."""
    if taken.shared > taken.shared_limit:
        yield (
            f"shared memory {taken.shared:,} bytes - limit {taken.shared_limit:,} bytes = "
            f"{taken.shared - taken.shared_limit:,} bytes too many",
            f"a smaller tile or fewer stages (now {taken.num_stages})",
        )
    # Outside loops a spill is only shown: ptxas trades a few bytes of prologue for occupancy, which costs nothing and
    # comes and goes with its version.
    allowed = allowed_spills(taken.key, minor(taken.triton))
    if taken.loop_spills > allowed:
        yield (
            f"spills inside loops: {taken.loop_spills:,} spill loads and stores - limit {allowed:,} = "
            f"{taken.loop_spills - allowed:,} too many; spills {taken.spills:,} {taken.spill_unit} with "
            f"{taken.registers} registers a thread and {taken.num_warps} warps a program in use",
            f"a smaller tile or more warps (now {taken.num_warps})",
        )
    expected = products.get((taken.kernel, taken.block_h))
    found = sum(taken.instructions.get(name, 0) for name in ("HGMMA", "QGMMA"))  # of 16-bit and of 8-bit operands
    if expected is not None and taken.target == SM90 and expected != found:
        yield (
            f"{found} wgmma instructions in the code - expected {expected}: one was split, doubled or left out",
            "another tile",
        )
    if taken.tensor_memory > TENSOR_MEMORY_COLUMNS:
        yield (
            f"tensor memory {taken.tensor_memory} columns - limit {TENSOR_MEMORY_COLUMNS} columns = "
            f"{taken.tensor_memory - TENSOR_MEMORY_COLUMNS} columns too many",
            "a smaller tile",
        )


def short_reason(taken: Resources) -> str:
    """The limit that a kernel breaks, in a few words."""
    if taken.shared > taken.shared_limit:
        return f"{taken.shared:,} bytes of shared memory, {taken.shared_limit:,} at most"
    if taken.loop_spills > allowed_spills(taken.key, minor(taken.triton)):
        return f"{taken.loop_spills:,} spill{'s' * (taken.loop_spills > 1)} in loops"
    return "its machine code differs from the plan"


def _remedies(
    taken: Resources, other_tile: str, spec: str, targets: Sequence[str], holds: Sequence[str]
) -> Iterator[str]:
    """Yield fixes for a kernel over a limit, by the command line or the spec."""
    if holds:
        yield f"--triton {minors(holds)[-1]}, which keeps the limits"
    else:
        yield "--triton with another version"
    if taken.module in TUNED_TABLES and taken.tabled:
        file = tuned_path(spec, taken.target, Path())
        # Made if it is not there; a file that comes with mlagen is behind it.
        table = TUNED_TABLES[taken.module]
        yield f"{other_tile} in {table} of {file} next to the spec, with fits.{table} as `mlagen show plan` prints it"
    if taken.module in SM90_MODULES:
        yield "`backend: auto` in the spec, which leaves out sm90 kernels over a limit"
    if taken.kernel == "_dense_fwd_descriptor_kernel":
        yield "`addressing: pointers` in the spec's multi_head"
    if tuple(targets) != (taken.target,):
        yield f"the spec's targets without {taken.target}"
