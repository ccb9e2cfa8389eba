"""Operations and their items, as they stand.

What an operation does, in plain words.
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
from outbox.operator.model import Action, OperationItem, OperationRow, Page, PageRequest

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from outbox.operator.databases import Database, Databases

T = TypeVar("T")

STATES = ("waiting", "running", "done", "partly", "cancelled")
ITEM_STATES = ("pending", "done", "skipped", "failed", "cancelled")

_NEWEST: Order[OperationRow] = Order(key=lambda row: (row.id,), shape=(UUID,))
_BY_NUMBER: Order[OperationItem] = Order(key=lambda item: (item.number,), shape=(int,), newest_first=False)


def list_operations(
    databases: Databases, page: PageRequest, *, state: str | None, database: str | None
) -> Page[OperationRow]:
    """Return a page of operations, the newest first.

    Raises:
        InvalidRequest: a state or token that isn't one.
        UnknownDatabase: no database has this name.
    """
    check_words([] if state is None else [state], STATES, "state")
    names = list(databases) if database is None else [databases[database].name]

    def look(name: str, after: Position | None, limit: int) -> Found[OperationRow]:
        one = databases[name]
        with one.looking() as connection:
            statement = sql.list_operations(one.schema, state, after[0] if after else None, limit)
            (rows,) = execute(connection, statement)
        return Found([_row(name, row) for row in rows])

    return merged(names, page, ("operations", state), _NEWEST, look)


def operation(databases: Databases, operation_id: UUID) -> OperationRow:
    """Return an operation.

    Raises:
        BulkJobNotFound: no registered database has it.
    """
    found = _first(databases, lambda database: _look(database, operation_id))
    if found is None:
        raise BulkJobNotFound(f"no registered database ({', '.join(databases)}) has operation {operation_id}")
    return found


def find(databases: Databases, operation_id: UUID) -> Database:
    """Return the database that has an operation.

    Raises:
        BulkJobNotFound: none has.
    """
    return databases[operation(databases, operation_id).database]


def items(databases: Databases, operation_id: UUID, page: PageRequest, *, state: str | None) -> Page[OperationItem]:
    """Return a page of the items of an operation, in their order.

    Raises:
        BulkJobNotFound: no registered database has it.
        InvalidRequest: a state or token that isn't one.
    """
    check_words([] if state is None else [state], ITEM_STATES, "state")
    database = find(databases, operation_id)

    def look(_: str, after: Position | None, limit: int) -> Found[OperationItem]:
        with database.looking() as connection:
            statement = sql.items(database.schema, operation_id, state, after[0] if after else 0, limit)
            (rows,) = execute(connection, statement)
        return Found([OperationItem(*row) for row in rows])

    return merged([database.name], page, ("items", operation_id, state), _BY_NUMBER, look)


def of_message(connection: Connection, database: Database, message_id: UUID) -> list[OperationRow]:
    """Return the operations of a database that a message was in."""
    (rows,) = execute(connection, sql.of_message(database.schema, message_id))
    return [_row(database.name, row) for row in rows]


def _look(database: Database, operation_id: UUID) -> OperationRow | None:
    with database.looking() as connection:
        (rows,) = execute(connection, sql.operation(database.schema, operation_id))
    return _row(database.name, rows[0]) if rows else None


def _row(database: str, row: Row) -> OperationRow:
    said = dict(zip(sql.OPERATION, row, strict=True))
    counts = json.loads(said.pop("counts") or "{}")
    said |= {"options": json.loads(said["options"]), "described": said["described"] or said["action"]}
    return OperationRow(database, **said, **{state: counts.get(state, 0) for state in ITEM_STATES})


def _first(databases: Databases, look: Callable[[Database], T | None]) -> T | None:
    return next((found for database in databases.values() if (found := look(database)) is not None), None)


_VERB: Mapping[Action, str] = MappingProxyType({Action.ROLLBACK: "roll back"})
_HALF_STATES = {"undecided": "undecided", "fenced": "undecided"}
_WORD = {"delivered": "consumed", "being_rolled_back": "half rolled back", **_HALF_STATES}


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
