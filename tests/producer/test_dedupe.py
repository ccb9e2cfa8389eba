"""A message that is to be sent once is sent once: in a race, after a rollback, with every carrier."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any
from uuid import NAMESPACE_OID, UUID, uuid4, uuid5

import pytest
from sqlalchemy import Engine, create_engine, insert, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from outbox import Outbox, Outgoing, Settings, Topic, message_id, testing
from outbox.errors import DuplicateMessage, InvalidMessage
from outbox.message.ids import FIRST_BUSINESS_ID
from outbox.telemetry.events import DuplicateIgnored, MessagesSent
from outbox.telemetry.hooks import TelemetryEvent
from tests.kit import Tables, at_once, dispatch_all, wait_until
from tests.producer.bank import change, changes, halves, messages, pid_of, settle, waits_for_a_lock
from tests.producer.carriers import CARRIERS, send


def deliver(engine: Engine) -> list[int]:
    """Dispatch what was sent; return the numbers of messages."""
    dispatch_all(engine)
    return Tables(engine).rows(
        "SELECT (convert_from(h.body, 'UTF8')::jsonb ->> 'number')::int FROM outbox.message m"
        " JOIN outbox.half_message h ON h.id = m.half_id ORDER BY 1"
    )


def send_in(session: Session, outbox: Outbox, number: int, **options: Any) -> UUID:
    """Make the business change and send of it."""
    session.execute(insert(change).values(number=number))
    return outbox.send(session, "t", {"number": number}, **options)


@pytest.mark.parametrize("name", CARRIERS)
async def test_second_send_does_nothing(name: str, url: str, engine: Engine, outbox: Outbox) -> None:
    """The second send returns the first id, writes nothing, and its business change commits."""
    ids = []
    for number in (1, 2):
        async with CARRIERS[name](url, False) as opened:
            await opened.write(number)
            ids.append(await send(outbox, opened, number, dedupe="order-4711"))
            await opened.commit()
    assert ids == [message_id("t", "order-4711")] * 2
    assert (messages(engine), changes(engine)) == ([1], {1, 2})
    (half,) = halves(engine)
    assert (half.id, half.headers) == (ids[0], {"outbox-dedupe": "order-4711"})


@pytest.mark.parametrize("name", CARRIERS)
async def test_second_send_fails(name: str, url: str, engine: Engine, outbox: Outbox) -> None:
    """With on_duplicate="error" the second transaction fails, which has written nothing after its rollback."""
    async with CARRIERS[name](url, False) as opened:
        await opened.write(1)
        await send(outbox, opened, 1, dedupe="order-4711", on_duplicate="error")
        await opened.commit()
    async with CARRIERS[name](url, False) as opened:
        await opened.write(2)
        with pytest.raises(DuplicateMessage, match="of 'order-4711' already") as failed:
            await send(outbox, opened, 2, dedupe="order-4711", on_duplicate="error")
            await opened.commit()
        await opened.rollback()
        assert failed.value.message_id == message_id("t", "order-4711")
    assert (messages(engine), changes(engine)) == ([1], {1})


@pytest.mark.parametrize("name", CARRIERS)
async def test_a_rollback_is_no_send(name: str, url: str, engine: Engine, outbox: Outbox) -> None:
    """What was sent with a transaction or a savepoint that rolled back was not sent."""
    async with CARRIERS[name](url, False) as opened:
        await opened.write(1)
        await send(outbox, opened, 1, dedupe="order-4711")
        await opened.rollback()
    async with CARRIERS[name](url, False) as opened:
        await opened.write(2)
        undo = await opened.savepoint()
        await send(outbox, opened, 2, dedupe="order-4711")
        await settle(undo())
        await send(outbox, opened, 3, dedupe="order-4711")
        await opened.commit()
    assert (messages(engine), changes(engine)) == ([3], {2})


def test_race_of_twenty(url: str) -> None:
    """Of twenty transactions that send the same at once, and of which some roll back, one sends; none fails."""
    number, rolling_back = 20, {0, 3, 7, 11, 19}
    engine = create_engine(url, pool_size=number)
    outbox = Outbox(engine, settings=Settings())
    begun = threading.Barrier(number, timeout=60)

    def act(mine: int) -> UUID:
        if mine in rolling_back:
            raw = engine.raw_connection()
            assert raw.driver_connection is not None
            begun.wait()
            half_id: UUID = outbox.send(raw.driver_connection, "t", {"number": mine}, dedupe="order-4711")
            raw.rollback()  # what it had written
            raw.close()
            return half_id
        with Session(engine) as session:
            half_id = send_in(session, outbox, mine, dedupe="order-4711")
            outbox.send(session, "t", {"number": 100 + mine}, dedupe=f"order-{mine % 3}")
            begun.wait()
            session.commit()
        return half_id

    assert set(at_once(*(partial(act, mine) for mine in range(number)))) == {message_id("t", "order-4711")}
    assert changes(engine) == set(range(number)) - rolling_back
    sent = deliver(engine)
    assert len(sent) == 4
    assert len([each for each in sent if each < 100]) == 1
    assert {each % 100 % 3 for each in sent if each >= 100} == {0, 1, 2}
    engine.dispose()


@pytest.mark.parametrize("first_commits", [True, False])
def test_second_waits_for_the_first(first_commits: bool, engine: Engine, outbox: Outbox) -> None:
    """A send waits for one of the same that is being written: if that rolls back, it is the first one."""
    done = threading.Event()
    pids: list[int] = []

    def second() -> None:
        with Session(engine) as session:
            pids.append(pid_of(session.connection()))
            send_in(session, outbox, 2, dedupe="order-4711")
            session.commit()
        done.set()

    raw = engine.raw_connection()
    connection: Any = raw.driver_connection
    outbox.send(connection, "t", {"number": 1}, dedupe="order-4711")  # written at once
    thread = threading.Thread(target=second)
    thread.start()
    wait_until(lambda: bool(pids) and waits_for_a_lock(engine, pids[0]), "the second one waits")
    assert not done.is_set()
    raw.commit() if first_commits else raw.rollback()
    raw.close()
    thread.join()
    assert deliver(engine) == ([1] if first_commits else [2])
    assert changes(engine) == {2}


def test_crossed_sends_do_not_deadlock(engine: Engine, outbox: Outbox) -> None:
    """Two transactions that send the same messages in opposite orders both commit, however often."""
    begun = threading.Barrier(2, timeout=60)

    def act(mine: int) -> None:
        for turn in range(20):
            with Session(engine) as session, session.begin():
                send_in(session, outbox, mine * 1000 + turn)
                orders = range(10) if mine else reversed(range(10))
                for order in orders:
                    outbox.send(session, "t", {"number": order}, dedupe=f"{turn}-{order}")
                begun.wait()

    at_once(partial(act, 0), partial(act, 1))
    assert len(messages(engine)) == 2 * 20 + 20 * 10


def test_twice_in_one_transaction(engine: Engine, outbox: Outbox) -> None:
    """Within a transaction the first one is sent; ops keep the order of the sends."""
    with Session(engine) as session, session.begin():
        for number, dedupe in enumerate((None, "b", "a", "b", None)):
            outbox.send(session, "t", {"number": number}, dedupe=dedupe)
    assert messages(engine) == [0, 1, 2, 4]
    with pytest.raises(DuplicateMessage), Session(engine) as session, session.begin():
        outbox.send(session, "t", {"number": 5}, dedupe="c")
        outbox.send(session, "t", {"number": 6}, dedupe="c", on_duplicate="error")
    assert messages(engine) == [0, 1, 2, 4]


def test_topics_are_apart(engine: Engine, outbox: Outbox) -> None:
    """The same string is another message in another topic."""
    with Session(engine) as session, session.begin():
        ids = {outbox.send(session, topic, {"number": 1}, dedupe="order-4711") for topic in ("t", "u")}
    assert ids == {half.id for half in halves(engine)}
    assert len(ids) == 2


def test_with_a_queue_a_prepared_half_and_a_decision(engine: Engine, outbox: Outbox) -> None:
    """It goes together with all else that a transaction sends, prepares and decides."""
    outbox.declare_topic("chosen", 4)
    for _ in range(2):
        with Session(engine) as session, session.begin():
            earlier = outbox.prepare(session, "t", {"number": 1})
        with Session(engine) as session, session.begin():
            outbox.commit(earlier, session)
            outbox.send(session, "chosen", {"number": 2}, dedupe="order-4711", queue=3)
            outbox.prepare(session, "t", {"number": 3})
            outbox.send(session, "t", {"number": 4})
    # The decision is drawn last.
    assert messages(engine) == [2, 4, 1, 4, 1]
    with engine.connect() as connection:
        queue = text("SELECT queue FROM outbox.half_message WHERE id = :id")
        assert connection.scalar(queue, {"id": message_id("chosen", "order-4711")}) == 3


def test_what_is_told(
    engine: Engine, outbox: Outbox, heard: list[TelemetryEvent], caplog: pytest.LogCaptureFixture
) -> None:
    """A second send is told once it has committed, and isn't counted as sent."""
    with caplog.at_level("INFO", logger="outbox.producer"):
        for number in (1, 2):
            with Session(engine) as session, session.begin():
                first = outbox.send(session, "t", {"number": number}, dedupe="order-4711")
        with Session(engine) as session:
            outbox.send(session, "t", {"number": 3}, dedupe="order-4711")
            session.rollback()
    sent = [event.message_ids for event in heard if isinstance(event, MessagesSent)]
    assert sent == [(first,)]
    assert [event for event in heard if isinstance(event, DuplicateIgnored)] == [
        DuplicateIgnored(topic="t", message_id=first, dedupe="order-4711")
    ]
    assert [record.outbox_event for record in caplog.records] == ["message.duplicate"]  # type: ignore[attr-defined]  # ours


def test_repeatable_read(engine: Engine, outbox: Outbox) -> None:
    """Under REPEATABLE READ, PostgreSQL refuses a row that came after the snapshot, as any such row: try again."""
    repeatable = engine.execution_options(isolation_level="REPEATABLE READ")
    with Session(repeatable) as session:
        session.execute(text("SELECT count(*) FROM change"))
        with Session(engine) as other, other.begin():
            send_in(other, outbox, 1, dedupe="order-4711")
        outbox.send(session, "t", {"number": 2}, dedupe="order-4711")
        with pytest.raises(OperationalError, match="could not serialize"):
            session.commit()
    with Session(repeatable) as session, session.begin():
        send_in(session, outbox, 2, dedupe="order-4711")
    assert (messages(engine), changes(engine)) == ([1], {1, 2})


def test_decorated(engine: Engine, outbox: Outbox) -> None:
    """A decorated function says it by the `Outgoing` that it returns."""

    @outbox.transactional(topic="t")
    def order(session: Session, number: int) -> Outgoing:
        session.execute(insert(change).values(number=number))
        return Outgoing({"number": number}, dedupe="order-4711")

    order(1)
    order(2)
    assert (messages(engine), changes(engine)) == ([1], {1, 2})


def test_ids_of_business_strings(engine: Engine, outbox: Outbox) -> None:
    """An id may be a business string, whose UUID every language makes; a second send with it fails."""
    topic = Topic("t", dict)
    namespace = uuid5(NAMESPACE_OID, "outbox")
    plain = uuid5(uuid5(namespace, "t"), "order-4711")
    assert message_id(topic, "order-4711") == UUID(f"f{str(plain)[1:]}") >= FIRST_BUSINESS_ID
    with Session(engine) as session, session.begin():
        half_id = outbox.send(session, topic, {"number": 1}, id="order-4711")
    assert half_id == message_id("t", "order-4711")
    with pytest.raises(Exception, match="duplicate key"), Session(engine) as session, session.begin():
        outbox.send(session, topic, {"number": 2}, id="order-4711")
    with Session(engine) as session, session.begin():
        outbox.send(session, topic, {"number": 3}, dedupe="order-4711")
    assert messages(engine) == [1]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"dedupe": ""}, "dedupe is empty"),
        ({"dedupe": 4711}, "dedupe must be a str, not int"),
        ({"dedupe": "é" * 128}, "has 256 bytes; at most 255"),
        ({"dedupe": "a\0b"}, "dedupe"),
        ({"dedupe": "a", "id": uuid4()}, "leave id out"),
        ({"dedupe": "a", "on_duplicate": "replace"}, "must be 'ignore' or 'error'"),
        ({"on_duplicate": "error"}, "says nothing without dedupe"),
        ({"id": ""}, "id is empty"),
        ({"id": 4711}, "must be a UUID or a business string"),
        ({"id": str(uuid4())}, "is the text of a UUID"),
    ],
)
def test_refused(options: dict[str, Any], why: str, outbox: Outbox, engine: Engine) -> None:
    """What can't be meant is refused at the call."""
    with Session(engine) as session, pytest.raises(InvalidMessage, match=why):
        outbox.send(session, "t", {"number": 1}, **options)


def test_prepare_is_refused(outbox: Outbox, engine: Engine) -> None:
    """A half that may be rolled back can't stand for all later messages."""
    with Session(engine) as session, pytest.raises(InvalidMessage, match="can't be prepared"):
        outbox.prepare(session, "t", {"number": 1}, dedupe="order-4711")


def test_passed_on_headers(engine: Engine, outbox: Outbox) -> None:
    """A message that is passed on with its headers isn't a second one."""
    with Session(engine) as session, session.begin():
        outbox.send(session, "t", {"number": 1}, headers={"outbox-dedupe": "order-4711", "h": "1"})
    (half,) = halves(engine)
    assert half.headers == {"h": "1"}


def test_captured(engine: Engine, outbox: Outbox) -> None:
    """A captured second send does nothing either; of one that was rolled back nothing is known."""
    with testing.capture(outbox) as sent:
        with Session(engine) as session:
            outbox.send(session, "t", {"number": 1}, dedupe="order-4711")
            session.rollback()
        with Session(engine) as session, session.begin():
            outbox.send(session, "t", {"number": 2}, dedupe="order-4711")
            outbox.send(session, "t", {"number": 3}, dedupe="order-4711")
            with pytest.raises(DuplicateMessage):
                outbox.send(session, "t", {"number": 4}, dedupe="order-4711", on_duplicate="error")
    assert [message.body for message in sent if message.state == "sent"] == [{"number": 2}]
