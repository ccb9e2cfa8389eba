"""RocketMQ's rules of crashes, poisonous messages and time, one test each; see test_peer_rules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError, OperationalError

from outbox import Counts, Orphan, Resolution
from outbox.check import asker, check_pass
from outbox.database.execute import driver_of
from outbox.database.session import commit
from tests.check.support import Bench, Declined, checker_of

NewBench = Callable[..., Bench]
COMMIT, ROLLBACK, UNKNOWN = Resolution.COMMIT, Resolution.ROLLBACK, Resolution.UNKNOWN


def test_pass_is_bounded_in_time(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scan takes 60 s for each queue, MAX_PROCESS_TIME_LIMIT. TransactionalMessageServiceImpl. Same.

    Better: what was checked is recorded one by one; the next pass goes on with the rest.
    """
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(check_pass, "time", SimpleNamespace(monotonic=lambda: clock.now))

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

    bench.outbox.checker("paid", max_checks=2)(checker_of(checker, is_async=is_async, takes_session=False))
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


def test_crash_of_the_asker_frees_its_lease(bench: Bench) -> None:
    """A check that was sent and never answered is sent again by the next scan. TransactionalMessageServiceImpl. Same.

    Better: the lease ends by the database's clock, and any worker goes on; what was asked counts.
    """
    asked = bench.register(COMMIT)
    half_id = bench.prepare()
    bench.kill_process_that_asks(half_id)
    lease = bench.waits(half_id)
    assert (lease.check_times, lease.last_error) == (1, "asked, and no answer came: the worker died or was cut off")
    # Until it must have answered, and one pause longer.
    assert 20 < lease.wait <= 40
    assert bench.check() == Counts()
    bench.age_and_check()
    assert ([each.checks for each in asked], bench.op(half_id)) == ([2], ("commit", "check"))
    assert bench.answers(half_id)[1:] == ["commit"]


#: Where the server ends a backend: the event, the table, the how manieth time, and what it then is that dies.
LEASE = [("BEFORE UPDATE", "outbox.half_check", 1), ("BEFORE INSERT", "outbox.check_history", 1)]
LEASE += [("COMMIT", "outbox.check_history", 1)]
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
        assert point in LEASE
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
@pytest.mark.parametrize("point", LEASE + VERDICT, ids=names)
def test_crash_between_any_two_statements(
    bench: Bench, point: tuple[str, str, int], takes_session: bool, verdict: Resolution
) -> None:
    """A crash between message, op and offset doubles or loses. EndTransactionProcessor, #9500. Better.

    Whichever statement of the lease or the decision the server dies at, there is one verdict in the end, and what the
    checker wrote is there as often.
    """
    kill_while_deciding(bench, point, takes_session=takes_session, verdict=verdict)


def test_answer_of_the_commit_is_lost(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sender can't tell if END_TRANSACTION arrived, and the check commits again. DefaultMQProducerImpl. Better.

    The COMMIT of a verdict took effect, and the connection broke before the sender knew: it stays the one verdict.
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
    assert (bench.op(half_id), bench.answers(half_id), bench.messages()) == (("commit", "check"), ["commit"], [half_id])


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
