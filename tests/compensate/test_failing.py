"""Compensations that fail, and compensations that have to wait: what is undone, what stands, and when it goes on."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from outbox import Message, Retry
from outbox.database.engines import EngineRunner
from tests.compensate.support import GIVE, Town, give_back, settle


def give_back_and_fail(message: Message, session: Session) -> None:
    """Undo it, and then fail."""
    give_back(message, session)
    session.flush()
    raise RuntimeError("bank A is closed")


def due_in(town: Town) -> float:
    """Return the seconds until the only item is due, rounded to a multiple of ten."""
    sql = "SELECT extract(epoch FROM next_attempt_at - changed_at)::float8 FROM outbox.bulk_item"
    return round(float(town.at_a.rows(sql)[0]), -1)


def test_tried_five_times(town: Town, caplog: pytest.LogCaptureFixture) -> None:
    """Its change is undone each time, waits double, the quarantines stand; then it is given up until ordered anew."""
    caplog.set_level(logging.INFO, "outbox.compensate")
    town.compensate_by(give_back_and_fail)
    half_id = town.parked()
    bulk_job_id = town.order(half_id)
    waits = []
    for attempt in range(1, 5):
        counts = town.work()
        assert (counts.taken, counts.failed, counts.parked) == (1, 1, 0)
        said = f"failed: RuntimeError: bank A is closed (attempt {attempt} of 5)"
        assert town.item(bulk_job_id) == ("pending", said)
        assert (town.balance, town.refunds(half_id)) == (900, 0)
        assert town.at_a.rows("SELECT count(*) FROM outbox.compensation") == [0]
        waits.append(due_in(town))
        assert not town.work()
        town.age()
    assert waits == [30, 60, 120, 240]
    counts = town.work()
    assert (counts.taken, counts.failed, counts.parked) == (1, 0, 1)
    assert town.item(bulk_job_id) == ("failed", "failed 5 times, at last: RuntimeError: bank A is closed")
    assert town.at_a.rows("SELECT finished_at IS NOT NULL FROM outbox.bulk_job") == [True]
    levels = [entry.levelname for entry in caplog.records if entry.name == "outbox.compensate"]
    assert levels == ["ERROR"] * 5
    settle(town, town.declare())
    assert town.status(half_id) == {"g": "quarantined"}
    town.compensate_by()
    assert town.roll_back(half_id) == "done"
    assert (town.balance, town.refunds(half_id), town.effects(half_id)) == (1000, 1, 0)


def _rolls_back(message: Message, session: Session) -> None:
    session.execute(GIVE, {"amount": 1})
    session.rollback()


class _Late:
    """A plain function as far as anybody can see, that returns a coroutine."""

    def __call__(self, message: Message, session: Session) -> Any:  # noqa: ARG002
        return self._later()

    async def _later(self) -> None:
        """Never awaited."""


def _defers(message: Message, session: Session) -> None:
    session.execute(text("INSERT INTO deferred VALUES (1), (1)"))


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (_rolls_back, "the compensation rolled its session back; let it raise instead"),
        (_Late(), "returned a coroutine: declare it with 'async def'"),
        (lambda message, session: Retry(), "which only handlers may; let it raise to be tried again"),
        (_defers, "duplicate key value violates unique constraint"),
        (lambda message, session: session.execute(text("SELECT 1/0")), "division by zero"),
        (lambda message, session: message.body["missing"], "KeyError: 'missing'"),
    ],
    ids=["rollback", "coroutine", "Retry", "at commit", "SQL", "body"],
)
def test_what_counts_as_a_failure(village: Town, function: Any, said: str) -> None:
    """All that can't have been meant as a success is a failure, and leaves nothing behind."""
    village.at_a.run("CREATE TABLE IF NOT EXISTS deferred (n int UNIQUE DEFERRABLE INITIALLY DEFERRED)")
    village.compensate_by(function)
    half_id = village.transfer()
    bulk_job_id = village.order(half_id)
    assert village.work().failed == 1
    assert said in village.said(bulk_job_id)
    assert village.balance == 900
    assert village.at_a.rows("SELECT count(*) FROM outbox.compensation") == [0]


def test_connection_is_lost(village: Town) -> None:
    """A compensation that loses its connection is undone, and counts as tried."""

    def cut(message: Message, session: Session) -> None:
        give_back(message, session)
        session.execute(text("SELECT pg_terminate_backend(pg_backend_pid())"))

    village.compensate_by(cut)
    half_id = village.transfer()
    bulk_job_id = village.order(half_id)
    assert village.work().failed == 1
    assert village.said(bulk_job_id).startswith("failed: ")
    assert village.said(bulk_job_id).endswith("(attempt 1 of 5)")
    assert village.balance == 900
    village.compensate_by()
    village.age()
    assert village.work().done == 1
    assert village.balance == 1000


def test_worker_dies_each_time(village: Town) -> None:
    """One that is begun again and again without an end is given up."""
    half_id = village.transfer()
    bulk_job_id = village.order(half_id)
    village.at_a.run("UPDATE outbox.bulk_item SET attempts = 5")
    assert village.work().parked == 1
    assert village.item(bulk_job_id) == ("failed", "failed: the worker died over it each time")


def test_attempts_are_a_setting(village: Town) -> None:
    """Where workers are killed all the time, a compensation is tried more often, and after no longer than a day."""

    def fail(message: Message, session: Session) -> None:
        raise RuntimeError("the vault is locked")

    village.settings = replace(village.settings, compensation_attempts=30_000)
    village.compensate_by(fail)
    bulk_job_id = village.order(village.transfer())
    village.at_a.run("UPDATE outbox.bulk_item SET attempts = 20000")
    assert village.work().failed == 1
    assert village.said(bulk_job_id).endswith("(attempt 20001 of 30000)")
    waits = "SELECT next_attempt_at - changed_at BETWEEN '86399 s' AND '86401 s' FROM outbox.bulk_item"
    assert village.at_a.rows(waits) == [True]


def test_database_of_a_consumer_is_down(town: Town) -> None:
    """A compensation waits for a consumer's database that can't be reached, says so, and is charged no attempt."""
    half_id = town.parked()
    town.compensate_by(give_back, "postgresql://ada:secret@127.0.0.1:1/nowhere")
    bulk_job_id = town.order(half_id)
    for _ in range(7):
        assert town.work().failed == 1
        state, said = town.item(bulk_job_id)
        assert state == "pending"
        assert said is not None
        assert said.startswith("waits: database 127.0.0.1:1/nowhere: ")
        assert "secret" not in said
        assert due_in(town) == 30
        town.age()
    assert town.status(half_id) == {"g": "parked"}
    assert town.at_a.rows("SELECT attempts FROM outbox.bulk_item") == [1]
    town.compensate_by()
    assert town.work().done == 1


def test_database_without_tables(town: Town, server: Any) -> None:
    """So it does for a database that nobody has migrated, and names the mend."""
    server.create_database("bare")
    town.compensate_by(give_back, server.url("bare"))
    half_id = town.parked()
    bulk_job_id = town.order(half_id)
    assert town.work().failed == 1
    assert "run: outbox db upgrade" in town.said(bulk_job_id)
    server.drop_database("bare")


def test_one_that_waits_holds_up_nobody(town: Town) -> None:
    """A database that can't be reached is asked once in a pass, and items that don't need it go on."""
    waiting = [town.transfer() for _ in range(3)]
    with town.producer.begin() as connection:
        other = town.app.send(connection, "other", {"amount": 1})
    town.compensate_by(give_back, "postgresql://127.0.0.1:1/nowhere")
    mine = town.compensations
    town.compensate_by(topic="other")
    town.compensations |= mine
    for half_id in (*waiting, other):
        town.order(half_id)
    counts = town.work()
    assert (counts.failed, counts.done) == (3, 1)


def test_worker_that_stops(town: Town) -> None:
    """A worker that is to stop begins nothing more, and gives back what it couldn't begin."""
    ids = [town.transfer() for _ in range(2)]
    bulk_jobs = [town.order(half_id) for half_id in ids]
    stopping = iter([False, True])
    counts = town.work(stopping=lambda: next(stopping))
    assert (counts.done, counts.more) == (1, True)
    assert town.item(bulk_jobs[1]) == ("pending", None)
    assert town.work(lambda is_async: _Closed(town.producer)).failed == 1
    assert town.item(bulk_jobs[1]) == ("pending", "waits: the worker was stopped")
    assert town.work().done == 1


class _Closed(EngineRunner):
    """A room that lets nobody in any more."""

    def run(self, act: Any) -> Any:  # noqa: ARG002
        return None


def test_no_connection_for_the_compensation(town: Town) -> None:
    """A room that can't be opened costs no attempt."""
    half_id = town.transfer()
    bulk_job_id = town.order(half_id)

    class Locked(EngineRunner):
        def run(self, act: Any) -> Any:  # noqa: ARG002
            raise OSError("too many clients")

    assert town.work(lambda is_async: Locked(town.producer)).failed == 1
    assert town.item(bulk_job_id) == ("pending", "waits: OSError: too many clients")
    town.age()
    assert town.work().done == 1


def test_cancelled_between_two_tries(town: Town) -> None:
    """A compensation that keeps failing can be cancelled: its message goes its way again, at once."""
    town.compensate_by(give_back_and_fail)
    half_id = town.transfer()
    consumer = town.declare()
    bulk_job_id = town.order(half_id)
    town.work()
    town.cancel(bulk_job_id)
    assert town.work().taken == 1
    assert town.item(bulk_job_id) == ("cancelled", "refused: cancelled by bob")
    settle(town, consumer)
    assert town.effects(half_id) == 1


def test_pruned_before_its_turn(town: Town) -> None:
    """A message that was pruned before its compensation came to it is refused."""
    half_id = town.transfer()
    bulk_job_id = town.order(half_id)
    for table, column in (("message", "half_id"), ("op_message", "half_id"), ("half_message", "id")):
        town.at_a.run(f"DELETE FROM outbox.{table} WHERE {column} = :id", id=half_id)
    town.work()
    assert town.item(bulk_job_id)[0] == "skipped"
    assert "no half message has this id" in town.said(bulk_job_id)


def test_compensated_by_the_application_meanwhile(town: Town) -> None:
    """A message that the application compensates by itself while it is rolled back keeps its quarantine."""
    half_id = town.parked()
    bulk_job_id = town.order(half_id)

    def compensate(is_async: bool) -> EngineRunner:
        town.at_a.run(
            "INSERT INTO outbox.compensation (half_id, function, requested_by, reason) VALUES (:id, 'f', 'me', 'x')",
            id=half_id,
        )
        return EngineRunner(town.producer)

    assert town.work(compensate).failed == 1
    assert town.item(bulk_job_id) == ("pending", "waits: it was compensated")
    town.work()
    assert town.item(bulk_job_id)[0] == "skipped"
    assert "compensated already" in town.said(bulk_job_id)
    assert town.status(half_id) == {"g": "quarantined"}
    assert town.refunds(half_id) == 0
