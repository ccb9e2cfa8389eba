"""Publish into a table, or the WAL alone, for change data capture: a relay whose handler runs in transactions.

A message is written with its inbox row and its offset: once, unless the group is reset. What is undecided or rolled
back never was a message. The rows of a key are in its order, and the WAL is in that of the commits. The columns are
those that the outbox event router of Debezium takes by default, and some that it can be told of; none is NULL that
stops it for good. Once a row is in the WAL its work is done: prune empties the table with the segments of the messages.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.exc import InternalError, OperationalError, ProgrammingError

from outbox.database.duty import Duty
from outbox.database.execute import Template, execute, is_lost
from outbox.errors import InvalidMessage, SchemaError
from outbox.message.model import HandlerAnswer, Message, Unavailable
from outbox.relay.envelope import type_of_message
from outbox.text import summary_of

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
