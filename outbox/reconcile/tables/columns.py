"""The columns that the judge needs of a foreign side, and rows in them as it has them; declared once for every source.

An id may be of any type. One that is a UUID is used as it is: 16 bytes, or a text in the one form in which PostgreSQL
writes it. Any other is hashed whole, so that ids of two sides meet if they are equal to the letter: the digit ``e``
and 31 digits of the SHA-256 of its bytes, or of its text in UTF-8. So it lies behind the ids that have a time in them,
and before those of business strings, from both of which the judge reads more than that they are equal. `key_of` does
this here, and `sql.key` in PostgreSQL.
"""

from __future__ import annotations

import enum
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from outbox.errors import InvalidSettings
from outbox.reconcile.job import InboxState, Part, ProducerState
from outbox.reconcile.rows import CONSUMER, FOREIGN_ID, PRODUCER, SCHEMAS, fixed_ids, within_calendar

INTEGERS = ("tinyint", "smallint", "int", "bigint")
_IDS = ("string", "binary", *INTEGERS)
_BYTES_OF_ID = 16


@dataclass(frozen=True, slots=True)
class TableColumn:
    """A column: its name, the types that Spark may call it, and what it is to the judge.

    Where it isn't there, and isn't ``required``, each row has the ``default``. ``words`` are the texts that it may
    have, which stand for numbers.
    """

    name: str
    types: tuple[str, ...]
    arrow: pa.DataType
    required: bool = False
    default: Any = None
    words: Mapping[str, int] | None = None


def _words(kind: type[enum.IntEnum]) -> dict[str, int]:
    return {each.name.lower(): each.value for each in kind}


def _of(schema: pa.Schema, name: str, types: tuple[str, ...], **more: Any) -> TableColumn:
    return TableColumn(name, types, schema.field(name).type, **more)


#: One row for each message that was sent, or is to be: ``state`` is how far it has come (`rows.ProducerState` in lower
#: case), ``at`` since when; ``sends`` how often it was sent, the last time to ``queue`` and ``position``. ``digest`` is
#: of its body, ``addressed`` whether it is meant for the group.
PRODUCER_COLUMNS: tuple[TableColumn, ...] = (
    TableColumn("id", _IDS, pa.binary(), required=True),
    _of(PRODUCER, "at", ("timestamp",), required=True),
    _of(PRODUCER, "state", ("string",), default="dispatched", words=_words(ProducerState)),
    _of(PRODUCER, "sends", INTEGERS, default=1),
    _of(PRODUCER, "queue", INTEGERS, default=0),
    _of(PRODUCER, "position", INTEGERS, default=1),
    _of(PRODUCER, "digest", ("string", "binary")),
    _of(PRODUCER, "addressed", ("boolean",), default=True),
    _of(PRODUCER, "compensated", ("boolean",), default=False),
)

#: One row for each message that the consumer knows: ``status`` is what it says of it (`rows.InboxState` in lower case),
#: ``changed_at`` since when, ``effects`` how many rows of it its business table has, -1 where that isn't known.
CONSUMER_COLUMNS: tuple[TableColumn, ...] = (
    TableColumn("id", _IDS, pa.binary(), required=True),
    _of(CONSUMER, "status", ("string",), default="consumed", words=_words(InboxState)),
    _of(CONSUMER, "received_at", ("timestamp",)),
    _of(CONSUMER, "changed_at", ("timestamp",)),
    _of(CONSUMER, "attempts", INTEGERS, default=1),
    _of(CONSUMER, "digest", ("string", "binary")),
    _of(CONSUMER, "effects", INTEGERS, default=-1),
    _of(CONSUMER, "skipped", ("boolean",), default=False),
)

#: What each side may have.
COLUMNS: Mapping[Part, tuple[TableColumn, ...]] = {"producer": PRODUCER_COLUMNS, "consumer": CONSUMER_COLUMNS}

#: The columns by which the rows of a pair are told from those of others.
NAMES: Mapping[Part, tuple[str, ...]] = {"producer": ("topic",), "consumer": ("topic", "group")}

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
            made[column.name] = pa.repeat(pa.scalar(default, column.arrow), rows.num_rows)
        elif column.words:
            made[column.name] = _numbers(rows[column.name], column, words_of(column, states or {}), called)
        else:
            made[column.name] = _values(rows[column.name].cast(column.arrow), column, called)
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
    if pa.types.is_timestamp(column.arrow):
        return within_calendar(values)
    return values if column.default is None else pc.fill_null(values, column.default)


def _numbers(texts: pa.ChunkedArray, column: TableColumn, words: Mapping[str, int], called: str) -> pa.ChunkedArray:
    numbers = pc.index_in(texts, pa.array(list(words), texts.type))
    if numbers.null_count:
        wrong = texts.filter(pc.is_null(numbers))[0]
        raise unknown_state(column.name, str(wrong), words, called)
    return pc.take(pa.array(list(words.values()), column.arrow), numbers)


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


def wrong_columns(part: Part, names: Sequence[str], states: Mapping[str, str]) -> str | None:
    """Return the faults of the judge's columns that a table is said to have, and of its states."""
    known = COLUMNS[part]
    called = [*(column.name for column in known), *NAMES[part]]
    if unknown := [name for name in names if name not in called]:
        return f"columns.{unknown[0]} is none of the {part}'s columns: {', '.join(called)}"
    if missing := [column.name for column in known if column.required and column.name not in names]:
        return f"columns lacks {', '.join(missing)}, which the judge needs of the {part}"
    (worded,) = (column for column in known if column.words)
    words = worded.words or {}
    if states and worded.name not in names:
        return f"states are those of the column {worded.name}, which columns doesn't name"
    if strange := [(own, word) for own, word in states.items() if word not in words]:
        own, word = strange[0]
        return f"states.{own} = {word!r} must be one of: {', '.join(words)}"
    return None
