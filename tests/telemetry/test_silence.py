"""Nothing fails in silence: each failure, park, refusal and recovery is one record with its ids and traceback."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import text

from outbox import Message, Outbox, Park, Resolution, Settings, Skip, testing
from outbox.errors import OutboxBusy
from outbox.telemetry import events
from outbox.telemetry.events import messages, settling, working
from outbox.telemetry.hooks import TelemetryEvent
from tests.kit import wait_until
from tests.worker.conftest import Bench, open_bench


@pytest.fixture
def bench(new_database: Callable[[], str]) -> Iterator[Bench]:
    """A bench on which a failed message is tried once more, at once."""
    made = open_bench(new_database(), Settings(retry_delays=(0.0,), max_checks=1, immunity=0, check_interval=0.1))
    yield made
    made.stack.close()


def told(caplog: pytest.LogCaptureFixture, kind: type[TelemetryEvent]) -> list[logging.LogRecord]:
    """Return the records of one kind of event."""
    return [record for record in caplog.records if getattr(record, "outbox_event", None) == kind.code]


def facts(record: logging.LogRecord, *names: str) -> list[Any]:
    """Return some facts of a record."""
    return [getattr(record, name) for name in names]


def error_of(record: logging.LogRecord) -> BaseException:
    """Return the exception whose traceback the record shows."""
    assert record.exc_info
    assert record.exc_info[1] is not None
    assert record.exc_info[1].__traceback__ is not None
    return record.exc_info[1]


def test_a_failing_handler(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """Each attempt that fails is a record with ids and traceback, and so is the park."""

    @bench.outbox.consumer("paid", group="mail")
    def handle(message: Message, session: Any) -> None:
        raise ZeroDivisionError(f"attempt {message.attempt}")

    (message_id,) = bench.send()
    bench.work(roles=["dispatch", "consume", "retry"])
    wait_until(lambda: bench.inbox() == [("parked", 2)], "the message is parked")
    wait_until(lambda: told(caplog, events.MessageParked), "the park is told")
    (failed,), (parked,) = told(caplog, events.MessageFailed), told(caplog, events.MessageParked)
    names = "group", "topic", "message_id", "attempt"
    assert facts(failed, *names) == ["mail", "paid", str(message_id), 1]
    assert facts(parked, *names) == ["mail", "paid", str(message_id), 2]
    assert (failed.levelno, parked.levelno) == (logging.WARNING, logging.ERROR)
    assert (str(error_of(failed)), str(error_of(parked))) == ("attempt 1", "attempt 2")
    assert failed.name == "outbox.consumer"
    assert "ZeroDivisionError: attempt 1" in failed.getMessage()


def test_a_recovery_and_answers(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """A message that succeeds at a later attempt is told; so are Park and Skip, which have no traceback."""
    caplog.set_level(logging.INFO, "outbox")

    @bench.outbox.consumer("paid", group="mail")
    def handle(message: Message, session: Any) -> Park | Skip | None:
        if message.body["number"] == 0 and message.attempt == 1:
            raise ZeroDivisionError
        return {0: None, 1: Park("no such customer"), 2: Skip("a test")}[message.body["number"]]

    first, second, third = bench.send(count=3)
    testing.drain(bench.outbox)
    testing.drain(bench.outbox)
    bench.work(roles=["retry"])
    wait_until(lambda: told(caplog, events.MessagesHandled), "the recovery is told")
    (handled,) = told(caplog, events.MessagesHandled)
    assert facts(handled, "message_ids", "attempt", "levelno") == [[str(first)], 2, logging.INFO]
    (parked,), (skipped,) = told(caplog, events.MessageParked), told(caplog, events.MessageSkipped)
    assert facts(parked, "message_id", "reason", "exc_info") == [str(second), "no such customer", None]
    assert facts(skipped, "message_id", "reason", "exc_info") == [str(third), "a test", None]


def test_a_batch_that_is_undone(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """Messages that fail together are told as a batch, with the traceback; then the one that fails alone."""

    @bench.outbox.consumer("paid", group="mail", batch=10)
    def handle(message: Message, session: Any) -> None:
        if message.body["number"] == 2:
            raise ZeroDivisionError

    ids = bench.send(count=3, topic="paid")
    testing.drain(bench.outbox)
    undone = [record for record in told(caplog, events.BatchUndone) if record.exc_info]
    failed = told(caplog, events.MessageFailed)
    assert [facts(record, "message_id") for record in failed] == [[str(ids[2])]]
    assert all(isinstance(error_of(record), ZeroDivisionError) for record in (*undone, *failed))


def test_a_start_without_an_end(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """A start that an earlier worker left behind is told."""
    bench.outbox.consumer("paid", group="mail")(bench.handle)
    bench.send()
    testing.drain(bench.outbox)
    with bench.engine.begin() as connection:
        # As a worker leaves it that dies over the next message.
        connection.execute(
            text("""INSERT INTO outbox.consumer_offset
                           (consumer_group, topic, queue, position, starts, message_id, written_at)
                    SELECT consumer_group, topic, queue, position, 3, message_id, now() - interval '1 minute'
                      FROM outbox.consumer_offset WHERE position > 0 AND starts = 0""")
        )
    bench.send()
    testing.drain(bench.outbox)
    (found,) = told(caplog, events.CrashFound)
    assert facts(found, "group", "topic", "starts") == ["mail", "paid", 3]


def test_a_checker_that_fails(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """The failed check has its traceback; the parked half is told with its id."""

    @bench.outbox.checker("paid")
    def check(orphan: Any) -> Resolution:
        raise ZeroDivisionError("no answer")

    with bench.engine.begin() as connection:
        half_id = bench.outbox.prepare(connection, "paid", {})
    testing.check(bench.outbox)
    (checked,), (parked,) = told(caplog, events.HalfChecked), told(caplog, events.HalfParked)
    assert facts(checked, "half_id", "topic", "resolution") == [str(half_id), "paid", "unknown"]
    assert str(error_of(checked)) == "no answer"
    assert facts(parked, "half_id", "topic", "checks", "levelno") == [str(half_id), "paid", 1, logging.ERROR]


def test_a_send_that_is_refused(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """Flow control tells which limit was reached."""
    bench.send(count=2)
    limited = Outbox(bench.engine, settings=Settings(max_undispatched=1))
    with pytest.raises(OutboxBusy), bench.engine.begin() as connection:
        limited.send(connection, "paid", {})
    (refused,) = told(caplog, events.SendRefused)
    assert facts(refused, "topic", "setting", "limit") == ["paid", "max_undispatched", 1]


def test_a_half_that_is_gone_is_told_after_the_commit(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """What dispatch finds is told once it has committed, by the id."""
    (half_id,) = bench.send()
    with bench.engine.begin() as connection:
        connection.execute(text("DELETE FROM outbox.half_message"))
    with pytest.warns(UserWarning, match="consumes nothing"):
        testing.drain(bench.outbox)
    (missing,) = told(caplog, events.HalfMissing)
    assert missing.half_id == str(half_id)  # type: ignore[attr-defined]  # a fact of the event


def test_facts_are_attributes_of_no_record_already() -> None:
    """No fact hides an attribute of a record, which logging refuses; and each sentence can be made of the facts."""
    kinds = [kind for kind in vars(events).values() if isinstance(kind, type) and issubclass(kind, TelemetryEvent)]
    taken = set(vars(logging.makeLogRecord({}))) | {"message", "asctime", "event"}
    codes = [kind.code for kind in kinds if hasattr(kind, "code")]
    assert len(codes) == len(set(codes)) > 30
    for part in (messages, settling, working):
        declared = [name for name, kind in vars(part).items() if hasattr(kind, "code") and not name.startswith("_")]
        assert set(declared) <= set(vars(events)), "each is found in one place"
    for kind in kinds:
        names = set(kind.__dataclass_fields__) - {"error"}
        assert not names & taken, kind
        if hasattr(kind, "code"):
            kind.text % _AnyFact(names | {"because", "where"})


class _AnyFact(dict[str, float]):
    """A number for each of some names."""

    def __init__(self, names: set[str]) -> None:
        super().__init__(dict.fromkeys(names, 1.0))
