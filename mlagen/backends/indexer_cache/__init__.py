"""Template contexts of the indexer's cache."""
