"""Checkers that take too long: they are given up, and hold up nothing else; limits are of the transaction."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from outbox import Counts, Orphan, Outbox, Resolution, Settings
from tests.check.changing import Change, changes, with_changes
from tests.check.support import SHORT, Bench, asking_threads, checker_of

NewBench = Callable[..., Bench]
COMMIT, UNKNOWN = Resolution.COMMIT, Resolution.UNKNOWN


@pytest.fixture
def bench(new_bench: NewBench) -> Bench:
    """A bench with the table ``change`` beside the outbox."""
    return with_changes(new_bench())


@pytest.mark.parametrize("takes_session", [False, True], ids=["plain", "session"])
def test_async_checker_that_hangs_is_cancelled(bench: Bench, takes_session: bool) -> None:
    """It is given up and cancelled: it ends, leaves no thread and no connection behind, and its topic goes on."""
    cancelled = threading.Event()

    async def hang(orphan: Orphan) -> Resolution:
        if orphan.key == "hangs":
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()
        return COMMIT

    async def hang_with_session(orphan: Orphan, session: AsyncSession) -> Resolution:
        session.add(Change(number=1 if orphan.key == "hangs" else orphan.body["n"]))
        await session.flush()
        return await hang(orphan)

    bench.outbox.checker("paid", timeout=2)(hang_with_session if takes_session else hang)
    bench.warm_up(is_async=True)
    half_id = bench.prepare(key="hangs")
    assert bench.check() == Counts(taken=1, failed=1)
    assert cancelled.wait(60)
    bench.wait_for(lambda: not asking_threads(), "no thread is left behind")
    assert bench.history(half_id)[0].error == "no answer within 2 s: the checker was given up"
    assert changes(bench) == []
    others = [bench.prepare(body={"n": 2 + n}) for n in range(10)]

    def have_been_asked() -> bool:
        while bench.check():
            pass
        # On a busy machine, 2 s may be too short for the first of them, which open connections; they are asked again.
        bench.age()
        return {bench.op(each) for each in others} == {("commit", "check")}

    bench.wait_for(have_been_asked, "the checker has answered about the others")
    bench.asker.end()
    bench.wait_for(
        lambda: not [thread for thread in threading.enumerate() if thread.name == "outbox-worker-loop"],
        "the event loops have ended",
    )


def test_async_checker_that_refuses_to_be_cancelled(bench: Bench) -> None:
    """One that goes on all the same can't record anything: its connection is gone."""
    answered = threading.Event()

    @bench.outbox.checker("paid", timeout=SHORT)
    async def checker(orphan: Orphan, session: AsyncSession) -> Resolution:
        session.add(Change(number=1))
        await session.flush()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            answered.set()
        return COMMIT

    half_id = bench.prepare()
    bench.warm_up(is_async=True)
    assert bench.check() == Counts(taken=1, failed=1)
    assert answered.wait(60)
    bench.wait_for(lambda: not asking_threads(), "the thread has ended")
    assert (bench.op(half_id), bench.answers(half_id), changes(bench)) == (None, ["unknown"], [])


def test_async_checker_that_blocks_its_loop(bench: Bench) -> None:
    """It can't be cancelled; it holds up its own loop, and no other checker."""

    @bench.outbox.checker("paid", timeout=SHORT)
    async def blocks(orphan: Orphan) -> Resolution:
        bench.let_go.wait()
        return COMMIT

    @bench.outbox.checker("shipped")
    async def good(orphan: Orphan) -> Resolution:
        return COMMIT

    blocked = bench.prepare()
    bench.warm_up(is_async=True, count=5)
    others = [bench.prepare("shipped") for _ in range(10)]
    assert bench.check() == Counts(taken=11, done=10, failed=1)
    assert {bench.op(each) for each in others} == {("commit", "check")}
    assert bench.answers(blocked) == ["unknown"]
    bench.let_go.set()
    bench.wait_for(lambda: not asking_threads(), "it has ended")
    assert bench.op(blocked) is None


def test_topic_goes_on_when_its_checkers_have_ended(new_bench: NewBench) -> None:
    """While all threads of a topic hang it rests, uncounted; when they have ended at last it goes on."""
    bench = new_bench(checks_in_flight=2)
    asked = bench.register(bench.let_go, timeout=SHORT)
    bench.warm_up(count=2)
    ids = [bench.prepare() for _ in range(4)]
    bench.age_and_check(4)
    assert len(asked) == 2
    assert sorted(bench.waits(each).check_times for each in ids) == [0, 0, 1, 1]
    bench.let_go.set()
    bench.wait_for(lambda: not asking_threads(), "the checkers have ended")
    bench.age_and_check()
    assert {bench.op(each) for each in ids} == {("commit", "check")}


def test_statement_that_takes_too_long(bench: Bench) -> None:
    """A statement of a checker ends with its time, also on the server."""

    @bench.outbox.checker("paid", timeout=SHORT)
    def checker(orphan: Orphan, session: Session) -> Resolution:
        session.add(Change(number=1))
        session.execute(text("SELECT pg_sleep(3600)"))
        return COMMIT

    half_id = bench.prepare()
    bench.warm_up()
    assert bench.check() == Counts(taken=1, failed=1)
    bench.wait_for(lambda: bench.connections("query LIKE '%pg_sleep(3600)%'") == 0, "the statement has ended")
    bench.wait_for(lambda: not asking_threads(), "and its thread")
    assert (bench.op(half_id), bench.answers(half_id), changes(bench)) == (None, ["unknown"], [])


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_lock_that_is_not_to_be_had(bench: Bench, is_async: bool) -> None:
    """A checker that must wait for the transaction it is asked about answers UNKNOWN soon, and gives its place up."""
    bench.run("INSERT INTO change VALUES (1)")
    update = text("UPDATE change SET of = 1")

    checker = checker_of(lambda _: COMMIT, lambda session: session.execute(update), is_async=is_async)
    bench.outbox.checker("paid", timeout=60)(checker)
    half_id = bench.prepare()
    with bench.engine.begin() as business:
        business.execute(update)
        assert bench.check() == Counts(taken=1, failed=1)
    (check,) = bench.history(half_id)
    assert "psycopg.errors.LockNotAvailable" in check.error
    assert "canceling statement due to lock timeout" in check.error
    assert bench.age_and_check() == Counts(taken=1, done=1)


def test_limits_are_of_the_transaction(bench: Bench) -> None:
    """What limits a checker's statements is gone with its transaction: the connection may be a pooler's."""
    seen: list[tuple[Any, ...]] = []
    show = text("SELECT current_setting('statement_timeout'), current_setting('lock_timeout')")
    engine_default = tuple(bench.rows(str(show))[0])

    @bench.outbox.checker("paid", timeout=7, interval=1)
    def checker(orphan: Orphan, session: Session) -> Resolution:
        seen.append(tuple(session.execute(show).one()))
        return COMMIT

    @bench.outbox.checker("shipped", timeout=0.2)
    def quick(orphan: Orphan, session: Session) -> Resolution:
        seen.append(tuple(session.execute(show).one()))
        return COMMIT

    bench.prepare()
    bench.check()
    shipped = bench.prepare("shipped")
    while bench.op(shipped) is None:  # on a busy machine it may be given up, and is asked again
        bench.age_and_check()
    assert (seen[0], set(seen[1:])) == (("7s", "500ms"), {("200ms", "200ms")})
    (runner,) = bench.asker._idle[False]

    def look(connection: Any, _: Any) -> Counts:
        with connection.begin():
            seen.append(tuple(connection.execute(show).one()))
        return Counts()

    runner.run(look)
    assert seen[-1] == engine_default


def test_the_longest_times_that_may_be_set(new_bench: NewBench) -> None:
    """What the settings let through works: the server takes these limits, and the clock these waits."""
    century = 100 * 366 * 86400 - 1
    bench = new_bench(immunity=century, check_interval=century, check_time_limit=86400, check_timeout=86400)
    bench.outbox.checker("paid")(lambda orphan, session: COMMIT if orphan.checks == 2 else UNKNOWN)
    half_id = bench.prepare(due=False)
    for _ in range(2):
        assert bench.check() == Counts()
        assert bench.waits(half_id).wait > century - 60
        bench.age_and_check()
    assert bench.op(half_id) == ("commit", "check")


def test_checker_for_a_moment_only(new_bench: NewBench) -> None:
    """A worker without the checker leaves what another one has leased; who has it goes on with his own rules."""
    bench = new_bench()
    asked = bench.register(UNKNOWN, max_checks=2)
    half_id = bench.prepare()
    bench.check()
    other = bench.colleague(Outbox(bench.engine, settings=Settings(max_checks=15)))
    other.age_and_check(3)
    assert bench.waits(half_id).check_times == 1
    patient = other.register(UNKNOWN)
    other.age_and_check(2)
    assert not bench.waits(half_id).parked
    assert ([each.checks for each in asked], [each.checks for each in patient]) == ([1], [2, 3])
    # By this one's rules it has been asked about often enough.
    assert bench.age_and_check() == Counts(taken=1, parked=1)
    assert len(asked) == 1
