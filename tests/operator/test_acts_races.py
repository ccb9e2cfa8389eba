"""Acts beside other transactions: the loser waits and is refused, and what isn't recorded isn't done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from uuid import UUID

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from outbox.acts.changes import Target
from outbox.acts.messages import ACTS
from outbox.embedded import ServerLike
from outbox.errors import ActRefused, InvalidRequest
from tests.kit import wait_until
from tests.operator.acting import Desk, open_desk
from tests.operator.test_acts import state_of

WAITING = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"


@pytest.fixture(scope="module")
def desk(server: ServerLike, template: str) -> Iterator[Desk]:
    """A desk over one database that is the producer's and the consumer's."""
    with open_desk(server, template, "bank") as opened:
        yield opened


@contextmanager
def rival(desk: Desk, sql: str, **values: object) -> Iterator[Callable[[], None]]:
    """Hold a statement of somebody else's open; gives what commits it."""
    with desk.engine.connect() as connection:
        connection.execute(text(sql), values)
        yield connection.commit


@contextmanager
def acting(desk: Desk, action: str, message_id: UUID, group: str | None = None) -> Iterator[Future[str]]:
    """Do it in another thread, and wait until it waits for a lock."""
    with ThreadPoolExecutor(1) as threads:
        future = threads.submit(desk.act, action, message_id, group)
        wait_until(lambda: desk.rows(WAITING)[0], "the act waits for the lock")
        yield future


@pytest.mark.parametrize(
    ("action", "state"),
    [("retry", "parked"), ("discard", "parked"), ("resend", "dispatched"), ("recall", "scheduled"),
     ("check", "undecided"), ("reset", "undecided"), ("rollback", "undecided")],
)  # fmt: skip
def test_without_its_audit_row_nothing_is_done(desk: Desk, action: str, state: str) -> None:
    """The act and its record are one transaction: what breaks the second undoes the first."""
    group = "bank-b" if ACTS[action].part == "consumer" else None
    message_id = desk.inbox(state)[0] if group else desk.half(state)
    before = desk.inbox_row(message_id) if group else state_of(desk, message_id)
    sends = "SELECT count(*) FROM outbox.message WHERE half_id = :id"
    asked = "SELECT next_check_at FROM outbox.half_check WHERE half_id = :id"
    was = desk.rows(sends, id=message_id), desk.rows(asked, id=message_id)
    desk.run("ALTER TABLE outbox.audit ADD CONSTRAINT full_disk CHECK (id < 0) NOT VALID")
    try:
        with pytest.raises(DBAPIError, match="full_disk"):
            desk.act(action, message_id, group)
    finally:
        desk.run("ALTER TABLE outbox.audit DROP CONSTRAINT full_disk")
    assert (desk.inbox_row(message_id) if group else state_of(desk, message_id)) == before
    assert (desk.rows(sends, id=message_id), desk.rows(asked, id=message_id)) == was
    assert desk.audited(f"{group}/{message_id}" if group else message_id) == []


def test_who_comes_second_waits_and_is_refused(desk: Desk) -> None:
    """Two operators at one dead letter: the second learns what has become of it."""
    (message_id,) = desk.inbox("parked")
    discard = "UPDATE outbox.consumer_message SET discarded_at = clock_timestamp() WHERE message_id = :id"
    with rival(desk, discard, id=message_id) as commit, acting(desk, "retry", message_id, "bank-b") as retrying:
        commit()
        with pytest.raises(ActRefused, match="it is discarded; restore it first"):
            retrying.result(30)
    assert desk.audited(f"bank-b/{message_id}") == []


def test_a_retry_of_what_is_being_consumed(desk: Desk) -> None:
    """The consumer that holds the row comes first: what it has consumed isn't retried."""
    (message_id,) = desk.inbox("failed")
    consumed = "UPDATE outbox.consumer_message SET status = 'consumed', next_attempt_at = NULL WHERE message_id = :id"
    with rival(desk, consumed, id=message_id) as commit, acting(desk, "retry", message_id, "bank-b") as retrying:
        commit()
        with pytest.raises(ActRefused, match="it is consumed"):
            retrying.result(30)


def test_a_decision_that_somebody_else_makes(desk: Desk) -> None:
    """The producer commits while the operator rolls back: one op, and the operator learns that it is committed."""
    half_id = desk.half("undecided")
    decide = "INSERT INTO outbox.op_message (half_id, resolution, decided_by) VALUES (:id, 'commit', 'producer')"
    with rival(desk, decide, id=half_id) as commit, acting(desk, "rollback", half_id) as deciding:
        commit()
        with pytest.raises(ActRefused, match="it is committed and waits for dispatch; nothing is left to decide"):
            deciding.result(30)
    assert desk.rows("SELECT resolution FROM outbox.op_message WHERE half_id = :id", id=half_id) == ["commit"]
    assert desk.audited(half_id) == []


def test_a_recall_that_is_too_late(desk: Desk) -> None:
    """Two recalls at once: one is done, the other told."""
    half_id = desk.half("scheduled")
    with ThreadPoolExecutor(4) as threads:
        futures = [threads.submit(desk.act, "recall", half_id) for _ in range(4)]
    refused = [str(future.exception()) for future in futures if future.exception()]
    assert [future.exception() for future in futures].count(None) == 1
    assert all("it was recalled; there is nothing left to take back" in said for said in refused)
    assert len(desk.audited(half_id)) == 1


def test_who_never_lets_go(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a while the operator is told that somebody has it, rather than left waiting."""
    from outbox.operator import databases

    monkeypatch.setattr(databases, "PATIENCE", 0.2)
    (message_id,) = desk.inbox("failed")
    locked = "UPDATE outbox.consumer_message SET starts = starts + 1 WHERE message_id = :id"
    with (
        rival(desk, locked, id=message_id),
        pytest.raises(ActRefused, match="another transaction has been working on it"),
    ):
        desk.act("park", message_id, "bank-b")
    assert desk.inbox_row(message_id)[0] == "failed"


def test_many_at_one_message(desk: Desk) -> None:
    """Of eight that discard one dead letter at once, one has done it, and it is recorded once."""
    (message_id,) = desk.inbox("parked")
    with ThreadPoolExecutor(8) as threads:
        futures = [threads.submit(desk.act, "discard", message_id, "bank-b") for _ in range(8)]
    assert [type(future.exception()) for future in futures].count(ActRefused) == 7
    assert len(desk.audited(f"bank-b/{message_id}")) == 1


def test_a_message_in_two_databases(server: ServerLike, template: str) -> None:
    """An act goes where the message is; where several have it, the operator has to say which."""
    with open_desk(server, template, "a", "b") as desk:
        only, both = desk.inbox("parked", 2, database="b")
        desk.inbox("parked", ids=[both], database="a")
        desk.act("retry", only, "bank-b")
        with pytest.raises(InvalidRequest, match="is in several databases; name one of: a, b") as refused:
            desk.act("retry", both, "bank-b")
        assert refused.value.field == "database"
        desk.act("retry", both, "bank-b", database="b")
        status = "SELECT status FROM outbox.consumer_message WHERE message_id = :id"
        assert desk.rows(status, id=both, database="a") == ["parked"]
        assert desk.rows(status, id=both, database="b") == ["failed"]
        assert desk.rows("SELECT target FROM outbox.audit ORDER BY id", database="b") == [
            f"bank-b/{only}", f"bank-b/{both}",
        ]  # fmt: skip
        with pytest.raises(ActRefused, match="this group's inbox has no row of it"):
            desk.act("retry", only, "bank-b", database="a")


def test_the_sentence_names_the_message() -> None:
    """What is shown to the operator says which message, and of which group."""
    message_id = UUID(int=7)
    assert str(Target(message_id)) == f"message {message_id}"
    assert str(Target(message_id, "bank-b")) == f"message {message_id} of group bank-b"
