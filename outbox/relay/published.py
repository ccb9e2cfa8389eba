"""What change data capture reads: messages as rows of the table ``published``, in the WAL of this database.

A relay to it is a group whose handler works in the transaction of its inbox rows and its offset. So each message is in
the table once; only a group that is reset writes it again, under the same id. What is undecided or rolled back never
was a message. The rows of a key are in its order, and the WAL is in that of the commits.

The columns are those that the outbox event router of Debezium takes by default, and some that it can be told of. None
is NULL that stops it for good. Once a row is in the WAL its work is done: prune empties the table with the segments of
the messages.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection
from sqlalchemy.exc import InternalError, OperationalError, ProgrammingError

from outbox.database.dialect import Bigints, Byteas, Uuids
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

# In the order of their positions, which the WAL keeps.
_PUBLISH = Template("""
INSERT INTO {s}.published (id, aggregatetype, aggregateid, type, payload, timestamp, content_type, headers, traceparent,
                           tag, queue, position, send_number)
SELECT id, aggregatetype, aggregateid, type, payload, born_at AT TIME ZONE 'UTC', content_type, headers::jsonb,
       headers::jsonb ->> 'traceparent', tag, queue, position, send_number
  FROM unnest(%b::uuid[], %s::text[], %s::text[], %s::text[], %b::bytea[], %s::timestamptz[], %s::text[], %s::text[],
              %s::text[], %s::int[], %b::bigint[], %s::int[]) WITH ORDINALITY
    AS m (id, aggregatetype, aggregateid, type, payload, born_at, content_type, headers, tag, queue, position,
          send_number, number)
 ORDER BY m.number
""")


@dataclass(frozen=True, slots=True)
class PublishedRows:
    """The handler of a relay: writes messages into the table of the ``schema`` that it is called for."""

    schema: Callable[[], str]
    type_of: Callable[[Message], str]

    def __call__(self, messages: Sequence[Message], connection: Connection, /) -> HandlerAnswer:
        """Write messages, in the transaction of the connection.

        Returns:
            None; or `Unavailable` where the table can't be written, which is the fault of no message.

        Raises:
            InvalidMessage: a body can't be decompressed, or a type is no text.
        """
        columns = (
            Uuids(each.id for each in messages),
            [each.topic for each in messages],
            [each.key for each in messages],
            [self._type(each) for each in messages],
            Byteas(each.raw for each in messages),
            [each.born_at for each in messages],
            [each.content_type for each in messages],
            [json.dumps(dict(each.headers)) for each in messages],
            [each.tag for each in messages],
            [each.queue for each in messages],
            Bigints(each.position for each in messages),
            [each.send_number for each in messages],
        )
        try:
            execute(connection, _PUBLISH(self.schema(), *columns))
        except (InternalError, OperationalError, ProgrammingError, SchemaError) as error:
            if is_lost(connection):
                raise
            return Unavailable(f"published: {summary_of(error)}")
        return None

    def _type(self, message: Message) -> str:
        """Return the type of a message; without one, the router would stop at it for good."""
        if not isinstance(found := self.type_of(message), str) or "\0" in found:
            raise InvalidMessage(f"message {message.id}: type_of returned {found!r}, which is no text")
        return found


class PublishedTable:
    """Where a relay writes rows of ``published``, in the database of its `Outbox`, for change data capture.

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
