"""Segments: partitions by id that are made ahead of the clock, and emptied as a whole when they are old.

Message ids begin with the client's time, so that a range of ids is a range of time. To delete its rows one by one would
leave each of them in the indexes until a vacuum takes it, and while any old snapshot is held, none can. A segment that
is truncated leaves nothing.

What is emptied is one range of ids in ``half_message``, ``op_message`` and ``message`` together: never an op without
its half, never a message without its op. Ids of no segment (of before the first one, of clocks that are far off, that
are no UUIDv7) are in the DEFAULT partitions, where `outbox.prune.once` deletes row by row; and so are the survivors of
a segment that is dropped, which keeps the number of partitions small.

Nobody waits for a lock of a segment's for longer than `WAIT`, nor is one held for much longer: what has to be kept is
found out before, without a lock (`_survey`), and under the lock by index alone (`_changed`). Where a lock can't be
had, the next pass tries again.
"""

from __future__ import annotations

import datetime as dt
import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import UUID

from sqlalchemy.exc import DBAPIError

from outbox.database.execute import (
    CONTENDED,
    STATEMENT_CANCELLED,
    Row,
    Statement,
    execute,
    in_schema,
    lock_key,
    sqlstate,
)
from outbox.database.sql import plan_by_index, try_lock, wait_at_most
from outbox.database.tables import SEGMENTED, producer_tables
from outbox.prune import segments_sql as sql

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from outbox.settings import Settings

logger: logging.Logger = logging.getLogger("outbox.prune")

#: How long (seconds) a statement that takes locks may wait, and how long each may take that holds them.
WAIT = 0.1
#: Segments to the length of the retention. The more there are, the longer a statement takes that looks at all of them.
_SEGMENTS = 2
_SHORTEST = 60.0
#: Segments that are ready for the time to come, besides that of now.
_AHEAD = 1
#: At most so many, where old ones can't be dropped.
MOST = 24
#: At most so many rows of a table are written again to keep them.
_FEW = 1_000

_FAILED_CHECK = "23514"
_BOUNDS = re.compile(r"FROM \('([0-9a-f-]{36})'\) TO \('([0-9a-f-]{36})'\)")
_END = UUID(int=(1 << 128) - 1)


@dataclass(frozen=True, slots=True, order=True)
class Segment:
    """A range of ids, and the end of its partitions' names."""

    first: UUID
    end: UUID
    suffix: str

    @property
    def end_ms(self) -> int:
        """The time that ids at its end begin with, in ms since 1970."""
        return self.end.int >> 80

    def leaf(self, table: str) -> str:
        """Return the name of its partition of a table."""
        return f"{table}_{self.suffix}"


def segment_length(retention: float) -> int:
    """Return how long (whole seconds) a segment is: half of the retention, but a minute at least."""
    return math.ceil(max(retention / _SEGMENTS, _SHORTEST))


def segments(connection: Connection, schema: str) -> list[Segment]:
    """Read the segments, in order. The catalog is the only place that knows them."""
    found = []
    for name, bound in execute(connection, sql.partitions(schema))[0]:
        if match := _BOUNDS.search(bound):
            found.append(Segment(UUID(match[1]), UUID(match[2]), name.removeprefix("half_message_")))
    return sorted(found)


def gaps(found: Sequence[Segment]) -> Iterator[tuple[UUID, UUID]]:
    """Yield the ranges of ids that are in no segment, as the id before the first one and the id after the last one."""
    before = UUID(int=0)
    for each in found:
        if each.first.int > before.int + 1:
            yield before, each.first
        before = UUID(int=each.end.int - 1)
    yield before, _END


def now_ms(connection: Connection) -> int:
    """Return the database's time in ms since 1970."""
    return int(execute(connection, sql.NOW_MS)[0][0][0])


def is_overdue(segment: Segment, settings: Settings, now: int) -> bool:
    """Tell whether a segment couldn't be emptied for so long that its rows go one by one."""
    return segment.end_ms + (settings.retention + segment_length(settings.retention)) * 1000 < now


# --- making ----------------------------------------------------------------------------------------------------------


def make_next(connection: Connection, settings: Settings) -> None:
    """Make the segments of the time to come that are missing, as far as that can be done now."""
    with connection.begin():
        found, now = segments(connection, settings.schema), now_ms(connection)
    length = segment_length(settings.retention) * 1000
    for number in range(now // length, now // length + 1 + _AHEAD):
        first, end = id_at(number * length), id_at((number + 1) * length)
        if inside := _overlapping(found, first, end):
            # Of another length: what is left of this range begins after it.
            first = max(first, inside[-1].end)
        if first >= end:
            continue
        if len(found) >= MOST:
            logger.warning(
                "there are %d segments of messages, and old ones can't be dropped; no more are made",
                len(found),
                extra={"event": "segments.too_many", "segments": len(found)},
            )
            return
        segment = segment_of(first, end)
        if make_segment(connection, settings, segment):
            found = sorted([*found, segment])


def _overlapping(found: Sequence[Segment], first: UUID, end: UUID) -> list[Segment]:
    return [each for each in found if each.first < end and each.end > first]


def id_at(ms: int) -> UUID:
    """Return the first id of a time in ms since 1970."""
    return UUID(int=ms << 80)


def segment_of(first: UUID, end: UUID) -> Segment:
    """Return the segment of a range of ids."""
    begin = dt.datetime.fromtimestamp((first.int >> 80) / 1000, dt.UTC)
    return Segment(first, end, f"{begin:%Y%m%dt%H%M%S}")


def make_segment(connection: Connection, settings: Settings, segment: Segment) -> bool:
    """Make the partitions of a segment, in one transaction; False where a lock can't be had, or too much is in the way.

    The ids of the new range that are in the DEFAULT partition (those of clocks that are ahead) move over before.

    To attach a partition, PostgreSQL locks the DEFAULT one altogether, and lets others go on with the table itself.
    That isn't enough. A statement that is being planned meanwhile knows the partitions of before, waits for the DEFAULT
    one, and takes its snapshot after that: rows of the new partition are in the snapshot, and the plan doesn't read
    them. Dispatch would pass over an op for ever. So all wait for the table, and plan after that.
    """
    schema = settings.schema
    with shortly(connection, schema, "make", segment) as mine:
        if not mine:
            return False
        # The DEFAULT partition may be large.
        execute(connection, plan_by_index())
        for table in SEGMENTED:
            execute(connection, sql.create(schema, table, segment.leaf(table)))
        execute(connection, _lock_tables(schema, [f"{table}_default" for table in SEGMENTED]))
        values = {"first": segment.first, "end": segment.end}
        for table, column in SEGMENTED.items():
            names = {"leaf": segment.leaf(table), "table": table, "column": column}
            execute(
                connection,
                sql.moved(schema, names, _columns(schema, table), values),
                sql.attach(schema, names, segment.first, segment.end),
            )
        return True
    return False


# --- emptying --------------------------------------------------------------------------------------------------------


def empty_segment(
    connection: Connection,
    settings: Settings,
    segment: Segment,
    *,
    by_row: bool = False,
    stopping: Callable[[], bool] = lambda: False,
) -> int:
    """Delete what is settled and older than the retention in a segment; return how many halves went.

    With ``by_row``, what can't be deleted as a whole goes row by row.
    """
    schema = settings.schema
    with connection.begin():
        (taken, *_), ((hidden,),) = execute(connection, try_lock(_lock(schema)), sql.row_security(schema))
        if not taken[0] or segment not in segments(connection, schema) or hidden:
            return 0  # what the role can't see, it can't keep
        _, (survey,) = execute(connection, plan_by_index(), _survey(settings, segment))
    snapshot, halves, keep, *ends = survey
    keep = keep or []
    done = 0
    if halves > len(keep) and len(keep) <= _FEW:
        done = _compact(connection, schema, segment, halves, keep, snapshot, ends)
    if not done and halves > len(keep) and by_row:
        logger.info(
            "segment %s can't be emptied; what is settled in it is deleted row by row",
            segment.suffix,
            extra={"event": "segment.held", "segment": segment.suffix, "keep": len(keep)},
        )
        done = prune_rows(connection, settings, UUID(int=segment.first.int - 1), segment.end, stopping)
    with connection.begin():
        execute(connection, sql.left_over(schema, segment.first, segment.end))
    return done


def _survey(settings: Settings, segment: Segment) -> Statement:
    values = {
        "first": segment.first,
        "end": segment.end,
        "retention": settings.retention,
        "limit": _FEW + 1,
    }
    return sql.survey(settings.schema, _leaves(segment), values)


def _leaves(segment: Segment) -> dict[str, str]:
    return {table: segment.leaf(table) for table in SEGMENTED}


def _compact(
    connection: Connection,
    schema: str,
    segment: Segment,
    halves: int,
    keep: list[UUID],
    snapshot: str,
    ends: Sequence[Row],
) -> int:
    """Truncate a segment, and write again what is to be kept; return how many halves went.

    Whoever writes into the segment waits for the lock, and looks again after it: each statement takes the locks of all
    partitions that it reads before it takes its snapshot, and one that only inserts (an op of a half, which was kept)
    needs no row of it. Only a transaction in REPEATABLE READ that reads the table later than it took its snapshot would
    find nothing; those of ours take the lock first (`outbox.reconcile.source`).
    """
    leaves = {table: _name(schema, name) for table, name in _leaves(segment).items()}
    with shortly(connection, schema, "empty", segment) as mine:
        if not mine:
            return 0
        for table in SEGMENTED:
            execute(connection, sql.make_survivors(schema, table))
        execute(connection, Statement(f"LOCK TABLE {', '.join(leaves.values())} IN ACCESS EXCLUSIVE MODE"))
        # A statement of its own, after the lock: it sees all that was written since the survey.
        values = {"first": segment.first, "end": segment.end, "snapshot": snapshot}
        values |= dict(zip(("topics", "queues", "lasts"), ends, strict=True))
        (changed,) = execute(connection, sql.changed(schema, _leaves(segment), values))
        keep = sorted({*keep, *(row[0] for row in changed)})
        if len(keep) > _FEW:
            return 0
        survivors = 0
        for table, column in SEGMENTED.items():
            columns = _columns(schema, table)
            (rows,) = execute(connection, sql.copy_survivors(leaves[table], table, column, columns, keep))
            survivors += len(rows) if table == "half_message" else 0
        execute(connection, Statement(f"TRUNCATE {', '.join(leaves.values())}"))
        for table in SEGMENTED:
            execute(connection, sql.put_back(leaves[table], table, _columns(schema, table)))
        return max(halves - survivors, 0)
    return 0


def drop_segment(connection: Connection, settings: Settings, segment: Segment) -> bool | None:
    """Drop a segment that has few rows, which move into the DEFAULT partitions; tell whether that could be done.

    None: it has too many.
    """
    schema = settings.schema
    count = sql.at_most(schema, _leaves(segment), _FEW + 1)
    with shortly(connection, schema, "drop", segment) as mine:
        if not mine:
            return False
        # Looked at before the lock, and again under it.
        if execute(connection, count)[0][0][0] > _FEW:
            return None
        execute(connection, _lock_tables(schema, _leaves(segment).values()))
        if execute(connection, count)[0][0][0] > _FEW:
            return None
        for table in SEGMENTED:
            execute(connection, *sql.fold(schema, table, segment.leaf(table), _columns(schema, table)))
        return True
    return False


# --- row by row ------------------------------------------------------------------------------------------------------


def prune_rows(connection: Connection, settings: Settings, after: UUID, end: UUID, stopping: Callable[[], bool]) -> int:
    """Delete settled halves of a range of ids, row by row; return how many went. A short transaction a batch.

    Goes on from id to id until it comes to halves that are too young, so that what can't go yet (a message that waits
    for its time) never hides what comes after it. ``stopping`` is asked between batches.
    """
    schema, batch = settings.schema, settings.prune_batch
    deleted, going = 0, True
    while going and not stopping():
        halves = sql.settled_halves(schema, after=after, end=end, limit=batch, retention=settings.retention)
        with connection.begin():
            _, ((found, gone, after, young),) = execute(connection, plan_by_index(), halves)
        deleted += gone
        going = found == batch and not young
    return deleted


# --- locks -----------------------------------------------------------------------------------------------------------


@contextmanager
def shortly(connection: Connection, schema: str, act: str, segment: Segment) -> Iterator[bool]:
    """Begin a transaction that waits for no lock for long, and say whether the segment is this worker's to act on.

    A lock that can't be had ends it, and is told; the caller goes on after the block.
    """
    try:
        with connection.begin():
            limits = wait_at_most(WAIT), sql.at_most_seconds(WAIT)
            (taken, *_), *_ = execute(connection, try_lock(_lock(schema)), *limits)
            # Read after the lock was taken: another worker may have made or dropped it meanwhile.
            found = segments(connection, schema)
            match act:
                case "make" | "make way for":
                    mine = not _overlapping(found, segment.first, segment.end)
                case "empty" | "drop":
                    mine = segment in found
                case _:
                    mine = True
            yield bool(taken[0]) and mine
    except DBAPIError as error:
        if sqlstate(error) not in {*CONTENDED, STATEMENT_CANCELLED, _FAILED_CHECK}:
            raise
        logger.debug(
            "couldn't %s segment %s now: %s",
            act,
            segment.suffix,
            error.orig,
            extra={"event": "segment.busy", "act": act, "segment": segment.suffix},
        )


def _lock_tables(schema: str, leaves: Iterable[str]) -> Statement:
    """Lock the tables, and some of their partitions; one statement, so that all its waits together are short."""
    tables = [*(f"ONLY {_name(schema, table)}" for table in SEGMENTED), *(_name(schema, leaf) for leaf in leaves)]
    return Statement(f"LOCK TABLE {', '.join(tables)} IN ACCESS EXCLUSIVE MODE")


def _lock(schema: str) -> int:
    """Return the advisory lock that a worker holds while it makes, looks through, empties or drops a segment."""
    return lock_key("segments", schema)


def _name(schema: str, table: str) -> str:
    return in_schema(f"{{s}}.{table}", schema)


def _columns(schema: str, table: str) -> str:
    """Return the columns of a table that can be written."""
    columns = producer_tables(schema).tables[f"{schema}.{table}"].columns
    return ", ".join(column.name for column in columns if column.computed is None)
