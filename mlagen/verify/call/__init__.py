"""A call under test: its package, its tensors in memory, and the family that a case belongs to."""
