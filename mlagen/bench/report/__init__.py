"""Reports of a run: its rows, their origin, and JSON, tables, a page and comparisons made of them."""
