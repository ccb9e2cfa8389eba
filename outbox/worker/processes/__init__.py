"""Several worker processes under one command: the parent that watches them, and what a child does for it."""
