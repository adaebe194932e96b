"""Dense attention over a paged cache: cases, inputs, and checks.

The reference follows the block table key by key, decodes those rows with mlagen.layout.codec, rounds them to the
model's dtype as kernels do, and attends to them. Every other byte of a cache is poison, and every entry of the block
table behind a request's keys, or before its window, names a page far past the cache.
"""
