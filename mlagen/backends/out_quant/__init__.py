"""Attention's output, rotated back and quantised."""
