"""Exactly-once effect: inbox row and one UPDATE by the handler, in one transaction."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from typing import Any

import psycopg
from sqlalchemy import Connection, Engine, text
from sqlalchemy.orm import Session

from benchmarks import bank, fill
from benchmarks.lab import Benchmark, Lab
from benchmarks.measure import Figure, at_least, compared, interleave
from benchmarks.readers import TOPIC, ByHand, Ours, Row, first_rows, new_group
from outbox import Message, Settings

_CREDIT = "UPDATE account SET balance = balance + %s WHERE id = %s"
_CREDIT_ALL = """
UPDATE account SET balance = balance + moved
  FROM (SELECT id, sum(amount) AS moved
          FROM unnest(CAST(:ids AS bigint[]), CAST(:amounts AS numeric[])) AS m (id, amount) GROUP BY id) m
 WHERE account.id = m.id
"""
_CREDIT_ALL_RAW = _CREDIT_ALL.replace(":ids", "%(ids)s").replace(":amounts", "%(amounts)s")
_CREDIT_ALL_TEXT = text(_CREDIT_ALL)
_INBOX_ONE = """
INSERT INTO outbox.consumer_message (consumer_group, message_id, topic, queue, position, status, attempts)
VALUES (:group, :id, 'transfer', 0, :position, 'consumed', 1)
"""
_INBOX_ONE_RAW = _INBOX_ONE.replace(":group", "%s").replace(":id", "%s").replace(":position", "%s")
_INBOX_ONE_TEXT = text(_INBOX_ONE)


def run(lab: Lab) -> Iterator[Figure]:
    """Measure one message a transaction, a hundred with a call for each (three kinds), and one call for all."""
    settings = Settings()
    engine = lab.engine("main")
    bank.open_bank(engine)
    lab.say("effect: filling")
    fill.messages(engine, TOPIC, lab.scale(50_000, 10_000), settings)
    with lab.worker_connection("main") as connection, lab.psycopg("main") as raw:
        yield from _single(lab, connection, raw, settings)
        what = "batch=100, handler called for each message"
        ours = Ours(connection, connection, settings, _credit, 100)
        yield from _batched(lab, what, ours, ByHand(raw, settings.queues, 100, _each_by_hand), 5_000)
        what = "batch=100, handler with a cursor"
        ours = Ours(connection, connection, settings, _credit_by_cursor, 100)
        yield from _against(lab, what, ours, ByHand(raw, settings.queues, 100, _one_by_one_by_hand), 0.8)
        what = "batch=100, handler with a cursor, pipeline=True"
        ours = Ours(connection, connection, settings, _credit_by_cursor, 100, pipeline=True)
        yield from _against(lab, what, ours, ByHand(raw, settings.queues, 100, _each_by_hand), 0.6)
        what = "batch=100, handler takes the list"
        ours = Ours(connection, connection, settings, _credit_all, 100, takes_batch=True)
        yield from _batched(lab, what, ours, ByHand(raw, settings.queues, 100, _all_by_hand), 25_000)


def _single(lab: Lab, connection: Connection, raw: psycopg.Connection[Any], settings: Settings) -> Iterator[Figure]:
    lab.say("effect: one message a transaction")
    seconds, rounds = 0.2, lab.scale(40, 5)
    ours = Ours(connection, connection, settings, _credit, 1)
    rows, engine = first_rows(raw, 1000), lab.engine("main")
    results = interleave(
        {
            "ours": lambda: ours.round(seconds),
            "session": lambda: _for_seconds(seconds, rows, partial(_session_transaction, engine)),
            "psycopg": lambda: _for_seconds(seconds, rows, partial(_bare_transaction, raw)),
        },
        rounds,
    )
    what = "one message a transaction"
    yield compared(what, "", results["ours"], "bare transaction, SQLAlchemy session", results["session"], 0.8)
    yield compared(what, "", results["ours"], "bare transaction, psycopg", results["psycopg"], 0.8)


def _batched(lab: Lab, what: str, ours: Ours, hand: ByHand, bar: float) -> Iterator[Figure]:
    results = _alternate(lab, what, ours, hand)
    yield at_least(what, "messages", results["ours"], bar)
    yield compared(what, "messages", results["ours"], "psycopg by hand", results["hand"], None)


def _against(lab: Lab, what: str, ours: Ours, hand: ByHand, bar: float) -> Iterator[Figure]:
    results = _alternate(lab, what, ours, hand)
    yield compared(what, "messages", results["ours"], "psycopg by hand", results["hand"], bar)


def _alternate(lab: Lab, what: str, ours: Ours, hand: ByHand) -> dict[str, list[float]]:
    lab.say(f"effect: {what}")
    seconds = lab.scale(10, 3) / 10
    arms = {"ours": lambda: ours.round(seconds), "hand": lambda: hand.round(seconds)}
    return interleave(arms, lab.scale(9, 3))


def _credit(message: Message, session: Session) -> None:
    body = message.body
    session.execute(bank.MOVE, {"account_id": body["receiver"], "moved": body["amount"]})


def _credit_by_cursor(message: Message, cursor: psycopg.Cursor[Any]) -> None:
    body = message.body
    cursor.execute(_CREDIT, (body["amount"], body["receiver"]))


def _credit_all(messages: list[Message], session: Session) -> None:
    session.execute(_CREDIT_ALL_TEXT, _columns([message.body for message in messages]))


def _columns(orders: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {"ids": [order["receiver"] for order in orders], "amounts": [order["amount"] for order in orders]}


def _for_seconds(seconds: float, rows: list[Row], transaction: Callable[[str, Row], None]) -> float:
    """Handle one message after the other, as a new group; return how many a second."""
    group, began, done = new_group(), time.perf_counter(), 0
    for row in cycle(rows):
        if done % len(rows) == 0:
            group = new_group()
        transaction(group, row)
        done += 1
        if time.perf_counter() > began + seconds:
            break
    return done / (time.perf_counter() - began)


def _session_transaction(engine: Engine, group: str, row: Row) -> None:
    """Inbox row, business change, commit: what one writes without a framework, for a message at hand."""
    order = json.loads(row[7])
    with Session(engine) as session, session.begin():
        session.execute(_INBOX_ONE_TEXT, {"group": group, "id": row[1], "position": row[0]})
        session.execute(bank.MOVE, {"account_id": order["receiver"], "moved": order["amount"]})


def _bare_transaction(raw: psycopg.Connection[Any], group: str, row: Row) -> None:
    order = json.loads(row[7])
    raw.execute(_INBOX_ONE_RAW, (group, row[1], row[0]))
    raw.execute(_CREDIT, (order["amount"], order["receiver"]))
    raw.commit()


def _one_by_one_by_hand(raw: psycopg.Connection[Any], rows: list[Row]) -> None:
    for row in rows:
        order = json.loads(row[7])
        raw.execute(_CREDIT, (order["amount"], order["receiver"]))


def _each_by_hand(raw: psycopg.Connection[Any], rows: list[Row]) -> None:
    with raw.pipeline():
        _one_by_one_by_hand(raw, rows)


def _all_by_hand(raw: psycopg.Connection[Any], rows: list[Row]) -> None:
    raw.execute(_CREDIT_ALL_RAW, _columns([json.loads(row[7]) for row in rows]))


BENCHMARK = Benchmark(run)
