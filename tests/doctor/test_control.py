"""Groups that are paused or stopped by their breaker, and paused topics: what the doctor says, and what mends it."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Engine, text

from outbox import Breaker, Message, Outbox, Retry
from outbox.testing import schedules
from tests.doctor.support import codes, dispatch_all, examine, mend_by_command, sql, the
from tests.doctor.test_messages import consume, send, till

__all__ = ["till"]

YES = "--yes"


def test_a_paused_group(engine: Engine, outbox: Outbox, till: list[Any]) -> None:
    """It is a note, with who and why; its overdue retries are none, and the mend has it go on."""
    send(outbox)
    dispatch_all(engine, outbox)
    till.append(Retry())
    consume(outbox, engine)
    sql(engine, "UPDATE outbox.consumer_message SET next_attempt_at = now() - interval '10 minutes'")
    outbox.operator.pause_group("till", by="ann", why="stocktaking")
    report = examine(engine)
    assert codes(report) == ["group.paused"]
    finding = the(report, "group.paused")
    assert "by ann: stocktaking" in finding.sentence
    assert mend_by_command(engine, finding.mend, YES).code == 0
    assert codes(examine(engine)) == ["retry.overdue"]


def test_an_open_breaker(engine: Engine, outbox: Outbox) -> None:
    """It is a problem, with the error that opened it."""

    @outbox.consumer("orders", group="mail", breaker=Breaker(failures=1))
    def handle(message: Message, session: Any) -> None:
        raise ConnectionError("the mail server is down")

    send(outbox)
    dispatch_all(engine, outbox)
    consume(outbox, engine)
    report = examine(engine)
    assert codes(report) == ["breaker.open"]
    assert "ConnectionError: the mail server is down" in the(report, "breaker.open").sentence


def test_a_paused_topic(engine: Engine, outbox: Outbox) -> None:
    """It is a note, and the mend has its dispatch go on."""
    outbox.operator.pause_topic("orders", by="ann", why="sent twice", create=True)
    report = examine(engine)
    assert codes(report) == ["topic.paused"]
    assert mend_by_command(engine, the(report, "topic.paused").mend, YES).code == 0
    assert codes(examine(engine)) == []


def test_schedules(engine: Engine, outbox: Outbox) -> None:
    """One that is paused is a note; one of which no worker sends the messages is a problem."""
    outbox.every(3600.0, topic="orders", name="hourly")(lambda at: None)
    schedules(outbox)
    outbox.operator.pause_cron("hourly", by="ann", why="calm")
    report = examine(engine)
    assert codes(report) == ["schedule.paused"]
    assert mend_by_command(engine, the(report, "schedule.paused").mend, YES).code == 0
    schedules(outbox)
    assert codes(examine(engine)) == []
    with engine.begin() as connection:
        connection.execute(text("UPDATE outbox.cron_schedule SET next_at = clock_timestamp() - interval '1 hour'"))
    report = examine(engine)
    assert codes(report) == ["schedule.overdue"]
    assert "has been due for 1h00m" in the(report, "schedule.overdue").sentence


def test_names_that_do_not_meet(engine: Engine, outbox: Outbox, till: list[Any]) -> None:
    """A topic that is consumed and was never sent to, and one that is sent to and never consumed, are notes."""
    send(outbox)
    dispatch_all(engine, outbox)
    consume(outbox, engine)
    assert codes(examine(engine, subscriptions=outbox.subscriptions.values())) == []
    other = Outbox(engine)
    other.consumer("ordres", group="mail")(lambda message, session: None)
    elsewhere = engine.url.render_as_string(hide_password=False)
    other.consumer("remote", group="mail", source=elsewhere)(lambda message, session: None)
    with engine.begin() as connection:
        outbox.send(connection, "invoices", {})
    dispatch_all(engine, outbox)
    report = examine(engine, subscriptions=other.subscriptions.values())
    assert [(each.code, each.details, each.severity.value) for each in report.findings if "topic." in each.code] == [
        ("topic.silent", {"topic": "ordres", "group": "mail"}, "note"),
        ("topic.unread", {"topic": "invoices"}, "note"),
    ]
