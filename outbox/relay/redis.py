"""Publish to Redis Streams, by redis-py: one entry a message, plain fields, all of a list in one round trip."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, cast
from uuid import uuid4

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ResponseError

from outbox.message.model import Message
from outbox.relay.envelope import Destination, Envelope, RelayRecord
from outbox.relay.publisher import PUBLISH_TIMEOUT, ConnectedPublisher, Undeliverable
from outbox.relay.source import ConnectedSource, Received
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


#: An entry that another consumer has taken, and said nothing of for so long (milliseconds), is taken over.
_CLAIM_AFTER = 60_000
_CLAIM_EVERY = 10.0


class RedisSource(ConnectedSource["Redis", tuple[bytes, dict[bytes, bytes]]]):
    """Takes from a stream as a consumer of the group ``group``, which is made if it isn't there.

    What a consumer has taken and not confirmed within a minute is taken over. Of entries that were trimmed before they
    were confirmed nothing is left: that is told.
    """

    def __init__(
        self, url: str, stream: str, *, group: str, start: str = "first", name: str = "redis", **options: Any
    ) -> None:
        super().__init__(name, group, start)
        self._url, self._stream, self._options = url, stream, options
        self._consumer = f"outbox-{uuid4()}"
        self._claim_at = 0.0

    async def _connect(self) -> Redis:
        client: Redis = Redis.from_url(self._url, **self._options)
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
        if time.monotonic() >= self._claim_at:
            claimed: Any = await client.xautoclaim(self._stream, self.group, self._consumer, _CLAIM_AFTER, count=most)
            _, entries, trimmed = claimed
            for each in trimmed:
                origin = f"{self._stream}@{each.decode()}"
                reason = "it was trimmed before it was confirmed: it may be lost"
                emit(IntakeRefused(topic=self._stream, source=self.name, origin=origin, reason=reason))
            if entries:
                return [tuple(each) for each in entries]
            self._claim_at = time.monotonic() + _CLAIM_EVERY
        wait, streams = int(seconds * 1000), cast("Any", {self._stream: ">"})
        found: Any = await client.xreadgroup(self.group, self._consumer, streams, count=most, block=wait)
        return [tuple(each) for each in found[0][1]] if found else ()

    def _received(self, message: tuple[bytes, dict[bytes, bytes]]) -> Received:
        entry, fields = message
        headers = {
            name.decode("utf-8", "backslashreplace"): value.decode("utf-8", "backslashreplace")
            for name, value in fields.items()
            if name != BODY_FIELD.encode()
        }
        return Received(f"{self._stream}@{entry.decode()}", fields.get(BODY_FIELD.encode(), b""), headers)

    async def _acknowledge(self, client: Redis, messages: Sequence[tuple[bytes, dict[bytes, bytes]]]) -> None:
        await client.xack(self._stream, self.group, *(entry for entry, _ in messages))
