"""Bulk jobs as they are carried out: each item exactly once, whoever dies, competes, fails or cancels meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from uuid import UUID

import pytest
from sqlalchemy import create_engine, text

from outbox.acts.changes import Actor, MessageStatus
from outbox.errors import ActRefused
from outbox.message.model import Counts, Status
from outbox.operator.bulk import run
from outbox.operator.model import BulkJob, InboxFilter, MessageFilter
from tests.kit import wait_until
from tests.operator.acting import ANN, Desk
from tests.operator.test_bulk_jobs_order import PARKED

BOB = Actor("bob", {"via": "cli"})
RETRIED = "SELECT count(*) FROM outbox.consumer_message WHERE status = 'failed'"


def retry(desk: Desk, count: int, **options: object) -> BulkJob:
    """Order the retry of so many dead letters."""
    desk.inbox("parked", count)
    return desk.start("retry", PARKED, **options)


def acted_once(desk: Desk, row: BulkJob, count: int) -> None:
    """See that each item is done, once, with one audit row that came by the bulk job."""
    row = desk.bulk_job(row)
    assert (row.state, row.done, row.pending, row.total) == ("done", count, 0, count)
    assert desk.rows("SELECT DISTINCT attempts FROM outbox.bulk_item") == [1]
    by_target = (
        "SELECT count(*), count(DISTINCT target), count(*) FILTER (WHERE origin ->> 'bulk_job' = :id)"
        " FROM outbox.audit WHERE action = 'retry'"
    )
    assert desk.rows(by_target, id=str(row.id)) == [(count, count, count)]
    assert desk.rows(RETRIED) == [count]


@contextmanager
def poisoned(desk: Desk, *message_ids: UUID) -> Iterator[None]:
    """Have the database refuse any change of the inbox rows of these."""
    refused = ", ".join(f"'{each}'" for each in message_ids)
    desk.run(
        "CREATE OR REPLACE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS"
        f" $$BEGIN IF NEW.message_id IN ({refused}) THEN RAISE 'poison: not this one'; END IF; RETURN NEW; END$$"
    )
    desk.run("CREATE TRIGGER refuse BEFORE UPDATE ON outbox.consumer_message FOR EACH ROW EXECUTE FUNCTION refuse()")
    try:
        yield
    finally:
        desk.run("DROP TRIGGER refuse ON outbox.consumer_message")


def test_thousands_at_once(desk: Desk) -> None:
    """Every item is acted on as by hand: who, why, by which way and as part of what is in its audit row."""
    row = retry(desk, 2500)
    assert desk.work() == Counts(taken=2500, done=2500)
    acted_once(desk, row, 2500)
    done = desk.bulk_job(row)
    assert done.started_at is not None
    assert done.finished_at is not None
    assert desk.items(done)[0].outcome == "is due now, with all its attempts"
    target = f"bank-b/{desk.items(done)[0].message_id}"
    origin = {**ANN.origin, "bulk_job": str(row.id)}
    assert desk.audited(target) == [("ann", "retry", "because", {"was": "parked"}, origin)]


@pytest.mark.parametrize(
    ("action", "state", "after"),
    [("resend", "dispatched", "dispatched"), ("recall", "scheduled", "recalled"),
     ("rollback", "undecided", "rolled_back"), ("commit", "undecided", "committed"),
     ("check", "fenced", "rolled_back"), ("reset", "undecided", "undecided")],
)  # fmt: skip
def test_each_act_of_the_producers_side(desk: Desk, action: str, state: str, after: str) -> None:
    """The same acts as on one message, for many."""
    from tests.operator.test_acts import state_of

    ids = [desk.half(state) for _ in range(3)]
    row = desk.start(action, ids)
    desk.work()
    assert [state_of(desk, each) for each in ids] == [after] * 3
    assert desk.bulk_job(row).done == 3
    assert all(desk.audited(each)[-1][4]["bulk_job"] == str(row.id) for each in ids)


@pytest.mark.parametrize("action", ["park", "discard", "restore"])
def test_each_act_of_the_consumers_side(desk: Desk, action: str) -> None:
    """The same acts as on one message, for many."""
    state = {"park": "failed", "discard": "parked", "restore": "discarded"}[action]
    desk.inbox(state, 3)
    row = desk.start(action, InboxFilter(group="bank-b"))
    desk.work()
    assert (desk.bulk_job(row).state, desk.bulk_job(row).done) == ("done", 3)


def test_partial_success_is_told(desk: Desk) -> None:
    """What changed since is skipped, what the database refuses has failed, each with why; the rest is done."""
    ids = desk.inbox("parked", 250)
    row = desk.start("retry", PARKED)
    desk.run("UPDATE outbox.consumer_message SET discarded_at = now() WHERE message_id = :id", id=ids[3])
    desk.run("DELETE FROM outbox.consumer_message WHERE message_id = :id", id=ids[120])
    with poisoned(desk, ids[7], ids[249]):
        desk.work()
    row = desk.bulk_job(row)
    assert (row.state, row.done, row.skipped, row.failed, row.pending) == ("partly", 246, 2, 2, 0)
    assert [(item.message_id, item.outcome) for item in desk.items(row, "skipped")] == [
        (ids[3], "it is discarded; restore it first"),
        (ids[120], "this group's inbox has no row of it; it comes by itself when the group has come so far; if it was"
                   " left out, send it again"),
    ]  # fmt: skip
    failed = desk.items(row, "failed")
    assert [item.message_id for item in failed] == [ids[7], ids[249]]
    assert all("poison: not this one" in (item.outcome or "") for item in failed)
    assert desk.rows("SELECT count(*) FROM outbox.audit WHERE action = 'retry'") == [246]


def test_what_somebody_holds_is_left_for_later(desk: Desk) -> None:
    """A message in the hands of its consumer doesn't hold up the others, and comes when it is free."""
    ids = desk.inbox("failed", 5)
    row = desk.start("park", InboxFilter(status=(Status.FAILED,)))
    with desk.engine.connect() as consumer:
        consumer.execute(text("SELECT FROM outbox.consumer_message WHERE message_id = :id FOR UPDATE"), {"id": ids[2]})
        desk.work()
        (left,) = desk.items(row, "pending")
        assert (left.message_id, left.attempts) == (ids[2], 1)
        assert "another transaction is working on it" in (left.outcome or "")
        assert desk.bulk_job(row).state == "running"
    desk.work()
    assert desk.bulk_job(row).pending == 1
    desk.run("UPDATE outbox.bulk_item SET next_attempt_at = now()")
    desk.work()
    assert (desk.bulk_job(row).state, desk.bulk_job(row).done) == ("done", 5)


def test_what_nobody_ever_lets_go(desk: Desk) -> None:
    """After enough tries the item has failed: the bulk job comes to an end."""
    (message_id,) = desk.inbox("failed")
    row = desk.start("park", [(message_id, "bank-b")])
    desk.run("UPDATE outbox.bulk_item SET attempts = :most - 1", most=run.MOST)
    with desk.engine.connect() as consumer:
        consumer.execute(text("SELECT FROM outbox.consumer_message FOR UPDATE"))
        desk.work()
    assert "and was so 60 times" in (desk.items(row, "failed")[0].outcome or "")
    assert desk.bulk_job(row).state == "partly"


def test_a_half_that_is_being_decided(desk: Desk) -> None:
    """A lock that isn't given soon is waited for later, and doesn't stop the items beside it."""
    ids = [desk.half("undecided") for _ in range(3)]
    row = desk.start("rollback", ids)
    decide = "INSERT INTO outbox.op_message (half_id, resolution, decided_by) VALUES (:id, 'commit', 'producer')"
    with desk.engine.connect() as producer:
        producer.execute(text(decide), {"id": ids[1]})
        desk.work()
        producer.commit()
    assert [item.state for item in desk.items(row)] == ["done", "pending", "done"]
    desk.run("UPDATE outbox.bulk_item SET next_attempt_at = now()")
    desk.work()
    assert [item.state for item in desk.items(row)] == ["done", "skipped", "done"]
    assert "it is committed and waits for dispatch" in (desk.items(row, "skipped")[0].outcome or "")


def test_two_at_once(desk: Desk) -> None:
    """Runners beside each other share the items; no item is acted on twice."""
    row = retry(desk, 1200)
    with ThreadPoolExecutor(4) as threads:
        shares = list(threads.map(lambda _: desk.work().taken, range(4)))
    assert sum(shares) == 1200
    desk.work()
    acted_once(desk, row, 1200)


def test_small_bulk_jobs_do_not_wait_for_big_ones(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """One pass carries on with each of them, for a while."""
    monkeypatch.setattr(run, "SLICE", 0.0)
    big = retry(desk, 500)
    (message_id,) = desk.inbox("failed")
    small = desk.start("park", [(message_id, "bank-b")])
    monkeypatch.setattr(run, "SLICE", 0.05)
    with desk.engine.connect() as connection:
        run.bulk_once(connection, desk.outbox.settings)
    assert desk.bulk_job(small).done == 1
    assert desk.bulk_job(big).done > 0


# --- rate ----------------------------------------------------------------------------------------------------


def test_never_more_than_the_rate(desk: Desk) -> None:
    """In no second are more items acted on than were ordered, with two runners at it, and none held up in between."""
    row = retry(desk, 60, rate=40.0)

    def keep_running() -> None:
        with desk.engine.connect() as connection:
            while desk.bulk_job(row).pending:
                run.bulk_once(connection, desk.outbox.settings)

    with ThreadPoolExecutor(2) as threads:
        for future in [threads.submit(keep_running) for _ in range(2)]:
            future.result()
    desk.work()
    acted_once(desk, row, 60)
    in_a_second = (
        "SELECT max((SELECT count(*) FROM outbox.bulk_item b"
        " WHERE b.changed_at > a.changed_at - interval '1 s' AND b.changed_at <= a.changed_at))"
        " FROM outbox.bulk_item a"
    )
    assert desk.rows(in_a_second) == [40]


def test_a_rate_below_one(desk: Desk) -> None:
    """One in ten seconds: the first at once, the next only when these are over."""
    row = retry(desk, 3, rate=0.1)
    with desk.engine.connect() as connection:
        for _ in range(5):
            run.bulk_once(connection, desk.outbox.settings)
        assert desk.bulk_job(row).done == 1
        desk.run("UPDATE outbox.bulk_item SET changed_at = changed_at - interval '10 s'")
        for _ in range(5):
            run.bulk_once(connection, desk.outbox.settings)
    assert desk.bulk_job(row).done == 2


def test_no_burst_after_an_outage(desk: Desk) -> None:
    """However long nobody ran it, the rate is that of the last second: a bucket doesn't fill up meanwhile."""
    row = retry(desk, 100, rate=10.0)
    desk.run("UPDATE outbox.bulk_job SET created_at = created_at - interval '1 day', started_at = created_at")
    with desk.engine.connect() as connection:
        run.bulk_once(connection, desk.outbox.settings)
    assert desk.bulk_job(row).done == 10


# --- cancel --------------------------------------------------------------------------------------------------


def cancel(desk: Desk, row: BulkJob) -> BulkJob:
    """Cancel a bulk job."""
    return desk.operator.cancel(row.id, by=BOB, why="enough")


def test_cancelled_in_the_middle(desk: Desk) -> None:
    """What was done stays done, what is left isn't; it says who, and ends at once."""
    row = retry(desk, 30, rate=10.0)
    with desk.engine.connect() as connection:
        run.bulk_once(connection, desk.outbox.settings)
    row = cancel(desk, row)
    assert (row.state, row.done, row.cancelled, row.pending, row.cancelled_by) == ("cancelled", 10, 20, 0, "bob")
    assert row.finished_at is not None
    assert desk.work() == run.NOTHING
    assert desk.rows(RETRIED) == [10]
    assert desk.audited(row.id)[1:] == [("bob", "bulk", "enough", {"did": "cancel", "cancelled": 20}, {"via": "cli"})]
    for done in (row, retry(desk, 1)):
        desk.work()
        with pytest.raises(ActRefused, match=f"bulk job {done.id} can't be cancelled: it (was cancelled|has finished)"):
            cancel(desk, done)


def test_cancelled_while_it_runs(desk: Desk) -> None:
    """The batch that is being done is finished, everything after it cancelled; all items are accounted for."""
    row = retry(desk, 2000)
    with ThreadPoolExecutor(2) as threads:
        running = [threads.submit(desk.work) for _ in range(2)]
        wait_until(lambda: desk.bulk_job(row).done, "some are done")
        cancel(desk, row)
        taken = sum(future.result().taken for future in running)
    row = desk.bulk_job(row)
    assert (row.done, row.done + row.cancelled) == (taken, 2000)
    assert desk.rows(RETRIED) == [row.done]


def test_a_rollback_that_has_begun_is_seen_through(desk: Desk) -> None:
    """Its consumers are quarantined: whoever carries it out ends it; what hasn't begun is cancelled."""
    row = desk.start("compensate", [desk.half("dispatched") for _ in range(3)])
    assert desk.work() == run.NOTHING
    assert desk.bulk_job(row).state == "waiting"
    desk.run("UPDATE outbox.bulk_item SET attempts = 1 WHERE number = 2")
    assert desk.bulk_job(row).state == "running"
    row = cancel(desk, row)
    assert [item.state for item in desk.items(row)] == ["cancelled", "pending", "cancelled"]
    assert (row.state, row.finished_at) == ("cancelled", None)
    desk.run("UPDATE outbox.bulk_item SET state = 'done' WHERE number = 2")
    desk.work()
    assert desk.bulk_job(row).finished_at is not None


# --- crashes -------------------------------------------------------------------------------------------------


def test_a_lost_connection_loses_nothing(desk: Desk) -> None:
    """The pass fails, nothing is half done, and the next one goes on."""
    row = retry(desk, 300)
    other = create_engine(desk.engine.url)
    with other.connect() as connection:
        run.bulk_once(connection, desk.outbox.settings, bulk_job_id=row.id, stopping=_after(1))
        assert desk.bulk_job(row).done == 100
        connection.commit()
        pid = connection.exec_driver_sql("SELECT pg_backend_pid()").scalar()
        connection.commit()
        desk.rows("SELECT pg_terminate_backend(:pid)", pid=pid)
        with pytest.raises(Exception, match=r"terminat|closed|lost"):
            run.bulk_once(connection, desk.outbox.settings, bulk_job_id=row.id)
    other.dispose()
    desk.work()
    acted_once(desk, row, 300)


def _after(batches: int) -> Callable[[], bool]:
    """Return what says after so many batches that it is time to stop."""
    asked = iter([False] * (batches + 1))
    return lambda: next(asked, True)


def test_an_action_of_a_newer_version_is_left_alone(desk: Desk) -> None:
    """A worker that doesn't know it leaves it to those that do, and does the others."""
    row = retry(desk, 2)
    desk.run("UPDATE outbox.bulk_job SET action = 'teleport' WHERE id = :id", id=row.id)
    assert desk.work() == run.NOTHING
    desk.run("UPDATE outbox.bulk_job SET action = 'retry' WHERE id = :id", id=row.id)
    assert desk.work().done == 2


def test_messages_of_a_filter_are_sent_again(desk: Desk) -> None:
    """By a filter over messages, too: what the preview said is what is sent, once more each."""
    ids = [desk.half("dispatched") for _ in range(4)]
    row = desk.start("resend", MessageFilter(status=(MessageStatus.DISPATCHED,), topic="transfers"))
    desk.work()
    sends = "SELECT half_id, count(*) FROM outbox.message GROUP BY 1 ORDER BY 1"
    assert desk.rows(sends) == [(each, 2) for each in sorted(ids)]
    assert desk.bulk_job(row).done == 4
