"""Executes the generated sm90 kernels in numpy: values, synchronisation and races; see docs/decisions/0039."""
