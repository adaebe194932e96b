"""Facts of an empty package for every target.

`build` writes a `_facts` with the same names and types for each package.
"""

TARGETS = ("sm80", "sm86", "sm89", "sm90", "sm100", "sm120", "gfx942", "gfx950")

# Wrappers of the package.
WRAPPERS: list[str] = []

# Modules with Triton functions; callees come before their callers.
MODULES: tuple[str, ...] = ("_launch",)
SM90_MODULES: list[str] = []
# Kernels that a call can run, by the names that schedules and `_launch.force` have for them.
KERNELS: tuple[str, ...] = ("portable",)

# Targets with instructions that convert float8_e4m3fn, and those that also round fp32 to it in one instruction.
E4M3_TARGETS = ("sm89", "sm90", "sm100", "sm120", "gfx950")
E4M3_ROUNDING_TARGETS = ("sm90", "sm100", "sm120")
# Targets where a kernel can begin while the kernel before it still runs (PDL).
PDL_TARGETS = ("sm90", "sm100", "sm120")
PDL_MAX_PROGRAMS = 16  # most programs per multiprocessor of a kernel that uses PDL
