"""The writers and gathers of a cache: cases, inputs, and checks. Every comparison is exact.

Written caches are compared byte for byte, the bytes around and between rows too, with what the reference writer of
mlagen.layout.codec makes of them; gathered rows with what its reader finds, where any NaN equals any other. Caches
hold random bytes, and so every bit pattern of values and scales; what must not be touched in an output is poisoned.
"""
