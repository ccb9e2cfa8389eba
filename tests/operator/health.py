"""A producer's and a consumer's database, and what tests of the overview put into them."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from uuid import UUID

from sqlalchemy import Engine, text

from outbox import Message, Outbox, Park, Retry, Settings
from outbox.consumer.consumer import Consumer
from outbox.operator.databases import Databases
from outbox.operator.health.overview import HealthViews, Overview
from outbox.operator.health.rules import Diagnosis
from outbox.operator.health.stats import totals
from outbox.worker.report import Facts, report_once
from tests.kit import dispatch_all

DUTIES = ("dispatch", "release", "check", "bulk", "consume paid of mail")


def open_databases(**engines: Engine) -> Databases:
    """Register databases by name."""
    return Databases.open(engines, Settings())


def overview_of(window: str = "1h", **engines: Engine) -> Overview:
    """Return the overview of these databases."""
    return HealthViews(open_databases(**engines)).overview(window)


def findings(found: Overview, word: str) -> list[Diagnosis]:
    """Return the findings whose sentence has this word."""
    return [problem for problem in found.findings if word in problem.sentence]


def send(engine: Engine, count: int, topic: str = "paid", **options: Any) -> list[UUID]:
    """Send messages in one transaction."""
    outbox = Outbox(engine, settings=Settings())
    with engine.begin() as connection:
        return [outbox.send(connection, topic, {"n": n}, key=str(n), **options) for n in range(count)]


def dispatch(engine: Engine) -> None:
    """Dispatch all there is."""
    dispatch_all(engine)


def consume(engine: Engine, source: Engine, answers: Sequence[Park | Retry | None] = (), limit: int = 1000) -> None:
    """Have group mail consume so many messages of topic paid, and answer so first."""
    left, handled = list(answers), []

    def handle(message: Message, session: Any) -> Park | Retry | None:
        handled.append(message.id)
        return left.pop(0) if left else None

    outbox = Outbox(engine, settings=Settings())
    outbox.consumer("paid", group="mail")(handle)
    consumer = Consumer(outbox.subscriptions["paid", "mail"], Settings(), lambda: len(handled) >= limit)
    with engine.connect() as connection, source.connect() as reader:
        consumer.start(connection, reader)
        while len(handled) < limit and consumer.consume_once(connection, reader):
            pass


def report(
    engine: Engine,
    duties: Iterable[str] = DUTIES,
    handlers: Sequence[Mapping[str, Any]] = (),
    *,
    number: int = 1,
    health: Mapping[str, Any] | None = None,
) -> None:
    """Have a worker report that it is there; no sample is taken."""
    facts = Facts(
        UUID(int=number), f"host:{number}", "1.0", ["all"], handlers, {name: dict(health or {}) for name in duties}
    )
    with engine.connect() as connection:
        report_once(connection, Settings(), facts, lambda _: {})


def handler(kind: str, topic: str, group: str | None = None, **options: Any) -> dict[str, Any]:
    """Return a handler as workers tell it."""
    return {"kind": kind, "topic": topic, "group": group, "name": f"app.{kind}", "options": options}


def sql(engine: Engine, statement: str, **values: Any) -> None:
    """Run a statement."""
    with engine.begin() as connection:
        connection.execute(text(statement), values)


def hold_back(engine: Engine) -> None:
    """Have group mail be paused for topic paid, and its breaker be open for sent, and half open for lost."""
    sql(
        engine,
        "INSERT INTO outbox.group_control (consumer_group, topic, paused_at, paused_by, pause_reason, opened_at,"
        " trial_at, opened_because) VALUES"
        " ('mail', 'paid', now(), 'ann', 'the provider moves', now(), now() + interval '1 hour', 'refused'),"
        " ('mail', 'sent', NULL, NULL, NULL, now(), now() + interval '1 hour', 'refused'),"
        " ('mail', 'lost', NULL, NULL, NULL, now(), now() - interval '1 hour', 'refused')",
    )


def this_minute(engine: Engine) -> dt.datetime:
    """Return when the minute that it is now began, by the database's clock.

    A test that writes samples asks once, and first: the minute may end between two of them, and a report takes the row
    of its own minute.
    """
    with engine.connect() as connection:
        minute: dt.datetime = connection.scalars(text("SELECT date_trunc('minute', clock_timestamp())")).one()
    return minute


def sample(
    engine: Engine, at: dt.datetime, topics: Mapping[str, Any], groups: Mapping[str, Any] | None = None, **more: Any
) -> None:
    """Write the sample of the minute that began then, taken when it began: after those of the minutes before it."""
    stats = {"at": at.isoformat(), "topics": topics, "groups": groups or {}, **more}
    with engine.connect() as connection:
        before = connection.scalar(text("SELECT stats FROM outbox.stats_sample ORDER BY sampled_at DESC LIMIT 1"))
    statement = "INSERT INTO outbox.stats_sample (sampled_at, stats) VALUES (:at, CAST(:stats AS jsonb))"
    sql(engine, statement, at=at, stats=json.dumps(stats | {"totals": totals(stats, before)}))


def run(engine: Engine, age: str = "1 hour", **values: object) -> None:
    """Write that group mail was reconciled with topic paid."""
    columns = {"counts": None, "error": None, "applied": False} | values
    sql(
        engine,
        "INSERT INTO outbox.reconciliation_run (id, job_id, topic, consumer_group, started_at, finished_at, counts, "
        "error, applied) VALUES (gen_random_uuid(), gen_random_uuid(), 'paid', 'mail', now() - CAST(:age AS interval), "
        "now(), CAST(:counts AS jsonb), :error, :applied)",
        age=age,
        **columns,
    )
