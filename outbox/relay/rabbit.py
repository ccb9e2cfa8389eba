"""Publish to RabbitMQ, by aio-pika: persistent, mandatory, confirmed; what no queue took isn't taken for published."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from typing import Any, ClassVar

import aio_pika
from aio_pika.abc import AbstractChannel, AbstractConnection, AbstractExchange, AbstractIncomingMessage
from aio_pika.exceptions import DeliveryError, PublishError
from aiormq.exceptions import ChannelClosed

from outbox.errors import InvalidHandler
from outbox.message.model import HandlerAnswer, Unavailable
from outbox.relay.envelope import Destination, Envelope, RelayRecord
from outbox.relay.intake.source import ConnectedSource, Received
from outbox.relay.publisher import PUBLISH_TIMEOUT, ConnectedPublisher, Undeliverable
from outbox.text import class_name


class _Channel:
    """A connection with the exchange on a channel of it."""

    def __init__(self, connection: AbstractConnection, exchange: AbstractExchange) -> None:
        self.connection, self.exchange = connection, exchange


class RabbitPublisher(ConnectedPublisher[_Channel]):
    """Publishes to an exchange ("": the default one), with ``routing_key``; ``options`` are those of aio_pika.connect.

    The exchange isn't declared here: it has to be there. A message without a queue that takes it is parked if others
    are routed; else the broker counts as not available.
    """

    possible: ClassVar[re.Pattern[str]] = re.compile(r".{1,255}", re.DOTALL)

    def __init__(
        self,
        url: str,
        exchange: str = "",
        routing_key: Destination = "{topic}",
        *,
        name: str = "rabbitmq",
        envelope: Envelope | None = None,
        timeout: float = PUBLISH_TIMEOUT,
        **options: Any,
    ) -> None:
        super().__init__(routing_key, envelope, timeout)
        self.name: str = name
        if not url.startswith(("amqp://", "amqps://")):
            raise InvalidHandler("RabbitPublisher: the URL must begin with amqp:// or amqps://")
        self._url, self._exchange, self._options = url, exchange, options

    async def _connect(self) -> _Channel:
        # Not a robust one: that hangs while it connects anew, and hides that.
        connection = await aio_pika.connect(self._url, timeout=self.timeout, **self._options)
        try:
            channel = await connection.channel(publisher_confirms=True, on_return_raises=True)
            if self._exchange:
                return _Channel(connection, await channel.get_exchange(self._exchange, ensure=True))
            return _Channel(connection, channel.default_exchange)
        except BaseException:
            await connection.close()
            raise

    async def _disconnect(self, client: _Channel) -> None:
        await client.connection.close()

    async def _send(self, client: _Channel, record: RelayRecord) -> HandlerAnswer:
        message = record.message
        sent = aio_pika.Message(
            record.body,
            headers={name: value for name, value in record.headers.items() if name != "content-type"},
            content_type=message.content_type,
            message_id=str(message.id),
            type=message.topic,
            timestamp=message.born_at,
            delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
        )
        try:
            await client.exchange.publish(sent, record.destination, mandatory=True, timeout=self.timeout)
        except PublishError:  # a Basic.Return, told by the answer
            return self._unroutable(f"{self.name}: no queue takes messages of {record.destination!r}")
        except DeliveryError as error:  # a Basic.Nack
            return Unavailable(f"{self.name} has refused the message for now: {class_name(error.frame)}")
        except ChannelClosed as error:
            if "PRECONDITION_FAILED" in str(error) and "message size" in str(error):
                raise Undeliverable(f"{self.name}: {error}") from error
            raise
        self._routed_at = time.monotonic()
        return None


class _Consuming:
    """A connection, its channel, and what has come of a queue."""

    def __init__(self, connection: AbstractConnection, channel: AbstractChannel) -> None:
        self.connection, self.channel = connection, channel
        self.arrived: asyncio.Queue[AbstractIncomingMessage] = asyncio.Queue()


class RabbitSource(ConnectedSource[_Consuming, AbstractIncomingMessage]):
    """Takes from a queue, which has to be there; ``options`` are those of aio_pika.connect.

    Its messages need an id: of CloudEvents, the property ``message_id``, or ``id_from`` of the intake. For the order of
    keys the queue must have a single active consumer, where several workers take from it.
    """

    def __init__(self, url: str, queue: str, *, name: str = "rabbitmq", prefetch: int = 500, **options: Any) -> None:
        super().__init__(name, name, "first")
        self._url, self._queue, self._prefetch, self._options = url, queue, prefetch, options

    async def _connect(self) -> _Consuming:
        connection = await aio_pika.connect(self._url, **self._options)
        try:
            channel = await connection.channel()
            await channel.set_qos(prefetch_count=self._prefetch)
            consuming = _Consuming(connection, channel)
            queue = await channel.get_queue(self._queue, ensure=True)
            await queue.consume(consuming.arrived.put)
            return consuming
        except BaseException:
            await connection.close()
            raise

    async def _disconnect(self, client: _Consuming) -> None:
        await client.connection.close()

    async def _fetch(self, client: _Consuming, most: int, seconds: float) -> Sequence[AbstractIncomingMessage]:
        if client.connection.is_closed or client.channel.is_closed:
            raise ConnectionError("the connection was closed")
        try:
            async with asyncio.timeout(seconds):
                messages = [await client.arrived.get()]
        except TimeoutError:  # none came
            return ()
        while len(messages) < most and not client.arrived.empty():
            messages.append(client.arrived.get_nowait())
        return messages

    @staticmethod
    def received(message: AbstractIncomingMessage) -> Received:
        """Return a message of the client as it is taken in."""
        headers = {name: str(value) for name, value in message.headers.items()}
        return Received(message.message_id or "", message.body, headers, None, message.content_type)

    async def _acknowledge(self, _: _Consuming, messages: Sequence[AbstractIncomingMessage]) -> None:
        await messages[-1].ack(multiple=True)
