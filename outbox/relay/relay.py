"""A relay: a group whose handler publishes, outside of transactions or into a table. It is as all groups are.

To a broker a message is published at least once, its offset moves when it is confirmed, and of one key one message at a
time is on its way, while many keys are. A destination that isn't there opens the group's breaker and costs no attempt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from outbox.errors import InvalidHandler
from outbox.message.content import check_group, check_topic, is_internal
from outbox.message.model import HandlerAnswer, Message, Unavailable
from outbox.relay.client import settled
from outbox.relay.published import PublishedTable
from outbox.relay.publisher import Publisher

#: Messages that are published in one call at most, and calls that run at once in each worker.
BATCH, CONCURRENCY = 500, 8
# Beside the publisher's own time-out (seconds): an attempt of which it says nothing at all has failed then.
_GRACE = 15.0


@dataclass(frozen=True, slots=True)
class RelayRule:
    """Which topics a group relays: those that are named, and those that match a pattern with ``*``, whenever they come.

    ``options`` are those of the group's `outbox.consumer.subscription.Subscription` of each topic.

    Raises:
        InvalidHandler: an option can't work.
        InvalidMessage: a topic or the group isn't a name.
    """

    topics: tuple[str, ...]
    group: str
    publisher: Publisher | PublishedTable
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_group(self.group)
        if not self.topics:
            raise InvalidHandler(f"relay of group {self.group!r}: it names no topic")
        for topic in self.topics:
            check_topic(topic.replace("*", "x"))
        if self.options.get("on_exhausted") == "block":
            raise InvalidHandler(
                f"relay of group {self.group!r}: on_exhausted = 'block' can't be: what a broker refuses for itself it "
                "refuses for ever; 'park' holds back its key, 'skip' goes on"
            )

    @property
    def named(self) -> list[str]:
        """The topics that are named."""
        return [topic for topic in self.topics if "*" not in topic]

    @property
    def patterns(self) -> list[str]:
        """The patterns."""
        return [topic for topic in self.topics if "*" in topic]

    def takes(self, topic: str) -> bool:
        """Tell whether it relays a topic."""
        if is_internal(topic):
            return False
        return any(fnmatchcase(topic, pattern) for pattern in self.topics)

    def handler(self, schema: Callable[[], str]) -> Callable[..., Any]:
        """Return the handler of its group; ``schema`` tells which one the tables of the group's database are in."""
        publisher = self.publisher
        if isinstance(publisher, PublishedTable):
            return publisher.rows(schema)
        longest = 2 * publisher.timeout + _GRACE / 2

        async def publish(messages: list[Message], /) -> Sequence[HandlerAnswer]:
            (answers,) = await settled([asyncio.ensure_future(publisher.publish(messages))], longest)
            if isinstance(answers, TimeoutError):  # it says nothing at all, and no message is at fault
                return [Unavailable(f"{publisher.name} has said nothing within {longest:g} s")] * len(messages)
            if isinstance(answers, BaseException):
                raise answers
            return answers

        return publish

    @classmethod
    def of(
        cls,
        topics: str | Sequence[str],
        publisher: Publisher | PublishedTable,
        group: str | None = None,
        **options: Any,
    ) -> RelayRule:
        """Return the rule with options as users write them."""
        listed = (topics,) if isinstance(topics, str) else tuple(topics)
        rules: dict[str, Any] = {"ordered": "key", "batch": getattr(publisher, "batch", BATCH), **options}
        fixed: dict[str, Any] = {"transactional": True, "takes_batch": True}
        if not isinstance(publisher, PublishedTable):
            if not callable(getattr(publisher, "publish", None)) or not hasattr(publisher, "timeout"):
                raise InvalidHandler(
                    f"relay to {publisher!r}: it is no Publisher, which has publish, close, name and timeout"
                )
            fixed |= {"transactional": False, "timeout": 2 * publisher.timeout + _GRACE}
            rules.setdefault("concurrency", CONCURRENCY)
        if rules["ordered"] == "key":
            rules.setdefault("on_exhausted", "skip")
        return cls(listed, group or f"relay-{publisher.name}", publisher, {**rules, **fixed})
