"""The shape of what is compared: Arrow tables of either side, and of what the comparison finds.

Times are microseconds since 1970 in UTC, ids 16 bytes. A table of a side is sorted by id, and has each id once.
"""

from __future__ import annotations

from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa

_ID = pa.binary(16)
_TIME = pa.timestamp("us", tz="UTC")

#: One row for each half message of the topic. ``state`` is a `ProducerState`; ``sends`` the newest send number, 0
#: without one, with its ``queue`` and ``position``. ``at`` is since when it is as it is: born, decided, to be
#: delivered, or visible (of the newest send). ``digest`` is that of the body as the producer has it now.
PRODUCER = pa.schema(
    [
        pa.field("id", _ID, nullable=False),
        pa.field("state", pa.int8(), nullable=False),
        pa.field("sends", pa.int16(), nullable=False),
        pa.field("queue", pa.int32(), nullable=False),
        pa.field("position", pa.int64(), nullable=False),
        pa.field("at", _TIME, nullable=False),
        pa.field("digest", pa.binary(), nullable=False),
        pa.field("addressed", pa.bool_(), nullable=False),
        pa.field("compensated", pa.bool_(), nullable=False),
    ]
)

#: One row for each message that the group's inbox or the business table has. ``status`` is an `InboxState`,
#: ``effects`` the number of rows in the business table, -1 where none is named, ``skipped`` whether the handler
#: answered `Skip`.
CONSUMER = pa.schema(
    [
        pa.field("id", _ID, nullable=False),
        pa.field("status", pa.int8(), nullable=False),
        pa.field("attempts", pa.int32(), nullable=False),
        pa.field("received_at", _TIME),
        pa.field("changed_at", _TIME),
        pa.field("digest", pa.binary()),
        pa.field("effects", pa.int64(), nullable=False),
        pa.field("skipped", pa.bool_(), nullable=False),
    ]
)

#: One row for each difference and each message in flight; ``outcome`` is an `Outcome`. What a side lacks is null.
FINDING = pa.schema(
    [
        pa.field("id", _ID, nullable=False),
        pa.field("outcome", pa.int8(), nullable=False),
        *(pa.field(field.name, field.type) for field in PRODUCER if field.name not in {"id", "digest", "addressed"}),
        pa.field("producer_digest", pa.binary()),
        *(pa.field(field.name, field.type) for field in CONSUMER if field.name not in {"id", "digest", "skipped"}),
        pa.field("consumer_digest", pa.binary()),
    ]
)


def fixed_ids(table: pa.Table) -> np.ndarray[Any, Any]:
    """Return the column ``id`` as an array of 16-byte strings that compare as ids do."""
    column = table["id"].combine_chunks()
    if isinstance(column, pa.ChunkedArray):  # what combine_chunks returns for no chunks
        return np.empty(0, "S16")
    buffer = column.buffers()[1]
    return np.frombuffer(buffer, "S16", len(column), column.offset * 16)


def to_uuids(table: pa.Table) -> list[UUID]:
    """Return the column ``id`` as a list."""
    return [UUID(bytes=value) for value in table["id"].to_pylist()]
