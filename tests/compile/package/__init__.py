"""Small kernels, written by hand, that compile well or break in one way each."""
