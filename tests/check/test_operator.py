"""What operators do about undecided halves: one verdict, an audit entry for each act, and none for one too late."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import Connection, text
from sqlalchemy.orm import Session

from outbox import INJECTED, Answer, Counts, Orphan, Outbox, Resolution
from outbox.acts.changes import ActRequest, Target, apply
from outbox.acts.messages import ACTS as TABLE
from outbox.check import sql as check_sql
from outbox.database.decision import decide
from outbox.database.execute import execute
from outbox.errors import (
    ActRefused,
    AlreadyDecided,
    AlreadyRolledBack,
    CheckRefused,
    HalfNotFound,
    InvalidRequest,
    NotFound,
)
from outbox.message.model import Decision
from outbox.operator import operator as operator_module
from outbox.operator.bulk.run import bulk_once
from outbox.operator.model import BulkItemFilter, BulkItemState, HalfFilter, HalfStatus, PageRequest, Selector
from outbox.worker.connections import Runners, WorkerDatabase
from tests.check.support import SHORT, Bench, NoRunner, beside

COMMIT, ROLLBACK, UNKNOWN = Resolution.COMMIT, Resolution.ROLLBACK, Resolution.UNKNOWN
Act = Callable[[Bench, UUID], object]

WHO: dict[str, Any] = {"by": "ann", "why": "the provider called"}


def parked(bench: Bench, topic: str = "paid", **checker: Any) -> UUID:
    """Return a half that is parked after its only check, by a checker that never knows."""
    half_id = bench.prepare(topic)
    bench.register(UNKNOWN, topic, max_checks=1, **checker)
    assert bench.check() == Counts(taken=1, failed=1, parked=1)
    del bench.outbox.checkers[topic]
    return half_id


def audit(bench: Bench, half_id: UUID) -> list[tuple[str, str, str, Any]]:
    """Return what is recorded about a half: who did what, why, with what result."""
    found = bench.rows("SELECT actor, action, reason, result FROM outbox.audit WHERE target = :id ORDER BY id",
                       id=str(half_id))  # fmt: skip
    return [tuple(row) for row in found]


def check_of(bench: Bench, half_id: UUID) -> list[Any]:
    """Return all that is written about the check of an undecided half."""
    return bench.rows("SELECT * FROM outbox.half_check WHERE half_id = :id", id=half_id)


def waiting(bench: Bench) -> bool:
    """Tell whether somebody waits for a lock that another holds."""
    return bench.connections("wait_event_type = 'Lock' AND cardinality(pg_blocking_pids(pid)) > 0") > 0


def act_in(connection: Connection, bench: Bench, name: str, half_id: UUID) -> None:
    """Do an act in the caller's transaction."""
    request = ActRequest(TABLE[name], WHO["by"], WHO["why"])
    (outcome,) = apply(connection, bench.settings, request, [Target(half_id)])
    assert outcome.state == "done", outcome


def check_now(bench: Bench, half_id: UUID) -> Answer:
    """Have a half checked here and now."""
    return bench.outbox.operator.check_now(half_id, **WHO)


# --- one verdict ---------------------------------------------------------------------------------------------------


def by_checker(answer: Resolution) -> Act:
    """Return an act that asks a checker by hand."""

    def ask(bench: Bench, half_id: UUID) -> None:
        bench.outbox.checkers.clear()
        bench.register(answer)
        check_now(bench, half_id)

    return ask


DECIDERS: dict[str, tuple[Act, tuple[str, str]]] = {
    "producer commits": (lambda bench, half_id: bench.outbox.commit(half_id), ("commit", "producer")),
    "producer rolls back": (lambda bench, half_id: bench.outbox.rollback(half_id), ("rollback", "producer")),
    "operator commits": (lambda bench, half_id: bench.outbox.operator.commit(half_id, **WHO), ("commit", "operator")),
    "operator rolls back": (
        lambda bench, half_id: bench.outbox.operator.rollback(half_id, **WHO),
        ("rollback", "operator"),
    ),
    "checker says commit": (by_checker(COMMIT), ("commit", "check")),
    "checker says rollback": (by_checker(ROLLBACK), ("rollback", "check")),
}


@pytest.mark.parametrize("name", DECIDERS)
def test_late_decision_after_parking(bench: Bench, name: str) -> None:
    """A parked half is decided by whoever comes first, once; all who come later are told, and change nothing."""
    half_id = parked(bench)
    act, op = DECIDERS[name]
    act(bench, half_id)
    assert (bench.op(half_id), bench.waits(half_id)) == (op, None)
    acts = audit(bench, half_id)
    assert len(acts) == (not name.startswith("producer"))
    for later, its_op in DECIDERS.values():
        if its_op[0] == op[0] and its_op[1] == "producer":
            assert isinstance(decision := later(bench, half_id), Decision)
            assert (decision.first, decision.decided_by) == (False, op[1])
        else:
            with pytest.raises((AlreadyDecided, ActRefused)):
                later(bench, half_id)
    for ask_again in (bench.outbox.operator.reset, bench.outbox.operator.check):
        with pytest.raises(ActRefused, match="it is committed" if op[0] == "commit" else "it was rolled back"):
            ask_again(half_id, **WHO)
    assert (bench.op(half_id), audit(bench, half_id)) == (op, acts)
    assert bench.dispatch() == (op[0] == "commit")
    assert bench.dispatch() == 0


@pytest.mark.parametrize("name", DECIDERS)
def test_reset_then_decided(bench: Bench, name: str) -> None:
    """A parked half whose counter was set back is decided like any other: once."""
    half_id = parked(bench)
    bench.outbox.operator.reset(half_id, **WHO)
    act, op = DECIDERS[name]
    act(bench, half_id)
    bench.register(COMMIT, "other")
    assert bench.check() == Counts()
    assert (bench.op(half_id), bench.waits(half_id)) == (op, None)


def test_reset_sets_the_counter_back(bench: Bench) -> None:
    """It is asked about by the next pass, and as often as a new one until it is parked again; the history stays."""
    asked = bench.register(UNKNOWN, max_checks=3)
    half_id = bench.prepare()
    for round_ in (1, 2):
        bench.age_and_check(5)
        assert len(asked) == 3 * round_
        assert (bench.waits(half_id).parked, bench.waits(half_id).check_times) == (True, 3)
        assert bench.answers(half_id) == ["unknown"] * 3 * round_
        bench.outbox.operator.reset(half_id, **WHO)
        state = bench.waits(half_id)
        assert (state.parked, state.reason, state.check_times, state.wait <= 0) == (False, None, 0, True)
    assert bench.check() == Counts(taken=1, failed=1)
    assert [each.checks for each in asked] == [1, 2, 3, 1, 2, 3, 1]
    assert {each.born_at for each in asked} == {bench.value("SELECT born_at FROM outbox.half_message")}


def test_reset_before_parking(bench: Bench) -> None:
    """The counter of a half that isn't parked so far is set back as well."""
    asked = bench.register(UNKNOWN, max_checks=2)
    half_id = bench.prepare()
    bench.age_and_check()
    bench.outbox.operator.reset(half_id, **WHO)
    bench.age_and_check(5)
    assert len(asked) == 3


def test_request_of_a_check(bench: Bench) -> None:
    """The next pass asks at once: about a young half from now on, about a parked one exactly once more."""
    asked = bench.register(UNKNOWN, max_checks=2)
    half_id = bench.prepare(due=False, immunity=3600)
    assert bench.check() == Counts()
    bench.outbox.operator.check(half_id, **WHO)
    assert bench.check() == Counts(taken=1, failed=1)
    bench.age_and_check(5)
    assert (len(asked), bench.waits(half_id).parked) == (2, True)
    bench.outbox.operator.check(half_id, **WHO)
    assert not bench.waits(half_id).parked
    assert bench.check() == Counts(taken=1, failed=1, parked=1)
    bench.age_and_check(5)
    assert (len(asked), bench.waits(half_id).parked) == (3, True)
    assert audit(bench, half_id) == [("ann", "check", "the provider called", {"asked": "next pass"})] * 2


@pytest.mark.parametrize("by_hand", [1, 2])
def test_request_after_checks_by_hand(bench: Bench, by_hand: int) -> None:
    """A parked half that was asked about by hand is still checked once more when that is requested."""
    asked = bench.register(UNKNOWN, max_checks=2)
    half_id = bench.prepare()
    bench.age_and_check(3)
    for _ in range(by_hand):
        check_now(bench, half_id)
    bench.outbox.operator.check(half_id, **WHO)
    assert bench.check() == Counts(taken=1, failed=1, parked=1)
    bench.age_and_check(3)
    assert (len(asked), bench.waits(half_id).parked) == (2 + by_hand + 1, True)


# --- many at once ---------------------------------------------------------------------------------------------------


def reset_parked(bench: Bench, topic: str | None = None) -> list[UUID]:
    """Reset all parked halves by a bulk job; return those to which it was done."""
    operator = bench.outbox.operator
    selector = Selector(halves=HalfFilter(topic=topic, status=HalfStatus.PARKED))
    job = operator.start("reset", selector, token=operator.preview("reset", selector).token, **WHO)
    with bench.engine.connect() as connection:
        while bulk_once(connection, bench.settings, bulk_job_id=job.id):
            pass
    return [
        item.message_id
        for item in operator.bulk_items(job.id, BulkItemFilter(BulkItemState.DONE), PageRequest(500)).items
    ]


def test_reset_of_all_that_are_parked(bench: Bench) -> None:
    """Each parked half of the topic, and no other; each has its audit entry, in the same transaction."""
    bench.register(UNKNOWN, max_checks=1)
    bench.register(UNKNOWN, "refunds", max_checks=1)
    halves = [bench.prepare() for _ in range(5)]
    other = bench.prepare("refunds")
    bench.check()
    young = bench.prepare(due=False)
    assert reset_parked(bench, "paid") == halves
    assert all(len(audit(bench, half_id)) == 1 for half_id in halves)
    assert audit(bench, halves[0]) == [("ann", "reset", "the provider called", None)]
    assert (bench.waits(other).parked, audit(bench, young)) == (True, [])
    assert bench.check() == Counts(taken=5, failed=5, parked=5)
    assert len(reset_parked(bench)) == 6


def test_reset_of_all_but_one_that_is_being_decided(bench: Bench) -> None:
    """A half which a transaction is deciding at this moment is left for later, and the others are reset."""
    halves = [bench.prepare() for _ in range(3)]
    bench.register(UNKNOWN, max_checks=1)
    bench.check()
    with bench.engine.begin() as rival:
        decide(rival, "outbox", halves[1], COMMIT)
        assert reset_parked(bench) == [halves[0], halves[2]]
    assert bench.op(halves[1]) == ("commit", "producer")
    assert audit(bench, halves[1]) == []


# --- races ---------------------------------------------------------------------------------------------------------


def test_operator_decides_while_the_checker_is_asked(bench: Bench) -> None:
    """The operator needn't wait for the checker, whose answer then comes too late, and is told so in the history."""
    bench.register(bench.let_go)
    half_id = bench.prepare()
    with beside(bench, bench.check) as passing:
        bench.wait_for(lambda: bench.history(half_id), "the checker is asked")
        bench.outbox.operator.rollback(half_id, **WHO)
        bench.let_go.set()
        passing.result(60)
    assert (bench.op(half_id), bench.messages()) == (("rollback", "operator"), [])
    (entry,) = bench.history(half_id)
    assert entry.answer == "rollback"
    assert entry.error == "answered commit, but the operator had decided rollback"
    assert len(audit(bench, half_id)) == 1


def hold_up_commits(bench: Bench) -> None:
    """Have the COMMIT of whoever writes into the table ``slow`` wait until ``gate`` has a row."""
    bench.run("CREATE TABLE slow (id int)")
    bench.run("CREATE TABLE gate (id int)")
    bench.run(
        "CREATE FUNCTION wait_at_gate() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        " WHILE NOT EXISTS (SELECT FROM gate) LOOP PERFORM pg_sleep(0.01); END LOOP; RETURN NULL; END $$"
    )
    bench.run(
        "CREATE CONSTRAINT TRIGGER slow AFTER INSERT ON slow DEFERRABLE INITIALLY DEFERRED"
        " FOR EACH ROW EXECUTE FUNCTION wait_at_gate()"
    )


LATE_ACTS: dict[str, Act] = {
    "resolve": lambda bench, half_id: bench.outbox.operator.rollback(half_id, **WHO),
    "reset": lambda bench, half_id: bench.outbox.operator.reset(half_id, **WHO),
    "request": lambda bench, half_id: bench.outbox.operator.check(half_id, **WHO),
    "check": check_now,
}


@pytest.mark.parametrize("name", LATE_ACTS)
def test_check_is_faster_than_the_operator(bench: Bench, name: str) -> None:
    """The check has written its verdict and commits: the operator waits for it, is told, and leaves no audit entry."""
    hold_up_commits(bench)

    @bench.outbox.checker("paid")
    def checker(orphan: Orphan, session: Any) -> Resolution:
        session.execute(text("INSERT INTO slow VALUES (1)"))
        return COMMIT

    half_id = bench.prepare()
    with beside(bench, bench.check) as passing:
        bench.wait_for(lambda: bench.connections("wait_event = 'PgSleep'"), "the check commits")
        with beside(bench, lambda: LATE_ACTS[name](bench, half_id)) as late:
            try:
                bench.wait_for(lambda: waiting(bench), "the operator waits")
                assert (bench.op(half_id), late.done()) == (None, False)
            finally:
                bench.run("INSERT INTO gate VALUES (1)")
            assert passing.result(60) == Counts(taken=1, done=1)
            with pytest.raises(ActRefused, match="it is committed"):
                late.result(60)
    assert (bench.op(half_id), audit(bench, half_id)) == (("commit", "check"), [])


def test_operator_is_faster_than_the_check(bench: Bench) -> None:
    """The operator's decision is about to commit: a pass leaves the half alone, and finds nothing to do afterwards."""
    bench.register(COMMIT)
    half_id = bench.prepare()
    with bench.engine.begin() as connection:
        act_in(connection, bench, "rollback", half_id)
        assert bench.check() == Counts()
    assert bench.check() == Counts()
    assert (bench.op(half_id), bench.history(half_id)) == (("rollback", "operator"), [])


def test_two_operators(bench: Bench) -> None:
    """Two operators decide otherwise at once: the second waits, is told what the first decided, and leaves no entry."""
    half_id = parked(bench)
    with bench.engine.connect() as first, first.begin() as transaction:
        act_in(first, bench, "rollback", half_id)
        with beside(bench, lambda: bench.outbox.operator.commit(half_id, by="bob", why="no")) as second:
            bench.wait_for(lambda: waiting(bench), "the second operator waits")
            transaction.commit()
            with pytest.raises(ActRefused, match="it was rolled back"):
                second.result(60)
    assert audit(bench, half_id) == [("ann", "rollback", "the provider called", None)]


# --- fences --------------------------------------------------------------------------------------------------------


@pytest.fixture
def running(bench: Bench) -> Iterator[tuple[UUID, Future[str]]]:
    """A fenced function in the middle of its transaction, and what becomes of it when the bench lets it go."""
    bench.run("CREATE TABLE change (id int)")
    begun = threading.Event()

    @bench.outbox.two_phase(topic="fenced")
    def change(session: Any = INJECTED) -> str:
        session.execute(text("INSERT INTO change VALUES (1)"))
        begun.set()
        bench.let_go.wait()
        return "changed"

    with beside(bench, change) as future:
        bench.wait_for(begun.is_set, "the function runs")
        yield bench.value("SELECT half_id FROM outbox.half_check"), future


def ended(bench: Bench) -> UUID:
    """Return a fenced half whose function ended without a commit."""

    @bench.outbox.two_phase(topic="fenced")
    def fail(session: Session = INJECTED) -> None:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    half_id: UUID = bench.value("SELECT half_id FROM outbox.half_check")
    return half_id


def test_rollback_under_a_running_function(bench: Bench, running: tuple[UUID, Future[str]]) -> None:
    """The operator needn't wait for the function, whose commit then fails with all that it changed."""
    half_id, future = running
    bench.outbox.operator.rollback(half_id, **WHO)
    bench.let_go.set()
    with pytest.raises(AlreadyRolledBack, match="by the operator"):
        future.result(60)
    assert (bench.op(half_id), bench.rows("SELECT * FROM change")) == (("rollback", "operator"), [])


def test_commit_of_a_fenced_half(bench: Bench) -> None:
    """Refused: its business change was never committed. By force the message goes out all the same, on record."""
    half_id = ended(bench)
    with pytest.raises(ActRefused, match=r"fenced and has no op.*use force"):
        bench.outbox.operator.commit(half_id, **WHO)
    assert (bench.op(half_id), audit(bench, half_id)) == (None, [])
    bench.outbox.operator.commit(half_id, force=True, **WHO)
    assert bench.dispatch() == 1
    assert audit(bench, half_id)[0][3] == {"force": True}
    with pytest.raises(ActRefused, match="it is dispatched"):
        bench.outbox.operator.commit(half_id, **WHO)


def test_check_of_a_running_function_by_hand(bench: Bench, running: tuple[UUID, Future[str]]) -> None:
    """It still runs, says the fence, without waiting; the function commits, and is then found decided."""
    half_id, future = running
    answer = check_now(bench, half_id)
    assert (answer.resolution, answer.error) == (UNKNOWN, "its transaction is still running")
    bench.let_go.set()
    assert future.result(60) == "changed"
    assert bench.op(half_id) == ("commit", "producer")
    with pytest.raises(CheckRefused, match="it is committed"):
        check_now(bench, half_id)
    asked = {"asked": "fence", "answer": "unknown", "error": "its transaction is still running"}
    assert audit(bench, half_id) == [("ann", "check", "the provider called", asked)]


def test_check_of_an_ended_function_by_hand(bench: Bench) -> None:
    """It ended without a commit: rolled back at once, however young, without a checker."""
    half_id = ended(bench)
    assert check_now(bench, half_id).resolution is ROLLBACK
    assert (bench.op(half_id), bench.answers(half_id)) == (("rollback", "check"), ["rollback"])
    assert audit(bench, half_id)[0][3] == {"asked": "fence", "answer": "rollback", "error": None}


# --- here and now --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", [COMMIT, ROLLBACK, UNKNOWN])
@pytest.mark.parametrize("state", ["immune", "orphan", "parked"])
def test_check_here_and_now(bench: Bench, state: str, answer: Resolution) -> None:
    """The checker is asked at once, whatever the half is waiting for; without a verdict a parked half stays parked."""
    half_id = parked(bench) if state == "parked" else bench.prepare(due=state == "orphan")
    bench.register(answer)
    assert check_now(bench, half_id).resolution is answer
    checks = 1 + (state == "parked")
    assert bench.answers(half_id) == ["unknown"] * (checks - 1) + [answer]
    if answer is UNKNOWN:
        assert (bench.waits(half_id).parked, bench.waits(half_id).check_times) == (state == "parked", checks)
    else:
        assert (bench.op(half_id), bench.waits(half_id)) == ((answer, "check"), None)
    assert audit(bench, half_id) == [("ann", "check", "the provider called", {"asked": "checker"})]
    assert bench.check() == Counts()


def test_last_check_by_hand_parks(bench: Bench) -> None:
    """What an operator has asked counts: the half is parked after as many checks as any other."""
    bench.register(UNKNOWN, max_checks=2)
    half_id = bench.prepare()
    for checks in (1, 2, 3):
        check_now(bench, half_id)
        assert (bench.waits(half_id).check_times, bench.waits(half_id).parked) == (checks, checks >= 2)


def test_check_that_takes_too_long_by_hand(bench: Bench) -> None:
    """A checker that hangs is given up after its time, also for an operator."""
    bench.register(bench.let_go, timeout=SHORT)
    half_id = bench.prepare()
    answer = check_now(bench, half_id)
    assert (answer.resolution, answer.error) == (UNKNOWN, f"no answer within {SHORT} s: the checker was given up")
    assert bench.answers(half_id) == ["unknown"]


def with_runners(bench: Bench, half_id: UUID) -> Answer:
    """Have a half checked here and now, with connections as a worker's."""
    new_runner = Runners(WorkerDatabase(bench.engine), threading.Event())
    return bench.outbox.operator.check_now(half_id, new_runner=new_runner, **WHO)


def test_async_checker_by_hand(bench: Bench) -> None:
    """Without an event loop it is refused before anything is written; with a worker's runners it is asked."""

    @bench.outbox.checker("paid")
    async def checker(orphan: Orphan, session: Any) -> Resolution:
        await asyncio.sleep(0)  # there is a loop that runs
        await session.execute(text("SELECT 1"))
        return COMMIT

    half_id = bench.prepare()
    before = check_of(bench, half_id)
    with pytest.raises(CheckRefused, match="event loop"):
        check_now(bench, half_id)
    assert check_of(bench, half_id) == before
    assert (bench.history(half_id), audit(bench, half_id)) == ([], [])
    assert with_runners(bench, half_id).resolution is COMMIT
    assert bench.op(half_id) == ("commit", "check")


@pytest.mark.parametrize(
    ("error", "why"),
    [(ConnectionError("no more connections"), "ConnectionError: no more connections"), (None, "about to end")],
)
def test_nobody_could_be_asked(bench: Bench, error: Exception | None, why: str) -> None:
    """A checker that could not be reached costs the half none of its checks."""
    bench.register(COMMIT)
    half_id = bench.prepare()
    with pytest.raises(CheckRefused, match=f"could not be asked about: .*{why}"):
        bench.outbox.operator.check_now(half_id, new_runner=lambda _: NoRunner(error), **WHO)
    assert (bench.waits(half_id).check_times, bench.history(half_id)) == (0, [])
    assert bench.check() == Counts(taken=1, done=1)


def test_no_checker_to_ask_by_hand(bench: Bench) -> None:
    """Refused, with the mend, and nothing is written."""
    half_id = bench.prepare()
    with pytest.raises(CheckRefused, match=r"register one with @outbox.checker\('paid'\)"):
        check_now(bench, half_id)
    assert (bench.history(half_id), audit(bench, half_id)) == ([], [])


def test_being_asked_at_this_moment(bench: Bench) -> None:
    """Nobody is asked about a half twice at once: the operator is told to look again."""
    asked = bench.register(bench.let_go)
    half_id = bench.prepare()
    with beside(bench, bench.check) as passing:
        bench.wait_for(lambda: asked, "the checker is asked")
        with pytest.raises(CheckRefused, match="being asked about at this moment"):
            check_now(bench, half_id)
        bench.let_go.set()
        assert passing.result(60) == Counts(taken=1, done=1)
    assert (len(asked), audit(bench, half_id)) == (1, [])


def test_asked_by_another_in_the_same_moment(bench: Bench) -> None:
    """The operator waits for a pass that is leasing the half, and then sees that it did."""
    asked = bench.register(COMMIT)
    half_id = bench.prepare()
    with bench.engine.connect() as rival, rival.begin() as transaction:
        execute(rival, check_sql.lease("outbox", "paid", 1, check_sql.Question(15, 40, "another")))
        with beside(bench, lambda: check_now(bench, half_id)) as late:
            bench.wait_for(lambda: waiting(bench), "the operator waits")
            transaction.commit()
            with pytest.raises(CheckRefused, match="being asked about at this moment"):
                late.result(60)
    assert (asked, len(bench.history(half_id)), audit(bench, half_id)) == ([], 1, [])


def test_checked_again_after_the_worker_died(bench: Bench) -> None:
    """Once the lease of a dead worker has run out, an operator may ask."""
    asked = bench.register(COMMIT)
    half_id = bench.prepare()
    with bench.engine.begin() as dead:
        execute(dead, check_sql.lease("outbox", "paid", 1, check_sql.Question(15, 40, "dead")))
    with pytest.raises(CheckRefused):
        check_now(bench, half_id)
    bench.run("UPDATE outbox.check_history SET asked_at = asked_at - interval '41 s'")
    assert check_now(bench, half_id).resolution is COMMIT
    assert (len(asked), bench.answers(half_id)) == (1, [None, "commit"])


@pytest.mark.parametrize("fenced", [False, True])
def test_decided_by_a_transaction_that_never_ends(bench: Bench, monkeypatch: pytest.MonkeyPatch, fenced: bool) -> None:
    """The operator waits so long and no longer, and is told what for."""
    monkeypatch.setattr(operator_module, "PATIENCE", 0.05)
    bench.register(COMMIT)
    half_id = ended(bench) if fenced else bench.prepare()
    with bench.engine.begin() as rival:
        decide(rival, "outbox", half_id, COMMIT)
        with pytest.raises(CheckRefused, match=r"a transaction that decides it has not ended for 0\.05 s"):
            check_now(bench, half_id)
    assert audit(bench, half_id) == []


# --- refused -------------------------------------------------------------------------------------------------------

ACTS: dict[str, Callable[[Outbox, UUID, str], object]] = {
    "commit": lambda outbox, half_id, reason: outbox.operator.commit(half_id, by="ann", why=reason),
    "rollback": lambda outbox, half_id, reason: outbox.operator.rollback(half_id, by="ann", why=reason),
    "reset": lambda outbox, half_id, reason: outbox.operator.reset(half_id, by="ann", why=reason),
    "request": lambda outbox, half_id, reason: outbox.operator.check(half_id, by="ann", why=reason),
    "check": lambda outbox, half_id, reason: outbox.operator.check_now(half_id, by="ann", why=reason),
}


@pytest.mark.parametrize("name", ACTS)
def test_unknown_half(bench: Bench, name: str) -> None:
    """There is no such half: it is said so, and nothing is recorded."""
    half_id = uuid4()
    with pytest.raises((HalfNotFound, NotFound), match=str(half_id)):
        ACTS[name](bench.outbox, half_id, "why")
    assert audit(bench, half_id) == []


@pytest.mark.parametrize("reason", ["", " \n"])
@pytest.mark.parametrize("name", ["commit", "rollback", "reset"])
def test_no_reason(bench: Bench, name: str, reason: str) -> None:
    """What can't be taken back isn't done without a reason."""
    bench.register(COMMIT)
    half_id = bench.prepare()
    before = check_of(bench, half_id)
    with pytest.raises(InvalidRequest, match="give a reason"):
        ACTS[name](bench.outbox, half_id, reason)
    assert check_of(bench, half_id) == before


def test_act_that_is_rolled_back(bench: Bench) -> None:
    """Act and audit entry are in the caller's transaction, and vanish with it."""
    half_id = parked(bench)

    def acts(connection: Connection) -> None:
        for name in ("check", "reset", "commit"):
            act_in(connection, bench, name, half_id)

    with bench.engine.connect() as connection, connection.begin() as transaction:
        acts(connection)
        transaction.rollback()
    assert (bench.op(half_id), bench.waits(half_id).parked, audit(bench, half_id)) == (None, True, [])
    with bench.engine.begin() as connection:
        acts(connection)
    assert bench.op(half_id) == ("commit", "operator")
    assert [act for _, act, _, _ in audit(bench, half_id)] == ["check", "reset", "commit"]
