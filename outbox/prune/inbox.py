"""Prune of the inbox: of its segments as a whole, and of rows in none of them one by one.

An inbox row may go when it is settled and old, and the producer doesn't have its half any more. A segment holds rows of
all groups and topics, whose producers are known to the passes of these pairs alone. So each of them asks its producer
which halves of an old segment it still has, and writes that down (``segment_hold``): those rows stay, and so do all
rows of a pair that hasn't said anything. When few rows stay, the segment is emptied, by whichever worker comes next.

What the producer doesn't have any more doesn't come back. A half that it didn't have yet (of a transaction that was
open for days) is consumed after it was asked: such rows stay, until it is asked again.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import UUID

from outbox.database.execute import Row, Statement, Template, by_size, execute
from outbox.database.sql import NOW
from outbox.message.ids import FIRST_BUSINESS_ID
from outbox.prune import sql
from outbox.prune.rewrite import holds, rewrite
from outbox.prune.segments import (
    FEW,
    Segment,
    SegmentedSide,
    Survey,
    gaps,
    in_batches,
    is_overdue,
    now_ms,
    segments,
    shortly,
)
from outbox.prune.segments_sql import of_segment
from outbox.text import topic_of

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from outbox.settings import Settings

#: A row has its time before its insert takes the lock of its partition, by much less (seconds) than this.
_MARGIN = 60.0
#: So many halves of all topics a producer is asked about at most. One that has more hasn't pruned that time yet.
_HALVES = 20_000
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


class _InboxSide(SegmentedSide):
    """The inbox: one table.

    What changes in a segment after it was surveyed is found by its time (``changed_at``), which all that writes a row
    sets, and by an index that has only rows changed late: when the next segment was over as well. So it costs a
    consumer nothing that isn't that far behind.
    """

    part = "consumer"
    counted = "consumer_message"
    conditions: Mapping[str, str] = {"consumer_message": "consumer_group = key_group AND message_id = key_id"}

    def retention(self, settings: Settings) -> float:
        return settings.inbox_retention

    def old_after(self, segment: Segment, settings: Settings) -> float:
        return max(super().old_after(segment, settings), _late_ms(segment) + _MARGIN * 1000)

    def indexes(self, schema: str, segment: Segment) -> list[Statement]:
        late = dt.datetime.fromtimestamp(_late_ms(segment) / 1000, dt.UTC)
        return [sql.index_of_late(schema, segment.leaf(self.counted), late.isoformat())]

    def survey(self, connection: Connection, settings: Settings, segment: Segment) -> Survey | None:
        schema, since = settings.schema, None
        with shortly(connection, schema, "look through", segment, self) as mine:
            if mine:
                # Transactions that were writing have ended; one that comes after this has a later time.
                share = Statement(f'LOCK TABLE "{schema}".{segment.leaf(self.counted)} IN SHARE MODE')
                _, ((since,),) = execute(connection, share, NOW)
        if since is None:
            return None
        values = {"first": segment.first, "retention": settings.inbox_retention, "limit": FEW + 1}
        with connection.begin():
            ((rows, groups, ids),) = execute(connection, of_segment(sql.SURVEY, schema, self.leaves(segment), values))[
                0
            ]
        keep = frozenset(zip(groups, ids, strict=True))
        return Survey(rows, keep, {"since": since - dt.timedelta(seconds=_MARGIN)})

    def changed(self, schema: str, segment: Segment, survey: Survey) -> Statement:
        return sql.changed_since(schema, segment.leaf(self.counted), survey.since["since"].isoformat())

    def prune_rows(self, *_: object) -> int:
        # That is done by the passes of the groups, which can ask their producers.
        return 0

    def clear_up(self, connection: Connection, schema: str, _segment: Segment) -> None:
        with connection.begin():
            firsts = [each.first for each in segments(connection, schema, self)]
        if rewrite(connection, schema, holds(firsts)) is None:
            with connection.begin():
                execute(connection, sql.drop_holds(schema, firsts))


INBOX: SegmentedSide = _InboxSide()


def _late_ms(segment: Segment) -> int:
    """Return the time (ms since 1970) from which on a change in a segment is late: it was over for its own length."""
    return 2 * segment.end_ms - (segment.first.int >> 80)


def prune_inbox(
    connection: Connection, source: Connection, settings: Settings, group: str, topic: str, stopping: Callable[[], bool]
) -> int:
    """Say what a group's producer still has of old segments; delete its rows of no segment, or of one that is overdue.

    Returns how many rows went.
    """
    with connection.begin():
        found, now = segments(connection, settings.schema, INBOX), now_ms(connection)
    prune = _GroupPrune(connection, source, settings, group, topic, stopping)
    for segment in found:
        if INBOX.old_after(segment, settings) < now and not stopping():
            prune.hold(segment, now)
    in_time = [each for each in found if not is_overdue(each, INBOX, settings, now)]
    return sum(prune.rows(*each) for each in gaps(in_time)) + prune.business_rows()


@dataclass(frozen=True, slots=True)
class _GroupPrune:
    """The inbox rows of a group in a topic, as it keeps it; ``source`` is on the database of its producer."""

    connection: Connection
    source: Connection
    settings: Settings
    group: str
    topic: str
    stopping: Callable[[], bool]

    def hold(self, segment: Segment, now: int) -> None:
        """Write down what the producer still has of a segment, unless that is much."""
        schema, of_producer = self.settings.schema, topic_of(self.topic)
        asking = {"topic": of_producer, "first": segment.first, "end": segment.end}

        def ask(size: int) -> tuple[int, list[UUID], int]:
            with self.source.begin():
                return *execute(self.source, sql.still_between(schema, **asking, most=size))[0][0], size

        halves, ids, most = by_size(self.source, ("prune", "holds", schema), _HALVES, ask)
        if halves < most and len(ids) <= FEW:
            values = {"group": self.group, "topic": self.topic, "first": segment.first, "ids": sorted(ids)}
            with self.connection.begin():
                execute(self.connection, sql.hold(schema, **values, asked_ms=now))

    def rows(self, after: UUID, end: UUID) -> int:
        """Delete old rows between two ids, as far as the producer has pruned their messages; return how many went."""
        batch = self.settings.prune_batch

        def delete(after: UUID, size: int) -> tuple[int, int, UUID, bool]:
            rows, old = self._read(sql.old_inbox, size, after=after, end=end)
            going = len(rows) == size and (bool(old) or size < batch)
            return len(rows), self._forget(old), rows[-1][0] if rows else after, going

        name = ("prune", "inbox", self.group, self.topic)
        return in_batches(self.connection, name, batch, self.stopping, delete, after)

    def business_rows(self) -> int:
        """Do the same with all old rows of business strings, whose ids have no order: by their last change."""

        def delete(at: tuple[UUID, dt.datetime], size: int) -> tuple[int, int, tuple[UUID, dt.datetime], bool]:
            rows, old = self._read(sql.old_business_inbox, size, after=at[0], since=at[1])
            return len(rows), self._forget(old), (rows[-1][0], rows[-1][2]) if rows else at, len(rows) == size

        name, batch = ("prune", "business inbox", self.group, self.topic), self.settings.prune_batch
        return in_batches(self.connection, name, batch, self.stopping, delete, (FIRST_BUSINESS_ID, _EPOCH))

    def _read(self, query: Template, limit: int, **bounds: object) -> tuple[list[Row], list[UUID]]:
        """Return the next rows, and the ids of those that are settled and old."""
        values = {"group": self.group, "topic": self.topic, "retention": self.settings.inbox_retention}
        with self.connection.begin():
            (rows,) = execute(self.connection, query(self.settings.schema, **values, **bounds, limit=limit))
        return rows, [row[0] for row in rows if row[1]]

    def _forget(self, old: Sequence[UUID]) -> int:
        """Delete those of these rows whose messages the producer has pruned; return how many went."""
        if not old:
            return 0
        schema, values = self.settings.schema, {"group": self.group, "retention": self.settings.inbox_retention}
        with self.source.begin():
            existing = {row[0] for row in execute(self.source, sql.still_there(schema, old))[0]}
        gone = [message_id for message_id in old if message_id not in existing]
        with self.connection.begin():
            return len(execute(self.connection, sql.forget(schema, **values, ids=gone))[0])
