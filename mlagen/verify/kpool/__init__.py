"""The indexer that scores pools of keys: cases, inputs, and checks.

Tails and expanded indices are compared bit for bit, keys of pools and the query with the codec's bytes of a float64
reference: an fp32 sum may round a few columns the other way, so that they hold the neighbouring code.
"""
