"""What stands between the banks, where bank B has no access to bank A's database: a broker, HTTP, or RocketMQ's client.

A bank relays a topic of its own to it, and takes a topic of the other bank's from it. Neither knows more of the other
one than that. Where the messages are published and taken says the environment of the bank's processes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from outbox import Outbox

from .lifeline import report
from .options import Via

_VARIABLE = "BANK_VIA"
# How long (seconds) a relay waits to hear that its messages are there: in the demo answers are lost on purpose.
_TIMEOUT = 3.0


@dataclass(frozen=True, slots=True)
class Between:
    """A kind, the addresses at which a bank publishes and takes, and the secrets of webhooks; those two by topic."""

    kind: Via
    publish_at: Mapping[str, str]
    take_at: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        """Return the variable by which a process finds it."""
        return {_VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def of_environment(cls) -> Between:
        """Return what the process was started with."""
        facts = json.loads(os.environ[_VARIABLE])
        return cls(**{**facts, "kind": Via(facts["kind"])})


def relay(outbox: Outbox, topic: str, between: Between) -> None:
    """Have workers publish a topic for the other bank; RocketMQ's client reads it by itself, at a `gateway`."""
    if between.kind is Via.ROCKETMQ:
        return
    outbox.relay(topic, to=_publisher(topic, between, between.publish_at[topic]), group=f"relay-{topic}")


def take_in(outbox: Outbox, topic: str, group: str, between: Between) -> None:
    """Have workers take a topic of the other bank in, as a topic of this database.

    Webhooks have an `endpoint`, and RocketMQ's client a `collector`.
    """
    if between.kind.has_broker:
        outbox.intake(topic, source=_Counted(_source(topic, group, between.kind, between.take_at[topic])))


class _Counted:
    """A source, of which the demo hears how many messages were taken from it."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self.name: str = source.name

    def take(self, most: int, seconds: float, /) -> Sequence[Any]:
        """Return messages; those of before again if they aren't confirmed."""
        messages: Sequence[Any] = self._source.take(most, seconds)
        if messages:
            report(taken=len(messages))
        return messages

    def confirm(self) -> None:
        """Tell the broker that they are stored."""
        self._source.confirm()

    def close(self) -> None:
        """Give up the connection."""
        self._source.close()


def _publisher(topic: str, between: Between, address: str) -> Any:
    # Each needs the library of its broker, and no other.
    match between.kind:
        case Via.KAFKA:
            from outbox.relay import KafkaPublisher  # noqa: PLC0415

            return KafkaPublisher({"bootstrap.servers": address, "log_level": 0}, topic, timeout=_TIMEOUT)
        case Via.RABBITMQ:
            from outbox.relay import RabbitPublisher  # noqa: PLC0415

            return RabbitPublisher(address, exchange=topic, timeout=_TIMEOUT)
        case Via.NATS:
            from outbox.relay import NatsPublisher  # noqa: PLC0415

            return NatsPublisher(address, topic, timeout=_TIMEOUT)
        case Via.REDIS:
            from outbox.relay import RedisPublisher  # noqa: PLC0415

            return RedisPublisher(address, topic, timeout=_TIMEOUT)
        case Via.WEBHOOK:
            from outbox.relay import Webhook  # noqa: PLC0415

            # On one machine there is neither TLS nor an address of the public internet.
            return Webhook(address, secrets=[between.secrets[topic]], private=True, timeout=_TIMEOUT)
        case _:
            raise ValueError(f"nothing is published to a {between.kind}")


def _source(topic: str, group: str, kind: Via, address: str) -> Any:
    match kind:
        case Via.KAFKA:
            from outbox.relay import KafkaSource  # noqa: PLC0415

            config = {"bootstrap.servers": address, "log_level": 0, "session.timeout.ms": 6000}
            # A member of this name takes the place of one that was killed, which Kafka would wait for else.
            return KafkaSource({**config, "group.instance.id": group}, [topic], group=group)
        case Via.RABBITMQ:
            from outbox.relay import RabbitSource  # noqa: PLC0415

            return RabbitSource(address, topic)
        case Via.NATS:
            from outbox.relay import NatsSource  # noqa: PLC0415

            return NatsSource(address, topic, group=group)
        case Via.REDIS:
            from outbox.relay import RedisSource  # noqa: PLC0415

            return RedisSource(address, topic, group=group)
        case _:
            raise ValueError(f"nothing is taken from a {kind}")
