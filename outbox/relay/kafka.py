"""Publish to Kafka, by confluent-kafka: idempotent, confirmed by all replicas in sync, in the partition of the key.

The client delivers in the background; a thread polls it, so that its reports come at once. A message is sent again by
its group alone, never behind a later one of its key, for of each key one at a time is on its way.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka import Message as Report

from outbox.errors import InvalidHandler
from outbox.message.model import HandlerAnswer, Park, Unavailable
from outbox.relay.envelope import Destination, Envelope, RelayRecord
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
