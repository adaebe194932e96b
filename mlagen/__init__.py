"""Generates attention kernels for multi-head latent attention (MLA) from a YAML spec."""

__version__ = "0.1.0"

# Who made a package, as its files' headers and its SPEC name it: patch releases change no package.
GENERATOR = f"mlagen {'.'.join(__version__.split('.')[:2])}"
