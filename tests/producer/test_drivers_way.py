"""A psycopg whose private parts have other names: statements go the driver's own way, and a send works."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import psycopg
import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from outbox import Outbox
from outbox.database import roundtrip
from outbox.dispatch.once import dispatch_once
from tests.producer.bank import halves


class Unnamed:
    """What psycopg has prepared, where it doesn't tell the names."""

    def __init__(self, real: object) -> None:
        self._real = real

    def __getattr__(self, name: str) -> object:
        if name == "_names":
            raise AttributeError(name)
        return getattr(self._real, name)


def rename_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take ``connection._prepared._names`` away."""
    real = psycopg.Connection.__init__

    def init(self: psycopg.Connection, *args: object, **options: object) -> None:
        real(self, *args, **options)  # type: ignore[arg-type]
        self._prepared = Unnamed(self._prepared)  # type: ignore[assignment]

    monkeypatch.setattr(psycopg.Connection, "__init__", init)


def reshape_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have it map to what isn't a name."""
    monkeypatch.setattr(roundtrip, "Mapping", type("None", (), {}))


def rename_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the module find a generator of psycopg's under no name."""
    monkeypatch.delitem(sys.modules, "outbox.database.roundtrip")
    monkeypatch.delattr("psycopg.generators.fetch_many")


def be_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be of a version that isn't known yet."""
    monkeypatch.setattr(psycopg, "__version__", "3.99.0")
    roundtrip.is_known.cache_clear()


@pytest.fixture(params=[rename_prepared, reshape_prepared, rename_generator, be_unknown])
def other_driver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A psycopg that differs in one private part."""
    differ: Callable[[pytest.MonkeyPatch], None] = request.param
    differ(monkeypatch)
    yield
    roundtrip.is_known.cache_clear()


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
    roundtrip.is_known.cache_clear()
    try:
        assert not roundtrip.is_known()
    finally:
        roundtrip.is_known.cache_clear()
