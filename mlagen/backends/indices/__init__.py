"""Template contexts of index kernels."""
