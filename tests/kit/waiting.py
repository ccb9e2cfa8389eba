"""Wait for a fact, never for a time: a busy machine may take longer, and an idle one doesn't wait in vain."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import pytest

T = TypeVar("T")

#: So long (seconds) a test waits for what must come: a test that reaches it has met a defect, not a busy machine.
PATIENCE = 180.0


def wait_until(fact: Callable[[], T], what: str, seconds: float = PATIENCE) -> T:
    """Poll until ``fact`` is true and return it; fail, naming ``what``, when it never is."""
    deadline = time.monotonic() + seconds
    while not (value := fact()):
        if time.monotonic() > deadline:
            pytest.fail(f"waited {seconds:.0f} s in vain: {what}")
        time.sleep(0.01)
    return value
