"""What the banks need at a broker, and what the demo finds there at the end: each topic, and the ids of its messages.

Only these few lines know how each broker keeps what was published; a relay and an intake need nothing of it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from .options import Via

_PARTITIONS = 4
_SECONDS = 60.0


def make(kind: Via, address: str, topics: Sequence[str]) -> None:
    """Make what a broker must have before something is published to these topics."""
    makers: dict[Via, Callable[[str, Sequence[str]], None]] = {
        Via.KAFKA: _make_kafka,
        Via.NATS: lambda *each: asyncio.run(_make_nats(*each)),
        Via.RABBITMQ: lambda *each: asyncio.run(_make_rabbit(*each)),
    }
    if kind in makers:  # the first entry makes a stream of Redis
        makers[kind](address, topics)


def published(kind: Via, address: str, topics: Sequence[str]) -> Counter[str]:
    """Return the ids of the messages that a broker has of these topics, and how often it has each."""
    readers: dict[Via, Callable[[str, str], Iterable[str]]] = {
        Via.KAFKA: _read_kafka,
        Via.NATS: lambda *each: asyncio.run(_read_nats(*each)),
        Via.RABBITMQ: lambda *each: asyncio.run(_read_rabbit(*each)),
        Via.REDIS: _read_redis,
    }
    return Counter(each for topic in topics for each in readers[kind](address, topic))


def _make_kafka(address: str, topics: Sequence[str]) -> None:
    from confluent_kafka import admin  # noqa: PLC0415 - an extra

    kafka: Any = admin
    client = kafka.AdminClient({"bootstrap.servers": address})
    for made in client.create_topics([kafka.NewTopic(topic, _PARTITIONS) for topic in topics]).values():
        made.result(_SECONDS)


def _read_kafka(address: str, topic: str) -> Iterator[str]:
    from confluent_kafka import Consumer, TopicPartition  # noqa: PLC0415 - an extra

    consumer = Consumer({"bootstrap.servers": address, "group.id": "audit", "log_level": 0})
    try:
        for number in range(_PARTITIONS):
            low, high = consumer.get_watermark_offsets(TopicPartition(topic, number), timeout=_SECONDS)
            consumer.assign([TopicPartition(topic, number, low)])
            at = low
            while at < high:
                message = consumer.poll(_SECONDS)
                if message is None or message.error() is not None:
                    raise TimeoutError(f"Kafka gives nothing of {topic}[{number}] at {at} of {high}")
                at = int(message.offset() or 0) + 1
                headers: dict[str, Any] = dict(message.headers() or [])
                yield headers["ce_id"].decode()
    finally:
        consumer.close()


async def _make_nats(address: str, topics: Sequence[str]) -> None:
    import nats  # noqa: PLC0415 - an extra

    client = await nats.connect(address)
    for topic in topics:
        await client.jetstream().add_stream(name=topic, subjects=[topic])
    await client.close()


async def _read_nats(address: str, topic: str) -> list[str]:
    import nats  # noqa: PLC0415 - an extra

    client = await nats.connect(address)
    stream = client.jetstream()
    last = (await stream.stream_info(topic)).state.last_seq
    messages = [await stream.get_msg(topic, number) for number in range(1, last + 1)]
    await client.close()
    return [(each.headers or {})["ce-id"] for each in messages]


async def _make_rabbit(address: str, topics: Sequence[str]) -> None:
    import aio_pika  # noqa: PLC0415 - an extra

    async with await aio_pika.connect(address) as connection:
        channel = await connection.channel()
        for topic in topics:
            exchange = await channel.declare_exchange(topic, aio_pika.ExchangeType.FANOUT, durable=True)
            # A queue forgets what was taken from it, so the demo has one of its own.
            for name in (topic, _copy_of(topic)):
                await (await channel.declare_queue(name, durable=True)).bind(exchange)


async def _read_rabbit(address: str, topic: str) -> list[str]:
    import aio_pika  # noqa: PLC0415 - an extra

    async with await aio_pika.connect(address) as connection:
        queue = await (await connection.channel()).get_queue(_copy_of(topic))
        found = []
        while (message := await queue.get(no_ack=True, fail=False)) is not None:
            found.append(message.message_id or "")
    return found


def _copy_of(topic: str) -> str:
    return f"{topic}-copy"


def _read_redis(address: str, topic: str) -> Iterator[str]:
    from redis import Redis  # noqa: PLC0415 - an extra

    with Redis.from_url(address) as client:
        entries: Any = client.xrange(topic)
    for _, fields in entries:
        yield fields[b"ce-id"].decode()
