"""Prune: delete what is older than the retention and settled."""
