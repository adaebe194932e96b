"""What becomes of a run: its rows, where they come from, and JSON, tables, a page and comparisons made of them."""
