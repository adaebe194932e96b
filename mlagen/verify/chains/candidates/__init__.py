"""Candidate blocks: their selection, logits of the keys in them, and the top-k of these."""
