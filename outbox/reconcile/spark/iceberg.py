"""A topic's log in an Iceberg table: each batch of a stream once, in one commit with the name of the batch.

Into an Iceberg table of any catalog PyIceberg writes, without a jar. Spark tells of a batch again where it died before
its checkpoint said that the batch is written. So the commit that appends a batch also writes into the table's
properties which batch of which query it was: both are there, or neither. The properties outlive snapshots that expire
and files that are compacted.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from outbox.errors import SourceError

if TYPE_CHECKING:
    import pyarrow as pa
    from pyiceberg.table import Table
    from pyspark.sql import DataFrame

#: The property of a query, before its id.
PROPERTY = "outbox.stream."
#: So often a batch is tried where others write into the table at the same time.
_TRIES = 10
_RETRIES = "commit.retry.num-retries"
# What Spark calls the id of a query, which its checkpoint keeps.
_QUERY = "sql.streaming.queryId"


class _Written(NamedTuple):
    """The last batch of a query that is in a table, and how many rows it has."""

    batch: int
    rows: int


def appending(load: Callable[[], Table]) -> Callable[[DataFrame, int], None]:
    """Return the function for ``foreachBatch`` that appends each batch to the Iceberg table that ``load`` returns.

    A batch is collected in the driver: bound it by ``max_rows`` of the source. The columns of the frame must be those
    of the table. The function raises:

        SourceError: the checkpoint is older than the table; or another query that has it writes too.
        pyiceberg.exceptions.CommitFailedException: others write into the table all the time.
    """

    def append(frame: DataFrame, batch: int) -> None:
        from pyiceberg.exceptions import CommitFailedException  # noqa: PLC0415 - an extra

        if (query := frame.sparkSession.sparkContext.getLocalProperty(_QUERY)) is None:
            raise SourceError("no stream called this function; give it to foreachBatch of a writeStream")
        rows = frame.toArrow()
        name = f"{PROPERTY}{query}"
        for left in reversed(range(_TRIES)):
            table = load()
            # In memory alone: PyIceberg's own retry would append to what another process has just written, unseen.
            table.properties[_RETRIES] = "0"
            if _is_there(table, name, batch, rows.num_rows):
                return
            try:
                with table.transaction() as transaction:
                    transaction.append(_as(table, rows), {"outbox.query": query, "outbox.batch": str(batch)})
                    transaction.set_properties({name: json.dumps(_Written(batch, rows.num_rows))})
                return
            except CommitFailedException:
                # Another one was faster; it may have been another process with this checkpoint.
                if not left:
                    raise

    return append


def _as(table: Table, rows: pa.Table) -> pa.Table:
    """Return rows in the types of a table: Iceberg has no integer of 16 bits."""
    schema = table.schema().as_arrow()
    return rows.select(schema.names).cast(schema)


def _is_there(table: Table, name: str, batch: int, rows: int) -> bool:
    """Is a batch in the table already?

    Raises:
        SourceError: a later one is, or another one of this number.
    """
    if (text := table.properties.get(name)) is None:
        return False
    last = _Written(*json.loads(text))
    if batch > last.batch:
        return False
    if last != (batch, rows):
        raise SourceError(
            f"batch {batch} of {rows} rows comes after batch {last.batch} of {last.rows} rows, which is in the table: "
            "the checkpoint was put back, or two processes have it. Begin with a new checkpoint and a new table, or "
            "put back the table too"
        )
    return True
