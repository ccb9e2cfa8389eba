"""Only a return is a success, and only of an answer: whatever else a handler does is one failed attempt, and no more.

Each engine handles a message for each way to fail, and one that does nothing wrong: in one pass.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import pytest

from outbox import Park, Retry, Settings, Skip
from outbox.consumer.consumer import Consumer
from outbox.message.answer import failure_of
from outbox.message.model import Status
from outbox.telemetry.hooks import add_observer
from tests.kit import at_once, consume_all
from tests.kit.bench import Bench
from tests.kit.hostile import HOSTILE, LEAVING, NO_ANSWERS, VALUES

#: How handlers are called: with which options, and whether they are async.
ENGINES: dict[str, tuple[dict[str, Any], bool]] = {
    "in a transaction": ({}, False),
    "in a transaction, async": ({}, True),
    "in a batch": ({"batch": 7}, False),
    "of lists": ({"batch": 7, "takes_batch": True}, False),
    "by key": ({"ordered": "key"}, False),
    "outside": ({"transactional": False, "concurrency": 4}, False),
    "outside, async": ({"transactional": False, "concurrency": 4}, True),
}


def raised_of(message: Any) -> BaseException | None:
    """Return the exception that a message asks for."""
    made: Mapping[str, Callable[[], BaseException]] = HOSTILE | LEAVING
    body = (message[0] if isinstance(message, list) else message).body["case"]
    if isinstance(message, list) and len(message) > 1:
        return ValueError("one by one, please")
    return made[body]() if body in made else None


def consume(bench: Bench, consumer: Consumer) -> None:
    """Consume what is there, in a thread that isn't the main one: that is Ctrl-C's."""
    at_once(lambda: bench.consume(consumer))


@pytest.mark.parametrize("seen", [False, True], ids=["alone", "observed"])
@pytest.mark.parametrize("engine_name", ENGINES)
def test_whatever_is_raised(bench: Bench, engine_name: str, seen: bool, caplog: pytest.LogCaptureFixture) -> None:
    """An exception of any class is a failed attempt that is written down and logged; the queue goes on."""
    options, is_async = ENGINES[engine_name]
    calls: list[Any] = []

    def handle(message: Any, *_: Any) -> None:
        calls.append(message)
        if (error := raised_of(message)) is not None:
            raise error

    async def handle_later(message: Any, *_: Any) -> None:
        await asyncio.sleep(0)
        handle(message)

    names = [*HOSTILE, *(each for each in LEAVING if not is_async or each != "StopIteration"), "well"]
    caplog.set_level(logging.INFO, "outbox.consumer")
    consumer = bench.declare(handle_later if is_async else handle, **options)
    ids = dict(zip(bench_sent(bench, names), names, strict=True))
    end = add_observer(lambda activity: nullcontext()) if seen else lambda: None
    try:
        consume(bench, consumer)
    finally:
        end()
    inbox = bench.inbox()
    assert {ids[id_]: (row.status, row.attempts) for id_, row in inbox.items()} == {
        name: ("consumed", 1) if name == "well" else ("failed", 1) for name in names
    }
    assert all(row.error for id_, row in inbox.items() if ids[id_] != "well")
    told = [record for record in caplog.records if getattr(record, "outbox_event", "") == "message.failed"]
    assert len(told) == len(names) - 1
    assert all(logging.Formatter().format(record) for record in told)


@pytest.mark.parametrize("engine_name", ENGINES)
def test_whatever_is_returned(bench: Bench, engine_name: str) -> None:
    """What is no answer is a failed attempt that says so; no coroutine is left behind that was never awaited."""
    options, is_async = ENGINES[engine_name]
    mistakes = NO_ANSWERS | VALUES

    def handle(message: Any, *_: Any) -> Any:
        if isinstance(message, list):
            if len(message) > 1:
                raise ValueError("one by one, please")
            message = message[0]
        case = message.body["case"]
        return mistakes[case][0]() if case in mistakes else None

    async def handle_later(message: Any, *_: Any) -> Any:
        await asyncio.sleep(0)
        return handle(message)

    consumer = bench.declare(handle_later if is_async else handle, **options)
    ids = dict(zip(bench_sent(bench, [*mistakes, "well"]), [*mistakes, "well"], strict=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        consume(bench, consumer)
    found = {ids[id_]: row for id_, row in bench.inbox().items()}
    assert {name: (row.status, row.attempts) for name, row in found.items()} == {
        name: ("consumed", 1) if name == "well" else ("failed", 1) for name in [*mistakes, "well"]
    }
    for name, (_, said) in mistakes.items():
        assert f"the handler {said}" in str(found[name].error)


def bench_sent(bench: Bench, bodies: list[str]) -> list[Any]:
    """Send each case under a key of its own."""
    return [bench.send({"case": body}, key=body)[0] for body in bodies]


@pytest.mark.parametrize("is_async", [False, True], ids=["plain", "async"])
def test_an_end_that_is_not_said(bench: Bench, monkeypatch: pytest.MonkeyPatch, is_async: bool) -> None:
    """A call of which nothing tells how it ended has failed: a success has to be said."""
    from outbox.consumer.outside import calls

    def broken(*_: object) -> Any:
        raise RuntimeError("the code that reads outcomes")

    async def handle_later(message: Any) -> None:
        """Do nothing."""

    consumer = bench.declare(handle_later if is_async else lambda message: None, transactional=False)
    bench.send("a")
    monkeypatch.setattr(calls, "failures_of", broken)
    monkeypatch.setattr(calls, "failure_from", broken)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    bench.consume(consumer)
    assert bench.statuses() == [("failed", 1)]
    assert "nothing tells how" in str(next(iter(bench.inbox().values())).error)


async def test_the_pass_is_what_a_cancel_ends(bench: Bench, settings: Settings) -> None:
    """A task that is cancelled from outside is no attempt, and its message isn't consumed."""
    reached: list[Any] = []

    async def handle(message: Any, session: Any) -> None:
        reached.append(message.body)
        await asyncio.Event().wait()

    consumer = bench.declare(handle)
    bench.send("a")
    passes = bench.in_loop(lambda connection: consume_all(consumer, connection, connection))
    task = asyncio.create_task(passes)
    while not reached:
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert bench.statuses() == []


@pytest.mark.parametrize("kind", [Retry, Park, Skip])
def test_an_answer_that_cannot_be_read(kind: type) -> None:
    """A class of the application's own that doesn't call its base's ``__init__`` is a failure, and no success."""
    bare: Any = type("Bare", (kind,), {"__init__": lambda _: None})
    failure = failure_of(bare())
    assert failure is not None
    assert failure.error.startswith("the handler returned a Bare that can't be read: ")
    assert failure.status is Status.FAILED
