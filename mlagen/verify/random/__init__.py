"""Random calls of a generated package on a GPU, several at a time, and in the interpreter; needs no pydantic."""
