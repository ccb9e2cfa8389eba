"""Statements beside the caller's: with settings of their own, and failing alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from outbox.store import reconcile_measure as store
from outbox.store.dispatch import plan_by_index
from outbox.store.execute import execute

if TYPE_CHECKING:
    from sqlalchemy import Connection


@contextmanager
def aside(connection: Connection, seconds: float, *, by_index: bool = False) -> Iterator[None]:
    """Read within the caller's transaction, in a savepoint that is undone at the end.

    So that no setting is left behind, and a statement which fails doesn't end the transaction. ``seconds`` is how long
    each statement may take; 0 is as long as it wants.
    """
    savepoint = connection.begin_nested()
    try:
        execute(connection, store.limits(seconds), *([plan_by_index()] if by_index else []))
        yield
    finally:
        if not connection.invalidated:
            savepoint.rollback()
