"""Template contexts of top-k."""
