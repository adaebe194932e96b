"""Merges of attention over parts of the keys: reference, cases, inputs, and checks.

Irrelevant data is poisoned: the values of an empty part are NaN, and so are the elements between and around the
rows of a buffer, tokens of a prefix past those that have one, and the memory of results.
"""
