"""The top-k kernels: reference, cases, inputs, and checks. Every comparison is exact.

Irrelevant data is poisoned: scores outside a row's range are NaN and +inf, and so is the memory around and between
rows; outputs start as INT32_MAX and NaN.
"""
