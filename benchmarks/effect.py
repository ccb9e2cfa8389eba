"""Exactly-once effect: inbox row and one UPDATE by the handler, in one transaction."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import psycopg
from sqlalchemy import Connection, Engine, text
from sqlalchemy.orm import Session

from benchmarks import bank, fill
from benchmarks.consume import INBOX, OFFSET, TOPIC, consumed, new_group, new_name, rows_of, settle
from benchmarks.lab import Benchmark, Lab
from benchmarks.measure import Figure, at_least, compared, interleave, rate
from outbox import Message, Settings

_CREDIT = "UPDATE account SET balance = balance + %s WHERE id = %s"
_CREDIT_ALL = """
UPDATE account SET balance = balance + moved FROM (
    SELECT id, sum(amount) AS moved FROM unnest(%s::bigint[], %s::numeric[]) AS m (id, amount) GROUP BY id) m
 WHERE account.id = m.id
"""
_CREDIT_ALL_TEXT = text(_CREDIT_ALL.replace("%s::bigint[]", "CAST(:ids AS bigint[])").replace("%s::numeric[]", "CAST(:amounts AS numeric[])"))
_INBOX_ONE = text(
    "INSERT INTO outbox.consumer_message (consumer_group, message_id, topic, queue, position, status, attempts) "
    "VALUES (:group, :id, :topic, :queue, :position, 'consumed', 1)"
)


def run(lab: Lab) -> Iterator[Figure]:
    """Measure one message a transaction, a hundred with a call for each, and a hundred with one call for all."""
    settings = Settings()
    count, rounds = lab.scale(50_000, 5_000), lab.scale(7, 2)
    engine = lab.engine("main")
    bank.open_bank(engine)
    lab.say("effect: filling")
    fill.messages(engine, TOPIC, count, settings)
    with engine.connect() as connection, lab.psycopg("main") as raw:
        connection.commit()
        yield from _single(lab, connection, raw, settings)
        lab.say("effect: batch=100")
        few = lab.scale(10_000, 2_000)
        results = interleave(
            {
                "ours": lambda: consumed(connection, connection, new_group(_credit, 100, settings), settings, few),
                "hand": lambda: rate(few, partial(_each_by_hand, raw, new_name(), few)),
            },
            rounds,
        )
        what = "batch=100, handler called for each message"
        yield at_least(what, "messages", results["ours"], 5_000)
        yield compared(what, "messages", results["ours"], "psycopg pipeline by hand", results["hand"], None)
        lab.say("effect: takes_batch")
        results = interleave(
            {
                "ours": lambda: consumed(
                    connection,
                    connection,
                    new_group(_credit_all, 100, settings, takes_batch=True),
                    settings,
                    count,
                ),
                "hand": lambda: rate(count, partial(_all_by_hand, raw, new_name())),
            },
            rounds,
        )
        what = "batch=100, handler takes the list"
        yield at_least(what, "messages", results["ours"], 25_000)
        yield compared(what, "messages", results["ours"], "the same statements by hand", results["hand"], None)


def _single(lab: Lab, connection: Connection, raw: psycopg.Connection[Any], settings: Settings) -> Iterator[Figure]:
    lab.say("effect: one message a transaction")
    count, rounds = lab.scale(400, 50), lab.scale(25, 3)
    engine = lab.engine("main")
    rows: list[Any] = [row for _, batch in rows_of(raw, "", settings.queues, 100) for row in batch][:count]
    results = interleave(
        {
            "ours": lambda: consumed(connection, connection, new_group(_credit, 1, settings), settings, count),
            "session": lambda: rate(count, partial(_session_transactions, engine, new_name(), rows)),
            "psycopg": lambda: rate(count, partial(_bare_transactions, raw, new_name(), rows)),
        },
        rounds,
    )
    what = "one message a transaction"
    yield compared(what, "", results["ours"], "bare transaction, SQLAlchemy session", results["session"], 0.8)
    yield compared(what, "", results["ours"], "bare transaction, psycopg", results["psycopg"], 0.8)


def _order(message: Message) -> dict[str, Any]:
    body = message.body
    return {"account_id": body["receiver"], "moved": body["amount"]}


def _credit(message: Message, session: Session) -> None:
    session.execute(bank.MOVE, _order(message))


def _credit_all(messages: list[Message], session: Session) -> None:
    orders = [message.body for message in messages]
    values = {"ids": [order["receiver"] for order in orders], "amounts": [order["amount"] for order in orders]}
    session.execute(_CREDIT_ALL_TEXT, values)


def _decoded(row: Any) -> tuple[Any, Any]:
    import json

    order = json.loads(row[7])
    return order["amount"], order["receiver"]


def _session_transactions(engine: Engine, group: str, rows: list[Any]) -> None:
    """Inbox row, business change, commit: what one would write without a framework, for a message at hand."""
    for row in rows:
        amount, receiver = _decoded(row)
        with Session(engine) as session, session.begin():
            session.execute(_INBOX_ONE, {"group": group, "id": row[1], "topic": TOPIC, "queue": 0, "position": row[0]})
            session.execute(bank.MOVE, {"account_id": receiver, "moved": amount})


def _bare_transactions(raw: psycopg.Connection[Any], group: str, rows: list[Any]) -> None:
    for row in rows:
        raw.execute(INBOX, (group, TOPIC, 0, [row[1]], [row[0]], [b""]))
        raw.execute(_CREDIT, _decoded(row))
        raw.commit()


def _each_by_hand(raw: psycopg.Connection[Any], group: str, count: int) -> None:
    done = 0
    for queue, rows in rows_of(raw, group, 8, 100):
        with raw.pipeline():
            for row in rows:
                raw.execute(INBOX, (group, TOPIC, queue, [row[1]], [row[0]], [b""]))
                raw.execute(_CREDIT, _decoded(row))
            raw.execute(OFFSET, (group, TOPIC, queue, rows[-1][0]))
            raw.commit()
        done += len(rows)
        if done >= count:
            return


def _all_by_hand(raw: psycopg.Connection[Any], group: str) -> None:
    for queue, rows in rows_of(raw, group, 8, 100):
        amounts, receivers = zip(*map(_decoded, rows), strict=True)
        settle(raw, group, queue, rows)
        raw.execute(_CREDIT_ALL, (list(receivers), list(amounts)))
        raw.commit()


BENCHMARK = Benchmark(run)
