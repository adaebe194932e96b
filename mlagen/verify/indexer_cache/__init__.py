"""The kernels around the indexer's keys: cases, inputs, the reference, and checks.

Written caches are compared byte for byte, the bytes around and between keys too, with what the reference writer of
mlagen.layout.codec makes of them; gathered keys with the cache's bytes; the query with the reference's bytes. RoPE's
angles have few bits, so that rotating rounds once in fp32, however it is computed. A normalised key's codes may be one
off.
"""
