"""Template contexts of the compressor."""
