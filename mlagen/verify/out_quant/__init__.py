"""Attention's output rotated back and quantised: cases, inputs and checks.

Results are compared bit for bit. Tables of angles have numbers in the model's dtype, so that every order of operations
in fp32 rounds a rotated column alike.
"""
