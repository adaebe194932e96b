"""The index kernels: reference, cases, inputs, and checks. Every comparison is exact.

Irrelevant data is poisoned: the elements around and between the rows of a buffer name something, and so do the
entries of a block table past its last column, so that a read out of bounds shows; outputs start as INT32_MAX.
"""
