"""Sparse attention over rows: cases, inputs, and what is checked of its wrappers."""
