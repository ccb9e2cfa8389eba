"""Relays: groups whose handler publishes a topic's messages to a broker or an endpoint; one module for each kind.

Each publisher needs the library of its broker, an extra of this package, and is imported when it is first used::

    from outbox.relay import KafkaPublisher, Webhook
"""

import importlib
from typing import TYPE_CHECKING, Any

from outbox.errors import pip_install

if TYPE_CHECKING:
    from outbox.relay.envelope import Envelope as Envelope
    from outbox.relay.faststream import FastStreamPublisher as FastStreamPublisher
    from outbox.relay.intake.source import IntakeSource as IntakeSource
    from outbox.relay.intake.source import Received as Received
    from outbox.relay.kafka import KafkaPublisher as KafkaPublisher
    from outbox.relay.kafka import KafkaSource as KafkaSource
    from outbox.relay.nats import NatsPublisher as NatsPublisher
    from outbox.relay.nats import NatsSource as NatsSource
    from outbox.relay.published import PublishedLog as PublishedLog
    from outbox.relay.published import PublishedTable as PublishedTable
    from outbox.relay.publisher import Publisher as Publisher
    from outbox.relay.rabbit import RabbitPublisher as RabbitPublisher
    from outbox.relay.rabbit import RabbitSource as RabbitSource
    from outbox.relay.redis import RedisPublisher as RedisPublisher
    from outbox.relay.redis import RedisSource as RedisSource
    from outbox.relay.webhook import Webhook as Webhook

#: The module of each name, and the extra that brings its library.
_HOMES = {
    "Envelope": ("envelope", ""),
    "FastStreamPublisher": ("faststream", ""),
    "KafkaPublisher": ("kafka", "kafka"),
    "KafkaSource": ("kafka", "kafka"),
    "NatsPublisher": ("nats", "nats"),
    "NatsSource": ("nats", "nats"),
    "PublishedLog": ("published", ""),
    "PublishedTable": ("published", ""),
    "Publisher": ("publisher", ""),
    "RabbitPublisher": ("rabbit", "rabbitmq"),
    "RabbitSource": ("rabbit", "rabbitmq"),
    "Received": ("intake.source", ""),
    "RedisPublisher": ("redis", "redis"),
    "RedisSource": ("redis", "redis"),
    "IntakeSource": ("intake.source", ""),
    "Webhook": ("webhook", "http"),
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'outbox.relay' has no attribute {name!r}")
    module, extra = _HOMES[name]
    try:
        return getattr(importlib.import_module(f"outbox.relay.{module}"), name)
    except ModuleNotFoundError as error:
        if not extra:
            raise
        raise ImportError(f"{name} needs {error.name}, which isn't installed: {pip_install(extra)}") from error
