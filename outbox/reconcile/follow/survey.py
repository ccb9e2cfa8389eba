"""Look at both sides for a follower, in two snapshots: at messages that are new, due, or touched by the log.

Nothing else is read. What the clock has brought past the grace period is digested, and the rows of ranges that differ
are read. Messages that came late (their ids are old, or ahead of the clock), that were sent again, compensated, or have
failed are found by what was written since the last look, by indexes, and are read one by one when their own grace
period is over. The outcome is `rows.judge`'s, as in any run.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from outbox.database.engines import discard
from outbox.database.execute import Template, driver_of, execute
from outbox.database.sql import open_rows
from outbox.message.ids import uuid7_at
from outbox.reconcile import sql
from outbox.reconcile.digest import PairDigester, mixing_of, united
from outbox.reconcile.follow.record import NEVER, FollowerState, PendingRange, clustered
from outbox.reconcile.job import Access, Job, Outcome, Pair, Part, Range
from outbox.reconcile.pairing import rules_now, rules_of
from outbox.reconcile.plan import Digested, cut
from outbox.reconcile.record import settled
from outbox.reconcile.record.settled import WRITTEN_SINCE
from outbox.reconcile.rows import FINDING, SCHEMAS, Comparison, Rules, Side, differing, in_flight, to_uuids
from outbox.reconcile.source import (
    PostgresSide,
    SessionSettings,
    Snapshot,
    Snapshots,
    engine_of,
    in_savepoint,
    reaching,
    snapshots_of,
)
from outbox.reconcile.tables import ProducerState

#: How long (seconds) after its id a message usually is in its queue, at most: ids are taken up so much later than they
#: would be, so that they aren't in flight any more.
SLACK = 2.0
#: Ids ahead of the producer's clock by so many seconds aren't waited for until it has come there.
AHEAD = 10.0
#: So many messages are taken up in a pass; behind the clock, the next one follows at once.
ROWS_OF_PASS = 100_000
#: The least and the most seconds of ids that a pass takes up.
_FEWEST_SECONDS, _MOST_SECONDS = 20.0, 86_400.0
#: Messages of a range that is digested; few, so that little is read for one difference.
_ROWS_OF_BUCKET = 60
_MOST_BUCKETS = 4_096
#: Of more messages of a range in flight, the range is judged again, and not each of them.
_MOST_IN_FLIGHT = 1_000
#: So many messages are read one by one in a pass at most.
_MOST_READ = 2_000
#: So many known differences are read again in each pass, in turn.
_OPEN_READ = 200
#: After so many seconds a message that is ahead of the group is looked at again.
_AHEAD_AGAIN = 30.0
#: So far (seconds) before the newest that is left, all is judged again where the log or the group fell back.
REWIND = 3_600.0


@dataclass(slots=True)
class Chunk:
    """A range that was judged: its outcomes, and what is ahead of the group or in flight in it."""

    ids: Range
    counts: Counter[Outcome] = field(default_factory=Counter)
    up_to: dict[int, int] = field(default_factory=dict)
    in_flight_until: int = 0


@dataclass(slots=True)
class LogSurvey:
    """What a look has found.

    ``found``: differences that aren't known, to be looked at a second time; ``known``: those that still are as they
    were (both `rows.FINDING`). ``gone``: known ones that are none any more. ``behind``: the clock is further already.
    """

    rules: Rules
    chunks: list[Chunk] = field(default_factory=list)
    found: pa.Table = field(default_factory=FINDING.empty_table)
    known: pa.Table = field(default_factory=FINDING.empty_table)
    gone: set[UUID] = field(default_factory=set)
    judged: int = 0
    behind: bool = False
    fell_back: bool = False

    def has_judged(self, id_: UUID) -> bool:
        """Does a message lie in one of the ranges that were judged?"""
        return any(id_ in chunk.ids for chunk in self.chunks)


@dataclass(slots=True)
class LogSurveyor:
    """Takes a look, and advances the state by it.

    ``open`` are the differences that are known, by id, those that were looked at the longest ago first; ``urgent`` of
    them are read in any case. ``examined`` is what the log doesn't tell of and was read already; the look adds to it.
    """

    job: Job
    pair: Pair
    snapshots: Snapshots
    state: FollowerState
    open: dict[UUID, Outcome]
    urgent: Collection[UUID]
    examined: set[UUID]

    def take(self) -> LogSurvey:
        """Take the look."""
        look = LogSurvey(rules_of(self.job, self.pair, self.snapshots))
        now = settled.mark_of(self.snapshots, self.pair)
        before, self.state.mark = self.state.mark, now
        late: list[UUID] = []
        if before is not None:
            look.fell_back = before["identity"] != now["identity"] or settled.fell_back(
                self.snapshots, self.pair, before, now
            )
            if look.fell_back:
                self._rewind(before, now)
            else:
                late = self._late(look.rules, before, now)
        self._judge_ranges(look)
        self._judge_messages(look, late)
        return look

    # --- ranges and messages to judge --------------------------------------------------------------------

    def _late(self, rules: Rules, before: settled.Mark, now: settled.Mark) -> list[UUID]:
        """Return the rows written since the last look below the frontier, or ahead of the clock."""
        ahead = uuid7_at(rules.producer_now / 1e6 + AHEAD)
        values = {**settled.written_since(before, now), "topic": self.pair.topic}
        producer = self.snapshots.producer
        statement = _LATE(producer.access.schema, frontier=self.state.frontier, ahead=ahead, **values)
        with reaching(producer.access), in_savepoint(producer.connection, 0.0, by_index=True):
            return [id_ for (id_,) in execute(producer.connection, statement)[0]]

    def _unsaid(self, rules: Rules) -> list[UUID]:
        """Return what the log doesn't tell of, and wasn't read so far."""
        producer, consumer, frontier = self.snapshots.producer, self.snapshots.consumer, self.state.frontier
        of_pair: dict[str, Any] = {"topic": self.pair.topic, "feed": self.pair.feed, "frontier": frontier}
        unsaid = _UNSAID(producer.access.schema, grace=rules.grace / 1e6, **of_pair)
        failing = _FAILING(consumer.access.schema, group=self.pair.group, **of_pair)
        ids: set[UUID] = set()
        for side, statement in ((producer, unsaid), (consumer, failing)):
            with reaching(side.access), in_savepoint(side.connection, 0.0, by_index=True):
                ids |= {id_ for (id_,) in execute(side.connection, statement)[0]}
        self.examined &= ids
        return sorted(ids - self.examined - self.open.keys() - self.state.watch.keys())

    def _rewind(self, before: settled.Mark, now: settled.Mark) -> None:
        """Go back to what is left of a log that fell back, or to where a group reads again."""
        changed = [head[2] for head in now["heads"] if head not in before["heads"]]
        offsets = {int(queue): position for queue, position in now["offsets"].items()}
        fallen = [int(queue) for queue, position in before["offsets"].items() if offsets.get(int(queue), 0) < position]
        producer = self.snapshots.producer
        values = {"topic": self.pair.topic, "queues": fallen, "positions": [offsets.get(each, 0) for each in fallen]}
        with reaching(producer.access):
            (following,) = execute(producer.connection, _AT_POSITIONS(producer.access.schema, **values))
        ids = [self.state.frontier, *(UUID(id_) for id_ in changed if id_), *(id_ for (id_,) in following)]
        back = uuid7_at(max((min(ids).int >> 80) / 1e3 - REWIND, 0.0))
        self.state.frontier = min(self.state.frontier, back)
        self.state.pending = [each for each in self.state.pending if each.ids.first < self.state.frontier]
        self.examined.clear()

    def _ranges(self, look: LogSurvey) -> Iterator[tuple[Range, int]]:
        """Yield the ranges to be judged, in order and apart, with how many messages are expected in each."""
        state, rules = self.state, look.rules
        due = state.due(rules.producer_now, rules.offsets or {})
        state.pending = [each for each in state.pending if each not in due]
        for each in due:
            state.judged -= _in_order(each.counts)
            yield each.ids, max(each.counts.total(), _ROWS_OF_BUCKET)
        until = (rules.producer_now - rules.grace) / 1e6 - SLACK
        since = (state.frontier.int >> 80) / 1e3
        if until > since:
            seconds = min(until - since, state.span)
            look.behind = since + seconds < until
            first, state.frontier = state.frontier, uuid7_at(since + seconds)
            if first < state.frontier:
                yield Range(first, state.frontier), int(ROWS_OF_PASS * seconds / state.span)

    # --- judging -----------------------------------------------------------------------------------------

    def _judge_ranges(self, look: LogSurvey) -> None:
        began = self.state.frontier
        expected = _apart(self._ranges(look))
        if not expected:
            return
        ranges = [ids for ids, _ in expected]
        points = sorted(point for ids, rows in expected for point in evenly(ids, rows // _ROWS_OF_BUCKET))
        horizon = UUID(bytes=look.rules.horizon)
        digester = PairDigester(self.snapshots, self.pair, mixing_of(self.snapshots), horizon)
        found = digester.digest(ranges, cut(ranges, points))
        for ids in ranges:
            chunk, table = self._judge(look, ids, found)
            look.chunks.append(chunk)
            look.judged += chunk.counts.total()
            self.state.judged += _in_order(chunk.counts)
            self._sort_out(look, table, {id_ for id_ in self.open if id_ in ids})
            if ids.first == began:
                self._pace(ids, chunk.counts.total())

    def _pace(self, ids: Range, rows: int) -> None:
        """Have the next pass take up as many seconds of ids as hold about `ROWS_OF_PASS` messages."""
        seconds = ((self.state.frontier.int >> 80) - (ids.first.int >> 80)) / 1e3
        span = min(seconds * ROWS_OF_PASS / max(rows, 1), self.state.span * 4)
        self.state.span = min(max(span, _FEWEST_SECONDS), _MOST_SECONDS)

    def _judge(self, look: LogSurvey, ids: Range, found: Digested) -> tuple[Chunk, pa.Table]:
        """Judge a range by its digests, and by the rows of where they differ."""
        chunk = Chunk(ids)
        for bucket, counts in found.clean:
            if bucket.first in ids:
                chunk.counts += counts
        different = [(bucket, rows) for bucket, rows in found.differing if bucket.first in ids]
        if not different:
            return chunk, FINDING.empty_table()
        ranges = united(bucket for bucket, _ in different)
        readers = readers_of(self.snapshots, self.pair, sum(rows for _, rows in different))
        collected = Comparison(*readers, look.rules)(ranges)
        chunk.counts += collected.counts
        self._note_waiting(look.rules, chunk, collected.table)
        return chunk, collected.table

    def _judge_messages(self, look: LogSurvey, late: Sequence[UUID]) -> None:
        """Judge what is read one by one: what is due, what the log doesn't tell of, and some of what is known."""
        state, now = self.state, look.rules.producer_now
        touched = [id_ for id_ in late if id_ in self.open]
        state.watch_all((id_ for id_ in late if id_ not in self.open), now + look.rules.grace)
        unsaid = self._unsaid(look.rules)
        single, ranges = clustered(unsaid) if len(unsaid) > _MOST_READ // 4 else (unsaid, [])
        state.add_pending(PendingRange(each) for each in ranges)
        self.examined.update(unsaid)
        due = (id_ for id_, due_at in state.watch.items() if due_at <= now)
        first = dict.fromkeys([*touched, *self.urgent, *due, *single])
        to_read = [id_ for id_ in first if not look.has_judged(id_)]
        in_turn = (id_ for id_ in self.open if not look.has_judged(id_))
        some = {*to_read[:_MOST_READ], *itertools.islice(in_turn, _OPEN_READ)}
        state.watch |= dict.fromkeys((id_ for id_ in to_read[_MOST_READ:] if id_ not in self.open), now)
        for id_ in some:
            state.watch.pop(id_, None)
            if id_ in self.open:  # to the end of those that are looked at in turn
                self.open[id_] = self.open.pop(id_)
        if not some:
            return
        table, others = Comparison(*readers_of(self.snapshots, self.pair, 0), look.rules).again(sorted(some))
        look.judged += len(some)
        state.judged += _in_order(others)
        for id_, due_at in due_of(look.rules, in_flight(table)):
            state.watch[id_] = due_at
        for id_ in to_uuids(ahead_of(table)):
            state.watch[id_] = now + int(_AHEAD_AGAIN * 1e6)
        self._sort_out(look, table, self.open.keys() & some)

    def _note_waiting(self, rules: Rules, chunk: Chunk, table: pa.Table) -> None:
        """Note the messages of a range that are ahead of the group, and those in flight."""
        ahead = ahead_of(table)
        for queue, position in zip(ahead["queue"].to_pylist(), ahead["position"].to_pylist(), strict=True):
            chunk.up_to[queue] = max(chunk.up_to.get(queue, 0), position)
        flying = list(due_of(rules, in_flight(table)))
        if len(flying) > _MOST_IN_FLIGHT:
            chunk.in_flight_until = max(due_at for _, due_at in flying)
        else:
            self.state.watch |= dict(flying)

    def _sort_out(self, look: LogSurvey, table: pa.Table, known: Collection[UUID]) -> None:
        """Sort differences that were read into new and known ones; the others of ``known`` are gone."""
        differences = differing(table).filter(pc.not_equal(differing(table)["outcome"], int(Outcome.UNCONSUMED)))
        kinds = dict(zip(to_uuids(differences), map(Outcome, differences["outcome"].to_pylist()), strict=True))
        is_known = pa.array([self.open.get(id_) is kind for id_, kind in kinds.items()], pa.bool_())
        look.known = pa.concat_tables([look.known, differences.filter(is_known)])
        look.found = pa.concat_tables([look.found, differences.filter(pc.invert(is_known))])
        look.gone |= set(known) - kinds.keys()


def pending_of(chunk: Chunk, unlisted: Counter[Outcome], again_at: int) -> PendingRange | None:
    """Return the messages of a range to judge again; ``unlisted`` differences are looked at again at a time."""
    due_at = min(filter(None, (chunk.in_flight_until, again_at if unlisted else 0)), default=NEVER)
    if not chunk.up_to and due_at == NEVER:
        return None
    counts = Counter({outcome: number for outcome, number in chunk.counts.items() if not outcome.differs})
    counts[Outcome.UNCONSUMED] = chunk.counts[Outcome.UNCONSUMED]
    return PendingRange(chunk.ids, due_at, chunk.up_to, +counts + unlisted)


def _apart(expected: Iterable[tuple[Range, int]]) -> list[tuple[Range, int]]:
    """Return ranges in order and without what an earlier one has; each with the messages that are expected in it."""
    apart: list[tuple[Range, int]] = []
    for ids, rows in sorted(expected):
        within = Range(apart[-1][0].end or ids.first, None) if apart else ids
        if (clipped := ids.clipped(within)) is not None:
            apart.append((clipped, rows))
    return apart


def evenly(ids: Range, pieces: int) -> list[UUID]:
    """Return the points that cut a range of ids, which are spread evenly over it, into so many pieces."""
    first, end = ids.first.int, ids.end.int if ids.end is not None else 2**128
    pieces = max(min(pieces, _MOST_BUCKETS), 1)
    return [UUID(int=first + (end - first) * number // pieces) for number in range(1, pieces)]


def _in_order(counts: Counter[Outcome]) -> Counter[Outcome]:
    """Return the counts of what nothing is wrong with, for ever."""
    kinds = (Outcome.CONSUMED, Outcome.ROLLED_BACK, Outcome.LEFT_OUT, Outcome.UNJUDGED)
    return Counter({kind: counts[kind] for kind in kinds if counts[kind]})


def ahead_of(table: pa.Table) -> pa.Table:
    """Return what of a table of findings lies ahead of the group."""
    return table.filter(pc.equal(table["outcome"], int(Outcome.UNCONSUMED)))


def due_of(rules: Rules, flying: pa.Table) -> Iterator[tuple[UUID, int]]:
    """Yield messages in flight with the time at which their grace period is over, by the producer's clock.

    Without those that are scheduled: they become messages, or are overdue, which both is found.
    """
    skew = rules.producer_now - rules.consumer_now
    flying = flying.filter(pc.fill_null(pc.not_equal(flying["state"], int(ProducerState.SCHEDULED)), True))
    times = [
        pc.add(flying[name].cast(pa.int64()), rules.grace + by).fill_null(0).to_numpy()
        for name, by in (("at", 0), ("received_at", skew), ("changed_at", skew))
    ]
    ends = np.stack(times) if flying.num_rows else np.empty((3, 0), "i8")
    soonest = np.where(ends > rules.producer_now, ends, NEVER).min(axis=0, initial=NEVER)
    soonest = np.where(soonest == NEVER, rules.producer_now + 1_000_000, soonest + 1)
    yield from zip(to_uuids(flying), soonest.tolist(), strict=True)


# --- statements: what was written since the last pass, without what was judged ---------------------------

#: So many ids of each kind that the log doesn't tell of are read in a pass.
_MOST_UNSAID = 5_000

#: What became visible since a mark (`settled.written_since`) with an id below the frontier, or made ahead of time.
#: Rows: ``(half_id,)``.
_LATE: Template = Template(f"""
SELECT DISTINCT half_id FROM ({WRITTEN_SINCE}) t
 WHERE half_id < %(frontier)s::uuid OR half_id >= %(ahead)s::uuid
""")

# Each by an index. Their rows go away, or are few: the caller leaves out what it has judged already.
#: What no op and no message tells of: halves that wait for a decision, what was compensated, what is overdue for its
#: release by so many seconds. Rows: ``(half_id,)``.
_UNSAID: Template = Template(f"""
(SELECT half_id FROM {{s}}.half_check WHERE topic = %(topic)s AND half_id < %(frontier)s::uuid LIMIT {_MOST_UNSAID})
 UNION ALL
(SELECT half_id FROM {{s}}.compensation WHERE half_id < %(frontier)s::uuid
  ORDER BY half_id DESC LIMIT {_MOST_UNSAID})
 UNION ALL
(SELECT half_id FROM {{s}}.scheduled_message
  WHERE recalled_at IS NULL AND deliver_at < clock_timestamp() - make_interval(secs => %(grace)s)
    AND half_id < %(frontier)s::uuid
  ORDER BY deliver_at LIMIT {_MOST_UNSAID})
""")

#: What a group isn't done with: it fails at it, has parked it, or has it wait for its key. Rows: ``(message_id,)``.
_FAILING: Template = Template(f"""
SELECT message_id FROM ({open_rows(f"discarded_at IS NULL LIMIT {_MOST_UNSAID}")}) f
 WHERE message_id < %(frontier)s::uuid
""")

#: The messages that a group comes to next, of the queues of which positions are given. Rows: ``(half_id,)``.
_AT_POSITIONS: Template = Template("""
SELECT n.half_id
  FROM unnest(%(queues)s::int[], %(positions)s::int8[]) AS q (queue, position)
 CROSS JOIN LATERAL (SELECT half_id FROM {s}.message m
                      WHERE m.topic = %(topic)s AND m.queue = q.queue AND m.position > q.position
                      ORDER BY m.position LIMIT 1) n
""")


# --- what it reads on ------------------------------------------------------------------------------------

# A pass takes its snapshots on the two connections of a follower for as long as it reads. Many rows are read by COPY,
# on connections that import these snapshots, as a run reads; what is little on the connections themselves, which costs
# a tenth of it.

#: From so many rows on, COPY by another connection is cheaper.
_WORTH_COPY = 4_000


@dataclass(frozen=True, slots=True)
class ConnectedSide:
    """One side of a pair, read on a connection that is in a transaction."""

    connection: Connection
    access: Access
    part: Part
    pair: Pair

    def read(self, ranges: Sequence[Range]) -> pa.Table:
        """Return the rows of the ranges, sorted by id (`rows.SCHEMAS`).

        Raises:
            SourceError: they can't be read.
        """
        schema = SCHEMAS[self.part]
        if not ranges:
            return schema.empty_table()
        with reaching(self.access):
            _, rows = execute(
                self.connection, sql.PLAN_FOR_ROWS, sql.rows(self.part, self.access.schema, self.pair, ranges)
            )
        if not rows:
            return schema.empty_table()
        ids, *columns = zip(*sorted(rows), strict=True)
        arrays = [pa.array([id_.bytes for id_ in ids], schema[0].type)]
        arrays += [pa.array(column, of.type) for column, of in zip(columns, list(schema)[1:], strict=True)]
        return pa.Table.from_arrays(arrays, schema=schema)


@dataclass(slots=True)
class Sessions:
    """The connections of a follower. They are opened when they are needed, and again after one was lost."""

    job: Job
    settings: SessionSettings
    _open: dict[Part, Connection] = field(default_factory=dict)

    def close(self) -> None:
        """Close the connections."""
        for connection in self._open.values():
            discard(connection)
        self._open.clear()

    @property
    def backends(self) -> list[int]:
        """The processes of the servers behind the open connections."""
        return [int(driver_of(connection).info.backend_pid) for connection in self._open.values()]

    @contextmanager
    def snapshots(self, waiting: Callable[[], None]) -> Iterator[Snapshots]:
        """Take snapshots as `source.snapshots_of` does, and give them back at the end of the block."""
        taking = snapshots_of(self.job.databases, waiting=waiting, settings=self.settings, on=self._connection)
        with self._closed_on_error(), taking as snapshots:
            yield snapshots

    def read_again(self, pair: Pair, ids: list[UUID]) -> tuple[pa.Table, Counter[Outcome]]:
        """Read messages as they are now (`pairing.SecondRead`); nothing is in a transaction before or after."""
        with self._closed_on_error():
            try:
                rules = rules_now(self.job, pair, self._opened)
                return Comparison(self._side("producer", pair), self._side("consumer", pair), rules).again(ids)
            finally:
                for connection in self._open.values():
                    with suppress(SQLAlchemyError):  # what went wrong before is to be told
                        connection.rollback()

    @contextmanager
    def _opened(self, part: Part) -> Iterator[Connection]:
        with reaching(self.job.databases[part]):
            yield self._connection(part)

    def _side(self, part: Part, pair: Pair) -> ConnectedSide:
        return ConnectedSide(self._connection(part), self.job.databases[part], part, pair)

    def _connection(self, part: Part) -> Connection:
        if part not in self._open:
            access = self.job.databases[part]
            with reaching(access):
                # READ COMMITTED, against the server's default: outside of a snapshot a statement sees what is there.
                self._open[part] = engine_of(access).connect().execution_options(isolation_level="READ COMMITTED")
        return self._open[part]

    @contextmanager
    def _closed_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.close()
            raise


def readers_of(snapshots: Snapshots, pair: Pair, rows: int) -> tuple[Side, Side]:
    """Return what reads about so many rows of both sides, the producer's first, in snapshots."""

    def side(part: Part, snapshot: Snapshot) -> Side:
        if rows >= _WORTH_COPY:
            return PostgresSide(snapshot.access, part, pair, snapshot.name, snapshot.settings)
        return ConnectedSide(snapshot.connection, snapshot.access, part, pair)

    return side("producer", snapshots.producer), side("consumer", snapshots.consumer)
