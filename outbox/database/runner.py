"""Connections on which functions of the application run: checkers and compensations.

Each has a connection of its own, so that it can be taken away from a function that doesn't end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from outbox.message.model import Counts

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine

#: One pass over some work. It gets a connection to the database, and one to the producer's database; the same object
#: twice where both are one. Neither is in a transaction.
Pass = Callable[["Connection", "Connection"], Counts]


class Runner(Protocol):
    """Runs passes, one at a time, on a connection of its own."""

    def run(self, one_pass: Pass) -> Counts:
        """Run a pass; may return empty counts without running it when the worker ends."""

    def end(self) -> None:
        """Close the connection, or cut it off under a pass that runs on: what that did is rolled back."""


#: Makes a runner, for async functions (True) or plain ones.
NewRunner = Callable[[bool], Runner]


class EngineRunner:
    """Runs passes with plain functions; its connection goes back to the engine's pool after each pass."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def run(self, one_pass: Pass) -> Counts:
        """Run a pass on a connection of the pool."""
        with self._engine.connect() as connection:
            return one_pass(connection, connection)

    def end(self) -> None:
        """Do nothing: a pass that runs on keeps its connection until it ends."""
