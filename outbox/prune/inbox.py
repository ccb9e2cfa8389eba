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
from typing import TYPE_CHECKING, Any
from uuid import UUID

from outbox.database.execute import Statement, by_size, execute
from outbox.database.sql import NOW
from outbox.message.ids import FIRST_BUSINESS_ID
from outbox.prune import sql
from outbox.prune.rewrite import holds, rewrite
from outbox.prune.segments import FEW, Segment, SegmentedSide, Survey, gaps, is_overdue, now_ms, segments, shortly
from outbox.prune.segments_sql import of_segment

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
    for segment in found:
        if INBOX.old_after(segment, settings) < now and not stopping():
            _write_hold(connection, source, settings, (group, topic), segment, now)
    in_time = [each for each in found if not is_overdue(each, INBOX, settings, now)]
    deleted = 0
    for each in gaps(in_time):
        deleted += _prune_rows(connection, source, settings, (group, topic), each, stopping)
    return deleted + _prune_business_rows(connection, source, settings, (group, topic), stopping)


def _write_hold(
    connection: Connection, source: Connection, settings: Settings, pair: tuple[str, str], segment: Segment, now: int
) -> None:
    (group, topic), schema = pair, settings.schema
    asking = {"topic": topic, "first": segment.first, "end": segment.end}

    def ask(size: int) -> tuple[int, list[UUID], int]:
        with source.begin():
            return *execute(source, sql.still_between(schema, **asking, most=size))[0][0], size

    halves, ids, most = by_size(source, ("prune", "holds", schema), _HALVES, ask)
    if halves < most and len(ids) <= FEW:
        values = {"group": group, "topic": topic, "first": segment.first, "ids": sorted(ids), "asked_ms": now}
        with connection.begin():
            execute(connection, sql.hold(schema, **values))


def _prune_rows(
    connection: Connection,
    source: Connection,
    settings: Settings,
    pair: tuple[str, str],
    between: tuple[UUID, UUID],
    stopping: Callable[[], bool],
) -> int:
    """Delete a group's old inbox rows between two ids, as far as the producer has pruned their messages."""
    (group, topic), (after, end) = pair, between
    schema, batch, retention = settings.schema, settings.prune_batch, settings.inbox_retention
    values = {"group": group, "topic": topic, "end": end, "retention": retention}

    def delete(size: int) -> tuple[int, int, UUID, bool]:
        with connection.begin():
            (rows,) = execute(connection, sql.old_inbox(schema, after=after, limit=size, **values))
        old = [row[0] for row in rows if row[1]]
        gone = _forget(connection, source, settings, group, old)
        return len(rows), gone, rows[-1][0] if rows else after, len(rows) == size and (bool(old) or size < batch)

    deleted, going = 0, True
    while going and not stopping():
        _, gone, after, going = by_size(connection, ("prune", "inbox", group, topic), batch, delete)
        deleted += gone
    return deleted


def _prune_business_rows(
    connection: Connection, source: Connection, settings: Settings, pair: tuple[str, str], stopping: Callable[[], bool]
) -> int:
    """Do the same with all old rows of business strings, whose ids have no order: by the time of their last change."""
    group, topic = pair
    schema, batch, retention = settings.schema, settings.prune_batch, settings.inbox_retention
    values = {"group": group, "topic": topic, "retention": retention}
    after, since = FIRST_BUSINESS_ID, _EPOCH

    def delete(size: int) -> tuple[int, int, Any, bool]:
        with connection.begin():
            old = sql.old_business_inbox(schema, after=after, since=since, limit=size, **values)
            (rows,) = execute(connection, old)
        gone = _forget(connection, source, settings, group, [row[0] for row in rows if row[1]])
        return len(rows), gone, rows[-1] if rows else (after, None, since), len(rows) == size

    deleted, going = 0, True
    while going and not stopping():
        name = ("prune", "business inbox", group, topic)
        _, gone, (after, _, since), going = by_size(connection, name, batch, delete)
        deleted += gone
    return deleted


def _forget(connection: Connection, source: Connection, settings: Settings, group: str, old: Sequence[UUID]) -> int:
    """Delete those of a group's old inbox rows whose messages the producer has pruned; return how many went."""
    if not old:
        return 0
    with source.begin():
        existing = {row[0] for row in execute(source, sql.still_there(settings.schema, old))[0]}
    gone = [message_id for message_id in old if message_id not in existing]
    values = {"group": group, "ids": gone, "retention": settings.inbox_retention}
    with connection.begin():
        (forgotten,) = execute(connection, sql.forget(settings.schema, **values))
    return len(forgotten)
