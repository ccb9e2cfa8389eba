"""Fixtures for pytest, which finds them by itself where this package is installed.

A run that doesn't use them pays for this module alone: whatever else is needed is imported by a fixture.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Protocol

import pytest

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from outbox.app import Outbox
    from outbox.testing import SentMessages


class Capture(Protocol):
    """What the fixture `outbox_capture` gives."""

    def __call__(self, *outboxes: Outbox) -> SentMessages:
        """Capture what these outboxes send until the test ends, as `outbox.testing.capture` does."""


class RollBack(Protocol):
    """What the fixture `outbox_rollback` gives."""

    def __call__(self, outbox: Outbox, connection: Connection | None = None) -> Connection:
        """Roll back all of an outbox when the test ends, as `outbox.testing.rolling_back` does."""


@pytest.fixture
def outbox_capture() -> Iterator[Capture]:
    """A function that captures what outboxes send in this test, without a database."""
    from outbox.testing import capture  # noqa: PLC0415 - runs that don't use it must not pay for it

    with ExitStack() as stack:
        yield lambda *outboxes: stack.enter_context(capture(*outboxes))


@pytest.fixture
def outbox_rollback() -> Iterator[RollBack]:
    """A function that keeps all of an outbox in one transaction, which this test's end rolls back."""
    from outbox.testing import rolling_back  # noqa: PLC0415 - runs that don't use it must not pay for it

    with ExitStack() as stack:
        yield lambda outbox, connection=None: stack.enter_context(rolling_back(outbox, connection))
