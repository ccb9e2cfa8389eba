"""Bulk jobs and their items, as they stand.

What a bulk job does, in plain words.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar
from uuid import UUID

from outbox.database.execute import Row, execute
from outbox.errors import BulkJobNotFound
from outbox.operator.bulk import sql
from outbox.operator.bulk.selection import Kept
from outbox.operator.look.messages import check_words
from outbox.operator.look.paging import Found, Order, Position, merged
from outbox.operator.model import Action, BulkItem, BulkJob, Page, PageRequest

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from outbox.operator.databases import Database, Databases

T = TypeVar("T")

STATES = ("waiting", "running", "done", "partly", "cancelled")
ITEM_STATES = ("pending", "done", "skipped", "failed", "cancelled")

_NEWEST: Order[BulkJob] = Order(key=lambda row: (row.id,), shape=(UUID,))
_BY_NUMBER: Order[BulkItem] = Order(key=lambda item: (item.number,), shape=(int,), newest_first=False)


def list_bulk_jobs(
    databases: Databases, page: PageRequest, *, state: str | None, database: str | None
) -> Page[BulkJob]:
    """Return a page of bulk jobs, the newest first.

    Raises:
        InvalidRequest: a state or token that isn't one.
        UnknownDatabase: no database has this name.
    """
    check_words([] if state is None else [state], STATES, "state")
    names = list(databases) if database is None else [databases[database].name]

    def look(name: str, after: Position | None, limit: int) -> Found[BulkJob]:
        one = databases[name]
        with one.looking() as connection:
            statement = sql.list_bulk_jobs(one.schema, state, after[0] if after else None, limit)
            (rows,) = execute(connection, statement)
        return Found([_row(name, row) for row in rows])

    return merged(names, page, ("bulk_jobs", state), _NEWEST, look)


def bulk_job(databases: Databases, bulk_job_id: UUID) -> BulkJob:
    """Return a bulk job.

    Raises:
        BulkJobNotFound: no registered database has it.
    """
    found = _first(databases, lambda database: _look(database, bulk_job_id))
    if found is None:
        raise BulkJobNotFound(f"no registered database ({', '.join(databases)}) has bulk job {bulk_job_id}")
    return found


def find(databases: Databases, bulk_job_id: UUID) -> Database:
    """Return the database that has a bulk job.

    Raises:
        BulkJobNotFound: none has.
    """
    return databases[bulk_job(databases, bulk_job_id).database]


def items(databases: Databases, bulk_job_id: UUID, page: PageRequest, *, state: str | None) -> Page[BulkItem]:
    """Return a page of the items of a bulk job, in their order.

    Raises:
        BulkJobNotFound: no registered database has it.
        InvalidRequest: a state or token that isn't one.
    """
    check_words([] if state is None else [state], ITEM_STATES, "state")
    database = find(databases, bulk_job_id)

    def look(_: str, after: Position | None, limit: int) -> Found[BulkItem]:
        with database.looking() as connection:
            statement = sql.items(database.schema, bulk_job_id, state, after[0] if after else 0, limit)
            (rows,) = execute(connection, statement)
        return Found([BulkItem(*row) for row in rows])

    return merged([database.name], page, ("items", bulk_job_id, state), _BY_NUMBER, look)


def of_message(connection: Connection, database: Database, message_id: UUID) -> list[BulkJob]:
    """Return the bulk jobs of a database that a message was in."""
    (rows,) = execute(connection, sql.of_message(database.schema, message_id))
    return [_row(database.name, row) for row in rows]


def _look(database: Database, bulk_job_id: UUID) -> BulkJob | None:
    with database.looking() as connection:
        (rows,) = execute(connection, sql.bulk_job(database.schema, bulk_job_id))
    return _row(database.name, rows[0]) if rows else None


def _row(database: str, row: Row) -> BulkJob:
    said = dict(zip(sql.BULK_JOB, row, strict=True))
    counts = json.loads(said.pop("counts") or "{}")
    said |= {"options": json.loads(said["options"]), "described": said["described"] or said["action"]}
    return BulkJob(database, **said, **{state: counts.get(state, 0) for state in ITEM_STATES})


def _first(databases: Databases, look: Callable[[Database], T | None]) -> T | None:
    return next((found for database in databases.values() if (found := look(database)) is not None), None)


_VERB: Mapping[Action, str] = MappingProxyType({Action.ROLLBACK: "roll back"})
_HALF_STATES = {"undecided": "undecided", "fenced": "undecided"}
_WORD = {"delivered": "consumed", "compensating": "half compensated", **_HALF_STATES}


def described(action: Action, able: Sequence[Kept]) -> str:
    """Return what is done to how many messages of which group and topic.

    Such as "retry 12 parked messages of group bank-b, topic transfers (NoAccount in bank_b.py:credit)".
    """
    counts: Counter[str] = Counter()
    for each in able:
        counts[_WORD.get(each.state, each.state)] += each.count
    number = counts.total()
    one, many = (
        ("half message", "half messages") if counts and set(counts) <= {"undecided"} else ("message", "messages")
    )
    noun = one if number == 1 else many
    verb = _VERB.get(action, str(action))
    if not number:
        return f"{verb} no message"
    if len(counts) == 1:
        what = f"{number} {next(iter(counts))} {noun}"
    else:
        what = f"{number} {noun} ({', '.join(f'{count} {word}' for word, count in counts.most_common())})"
    return f"{verb} {what}{_where(able)}"


def _where(able: Sequence[Kept]) -> str:
    groups, topics, kinds = ({getattr(each, name) for each in able} for name in ("group", "topic", "kind"))
    group, topic, kind = (values.pop() if len(values) == 1 else None for values in (groups, topics, kinds))
    places = [f"{word} {name}" for word, name in (("group", group), ("topic", topic)) if name]
    return (f" of {', '.join(places)}" if places else "") + (f" ({kind})" if kind else "")
