"""What a message passes through leaves no circle of objects: a collector would have to find each, for every message."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from psycopg.adapt import Dumper
from sqlalchemy import Connection, NullPool, create_engine, text
from sqlalchemy.orm import Session

from outbox import Message, Outbox
from tests.kit.bench import Bench, record

MESSAGES = 20
_OLD = tuple(map(int, psycopg.__version__.split(".")[:2])) < (3, 3)
_NEW = pytest.mark.skipif(_OLD, reason="psycopg before 3.3 has its connections in circles of its own")


def by_cursor(message: Message, cursor: psycopg.Cursor[Any]) -> None:
    """Write into the ledger."""
    cursor.execute("INSERT INTO ledger (message_id) VALUES (%s)", (message.id,))


def by_connection(message: Message, connection: Connection) -> None:
    """Write into the ledger."""
    connection.exec_driver_sql("INSERT INTO ledger (message_id) VALUES (%s)", (message.id,))


def outside(message: Message) -> None:
    """Do nothing, outside of a transaction."""


def all_at_once(messages: list[Message], session: Session) -> None:
    """Write a list into the ledger."""
    for message in messages:
        record(message, session)


def circles(work: Callable[[], object]) -> Counter[str]:
    """Return how many objects of each type of ours only a collector could take away after some work, done once before.

    What they keep goes with them: a session, a connection. An old psycopg's dumpers are in circles by themselves.
    """
    work()
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        work()
        gc.collect()
        kinds = (type(each) for each in gc.garbage if not isinstance(each, Dumper))
        ours = (kind for kind in kinds if kind.__module__.startswith("outbox.") or issubclass(kind, psycopg.Connection))
        return Counter(kind.__qualname__ for kind in ours)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.mark.parametrize(
    ("handler", "options"),
    [
        (record, {}),
        (record, {"batch": 10}),
        (by_cursor, {}),
        (by_cursor, {"batch": 10, "pipeline": True}),
        (by_connection, {}),
        (all_at_once, {"batch": 10, "takes_batch": True}),
        (outside, {"transactional": False}),
        (record, {"ordered": "key"}),
    ],
)
def test_a_handled_message_leaves_no_circle(bench: Bench, handler: Any, options: dict[str, Any]) -> None:
    """Fewer than one for each message: a pass may leave some."""
    consumer = bench.declare(handler, **options)

    def work() -> None:
        bench.send(*range(MESSAGES))
        bench.consume(consumer)

    found = circles(work)
    assert not {kind: each for kind, each in found.items() if each >= MESSAGES}


@pytest.mark.parametrize("pool", [None, pytest.param(NullPool, marks=_NEW)])
def test_a_sent_message_leaves_no_circle(bench: Bench, pool: type[NullPool] | None) -> None:
    """By a session, a connection, and each decorator; also where each has a connection of its own."""
    engine = create_engine(bench.producer.url, poolclass=pool)
    app = Outbox(engine, settings=bench.settings)

    @app.transactional(topic="t")
    def order(session: Session, number: int) -> int:
        return number

    @app.two_phase(topic="t")
    def pay(session: Session, number: int) -> None:
        session.execute(text("SELECT 1"))

    def work() -> None:
        for number in range(MESSAGES):
            with Session(engine) as session, session.begin():
                app.send(session, "t", number)
            with engine.begin() as connection:
                app.send(connection, "t", number)
            order(number)
            pay(number)

    found = circles(work)
    assert not {kind: each for kind, each in found.items() if each >= MESSAGES}
    engine.dispose()
