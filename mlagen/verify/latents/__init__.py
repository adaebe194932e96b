"""V4.1's compressor: cases, inputs, and checks.

States and inserted rows are compared bit for bit, and latents with a float64 reference within the tolerance of one
rounding.
"""
