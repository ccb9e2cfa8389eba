"""What a relay publishes to, in tests: a server of each kind, its publisher, and what readers of it find."""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import aio_pika
import httpx
import nats
import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]  # its types lack it
from redis import Redis

from outbox.relay.envelope import Envelope
from outbox.relay.intake.source import IntakeSource
from outbox.relay.kafka import KafkaPublisher, KafkaSource
from outbox.relay.nats import NatsPublisher, NatsSource
from outbox.relay.publisher import BrokerPublisher
from outbox.relay.rabbit import RabbitPublisher, RabbitSource
from outbox.relay.redis import RedisPublisher, RedisSource
from outbox.relay.webhook import Webhook
from tests.relay import servers

T = TypeVar("T")
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"  # noqa: S105 - of the tests


@dataclass(frozen=True)
class Received:
    """A message as a reader finds it; ``headers`` are lower case."""

    headers: dict[str, str]
    body: bytes
    key: str | None = None

    @property
    def id(self) -> str:
        """The id of the message."""
        return self.headers.get("ce_id") or self.headers["ce-id"]

    @property
    def value(self) -> Any:
        """The body, which is JSON."""
        return json.loads(self.body)


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run what a client does; its own tasks end first, some of which it begins when its connection is closed."""

    async def settled() -> T:
        result = await work
        for _ in range(10):
            await asyncio.sleep(0)
        if others := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(others, timeout=5)
        return result

    return asyncio.run(settled())


class Target(ABC):
    """Somewhere to publish to, of which one test has a destination of its own."""

    def __init__(self, server: Any) -> None:
        self.server = server
        self.destination = f"t{uuid4().hex[:10]}"
        self.make(self.destination)

    @abstractmethod
    def make(self, destination: str) -> None:
        """Make a destination there."""

    @abstractmethod
    def publisher(self, **options: Any) -> BrokerPublisher:
        """Return a publisher to it."""

    def source(self, **_: Any) -> IntakeSource:
        """Return what an intake takes from it."""
        pytest.skip("nothing takes from it")

    @abstractmethod
    def put(self, *bodies: bytes, headers: dict[str, str] | None = None) -> None:
        """Publish bodies as anybody might, without attributes of CloudEvents."""

    @abstractmethod
    def read(self) -> list[Received]:
        """Return all that was published."""

    @classmethod
    @abstractmethod
    @contextmanager
    def serve(cls, _: Path) -> Iterator[Any]:
        """Run the server."""


class KafkaTarget(Target):
    """A topic of a Kafka."""

    @classmethod
    @contextmanager
    def serve(cls, _: Path) -> Iterator[Any]:
        """Run the mock that is in the client's library."""
        mock = Producer({"bootstrap.servers": "127.0.0.1:1", "test.mock.num.brokers": 3, "log_level": 0})
        brokers = mock.list_topics(timeout=30).brokers.values()
        yield ",".join(f"{each.host}:{each.port}" for each in brokers)
        mock.flush(1)

    def make(self, destination: str) -> None:
        """Make the topic: the mock does so when it is asked about it."""
        Producer({"bootstrap.servers": self.server, "log_level": 0}).list_topics(destination, timeout=30)

    def publisher(self, **options: Any) -> BrokerPublisher:
        """Return a publisher to it."""
        return KafkaPublisher({"bootstrap.servers": self.server, "log_level": 0}, self.destination, **options)

    def source(self, **options: Any) -> IntakeSource:
        """Return what takes from it."""
        config = {"bootstrap.servers": self.server, "log_level": 0, "session.timeout.ms": 6000}
        return KafkaSource(config, [self.destination], **{"group": "g", **options})

    def put(self, *bodies: bytes, headers: dict[str, str] | None = None) -> None:
        """Publish bodies."""
        producer = Producer({"bootstrap.servers": self.server, "log_level": 0})
        for body in bodies:
            producer.produce(self.destination, body, headers=list((headers or {}).items()))
        assert producer.flush(30) == 0

    def read(self) -> list[Received]:
        """Return all that was published, partition by partition."""
        config = {"bootstrap.servers": self.server, "group.id": "reader", "enable.partition.eof": False, "log_level": 0}
        consumer = Consumer(config)
        try:
            partitions = consumer.list_topics(self.destination, timeout=30).topics[self.destination].partitions
            found = []
            for partition in partitions:
                low, high = consumer.get_watermark_offsets(TopicPartition(self.destination, partition), timeout=30)
                if low < high:
                    consumer.assign([TopicPartition(self.destination, partition, low)])
                    read = 0
                    while read < high - low:
                        if (report := consumer.poll(30)) is not None and report.error() is None:
                            found.append(_of_kafka(report))
                            read = int(report.offset() or 0) + 1 - low
            return found
        finally:
            consumer.close()


def _of_kafka(report: Any) -> Received:
    headers = {name: value.decode() for name, value in report.headers() or []}
    key = report.key()
    return Received(headers, report.value(), None if key is None else key.decode())


def make_kafka_topic(bootstrap: str, topic: str, partitions: int = 4, **config: str) -> None:
    """Make a topic of a real Kafka."""
    admin = AdminClient({"bootstrap.servers": bootstrap})
    made = admin.create_topics([NewTopic(topic, partitions, config=config)])
    made[topic].result(60)


class NatsTarget(Target):
    """A subject with a stream of its own."""

    @classmethod
    @contextmanager
    def serve(cls, folder: Path) -> Iterator[Any]:
        """Run the server."""
        with servers.nats_server(folder) as server:
            yield server

    @property
    def url(self) -> str:
        """The URL."""
        return f"nats://127.0.0.1:{self.server.port}"

    def make(self, destination: str) -> None:
        """Make a stream for the subject."""

        async def add() -> None:
            client = await nats.connect(self.url)
            await client.jetstream().add_stream(name=destination, subjects=[destination])
            await client.close()

        run(add())

    def publisher(self, **options: Any) -> BrokerPublisher:
        """Return a publisher to it."""
        return NatsPublisher(self.url, self.destination, **options)

    def source(self, **options: Any) -> IntakeSource:
        """Return what takes from it."""
        return NatsSource(self.url, self.destination, **{"group": "g", **options})

    def put(self, *bodies: bytes, headers: dict[str, str] | None = None) -> None:
        """Publish bodies."""

        async def publish() -> None:
            client = await nats.connect(self.url)
            for body in bodies:
                await client.jetstream().publish(self.destination, body, headers=headers)
            await client.close()

        run(publish())

    def read(self) -> list[Received]:
        """Return all that was published."""

        async def fetch() -> list[Received]:
            client = await nats.connect(self.url)
            stream = client.jetstream()
            state = (await stream.stream_info(self.destination)).state
            found = [await stream.get_msg(self.destination, each) for each in range(1, state.last_seq + 1)]
            await client.close()
            return [
                Received({name.lower(): value for name, value in (each.headers or {}).items()}, each.data or b"")
                for each in found
            ]

        return run(fetch())


class RedisTarget(Target):
    """A stream of Redis."""

    @classmethod
    @contextmanager
    def serve(cls, folder: Path) -> Iterator[Any]:
        """Run the server."""
        with servers.redis_server(folder) as server:
            yield server

    @property
    def url(self) -> str:
        """The URL."""
        return f"redis://127.0.0.1:{self.server.port}"

    def make(self, destination: str) -> None:
        """Do nothing: the first entry makes it."""

    def publisher(self, **options: Any) -> BrokerPublisher:
        """Return a publisher to it."""
        return RedisPublisher(self.url, self.destination, **options)

    def source(self, **options: Any) -> IntakeSource:
        """Return what takes from it."""
        return RedisSource(self.url, self.destination, **{"group": "g", **options})

    def put(self, *bodies: bytes, headers: dict[str, str] | None = None) -> None:
        """Publish bodies."""
        with Redis.from_url(self.url) as client:
            for body in bodies:
                client.xadd(self.destination, {**(headers or {}), "body": body})

    def read(self) -> list[Received]:
        """Return all that was published."""
        with Redis.from_url(self.url) as client:
            entries: Any = client.xrange(self.destination)
        found = []
        for _, fields in entries:
            headers = {name.decode(): value.decode() for name, value in fields.items() if name != b"body"}
            found.append(Received(headers, fields[b"body"]))
        return found


class RabbitTarget(Target):
    """A queue of RabbitMQ, by the default exchange."""

    @classmethod
    @contextmanager
    def serve(cls, folder: Path) -> Iterator[Any]:
        """Run the server."""
        with servers.rabbit_server(folder) as server:
            yield server

    @property
    def url(self) -> str:
        """The URL."""
        return f"amqp://guest:guest@127.0.0.1:{self.server.port}/"

    def make(self, destination: str) -> None:
        """Make a durable queue."""

        async def declare() -> None:
            async with await aio_pika.connect(self.url) as connection:
                await (await connection.channel()).declare_queue(destination, durable=True)

        run(declare())

    def publisher(self, **options: Any) -> BrokerPublisher:
        """Return a publisher to it."""
        return RabbitPublisher(self.url, routing_key=self.destination, **options)

    def source(self, **options: Any) -> IntakeSource:
        """Return what takes from it."""
        options.pop("group", None)
        return RabbitSource(self.url, self.destination, **options)

    def put(self, *bodies: bytes, headers: dict[str, str] | None = None) -> None:
        """Publish bodies."""

        async def publish() -> None:
            async with await aio_pika.connect(self.url) as connection:
                exchange = (await connection.channel()).default_exchange
                for body in bodies:
                    await exchange.publish(aio_pika.Message(body, headers=dict(headers or {})), self.destination)

        run(publish())

    def read(self) -> list[Received]:
        """Take all that was published."""

        async def take() -> list[Received]:
            async with await aio_pika.connect(self.url) as connection:
                queue = await (await connection.channel()).declare_queue(self.destination, durable=True)
                found = []
                while (message := await queue.get(no_ack=True, fail=False)) is not None:
                    headers = {name.lower(): str(value) for name, value in message.headers.items()}
                    found.append(Received({**headers, "content-type": message.content_type or ""}, message.body))
                return found

        return run(take())


class WebhookTarget(Target):
    """An HTTP endpoint."""

    @classmethod
    @contextmanager
    def serve(cls, _: Path) -> Iterator[Any]:
        """Serve it."""
        with servers.http_endpoint() as endpoint:
            yield endpoint

    def make(self, destination: str) -> None:  # noqa: ARG002 - it has one URL
        """Forget what came before."""
        self.server.took.clear()

    def publisher(self, **options: Any) -> BrokerPublisher:
        """Return a publisher to it."""
        return Webhook(self.server.url, secrets=[SECRET], private=True, **options)

    def put(self, *bodies: bytes, headers: dict[str, str] | None = None) -> None:
        """Post bodies."""
        for body in bodies:
            httpx.post(self.server.url, content=body, headers=headers)

    def read(self) -> list[Received]:
        """Return all that came."""
        return [Received(headers, body) for headers, body in self.server.took]


TARGETS: dict[str, type[Target]] = {
    "kafka": KafkaTarget,
    "nats": NatsTarget,
    "redis": RedisTarget,
    "webhook": WebhookTarget,
    "rabbitmq": RabbitTarget,
}

__all__ = ["SECRET", "TARGETS", "Envelope", "Received", "Target", "make_kafka_topic"]
