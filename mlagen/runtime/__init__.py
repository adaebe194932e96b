"""Python that packages contain verbatim: launches, calls that are checked once, and host code without a spec's shapes.

`mlagen build` copies the modules of this room into every package that imports them. They import only torch, Triton, the
standard library and each other. `_facts` has the facts of a package: `build` writes it anew for each one.
"""
