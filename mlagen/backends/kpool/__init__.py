"""The indexer that scores pools of keys."""
