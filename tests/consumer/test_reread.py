"""Read again: a group that an operator has moved handles once more what it had, and knows what was before."""

from __future__ import annotations

import datetime as dt
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy.orm import Session

from outbox import Message
from outbox.database.sql import GroupQueue
from outbox.errors import ActRefused, InvalidHandler, InvalidRequest, MessagesPruned, NotFound
from outbox.operator import databases
from outbox.operator.operator import Operator
from outbox.prune.prune_pass import prune_consumer_once
from outbox.reconcile.job import Access, Effect, Job, Outcome, Pair, Window
from tests.kit import wait_until
from tests.kit.bench import Bench, Ward, record

WHY = "the handler was wrong"
EARLIER = "SELECT message_id, passage, status FROM outbox.reread_message ORDER BY message_id, passage"
PAIR = Pair("t", "g")
PASSAGES = "SELECT passage, count(*) FROM outbox.consumer_message GROUP BY 1 ORDER BY 1"


def operator(bench: Bench) -> Operator:
    """Return an operator over the databases of a bench."""
    if bench.producer is bench.consumer:
        return Operator.open({"both": bench.consumer}, bench.settings)
    return Operator.open({"producer": bench.producer, "consumer": bench.consumer}, bench.settings)


def reset(bench: Bench, to: Any = "first", **options: Any) -> str:
    """Reset the group."""
    return operator(bench).reset_group("g", "t", to, by="ada", why=WHY, **options)


def positions(bench: Bench) -> dict[int, int]:
    """Return how far the group is in each queue in which it has read something."""
    sql = "SELECT queue, max(position) FROM outbox.consumer_offset GROUP BY 1 HAVING max(position) > 0"
    return dict(bench.rows(sql))


@pytest.mark.parametrize("batch", [1, 10])
@pytest.mark.parametrize("ordered", [False, True])
def test_all_of_it_once_more(any_bench: Bench, batch: int, ordered: bool) -> None:
    """Each message once more, in order; what the inbox said before is kept, and the offset is where it was."""
    consumer = any_bench.declare(batch=batch, ordered=ordered)
    ids = any_bench.send(1, 2, 3)
    any_bench.consume(consumer)
    before = positions(any_bench)
    assert "reads up to 3 messages again (passage 1)" in reset(any_bench)
    assert any_bench.statuses() == [("consumed", 1)] * 3
    any_bench.send(4)
    any_bench.consume(consumer)
    assert any_bench.ledger() == ["1", "2", "3", "1", "2", "3", "4"]
    assert [tuple(row) for row in any_bench.rows(EARLIER)] == [(id_, 0, "consumed") for id_ in sorted(ids)]
    assert [tuple(row) for row in any_bench.rows(PASSAGES)] == [(1, 4)]
    assert positions(any_bench) == {queue: position + 1 for queue, position in before.items()}
    assert not any_bench.consume(consumer)
    assert not any_bench.retry(consumer)


def test_again_and_again(bench: Bench) -> None:
    """The second passage of some, the third of others: each keeps what was before it."""
    consumer = bench.declare()
    ids = bench.send(1, 2, 3)
    bench.consume(consumer)
    reset(bench, 2)
    bench.consume(consumer)
    reset(bench)
    bench.consume(bench.declare())
    assert bench.ledger() == ["1", "2", "3", "2", "3", "1", "2", "3"]
    expected = [(ids[0], 0), (ids[1], 0), (ids[1], 1), (ids[2], 0), (ids[2], 1)]
    assert [tuple(row)[:2] for row in bench.rows(EARLIER)] == expected


def test_to_a_time(any_bench: Bench) -> None:
    """From the first message on that became visible then."""
    consumer = any_bench.declare()
    bodies = list(range(20))
    ids = [id_ for body in bodies for id_ in any_bench.send(body, key=f"k{body % 3}")]
    any_bench.consume(consumer)
    monday = dt.datetime(2026, 1, 5, 9, tzinfo=dt.UTC)
    with any_bench.producer.begin() as connection:
        for number, id_ in enumerate(ids):
            at = monday + dt.timedelta(hours=number - 12)
            sql = "UPDATE outbox.message SET visible_at = %s WHERE half_id = %s"
            connection.exec_driver_sql(sql, (at, id_))
    preview = operator(any_bench).preview_reset("g", "t", monday)
    assert (preview.messages, preview.missing) == (8, 0)
    reset(any_bench, monday)
    any_bench.consume(consumer)
    assert sorted(any_bench.ledger()[20:]) == sorted(str(body) for body in range(12, 20))
    with pytest.raises(ActRefused, match="is behind that already, in all queues"):
        reset(any_bench, monday + dt.timedelta(days=30))


def test_what_is_not_handled_again(bench: Bench) -> None:
    """What is quarantined or discarded stays so; what failed or was parked is tried with all attempts."""
    handler = Ward(2, 3, 4)
    consumer = bench.declare(handler, retry_delays=(0.0,))
    _, failed, parked, discarded, quarantined = bench.send(1, 2, 3, 4, 5)
    bench.consume(consumer)
    park = "UPDATE outbox.consumer_message SET status = 'parked', next_attempt_at = NULL"
    bench.run(f"{park} WHERE message_id <> :id AND status = 'failed'", id=failed)
    bench.sink.operator.discard(discarded, group="g", by="ada", why="a test")
    quarantine = "UPDATE outbox.consumer_message SET status = 'quarantined' WHERE message_id = :id"
    bench.run(quarantine, id=quarantined)
    handler.ill.clear()
    reset(bench)
    bench.consume(consumer)
    assert bench.ledger() == ["1", "5", "1", "2", "3"]
    found = {id_: (row.status, row.attempts) for id_, row in bench.inbox().items()}
    assert found[parked] == found[failed] == ("consumed", 1)
    assert found[discarded][0] == "parked"
    assert found[quarantined][0] == "quarantined"


@pytest.mark.parametrize("ordered", [False, True])
def test_fails_when_it_is_read_again(any_bench: Bench, ordered: bool) -> None:
    """It is retried, in place or later, and parked as any other; that it took effect before is still known."""
    handler = Ward()
    consumer = any_bench.declare(handler, retry_delays=(0.0,), ordered=ordered)
    (half_id,) = any_bench.send(1)
    any_bench.consume(consumer)
    handler.ill.add(1)
    reset(any_bench)
    any_bench.consume(consumer)
    if not ordered:
        assert any_bench.statuses() == [("failed", 1)]
        any_bench.retry(consumer)
    assert any_bench.statuses() == [("parked", 2)]
    assert [tuple(row) for row in any_bench.rows(EARLIER)] == [(half_id, 0, "consumed")]


def test_a_retry_counts_for_the_new_passage(bench: Bench) -> None:
    """What a retry has just handled isn't handled again when the group comes to it."""
    handler = Ward(2)
    consumer = bench.declare(handler, retry_delays=(0.0,))
    bench.send(1, 2)
    bench.consume(consumer)
    reset(bench)
    handler.ill.clear()
    bench.retry(consumer)
    bench.consume(consumer)
    assert bench.ledger() == ["1", "2", "1"]


def test_only_sent_again_since(bench: Bench) -> None:
    """A message that was handled before the range, and sent again in it, isn't handled again."""
    consumer = bench.declare()
    first, _ = bench.send(1, 2)
    bench.resend(first)
    bench.consume(consumer)
    reset(bench, 2)
    bench.consume(consumer)
    assert bench.ledger() == ["1", "2", "2"]


def test_reset_while_a_handler_runs(any_bench: Bench) -> None:
    """It waits for the handler's transaction, and what that did is handled again; what was read ahead is dropped."""
    begun, go_on = threading.Event(), threading.Event()

    def slow(message: Message, session: Session) -> None:
        record(message, session)
        session.flush()
        begun.set()
        assert go_on.wait(60)

    any_bench.send(1, 2, 3)
    consumer = any_bench.declare(slow)
    with ThreadPoolExecutor(2) as threads:
        consuming = threads.submit(any_bench.consume, consumer)
        assert begun.wait(60)
        resetting = threads.submit(reset, any_bench, 1)
        wait_until(any_bench.waiting, "the reset waits for the queue")
        go_on.set()
        consuming.result(60)
        try:
            resetting.result(60)
        except ActRefused:  # the worker had the queue again before: it has read nothing, or all of it
            reset(any_bench, 1)
    any_bench.consume(consumer)
    ledger = any_bench.ledger()
    again = any_bench.value("SELECT count(*) FROM outbox.reread_message")
    assert len(ledger) == 3 + again
    assert ledger.count("1") == 2


def test_reset_while_calls_are_in_flight(any_bench: Bench) -> None:
    """Handlers outside of transactions hold no lock: their results count no more, and all is handled again."""
    begun, go_on, handled = threading.Event(), threading.Event(), Counter[int]()

    def call(message: Message) -> None:
        if message.body == 3:
            begun.set()
            assert go_on.wait(60)
        handled[message.body] += 1

    consumer = any_bench.declare(call, transactional=False, concurrency=3, ordered=False)
    any_bench.send(1, 2)
    any_bench.consume(consumer)
    any_bench.send(3)
    with ThreadPoolExecutor(1) as threads:
        consuming = threads.submit(any_bench.consume, consumer)
        assert begun.wait(60)
        assert "reads up to 2 messages again" in reset(any_bench)
        go_on.set()
        consuming.result(60)
    any_bench.consume(consumer)
    assert handled == {1: 2, 2: 2, 3: 2}
    assert [tuple(row) for row in any_bench.rows(PASSAGES)] == [(1, 3)]
    assert any_bench.value("SELECT count(*) FROM outbox.reread_message") == 2
    assert any_bench.statuses() == [("consumed", 1)] * 3


def test_a_queue_that_is_busy(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is done, in no queue."""
    consumer = bench.declare()
    bench.send(1)
    bench.consume(consumer)
    monkeypatch.setattr(databases, "PATIENCE", 0.05)
    before = bench.rows("SELECT * FROM outbox.consumer_offset ORDER BY 1, 2, 3, 4, 5")
    queue = next(iter(positions(bench)))
    with bench.consumer.begin() as connection:
        lock = GroupQueue("outbox", "g", "t", queue).lock
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({lock})")
        with pytest.raises(ActRefused, match="is busy: a session has held a lock of it"):
            reset(bench)
    assert bench.rows("SELECT * FROM outbox.consumer_offset ORDER BY 1, 2, 3, 4, 5") == before
    assert bench.audited("g/t") == []


def test_another_one_has_the_row(bench: Bench) -> None:
    """The worker leaves the queue alone for now, and handles the message later."""
    consumer = bench.declare()
    (half_id,) = bench.send(1)
    bench.consume(consumer)
    reset(bench)
    with bench.consumer.begin() as other:
        other.exec_driver_sql("SELECT FROM outbox.consumer_message WHERE message_id = %s FOR UPDATE", (half_id,))
        assert not bench.consume(consumer).done
    bench.consume(consumer)
    assert bench.ledger() == ["1", "1"]


def test_pruned_meanwhile(any_bench: Bench) -> None:
    """What was pruned is refused; if that is accepted, the group goes on with what is there."""
    consumer = any_bench.declare()
    ids = any_bench.send(1, 2, 3)
    any_bench.consume(consumer)
    with any_bench.producer.begin() as connection:
        connection.exec_driver_sql("DELETE FROM outbox.message WHERE half_id = %s", (ids[0],))
    long_ago = dt.datetime(2020, 1, 1, tzinfo=dt.UTC)
    for to in (1, long_ago):
        with pytest.raises(ActRefused, match="1 message of before were pruned"):
            reset(any_bench, to)
    assert "2 messages" in reset(any_bench, long_ago, skip_pruned=True)
    any_bench.consume(consumer)
    assert any_bench.ledger() == ["1", "2", "3", "2", "3"]


def test_skip(any_bench: Bench) -> None:
    """What lies between is never handled, unless the group is reset to it."""
    consumer = any_bench.declare()
    any_bench.send(1)
    any_bench.consume(consumer)
    any_bench.send(2, 3)
    done = operator(any_bench).skip_group("g", "t", by="ada", why="a load test")
    assert "leaves 2 messages out" in done
    any_bench.send(4)
    any_bench.consume(consumer)
    assert any_bench.ledger() == ["1", "4"]
    reset(any_bench, 3)
    any_bench.consume(consumer)
    assert any_bench.ledger() == ["1", "4", "3", "4"]
    actor, action, *_ = any_bench.audited("g/t")[0]
    assert (actor, action) == ("ada", "skip_group")


def compared(bench: Bench, pair: Pair = PAIR) -> dict[Outcome, int]:
    """Reconcile; return how many messages came to what."""
    producer, consumer = (
        Access(engine.url.render_as_string(hide_password=False), bench.settings)
        for engine in (bench.producer, bench.consumer)
    )
    job = Job(producer, consumer, (pair,), window=Window(grace=0.0))
    pytest.importorskip("pyarrow", reason="the oldest libraries are tried without it")
    from outbox.reconcile.run import reconcile

    return dict(reconcile(job).pairs[0].counts)


def test_reconciled(any_bench: Bench) -> None:
    """What is skipped is left out; what is yet to be read again was consumed; what is read after all is consumed."""
    consumer = any_bench.declare()
    any_bench.send(1, 2)
    any_bench.consume(consumer)
    any_bench.send(3)
    operator(any_bench).skip_group("g", "t", by="ada", why="a load test")
    assert compared(any_bench) == {Outcome.CONSUMED: 2, Outcome.LEFT_OUT: 1}
    reset(any_bench)
    assert compared(any_bench) == {Outcome.CONSUMED: 2, Outcome.UNCONSUMED: 1}
    any_bench.consume(consumer)
    assert compared(any_bench) == {Outcome.CONSUMED: 3}


def test_reconciled_with_effects(bench: Bench) -> None:
    """What took effect, and is parked since it was read again, is parked: the inbox contradicts nothing."""
    bench.send(1)
    handler = Ward()
    consumer = bench.declare(handler, retry_delays=())
    bench.consume(consumer)
    pair = Pair("t", "g", effect=Effect("ledger"))
    assert compared(bench, pair) == {Outcome.CONSUMED: 1}
    handler.ill.add(1)
    reset(bench)
    bench.consume(consumer)
    assert compared(bench, pair) == {Outcome.PARKED: 1}


def test_pruned_with_time(bench: Bench) -> None:
    """What an earlier passage said goes after a while, but for what may yet be compensated: it took effect."""
    consumer = bench.declare(handler := Ward(), retry_delays=())
    consumed, parked = bench.send(1, 2)
    bench.consume(consumer)
    handler.ill.add(2)
    reset(bench)
    bench.consume(consumer)
    with bench.consumer.connect() as connection:
        prune_consumer_once(connection, connection, bench.settings, "g", "t")
        assert len(bench.rows(EARLIER)) == 2
        bench.run("UPDATE outbox.reread_message SET replaced_at = replaced_at - interval '1 year'")
        prune_consumer_once(connection, connection, bench.settings, "g", "t")
    assert [id_ for id_, *_ in bench.rows(EARLIER)] == [parked]
    assert bench.inbox()[consumed].status == "consumed"


def test_delete(any_bench: Bench) -> None:
    """All that makes the group known is gone; a worker that comes back begins anew."""
    consumer = any_bench.declare()
    any_bench.send(1)
    any_bench.consume(consumer)
    reset(any_bench)
    any_bench.consume(consumer)
    seen = operator(any_bench)
    assert [(row.group, row.passages) for row in seen.groups()] == [("g", 1)]
    assert seen.preview_delete("g", "t").inbox == {"consumed": 1}
    assert "with 1 inbox row;" in seen.delete_group("g", "t", by="ada", why="gone")
    for table in ("consumer_message", "consumer_offset", "consumer_start", "consumer_passage", "reread_message"):
        assert any_bench.value(f"SELECT count(*) FROM outbox.{table}") == 0
    assert seen.groups() == []
    with pytest.raises(NotFound):
        seen.delete_group("g", "t", by="ada", why="gone")


@pytest.mark.parametrize("to", [0, True, "monday", dt.datetime(2026, 1, 5), {0: 0}, {-1: 1}, None])  # noqa: DTZ001
def test_what_is_no_start(bench: Bench, to: Any) -> None:
    """It is refused before anything is read."""
    with pytest.raises(InvalidRequest, match="must be 'first' or 'now'"):
        reset(bench, to)
    with pytest.raises(InvalidHandler, match="must be 'first' or 'now'"):
        bench.declare(start=to)


@pytest.mark.parametrize(
    ("start", "expected"),
    [(2, ["2", "3"]), ({}, ["1", "2", "3"]), (dt.datetime(2100, 1, 1, tzinfo=dt.UTC), [])],
)
def test_a_new_group_begins_there(any_bench: Bench, start: Any, expected: list[str]) -> None:
    """At a position, at the first of each queue that isn't named, at a time."""
    any_bench.send(1, 2, 3)
    any_bench.consume(any_bench.declare(start=start))
    assert any_bench.ledger() == expected


def test_a_new_group_whose_messages_were_pruned(bench: Bench) -> None:
    """It doesn't begin, unless the subscription says to go on."""
    ids = bench.send(1, 2)
    with bench.producer.begin() as connection:
        connection.exec_driver_sql("DELETE FROM outbox.message WHERE half_id = %s", (ids[0],))
    start = dt.datetime(2020, 1, 1, tzinfo=dt.UTC)
    with pytest.raises(MessagesPruned, match="1 older messages were pruned"):
        bench.declare(start=start)
    bench.consume(bench.declare(start=start, on_pruned="skip"))
    assert bench.ledger() == ["2"]
