"""What is taken in from a broker, on a real server of each kind."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer
from redis import Redis
from sqlalchemy import Engine
from sqlalchemy.exc import OperationalError

from outbox import Message, Outbox, Settings, Topic, Worker, testing
from outbox.consumer.outside.consumer import OutsideConsumer
from outbox.errors import InvalidHandler
from outbox.relay.intake.comparison import compare
from outbox.relay.intake.intake import REFUSED_HEADER
from outbox.relay.intake.source import IntakeSource, Received
from outbox.relay.kafka import KafkaSource
from outbox.telemetry.events import IntakeMissing, IntakeRefused
from outbox.telemetry.hooks import TelemetryEvent
from outbox.worker.connections import WorkerDatabase
from tests.kit import wait_until
from tests.kit.bench import Bench
from tests.relay.targets import TARGETS, NatsTarget, RabbitTarget, RedisTarget, Target

Relaying = Callable[..., OutsideConsumer]


@pytest.fixture(scope="module", params=["kafka", "nats", "redis", "rabbitmq"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Any]]:
    """A server of each kind, one after the other."""
    with TARGETS[request.param].serve(tmp_path_factory.mktemp(request.param)) as server:
        yield request.param, server


@pytest.fixture
def target(served: tuple[str, Any]) -> Target:
    """A destination of the test's own."""
    kind, server = served
    return TARGETS[kind](server)


class Receiver:
    """Another service, that takes a destination in as its topic `taken`; pass by pass."""

    def __init__(self, engine: Engine, settings: Settings, source: IntakeSource, **options: Any) -> None:
        self.app = Outbox(engine, settings=settings)
        self.app.intake("taken", source=source, **options)
        self.source = source
        self.connection = WorkerDatabase(engine).connect()
        self.handled: list[Message] = []

        @self.app.consumer("taken", group="books", ordered="key")
        def handle(message: Message, _: Any) -> None:
            self.handled.append(message)

    def take(self) -> int:
        """Make passes until one finds nothing; return how many messages were taken."""
        taken = 0
        for _ in range(30):
            counts = self.app.intakes[0].once(self.connection, "outbox")
            taken += counts.taken
            if not counts and taken:
                break
        return taken

    def handle(self) -> list[Message]:
        """Have all that was taken handled."""
        testing.drain(self.app)
        return self.handled

    def close(self) -> None:
        """Give up what is open."""
        self.source.close()
        self.connection.close()


@pytest.fixture
def receiving(new_engine: Callable[[], Engine], settings: Settings) -> Iterator[Callable[..., Receiver]]:
    """A function that makes a receiver, by default on one database."""
    engine, made = new_engine(), list[Receiver]()

    def make(source: IntakeSource, **options: Any) -> Receiver:
        made.append(Receiver(engine, options.pop("settings", settings), source, **options))
        return made[-1]

    yield make
    for each in made:
        with suppress(Exception):
            each.close()


def test_from_one_database_to_another(bench: Bench, relaying: Relaying, receiving: Any, target: Target) -> None:
    """Each once, in the order of its key, with its id, key, tag, headers, content type and body."""
    ids: list[UUID] = []
    for number in range(120):
        options: Any = {"key": f"ключ {number % 10}", "tag": "t", "headers": {"note": "Grüße 100 %"}}
        ids += bench.send({"number": number}, **options)
    ids += bench.send(b"\xff\x00", key=None)
    bench.consume(relaying(target.publisher()))
    receiver = receiving(target.source())
    assert receiver.take() == 121
    handled = receiver.handle()
    assert sorted(each.id for each in handled) == sorted(ids)
    by_key = defaultdict(list)
    for each in handled:
        if each.key is not None:
            by_key[each.key].append(each.body["number"])
            assert (each.tag, each.headers["note"], each.content_type) == ("t", "Grüße 100 %", "application/json")
    assert [sorted(numbers) for numbers in by_key.values()] == list(by_key.values())
    assert sorted(by_key) == sorted({f"ключ {number}" for number in range(10)})
    (plain,) = [each for each in handled if each.key is None]
    assert (plain.body, plain.content_type) == (b"\xff\x00", "application/octet-stream")


def test_what_comes_again_is_stored_once(bench: Bench, relaying: Relaying, receiving: Any, target: Target) -> None:
    """A worker that died before it confirmed, and an operator's resend on the other side."""
    ids = bench.send(1, 2, 3)
    consumer = relaying(target.publisher())
    bench.consume(consumer)
    dying = target.source()
    assert len(_taken(dying)) >= 1
    dying.close()
    receiver = receiving(target.source())
    assert receiver.take() == 3
    bench.resend(ids[0])
    bench.consume(consumer)
    bench.app.operator.reset_group("g", "t", "first", by="me", why="test")
    bench.consume(consumer)
    assert receiver.take() >= 3
    assert sorted(each.body for each in receiver.handle()) == [1, 2, 3]


def _taken(source: IntakeSource) -> list[Received]:
    return list(wait_until(lambda: source.take(10, 1.0), "something is taken"))


def test_while_the_database_is_away_the_same_comes_again(receiving: Any, target: Target) -> None:
    """Nothing is confirmed that isn't stored."""
    target.put(b"1", b"2", headers={"ce-id": str(uuid4()), "ce_id": str(uuid4())})
    receiver = receiving(target.source(), id_from=lambda received: f"n{received.body.decode()}")
    intake = receiver.app.intakes[0]
    wait_until(lambda: intake.source.take(10, 1.0), "something is taken")
    pid = receiver.connection.exec_driver_sql("SELECT pg_backend_pid()").scalar()
    receiver.connection.rollback()
    with receiver.app.engine.connect() as connection:
        connection.exec_driver_sql(f"SELECT pg_terminate_backend({pid})")
    with pytest.raises(OperationalError):
        intake.once(receiver.connection, "outbox")
    receiver.connection.close()
    receiver.connection = WorkerDatabase(receiver.app.engine).connect()
    assert receiver.take() == 2
    assert sorted(each.body for each in receiver.handle()) == [b"1", b"2"]


def test_without_ids(receiving: Any, target: Target) -> None:
    """Where the broker has a message tells it from others. RabbitMQ has no such thing: most clients give one an id."""
    target.put(b"same", b"same", headers={"kind": "x"})
    receiver = receiving(target.source())
    with pytest.raises(InvalidHandler, match="id_from"):
        receiver.app.intakes[0].id_of(Received("", b"x"))
    assert receiver.take() == 2
    first = {each.id for each in receiver.handle()}
    assert len(first) == 2
    if target.__class__.__name__ != "RabbitTarget":  # of which nothing is left
        again = receiving(target.source(group="other"))
        assert again.take() == 2
        assert {each.id for each in receiver.handle()} == first


def test_what_cannot_be_a_message_is_stored_as_it_is(
    receiving: Any, target: Target, heard: list[TelemetryEvent]
) -> None:
    """Its handler sees what was wrong, the broker isn't held up, and it is told."""
    headers = {"ce_id": str(uuid4()), "ce-id": "", "note": "x" * 20_000, "outbox-dedupe": "y"}
    headers["ce-id"] = headers["ce_id"]
    target.put(b"\xffbody", headers=headers)
    receiver = receiving(target.source())
    assert receiver.take() == 1
    (message,) = receiver.handle()
    assert message.body == b"\xffbody"
    assert "headers" in message.headers[REFUSED_HEADER]
    (told,) = [each for each in heard if isinstance(each, IntakeRefused)]
    assert told.topic == "taken"


def test_one_message_in_two_topics(receiving: Any, target: Target) -> None:
    """Its id is that of one of them; in the other one it has an id that follows from it, and isn't lost."""
    name = "ce_id" if target.__class__.__name__ in {"KafkaTarget", "RedisTarget"} else "ce-id"
    given = str(uuid4())
    target.put(b"1", headers={name: given})
    receiver = receiving(target.source())
    assert receiver.take() == 1
    with receiver.app.engine.begin() as connection:
        connection.exec_driver_sql("UPDATE outbox.half_message SET topic = 'other'")
    for _ in range(2):
        target.put(b"1", headers={name: given})
    assert receiver.take() == 2
    with receiver.app.engine.connect() as connection:
        rows = connection.exec_driver_sql("SELECT topic, id::text FROM outbox.half_message ORDER BY topic").all()
    assert [topic for topic, _ in rows] == ["other", "taken"]
    assert rows[0][1] == given


def test_a_model_is_the_readers_business(receiving: Any, target: Target, heard: list[TelemetryEvent]) -> None:
    """A body that doesn't fit the topic's model is stored, and parked where it is read; a codec doesn't touch it."""
    receiver = receiving(target.source(), id_from=lambda received: received.body.decode())
    receiver.app.codec("application/x-csv", encode=lambda body: b"encoded", decode=lambda raw: raw.decode().split(","))
    receiver.app.topics["taken"] = Topic("taken", int)
    target.put(b"17", b"seventeen", headers={"content-type": "application/json"})
    target.put(b"1,2", headers={"content-type": "application/x-csv"})
    assert receiver.take() == 3
    with receiver.app.engine.connect() as connection:
        bodies = connection.exec_driver_sql("SELECT body FROM outbox.half_message").scalars()
        assert sorted(map(bytes, bodies)) == [b"1,2", b"17", b"seventeen"]
    assert not [each for each in heard if isinstance(each, IntakeRefused)]


def test_a_worker_takes_in(new_engine: Callable[[], Engine], settings: Settings, target: Target) -> None:
    """By the role `intake`; at its end the source is closed, and the next worker goes on."""
    engine, handled = new_engine(), list[bytes]()
    app = Outbox(engine, settings=settings)
    app.intake("taken", source=target.source(), id_from=lambda received: received.body.decode())

    @app.consumer("taken", group="books")
    def handle(message: Message, _: Any) -> None:
        handled.append(message.body)

    for body in (b"a", b"b"):
        with Worker(app) as worker:
            wait_until(lambda: any("take in" in name for name in worker.health()), "it is planned")
            target.put(body)
            wait_until(lambda body=body: body in handled, "it is handled")  # type: ignore[misc]  # of this round
    assert handled == [b"a", b"b"]


def test_what_cannot_be_declared(engine: Engine, settings: Settings) -> None:
    """It is refused where it is declared."""
    app = Outbox(engine, settings=settings)
    with pytest.raises(InvalidHandler, match="no IntakeSource"):
        app.intake("t", source=object())  # type: ignore[arg-type]  # what is tested
    from outbox.relay.nats import NatsSource

    source = KafkaSource({"bootstrap.servers": "x"}, ["a"], group="g")
    with pytest.raises(InvalidHandler, match="inbox_retention"):
        app.intake("t", source=source, broker_retention=10 * 365 * 86400)
    with pytest.raises(InvalidHandler, match=r"group.id"):
        KafkaSource({"group.id": "x"}, ["a"], group="g")
    with pytest.raises(InvalidHandler, match="list"):
        KafkaSource({}, "a", group="g")
    with pytest.raises(InvalidHandler, match="start"):
        NatsSource("x", "s", group="g", start="later")


def test_entries_that_were_trimmed_are_told(receiving: Any, tmp_path: Path, heard: list[TelemetryEvent]) -> None:
    """Redis knows of them only that they were there: they don't come again and again, and are no messages."""
    with RedisTarget.serve(tmp_path) as server:
        target = RedisTarget(server)
        target.put(b"1", b"2", b"3")
        dying = target.source()
        assert len(dying.take(10, 1.0)) == 3
        dying.close()
        with Redis.from_url(target.url) as client:
            client.xtrim(target.destination, maxlen=1, approximate=False)
        receiver = receiving(target.source())
        assert receiver.take() == 1
        assert len([each for each in heard if isinstance(each, IntakeRefused)]) == 2
        receiver.source.close()
        assert len(receiver.source.take(10, 0.1)) == 0


# --- what a fresh pair of eyes has found: without a broker ----------------------------------------------------------


class Given:
    """A source that gives messages until they are confirmed."""

    name = "given"

    def __init__(self, *received: Received) -> None:
        self.received: list[Received] = list(received)
        self.confirmed = 0

    def take(self, *_: float) -> list[Received]:
        """Return them."""
        return self.received

    def confirm(self) -> None:
        """Give no more."""
        self.confirmed += 1
        self.received = []

    def close(self) -> None:
        """Do nothing."""


def stored(receiver: Receiver) -> list[tuple[str | None, bytes]]:
    """Return key and body of each message."""
    engine: Any = receiver.app.engine
    with engine.connect() as connection:
        rows = connection.exec_driver_sql("SELECT key, body FROM outbox.half_message ORDER BY length(body), body").all()
    return [(key, bytes(body)) for key, body in rows]


HOSTILE = {
    "too large": [Received("1", b"x" * (5 * 2**20), {}, "k")],
    "no ids": [Received(str(number), b"x", {"ce_id": ""}) for number in range(3)],
    "NUL everywhere": [Received("a\0b", b"x", {"note": "\0", "ce-id": "\0"}, "k")],
    "lone surrogates": [Received("\ud800", b"x", {"ce_id": "\udfff", "ce_source": "\ud800", "n": "\ud800"})],
    "a type that is none": [Received("1", b"x", {"content-type": "no type"}, "k")],
    "a key too long": [Received("1", b"x", {}, "k" * 300)],
    "headers of ours": [Received("1", b"x", {"outbox-dedupe": "a", "outbox-encoding": "gzip", "intake-refused": "no"})],
}


@pytest.mark.parametrize("given", HOSTILE)
def test_nothing_holds_it_up(receiving: Any, given: str) -> None:
    """Whatever comes is stored, each once, and confirmed."""
    source = Given(*HOSTILE[given])
    receiver = receiving(source)
    assert receiver.app.intakes[0].once(receiver.connection, "outbox").done == len(HOSTILE[given])
    assert source.confirmed == 1
    assert len(stored(receiver)) == len(HOSTILE[given])
    (message, *_) = receiver.handle()
    if given == "too large":
        assert (len(message.body), message.key) == (4 * 2**20, "k")
    if given == "headers of ours":
        assert message.headers == {}


def test_a_list_that_no_transaction_takes_is_stored_in_several(receiving: Any) -> None:
    """Each of its messages is one that may be sent."""
    receiver = receiving(Given(*(Received(str(number), b"x" * (4 * 2**20 - 1)) for number in range(70))))
    assert receiver.app.intakes[0].once(receiver.connection, "outbox").done == 70
    assert len(stored(receiver)) == 70


@pytest.mark.parametrize("answer", [None, "", 3, ValueError("no")])
def test_an_id_that_the_application_cannot_tell(receiving: Any, answer: Any) -> None:
    """Where the broker has the message tells it from others then, and its handler sees what was wrong."""

    def id_from(received: Received) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    receiver = receiving(Given(Received("1", b"a"), Received("2", b"b")), id_from=id_from)
    receiver.app.intakes[0].once(receiver.connection, "outbox")
    assert {message.headers[REFUSED_HEADER] != "" for message in receiver.handle()} == {True}
    assert [body for _, body in stored(receiver)] == [b"a", b"b"]


def test_one_source_has_one_intake(engine: Engine, settings: Settings) -> None:
    """What one confirms could be what the other has taken; two of one name couldn't be told from each other."""
    app, source = Outbox(engine, settings=settings), Given()
    app.intake("a", source=source)
    with pytest.raises(InvalidHandler, match="has an intake already"):
        app.intake("b", source=source)
    with pytest.raises(InvalidHandler, match="has an intake already"):
        app.intake("a", source=Given())


def test_attributes_in_any_case(receiving: Any) -> None:
    """And those of other senders are kept as headers."""
    given = str(uuid4())
    receiver = receiving(Given(Received("1", b"x", {"Ce-Id": given, "CE-partitionkey": "k", "ce-dataschema": "s"})))
    receiver.app.intakes[0].once(receiver.connection, "outbox")
    (message,) = receiver.handle()
    assert (str(message.id), message.key, message.headers) == (given, "k", {"ce-dataschema": "s"})


class KafkaFaults:
    """A source of a mock Kafka of four partitions, with 24 messages."""

    def __init__(self, address: str) -> None:
        self.config = {"bootstrap.servers": address, "log_level": 0, "session.timeout.ms": 6000}
        self.topic = f"t{uuid4().hex[:8]}"
        producer = Producer({"bootstrap.servers": address, "log_level": 0})
        producer.list_topics(self.topic, timeout=30)
        for number in range(24):
            producer.produce(self.topic, str(number), partition=number % 4)
        assert producer.flush(30) == 0
        self.source = self.another()

    def another(self) -> KafkaSource:
        """Return another member of the group."""
        return KafkaSource(self.config, [self.topic], group="g")

    def all_of(self, source: KafkaSource) -> set[str]:
        """Take and confirm until all are there."""
        found: set[str] = set()

        def more() -> bool:
            found.update(each.body.decode() for each in source.take(100, 0.5))
            source.confirm()
            return len(found) == 24

        wait_until(more, "all are taken")
        return found


@pytest.fixture
def faults(tmp_path: Path) -> Iterator[KafkaFaults]:
    """A Kafka of the test's own."""
    with TARGETS["kafka"].serve(tmp_path) as address:
        faults = KafkaFaults(address)
        yield faults
        faults.source.close()


def test_a_member_that_cannot_tell_where_to_begin(faults: KafkaFaults, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says so by an exception like any other, joins anew, and goes on."""

    def fails(*_: Any, **__: Any) -> Any:
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT))

    class Failing(Consumer):
        committed = fails

    monkeypatch.setattr("outbox.relay.kafka.Consumer", Failing)
    with pytest.raises(ConnectionError, match="where to begin"):
        wait_until(lambda: faults.source.take(100, 0.5), "it joins")
    monkeypatch.undo()
    assert len(faults.all_of(faults.source)) == 24


def test_what_another_member_has_taken_over_leaves_nothing_paused(faults: KafkaFaults) -> None:
    """A list that isn't stored for long, and then is another one's, doesn't stop the partitions that come back."""
    wait_until(lambda: faults.source.take(100, 0.5), "some are taken")
    faults.source.take(100, 0.1)
    second = faults.another()
    wait_until(lambda: second.take(1, 0.2) or faults.source.take(100, 0.2) == [], "the second joins")
    second.close()
    assert len(faults.all_of(faults.source)) == 24


def test_an_error_comes_behind_what_was_taken(faults: KafkaFaults) -> None:
    """Messages that a list has beside it aren't passed over."""
    wait_until(lambda: faults.source.take(100, 0.5), "some are taken")
    source = faults.source
    source._error = KafkaException(KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED))
    rest = {each.body.decode() for each in source.take(100, 0.1)}
    assert rest
    source.confirm()

    def raises() -> bool:
        try:
            rest.update(each.body.decode() for each in source.take(100, 0.1))
        except KafkaException:
            return True
        source.confirm()
        return False

    wait_until(raises, "the error comes, behind what the client had already")

    def more() -> bool:
        rest.update(each.body.decode() for each in source.take(100, 0.5))
        source.confirm()
        return len(rest) == 24

    wait_until(more, "the rest is taken")


def test_a_group_of_nats_leaves_others_alone(tmp_path: Path) -> None:
    """One whose name is that of another and a number, too: its consumer and what it has taken are its own."""
    with NatsTarget.serve(tmp_path) as server:
        target = NatsTarget(server)
        target.put(b"1", b"2")
        other, dying = target.source(group="books-2"), target.source(group="books")
        assert len(other.take(1, 1.0)) == 1
        other.confirm()
        assert len(dying.take(10, 1.0)) == 2
        dying.close()
        heir = target.source(group="books")  # its consumer is made anew
        assert len(heir.take(10, 1.0)) == 2
        heir.confirm()
        assert [each.body for each in other.take(10, 1.0)] == [b"2"]
        for each in (heir, other):
            each.close()


# --- what the broker has and this database hasn't --------------------------------------------------------------------


def test_what_is_missing_is_found_and_stored(receiving: Any, target: Target, heard: list[TelemetryEvent]) -> None:
    """By where the broker has it; what was not confirmed isn't missing, and nothing is taken from the group."""
    target.put(*(b"%d" % number for number in range(7)))
    receiver = receiving(target.source())
    intake, settings = receiver.app.intakes[0], receiver.app.settings
    if isinstance(target, RabbitTarget):
        with pytest.raises(InvalidHandler, match="forgets"):
            compare(receiver.connection, settings, intake)
        return
    assert compare(receiver.connection, settings, intake).confirmed == 0
    assert receiver.take() == 7
    assert len(receiver.handle()) == 7
    with receiver.app.engine.begin() as connection:
        for table in ("consumer_message", "half_message", "op_message", "message"):
            column = "message_id" if table == "consumer_message" else "id" if table == "half_message" else "half_id"
            connection.exec_driver_sql(f"DELETE FROM outbox.{table} WHERE {column} = %s", (receiver.handled[2].id,))
            connection.exec_driver_sql(f"DELETE FROM outbox.{table} WHERE {column} = %s", (receiver.handled[4].id,))
    target.put(b"later")
    found = compare(receiver.connection, settings, intake)
    assert (found.confirmed, found.known, found.lost, found.stored) == (7, 5, 2, 0)
    assert {each.id for each in found.missing} == {receiver.handled[2].id, receiver.handled[4].id}
    assert all(target.destination in each.origin and "@" in each.origin for each in found.missing)
    assert len([each for each in heard if isinstance(each, IntakeMissing)]) == 2
    assert compare(receiver.connection, settings, intake, apply=True).stored == 2
    assert compare(receiver.connection, settings, intake).lost == 0
    assert receiver.take() == 1
    # Whether the group reads them is a matter of where its offsets are, which a restore takes back too.
    with receiver.app.engine.connect() as connection:
        halves = set(connection.exec_driver_sql("SELECT id FROM outbox.half_message").scalars())
    assert halves >= {each.id for each in receiver.handled}
    assert b"later" in [each.body for each in receiver.handle()]
