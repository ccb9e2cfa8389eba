"""Publish to Redis Streams, by redis-py: one entry a message, plain fields, all of a list in one round trip."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from outbox.message.model import Message
from outbox.relay.envelope import Destination, Envelope, RelayRecord
from outbox.relay.publisher import PUBLISH_TIMEOUT, ConnectedPublisher, Undeliverable

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
