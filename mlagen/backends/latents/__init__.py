"""Latents of groups of tokens, and their insertion."""
