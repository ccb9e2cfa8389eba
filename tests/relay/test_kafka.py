"""Kafka, a real one: what a topic refuses, what isn't there, what isn't allowed, and a broker that is killed."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka import admin as kafka_admin
from sqlalchemy import Engine

from outbox import Outbox, Settings
from outbox.consumer.control.gate import Gate
from outbox.consumer.outside.consumer import OutsideConsumer
from outbox.relay.intake.comparison import compare
from outbox.relay.kafka import KafkaPublisher, KafkaSource
from outbox.worker.connections import WorkerDatabase
from tests.consumer.test_control import Clock, control
from tests.kit import wait_until
from tests.kit.bench import Bench
from tests.relay.servers import KafkaServers, kafka_servers
from tests.relay.targets import KafkaTarget, make_kafka_topic
from tests.relay.test_targets import recover

Relaying = Callable[..., OutsideConsumer]


@pytest.fixture(scope="module")
def kafka() -> Iterator[KafkaServers]:
    """One broker for this file."""
    with kafka_servers() as kafka:
        yield kafka


class RealTarget(KafkaTarget):
    """A topic of a real Kafka; ``config`` is its configuration."""

    def __init__(self, kafka: KafkaServers, **config: str) -> None:
        self.config = config
        super().__init__(kafka.bootstrap)

    def make(self, destination: str) -> None:
        """Make the topic, with one partition."""
        make_kafka_topic(self.server, destination, 1, **self.config)


def gated(bench: Bench, consumer: OutsideConsumer) -> Clock:
    """Have a relay's gate go by a clock of the test."""
    clock = Clock()
    consumer.gate = Gate(consumer.subscription, bench.settings, consumer._queues.keys(), clock)
    return clock


def test_what_is_too_large_takes_no_other_along(bench: Bench, relaying: Relaying, kafka: KafkaServers) -> None:
    """The limit of a topic counts for a batch of the client's: those that fit by themselves are published."""
    target = RealTarget(kafka, **{"max.message.bytes": "2000"})
    bench.app.declare_topic("t", 1)
    small = bench.send(*(b"s" * 300 for _ in range(10)), key=None)
    large = bench.send(b"l" * 3000, key=None)
    bench.consume(relaying(target.publisher()))
    inbox = bench.inbox()
    assert {inbox[each].status for each in small} == {"consumed"}
    assert inbox[large[0]].status == "parked"
    assert [each.body for each in target.read()].count(b"s" * 300) >= 10


def test_a_compacted_topic_refuses_what_has_no_key(bench: Bench, relaying: Relaying, kafka: KafkaServers) -> None:
    """That is the message's own fault."""
    target = RealTarget(kafka, **{"cleanup.policy": "compact"})
    ids = bench.send(1, key=None) + bench.send(2, key="k")
    bench.consume(relaying(target.publisher()))
    assert [bench.inbox()[each].status for each in ids] == ["parked", "consumed"]


def test_a_topic_that_comes_later(bench: Bench, relaying: Relaying, kafka: KafkaServers) -> None:
    """Until then no message pays."""
    topic = f"late-{uuid4().hex[:8]}"
    consumer = relaying(KafkaPublisher({"bootstrap.servers": kafka.bootstrap}, topic, timeout=3.0))
    clock = gated(bench, consumer)
    bench.send(*range(5), key=None)
    bench.consume(consumer)
    assert (bench.statuses(), control(bench).state) == ([], "open")
    make_kafka_topic(kafka.bootstrap, topic)
    recover(bench, consumer, clock, 5)


def test_without_the_right_to_write(bench: Bench, relaying: Relaying, kafka: KafkaServers) -> None:
    """Until it is granted no message pays; the same client goes on then. A wrong password is told as what it is."""
    topic = f"acl-{uuid4().hex[:8]}"
    make_kafka_topic(kafka.bootstrap, topic)
    sasl: dict[str, Any] = {"bootstrap.servers": kafka.report["sasl"], "security.protocol": "SASL_PLAINTEXT"}
    sasl |= {"sasl.mechanisms": "PLAIN", "sasl.username": "alice", "log_level": 0}
    bench.send(*range(5), key=None)
    consumer = relaying(KafkaPublisher({**sasl, "sasl.password": "wrong"}, topic, timeout=3.0))
    bench.consume(consumer)
    assert "uthentication" in control(bench).because
    assert "wrong" not in control(bench).because
    consumer = relaying(KafkaPublisher({**sasl, "sasl.password": "alice-secret"}, topic, timeout=5.0))
    clock = gated(bench, consumer)
    bench.run("UPDATE outbox.group_control SET trial_at = clock_timestamp() - interval '1 ms'")
    bench.consume(consumer)
    assert "uthoriz" in control(bench).because
    assert bench.statuses() == []
    admin: Any = kafka_admin
    names = admin.ResourceType.TOPIC, topic, admin.ResourcePatternType.LITERAL, "User:alice", "*"
    rights = admin.AclOperation.WRITE, admin.AclOperation.DESCRIBE
    bindings = [admin.AclBinding(*names, each, admin.AclPermissionType.ALLOW) for each in rights]
    client = admin.AdminClient({"bootstrap.servers": kafka.bootstrap})
    for granted in client.create_acls(bindings).values():
        granted.result(60)
    recover(bench, consumer, clock, 5)


def test_a_broker_that_is_killed(bench: Bench, relaying: Relaying, kafka: KafkaServers) -> None:
    """A time-out leaves open what it has; all are there in the end, in the order of their key."""
    target = RealTarget(kafka)
    consumer = relaying(
        KafkaPublisher({"bootstrap.servers": kafka.bootstrap, "log_level": 0}, target.destination, timeout=3)
    )
    clock = gated(bench, consumer)
    bench.send(0)
    bench.consume(consumer)
    kafka.signal(1, signal.SIGKILL)
    bench.send(*range(1, 6))
    assert not bench.consume(consumer).done
    kafka.restart()
    recover(bench, consumer, clock, 6)
    assert list(dict.fromkeys(each.value for each in target.read())) == list(range(6))


def test_between_two_owners_each_is_stored_once(
    new_engine: Callable[[], Engine], settings: Settings, kafka: KafkaServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Members of one group come and go; what one has taken and not stored, the next one takes."""
    monkeypatch.setattr("outbox.relay.intake.intake.BATCH", 20)
    monkeypatch.setattr("outbox.relay.intake.intake.WAIT", 0.2)
    topic = f"many-{uuid4().hex[:8]}"
    make_kafka_topic(kafka.bootstrap, topic, 4)
    producer = Producer({"bootstrap.servers": kafka.bootstrap})
    for number in range(600):
        producer.produce(topic, str(number), str(number % 50))
    assert producer.flush(60) == 0
    config = {"bootstrap.servers": kafka.bootstrap, "session.timeout.ms": 6000, "max.poll.interval.ms": 6000}
    engine = new_engine()
    workers = [Outbox(engine, settings=settings) for _ in range(3)]
    for each in workers:
        each.intake("taken", source=KafkaSource(config, [topic], group="g"))
    connection = WorkerDatabase(engine).connect()
    first, second, third = (each.intakes[0] for each in workers)
    try:
        wait_until(lambda: first.source.take(40, 1.0), "the first has some, which it never stores")
        second.source.take(1, 0.2)  # it asks to be a member, by which the first loses some of what it has
        first.source.take(40, 0.2)
        first.source.close()
        wait_until(lambda: second.once(connection, "outbox"), "the second goes on")
        third.source.take(1, 0.2)
        second.once(connection, "outbox")
        second.source.close()

        def count() -> bool:
            third.once(connection, "outbox")
            with engine.connect() as other:
                return int(other.exec_driver_sql("SELECT count(*) FROM outbox.half_message").scalar_one()) >= 600

        wait_until(count, "all are stored")
    finally:
        for worker in (first, second, third):
            worker.source.close()
        connection.close()
    with engine.connect() as other:
        sql = "SELECT DISTINCT convert_from(body, 'UTF8')::int FROM outbox.half_message ORDER BY 1"
        stored = [body for (body,) in other.exec_driver_sql(sql)]
    assert stored == list(range(600))


def _murmur2(raw: bytes) -> int:
    """Return the hash by which Kafka's own clients choose a partition (`org.apache.kafka.common.utils.Utils`)."""
    m, mask = 0x5BD1E995, 0xFFFFFFFF
    h = (0x9747B28C ^ len(raw)) & mask
    for i in range(0, len(raw) & ~3, 4):
        k = int.from_bytes(raw[i : i + 4], "little") * m & mask
        h = (h * m & mask) ^ ((k ^ k >> 24) * m & mask)
    if rest := raw[len(raw) & ~3 :]:
        h = (h ^ int.from_bytes(rest, "little")) * m & mask
    h = (h ^ h >> 13) * m & mask
    return (h ^ h >> 15) & 0x7FFFFFFF


def test_keys_go_where_other_clients_put_them(bench: Bench, relaying: Relaying, kafka: KafkaServers) -> None:
    """By murmur2, also an empty key; no key is none, and an empty body is no tombstone."""
    topic, count = f"keys-{uuid4().hex[:8]}", 4
    make_kafka_topic(kafka.bootstrap, topic, count)
    assert _murmur2(b"foobar") == -790332482 & 0x7FFFFFFF  # of Kafka's tests
    keys = [f"конто {number}" for number in range(20)]
    for key in keys:
        bench.send(key, key=key)
    bench.send(b"", key=None)
    bench.consume(relaying(KafkaPublisher({"bootstrap.servers": kafka.bootstrap}, topic)))
    consumer = Consumer({"bootstrap.servers": kafka.bootstrap, "group.id": "reader", "auto.offset.reset": "earliest"})
    consumer.assign([TopicPartition(topic, number, 0) for number in range(count)])
    found: list[Any] = []
    while len(found) <= len(keys):
        found += [each for each in [consumer.poll(30)] if each is not None]
    consumer.close()
    partitions = {each.key(): each.partition() for each in found if each.key() is not None}
    assert partitions == {key.encode(): _murmur2(key.encode()) % count for key in keys}
    (none,) = [each for each in found if each.key() is None]
    assert none.value() == b""


def test_what_is_missing_of_a_topic_with_transactions(
    new_engine: Callable[[], Engine], settings: Settings, kafka: KafkaServers
) -> None:
    """Their markers have offsets, and are no messages: what was rolled back is never taken in, or missed."""
    topic = f"transactions-{uuid4().hex[:8]}"
    make_kafka_topic(kafka.bootstrap, topic, 1)
    producer = Producer({"bootstrap.servers": kafka.bootstrap, "transactional.id": topic})
    producer.init_transactions(60)
    for number in range(6):
        producer.begin_transaction()
        producer.produce(topic, b"%d" % number)
        producer.flush(60)
        (producer.commit_transaction if number % 2 else producer.abort_transaction)(60)
    app = Outbox(new_engine(), settings=settings)
    source = KafkaSource({"bootstrap.servers": kafka.bootstrap, "session.timeout.ms": 6000}, [f"^{topic}$"], group="g")
    app.intake("taken", source=source)
    engine: Any = app.engine
    with WorkerDatabase(engine).connect() as connection:
        taken = 0
        while taken < 3:
            taken += app.intakes[0].once(connection, "outbox").taken
        assert compare(connection, settings, app.intakes[0]).known == 3
        with engine.begin() as other:
            other.exec_driver_sql("DELETE FROM outbox.half_message WHERE body = '3'")
        found = compare(connection, settings, app.intakes[0])
    source.close()
    assert (found.confirmed, found.lost) == (3, 1)
    assert f"{topic}[0]@" in found.missing[0].origin
