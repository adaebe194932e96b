"""Template contexts of merges of attention states."""
