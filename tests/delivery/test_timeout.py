"""A callback that takes too long has failed: what it did is undone, and the other messages and topics go on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from outbox import Delivery, Outbox, Settings
from outbox.errors import InvalidHandler, InvalidMessage
from outbox.worker.connections import Runners, WorkerDatabase
from tests.delivery.support import Post, tell
from tests.kit import wait_until

LIMIT = 0.3


@pytest.fixture
def runners(post: Post) -> Iterator[Runners]:
    """Connections as a worker makes them."""
    made = Runners(WorkerDatabase(post.producer), threading.Event())
    yield made
    made.end()


def hanging(app: Outbox) -> int:
    """Count the threads in which the callback was left behind."""
    return sum(thread.is_alive() for thread in app.delivery_callbacks["t", "delivered"].left_behind)


def test_a_plain_callback_that_hangs(
    post: Post, runners: Runners, released: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    """It loses its connection, and can commit nothing when it comes back; the others are called; so is it, later."""
    app, consumer, errors = post.know(), post.declare(), list[BaseException]()
    stuck = True

    @app.on_delivered("t", timeout=LIMIT)
    def credit(delivery: Delivery, session: Session) -> None:
        tell(delivery, session)
        if stuck and delivery.message.body == 1:
            released.wait()
            try:
                tell(delivery, session)
            except BaseException as error:
                errors.append(error)
                raise

    first, second = post.send(1, 2)
    post.consume(consumer)
    post.confirm(app, new_runner=runners)
    assert "it took longer than 0.3 s, and was given up" in caplog.text
    assert post.told() == [(second, "g", "consumed")]
    assert (post.fates()[first], post.settled(first)) == (["consumed"], False)
    stuck = False
    released.set()
    wait_until(lambda: hanging(app) == 0, "the thread has ended")
    assert errors, "its connection is gone"
    assert post.told() == [(second, "g", "consumed")]
    app.delivery_callbacks["t", "delivered"] = replace(app.delivery_callbacks["t", "delivered"], timeout=60)
    post.confirm(app, new_runner=runners)
    assert post.told() == [(second, "g", "consumed"), (first, "g", "consumed")]
    assert post.settled(first)


def test_a_coroutine_that_hangs(post: Post, runners: Runners) -> None:
    """It is cancelled; what it wrote is undone."""
    app, consumer, ended = post.know(), post.declare(), list[BaseException]()

    @app.on_delivered("t", timeout=2)
    async def credit(delivery: Delivery, session: AsyncSession) -> None:
        await session.execute(text("INSERT INTO told (message_id) VALUES (:id)"), {"id": delivery.message.id})
        try:
            await asyncio.Event().wait()
        except BaseException as error:
            ended.append(error)
            raise

    (half_id,) = post.send(1)
    post.consume(consumer)
    post.confirm(app, new_runner=runners)
    wait_until(lambda: hanging(app) == 0, "its thread has ended")
    assert [type(error) for error in ended] == [asyncio.CancelledError]
    assert (post.told(), post.fates()[half_id], post.settled(half_id)) == ([], ["consumed"], False)


def test_a_callback_that_always_hangs_rests(
    post: Post, runners: Runners, released: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It isn't called while it hangs in every thread that it may have; when one is back, it is."""
    monkeypatch.setattr("outbox.calling.engine.MOST_LEFT_BEHIND", 1)
    app, consumer, calls = post.know(), post.declare(), list[Delivery]()

    @app.on_delivered("t", timeout=LIMIT)
    def credit(delivery: Delivery, session: Session) -> None:
        calls.append(delivery)
        released.wait()

    ids = post.send(1, 2, 3)
    post.consume(consumer)
    post.confirm(app, new_runner=runners)
    assert len(calls) == 1
    assert [post.settled(each) for each in ids] == [False] * 3
    released.set()
    wait_until(lambda: hanging(app) == 0, "the thread has ended")
    app.delivery_callbacks["t", "delivered"] = replace(app.delivery_callbacks["t", "delivered"], timeout=60)
    post.confirm(app, new_runner=runners)
    assert [post.settled(each) for each in ids] == [True] * 3


def test_the_limit_is_declared() -> None:
    """By default that of the settings; a limit that isn't one is refused."""
    app = Outbox(settings=Settings(callback_timeout=7))
    app.on_delivered("t")(tell)
    app.on_undeliverable("t", timeout=1.5)(tell)
    limits = {kind: each.timeout for (_, kind), each in app.delivery_callbacks.items()}
    assert limits == {"delivered": 7, "undeliverable": 1.5}
    with pytest.raises(InvalidHandler, match=r"on_delivered of 'v': timeout = 0\.0 must be greater than 0"):
        app.on_delivered("v", timeout=0)(tell)
    with pytest.raises(InvalidMessage, match="timeout"):
        app.on_delivered("v", timeout=-1)(tell)
