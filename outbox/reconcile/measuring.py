"""Compute measures: what the two sides' business tables, and the messages under way between them, add up to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc

from outbox.errors import InvalidSettings
from outbox.reconcile.bodies import Bodies
from outbox.reconcile.measure import Measure
from outbox.reconcile.model import InboxState, Pair, ProducerState, Window
from outbox.reconcile.result import MeasureResult, MeasureRow
from outbox.reconcile.rows import to_uuids
from outbox.reconcile.selecting import Select
from outbox.reconcile.tally import Tally, keys_of

if TYPE_CHECKING:
    from sqlalchemy import Connection

#: How long a statement of a measure may take, in seconds.
TIMEOUT = 600.0

_COMMITTED = (ProducerState.COMMITTED, ProducerState.SCHEDULED, ProducerState.DISPATCHED)


@dataclass(frozen=True, slots=True)
class Compared:
    """A pair that was compared: what is under way (`under_way`), and after which position of each queue it began."""

    pair: Pair
    under_way: Sequence[UUID]
    starts: Mapping[int, int] = field(default_factory=dict)


def under_way(*tables: pa.Table) -> list[UUID]:
    """Return the ids of messages that were committed and haven't taken effect, of tables of findings (`rows.FINDING`).

    The tables are those of one comparison, before its second look: what has healed since was under way in the snapshot
    in which the measures are computed. What decides is what either side says, not the outcome:

    - The producer's part is booked if its op is a commit, whether it was dispatched, waits for that, or for its time;
      not if it is undecided, was rolled back, recalled or compensated (what ``rolled_back`` tells of is booked and
      taken back again, and no message accounts for it).
    - The consumer's part isn't booked if the inbox has no row (missing, unconsumed, undispatched, resend exhausted), if
      the handler failed (its transaction was rolled back), if the message is parked or fenced off. A body that was
      changed on the way took effect if it was consumed, whatever it then said: what differs stays unexplained.
    - A business table that has the message's row proves the effect, whatever the inbox says (unrecorded). One that
      hasn't, though the message was consumed (no effect), is a hole: nothing will bring that effect any more.

    So what took effect without a booked commit (phantom, consumed though rolled back), or twice, stays unexplained.
    """
    return [id_ for table in tables for id_ in to_uuids(table.filter(_is_under_way(table)))]


def _is_under_way(table: pa.Table) -> pa.ChunkedArray:
    booked = pc.is_in(table["state"], value_set=pa.array(_COMMITTED, pa.int8()))
    taken_back = pc.fill_null(table["compensated"], False)
    consumed = pc.fill_null(pc.equal(table["status"], int(InboxState.CONSUMED)), False)
    took_effect = pc.fill_null(pc.greater(table["effects"], 0), False)
    arrived = pc.or_(consumed, took_effect)
    return pc.and_not(pc.and_not(booked, taken_back), arrived)


def check_measures(
    measures: Iterable[Measure],
    pairs: Iterable[Pair],
    producer: Connection,
    consumer: Connection,
    window: Window,
    *,
    seconds: float = TIMEOUT,
) -> None:
    """See that measures can be computed, before hours are spent on a comparison; nothing is read.

    Raises:
        InvalidSettings: a measure of a pair that isn't compared, or a SELECT that can't be run, lacks a column, has
            one too many, or returns floats; names the measure and the mend.
        SourceError: a database can't be asked.
    """
    known = {(pair.topic, pair.group) for pair in pairs}
    for measure in measures:
        if (measure.topic, measure.group) not in known:
            raise _not_compared(measure)
        for select in _selects(measure, producer, consumer, window, seconds).values():
            select.check()


def measure_all(
    measures: Iterable[Measure],
    compared: Iterable[Compared],
    producer: Connection,
    consumer: Connection,
    window: Window,
    schema: str = "outbox",
    *,
    seconds: float = TIMEOUT,
) -> list[MeasureResult]:
    """Compute measures, in their order.

    The connections are in transactions (REPEATABLE READ READ ONLY) on the snapshots of the comparison, the consumer's
    taken first: so whatever the consumer has booked, the producer had booked before. ``schema`` is that of the outbox
    tables in the producer's database; ``seconds`` is how long a statement may take. The transactions stay as they are,
    also after an error.

    Raises:
        InvalidSettings: as `check_measures`.
        ReconcileError: a SELECT failed, or took too long.
        SourceError: a database can't be asked.
    """
    declared, known = list(measures), {(one.pair.topic, one.pair.group): one for one in compared}
    check_measures(declared, [one.pair for one in known.values()], producer, consumer, window, seconds=seconds)
    results = []
    for measure in declared:
        one = known[measure.topic, measure.group]
        selects = _selects(measure, producer, consumer, window, seconds)
        tallies = {side: select.tally() for side, select in selects.items()}
        bodies = Bodies(producer, schema, measure, one.pair, seconds)
        tallies["in_flight"] = bodies.under_way(one.under_way)
        if measure.producer is None:
            tallies["producer"] = bodies.settled(window.range, one.starts)
        results.append(_result(measure, one.pair, tallies))
    return results


def _selects(
    measure: Measure, producer: Connection, consumer: Connection, window: Window, seconds: float
) -> dict[str, Select]:
    return {
        side: Select(consumer if side == "consumer" else producer, measure, side, window, seconds)
        for side in measure.selects
    }


def _result(measure: Measure, pair: Pair, tallies: Mapping[str, Tally]) -> MeasureResult:
    nothing = Tally(len(measure.values))

    def row(key: tuple[str, ...], place: int, value: str) -> MeasureRow:
        parts = {
            side: tallies.get(side, nothing).get(key, place)
            for side in ("producer", "rolled_back", "consumer", "in_flight")
        }
        return MeasureRow(key, value, **parts)

    return MeasureResult(
        measure.name,
        pair,
        measure.by,
        tuple(
            row(key, place, value) for key in keys_of(tallies.values()) for place, value in enumerate(measure.values)
        ),
        tuple(fault for tally in tallies.values() for fault in tally.faults),
    )


def _not_compared(measure: Measure) -> InvalidSettings:
    return measure.refused(
        f"it is of {measure.topic} → {measure.group}, which isn't compared; add that pair, or leave the measure out"
    )
