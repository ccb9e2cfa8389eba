"""A broker object of FastStream as a publisher."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faststream.confluent import KafkaBroker as ConfluentBroker
from faststream.kafka import KafkaBroker
from faststream.nats import NatsBroker
from faststream.rabbit import Channel, RabbitBroker
from faststream.redis import RedisBroker

from outbox.consumer.outside.consumer import OutsideConsumer
from outbox.errors import InvalidHandler
from outbox.relay.faststream import FastStreamPublisher
from tests.consumer.test_control import control
from tests.kit.bench import Bench
from tests.relay.targets import KafkaTarget, NatsTarget, RabbitTarget, RedisTarget

Relaying = Callable[..., OutsideConsumer]


def test_redis(bench: Bench, relaying: Relaying, tmp_path: Path) -> None:
    """Its entries are FastStream's own envelope, of which its readers know."""
    with RedisTarget.serve(tmp_path) as server:
        target = RedisTarget(server)
        bench.send(*range(5), key=None)
        broker = RedisBroker(target.url)
        assert bench.consume(relaying(FastStreamPublisher(broker, target.destination))).done == 5
        from redis import Redis

        with Redis.from_url(target.url) as client:
            assert client.xlen(target.destination) == 5


def test_nats(bench: Bench, relaying: Relaying, tmp_path: Path) -> None:
    """Into a stream; without one nothing would be confirmed."""
    with NatsTarget.serve(tmp_path) as server:
        target = NatsTarget(server)
        with pytest.raises(InvalidHandler, match="stream"):
            FastStreamPublisher(NatsBroker(target.url), target.destination)
        bench.send(*range(5), key=None)
        publisher = FastStreamPublisher(NatsBroker(target.url), target.destination, stream=target.destination)
        assert bench.consume(relaying(publisher)).done == 5
        assert sorted(each.value for each in target.read()) == list(range(5))


def test_kafka(bench: Bench, relaying: Relaying, tmp_path: Path) -> None:
    """By confluent's client; by aiokafka only if all replicas in sync have to confirm."""
    with KafkaTarget.serve(tmp_path) as server:
        target = KafkaTarget(server)
        bench.send(*range(5), key="k")
        broker = ConfluentBroker(server, allow_auto_create_topics=False)
        assert bench.consume(relaying(FastStreamPublisher(broker, target.destination))).done == 5
        assert [each.value for each in target.read()] == list(range(5))
        with pytest.raises(InvalidHandler, match="idempotence"):
            FastStreamPublisher(KafkaBroker(server))


def test_rabbit(bench: Bench, relaying: Relaying, tmp_path: Path) -> None:
    """One that says nothing of what no queue took isn't used."""
    with RabbitTarget.serve(tmp_path) as server:
        target = RabbitTarget(server)
        bench.send(*range(5), key=None)
        bench.consume(relaying(FastStreamPublisher(RabbitBroker(target.url), target.destination)))
        assert bench.statuses() == []
        assert "on_return_raises=True" in control(bench).because
        bench.run("TRUNCATE outbox.group_control")
        broker = RabbitBroker(target.url, default_channel=Channel(on_return_raises=True))
        assert bench.consume(relaying(FastStreamPublisher(broker, target.destination))).done == 5
        assert sorted(each.value for each in target.read()) == list(range(5))


def test_a_broker_of_another_kind() -> None:
    """It is refused."""
    broker: Any = object()
    with pytest.raises(InvalidHandler, match="isn't one of"):
        FastStreamPublisher(broker)
