"""The indexer's logits: reference, cases, inputs, and checks.

Irrelevant data is poisoned: keys that no token sees are NaN, and so are their scales; block tables hold garbage
past the keys of their request, and pages that no table names are NaN.
"""
