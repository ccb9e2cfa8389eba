"""Segments: partitions by id that are made ahead of the clock, and emptied as a whole when they are old.

Message ids begin with the client's time, so that a range of ids is a range of time. To delete its rows one by one would
leave each of them in the indexes until a vacuum takes it, and while any old snapshot is held, none can. A segment that
is truncated leaves nothing.

A producer and an inbox each have their own (`SegmentedSide`). A producer is emptied of one range of ids in
``half_message``, ``op_message``, ``message``, ``delivery`` and ``published`` together: never an op without its half,
never a message without its op, never what became of a message without the message. Ids of no segment (of before the
first one, of clocks that are far off, of business strings) are in the DEFAULT partitions, where
`outbox.prune.prune_pass` deletes row by row; and so are the survivors of a segment that is dropped, which keeps the
number of partitions small. Ids of business strings are never in a segment: they lie behind all times.

No transaction waits for a lock of a segment's for longer than `WAIT`, nor is one held for much longer: what has to be
kept is found out before, without a lock (`SegmentedSide.survey`), and under the lock by index alone
(`SegmentedSide.changed`). Where a lock can't be had, the next pass tries again.
"""

from __future__ import annotations

import datetime as dt
import logging
import math
import random
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import UUID

from sqlalchemy.exc import DBAPIError

from outbox.database.execute import (
    CONTENDED,
    CUT_OFF,
    STATEMENT_CANCELLED,
    Statement,
    by_size,
    execute,
    in_schema,
    is_lost,
    lock_key,
    sqlstate,
)
from outbox.database.sql import limits, plan_by_index, try_lock
from outbox.database.tables import SEGMENTED, consumer_tables, producer_tables
from outbox.message.ids import FIRST_BUSINESS_ID
from outbox.prune import segments_sql as sql
from outbox.prune.segments_sql import Key
from outbox.telemetry.events import BatchTooLarge
from outbox.telemetry.hooks import emit

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from outbox.settings import Settings

A = TypeVar("A")

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
FEW = 1_000

_FAILED_CHECK = "23514"
#: Names of segments are written into statements: a partition with another name isn't one of ours.
_NAME = "{}_([0-9a-z]+)"
_BOUNDS = re.compile(r"FROM \('([0-9a-f-]{36})'\) TO \('([0-9a-f-]{36})'\)")
#: Looked through in one pass, of the business strings' ids: 1 in so many, for the leftovers of those that went.
_SLICES = 256


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


@dataclass(frozen=True, slots=True)
class Survey:
    """What a segment was found to have, without a lock: its rows, those to be kept, and what tells what came since."""

    rows: int
    keep: frozenset[Key]
    since: Mapping[str, Any] = field(default_factory=dict)


class SegmentedSide:
    """The tables that have the same segments, and their particulars."""

    #: The part whose tables they are.
    part: str
    #: The one of them of which rows are counted.
    counted: str
    #: What finds a row by ``key_group`` and ``key_id``, in each of the tables of which rows may be kept.
    conditions: Mapping[str, str]

    @property
    def tables(self) -> Mapping[str, str]:
        """The tables, in the order in which they are locked, and their columns with the id."""
        return SEGMENTED[self.part]

    def leaves(self, segment: Segment) -> dict[str, str]:
        """Return the names of a segment's partitions, by table."""
        return {table: segment.leaf(table) for table in self.tables}

    def columns(self, schema: str, table: str) -> str:
        """Return the columns of a table that can be written."""
        metadata = {"producer": producer_tables, "consumer": consumer_tables}[self.part](schema)
        columns = metadata.tables[f"{schema}.{table}"].columns
        return ", ".join(column.name for column in columns if column.computed is None)

    def lock(self, schema: str) -> int:
        """Return the advisory lock that a worker holds while it makes, looks through, empties or drops a segment."""
        return lock_key("segments", schema, self.part)

    def retention(self, settings: Settings) -> float:
        """Return how long (seconds) rows are kept."""
        raise NotImplementedError

    def old_after(self, segment: Segment, settings: Settings) -> float:
        """Return from when on (ms since 1970) a segment can be emptied."""
        return segment.end_ms + self.retention(settings) * 1000

    def indexes(self, schema: str, segment: Segment) -> list[Statement]:
        """Return what makes the indexes of a new segment's own."""
        raise NotImplementedError

    def survey(self, connection: Connection, settings: Settings, segment: Segment) -> Survey | None:
        """Look a segment through, in transactions of its own; None where that can't be done now."""
        raise NotImplementedError

    def changed(self, schema: str, segment: Segment, survey: Survey) -> Statement:
        """Return what finds the rows that must be kept besides, of those written since a survey. Rows: keys."""
        raise NotImplementedError

    def prune_rows(
        self, connection: Connection, settings: Settings, segment: Segment, stopping: Callable[[], bool]
    ) -> int:
        """Delete row by row the settled rows of a segment that can't be emptied; return how many rows counted went."""
        raise NotImplementedError

    def clear_up(self, connection: Connection, schema: str, segment: Segment) -> None:
        """Delete what other tables have of rows that went, and of a segment that was dropped."""
        raise NotImplementedError


class _ProducerSide(SegmentedSide):
    part = "producer"
    counted = "half_message"
    # What was published is in the WAL. Rows that were written again would be published again.
    conditions: Mapping[str, str] = {
        table: f"{column} = key_id" for table, column in SEGMENTED["producer"].items() if table != "published"
    }

    def retention(self, settings: Settings) -> float:
        return settings.retention

    def indexes(self, _schema: str, _segment: Segment) -> list[Statement]:
        return []

    def survey(self, connection: Connection, settings: Settings, segment: Segment) -> Survey | None:
        undelivered = self._undelivered(connection, settings, segment)
        if len(undelivered) > FEW:
            return None  # it waits for its groups as a whole: row by row, each pass would read all of it in vain
        values = {"first": segment.first, "end": segment.end, "retention": settings.retention, "limit": FEW + 1}
        with connection.begin():
            survey = sql.of_segment(sql.SURVEY, settings.schema, self.leaves(segment), values)
            _, ((snapshot, halves, keep, *ends),) = execute(connection, plan_by_index(), survey)
        since = {"snapshot": snapshot} | dict(zip(("topics", "queues", "lasts"), ends, strict=True))
        return Survey(halves, frozenset(("", id_) for id_ in {*(keep or ()), *undelivered}), since)

    def _undelivered(self, connection: Connection, settings: Settings, segment: Segment) -> set[UUID]:
        """Return messages that known groups have yet to consume; where there are many, some more than few."""
        if not settings.undelivered_retention:
            return set()
        values = {"undelivered": settings.undelivered_retention, "limit": FEW + 1}
        with connection.begin():
            statement = sql.of_segment(sql.UNDELIVERED, settings.schema, self.leaves(segment), values)
            _, rows = execute(connection, plan_by_index(), statement)
        return {half_id for (half_id,) in rows}

    def changed(self, schema: str, segment: Segment, survey: Survey) -> Statement:
        values = {"first": segment.first, "end": segment.end, **survey.since}
        return sql.of_segment(sql.CHANGED, schema, self.leaves(segment), values)

    def prune_rows(
        self, connection: Connection, settings: Settings, segment: Segment, stopping: Callable[[], bool]
    ) -> int:
        return prune_rows(connection, settings, UUID(int=segment.first.int - 1), segment.end, stopping)

    def clear_up(self, connection: Connection, schema: str, segment: Segment) -> None:
        with connection.begin():
            execute(connection, sql.left_over(schema, first=segment.first, end=segment.end))


PRODUCER: SegmentedSide = _ProducerSide()


def segment_length(retention: float) -> int:
    """Return how long (whole seconds) a segment is: half of the retention, but a minute at least."""
    return math.ceil(max(retention / _SEGMENTS, _SHORTEST))


def segments(connection: Connection, schema: str, side: SegmentedSide = PRODUCER) -> list[Segment]:
    """Read the segments, in order. The catalog is the only place that knows them."""
    found = []
    for name, bound in execute(connection, sql.partitions(schema, side.counted))[0]:
        named, bounds = re.fullmatch(_NAME.format(side.counted), name), _BOUNDS.search(bound)
        if named and bounds:
            found.append(Segment(UUID(bounds[1]), UUID(bounds[2]), named[1]))
    return sorted(found)


def gaps(found: Sequence[Segment]) -> Iterator[tuple[UUID, UUID]]:
    """Yield the ranges of ids that are in no segment, as the id before the first one and the id after the last one.

    Those of business strings, which have no order, are none of them.
    """
    before = UUID(int=0)
    for each in found:
        if each.first.int > before.int + 1:
            yield before, each.first
        before = UUID(int=each.end.int - 1)
    yield before, FIRST_BUSINESS_ID


def is_overdue(segment: Segment, side: SegmentedSide, settings: Settings, now_ms: float) -> bool:
    """Tell whether a segment couldn't be emptied for so long that its rows go one by one."""
    return side.old_after(segment, settings) + segment_length(side.retention(settings)) * 1000 < now_ms


def now_ms(connection: Connection) -> int:
    """Return the database's time in ms since 1970."""
    return int(execute(connection, sql.NOW_MS)[0][0][0])


# --- making ----------------------------------------------------------------------------------------------------------


def make_next(connection: Connection, settings: Settings, side: SegmentedSide = PRODUCER) -> None:
    """Make the segments of the time to come that are missing, as far as that can be done now."""
    with connection.begin():
        found, now = segments(connection, settings.schema, side), now_ms(connection)
    length = segment_length(side.retention(settings)) * 1000
    for number in range(now // length, now // length + 1 + _AHEAD):
        first, end = id_at(number * length), id_at((number + 1) * length)
        if inside := _overlapping(found, first, end):
            # Of another length: the rest of this range begins after it.
            first = max(first, inside[-1].end)
        if first >= end:
            continue
        if len(found) >= MOST:
            logger.warning(
                "there are %d segments of %s, and old ones can't be dropped; no more are made",
                len(found),
                side.counted,
                extra={"outbox_event": "segments.too_many", "table": side.counted, "segments": len(found)},
            )
            return
        segment = segment_of(first, end)
        if make_segment(connection, settings, segment, side):
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


def make_segment(connection: Connection, settings: Settings, segment: Segment, side: SegmentedSide = PRODUCER) -> bool:
    """Make the partitions of a segment, in one transaction; False where a lock can't be had, or too much is in the way.

    The ids of the new range that are in the DEFAULT partition (those of clocks that are ahead) move over before.

    To attach a partition, PostgreSQL locks the DEFAULT one altogether, and lets others go on with the table itself.
    That isn't enough. A statement that is being planned meanwhile knows the partitions of before, waits for the DEFAULT
    one, and takes its snapshot after that: rows of the new partition are in the snapshot, and the plan doesn't read
    them. Dispatch would pass over an op for ever. So all wait for the table, and plan after that.
    """
    schema = settings.schema
    with shortly(connection, schema, "make", segment, side) as mine:
        if not mine:
            return False
        _add_partitions(connection, schema, segment, side, side.tables)
        return True
    return False


def complete_segments(connection: Connection, settings: Settings, side: SegmentedSide = PRODUCER) -> None:
    """Make partitions that a segment lacks: a worker that knew fewer tables made it, while the schema was upgraded."""
    schema = settings.schema
    with connection.begin():
        lacking = [each for each in segments(connection, schema, side) if _missing(connection, schema, each, side)]
    for segment in lacking:
        with shortly(connection, schema, "complete", segment, side) as mine:
            # Again under the lock: another worker may have made them meanwhile.
            if mine and (missing := _missing(connection, schema, segment, side)):
                _add_partitions(connection, schema, segment, side, missing)


def _missing(connection: Connection, schema: str, segment: Segment, side: SegmentedSide) -> list[str]:
    """Return the tables that have no partition of a segment."""
    found = execute(connection, *(sql.partitions(schema, table) for table in side.tables))
    there = {name for rows in found for name, _ in rows}
    return [table for table in side.tables if segment.leaf(table) not in there]


def _add_partitions(
    connection: Connection, schema: str, segment: Segment, side: SegmentedSide, tables: Collection[str]
) -> None:
    """Make partitions of a segment for some of the tables, with the rows that are in the DEFAULT ones so far."""
    # The DEFAULT partition may be large.
    execute(connection, plan_by_index())
    for table in tables:
        execute(connection, sql.create(schema, table, segment.leaf(table)))
    if side.counted in tables:
        execute(connection, *side.indexes(schema, segment))
    execute(connection, _lock_tables(schema, side, [f"{table}_default" for table in tables]))
    values = {"first": segment.first, "end": segment.end}
    for table in tables:
        names = {"leaf": segment.leaf(table), "table": table, "column": side.tables[table]}
        execute(
            connection,
            sql.moved(schema, names, side.columns(schema, table), values),
            sql.attach(schema, names, segment.first, segment.end),
        )


# --- emptying --------------------------------------------------------------------------------------------------------


def empty_segment(
    connection: Connection,
    settings: Settings,
    segment: Segment,
    side: SegmentedSide = PRODUCER,
    *,
    by_row: bool = False,
    stopping: Callable[[], bool] = lambda: False,
) -> int:
    """Delete settled rows of a segment that are older than the retention; return how many halves, or inbox rows, went.

    With ``by_row``, a segment that can't be emptied is deleted row by row.
    """
    schema = settings.schema
    with connection.begin():
        locking = try_lock(side.lock(schema)), sql.row_security(schema, side.tables)
        (taken, *_), ((hidden,),) = execute(connection, *locking)
        if not taken[0] or segment not in segments(connection, schema, side) or hidden:
            return 0  # what the role can't see, it can't keep
    survey = None
    try:
        survey = side.survey(connection, settings, segment)
    except DBAPIError as error:
        if sqlstate(error) not in CUT_OFF or is_lost(connection):
            raise
        emit(BatchTooLarge(batch=f"the survey of {side.counted}", size=None, reason=str(error.orig), error=error))
    if survey is None:
        # Where it takes longer than the server lets it, rows go one by one in time.
        return side.prune_rows(connection, settings, segment, stopping) if by_row else 0
    done, left = 0, survey.rows > len(survey.keep)
    if left and len(survey.keep) <= FEW:
        done = _compact(connection, schema, segment, side, survey)
    if not done and left and by_row:
        logger.info(
            "segment %s of %s can't be emptied; its settled rows are deleted one by one",
            segment.suffix,
            side.counted,
            extra={
                "outbox_event": "segment.held",
                "table": side.counted,
                "segment": segment.suffix,
                "keep": len(survey.keep),
            },
        )
        done = side.prune_rows(connection, settings, segment, stopping)
    side.clear_up(connection, schema, segment)
    return done


def _compact(connection: Connection, schema: str, segment: Segment, side: SegmentedSide, survey: Survey) -> int:
    """Truncate a segment, and write again the rows to be kept; return how many of the rows counted went.

    A transaction that writes into the segment waits for the lock, and looks again after it: each statement takes the
    locks of all partitions that it reads before it takes its snapshot, and one that only inserts (an op of a half,
    which was kept) needs no row of it. Only a transaction in REPEATABLE READ that reads the table later than it took
    its snapshot finds nothing. Those of ours take the lock first (`outbox.reconcile.source`); a caller's that decides a
    half asks the unique index (`outbox.database.decision`). So it is with rows that move when a segment is made or
    dropped.
    """
    leaves = {table: _name(schema, name) for table, name in side.leaves(segment).items()}
    with shortly(connection, schema, "empty", segment, side) as mine:
        if not mine:
            return 0
        for table in side.conditions:
            execute(connection, sql.make_survivors(schema, table))
        execute(connection, Statement(f"LOCK TABLE {', '.join(leaves.values())} IN ACCESS EXCLUSIVE MODE"))
        # A statement of its own, after the lock: it sees all that was written since the survey.
        _, changed = execute(connection, plan_by_index(), side.changed(schema, segment, survey))
        keep = sorted({*survey.keep, *((group, id_) for group, id_ in changed)})
        if len(keep) > FEW:
            return 0
        survivors = 0
        for table, condition in side.conditions.items():
            columns = side.columns(schema, table)
            (rows,) = execute(connection, sql.copy_survivors(leaves[table], table, condition, columns, keep))
            survivors += len(rows) if table == side.counted else 0
        execute(connection, Statement(f"TRUNCATE {', '.join(leaves.values())}"))
        for table in side.conditions:
            execute(connection, sql.put_back(leaves[table], table, side.columns(schema, table)))
        return max(survey.rows - survivors, 0)
    return 0


def drop_segment(
    connection: Connection, settings: Settings, segment: Segment, side: SegmentedSide = PRODUCER
) -> bool | None:
    """Drop a segment that has few rows, which move into the DEFAULT partitions; tell whether that could be done.

    None: it has too many.
    """
    schema, dropped = settings.schema, False
    count = sql.at_most(schema, {table: segment.leaf(table) for table in side.conditions}, FEW + 1)
    with shortly(connection, schema, "drop", segment, side) as mine:
        if not mine:
            return False
        # Looked at before the lock, and again under it.
        if execute(connection, count)[0][0][0] > FEW:
            return None
        execute(connection, _lock_tables(schema, side, side.leaves(segment).values()))
        if execute(connection, count)[0][0][0] > FEW:
            return None
        for table in side.tables:
            columns = side.columns(schema, table) if table in side.conditions else None
            execute(connection, *sql.fold(schema, table, segment.leaf(table), columns))
        dropped = True
    if dropped:
        side.clear_up(connection, schema, segment)
    return dropped


# --- row by row ------------------------------------------------------------------------------------------------------


def in_batches(
    bind: Connection,
    name: tuple[str, ...],
    most: int,
    stopping: Callable[[], bool],
    batch: Callable[[A, int], tuple[int, int, A, bool]],
    at: A,
) -> int:
    """Do batches, each where the one before has ended, until one was the last, or ``stopping``; return what was done.

    ``batch`` begins ``at`` a place, and is one of `outbox.database.execute.by_size`. It returns how many rows it took,
    how many of them it has done, where the next one begins, and whether there is one.
    """
    done, going = 0, True
    while going and not stopping():
        _, now, at, going = by_size(bind, name, most, partial(batch, at))
        done += now
    return done


def prune_rows(connection: Connection, settings: Settings, after: UUID, end: UUID, stopping: Callable[[], bool]) -> int:
    """Delete settled halves of a range of ids, row by row; return how many went. A short transaction a batch.

    Goes on from id to id until it comes to halves that are too young, so that a half that can't go yet (a message that
    waits for its time) never hides later ones. Rows that were written about halves that had just gone (a delivery whose
    transaction was still open) go, too. ``stopping`` is asked between batches.
    """
    schema, batch = settings.schema, settings.prune_batch
    ages = {"retention": settings.retention, "undelivered": settings.undelivered_retention}

    def delete(after: UUID, size: int) -> tuple[int, int, UUID, bool]:
        halves = sql.settled_halves(schema, **ages, after=after, end=end, limit=size)
        with connection.begin():
            _, ((found, gone, young, last),) = execute(connection, plan_by_index(), halves)
            full = found == size
            execute(connection, sql.left_over(schema, first=_next(after), end=_next(last) if full else end))
        return found, gone, last, full and not young

    return in_batches(connection, ("prune", "halves", schema), batch, stopping, delete, after)


def prune_business_rows(connection: Connection, settings: Settings, stopping: Callable[[], bool]) -> int:
    """Delete settled halves of business strings, row by row; return how many went. A short transaction a batch.

    Their ids say nothing of their time, so that they are looked at in the order of their decisions, as `prune_rows`
    looks at others in that of their ids. Leftovers of some that went are found in a part of the ids that each pass
    draws.
    """
    schema, batch = settings.schema, settings.prune_batch
    ages = {"retention": settings.retention, "undelivered": settings.undelivered_retention}

    def delete(at: tuple[str, str], size: int) -> tuple[int, int, tuple[str, str], bool]:
        halves = sql.settled_business_halves(schema, **ages, xid=at[0], after=at[1], limit=size)
        with connection.begin():
            _, ((found, gone, young, last),) = execute(connection, plan_by_index(), halves)
        return found, gone, (last[0], last[1]) if last else at, found == size and not young

    first = ("0", str(FIRST_BUSINESS_ID))
    deleted = in_batches(connection, ("prune", "business halves", schema), batch, stopping, delete, first)
    size = (1 << 124) // _SLICES
    begin = FIRST_BUSINESS_ID.int + random.randrange(_SLICES) * size  # noqa: S311 - no secret
    with connection.begin():
        execute(connection, sql.left_over(schema, first=UUID(int=begin), end=UUID(int=begin + size - 1)))
    return deleted


def _next(half_id: UUID) -> UUID:
    return UUID(int=half_id.int + 1)


# --- locks -----------------------------------------------------------------------------------------------------------


@contextmanager
def shortly(connection: Connection, schema: str, act: str, segment: Segment, side: SegmentedSide) -> Iterator[bool]:
    """Begin a transaction that waits for no lock for long, and say whether the segment is this worker's to act on.

    A lock that can't be had, or a statement that is cut off, ends it, and is told; the caller goes on after the block.
    """
    begun = False
    try:
        with connection.begin():
            (taken, *_), _ = execute(connection, try_lock(side.lock(schema)), limits(WAIT, WAIT))
            # Read after the lock was taken: another worker may have made or dropped it meanwhile.
            found = segments(connection, schema, side)
            match act:
                case "make" | "make way for":
                    mine = not _overlapping(found, segment.first, segment.end)
                case "empty" | "drop" | "look through" | "complete":
                    mine = segment in found
                case _:
                    mine = True
            begun = True
            yield bool(taken[0]) and mine
    except DBAPIError as error:
        if sqlstate(error) not in {*CONTENDED, STATEMENT_CANCELLED, _FAILED_CHECK}:
            raise
        logger.debug(
            "couldn't %s segment %s of %s now: %s",
            act,
            segment.suffix,
            side.counted,
            error.orig,
            extra={"outbox_event": "segment.busy", "act": act, "table": side.counted, "segment": segment.suffix},
        )
        if not begun:
            yield False


def _lock_tables(schema: str, side: SegmentedSide, leaves: Iterable[str]) -> Statement:
    """Lock the tables, and some of their partitions; one statement, so that all its waits together are short."""
    tables = [*(f"ONLY {_name(schema, table)}" for table in side.tables), *(_name(schema, leaf) for leaf in leaves)]
    return Statement(f"LOCK TABLE {', '.join(tables)} IN ACCESS EXCLUSIVE MODE")


def _name(schema: str, table: str) -> str:
    return in_schema(f"{{s}}.{table}", schema)
