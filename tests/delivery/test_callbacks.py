"""What the producer does when it has learnt of a message's fate: once, and in one transaction with that."""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection as Pipe

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from outbox import Delivery, Message, Outbox, Settings, Worker, testing
from outbox.errors import InvalidHandler
from outbox.worker.connections import AsyncRunner, WorkerDatabase
from tests.compensate.test_kill import Killer
from tests.delivery.killed import serve
from tests.delivery.support import Post, refuse, tell
from tests.kit import stride, wait_until
from tests.telemetry.test_otel import Telescope


def telling(post: Post) -> Outbox:
    """Return bank A with both callbacks."""
    app = post.know()
    app.on_delivered("t")(tell)
    app.on_undeliverable("t")(tell)
    return app


def test_told_once_of_what_was_consumed(post: Post) -> None:
    """The callback gets the message, the group and the fate; and none of them twice."""
    app, consumer = telling(post), post.declare()
    ids = post.send({"amount": 1}, {"amount": 2})
    post.consume(consumer)
    for _ in range(2):
        post.confirm(app)
    assert post.told() == [(each, "g", "consumed") for each in ids]
    assert post.fates() == {each: ["consumed"] for each in ids}


def test_told_of_what_was_parked_and_of_what_was_consumed_after_all(post: Post) -> None:
    """Each of the two is told once, however often the fate changes."""
    app = telling(post)
    fails = True

    def handler(message: Message, session: Session) -> None:
        if fails:
            refuse(message, session)

    consumer = post.declare(handler, retry_delays=())
    (half_id,) = post.send(1)
    post.consume(consumer)
    post.confirm(app)
    for _ in range(2):
        post.sink.operator.retry(half_id, group="g", by="me", why="again")
        post.retry(consumer)
        post.confirm(app)
    fails = False
    post.sink.operator.retry(half_id, group="g", by="me", why="the account is there now")
    post.retry(consumer)
    post.confirm(app)
    assert post.told() == [(half_id, "g", "parked"), (half_id, "g", "consumed")]


def test_told_of_what_was_given_up(post: Post) -> None:
    """A message that is lost for good is undeliverable."""
    app, consumer = telling(post), post.declare()
    settings = replace(post.settings, confirm_resends=0)
    (half_id,) = post.send(1)
    post.consume(consumer)
    post.lose(half_id)
    post.confirm(app, settings)
    assert post.told() == [(half_id, "g", "resend_exhausted")]


def test_what_raises_is_undone_and_called_again(post: Post, caplog: pytest.LogCaptureFixture) -> None:
    """Neither the callback nor the row that says so is there; the others are called all the same, and it is later."""
    app, consumer = post.know(), post.declare()
    broken = True

    @app.on_delivered("t")
    def credit(delivery: Delivery, session: Session) -> None:
        tell(delivery, session)
        if broken and delivery.message.body == 1:
            raise RuntimeError("bank A is closed")

    first, second = post.send(1, 2)
    post.consume(consumer)
    for _ in range(2):
        post.confirm(app)
    assert post.told() == [(second, "g", "consumed")]
    assert (post.fates()[first], post.settled(first)) == (["consumed"], False)
    assert "bank A is closed" in caplog.text
    broken = False
    post.confirm(app)
    assert post.told() == [(second, "g", "consumed"), (first, "g", "consumed")]
    assert post.settled(first)
    assert not post.confirm(app)


@pytest.mark.parametrize("ends", ["rollback", "COMMIT"])
def test_who_ends_the_transaction_has_failed(post: Post, ends: str, caplog: pytest.LogCaptureFixture) -> None:
    """A callback that takes the transaction into its own hands is told of, and called again."""
    app, consumer = post.know(), post.declare()

    @app.on_delivered("t")
    def credit(delivery: Delivery, session: Session) -> None:
        tell(delivery, session)
        if ends == "rollback":
            session.rollback()
        else:
            session.connection().exec_driver_sql(ends)

    (half_id,) = post.send(1)
    post.consume(consumer)
    post.confirm(app)
    assert ("let it" if ends == "rollback" else "COMMIT inside") in caplog.text
    assert post.at_a.value("SELECT count(*) FROM outbox.delivery_cursor") == 1
    assert half_id in post.fates()


def test_what_a_callback_sends_goes_with_it(post: Post) -> None:
    """It may send messages, with its session."""
    app, consumer = post.know(), post.declare()

    @app.on_delivered("t")
    def confirm(delivery: Delivery, session: Session) -> None:
        app.send(session, "credited", {"transfer": str(delivery.message.id)})

    post.send(1)
    post.consume(consumer)
    post.confirm(app)
    assert post.at_a.rows("SELECT topic FROM outbox.half_message ORDER BY id") == ["t", "credited"]


@dataclass
class Transfer:
    """A body."""

    amount: int


def test_async_and_with_a_model(post: Post) -> None:
    """A coroutine gets an AsyncSession, and the body as what the topic declares."""
    app, consumer = post.know(), post.declare()
    amounts = []

    @app.on_delivered("t", model=Transfer)
    async def credit(delivery: Delivery[Transfer], session: AsyncSession) -> None:
        amounts.append(delivery.message.body.amount)
        await session.execute(text("INSERT INTO told (message_id) VALUES (:id)"), {"id": delivery.message.id})

    (half_id,) = post.send({"amount": 5})
    post.consume(consumer)
    database = WorkerDatabase(post.producer)
    post.confirm(app, new_runner=lambda is_async: AsyncRunner(database, None, threading.Event()))
    assert amounts == [5]
    assert post.at_a.rows("SELECT message_id FROM told") == [half_id]


def test_of_many_workers_one_calls_back(post: Post) -> None:
    """Passes that begin at the same time tell each fate once."""
    app, consumer = telling(post), post.declare(batch=50)
    ids = post.send(*range(20))
    post.consume(consumer)
    with ThreadPoolExecutor(4) as threads:
        for each in [threads.submit(post.confirm, app) for _ in range(4)]:
            each.result()
    assert sorted(post.told()) == sorted((each, "g", "consumed") for each in ids)
    assert post.fates() == {each: ["consumed"] for each in ids}


def test_a_second_caller_waits_for_the_first(post: Post) -> None:
    """While a callback runs, another worker waits at its row, and then does nothing."""
    begun, go_on = threading.Event(), threading.Event()
    app, consumer = post.know(), post.declare()

    @app.on_delivered("t")
    def credit(delivery: Delivery, session: Session) -> None:
        tell(delivery, session)
        session.flush()
        begun.set()
        assert go_on.wait(60)

    (half_id,) = post.send(1)
    post.consume(consumer)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(post.confirm, app)
        assert begun.wait(60)
        second = threads.submit(post.confirm, app)
        wait_until(post.at_a.waiting, "the second waits for the first")
        go_on.set()
        assert sorted([first.result().taken, second.result().taken]) == [0, 1]
    assert post.told() == [(half_id, "g", "consumed")]


def test_pruned_meanwhile(post: Post) -> None:
    """Nothing is written, and nobody called, for a message that isn't there any more."""
    app, consumer = telling(post), post.declare(refuse, retry_delays=())
    post.send(1)
    post.consume(consumer)
    post.confirm()
    for table in ("message", "half_message", "op_message"):
        post.at_a.run(f"DELETE FROM outbox.{table}")
    post.confirm(app)
    assert post.told() == []


def test_declarations(post: Post) -> None:
    """A topic has one callback of each kind, and a group whose fate it can be told."""
    app = Outbox(post.producer, settings=post.settings)
    app.on_delivered("t")(tell)
    with pytest.raises(InvalidHandler, match=r"on_delivered of .* is declared already"):
        app.on_delivered("t")(tell)
    with pytest.raises(InvalidHandler, match="delivery, session"):
        app.on_undeliverable("t")(lambda: None)  # type: ignore[arg-type,misc]  # what is refused
    with pytest.raises(InvalidHandler, match="no group of topic 't' is known"):
        app.groups_to_confirm()
    app.consumer("t", group="g")(refuse)
    assert [each.group for each in app.groups_to_confirm()] == ["g"]


def test_in_a_users_test(village: Post) -> None:
    """A user's test has it done here and now, however young the messages are."""
    app = Outbox(village.producer, settings=Settings())
    app.consumer("t", group="g")(lambda message, session: None)
    app.on_delivered("t")(tell)
    (half_id,) = village.send(1)
    testing.drain(app)
    assert testing.confirm(app).done == 1
    assert village.told() == [(half_id, "g", "consumed")]


def test_in_an_async_users_test(village: Post) -> None:
    """So does one on an AsyncEngine, with an async callback."""

    async def confirm() -> int:
        engine = create_async_engine(village.producer.url)
        app = Outbox(engine, settings=Settings())
        app.consumer("t", group="g")(lambda message, session: None)

        @app.on_delivered("t")
        async def credit(delivery: Delivery, session: AsyncSession) -> None:
            await session.execute(text("INSERT INTO told (message_id) VALUES (:id)"), {"id": delivery.message.id})

        await testing.on_loop(testing.drain, app)
        counts = await testing.on_loop(testing.confirm, app)
        await engine.dispose()
        return counts.done

    ids = village.send(1, 2)
    assert asyncio.run(confirm()) == 2
    assert village.at_a.rows("SELECT message_id FROM told ORDER BY n") == ids


def test_in_a_trace(post: Post) -> None:
    """A callback is a span, with its group and the fate, linked to the one that sent the message."""
    telescope = Telescope()
    try:
        app, consumer = telling(post), post.declare()
        with telescope.tracer.start_as_current_span("transfer"):
            post.send(1)
        post.consume(consumer)
        post.confirm(app)
        (sent,), (span,) = telescope.spans("transfer"), telescope.spans("confirm t")
        assert span.attributes is not None
        assert span.attributes["outbox.delivery"] == "consumed"
        assert [link.context.trace_id for link in span.links] == [sent.context.trace_id]
    finally:
        telescope.end()
        for shut_down in telescope.shut_down:
            shut_down()


def test_by_a_worker(village: Post) -> None:
    """Services in one database need not name the group: what it consumes is told."""
    app = Outbox(village.producer, settings=replace(village.settings, confirm_interval=0.05))
    app.consumer("t", group="g")(lambda message, session: None)
    app.on_delivered("t")(tell)
    with Worker(app):
        (half_id,) = village.send(1)
        wait_until(lambda: village.told() == [(half_id, "g", "consumed")], "it is told")


# --- killed ---------------------------------------------------------------------------------------------------------


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
    """Killed after any round trip, each fate is told once, and what is lost is sent again once."""
    killer, app, consumer = Killer(forking, post), telling(post), post.declare(_refuse_odd, retry_delays=())
    stages = set()
    for rounds, after in enumerate(itertools.count(1, stride(3)), start=1):
        told, parked, lost = post.send(2, 3, 4)
        post.consume(consumer)
        post.lose(lost)
        ended = killer.kill_after(after)
        fates = post.fates()
        stages.add((told in fates, parked in fates, lost in fates))
        post.confirm(app)
        assert [post.sends(each) for each in (told, parked, lost)] == [1, 1, 2]
        post.consume(consumer)
        post.confirm(app)
        said = [(each, status) for each, _, status in post.told()]
        assert sorted(said[-3:]) == sorted([(told, "consumed"), (parked, "parked"), (lost, "consumed")])
        assert len(said) == 3 * rounds
        if ended:
            break
    # Nothing, one callback, two, and all.
    assert stages == {(False,) * 3, (True, False, False), (True, True, False), (True,) * 3}


def _refuse_odd(message: Message, session: Session) -> None:
    if message.body % 2:
        refuse(message, session)
