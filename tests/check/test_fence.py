"""The fence: a business transaction in the same database needs no checker, however long it takes, however it ends."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Connection, NullPool, event, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from outbox import INJECTED, Counts, Outbox, Outgoing, Resolution
from outbox.check import sql as check_sql
from outbox.check.check_pass import check_fences
from outbox.database.decision import decide, fence_key
from outbox.database.execute import execute
from outbox.database.sql import take_lock
from outbox.errors import AlreadyRolledBack
from outbox.producer import decorators
from tests.check.support import Bench

NewBench = Callable[..., Bench]
COMMIT, ROLLBACK, UNKNOWN = Resolution.COMMIT, Resolution.ROLLBACK, Resolution.UNKNOWN
CHANGE = text("INSERT INTO change VALUES (:n)")


@pytest.fixture
def bench(new_bench: NewBench) -> Bench:
    """A bench with the table ``change`` beside the outbox, whose fenced halves are due at once."""
    bench = new_bench(immunity=0)
    bench.run("CREATE TABLE change (number int PRIMARY KEY)")
    return bench


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def is_async(request: pytest.FixtureRequest) -> bool:
    """Is the function a coroutine function?"""
    return bool(request.param)


def pay(bench: Bench, is_async: bool, body: Callable[[Session], Any], **options: Any) -> Any:
    """Call a fenced two-phase function that makes a change and does ``body`` in its transaction."""

    def work(session: Session, number: int) -> Any:
        session.execute(CHANGE, {"n": number})
        return body(session)

    if not is_async:

        @bench.outbox.two_phase(topic="paid", **options)
        def function(number: int, session: Session = INJECTED) -> Any:
            return work(session, number)

        return function(1)

    engine = create_async_engine(bench.engine.url, poolclass=NullPool)
    outbox = Outbox(engine, settings=bench.settings)

    @outbox.two_phase(topic="paid", **options)
    async def async_function(number: int, session: AsyncSession = INJECTED) -> Any:
        return await session.run_sync(work, number)

    async def call() -> Any:
        try:
            return await async_function(1)
        finally:
            await engine.dispose()

    return asyncio.run(call())


def changes(bench: Bench) -> list[int]:
    """Return what functions have committed."""
    return [row[0] for row in bench.rows("SELECT number FROM change ORDER BY 1")]


def the_half(bench: Bench) -> UUID:
    """Return the only half."""
    ((half_id,),) = bench.rows("SELECT id FROM outbox.half_message")
    return UUID(str(half_id))


def fenced(bench: Bench, count: int = 1) -> list[UUID]:
    """Prepare fenced halves whose functions never begin, as processes leave them that die before."""
    with bench.engine.begin() as connection:
        ids = [
            bench.outbox._producer.prepare(connection, "paid", Outgoing({"n": number}), fenced=True, immunity=0)
            for number in range(count)
        ]
    bench.age()
    return ids


# --- while it runs -------------------------------------------------------------------------------------------------


def test_function_that_runs_ten_times_longer_than_its_immunity(new_bench: NewBench, is_async: bool) -> None:
    """It is checked meanwhile, again and again, sees nothing of that, and commits."""
    bench = new_bench(immunity=0.02)
    bench.run("CREATE TABLE change (number int PRIMARY KEY)")
    age = "SELECT extract(epoch FROM clock_timestamp() - born_at) FROM outbox.half_message"
    counts: list[Counts] = []

    def body(_: Session) -> str:
        while bench.value(age) < 10 * 0.02 or len(counts) < 20:
            counts.append(bench.age_and_check())
        return "paid"

    assert pay(bench, is_async, body) == "paid"
    assert set(counts) == {Counts(taken=1, failed=1)}
    half_id = the_half(bench)
    assert (bench.op(half_id), bench.waits(half_id), changes(bench)) == (("commit", "producer"), None, [1])
    history = bench.history(half_id)
    assert len(history) == len(counts)
    assert {(each.asked, each.answer, each.error) for each in history} == {
        ("fence", "unknown", "its transaction is still running")
    }
    bench.dispatch()
    assert bench.messages() == [half_id]


def test_running_function_is_never_parked(bench: Bench) -> None:
    """A fence isn't a question: looking at it moves no counter, and the next look is one interval away.

    The checker of the topic isn't asked either.
    """
    asked = bench.register(COMMIT)

    def body(_: Session) -> None:
        bench.age_and_check(bench.settings.max_checks + 5)
        row = bench.waits(the_half(bench))
        assert (row.check_times, row.parked, row.last_error) == (0, False, "its transaction is still running")
        assert 15 < row.wait <= 30
        assert bench.check() == Counts()

    pay(bench, False, body)
    assert (asked, changes(bench)) == ([], [1])


@pytest.mark.parametrize("doing", ["running", "decided, not committed", "decided by an operator, not committed"])
def test_check_waits_for_no_running_transaction(bench: Bench, doing: str) -> None:
    """Whatever the transaction of a half is at, a pass goes by, and the other halves have their verdicts."""
    half_id, *others = fenced(bench, 5)
    with bench.engine.connect() as business, business.begin():
        if "operator" not in doing:
            execute(business, take_lock(fence_key("outbox", half_id)))
        if "decided" in doing:
            decide(business, "outbox", half_id, COMMIT, "operator" if "operator" in doing else "producer")
        with ThreadPoolExecutor(1) as pool:
            counts = pool.submit(bench.check).result(60)
        assert counts.done == 4
        assert {bench.op(each) for each in others} == {("rollback", "check")}
    if "decided" in doing:
        assert bench.op(half_id) == ("commit", "operator" if "operator" in doing else "producer")
        assert bench.age_and_check() == Counts()
    else:
        assert bench.age_and_check() == Counts(taken=1, done=1)
        assert bench.op(half_id) == ("rollback", "check")


# --- how it ends ---------------------------------------------------------------------------------------------------


def test_function_that_ends_without_committing(bench: Bench, is_async: bool) -> None:
    """An exception leaves the half undecided; the next pass rolls it back, and no consumer hears of it."""

    def body(_: Session) -> None:
        raise LookupError("no such account")

    with pytest.raises(LookupError, match="no such account"):
        pay(bench, is_async, body)
    half_id = the_half(bench)
    assert bench.op(half_id) is None
    assert bench.age_and_check() == Counts(taken=1, done=1)
    assert (bench.op(half_id), bench.waits(half_id), changes(bench)) == (("rollback", "check"), None, [])
    assert [(each.asked, each.answer, each.error) for each in bench.history(half_id)] == [("fence", "rollback", None)]
    assert (bench.dispatch(), bench.age_and_check()) == (0, Counts())


def test_function_that_never_began(bench: Bench, is_async: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its half is rolled back; if it begins after all, it isn't run, and its caller is told who decided."""
    take = decorators._take_fence
    ran: list[Session] = []

    def slow_start(session: Session, schema: str, half_id: UUID) -> None:
        assert bench.age_and_check() == Counts(taken=1, done=1)
        take(session, schema, half_id)

    monkeypatch.setattr(decorators, "_take_fence", slow_start)
    with pytest.raises(AlreadyRolledBack, match=r"was already rolled back \(by the check\)"):
        pay(bench, is_async, ran.append)
    half_id = the_half(bench)
    assert (ran, bench.op(half_id), changes(bench)) == ([], ("rollback", "check"), [])
    assert bench.connections("state LIKE 'idle in transaction%'") == 0


def test_function_that_begins_while_it_is_decided(bench: Bench) -> None:
    """It waits for the check to end, and is told; it never runs beside the verdict."""
    (half_id,) = fenced(bench)
    key, ran = fence_key("outbox", half_id), []

    def begin() -> None:
        with Session(bench.engine) as session, session.begin():
            decorators._take_fence(session, "outbox", half_id)
            ran.append(1)

    with bench.engine.connect() as check, ThreadPoolExecutor(1) as pool:
        with check.begin():
            execute(check, check_sql.due_fenced("outbox", 10))
            execute(check, check_sql.try_fences("outbox", [half_id], 30, "me"))
            late = pool.submit(begin)
            bench.wait_for(
                lambda: bench.value(
                    "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
                    " AND (classid::bigint << 32 | objid::bigint) = :key",
                    key=key,
                ),
                "the function waits for its fence",
            )
        with pytest.raises(AlreadyRolledBack):
            late.result(60)
    assert ran == []


def test_function_whose_connection_is_lost(bench: Bench, is_async: bool) -> None:
    """The server has lost its transaction and with that its fence: it is rolled back, and the function fails."""

    def body(session: Session) -> None:
        pid = session.scalar(text("SELECT pg_backend_pid()"))
        bench.run("SELECT pg_terminate_backend(:pid, 60000)", pid=pid)
        assert bench.age_and_check() == Counts(taken=1, done=1)

    with pytest.raises(OperationalError):
        pay(bench, is_async, body)
    assert (bench.op(the_half(bench)), changes(bench)) == (("rollback", "check"), [])


def test_decided_by_others_while_it_runs(bench: Bench, is_async: bool) -> None:
    """An operator may roll back what runs: its commit fails with its change, and the function's caller is told."""

    def body(_: Session) -> None:
        bench.outbox.operator.rollback(the_half(bench), by="ops", why="it hangs")
        assert bench.age_and_check() == Counts()

    with pytest.raises(AlreadyRolledBack, match="by the operator"):
        pay(bench, is_async, body)
    assert changes(bench) == []


def test_known_outcome_needs_no_check(bench: Bench, is_async: bool) -> None:
    """What ``rollback_on`` names is decided at once, by the producer."""

    def body(_: Session) -> None:
        raise LookupError

    with pytest.raises(LookupError):
        pay(bench, is_async, body, rollback_on=(LookupError,))
    assert bench.op(the_half(bench)) == ("rollback", "producer")
    assert bench.age_and_check() == Counts()


def test_plain_prepare_is_never_rolled_back(bench: Bench) -> None:
    """Without a fence nobody knows: no number of passes decides it, nor spends its questions."""
    half_id = bench.prepare()
    with bench.engine.begin() as connection:
        bench.outbox.prepare(connection, "paid", {})
        bench.age_and_check(20)
    assert bench.age_and_check(20) == Counts()
    assert (bench.op(half_id), bench.waits(half_id).check_times, bench.history(half_id)) == (None, 0, [])
    assert bench.value("SELECT count(*) FROM outbox.half_check") == 2


def test_fenced_halves_need_no_checker_and_ask_none(bench: Bench) -> None:
    """The checker of a topic is asked about its plain halves only, the fence about the fenced ones only."""
    asked = bench.register(COMMIT)
    plain = bench.prepare()
    (own,) = fenced(bench)
    assert bench.check() == Counts(taken=2, done=2)
    assert [each.id for each in asked] == [plain]
    assert (bench.op(plain), bench.op(own)) == (("commit", "check"), ("rollback", "check"))


# --- traps ---------------------------------------------------------------------------------------------------------


def test_savepoint_trap(bench: Bench) -> None:
    """An op under a savepoint that was rolled back: its transaction committed, the half didn't. Only the op counts."""
    (half_id,) = fenced(bench)
    with bench.engine.begin() as business:
        execute(business, take_lock(fence_key("outbox", half_id)))
        xid = business.scalar(text("SELECT pg_current_xact_id()"))
        nested = business.begin_nested()
        decide(business, "outbox", half_id, COMMIT)
        nested.rollback()
    assert bench.value("SELECT pg_xact_status(CAST(:xid AS xid8))", xid=str(xid)) == "committed"
    assert bench.op(half_id) is None
    assert bench.age_and_check() == Counts(taken=1, done=1)
    assert bench.op(half_id) == ("rollback", "check")


def test_function_in_a_savepoint_of_its_own(bench: Bench) -> None:
    """A savepoint that the function rolls back gives its fence up to nobody, and its commit stands."""

    def body(session: Session) -> None:
        with contextlib.suppress(LookupError), session.begin_nested():
            session.execute(CHANGE, {"n": 2})
            raise LookupError
        assert bench.age_and_check() == Counts(taken=1, failed=1)

    pay(bench, False, body)
    assert (bench.op(the_half(bench)), changes(bench)) == (("commit", "producer"), [1])


@pytest.mark.parametrize("ending", ["COMMIT", "ROLLBACK"])
@pytest.mark.parametrize("decided", [False, True])
def test_prepared_transaction_holds_the_fence(bench: Bench, decided: bool, ending: str) -> None:
    """A transaction in PREPARE TRANSACTION is in no session, and still running: the check leaves it alone."""
    (half_id,) = fenced(bench)
    with bench.engine.connect() as business:
        transaction = business.begin_twophase("trap")
        execute(business, take_lock(fence_key("outbox", half_id)))
        business.execute(CHANGE, {"n": 1})
        if decided:
            decide(business, "outbox", half_id, COMMIT)
        transaction.prepare()
        business.invalidate()
    try:
        # With its op it holds the lock of the half as well: then it isn't even looked at.
        assert bench.age_and_check(3) == (Counts() if decided else Counts(taken=3, failed=3))
        assert bench.op(half_id) is None
    finally:
        with bench.observer.connect() as connection:
            connection.execution_options(isolation_level="AUTOCOMMIT").exec_driver_sql(f"{ending} PREPARED 'trap'")
    expected = ("commit", "producer") if decided and ending == "COMMIT" else ("rollback", "check")
    assert bench.age_and_check().done == (expected[1] == "check")
    assert (bench.op(half_id), changes(bench)) == (expected, [1] if ending == "COMMIT" else [])


def test_function_of_a_two_phase_session(bench: Bench) -> None:
    """Between PREPARE TRANSACTION and COMMIT PREPARED a check decides nothing; then the commit stands."""
    between: list[Counts] = []

    def check(_: Connection, __: str, is_prepared: bool) -> None:
        if is_prepared and bench.value("SELECT count(*) FROM outbox.half_check"):
            between.append(bench.age_and_check())

    outbox = Outbox(sessionmaker(bench.engine, twophase=True), settings=bench.settings)
    event.listen(bench.engine, "commit_twophase", check)

    @outbox.two_phase(topic="paid")
    def function(session: Session = INJECTED) -> None:
        session.execute(CHANGE, {"n": 1})

    function()
    assert between
    assert not any(each.done for each in between)
    assert (bench.op(the_half(bench)), changes(bench)) == (("commit", "producer"), [1])
    assert bench.age_and_check() == Counts()


def test_fence_of_another_schema(new_bench: NewBench) -> None:
    """The same id in two schemas has two fences."""
    from outbox.database import migration

    bench = new_bench(immunity=0)
    migration.upgrade(bench.engine.url.render_as_string(hide_password=False), schema="mine")
    (half_id,) = fenced(bench)
    with bench.engine.begin() as business:
        execute(business, take_lock(fence_key("mine", half_id)))
        assert bench.check() == Counts(taken=1, done=1)


# --- many at once --------------------------------------------------------------------------------------------------


def test_batches_of_fences(new_bench: NewBench) -> None:
    """Fences are tried in batches, each in a transaction of its own; a pass goes on until none is due."""
    bench = new_bench(check_batch=10)
    ids = fenced(bench, 35)
    with bench.engine.connect() as connection:
        assert check_fences(connection, bench.settings) == Counts(taken=10, done=10, more=True)
        assert check_fences(connection, bench.settings, limit=3) == Counts(taken=3, done=3, more=True)
    assert bench.check() == Counts(taken=22, done=22)
    assert {bench.op(each) for each in ids} == {("rollback", "check")}
    xids = bench.rows("SELECT xid::text, count(*) FROM outbox.op_message GROUP BY 1")
    assert sorted(row[1] for row in xids) == [2, 3, 10, 10, 10]


def test_pass_that_is_told_to_stop_between_fences(new_bench: NewBench) -> None:
    """It ends after the batch it is at, and says that there is more."""
    bench = new_bench(check_batch=10)
    fenced(bench, 35)
    looks = iter(range(100))
    counts = bench.check(stopping=lambda: next(looks) > 1)
    assert counts.more
    assert 0 < counts.done < 35
    assert bench.value("SELECT count(*) FROM outbox.half_check") == 35 - counts.done


@pytest.mark.parametrize(
    ("when", "table"),
    [
        ("BEFORE INSERT", "outbox.op_message"),
        ("AFTER INSERT", "outbox.op_message"),
        ("BEFORE DELETE", "outbox.half_check"),
        ("BEFORE UPDATE", "outbox.half_check"),
        ("BEFORE INSERT", "outbox.check_history"),
        ("COMMIT", "outbox.op_message"),
    ],
)
def test_crash_between_any_two_statements(bench: Bench, when: str, table: str) -> None:
    """A batch of fences is all or nothing, wherever the server dies; the next pass decides it."""
    running, *ended = fenced(bench, 3)
    with bench.engine.begin() as business:
        execute(business, take_lock(fence_key("outbox", running)))
        bench.kill_at(when, table, nth=2 if table == "outbox.op_message" else 1)
        with pytest.raises(OperationalError):
            bench.check()
        assert bench.was_killed()
        assert bench.value("SELECT count(*) FROM outbox.op_message") == 0
        assert bench.value("SELECT count(*) FROM outbox.check_history") == 0
        assert bench.age_and_check() == Counts(taken=3, done=2, failed=1)
    assert {bench.op(each) for each in ended} == {("rollback", "check")}
    assert bench.op(running) is None


def test_thousand_orphans_and_many_workers(new_bench: NewBench) -> None:
    """Each orphan is decided once, by one of them."""
    bench = new_bench(check_batch=20)
    benches = [bench, *(bench.colleague() for _ in range(3))]
    for each in benches:
        assert each.check() == Counts()
    ids = fenced(bench, 1000)
    start = threading.Barrier(len(benches))
    with ThreadPoolExecutor(len(benches)) as pool:
        counts = list(pool.map(lambda each: (start.wait(), each.check())[1], benches))
    assert sum(each.done for each in counts) == sum(each.taken for each in counts) == 1000
    assert sum(each.done > 0 for each in counts) > 1
    assert {bench.op(each) for each in random.sample(ids, 20)} == {("rollback", "check")}
    assert bench.value("SELECT count(*) FROM outbox.op_message WHERE resolution = 'rollback'") == 1000
    assert bench.value("SELECT count(DISTINCT half_id) FROM outbox.check_history") == 1000
    assert bench.value("SELECT count(*) FROM outbox.check_history") == 1000
    assert bench.value("SELECT count(*) FROM outbox.half_check") == 0


@pytest.mark.parametrize("at_once", [1, 7])
def test_functions_and_checks_race(bench: Bench, at_once: int) -> None:
    """A thousand functions begin and commit while four workers check: each is either, its change with it; no deadlock.

    ``at_once``: how many halves one transaction decides.
    """
    ids = fenced(bench, 1000)
    number_of = {half_id: number for number, half_id in enumerate(ids)}
    over = threading.Event()
    told: Counter[str] = Counter()

    def functions(share: list[UUID]) -> None:
        for first in range(0, len(share), at_once):
            batch = share[first : first + at_once]
            try:
                with Session(bench.engine) as session, session.begin():
                    for half_id in batch:
                        decorators._take_fence(session, "outbox", half_id)
                        session.execute(CHANGE, {"n": number_of[half_id]})
                    for half_id in random.sample(batch, len(batch)):
                        bench.outbox._producer.decide(half_id, Resolution.COMMIT, session)
                told["committed"] += len(batch)
            except AlreadyRolledBack:
                told["rolled back"] += len(batch)

    def checks(each: Bench) -> None:
        while not over.is_set():
            with each.engine.connect() as connection:
                check_fences(connection, each.settings, limit=random.choice([1, 5, 20]))  # noqa: S311

    shuffled = random.sample(ids, len(ids))
    with ThreadPoolExecutor(8) as pool:
        working = [pool.submit(functions, shuffled[n::4]) for n in range(4)]
        checking = [pool.submit(checks, bench.colleague()) for _ in range(4)]
        try:
            # Whatever is raised here, a DeadlockDetected above all, is a failure.
            for work in working:
                work.result(240)
        finally:
            over.set()
        for check in checking:
            check.result(60)
    bench.age_and_check()
    ops = {
        half_id: (resolution, by)
        for half_id, resolution, by in bench.rows("SELECT half_id, resolution, decided_by FROM outbox.op_message")
    }
    assert set(ops) == set(ids)
    assert Counter(ops.values()) == Counter(
        {("commit", "producer"): told["committed"], ("rollback", "check"): told["rolled back"]}
    )
    assert set(changes(bench)) == {number_of[half_id] for half_id, op in ops.items() if op[0] == "commit"}
    assert min(told.values()) > 0
    assert bench.value("SELECT count(*) FROM outbox.half_check") == 0


def test_commit_in_the_middle_of_a_check(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that commits while the check has its half in hand waits for that, no longer, and has committed."""
    (half_id,) = fenced(bench)
    in_hand, go_on = threading.Event(), threading.Event()
    try_fences = check_sql.try_fences

    def slowly(*args: Any) -> Any:
        in_hand.set()
        assert go_on.wait(60)
        return try_fences(*args)

    monkeypatch.setattr(check_sql, "try_fences", slowly)
    with ThreadPoolExecutor(2) as pool, Session(bench.engine) as session:
        decorators._take_fence(session, "outbox", half_id)
        session.execute(CHANGE, {"n": 1})
        pid = session.scalar(text("SELECT pg_backend_pid()"))
        check = pool.submit(bench.check)
        assert in_hand.wait(60)
        bench.outbox._producer.decide(half_id, Resolution.COMMIT, session)
        commit = pool.submit(session.commit)
        bench.wait_for(
            lambda: bench.value("SELECT cardinality(pg_blocking_pids(:pid))", pid=pid), "the commit waits for the check"
        )
        go_on.set()
        assert check.result(60) == Counts(taken=1, failed=1)
        commit.result(60)
    assert (bench.op(half_id), changes(bench)) == (("commit", "producer"), [1])


def test_no_room_in_the_lock_table_is_wasted(bench: Bench) -> None:
    """The fences that a check has taken are free when its batch is done."""
    fenced(bench, 300)
    bench.check()
    assert (
        bench.value(
            "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND database ="
            " (SELECT oid FROM pg_database WHERE datname = current_database())"
        )
        == 0
    )


def test_immunity_keeps_the_check_away(new_bench: NewBench) -> None:
    """A function isn't looked at within its immunity time, whatever becomes of it."""
    bench = new_bench(immunity=1000)
    bench.run("CREATE TABLE change (number int PRIMARY KEY)")

    def body(_: Session) -> None:
        assert bench.check() == Counts()
        raise LookupError

    with pytest.raises(LookupError):
        pay(bench, False, body)
    half_id = the_half(bench)
    assert bench.check() == Counts()
    with bench.engine.begin() as connection:
        other = bench.outbox._producer.prepare(connection, "paid", Outgoing({}), fenced=True, immunity=0)
    assert bench.check() == Counts(taken=1, done=1)
    assert (bench.op(half_id), bench.history(half_id)) == (None, [])
    assert bench.op(other) == ("rollback", "check")
