"""What two sides of a message come to: one outcome for each id, decided purely, for a whole table at once.

The order of the rules is that of `Outcome`: the gravest that fits counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from outbox.message.ids import FIRST_BUSINESS_ID
from outbox.reconcile.job import FIRST_ID, Outcome
from outbox.reconcile.rows import FINDING, FOREIGN_ID, fixed_ids
from outbox.reconcile.tables.declare import WITHDRAWN, InboxState, ProducerState

Array = np.ndarray[Any, Any]

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
    """The rows of both sides (`rows.PRODUCER`, `rows.CONSUMER`), side by side in the order of their ids.

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

    Returns how many there are of each outcome; and, as `rows.FINDING`, the differences and the messages in flight, or
    ``every`` message.
    """
    outcomes = _outcomes(both, rules)
    values, numbers = np.unique(outcomes[outcomes >= 0], return_counts=True)
    counts = Counter({Outcome(int(value)): int(number) for value, number in zip(values, numbers, strict=True)})
    is_reported = outcomes >= 0 if every else (outcomes == Outcome.IN_FLIGHT) | (outcomes >= Outcome.TORN)
    reported = np.flatnonzero(is_reported)
    return counts, _findings(both, reported, outcomes[reported])


def lags(both: Both) -> Array:
    """Return how long each consumed message took from its dispatch to its effect, in seconds; by both clocks."""
    took = (both.of_producer("state", -1) == ProducerState.DISPATCHED) & (
        both.of_consumer("status", 0) == InboxState.CONSUMED
    )
    # The clocks of two servers may differ by more than the lag.
    lag: Array = np.maximum(both.of_consumer("changed_at", 0)[took] - both.of_producer("at", 0)[took], 0) / 1e6
    return lag


def _outcomes(both: Both, rules: Rules) -> Array:
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
    return np.select([case for case, _ in cases], [int(outcome) for _, outcome in cases], int(Outcome.MISSING))


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
