"""The history of failed attempts: each one with its error, bounded, and pruned."""

from __future__ import annotations

import os
from typing import Any

import pytest
from sqlalchemy.orm import Session

from outbox import Message, Park, Skip
from outbox.consumer.sql import MOST_ATTEMPTS
from outbox.operator.model import FailedAttempt
from outbox.prune.prune_pass import prune_consumer_once
from tests.kit import at_once
from tests.kit.bench import Bench, Ward, fail, record

COUNT = "SELECT count(*) FROM outbox.attempt_history"
STATEMENTS = "SELECT attempt, status, error_kind FROM outbox.attempt_history ORDER BY failed_at"


def attempts(bench: Bench, message_id: Any) -> list[FailedAttempt]:
    """Return what an operator sees of the failed attempts at a message."""
    return bench.sink.operator.message(message_id).attempts


def test_each_attempt_is_kept_with_its_own_error(bench: Bench) -> None:
    """The history has every error, though the inbox row has the last one only; what succeeds at last adds nothing."""
    errors: list[Exception | None] = [ValueError("no such account"), KeyError("iban"), None]

    def handler(message: Message, session: Session) -> None:
        if (error := errors[message.attempt - 1]) is not None:
            raise error
        record(message, session)

    consumer = bench.declare(handler)
    (message_id,) = bench.send(1)
    bench.consume(consumer)
    bench.retry(consumer)
    bench.retry(consumer)
    assert bench.statuses() == [("consumed", 3)]
    first, second = attempts(bench, message_id)
    assert [(each.attempt, each.status, each.group) for each in (first, second)] == [
        (1, "failed", "g"),
        (2, "failed", "g"),
    ]
    assert "ValueError: no such account" in str(first.error)
    assert "KeyError: 'iban'" in str(second.error)
    assert first.error_kind != second.error_kind
    assert first.worker.endswith(f":{os.getpid()}")
    assert first.seconds is not None
    assert first.failed_at < second.failed_at


@pytest.mark.parametrize(("answer", "status"), [(Park("closed"), "parked"), (Skip("test order"), "consumed")])
def test_what_a_handler_sets_aside(bench: Bench, answer: Any, status: str) -> None:
    """What a handler parks or skips is in the history, with its reason."""
    consumer = bench.declare(lambda message, session: answer)
    (message_id,) = bench.send(1)
    bench.consume(consumer)
    (attempt,) = attempts(bench, message_id)
    assert (attempt.status, attempt.error) == (status, answer.reason)


def test_success_writes_no_history(bench: Bench) -> None:
    """What is consumed at the first attempt leaves nothing behind, in a batch neither."""
    consumer = bench.declare(batch=10)
    bench.send(*range(20))
    bench.consume(consumer)
    assert bench.rows(COUNT) == [0]


def test_one_of_a_batch_fails_once(bench: Bench) -> None:
    """A batch that is undone is no attempt of anybody's: the one that failed is found alone, and recorded then."""

    consumer = bench.declare(Ward(3), batch=10)
    ids = bench.send(*range(6))
    bench.consume(consumer)
    assert [len(attempts(bench, message_id)) for message_id in ids] == [0, 0, 0, 1, 0, 0]


def test_history_is_bounded(bench: Bench) -> None:
    """Of an ordered group that retries without an end, the newest attempts are kept."""

    def handler(message: Message, session: Session) -> None:
        raise RuntimeError(f"attempt {message.attempt} " + "x" * 5_000)

    consumer = bench.declare(handler, ordered=True, on_exhausted="block", retry_delays=(3600.0,))
    (message_id,) = bench.send(1)
    for _ in range(MOST_ATTEMPTS + 5):
        bench.consume(consumer)
        bench.age_retries()
    kept = attempts(bench, message_id)
    assert len(kept) == MOST_ATTEMPTS
    assert [each.attempt for each in kept] == list(range(6, MOST_ATTEMPTS + 6))
    assert max(len(each.error or "") for each in kept) <= 2_000


def test_attempts_go_on_after_a_retry(bench: Bench) -> None:
    """An operator's retry of a parked message counts its attempts from 1 again; the history has both rounds."""

    consumer = bench.declare(fail, retry_delays=(3600.0,))
    (message_id,) = bench.send(1)
    bench.consume(consumer)
    bench.retry(consumer)
    bench.sink.operator.retry(message_id, group="g", by="ann")
    bench.retry(consumer)
    found = [(each.attempt, each.status) for each in attempts(bench, message_id)]
    assert found == [(1, "failed"), (2, "parked"), (1, "failed")]


def test_recorded_with_the_failure_or_not_at_all(bench: Bench) -> None:
    """Where the failure can't be recorded, neither is the attempt: both are written in one transaction."""

    consumer = bench.declare(fail)
    bench.send(1)
    bench.run("ALTER TABLE outbox.consumer_message ADD CONSTRAINT no_failure CHECK (status <> 'failed') NOT VALID")
    with pytest.raises(Exception, match="no_failure"):
        bench.consume(consumer)
    assert bench.rows(COUNT) == [0]
    bench.run("ALTER TABLE outbox.consumer_message DROP CONSTRAINT no_failure")


def test_two_workers_fail_at_one_message(bench: Bench) -> None:
    """Two workers that record a failure of the same message at the same time are both in the history."""

    consumer = bench.declare(fail, retry_delays=(0.0,) * 10)
    (message_id,) = bench.send(1)
    bench.consume(consumer)

    def retry() -> None:
        other = bench.declare(fail, retry_delays=(0.0,) * 10, early=True)
        with bench.another() as there:
            for _ in range(3):
                other.retry_once(*there)

    bench.age_retries()
    at_once(retry, retry)
    made = bench.inbox()[message_id].attempts
    assert {each.attempt for each in attempts(bench, message_id)} == set(range(1, made + 1))


def test_old_attempts_are_pruned(bench: Bench) -> None:
    """Attempts go after the retention of records, whatever became of their messages."""

    consumer = bench.declare(fail)
    bench.send(*range(3))
    bench.consume(consumer)
    bench.run("UPDATE outbox.attempt_history SET failed_at = failed_at - interval '91 days' WHERE attempt = 1")
    bench.retry(consumer)
    prune_consumer_once(bench.connection, bench.source, bench.settings, "g", "t")
    assert set(bench.rows("SELECT attempt FROM outbox.attempt_history")) == {2}
