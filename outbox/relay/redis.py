"""Publish to Redis Streams, by redis-py: one entry a message, plain fields, all of a list in one round trip."""

from __future__ import annotations

import asyncio
import datetime as dt
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ResponseError

from outbox.message.model import Message
from outbox.relay.envelope import Destination, Envelope, RelayRecord
from outbox.relay.intake.source import PAGE, Confirmed, ConnectedSource, Received
from outbox.relay.publisher import PUBLISH_TIMEOUT, ConnectedPublisher, Undeliverable
from outbox.telemetry.events import IntakeRefused
from outbox.telemetry.hooks import emit

#: The field of an entry that has the body.
BODY_FIELD = "body"


class RedisPublisher(ConnectedPublisher["Redis"]):
    """Publishes to ``stream``, of about ``maxlen`` entries (None: all are kept).

    ``options`` are those of Redis.from_url. An entry has the body in the field ``body``, and each header in one of its
    own. Confirmed is what the server has taken; that it outlives the server is up to its ``appendfsync``.
    """

    def __init__(
        self,
        url: str,
        stream: Destination = "{topic}",
        *,
        maxlen: int | None = None,
        name: str = "redis",
        envelope: Envelope | None = None,
        timeout: float = PUBLISH_TIMEOUT,
        **options: Any,
    ) -> None:
        super().__init__(stream, envelope, timeout)
        self.name: str = name
        self._url, self._maxlen, self._options = url, maxlen, options

    def _headers(self, message: Message) -> dict[str, str]:
        headers = super()._headers(message)
        if BODY_FIELD in headers:
            raise Undeliverable(f"{self.name}: header {BODY_FIELD!r} is the field of the body; give it another name")
        return headers

    async def _connect(self) -> Redis:
        # Without retries of its own: an entry would be there twice.
        options: dict[str, Any] = {"retry": Retry(NoBackoff(), 0), "socket_timeout": self.timeout, **self._options}
        client: Redis = Redis.from_url(self._url, **options)
        try:
            await client.ping()
        except BaseException:
            await client.aclose()
            raise
        return client

    async def _disconnect(self, client: Redis) -> None:
        await client.aclose()

    async def _send_all(self, client: Redis, records: Sequence[RelayRecord], until: float) -> Sequence[Any]:
        """Publish all in one round trip: a task for each would cost more than the server does."""
        try:
            async with asyncio.timeout_at(until), client.pipeline(transaction=False) as pipeline:
                for record in records:
                    fields: dict[Any, Any] = {**record.headers, BODY_FIELD: record.body}
                    pipeline.xadd(record.destination, fields, maxlen=self._maxlen, approximate=True)
                results = await pipeline.execute(raise_on_error=False)
        except Exception as error:
            return [error] * len(records)
        return [each if isinstance(each, BaseException) else None for each in results]


# How often (seconds) to look for entries that a worker which is gone has taken.
_LEFT_EVERY = 60.0
_CONSUMER = "outbox"


class RedisSource(ConnectedSource["Redis", tuple[bytes, dict[bytes, bytes]]]):
    """Takes from a stream as the consumer ``outbox`` of the group ``group``, which is made if it isn't there.

    All workers are one consumer: one that starts first takes what another one took and didn't confirm, so that after
    a death nothing overtakes it. Of entries that were trimmed before they were confirmed nothing is left: that is told.
    """

    def __init__(
        self, url: str, stream: str, *, group: str, start: str = "first", name: str = "redis", **options: Any
    ) -> None:
        super().__init__(name, group, start)
        self._url, self._stream, self._options = url, stream, options
        # When to look for what was taken and not confirmed: at once, by each new connection.
        self._left_at = 0.0

    async def _connect(self) -> Redis:
        client: Redis = Redis.from_url(self._url, **{**self._options, "decode_responses": False})
        self._left_at = 0.0
        try:
            await client.xgroup_create(
                self._stream, self.group, id="0" if self.start == "first" else "$", mkstream=True
            )
        except ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise
        return client

    async def _disconnect(self, client: Redis) -> None:
        await client.aclose()

    async def _fetch(self, client: Redis, most: int, seconds: float) -> Sequence[tuple[bytes, dict[bytes, bytes]]]:
        if time.monotonic() >= self._left_at:
            if left := await self._read(client, "0", most, None):
                return left
            self._left_at = time.monotonic() + _LEFT_EVERY
        return await self._read(client, ">", most, int(seconds * 1000))

    async def _read(self, client: Redis, after: str, most: int, wait: int | None) -> Sequence[Any]:
        streams: Any = {self._stream: after}
        while True:
            found: Any = await client.xreadgroup(self.group, _CONSUMER, streams, count=most, block=wait)
            entries = [tuple(each) for each in found[0][1]] if found else []
            if trimmed := [entry for entry, fields in entries if not fields]:
                reason = "it was trimmed before it was confirmed: it may be lost"
                for entry in trimmed:
                    origin = f"{self._stream}@{entry.decode()}"
                    emit(IntakeRefused(topic=self._stream, source=self.name, origin=origin, reason=reason))
                await client.xack(self._stream, self.group, *trimmed)
            if len(trimmed) < len(entries) or not entries:
                return [each for each in entries if each[1]]

    def received(self, message: tuple[bytes, dict[bytes, bytes]]) -> Received:
        """Return an entry of the stream as it is taken in."""
        entry, fields = message
        headers = {
            name.decode("utf-8", "backslashreplace"): value.decode("utf-8", "backslashreplace")
            for name, value in fields.items()
            if name != BODY_FIELD.encode()
        }
        return Received(f"{self._stream}@{entry.decode()}", fields.get(BODY_FIELD.encode(), b""), headers)

    def confirmed(self) -> Iterator[Sequence[Confirmed]]:
        """Yield what the stream still has of what was confirmed, in lists."""
        return self._again(self._pages())

    async def _pages(self) -> AsyncIterator[Sequence[Confirmed]]:
        # By a connection of its own, which makes no group.
        async with Redis.from_url(self._url, **{**self._options, "decode_responses": False}) as client:
            groups: Any = await client.xinfo_groups(self._stream) if await client.exists(self._stream) else []
            for group in groups:
                if group["name"] != self.group.encode():
                    continue
                taken: Any = await client.xpending(self._stream, self.group)
                end, first = taken["min"] and _number(taken["min"]), "-"
                while True:
                    entries: Any = await client.xrange(self._stream, first, group["last-delivered-id"], count=PAGE)
                    found = [each for each in entries if end is None or _number(each[0]) < end]
                    yield [Confirmed(self.received(each), _time_of(each[0])) for each in found]
                    if not entries or len(found) < len(entries):
                        break
                    first = f"({entries[-1][0].decode()}"

    async def _acknowledge(self, client: Redis, messages: Sequence[tuple[bytes, dict[bytes, bytes]]]) -> None:
        await client.xack(self._stream, self.group, *(entry for entry, _ in messages))


def _number(entry: bytes) -> tuple[int, int]:
    """Return the id of an entry as Redis orders them."""
    milliseconds, _, number = entry.decode().partition("-")
    return int(milliseconds), int(number)


def _time_of(entry: bytes) -> dt.datetime:
    return dt.datetime.fromtimestamp(_number(entry)[0] / 1000, dt.UTC)
