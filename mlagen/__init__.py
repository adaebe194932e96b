"""Generates attention kernels for multi-head latent attention (MLA) from a YAML spec."""

__version__ = "0.1.0"
