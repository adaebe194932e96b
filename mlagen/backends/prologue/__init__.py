"""Template contexts of prologues."""
