"""Publish by a broker object of FastStream, one message a call: for an application that has its settings in one.

What a native publisher does better: Redis entries are FastStream's own envelope here, Kafka's headers are str only, and
each message is a call. Options of the broker by which a message that is lost looks published are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from uuid import uuid4

from outbox.errors import InvalidHandler
from outbox.message.model import HandlerAnswer
from outbox.relay.envelope import Destination, Envelope, RelayRecord
from outbox.relay.publisher import PUBLISH_TIMEOUT, ConnectedPublisher
from outbox.text import class_name

# Their classes have no public base.
Broker = Any


def _kafka(record: RelayRecord) -> Mapping[str, Any]:
    key = record.message.key
    return {"topic": record.destination, "key": None if key is None else key.encode()}


def _rabbit(record: RelayRecord) -> Mapping[str, Any]:
    message = record.message
    named = {"message_id": str(message.id), "content_type": message.content_type}
    return {"routing_key": record.destination, "mandatory": True, "persist": True, **named}


#: What `publish` of each kind of broker takes beside body and headers.
_ARGUMENTS: Mapping[str, Callable[[RelayRecord], Mapping[str, Any]]] = {
    "confluent": _kafka,
    "kafka": _kafka,
    "rabbit": _rabbit,
    "nats": lambda record: {"subject": record.destination},
    "redis": lambda record: {"stream": record.destination},
}


class FastStreamPublisher(ConnectedPublisher[Broker]):
    """Publishes by ``broker``, which must be the relay's own: it is connected on the relay's loop.

    ``options`` are further arguments of its ``publish``: NATS needs ``stream=`` (without one nothing is confirmed),
    RabbitMQ may have ``exchange=``.

    Raises:
        InvalidHandler: a kind of broker that isn't known, or an option by which a lost message looks published.
    """

    def __init__(
        self,
        broker: Broker,
        destination: Destination = "{topic}",
        *,
        name: str | None = None,
        envelope: Envelope | None = None,
        timeout: float = PUBLISH_TIMEOUT,
        **options: Any,
    ) -> None:
        kind = type(broker).__module__.removeprefix("faststream.").partition(".")[0]
        if kind not in _ARGUMENTS:
            raise InvalidHandler(f"FastStreamPublisher: a broker of {kind!r} isn't one of {', '.join(_ARGUMENTS)}")
        is_kafka = _ARGUMENTS[kind] is _kafka
        super().__init__(destination, envelope or Envelope(prefix="ce_" if is_kafka else "ce-"), timeout)
        self.name: str = name or f"faststream-{kind}"
        self._broker, self._kind, self._options = broker, kind, options
        if kind == "nats" and not options.get("stream"):
            raise InvalidHandler("FastStreamPublisher: NATS confirms nothing without a stream; give stream='…'")
        if kind == "kafka":
            settings = broker._connection_kwargs
            if not settings.get("enable_idempotence") and settings.get("acks") not in {"all", -1}:
                raise InvalidHandler(
                    "FastStreamPublisher: this KafkaBroker takes a message for published which its leader alone has; "
                    "make it with enable_idempotence=True"
                )

    async def _connect(self) -> Broker:
        await self._broker.connect()
        if self._kind == "rabbit":
            await self._check_returns()
        return self._broker

    async def _check_returns(self) -> None:
        """Find out whether a message without a queue is told of: a setting of the channel, which nothing else shows."""
        try:
            await self._broker.publish(b"", routing_key=f"outbox-{uuid4()}", mandatory=True, timeout=self.timeout)
        except Exception as error:
            if class_name(error) == "PublishError":
                return
            raise
        raise InvalidHandler(
            "FastStreamPublisher: this RabbitBroker takes a message for published which no queue took; make it with "
            "default_channel=Channel(on_return_raises=True)"
        )

    async def _disconnect(self, client: Broker) -> None:
        await client.stop()

    async def _send(self, client: Broker, record: RelayRecord) -> HandlerAnswer:
        arguments = {**_ARGUMENTS[self._kind](record), **self._options}
        await client.publish(record.body, headers=dict(record.headers), **arguments)
        return None
