"""Publish to Kafka and take from it, by confluent-kafka; idempotently, confirmed by all replicas in sync.

The client delivers in the background; a thread polls it, so that its reports come at once. A message is sent again by
its group alone, never behind a later one of its key, for of each key one at a time is on its way.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka import Message as Report

from outbox.errors import InvalidHandler
from outbox.message.model import HandlerAnswer, Park, Unavailable
from outbox.relay.envelope import Destination, Envelope, RelayRecord
from outbox.relay.intake.source import ANSWER_TIMEOUT, PAGE, STARTS, Confirmed, Received
from outbox.relay.publisher import PUBLISH_TIMEOUT, BrokerPublisher
from outbox.text import message_of

#: What a broker says of a message, and of others that are in one request with it.
_REFUSALS = {KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE, KafkaError.INVALID_RECORD}
_REFUSALS |= {KafkaError.INVALID_MSG, KafkaError.INVALID_TIMESTAMP}
# Seconds beside its own time-out in which the client must have reported a message.
_GRACE = 5.0

#: The default partitioner of the client puts most keys elsewhere than those of Java, Go and others do (CRC32, murmur2).
_DEFAULTS: Mapping[str, Any] = {
    "enable.idempotence": True,
    "acks": "all",
    "partitioner": "murmur2_random",
    "socket.timeout.ms": 10_000,
}
_REQUIRED = {"enable.idempotence": (True, "true", "True"), "acks": ("all", -1, "-1")}


class KafkaPublisher(BrokerPublisher):
    """Publishes to the topic ``topic`` with the client's configuration ``config``; the record's key is the message's.

    ``timeout`` is the client's ``message.timeout.ms``. What the broker or a topic refuses for itself (too large, no key
    where it is compacted) is parked; all else isn't available.

    Raises:
        InvalidHandler: a setting by which a confirmed message could be lost or come twice, or one that the relay makes.
    """

    prefix: ClassVar[str] = "ce_"
    possible: ClassVar[re.Pattern[str]] = re.compile(r"[a-zA-Z0-9._-]{1,249}")

    def __init__(
        self,
        config: Mapping[str, Any],
        topic: Destination = "{topic}",
        *,
        name: str = "kafka",
        envelope: Envelope | None = None,
        timeout: float = PUBLISH_TIMEOUT,
    ) -> None:
        super().__init__(topic, envelope, timeout)
        self.name: str = name
        for setting, possible in _REQUIRED.items():
            if config.get(setting, possible[0]) not in possible:
                raise InvalidHandler(
                    f"KafkaPublisher: {setting} = {config[setting]!r} could lose messages that Kafka has confirmed, or "
                    f"send them twice; leave it out, or {possible[0]!r}"
                )
        for setting in ("message.timeout.ms", "delivery.timeout.ms", "transactional.id", "on_delivery", "error_cb"):
            if setting in config:
                raise InvalidHandler(f"KafkaPublisher: {setting} is for the relay; leave it out, or give timeout=")
        self._config = {**_DEFAULTS, **config, "message.timeout.ms": int(self.timeout * 1000)}
        self._lock = threading.Lock()
        # The client, and one whose requests have one message each, by whether it is that.
        self._producers: dict[bool, _KafkaClient] = {}

    async def _deliver(self, records: Sequence[RelayRecord]) -> Sequence[HandlerAnswer]:
        answers = list(await self._produce(records, alone=False))
        # One that is refused takes along all that are in its request, also those of other calls: by itself it is known
        # which one that was.
        if refused := [number for number, answer in enumerate(answers) if isinstance(answer, Park)]:
            again = await self._produce([records[number] for number in refused], alone=True)
            for number, answer in zip(refused, again, strict=True):
                answers[number] = answer
        return answers

    async def _produce(self, records: Sequence[RelayRecord], *, alone: bool) -> Sequence[HandlerAnswer]:
        try:
            producer = self._opened(alone)
        except KafkaException as error:  # a setting that the client doesn't know
            return [Unavailable(f"{self.name}: {message_of(error)}")] * len(records)
        reported = _Reports(len(records), self.name, producer)
        for number, record in enumerate(records):
            headers: list[tuple[str, str | bytes | None]] = [(n, v.encode()) for n, v in record.headers.items()]
            key = None if record.message.key is None else record.message.key.encode()
            try:
                producer.client.produce(
                    record.destination, record.body, key, headers=headers, on_delivery=reported.of(number)
                )
            except (KafkaException, BufferError, ValueError) as error:
                reported.failed(number, error)
        await reported.wait(self.timeout + _GRACE)
        if producer.is_fatal:
            self._forget(producer)
        return reported.answers

    def _opened(self, alone: bool) -> _KafkaClient:
        with self._lock:
            producer = self._producers.get(alone)
            if producer is None or producer.pid != os.getpid():
                config = {**self._config, "batch.num.messages": 1} if alone else self._config
                producer = self._producers[alone] = _KafkaClient(config)
            return producer

    def _forget(self, producer: _KafkaClient) -> None:
        with self._lock:
            self._producers = {alone: each for alone, each in self._producers.items() if each is not producer}
        producer.end()

    def close(self) -> None:
        """Give up the client, and what it hasn't delivered yet."""
        for producer in list(self._producers.values()):
            if producer.pid == os.getpid():
                self._forget(producer)


class _KafkaClient:
    """A client, and the thread that has it report; ``is_fatal``: it is of no use any more."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.pid = os.getpid()
        self.is_fatal = False
        self.last_error = ""
        self.client = Producer({**config, "error_cb": self._failed})
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="outbox-kafka", daemon=True)
        self._thread.start()

    def _poll(self) -> None:
        while not self._ending.is_set():
            try:
                self.client.poll(0.1)
            except Exception:  # a fatal error is raised here, too, and takes a report along
                self.is_fatal = True

    def _failed(self, error: KafkaError) -> None:
        self.last_error = error.str()
        self.is_fatal |= error.fatal()

    def end(self) -> None:
        """Give up what isn't delivered, and end the thread."""
        self._ending.set()
        self.client.purge(blocking=False)
        if threading.current_thread() is not self._thread:
            self._thread.join(5)


class _Reports:
    """What the client has reported of some records; ``wait`` on the loop that made it."""

    def __init__(self, count: int, name: str, producer: _KafkaClient) -> None:
        self._name, self._producer = name, producer
        nothing = Unavailable(f"{name} has reported nothing, so that it isn't known whether it has the message")
        self.answers: list[HandlerAnswer] = [nothing] * count
        self._left = count
        self._lock = threading.Lock()
        self._loop = asyncio.get_running_loop()
        self._done = asyncio.Event()

    def of(self, number: int) -> Callable[[KafkaError | None, Report], None]:
        """Return what the client calls with the report of one record."""
        return lambda error, _: self._take(number, error)

    def failed(self, number: int, error: BaseException) -> None:
        """Take that the client hasn't taken a record."""
        if isinstance(error, KafkaException):
            self._take(number, error.args[0])
        else:  # its queue is full, or it is closing
            self._ended(number, Unavailable(f"{self._name}: {message_of(error)}"))

    def _take(self, number: int, error: KafkaError | None) -> None:
        if error is None:
            self._ended(number, None)
        elif error.code() in _REFUSALS:
            self._ended(number, Park(f"{self._name}: {error.str()}"))
        else:
            self._producer.is_fatal |= error.fatal() or error.code() == KafkaError._FATAL
            because = f" ({self._producer.last_error})" if self._producer.last_error else ""
            self._ended(number, Unavailable(f"{self._name}: {error.str()}{because}"))

    def _ended(self, number: int, answer: HandlerAnswer) -> None:
        with self._lock:
            self.answers[number] = answer
            self._left -= 1
            if self._left:
                return
        self._loop.call_soon_threadsafe(self._done.set)

    async def wait(self, timeout: float) -> None:
        """Wait until all are reported, at most so many seconds."""
        try:
            async with asyncio.timeout(timeout):
                await self._done.wait()
        except TimeoutError:
            self._producer.is_fatal = True  # a report is lost


#: What a commit of offsets says where another consumer has the partition by now, which will take the messages again.
_REVOKED = {KafkaError.ILLEGAL_GENERATION, KafkaError.UNKNOWN_MEMBER_ID, KafkaError.REBALANCE_IN_PROGRESS}
_REVOKED |= {KafkaError.FENCED_INSTANCE_ID, KafkaError._NO_OFFSET, KafkaError._STATE}
#: What a client tells of while it connects again by itself.
_PASSING = {KafkaError._ALL_BROKERS_DOWN, KafkaError._TRANSPORT, KafkaError._TIMED_OUT, KafkaError._MAX_POLL_EXCEEDED}


def _names(topic: str, name: str) -> bool:
    """Tell whether a topic of a source, which is an expression where it begins with ``^``, names a topic."""
    return re.match(topic, name) is not None if topic.startswith("^") else topic == name


# What a source sets itself, or goes by: partitions come and go as a whole.
_OF_INTAKES = {"group.id", "enable.auto.commit", "enable.auto.offset.store", "auto.offset.reset"}
_OF_INTAKES |= {"enable.partition.eof", "partition.assignment.strategy", "group.protocol"}


class KafkaSource:
    """Takes from ``topics`` as a member of the consumer group ``group``, with the client's configuration ``config``.

    Offsets are committed when the messages are stored. ``start`` ("first" or "now") is where a partition begins of
    which none is committed. If Kafka has deleted messages before they were taken, it stops, and tells which.

    Raises:
        InvalidHandler: a setting that is for the intake.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        topics: Sequence[str],
        *,
        group: str,
        start: str = "first",
        name: str = "kafka",
    ) -> None:
        for setting in sorted(_OF_INTAKES):
            if setting in config:
                raise InvalidHandler(
                    f"KafkaSource: {setting} is for the intake; leave it out, or give group= and start="
                )
        if isinstance(topics, str) or not topics or start not in STARTS:
            raise InvalidHandler("KafkaSource: topics is a list of at least one, start is 'first' or 'now'")
        own = {"group.id": group, "enable.auto.commit": False, "enable.auto.offset.store": False}
        self._config = {**config, **own, "auto.offset.reset": "error"}
        self.name: str = name
        self.start: str = start
        self._topics, self._start = list(topics), OFFSET_BEGINNING if start == "first" else OFFSET_END
        self._consumer: Consumer | None = None
        self._taken: list[Report] = []
        self._paused = False
        # What went wrong while there were messages, or where no exception may be raised.
        self._error: Exception | None = None

    def take(self, most: int, seconds: float, /) -> Sequence[Received]:
        """Return messages, waiting so many seconds for the first; those of before again if they aren't confirmed."""
        if self._consumer is None:
            self._consumer = Consumer(self._config)
            self._consumer.subscribe(
                self._topics, on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._revoked
            )
        if self._taken:  # to be a member still, it has to poll, and must get nothing by that
            self._consumer.pause(self._consumer.assignment())
            self._paused = True
            self._keep([self._consumer.poll(0)])
        else:
            if self._paused:  # what was taken has gone to another member
                self._consumer.resume(self._consumer.assignment())
                self._paused = False
            self._keep([self._consumer.poll(seconds)])
            if self._taken:
                self._keep(self._consumer.consume(most - 1, 0.0))
        # Behind what was taken before it: a commit of what comes later would pass over that.
        if self._error is not None and not self._taken:
            error = self._error
            self.close()
            raise error
        return [self.received(each) for each in self._taken]

    def _keep(self, reports: Sequence[Report | None]) -> None:
        for report in reports:
            if report is None:
                continue
            error = report.error()
            if error is None:
                self._taken.append(report)
            elif error.code() == KafkaError._AUTO_OFFSET_RESET:
                group, where = self._config["group.id"], f"{report.topic()}[{report.partition()}]"
                self._error = LookupError(
                    f"{self.name}: messages of {where} were deleted before they were taken ({error.str()}); to go on "
                    f"without them, move the offset of group {group!r}"
                )
            elif error.code() not in _PASSING:
                self._error = KafkaException(error)

    def confirm(self) -> None:
        """Tell the broker that those which were taken last are stored."""
        if self._consumer is None:  # closed meanwhile: it comes again, and is known
            return
        ends: dict[tuple[str, int], int] = {}
        for each in self._taken:
            ends[str(each.topic()), int(each.partition() or 0)] = int(each.offset() or 0) + 1
        offsets = [TopicPartition(topic, partition, end) for (topic, partition), end in ends.items()]
        self._taken = []
        try:
            if offsets:
                self._consumer.commit(offsets=offsets, asynchronous=False)
        except KafkaException as error:
            if error.args[0].code() not in _REVOKED:
                raise

    def _assigned(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        try:
            for each in consumer.committed(partitions, timeout=30):
                partition = next(p for p in partitions if (p.topic, p.partition) == (each.topic, each.partition))
                partition.offset = self._start if each.offset < 0 else each.offset
            consumer.assign(partitions)
            consumer.resume(partitions)  # the client knows of a partition that comes back that it was paused
        except Exception as error:  # raised by `take`: what is raised here would end its thread
            self._error = ConnectionError(f"{self.name}: it isn't known where to begin: {message_of(error)}")
            consumer.assign([])

    def _revoked(self, _: Consumer, partitions: list[TopicPartition]) -> None:
        """Forget what isn't stored yet: the next owner takes it."""
        gone = {(each.topic, each.partition) for each in partitions}
        self._taken = [each for each in self._taken if (each.topic(), each.partition()) not in gone]

    def confirmed(self) -> Iterator[Sequence[Confirmed]]:
        """Yield what Kafka still has of what was confirmed, in lists; the group keeps its members and its offsets."""
        consumer = Consumer({**self._config, "enable.partition.eof": True})
        try:
            known = consumer.list_topics(timeout=ANSWER_TIMEOUT).topics
            names = [name for name in known if any(_names(topic, name) for topic in self._topics)]
            of = [TopicPartition(name, number) for name in names for number in known[name].partitions]
            for each in consumer.committed(of, timeout=ANSWER_TIMEOUT):
                low, high = consumer.get_watermark_offsets(each, timeout=ANSWER_TIMEOUT)
                if low < (end := min(each.offset, high)):
                    consumer.assign([TopicPartition(each.topic, each.partition, low)])
                    yield from self._up_to(consumer, end)
        finally:
            consumer.close()

    def _up_to(self, consumer: Consumer, end: int) -> Iterator[Sequence[Confirmed]]:
        left = True
        while left:
            found, first = list[Confirmed](), consumer.poll(ANSWER_TIMEOUT)
            if first is None:
                raise TimeoutError(f"{self.name} has given nothing more within {ANSWER_TIMEOUT:g} s")
            for report in (first, *consumer.consume(PAGE, 0.0)):
                error, offset = report.error(), int(report.offset() or 0)
                if error is not None and error.code() in _PASSING:
                    continue
                if error is not None and error.code() != KafkaError._PARTITION_EOF:
                    raise KafkaException(error)
                # Transactions leave gaps: there may be nothing right before the end.
                left = left and error is None and offset + 1 < end
                if error is None and offset < end:
                    at = dt.datetime.fromtimestamp(report.timestamp()[1] / 1000, dt.UTC)
                    found.append(Confirmed(self.received(report), at))
            yield found

    def close(self) -> None:
        """Leave the group; the next call joins it again."""
        consumer, self._consumer, self._taken = self._consumer, None, []
        self._paused, self._error = False, None
        if consumer is not None:
            consumer.close()

    @staticmethod
    def received(message: Report) -> Received:
        """Return a message of the client as it is taken in."""
        found: Any = message.headers() or []
        headers = {name: (value or b"").decode("utf-8", "backslashreplace") for name, value in found}
        key, body = message.key(), message.value()
        # A topic that is made anew has the same offsets again.
        origin = f"{message.topic()}[{message.partition()}]@{message.offset()}/{message.timestamp()[1]}"
        decoded = None if key is None else bytes(key).decode("utf-8", "backslashreplace")
        return Received(origin, b"" if body is None else bytes(body), headers, decoded)
