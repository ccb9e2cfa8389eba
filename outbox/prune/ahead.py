"""Segments are made ahead: where the DEFAULT partitions are small at once, and otherwise for a time that is far ahead.

When a partition is attached, PostgreSQL reads the DEFAULT one to the end, to see that no row of it belongs to the new
one, and all others wait. That is too long where the DEFAULT one is large: by many ids of business strings, or because
no worker made segments for long, or may. So these are told apart first:

1. A CHECK on the DEFAULT partitions refuses the ids of some segments to come (`_refuse`): NOT VALID, so that no row is
   read for it.
2. It is validated (`_validate`). That reads all rows, and blocks no transaction that reads or writes.
3. The segments are attached. PostgreSQL takes the CHECK for a proof, and reads nothing.
4. The CHECK is dropped.

Each step is found in the catalog by the next pass, of whatever worker, which goes on from there.

Until those segments begin, all goes into the DEFAULT partitions and is deleted row by row; and when they end, the rows
of today have been deleted.

While the CHECK is there, a message with such an id can't be sent. So the segments are as far ahead as `_lead`, where no
clock should be; and when half of that time is over and they aren't made, the CHECK is dropped instead.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import UUID

from outbox.database.execute import Statement, execute
from outbox.database.sql import limits, plan_by_index
from outbox.prune import segments_sql as sql
from outbox.prune.segments import (
    MOST,
    PRODUCER,
    Segment,
    SegmentedSide,
    id_at,
    make_next,
    make_segment,
    now_ms,
    segment_length,
    segment_of,
    segments,
    shortly,
)

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from outbox.settings import Settings

logger: logging.Logger = logging.getLogger("outbox.prune")

#: DEFAULT partitions of at most so many bytes together are read under the lock.
_SMALL = 8 << 20
#: So far ahead (seconds) are segments at least for which a CHECK is validated; and two of them, if these are longer.
_LEAD = 86400.0
#: So many segments are made behind that: in their time, the rows in the DEFAULT partitions before them come of age.
_BEHIND = 3
#: How long (seconds) the validation waits for a vacuum of the table. No transaction waits behind it.
_PATIENCE = 10.0
#: How long (seconds) it may read: a validation that isn't done in a day never will be.
_LONGEST = 86400.0

_REFUSED = re.compile(r"< '([0-9a-f-]{36})'::uuid\) OR \(\w+ >= '([0-9a-f-]{36})'::uuid")


@dataclass(frozen=True, slots=True)
class Refusal:
    """The CHECK of the DEFAULT partitions: the segments whose ids it refuses; the tables where it has no proof yet."""

    segments: tuple[Segment, ...]
    unproven: tuple[str, ...]

    def left(self, now: int) -> float:
        """Return how long (seconds) it is until the ids come that it refuses."""
        return ((self.segments[0].first.int >> 80) - now) / 1000


def make_ahead(
    connection: Connection,
    settings: Settings,
    side: SegmentedSide = PRODUCER,
    stopping: Callable[[], bool] = lambda: False,
) -> None:
    """Make segments of the time to come, as far as that can be done now."""
    with connection.begin():
        refusal = refusal_of(connection, settings.schema, side)
        ((size,),) = execute(connection, sql.size(settings.schema, side.tables))[0]
    if refusal is None and size <= _SMALL:
        make_next(connection, settings, side)
    elif refusal := refusal or _refuse(connection, settings, side):
        _make_refused(connection, settings, refusal, side, stopping)


def refusal_of(connection: Connection, schema: str, side: SegmentedSide = PRODUCER) -> Refusal | None:
    """Read the CHECK from the catalog."""
    (found,) = execute(connection, sql.refusals(schema, side.tables))
    if not found:
        return None
    bounds = _REFUSED.findall(found[0][1])
    unproven = tuple(table for table, _, valid in found if not valid)
    return Refusal(tuple(segment_of(UUID(first), UUID(end)) for first, end in bounds), unproven)


def last_moment(settings: Settings, side: SegmentedSide = PRODUCER) -> float:
    """Return how long (seconds) before its ids come the CHECK is dropped, if the segments aren't made by then."""
    return _lead(settings, side) / 2


def letting_in(schema: str, side: SegmentedSide = PRODUCER) -> list[Statement]:
    """Return the statements that drop the CHECK."""
    return [sql.let_in(schema, table) for table in side.tables]


def _lead(settings: Settings, side: SegmentedSide = PRODUCER) -> float:
    return max(2 * segment_length(side.retention(settings)), _LEAD)


def _refuse(connection: Connection, settings: Settings, side: SegmentedSide = PRODUCER) -> Refusal | None:
    """Add the CHECK for some segments far ahead; None where that can't be done now, or they are made already."""
    schema, lead, length = settings.schema, _lead(settings, side), segment_length(side.retention(settings))
    with connection.begin():
        found, now = segments(connection, schema, side), now_ms(connection)
    begin, last = math.ceil((now / 1000 + lead) / length), found[-1].end if found else UUID(int=0)
    number = min(math.ceil(lead / length) + _BEHIND, MOST // 2)
    if last >= id_at((begin + 1) * length * 1000) or len(found) + number > MOST:
        return None
    candidates = [
        segment_of(max(id_at(each * length * 1000), last), id_at((each + 1) * length * 1000))
        for each in range(begin, begin + number)
    ]
    defaults = ", ".join(f'"{schema}".{table}_default' for table in side.tables)
    with shortly(connection, schema, "make way for", candidates[0], side) as mine:
        if not mine:
            return None
        # No row can come any more; those of clocks that are far ahead stay where they are, and so does their segment.
        execute(connection, Statement(f"LOCK TABLE {defaults} IN ACCESS EXCLUSIVE MODE"), plan_by_index())
        (rows,) = execute(
            connection, sql.occupied(schema, side.tables, [(each.first, each.end) for each in candidates])
        )
        taken = {first for (first,) in rows}
        free = [each for each in candidates if each.first not in taken]
        if not free:
            return None
        ranges = [(each.first, each.end) for each in free]
        execute(connection, *(sql.refuse(schema, table, column, ranges) for table, column in side.tables.items()))
        logger.info(
            "the DEFAULT partitions are large: they are read once, while all goes on; the first segment begins in %d s",
            round(lead),
            extra={"outbox_event": "segments.far_ahead", "segment": free[0].suffix, "segments": len(free)},
        )
    with connection.begin():
        return refusal_of(connection, schema, side)


def _make_refused(
    connection: Connection, settings: Settings, refusal: Refusal, side: SegmentedSide, stopping: Callable[[], bool]
) -> None:
    """Go on from wherever this was left: validate, attach, drop the CHECK."""
    schema = settings.schema
    with connection.begin():
        found, now = segments(connection, schema, side), now_ms(connection)
    left = refusal.left(now) - last_moment(settings, side)
    if left > 0:
        for table in refusal.unproven:
            if stopping() or not _validate(connection, schema, table, refusal.segments[0], side, left):
                return
        for segment in refusal.segments:
            if segment not in found and (stopping() or not make_segment(connection, settings, segment, side)):
                return
    else:
        logger.warning(
            "segments of the time to come could not be made for %d s; ids of their time are let in again",
            round(last_moment(settings, side)),
            extra={"outbox_event": "segments.given_up", "segment": refusal.segments[0].suffix},
        )
    with shortly(connection, schema, "let in", refusal.segments[0], side) as mine:
        if mine:
            execute(connection, *letting_in(schema, side))


def _validate(
    connection: Connection, schema: str, table: str, segment: Segment, side: SegmentedSide, limit: float
) -> bool:
    """Validate the CHECK of a table, which may take ``limit`` seconds."""
    with shortly(connection, schema, "make way for", segment, side) as mine:
        if mine:
            execute(connection, limits(min(limit, _LONGEST), _PATIENCE), sql.validate(schema, table))
            return True
    return False
