"""Template contexts of the indexer's logits."""
