"""Publish to NATS JetStream, by nats-py: a stream has to confirm; what is published again in its window is dropped."""

from __future__ import annotations

from typing import Any

import nats
from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.errors import APIError, NoStreamResponseError

from outbox.message.model import HandlerAnswer, Message
from outbox.relay.envelope import Destination, Envelope, RelayRecord, ascii_headers
from outbox.relay.publisher import PUBLISH_TIMEOUT, ConnectedPublisher, Undeliverable

#: What a stream says of a message that is larger than it takes (``JSStreamMessageExceedsMaximumErr``).
_TOO_LARGE = 10054


class NatsPublisher(ConnectedPublisher[tuple[Client, JetStreamContext]]):
    """Publishes to ``subject``, in ``stream``, by default the one that takes it; ``options`` are nats.connect's.

    ``Nats-Msg-Id`` is made of the message's id, its send, the group and its passage: a stream drops what the transport
    repeats, and takes what an operator sends or has read again.
    """

    def __init__(
        self,
        servers: str | list[str],
        subject: Destination = "{topic}",
        *,
        stream: str | None = None,
        name: str = "nats",
        envelope: Envelope | None = None,
        timeout: float = PUBLISH_TIMEOUT,
        **options: Any,
    ) -> None:
        super().__init__(subject, envelope, timeout)
        self.name: str = name
        self._servers, self._stream, self._options = servers, stream, options

    def _headers(self, message: Message) -> dict[str, str]:
        return ascii_headers(super()._headers(message))

    async def _connect(self) -> tuple[Client, JetStreamContext]:
        # Without a wait for the server to come back: the group's breaker does that, and says so.
        options = {"allow_reconnect": False, "connect_timeout": self.timeout, "error_cb": _ignore, **self._options}
        client = await nats.connect(self._servers, **options)
        return client, client.jetstream(timeout=self.timeout)

    async def _disconnect(self, client: tuple[Client, JetStreamContext]) -> None:
        await client[0].close()

    async def _send(self, client: tuple[Client, JetStreamContext], record: RelayRecord) -> HandlerAnswer:
        connection, stream = client
        size = len(record.body) + sum(len(name) + len(value) + 4 for name, value in record.headers.items())
        if size > connection.max_payload:
            raise Undeliverable(f"{self.name}: {size} bytes with headers; the server takes {connection.max_payload}")
        headers = {**record.headers, "Nats-Msg-Id": record.id}
        try:
            await stream.publish(record.destination, record.body, stream=self._stream, headers=headers)
        except NoStreamResponseError as error:
            raise ConnectionError(f"no stream takes the subject {record.destination!r}") from error
        except APIError as error:
            if error.err_code == _TOO_LARGE:
                raise Undeliverable(f"{self.name}: {error.description}") from error
            raise
        return None


async def _ignore(_: Exception) -> None:
    """Leave an error to the call that fails by it."""
