"""The compressor: cases, inputs, and checks.

States are compared bit for bit, and compressed rows with the codec's bytes of a float64 reference's rows, which
are rounded once: an fp32 sum may round a few columns the other way, so that they hold the neighbouring code.
"""
