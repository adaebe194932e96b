"""The kernels around the indexer's keys: cases, inputs, the reference, and checks.

Written caches are compared byte for byte, including the bytes around and between keys, with those of the reference
writer in mlagen.layout.codec; gathered keys with the cache's bytes; the query with the reference's bytes. RoPE's
angles have few bits, so that rotating rounds once in fp32, however it is computed. A normalised key's codes may be one
off.
"""
