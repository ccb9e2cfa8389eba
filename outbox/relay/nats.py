"""Publish to NATS JetStream, by nats-py: a stream has to confirm; what is published again in its window is dropped."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from operator import itemgetter
from typing import Any, ClassVar

import nats
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, ConsumerInfo, DeliverPolicy
from nats.js.errors import APIError, NoStreamResponseError

from outbox.message.model import HandlerAnswer, Message
from outbox.relay.envelope import Destination, Envelope, RelayRecord, ascii_headers
from outbox.relay.intake.source import ANSWER_TIMEOUT, PAGE, Confirmed, ConnectedSource, Received, percent_decoded
from outbox.relay.publisher import PUBLISH_TIMEOUT, ConnectedPublisher, Undeliverable

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
    possible: ClassVar[re.Pattern[str]] = re.compile(r"[^\s.*>]+(\.[^\s.*>]+)*")

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


# How long (seconds) a list that is read again may take where it is looked at.
_LONGEST_PAGE = 900.0


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
            return client, await stream.pull_subscribe_bind(await self._consumer(stream), self._stream)
        except BaseException:
            await client.close()
            raise

    async def _consumer(self, stream: JetStreamContext) -> str:
        """Return the name of the consumer, which is made if it isn't there, and anew if it waits for one that is gone.

        Anew it has a number behind its name. It is there before the old one goes: so a death in between loses nothing.
        """
        infos = [each for each in await stream.consumers_info(self._stream) if self._number(each.name) is not None]
        infos.sort(key=lambda each: self._number(each.name) or 0)
        for each in infos[:-1]:
            await stream.delete_consumer(self._stream, each.name)
        if not infos:
            config = ConsumerConfig(durable_name=self.group, ack_policy=AckPolicy.EXPLICIT)
            config.filter_subject = None if self._subject == ">" else self._subject
            config.deliver_policy = DeliverPolicy.ALL if self.start == "first" else DeliverPolicy.NEW
            await stream.add_consumer(self._stream, config)
            return self.group
        before, info = None, infos[-1]
        for _ in range(_LOOKS):  # or another one is at work
            if not info.num_ack_pending:
                break
            if before is not None and (info.delivered, info.ack_floor) == (before.delivered, before.ack_floor):
                return await self._anew(stream, info)
            before = info
            await asyncio.sleep(_SETTLES)
            info = await stream.consumer_info(self._stream, info.name)
        return info.name

    async def _anew(self, stream: JetStreamContext, info: ConsumerInfo) -> str:
        """Make the next consumer, behind the last message that is confirmed, and take the one of before away."""
        name, known = f"{self.group}={(self._number(info.name) or 0) + 1}", info.config
        config = ConsumerConfig(durable_name=name, ack_policy=AckPolicy.EXPLICIT, filter_subject=known.filter_subject)
        config.ack_wait, config.max_ack_pending = known.ack_wait, known.max_ack_pending
        config.deliver_policy = DeliverPolicy.BY_START_SEQUENCE
        config.opt_start_seq = (info.ack_floor.stream_seq if info.ack_floor else 0) + 1
        await stream.add_consumer(self._stream, config)
        await stream.delete_consumer(self._stream, info.name)
        return name

    def _number(self, name: str) -> int | None:
        """Return the number of a consumer of the group; None: it isn't one."""
        # By a character that no group's name has: "books-2" may be another group's.
        match = re.fullmatch(re.escape(self.group) + r"(?:=(\d+))?", name)
        return None if match is None else int(match[1] or 0)

    async def _disconnect(self, client: tuple[Client, JetStreamContext.PullSubscription]) -> None:
        await client[0].close()

    async def _fetch(
        self, client: tuple[Client, JetStreamContext.PullSubscription], most: int, seconds: float
    ) -> Sequence[Msg]:
        try:
            return await client[1].fetch(most, timeout=seconds)
        except TimeoutError:  # none came
            return ()

    @staticmethod
    def received(message: Msg) -> Received:
        """Return a message of the client as it is taken in."""
        headers = percent_decoded(message.headers or {})
        headers.pop("Nats-Msg-Id", None)
        # A stream that is made anew has the same numbers again.
        origin = (
            f"{message.metadata.stream}@{message.metadata.sequence.stream}/{message.metadata.timestamp.isoformat()}"
        )
        return Received(origin, message.data, headers)

    def confirmed(self) -> Iterator[Sequence[Confirmed]]:
        """Yield what the stream still has of what was confirmed, in lists."""
        return self._again(self._pages())

    async def _pages(self) -> AsyncIterator[Sequence[Confirmed]]:
        # By a connection of its own, which makes no consumer and takes none over.
        client = await nats.connect(self._servers, **{"error_cb": _ignore, **self._options})
        try:
            stream = client.jetstream()
            named = [(self._number(each.name), each) for each in await stream.consumers_info(self._stream)]
            own = [(number, each.ack_floor) for number, each in named if number is not None]
            floor = max(own, key=itemgetter(0))[1] if own else None
            end = floor.stream_seq if floor else 0
            config = ConsumerConfig(ack_policy=AckPolicy.NONE, deliver_policy=DeliverPolicy.ALL)
            config.inactive_threshold = _LONGEST_PAGE
            config.filter_subject = None if self._subject == ">" else self._subject
            info = await stream.add_consumer(self._stream, config)
            reader = await stream.pull_subscribe_bind(info.name, self._stream)
            left = info.num_pending or 0
            while left and end:
                messages = await reader.fetch(min(PAGE, left), timeout=ANSWER_TIMEOUT)
                found = [each for each in messages if each.metadata.sequence.stream <= end]
                yield [Confirmed(self.received(each), each.metadata.timestamp) for each in found]
                left = left - len(messages) if len(found) == len(messages) else 0
            await stream.delete_consumer(self._stream, info.name)
        finally:
            await client.close()

    async def _acknowledge(
        self, client: tuple[Client, JetStreamContext.PullSubscription], messages: Sequence[Msg]
    ) -> None:
        for each in messages:
            await each.ack()
        await client[0].flush()
