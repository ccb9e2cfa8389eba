"""What the application is called for when it is parked: a message of a group, and a half message; once each."""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from outbox import DeadLetter, Message, Orphan, Outbox, Resolution, Worker, testing
from outbox.dead_letter import announce_pass
from outbox.errors import InvalidHandler
from tests.compensate.test_kill import Killer
from tests.delivery.killed_calling import note, serve
from tests.delivery.support import Post, refuse
from tests.kit import wait_until
from tests.telemetry.test_otel import Telescope


def calling(post: Post, function: Callable[..., Any] = note, **options: Any) -> Outbox:
    """Return bank B, which can't handle anything, and is called for it."""
    app = Outbox(post.consumer, settings=post.settings)
    source = None if post.producer is post.consumer else post.producer
    app.consumer("t", group="g", source=source, retry_delays=())(refuse)
    app.on_parked("t", **options)(function)
    return app


def park(post: Post, app: Outbox, *bodies: Any) -> list[UUID]:
    """Have messages parked."""
    ids = post.send(*bodies)
    testing.drain(app)
    return ids


def park_half(post: Post, app: Outbox) -> UUID:
    """Have a half parked: nobody knows what became of its transaction."""
    app.checker("t", max_checks=1)(lambda orphan: Resolution.UNKNOWN)
    with Session(post.producer) as session, session.begin():
        half_id = app.prepare(session, "t", {"amount": 5})
    assert testing.check(app).parked == 1
    return half_id


def called(post: Post) -> list[tuple[UUID, str, str]]:
    """Return for what bank B was called, in order."""
    return [tuple(row) for row in post.rows("SELECT message_id, consumer_group, status FROM told ORDER BY n")]


def test_called_once_for_a_message(post: Post) -> None:
    """In the database of its group, with the message and the reason; the audit says so."""
    letters: list[DeadLetter[Any]] = []
    app = calling(post, lambda letter, session: letters.append(letter))
    first, second = park(post, app, {"amount": 1}, {"amount": 2})
    assert [testing.dead_letters(app).done for _ in range(2)] == [2, 0]
    assert [(each.id, each.topic, each.group, each.attempts) for each in letters] == [
        (first, "t", "g", 1),
        (second, "t", "g", 1),
    ]
    assert "no such account" in letters[0].reason
    assert isinstance(letters[1].message, Message)
    assert letters[1].message.body == {"amount": 2}
    audited = "SELECT target, actor, result ->> 'topic' FROM outbox.audit WHERE action = 'on_parked' ORDER BY id"
    assert [tuple(row) for row in post.rows(audited)] == [(f"g/{each}", "worker", "t") for each in (first, second)]


def test_called_once_for_a_half(post: Post) -> None:
    """In the producer's database; and not again, if an operator has it asked again in vain."""
    letters: list[DeadLetter[Any]] = []
    app = Outbox(post.producer, settings=post.settings)
    app.on_parked("t")(lambda letter, session: letters.append(letter))
    half_id = park_half(post, app)
    assert [testing.dead_letters(app).done for _ in range(2)] == [1, 0]
    app.operator.reset(half_id, by="me", why="again")
    assert testing.check(app).parked == 1
    assert not testing.dead_letters(app)
    (letter,) = letters
    assert (letter.id, letter.group, letter.attempts) == (half_id, None, 1)
    assert "no verdict" in letter.reason
    assert isinstance(letter.message, Orphan)
    assert letter.message.body == {"amount": 5}


def test_both_in_one_database(village: Post) -> None:
    """A service that produces and consumes is called for both."""
    app = calling(village)
    (message_id,) = park(village, app, 1)
    half_id = park_half(village, app)
    assert testing.dead_letters(app).done == 2
    assert [(id_, group) for id_, group, _ in called(village)] == [(half_id, None), (message_id, "g")]


def test_what_raises_is_undone_and_called_again(post: Post, caplog: pytest.LogCaptureFixture) -> None:
    """The others are called for all the same."""
    broken = True

    def fail(letter: DeadLetter[Any], session: Session) -> None:
        note(letter, session)
        if broken and letter.message and letter.message.body == 1:
            raise RuntimeError("the ticket system is down")

    app = calling(post, fail)
    first, second = park(post, app, 1, 2)
    counts = testing.dead_letters(app)
    assert (counts.done, counts.failed) == (1, 1)
    assert [id_ for id_, *_ in called(post)] == [second]
    assert "the ticket system is down" in caplog.text
    broken = False
    assert testing.dead_letters(app).done == 1
    assert [id_ for id_, *_ in called(post)] == [second, first]


def test_who_rolls_back_has_failed(post: Post, caplog: pytest.LogCaptureFixture) -> None:
    """It is told of, and called again."""

    def roll_back(letter: DeadLetter[Any], session: Session) -> None:
        note(letter, session)
        session.rollback()

    app = calling(post, roll_back)
    park(post, app, 1)
    assert [testing.dead_letters(app).failed for _ in range(2)] == [1, 1]
    assert "rolled its session back" in caplog.text


def test_what_an_operator_has_in_hand(post: Post) -> None:
    """Nobody is called for what was discarded; nor twice for what was parked again."""
    app = calling(post)
    discarded, parked = park(post, app, 1, 2)
    app.operator.discard(discarded, group="g", by="me", why="known")
    testing.dead_letters(app)
    app.operator.retry(parked, group="g", by="me", why="again")
    assert testing.drain(app).parked == 1
    assert not testing.dead_letters(app)
    assert [id_ for id_, *_ in called(post)] == [parked]


def test_of_two_workers_one_calls(post: Post) -> None:
    """While the function runs, another worker goes on to the next letter."""
    begun, go_on = threading.Event(), threading.Event()

    def linger(letter: DeadLetter[Any], session: Session) -> None:
        note(letter, session)
        session.flush()
        if letter.message and letter.message.body == 1:
            begun.set()
            assert go_on.wait(60)

    app = calling(post, linger)
    first, second = park(post, app, 1, 2)
    with ThreadPoolExecutor(1) as threads:
        lingering = threads.submit(testing.dead_letters, app)
        assert begun.wait(60)
        assert testing.dead_letters(app).done == 1
        go_on.set()
        assert lingering.result().done == 1
    assert sorted(id_ for id_, *_ in called(post)) == sorted([first, second])


def test_a_retry_is_not_kept_waiting(post: Post) -> None:
    """An operator gives a message another try while the function runs: neither waits for the other."""
    app = calling(post)

    def retry(letter: DeadLetter[Any], session: Session) -> None:
        note(letter, session)
        session.flush()
        post.sink.operator.retry(letter.id, group="g", by="me", why="now")

    app.parked_callbacks.clear()
    app.on_parked("t")(retry)
    (half_id,) = park(post, app, 1)
    assert testing.dead_letters(app).done == 1
    assert post.statuses() == [("failed", 0)]
    assert [id_ for id_, *_ in called(post)] == [half_id]


def test_what_it_sends_is_caused_by_the_letter(village: Post) -> None:
    """It may send, with its session; what it sends belongs to the conversation."""

    def write(letter: DeadLetter[Any], session: Session) -> None:
        app.send(session, "tickets", {"why": letter.reason})

    app = calling(village, write)
    (half_id,) = park(village, app, 1)
    testing.dead_letters(app)
    sent = "SELECT headers ->> 'outbox-cause' FROM outbox.half_message WHERE topic = 'tickets'"
    assert village.rows(sent) == [str(half_id)]


def test_the_producer_has_pruned_it(post: Post) -> None:
    """The letter is there, its message isn't."""
    bodies: list[Any] = []
    app = calling(post, lambda letter, session: bodies.append(letter.message))
    park(post, app, 1)
    for table in ("message", "half_message", "op_message"):
        post.at_a.run(f"DELETE FROM outbox.{table}")
    assert testing.dead_letters(app).done == 1
    assert bodies == [None]


@dataclass
class Transfer:
    """A body."""

    amount: int


def test_async_and_with_a_model(village: Post) -> None:
    """A coroutine gets an AsyncSession, and the body as what it is declared to be."""
    amounts: list[int] = []

    async def announce() -> int:
        engine = create_async_engine(village.producer.url)
        app = Outbox(engine, settings=village.settings)
        app.consumer("t", group="g", retry_delays=())(refuse)

        @app.on_parked("t", model=Transfer)
        async def write(letter: DeadLetter[Transfer], session: AsyncSession) -> None:
            assert letter.message is not None
            amounts.append(letter.message.body.amount)
            await session.execute(text("INSERT INTO told (message_id) VALUES (:id)"), {"id": letter.id})

        await testing.on_loop(testing.drain, app)
        counts = await testing.on_loop(testing.dead_letters, app)
        await engine.dispose()
        return counts.done

    ids = village.send({"amount": 5})
    assert asyncio.run(announce()) == 1
    assert (amounts, village.rows("SELECT message_id FROM told")) == ([5], ids)


def test_more_than_a_page(post: Post) -> None:
    """All are called for in one pass, also behind one that fails."""

    def fail_at_zero(letter: DeadLetter[Any], session: Session) -> None:
        if letter.message and letter.message.body == 0:
            raise ValueError("zero")

    app = calling(post, fail_at_zero)
    park(post, app, *range(45))
    counts = testing.dead_letters(app)
    assert (counts.done, counts.failed) == (44, 1)


def test_in_a_trace(post: Post) -> None:
    """A call is a span with its group, linked to the one that sent the message."""
    telescope = Telescope()
    try:
        app = calling(post)
        with telescope.tracer.start_as_current_span("transfer"):
            post.send(1)
        testing.drain(app)
        testing.dead_letters(app)
        (sent,), (span,) = telescope.spans("transfer"), telescope.spans("announce t")
        assert [link.context.trace_id for link in span.links] == [sent.context.trace_id]
    finally:
        telescope.end()
        for shut_down in telescope.shut_down:
            shut_down()


def test_by_a_worker(post: Post, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the consumer's calls for messages, one of the producer's for halves."""
    monkeypatch.setattr(announce_pass, "INTERVAL", 0.05)
    app, producing = calling(post), Outbox(post.producer, settings=post.settings)
    producing.on_parked("t")(note)
    half_id = park_half(post, producing)
    with Worker(app, producing):
        (message_id,) = post.send(1)
        wait_until(lambda: [id_ for id_, *_ in called(post)] == [message_id], "bank B is called")
        wait_until(lambda: [id_ for id_, *_ in post.told()] == [half_id], "bank A is called")


def test_what_can_not_be_declared(post: Post) -> None:
    """A second function, and one that takes something else."""
    app = calling(post)
    with pytest.raises(InvalidHandler, match="on_parked of 't' is declared already"):
        app.on_parked("t")(note)
    with pytest.raises(InvalidHandler, match="letter, session"):
        app.on_parked("other")(lambda: None)  # type: ignore[arg-type,misc]  # what is refused


@pytest.fixture(scope="module")
def forking() -> Iterator[Pipe]:
    """A process that forks those that are killed."""
    context = multiprocessing.get_context("forkserver")
    pipe, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    yield pipe
    process.kill()
    process.join()


@pytest.mark.slow
def test_killed_anywhere(post: Post, forking: Pipe) -> None:
    """Killed after any round trip, each letter is called for once."""
    killer, app = Killer(forking, post), calling(post)
    stages = set()
    for after in itertools.count(1):
        (parked,) = park(post, app, after)
        ended = killer.kill_after(after)
        stages.add(parked in [id_ for id_, *_ in called(post)])
        testing.dead_letters(app)
        assert [id_ for id_, *_ in called(post)].count(parked) == 1
        if ended:
            break
    assert stages == {False, True}
