"""Benches for what a worker tells."""

from tests.worker.conftest import new_bench

__all__ = ["new_bench"]
