"""Template contexts of sparse attention over rows."""
