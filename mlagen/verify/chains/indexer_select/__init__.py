"""Scores and selection in one call: cases, inputs, and checks. Every comparison is exact.

Picks are compared with the best of the package's own logits, by a stable sort; where every sum is exact, also with
the best of float64 logits.
"""
