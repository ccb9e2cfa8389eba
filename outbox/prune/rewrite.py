"""Small tables that are rewritten as a whole: emptied in an instant, and what counts in them put back.

Cursors and offsets are appended, and the newest counts; a check's row lives until the decision, and the notes about a
segment as long as the segment. To delete replaced rows one by one leaves dead rows, which no vacuum can take while an
old snapshot is held somewhere, and each pass would step over them. A table that is truncated has none.

It is one round trip, in a transaction that waits for the table's lock for `WAIT` at most. A transaction that comes
meanwhile waits, and then sees the rows put back: a statement takes its snapshot after its locks. Only a transaction in
REPEATABLE READ with an older snapshot finds nothing. Those of ours take the lock first (`outbox.reconcile.source`). A
caller's may decide a half whose check it doesn't see, which the check pass deletes then (`outbox.check.sql`), and
doesn't count waiting messages (`outbox.producer.sql`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import UUID

from sqlalchemy.exc import DBAPIError

from outbox.database.execute import CONTENDED, STATEMENT_CANCELLED, execute, sqlstate, statement
from outbox.database.sql import jumps, limits

if TYPE_CHECKING:
    from sqlalchemy import Connection

logger: logging.Logger = logging.getLogger("outbox.prune")

#: How long (seconds) the lock may be waited for, and how long each statement under it may take.
WAIT = 0.1
#: At most so many rows are put back.
_FEW = 1_000
#: A table of more bytes couldn't be locked for long.
_OVERDUE = 1 << 20

_INVALID_TEXT = "22P02"
_NOT_NOW = {*CONTENDED, STATEMENT_CANCELLED, _INVALID_TEXT}


@dataclass(frozen=True, slots=True)
class Rewritten:
    """A table, and the SELECT of the rows that count.

    It is rewritten when it has others; or, with a ``size`` (bytes), when it has grown beyond that.
    """

    table: str
    counts: str
    size: int | None = None


CURSORS = Rewritten("dispatch_cursor", "SELECT * FROM {s}.dispatch_cursor ORDER BY id DESC LIMIT 1")

# The newest offset of each queue.
_NEWEST = jumps(
    "newest",
    "{s}.consumer_offset",
    *("consumer_group", "topic", "queue"),
    selected="*",
    then=["position", "starts"],
    backwards=True,
)
OFFSETS = Rewritten("consumer_offset", f"WITH RECURSIVE {_NEWEST} SELECT * FROM newest")

# Checks of decided halves are deleted already, and only in the way.
CHECKS = Rewritten("half_check", "SELECT * FROM {s}.half_check", size=1 << 19)
# So with those that were added up.
TOTALS = Rewritten("topic_total", "SELECT * FROM {s}.topic_total", size=1 << 19)


def holds(firsts: Iterable[UUID]) -> Rewritten:
    """Return what counts of ``segment_hold``: the notes about the segments that begin with these ids."""
    listed = ", ".join(f"'{first}'" for first in firsts)
    return Rewritten("segment_hold", f"SELECT * FROM {{s}}.segment_hold WHERE first_id = ANY (ARRAY[{listed}]::uuid[])")


_MAY = """
SELECT bool_and(has_table_privilege('{s}.{table}', privilege))
  FROM unnest(ARRAY['SELECT', 'INSERT', 'TRUNCATE']) privilege
"""
_SIZES = """
SELECT pg_relation_size('{s}.{table}'::regclass), (SELECT count(*) FROM {s}.{table}),
       (SELECT count(*) FROM (SELECT FROM ({counts}) c LIMIT %(few)s + 1) k)
"""
_LOCK = "LOCK TABLE {s}.{table} IN ACCESS EXCLUSIVE MODE"
# The rows are kept in a setting that is local to the transaction. Too many are an error: their number is no JSON.
_KEEP = """
SELECT set_config('outbox.kept', CASE WHEN count(*) > %(few)s THEN ('too many: ' || count(*))::json::text
                                      ELSE coalesce(json_agg(k), '[]')::text END, true),
       (SELECT count(*) FROM {s}.{table}) - count(*)
  FROM (SELECT * FROM ({counts}) c LIMIT %(few)s + 1) k
"""
_TRUNCATE = "TRUNCATE {s}.{table}"
_PUT_BACK = """
INSERT INTO {s}.{table} OVERRIDING SYSTEM VALUE
SELECT * FROM json_populate_recordset(NULL::{s}.{table}, current_setting('outbox.kept')::json)
"""


def rewrite(connection: Connection, schema: str, rewritten: Rewritten) -> int | None:
    """Empty a table, and put back what counts, if it is worth it and the lock can be had now; return what went.

    None: replaced rows are to go one by one. This role may not rewrite the table, too many rows count, or the lock
    could not be had for long.
    """
    few = {"few": _FEW}
    may, sizes, lock, keep, truncate, put_back = (
        statement(schema, template, values, counts=rewritten.counts, table=rewritten.table)
        for template, values in ((_MAY, {}), (_SIZES, few), (_LOCK, {}), (_KEEP, few), (_TRUNCATE, {}), (_PUT_BACK, {}))
    )
    with connection.begin():
        if not execute(connection, may)[0][0][0]:
            return None
    size = _OVERDUE + 1  # while it isn't known
    try:
        with connection.begin():
            ((size, rows, counting),) = execute(connection, sizes)[0]
        if counting > _FEW:
            return None
        if rows == counting if rewritten.size is None else size <= rewritten.size:
            return 0
        with connection.begin():
            *_, ((_, replaced),), _, _ = execute(connection, limits(WAIT, WAIT), lock, keep, truncate, put_back)
    except DBAPIError as error:
        if sqlstate(error) not in _NOT_NOW:
            raise
        logger.debug(
            "couldn't rewrite %s now: %s",
            rewritten.table,
            error.orig,
            extra={"outbox_event": "table.busy", "table": rewritten.table},
        )
        return None if size > _OVERDUE else 0
    return int(replaced)
