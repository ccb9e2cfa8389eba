"""What holds for each kind of destination, on a real server of it."""

from __future__ import annotations

import asyncio
import datetime as dt
import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import pytest

from outbox.consumer.control.gate import Gate
from outbox.consumer.outside.consumer import OutsideConsumer
from outbox.message.model import Message, Unavailable
from tests.consumer.test_control import Clock, control, trial_due
from tests.kit.bench import Bench
from tests.relay.targets import TARGETS, Envelope, Target

Relaying = Callable[..., OutsideConsumer]

#: Messages of a test that has many.
MANY = 300


@pytest.fixture(scope="module", params=TARGETS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Any]]:
    """A server of each kind, one after the other."""
    with TARGETS[request.param].serve(tmp_path_factory.mktemp(request.param)) as server:
        yield request.param, server


@pytest.fixture
def target(served: tuple[str, Any]) -> Target:
    """A destination of the test's own."""
    kind, server = served
    return TARGETS[kind](server)


#: Those that are processes, which can be stopped.
stopped = pytest.mark.parametrize("served", ["nats", "redis", "rabbitmq"], indirect=True)


def test_all_arrive_once_in_the_order_of_their_keys(bench: Bench, relaying: Relaying, target: Target) -> None:
    """With as many on their way as there are keys; the inbox has each, and the offset is behind them."""
    for number in range(MANY):
        bench.send(number, key=f"k{number % 20}")
    assert bench.consume(relaying(target.publisher())).done == MANY
    received = target.read()
    assert sorted(each.value for each in received) == list(range(MANY))
    by_key = defaultdict(list)
    for each in received:
        by_key[each.value % 20].append(each.value)
    assert all(values == sorted(values) for values in by_key.values())
    assert bench.statuses() == [("consumed", 1)] * MANY


def test_what_a_message_says(bench: Bench, relaying: Relaying, target: Target) -> None:
    """Body byte for byte, attributes of CloudEvents, the sender's headers, the trace, in any alphabet."""
    body = bytes(range(256))
    headers = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "note": 'Grüße, 100 % "now"'}
    (message_id,) = bench.send(body, key="ключ", tag="new", headers=headers)
    bench.send(b"", key=None)
    assert bench.consume(relaying(target.publisher())).done == 2
    received, empty = sorted(target.read(), key=lambda each: -len(each.body))
    prefix = "ce_" if "ce_id" in received.headers else "ce-"
    with bench.producer.connect() as connection:
        sql = "SELECT queue, position FROM outbox.message WHERE half_id = %s"
        queue, position = connection.exec_driver_sql(sql, (message_id,)).one()
    said = {name.removeprefix(prefix): value for name, value in received.headers.items() if name.startswith(prefix)}
    assert received.body == body
    assert said.pop("time").endswith("Z")
    encoded = _encoded if target.__class__.__name__ in {"NatsTarget", "WebhookTarget"} else str
    assert said == {
        "id": str(message_id),
        "source": "/outbox",
        "specversion": "1.0",
        "type": "t",
        "partitionkey": encoded("ключ"),
        "subject": encoded("ключ"),
        "outboxtopic": "t",
        "outboxqueue": str(queue),
        "sequence": f"{position:020d}",
        "outboxsend": "1",
        "outboxtag": "new",
    }
    assert received.headers["traceparent"] == headers["traceparent"]
    assert received.headers["note"] == encoded(headers["note"])
    assert received.headers["content-type"] == "application/octet-stream"
    assert empty.body == b""
    assert prefix + "partitionkey" not in empty.headers
    if target.__class__.__name__ == "KafkaTarget":
        assert (received.key, empty.key) == ("ключ", None)


def _encoded(text: str) -> str:
    known = {"ключ": "%D0%BA%D0%BB%D1%8E%D1%87", 'Grüße, 100 % "now"': "Gr%C3%BC%C3%9Fe, 100 %25 %22now%22"}
    return known[text]


def test_names_of_ones_own(bench: Bench, relaying: Relaying, target: Target) -> None:
    """Attributes have the names that readers expect, or are left out."""
    names = {"id": "message-id", "type": "kind", "sequence": ""}
    envelope = Envelope(source="/shop", prefix="x-", names=names, type_of=lambda message: f"shop.{message.topic}")
    (message_id,) = bench.send(1)
    bench.consume(relaying(target.publisher(envelope=envelope)))
    (received,) = [each.headers for each in target.read()]
    assert received["message-id"] == str(message_id)
    assert (received["kind"], received["x-source"]) == ("shop.t", "/shop")
    assert not [name for name in received if "sequence" in name or name.startswith("ce")]


def test_large_bodies(bench: Bench, relaying: Relaying, target: Target) -> None:
    """What the destination takes arrives whole; what it refuses is parked with the reason, and its key goes on."""
    large, most = b"x" * 400_000, b"y" * (4 * 1024 * 1024)
    ids = bench.send(large, most, b"after", key="k")
    bench.consume(relaying(target.publisher()))
    digests = {hashlib.sha256(each.body).digest() for each in target.read()}
    assert {hashlib.sha256(body).digest() for body in (large, b"after")} <= digests
    row = bench.inbox()[ids[1]]
    if hashlib.sha256(most).digest() in digests:
        assert row.status == "consumed"
    else:
        assert row.status == "parked"
        assert "large" in str(row.error).lower() or "bytes" in str(row.error)
    assert bench.inbox()[ids[2]].status == "consumed"


def test_a_repetition_is_told_from_a_resend(bench: Bench, relaying: Relaying, target: Target) -> None:
    """What an operator sends again has another number, and arrives; no broker drops it as a duplicate."""
    ids = bench.send(1, 2)
    consumer = relaying(target.publisher())
    bench.consume(consumer)
    bench.app.operator.reset_group("g", "t", "first", by="me", why="test")
    bench.consume(consumer)
    bench.resend(ids[0])
    received = target.read()
    assert sorted(each.value for each in received) == [1, 1, 2, 2]
    assert {each.id for each in received} == {str(each) for each in ids}


@stopped
def test_frozen_it_costs_no_attempt(bench: Bench, relaying: Relaying, target: Target) -> None:
    """A time-out says nothing: the same messages are published again, in the order of their keys, and none is lost."""
    server, clock = target.server, Clock()
    consumer = relaying(target.publisher(timeout=1.0))
    consumer.gate = Gate(consumer.subscription, bench.settings, consumer._queues.keys(), clock)
    bench.send(-1)
    recover(bench, consumer, clock, 1)  # to connect may take longer than that time-out
    server.freeze()
    try:
        bench.send(*range(10))
        assert not bench.consume(consumer).done
        assert control(bench).state == "open"
        assert bench.statuses() == [("consumed", 1)]
    finally:
        server.thaw()
    recover(bench, consumer, clock, 11)
    received = [each.value for each in target.read()]
    assert list(dict.fromkeys(received)) == [-1, *range(10)]


@stopped
def test_killed_and_back(bench: Bench, relaying: Relaying, target: Target) -> None:
    """The connection is opened again, by the same publisher; what was confirmed is still there."""
    server, clock = target.server, Clock()
    consumer = relaying(target.publisher(timeout=20.0))
    consumer.gate = Gate(consumer.subscription, bench.settings, consumer._queues.keys(), clock)
    bench.send(-1)
    bench.consume(consumer)
    server.kill()
    bench.send(*range(10))
    assert not bench.consume(consumer).done
    assert control(bench).state == "open"
    server.start()
    recover(bench, consumer, clock, 11)
    received = [each.value for each in target.read()]
    assert set(received) == {-1, *range(10)}
    assert list(dict.fromkeys(received[1:])) == list(range(10))


def recover(bench: Bench, consumer: OutsideConsumer, clock: Clock, count: int) -> None:
    """Try until all are relayed; none has cost more than one attempt."""
    for _ in range(50):
        trial_due(bench, clock)
        bench.consume(consumer)
        if len(bench.statuses()) == count:
            break
    assert bench.statuses() == [("consumed", 1)] * count


def test_closed_it_opens_again(bench: Bench, relaying: Relaying, target: Target) -> None:
    """One worker ends, another one in the same process goes on."""
    publisher = target.publisher()
    for number in range(3):
        bench.send(number)
        assert bench.consume(relaying(publisher)).done == 1
        publisher.close()
    assert sorted(each.value for each in target.read()) == [0, 1, 2]


@stopped
def test_nothing_listens(served: tuple[str, Any]) -> None:
    """Told in the words of the client, with the name of the destination."""
    target = TARGETS[served[0]](served[1])
    publisher = target.publisher(timeout=5.0)
    for name in ("_url", "_servers"):
        if hasattr(publisher, name):
            url = str(getattr(publisher, name))
            port = url.rsplit(":", 1)[1].split("/", maxsplit=1)[0]
            setattr(publisher, name, type(getattr(publisher, name))(url.replace(f":{port}", ":1")))
    try:
        (answer,) = asyncio.run(_publish(publisher))
    finally:
        publisher.close()
    assert isinstance(answer, Unavailable)
    assert publisher.name in answer.reason


async def _publish(publisher: Any) -> Any:
    now = dt.datetime.now(dt.UTC)
    return await publisher.publish([Message(uuid4(), "t", 0, 1, None, None, "application/json", b"1", now, now)])
