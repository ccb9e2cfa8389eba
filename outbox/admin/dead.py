"""Dead letters in groups: what is parked (and not discarded) for one group and topic with one kind of error."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outbox.admin.filters import check_text
from outbox.admin.model import COUNT_LIMIT, DeadGroup, InboxRow, Total
from outbox.errors import InvalidRequest
from outbox.store import dead as store
from outbox.store.execute import Row, execute

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from outbox.admin.databases import Database, Databases

_MOST = store.MOST
_LETTERS = 16


@dataclass(frozen=True, slots=True)
class Kind:
    """What the dead letters of one group in this sense have in common."""

    database: str
    group: str
    topic: str
    error_kind: str

    @property
    def fingerprint(self) -> str:
        """A short name for it, which stays the same as long as dead letters of this kind come."""
        text = "\0".join((self.database, self.group, self.topic, self.error_kind))
        return hashlib.sha256(text.encode()).hexdigest()[:_LETTERS]


def groups(
    databases: Databases,
    *,
    database: str | None = None,
    group: str | None = None,
    topic: str | None = None,
    limit: int = 200,
) -> list[DeadGroup]:
    """Return the dead letters by group, topic and kind of error, the biggest group first, ``limit`` groups at most.

    Counts stop at 10,000, sooner where there are many kinds. Times are those of the oldest and newest messages.

    Raises:
        InvalidRequest: a limit below 1 or over 1,000.
        UnknownDatabase: no database of this name is registered.
    """
    if not 1 <= limit <= _MOST:
        raise InvalidRequest(f"limit {limit} must be 1 to {_MOST}", field="limit")
    check_text(group, "group")
    check_text(topic, "topic")
    found = [dead for each in databases.having("consumer", database) for dead in _groups_in(each, group, topic, limit)]
    found.sort(key=lambda dead: (-dead.count.value, dead.database, dead.group, dead.topic, dead.error_kind))
    return found[:limit]


def by_fingerprint(connection: Connection, database: Database, fingerprint: str) -> Kind | None:
    """Return the kind of dead letters in a database that a fingerprint stands for; None if there are none now."""
    (rows,) = execute(connection, store.kinds(database.schema))
    kinds = (Kind(database.name, *row) for row in rows)
    return next((kind for kind in kinds if kind.fingerprint == fingerprint), None)


def _groups_in(database: Database, group: str | None, topic: str | None, limit: int) -> list[DeadGroup]:
    schema = database.schema
    with database.looking() as connection:
        (counts,) = execute(connection, store.counts(schema, group, topic, limit, COUNT_LIMIT))
        if not counts:
            return []
        columns = ([row[column] for row in counts] for column in range(3))
        (rows,) = execute(connection, store.details(schema, *columns))
    return [_dead(database.name, counts[row[0] - 1], row) for row in rows]


def _dead(database: str, count: Row, detail: Row) -> DeadGroup:
    group, topic, error_kind, value, most = count
    _, first_at, last_at, *sample = detail
    return DeadGroup(
        fingerprint=Kind(database, group, topic, error_kind).fingerprint,
        database=database,
        group=group,
        topic=topic,
        error_kind=error_kind,
        count=Total(value, "gte" if value >= most else "eq"),
        first_at=first_at,
        last_at=last_at,
        sample=InboxRow(database, *sample),
    )
