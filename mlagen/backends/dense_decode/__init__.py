"""Template contexts of dense attention over a paged cache."""
