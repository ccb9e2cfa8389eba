"""Leases of queues whose messages are handled outside of transactions: one worker has a queue, others leave it."""

from __future__ import annotations

import multiprocessing
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Connection

from outbox import Message
from outbox.compensate.compensation import Postponed
from outbox.compensate.quarantine import QuarantineOrder, quarantine
from outbox.message.model import Counts, uuid7
from outbox.telemetry.events import CrashFound, LeaseLost
from outbox.telemetry.hooks import TelemetryEvent
from tests.consumer import outside_workers
from tests.consumer.outside_workers import CONCURRENCY, Effects
from tests.consumer.test_reread import EARLIER, PASSAGES, reset
from tests.kit import wait_until
from tests.kit.bench import Bench, fail, record

OUTSIDE: dict[str, Any] = {"transactional": False}


class Gate:
    """A handler that stays in its message until the gate is open."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.begun: list[Any] = []

    def __call__(self, message: Message) -> None:
        """Wait for the gate."""
        self.begun.append(message.body)
        assert self.open.wait(120)


class Running:
    """A pass that runs in a thread, on a connection of its own."""

    def __init__(self, bench: Bench, one_pass: Callable[[Connection, Connection], Counts]) -> None:
        self.counts = Counts()
        self.error: Exception | None = None
        self._bench, self._pass = bench, one_pass
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with self._bench.consumer.connect() as connection:
            try:
                self.counts = self._pass(connection, connection)
            except Exception as error:
                self.error = error

    def join(self) -> Counts:
        """Wait for its end; return what it did."""
        self._thread.join(120)
        assert not self._thread.is_alive()
        return self.counts


@pytest.fixture
def gate() -> Iterator[Gate]:
    """A gate that is open at the end, whatever happens."""
    gate = Gate()
    yield gate
    gate.open.set()


def lapse(bench: Bench) -> None:
    """Let all leases that stand be over."""
    bench.run("UPDATE outbox.consumer_lease SET until = clock_timestamp() - interval '1 s' WHERE worker IS NOT NULL")


def offsets(bench: Bench) -> list[int]:
    """Return the newest offset."""
    return list(bench.rows("SELECT max(position) FROM outbox.consumer_offset"))


def test_a_leased_queue_is_left_alone(bench: Bench, gate: Gate) -> None:
    """Neither a transactional worker nor another one outside of transactions takes a queue that is leased."""
    (id_,) = bench.send("a")
    running = Running(bench, bench.declare(gate, **OUTSIDE).consume_once)
    wait_until(lambda: gate.begun, "the handler runs")
    with bench.consumer.connect() as other:
        assert bench.consume_on(bench.declare(), other, other) == Counts()
        assert bench.consume_on(bench.declare(gate, **OUTSIDE), other, other) == Counts()
    gate.open.set()
    assert running.join().done == 1
    assert bench.inbox()[id_].status == "consumed"
    assert bench.ledger() == []


def test_a_queue_that_was_given_up_is_for_all(bench: Bench, gate: Gate) -> None:
    """After a pass nothing is leased: a transactional worker goes on after the last message."""
    gate.open.set()
    bench.send("a")
    bench.consume(bench.declare(gate, **OUTSIDE))
    bench.send("b")
    bench.consume(bench.declare())
    bench.send("c")
    bench.consume(bench.declare(gate, **OUTSIDE))
    assert (gate.begun, bench.ledger()) == (["a", "c"], ["b"])


def test_an_outside_worker_waits_for_a_transaction(bench: Bench) -> None:
    """While a transactional worker has the queue's lock, nobody leases it."""
    bench.send("a")

    def handle(message: Message, session: Any) -> None:
        with bench.consumer.connect() as other:
            assert bench.consume_on(bench.declare(lambda _: None, early=True, **OUTSIDE), other, other) == Counts()
        record(message, session)

    bench.consume(bench.declare(handle))
    assert bench.ledger() == ["a"]
    assert bench.rows("SELECT * FROM outbox.consumer_lease") == []


def test_retries_of_a_leased_queue_are_its_workers(bench: Bench, gate: Gate) -> None:
    """A transactional worker leaves a failed message alone while another one has leased its queue."""
    retrying = bench.declare(fail)
    bench.send("a")
    bench.consume(retrying)
    bench.send("b")
    running = Running(bench, bench.declare(gate, **OUTSIDE).consume_once)
    wait_until(lambda: gate.begun, "the handler runs")
    bench.age_retries()
    with bench.consumer.connect() as other:
        assert retrying.retry_once(other, other) == Counts()
    gate.open.set()
    running.join()
    with bench.consumer.connect() as other:
        assert retrying.retry_once(other, other).failed == 1


@pytest.mark.parametrize("is_transactional", [False, True])
def test_results_of_an_older_term_are_refused(
    bench: Bench, gate: Gate, heard: list[TelemetryEvent], is_transactional: bool
) -> None:
    """A worker that comes back too late writes nothing: its messages were taken over, and handled twice at worst."""
    bench.send("a", "b")
    running = Running(bench, bench.declare(gate, concurrency=2, ordered=False, **OUTSIDE).consume_once)
    wait_until(lambda: len(gate.begun) == 2, "the handlers run")
    lapse(bench)
    again: list[Any] = []
    taker = bench.declare()
    if not is_transactional:
        taker = bench.declare(lambda message: again.append(message.body), **OUTSIDE)
    assert bench.consume(taker).done == 2
    rows = bench.rows("SELECT message_id, changed_at FROM outbox.consumer_message ORDER BY 1")
    gate.open.set()
    assert running.join() == Counts()
    (lost,) = [event for event in heard if isinstance(event, LeaseLost)]
    assert lost.calls + lost.results == 2
    assert bench.rows("SELECT message_id, changed_at FROM outbox.consumer_message ORDER BY 1") == rows
    assert (bench.ledger() if is_transactional else again) == ["a", "b"]
    assert offsets(bench) == [2]


def test_results_outlive_a_lost_connection(bench: Bench, gate: Gate) -> None:
    """What runs when the connection is lost is written by the next pass; nothing is handled twice."""
    bench.send("a", "b")
    consumer = bench.declare(gate, concurrency=2, ordered=False, **OUTSIDE)
    running = Running(bench, consumer.consume_once)
    wait_until(lambda: len(gate.begun) == 2, "the handlers run")
    bench.connection.close()
    bench.source.close()
    bench.cut()
    bench.consumer.dispose()
    running.join()
    assert running.error is not None
    gate.open.set()
    with bench.consumer.connect() as connection:
        bench.consume_on(consumer, connection, connection)
    assert gate.begun == ["a", "b"]
    assert bench.statuses() == [("consumed", 1)] * 2
    assert offsets(bench) == [2]


def test_leases_are_renewed(bench: Bench, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a handler runs its lease is renewed, by a row of the same term."""
    monkeypatch.setattr("outbox.consumer.outside.leased_queue._RENEW_LEFT", 30.0)
    bench.send("a")
    running = Running(bench, bench.declare(gate, **OUTSIDE).consume_once)
    renewals = "SELECT coalesce(max(renewal), 0) FROM outbox.consumer_lease"
    wait_until(lambda: bench.value(renewals) > 2, "the lease is renewed")
    assert bench.rows("SELECT DISTINCT term FROM outbox.consumer_lease") == [1]
    gate.open.set()
    running.join()


# --- compensation ----------------------------------------------------------------------------------------


def order_of(bench: Bench, id_: UUID) -> QuarantineOrder:
    """Return the order to compensate a message."""
    sends = bench.rows("SELECT queue, position FROM outbox.message WHERE half_id = :id", id=id_)
    return QuarantineOrder(id_, "t", uuid7(), "me", "test", None, tuple(sends))


@pytest.mark.parametrize("attempt", [1, 2], ids=["at first", "a retry"])
def test_quarantine_waits_for_what_runs(bench: Bench, gate: Gate, attempt: int) -> None:
    """A message that may have been begun isn't compensated before it has ended; then it is known to be consumed."""
    (id_,) = bench.send("a")
    if attempt == 2:
        bench.consume(bench.declare(fail))
        bench.age_retries()
    consumer = bench.declare(gate, **OUTSIDE)
    running = Running(bench, consumer.consume_once if attempt == 1 else consumer.retry_once)
    wait_until(lambda: gate.begun, "the handler runs")
    with bench.consumer.connect() as other:
        with pytest.raises(Postponed, match="may be at work on the message"):
            quarantine(other, "outbox", order_of(bench, id_), acknowledged=False)
        gate.open.set()
        running.join()
        assert quarantine(other, "outbox", order_of(bench, id_), acknowledged=False).consumed == ["g"]
    assert bench.statuses() == [("consumed", attempt)]


def test_a_quarantine_that_came_first_is_kept(bench: Bench, gate: Gate) -> None:
    """What is quarantined before a worker leases its queue is passed."""
    gate.open.set()
    consumer = bench.declare(gate, concurrency=2, **OUTSIDE)
    first, second = bench.send("a", "b")
    with bench.consumer.connect() as other:
        assert quarantine(other, "outbox", order_of(bench, first), acknowledged=False).quarantined == ["g"]
    bench.consume(consumer)
    assert gate.begun == ["b"]
    inbox = bench.inbox()
    assert (inbox[first].status, inbox[second].status) == ("quarantined", "consumed")


# --- what is read again ----------------------------------------------------------------------------------


def test_all_of_it_once_more(any_bench: Bench) -> None:
    """A group that was reset handles each message once more; what the inbox said before is kept."""
    handled: list[Any] = []

    def handle(message: Message) -> None:
        handled.append((message.body, message.attempt))

    ids = any_bench.send(1, 2, 3)
    consumer = any_bench.declare(handle, **OUTSIDE)
    any_bench.consume(consumer)
    reset(any_bench)
    any_bench.send(4)
    any_bench.consume(consumer)
    assert handled == [(body, 1) for body in (1, 2, 3, 1, 2, 3, 4)]
    assert [tuple(row) for row in any_bench.rows(EARLIER)] == [(id_, 0, "consumed") for id_ in sorted(ids)]
    assert [tuple(row) for row in any_bench.rows(PASSAGES)] == [(1, 4)]
    assert offsets(any_bench) == [4]


def test_reset_while_handlers_run(bench: Bench, gate: Gate, heard: list[TelemetryEvent]) -> None:
    """It waits for no handler: what they come to is refused, and handled again by the new passage, several at once."""
    options = {"ordered": False, "concurrency": 3, **OUTSIDE}
    bench.send(1, 2)
    bench.consume(bench.declare(lambda _: None, **options))
    bench.send(3, 4, 5)
    running = Running(bench, bench.declare(gate, **options).consume_once)
    wait_until(lambda: len(gate.begun) == 3, "the handlers run")
    reset(bench)
    together = threading.Barrier(3)

    def wait(_: Message) -> None:
        together.wait(60)

    with bench.consumer.connect() as other:
        again = bench.declare(wait, **options, early=True)
        assert consumed(bench) == 2
        bench.send(6)
        assert bench.consume_on(again, other, other).done == 6
    gate.open.set()
    running.join()
    assert [event.calls + event.results for event in heard if isinstance(event, LeaseLost)] == [3]
    assert [tuple(row) for row in bench.rows(PASSAGES)] == [(1, 6)]
    assert offsets(bench) == [6]


def consumed(bench: Bench) -> int:
    """Return how many messages the inbox has as consumed."""
    return int(bench.value("SELECT count(*) FROM outbox.consumer_message WHERE status = 'consumed'"))


# --- processes that die ----------------------------------------------------------------------------------

Spawn = Callable[[str], Effects]


@pytest.fixture
def spawn(bench: Bench, tmp_path: Path) -> Iterator[Spawn]:
    """A function that runs a process until its end, which is a sudden one; and returns what was begun so far."""
    context = multiprocessing.get_context("forkserver")
    lifeline, held = context.Pipe(duplex=False)
    url = bench.consumer.url.render_as_string(hide_password=False)
    effects = Effects(tmp_path / "effects")

    def run(step: str) -> Effects:
        process = context.Process(
            target=outside_workers.start, args=(lifeline, url, str(effects.path), step), daemon=True
        )
        process.start()
        process.join(120)
        assert process.exitcode in {0, 137}
        process.close()
        lapse(bench)
        return effects

    yield run
    held.close()


@pytest.mark.parametrize("step", sorted(outside_workers.STEPS))
def test_killed_at_each_step(bench: Bench, spawn: Spawn, step: str) -> None:
    """Nothing is lost, at most what was in flight is repeated, and the offset is exact."""
    bench.send(*range(20))
    assert len(spawn(step).bodies()) <= 20
    effects = Counter(spawn("to the end").bodies())
    assert sorted(map(int, effects)) == list(range(20))
    repeated = [body for body, times in effects.items() if times > 1]
    assert len(repeated) <= CONCURRENCY
    if step == "leased":
        assert repeated == []
    assert set(bench.statuses()) == {("consumed", 1)}
    assert offsets(bench) == [20]


def test_a_message_that_kills_its_worker_is_parked(bench: Bench, spawn: Spawn) -> None:
    """One that ends its process each time is found, by handling one by one, and parked; all others are consumed."""
    bench.send(*range(5))
    (bomb,) = bench.send("bomb")
    bench.send(*range(5, 10))
    deaths = 0
    while bench.rows("SELECT count(*) FROM outbox.consumer_message WHERE status <> 'failed'") != [11]:
        spawn("")
        deaths += 1
        assert deaths < 10, bench.inbox()
    effects = Counter(spawn("").bodies())
    assert sorted(body for body in effects if body != "bomb") == sorted(map(str, range(10)))
    inbox = bench.inbox()
    assert inbox.pop(bomb).status == "parked"
    assert {row.status for row in inbox.values()} == {"consumed"}


def test_doubt_is_told(bench: Bench, gate: Gate, heard: list[TelemetryEvent]) -> None:
    """Whoever takes over a queue in which messages had no end tells it."""
    bench.send("a")
    running = Running(bench, bench.declare(gate, **OUTSIDE).consume_once)
    wait_until(lambda: gate.begun, "the handler runs")
    lapse(bench)
    bench.consume(bench.declare(lambda _: None, **OUTSIDE))
    gate.open.set()
    running.join()
    assert [event.starts for event in heard if isinstance(event, CrashFound)] == [1]
