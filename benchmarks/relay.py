"""Relays: from tables to a broker, against a loop by hand with the same client, and from the commit to the broker."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from uuid import uuid4

import aio_pika
import nats
import psycopg
from confluent_kafka import Consumer, Producer
from redis.asyncio import Redis
from sqlalchemy import Engine, func, select, text

from benchmarks import bank, fill, handmade
from benchmarks.lab import Benchmark, Lab
from benchmarks.measure import Figure, Ratio, interleave
from benchmarks.peers.business import asyncpg_url
from outbox import Message, Outbox, Settings
from outbox.worker import Worker
from tests.relay import servers, targets

_SETTINGS = Settings()
_BATCH = 500
#: Messages of a round, by what each takes.
_COUNTS = {"kafka": 10_000, "nats": 10_000, "redis": 10_000, "rabbitmq": 3_000}
_RATE, _SECONDS = 500, 20
#: Workers of the peer.
_AT_ONCE = 8

#: Publishes a list of keys and bodies, and returns when all are confirmed.
Publish = Callable[[list[tuple[str | None, bytes]]], Awaitable[None]]


class RealKafka(targets.KafkaTarget):
    """A topic of a real Kafka."""

    def make(self, destination: str) -> None:
        """Make it."""
        targets.make_kafka_topic(self.server, destination)


def run(lab: Lab) -> Iterator[Figure]:
    """Measure each broker in turn."""
    engine = lab.engine("main")
    handmade.create(engine)
    with tempfile.TemporaryDirectory() as folder:
        for name, count in _COUNTS.items():
            place = Path(folder, name)
            place.mkdir()
            with _served(name, place) as target:
                yield from _measured(lab, engine, name, target, lab.scale(count, count // 10))
                yield _taken_in(lab, engine, name, target, lab.scale(count, count // 10))
                if name != "rabbitmq":
                    yield _latency(lab, engine, name, target)


def _served(name: str, place: Path) -> Any:
    from contextlib import contextmanager

    @contextmanager
    def serve() -> Iterator[targets.Target]:
        if name == "kafka":
            with servers.kafka_servers() as kafka:
                yield RealKafka(kafka.bootstrap)
        else:
            with targets.TARGETS[name].serve(place) as server:
                yield targets.TARGETS[name](server)

    return serve()


def _measured(lab: Lab, engine: Engine, name: str, target: targets.Target, count: int) -> Iterator[Figure]:
    lab.say(f"relay: {count} messages to {name}")
    cpu: dict[str, list[float]] = {"ours": [], "hand": [], "peer": []}

    def counted(arm: str, call: Callable[[], float]) -> float:
        began = time.process_time()
        rate = call()
        cpu[arm].append((time.process_time() - began) / count)
        return rate

    arms = {
        "ours": lambda: counted("ours", lambda: _relayed(engine, target, count)),
        "hand": lambda: counted("hand", lambda: asyncio.run(_by_hand(lab, name, target, count))),
    }
    if find_spec("faststream_outbox"):
        arms["peer"] = lambda: counted("peer", lambda: asyncio.run(_by_faststream(lab, name, target, count // 10)))
    rates = interleave(arms, lab.scale(3, 1))
    ratio = Ratio.of(rates["ours"], rates["hand"])
    spent = {arm: statistics.median(each) * 1e6 for arm, each in cpu.items() if each}
    ours = f"{statistics.median(rates['ours']):,.0f}/s, {spent['ours']:.0f} µs"
    yield Figure(
        f"{count} messages to {name} ÷ a loop by hand: DELETE … RETURNING {_BATCH}, publish, COMMIT",
        ours,
        f"{statistics.median(rates['hand']):,.0f}/s, {spent['hand']:.0f} µs",
        ratio,
        "≥ 0.8",
        ratio.median >= 0.8,
    )
    if "peer" in rates:
        beside = Ratio.of(rates["ours"], rates["peer"])
        theirs = f"{statistics.median(rates['peer']):,.0f}/s, {10 * spent['peer']:.0f} µs"
        yield Figure(f"the same to {name} ÷ faststream-outbox, its relay", ours, theirs, beside)


async def _by_faststream(lab: Lab, name: str, target: Any, count: int) -> float:
    """Return how many messages a second faststream-outbox relays, by a stacked publisher as its users write it."""
    from faststream_outbox import OutboxBroker, make_outbox_table
    from sqlalchemy import MetaData
    from sqlalchemy.ext.asyncio import create_async_engine

    engine = create_async_engine(asyncpg_url(lab.urls["main"]), pool_size=_AT_ONCE + 2)
    metadata = MetaData()
    table = make_outbox_table(metadata, table_name=f"peer_{uuid4().hex[:8]}")
    outbox, (broker, publisher) = OutboxBroker(engine, outbox_table=table, logger=None), _faststream(name, target)
    async with engine.begin() as connection:
        await connection.run_sync(metadata.create_all)
        orders = [bank.new_order() for _ in range(count)]
        await outbox.publish_batch(*orders, queue="q", session=connection)

    async def relay(body: dict[str, Any]) -> dict[str, Any]:
        return body

    outbox.subscriber("q", max_workers=_AT_ONCE, fetch_batch_size=_BATCH, min_fetch_interval=0.01)(publisher(relay))
    await broker.start()
    began = time.perf_counter()
    await outbox.start()
    left = count
    while left:
        await asyncio.sleep(0.02)
        async with engine.connect() as connection:
            left = (await connection.execute(select(func.count()).select_from(table))).scalar_one()
    rate = count / (time.perf_counter() - began)
    await outbox.stop()
    await broker.stop()
    await engine.dispose()
    return rate


def _faststream(name: str, target: Any) -> tuple[Any, Any]:
    """Return a broker of FastStream's, and a publisher to the target."""
    if name == "kafka":
        from faststream.kafka import KafkaBroker

        kafka = KafkaBroker(target.server, enable_idempotence=True, logger=None)
        return kafka, kafka.publisher(target.destination)
    if name == "nats":
        from faststream.nats import NatsBroker

        nats_broker = NatsBroker(target.url, logger=None)
        return nats_broker, nats_broker.publisher(target.destination, stream=target.destination)
    if name == "redis":
        from faststream.redis import RedisBroker

        redis_broker = RedisBroker(target.url)
        return redis_broker, redis_broker.publisher(stream=target.destination)
    from faststream.rabbit import RabbitBroker

    rabbit = RabbitBroker(target.url, logger=None)
    return rabbit, rabbit.publisher(target.destination, persist=True)


def _relayed(engine: Engine, target: targets.Target, count: int) -> float:
    """Return how many messages a second a worker relays, of those that wait when it starts."""
    topic = f"relay-{uuid4().hex[:8]}"
    fill.messages(engine, topic, count, _SETTINGS)
    outbox = Outbox(engine, settings=_SETTINGS)
    publisher = target.publisher()
    outbox.relay(topic, to=publisher, group=topic)
    with engine.connect() as connection:
        sql = text("SELECT count(*) FROM outbox.consumer_message WHERE consumer_group = :group AND status = 'consumed'")
        with Worker(outbox, roles=["consume"]):
            began = time.perf_counter()
            while connection.execute(sql, {"group": topic}).scalar_one() < count:
                connection.rollback()
                time.sleep(0.02)
            return count / (time.perf_counter() - began)


async def _by_hand(lab: Lab, name: str, target: Any, count: int) -> float:
    """Return how many messages a second a loop publishes that takes rows, publishes them, and commits."""
    with lab.engine("main").begin() as connection:
        connection.exec_driver_sql("TRUNCATE handmade")
        connection.exec_driver_sql(handmade.FILL, (count,))
    with lab.psycopg("main") as connection:
        async with _PUBLISHERS[name](target) as publish:
            began, done = time.perf_counter(), 0
            while done < count:
                done += await _step(connection, publish)
            return count / (time.perf_counter() - began)


async def _step(connection: psycopg.Connection[Any], publish: Publish) -> int:
    import json

    with connection.transaction():
        rows = connection.execute(handmade.TAKE, (_BATCH,)).fetchall()
        await publish([(key, json.dumps(body).encode()) for _, _, key, body in rows])
    return len(rows)


@asynccontextmanager
async def _kafka(target: RealKafka) -> AsyncIterator[Publish]:
    producer = Producer({"bootstrap.servers": target.server, "enable.idempotence": True})
    failures: list[Any] = []

    def report(error: Any, _: Any) -> None:
        if error is not None:
            failures.append(error)

    async def publish(messages: list[tuple[str | None, bytes]]) -> None:
        for key, body in messages:
            producer.produce(target.destination, body, key, on_delivery=report)
        producer.flush()
        assert not failures

    yield publish


@asynccontextmanager
async def _nats(target: targets.NatsTarget) -> AsyncIterator[Publish]:
    client = await nats.connect(target.url)
    stream = client.jetstream()

    async def publish(messages: list[tuple[str | None, bytes]]) -> None:
        headers = [{"Nats-Msg-Id": str(uuid4()), "key": key or ""} for key, _ in messages]
        sent = (
            stream.publish(target.destination, body, headers=h) for h, (_, body) in zip(headers, messages, strict=True)
        )
        await asyncio.gather(*sent)

    yield publish
    await client.close()


@asynccontextmanager
async def _redis(target: targets.RedisTarget) -> AsyncIterator[Publish]:
    client = Redis.from_url(target.url)

    async def publish(messages: list[tuple[str | None, bytes]]) -> None:
        async with client.pipeline(transaction=False) as pipeline:
            for key, body in messages:
                pipeline.xadd(target.destination, {"id": str(uuid4()), "key": key or "", "body": body})
            await pipeline.execute()

    yield publish
    await client.aclose()


@asynccontextmanager
async def _rabbit(target: targets.RabbitTarget) -> AsyncIterator[Publish]:
    async with await aio_pika.connect(target.url) as connection:
        channel = await connection.channel(publisher_confirms=True, on_return_raises=True)

        async def publish(messages: list[tuple[str | None, bytes]]) -> None:
            mode = aio_pika.DeliveryMode.PERSISTENT
            sent = [aio_pika.Message(body, message_id=str(uuid4()), delivery_mode=mode) for _, body in messages]
            await asyncio.gather(*(channel.default_exchange.publish(each, target.destination) for each in sent))

        yield publish


_PUBLISHERS: dict[str, Any] = {"kafka": _kafka, "nats": _nats, "redis": _redis, "rabbitmq": _rabbit}


def _taken_in(lab: Lab, engine: Engine, name: str, target: Any, count: int) -> Figure:
    """Measure from a broker into a database, against a loop by hand with the same client."""
    lab.say(f"intake: {count} messages of {name}")
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE IF NOT EXISTS taken (id uuid PRIMARY KEY, body bytea NOT NULL)")
    arms: dict[str, Callable[[], float]] = {
        "ours": lambda: _by_intake(engine, target, name, count),
        "hand": lambda: _by_loop(lab, target, name, count),
    }
    rates = interleave(arms, lab.scale(3, 1))
    ratio = Ratio.of(rates["ours"], rates["hand"])
    ours, hand = (f"{statistics.median(rates[arm]):,.0f}/s" for arm in arms)
    what = f"{count} messages of {name} taken in ÷ a loop by hand: {_BATCH} of them, INSERT … ON CONFLICT, COMMIT, ack"
    return Figure(what, ours, hand, ratio, "≥ 0.8", ratio.median >= 0.8)


def _fill(name: str, target: Any, count: int) -> None:
    """Have messages wait at a destination of their own."""
    target.destination = f"t{uuid4().hex[:10]}"
    target.make(target.destination)

    async def publish() -> None:
        async with _PUBLISHERS[name](target) as publishing:
            for _ in range(0, count, _BATCH):
                await publishing([(f"key {number}", b"x" * 300) for number in range(min(_BATCH, count))])

    asyncio.run(publish())


def _by_intake(engine: Engine, target: Any, name: str, count: int) -> float:
    """Return how many messages a second a worker takes in, of those that wait when it starts."""
    _fill(name, target, count)
    topic, outbox = f"intake-{uuid4().hex[:8]}", Outbox(engine, settings=_SETTINGS)
    outbox.intake(topic, source=target.source(), id_from=(lambda _: str(uuid4())) if name == "rabbitmq" else None)
    with engine.connect() as connection:
        sql = text("SELECT count(*) FROM outbox.half_message WHERE topic = :topic")
        with Worker(outbox, roles=["intake"]):
            began = time.perf_counter()
            while connection.execute(sql, {"topic": topic}).scalar_one() < count:
                connection.rollback()
                time.sleep(0.02)
            return count / (time.perf_counter() - began)


def _by_loop(lab: Lab, target: Any, name: str, count: int) -> float:
    """Return how many messages a second a loop by hand takes in."""
    _fill(name, target, count)
    return asyncio.run(_taken_by_hand(lab, name, target, count))


async def _taken_by_hand(lab: Lab, name: str, target: Any, count: int) -> float:
    insert = "INSERT INTO taken SELECT * FROM unnest(%s::uuid[], %s::bytea[]) ON CONFLICT DO NOTHING"
    with lab.psycopg("main") as connection:
        async with _TAKERS[name](target) as take:
            began, done = time.perf_counter(), 0
            while done < count:
                bodies, confirm = await take()
                if bodies:
                    connection.execute(insert, ([uuid4() for _ in bodies], bodies))
                    connection.commit()
                    await confirm()
                    done += len(bodies)
            return count / (time.perf_counter() - began)


@asynccontextmanager
async def _take_kafka(target: RealKafka) -> AsyncIterator[Any]:
    config = {"bootstrap.servers": target.server, "group.id": uuid4().hex, "auto.offset.reset": "earliest"}
    consumer = Consumer({**config, "enable.auto.commit": False})
    consumer.subscribe([target.destination])

    async def take() -> Any:
        found = consumer.consume(_BATCH, 0.2)

        async def confirm() -> None:
            consumer.commit(asynchronous=False)

        return [each.value() for each in found if each.error() is None], confirm

    yield take
    consumer.close()


@asynccontextmanager
async def _take_nats(target: targets.NatsTarget) -> AsyncIterator[Any]:
    client = await nats.connect(target.url)
    reader = await client.jetstream().pull_subscribe(target.destination, durable="hand", stream=target.destination)

    async def take() -> Any:
        found = await reader.fetch(_BATCH, timeout=5)

        async def confirm() -> None:
            for each in found:
                await each.ack()
            await client.flush()

        return [each.data for each in found], confirm

    yield take
    await client.close()


@asynccontextmanager
async def _take_redis(target: targets.RedisTarget) -> AsyncIterator[Any]:
    client = Redis.from_url(target.url)
    await client.xgroup_create(target.destination, "hand", id="0", mkstream=True)

    async def take() -> Any:
        found: Any = await client.xreadgroup("hand", "hand", {target.destination: ">"}, count=_BATCH, block=1000)
        entries = list(found[0][1]) if found else []

        async def confirm() -> None:
            await client.xack(target.destination, "hand", *(entry for entry, _ in entries))

        return [fields[b"body"] for _, fields in entries], confirm

    yield take
    await client.aclose()


@asynccontextmanager
async def _take_rabbit(target: targets.RabbitTarget) -> AsyncIterator[Any]:
    async with await aio_pika.connect(target.url) as connection:
        channel = await connection.channel()
        await channel.set_qos(prefetch_count=_BATCH)
        arrived: asyncio.Queue[Any] = asyncio.Queue()
        await (await channel.get_queue(target.destination)).consume(arrived.put)

        async def take() -> Any:
            found = [await arrived.get()]
            while len(found) < _BATCH and not arrived.empty():
                found.append(arrived.get_nowait())

            async def confirm() -> None:
                await found[-1].ack(multiple=True)

            return [each.body for each in found], confirm

        yield take


_TAKERS: dict[str, Any] = {"kafka": _take_kafka, "nats": _take_nats, "redis": _take_redis, "rabbitmq": _take_rabbit}


def _latency(lab: Lab, engine: Engine, name: str, target: targets.Target) -> Figure:
    """Measure from the commit to the confirmation, at a fixed rate, one message a transaction."""
    lab.say(f"relay: latency to {name}")
    topic, committed, confirmed = f"late-{uuid4().hex[:8]}", dict[Any, float](), dict[Any, float]()
    outbox, publisher = Outbox(engine, settings=_SETTINGS), target.publisher()
    publish = publisher.publish

    async def timed(messages: list[Message], /) -> Any:
        answers = await publish(messages)
        now = time.monotonic()
        confirmed.update((each.id, now) for each in messages)
        return answers

    publisher.publish = timed  # type: ignore[method-assign]  # what is measured
    outbox.relay(topic, to=publisher, group=topic)
    count = _RATE * lab.scale(_SECONDS, 4)

    def send() -> None:
        with engine.connect() as connection:
            begin_at = time.monotonic() + 2
            for number in range(count):
                time.sleep(max(begin_at + number / _RATE - time.monotonic(), 0))
                order = bank.new_order()
                with connection.begin():
                    id_ = outbox.send(connection, topic, order, key=order["receiver"])
                committed[id_] = time.monotonic()

    with Worker(outbox):
        sender = threading.Thread(target=send)
        sender.start()
        sender.join()
        deadline = time.monotonic() + 30
        while len(confirmed) < count and time.monotonic() < deadline:
            time.sleep(0.05)
    late = sorted((confirmed[each] - at) * 1000 for each, at in list(committed.items())[_RATE:])
    p50, p99 = late[len(late) // 2], late[len(late) * 99 // 100]
    return Figure(f"commit → confirmed by {name}, at {_RATE}/s", f"p50 {p50:.1f} ms, p99 {p99:.1f} ms")


BENCHMARK = Benchmark(run)
