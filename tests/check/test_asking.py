"""Threads, connections, leases: no checker or connection of one holds up a pass, and no late word counts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Connection, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from outbox import Answer, Counts, Orphan, Outbox, Resolution, Settings
from outbox.check import sql as check_sql
from outbox.check.asker import Interview
from outbox.check.check_pass import question_of
from outbox.database.decision import decide
from outbox.database.engines import EngineRunner
from outbox.database.execute import driver_of, execute
from outbox.worker.connections import OwnRunner, WorkerDatabase
from tests.check.support import SHORT, Bench, NoRunner, asking_threads, beside, checker_of

NewBench = Callable[..., Bench]
COMMIT, ROLLBACK, UNKNOWN = Resolution.COMMIT, Resolution.ROLLBACK, Resolution.UNKNOWN
NOTE = text("CREATE TABLE change AS SELECT 1")


def note(session: Session) -> None:
    """Write something with a checker's session."""
    session.execute(NOTE)


# --- late answers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("takes_session", [False, True], ids=["plain", "session"])
def test_late_answer_in_a_room_that_cannot_be_closed(bench: Bench, takes_session: bool) -> None:
    """Also where the connection stays open under a checker that was given up, its late answer changes nothing."""
    answered: list[UUID] = []
    bench.asker._new_runner = lambda _: EngineRunner(bench.engine)

    def late(orphan: Orphan) -> Resolution:
        bench.let_go.wait()
        answered.append(orphan.id)
        return ROLLBACK

    bench.outbox.checker("paid", timeout=SHORT)(checker_of(late, note, takes_session=takes_session))
    half_id = bench.prepare()
    bench.check()
    before = bench.waits(half_id).next_check_at
    bench.let_go.set()
    bench.wait_for(lambda: answered and not asking_threads(), "the checker answers at last")
    assert (bench.op(half_id), bench.answers(half_id)) == (None, ["unknown"])
    assert bench.value("SELECT to_regclass('change')") is None
    assert bench.waits(half_id).next_check_at == before


@pytest.mark.parametrize("verdict", [COMMIT, ROLLBACK, UNKNOWN])
@pytest.mark.parametrize("takes_session", [False, True], ids=["plain", "session"])
def test_answer_to_a_question_that_another_has_put_since(
    bench: Bench, takes_session: bool, verdict: Resolution
) -> None:
    """A process that slept longer than its lease: the half was asked about again, and its old answer is void."""

    def late(orphan: Orphan) -> Resolution:
        bench.let_go.wait()
        return verdict

    bench.outbox.checker("paid", timeout=60)(checker_of(late, note, takes_session=takes_session))
    half_id = bench.prepare()
    awake = bench.colleague(Outbox(bench.engine, settings=bench.settings))
    asked = awake.register(UNKNOWN, interval=1000)
    with beside(bench, bench.check) as passing:
        bench.wait_for(lambda: bench.history(half_id), "the question is put")
        bench.age()
        awake.check()
        assert [each.checks for each in asked] == [2]
        bench.let_go.set()
        passing.result(60)
    assert bench.op(half_id) is None
    assert bench.value("SELECT to_regclass('change')") is None
    assert (bench.waits(half_id).check_times, bench.waits(half_id).wait > 900) == (2, True)
    awake.asker.end()
    other = bench.colleague(Outbox(bench.engine, settings=bench.settings))
    other.register(COMMIT)
    bench.age()
    other.check()
    assert bench.op(half_id) == ("commit", "check")


def test_answer_that_is_recorded_while_another_asks(bench: Bench) -> None:
    """An UNKNOWN that waits for the history of its half leaves a lease alone that came in between."""
    bench.register(bench.let_go, timeout=60, interval=1)
    half_id = bench.prepare()
    other = bench.colleague(Outbox(bench.engine, settings=bench.settings))
    other.register(UNKNOWN, interval=1000)
    checker = bench.outbox.checkers["paid"]
    with bench.engine.connect() as mine, bench.engine.connect() as rival, ThreadPoolExecutor(1) as pool:
        with mine.begin():
            ((row,),) = execute(mine, check_sql.lease("outbox", "paid", 1, question_of(checker)))
        interview = Interview.of(checker, bench.settings, row)
        with rival.begin():
            rival.execute(text("SELECT FROM outbox.check_history FOR UPDATE"))
            recording = pool.submit(interview.record_unknown, mine, Answer(UNKNOWN, "late", 1.0))
            pid = driver_of(mine).info.backend_pid
            bench.wait_for(lambda: bench.value("SELECT cardinality(pg_blocking_pids(:pid))", pid=pid), "it waits")
            bench.age()
            leased = other.check()
        recording.result(60)
    assert (leased, bench.waits(half_id).wait > 900) in [(Counts(taken=1, failed=1), True), (Counts(), False)]


@pytest.mark.parametrize("act", ["reset", "check"])
def test_operator_who_has_it_checked_while_it_is(bench: Bench, act: str) -> None:
    """A half that is being asked about isn't asked about a second time meanwhile, and its verdict counts."""
    bench.register(bench.let_go, timeout=60)
    half_id = bench.prepare()
    other = bench.colleague(Outbox(bench.engine, settings=bench.settings))
    asked = other.register(ROLLBACK)
    with beside(bench, bench.check) as passing:
        bench.wait_for(lambda: bench.history(half_id), "the question is put")
        getattr(bench.outbox.operator, act)(half_id, by="ops", why="now")
        assert other.check() == Counts()
        bench.let_go.set()
        assert passing.result(60) == Counts(taken=1, done=1)
    assert (asked, bench.op(half_id)) == ([], ("commit", "check"))


def test_reset_while_it_is_asked(bench: Bench) -> None:
    """The question that is being put isn't counted any more; its answer is recorded, and sets the next check."""

    @bench.outbox.checker("paid", timeout=60, interval=30, max_checks=1)
    def checker(orphan: Orphan) -> Resolution:
        bench.outbox.operator.reset(orphan.id, by="ops", why="start again")
        raise LookupError("no such payment")

    half_id = bench.prepare()
    assert bench.check() == Counts(taken=1, failed=1)
    row = bench.waits(half_id)
    assert (row.check_times, row.parked) == (0, False)
    assert "no such payment" in row.last_error
    assert row.wait <= 30
    assert bench.answers(half_id) == ["unknown"]


def test_answer_just_before_the_end_of_its_time(bench: Bench) -> None:
    """An answer that came in time counts, also if the pass was too busy to see it before the time was over."""
    bench.register(COMMIT, timeout=SHORT)
    half_id = bench.prepare()
    checker = bench.outbox.checkers["paid"]
    with bench.engine.connect() as connection:
        with connection.begin():
            ((row,),) = execute(connection, check_sql.lease("outbox", "paid", 1, question_of(checker)))
        interview = Interview.of(checker, bench.settings, row)
        bench.asker.begin(interview)
        bench.wait_for(lambda: bench.op(half_id) and not asking_threads(), "the answer is recorded")
        over = time.monotonic() + SHORT
        bench.wait_for(lambda: time.monotonic() > over, "its time is over")
        assert bench.asker.next_ended(wait=True) == (interview, None)
    assert interview.answer
    assert (interview.answer.resolution, interview.abandoned) == (COMMIT, False)
    assert not bench.asker.rests("paid")


# --- connections ---------------------------------------------------------------------------------------------------


def test_connection_that_opens_too_late(bench: Bench) -> None:
    """A checker whose connection took longer than its time isn't asked any more, and the counter stays."""
    asked = bench.register(COMMIT, timeout=SHORT)
    half_id = bench.prepare()
    database = WorkerDatabase(bench.engine)
    connect = database.connect

    def slowly(name: str = "outbox") -> Connection:
        bench.let_go.wait()
        return connect(name)

    database.connect = slowly  # type: ignore[method-assign,assignment]
    bench.asker._new_runner = lambda _: OwnRunner(database, None, threading.Event())
    assert bench.check() == Counts()
    assert (bench.waits(half_id).check_times, bench.history(half_id)) == (0, [])
    bench.let_go.set()
    bench.wait_for(lambda: not asking_threads(), "the connection is there at last")
    assert (asked, bench.op(half_id), bench.waits(half_id).check_times) == ([], None, 0)
    bench.check()
    assert [each.checks for each in asked] == [1]


def test_connections_that_cannot_be_opened(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """Without connections for the checkers a pass doesn't run in circles: it says so, and leaves the rest for later."""
    runner = NoRunner(OperationalError("", {}, Exception("too many clients already")))
    bench.register(COMMIT)
    ids = [bench.prepare() for _ in range(20)]
    bench.asker._new_runner = lambda _: runner
    assert bench.check(stopping=lambda: runner.opened > 100) == Counts()
    assert runner.opened <= bench.settings.checks_in_flight
    assert {bench.waits(each).check_times for each in ids} == {0}
    assert "too many clients already" in caplog.text


def test_thread_that_cannot_be_started(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process out of threads asks nobody, and no half is the worse for it."""
    asked = bench.register(COMMIT)
    ids = [bench.prepare() for _ in range(3)]

    class NoThread(threading.Thread):
        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading, "Thread", NoThread)
        assert bench.check() == Counts()
    assert ({bench.waits(each).check_times for each in ids}, asked) == ({0}, [])
    assert bench.check().done == 3


def test_connections_are_shared_and_closed(bench: Bench) -> None:
    """Asking takes at most as many connections as may be in flight; one is kept for the next pass."""
    opened: list[Any] = []
    new_runner = bench.asker._new_runner

    def count(is_async: bool) -> Any:
        opened.append(new_runner(is_async))
        return opened[-1]

    bench.asker._new_runner = count
    bench.register(COMMIT)
    for _ in range(30):
        bench.prepare()
    assert bench.check().done == 30
    assert len(opened) == bench.settings.checks_in_flight
    # That of the pass, which it took out of the application's pool, and that of the one runner.
    bench.wait_for(lambda: bench.connections() == 2, "all connections but one are closed")
    bench.prepare()
    assert bench.check().done == 1
    assert len(opened) == bench.settings.checks_in_flight
    bench.asker.end()
    bench.runner.end()
    bench.wait_for(lambda: bench.connections() == 1, "all are closed")


def test_connection_lost_under_a_checker(bench: Bench) -> None:
    """The server ends the connection while a checker uses it: UNKNOWN, and the next question has a new connection."""

    @bench.outbox.checker("paid")
    def checker(orphan: Orphan, session: Any) -> Resolution:
        if orphan.checks == 1:
            bench.run("SELECT pg_terminate_backend(:pid)", pid=session.scalar(text("SELECT pg_backend_pid()")))
        session.execute(NOTE)
        return COMMIT

    half_id = bench.prepare()
    assert bench.check() == Counts(taken=1, failed=1)
    assert "terminating connection" in bench.history(half_id)[0].error
    assert bench.age_and_check() == Counts(taken=1, done=1)


@pytest.mark.parametrize("takes_session", [False, True], ids=["plain", "session"])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_connection_lost_between_two_passes(bench: Bench, is_async: bool, takes_session: bool) -> None:
    """Nobody is asked on a connection that has gone while it lay idle: the answer couldn't be recorded."""
    asked: list[int] = []

    def answer(orphan: Orphan) -> Resolution:
        asked.append(orphan.checks)
        return COMMIT

    bench.outbox.checker("paid")(checker_of(answer, is_async=is_async, takes_session=takes_session))
    bench.prepare()
    assert bench.check().done == 1
    runner: Any = bench.asker._idle[is_async][0]
    bench.run("SELECT pg_terminate_backend(:pid, 60000)", pid=runner._drivers[0].info.backend_pid)
    half_id = bench.prepare()
    assert bench.check() == Counts()
    assert (bench.waits(half_id).check_times, bench.history(half_id), asked) == (0, [], [1])
    assert bench.check() == Counts(taken=1, done=1)
    assert asked == [1, 1]


def test_connection_of_the_pass_is_lost(new_bench: NewBench) -> None:
    """A pass that fails loses no interview that still runs: the next one waits for it, and asks about the rest."""
    bench = new_bench(checks_in_flight=2)
    slow = bench.register(bench.let_go, "slow", timeout=60)
    stuck = bench.register(bench.let_go, "stuck", timeout=SHORT)
    running, abandoned = bench.prepare("slow"), bench.prepare("stuck")
    bench.warm_up(count=2)

    def cut() -> None:
        bench.wait_for(lambda: slow and stuck, "both are asked")
        bench.run("SELECT pg_terminate_backend(:pid, 60000)", pid=bench.runner.backend_pid)

    with ThreadPoolExecutor(1) as pool:
        cutting = pool.submit(cut)
        with pytest.raises(OperationalError):
            bench.check()
        cutting.result(60)
        assert bench.asker.busy
        assert (bench.op(running), bench.answers(abandoned)) == (None, [None])
        going_on = pool.submit(bench.check)
        bench.let_go.set()
        assert going_on.result(60) == Counts(taken=1, done=1)
    assert not bench.asker.busy
    assert bench.op(running) == ("commit", "check")
    bench.wait_for(lambda: not asking_threads(), "the threads have ended")
    assert (bench.op(abandoned), bench.waits(abandoned).check_times) == (None, 1)
    bench.age_and_check()
    assert (bench.op(abandoned), [each.checks for each in stuck]) == (("commit", "check"), [1, 2])


# --- rivals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["commit", "rollback"])
@pytest.mark.parametrize("answer", [COMMIT, ROLLBACK, UNKNOWN, None])
@pytest.mark.parametrize("takes_session", [False, True], ids=["plain", "session"])
def test_rival_who_takes_his_time(bench: Bench, takes_session: bool, answer: Any, ending: str) -> None:
    """Somebody decides the half meanwhile and doesn't commit: the pass waits for him no longer than for a lock."""
    slow = bench.prepare(key="slow")
    others = [bench.prepare() for _ in range(8)]
    with bench.engine.connect() as rival:
        rival.begin()

        def checker(orphan: Orphan) -> Any:
            if orphan.key != "slow":
                return COMMIT
            if orphan.checks == 1:
                decide(rival, "outbox", orphan.id, COMMIT)
            return answer

        bench.outbox.checker("paid")(checker_of(checker, takes_session=takes_session))
        with beside(bench, bench.check) as passing:
            try:
                assert passing.result(60) == Counts(taken=9, done=8, failed=1)
            finally:
                getattr(rival, ending)()
    assert {bench.op(each) for each in others} == {("commit", "check")}
    assert bench.answers(slow) == ["unknown"]
    bench.age_and_check()
    if ending == "commit":
        assert (bench.op(slow), bench.waits(slow)) == (("commit", "producer"), None)
    elif isinstance(answer, Resolution) and answer is not UNKNOWN:
        assert bench.op(slow) == (answer, "check")
    else:
        assert (bench.op(slow), bench.waits(slow).check_times) == (None, 2)


@pytest.mark.parametrize("ending", ["commit", "rollback"])
def test_half_that_somebody_is_deciding(bench: Bench, ending: str) -> None:
    """It is passed over, uncounted, and the pass goes on with the others; it is asked about if it stays undecided."""
    asked = bench.register(COMMIT)
    half_id, other = bench.prepare(), bench.prepare()
    with bench.engine.connect() as rival:
        rival.begin()
        decide(rival, "outbox", half_id, ROLLBACK)
        with beside(bench, bench.check) as passing:
            try:
                assert passing.result(60) == Counts(taken=1, done=1)
            finally:
                getattr(rival, ending)()
    assert [each.id for each in asked] == [other]
    assert bench.age_and_check().done == (ending == "rollback")
    assert bench.op(half_id) == (("rollback", "producer") if ending == "commit" else ("commit", "check"))


def test_rival_under_a_half_that_is_given_back(bench: Bench) -> None:
    """Giving a lease back waits for nobody either."""
    bench.register(COMMIT)
    half_id = bench.prepare()
    with bench.engine.connect() as rival:
        rival.begin()

        class Decided(NoRunner):
            def run(self, act: Any) -> Counts:
                decide(rival, "outbox", half_id, COMMIT)
                return super().run(act)

        bench.asker._new_runner = lambda _: Decided(ConnectionError("no more connections"))
        with beside(bench, bench.check) as passing:
            try:
                assert passing.result(60) == Counts()
            finally:
                rival.commit()
    assert bench.op(half_id) == ("commit", "producer")


# --- a pass --------------------------------------------------------------------------------------------------------


def test_pass_that_is_told_to_stop_while_it_parks(bench: Bench) -> None:
    """A pass that finds nothing but halves to be parked looks up between them."""
    asked = bench.register(COMMIT, max_checks=1)
    for _ in range(50):
        bench.prepare()
    bench.run("UPDATE outbox.half_check SET check_times = 1, last_answer = 'unknown'")
    looks = iter(range(100))
    counts = bench.check(stopping=lambda: next(looks) > 2)
    assert counts.more
    assert 0 < counts.parked < 50
    assert asked == []
    while bench.check():
        pass
    assert bench.value("SELECT count(*) FROM outbox.half_check WHERE parked_at IS NOT NULL") == 50


def test_topics_take_turns(new_bench: NewBench) -> None:
    """A topic with many orphans doesn't keep the checkers of another from being asked."""
    bench = new_bench(checks_in_flight=2)
    order: list[str] = []
    for topic in ("a", "b"):

        @bench.outbox.checker(topic)
        def checker(orphan: Orphan) -> Resolution:
            order.append(orphan.topic)
            return COMMIT

    with bench.engine.begin() as connection:
        for topic, count in (("a", 100), ("b", 5)):
            for _ in range(count):
                bench.outbox.prepare(connection, topic, {})
    bench.age_and_check()
    assert order.count("a") == 100
    assert order.index("b") <= 4
    assert len(order) - order[::-1].index("b") <= 20


def test_pass_with_nothing_to_do(bench: Bench) -> None:
    """One statement looks, and no half is leased, when nothing is due: also with a thousand halves that wait."""
    bench.register(COMMIT)
    with bench.engine.begin() as connection:
        for _ in range(1000):
            bench.outbox.prepare(connection, "paid", {}, immunity=1000)
    assert bench.check() == Counts()
    assert bench.value("SELECT sum(check_times) FROM outbox.half_check") == 0
    assert bench.value("SELECT count(*) FROM outbox.check_history") == 0


def test_own_schema(new_bench: NewBench, bench: Bench) -> None:
    """Checks of a schema of one's own touch that one only."""
    from outbox.database import migration

    url = bench.engine.url.render_as_string(hide_password=False)
    migration.upgrade(url, schema="mine")
    mine = bench.colleague(Outbox(bench.engine, settings=Settings(schema="mine")))
    asked, theirs = mine.register(COMMIT), bench.register(ROLLBACK)
    half_id = bench.prepare()
    with bench.engine.begin() as connection:
        own = mine.outbox.prepare(connection, "paid", {}, immunity=0)
    mine.check()
    assert (len(asked), bench.value("SELECT half_id FROM mine.op_message")) == (1, own)
    assert (theirs, bench.op(half_id)) == ([], None)
    bench.check()
    assert bench.op(half_id) == ("rollback", "check")
