"""Ranges that need no second look: found in sync once, with nothing in flight, and nothing written in them since.

Half, op and message rows never change, and an inbox row that is consumed doesn't either. So what was in sync stays
so unless something is added: an op that became visible, a message (dispatched late, or resent), a compensation, a
check, a failure. Each is found by an index on what was added since the mark of the last run, so that a night costs
the day's rows and the differences, not the history.

What this can't see is a change behind the framework's back: an inbox row that was deleted by hand in a range that
was settled. So a range is trusted for ``keep_for`` seconds only, and `Job.keep_for` = 0 trusts none.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from outbox.database.execute import execute
from outbox.reconcile.job import Outcome, Pair, Range
from outbox.reconcile.record import sql
from outbox.reconcile.source import Snapshot, Snapshots, engine_of, in_savepoint, reaching

#: With another meaning of a range or a mark, older ones are forgotten.
_FORMAT = 2

#: Messages of a range that is kept, unless a range that was digested has more: few, since one late message spoils it.
ROWS_OF_RANGE = 600

SettledRange = tuple[Range, Counter[Outcome]]


@dataclass(frozen=True, slots=True)
class SettledRanges:
    """The ranges of a pair that are settled as of these snapshots, and what is needed to go on from here.

    ``ranges`` are those inside the window, ``outside`` are where those begin that have nothing in common with it;
    ``forgotten`` were touched since.
    """

    ranges: list[SettledRange]
    version: int
    mark: Mapping[str, Any]
    outside: tuple[UUID, ...] = ()
    forgotten: int = 0

    @property
    def counts(self) -> Counter[Outcome]:
        """The outcomes in all ranges."""
        return sum((counts for _, counts in self.ranges), Counter())


@dataclass(slots=True)
class _Mark:
    """Where everything stood at a run: the snapshot of the producer's database, and the end of each queue."""

    identity: list[Any]
    snapshot: str
    heads: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, snapshots: Snapshots, pair: Pair) -> _Mark:
        schema = snapshots.producer.access.schema
        with reaching(snapshots.producer.access):
            ((here,), heads) = execute(snapshots.producer.connection, sql.here(), sql.heads(schema, pair.topic))
        filters = [None if names is None else sorted(names) for names in (pair.tags, pair.keys)]
        effect = None if pair.effect is None else [pair.effect.table, pair.effect.column]
        horizon = snapshots.producer.access.settings.retention
        return cls([_FORMAT, *here[:-1], schema, *filters, effect, horizon], here[-1], dict(heads))

    def as_json(self) -> dict[str, Any]:
        return {"identity": self.identity, "snapshot": self.snapshot, "heads": list(self.heads.items())}


def load(snapshots: Snapshots, pair: Pair, window: Range, keep_for: float) -> SettledRanges:
    """Return the ranges inside the window that needn't be looked at; none if ``keep_for`` (seconds) is 0."""
    now = _Mark.of(snapshots, pair)
    consumer, schema = snapshots.consumer, snapshots.consumer.access.schema
    with reaching(consumer.access):
        marks, rows = execute(
            consumer.connection,
            sql.mark(schema, pair.group, pair.topic),
            sql.load(schema, pair.group, pair.topic, keep_for),
        )
    version, before = (int(marks[0][0]), json.loads(marks[0][1])) if marks else (0, None)
    if not keep_for or before is None or before["identity"] != now.identity or not rows:
        return SettledRanges([], version, now.as_json())
    known = [(Range(first, end), _counter(counts)) for first, end, counts in rows]
    # With the ends too: what lies between two ranges must not count for the one before it.
    bounds = sorted({bound for each, _ in known for bound in each if bound is not None})
    touched = {bounds[number - 1] for number in _touched(snapshots, pair, bounds, before, now) if number}
    untouched = [each for each in known if each[0].first not in touched]
    ranges = [each for each in untouched if _inside(each[0], window)]
    # What overlaps the window is given up: the part of it that is inside is going to be in a range of its own.
    outside = tuple(each.first for each, _ in untouched if _apart(each, window))
    return SettledRanges(ranges, version, now.as_json(), outside, len(known) - len(untouched))


def keep(consumer: Snapshot, pair: Pair, settled: SettledRanges, fresh: Sequence[SettledRange]) -> bool:
    """Write down what is settled now; False if another run of the same pair was faster, which is no harm."""
    access = consumer.access
    engine = engine_of(access)
    try:
        with reaching(access), engine.begin() as connection:
            (written,) = execute(
                connection,
                sql.write_mark(access.schema, pair.group, pair.topic, settled.version, settled.mark),
            )
            if not written:
                return False
            old = [each.first for each, _ in settled.ranges]
            execute(
                connection,
                sql.forget(access.schema, pair.group, pair.topic, [*old, *settled.outside]),
                sql.keep(
                    access.schema,
                    pair.group,
                    pair.topic,
                    [each for each, _ in fresh],
                    [{outcome.label: number for outcome, number in counts.items()} for _, counts in fresh],
                ),
            )
            return True
    finally:
        engine.dispose()


def _touched(snapshots: Snapshots, pair: Pair, bounds: list[UUID], before: Mapping[str, Any], now: _Mark) -> set[int]:
    producer, consumer = snapshots.producer, snapshots.consumer
    heads = dict.fromkeys(now.heads, 0) | {int(queue): int(position) for queue, position in before["heads"]}
    # By index: both are about what came lately, and statistics don't know what is late.
    with reaching(producer.access), in_savepoint(producer.connection, 0.0, by_index=True):
        (ours,) = execute(
            producer.connection,
            sql.touched_at_producer(producer.access.schema, pair.topic, bounds, before["snapshot"], heads),
        )
    with reaching(consumer.access), in_savepoint(consumer.connection, 0.0, by_index=True):
        (theirs,) = execute(
            consumer.connection,
            sql.touched_at_consumer(consumer.access.schema, pair.group, pair.topic, bounds),
        )
    return {number for (number,) in (*ours, *theirs)}


def _inside(each: Range, window: Range) -> bool:
    if each.first < window.first:
        return False
    return window.end is None or (each.end is not None and each.end <= window.end)


def _apart(each: Range, window: Range) -> bool:
    if window.end is not None and each.first >= window.end:
        return True
    return each.end is not None and each.end <= window.first


def _counter(text: str) -> Counter[Outcome]:
    return Counter({Outcome[name.upper()]: number for name, number in json.loads(text).items()})


def settled_by(ranges: Sequence[SettledRange], excluded: Sequence[UUID]) -> list[SettledRange]:
    """Return the ranges, which are in order, in which none of these ids lies.

    Without those that have no end: new messages come into them, and so may rows that only the consumer has.
    """
    ids = sorted(excluded)
    settled: list[SettledRange] = []
    for each, counts in ranges:
        index = bisect_left(ids, each.first)
        if each.end is not None and (index == len(ids) or ids[index] >= each.end):
            _append(settled, each, counts)
    return settled


def _append(settled: list[SettledRange], each: Range, counts: Counter[Outcome]) -> None:
    """Add a range to others before it; to the last of them, if that is its neighbour and both are small."""
    if settled:
        before, others = settled[-1]
        if before.end == each.first and others.total() + counts.total() <= ROWS_OF_RANGE:
            settled[-1] = Range(before.first, each.end), others + counts
            return
    settled.append((each, counts))
