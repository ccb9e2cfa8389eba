"""Repairs beside everybody else: two of them at once, and handlers, dispatchers, deciders and prune at work."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Connection, Engine, text
from sqlalchemy.orm import Session

from outbox import Message, Outbox
from outbox.consumer.consumer import Consumer
from outbox.dispatch.dispatch_pass import dispatch_lock, dispatch_once
from outbox.message.model import Counts
from outbox.reconcile import repair
from outbox.reconcile.job import Outcome, Repair
from outbox.reconcile.repair import BUSY
from outbox.worker import Worker
from tests.dispatch.support import WAITING, flush
from tests.kit import wait_until
from tests.kit.bench import record
from tests.reconcile.repairing import Night

GATE = 4711


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repairs that soon give up waiting."""
    monkeypatch.setattr(repair, "PATIENCE", 0.2)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    """Threads for those who are at work at the same time."""
    with ThreadPoolExecutor(8) as pool:
        yield pool


class Held:
    """A handler that writes into the ledger, and returns when the test lets it go."""

    def __init__(self) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()

    def __call__(self, message: Message, session: Session) -> None:
        """Handle a message."""
        record(message, session)
        session.flush()
        self.reached.set()
        assert self.go_on.wait(60)


def explode(message: Message, session: Session) -> None:
    """Fail."""
    raise RuntimeError("boom")


def start(
    night: Night, pool: ThreadPoolExecutor, act: Callable[[Consumer, Connection, Connection], Counts], **options: Any
) -> tuple[Held, Future[Counts]]:
    """Begin a pass of another worker of the group; return when its handler has written, and not returned."""
    held = Held()
    consumer = night.declare(held, early=True, **options)

    def run() -> Counts:
        with night.consumer.connect() as connection, night.producer.connect() as source:
            return act(consumer, connection, source)

    running = pool.submit(run)
    assert held.reached.wait(60)
    return held, running


def retrying(consumer: Consumer, connection: Connection, source: Connection) -> Counts:
    """Retry what is due."""
    return consumer.retry_once(connection, source)


def consuming(consumer: Consumer, connection: Connection, source: Connection) -> Counts:
    """Consume until nothing is left."""
    counts = Counts()
    while step := consumer.consume_once(connection, source):
        counts += step
    return counts


@contextmanager
def gate(engine: Engine, trigger: str) -> Iterator[Callable[[], bool]]:
    """Stop every transaction of a database where a trigger says, until the block ends; yields: is one stopped there?"""
    with engine.begin() as connection:
        connection.execute(
            text(f"""CREATE OR REPLACE FUNCTION wait_at_gate() RETURNS trigger LANGUAGE plpgsql AS
            $$ BEGIN PERFORM pg_advisory_xact_lock_shared({GATE}); RETURN NULL; END $$""")
        )
        connection.execute(text(trigger))
    with engine.connect() as keeper:
        keeper.execute(text(f"SELECT pg_advisory_lock({GATE})"))
        keeper.commit()

        def stopped() -> bool:
            waiting = f"SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = {GATE} AND NOT granted"
            with engine.begin() as connection:
                return bool(connection.execute(text(waiting)).scalar_one())

        try:
            yield stopped
        finally:
            keeper.execute(text(f"SELECT pg_advisory_unlock({GATE})"))
            keeper.commit()


#: Where a handler's transaction has its inbox row inserted, and isn't committed.
AT_COMMIT = """CREATE CONSTRAINT TRIGGER gate AFTER INSERT ON ledger DEFERRABLE INITIALLY DEFERRED
               FOR EACH ROW EXECUTE FUNCTION wait_at_gate()"""
#: Where a repair has acted, and isn't committed.
AT_AUDIT = "CREATE TRIGGER gate AFTER INSERT ON outbox.audit FOR EACH ROW EXECUTE FUNCTION wait_at_gate()"


def waiting(engine: Engine) -> int:
    """Return how many statements wait for a lock in a database."""
    with engine.begin() as connection:
        return int(connection.execute(text(WAITING)).scalar_one())


# --- two repairs -----------------------------------------------------------------------------------------


def test_two_repairs_at_once(night: Night, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of repairs that race for the same differences, each difference is repaired by one, and recorded once."""
    monkeypatch.setattr(repair, "BATCH", 7)
    each = 40
    ids = night.consumed(*range(5 * each))
    missing, unrecorded, mismatch, parked, withdrawn = (ids[n * each : n * each + each] for n in range(5))
    night.forget(*missing, *withdrawn)
    night.forget(*unrecorded, ledger=False)
    night.set_status("quarantined", *mismatch)
    night.set_status("parked", *parked)
    night.run("DELETE FROM ledger WHERE message_id = ANY (:ids)", ids=parked)
    night.compensate(*withdrawn)
    undispatched = night.passed(*range(each))
    with night.producer.begin() as connection:
        undecided = [night.app.prepare(connection, "t", n, immunity=3600) for n in range(each)]
    findings = night.found()
    assert len(findings) == 7 * each
    barrier = threading.Barrier(3)

    def race() -> list[tuple[UUID, str]]:
        barrier.wait()
        return [(done.id, done.result) for done in night.repaired(findings)]

    told = [result for future in [pool.submit(race) for _ in range(3)] for result in future.result()]
    assert Counter(message_id for message_id, result in told if result == "done") == Counter(
        finding.id for finding in findings
    )
    assert night.sends(*missing, *undispatched) == [2] * each + [1] * each
    for action, targets in {
        Repair.RESEND: missing,
        Repair.DISPATCH: undispatched,
        Repair.SYNC_STATUS: [*unrecorded, *mismatch, *withdrawn],
        Repair.RETRY: parked,
        Repair.CHECK: undecided,
    }.items():
        acts = [target.removeprefix("g/") for _, target, _ in night.acts(action)]
        assert sorted(acts) == sorted(map(str, targets))
    night.settle()
    assert night.kinds() == {Outcome.UNDECIDED: each}


def test_the_second_repair_waits_and_finds_it_done(night: Night, pool: ThreadPoolExecutor) -> None:
    """A resend that comes while another is under way waits for it, and sends nothing."""
    (half_id,) = night.consumed("lost")
    night.forget(half_id)
    findings = night.found()
    with gate(night.producer, AT_AUDIT) as stopped:
        first = pool.submit(night.repair, findings)
        wait_until(stopped, "the first has sent")
        second = pool.submit(night.repair, findings)
        wait_until(lambda: waiting(night.producer) == 2, "the second waits for the first")
    assert first.result() == {half_id: "done"}
    assert second.result() == {half_id: "healed"}
    assert night.sends(half_id) == [2]


# --- handlers: there is a row ----------------------------------------------------------------------------


@pytest.mark.parametrize("ordered", [False, True], ids=["retry", "ordered"])
@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.STATUS_MISMATCH])
def test_a_failed_message_that_is_being_handled(
    night: Night, pool: ThreadPoolExecutor, ordered: bool, outcome: Outcome
) -> None:
    """A message whose handler is running is left alone; when it has succeeded, there is nothing left to do."""
    (half_id,) = night.send("x")
    night.consume(night.declare(explode, ordered=ordered))
    if outcome is Outcome.STATUS_MISMATCH:
        night.compensate(half_id)
    findings = night.found()
    assert [finding.outcome for finding in findings] == [outcome]
    night.age_retries()
    held, running = start(night, pool, consuming if ordered else retrying, ordered=ordered)
    assert night.repair(findings) == {half_id: BUSY}
    held.go_on.set()
    assert running.result().done == 1
    assert night.status(half_id) == ["consumed"]
    expected = "healed" if outcome is Outcome.FAILED else "refused: it took effect"
    assert night.repair(findings) == {half_id: expected}
    assert night.ledger() == ["x"]


@pytest.mark.parametrize("ordered", [False, True], ids=["retry", "ordered"])
def test_a_handler_that_comes_after_the_repair(night: Night, pool: ThreadPoolExecutor, ordered: bool) -> None:
    """While a repair quarantines a message no handler of it begins, and none afterwards."""
    (half_id,) = night.send("x")
    consumer = night.declare(explode, ordered=ordered)
    night.consume(consumer)
    night.compensate(half_id)
    findings = night.found()
    night.age_retries()
    with gate(night.consumer, AT_AUDIT) as stopped:
        repairing = pool.submit(night.repair, findings)
        wait_until(stopped, "the quarantine is written")
        other = night.declare(record, early=True, ordered=ordered)
        assert not night.retry(other, due=False)
        assert not night.consume(other).done
        assert night.ledger() == []
    assert repairing.result() == {half_id: "done"}
    night.retry(other, due=False)
    assert not night.consume(other).done
    assert night.ledger() == []
    assert night.status(half_id) == ["quarantined"]
    night.send("next")
    night.consume(other)
    assert night.ledger() == ["next"]


# --- handlers: there is no row ---------------------------------------------------------------------------


def lost_and_back(night: Night, how: str) -> UUID:
    """Make a message that is about to be consumed, and the difference: it took effect already, or was compensated."""
    if how == "compensated":
        (half_id,) = night.send("x")
        night.compensate(half_id)
        return half_id
    (half_id,) = night.consumed("x")
    night.forget(half_id, ledger=False)
    night.resend(half_id)
    return half_id


@pytest.mark.parametrize("how", ["compensated", "unrecorded"])
def test_the_repair_is_first(night: Night, pool: ThreadPoolExecutor, how: str) -> None:
    """A handler in the middle of its work, whose message is settled by a repair, loses what it did."""
    half_id = lost_and_back(night, how)
    before = night.ledger()
    findings = night.found()
    held, running = start(night, pool, consuming)
    assert night.repair(findings) == {half_id: "done"}
    held.go_on.set()
    assert running.result().done == 0
    assert night.ledger() == before
    assert night.status(half_id) == ["quarantined" if how == "compensated" else "consumed"]
    assert night.found() == []


@pytest.mark.parametrize("how", ["compensated", "unrecorded"])
def test_the_handler_waits_for_the_repair(night: Night, pool: ThreadPoolExecutor, how: str) -> None:
    """A handler that commits while the repair's row isn't committed yet waits for it, and loses what it did."""
    half_id = lost_and_back(night, how)
    before = night.ledger()
    findings = night.found()
    held, running = start(night, pool, consuming)
    with gate(night.consumer, AT_AUDIT) as stopped:
        repairing = pool.submit(night.repair, findings)
        wait_until(stopped, "the repair has its row")
        held.go_on.set()
        wait_until(lambda: waiting(night.consumer) == 2, "the handler waits for the repair")
    assert repairing.result() == {half_id: "done"}
    assert running.result().done == 0
    assert night.ledger() == before
    assert night.found() == []


@pytest.mark.parametrize(
    ("how", "result", "left"),
    [
        ("compensated", "refused: it is consumed now", {Outcome.CONSUMED_THOUGH_ROLLED_BACK: 1}),
        ("unrecorded", "healed", {Outcome.DUPLICATE_EFFECT: 1}),
    ],
)
def test_the_repair_waits_for_the_handler(
    night: Night, pool: ThreadPoolExecutor, how: str, result: str, left: dict[Outcome, int]
) -> None:
    """A repair that comes while a handler is committing waits for it, and finds its row: nothing is written over."""
    half_id = lost_and_back(night, how)
    findings = night.found()
    with gate(night.consumer, AT_COMMIT) as stopped:
        held, running = start(night, pool, consuming)
        held.go_on.set()
        wait_until(stopped, "the handler's row is there and not committed")
        repairing = pool.submit(night.repair, findings)
        wait_until(lambda: waiting(night.consumer) == 2, "the repair waits for the handler")
    assert running.result().done == 1
    assert repairing.result() == {half_id: result}
    assert night.status(half_id) == ["consumed"]
    assert night.kinds() == left, "the effect that came twice, or too late, is told of"
    assert night.acts(Repair.SYNC_STATUS) == []


def test_a_handler_that_never_commits(night: Night, pool: ThreadPoolExecutor, hurried: None) -> None:
    """A message that a handler holds for ever is told as busy; the others of its batch are repaired."""
    ids = night.send(*range(5))
    night.compensate(*ids)
    findings = night.found()
    with gate(night.consumer, AT_COMMIT) as stopped:
        held, running = start(night, pool, consuming, batch=1)
        held.go_on.set()
        wait_until(stopped, "the handler's row is there and not committed")
        assert night.repair(findings) == {ids[0]: BUSY, **dict.fromkeys(ids[1:], "done")}
    running.result()
    assert night.ledger() == ["0"]
    assert night.status(*ids) == ["consumed", *["quarantined"] * 4]


# --- dispatch --------------------------------------------------------------------------------------------


def test_an_op_of_a_transaction_that_was_in_flight(night: Night) -> None:
    """An op behind the cursor whose transaction was in flight then is dispatched by dispatch, once."""
    with night.producer.connect() as slow, slow.begin():
        late = night.app.send(slow, "t", "late", key="k")
        flush(slow)
        night.send(*range(5))
        lost = night.passed("lost")
        night.dispatch()
    findings = night.found()
    assert {finding.id for finding in findings if finding.outcome is Outcome.UNDISPATCHED} == {late, *lost}
    results = night.repair(findings)
    assert results == {late: "healed", lost[0]: "done"}
    assert [target for _, target, _ in night.acts(Repair.DISPATCH)] == [str(lost[0])]
    night.send("after")
    assert night.sends(late, *lost) == [1, 1]
    night.settle()
    assert night.found() == []
    assert Counter(night.ledger()) == Counter([*map(str, range(5)), "late", "lost", "after"])


def test_a_transaction_that_commits_during_the_repair(night: Night, pool: ThreadPoolExecutor) -> None:
    """An op that becomes visible while a repair places others isn't taken for one that dispatch has passed."""
    with night.producer.connect() as slow:
        slow.begin()
        late = night.app.send(slow, "t", "late", key="k")
        flush(slow)
        night.send(1)
        (lost,) = night.passed("lost")
        (finding,) = (each for each in night.found() if each.id == lost)
        with gate(night.producer, AT_AUDIT) as stopped:
            repairing = pool.submit(night.repair, [finding, replace(finding, id=late)])
            wait_until(stopped, "the repair has placed what it saw")
            slow.commit()
            with night.producer.connect() as connection:
                assert not dispatch_once(connection, night.settings), "the repair keeps dispatch out meanwhile"
    results = repairing.result()
    assert results == {lost: "done", late: "healed"}
    night.settle()
    assert night.sends(lost, late) == [1, 1]
    assert night.found() == []


def test_dispatchers_and_repairs_that_race(night: Night, pool: ThreadPoolExecutor) -> None:
    """Among senders, dispatchers and repairs, every op becomes one message, and dispatch never stumbles."""
    over = threading.Event()
    sent: list[UUID] = []

    def sender(number: int) -> None:
        for n in range(40):
            with night.producer.connect() as connection, connection.begin():
                ids = [night.app.send(connection, "t", n, key=f"k{number}") for _ in range(3)]
                flush(connection)
                over.wait(0.003 * (n % 4))
                if n % 5 == 0:
                    connection.execute(
                        text("UPDATE outbox.op_message SET xid = '3' WHERE half_id = :id"), {"id": ids[1]}
                    )
            sent.extend(ids)

    def dispatcher(limit: int) -> None:
        with night.producer.connect() as connection:
            while not over.is_set():
                dispatch_once(connection, night.settings, limit=limit)

    def repairer() -> Counter[str]:
        results: Counter[str] = Counter()
        while not over.is_set():
            results.update(
                each.result for each in night.repaired([f for f in night.found() if f.outcome is Outcome.UNDISPATCHED])
            )
        return results

    senders = [pool.submit(sender, number) for number in range(3)]
    dispatchers = [pool.submit(dispatcher, limit) for limit in (2, 7)]
    repairers = [pool.submit(repairer) for _ in range(2)]
    try:
        for each in senders:
            each.result()
    finally:
        over.set()
    for future in dispatchers:
        future.result()
    results = sum((future.result() for future in repairers), Counter[str]())
    assert set(results) <= {"done", "healed"}
    assert results["done"]
    night.repair()
    night.settle()
    assert night.sends(*sent) == [1] * len(sent)
    positions = "SELECT queue, max(position) = count(*) FROM outbox.message GROUP BY queue"
    assert all(dense for _, dense in night.rows_at_producer(positions))
    assert night.found() == []


# --- locks -----------------------------------------------------------------------------------------------


def test_dispatch_that_is_held_up(night: Night, hurried: None) -> None:
    """Where somebody holds dispatch for ever, the repairs that need it are told as busy; the others are done."""
    missing, mismatch = night.consumed(1, 2)
    night.forget(missing)
    night.set_status("parked", mismatch)
    (passed,) = night.passed("lost")
    findings = night.found()
    with night.producer.begin() as holder:
        holder.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": dispatch_lock("outbox")})
        assert night.repair(findings) == {missing: BUSY, passed: BUSY, mismatch: "done"}
    assert night.repair(findings) == {missing: "done", passed: "done", mismatch: "healed"}


def test_a_table_that_is_locked(night: Night, hurried: None) -> None:
    """Where nobody can have a row, a repair of hundreds gives up soon, and does it the next time."""
    ids = night.consumed(*range(100))
    night.set_status("failed", *ids)
    findings = night.found()
    with night.consumer.begin() as holder:
        holder.execute(text("LOCK TABLE outbox.consumer_message IN SHARE MODE"))
        assert night.repair(findings) == dict.fromkeys(ids, BUSY)
    assert night.repair(findings) == dict.fromkeys(ids, "done")


def test_rows_that_are_locked(night: Night) -> None:
    """Rows that others hold aren't waited for: they are told as busy, and all others of the batch are repaired."""
    ids = night.consumed(*range(20))
    night.set_status("failed", *ids)
    findings = night.found()
    with night.consumer.begin() as holder:
        holder.execute(
            text("SELECT FROM outbox.consumer_message WHERE message_id = ANY (:ids) FOR UPDATE"), {"ids": ids[:6]}
        )
        assert night.repair(findings) == dict.fromkeys(ids[:6], BUSY) | dict.fromkeys(ids[6:], "done")


def test_a_half_that_is_being_decided(night: Night) -> None:
    """A half whose decision isn't committed yet isn't waited for; decided, it needs no check."""
    with night.producer.begin() as connection:
        ids = [night.app.prepare(connection, "t", n, immunity=3600) for n in range(2)]
    findings = night.found()
    with night.producer.begin() as connection:
        night.app.commit(ids[0], within=connection)
        flush(connection)
        assert night.repair(findings) == {ids[0]: BUSY, ids[1]: "done"}
    assert night.repair(findings)[ids[0]] == "healed"


def test_prune_at_work(night: Night, pool: ThreadPoolExecutor) -> None:
    """A message that prune is deleting is waited for, and not resent once it is gone."""
    ids = night.consumed(1, 2)
    night.forget(*ids)
    findings = night.found()
    with night.producer.connect() as pruner:
        pruner.begin()
        for table, column in (("op_message", "half_id"), ("message", "half_id"), ("half_message", "id")):
            pruner.execute(text(f"DELETE FROM outbox.{table} WHERE {column} = :id"), {"id": ids[0]})
        repairing = pool.submit(night.repair, findings)
        wait_until(lambda: waiting(night.producer), "the repair waits for prune")
        pruner.commit()
    assert repairing.result() == {ids[0]: "refused: the producer has no message of it any more", ids[1]: "done"}
    assert night.sends(*ids) == [0, 2]
    assert [target for _, target, _ in night.acts(Repair.RESEND)] == [str(ids[1])]


def test_a_repair_whose_connection_is_cut(night: Night, pool: ThreadPoolExecutor) -> None:
    """A repair that loses its connection says so, leaves nothing half done, and can be run again."""
    ids = night.consumed(1, 2)
    night.forget(*ids)
    findings = night.found()
    with gate(night.producer, AT_AUDIT) as stopped:
        repairing = pool.submit(night.repair, findings)
        wait_until(stopped, "the repair has sent")
        night.run_at_producer(
            "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE objid = :gate AND NOT granted", gate=GATE
        )
        with pytest.raises(Exception, match="terminat"):
            repairing.result()
    assert night.sends(*ids) == [1, 1]
    assert night.repair(findings) == dict.fromkeys(ids, "done")
    assert night.sends(*ids) == [2, 2]


# --- the whole -------------------------------------------------------------------------------------------


def test_money_is_conserved(night: Night) -> None:
    """Transfers that got lost on the way arrive after the repair, through running workers, to the last cent, once."""
    for engine, name in ((night.producer, "sender"), (night.consumer, "receiver")):
        with engine.begin() as connection:
            connection.execute(text(f"CREATE TABLE {name} (balance numeric(12, 2) NOT NULL)"))
            connection.execute(text(f"INSERT INTO {name} VALUES (1000.00)"))
    bank = Outbox(night.consumer, settings=night.settings)

    @bank.consumer("t", group="g", source=night.producer)
    def credit(message: Message, session: Session) -> None:
        record(message, session)
        session.execute(text("UPDATE receiver SET balance = balance + CAST(:sum AS numeric)"), {"sum": message.body})

    def transfer(amount: str) -> UUID:
        with night.producer.begin() as connection:
            connection.execute(text("UPDATE sender SET balance = balance - CAST(:sum AS numeric)"), {"sum": amount})
            return night.app.send(connection, "t", amount, key=amount)

    ids = [transfer(f"{n}.0{n}") for n in range(1, 8)]
    never = transfer("8.08")
    night.run_at_producer("UPDATE outbox.op_message SET xid = '3' WHERE half_id = :id", id=never)
    with Worker(night.app), Worker(bank):
        wait_until(lambda: len(night.ledger()) == 7, "the transfers have arrived")
        # Two arrive and are lost, the inbox forgets two that stay, and one looks as if it had failed.
        night.run("UPDATE receiver SET balance = balance - 3.03")
        night.forget(*ids[:2])
        night.forget(*ids[2:4], ledger=False)
        night.set_status("failed", ids[4])
        assert sorted(night.kinds().elements()) == sorted(
            [Outcome.MISSING] * 2 + [Outcome.UNRECORDED] * 2 + [Outcome.STATUS_MISMATCH, Outcome.UNDISPATCHED]
        )
        assert set(night.repair().values()) == {"done"}
        wait_until(lambda: len(night.ledger()) == 8, "what was lost has arrived")
        wait_until(lambda: not night.found(), "the two sides agree")
    (sender,) = night.rows_at_producer("SELECT balance FROM sender")
    (receiver,) = night.rows("SELECT balance FROM receiver")
    assert sender + receiver == 2000
    assert receiver == 1000 + sum(Decimal(f"{n}.0{n}") for n in range(1, 9))
    assert set(Counter(night.ledger()).values()) == {1}
