"""Sparse attention over a paged cache: cases, inputs, and checks.

The reference decodes each row that an index names with mlagen.layout.codec, rounds it to the model's dtype as kernels
do, and attends to those rows. Every other byte of a cache is poison, 0xff or 0x7f: NaN, infinity or the largest value,
in every dtype.
"""
