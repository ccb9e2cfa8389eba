"""Adapters and settings of the application's: what the framework binds and reads means the same with each of them."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any
from uuid import UUID

import psycopg
import psycopg2.extensions
import pytest
from psycopg.adapt import Loader
from psycopg.types.json import JsonbDumper
from sqlalchemy import Engine, create_engine, event
from sqlalchemy.orm import Session

from outbox import Message, Outbox, Settings, testing
from outbox.database import migration
from outbox.operator.model import MessageFilter, PageRequest
from tests.kit import Tables

#: Settings of the server's for a session that has been asked to be different.
SETTINGS = {
    "array_nulls": "off",
    "bytea_output": "escape",
    "DateStyle": "German",
    "IntervalStyle": "sql_standard",
    "TimeZone": "Asia/Kathmandu",
    "standard_conforming_strings": "off",
    "extra_float_digits": "-15",
    "search_path": "pg_temp",
    "default_transaction_isolation": "serializable",
    "default_transaction_deferrable": "on",
    "row_security": "off",
    "client_encoding": "LATIN1",
    "enable_hashjoin": "off",
    "plan_cache_mode": "force_generic_plan",
    "xmlbinary": "hex",
    "transform_null_equals": "on",
    "quote_all_identifiers": "on",
}


class Nonsense(Loader):
    """Reads everything as the same."""

    def load(self, data: Any) -> str:  # noqa: ARG002 - psycopg's
        return "nonsense"


class NonsenseInBinary(Nonsense):
    """The same."""

    format = psycopg.pq.Format.BINARY


# Not those of text and of whole numbers, without which SQLAlchemy itself gets nowhere.
READ = ("timestamptz", "jsonb", "json", "uuid", "bytea", "float8", "numeric", "interval", 1009, 1016, 2951)


def _loaders(adapters: Any) -> None:
    for name in READ:
        adapters.register_loader(name, Nonsense)
        adapters.register_loader(name, NonsenseInBinary)


def _dumpers(adapters: Any) -> None:
    for kind in (list, dict, tuple, float, bool, bytes, dt.datetime, UUID):
        adapters.register_dumper(kind, JsonbDumper)


#: What is done to a connection of psycopg's.
ADAPTERS: dict[str, Callable[[Any], None]] = {
    "lists as JSON": lambda connection: connection.adapters.register_dumper(list, JsonbDumper),
    "all as JSON": lambda connection: _dumpers(connection.adapters),
    "loaders": lambda connection: _loaders(connection.adapters),
    "cursors": lambda connection: setattr(connection, "cursor_factory", psycopg.ClientCursor),
    "prepares at once": lambda connection: setattr(connection, "prepare_threshold", 0),
    "prepares never": lambda connection: setattr(connection, "prepare_threshold", None),
}


@pytest.fixture
def hostile(request: pytest.FixtureRequest, engine: Engine) -> Iterator[Engine]:
    """An engine whose connections have been changed by the application."""
    options = f"-c {request.param}={SETTINGS[request.param]}" if request.param in SETTINGS else ""
    changed = create_engine(engine.url, connect_args={"options": options})
    if request.param in ADAPTERS:
        event.listen(changed, "connect", lambda connection, _: ADAPTERS[request.param](connection))
    with ExitStack() as stack:
        stack.callback(changed.dispose)
        if request.param == "psycopg2":
            psycopg2.extensions.register_adapter(list, psycopg2.extensions.QuotedString)
            stack.callback(psycopg2.extensions.register_adapter, list, psycopg2._psycopg.List)
        if request.param == "global":
            own, before = psycopg.adapters, psycopg.adapt.AdaptersMap(psycopg.adapters)
            stack.callback(own.__dict__.update, before.__dict__)
            _dumpers(own)
            _loaders(own)
        yield changed


def _send_raw(app: Outbox, hostile: Engine, engine: Engine, undecided: UUID) -> None:
    """Send with the driver's own connection."""
    with ExitStack() as stack:
        if psycopg2.extensions.adapters[list, psycopg2.extensions.ISQLQuote] is psycopg2.extensions.QuotedString:
            dsn = engine.url.set(drivername="postgresql").render_as_string(hide_password=False)
            raw: Any = stack.enter_context(closing(psycopg2.connect(dsn)))
        else:
            raw = stack.enter_context(hostile.connect()).connection.driver_connection
        app.send(raw, "t", "raw")
        app.send(raw, "t", "once more", dedupe="x")
        app.commit(undecided, raw)
        raw.commit()


@pytest.mark.parametrize("hostile", [*SETTINGS, *ADAPTERS, "global", "psycopg2"], indirect=True)
def test_the_whole_way(hostile: Engine, engine: Engine, settings: Settings) -> None:
    """Sent in each form, dispatched, consumed, retried, looked at, compensated, and found healthy."""
    app = Outbox(hostile, settings=settings)
    got: list[tuple[Any, str | None, str | None, Any]] = []
    undone: list[Any] = []
    born: list[dt.datetime] = []

    @app.consumer("t", group="g", batch=5)
    def handle(message: Message, session: Session) -> None:
        if message.attempt == 1 and message.body == "one":
            raise ValueError("once")
        got.append((message.body, message.key, message.tag, dict(message.headers)))
        born.append(message.born_at)
        app.send(session, "told", {"of": str(message.id)})

    @app.compensation("t")
    def undo(message: Message, session: Session) -> None:
        undone.append(message.body)

    app.declare_topic("q", 3)
    later = dt.datetime.now(dt.UTC) + dt.timedelta(hours=1)
    with hostile.connect() as connection, connection.begin():
        app.send(connection, "t", "one", key="ä\\'\"")
    with Session(hostile) as session, session.begin():
        app.send(session, "t", b"\x00\\\xff", headers={"a": "\\n{NULL}"})
        app.send(session, "t", {"n": [None, 0.1 + 0.2]}, tag="NULL")
        app.send(session, "t", None)
        app.send(session, "q", 1, queue=2)
    with Session(hostile) as session, session.begin():
        first = app.send(session, "t", "once", dedupe="x")
        assert app.send(session, "t", "twice", dedupe="x") == first
        delayed = app.send(session, "later", 1, deliver_at=later)
    with Session(hostile) as session, session.begin():
        half = app.prepare(session, "t", "prepared")
        undecided = app.prepare(session, "t", "undecided")
    decision = app.commit(half)
    assert decision is not None
    assert decision.first
    _send_raw(app, hostile, engine, undecided)
    testing.drain(app, failed=True)
    assert sorted(map(str, got)) == sorted(
        map(
            str,
            [
                ("one", "ä\\'\"", None, {}),
                (b"\x00\\\xff", None, None, {"a": "\\n{NULL}"}),
                ({"n": [None, 0.1 + 0.2]}, None, "NULL", {}),
                (None, None, None, {}),
                ("once", None, None, {"outbox-dedupe": "x"}),
                ("prepared", None, None, {}),
                ("undecided", None, None, {}),
                ("raw", None, None, {}),
            ],
        )
    )
    assert all(abs(dt.datetime.now(dt.UTC) - each) < dt.timedelta(hours=1) for each in born)
    at = Tables(engine)
    assert at.value("SELECT deliver_at FROM outbox.half_message WHERE id = :id", id=delayed) == later
    assert at.value("SELECT count(*) FROM outbox.half_message WHERE tag = 'NULL' OR key = 'NULL'") == 1
    page = app.operator.messages(MessageFilter(topic="t"), PageRequest())
    assert len(page.items) == 8
    assert app.operator.message(first).id == first
    app.operator.compensate([half], by="me", why="test", acknowledge_delivered=True)
    testing.bulk(app)
    assert undone == ["prepared"]
    assert migration.check(hostile) == []
