"""Ours beside its peers from PyPI and what one writes by hand, all in one run: ``python -m benchmarks.peers``."""
