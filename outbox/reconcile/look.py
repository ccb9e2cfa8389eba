"""The second look: a difference counts only if it is still there when both sides are read again.

Two databases have no snapshot in common. In the first look the consumer's is the older one, so that it knows nothing
the producer's doesn't; what it consumed in between looks missing. The second look reads the differing messages again,
the producer's side first, and goes on until two looks in a row say the same of a message.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc

from outbox.reconcile.compare import Collected, compared
from outbox.reconcile.model import KINDS, Outcome, Pair, Range
from outbox.reconcile.options import Job
from outbox.reconcile.pairing import in_flight
from outbox.reconcile.rows import FINDING, to_uuids
from outbox.reconcile.rules import rules_now
from outbox.reconcile.sides import sides
from outbox.store.reconcile import LAST_ID

_BATCH = 2_000
#: A message on which both sides are at work is different at each look; after so many it is told as it is.
_MOST_LOOKS = 4


@dataclass(frozen=True, slots=True)
class Looked:
    """The differences that are still there, and what is in flight now (`rows.FINDING`); how the counts change.

    ``healed`` is how many are no difference any more.
    """

    findings: pa.Table
    open: pa.Table
    change: Counter[Outcome]
    healed: int


def second_look(job: Job, pair: Pair, findings: pa.Table, done: Callable[[int], None]) -> Looked:
    """Look again at differences (`rows.FINDING`).

    Raises:
        SourceError: a database can't be read.
    """
    confirmed: list[pa.Table] = [FINDING.empty_table()]
    opened: list[pa.Table] = [FINDING.empty_table()]
    change: Counter[Outcome] = Counter()
    for finished, batch in enumerate(_batches(findings), 1):
        seen = _outcomes(batch)
        change.subtract(seen.values())
        for look in range(_MOST_LOOKS):
            told, others = _look(job, pair, sorted(seen))
            still = differing(told)
            opened.append(in_flight(told))
            change.update(others)
            before, seen = seen, _outcomes(still)
            if seen == before or not seen or look == _MOST_LOOKS - 1:
                break
        change.update(seen.values())
        confirmed.append(still)
        done(min(finished * _BATCH, findings.num_rows))
    still = pa.concat_tables(confirmed)
    return Looked(still, pa.concat_tables(opened), change, findings.num_rows - still.num_rows)


def _look(job: Job, pair: Pair, ids: list[UUID]) -> tuple[pa.Table, Counter[Outcome]]:
    """Return which of these messages differ or are in flight, and how many that don't differ have which outcome."""
    ranges = [Range(each, None if each == LAST_ID else UUID(int=each.int + 1)) for each in ids]
    rules = rules_now(job, pair)
    producer, consumer = sides(job, pair, rules.producer_now, rules.consumer_now)
    collected = Collected.empty()
    collected.add(compared(producer.read(ranges), consumer.read(ranges), rules))
    others = Counter({outcome: number for outcome, number in collected.counts.items() if not outcome.differs})
    return collected.table, others


def differing(table: pa.Table) -> pa.Table:
    """Return the rows of a table of findings that are differences."""
    return table.filter(pc.greater_equal(table["outcome"], int(KINDS[0])))


def _outcomes(table: pa.Table) -> dict[UUID, Outcome]:
    return dict(zip(to_uuids(table), map(Outcome, table["outcome"].to_pylist()), strict=True))


def _batches(table: pa.Table) -> Iterator[pa.Table]:
    for start in range(0, table.num_rows, _BATCH):
        yield table.slice(start, _BATCH)
