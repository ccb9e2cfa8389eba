"""A relay as it is declared, and as a worker serves it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest
from sqlalchemy import Engine

from outbox import Message, Outbox, Park, Settings, Unavailable, Worker, testing
from outbox.consumer import start
from outbox.errors import InvalidHandler, InvalidMessage
from outbox.message.model import HandlerAnswer
from outbox.relay.envelope import Envelope, RelayRecord, destination_of
from outbox.relay.kafka import KafkaPublisher
from outbox.relay.nats import NatsPublisher
from outbox.relay.publisher import ConnectedPublisher, Publisher
from outbox.worker.duty import Lane
from tests.consumer.test_control import control
from tests.kit import dispatch_all, wait_until
from tests.kit.bench import Bench
from tests.relay.test_kafka import gated
from tests.relay.test_targets import recover


class Memory:
    """A publisher of one's own, by the protocol alone."""

    def __init__(self, name: str = "memory") -> None:
        self.name, self.timeout = name, 5.0
        self.published: list[tuple[str, Any]] = []
        self.sizes: list[int] = []
        self.closed = 0
        self.away = False
        self.ill: set[Any] = set()

    async def publish(self, messages: list[Message], /) -> Sequence[HandlerAnswer]:
        """Keep them."""
        await asyncio.sleep(0)
        self.sizes.append(len(messages))
        if self.away:
            return [Unavailable("away")] * len(messages)
        self.published += [(each.topic, each.body) for each in messages if each.body not in self.ill]
        return [Park("ill") if each.body in self.ill else None for each in messages]

    def close(self) -> None:
        """Count it."""
        self.closed += 1


def test_a_worker_relays_topics_by_name_and_by_pattern(engine: Engine, settings: Settings) -> None:
    """Those that come later too; internal ones and others aren't touched; at the end the publisher is closed."""
    app, memory = Outbox(engine, settings=settings), Memory()
    app.relay("order-*", to=memory)
    app.relay(["invoice", "*.audit"], to=(second := Memory("second")), group="ledger")
    publisher: Publisher = memory
    assert publisher.name == "memory"

    def send(topic: str, body: Any) -> None:
        with engine.begin() as connection:
            app.send(connection, topic, body)

    send("order-paid", 1)
    send("stock", 2)
    send("invoice", 3)
    with Worker(app):
        wait_until(lambda: ("order-paid", 1) in memory.published, "a topic of the pattern is relayed")
        send("order-lost", 4)
        wait_until(lambda: ("order-lost", 4) in memory.published, "a topic that came later is relayed")
        wait_until(lambda: ("invoice", 3) in second.published, "a topic by name is relayed")
        assert not memory.closed
    assert memory.published == [("order-paid", 1), ("order-lost", 4)]
    assert second.published == [("invoice", 3)]
    assert memory.closed
    assert second.closed
    groups = {(each.group, each.topic) for each in app.operator.controls()}
    assert {("relay-memory", "order-paid"), ("relay-memory", "order-lost"), ("ledger", "invoice")} <= groups


def test_a_group_of_a_pattern_that_fails_at_its_start_is_tried_again(
    engine: Engine, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is left of the first try, and the others go on."""
    app, memory = Outbox(engine, settings=settings), Memory()
    app.relay("order-*", to=memory)
    start_group, failures = start.start_group, iter([True])

    def start_it(*arguments: Any) -> Any:
        if next(failures, False):
            raise RuntimeError("not yet")
        return start_group(*arguments)

    monkeypatch.setattr("outbox.consumer.consumer.start_group", start_it)
    worker = Worker(app)
    with worker:
        with engine.begin() as connection:
            app.send(connection, "order-paid", 1)
        wait_until(lambda: memory.published, "it is relayed at the second try")
        names = list(worker.health())
        assert len(names) == len(set(names))
    assert next(failures, None) is None


def test_a_drain_relays_too(engine: Engine, settings: Settings) -> None:
    """Also by a pattern, to the topics that its rounds make; what the publisher has open is closed."""
    app, memory = Outbox(engine, settings=settings), Memory()
    app.relay("order-*", to=memory)
    with engine.begin() as connection:
        app.send(connection, "order-paid", 1)
    assert testing.drain(app).done == 1
    assert memory.published == [("order-paid", 1)]
    assert memory.closed


def test_a_key_waits_for_what_is_parked_if_it_is_asked_to(bench: Bench, relaying: Any) -> None:
    """By default the key goes on."""
    for rule, after in (("skip", ["consumed"]), ("park", ["waiting"])):
        bench.run("TRUNCATE outbox.consumer_message, outbox.consumer_offset")
        memory = Memory()
        memory.ill = {1}
        bench.send(1, 2) if rule == "skip" else None
        bench.consume(relaying(memory, on_exhausted=rule))
        statuses = {row.status for row in bench.inbox().values()}
        assert statuses == {"parked", *after}


def test_lists_are_as_long_as_there_are_keys(bench: Bench, relaying: Any) -> None:
    """Of one key one message is on its way; without an order all are."""
    bench.app.declare_topic("t", 1)
    bench.send(*range(20), key="a")
    memory = Memory()
    bench.consume(relaying(memory))
    assert memory.sizes == [1] * 20
    bench.run("TRUNCATE outbox.consumer_message, outbox.consumer_offset")
    other = Memory()
    bench.consume(relaying(other, ordered=False))
    assert max(other.sizes) == 20


@pytest.mark.parametrize("key", [None, "", "a b", "*", "a.>", "x\r\ny", ".", "a..b"])
def test_a_destination_that_its_message_spoils(bench: Bench, relaying: Any, key: str | None) -> None:
    """It is parked: nothing is asked of the broker, and nothing is held up."""
    bench.send(1, key=key)
    bench.consume(relaying(NatsPublisher("nats://127.0.0.1:1", "t.{key}")))
    assert [row.status for row in bench.inbox().values()] == ["parked"]
    bench.run("TRUNCATE outbox.consumer_message, outbox.consumer_offset")
    if key != "a..b":
        return
    bench.consume(relaying(KafkaPublisher({"bootstrap.servers": "127.0.0.1:1"}, "t/{key}")))
    assert [row.status for row in bench.inbox().values()] == ["parked"]


def test_what_cannot_be_declared(engine: Engine, settings: Settings) -> None:
    """It is refused where it is declared."""
    app, memory = Outbox(engine, settings=settings), Memory()
    with pytest.raises(InvalidHandler, match="names no topic"):
        app.relay([], to=memory)
    with pytest.raises(InvalidHandler, match="block"):
        app.relay("a", to=memory, on_exhausted="block")  # type: ignore[arg-type]  # what is tested
    with pytest.raises(InvalidHandler, match="no Publisher"):
        app.relay("a", to=object())  # type: ignore[arg-type]  # what is tested
    with pytest.raises(InvalidMessage):
        app.relay("a b*", to=memory)
    with pytest.raises(InvalidMessage):
        app.relay("outbox.parked", to=memory)
    app.relay("a", to=memory)
    with pytest.raises(InvalidHandler, match="declared already"):
        app.relay("a", to=memory)
    with pytest.raises(InvalidHandler, match="acks"):
        KafkaPublisher({"bootstrap.servers": "x", "acks": 1})
    with pytest.raises(InvalidHandler, match=r"message.timeout.ms"):
        KafkaPublisher({"bootstrap.servers": "x", "message.timeout.ms": 1})
    with pytest.raises(InvalidHandler, match="may have the fields"):
        destination_of("topic", "{id}")
    with pytest.raises(InvalidHandler, match="can't be read"):
        destination_of("topic", "{topic")
    with pytest.raises(InvalidHandler, match="no attribute"):
        Envelope(names={"idd": "x"})
    with pytest.raises(InvalidHandler, match="source is empty"):
        Envelope(source="")


class Deaf(ConnectedPublisher[object]):
    """One whose client takes no notice of being cancelled, while it connects or while it sends."""

    name = "deaf"

    def __init__(self) -> None:
        super().__init__("{topic}", None, 0.1)
        self.busy_with = ""
        self.connected = 0

    async def _busy(self, what: str) -> None:
        while self.busy_with == what:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)

    async def _connect(self) -> object:
        await self._busy("connect")
        self.connected += 1
        return object()

    async def _disconnect(self, client: object) -> None:  # noqa: ARG002 - there is none
        await self._busy("disconnect")

    async def _send(self, client: object, record: RelayRecord) -> None:  # noqa: ARG002 - there is none
        await self._busy("send")


@pytest.mark.parametrize("what", ["connect", "send"])
def test_a_client_that_takes_no_notice(bench: Bench, relaying: Any, what: str) -> None:
    """No attempt is used up, and the relay goes on by another client."""
    publisher = Deaf()
    publisher.busy_with = what
    consumer = relaying(publisher)
    clock = gated(bench, consumer)
    bench.send(*range(5), key=None)
    bench.consume(consumer)
    assert (bench.statuses(), control(bench).state) == ([], "open")
    publisher.busy_with = "disconnect" if what == "send" else ""
    recover(bench, consumer, clock, 5)
    assert publisher.connected >= 1
    publisher.busy_with = ""


class Silent(Memory):
    """A publisher that never says anything, while it is so."""

    silent = True

    async def publish(self, messages: list[Message], /) -> Sequence[HandlerAnswer]:
        """Say nothing."""
        while self.silent:
            await asyncio.sleep(0.01)
        return await super().publish(messages)


def test_a_publisher_that_says_nothing(bench: Bench, relaying: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of it costs an attempt either."""
    monkeypatch.setattr("outbox.relay.relay._GRACE", 1.0)
    publisher = Silent()
    publisher.timeout = 0.1
    consumer = relaying(publisher)
    clock = gated(bench, consumer)
    bench.send(*range(5), key=None)
    bench.consume(consumer)
    assert bench.statuses() == []
    assert "nothing within" in control(bench).because
    publisher.silent = False
    recover(bench, consumer, clock, 5)


def test_topics_that_are_found_while_a_worker_begins(
    engine: Engine, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their lanes are begun once, by what has found them."""
    app, publisher, start = Outbox(engine, settings=settings), Memory(), Lane.start
    with engine.begin() as connection:
        app.send(connection, "order-paid", 1)
    dispatch_all(engine, settings)
    app.relay("order-*", to=publisher)
    begun: list[threading.Thread] = []

    def noted(lane: Lane) -> None:
        start(lane)
        begun.append(threading.current_thread())
        if any("relay" in duty.name for duty in lane.duties) and len(set(begun)) == 1:
            wait_until(lambda: len(set(begun)) > 1, "the topic is found, and its lane is begun")

    monkeypatch.setattr(Lane, "start", noted)
    with Worker(app):
        wait_until(lambda: publisher.published, "it is published")
    assert publisher.published == [("order-paid", 1)]
