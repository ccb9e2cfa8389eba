"""Which producer's database a group reads from: a part of the identity of all that a consumer keeps.

Each producer's database has an id of its own, which the first migration draws. Dumps and replicas keep it, as they keep
the messages; a copy that lives on beside its original is given a new one (`renew`). A consumer's database numbers the
sources of each topic in the order in which its groups meet them, in ``message_source``.

The topic of one source is a **feed**: ``orders`` is that of the first source, ``orders@1`` that of the next one. All
that a consumer keeps of a topic, it keeps of a feed: offsets, the inbox, starts, losses, settled ranges. So one topic
name from two sources never mixes, and of a single source nothing is longer than its topic. What holds a group back, its
pause, rate and breaker, is kept of the topic: it holds for all sources.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple
from uuid import UUID

from outbox.database.execute import Template, execute, lock_key, read_source
from outbox.database.session import begin
from outbox.database.sql import take_lock
from outbox.text import feed_among

if TYPE_CHECKING:
    from sqlalchemy import Connection

# The server tells where it is: by which alias, pooler or proxy one came doesn't matter. A socket has no address.
#: Read which source a producer's database is, and where it is; None on a standby. One row: ``(id, address)``.
identity: Template = Template("""
SELECT {s}.source_id(),
       CASE WHEN NOT pg_is_in_recovery()
            THEN concat(coalesce(host(inet_server_addr()), 'local'), ':', current_setting('port'), '/',
                        current_database(), ' of system ', system_identifier) END
  FROM pg_control_system()
""")

#: Read the source of an id, as a consumer's database knows it for a topic. Rows: ``(number, address)`` or none.
_KNOWN = Template("SELECT number, address FROM {s}.message_source WHERE topic = %s AND id = %s")

#: Read all sources. Rows: ``(topic, number, id, address)``.
sources: Template = Template("SELECT topic, number, id, address FROM {s}.message_source ORDER BY 1, 2")

#: Read the sources of a topic. Rows: ``(number, id)``.
NUMBERS: Template = Template("SELECT number, id FROM {s}.message_source WHERE topic = %s")

#: Number a source that is new for a topic, or note that it is elsewhere.
_NOTE = Template("""
INSERT INTO {s}.message_source AS k (topic, number, id, address)
SELECT %(topic)s, coalesce(max(number) + 1, 0), %(id)s, %(address)s FROM {s}.message_source WHERE topic = %(topic)s
ON CONFLICT (id, topic) DO UPDATE SET address = excluded.address, met_at = clock_timestamp()
RETURNING number
""")

_RENEW = Template("SELECT {s}.renew_source_id()")
_CONSUMES = Template("SELECT to_regclass('{s}.message_source') IS NOT NULL")
_FOLLOW = Template("UPDATE {s}.message_source SET id = %(new)s WHERE id = %(old)s RETURNING number")


class Source(NamedTuple):
    """A producer's database, as a consumer's has met it: its number there, its id, where it is and where it was."""

    number: int
    id: UUID
    address: str | None
    before: str | None

    @property
    def has_moved(self) -> bool:
        """Was it met at another address than before?"""
        return None not in {self.address, self.before} and self.address != self.before


def meet(connection: Connection, source: Connection, schema: str, topic: str) -> Source:
    """Return which source of a topic a producer's database is; number it, if no group has read the topic from it.

    Neither connection is in a transaction, unless the caller's is to be rolled back.
    """
    ((id_, address),) = read_source(source, identity(schema))[0]
    (rows,) = read_source(connection, _KNOWN(schema, topic, id_))
    number, before = rows[0] if rows else (None, address)
    if number is None or (address is not None and address != before):
        with begin(connection):
            # Of two workers that meet new sources at once, each gets a number of its own.
            lock = take_lock(lock_key("sources", schema, topic))
            _, ((number,),) = execute(connection, lock, _NOTE(schema, topic=topic, id=id_, address=address))
    return Source(number, id_, address, before)


def feed_here(connection: Connection, source: Connection, schema: str, topic: str) -> str:
    """Return the feed that a consumer's database has of the topic of a source; writes nothing.

    Of a source that it hasn't met, it is one of which it has nothing.
    """
    ((id_, _),) = read_source(source, identity(schema))[0]
    return feed_from(connection, schema, topic, id_)


def feed_from(connection: Connection, schema: str, topic: str, source_id: UUID) -> str:
    """Return the same by the id of the source."""
    (rows,) = read_source(connection, NUMBERS(schema, topic))
    return feed_among(rows, topic, source_id)


def renew(connection: Connection, schema: str) -> tuple[UUID, UUID]:
    """Give a producer's database, a copy of another one, an id of its own, in the running transaction.

    The groups that read it in the same database go on where they were. Return the former id and the new one.
    """
    ((old, _),) = execute(connection, identity(schema))[0]
    ((new,),), ((consumes,),) = execute(connection, _RENEW(schema), _CONSUMES(schema))
    if consumes:
        follow(connection, schema, old, new)
    return old, new


def follow(connection: Connection, schema: str, old: UUID, new: UUID) -> bool:
    """Have a consumer's database know a source by its new id, in the running transaction; False if it never met it."""
    return bool(execute(connection, _FOLLOW(schema, old=old, new=new))[0])
