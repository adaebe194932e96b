"""Sparse attention over rows: cases, inputs, and checks."""
