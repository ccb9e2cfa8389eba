"""One group in several databases: what took effect in more than one of them took effect twice.

Each of them may be in sync with the producer, so that no comparison of two databases finds it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from outbox.database.execute import execute, statement
from outbox.errors import OutboxError
from outbox.reconcile.compare import only
from outbox.reconcile.fleet.members import Member
from outbox.reconcile.job import Outcome, Range
from outbox.reconcile.judge import Both, judge
from outbox.reconcile.pairing import rules_now, sources
from outbox.reconcile.record.write import Record
from outbox.reconcile.report import gravest
from outbox.reconcile.rows import FINDING, JobResult, PairResult, fixed_ids
from outbox.reconcile.source import PostgresSide, connected, insist
from outbox.reconcile.sql import last_of
from outbox.reconcile.tables.declare import InboxState

Array = np.ndarray[Any, Any]

#: Inbox rows that are read at once of each database.
_ROWS = 500_000
#: Messages that are judged once more at once.
_BATCH = 2_000

_CUTS = """
SELECT message_id
  FROM (SELECT message_id, row_number() OVER (ORDER BY message_id) AS number FROM {s}.consumer_message
         WHERE consumer_group = %(group)s AND topic = %(topic)s
           AND message_id BETWEEN %(first)s::uuid AND %(last)s::uuid) r
 WHERE number %% %(rows)s = 0 ORDER BY 1
"""


@dataclass(frozen=True, slots=True)
class Double:
    """A group that took messages of a producer's topic in several databases; ``number`` of them in more than one."""

    producer: str
    topic: str
    group: str
    consumers: tuple[str, ...]
    number: int


@dataclass(frozen=True, slots=True)
class _Inbox:
    member: Member
    result: PairResult

    def took(self, range_: Range) -> Array:
        """Return the ids (16 bytes each, in order) of what took effect, of a range."""
        side = PostgresSide(self.member.job.consumer, "consumer", self.result.pair)
        rows = side.read([range_])
        consumed = pc.equal(rows["status"], int(InboxState.CONSUMED))
        booked = pc.or_(pc.and_not(consumed, rows["skipped"]), pc.greater(rows["effects"], 0))
        return fixed_ids(rows.filter(booked))

    def ranges(self, window: Range) -> Iterator[Range]:
        """Yield the window in parts of so many rows here."""
        access, pair = self.member.job.consumer, self.result.pair
        values = {"group": pair.group, "topic": pair.topic, "first": window.first, "last": last_of(window)}

        def cuts() -> list[UUID]:
            with connected(access) as connection:
                rows = execute(connection, statement(access.schema, _CUTS, {**values, "rows": _ROWS}))[0]
            return [cut for (cut,) in rows]

        first = window.first
        for cut in insist(cuts):
            if first < cut:
                yield Range(first, cut)
            first = cut
        yield Range(first, window.end)


def find_doubles(
    results: Sequence[tuple[Member, JobResult]], step: Callable[[], None]
) -> tuple[list[Double], list[str]]:
    """Return the groups that took messages in several databases, and count these as differences of each.

    Returns sentences about groups of which it can't be found out too. ``step`` is called now and then; what it raises
    ends it.
    """
    inboxes: dict[tuple[str, str, str], list[_Inbox]] = {}
    for member, job_result in results:
        for result in job_result.pairs:
            inboxes.setdefault((member.producer, *result.pair.names), []).append(_Inbox(member, result))
    doubles, faults = list[Double](), list[str]()
    for (producer, topic, group), several in inboxes.items():
        if len(several) < 2:
            continue
        try:
            number, consumers = _taken_twice(several, step)
        except OutboxError as error:
            where = ", ".join(each.member.consumer for each in several)
            faults.append(f"whether {topic} → {group} took effect in several of {where} isn't known: {error}")
            continue
        if number:
            doubles.append(Double(producer, topic, group, consumers, number))
    return doubles, faults


def _taken_twice(several: Sequence[_Inbox], step: Callable[[], None]) -> tuple[int, tuple[str, ...]]:
    """Return how many messages took effect in more than one of these databases, and in which."""
    consumers: dict[str, None] = {}
    number = 0
    for range_ in several[0].ranges(several[0].result.window.range):
        step()
        taken = [each.took(range_) for each in several]
        ids, counts = np.unique(np.concatenate(taken), return_counts=True)
        again = ids[counts > 1]
        number += len(again)
        for each, own in zip(several, taken, strict=True):
            if len(mine := np.intersect1d(own, again, assume_unique=True)):
                consumers[each.member.consumer] = None
                _count(each, mine, step)
    return number, tuple(consumers)


def _count(inbox: _Inbox, ids: Array, step: Callable[[], None]) -> None:
    """Make these messages differences of the pair, in its result and its record, but those that are worse already."""
    job, result = inbox.member.job, inbox.result
    found = [FINDING.empty_table()]
    for start in range(0, len(ids), _BATCH):
        step()
        some = [UUID(bytes=each.ljust(16, b"\0")) for each in ids[start : start + _BATCH].tolist()]
        found.append(insist(functools.partial(_consumed, inbox, some)))
    new = pa.concat_tables(found)
    result.counts[Outcome.CONSUMED] -= new.num_rows
    result.counts[Outcome.DUPLICATE_EFFECT] += new.num_rows
    result.counts = +result.counts
    result.findings = gravest(pa.concat_tables([result.findings, new]), job.max_findings)
    result.left_out = sum(result.differences.values()) - result.findings.num_rows
    record = Record(job)
    record.findings(result)
    record.end(result)


def _consumed(inbox: _Inbox, ids: Sequence[UUID]) -> pa.Table:
    """Return those that count as consumed as findings (`rows.FINDING`) of an effect that is there twice."""
    job, pair = inbox.member.job, inbox.result.pair
    ranges = [only(each) for each in sorted(ids)]
    rules = rules_now(job, pair)
    producer, consumer = sources(job, pair)
    _, judged = judge(Both(producer.read(ranges), consumer.read(ranges)), rules, every=True)
    consumed = judged.filter(pc.equal(judged["outcome"], int(Outcome.CONSUMED)))
    kind = pa.array([int(Outcome.DUPLICATE_EFFECT)] * consumed.num_rows, FINDING.field("outcome").type)
    return consumed.set_column(consumed.schema.get_field_index("outcome"), FINDING.field("outcome"), kind)
