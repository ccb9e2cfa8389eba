"""Chains of messages: what a handler sends knows its cause and its conversation, and a message can be answered."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from outbox import Delivery, Message, Orphan, Outbox, Resolution, Settings, Topic, testing
from outbox.errors import DuplicateMessage, InvalidMessage
from outbox.message.ids import derived_id
from outbox.message.model import uuid7
from outbox.message.notice import DELIVERED
from outbox.operator.operator import Operator
from outbox.telemetry import hooks
from outbox.telemetry.events import DuplicateIgnored
from outbox.testing import drain
from tests.kit.bench import Bench, fail, record

HEADERS = text("SELECT topic, headers FROM outbox.half_message ORDER BY id")


def headers(engine: Engine) -> dict[str, Mapping[str, str]]:
    """Return the headers of what was sent, by topic."""
    with engine.connect() as connection:
        return {topic: found or {} for topic, found in connection.execute(HEADERS)}


def chain_of(first: UUID, cause: UUID) -> dict[str, str]:
    """Return the headers of a message that a handler has sent."""
    return {"outbox-conversation": str(first), "outbox-cause": str(cause)}


def test_a_chain_has_one_conversation_and_each_message_its_cause(any_bench: Bench) -> None:
    """Over three databases' worth of handlers: the first message has no header, the others name it and their cause."""
    seen: dict[str, Message] = {}

    def pass_on(message: Message, session: Session) -> None:
        seen[message.topic] = message
        if message.topic != "c":
            any_bench.sink.send(session, {"t": "b", "b": "c"}[message.topic], {}, headers={"own": "yes"})

    (first,) = any_bench.send({})
    here = any_bench.consumer
    any_bench.consume(any_bench.declare(pass_on))
    back = Bench(here, here, any_bench.settings)
    with back:
        for topic in ("b", "c"):
            back.dispatch()
            back.consume(back.declare(pass_on, topic=topic))
    assert [each.conversation for each in seen.values()] == [first] * 3
    assert [each.cause for each in seen.values()] == [None, first, seen["b"].id]
    assert seen["c"].headers == {"own": "yes", **chain_of(first, seen["b"].id)}
    assert "outbox-conversation" not in seen["t"].headers


def test_a_batch_of_handlers_each_has_its_own_cause(bench: Bench) -> None:
    """Messages that share a transaction don't share their causes; of a list only its sender knows."""

    def copy(message: Message, session: Session) -> None:
        bench.sink.send(session, f"copy-{message.body}", {})

    def copy_all(messages: list[Message], session: Session) -> None:
        bench.sink.send(session, "unknown", {})
        bench.sink.send(session, "known", {}, cause=messages[1])

    ids = bench.send(1, 2)
    bench.consume(bench.declare(copy, batch=10))
    bench.consume(bench.declare(copy_all, group="all", batch=10, takes_batch=True))
    sent = headers(bench.consumer)
    assert sent["copy-1"] == chain_of(ids[0], ids[0])
    assert sent["copy-2"] == chain_of(ids[1], ids[1])
    assert sent["unknown"] == {}
    assert sent["known"] == chain_of(ids[1], ids[1])


def test_after_the_handler_nothing_is_handled(bench: Bench) -> None:
    """Neither after one that returns nor after one that fails."""

    bench.send({})
    bench.consume(bench.declare(lambda *_: None))
    bench.consume(bench.declare(fail, group="failing"))
    bench.send({}, topic="later")
    assert headers(bench.producer)["later"] == {}


async def _async_chain(url: str, settings: Settings) -> tuple[UUID, list[Message]]:
    engine = create_async_engine(url)
    app = Outbox(engine, settings=settings)
    seen: list[Message] = []

    @app.consumer("first", group="g")
    async def begin(message: Message, session: AsyncSession) -> None:
        await asyncio.gather(*(asyncio.create_task(branch(session, n)) for n in range(2)))

    async def branch(session: AsyncSession, number: int) -> None:
        app.send(session, "second", number)

    @app.consumer("second", group="g")
    async def end(message: Message, session: AsyncSession) -> None:
        seen.append(message)

    async with AsyncSession(engine) as session, session.begin():
        first = app.send(session, "first", {})
    await testing.on_loop(testing.drain, app)
    await engine.dispose()
    return first, seen


def test_tasks_of_an_async_handler_know_the_cause(url: str, settings: Settings) -> None:
    """They inherit the context of the handler that began them."""
    first, seen = asyncio.run(_async_chain(url, settings))
    assert [(each.conversation, each.cause) for each in seen] == [(first, first)] * 2


def test_checkers_compensations_and_callbacks_carry_the_chain(engine: Engine, settings: Settings) -> None:
    """What they send belongs to the conversation of the message that they are about."""
    app = Outbox(engine, settings=settings)

    @app.checker("checked", immunity=0)
    def check(orphan: Orphan, session: Session) -> Resolution:
        app.send(session, "by-checker", {})
        return Resolution.ROLLBACK

    @app.checker("asked", immunity=0)
    def ask(orphan: Orphan) -> Resolution:
        with Session(engine) as session, session.begin():
            app.send(session, "by-asked", {})
        return Resolution.ROLLBACK

    @app.compensation("undone")
    def undo(message: Message, session: Session) -> None:
        app.send(session, "by-compensation", {})

    @app.consumer("undone", group="g")
    def park(message: Message, session: Session) -> None:
        raise InvalidMessage("can't be read")

    @app.on_delivered("done")
    def delivered(delivery: Delivery, session: Session) -> None:
        app.send(session, "by-callback", {})

    app.consumer("done", group="g")(lambda message, session: None)
    app.known_group("done", group="g")
    first = uuid7()
    with Session(engine) as session, session.begin():
        ids = {
            "by-checker": app.prepare(session, "checked", {}, conversation=first),
            "by-asked": app.prepare(session, "asked", {}, conversation=first),
            "by-compensation": app.send(session, "undone", {}, conversation=first),
            "by-callback": app.send(session, "done", {}, conversation=first),
        }
    testing.check(app)
    drain(app)
    testing.confirm(app)
    drain(app)
    app.operator.compensate(ids["by-compensation"], by="me", why="test")
    drain(app)
    testing.bulk(app)
    sent = headers(engine)
    # The callback handles the notice, which the message that it is about has caused.
    notice = derived_id(ids["by-callback"], DELIVERED, "g", "delivered")
    assert sent[DELIVERED].items() >= chain_of(first, ids["by-callback"]).items()
    ids["by-callback"] = notice
    assert {topic: sent[topic] for topic in ids} == {topic: chain_of(first, cause) for topic, cause in ids.items()}


# --- replies ---------------------------------------------------------------------------------------------------------


def test_an_answer_goes_where_the_sender_said_and_names_the_request(any_bench: Bench) -> None:
    """From the database of the handler, in its transaction, under the key of the request."""
    answers: list[Message] = []

    def handle(message: Message, session: Session) -> None:
        message.reply(session, {"sum": message.body["a"] + 1}, tag="t")

    (request,) = any_bench.send({"a": 1}, reply_to="answers", key="kim")
    any_bench.consume(any_bench.declare(handle))
    here = any_bench.consumer
    with Bench(here, here, any_bench.settings) as asker:
        asker.dispatch()
        asker.consume(asker.declare(lambda message, session: answers.append(message), topic="answers"))
    (answer,) = answers
    assert (answer.body, answer.key, answer.tag) == ({"sum": 2}, "kim", "t")
    assert (answer.correlation, answer.cause, answer.conversation) == (request, request, request)
    assert (answer.refusal, answer.reply_to) == (None, None)


def test_an_answer_of_a_handler_that_fails_is_undone(bench: Bench) -> None:
    """With all else that it did; the next attempt answers again."""

    def handle(message: Message, session: Session) -> None:
        message.reply(session, {"attempt": message.attempt})
        if message.attempt == 1:
            raise ValueError("not yet")

    bench.send({}, reply_to="answers")
    consumer = bench.declare(handle)
    bench.consume(consumer)
    bench.retry(consumer)
    bodies = bench.rows("SELECT convert_from(body, 'UTF8') FROM outbox.half_message WHERE topic = 'answers'")
    assert list(bodies) == ['{"attempt":2}']


def test_a_refusal_says_why(engine: Engine, settings: Settings) -> None:
    """In its header and its body, also where the topic of the answers is declared with a model."""
    app = Outbox(engine, settings=settings)
    answers = Topic("answers", int)
    found: list[Message[Any]] = []
    app.consumer(answers, group="asker")(lambda message, session: found.append(message))
    reason = "no seats left\0 " + "x" * 600

    @app.consumer("t", group="g")
    def handle(message: Message, session: Session) -> None:
        message.refuse(session, reason) if message.body else message.reply(session, 7)

    with Session(engine) as session, session.begin():
        for asked in (True, False):
            app.send(session, "t", asked, reply_to=answers, key="k")
    drain(app)
    assert [each.refusal for each in found] == [reason.replace("\0", "")[:500], None]
    assert found[1].body == 7
    assert found[0].raw.startswith(b'{"refused":"no seats left')


def test_a_tenants_answer_goes_out_from_the_tenants_database(
    engine: Engine, new_engine: Any, settings: Settings
) -> None:
    """Also where the Outbox on which the handler was declared has a database of its own."""
    app = Outbox(engine, settings=settings)

    @app.consumer("t", group="g")
    def answer(message: Message, session: Session) -> None:
        message.reply(session, {})

    own = new_engine()
    tenant = app.bound_to(own)
    with Session(own) as session, session.begin():
        tenant.send(session, "t", {}, reply_to="answers")
    drain(tenant)
    assert set(headers(own)) == {"t", "answers"}
    assert headers(engine) == {}


def test_what_can_not_be_answered_says_so(bench: Bench) -> None:
    """A message whose sender expects no answer; one that no consumer handles."""
    bench.send({})
    consumer = bench.declare(lambda message, session: message.reply(session, {}))
    bench.consume(consumer)
    ((status, _),) = bench.statuses()
    assert status == "parked"
    (row,) = bench.inbox().values()
    assert "its sender expects no answer" in (row.error or "")


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("reply_to", "no topic", "topic 'no topic' may only have the characters"),
        ("correlation", "x", "correlation must be a UUID, not str: 'x'"),
        ("conversation", "x", "conversation must be a UUID, not str: 'x'"),
        ("cause", uuid4, "cause must be a message that is handled, not function"),
    ],
)
def test_options_that_tie_messages_are_checked(bench: Bench, option: str, value: Any, said: str) -> None:
    """Before anything is written."""
    with pytest.raises(InvalidMessage, match=said):
        bench.send({}, **{option: value})


def test_a_message_that_is_passed_on_has_its_own_chain(bench: Bench) -> None:
    """Headers of ours that come with the given ones are those of another message."""
    former = chain_of(uuid4(), uuid4()) | {"outbox-reply-to": "a", "outbox-correlation": str(uuid4()), "own": "yes"}
    given = uuid7()
    bench.send({}, headers=former, correlation=given)
    assert headers(bench.producer)["t"] == {"own": "yes", "outbox-correlation": str(given)}


def test_another_thread_knows_the_cause_only_if_it_is_told(bench: Bench) -> None:
    """A new thread has a context of its own."""

    def send_it(**options: Any) -> None:
        with bench.consumer.begin() as connection:
            bench.sink.send(connection, "told" if options else "untold", {}, **options)

    def handle(message: Message, session: Session) -> None:
        for options in ({}, {"cause": message}):
            thread = threading.Thread(target=send_it, kwargs=options)
            thread.start()
            thread.join()

    (first,) = bench.send({})
    bench.consume(bench.declare(handle))
    sent = headers(bench.consumer)
    assert (sent["untold"], sent["told"]) == ({}, chain_of(first, first))


def test_a_header_that_is_no_id_is_told(bench: Bench) -> None:
    """A table may hold anything."""
    said: list[str] = []

    def handle(message: Message, session: Session) -> None:
        with pytest.raises(InvalidMessage, match=r"header 'outbox-cause' .* must be an id, not 'x'") as caught:
            _ = message.cause
        said.append(str(caught.value))

    with bench.producer.begin() as connection:
        connection.execute(text("SELECT outbox.send('t', '{}')"))
        connection.execute(text('UPDATE outbox.half_message SET headers = \'{"outbox-cause": "x"}\''))
    bench.dispatch()
    bench.consume(bench.declare(handle))
    assert len(said) == 1


SENT = "SELECT id FROM outbox.half_message WHERE topic = :topic ORDER BY id"


@pytest.fixture
def duplicates() -> Iterator[list[DuplicateIgnored]]:
    """What is told of messages that were sent again."""
    found: list[DuplicateIgnored] = []
    end = hooks.add_hook(lambda each: found.append(each) if isinstance(each, DuplicateIgnored) else None)
    yield found
    end()


def test_a_message_that_was_handled_before_sends_nothing_new(
    any_bench: Bench, duplicates: list[DuplicateIgnored]
) -> None:
    """Its inbox row is lost, and it is handled again: what it sent is there, and that is no error."""

    def handle(message: Message, session: Session) -> None:
        record(message, session)
        for number in (1, 1, 2):
            any_bench.sink.send(session, "told", number, key="k")
        message.reply(session, {"n": len(any_bench.ledger())})

    consumer = any_bench.declare(handle)
    (asked,) = any_bench.send({}, reply_to="answered")
    any_bench.consume(consumer)
    ids = [any_bench.rows(SENT, topic=topic) for topic in ("told", "answered")]
    assert [len(each) for each in ids] == [3, 1]
    any_bench.run("DELETE FROM outbox.consumer_message")
    any_bench.resend(asked)
    any_bench.dispatch()
    any_bench.consume(consumer)
    assert (any_bench.ledger(), any_bench.statuses()) == (["{}"] * 2, [("consumed", 1)])
    assert [any_bench.rows(SENT, topic=topic) for topic in ("told", "answered")] == ids
    assert {each.message_id for each in duplicates} == {each for of_topic in ids for each in of_topic}


def test_what_is_sent_otherwise_is_another_message(bench: Bench) -> None:
    """A second handling that says something else is heard; so is one that an operator has asked for."""
    said = ["a"]

    def handle(message: Message, session: Session) -> None:
        bench.sink.send(session, "told", said[0])
        message.reply(session, said[0])

    consumer = bench.declare(handle)
    (asked,) = bench.send({}, reply_to="answered")
    bench.consume(consumer)
    said[0] = "b"
    bench.run("DELETE FROM outbox.consumer_message")
    bench.resend(asked)
    bench.dispatch()
    bench.consume(consumer)
    assert [len(bench.rows(SENT, topic=topic)) for topic in ("told", "answered")] == [2, 1]
    Operator.open({"both": bench.consumer}, bench.settings).reset_group("g", "t", "first", by="me", why="test")
    bench.consume(consumer)
    assert [len(bench.rows(SENT, topic=topic)) for topic in ("told", "answered")] == [3, 2]


def test_what_a_handler_commits_by_itself_is_sent_each_time(bench: Bench) -> None:
    """An attempt that failed has said so, and so does the next one."""

    def handle(message: Message, session: Session) -> None:
        with Session(bench.consumer) as own, own.begin():
            bench.sink.send(own, "tried", "again")
        if message.attempt == 1:
            raise ValueError("once")

    consumer = bench.declare(handle)
    bench.send({})
    bench.consume(consumer)
    bench.retry(consumer)
    assert bench.statuses() == [("consumed", 2)]
    assert len(bench.rows(SENT, topic="tried")) == 2


def test_a_given_id_that_is_there_can_be_ignored(bench: Bench, duplicates: list[DuplicateIgnored]) -> None:
    """Or fail, as it does by itself; and the option needs something that it is said of."""
    given = uuid4()
    for _ in range(2):
        with bench.consumer.begin() as connection:
            assert bench.sink.send(connection, "told", 1, id=given, on_duplicate="ignore") == given
    assert (bench.rows(SENT, topic="told"), [each.message_id for each in duplicates]) == ([given], [given])
    with pytest.raises(DuplicateMessage, match=str(given)), bench.consumer.begin() as connection:
        bench.sink.send(connection, "told", 1, id=given, on_duplicate="error")
    with pytest.raises(IntegrityError), bench.consumer.begin() as connection:
        bench.sink.send(connection, "told", 1, id=given)
    with pytest.raises(InvalidMessage, match="says nothing without"), bench.consumer.begin() as connection:
        bench.sink.send(connection, "told", 1, on_duplicate="ignore")
