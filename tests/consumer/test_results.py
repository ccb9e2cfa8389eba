"""What handlers may answer, alone and in batches, and what they may not break."""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import Callable
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from outbox import Message, Park, Retry, Skip
from outbox.errors import AlreadyCommitted
from tests.kit.bench import Bench, but, fail, record

WAIT = "SELECT extract(epoch FROM next_attempt_at - changed_at)::float8 FROM outbox.consumer_message"


ANSWERS: dict[str, tuple[Callable[[Message, Session], Any], tuple[str, int], str]] = {
    "raise": (fail, ("failed", 1), "RuntimeError: ill"),
    "retry": (lambda m, s: Retry(reason="later"), ("failed", 1), "later"),
    "park": (lambda m, s: Park("never"), ("parked", 1), "never"),
    "skip": (lambda m, s: Skip("who cares"), ("consumed", 1), "who cares"),
    "rollback": (lambda m, s: s.rollback(), ("failed", 1), "rolled the session back"),
    "undecodable": (lambda m, s: _broken(m).body, ("parked", 1), "InvalidMessage"),
}


def _broken(message: Message) -> Message:
    message.stored, message.content_type = b"{not json", "application/json"
    return message


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("batch", [1, 2, 5, 100])
def test_one_of_many_fails(bench: Bench, answer: str, batch: int) -> None:
    """Whatever one message comes to: its changes are undone, and the others are consumed once each."""
    act, (status, attempts), error = ANSWERS[answer]
    consumer = bench.declare(but(3, act), batch=batch)
    ids = bench.send(1, 2, 3, 4, 5)
    counts = bench.consume(consumer)
    assert (counts.taken, counts.done + counts.failed + counts.parked) == (5, 5)
    assert bench.ledger() == ["1", "2", "4", "5"]
    inbox = bench.inbox()
    assert (inbox[ids[2]].status, inbox[ids[2]].attempts) == (status, attempts)
    assert error in str(inbox[ids[2]].error)
    assert all((inbox[id_].status, inbox[id_].attempts) == ("consumed", 1) for id_ in ids if id_ != ids[2])


@pytest.mark.parametrize(
    ("after", "seconds"),
    [(45, 45), (0, 0), (-5, 0), (dt.timedelta(minutes=2), 120), (1e300, 100 * 366 * 86400), (float("inf"), 3.16e9)],
)
def test_retry_after(bench: Bench, after: Any, seconds: float) -> None:
    """`Retry(after=…)` sets the time of the next attempt by the database's clock, within what a time can be."""
    consumer = bench.declare(but(1, lambda m, s: Retry(after=after)))
    bench.send(1)
    bench.consume(consumer)
    assert bench.rows(WAIT) == [pytest.approx(seconds, rel=0.01, abs=0.5)]


def _unprintable(message: Message, session: Session) -> None:
    class Unprintable(Exception):
        def __str__(self) -> str:
            raise ValueError("no text")

    raise Unprintable


POISON: dict[str, Callable[[Message, Session], Any]] = {
    "NUL": lambda m, s: Park("a\0b"),
    "surrogate": lambda m, s: dict[str, int]()["\ud800"],
    "surrogate answer": lambda m, s: Retry(reason="\udc80"),
    "no text": lambda m, s: Park(404),  # type: ignore[arg-type]
    "unprintable": _unprintable,
    "not a number": lambda m, s: Retry(after=float("nan")),
    "not a time": lambda m, s: Retry(after="soon"),  # type: ignore[arg-type]
    "endless": lambda m, s: Skip("x" * 10_000_000),
}


@pytest.mark.parametrize("poison", POISON)
def test_no_answer_holds_up_the_queue(bench: Bench, poison: str) -> None:
    """A failure whose text or time can't be stored as it is gets written down all the same."""
    consumer = bench.declare(but(2, POISON[poison]), batch=5)
    ids = bench.send(1, 2, 3)
    bench.consume(consumer)
    assert bench.ledger() == ["1", "3"]
    assert bench.inbox()[ids[1]].error


def test_a_body_that_cannot_be_read(bench: Bench) -> None:
    """A body that doesn't fit the declared model is parked at its first attempt, and holds up nobody."""
    consumer = bench.declare(model=int, batch=3)
    ids = bench.send(1, "not a number", 3)
    bench.consume(consumer)
    assert bench.ledger() == ["1", "3"]
    row = bench.inbox()[ids[1]]
    assert (row.status, row.attempts) == ("parked", 1)
    assert "InvalidMessage" in str(row.error)


def test_failures_with_one_cause_are_of_one_kind(bench: Bench) -> None:
    """The kind is written beside the error; a success wipes it out, as it does the error."""

    def handler(message: Message, session: Session) -> Park | None:
        if message.body == 4:
            return Park("no account AB-4 at bank B")
        session.execute(text("INSERT INTO taken VALUES (1)"))
        return None

    bench.run("CREATE TABLE taken (n int PRIMARY KEY)")
    bench.run("INSERT INTO taken VALUES (1)")
    consumer = bench.declare(handler)
    ids = bench.send(1, 2, 4)
    bench.consume(consumer)
    kinds = {row[0]: row[1] for row in bench.rows("SELECT message_id, error_kind FROM outbox.consumer_message")}
    assert kinds[ids[0]] == kinds[ids[1]]
    assert kinds[ids[0]].startswith("UniqueViolation of taken_pkey in test_results.py:")
    assert kinds[ids[2]] == "no account … at bank B"
    bench.run("DELETE FROM taken")
    bench.retry(consumer)
    assert bench.rows("SELECT error_kind IS NULL, last_error IS NULL FROM outbox.consumer_message "
                      "WHERE status = 'consumed'") == [(True, True)]  # fmt: skip


def swallow(message: Message, session: Session) -> None:
    """Run a statement that fails, and go on as if nothing had happened."""
    try:
        session.execute(text("SELECT 1 / 0"))
    except DBAPIError:
        return


@pytest.mark.parametrize("batch", [1, 4])
def test_a_swallowed_database_error_is_a_failure(bench: Bench, batch: int) -> None:
    """A handler that swallows a database error has lost its changes, and its message isn't taken for consumed."""
    consumer = bench.declare(but(2, swallow), batch=batch)
    ids = bench.send(1, 2, 3, 4)
    bench.consume(consumer)
    assert bench.ledger() == ["1", "3", "4"]
    assert bench.inbox()[ids[1]].status == "failed"


def test_a_database_error_within_a_savepoint(bench: Bench) -> None:
    """A handler that confines an error to a savepoint succeeds, and keeps what it did outside."""

    def careful(message: Message, session: Session) -> None:
        try:
            with session.begin_nested():
                session.execute(text("SELECT 1 / 0"))
        except DBAPIError:
            return

    consumer = bench.declare(but(2, careful), batch=4)
    bench.send(1, 2, 3)
    bench.consume(consumer)
    assert bench.ledger() == ["1", "2", "3"]


@pytest.mark.parametrize("batch", [1, 4])
def test_a_constraint_that_speaks_at_commit(bench: Bench, batch: int) -> None:
    """A deferred constraint that one message violates fails that one only, also when it is retried."""
    bench.run("CREATE TABLE strict (n int UNIQUE DEFERRABLE INITIALLY DEFERRED)")
    bench.run("INSERT INTO strict VALUES (2)")

    def handler(message: Message, session: Session) -> None:
        record(message, session)
        session.execute(text("INSERT INTO strict VALUES (:n)"), {"n": message.body})

    consumer = bench.declare(handler, batch=batch)
    ids = bench.send(1, 2, 3)
    bench.consume(consumer)
    assert bench.ledger() == ["1", "3"]
    assert (bench.inbox()[ids[1]].status, bench.inbox()[ids[1]].attempts) == ("failed", 1)
    assert bench.retry(consumer).failed == 1
    bench.run("DELETE FROM strict WHERE n = 2")
    assert bench.retry(consumer).done == 1
    assert bench.ledger() == ["1", "3", "2"]


def test_a_decision_that_came_too_late(bench: Bench) -> None:
    """A handler that decides a half which was decided before fails at its commit like by any other error."""
    with bench.producer.begin() as connection:
        half_id = bench.app.prepare(connection, "other", "half")
    bench.app.commit(half_id)

    def handler(message: Message, session: Session) -> None:
        record(message, session)
        if message.body == 2:
            bench.sink.commit(half_id, session)

    consumer = bench.declare(handler, batch=3)
    ids = bench.send(1, 2, 3)
    bench.consume(consumer)
    assert bench.ledger() == ["1", "3"]
    assert AlreadyCommitted.__name__ in str(bench.inbox()[ids[1]].error)
    assert bench.retry(consumer).failed == 1


def test_a_handler_cannot_commit(bench: Bench) -> None:
    """`session.commit()` in a handler keeps nothing if the handler fails afterwards."""

    def act(message: Message, session: Session) -> None:
        session.commit()
        record(message, session)
        session.commit()
        raise RuntimeError

    consumer = bench.declare(but(1, act))
    bench.send(1, 2)
    bench.consume(consumer)
    assert bench.ledger() == ["2"]


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("commit", [False, True])
def test_what_a_handler_sends(any_bench: Bench, batch: int, commit: bool) -> None:
    """Messages sent by a handler go with its effect, or vanish with it, each once; savepoints included."""

    def handler(message: Message, session: Session) -> None:
        record(message, session)
        any_bench.sink.send(session, "next", message.body)
        if commit:
            session.commit()
        undone = session.begin_nested()
        any_bench.sink.send(session, "next", "undone")
        undone.rollback()
        if message.body == 2:
            raise RuntimeError

    consumer = any_bench.declare(handler, batch=batch)
    any_bench.send(1, 2, 3)
    any_bench.consume(consumer)
    sent = (
        "SELECT convert_from(body, 'UTF8') FROM outbox.half_message h JOIN outbox.op_message o ON h.id = o.half_id "
        "WHERE topic = 'next' ORDER BY o.sequence"
    )
    assert any_bench.rows(sent) == ["1", "3"]
    assert any_bench.rows("SELECT count(*) FROM outbox.half_message WHERE topic = 'next'") == [2]


def test_what_a_handler_sends_for_later(bench: Bench) -> None:
    """Messages of one handler, for one time, come in the order in which they were sent, though their ids have none."""
    later = dt.datetime.now(dt.UTC) + dt.timedelta(hours=1)

    def handler(message: Message, session: Session) -> None:
        for number in range(12):
            bench.sink.send(session, "next", number, key="k", deliver_at=later)

    consumer = bench.declare(handler)
    bench.send("a")
    bench.consume(consumer)
    bench.dispatch()
    bench.run("UPDATE outbox.scheduled_message SET deliver_at = deliver_at - interval '2 hours'")
    bench.dispatch()
    sent = "SELECT convert_from(body, 'UTF8')::int FROM outbox.half_message h JOIN outbox.message m ON m.half_id = h.id"
    assert bench.rows(f"{sent} WHERE h.topic = 'next' ORDER BY m.position") == list(range(12))


def test_takes_batch(bench: Bench) -> None:
    """A handler of lists gets whole batches; when one fails, lists of one, down to the message it can't do."""
    lists: list[list[int]] = []

    def handler(messages: list[Message], session: Session) -> Any:
        lists.append([message.body for message in messages])
        for message in messages:
            record(message, session)
        return Park("no threes") if 3 in lists[-1] else None

    consumer = bench.declare(handler, batch=4, takes_batch=True)
    ids = bench.send(1, 2, 3, 4, 5, 6)
    bench.consume(consumer)
    assert sorted(bench.ledger()) == ["1", "2", "4", "5", "6"]
    assert bench.inbox()[ids[2]].status == "parked"
    assert lists[:4] == [[1, 2, 3, 4], [1], [2], [3]]
    bench.app.operator.retry(ids[2], group="g", by="me", why="test")
    assert bench.retry(consumer).parked == 1
    assert lists[-1] == [3]


def test_async_handlers(bench: Bench) -> None:
    """Async handlers run inside an AsyncConnection's `run_sync`, with an AsyncSession, by the same rules."""

    async def handler(message: Message, session: AsyncSession) -> Any:
        await asyncio.sleep(0)  # as one that waits for another service: it comes back to its event loop
        await session.run_sync(lambda sync: record(message, sync))
        bench.sink.send(session, "next", message.body)
        if message.body == 2:
            raise RuntimeError("not today")
        return Park("no threes") if message.body == 3 else None

    consumer = bench.declare(handler, batch=3)
    ids = bench.send(1, 2, 3, 4)

    bench.consume(consumer)
    assert bench.retry(consumer).failed == 1
    assert bench.ledger() == ["1", "4"]
    statuses = [bench.inbox()[id_] for id_ in ids]
    assert [(row.status, row.attempts) for row in statuses] == [
        ("consumed", 1), ("failed", 2), ("parked", 1), ("consumed", 1),
    ]  # fmt: skip
    assert bench.rows("SELECT count(*) FROM outbox.half_message WHERE topic = 'next'") == [2]


def test_a_session_that_the_handler_closes(bench: Bench) -> None:
    """A handler that uses its session in a with block keeps its change and what it sent together."""

    def handler(message: Message, session: Session) -> None:
        with session:
            record(message, session)
            bench.sink.send(session, "next", message.body)

    consumer = bench.declare(handler)
    bench.send(1)
    bench.consume(consumer)
    sent = bench.rows("SELECT count(*) FROM outbox.half_message WHERE topic = 'next'")
    assert len(bench.ledger()) == sent[0], "effect and message didn't stay together"


def test_the_handler_sees_the_whole_message(any_bench: Bench) -> None:
    """A handler gets id, key, tag, headers, place and times as they were sent."""
    seen: list[Message] = []
    consumer = any_bench.declare(lambda message, session: seen.append(message))
    (half_id,) = any_bench.send({"n": 1}, key="k", tag="blue", headers={"trace": "ü"})
    any_bench.consume(consumer)
    (message,) = seen
    assert isinstance(message.id, UUID)
    assert (message.id, message.topic, message.key, message.tag) == (half_id, "t", "k", "blue")
    assert (message.body, message.headers, message.position) == ({"n": 1}, {"trace": "ü"}, 1)
    assert (message.attempt, message.send_number) == (1, 1)
    assert message.born_at.tzinfo is not None
    assert message.visible_at >= message.born_at
