"""The rows of two sides, how they are judged, and what a job comes to: for the report, the record and the exit code.

Arrow tables of either side have times in microseconds since 1970 in UTC, and ids of 16 bytes. A table of a side is
sorted by id, and has each id once. Its columns are in the order in which `outbox.reconcile.sql.rows` reads them.
"""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from outbox.message.ids import FIRST_BUSINESS_ID
from outbox.reconcile.job import FIRST_ID, KINDS, EngineName, Outcome, Pair, Part, Range, Repair, Tier, Window
from outbox.reconcile.tables import WITHDRAWN, InboxState, ProducerState, Torn

if TYPE_CHECKING:
    from outbox.reconcile.measure.result import MeasureResult

Array = np.ndarray[Any, Any]

_ID = pa.binary(16)
_TIME = pa.timestamp("us", tz="UTC")

#: One row for each half message of the topic, and each message or op that should have one, and hasn't. ``state`` is a
#: `ProducerState`, ``torn`` a `Torn`; ``sends`` the newest send number, 0 without one, with its ``queue`` and
#: ``position``. ``at`` is since when it is as it is: born, decided, to be delivered, or visible (of the newest send).
#: ``digest`` is that of the body as the producer has it now. ``opinion`` is the `InboxState` that it believes in, -1
#: without one, as of ours.
PRODUCER = pa.schema(
    [
        pa.field("id", _ID, nullable=False),
        pa.field("state", pa.int8(), nullable=False),
        pa.field("sends", pa.int16(), nullable=False),
        pa.field("queue", pa.int32(), nullable=False),
        pa.field("position", pa.int64(), nullable=False),
        pa.field("at", _TIME, nullable=False),
        pa.field("digest", pa.binary(), nullable=False),
        pa.field("addressed", pa.bool_(), nullable=False),
        pa.field("compensated", pa.bool_(), nullable=False),
        pa.field("opinion", pa.int8(), nullable=False),
        pa.field("torn", pa.int8(), nullable=False),
    ]
)

#: One row for each message that the group's inbox or the business table has. ``status`` is an `InboxState`,
#: ``effects`` the number of rows in the business table, -1 where none is named, ``skipped`` whether the handler
#: answered `Skip`.
CONSUMER = pa.schema(
    [
        pa.field("id", _ID, nullable=False),
        pa.field("status", pa.int8(), nullable=False),
        pa.field("attempts", pa.int32(), nullable=False),
        pa.field("received_at", _TIME),
        pa.field("changed_at", _TIME),
        pa.field("digest", pa.binary()),
        pa.field("skipped", pa.bool_(), nullable=False),
        pa.field("effects", pa.int64(), nullable=False),
    ]
)

#: What each side of a comparison reads.
SCHEMAS: dict[Part, pa.Schema] = {"producer": PRODUCER, "consumer": CONSUMER}

#: The id as a table that isn't ours has it, where its own is no UUID (`key_of`).
FOREIGN_ID = pa.field("foreign_id", pa.string())

#: One row for each difference and each message in flight; ``outcome`` is an `Outcome`. What a side lacks is null.
FINDING = pa.schema(
    [
        pa.field("id", _ID, nullable=False),
        pa.field("outcome", pa.int8(), nullable=False),
        FOREIGN_ID,
        *(pa.field(field.name, field.type) for field in PRODUCER if field.name not in {"id", "digest", "addressed"}),
        pa.field("producer_digest", pa.binary()),
        *(pa.field(field.name, field.type) for field in CONSUMER if field.name not in {"id", "digest", "skipped"}),
        pa.field("consumer_digest", pa.binary()),
    ]
)


#: The digests of bodies, which nothing has that is shown or kept: the digest of a short body gives the body away.
DIGESTS = frozenset({"producer_digest", "consumer_digest"})


#: The first and the last microsecond that Python has, of the years 1 and 9999; and what ADBC makes of -infinity.
_FIRST, _LAST, _ENDLESS = -62135596800_000_000, 253402300799_999_999, -(2**63) + 946684800_000_000
#: Before the first day that PostgreSQL has: ADBC adds thirty years to each time, and those of the end wrap round.
_WRAPPED = -210866803200_000_000


def within_calendar(times: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return times with those that Python doesn't have, infinity among them, as the first or the last that it has."""
    micros = times.cast(pa.int64())
    ends = pc.min_max(micros).as_py()
    if ends["min"] is None or (ends["min"] >= _FIRST and ends["max"] <= _LAST):
        return times
    wrapped = pc.and_(pc.less(micros, _WRAPPED), pc.not_equal(micros, _ENDLESS))
    within = pc.min_element_wise(pc.max_element_wise(micros, _FIRST, skip_nulls=False), _LAST, skip_nulls=False)
    return pc.if_else(wrapped, pa.scalar(_LAST, pa.int64()), within).cast(times.type)


def fixed_ids(table: pa.Table) -> np.ndarray[Any, Any]:
    """Return the column ``id`` as an array of 16-byte strings that compare as ids do."""
    column = table["id"].combine_chunks()
    if isinstance(column, pa.ChunkedArray):  # what combine_chunks returns for no chunks
        return np.empty(0, "S16")
    buffer = column.buffers()[1]
    return np.frombuffer(buffer, "S16", len(column), column.offset * 16)


def to_uuids(table: pa.Table) -> list[UUID]:
    """Return the column ``id`` as a list."""
    return [UUID(bytes=value) for value in table["id"].to_pylist()]


@dataclass(frozen=True, slots=True)
class Finding:
    """One difference, with all that either side says of the message; None where it says nothing.

    ``foreign_id`` is the id as a table that isn't ours has it, where that is no UUID.
    """

    id: UUID
    outcome: Outcome
    state: ProducerState | None
    sends: int | None
    queue: int | None
    position: int | None
    at: dt.datetime | None
    compensated: bool | None
    opinion: InboxState | None
    torn: Torn | None
    producer_digest: bytes | None
    status: InboxState | None
    attempts: int | None
    received_at: dt.datetime | None
    changed_at: dt.datetime | None
    effects: int | None
    consumer_digest: bytes | None
    foreign_id: str | None = None

    @property
    def name(self) -> str:
        """The id as people know it."""
        return self.foreign_id or str(self.id)

    @property
    def since(self) -> dt.datetime | None:
        """The last time at which either side did something with the message."""
        return max(filter(None, (self.at, self.changed_at)), default=None)


#: The numbers of a finding and for what they stand; below the least that is named a side says nothing by it.
NUMBERS: Mapping[str, tuple[type[int], int]] = {
    "outcome": (Outcome, 0), "state": (ProducerState, 0), "opinion": (InboxState, 0), "torn": (Torn, 1),
    "status": (InboxState, 0), "effects": (int, 0),
}  # fmt: skip


def to_findings(table: pa.Table) -> Iterator[Finding]:
    """Yield the rows of a table of findings (`rows.FINDING`)."""
    for batch in table.to_batches(max_chunksize=10_000):
        for row in batch.to_pylist():
            numbers = {
                name: None if (value := row[name]) is None or value < least else kind(value)
                for name, (kind, least) in NUMBERS.items()
            }
            yield Finding(**row | numbers | {"id": UUID(bytes=row["id"])})


# --- judging ---------------------------------------------------------------------------------------------

# One outcome for each id, decided purely, for a whole table at once. The order of the rules is that of `Outcome`: the
# gravest that fits counts.

#: Where the producer's opinion is compared: nothing graver is wrong, and the consumer won't say another word soon.
_HEARD = (Outcome.CONSUMED, Outcome.ROLLED_BACK, Outcome.LEFT_OUT, Outcome.PARKED, Outcome.FAILED)

_FIRST_BUSINESS_ID = np.array(FIRST_BUSINESS_ID.bytes, "S16")


@dataclass(frozen=True, slots=True)
class Rules:
    """What the outcome depends on besides the rows themselves.

    ``producer_now`` and ``consumer_now`` are the clocks of the databases, ``grace`` the grace period with the lag of a
    standby, all in microseconds. Ids below ``horizon`` (16 bytes) may have been pruned by the producer, and so may
    those of business strings, which have no time; None, and nothing was pruned. ``offsets`` and ``starts`` are the
    group's position and its first offset by queue (without offsets it has read everything), ``lost`` the ids that it
    found the producer to have lost, ``skipped`` the ranges that it will never read: queue, after which position, up to
    which one, ``again`` the ids of what took effect in an earlier passage, and has failed or is parked since the group
    read it again.
    """

    producer_now: int
    consumer_now: int
    grace: int
    horizon: bytes | None = FIRST_ID.bytes
    offsets: Mapping[int, int] | None = field(default_factory=dict)
    starts: Mapping[int, int] = field(default_factory=dict)
    lost: frozenset[bytes] = frozenset()
    skipped: Sequence[tuple[int, int, int]] = ()
    again: frozenset[bytes] = frozenset()
    max_resends: int = 3


class Both:
    """The rows of both sides (`PRODUCER`, `CONSUMER`), side by side in the order of their ids.

    ``in_producer`` and ``in_consumer`` are the rows of each id in their tables; -1 where a side has none.
    """

    def __init__(self, producer: pa.Table, consumer: pa.Table) -> None:
        ours, theirs = fixed_ids(producer), fixed_ids(consumer)
        # Both are in order already: finding the indexes of one in the other takes a twentieth of sorting them together.
        indexes = np.searchsorted(ours, theirs)
        alone = np.ones(len(theirs), bool)
        inside = indexes < len(ours)
        alone[inside] = ours[indexes[inside]] != theirs[inside]
        self.ids: Array = np.insert(ours, indexes[alone], theirs[alone])
        self.in_producer: Array = np.insert(np.arange(len(ours)), indexes[alone], -1)
        self.in_consumer: Array = np.full(len(self.ids), -1)
        self.in_consumer[indexes + np.cumsum(alone) - alone] = np.arange(len(theirs))
        self.producer: Any = producer
        self.consumer: Any = consumer

    def of_producer(self, column: str, missing: Any) -> Array:
        """Return a column of the producer's table; ``missing`` where it has no such row, or null."""
        return _spread(self.producer[column], self.in_producer, missing)

    def of_consumer(self, column: str, missing: Any) -> Array:
        """Return a column of the consumer's table; ``missing`` where it has no such row, or null."""
        return _spread(self.consumer[column], self.in_consumer, missing)

    def digests_differ(self) -> Array:
        """Tell where both sides know the digest of the body, and it isn't the same."""
        pair = np.flatnonzero((self.in_producer >= 0) & (self.in_consumer >= 0))
        ours = self.producer["digest"].take(pa.array(self.in_producer[pair]))
        theirs = self.consumer["digest"].take(pa.array(self.in_consumer[pair]))
        differ = np.zeros(len(self.ids), bool)
        differ[pair] = pc.fill_null(pc.not_equal(ours, theirs), False).to_numpy().astype(bool)
        return differ


def judge(both: Both, rules: Rules, *, every: bool = False) -> tuple[Counter[Outcome], pa.Table]:
    """Judge all messages of two sides.

    Returns how many there are of each outcome; and, as `FINDING`, the differences and the messages in flight, or
    ``every`` message.
    """
    outcomes = _decided(both, rules)
    values, numbers = np.unique(outcomes[outcomes >= 0], return_counts=True)
    counts = Counter({Outcome(int(value)): int(number) for value, number in zip(values, numbers, strict=True)})
    is_reported = outcomes >= 0 if every else (outcomes == Outcome.IN_FLIGHT) | (outcomes >= Outcome.TORN)
    reported = np.flatnonzero(is_reported)
    return counts, _findings(both, reported, outcomes[reported])


def _decided(both: Both, rules: Rules) -> Array:
    state, at = both.of_producer("state", -1), both.of_producer("at", 0)
    compensated = both.of_producer("compensated", False)
    status, effects = both.of_consumer("status", 0), both.of_consumer("effects", -1)
    skipped = both.of_consumer("skipped", False)
    queue, position = both.of_producer("queue", 0), both.of_producer("position", 0)

    known = state >= 0
    withdrawn = np.isin(state, WITHDRAWN) | compensated
    committed = (state >= ProducerState.COMMITTED) & ~withdrawn
    dispatched = committed & (state == ProducerState.DISPATCHED)
    consumed = status == InboxState.CONSUMED
    waiting = (status == InboxState.FAILED) | (status == InboxState.PARKED)
    quarantined = status == InboxState.QUARANTINED
    unknown = status == InboxState.NONE
    again = np.isin(both.ids, np.array(sorted(rules.again), "S16"))
    took = (effects >= 1) | ((consumed | again) & ~skipped)
    young = at > rules.producer_now - rules.grace
    may_be_pruned = _may_be_pruned(rules, both.ids)
    changed, received = both.of_consumer("changed_at", 0), both.of_consumer("received_at", 0)
    # A scheduled message has the time at which it is due.
    ahead_of_clock = (at > rules.producer_now + rules.grace) & (state != ProducerState.SCHEDULED)
    ahead_of_clock |= np.maximum(changed, received) > rules.consumer_now + rules.grace
    lately = (changed > rules.consumer_now - rules.grace) & ~ahead_of_clock
    received_lately = (received > rules.consumer_now - rules.grace) & ~ahead_of_clock
    before = _before(rules, queue, position)
    ahead = _unread(rules, queue, position)
    for_group = both.of_producer("addressed", True)
    unsent = (~unknown | took) & ((state == ProducerState.UNDECIDED) | (state == ProducerState.SCHEDULED))
    lost = np.isin(both.ids, np.array(sorted(rules.lost), "S16")) & ~unknown

    cases: list[tuple[Array, int]] = [
        (~known & unknown, -1),  # a row of the business table that is none of ours
        (~known & may_be_pruned, Outcome.UNJUDGED),
        (both.of_producer("torn", 0) > 0, Outcome.TORN),
        (withdrawn & took, Outcome.CONSUMED_THOUGH_ROLLED_BACK),
        (effects > 1, Outcome.DUPLICATE_EFFECT),
        ((~known | (state == ProducerState.UNDECIDED)) & lost, Outcome.LOST),
        # A replica may not know its message yet, or its op.
        ((~known | unsent) & received_lately, Outcome.IN_FLIGHT),
        (~known | unsent, Outcome.PHANTOM),
        (committed & ~unknown & ~quarantined & both.digests_differ(), Outcome.DIGEST_MISMATCH),
        (committed & consumed & ~skipped & (effects == 0), Outcome.NO_EFFECT),
        (committed & unknown & (effects == 1), Outcome.UNRECORDED),
        (committed & (waiting | quarantined) & ~again & (effects == 1), Outcome.STATUS_MISMATCH),
        (withdrawn & waiting, Outcome.STATUS_MISMATCH),
        (compensated & unknown & (state == ProducerState.DISPATCHED) & for_group & ~before, Outcome.STATUS_MISMATCH),
        (withdrawn, Outcome.ROLLED_BACK),
        (committed & quarantined & ~lately, Outcome.UNCOMPENSATED),
        (committed & quarantined, Outcome.IN_FLIGHT),
        (ahead_of_clock, Outcome.AHEAD_OF_CLOCK),
        (committed & ~dispatched & ~young, Outcome.UNDISPATCHED),
        (~committed & ~young, Outcome.UNDECIDED),
        (~dispatched, Outcome.IN_FLIGHT),
        (consumed, Outcome.CONSUMED),
        (status == InboxState.PARKED, Outcome.PARKED),
        ((status == InboxState.FAILED) & ~received_lately, Outcome.FAILED),
        (~unknown, Outcome.IN_FLIGHT),
        (~for_group | before, Outcome.LEFT_OUT),
        (young, Outcome.IN_FLIGHT),
        (ahead, Outcome.UNCONSUMED),
        (both.of_producer("sends", 0) > rules.max_resends, Outcome.RESEND_EXHAUSTED),
    ]
    outcomes = np.select([case for case, _ in cases], [int(outcome) for _, outcome in cases], int(Outcome.MISSING))
    opinion = both.of_producer("opinion", -1)  # what either side said lately the other needn't know yet
    wrong = (opinion >= 0) & (opinion != status) & ~young & ~lately & np.isin(outcomes, _HEARD)
    outcomes[wrong] = Outcome.OPINION_DIFFERS
    return outcomes


def _may_be_pruned(rules: Rules, ids: Array) -> Array:
    if rules.horizon is None:
        return np.zeros(len(ids), bool)
    pruned: Array = (ids < np.array(rules.horizon, "S16")) | (ids >= _FIRST_BUSINESS_ID)
    return pruned


def beyond(rules: Rules, queue: Array, position: Array) -> Array:
    """Tell which places in the log the group hasn't come to yet, and isn't going to leave out."""
    return _unread(rules, queue, position) & ~_before(rules, queue, position)


def _unread(rules: Rules, queue: Array, position: Array) -> Array:
    if rules.offsets is None:
        return np.zeros(len(queue), bool)
    unread: Array = position > _by_queue(rules.offsets, queue)
    return unread


def _before(rules: Rules, queue: Array, position: Array) -> Array:
    """Tell which places in the log lie before the beginning of the group, or in what it skips."""
    before: Array = position <= _by_queue(rules.starts, queue)
    for of_queue, after, end in rules.skipped:
        before |= (queue == of_queue) & (position > after) & (position <= end)
    return before


def _by_queue(positions: Mapping[int, int], queues: Array) -> Array:
    """Return the position of each queue; 0 where there is none."""
    table = np.zeros(max([*positions, *queues[:1], 0, int(queues.max(initial=0))]) + 1, "i8")
    for queue, position in positions.items():
        table[queue] = position
    found: Array = table[queues]
    return found


def _spread(column: pa.ChunkedArray, rows: Array, missing: Any) -> Array:
    """Return the values of these rows of a column as numbers; ``missing`` where the row is -1, or the value null."""
    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.int64())
    if column.null_count:
        column = column.fill_null(missing)
    own: Array = column.to_numpy()
    if len(own) == len(rows):
        return own
    values = np.full(len(rows), missing, own.dtype if len(own) else np.array(missing).dtype)
    values[rows >= 0] = own[rows[rows >= 0]]
    return values


def _findings(both: Both, reported: Array, outcomes: Array) -> pa.Table:
    columns: dict[str, Any] = {
        "id": pa.Array.from_buffers(pa.binary(16), len(reported), [None, pa.py_buffer(both.ids[reported].tobytes())]),
        "outcome": pa.array(outcomes, pa.int8()),
    }
    for side, rows, prefix in (
        (both.producer, both.in_producer[reported], "producer"),
        (both.consumer, both.in_consumer[reported], "consumer"),
    ):
        index = pa.array(rows, mask=rows < 0)
        for name in side.column_names:
            target = f"{prefix}_digest" if name == "digest" else name
            if target in FINDING.names and target != "id":
                values = side[name].take(index)
                # Which is all that both sides may have.
                columns[target] = pc.coalesce(columns[target], values) if target in columns else values
    columns.setdefault(FOREIGN_ID.name, pa.nulls(len(reported), FOREIGN_ID.type))
    return pa.table(columns).select(FINDING.names).cast(FINDING)


# --- comparing -------------------------------------------------------------------------------------------


#: Upper bounds of the lag histogram, in seconds; what took effect before it was sent is in no bin of it, but `EARLY`.
EARLY = -1
LAG_BOUNDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3600.0)


def binned(sent: Array, consumed: Array, sent_again: Array, grace: int) -> Counter[int]:
    """Return how many messages are in each bin, by when they were sent and consumed (microseconds, as ``grace`` is)."""
    took = consumed - sent
    # The clocks of two servers may differ by more than the lag, and what was sent again may have been consumed before.
    bins = np.where((took < -grace) & ~sent_again, EARLY, np.searchsorted(LAG_BOUNDS, took / 1e6))
    numbers, counts = np.unique(bins, return_counts=True)
    return Counter(dict(zip(numbers.tolist(), counts.tolist(), strict=True)))


class Side(Protocol):
    """One side of a comparison. It can be pickled; it opens what it needs when it reads."""

    def read(self, ranges: Sequence[Range]) -> pa.Table:
        """Return all rows of the ranges, which are in order and don't overlap, sorted by id.

        Raises:
            SourceError: it can't be read; says where and why, and holds no password.
        """
        ...


@dataclass(frozen=True, slots=True)
class Comparison:
    """What to do with a task, which is ranges of ids; the sides read rows of `PRODUCER` and of `CONSUMER`.

    ``title`` is for those that look on while tasks run.
    """

    producer: Side
    consumer: Side
    rules: Rules
    title: str = "outbox reconcile"

    def __call__(self, task: Sequence[Range]) -> Collected:
        """Return the result of one task."""
        return compared(self.producer.read(task), self.consumer.read(task), self.rules)

    def again(self, ids: Iterable[UUID]) -> tuple[pa.Table, Counter[Outcome]]:
        """Read messages from both sides, the producer's first, and judge them; ``ids`` are in order.

        Returns those that differ or are in flight (`FINDING`), and how many others have which outcome.
        """
        collected = self([Range.only(id_) for id_ in ids])
        others = Counter({outcome: number for outcome, number in collected.counts.items() if not outcome.differs})
        return collected.table, others


def compared(producer: pa.Table, consumer: pa.Table, rules: Rules) -> Collected:
    """Judge the rows of the same ids."""
    both = Both(producer, consumer)
    counts, findings = judge(both, rules)
    took = both.of_producer("state", -1) == ProducerState.DISPATCHED
    took &= both.of_consumer("status", 0) == InboxState.CONSUMED
    times = both.of_producer("at", 0)[took], both.of_consumer("changed_at", 0)[took]
    lags_by_bin = binned(*times, both.of_producer("sends", 0)[took] > 1, rules.grace)
    return Collected(
        counts, [findings], lags_by_bin, producer.num_rows + consumer.num_rows, producer.nbytes + consumer.nbytes
    )


@dataclass(slots=True)
class Collected:
    """The result of a task, or of many: ``findings`` are tables of `FINDING`, ``lags`` bins of a histogram."""

    counts: Counter[Outcome] = field(default_factory=Counter)
    findings: list[pa.Table] = field(default_factory=list)
    lags: Counter[int] = field(default_factory=Counter)
    rows_read: int = 0
    bytes_read: int = 0

    def add(self, other: Collected) -> None:
        """Add the result of other tasks."""
        self.counts.update(other.counts)
        self.findings += other.findings
        self.lags.update(other.lags)
        self.rows_read += other.rows_read
        self.bytes_read += other.bytes_read

    def lag(self, *, sampled: bool) -> Lag | None:
        """Return the histogram of the lags; None if none was measured."""
        if not self.lags:
            return None
        return Lag(LAG_BOUNDS, tuple(self.lags[bin_] for bin_ in range(len(LAG_BOUNDS) + 1)), sampled)

    @property
    def table(self) -> pa.Table:
        """All findings, sorted by id."""
        return pa.concat_tables([FINDING.empty_table(), *self.findings]).sort_by("id")


def differing(table: pa.Table) -> pa.Table:
    """Return the rows of a table of findings that are differences."""
    return table.filter(pc.greater_equal(table["outcome"], int(KINDS[0])))


def in_flight(table: pa.Table) -> pa.Table:
    """Return the messages in flight of a table of findings."""
    return table.filter(pc.equal(table["outcome"], int(Outcome.IN_FLIGHT)))


# --- what a job comes to -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a comparison is expected to read of both sides, or has read: rows, bytes sent by the servers, seconds."""

    rows: int
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class ComparisonPlan:
    """How a pair was compared, and why so; ``why`` are sentences.

    ``expected`` is its cost as estimated before the first digest, and ``came`` the real one until the second look.
    ``standby_lag`` is how far (seconds) the sides that were read on a standby were behind their primaries, ``foreign``
    the sides whose tables aren't ours, ``writable`` whether an opinion can be written there. ``doubts`` say what can't
    be true, so that something else was compared than was meant.
    """

    tier: Tier
    engine: EngineName
    why: tuple[str, ...]
    ranges: int
    buckets: int = 0
    differing: int = 0
    settled: int = 0
    rows_read: int = 0
    standby_lag: Mapping[Part, float] = field(default_factory=dict)
    expected: Estimate | None = None
    came: Estimate | None = None
    foreign: tuple[Part, ...] = ()
    doubts: tuple[str, ...] = ()
    writable: bool = False


@dataclass(frozen=True, slots=True)
class Repaired:
    """What became of one attempt to repair: ``done``, ``healed`` (nothing left to do), or why it was refused."""

    id: UUID
    kind: Outcome
    action: Repair
    result: str


@dataclass(frozen=True, slots=True)
class Lag:
    """How long messages took from their dispatch to their effect.

    ``counts[i]`` of them took up to ``bounds[i]`` seconds, and the last of ``counts`` the rest. ``sampled`` tells
    that they are a sample; all are of those that the run read from both sides.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sampled: bool

    @property
    def total(self) -> int:
        """How many were measured."""
        return sum(self.counts)

    def within(self, share: float) -> float | None:
        """Return a bound (seconds) within which this share of them lies, 0.99 say; None if that is the last of all."""
        reached = zip(self.bounds, accumulate(self.counts), strict=False)
        return next((bound for bound, count in reached if count >= share * self.total), None)


@dataclass(slots=True)
class PairResult:
    """One pair, compared. ``findings`` are its differences and ``open`` the messages in flight (`rows.FINDING`).

    ``healed`` differences were gone at the second look. ``left_out`` are counted, and aren't among the findings, which
    `Job.max_findings` bounds. ``backlog`` is how many messages of each queue lie beyond the group's offset. ``seconds``
    are the durations of the stages by name.
    """

    run_id: UUID
    pair: Pair
    window: Window
    begun_at: dt.datetime
    plan: ComparisonPlan
    counts: Counter[Outcome]
    findings: pa.Table
    open: pa.Table
    healed: int = 0
    left_out: int = 0
    backlog: Counter[int] = field(default_factory=Counter)
    lag: Lag | None = None
    repairs: list[Repaired] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def differences(self) -> dict[Outcome, int]:
        """How many there are of each kind, gravest first; none of those that are 0."""
        return {kind: self.counts[kind] for kind in KINDS if self.counts[kind]}

    @property
    def in_sync(self) -> bool:
        """Is there no difference?"""
        return not self.differences


@dataclass(slots=True)
class JobResult:
    """A whole job: its pairs and measures, in the order in which they were declared, and the policy of its repairs.

    ``labels`` are what producer and consumer are called.
    """

    begun_at: dt.datetime
    pairs: list[PairResult]
    measures: list[MeasureResult]
    seconds: float = 0.0
    applied: bool = False
    policy: Mapping[Outcome, Repair] = field(default_factory=dict)
    labels: tuple[str, str] = ("", "")

    @property
    def in_sync(self) -> bool:
        """Is there no difference, and nothing unexplained?"""
        return all(pair.in_sync for pair in self.pairs) and all(measure.in_sync for measure in self.measures)
