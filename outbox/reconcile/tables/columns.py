"""The columns that the judge needs of a foreign side, and rows in them as it has them; declared once for every source.

An id may be of any type. One that is a UUID is used as it is: 16 bytes, or a text in the one form in which PostgreSQL
writes it. Any other is hashed whole, so that ids of two sides meet if they are equal to the letter: the digit ``e``
and 31 digits of the SHA-256 of its bytes, or of its text in UTF-8. So it lies behind the ids that have a time in them,
and before those of business strings, from both of which the judge reads more than that they are equal. `key_of` does
this here, and `sql.key` in PostgreSQL.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from outbox.errors import InvalidSettings
from outbox.reconcile.job import Part
from outbox.reconcile.rows import FOREIGN_ID, SCHEMAS, fixed_ids, within_calendar
from outbox.reconcile.tables.declare import COLUMNS, TableColumn

_BYTES_OF_ID = 16


#: What each column is to the judge.
ARROW: Mapping[str, pa.DataType] = {
    **{field.name: field.type for schema in SCHEMAS.values() for field in schema},
    "id": pa.binary(),
}

#: The rows of a foreign side: those of ours, and the id as its table has it, null where that is the UUID itself.
FOREIGN: Mapping[Part, pa.Schema] = {
    # A foreign producer may have no digest of a body.
    part: pa.schema([field.with_nullable(True) for field in [*schema, FOREIGN_ID]])
    for part, schema in SCHEMAS.items()
}

#: The text of a UUID, as PostgreSQL and Python write it; in the syntax of both.
UUID_TEXT = "^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$"
#: With what the UUID of a hash begins, and how many of its digits follow.
HASHED, DIGITS_OF_HASH = "e", 31

_UUID = re.compile(UUID_TEXT.replace("$", r"\Z"))


def key_of(id_: str | bytes) -> tuple[bytes, str | None]:
    """Return the 16 bytes of an id, and the id as people read it, unless it is the UUID itself."""
    if isinstance(id_, bytes):
        return (id_, None) if len(id_) == _BYTES_OF_ID else (_hashed(id_), id_.hex())
    return (UUID(id_).bytes, None) if _UUID.match(id_) else (_hashed(id_.encode()), id_)


def _hashed(raw: bytes) -> bytes:
    return bytes.fromhex(HASHED + hashlib.sha256(raw).hexdigest()[:DIGITS_OF_HASH])


def words_of(column: TableColumn, states: Mapping[str, str]) -> dict[str, int]:
    """Return the texts that a column with words may have; ``states`` are a table's own, and what they are called."""
    known = dict(column.words or {})
    return {own: known[word] for own, word in states.items()} if states else known


def shaped(rows: pa.Table, part: Part, states: Mapping[str, str] | None = None, called: str | None = None) -> pa.Table:
    """Return rows with the columns of a side (`COLUMNS`) as the judge has them (`FOREIGN`), in the order of their ids.

    ``called`` is what errors call it.

    Raises:
        InvalidSettings: an id is null or there twice, a time is null, a state isn't known; names it and the mend.
    """
    called = called or f"the {part}'s table"
    keys, texts = _ids(rows["id"], called)
    made: dict[str, Any] = {"id": keys, FOREIGN_ID.name: texts}
    for column in COLUMNS[part][1:]:
        if column.name not in rows.column_names:
            default = column.words[column.default] if column.words else column.default
            made[column.name] = pa.repeat(pa.scalar(default, ARROW[column.name]), rows.num_rows)
        elif column.words:
            made[column.name] = _numbers(rows[column.name], column, words_of(column, states or {}), called)
        else:
            made[column.name] = _values(rows[column.name].cast(ARROW[column.name]), column, called)
    if part == "producer":
        made["torn"] = pa.repeat(pa.scalar(0, pa.int8()), rows.num_rows)
    return ordered(pa.table(made).select(FOREIGN[part].names).cast(FOREIGN[part]), called)


def ordered(table: pa.Table, called: str) -> pa.Table:
    """Return the rows of a foreign side (`FOREIGN`) in the order of their ids.

    Raises:
        InvalidSettings: an id is there twice.
    """
    table = table.sort_by("id")
    ids = fixed_ids(table)
    if (again := np.flatnonzero(ids[1:] == ids[:-1])).size:
        raise InvalidSettings(f"id {shown(table, int(again[0]))} is twice in {called}; keep one row")
    return table


def shown(table: pa.Table, row: int) -> str:
    """Return the id of a row as people read it."""
    foreign = table[FOREIGN_ID.name][row].as_py()
    return str(UUID(bytes=table["id"][row].as_py())) if foreign is None else foreign


def _values(values: pa.ChunkedArray, column: TableColumn, called: str) -> pa.ChunkedArray:
    if values.null_count and column.required:
        raise InvalidSettings(f"{column.name} is null in {called}; leave such rows out, or give them a value")
    if pa.types.is_timestamp(ARROW[column.name]):
        return within_calendar(values)
    return values if column.default is None else pc.fill_null(values, column.default)


def _numbers(texts: pa.ChunkedArray, column: TableColumn, words: Mapping[str, int], called: str) -> pa.ChunkedArray:
    numbers = pc.index_in(texts, pa.array(list(words), texts.type))
    if numbers.null_count:
        wrong = texts.filter(pc.is_null(numbers))[0]
        raise unknown_state(column.name, str(wrong), words, called)
    return pc.take(pa.array(list(words.values()), ARROW[column.name]), numbers)


def unknown_state(name: str, value: str, words: Mapping[str, int], called: str) -> InvalidSettings:
    """Return the error that names a state which isn't known."""
    return InvalidSettings(f"{name} = {value} of {called} must be one of: {', '.join(words)}")


def _ids(ids: pa.ChunkedArray, called: str) -> tuple[pa.Array, pa.Array]:
    keys, texts = [], []
    for value in ids.to_pylist():
        if value is None:
            raise InvalidSettings(f"an id of {called} is null; leave such rows out")
        key, text = key_of(value)
        keys.append(key)
        texts.append(text)
    return pa.array(keys, pa.binary(16)), pa.array(texts, pa.string())
