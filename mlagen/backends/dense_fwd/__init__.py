"""Template contexts of multi-head attention before absorption."""
