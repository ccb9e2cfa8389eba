"""A psycopg whose private parts have other names: statements go the driver's own way, and a send works."""

from __future__ import annotations

import inspect
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from psycopg import _preparing
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from outbox import Outbox
from outbox.database import execute, roundtrip
from outbox.dispatch.dispatch_pass import dispatch_once
from tests.producer.bank import halves


def rename_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give psycopg's own manager of prepared statements another name for what it has prepared."""
    source = inspect.getsource(_preparing)
    assert "self._names" in source
    renamed: dict[str, Any] = {"__name__": _preparing.__name__, "__package__": "psycopg"}
    exec(source.replace("self._names", "self._statements"), renamed)  # noqa: S102
    renamed["Prepare"] = _preparing.Prepare  # compared by identity
    monkeypatch.setattr("psycopg._connection_base.PrepareManager", renamed["PrepareManager"])


def reshape_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have it keep something else than names."""

    class Names(OrderedDict[Any, Any]):
        def values(self) -> Any:
            return [object()]

    class Manager(_preparing.PrepareManager):
        def __init__(self) -> None:
            super().__init__()
            self._names = Names()

    monkeypatch.setattr("psycopg._connection_base.PrepareManager", Manager)


def rename_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the module find a generator of psycopg's under no name."""
    monkeypatch.delitem(sys.modules, "outbox.database.roundtrip")
    monkeypatch.delattr("psycopg.generators.fetch_many")


def be_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be of a version that isn't known yet."""
    monkeypatch.setattr(psycopg, "__version__", "3.99.0")


@pytest.fixture(params=[rename_prepared, reshape_prepared, rename_generator, be_unknown])
def other_driver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A psycopg that differs in one private part."""
    differ: Callable[[pytest.MonkeyPatch], None] = request.param
    differ(monkeypatch)
    execute.round_trip_kind.cache_clear()
    yield
    monkeypatch.undo()
    execute.round_trip_kind.cache_clear()


@pytest.mark.usefixtures("other_driver")
def test_send_commits_rolls_back_and_is_dispatched(engine: Engine, outbox: Outbox) -> None:
    """Messages are written with the COMMIT, gone with a rollback, and dispatched, again and again."""
    for number in range(3):
        with Session(engine) as session, session.begin():
            outbox.send(session, "t", {"number": number})
        with Session(engine) as session:
            outbox.send(session, "t", {"number": 99})
            session.rollback()
    assert [half.body["number"] for half in halves(engine)] == [0, 1, 2]
    with engine.connect() as connection:
        assert sum(dispatch_once(connection, outbox.settings).done for _ in range(3)) == 3


@pytest.mark.parametrize("version", ["3.1.20", "3.4.0", "3.4.0rc1", "4.0"])
def test_known_versions_are_those_of_the_requirement(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `pyproject.toml` excludes isn't taken for known at run time either."""
    assert roundtrip.is_known()
    monkeypatch.setattr(psycopg, "__version__", version)
    assert not roundtrip.is_known()
