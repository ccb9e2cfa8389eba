"""Benches for the check, each on a database of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.check.support import Bench, open_bench


@pytest.fixture
def new_bench(new_database: Callable[[], str]) -> Iterator[Callable[..., Bench]]:
    """A function that makes a bench on a database of its own, or on that of ``url``."""
    with ExitStack() as stack:

        def make(url: str | None = None, **settings: Any) -> Bench:
            return open_bench(url or new_database(), stack, **settings)

        yield make


@pytest.fixture
def bench(new_bench: Callable[..., Bench]) -> Bench:
    """A bench with the default settings."""
    return new_bench()
