"""``async with Worker(outbox)``: async handlers are tasks of the application's own loop."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.ext.asyncio import AsyncSession

from outbox import Message, Orphan, Resolution
from outbox.database import at_commit
from outbox.database.engines import engine_of
from outbox.worker import Worker
from tests.kit import wait_until
from tests.worker.conftest import Bench

NewBench = Callable[..., Bench]
CONSUME = "consume paid of mail"
#: A variable of the application's.
tenant: contextvars.ContextVar[str] = contextvars.ContextVar("tenant", default="nobody's")


async def until(fact: Callable[[], Any], what: str) -> None:
    """Wait for a fact, while the loop turns."""
    await asyncio.to_thread(wait_until, fact, what)


def run(application: Coroutine[Any, Any, None]) -> None:
    """Run an application; whatever it leaves behind on its loop is an error."""

    async def watched() -> None:
        await application
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert left == set()

    asyncio.run(watched())


def test_handlers_run_on_the_loop_of_the_application(bench: Bench) -> None:
    """They use its locks and queues, see its context variables, and wait beside each other."""
    seen: list[tuple[Any, str]] = []

    async def application() -> None:
        lock, arrived, all_in = asyncio.Lock(), asyncio.Queue[int](), asyncio.Event()

        @bench.outbox.consumer("paid", group="mail", threads=3)
        async def handle(message: Message, session: AsyncSession) -> None:
            seen.append((asyncio.get_running_loop(), tenant.get()))
            async with lock:
                arrived.put_nowait(message.body["number"])
            await all_in.wait()
            await bench.handle_async(message, session)

        @bench.outbox.consumer("paid", group="plain")
        def handle_plainly(message: Message, session: Any) -> None:
            bench.handle(message, session)

        tenant.set("the application's")
        async with Worker(bench.outbox) as worker:
            assert isinstance(worker, Worker)
            await asyncio.to_thread(bench.send, count=20)
            # Several handlers wait at the same time, on a loop that goes on.
            for _ in range(2):
                await arrived.get()
            await until(lambda: len(bench.effects()) >= 20, "the plain handlers are done")
            all_in.set()
            await until(lambda: len(bench.effects()) >= 40, "all messages are handled")
        assert set(seen) == {(asyncio.get_running_loop(), "the application's")}

    run(application())
    assert len(bench.effects()) == 40
    bench.engine.dispose()
    wait_until(lambda: bench.connections() == 0, "no connection of the worker is left")


def test_checkers_and_compensations_run_on_it_too(bench: Bench) -> None:
    """Whatever async function the worker calls is a task of the loop around the block."""
    outbox, loops = bench.outbox, []

    @outbox.checker("prepared")
    async def check(orphan: Orphan, session: AsyncSession) -> Resolution:
        loops.append(asyncio.get_running_loop())
        return Resolution.COMMIT

    @outbox.compensation("paid")
    async def undo(message: Message, session: AsyncSession) -> None:
        loops.append(asyncio.get_running_loop())

    with bench.engine.begin() as connection:
        half_id = outbox.prepare(connection, "prepared", {}, immunity=0)
    (sent,) = bench.send()

    async def application() -> None:
        async with Worker(outbox) as worker:
            await until(lambda: sent in bench.messages(), "it is dispatched")
            await asyncio.to_thread(outbox.operator.compensate, sent, by="ann", why="no such account")
            bench.age_checks()
            worker.wake()
            await until(lambda: len(loops) == 2, "both are called")
            await until(lambda: bench.op(half_id), "the half is decided")
            assert set(loops) == {asyncio.get_running_loop()}

    run(application())
    assert bench.op(half_id) == ("commit", "check")


def test_a_blocked_loop_is_no_lost_lock(new_bench: NewBench) -> None:
    """While the loop is blocked, its worker keeps the queue, and nobody else handles the message; others dispatch."""
    bench = new_bench()
    rival = new_bench(bench.engine.url.render_as_string(hide_password=False))
    blocked, go_on, handled_by = threading.Event(), threading.Event(), []

    async def application() -> None:
        @bench.outbox.consumer("paid", group="mail")
        async def handle(message: Message, session: AsyncSession) -> None:
            await bench.handle_async(message, session)
            handled_by.append("blocked")
            blocked.set()
            go_on.wait()  # blocks the loop, in the middle of the transaction

        async with Worker(bench.outbox):
            await until(lambda: len(bench.effects()) >= 1, "the message is handled")

    def handle_elsewhere(message: Message, session: Any) -> None:
        handled_by.append("rival")

    rival.outbox.consumer("paid", group="mail")(handle_elsewhere)
    thread = threading.Thread(target=run, args=(application(),))
    (first,) = bench.send()
    thread.start()
    assert blocked.wait(180)
    consuming = rival.work(roles=["consume"])
    (second,) = bench.send()
    # The blocked application's own dispatcher is not blocked, and the rival has looked at the queue.
    wait_until(lambda: len(bench.messages()) == 2, "the second message is dispatched beside the blocked loop")
    wait_until(lambda: (health := consuming.health()) and health[CONSUME].last_success, "the rival has looked")
    assert bench.effects() == []
    go_on.set()
    wait_until(lambda: bench.inbox() == [("consumed", 1)] * 2, "both are consumed")
    thread.join(180)
    assert handled_by.count("blocked") + handled_by.count("rival") == 2
    assert handled_by[0] == "blocked"
    assert set(bench.messages()) == {first, second}


def test_the_end_waits_for_handlers(bench: Bench) -> None:
    """Leaving the block waits for what is running, which the loop goes on to serve."""

    async def application() -> None:
        started, go_on = asyncio.Event(), asyncio.Event()

        @bench.outbox.consumer("paid", group="mail")
        async def handle(message: Message, session: AsyncSession) -> None:
            started.set()
            await go_on.wait()
            await bench.handle_async(message, session)

        async with Worker(bench.outbox) as worker:
            bench.send()
            await started.wait()
            asyncio.get_running_loop().call_later(0.05, go_on.set)
        assert not worker.is_ready()

    run(application())
    assert bench.inbox() == [("consumed", 1)]


def test_the_end_is_bounded(new_bench: NewBench) -> None:
    """A handler that takes longer than the drain is cancelled; its work is rolled back, and costs no attempt."""
    bench, cancelled = new_bench(drain_timeout=0.1), []

    async def application() -> None:
        started = asyncio.Event()

        @bench.outbox.consumer("paid", group="mail")
        async def handle(message: Message, session: AsyncSession) -> None:
            await bench.handle_async(message, session)
            started.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(message.id)
                raise

        async with Worker(bench.outbox):
            bench.send()
            await started.wait()

    run(application())
    assert (len(cancelled), bench.effects(), bench.inbox()) == (1, [], [])


def test_a_cancelled_end_cuts_off(new_bench: NewBench) -> None:
    """When the server of the application loses its patience, the handlers are cancelled at once."""
    bench, cancelled = new_bench(drain_timeout=3600.0), []

    async def application() -> None:
        started = asyncio.Event()

        @bench.outbox.consumer("paid", group="mail")
        async def handle(message: Message, session: AsyncSession) -> None:
            started.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(message.id)
                raise

        async def serve() -> None:
            async with Worker(bench.outbox):
                bench.send()
                await started.wait()

        serving = asyncio.create_task(serve())
        await started.wait()
        await asyncio.sleep(0)
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving

    run(application())
    assert (len(cancelled), bench.inbox()) == (1, [])


def test_stop_on_the_loop_is_refused(bench: Bench) -> None:
    """It would block the loop on which the handlers have to end; another thread may call it."""

    async def application() -> None:
        @bench.outbox.consumer("paid", group="mail")
        async def handle(message: Message, session: AsyncSession) -> None: ...

        async with Worker(bench.outbox) as worker:
            with pytest.raises(RuntimeError, match="leave the 'async with' block"):
                worker.stop()
            assert await asyncio.to_thread(worker.stop)

    run(application())


def test_a_start_that_fails_leaves_nothing(bench: Bench) -> None:
    """What the start raises is raised by the block's beginning."""
    bench.run("ALTER SCHEMA outbox RENAME TO away")

    async def application() -> None:
        async with Worker(bench.outbox):
            raise AssertionError("it can't have started")

    from outbox.errors import OutboxError

    with pytest.raises(OutboxError):
        run(application())


def test_a_lost_connection_on_the_loop(bench: Bench) -> None:
    """A connection that the server ends under a handler is opened anew, on the same loop; the message is handled."""

    async def application() -> None:
        tries: list[int] = []

        @bench.outbox.consumer("paid", group="mail")
        async def handle(message: Message, session: AsyncSession) -> None:
            pid = await session.scalar(text("SELECT pg_backend_pid()"))
            tries.append(1)
            if len(tries) == 1:
                await asyncio.to_thread(bench.cut, f"pid = {pid}")
            await bench.handle_async(message, session)

        async with Worker(bench.outbox):
            await asyncio.to_thread(bench.send)
            await until(lambda: bench.inbox() == [("consumed", 1)], "it is handled after all")

    run(application())
    assert len(bench.effects()) == 1


def test_engines_that_share_listeners_have_ours_once(engine: Engine) -> None:
    """An engine that connects as the application's has its listeners: none is added while that one calls them."""
    at_commit.hook(engine)
    for _ in range(3):
        at_commit.hook(engine_of(engine, is_async=True))
    assert [each for each in engine.dispatch.commit if each is at_commit._on_commit] == [at_commit._on_commit]
