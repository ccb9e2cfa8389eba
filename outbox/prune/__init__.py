"""Prune: delete rows that are settled and older than the retention."""
