"""Ranges that need no second look: found in sync once, with nothing in flight, and nothing written in them since.

Half, op and message rows never change, and an inbox row that is consumed doesn't either. So what was in sync stays
so unless something is added: an op that became visible, a message (dispatched late, or resent), a compensation, a
check, a failure. Each is found by an index on what was added since the mark of the last run, so that a night costs
the day's rows and the differences, not the history.

Where the producer's storage was put back to an earlier state, nothing is trusted: the newest rows at the mark must
still be there. The consumer's storage has taken the marks with it, unless they are in another database: but the mark
says how far the group had come, and a group that isn't as far any more has lost something. Nor is anything trusted
after a group was reset: it handles again what was settled, and what it reads again between two runs is touched.

What this can't see is a change behind the framework's back: an inbox row that was deleted by hand in a range that
was settled. So a range is trusted for ``keep_for`` seconds only, and `Job.keep_for` = 0 trusts none.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from outbox.database.execute import Statement, execute, statement
from outbox.database.sql import LOG, STORAGE, open_rows
from outbox.reconcile.job import Access, Outcome, Pair, Range, counts_as_json, counts_of_json
from outbox.reconcile.source import Snapshot, Snapshots, connected, in_savepoint, reaching
from outbox.reconcile.sql import as_array

#: With another meaning of a range or a mark, older ones are forgotten.
_FORMAT = 5

#: Messages of a range that is kept, unless a range that was digested has more: few, since one late message spoils it.
ROWS_OF_RANGE = 600

SettledRange = tuple[Range, Counter[Outcome]]
#: Where everything stood at a run, as JSON has it.
Mark = Mapping[str, Any]

# Verified within so many seconds, in order.
KNOWN = """
SELECT first_id, end_id, counts::text FROM {s}.reconciliation_settled
 WHERE consumer_group = %(group)s AND topic = %(feed)s
   AND verified_at > clock_timestamp() - make_interval(secs => %(keep_for)s)
 ORDER BY first_id
"""

_MARK = "SELECT version, mark::text FROM {s}.reconciliation_mark WHERE consumer_group = %(group)s AND topic = %(feed)s"

_WRITE_MARK = """
INSERT INTO {s}.reconciliation_mark AS m (consumer_group, topic, version, mark)
VALUES (%(group)s, %(feed)s, %(version)s + 1, %(mark)s::jsonb)
ON CONFLICT (consumer_group, topic) DO UPDATE
   SET version = excluded.version, mark = excluded.mark, written_at = clock_timestamp()
 WHERE m.version = %(version)s
RETURNING version
"""

_FORGET = """
DELETE FROM {s}.reconciliation_settled
 WHERE consumer_group = %(group)s AND topic = %(feed)s AND NOT first_id = ANY (%(keep)s::uuid[])
"""

_KEEP = """
INSERT INTO {s}.reconciliation_settled (consumer_group, topic, first_id, end_id, counts)
SELECT %(group)s, %(feed)s, * FROM unnest(%(firsts)s::uuid[], %(ends)s::uuid[], %(counts)s::jsonb[])
"""

# A log that fell back may have lost what the consumer has seen. On a standby a snapshot doesn't list what is in
# progress: there nothing counts as seen from the oldest such transaction on.
_HERE = f"""
SELECT {LOG},
       CASE WHEN pg_is_in_recovery() THEN concat(pg_snapshot_xmin(n), ':', pg_snapshot_xmin(n), ':') ELSE n::text END,
       pg_snapshot_xmax(n)::text::int8
  FROM pg_control_system() s, pg_current_snapshot() n
"""

_HEADS = """
SELECT q, coalesce(l.position, 0), l.half_id::text
  FROM generate_series(0, (SELECT queues FROM {s}.topic WHERE name = %(topic)s) - 1) q
  LEFT JOIN LATERAL (SELECT position, half_id FROM {s}.message m WHERE m.topic = %(topic)s AND m.queue = q
                      ORDER BY position DESC LIMIT 1) l ON true
"""

_NEWEST_OP = "SELECT sequence, half_id::text FROM {s}.op_message ORDER BY sequence DESC LIMIT 1"

# A message lost behind an offset that is as far again was handled again.
_CONSUMED = f"""
SELECT concat_ws('.', {STORAGE}),
       (SELECT coalesce(jsonb_object_agg(queue, position), jsonb_build_object())::text
          FROM (SELECT queue, max(position) AS position FROM {{s}}.consumer_offset
                 WHERE consumer_group = %(group)s AND topic = %(feed)s GROUP BY queue) o),
       (SELECT count(*) FROM {{s}}.consumer_passage WHERE consumer_group = %(group)s AND topic = %(feed)s)
  FROM pg_control_system() s
"""

# Where the message or the op isn't there, it was pruned if it, and all before it, made way for newer ones.
_LOST_AT_PRODUCER = """
SELECT EXISTS (
    SELECT FROM unnest(%(queues)s::int[], %(positions)s::int8[], %(ids)s::uuid[]) AS w (queue, position, half_id)
     WHERE w.half_id IS NOT NULL
       AND NOT EXISTS (SELECT FROM {s}.message m WHERE m.topic = %(topic)s AND m.queue = w.queue
                          AND m.position = w.position AND m.half_id = w.half_id)
       AND (EXISTS (SELECT FROM {s}.message m
                     WHERE m.topic = %(topic)s AND m.queue = w.queue AND m.position <= w.position)
            OR NOT EXISTS (SELECT FROM {s}.message m
                            WHERE m.topic = %(topic)s AND m.queue = w.queue AND m.position > w.position))
) OR EXISTS (
    SELECT FROM unnest(%(sequences)s::int8[], %(ops)s::uuid[]) AS w (sequence, half_id)
     WHERE NOT EXISTS (SELECT FROM {s}.op_message o WHERE o.half_id = w.half_id AND o.sequence = w.sequence)
       AND (EXISTS (SELECT FROM {s}.op_message o WHERE o.sequence <= w.sequence)
            OR NOT EXISTS (SELECT FROM {s}.op_message o WHERE o.sequence > w.sequence)))
"""

# All that became visible since the mark, whatever its age.
_OPS_SINCE = """
        SELECT half_id FROM {s}.op_message
         WHERE xid >= pg_snapshot_xmin(%(snapshot)s::pg_snapshot)
           AND NOT pg_visible_in_snapshot(xid, %(snapshot)s::pg_snapshot)"""
_MESSAGES_SINCE = """
        SELECT m.half_id
          FROM unnest(%(queues)s::int[], %(positions)s::int8[]) AS q (queue, position)
         CROSS JOIN LATERAL (SELECT half_id FROM {s}.message m
                              WHERE m.topic = %(topic)s AND m.queue = q.queue AND m.position > q.position OFFSET 0) m
"""
WRITTEN_SINCE = f"{_OPS_SINCE}\n         UNION ALL{_MESSAGES_SINCE}"

# And what waits for a decision, or was compensated; by bucket. What has a half of another topic touches no range of
# this one; most of what is new lies behind all ranges, and its half isn't looked up.
_TOUCHED_AT_PRODUCER = f"""
SELECT DISTINCT width_bucket(half_id, %(bounds)s::uuid[])
  FROM ({_MESSAGES_SINCE}
         UNION ALL
        SELECT t.half_id
          FROM ({_OPS_SINCE}
                 UNION ALL
                SELECT half_id FROM {{s}}.half_check
                 UNION ALL
                SELECT half_id FROM {{s}}.compensation) t
          LEFT JOIN {{s}}.half_message h ON h.id = t.half_id
         WHERE t.half_id < %(last)s AND (h.id IS NULL OR h.topic = %(topic)s)) w
"""

_TOUCHED_AT_CONSUMER = f"SELECT DISTINCT width_bucket(message_id, %(bounds)s::uuid[]) FROM ({open_rows('true')}) t"


def pair_statement(template: str, access: Access, pair: Pair, **values: object) -> Statement:
    """Return one of these statements for a pair."""
    return statement(access.schema, template, {"group": pair.group, "topic": pair.topic, "feed": pair.feed, **values})


@dataclass(frozen=True, slots=True)
class SettledRanges:
    """The ranges of a pair that are settled as of these snapshots, and what is needed to go on from here.

    ``ranges`` are those inside the window, ``outside`` are where those begin that have nothing in common with it;
    ``forgotten`` were touched since.
    """

    ranges: list[SettledRange]
    version: int
    mark: Mark
    outside: tuple[UUID, ...] = ()
    forgotten: int = 0

    @property
    def counts(self) -> Counter[Outcome]:
        """The outcomes in all ranges."""
        return sum((counts for _, counts in self.ranges), Counter())


def mark_of(snapshots: Snapshots, pair: Pair) -> Mark:
    """Return where everything stands: the producer's snapshot, the ends of its queues, and its newest op.

    And how far the group has come, in how many passages.
    """
    access = snapshots.producer.access
    with reaching(access):
        (here,), heads, ops = execute(
            snapshots.producer.connection, *(pair_statement(each, access, pair) for each in (_HERE, _HEADS, _NEWEST_OP))
        )
    *log, snapshot, xmax = here
    filters = [None if names is None else sorted(names) for names in (pair.tags, pair.keys, pair.headers)]
    effect = None if pair.effect is None else [pair.effect.table, pair.effect.column]
    identity = [_FORMAT, *log, access.schema, *filters, effect, access.settings.retention]
    ends = {"heads": [list(head) for head in heads], "ops": [list(op) for op in ops]}
    access = snapshots.consumer.access
    with reaching(access):
        (((storage, offsets, passages),),) = execute(
            snapshots.consumer.connection, pair_statement(_CONSUMED, access, pair)
        )
    of_group = {"offsets": json.loads(offsets), "passages": passages}
    return {"identity": [*identity, storage], "snapshot": snapshot, "xmax": xmax, **ends, **of_group}


def fell_back(snapshots: Snapshots, pair: Pair, before: Mark, now: Mark) -> bool:
    """Has the producer, or the group, lost something of before the mark, though it still is the same storage?

    Storage that was put back tells nothing; new transactions have the numbers, and new messages the positions, of those
    that were lost. So the newest of that time must still be there.
    """
    if now["xmax"] < before["xmax"]:
        return True
    if before["passages"] != now["passages"]:
        return True
    if any(now["offsets"].get(queue, 0) < position for queue, position in before["offsets"].items()):
        return True
    queues, positions, ids = zip(*before["heads"], strict=True) if before["heads"] else ((), (), ())
    sequences, ops = zip(*before["ops"], strict=True) if before["ops"] else ((), ())
    values = {"queues": list(queues), "positions": list(positions), "ids": list(ids)}
    values |= {"sequences": list(sequences), "ops": list(ops)}
    producer = snapshots.producer
    with reaching(producer.access), in_savepoint(producer.connection, 0.0, by_index=True):
        lost = execute(producer.connection, pair_statement(_LOST_AT_PRODUCER, producer.access, pair, **values))
    return bool(lost[0][0][0])


def load(
    snapshots: Snapshots, pair: Pair, window: Range, keep_for: float, record_in: Access | None = None
) -> SettledRanges:
    """Return the ranges inside the window that needn't be looked at; none if ``keep_for`` (seconds) is 0.

    ``record_in`` is the database that has them, unless it is the consumer's.
    """
    now = mark_of(snapshots, pair)
    access = record_in or snapshots.consumer.access
    known_ranges = pair_statement(_MARK, access, pair), pair_statement(KNOWN, access, pair, keep_for=keep_for)
    if record_in is None:
        with reaching(access):
            marks, rows = execute(snapshots.consumer.connection, *known_ranges)
    else:
        with connected(record_in) as connection:
            marks, rows = execute(connection, *known_ranges)
    version, before = (int(marks[0][0]), json.loads(marks[0][1])) if marks else (0, None)
    if not keep_for or before is None or before["identity"] != now["identity"] or not rows:
        return SettledRanges([], version, now)
    if fell_back(snapshots, pair, before, now):
        return SettledRanges([], version, now, forgotten=len(rows))
    known = [(Range(first, end), counts_of_json(json.loads(counts))) for first, end, counts in rows]
    # With the ends too: what lies between two ranges must not count for the one before it.
    bounds = sorted({bound for each, _ in known for bound in each if bound is not None})
    touched: set[UUID] = set()
    for side, lookup in lookups(snapshots, pair, bounds, before, now):
        # By index: both are about what came lately, and statistics don't know what is late.
        with reaching(side.access), in_savepoint(side.connection, 0.0, by_index=True):
            touched |= {bounds[number - 1] for (number,) in execute(side.connection, lookup)[0] if number}
    untouched = [each for each in known if each[0].first not in touched]
    ranges = [each for each in untouched if each[0].clipped(window) == each[0]]
    # What overlaps the window is given up: the part of it that is inside is going to be in a range of its own.
    outside = tuple(each.first for each, _ in untouched if each.clipped(window) is None)
    return SettledRanges(ranges, version, now, outside, len(known) - len(untouched))


def keep(access: Access, pair: Pair, settled: SettledRanges, fresh: Sequence[SettledRange]) -> bool:
    """Record the ranges that are settled now; False if another run of the same pair was faster, which is no harm."""
    with connected(access) as connection:
        # The first run that writes at a version wins; the loser's ranges were judged against a mark that is gone.
        mark = json.dumps(settled.mark)
        (written,) = execute(connection, pair_statement(_WRITE_MARK, access, pair, version=settled.version, mark=mark))
        if not written:
            return False
        old = [*(each.first for each, _ in settled.ranges), *settled.outside]
        ranges = {
            "firsts": [each.first for each, _ in fresh],
            "ends": [each.end for each, _ in fresh],
            "counts": [json.dumps(counts_as_json(counts)) for _, counts in fresh],
        }
        execute(
            connection, pair_statement(_FORGET, access, pair, keep=old), pair_statement(_KEEP, access, pair, **ranges)
        )
        return True


def lookups(
    snapshots: Snapshots, pair: Pair, bounds: Sequence[UUID], before: Mark, now: Mark
) -> tuple[tuple[Snapshot, Statement], ...]:
    """Return what finds, in each database, the ranges in which anything was written since ``before``.

    Range n begins with the n-th of ``bounds``. Rows: ``(n,)``; 0 is before the first.
    """
    since, numbered, last = written_since(before, now), as_array(bounds), bounds[-1]
    producer, consumer = snapshots.producer, snapshots.consumer
    return (
        (producer, pair_statement(_TOUCHED_AT_PRODUCER, producer.access, pair, bounds=numbered, last=last, **since)),
        (consumer, pair_statement(_TOUCHED_AT_CONSUMER, consumer.access, pair, bounds=numbered)),
    )


def written_since(before: Mark, now: Mark) -> dict[str, object]:
    """Return what `WRITTEN_SINCE` binds besides the pair."""
    # A queue that is new is looked through from its beginning.
    heads = {queue: 0 for queue, *_ in now["heads"]} | {queue: position for queue, position, _ in before["heads"]}
    if now["passages"]:  # what the group has read again since was written again
        offsets = {int(queue): position for queue, position in before["offsets"].items()}
        heads = {queue: min(position, offsets.get(queue, position)) for queue, position in heads.items()}
    return {"snapshot": before["snapshot"], "queues": list(heads), "positions": list(heads.values())}


def settled_by(ranges: Sequence[SettledRange], excluded: Sequence[UUID]) -> list[SettledRange]:
    """Return the ranges, which are in order, in which none of these ids lies.

    Without those that have no end: new messages come into them, and so may rows that only the consumer has.
    """
    ids = sorted(excluded)
    settled: list[SettledRange] = []
    for each, counts in ranges:
        index = bisect_left(ids, each.first)
        if each.end is None or (index < len(ids) and ids[index] < each.end):
            continue
        before, others = settled[-1] if settled else (None, counts)
        # One range with its neighbour, if both are small.
        if before and before.end == each.first and others.total() + counts.total() <= ROWS_OF_RANGE:
            settled[-1] = Range(before.first, each.end), others + counts
        else:
            settled.append((each, counts))
    return settled
