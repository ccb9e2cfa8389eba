"""RocketMQ's rules of transactional messages, one test each, and what its users complain of, mended.

Each docstring says the rule, the class of RocketMQ that holds it, and whether ours is the same or better, and how. The
table of docs/peer_rules.md names these tests, those of test_peer_rules_asking and those of test_peer_rules_crashes.
"""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Callable

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from outbox import INJECTED, Counts, Orphan, Outbox, Resolution, Settings
from outbox.dispatch.dispatch_pass import release_due_once
from outbox.errors import AlreadyCommitted, AlreadyRolledBack
from outbox.message.ids import uuid7_at
from outbox.prune.prune_pass import prune_producer_once
from outbox.testing import make_due
from tests.check.support import Bench, Declined

NewBench = Callable[..., Bench]
COMMIT, ROLLBACK, UNKNOWN = Resolution.COMMIT, Resolution.ROLLBACK, Resolution.UNKNOWN
IMMUNITY = dt.timedelta(seconds=6)


# --- phase 1: the half message -------------------------------------------------------------------------------------


def test_half_is_invisible_until_committed(bench: Bench) -> None:
    """A half waits in the half topic, unseen by consumers, until its commit. TransactionalMessageBridge. Same."""
    half_id = bench.prepare()
    assert (bench.dispatch(), bench.messages()) == (0, [])
    bench.outbox.commit(half_id)
    assert (bench.dispatch(), bench.messages()) == (1, [half_id])


def test_local_transaction_runs_only_after_the_half_is_stored(bench: Bench) -> None:
    """When the half can't be stored, the local transaction isn't run. DefaultMQProducerImpl. Same."""
    ran: list[int] = []

    @bench.outbox.two_phase(topic="paid")
    def pay(number: int, session: Session = INJECTED) -> None:
        ran.append(number)

    bench.kill_at("BEFORE INSERT", "outbox.half_message")
    with pytest.raises(OperationalError):
        pay(1)
    assert ran == []
    pay(2)
    assert ran == [2]


def test_exception_of_the_local_transaction_is_unknown(bench: Bench) -> None:
    """A Throwable of the local transaction is UNKNOW, never a rollback. DefaultMQProducerImpl. Better.

    The same exception reaches the caller; the peer swallows it.
    """
    asked: list[Orphan] = []

    def check(orphan: Orphan) -> Resolution:
        asked.append(orphan)
        return COMMIT

    @bench.outbox.two_phase(topic="paid", check=check)
    def pay(number: int) -> None:
        raise Declined(number)

    with pytest.raises(Declined, match="7"):
        pay(7)
    half_id = bench.value("SELECT half_id FROM outbox.half_check")
    assert (bench.op(half_id), asked) == (None, [])
    bench.age_and_check()
    assert (bench.op(half_id), [each.body for each in asked]) == (("commit", "check"), [{"number": 7}])


def test_transaction_that_is_never_ended_is_left_to_the_check(bench: Bench) -> None:
    """A transaction without an end is abandoned to the check. TransactionImpl. Same."""
    asked = bench.register(ROLLBACK)
    half_id = bench.prepare()
    bench.check()
    assert ([each.id for each in asked], bench.op(half_id)) == ([half_id], ("rollback", "check"))


def test_many_messages_in_one_transaction(bench: Bench) -> None:
    """A transaction holds one message, a second one throws. TransactionImpl. Better.

    As many as one likes, each with a verdict of its own.
    """
    bench.register(COMMIT, "paid")
    bench.register(ROLLBACK, "shipped")
    with bench.engine.begin() as connection:
        ids = [bench.outbox.prepare(connection, topic, {}) for topic in ("paid", "shipped", "paid")]
    bench.age_and_check()
    assert [bench.op(each) for each in ids] == [("commit", "check"), ("rollback", "check"), ("commit", "check")]


def test_transaction_with_a_delay(bench: Bench) -> None:
    """Transaction and delay: the level is cleared, or the half loops until it is discarded. HookUtils. Better.

    A half that a check commits waits for its time, and is then delivered once.
    """
    bench.register(COMMIT)
    half_id = bench.prepare(delay=dt.timedelta(hours=1))
    bench.check()
    assert (bench.dispatch(), bench.messages()) == (1, [])
    make_due(bench.outbox, failed=False, orphans=False)
    with bench.engine.connect() as connection:
        assert release_due_once(connection, bench.settings).done == 1
    assert bench.messages() == [half_id]


def test_commit_order_decides_the_queues_order(bench: Bench) -> None:
    """The order of the commits, not that of the sends, is that of the queue. EndTransactionProcessor. Same."""
    first, second, third = (bench.prepare(key="k") for _ in range(3))
    bench.register(COMMIT)
    bench.outbox.commit(third)
    bench.outbox.commit(first)
    bench.age_and_check()
    bench.dispatch()
    assert bench.messages() == [third, first, second]


# --- phase 2: the decision -----------------------------------------------------------------------------------------


def test_crash_between_decision_and_message(bench: Bench) -> None:
    """First the message is put, then the op: a crash between doubles it. EndTransactionProcessor. Better.

    The op comes first, and the message exists once, whatever dies in between.
    """
    half_id = bench.prepare()
    bench.outbox.commit(half_id)
    bench.kill_at("AFTER INSERT", "outbox.message")
    with pytest.raises(OperationalError):
        bench.dispatch()
    assert bench.messages() == []
    assert bench.dispatch() == 1
    assert bench.dispatch() == 0
    assert bench.messages() == [half_id]


def test_rollback_keeps_the_body(bench: Bench) -> None:
    """A rollback writes the op only; the body stays until its file expires. EndTransactionProcessor. Same.

    It stays until the retention is over.
    """
    half_id = bench.prepare(body={"n": 1})
    bench.outbox.rollback(half_id)
    bench.dispatch()
    with bench.engine.connect() as connection:
        prune_producer_once(connection, bench.settings)
        assert bench.value("SELECT body FROM outbox.half_message") == b'{"n":1}'
        bench.run("UPDATE outbox.op_message SET decided_at = now() - interval '73 hours'")
        prune_producer_once(connection, bench.settings)
    assert bench.value("SELECT count(*) FROM outbox.half_message") == 0


def test_double_commit(bench: Bench) -> None:
    """Two END_TRANSACTION publish two messages. EndTransactionProcessor (#5574). Better: one op, one message."""
    half_id = bench.prepare()
    first, second = bench.outbox.commit(half_id), bench.outbox.commit(half_id)
    assert first
    assert second
    assert (first.first, second.first) == (True, False)
    assert (second.decided_at, second.decided_by) == (first.decided_at, "producer")
    bench.dispatch()
    with pytest.raises(AlreadyCommitted), bench.engine.begin() as connection:
        bench.outbox.commit(half_id, connection)
    bench.dispatch()
    assert bench.messages() == [half_id]


@pytest.mark.parametrize("verdict", [COMMIT, ROLLBACK])
def test_late_commit_after_a_check(bench: Bench, verdict: Resolution) -> None:
    """A commit after a check decided publishes, again or all the same. EndTransactionProcessor (#8158). Better.

    It is told what the check decided; beside a business change it fails, so that the change isn't made twice.
    """
    bench.register(verdict)
    half_id = bench.prepare()
    bench.check()
    assert bench.op(half_id) == (verdict, "check")
    if verdict is COMMIT:
        decision = bench.outbox.commit(half_id)
        assert decision
        assert (decision.first, decision.decided_by) == (False, "check")
    else:
        with pytest.raises(AlreadyRolledBack, match="by the check"):
            bench.outbox.commit(half_id)
    late = AlreadyCommitted if verdict is COMMIT else AlreadyRolledBack
    with pytest.raises(late, match="by the check"), bench.engine.begin() as connection:
        connection.execute(text("CREATE TABLE change AS SELECT 1"))
        bench.outbox.commit(half_id, connection)
    assert bench.value("SELECT to_regclass('change')") is None
    bench.dispatch()
    assert bench.messages() == ([half_id] if verdict is COMMIT else [])


def test_late_decision_without_a_check_is_taken(bench: Bench) -> None:
    """An own immunity time rejects late commits (604, which no caller sees). EndTransactionProcessor. Better.

    However late, the first decision counts; the half is still undecided, so nobody is contradicted.
    """
    half_id = bench.prepare(immunity=1)
    bench.run("UPDATE outbox.half_message SET born_at = now() - interval '30 days'")
    decision = bench.outbox.commit(half_id)
    assert decision
    assert decision.first


def test_commit_tells_its_outcome(bench: Bench) -> None:
    """A commit is sent one way; OK means that it was forwarded. DefaultMQProducerImpl (#9431). Better.

    It returns what is durable: the decision, by whom, when, and whether it was the first.
    """
    half_id = bench.prepare()
    decision = bench.outbox.commit(half_id)
    assert decision
    row = bench.rows("SELECT resolution, decided_by, decided_at FROM outbox.op_message")[0]
    assert (decision.resolution, decision.decided_by, decision.decided_at) == tuple(row)
    bench.kill_at("BEFORE INSERT", "outbox.op_message")
    other = bench.prepare()
    with pytest.raises(OperationalError):
        bench.outbox.commit(other)
    assert bench.op(other) is None


def test_any_process_may_decide(bench: Bench) -> None:
    """A proxy keeps transaction data for 30 s: a commit by another one fails. TransactionDataManager (#9431). Better.

    Whoever has the id may decide, whenever, from wherever.
    """
    half_id = bench.prepare()
    bench.run("UPDATE outbox.half_message SET born_at = now() - interval '1 day'")
    engine = create_engine(bench.engine.url)
    decision = Outbox(engine, group="others", settings=Settings()).commit(half_id)
    engine.dispose()
    assert decision
    assert decision.first


def test_decided_halves_are_never_asked(bench: Bench) -> None:
    """Ops are written in batches: a crash loses 3 s, and committed halves are checked. TransactionalMessageServiceImpl.

    Better: with the decision the half's check is gone, in one transaction.
    """
    asked = bench.register(UNKNOWN)
    ids = [bench.prepare() for _ in range(4)]
    bench.outbox.commit(ids[0])
    bench.outbox.rollback(ids[1])
    bench.outbox.operator.commit(ids[2], by="me", why="why")
    for half_id in ids[:3]:
        assert bench.waits(half_id) is None
    bench.age_and_check(3)
    assert {each.id for each in asked} == {ids[3]}


# --- when a half is checked ----------------------------------------------------------------------------------------


def test_first_check_after_the_immunity_time(bench: Bench) -> None:
    """A half is left alone for transactionTimeOut, 6 s, by the client's clock. BrokerConfig. Better.

    By the database's clock.
    """
    asked = bench.register(COMMIT)
    half_id = bench.prepare(due=False)
    waits = bench.rows(
        "SELECT next_check_at - born_at FROM outbox.half_check JOIN outbox.half_message ON id = half_id"
    )[0][0]
    assert abs(waits - IMMUNITY) < dt.timedelta(seconds=1)
    bench.check()
    # Not even on a machine that takes six seconds for this.
    assert asked == [] or bench.value("SELECT clock_timestamp() - born_at FROM outbox.half_message") > IMMUNITY
    bench.age()
    bench.check()
    assert [each.id for each in asked] == [half_id]


def test_pause_between_two_checks(bench: Bench) -> None:
    """transactionCheckInterval, 30 s, lies between two checks. BrokerConfig. Better: of each half by itself."""
    asked = bench.register(UNKNOWN)
    half_id = bench.prepare()
    bench.check()
    assert 15 < bench.waits(half_id).wait <= 30
    bench.check()
    assert len(asked) == 1
    bench.age_and_check()
    assert len(asked) == 2


def test_immunity_longer_than_all_checks(bench: Bench) -> None:
    """Immunity burns the budget: longer than max * interval, discarded unchecked. TransactionalMessageServiceImpl.

    Better (#615, #8311): the counter stays at 0 until the first question.
    """
    asked = bench.register(COMMIT, max_checks=2, interval=1)
    half_id = bench.prepare(immunity=1000, due=False)
    for _ in range(5):
        assert bench.check() == Counts()
    assert (bench.waits(half_id).check_times, bench.waits(half_id).parked, asked) == (0, False, [])
    bench.age_and_check()
    assert ([each.checks for each in asked], bench.op(half_id)) == ([1], ("commit", "check"))


def test_young_half_holds_up_no_other(new_bench: NewBench) -> None:
    """A half within its immunity stops the scan, and those behind it wait. TransactionalMessageServiceImpl. Better."""
    bench = new_bench(immunity=1000)
    asked = bench.register(COMMIT)
    with bench.engine.begin() as connection:
        for _ in range(300):
            bench.outbox.prepare(connection, "paid", {})
    late = bench.prepare(immunity=0, due=False)
    bench.check()
    assert [each.id for each in asked] == [late]


@pytest.mark.parametrize("ahead", [-3600, 3600])
def test_half_born_in_the_future(new_bench: NewBench, ahead: int) -> None:
    """A half of a client whose clock is ahead is checked at once; behind, too early. TransactionalMessageServiceImpl.

    Better: the client's clock is in the id and decides nothing: immunity and age are by the database's clock.
    """
    bench = new_bench(immunity=1000)
    asked = bench.register(COMMIT)
    half_id = bench.prepare(id=uuid7_at(time.time() + ahead), due=False)
    assert 900 < bench.waits(half_id).wait <= 1000
    assert bench.check() == Counts()
    bench.age_and_check()
    assert [each.id for each in asked] == [half_id]
    assert dt.timedelta() <= asked[0].age < dt.timedelta(minutes=1)


def test_old_half_is_checked(bench: Bench) -> None:
    """A half older than 72 h is discarded unchecked (needSkip). TransactionalMessageServiceImpl. Better."""
    asked = bench.register(COMMIT)
    half_id = bench.prepare()
    bench.run("UPDATE outbox.half_message SET born_at = now() - interval '100 days'")
    bench.check()
    assert asked[0].age > dt.timedelta(days=99)
    assert bench.op(half_id) == ("commit", "check")
