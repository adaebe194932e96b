"""Random calls of a generated package on a GPU, beside each other, and in the interpreter; needs no pydantic."""
