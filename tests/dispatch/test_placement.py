"""Which queue a message comes to, and who tells the consumers."""

from __future__ import annotations

from collections import Counter

import psycopg
import pytest
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import IntegrityError

from outbox import Outbox, Settings
from outbox.database.sql import read_news
from outbox.dispatch.dispatch_pass import dispatch_once, release_due_once
from outbox.errors import InvalidHandler, InvalidMessage
from outbox.testing import make_due
from tests.dispatch.support import assert_dense, by_key, dispatch_all, messages, run, scalar, send


def queues_of(connection: Connection, topic: str = "t") -> Counter[int]:
    """Return how many messages each queue has."""
    return Counter(message.queue for message in messages(connection, topic))


def test_messages_without_key_go_round(app: Outbox, connection: Connection, settings: Settings) -> None:
    """Messages without a key spread evenly over all queues."""
    for _ in range(4):
        send(app, *range(20))
    dispatch_all(connection, settings, 7)
    assert queues_of(connection) == dict.fromkeys(range(8), 10)


def test_released_messages_without_key_go_round(app: Outbox, connection: Connection, settings: Settings) -> None:
    """Delayed messages without a key spread as well, though they are released one at a time."""
    send(app, *range(16), delay=3600)
    dispatch_all(connection, settings)
    make_due(app)
    while release_due_once(connection, settings, limit=1).more:
        pass
    assert queues_of(connection) == dict.fromkeys(range(8), 2)


def test_a_key_has_one_queue_for_all_kinds_of_sending(app: Outbox, connection: Connection, settings: Settings) -> None:
    """Sent, released and resent messages of a key are in one queue; many keys use all queues."""
    for number in range(64):
        ids = send(app, "sent", key=f"key {number}")
        send(app, "released", key=f"key {number}", delay=3600)
        dispatch_all(connection, settings)
        app.operator.resend(ids, by="me", why="test")
    make_due(app)
    release_due_once(connection, settings)
    found = messages(connection)
    assert all(len(bodies) == 3 for bodies in by_key(found).values())
    assert set(queues_of(connection)) == set(range(8))
    assert_dense(found)


def test_topics_do_not_share_positions(app: Outbox, connection: Connection, settings: Settings) -> None:
    """Each topic counts its own queues' positions, in one batch or in several."""
    with connection.begin():
        for n in range(60):
            app.send(connection, f"topic-{n % 3}", n, key="same")
    dispatch_all(connection, settings, 7)
    for n in range(3):
        found = messages(connection, f"topic-{n}")
        assert_dense(found)
        assert by_key(found)["same"] == list(range(n, 60, 3))


def test_a_declared_topic_has_its_number_of_queues(app: Outbox, connection: Connection, settings: Settings) -> None:
    """A declared number of queues is used, may grow, and never shrinks."""
    app.declare_topic("t", 3)
    send(app, *range(30))
    dispatch_all(connection, settings)
    assert queues_of(connection) == dict.fromkeys(range(3), 10)
    app.declare_topic("t", 5)
    send(app, *range(100))
    dispatch_all(connection, settings)
    assert set(queues_of(connection)) == set(range(5))
    with pytest.raises(InvalidHandler, match="can't shrink to 2"):
        app.declare_topic("t", 2)
    with pytest.raises(InvalidHandler, match="between 1 and 4096"):
        app.declare_topic("t", 0)
    assert scalar(connection, "SELECT queues FROM outbox.topic") == 5
    assert_dense(messages(connection))


def test_an_undeclared_topic_appears_with_the_default(app: Outbox, engine: Engine, connection: Connection) -> None:
    """A topic that nobody declared is created by its first message, with the settings' number of queues."""
    send(app, 1)
    dispatch_all(connection, Settings(queues=3))
    assert scalar(connection, "SELECT queues FROM outbox.topic WHERE name = 't'") == 3
    send(app, *range(30))
    dispatch_all(connection, Settings(queues=6))
    assert set(queues_of(connection)) == {0, 1, 2}


def test_no_message_twice_for_one_send(app: Outbox, connection: Connection, settings: Settings) -> None:
    """The table itself refuses a second message for the same send of a half."""
    (half_id,) = send(app, 1)
    dispatch_all(connection, settings)
    with pytest.raises(IntegrityError, match=r"message\w*_pkey"):
        run(
            connection,
            "INSERT INTO outbox.message (topic, queue, position, half_id, send_number) VALUES ('t', 7, 99, :id, 1)",
            id=half_id,
        )


def test_rolled_back_halves_are_not_dispatched(app: Outbox, connection: Connection, settings: Settings) -> None:
    """A half that was prepared is dispatched when it is committed, and never if it is rolled back or undecided."""
    with connection.begin():
        kept, dropped, _ = (app.prepare(connection, "t", n, key="k0") for n in range(3))
    app.rollback(dropped)
    assert dispatch_all(connection, settings).done == 0
    app.commit(kept)
    assert dispatch_all(connection, settings).done == 1
    assert by_key(messages(connection)) == {"k0": [0]}


@pytest.mark.parametrize("listen", [True, False])
@pytest.mark.parametrize(
    ("count", "news"),
    [(10, ["topic-0:1", "topic-0:2", "topic-1:0", "topic-1:3"]), (40, ["topic-0", "topic-1"])],
    ids=["few", "many"],
)
def test_the_batch_tells_who_listens(
    app: Outbox, engine: Engine, connection: Connection, count: int, news: list[str], listen: bool
) -> None:
    """A small batch tells once for each queue, a large one for each topic: its caller, and who listens, if any may."""
    arrived: list[str] = []
    for topic in ("topic-0", "topic-1"):
        app.declare_topic(topic, 4)
    url = engine.url.set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(url, autocommit=True) as listener:
        listener.execute('LISTEN "outbox.message"')
        with connection.begin():
            for n in range(count):
                app.send(connection, f"topic-{n % 2}", n, queue=(1, 3, 2, 0)[n % 4])
            app.send(connection, "topic-2", "later", delay=60)
        dispatch_once(connection, Settings(listen=listen), on_news=arrived.append)
        run(connection, "SELECT pg_notify('outbox.message', 'the end')")
        payloads = []
        for notice in listener.notifies():
            if notice.payload != "!":  # a producer's nudge
                payloads.append(notice.payload)
            if notice.payload == "the end":
                break
    assert sorted(arrived) == news
    assert sorted(payloads) == (["the end", *news] if listen else ["the end"])
    assert {read_news(each)[0] for each in news} == {"topic-0", "topic-1"}
    assert {read_news(each)[1] for each in news} == ({0, 1, 2, 3} if count == 10 else {None})


@pytest.mark.parametrize(
    ("news", "read"),
    [
        ("t", ("t", None)),
        ("t:0", ("t", 0)),
        ("t:4095", ("t", 4095)),
        ("t:x", ("t", None)),
        ("t:-1", ("t", None)),
        ("t:1:2", ("t", None)),
        ("t:²", ("t", None)),
        (f"t:{'9' * 7000}", ("t", None)),
        ("", ("", None)),
    ],
)
def test_news_may_be_anybodys(news: str, read: tuple[str, int | None]) -> None:
    """Any role of a database can notify any channel: nothing that it may say is an error, which a listener dies of."""
    assert read_news(news) == read


def test_a_release_tells_too(app: Outbox, connection: Connection, settings: Settings) -> None:
    """Of what is due now, and of what a paused topic held."""
    arrived: list[str] = []
    for topic in ("later", "held"):
        app.declare_topic(topic, 4)
    with connection.begin():
        app.send(connection, "later", 1, queue=3, delay=60)
    app.operator.pause_topic("held", by="me", why="test", create=True)
    with connection.begin():
        app.send(connection, "held", 1, queue=2)
    dispatch_once(connection, settings, on_news=arrived.append)
    while dispatch_once(connection, settings, on_news=arrived.append).more:
        pass
    assert arrived == []
    run(connection, "UPDATE outbox.scheduled_message SET deliver_at = now() WHERE held_topic IS NULL")
    app.operator.resume_topic("held", by="me", why="test")
    release_due_once(connection, settings, on_news=arrived.append)
    assert sorted(arrived) == ["held:2", "later:3"]


def test_keys_of_any_text(app: Outbox, connection: Connection, settings: Settings) -> None:
    """Empty, long and non-ASCII keys have a queue like any other; an empty key isn't no key."""
    keys = ["", "ü" * 127, "🦉", "a" * 255, "'; DROP TABLE x; --", "%s {s}"]
    for key in keys:
        send(app, 1, 2, key=key)
    dispatch_all(connection, settings, 3)
    assert by_key(messages(connection)) == {key: [1, 2] for key in keys}


# --- a queue that the sender chooses ---------------------------------------------------------------------------------


def test_a_chosen_queue(app: Outbox, connection: Connection, settings: Settings) -> None:
    """Sent, prepared, delayed and resent, with a key or without: the message is in the queue that was chosen."""
    app.declare_topic("t", 4)
    ids = [half_id for number in range(4) for half_id in send(app, number, queue=number)]
    send(app, "with a key", "the same key", key="k", queue=3)
    send(app, "later", delay=3600, queue=2)
    with connection.begin():
        half_id = app.prepare(connection, "t", "prepared", queue=1)
    app.commit(half_id)
    dispatch_all(connection, settings, 3)
    make_due(app)
    while release_due_once(connection, settings, limit=1).more:
        pass
    app.operator.resend(ids, by="me", why="test")
    found = {queue: [] for queue in range(4)}  # type: dict[int, list[object]]
    for message in messages(connection):
        found[message.queue].append(message.body)
    assert found[0] == [0, 0]
    assert found[1] == [1, "prepared", 1]
    assert found[2] == [2, "later", 2]
    assert found[3] == [3, "with a key", "the same key", 3]
    assert_dense(messages(connection))


def test_the_others_are_placed_as_ever(app: Outbox, connection: Connection, settings: Settings) -> None:
    """A chosen queue is the choice of one message: others of its key go where the key says."""
    app.declare_topic("t", 8)
    send(app, "by key", key="k")
    send(app, "by key", key="k")
    dispatch_all(connection, settings)
    (home,) = queues_of(connection)
    send(app, "chosen", key="k", queue=(home + 1) % 8)
    send(app, "by key", key="k")
    dispatch_all(connection, settings)
    assert queues_of(connection) == {home: 3, (home + 1) % 8: 1}


@pytest.mark.parametrize("call", ["send", "prepare"])
@pytest.mark.parametrize("queue", [4, 4095, 2**31 - 1])
def test_a_queue_that_the_topic_has_not(app: Outbox, connection: Connection, call: str, queue: int) -> None:
    """It is refused by the COMMIT, and all of the transaction with it."""
    app.declare_topic("t", 4)
    with pytest.raises(InvalidMessage, match=f"queue {queue} of topic 't' must be from 0 to 3"), connection.begin():
        app.send(connection, "t", "another")
        app.send(connection, "t", "fits", queue=3)
        getattr(app, call)(connection, "t", "b", queue=queue)
    assert scalar(connection, "SELECT count(*) FROM outbox.half_message") == 0


def test_a_topic_without_queues(app: Outbox, connection: Connection, settings: Settings) -> None:
    """How many queues it will have is for its declaration, or its first dispatch, to say."""
    with (
        pytest.raises(InvalidMessage, match=r"queue 0 of topic 't' can't be chosen, .* by outbox\.declare_topic"),
        connection.begin(),
    ):
        app.send(connection, "t", "b", queue=0)
    send(app, "first")
    dispatch_all(connection, settings)
    send(app, "second", queue=0)


@pytest.mark.parametrize("queue", [-1, 2**31, 1.0, "1", True])
def test_what_is_no_queue(app: Outbox, connection: Connection, queue: object) -> None:
    """It is refused by the call itself."""
    with connection.begin(), pytest.raises(InvalidMessage, match=f"queue {queue!r} must be a whole number from 0 on"):
        app.send(connection, "t", "b", queue=queue)  # type: ignore[call-overload]  # the mistake


def test_a_drivers_own_connection_chooses_too(app: Outbox, connection: Connection, settings: Settings) -> None:
    """What is written at once is checked at once."""
    app.declare_topic("t", 4)
    with psycopg.connect(app.url.set(drivername="postgresql").render_as_string(hide_password=False)) as driver:
        app.send(driver, "t", "b", queue=3)
        with pytest.raises(InvalidMessage, match="queue 4 of topic 't' must be from 0 to 3"):
            app.send(driver, "t", "b", queue=4)
    dispatch_all(connection, settings)
    assert queues_of(connection) == {3: 1}


def test_a_half_that_was_written_by_hand(app: Outbox, connection: Connection, settings: Settings) -> None:
    """A number that nobody checked still comes to a queue which consumers look at."""
    app.declare_topic("t", 4)
    send(app, "a", "b", queue=1)
    run(connection, "UPDATE outbox.half_message SET queue = CASE body WHEN 'a' THEN 9 ELSE -1 END")
    dispatch_all(connection, settings)
    assert {message.body: message.queue for message in messages(connection)} == {"a": 1, "b": 3}
