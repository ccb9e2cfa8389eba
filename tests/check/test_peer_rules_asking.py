"""RocketMQ's rules of who is asked, how often, and what is made of the answer, one test each; see test_peer_rules."""

from __future__ import annotations

import datetime as dt
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import text
from sqlalchemy.exc import OperationalError

from outbox import Counts, Orphan, Outbox, Resolution
from outbox.text import process_name
from tests.check.support import SHORT, Bench, Declined, NoRunner, checker_of

NewBench = Callable[..., Bench]
COMMIT, ROLLBACK, UNKNOWN = Resolution.COMMIT, Resolution.ROLLBACK, Resolution.UNKNOWN

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
    stored = "SELECT key, headers, body FROM outbox.half_message"
    assert bench.rows(stored) == [("k", {"h": "v"}, b'{"n":1}')]


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


def test_counter_moves_only_when_asked(new_bench: NewBench) -> None:
    """The counter moves before it is known whether any producer can be asked. ProducerManager (#1519). Better.

    Not by waiting, not by a pass that stops, not by a connection that can't be opened.
    """
    bench = new_bench(immunity=1000)
    asked = bench.register(COMMIT)
    half_id = bench.prepare(due=False)
    bench.check()
    bench.age()
    assert bench.check(stopping=lambda: True) == Counts(more=True)
    bench.asker._new_runner = lambda is_async: NoRunner(OperationalError("", {}, Exception("connection refused")))
    bench.check()
    assert (bench.waits(half_id).check_times, bench.history(half_id), asked) == (0, [], [])
    bench.colleague().check()
    assert [each.checks for each in asked] == [1]


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

    Better: nothing queues behind them; what isn't asked isn't leased.
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
    # One scheduler asks about five at a time: the sixth is asked about by another one.
    both_ask = threading.Barrier(6, timeout=60)

    @bench.outbox.checker("paid")
    def checker(orphan: Orphan) -> Resolution:
        with lock:
            twice.extend({orphan.id} & now)
            now.add(orphan.id)
            asked.append(orphan)
            is_among_the_first = len(asked) <= both_ask.parties
        if is_among_the_first:
            both_ask.wait()
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

    note = text("CREATE TABLE change AS SELECT 1")
    checker = checker_of(late, lambda session: session.execute(note), takes_session=takes_session)
    bench.outbox.checker("paid", timeout=SHORT)(checker)
    bench.warm_up()
    half_id = bench.prepare()
    bench.check()
    bench.let_go.set()
    bench.wait_for(lambda: answers, "the checker answers at last")
    bench.wait_for(lambda: bench.connections("state <> 'idle'") == 0, "the late answer is dealt with")
    assert (bench.op(half_id), bench.answers(half_id)) == (None, ["unknown"])
    assert bench.value("SELECT to_regclass('change')") is None


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
    assert {each.worker for each in history} == {process_name()}
    assert all(each.seconds >= 0 for each in history)
    assert [each.asked_at for each in history] == sorted(each.asked_at for each in history)
