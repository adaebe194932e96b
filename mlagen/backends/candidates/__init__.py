"""Template contexts of candidate blocks."""
