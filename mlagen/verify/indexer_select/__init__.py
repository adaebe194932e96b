"""Scores and selection in one call: cases, inputs, and checks. Every comparison is exact.

What is picked is compared with the best of the package's own logits, by a stable sort; where every sum is exact, with
the best of float64 logits too.
"""
