"""What the producer does when it has learnt of a message's fate: told by a notice, once, in order, like any handler."""

from __future__ import annotations

import asyncio
import datetime as dt
import itertools
import json
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection as Pipe

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from outbox import Delivery, Message, Outbox, Settings, Worker, testing
from outbox.database.duty import Part
from outbox.database.migration import downgrade
from outbox.errors import InvalidHandler, InvalidMessage, SchemaError
from outbox.message.content import check_group
from outbox.message.notice import DELIVERED, notice_group
from outbox.operator.model import MessageFilter, PageRequest
from outbox.text import MASK
from tests.compensate.test_kill import Killer
from tests.delivery.killed import serve
from tests.delivery.support import Post, refuse, tell
from tests.doctor.support import examine
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
    assert sorted(post.told()) == [(each, "g", "consumed") for each in ids]
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
    """What the callback did isn't there; the others are called all the same, and it is later: as with any handler."""
    app, consumer = post.know(), post.declare()
    broken = True

    @app.on_delivered("t")
    def credit(delivery: Delivery, session: Session) -> None:
        tell(delivery, session)
        if broken and delivery.message.body == 1:
            raise RuntimeError("bank A is closed")

    first, second = post.send(1, 2)
    post.consume(consumer)
    post.confirm(app)
    assert post.told() == [(second, "g", "consumed")]
    assert (post.fates()[first], post.settled(first)) == (["consumed"], True)
    assert "bank A is closed" in caplog.text
    broken = False
    post.call(app)
    assert post.told() == [(second, "g", "consumed"), (first, "g", "consumed")]
    assert not post.confirm(app)


def test_a_fate_waits_for_those_before_it(post: Post) -> None:
    """A message that is consumed after all isn't told to be, while its callback fails at telling that it was parked."""
    app, fails = post.know(), True

    @app.on_undeliverable("t")
    def complain(delivery: Delivery, session: Session) -> None:
        if fails:
            raise RuntimeError("no paper")
        tell(delivery, session)

    app.on_delivered("t")(tell)
    consumer = post.declare(lambda message, session: refuse(message, session) if fails else None, retry_delays=())
    half_id, other = post.send(1, 2)
    post.consume(consumer)
    post.confirm(app)
    fails = False
    for each in (half_id, other):
        post.sink.operator.retry(each, group="g", by="me", why="the account is there now")
    post.retry(consumer)
    post.retry(consumer)
    post.confirm_without_calls(app)
    fails = True
    post.call(app)
    assert post.told() == []
    fails = False
    for _ in range(4):
        post.call(app)
    assert sorted(post.told()) == sorted(
        (each, "g", status) for each in (half_id, other) for status in ("parked", "consumed")
    )
    for each in (half_id, other):
        assert [status for told, _, status in post.told() if told == each] == ["parked", "consumed"]


@pytest.mark.parametrize("mixed", [False, True])
def test_callbacks_of_one_topic_are_one_group(post: Post, mixed: bool) -> None:
    """Whether their functions are async or not."""
    app = telling(post)
    group = notice_group(app.group, "t")
    assert [key for key in app.subscriptions if key[0] == DELIVERED] == [(DELIVERED, group)]
    if mixed:
        other = post.know()
        other.on_delivered("t")(tell)

        @other.on_undeliverable("t")
        async def complain(delivery: Delivery, session: AsyncSession) -> None: ...

        (subscription,) = (each for key, each in other.subscriptions.items() if key[0] == DELIVERED)
        assert subscription.is_async


def test_a_notice_without_its_callback_is_skipped(post: Post, caplog: pytest.LogCaptureFixture) -> None:
    """A release that has a callback no more leaves out what was told to it, and says so."""
    app = post.know()
    app.on_delivered("t")(tell)
    post.send(1)
    post.consume(post.declare())
    post.confirm_without_calls(app)
    later = post.know()
    later.on_undeliverable("t")(tell)
    with caplog.at_level("INFO"):
        post.call(later)
    assert post.told() == []
    assert "no on_delivered of topic 't' is declared any more" in caplog.text


def test_what_is_known_before_a_callback_is_declared_is_not_told(post: Post) -> None:
    """A callback is told what becomes known from then on."""
    consumer = post.declare(refuse, retry_delays=())
    post.send(1)
    post.consume(consumer)
    post.confirm()
    app = telling(post)
    post.confirm(app)
    assert post.told() == []
    (later,) = post.send(2)
    post.consume(consumer)
    post.confirm(app)
    assert post.told() == [(later, "g", "parked")]


def test_the_row_and_its_notice_are_one_transaction(post: Post) -> None:
    """Where a notice can't be written, neither is the row: the next pass writes both."""
    app, consumer = telling(post), post.declare()
    (half_id,) = post.send(1)
    post.consume(consumer)
    post.at_a.run("ALTER TABLE outbox.half_message ADD CONSTRAINT shut CHECK (topic <> 'outbox.delivered') NOT VALID")
    try:
        with pytest.raises(IntegrityError):
            post.confirm_without_calls(app)
        assert (post.fates(), post.at_a.value("SELECT count(*) FROM outbox.delivery_cursor")) == ({}, 0)
    finally:
        post.at_a.run("ALTER TABLE outbox.half_message DROP CONSTRAINT shut")
    post.confirm(app)
    assert post.told() == [(half_id, "g", "consumed")]


def test_a_notice_is_a_copy_that_asks_for_nothing(post: Post) -> None:
    """It has the headers and the chain of its message, but no answer and no end of its own; and the message is told."""
    app, seen = post.know(), []
    app.on_delivered("t")(lambda delivery, session: seen.append(delivery.message))
    options = {"headers": {"tenant": "b"}, "reply_to": "answers", "tag": "blue", "key": "kim", "dedupe": "one"}
    late = dt.datetime(2999, 1, 1, tzinfo=dt.UTC)
    (half_id,) = post.send({"amount": 1}, **options, expires_at=late)
    post.consume(post.declare())
    post.confirm(app)
    (told,) = seen
    assert (told.id, told.topic, told.key, told.tag, told.body) == (half_id, "t", "kim", "blue", {"amount": 1})
    assert (told.reply_to, told.expires_at, told.headers["tenant"]) == ("answers", late, "b")
    key, headers = post.at_a.rows("SELECT key, headers FROM outbox.half_message WHERE topic = 'outbox.delivered'")[0]
    assert (key, headers["tenant"], headers["outbox-cause"]) == (str(half_id), "b", str(half_id))
    assert not {"outbox-reply-to", "outbox-expires-at", "outbox-dedupe"} & set(headers)


def test_what_a_callback_sends_goes_with_it(post: Post) -> None:
    """It may send messages, with its session."""
    app, consumer = post.know(), post.declare()

    @app.on_delivered("t")
    def confirm(delivery: Delivery, session: Session) -> None:
        app.send(session, "credited", {"transfer": str(delivery.message.id)})

    post.send(1)
    post.consume(consumer)
    post.confirm(app)
    assert post.at_a.rows("SELECT topic FROM outbox.half_message ORDER BY born_at") == ["t", DELIVERED, "credited"]


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
    post.confirm_without_calls(app)
    with Worker(app):
        wait_until(lambda: post.at_a.rows("SELECT message_id FROM told") == [half_id], "it is told")
    assert amounts == [5]


def test_of_many_workers_one_calls_back(post: Post) -> None:
    """Passes that begin at the same time tell each fate once."""
    app, consumer = telling(post), post.declare(batch=50)
    ids = post.send(*range(20))
    post.consume(consumer)
    with ThreadPoolExecutor(4) as threads:
        for each in [threads.submit(post.confirm, app) for _ in range(4)]:
            each.result()
    # One that came while another had the queue has left it; what that one had read by then is all that it handled.
    post.confirm(app)
    assert sorted(post.told()) == sorted((each, "g", "consumed") for each in ids)
    assert post.fates() == {each: ["consumed"] for each in ids}


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
    testing.drain(app)
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
        await testing.on_loop(testing.drain, app)
        await engine.dispose()
        return counts.done

    ids = village.send(1, 2)
    assert asyncio.run(confirm()) == 2
    assert village.at_a.rows("SELECT message_id FROM told ORDER BY message_id") == ids


def test_in_a_trace(post: Post) -> None:
    """A callback is the span of a handler, linked to the one that sent the message."""
    telescope = Telescope()
    try:
        app, consumer = telling(post), post.declare()
        with telescope.tracer.start_as_current_span("transfer"):
            post.send(1)
        post.consume(consumer)
        post.confirm(app)
        (sent,), (span,) = telescope.spans("transfer"), telescope.spans(f"process {DELIVERED}")
        assert span.context is not None
        assert sent.context.trace_id in {span.context.trace_id, *(link.context.trace_id for link in span.links)}
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


# --- internal topics ------------------------------------------------------------------------------------------------


def test_an_application_has_no_hand_in_internal_topics(post: Post) -> None:
    """It can't declare one, or a consumer of one, or send to one, in Python or in SQL, or expect answers there."""
    app = post.know()
    reserved = r"'outbox\.delivered' can't be used: names that begin with 'outbox\.'"
    refused = pytest.raises(InvalidMessage, match=reserved)
    with refused:
        app.consumer(DELIVERED, group="g")(refuse)
    with refused:
        app.topic(DELIVERED, model=int)
    with refused:
        app.known_group(DELIVERED, group="g")
    with refused:
        app.on_delivered(DELIVERED)(tell)
    with refused:
        app.declare_topic(DELIVERED, 1)
    with post.producer.begin() as connection:
        with refused:
            app.send(connection, DELIVERED, {})
        with refused:
            app.send(connection, "t", {}, reply_to=DELIVERED)
        with pytest.raises(DBAPIError, match=reserved):
            connection.exec_driver_sql("SELECT outbox.send('outbox.delivered', '{}')")


def test_notices_are_messages_like_others_to_operators(village: Post) -> None:
    """Lists show them, under their masks; and their group is paused like any other."""
    app = Outbox(village.producer, group="shop", settings=village.settings)
    app.consumer("t", group="g")(lambda message, session: None)
    app.on_delivered("t")(tell)
    village.send({"card": "4111"})
    testing.drain(app)
    app.operator.pause_group("shop-t", topic=DELIVERED, by="ada", why="a test")
    testing.confirm(app)
    testing.drain(app)
    assert village.told() == []
    (listed,) = app.operator.messages(MessageFilter(topic=DELIVERED), PageRequest()).items
    body = app.operator.message(listed.id).body
    assert body is not None
    assert json.loads(body.text or "") == {"card": MASK}
    app.operator.resume_group("shop-t", topic=DELIVERED, by="ada", why="a test")
    testing.drain(app)
    assert len(village.told()) == 1


@pytest.mark.parametrize("part", ["producer", "consumer"])
def test_a_database_of_one_part_is_refused(new_engine: Callable[[], Engine], settings: Settings, part: Part) -> None:
    """No worker starts for callbacks where they would never be called; the doctor says which tables to add."""
    engine = new_engine()
    downgrade(engine, [part])
    app = Outbox(engine, group="shop", settings=settings)
    app.known_group("t", group="g", consumer=engine)
    app.on_delivered("t")(tell)
    with pytest.raises(SchemaError, match=rf"outbox db upgrade.*--part {part}"), Worker(app):
        pass
    found = examine(engine, settings, subscriptions=app.subscriptions.values()).findings
    (mend,) = (each.mend for each in found if each.code == "tables.one_part")
    assert mend.startswith(f"outbox db upgrade --part {part} ")


def test_groups_have_names_of_their_own() -> None:
    """A topic's characters that a group can't have are replaced, and a long name is cut; no two are alike."""
    topics = ["a.b", "a_b", "a/b", "x" * 127, "x" * 126 + "."]
    names = {notice_group("shop", topic) for topic in topics}
    assert len(names) == len(topics)
    assert all(check_group(name) for name in names)
    assert notice_group("shop", "order-created") == "shop-order-created"


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
    for rounds, after in enumerate(itertools.count(1, stride(5)), start=1):
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
    # Nothing, or all of it.
    assert stages == {(False,) * 3, (True,) * 3}


def _refuse_odd(message: Message, session: Session) -> None:
    if message.body % 2:
        refuse(message, session)
