"""Template contexts of cache writers and gathers."""
