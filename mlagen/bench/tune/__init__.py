"""Sweeps a package's attention on the device at hand, and makes its tile tables of the times."""
