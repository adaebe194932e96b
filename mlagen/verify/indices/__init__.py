"""The index kernels: reference, cases, inputs, and what is checked of the wrappers. Every comparison is exact.

What must not matter is poisoned: the elements around and between the rows of a buffer name something, and so do the
entries of a block table past its last column, so that a read out of bounds shows; outputs start as INT32_MAX.
"""
