"""The dispatch of a topic is paused: what is sent is held, and comes out in order; nothing else is touched."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies
from sqlalchemy import Connection, Engine, text

from outbox import Outbox, Settings
from outbox.dispatch.dispatch_pass import dispatch_once, release_due_once
from outbox.errors import ActRefused, InvalidMessage, InvalidRequest, NotFound
from outbox.operator.health.stats import stats
from outbox.operator.model import PageRequest, ScheduledFilter
from tests.dispatch.support import assert_dense, by_key, messages
from tests.dispatch.test_schedule import CONNECTIONS, RESET, STEPS, Interpreter
from tests.kit import tries

Send = Callable[..., Any]


@pytest.fixture
def send(app: Outbox, engine: Engine) -> Send:
    """A function that sends bodies to a topic in one transaction, under one key."""

    def send(*bodies: Any, topic: str = "t", **options: Any) -> list[Any]:
        with engine.begin() as connection:
            return [app.send(connection, topic, body, key="k", **options) for body in bodies]

    return send


def work(connection: Connection, settings: Settings, limit: int | None = None) -> None:
    """Dispatch and release until nothing is left."""
    while True:
        passes = [one_pass(connection, settings, limit=limit) for one_pass in (dispatch_once, release_due_once)]
        if not any(counts or counts.more for counts in passes):
            return


def bodies(connection: Connection, topic: str = "t") -> list[Any]:
    """Return the bodies of a topic's messages, in order."""
    return [message.body for message in messages(connection, topic)]


def paused(app: Outbox) -> list[tuple[str, int]]:
    """Return the paused topics, with how much each holds."""
    return [(row.topic, row.held) for row in app.operator.topic_pauses()]


def test_a_paused_topic_holds_what_is_sent(app: Outbox, connection: Connection, settings: Settings, send: Send) -> None:
    """Other topics go on; resumed, all of it goes out in order, and then what comes new; the pause is gone."""
    send(1)
    work(connection, settings)
    assert "is paused" in app.operator.pause_topic("t", by="ann", why="sent twice", create=True)
    send(2, 3)
    send("other", topic="u")
    work(connection, settings)
    assert (bodies(connection), bodies(connection, "u")) == ([1], ["other"])
    assert paused(app) == [("t", 2)]
    assert "is resumed" in app.operator.resume_topic("t", by="ben")
    send(4)
    work(connection, settings, limit=1)
    assert bodies(connection) == [1, 2, 3, 4]
    assert paused(app) == []
    send(5)
    dispatch_once(connection, settings)
    assert bodies(connection) == [1, 2, 3, 4, 5]
    with connection.begin():
        audited = connection.execute(text("SELECT actor, action, target, reason FROM outbox.audit ORDER BY id")).all()
    assert [tuple(row) for row in audited] == [
        ("ann", "pause_topic", "t", "sent twice"),
        ("ben", "resume_topic", "t", ""),
    ]


def test_nothing_overtakes_what_is_held(app: Outbox, connection: Connection, settings: Settings, send: Send) -> None:
    """What comes after the resumption, and before the last of it is out, waits behind it."""
    app.operator.pause_topic("t", by="me", why="test", create=True)
    send(1, 2, 3)
    dispatch_once(connection, settings)
    app.operator.resume_topic("t", by="me")
    release_due_once(connection, settings, limit=1)
    send(4)
    dispatch_once(connection, settings)
    assert bodies(connection) == [1]
    assert paused(app) == [("t", 3)]
    work(connection, settings)
    assert bodies(connection) == [1, 2, 3, 4]


def test_paused_again_while_it_goes_out(app: Outbox, connection: Connection, settings: Settings, send: Send) -> None:
    """The rest is held once more."""
    app.operator.pause_topic("t", by="me", why="test", create=True)
    send(1, 2, 3)
    dispatch_once(connection, settings)
    app.operator.resume_topic("t", by="me")
    release_due_once(connection, settings, limit=1)
    app.operator.pause_topic("t", by="me", why="test", create=True)
    work(connection, settings)
    assert bodies(connection) == [1]
    assert paused(app) == [("t", 2)]


def test_what_falls_due_is_held_too(app: Outbox, connection: Connection, settings: Settings, send: Send) -> None:
    """A delayed message of a paused topic waits until it is resumed; one of another topic doesn't."""
    send(1, delay=3600)
    send(2, delay=3600, topic="u")
    work(connection, settings)
    app.operator.pause_topic("t", by="me", why="test", create=True)
    due = "UPDATE outbox.scheduled_message SET deliver_at = clock_timestamp() - interval '1 ms'"
    with connection.begin():
        connection.execute(text(due))
    work(connection, settings)
    assert (bodies(connection), bodies(connection, "u")) == ([], [2])
    assert paused(app) == [("t", 1)]
    app.operator.resume_topic("t", by="me")
    work(connection, settings)
    assert bodies(connection) == [1]


def test_what_is_held_can_be_recalled(app: Outbox, connection: Connection, settings: Settings, send: Send) -> None:
    """As a scheduled message can, though it has no time of its own; and the pause ends without it."""
    app.operator.pause_topic("t", by="me", why="test", create=True)
    first, second = send(1, 2)
    work(connection, settings)
    app.operator.recall(first, by="me", why="sent twice")
    app.operator.resume_topic("t", by="me")
    work(connection, settings)
    assert [message.id for message in messages(connection)] == [second]
    assert paused(app) == []


def test_what_is_held_is_told(app: Outbox, connection: Connection, settings: Settings, send: Send) -> None:
    """It has no time at which it is due: neither its message, nor the list, nor the statistics make one up."""
    app.operator.pause_topic("t", by="me", why="test", create=True)
    (held,) = send(1)
    (delayed,) = send(2, topic="u", delay=3600)
    work(connection, settings)
    operator = app.operator
    assert operator.message(held).next.startswith("held: the dispatch of its topic is paused")
    assert [(row.id, row.held) for row in operator.scheduled(ScheduledFilter(), PageRequest()).items] == [
        (delayed, False),
        (held, True),
    ]
    topics = {each.topic: each for each in stats(connection, settings, {"producer"}).topics}
    assert (topics["t"].scheduled, topics["t"].next_due) == (1, None)
    assert topics["u"].next_due is not None


def test_acts_that_change_nothing_are_refused(app: Outbox) -> None:
    """They say why."""
    with pytest.raises(NotFound, match="has no topic 't'"):
        app.operator.resume_topic("t", by="me")
    app.operator.pause_topic("t", by="me", why="test", create=True)
    with pytest.raises(ActRefused, match="paused already"):
        app.operator.pause_topic("t", by="me", why="test", create=True)
    with pytest.raises(InvalidRequest, match="reason"):
        app.operator.pause_topic("u", by="me", why="")
    with pytest.raises(InvalidMessage):
        app.operator.pause_topic("not a topic!", by="me", why="test")


def test_paused_and_resumed_while_it_is_dispatched(
    app: Outbox, engine: Engine, connection: Connection, settings: Settings, send: Send
) -> None:
    """Two dispatchers, a producer and an operator at once: in the end, every message once, and in order."""

    def act() -> None:
        for _ in range(15):
            app.operator.pause_topic("t", by="me", why="test", create=True)
            app.operator.resume_topic("t", by="me")

    def dispatch() -> None:
        with engine.connect() as own:
            for _ in range(60):
                dispatch_once(own, settings, limit=3)
                release_due_once(own, settings, limit=3)

    def produce() -> None:
        for number in range(60):
            send(number)

    with ThreadPoolExecutor() as pool:
        for done in [pool.submit(act), pool.submit(dispatch), pool.submit(dispatch), pool.submit(produce)]:
            done.result()
    work(connection, settings)
    assert_dense(messages(connection))
    assert bodies(connection) == list(range(60))
    assert paused(app) == []


class PausingInterpreter(Interpreter):
    """Also pauses and resumes the topic, and lets out what was held."""

    def step(self, who: int, what: str, key: str, limit: int) -> None:
        """Do one thing, or nothing where it isn't possible now."""
        operator = self.app.operator
        pauses = {row.topic: row for row in operator.topic_pauses()} if what in {"pause", "resume"} else {}
        is_paused = "t" in pauses and pauses["t"].resumed_at is None
        if what == "pause" and not is_paused:
            operator.pause_topic("t", by="me", why="test", create=True)
        elif what == "resume" and is_paused:
            operator.resume_topic("t", by="me")
        elif what == "let out":
            release_due_once(self.dispatcher, self.app.settings, limit=limit)
        elif what not in {"pause", "resume"}:
            super().step(who, what, key, limit)


ACTS = strategies.tuples(
    strategies.just(0),
    strategies.sampled_from(["pause", "resume", "resume", "let out", "let out", "let out"]),
    strategies.just("k0"),
    strategies.integers(1, 5),
)


def test_any_schedule_with_pauses_keeps_the_order(app: Outbox, engine: Engine) -> None:
    """Whatever transactions overlap with pauses: in the end each key is in commit order, and positions have no hole."""
    with engine.connect() as dispatcher, ExitStack() as stack:
        writers = [stack.enter_context(engine.connect()) for _ in range(CONNECTIONS)]

        @settings(max_examples=tries(12), suppress_health_check=list(HealthCheck), database=None)
        @given(steps=STEPS, acts=strategies.lists(ACTS, min_size=10, max_size=40), limit=strategies.integers(1, 5))
        def check(steps: list[tuple[int, str, str, int]], acts: list[tuple[int, str, str, int]], limit: int) -> None:
            with dispatcher.begin():
                dispatcher.execute(RESET)
                dispatcher.execute(text("TRUNCATE outbox.topic_pause"))
            interpreter = PausingInterpreter(app, dispatcher, writers)
            try:
                for number, step in enumerate(steps):
                    interpreter.step(*step)
                    if number < len(acts):
                        interpreter.step(*acts[number])
                interpreter.step(0, "resume", "k0", limit)
                interpreter.finish(limit)
            finally:
                for writer in writers:
                    if writer.in_transaction():
                        writer.rollback()
            work(dispatcher, app.settings, limit)
            found = messages(dispatcher)
            assert_dense(found)
            assert by_key(found) == interpreter.committed

        check()
