"""Families with cases that run the kernels of several families one after the other."""
