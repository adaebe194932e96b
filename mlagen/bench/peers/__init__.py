"""Kernels that a package is measured against; none is required: what cannot be imported is absent, with a reason."""
