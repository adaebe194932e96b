"""A paged cache in memory, and values of its rows, for all families that write or read one."""
