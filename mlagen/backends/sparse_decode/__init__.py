"""Template contexts of sparse attention over a paged cache."""
