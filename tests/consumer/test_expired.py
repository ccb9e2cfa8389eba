"""What is too old when a group comes to it is recorded as expired, and never handled."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest
from sqlalchemy.orm import Session

from outbox import Message
from outbox.consumer.consumer import Consumer
from outbox.errors import InvalidMessage
from outbox.prune.prune_pass import prune_consumer_once
from outbox.telemetry.events import MessageExpired, MessagesHandled
from outbox.telemetry.hooks import TelemetryEvent
from tests.consumer.test_by_key import by_key, id_of, states
from tests.consumer.test_reread import EARLIER, reset
from tests.kit.bench import Bench, Ward, record

PAST = dt.datetime(2020, 1, 1, tzinfo=dt.UTC)
FUTURE = dt.datetime(2099, 1, 1, tzinfo=dt.UTC)
#: How the messages of a group that is ordered by key are handled.
BY_KEY: dict[str, dict[str, Any]] = {
    "one by one": {},
    "batch": {"batch": 4},
    "outside": {"transactional": False, "concurrency": 4},
}


def expire(bench: Bench, body: str) -> None:
    """Have a message that was sent expire now, as if its time had come."""
    with bench.producer.begin() as connection:
        changed = connection.exec_driver_sql(
            "UPDATE outbox.half_message SET headers = jsonb_set(headers, '{outbox-expires-at}',"
            " '\"2020-01-01T00:00:00+00:00\"') WHERE convert_from(body, 'UTF8') = %s",
            (body,),
        )
    assert changed.rowcount == 1


@pytest.mark.parametrize("batch", [1, 3, 100])
@pytest.mark.parametrize("takes_batch", [False, True])
def test_never_handled(any_bench: Bench, batch: int, takes_batch: bool, heard: list[TelemetryEvent]) -> None:
    """Among others, in one transaction with them; with the time and without an attempt."""
    bench = any_bench

    def handle_all(messages: list[Message], session: Session) -> None:
        for message in messages:
            record(message, session)

    consumer = bench.declare(handle_all if takes_batch else record, batch=batch, takes_batch=takes_batch)
    ids = [
        *bench.send("old", expires_at=PAST),
        *bench.send("young", expires_at=FUTURE),
        *bench.send("for ever"),
        *bench.send("old too", expires_at=PAST),
    ]
    counts = bench.consume(consumer)
    assert (counts.taken, counts.done, counts.failed, counts.parked) == (4, 2, 0, 0)
    assert bench.ledger() == ["young", "for ever"]
    assert bench.statuses() == [("expired", 0), ("consumed", 1), ("consumed", 1), ("expired", 0)]
    assert [event.message_id for event in heard if isinstance(event, MessageExpired)] == [ids[0], ids[3]]
    assert [id_ for event in heard if isinstance(event, MessagesHandled) for id_ in event.message_ids] == ids[1:3]
    assert not bench.consume(consumer)


@pytest.mark.parametrize("ordered", [False, True])
def test_expires_while_it_waits_for_its_retry(bench: Bench, ordered: bool) -> None:
    """A failed message isn't tried again when its time is over; its queue goes on."""

    ward = Ward("old")
    consumer = bench.declare(ward, ordered=ordered)
    bench.send("old", "next", expires_at=FUTURE)
    bench.consume(consumer)
    expire(bench, "old")
    bench.retry(consumer)
    consumer = bench.declare(ward, ordered=ordered)  # what it has read ahead knows another time
    bench.consume(consumer)
    assert bench.statuses() == [("expired", 1), ("consumed", 1)]
    assert bench.ledger() == ["next"]


def test_what_expires_undoes_no_other(bench: Bench) -> None:
    """A batch that fails is made again one by one, and what has expired of it expires once."""

    consumer = bench.declare(Ward("bad"), batch=10)
    for body, options in (("a", {}), ("old", {"expires_at": PAST}), ("bad", {}), ("b", {})):
        bench.send(body, **options)
    bench.consume(consumer)
    assert bench.ledger() == ["a", "b"]
    assert bench.statuses() == [("consumed", 1), ("expired", 0), ("failed", 1), ("consumed", 1)]


def test_sent_again(bench: Bench) -> None:
    """A resend of what has expired does nothing."""
    consumer = bench.declare()
    ids = bench.send("old", expires_at=PAST)
    bench.consume(consumer)
    bench.resend(*ids)
    bench.consume(consumer)
    assert (bench.ledger(), bench.statuses()) == ([], [("expired", 0)])


def test_read_again(bench: Bench) -> None:
    """What has expired since a group handled it isn't handled again; that it was consumed is kept."""
    consumer = bench.declare()
    ids = bench.send("old", "next", expires_at=FUTURE)
    bench.consume(consumer)
    expire(bench, "old")
    reset(bench)
    bench.consume(bench.declare())
    assert bench.ledger() == ["old", "next", "next"]
    assert bench.statuses() == [("expired", 0), ("consumed", 1)]
    assert [tuple(row) for row in bench.rows(EARLIER)] == [(id_, 0, "consumed") for id_ in ids]
    reset(bench)
    bench.consume(bench.declare())
    assert bench.statuses() == [("expired", 0), ("consumed", 1)]


@pytest.mark.parametrize("ordered", [False, True])
def test_outside_of_transactions(any_bench: Bench, ordered: bool, heard: list[TelemetryEvent]) -> None:
    """What has expired isn't called there either: neither at first nor when it is to be retried."""
    bench = any_bench
    ward = Ward("fails")
    consumer = bench.declare(ward, ordered=ordered, transactional=False, concurrency=3)
    ids = [
        *bench.send("old", "old too", expires_at=PAST),
        *bench.send("fails", expires_at=FUTURE),
        *bench.send("for ever"),
    ]
    bench.consume(consumer)
    expire(bench, "fails")
    bench.retry(consumer)
    bench.consume(consumer)
    assert ward.calls == ["fails", "for ever"]
    assert bench.statuses() == [("expired", 0), ("expired", 0), ("expired", 1), ("consumed", 1)]
    assert [event.message_id for event in heard if isinstance(event, MessageExpired)] == ids[:3]
    assert not bench.consume(consumer)


def done(bench: Bench, ward: Ward, kind: str) -> list[Any]:
    """Return what took effect: in transactions what is in the ledger, outside of them each call."""
    return ward.done if kind == "outside" else bench.ledger()


def retry_all(bench: Bench, consumer: Consumer) -> None:
    """Retry until nothing is due."""
    while bench.retry(consumer, due=False).taken:
        pass


@pytest.mark.parametrize("kind", BY_KEY)
def test_holds_no_key(any_bench: Bench, kind: str) -> None:
    """Those behind it follow in order: it is too old when it is read, when it is retried, or when its turn comes."""
    bench = any_bench
    bench.app.declare_topic("t", 1)
    ward = Ward("b1", "c1")
    consumer = bench.declare(ward, ordered="key", **BY_KEY[kind])
    bench.send("a1", key="a", expires_at=PAST)
    for body in ("a2", "b1", "c1", "b2", "c2", "a3", "c3"):
        bench.send(body, key=body[0], **({"expires_at": FUTURE} if body in {"b1", "c2"} else {}))
    bench.consume(consumer)
    assert done(bench, ward, kind) == ["a2", "a3"]
    for body in ("b1", "c2"):
        expire(bench, body)
    ward.ill.clear()
    bench.retry(consumer)
    if kind == "outside":  # where a pass begins only what was due before it
        retry_all(bench, consumer)
    assert by_key(done(bench, ward, kind)) == {"a": ["a2", "a3"], "b": ["b2"], "c": ["c1", "c3"]}
    left = {body: status for body, status in states(bench).items() if status != "consumed"}
    assert left == dict.fromkeys(("a1", "b1", "c2"), "expired")
    assert bench.rows("SELECT count(*) FROM outbox.consumer_message WHERE order_key IS NOT NULL") == [0]


@pytest.mark.parametrize("policy", ["park", "park_sequence", "block"])
@pytest.mark.parametrize("kind", ["one by one", "outside"])
def test_holds_no_key_when_it_is_exhausted(bench: Bench, policy: str, kind: str) -> None:
    """The head of a key that is parked, or blocks it, expires when it is tried again: the others follow in order."""
    ward = Ward("a1")
    consumer = bench.declare(ward, ordered="key", on_exhausted=policy, retry_delays=(), **BY_KEY[kind])
    bench.send("a1", "a2", "a3", key="a", expires_at=FUTURE)
    bench.consume(consumer)
    bench.retry(consumer, due=False)
    expire(bench, "a1")
    ward.ill.clear()
    if policy == "block":
        bench.age_retries()
    else:
        bench.sink.operator.retry(id_of(bench, "a1"), group="g", by="me", why="test")
    retry_all(bench, consumer)
    assert states(bench) == {"a1": "expired", "a2": "consumed", "a3": "consumed"}
    assert done(bench, ward, kind) == ["a2", "a3"]


def test_parked_and_retried(bench: Bench) -> None:
    """A dead letter whose time is over expires when an operator has it retried."""
    consumer = bench.declare(lambda message, session: 1 / 0, retry_delays=())
    (id_,) = bench.send("old", expires_at=FUTURE)
    bench.consume(consumer)
    assert bench.statuses() == [("parked", 1)]
    expire(bench, "old")
    bench.sink.operator.retry(id_, group="g", by="me", why="test")
    bench.retry(consumer)
    assert bench.statuses() == [("expired", 0)]


def test_header_of_another_sender(bench: Bench) -> None:
    """A header that isn't a time, which the senders of an earlier release could write, lets the message live."""
    consumer = bench.declare()
    for text in ("tomorrow", "2020-01-01T00:00:00"):
        (id_,) = bench.send(1)
        with bench.producer.begin() as connection:
            written = "UPDATE outbox.half_message SET headers = jsonb_build_object('outbox-expires-at', %s::text)"
            connection.exec_driver_sql(f"{written} WHERE id = %s", (text, id_))
    bench.dispatch()
    bench.consume(consumer)
    assert bench.statuses() == [("consumed", 1)] * 2


def test_pruned(bench: Bench) -> None:
    """The row of what has expired is settled: it goes when its message has gone, and its time is over."""
    consumer = bench.declare()
    bench.send("old", expires_at=PAST)
    bench.consume(consumer)
    bench.run("UPDATE outbox.consumer_message SET changed_at = changed_at - interval '10 years'")
    bench.run("DELETE FROM outbox.half_message")
    prune_consumer_once(bench.connection, bench.source, bench.settings, "g", "t")
    assert bench.statuses() == []


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"expires_at": 5}, "must be a datetime"),
        ({"expires_at": FUTURE.replace(tzinfo=None)}, "expires_at 2099-01-01T00:00:00 has no time zone"),
        ({"expires_at": PAST, "deliver_at": FUTURE}, "must be after deliver_at"),
    ],
)
def test_refused(bench: Bench, options: dict[str, Any], why: str) -> None:
    """What can't be meant is refused at the call."""
    with pytest.raises(InvalidMessage, match=why):
        bench.send(1, **options)


def test_seen_by_the_handler(bench: Bench) -> None:
    """A handler knows until when its work is wanted."""
    seen = []
    consumer = bench.declare(lambda message, session: seen.append(message.expires_at))
    bench.send("young", expires_at=FUTURE.astimezone(dt.timezone(dt.timedelta(hours=5))))
    bench.send("for ever")
    bench.consume(consumer)
    assert seen == [FUTURE, None]
