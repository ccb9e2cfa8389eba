"""RocketMQ's rules of transactional messages, one test each, and what its users complain of, mended.

Each docstring says the rule, the class of RocketMQ that holds it, and whether ours is the same or better, and how. The
table of docs/peer_rules.md names these tests.
"""

from __future__ import annotations

import datetime as dt
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Connection, create_engine, text
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError
from sqlalchemy.orm import Session

from outbox import INJECTED, Counts, Orphan, Outbox, Resolution, Settings
from outbox.check import asker, once
from outbox.database.execute import driver_of
from outbox.database.session import commit
from outbox.dispatch.once import release_due_once
from outbox.errors import ActRefused, AlreadyCommitted, AlreadyRolledBack, HalfNotFound, InvalidMessage
from outbox.message.model import uuid7, uuid7_at
from outbox.operator.acts import ACTS
from outbox.prune.once import prune_producer_once
from tests.check.support import SHORT, Bench

NewBench = Callable[..., Bench]
COMMIT, ROLLBACK, UNKNOWN = Resolution.COMMIT, Resolution.ROLLBACK, Resolution.UNKNOWN
IMMUNITY = dt.timedelta(seconds=6)


class Declined(Exception):
    """What a local transaction may end with."""


# --- phase 1: the half message -------------------------------------------------------------------------------------


def test_half_is_invisible_until_committed(bench: Bench) -> None:
    """A half waits in the half topic, unseen by consumers, until its commit. TransactionalMessageBridge. Same."""
    half_id = bench.prepare()
    assert (bench.dispatch(), bench.messages()) == (0, [])
    bench.outbox.commit(half_id)
    assert (bench.dispatch(), bench.messages()) == (1, [half_id])


def test_transaction_id_is_unique(bench: Bench) -> None:
    """A prepare that is tried again may store a second half of the same UNIQ_KEY. DefaultMQProducerImpl. Better.

    The id is the primary key: the second one fails, and one half stands.
    """
    half_id = bench.prepare(id=uuid7())
    with pytest.raises(IntegrityError):
        bench.prepare(id=half_id)
    assert bench.value("SELECT count(*) FROM outbox.half_message") == 1


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
    """A transaction that nobody ends is abandoned to the check. TransactionImpl. Same."""
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


def test_decision_before_the_half_is_stored_fails(bench: Bench) -> None:
    """commit or rollback before send is an IllegalStateException. TransactionImpl. Same: HalfNotFound."""
    with bench.engine.begin() as connection:
        half_id = bench.outbox.prepare(connection, "paid", {})
        for decide in (bench.outbox.commit, bench.outbox.rollback):
            with pytest.raises(HalfNotFound):
                decide(half_id)
    assert bench.op(half_id) is None


def test_transaction_with_a_delay(bench: Bench) -> None:
    """Transaction and delay: the level is cleared, or the half loops until it is discarded. HookUtils. Better.

    A half that a check commits waits for its time, and is then delivered once.
    """
    bench.register(COMMIT)
    half_id = bench.prepare(delay=dt.timedelta(hours=1))
    bench.check()
    assert (bench.dispatch(), bench.messages()) == (1, [])
    bench.run("UPDATE outbox.scheduled_message SET deliver_at = now()")
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


def test_unknown_is_never_stored(bench: Bench) -> None:
    """UNKNOW is logged and nothing is stored. EndTransactionProcessor. Same; better: the history shows the answer."""
    bench.register(UNKNOWN)
    half_id = bench.prepare()
    bench.check()
    assert (bench.op(half_id), bench.answers(half_id)) == (None, ["unknown"])
    assert bench.waits(half_id) is not None
    assert not {"unknown", "resolve"} & set(ACTS), "an operator's verdict is commit or rollback"


def test_decision_of_a_half_that_is_not_there_fails(bench: Bench) -> None:
    """Offset and group are verified, else "Find prepared transaction message failed". EndTransactionProcessor. Same."""
    for decide in (bench.outbox.commit, bench.outbox.rollback):
        with pytest.raises(HalfNotFound):
            decide(uuid7())
    assert bench.value("SELECT count(*) FROM outbox.op_message") == 0


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


def test_rollback_then_commit(bench: Bench) -> None:
    """A commit after a rollback publishes. EndTransactionProcessor (#8158). Better: it fails, and says why."""
    half_id = bench.prepare()
    bench.outbox.rollback(half_id)
    with pytest.raises(AlreadyRolledBack, match=r"already rolled back \(by the producer\)"):
        bench.outbox.commit(half_id)
    assert (bench.dispatch(), bench.op(half_id)) == (0, ("rollback", "producer"))


def test_commit_then_rollback(bench: Bench) -> None:
    """A rollback after a commit is accepted; the message stays out. EndTransactionProcessor. Better: it fails."""
    half_id = bench.prepare()
    bench.outbox.commit(half_id)
    with pytest.raises(AlreadyCommitted):
        bench.outbox.rollback(half_id)
    assert (bench.dispatch(), bench.op(half_id)) == (1, ("commit", "producer"))


def test_commit_after_parking(bench: Bench) -> None:
    """A commit after the discard publishes beside the parked copy. EndTransactionProcessor (#8158). Better.

    The parked half gets its one verdict and isn't parked any more.
    """
    asked = bench.register(UNKNOWN, max_checks=1)
    half_id = bench.prepare()
    bench.check()
    assert bench.waits(half_id).parked
    bench.outbox.commit(half_id)
    bench.dispatch()
    assert (bench.waits(half_id), bench.messages()) == (None, [half_id])
    bench.age_and_check()
    assert len(asked) == 1
    with pytest.raises(AlreadyCommitted):
        bench.outbox.rollback(half_id)


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


@pytest.mark.parametrize("by", ["message", "topic", "settings"])
def test_immunity_of_its_own(new_bench: NewBench, by: str) -> None:
    """CHECK_IMMUNITY_TIME_IN_SECONDS is a message's own immunity. TransactionalMessageUtil. Better.

    A parameter, which goes before the topic's, which goes before the settings'.
    """
    bench = new_bench(immunity=1000)
    bench.register(COMMIT, immunity=None if by == "settings" else 2000)
    half_id = bench.prepare(immunity=dt.timedelta(seconds=3000) if by == "message" else None, due=False)
    expected = {"message": 3000, "topic": 2000, "settings": 1000}[by]
    assert expected - 100 < bench.waits(half_id).wait <= expected


@pytest.mark.parametrize("immunity", [-1, "60", "29*1000", float("nan"), True])
def test_immunity_that_cannot_be_read_is_refused(bench: Bench, immunity: Any) -> None:
    """-1 and what can't be read fall back to the default, silently. TransactionalMessageUtil (#7415). Better."""
    with pytest.raises(InvalidMessage, match="immunity"):
        bench.prepare(immunity=immunity)
    assert bench.value("SELECT count(*) FROM outbox.half_message") == 0


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


# --- the counter, and parking --------------------------------------------------------------------------------------


def test_fifteen_checks_and_no_more(bench: Bench) -> None:
    """transactionCheckMax is 15, and 16 with RocksDB. BrokerConfig, TransactionalMessageRocksDBService. Same."""
    asked = bench.register(UNKNOWN)
    half_id = bench.prepare()
    bench.age_and_check(14)
    assert not bench.waits(half_id).parked
    counts = bench.age_and_check(6)
    assert [each.checks for each in asked] == list(range(1, 16))
    assert counts == Counts(taken=1, failed=1, parked=1)
    assert (bench.waits(half_id).check_times, bench.waits(half_id).parked) == (15, True)
    assert bench.answers(half_id) == ["unknown"] * 15


def test_crash_during_the_last_check(bench: Bench) -> None:
    """A check that is sent counts, also if no answer comes. TransactionalMessageServiceImpl. Same.

    The process dies over the 15th check: there is no 16th, the half is parked.
    """
    asked = bench.register(UNKNOWN)
    half_id = bench.prepare()
    bench.age_and_check(14)
    bench.age()
    bench.kill_process_that_asks(half_id)
    assert (bench.waits(half_id).check_times, bench.waits(half_id).parked) == (15, False)
    assert bench.age_and_check(2) == Counts(taken=1, parked=1)
    assert len(asked) == 14
    assert len(bench.history(half_id)) == 15
    assert bench.waits(half_id).parked
    assert "no verdict in 15 checks; the last one: asked, and no answer came" in bench.waits(half_id).reason


def test_parked_with_its_reason(bench: Bench) -> None:
    """After the last check a copy goes to TRANS_CHECK_MAX_TIME_TOPIC. DefaultTransactionalMessageCheckListener. Better.

    The half itself is set aside, with the reason and the history of its checks, and can be decided where it is.
    """
    bench.register(Declined("the bank is closed"), max_checks=2)
    half_id = bench.prepare(body={"n": 1}, key="k", headers={"h": "v"})
    bench.age_and_check(3)
    row = bench.waits(half_id)
    assert row.reason.startswith("no verdict in 2 checks; the last one: ")
    assert row.reason.endswith("Declined: the bank is closed")
    assert bench.answers(half_id) == ["unknown", "unknown"]
    assert bench.op(half_id) is None
    assert bench.rows("SELECT key, headers, body FROM outbox.half_message") == [("k", {"h": "v"}, b'{"n":1}')]


def test_checks_copy_nothing(bench: Bench) -> None:
    """Each check appends the half again, with a new id and offset. TransactionalMessageServiceImpl (#1543). Better."""
    bench.register(UNKNOWN)
    half_id = bench.prepare()
    bench.age_and_check(15)
    assert bench.rows("SELECT id FROM outbox.half_message") == [(half_id,)]
    assert bench.value("SELECT count(*) FROM outbox.half_check") == 1


def test_counter_cannot_be_forged(bench: Bench) -> None:
    """TRANSACTION_CHECK_TIMES is a property that a caller may set. MessageConst. Better: headers are only headers."""
    asked = bench.register(COMMIT)
    headers = {"TRANSACTION_CHECK_TIMES": "15", "CHECK_IMMUNITY_TIME_IN_SECONDS": "1000"}
    half_id = bench.prepare(headers=headers, due=False)
    assert bench.waits(half_id).wait <= 6
    bench.age_and_check()
    assert (asked[0].checks, asked[0].headers) == (1, headers)


def test_resume_sets_the_counter_back(bench: Bench) -> None:
    """resumeCheckHalfMessage appends the half with counter 0, its birth kept. AdminBrokerProcessor. Better.

    No copy stays behind, and who did it, and why, is in the audit.
    """
    asked = bench.register(UNKNOWN, max_checks=2)
    half_id = bench.prepare()
    bench.age_and_check(3)
    born_at = bench.value("SELECT born_at FROM outbox.half_message")
    bench.outbox.operator.reset(half_id, by="ops", why="the bank is open again")
    assert (bench.waits(half_id).check_times, bench.waits(half_id).parked) == (0, False)
    bench.check()
    bench.age_and_check(3)
    assert [each.checks for each in asked] == [1, 2, 1, 2]
    assert bench.waits(half_id).parked
    assert {each.born_at for each in asked} == {born_at}
    assert bench.rows("SELECT actor, action, reason FROM outbox.audit") == [("ops", "reset", "the bank is open again")]


def test_resume_then_commit(bench: Bench) -> None:
    """A resumed half that is committed leaves its parked copy behind. AdminBrokerProcessor. Better: one verdict."""
    asked = bench.register(UNKNOWN, max_checks=1)
    half_id = bench.prepare()
    bench.check()
    bench.outbox.operator.reset(half_id, by="ops", why="look again")
    bench.outbox.commit(half_id)
    bench.age_and_check()
    bench.dispatch()
    assert (len(asked), bench.waits(half_id), bench.messages()) == (1, None, [half_id])
    with pytest.raises(ActRefused, match="it is dispatched; nothing is left to decide"):
        bench.outbox.operator.reset(half_id, by="ops", why="once more")


def test_counter_moves_only_when_asked(new_bench: NewBench) -> None:
    """The counter moves before it is known whether anybody can be asked. ProducerManager (#1519). Better.

    Not by waiting, not by a pass that stops, not by a connection that can't be opened.
    """
    bench = new_bench(immunity=1000)
    asked = bench.register(COMMIT)
    half_id = bench.prepare(due=False)
    bench.check()
    bench.age()
    assert bench.check(stopping=lambda: True) == Counts(more=True)
    bench.asker._new_runner = lambda is_async: NoRunner()
    bench.check()
    assert (bench.waits(half_id).check_times, bench.history(half_id), asked) == (0, [], [])
    bench.colleague().check()
    assert [each.checks for each in asked] == [1]


class NoRunner:
    """A connection that can't be opened."""

    def run(self, act: Any) -> Counts:  # noqa: ARG002
        raise OperationalError("", {}, Exception("connection refused"))

    def end(self) -> None:
        pass


# --- who is asked --------------------------------------------------------------------------------------------------


def test_no_checker_spends_no_budget(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """Without a live producer the check is dropped, and counted. ProducerManager, Broker2Client (#475). Better.

    A topic without a checker is left alone and told, and the others have their checks.
    """
    asked = bench.register(COMMIT, "shipped")
    alone = [bench.prepare("paid") for _ in range(20)]
    shipped = bench.prepare("shipped")
    for _ in range(16):
        bench.check()
    assert {(bench.waits(each).check_times, bench.waits(each).parked) for each in alone} == {(0, False)}
    assert (bench.op(shipped), len(asked)) == (("commit", "check"), 1)
    assert "halves of topic 'paid' wait for a check, and no checker is registered" in caplog.text
    late = bench.register(COMMIT, "paid")
    for _ in range(5):
        bench.check()
    assert [each.checks for each in late] == [1] * 20


def test_topics_own_checker_is_asked(bench: Bench) -> None:
    """Any producer of the group may be asked about any topic. ProducerManager (#9791). Better."""
    paid, shipped = bench.register(COMMIT, "paid"), bench.register(ROLLBACK, "shipped")
    ids = bench.prepare("paid"), bench.prepare("shipped")
    bench.check()
    assert ([each.id for each in paid], [each.id for each in shipped]) == ([ids[0]], [ids[1]])
    assert [bench.op(each) for each in ids] == [("commit", "check"), ("rollback", "check")]


def test_any_worker_may_ask(bench: Bench) -> None:
    """Any live producer of the group is asked, in turn. ProducerManager. Same: any worker with the topic's checker."""
    half_id = bench.prepare()
    bench.check()
    other = bench.colleague(Outbox(bench.engine, group="another"))
    asked = other.register(COMMIT)
    other.check()
    assert ([each.id for each in asked], bench.op(half_id)) == ([half_id], ("commit", "check"))


def test_checker_is_told_what_it_needs(bench: Bench) -> None:
    """The checker gets the half with its properties. AbstractTransactionalMessageCheckListener. Same.

    Better: body decoded, age and number of the check, headers.
    """
    asked = bench.register(UNKNOWN)
    half_id = bench.prepare(body={"n": 1}, key="k", tag="t", headers={"h": "ü"})
    bench.age_and_check(2)
    assert [each.checks for each in asked] == [1, 2]
    orphan = asked[1]
    assert (orphan.id, orphan.topic, orphan.key, orphan.tag, orphan.headers) == (half_id, "paid", "k", "t", {"h": "ü"})
    assert (orphan.body, orphan.raw, orphan.content_type) == ({"n": 1}, b'{"n":1}', "application/json")
    assert orphan.born_at == bench.value("SELECT born_at FROM outbox.half_message")
    assert orphan.age > asked[0].age >= dt.timedelta()


def test_checkers_at_once_are_bounded(bench: Bench) -> None:
    """Checks run in a pool of 2 to 5 threads. AbstractTransactionalMessageCheckListener. Same: 5 in flight.

    Better: nothing queues behind them; what isn't asked isn't claimed.
    """
    gate = threading.Barrier(6, timeout=60)
    lock, at_once, most = threading.Lock(), 0, 0

    @bench.outbox.checker("paid")
    def checker(orphan: Orphan) -> Resolution:
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
        gate.wait()
        with lock:
            at_once -= 1
        return COMMIT

    for _ in range(10):
        bench.prepare()
    with ThreadPoolExecutor(1) as pool:
        one_pass = pool.submit(bench.check)
        bench.wait_for(lambda: gate.n_waiting == 5, "five checkers run")
        assert bench.value("SELECT sum(check_times) FROM outbox.half_check") == 5
        gate.wait()
        bench.wait_for(lambda: gate.n_waiting == 5, "the next five run")
        gate.wait()
        assert one_pass.result(60).done == 10
    assert most == 5


def test_hanging_checker_holds_up_no_other_topic(new_bench: NewBench) -> None:
    """One slow checker delays all, in a client's one thread. ProducerImpl. Better.

    It is given up after its own time, its topic rests while too many hang, and the other topics have their checks.
    """
    bench = new_bench(checks_in_flight=2)
    hanging = bench.register(bench.let_go, "paid", timeout=SHORT)
    asked = bench.register(COMMIT, "shipped")
    for _ in range(6):
        bench.prepare("paid")
    for _ in range(4):
        shipped = [bench.prepare("shipped") for _ in range(10)]
        bench.age_and_check()
        assert {bench.op(each) for each in shipped} == {("commit", "check")}
    assert len(asked) == 40
    assert len(hanging) == 2
    assert bench.asker.rests("paid")
    assert not bench.asker.rests("shipped")


def test_two_schedulers_at_once(bench: Bench) -> None:
    """One thread of one broker checks, over one queue. TransactionalMessageServiceImpl (#388). Better.

    As many as one likes: each half is asked about by one at a time, and none twice.
    """
    lock, now = threading.Lock(), set[UUID]()
    twice: list[UUID] = []
    asked: list[Orphan] = []

    @bench.outbox.checker("paid")
    def checker(orphan: Orphan) -> Resolution:
        with lock:
            twice.extend({orphan.id} & now)
            now.add(orphan.id)
            asked.append(orphan)
        time.sleep(0.001)
        with lock:
            now.remove(orphan.id)
        return COMMIT if orphan.body["n"] % 2 else UNKNOWN

    with bench.engine.begin() as connection:
        ids = [bench.outbox.prepare(connection, "paid", {"n": n}) for n in range(200)]
    bench.age()
    benches = [bench, *(bench.colleague() for _ in range(3))]
    with ThreadPoolExecutor(len(benches)) as pool:
        start = threading.Barrier(len(benches))
        counts = list(pool.map(lambda each: (start.wait(), each.check())[1], benches))
    assert sum(each.taken for each in counts) == 200
    assert sum(each.done for each in counts) == 100
    assert sorted(each.id for each in asked) == sorted(ids)
    assert twice == []
    assert sum(each.taken > 0 for each in counts) > 1


# --- what the checker answers --------------------------------------------------------------------------------------


def test_checker_that_raises(bench: Bench) -> None:
    """An exception of the checker is UNKNOW, with a remark. DefaultMQProducerImpl. Better: recorded, with its trace."""
    bench.register(Declined("the bank is closed"))
    half_id = bench.prepare()
    assert bench.check() == Counts(taken=1, failed=1)
    (check,) = bench.history(half_id)
    assert (check.answer, check.error.partition("\n")[0]) == (
        "unknown",
        f"{__name__}.Declined: the bank is closed",
    )
    assert "Traceback" in check.error
    assert bench.waits(half_id).last_error == check.error


def test_checker_that_returns_none(bench: Bench) -> None:
    """null is a NullPointerException, and nothing is sent. DefaultMQProducerImpl. Better: UNKNOWN, and recorded."""
    bench.register(None)
    half_id = bench.prepare()
    assert bench.check() == Counts(taken=1, failed=1)
    (check,) = bench.history(half_id)
    assert (check.answer, check.error) == ("unknown", "the checker returned None, which is not a Resolution")


def test_checker_that_hangs(bench: Bench) -> None:
    """A checker that never answers keeps the client's only thread. DefaultMQProducerImpl. Better.

    It is given up after its time: UNKNOWN, and recorded.
    """
    bench.register(bench.let_go, timeout=SHORT, interval=30)
    bench.warm_up()
    half_id = bench.prepare()
    assert bench.check() == Counts(taken=1, failed=1)
    (check,) = bench.history(half_id)
    assert (check.answer, check.seconds) == ("unknown", SHORT)
    assert check.error == f"no answer within {SHORT} s: the checker was given up"
    assert 15 < bench.waits(half_id).wait <= 30


@pytest.mark.parametrize("takes_session", [False, True])
def test_late_answer_is_not_recorded(bench: Bench, takes_session: bool) -> None:
    """An answer to a check is taken however late, under the copy's new offsets. EndTransactionProcessor. Better.

    After its time the question is closed: a late answer changes nothing, and another check asks anew.
    """
    answers: list[Resolution] = []

    def late(orphan: Orphan) -> Resolution:
        bench.let_go.wait()
        answers.append(ROLLBACK)
        return ROLLBACK

    def late_with_session(orphan: Orphan, session: Any) -> Resolution:
        session.execute(text("CREATE TABLE change AS SELECT 1"))
        return late(orphan)

    bench.outbox.checker("paid", timeout=SHORT)(late_with_session if takes_session else late)
    bench.warm_up()
    half_id = bench.prepare()
    bench.check()
    bench.let_go.set()
    bench.wait_for(lambda: answers, "the checker answers at last")
    bench.wait_for(lambda: bench.connections("state <> 'idle'") == 0, "the late answer is dealt with")
    assert (bench.op(half_id), bench.answers(half_id)) == (None, ["unknown"])
    assert bench.value("SELECT to_regclass('change')") is None


def test_state_that_changed_meanwhile_wins(bench: Bench) -> None:
    """An answer to a check publishes beside a commit that came meanwhile. EndTransactionProcessor (#8158). Better."""
    half_id = bench.prepare()

    @bench.outbox.checker("paid")
    def checker(orphan: Orphan) -> Resolution:
        bench.outbox.commit(orphan.id)
        return ROLLBACK

    bench.check()
    (check,) = bench.history(half_id)
    assert bench.op(half_id) == ("commit", "producer")
    assert check.error == "answered rollback, but the producer had decided commit"


def test_history_of_checks(bench: Bench) -> None:
    """Checks are in the broker's log, and counted nowhere. BrokerMetricsManager (#2840). Better.

    Each check is kept: when, by which worker, its answer, how long it took, its error.
    """
    given = iter([UNKNOWN, "commit", COMMIT])

    @bench.outbox.checker("paid")
    def checker(orphan: Orphan) -> Any:
        return next(given)

    half_id = bench.prepare()
    bench.age_and_check(3)
    history = bench.history(half_id)
    assert [(each.asked, each.answer) for each in history] == [
        ("checker", "unknown"),
        ("checker", "unknown"),
        ("checker", "commit"),
    ]
    assert [each.error for each in history] == [
        None,
        "the checker returned 'commit' (str), which is not a Resolution",
        None,
    ]
    assert {each.worker for each in history} == {once.worker_name()}
    assert all(0 <= each.seconds < 60 for each in history)
    assert [each.asked_at for each in history] == sorted(each.asked_at for each in history)


# --- crashes, poison, time -----------------------------------------------------------------------------------------


def test_pass_is_bounded_in_time(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scan takes 60 s for each queue, MAX_PROCESS_TIME_LIMIT. TransactionalMessageServiceImpl. Same.

    Better: what was checked is recorded one by one; the next pass goes on with the rest.
    """
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(once, "time", SimpleNamespace(monotonic=lambda: clock.now))

    @bench.outbox.checker("paid")
    def checker(orphan: Orphan) -> Resolution:
        clock.now += 11
        return COMMIT

    for _ in range(20):
        bench.prepare()
    counts = bench.check()
    # Those that were in flight when the time was over are waited for.
    assert 6 <= counts.done <= 10
    assert counts.more
    while bench.check().more:
        pass
    assert bench.value("SELECT count(*) FROM outbox.op_message") == 20


def raise_(error: BaseException) -> Any:
    """Raise, where only an expression can stand."""
    raise error


POISON: dict[str, Callable[[Orphan], Any]] = {
    "a body that can't be decoded": lambda orphan: orphan.body,
    "an exception": lambda _: raise_(Declined()),
    "SystemExit": lambda _: raise_(SystemExit(1)),
    "KeyboardInterrupt": lambda _: raise_(KeyboardInterrupt()),
    "GeneratorExit": lambda _: raise_(GeneratorExit()),
    "an error that can't be written down": lambda _: raise_(Declined("\0\ud800")),
    "an answer that can't be shown": lambda _: type("Bad", (), {"__repr__": lambda _: 1 / 0})(),
    "an answer that can't be written down": lambda _: "\0\ud800",
    "a half that is gone": lambda _: COMMIT,
}


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("kind", POISON)
def test_one_poisonous_half_stops_no_other(bench: Bench, kind: str, is_async: bool) -> None:
    """An exception in a scan leaves its offsets unsaved, and starves the rest. TransactionalMessageServiceImpl (#9500).

    Better: each half has its own progress, its own error, and its own end.
    """
    poison = bench.prepare(body=b"{", key="poison")
    bench.run("UPDATE outbox.half_message SET content_type = 'application/json' WHERE key = 'poison'")
    if kind == "a half that is gone":
        bench.run("DELETE FROM outbox.half_message WHERE key = 'poison'")
    others = [bench.prepare(body={"n": n}) for n in range(12)]

    def checker(orphan: Orphan) -> Any:
        return POISON[kind](orphan) if orphan.key == "poison" else COMMIT

    async def async_checker(orphan: Orphan) -> Any:
        return checker(orphan)

    bench.outbox.checker("paid", max_checks=2)(async_checker if is_async else checker)
    counts = bench.check()
    assert (counts.done, counts.failed) == (12, 1)
    assert {bench.op(each) for each in others} == {("commit", "check")}
    assert (bench.op(poison), bench.waits(poison).check_times) == (None, 1)
    (check,) = bench.history(poison)
    assert check.answer == "unknown"
    assert check.error
    bench.prepare()
    assert bench.age_and_check().done == 1
    assert bench.waits(poison).parked


def test_crash_of_the_asker_frees_its_claim(bench: Bench) -> None:
    """A check that was sent and never answered is sent again by the next scan. TransactionalMessageServiceImpl. Same.

    Better: the claim ends by the database's clock, and any worker goes on; what was asked counts.
    """
    asked = bench.register(COMMIT)
    half_id = bench.prepare()
    bench.kill_process_that_asks(half_id)
    claim = bench.waits(half_id)
    assert (claim.check_times, claim.last_error) == (1, "asked, and no answer came: the worker died or was cut off")
    # Until it must have answered, and one pause longer.
    assert 20 < claim.wait <= 40
    assert bench.check() == Counts()
    bench.age_and_check()
    assert ([each.checks for each in asked], bench.op(half_id)) == ([2], ("commit", "check"))
    assert bench.answers(half_id)[1:] == ["commit"]


#: Where the server ends a backend: the event, the table, the how manieth time, and what it then is that dies.
CLAIM = [("BEFORE UPDATE", "outbox.half_check", 1), ("BEFORE INSERT", "outbox.check_history", 1)]
CLAIM += [("COMMIT", "outbox.check_history", 1)]
VERDICT = [("BEFORE INSERT", "change", 1), ("AFTER INSERT", "change", 1)]
VERDICT += [("BEFORE INSERT", "outbox.op_message", 1), ("AFTER INSERT", "outbox.op_message", 1)]
VERDICT += [("BEFORE DELETE", "outbox.half_check", 1), ("AFTER DELETE", "outbox.half_check", 1)]
VERDICT += [("BEFORE UPDATE", "outbox.check_history", 1), ("AFTER UPDATE", "outbox.check_history", 1)]
VERDICT += [("COMMIT", "outbox.op_message", 1)]


def names(point: tuple[str, str, int]) -> str:
    """Return what a test of a point is called."""
    return " ".join(map(str, point))


def kill_while_deciding(bench: Bench, point: tuple[str, str, int], *, takes_session: bool, verdict: Resolution) -> None:
    """Have the server end whoever comes to a point of a check, and see what is left; then let others go on."""
    bench.run("CREATE TABLE change (half_id uuid)")
    note = text("INSERT INTO change VALUES (:id)")

    def checker(orphan: Orphan, session: Any) -> Resolution:
        session.execute(note, {"id": orphan.id})
        return verdict

    def plain_checker(orphan: Orphan) -> Resolution:
        return verdict

    bench.outbox.checker("paid")(checker if takes_session else plain_checker)
    half_id, other = bench.prepare(), bench.prepare()
    event, table, nth = point
    bench.kill_at(event, table, nth=nth)
    try:
        bench.check()
    except DBAPIError:
        assert point in CLAIM
    assert bench.was_killed() or (table == "change" and not takes_session)
    decided = [half for half in (half_id, other) if bench.op(half)]
    assert bench.rows("SELECT half_id FROM change ORDER BY 1") == [(half,) for half in decided if takes_session]
    bench.age_and_check(2)
    bench.dispatch()
    assert (bench.op(half_id), bench.op(other)) == ((verdict, "check"), (verdict, "check"))
    assert bench.value("SELECT count(*) FROM change") == (2 if takes_session else 0)
    assert sorted(bench.messages()) == (sorted([half_id, other]) if verdict is COMMIT else [])
    assert bench.value("SELECT count(*) FROM outbox.half_check") == 0
    for half in (half_id, other):
        *lost, last = bench.history(half)
        assert last.answer == verdict
        assert {each.answer for each in lost} <= {"unknown"}


@pytest.mark.parametrize("verdict", [COMMIT, ROLLBACK])
@pytest.mark.parametrize("takes_session", [False, True], ids=["plain", "session"])
@pytest.mark.parametrize("point", CLAIM + VERDICT, ids=names)
def test_crash_between_any_two_statements(
    bench: Bench, point: tuple[str, str, int], takes_session: bool, verdict: Resolution
) -> None:
    """A crash between message, op and offset doubles or loses. EndTransactionProcessor, #9500. Better.

    Whichever statement of the claim or the decision the server dies at, there is one verdict in the end, and what the
    checker wrote is there as often.
    """
    kill_while_deciding(bench, point, takes_session=takes_session, verdict=verdict)


def test_answer_of_the_commit_is_lost(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody learns whether END_TRANSACTION arrived, and the check commits again. DefaultMQProducerImpl. Better.

    The COMMIT of a verdict took effect, and the connection broke before anybody knew: it stays the one verdict.
    """
    half_id = bench.prepare()
    pids: list[int] = []

    def commit_and_break(connection: Connection) -> None:
        pids.append(driver_of(connection).info.backend_pid)
        commit(connection)
        bench.run("SELECT pg_terminate_backend(:pid, 60000)", pid=pids[0])
        connection.execute(text("SELECT 1"))

    monkeypatch.setattr(asker, "commit", commit_and_break)

    @bench.outbox.checker("paid")
    def checker(orphan: Orphan, session: Any) -> Resolution:
        return COMMIT

    bench.check()
    assert len(pids) == 1
    bench.age_and_check()
    bench.dispatch()
    assert (bench.op(half_id), bench.answers(half_id), bench.messages()) == (
        ("commit", "check"),
        ["commit"],
        [half_id],
    )


@pytest.mark.parametrize(
    "point",
    [
        ("BEFORE INSERT", "outbox.op_message", 1),
        ("AFTER INSERT", "outbox.op_message", 1),
        ("BEFORE DELETE", "outbox.half_check", 1),
        ("COMMIT", "outbox.op_message", 1),
    ],
    ids=names,
)
def test_crash_of_the_producers_decision(bench: Bench, point: tuple[str, str, int]) -> None:
    """An END_TRANSACTION that is lost is made good by the check. DefaultMQProducerImpl. Same.

    Wherever the producer's commit is broken off, the half is undecided, and the check finds the verdict.
    """
    asked = bench.register(COMMIT)
    half_id = bench.prepare()
    bench.kill_at(point[0], point[1])
    with pytest.raises(OperationalError):
        bench.outbox.commit(half_id)
    assert (bench.op(half_id), bench.waits(half_id).check_times) == (None, 0)
    bench.age_and_check()
    bench.dispatch()
    assert (len(asked), bench.op(half_id), bench.messages()) == (1, ("commit", "check"), [half_id])


def test_one_question_in_each_interval(bench: Bench) -> None:
    """A check that can't be dispatched is dropped, or sent twice. AbstractTransactionalMessageCheckListener. Better.

    However many workers look at the same moment, a half has one question in each interval (#1519, #1694).
    """
    asked = bench.register(UNKNOWN)
    ids = [bench.prepare() for _ in range(10)]
    benches = [bench, *(bench.colleague() for _ in range(3))]
    for _ in range(3):
        bench.age()
        with ThreadPoolExecutor(len(benches)) as pool:
            list(pool.map(lambda each: each.check(), benches))
    assert Counter(each.id for each in asked) == dict.fromkeys(ids, 3)
    assert {bench.waits(each).check_times for each in ids} == {3}
