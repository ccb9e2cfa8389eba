"""A relay: a group whose handler publishes, outside of transactions or into a table. It is as all groups are.

To a broker a message is published at least once, its offset moves when it is confirmed, and of one key one message at a
time is on its way, while many keys are. A destination that isn't there opens the group's breaker and costs no attempt.

Into the table ``published``, which change data capture reads in the WAL, a message is written with its inbox row and
its offset: once, unless the group is reset. What is undecided or rolled back never was a message. The rows of a key are
in its order, and the WAL is in that of the commits. The columns are those that the outbox event router of Debezium
takes by default, and some that it can be told of; none is NULL that stops it for good. Once a row is in the WAL its
work is done: prune empties the table with the segments of the messages. Or a message is written into the WAL alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.exc import InternalError, OperationalError, ProgrammingError

from outbox.database.duty import Duty
from outbox.database.execute import Template, execute, is_lost
from outbox.errors import InvalidHandler, InvalidMessage, SchemaError
from outbox.message.content import check_group, check_topic, is_internal
from outbox.message.model import HandlerAnswer, Message, Unavailable
from outbox.relay.envelope import type_of_message
from outbox.relay.publisher import Publisher
from outbox.text import summary_of

#: Messages that are published in one call at most, and calls that run at once in each worker.
BATCH, CONCURRENCY = 500, 8
# Beside the publisher's own time-out (seconds): an attempt of which it says nothing at all has failed then.
_GRACE = 15.0

DUTIES = (
    Duty(
        "publish",
        "Writes the messages of relays into a table, for change data capture.",
        """
        producer: worker
        INSERT ON published
        """,
    ),
)

_COLUMNS = """id, aggregatetype, aggregateid, type, payload, timestamp, content_type, tag, queue, position, send_number,
       traceparent, headers"""
_NAMES = tuple(_COLUMNS.replace(",", " ").split())
# In the order of their positions, which the WAL keeps.
_PUBLISH = Template(f"""
INSERT INTO {{s}}.published ({_COLUMNS})
SELECT {_COLUMNS.replace("timestamp", "timestamp AT TIME ZONE 'UTC'").replace("headers", "headers::jsonb")}
  FROM unnest(%s::uuid[], %s::text[], %s::text[], %s::text[], %b::bytea[], %s::timestamptz[], %s::text[], %s::text[],
              %s::int[], %s::int8[], %s::int[], %s::text[], %s::text[]) WITH ORDINALITY AS m ({_COLUMNS}, number)
 ORDER BY m.number
""")
_EMIT = Template("""
SELECT pg_logical_emit_message(true, %s, content) FROM unnest(%s::text[]) WITH ORDINALITY AS m (content, number)
 ORDER BY m.number
""")


@dataclass(frozen=True, slots=True)
class PublishedRows:
    """The handler of a relay that writes into the table ``published`` of the ``schema`` that it is called for.

    Or, where there is a ``prefix``, as messages with that into the WAL.
    """

    schema: Callable[[], str]
    type_of: Callable[[Message], str]
    prefix: str | None = None

    def __call__(self, messages: Sequence[Message], connection: Connection, /) -> HandlerAnswer:
        """Write messages; return None, or `Unavailable` where the table can't be written, for which none is at fault.

        Raises:
            InvalidMessage: a body can't be decompressed, or is to be text and isn't; or a type is no text.
        """
        rows = list(map(self._row, messages))
        try:
            if self.prefix is None:
                execute(connection, _PUBLISH(self.schema(), *map(list, zip(*rows, strict=True))))
            else:
                execute(connection, _EMIT(self.schema(), self.prefix, list(map(_content, rows))))
        except (InternalError, OperationalError, ProgrammingError, SchemaError) as error:
            if is_lost(connection):
                raise
            return Unavailable(f"published: {summary_of(error)}")
        return None

    def _row(self, each: Message) -> tuple[Any, ...]:
        kind = self.type_of(each)
        if not isinstance(kind, str) or "\0" in kind:  # without one, the router would stop at it for good
            raise InvalidMessage(f"message {each.id}: type_of returned {kind!r}, which is no text")
        known = each.id, each.topic, each.key, kind, each.raw, each.born_at, each.content_type, each.tag
        trace, headers = each.headers.get("traceparent"), json.dumps(dict(each.headers))
        return *known, each.queue, each.position, each.send_number, trace, headers


def _content(row: tuple[Any, ...]) -> str:
    """Return a row as JSON, which can have its body as a text only."""
    fields = dict(zip(_NAMES, row, strict=True))
    try:
        payload = fields["payload"].decode()
    except UnicodeDecodeError as error:
        raise InvalidMessage(f"message {fields['id']}: its body isn't UTF-8, and only a table takes bytes") from error
    return json.dumps({**fields, "id": str(fields["id"]), "payload": payload, "timestamp": str(fields["timestamp"])})


class PublishedTable:
    """Where a relay writes rows of the table ``published``, in the database of its `Outbox`, for change data capture.

    ``type_of`` returns the type of a message; by default its header ``type``, or its topic.
    """

    name: str = "published"

    def __init__(self, *, type_of: Callable[[Message], str] = type_of_message) -> None:
        self.type_of: Callable[[Message], str] = type_of

    def rows(self, schema: Callable[[], str]) -> PublishedRows:
        """Return what writes into the table; ``schema`` tells in which schema it is."""
        return PublishedRows(schema, self.type_of)

    def close(self) -> None:
        """Do nothing: what is open is the worker's."""


class PublishedLog(PublishedTable):
    """Where a relay writes messages into the WAL of the database alone, with a ``prefix``: only bodies that are text.

    Otherwise it is as a `PublishedTable`: the content is a JSON object with the columns of the table.
    """

    name: str = "published-log"

    def __init__(self, prefix: str = "outbox-messages", *, type_of: Callable[[Message], str] = type_of_message) -> None:
        super().__init__(type_of=type_of)
        self.prefix = prefix

    def rows(self, schema: Callable[[], str]) -> PublishedRows:
        """Return what writes into the WAL."""
        return PublishedRows(schema, self.type_of, self.prefix)


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

    def handler(self, schema: Callable[[], str]) -> Callable[..., Any]:
        """Return the handler of its group; ``schema`` tells which one the tables of the group's database are in."""
        publisher = self.publisher
        return publisher.rows(schema) if isinstance(publisher, PublishedTable) else publisher.publish

    def takes(self, topic: str) -> bool:
        """Tell whether it relays a topic."""
        if is_internal(topic):
            return False
        return any(fnmatchcase(topic, pattern) for pattern in self.topics)

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
