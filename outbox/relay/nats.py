"""Publish to NATS JetStream, by nats-py: a stream has to confirm; what is published again in its window is dropped."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from typing import Any

import nats
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy
from nats.js.errors import APIError, NoStreamResponseError, NotFoundError

from outbox.message.model import HandlerAnswer, Message
from outbox.relay.envelope import Destination, Envelope, RelayRecord, ascii_headers
from outbox.relay.publisher import PUBLISH_TIMEOUT, ConnectedPublisher, Undeliverable
from outbox.relay.source import ConnectedSource, Received, percent_decoded

# Seconds in which a worker that is alive confirms something, and how often that is looked at.
_SETTLES, _LOOKS = 2.0, 4
#: What a stream says of a message that is larger than it takes (``JSStreamMessageExceedsMaximumErr``).
_TOO_LARGE = 10054


class NatsPublisher(ConnectedPublisher[tuple[Client, JetStreamContext]]):
    """Publishes to ``subject``, in ``stream``, by default the one that takes it; ``options`` are nats.connect's.

    ``Nats-Msg-Id`` is made of the message's id, its send, the group and its passage: a stream drops what the transport
    repeats, and takes what an operator sends or has read again.
    """

    # Tokens without a space or a wildcard, none of them empty.
    possible = re.compile(r"[^\s.*>]+(\.[^\s.*>]+)*")

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
        except NoStreamResponseError:  # told by the answer
            return self._unroutable(f"{self.name}: no stream takes the subject {record.destination!r}")
        except APIError as error:
            if error.err_code == _TOO_LARGE:
                raise Undeliverable(f"{self.name}: {error.description}") from error
            raise
        self._routed_at = time.monotonic()
        return None


async def _ignore(_: Exception) -> None:
    """Leave an error to the call that fails by it."""


class NatsSource(ConnectedSource[tuple[Client, "JetStreamContext.PullSubscription"], Msg]):
    """Takes from a stream by the durable pull consumer ``group``, which is made if it isn't there.

    NATS gives what a dead worker had taken again after its ``ack_wait``, behind what came later. So a worker that
    starts looks for that, and where nothing moves has the consumer made anew, behind the last message that is
    confirmed: the order of keys is kept, as long as one worker takes in.
    """

    def __init__(
        self,
        servers: str | list[str],
        stream: str,
        subject: str = ">",
        *,
        group: str,
        start: str = "first",
        name: str = "nats",
        **options: Any,
    ) -> None:
        super().__init__(name, group, start)
        self._servers, self._stream, self._subject, self._options = servers, stream, subject, options

    async def _connect(self) -> tuple[Client, JetStreamContext.PullSubscription]:
        client = await nats.connect(self._servers, **{"allow_reconnect": False, "error_cb": _ignore, **self._options})
        try:
            stream = client.jetstream()
            await self._make_consumer(stream)
            return client, await stream.pull_subscribe_bind(self.group, self._stream)
        except BaseException:
            await client.close()
            raise

    async def _make_consumer(self, stream: JetStreamContext) -> None:
        """Make the consumer if it isn't there, and anew where it waits for a worker that is gone."""
        config = ConsumerConfig(durable_name=self.group, ack_policy=AckPolicy.EXPLICIT)
        config.filter_subject = None if self._subject == ">" else self._subject
        config.deliver_policy = DeliverPolicy.ALL if self.start == "first" else DeliverPolicy.NEW
        before = None
        try:
            for _ in range(_LOOKS):  # or another one is at work
                info = await stream.consumer_info(self._stream, self.group)
                if not info.num_ack_pending:
                    return
                if before is not None and (info.delivered, info.ack_floor) == (before.delivered, before.ack_floor):
                    floor = info.ack_floor.stream_seq if info.ack_floor else 0
                    config.deliver_policy, config.opt_start_seq = DeliverPolicy.BY_START_SEQUENCE, floor + 1
                    await stream.delete_consumer(self._stream, self.group)
                    raise NotFoundError
                before = info
                await asyncio.sleep(_SETTLES)
        except NotFoundError:  # not yet, or no more
            await stream.add_consumer(self._stream, config)

    async def _disconnect(self, client: tuple[Client, JetStreamContext.PullSubscription]) -> None:
        await client[0].close()

    async def _fetch(
        self, client: tuple[Client, JetStreamContext.PullSubscription], most: int, seconds: float
    ) -> Sequence[Msg]:
        try:
            return await client[1].fetch(most, timeout=seconds)
        except TimeoutError:  # none came
            return ()

    def _received(self, message: Msg) -> Received:
        headers = percent_decoded(message.headers or {})
        headers.pop("Nats-Msg-Id", None)
        return Received(f"{self._stream}@{message.metadata.sequence.stream}", message.data, headers)

    async def _acknowledge(
        self, client: tuple[Client, JetStreamContext.PullSubscription], messages: Sequence[Msg]
    ) -> None:
        for each in messages:
            await each.ack()
        await client[0].flush()
