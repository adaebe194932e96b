"""Template contexts of the indexer's logits and their top-k in one call."""
