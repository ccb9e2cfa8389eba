"""An emptied database, and how long flow control believes what it has counted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Connection, Engine

from outbox.database.execute import Statement, execute
from outbox.producer import flow_control
from tests.kit import empty
from tests.producer.backlog import FURTHER_TABLES


@pytest.fixture(autouse=True)
def cleared(engine: Engine) -> Iterator[None]:
    """Leave no message behind, and begin with none."""
    for last in (False, True):
        with engine.begin() as connection:
            empty(connection, *FURTHER_TABLES)
        if not last:
            yield


@pytest.fixture
def always_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Believe no count: each transaction counts itself."""
    monkeypatch.setattr(flow_control, "INTERVAL", 0.0)
    monkeypatch.setattr(flow_control, "PATIENCE", 0.0)


@pytest.fixture
def counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Believe the first count to the end of the test."""
    monkeypatch.setattr(flow_control, "INTERVAL", 3600.0)


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of statements of each count so far."""
    seen: list[int] = []

    def spy(connection: Connection, *statements: Statement) -> Any:
        seen.append(len(statements))
        return execute(connection, *statements)

    monkeypatch.setattr(flow_control, "execute", spy)
    return seen
