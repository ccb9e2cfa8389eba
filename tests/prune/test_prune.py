"""Prune deletes what is old and settled, and nothing that somebody could still need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Connection, Engine, text

from outbox import Outbox, Settings
from outbox.consumer.consumer import Consumer
from outbox.consumer.outside.consumer import consumer_of
from outbox.dispatch.dispatch_pass import dispatch_once
from outbox.errors import ActRefused, NotFound
from outbox.prune.prune_pass import prune_consumer_once, prune_producer_once
from tests.dispatch.support import act
from tests.kit import wait_until

OLD = "200 hours"


@pytest.fixture
def app(engine: Engine, settings: Settings) -> Outbox:
    """An outbox with a group that consumes everything of topic `t` without an effect."""
    outbox = Outbox(engine, settings=settings)
    outbox.consumer("t", group="g", batch=10)(lambda message, session: None)
    return outbox


def send(app: Outbox, count: int, **options: Any) -> list[UUID]:
    """Send so many messages over four keys in one transaction."""
    with app.engine.begin() as connection:  # type: ignore[union-attr]
        return [app.send(connection, "t", {"n": n}, key=str(n % 4), **options) for n in range(count)]


def dispatch(connection: Connection, settings: Settings) -> None:
    """Dispatch all there is."""
    while dispatch_once(connection, settings).more:
        pass


def age(connection: Connection, table: str, column: str) -> None:
    """Make all rows of a table older than any retention."""
    with connection.begin():
        connection.execute(text(f"UPDATE outbox.{table} SET {column} = {column} - interval '{OLD}'"))


def age_producer(connection: Connection) -> None:
    """Make everything on the producer's side old."""
    age(connection, "op_message", "decided_at")
    age(connection, "message", "visible_at")


def count(connection: Connection, table: str) -> int:
    """Count the rows of a table."""
    with connection.begin():
        return int(connection.execute(text(f"SELECT count(*) FROM outbox.{table}")).scalar_one())


def test_nothing_young_is_pruned(app: Outbox, engine: Engine, settings: Settings) -> None:
    """What is younger than the retention stays, settled or not."""
    send(app, 20)
    with engine.connect() as connection:
        dispatch(connection, settings)
        assert prune_producer_once(connection, settings).done == 0
        assert count(connection, "message") == 20


def test_old_settled_halves_go_with_ops_and_messages(app: Outbox, engine: Engine, settings: Settings) -> None:
    """Half, op and message of an old message go together; the newest of each queue stays to count positions from."""
    send(app, 40)
    with engine.connect() as connection:
        dispatch(connection, settings)
        age_producer(connection)
        assert prune_producer_once(connection, settings).done == 36
        assert {count(connection, table) for table in ("half_message", "op_message", "message")} == {4}


def test_positions_go_on_after_everything_was_pruned(app: Outbox, engine: Engine, settings: Settings) -> None:
    """A message sent after a prune gets the position after the last one ever used."""
    send(app, 40)
    with engine.connect() as connection:
        dispatch(connection, settings)
        age_producer(connection)
        prune_producer_once(connection, settings)
        send(app, 4)
        dispatch(connection, settings)
        with connection.begin():
            rows = connection.execute(text("SELECT max(position), count(*) FROM outbox.message GROUP BY queue")).all()
    assert sorted(rows) == [(11, 2)] * 4


@pytest.mark.parametrize("case", ["undecided", "undispatched", "scheduled"])
def test_what_is_unsettled_stays_however_old(case: str, app: Outbox, engine: Engine, settings: Settings) -> None:
    """An undecided half, an op that was never dispatched and a message that waits for its time are never pruned."""
    with engine.begin() as connection:
        if case == "undecided":
            app.prepare(connection, "t", "body")
        else:
            app.send(connection, "t", "body", delay=10**9 if case == "scheduled" else None)
    with engine.connect() as connection:
        if case == "scheduled":
            dispatch(connection, settings)
        age_producer(connection)
        assert prune_producer_once(connection, settings).done == 0
        assert count(connection, "half_message") == 1


def test_rolled_back_and_recalled_halves_go(app: Outbox, engine: Engine, settings: Settings) -> None:
    """A half that will never be a message is settled by that."""
    with engine.begin() as connection:
        undone = app.prepare(connection, "t", "body")
        recalled = app.send(connection, "t", "body", delay=3600)
    app.rollback(undone)
    app.operator.recall(recalled, by="test", why="test")
    with engine.connect() as connection:
        with connection.begin():
            connection.execute(text("INSERT INTO outbox.half_error SELECT id, 'Error', 'no' FROM outbox.half_message"))
        dispatch(connection, settings)
        age_producer(connection)
        assert prune_producer_once(connection, settings).done == 2
        assert count(connection, "scheduled_message") == count(connection, "half_error") == 0


def test_what_cannot_go_never_hides_what_can(app: Outbox, engine: Engine) -> None:
    """More unsettled old halves than a batch holds don't keep the pass from what comes after them."""
    settings = Settings(prune_batch=5)
    send(app, 12, delay=10**9)
    send(app, 12)
    with engine.connect() as connection:
        dispatch(connection, settings)
        age_producer(connection)
        assert prune_producer_once(connection, settings).done == 8
        assert count(connection, "scheduled_message") == 12


def test_a_resend_and_a_prune_of_one_message_exclude_each_other(
    app: Outbox, engine: Engine, settings: Settings
) -> None:
    """While a resend is under way its half is not pruned, so that no message is left without its half."""
    ids = send(app, 8)
    with engine.connect() as connection, engine.connect() as other:
        dispatch(connection, settings)
        age_producer(connection)
        with other.begin():
            assert act(other, settings, "resend", ids[0]) == 1
            prune_producer_once(connection, settings)
        with connection.begin():
            orphans = connection.execute(
                text(
                    "SELECT count(*) FROM outbox.message m LEFT JOIN outbox.half_message h ON h.id = m.half_id "
                    "WHERE h.id IS NULL"
                )
            ).scalar_one()
            sends = connection.execute(
                text("SELECT max(send_number) FROM outbox.message WHERE half_id = :id"), {"id": ids[0]}
            ).scalar_one()
    assert (orphans, sends) == (0, 2)


def test_what_was_sent_again_lately_stays(app: Outbox, engine: Engine, settings: Settings) -> None:
    """Also where a newer message follows it: a group may be behind, and has yet to come to the last send."""
    first, _ = send(app, 1)[0], send(app, 1)
    with engine.connect() as connection:
        dispatch(connection, settings)
        age_producer(connection)
        app.operator.resend(first, by="test", why="lost")
        send(app, 1)
        dispatch(connection, settings)
        assert prune_producer_once(connection, settings).done == 1
        with connection.begin():
            left = connection.execute(text("SELECT half_id FROM outbox.message ORDER BY position")).scalars().all()
    assert left.count(first) == 2


def test_a_resend_that_comes_after_the_prune_sends_nothing(app: Outbox, engine: Engine, settings: Settings) -> None:
    """A resend that waited for the prune of its half finds it gone, and appends no message without a half."""
    import threading

    ids = send(app, 8)
    refused: list[ActRefused | NotFound] = []
    with engine.connect() as connection, engine.connect() as prune:
        dispatch(connection, settings)
        age_producer(connection)
        with prune.begin() as transaction:
            prune.execute(text("SELECT FROM outbox.op_message WHERE half_id = :id FOR UPDATE"), {"id": ids[0]})

            def resend() -> None:
                try:
                    app.operator.resend(ids[0], by="test", why="late")
                except (ActRefused, NotFound) as error:
                    refused.append(error)

            thread = threading.Thread(target=resend)
            thread.start()
            wait_until(lambda: _waiting(connection), "the resend waits for the row that the prune has locked")
            for table, column in (("message", "half_id"), ("op_message", "half_id"), ("half_message", "id")):
                prune.execute(text(f"DELETE FROM outbox.{table} WHERE {column} = :id"), {"id": ids[0]})
            transaction.commit()
        thread.join()
    assert len(refused) == 1


def _waiting(connection: Connection) -> bool:
    with connection.begin():
        return bool(connection.execute(text("SELECT count(*) FROM pg_locks WHERE NOT granted")).scalar_one())


def test_replaced_cursors_go_and_dispatch_goes_on(app: Outbox, engine: Engine, settings: Settings) -> None:
    """Only the newest cursor is kept, and dispatch continues from it."""
    with engine.connect() as connection:
        for _ in range(5):
            send(app, 1)
            dispatch(connection, settings)
        prune_producer_once(connection, settings)
        assert count(connection, "dispatch_cursor") == 1
        send(app, 1)
        dispatch(connection, settings)
        assert count(connection, "message") == 6


def test_an_inbox_row_outlives_its_message(
    app: Outbox, new_engine: Callable[..., Engine], engine: Engine, settings: Settings
) -> None:
    """An old inbox row stays while the producer, in another database, could still send its message again."""
    send(app, 40)
    inbox = new_engine()
    consumer = Consumer(app.subscriptions["t", "g"], settings)
    with engine.connect() as source, inbox.connect() as connection:
        dispatch(source, settings)
        consumer.start(connection, source)
        assert consumer.consume_once(connection, source).done == 40
        age(connection, "consumer_message", "changed_at")
        assert prune_consumer_once(connection, source, settings, "g", "t").done == 0
        age_producer(source)
        prune_producer_once(source, settings)
        assert prune_consumer_once(connection, source, settings, "g", "t").done == 36
        assert count(connection, "consumer_message") == 4


@pytest.mark.parametrize("status", ["failed", "parked"])
def test_unfinished_inbox_rows_stay(status: str, app: Outbox, engine: Engine, settings: Settings) -> None:
    """A failed or parked message waits for its retry or its human, whatever its age."""
    with engine.connect() as connection:
        with connection.begin():
            connection.execute(
                text(
                    "INSERT INTO outbox.consumer_message (consumer_group, message_id, topic, queue, position, status, "
                    "attempts, next_attempt_at, changed_at) VALUES ('g', gen_random_uuid(), 't', 0, 1, :status, 1, "
                    "CASE WHEN :status = 'failed' THEN now() END, now() - interval '1 year')"
                ),
                {"status": status},
            )
        assert prune_consumer_once(connection, connection, settings, "g", "t").done == 0
        assert count(connection, "consumer_message") == 1


def test_replaced_offsets_go_and_the_group_goes_on(app: Outbox, engine: Engine, settings: Settings) -> None:
    """Only the newest offset of each queue is kept, and nothing is consumed again."""
    consumer = Consumer(app.subscriptions["t", "g"], settings)
    with engine.connect() as connection:
        for _ in range(5):
            send(app, 4)
            dispatch(connection, settings)
            consumer.start(connection, connection)
            consumer.consume_once(connection, connection)
        prune_consumer_once(connection, connection, settings, "g", "t")
        with connection.begin():
            rows = connection.execute(text("SELECT count(*), count(DISTINCT queue) FROM outbox.consumer_offset")).one()
        assert rows[0] == rows[1] > 0
        assert Consumer(app.subscriptions["t", "g"], settings).consume_once(connection, connection).done == 0


def test_replaced_leases_go(app: Outbox, engine: Engine, settings: Settings) -> None:
    """Only the newest lease of each queue is kept, also of one that was given up: its term goes on."""
    app.consumer("t", group="outside", transactional=False)(lambda _: None)
    consumer = consumer_of(app.subscriptions["t", "outside"], settings)
    with engine.connect() as connection:
        for _ in range(3):
            send(app, 4)
            dispatch(connection, settings)
            consumer.start(connection, connection)
            consumer.consume_once(connection, connection)
        assert count(connection, "consumer_lease") > 8
        prune_consumer_once(connection, connection, settings, "outside", "t")
        with connection.begin():
            leases = text("SELECT count(*), count(DISTINCT queue), count(worker), min(term) FROM outbox.consumer_lease")
            kept, queues, taken, term = connection.execute(leases).one()
    assert (kept, taken) == (queues, 0)
    assert term > 1


RUN = """
INSERT INTO outbox.reconciliation_run (id, job_id, topic, consumer_group, started_at, schedule)
VALUES (:id, :id, 't', :group, clock_timestamp() - make_interval(days => :age), :schedule)
"""
FINDING = "INSERT INTO outbox.reconciliation_finding (run_id, message_id, kind) VALUES (:id, :id, 'missing')"


def test_old_records_of_reconciliations_go(engine: Engine) -> None:
    """Runs and findings go after ``record_retention``; the newest run of each schedule says when the next is due."""
    old, older, nightly, young, another = (UUID(int=n) for n in range(1, 6))
    runs = [
        {"id": older, "group": "g", "age": 300, "schedule": None},
        {"id": old, "group": "g", "age": 200, "schedule": None},
        {"id": nightly, "group": "g", "age": 100, "schedule": "nightly"},
        {"id": young, "group": "g", "age": 10, "schedule": None},
        {"id": another, "group": "other", "age": 300, "schedule": None},
    ]
    with engine.begin() as connection:
        connection.execute(text(RUN), runs)
        connection.execute(text(FINDING), [{"id": each["id"]} for each in runs for _ in range(7)])
    with engine.connect() as connection:
        counts = prune_consumer_once(connection, connection, Settings(prune_batch=3), "g", "t")
        assert counts.taken == 3 * 7 + 2
        with connection.begin():
            left = connection.execute(text("SELECT id FROM outbox.reconciliation_run ORDER BY id")).scalars().all()
            findings = connection.execute(text("SELECT DISTINCT run_id FROM outbox.reconciliation_finding ORDER BY 1"))
            assert (left, findings.scalars().all()) == ([nightly, young, another], [young, another])


def send_once(app: Outbox, orders: range) -> list[UUID]:
    """Send a message of each order, once."""
    with app.engine.begin() as connection:  # type: ignore[union-attr]
        return [app.send(connection, "t", {"n": n}, key="k", dedupe=f"order-{n}") for n in orders]


def test_what_was_sent_once_can_be_sent_again_when_it_is_pruned(app: Outbox, engine: Engine) -> None:
    """A business string is taken for as long as its message is kept, whatever ids between are young."""
    settings, old, young = Settings(prune_batch=10), range(60), range(60, 120)
    first = [*send_once(app, range(20)), *send_once(app, range(20, 60))]
    with engine.connect() as connection:
        dispatch(connection, settings)
        age_producer(connection)
        send_once(app, young)
        dispatch(connection, settings)
        assert send_once(app, old) == first
        dispatch(connection, settings)
        assert count(connection, "message") == 120
        assert prune_producer_once(connection, settings).done == 60
        assert send_once(app, old) == first
        dispatch(connection, settings)
        assert count(connection, "message") == 120


def test_business_strings_that_cannot_go_hide_none_that_can(app: Outbox, engine: Engine) -> None:
    """More unsettled old halves, and parked rows, than a batch holds don't keep the passes from what comes after."""
    settings = Settings(prune_batch=5)
    with engine.begin() as connection:
        for n in range(12):
            app.send(connection, "t", {"n": n}, dedupe=f"waits-{n}", delay=10**9)
    parked = send_once(app, range(12))
    send_once(app, range(12, 33))
    consumer = Consumer(app.subscriptions["t", "g"], settings)
    with engine.connect() as connection:
        dispatch(connection, settings)
        consumer.start(connection, connection)
        assert consumer.consume_once(connection, connection).done == 33
        with connection.begin():
            park = text("UPDATE outbox.consumer_message SET status = 'parked' WHERE message_id = ANY (:ids)")
            connection.execute(park, {"ids": parked})
        age(connection, "consumer_message", "changed_at")
        age_producer(connection)
        # The newest message of the queue stays.
        assert prune_producer_once(connection, settings).done == 32
        assert prune_consumer_once(connection, connection, settings, "g", "t").done == 20
        assert (count(connection, "scheduled_message"), count(connection, "consumer_message")) == (12, 13)
