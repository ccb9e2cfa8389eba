"""The rows of a comparison, what it finds, and what a job comes to: for the report, the record and the exit code.

Arrow tables of either side have times in microseconds since 1970 in UTC, and ids of 16 bytes. A table of a side is
sorted by id, and has each id once. Its columns are in the order in which `outbox.reconcile.sql.rows` reads them.
"""

from __future__ import annotations

import datetime as dt
import enum
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Context, Decimal, Inexact, InvalidOperation
from functools import reduce
from itertools import accumulate
from operator import attrgetter
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from outbox.reconcile.job import KINDS, EngineName, Outcome, Pair, Part, Repair, Tier, Window
from outbox.reconcile.tables.declare import InboxState, ProducerState


class Torn(enum.IntEnum):
    """How a message's rows in the producer's tables contradict each other."""

    NO = 0
    MESSAGE_WITHOUT_HALF = 1
    OP_WITHOUT_HALF = 2
    MESSAGE_THOUGH_ROLLED_BACK = 3
    MESSAGE_THOUGH_UNDECIDED = 4
    MESSAGE_IN_OTHER_TOPIC = 5


_ID = pa.binary(16)
_TIME = pa.timestamp("us", tz="UTC")

#: One row for each half message of the topic, and each message or op that should have one, and hasn't. ``state`` is a
#: `ProducerState`, ``torn`` a `Torn`; ``sends`` the newest send number, 0 without one, with its ``queue`` and
#: ``position``. ``at`` is since when it is as it is: born, decided, to be
#: delivered, or visible (of the newest send). ``digest`` is that of the body as the producer has it now.
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

#: The id as a table that isn't ours has it, where its own is no UUID (`tables.columns`).
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


def to_findings(table: pa.Table) -> Iterator[Finding]:
    """Yield the rows of a table of findings (`rows.FINDING`)."""
    for batch in table.to_batches(max_chunksize=10_000):
        for row in batch.to_pylist():
            state, torn, status, effects = row["state"], row["torn"], row["status"], row["effects"]
            yield Finding(
                **row
                | {
                    "id": UUID(bytes=row["id"]),
                    "outcome": Outcome(row["outcome"]),
                    "state": None if state is None else ProducerState(state),
                    "torn": Torn(torn) if torn else None,
                    "status": None if status is None else InboxState(status),
                    "effects": None if effects is None or effects < 0 else effects,
                }
            )


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
    the sides whose tables aren't ours.
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


#: Adds without rounding: numeric has up to 131072 digits before the point and 16383 after it.
EXACT = Context(prec=150_000, traps=[Inexact, InvalidOperation])


@dataclass(frozen=True, slots=True)
class MeasureRow:
    """One value of one measure under one key; ``unexplained`` = producer - rolled_back - consumer - in_flight.

    A part of the key is None where it is NULL, or null in a body.
    """

    key: tuple[str | None, ...]
    value: str
    producer: Decimal
    rolled_back: Decimal
    consumer: Decimal
    in_flight: Decimal

    @property
    def unexplained(self) -> Decimal:
        """What nothing accounts for; 0 if all is well."""
        return reduce(EXACT.subtract, (self.rolled_back, self.consumer, self.in_flight), self.producer)


@dataclass(frozen=True, slots=True)
class MeasureResult:
    """One measure: a row for each key and value; ``by`` names the parts of the keys.

    ``faults`` are sentences about what couldn't be read, so that the measure proves nothing.
    """

    name: str
    pair: Pair
    by: tuple[str, ...]
    rows: tuple[MeasureRow, ...]
    faults: tuple[str, ...] = ()

    @property
    def totals(self) -> tuple[MeasureRow, ...]:
        """The sums over all keys, by value and currency."""
        totals = []
        for (value, currency), rows in self.by_currency(self.rows).items():
            parts = (map(attrgetter(part), rows) for part in ("producer", "rolled_back", "consumer", "in_flight"))
            sums = (reduce(EXACT.add, part, Decimal()) for part in parts)
            totals.append(MeasureRow(("total", *currency), value, *sums))
        return tuple(totals)

    def by_currency(self, rows: Iterable[MeasureRow]) -> dict[tuple[str, tuple[str | None, ...]], list[MeasureRow]]:
        """Return rows by value and currency, if a part of the key is called so: only such rows may be added up."""
        groups: dict[tuple[str, tuple[str | None, ...]], list[MeasureRow]] = {}
        for row in rows:
            currency = tuple(part for name, part in zip(self.by, row.key, strict=True) if name.lower() == "currency")
            groups.setdefault((row.value, currency), []).append(row)
        return groups

    @property
    def unexplained(self) -> tuple[MeasureRow, ...]:
        """The rows that don't add up."""
        return tuple(row for row in self.rows if row.unexplained)

    @property
    def in_sync(self) -> bool:
        """Does everything add up, and could everything be read?"""
        return not self.unexplained and not self.faults


@dataclass(slots=True)
class JobResult:
    """A whole job: its pairs and measures, in the order in which they were declared, and the policy of its repairs."""

    begun_at: dt.datetime
    pairs: list[PairResult]
    measures: list[MeasureResult]
    seconds: float = 0.0
    applied: bool = False
    policy: Mapping[Outcome, Repair] = field(default_factory=dict)

    @property
    def in_sync(self) -> bool:
        """Is there no difference, and nothing unexplained?"""
        return all(pair.in_sync for pair in self.pairs) and all(measure.in_sync for measure in self.measures)
