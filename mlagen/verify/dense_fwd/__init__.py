"""Multi-head attention over requests of any lengths: reference, cases, inputs, and checks.

Irrelevant data is poisoned: rows of q, k and v before the first request and past the last are NaN, and so are the
elements between and around the rows of a buffer, and the memory of results.
"""
