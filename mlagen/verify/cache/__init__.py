"""The writers and gathers of a cache: cases, inputs, and checks. Every comparison is exact.

Written caches are compared byte for byte, including the bytes around and between rows, with those of the reference
writer in mlagen.layout.codec. Gathered rows are compared with those of its reader, and any NaN equals any other.
Caches hold random bytes, so every bit pattern of values and scales. Parts of an output that must stay are poisoned.
"""
