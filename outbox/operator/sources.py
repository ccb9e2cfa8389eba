"""Which registered database is the source of what a group keeps: the one that has its id, as the consumer's has met it.

Two databases of one id are a copy and its original: the address tells which of them the group reads from.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple
from uuid import UUID

from outbox.database.execute import execute
from outbox.database.identity import source_identity, sources
from outbox.text import feed_of

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from outbox.operator.databases import Database


class SourceIdentity(NamedTuple):
    """The id of a producer's database, and where it is, as its server tells."""

    id: UUID
    address: str | None


#: The sources that a consumer's database has met, by the names under which it keeps their topics.
Met = Mapping[str, SourceIdentity]


def identity_of(connection: Connection, producer: Database) -> SourceIdentity:
    """Return which source a producer's database is."""
    return SourceIdentity(*execute(connection, source_identity(producer.schema))[0][0])


def met_in(connection: Connection, consumer: Database) -> Met:
    """Return the sources that a consumer's database has met."""
    (rows,) = execute(connection, sources(consumer.schema))
    return {feed_of(topic, number): SourceIdentity(id_, address) for topic, number, id_, address in rows}


def source_of(consumer: str, feed: str, met: Met, having: Mapping[str, SourceIdentity]) -> str | None:
    """Return the name of the database that a consumer's reads a topic from, which it keeps under a name.

    ``having`` are the databases that have the topic. Where no group has met its source yet, it is the consumer's own,
    or the only one. None: it can't be told.
    """
    known = met.get(feed)
    fitting = [name for name, each in having.items() if known is None or each.id == known.id]
    if known is not None and len(fitting) > 1:
        fitting = [name for name in fitting if having[name].address == known.address] or fitting
    if consumer in fitting:
        return consumer
    return fitting[0] if len(fitting) == 1 else None
