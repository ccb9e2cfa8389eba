"""Checkers: what each answer does, and what a checker may do meanwhile with its session."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from greenlet import GreenletExit
from sqlalchemy import insert, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from outbox import Counts, Orphan, Resolution
from tests.check.changing import Change, changes, with_changes
from tests.check.support import Bench, checker_of
from tests.kit.hostile import HOSTILE
from tests.kit.tables import OTHERS

NewBench = Callable[..., Bench]
COMMIT, ROLLBACK, UNKNOWN = Resolution.COMMIT, Resolution.ROLLBACK, Resolution.UNKNOWN


@pytest.fixture
def bench(new_bench: NewBench) -> Bench:
    """A bench with the table ``change`` beside the outbox."""
    return with_changes(new_bench())


# --- answers -------------------------------------------------------------------------------------------------------


class Broken:
    """What can't be shown."""

    def __repr__(self) -> str:
        raise LookupError


def coroutine() -> Any:
    """Return a coroutine, as a checker does that forgot to await."""

    async def never() -> Resolution:
        raise AssertionError

    return never()


#: What a checker gives: an answer, an exception, or a function that makes one; and what is recorded of it.
ANSWERS: dict[str, tuple[Any, str | None]] = {
    "COMMIT": (COMMIT, None),
    "ROLLBACK": (ROLLBACK, None),
    "UNKNOWN": (UNKNOWN, None),
    "None": (None, "the checker returned None, which is not a Resolution"),
    "str": ("commit", "the checker returned 'commit' (str), which is not a Resolution"),
    "True": (True, "the checker returned True (bool), which is not a Resolution"),
    "class": (Resolution, "the checker returned the class Resolution: return an object of it"),
    "long": ("x" * 10**6, "the checker returned '" + "x" * 198 + "… (str), which is not a Resolution"),
    "broken": (Broken(), "the checker returned a value that can't be shown (Broken), which is not a Resolution"),
    "coroutine": (coroutine, "the checker returned a coroutine: declare it with 'async def'"),
    "cause": (HOSTILE["a cause that raises"](), "Batch: refused"),
    "text": (HOSTILE["a text that raises"](), "Batch: <exception str() failed>"),
    "GreenletExit": (GreenletExit("leave"), "GreenletExit: leave"),
    "exception": (ValueError("no such payment"), "ValueError: no such payment"),
    "group": (ExceptionGroup("two", [ValueError("a"), LookupError("b")]), "ExceptionGroup: two (2 sub-exceptions)"),
    "SystemExit": (SystemExit(3), "SystemExit: 3"),
    "KeyboardInterrupt": (KeyboardInterrupt(), "KeyboardInterrupt"),
    "CancelledError": (asyncio.CancelledError(), "CancelledError"),
    "StopIteration": (StopIteration(), "StopIteration"),
}


def change(session: Session) -> None:
    """Write something."""
    session.add(Change(number=1))


def give(given: Any) -> Any:
    """Return or raise what an answer is made of."""
    if isinstance(given, BaseException):
        # What was raised before has a traceback of before, too.
        raise given.with_traceback(None)
    return given() if given is coroutine else given


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("takes_session", [False, True], ids=["plain", "session"])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_answers(bench: Bench, is_async: bool, takes_session: bool, name: str) -> None:
    """COMMIT and ROLLBACK decide, with what was written; all else is UNKNOWN, recorded, and undoes what was written."""
    given, said = ANSWERS[name]
    checker = checker_of(lambda _: give(given), change, is_async=is_async, takes_session=takes_session)
    bench.outbox.checker("paid")(checker)
    half_id = bench.prepare()
    decides = given is COMMIT or given is ROLLBACK
    assert bench.check() == Counts(taken=1, done=int(decides), failed=int(not decides))
    (check,) = bench.history(half_id)
    assert check.answer == (given if decides else UNKNOWN)
    if said is None:
        assert check.error is None
    elif is_async and name == "StopIteration":
        assert "coroutine raised StopIteration" in check.error
    else:
        assert said in check.error.partition("\n")[0]
    assert "Traceback" in (check.error or "") or not isinstance(given, ValueError)
    assert check.seconds >= 0
    assert bench.op(half_id) == ((given, "check") if decides else None)
    assert changes(bench) == ([1] if decides and takes_session else [])
    assert (bench.waits(half_id) is None) == decides
    # Whatever it was, the next one is asked as if nothing had been.
    bench.outbox.checkers.clear()
    bench.register(COMMIT)
    assert bench.age_and_check().failed == 0


# --- sessions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("theirs", [COMMIT, ROLLBACK])
@pytest.mark.parametrize("ours", [COMMIT, ROLLBACK])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_state_that_changed_meanwhile(bench: Bench, is_async: bool, ours: Resolution, theirs: Resolution) -> None:
    """Who decided while the checker ran has won, also with the same verdict: what the checker wrote is undone."""
    half_id = bench.prepare()

    def rival() -> None:
        (bench.outbox.commit if theirs is COMMIT else bench.outbox.rollback)(half_id)

    def checker(orphan: Orphan, session: Session) -> Resolution:
        session.add(Change(number=1))
        bench.outbox.send(session, "told", {})
        rival()
        return ours

    async def async_checker(orphan: Orphan, session: AsyncSession) -> Resolution:
        session.add(Change(number=1))
        bench.outbox.send(session, "told", {})
        await asyncio.get_running_loop().run_in_executor(None, rival)
        return ours

    bench.outbox.checker("paid")(async_checker if is_async else checker)
    # It is decided, if not by this pass.
    assert bench.check() == Counts(taken=1, done=1)
    (check,) = bench.history(half_id)
    assert (check.answer, check.error) == (theirs, f"answered {ours}, but the producer had decided {theirs}")
    assert (bench.op(half_id), changes(bench)) == ((theirs, "producer"), [])
    assert bench.value("SELECT count(*) FROM outbox.half_message") == 1
    bench.prepare()
    assert bench.value("SELECT count(*) FROM outbox.half_check") == 1


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_no_transaction_while_a_checker_without_session_runs(bench: Bench, is_async: bool) -> None:
    """It may take its time: no connection is in a transaction, and none holds back vacuum."""
    seen: list[Any] = []
    busy = "state <> 'idle' OR xact_start IS NOT NULL OR backend_xmin IS NOT NULL"

    def look(orphan: Orphan) -> Resolution:
        seen.extend(bench.rows(f"SELECT state, query FROM pg_stat_activity WHERE {OTHERS} AND ({busy})"))
        return COMMIT

    bench.outbox.checker("paid")(checker_of(look, is_async=is_async, takes_session=False))
    bench.prepare()
    assert bench.check().done == 1
    assert seen == []


def test_one_transaction_while_a_checker_with_session_runs(bench: Bench) -> None:
    """What the checker reads and writes, the op and the answer are of one transaction."""
    xids: list[Any] = []

    @bench.outbox.checker("paid")
    def checker(orphan: Orphan, session: Session) -> Resolution:
        xids.append(session.scalar(text("SELECT pg_current_xact_id()::text::bigint")))
        return COMMIT

    bench.prepare()
    bench.check()
    xids += bench.rows("SELECT xid::text::bigint FROM outbox.op_message")[0]
    xids += bench.rows("SELECT xmin::text::bigint FROM outbox.check_history")[0]
    assert len(set(xids)) == 1


def test_sessions_commit_is_the_verdicts(bench: Bench) -> None:
    """A checker can't commit by itself: without a verdict what it wrote is undone, with one it stays."""

    @bench.outbox.checker("paid")
    def checker(orphan: Orphan, session: Session) -> Resolution:
        session.add(Change(number=orphan.checks))
        session.commit()
        session.add(Change(number=10 + orphan.checks))
        return COMMIT if orphan.checks == 2 else UNKNOWN

    bench.prepare()
    bench.check()
    assert changes(bench) == []
    bench.age_and_check()
    assert changes(bench) == [2, 12]


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_session_that_is_rolled_back(bench: Bench, is_async: bool) -> None:
    """A checker that rolls its session back gave no verdict, whatever it says: part of its work may be gone."""

    def undo(session: Session) -> None:
        session.add(Change(number=1))
        session.flush()
        session.rollback()

    bench.outbox.checker("paid")(checker_of(lambda _: COMMIT, undo, is_async=is_async))
    half_id = bench.prepare()
    assert bench.check() == Counts(taken=1, failed=1)
    assert bench.history(half_id)[0].error == "the checker rolled its session back; let it raise instead"
    assert (bench.op(half_id), changes(bench)) == (None, [])


def test_savepoint_of_a_checker(bench: Bench) -> None:
    """A checker may try something in a savepoint; what it undoes is undone, the rest commits with the verdict."""

    @bench.outbox.checker("paid")
    def checker(orphan: Orphan, session: Session) -> Resolution:
        session.add(Change(number=1))
        session.flush()
        with pytest.raises(DBAPIError), session.begin_nested():
            bench.outbox.send(session, "told", {})
            session.execute(insert(Change).values(number=1))
        return COMMIT

    half_id = bench.prepare()
    assert bench.check().done == 1
    assert (bench.op(half_id), changes(bench)) == (("commit", "check"), [1])
    bench.dispatch()
    assert bench.messages() == [half_id]


def swallow(session: Session) -> None:
    """Fail, and say nothing of it."""
    with pytest.raises(DBAPIError):
        session.execute(text("SELECT 1 / 0"))


FAILURES: dict[str, Callable[[Session], Any]] = {
    "at the flush": lambda session: session.add_all([Change(number=1), Change(number=2, of=None), Change(number=0)]),
    "at COMMIT": lambda session: session.add(Change(number=1, of=99)),
    "and swallowed": swallow,
    "too long a number": lambda session: session.add(Change(number=2**40)),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_writes_that_fail(bench: Bench, failure: str) -> None:
    """A verdict whose writes can't be committed isn't one: UNKNOWN, with the error, and the connection is usable."""
    bench.run("INSERT INTO change VALUES (0)")

    @bench.outbox.checker("paid")
    def checker(orphan: Orphan, session: Session) -> Resolution:
        if orphan.checks == 1:
            FAILURES[failure](session)
        return COMMIT

    half_id = bench.prepare()
    assert bench.check() == Counts(taken=1, failed=1)
    assert "psycopg.errors" in bench.history(half_id)[0].error
    assert (bench.op(half_id), changes(bench)) == (None, [0])
    assert bench.waits(half_id) is not None
    assert bench.age_and_check() == Counts(taken=1, done=1)


@pytest.mark.parametrize("answer", [COMMIT, ROLLBACK, UNKNOWN])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_what_a_checker_sends(bench: Bench, is_async: bool, answer: Resolution) -> None:
    """Messages sent and halves decided with a checker's session go out with its verdict, or not at all."""
    other = bench.prepare("shipped")

    def tell(session: Session) -> None:
        bench.outbox.send(session, "told", {"n": 1})
        bench.outbox.commit(other, session)

    bench.outbox.checker("paid")(checker_of(lambda _: answer, tell, is_async=is_async))
    half_id = bench.prepare()
    bench.check()
    bench.dispatch()
    topics = [row[0] for row in bench.rows("SELECT topic FROM outbox.message ORDER BY 1")]
    decided = {COMMIT: ["paid", "shipped", "told"], ROLLBACK: ["shipped", "told"], UNKNOWN: []}[answer]
    assert topics == decided
    assert bench.op(other) == (None if answer is UNKNOWN else ("commit", "producer"))
    assert bench.op(half_id) == (None if answer is UNKNOWN else (answer, "check"))
