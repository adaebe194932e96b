"""GPU architectures: names and options for a compiler, and the limits that Triton does not check."""

from __future__ import annotations

from dataclasses import dataclass

KIB = 1024
SM90 = "sm90"  # the only target with Gluon kernels
WARP_SIZE = 32  # threads, of NVIDIA targets
REGISTERS = 65_536  # of a multiprocessor of any NVIDIA target
MOST_REGISTERS = 256  # of a thread, which can name all but one of them
SIMDS = 4  # of a compute unit, which share the wavefronts of a program
SIMD_REGISTERS = 512  # of a lane of a SIMD, for all of its wavefronts
SLOW_MEMORY = 4000  # GB/s: an H100 has 3,352, an H200 4,800


@dataclass(frozen=True)
class Target:
    """One GPU architecture.

    Attributes:
        name: the spec's name, `sm90` or `gfx942`.
        backend: Triton's backend, `cuda` or `hip`.
        arch: Triton's architecture: the compute capability as a number, or the gfx name.
        warp_size: threads a warp (wavefront).
        shared_limit: bytes of shared memory (LDS) one program may take.
        shared_per_sm: bytes of shared memory of a multiprocessor (compute unit).
        shared_reserve: bytes the driver takes from `shared_per_sm` for each resident program.
        threads_per_sm: resident threads of a multiprocessor.
        dot: instruction of tl.dot for 64 rows and more: `mma` (mma.sync), `wgmma`, `tcgen05` or `mfma`. Below 64,
            NVIDIA runs mma.sync.
        has_e4m3: float8_e4m3fn converts in hardware, and tl.dot multiplies it.
        has_e4m3fnuz: tl.dot multiplies float8_e4m3fnuz.
        rounds_e4m3: fp32 becomes float8_e4m3fn in hardware and in one rounding, saturating, NaN as 0x7f. Triton goes by
            way of fp16 on sm89, which rounds twice, and CDNA 4 keeps the sign of a NaN.
        copies_tensors: blocks of a tensor are copied to shared memory by descriptor (TMA); elsewhere Triton turns such
            copies into loads by pointers.
        pdl: a kernel can begin while the one before it still runs, and wait for it later.
    """

    name: str
    backend: str
    arch: int | str
    warp_size: int
    shared_limit: int
    shared_per_sm: int
    shared_reserve: int
    threads_per_sm: int
    dot: str
    has_e4m3: bool = False
    has_e4m3fnuz: bool = False
    rounds_e4m3: bool = False
    copies_tensors: bool = False
    pdl: bool = False

    @property
    def most_registers(self) -> int:
        """The most registers that a thread takes."""
        return MOST_REGISTERS if self.backend == "cuda" else SIMD_REGISTERS

    @property
    def registers_per_sm(self) -> int:
        """Registers of a multiprocessor (compute unit)."""
        return REGISTERS if self.backend == "cuda" else SIMDS * SIMD_REGISTERS * self.warp_size

    def register_limit(self, num_warps: int) -> int:
        """The most registers that a thread of a program can have; on AMD vector registers, of both kinds together."""
        if self.backend == "cuda":
            return min(MOST_REGISTERS - 1, REGISTERS // (num_warps * self.warp_size) // 8 * 8)
        return SIMD_REGISTERS // -(-num_warps // SIMDS)


def _cuda(major: int, minor: int, shared_per_sm: int, threads: int, dot: str = "mma") -> Target:
    """CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"; a program takes all but 1 KiB."""
    return Target(
        name=f"sm{major}{minor}",
        backend="cuda",
        arch=10 * major + minor,
        warp_size=WARP_SIZE,
        shared_limit=shared_per_sm - KIB,
        shared_per_sm=shared_per_sm,
        shared_reserve=KIB,
        threads_per_sm=threads,
        dot=dot,
        has_e4m3=(major, minor) >= (8, 9),
        rounds_e4m3=major >= 9,
        copies_tensors=major >= 9,
        pdl=major >= 9,
    )


def _hip(name: str, lds: int, *, has_e4m3: bool) -> Target:
    """CDNA 3 and CDNA 4 instruction set guides: LDS of a compute unit; one workgroup may take all of it."""
    fp8 = {"has_e4m3": has_e4m3, "has_e4m3fnuz": not has_e4m3}  # CDNA 3 has the one, CDNA 4 the other
    return Target(name, "hip", name, 64, lds, lds, 0, 2048, "mfma", **fp8)


TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        _cuda(8, 0, 164 * KIB, 2048),
        _cuda(8, 6, 100 * KIB, 1536),
        _cuda(8, 9, 100 * KIB, 1536),
        _cuda(9, 0, 228 * KIB, 2048, "wgmma"),
        _cuda(10, 0, 228 * KIB, 2048, "tcgen05"),
        _cuda(12, 0, 100 * KIB, 1536),
        _hip("gfx942", 64 * KIB, has_e4m3=False),
        _hip("gfx950", 160 * KIB, has_e4m3=True),
    )
}
