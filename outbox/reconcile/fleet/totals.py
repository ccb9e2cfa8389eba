"""What many databases' tables add up to, though no snapshot is common to them.

Each database is read in a snapshot of its own, and all of these are held at once. A message between two of them tells
what lies between their moments: what was committed before the producer's snapshot and hadn't taken effect in the
consumer's is under way, and is added; what had taken effect in the consumer's, and wasn't committed yet in the
producer's, is early, and is taken off (the channels' states of K. M. Chandy and L. Lamport, "Distributed Snapshots",
1985, without their markers: a message's id is there on both sides). So the order of the snapshots doesn't matter.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from outbox.database.execute import execute, statement
from outbox.errors import OutboxError
from outbox.message.model import uuid7
from outbox.reconcile import job as jobs
from outbox.reconcile.fleet.config import Fleet, FleetTotal
from outbox.reconcile.fleet.members import Member, Membership, matches, matching
from outbox.reconcile.job import NO_DATABASE, Job, NoProgress, Outcome, Pair, Range, Window
from outbox.reconcile.measure.compute import TIMEOUT, Bodies, Key, Select, Tally, side_by_side
from outbox.reconcile.measure.result import EXACT
from outbox.reconcile.pairing import Common, FirstPass, LocalEngine, Pairing, rules_now, sources
from outbox.reconcile.plan import cut
from outbox.reconcile.record.write import Record
from outbox.reconcile.report import amount, gravest
from outbox.reconcile.rows import FINDING, Both, JobResult, PairResult, fixed_ids, judge, to_uuids
from outbox.reconcile.run import arriving
from outbox.reconcile.source import (
    PostgresSide,
    SessionSettings,
    Snapshot,
    Snapshots,
    connected,
    insist,
    reaching,
    snapshot_of,
)
from outbox.reconcile.sql import SAMPLE_RANGES, bounds_of
from outbox.reconcile.tables import InboxState, ProducerState
from outbox.text import key_text

_EFFECTS = """
SELECT c.message_id FROM {s}.consumer_message c
 WHERE c.consumer_group = %(group)s AND c.message_id = ANY (%(ids)s::uuid[]) AND c.status = 'consumed'
   AND c.last_error IS NULL
"""
_COMMITTED = "SELECT half_id FROM {s}.op_message WHERE half_id = ANY (%(ids)s::uuid[]) AND resolution = 'commit'"


@dataclass(frozen=True, slots=True)
class TotalRow:
    """One value of a total under one key: the sums of each database, under way, and early."""

    key: Key
    value: str
    parts: Mapping[str, Decimal]
    in_flight: Decimal
    early: Decimal

    @property
    def unexplained(self) -> Decimal:
        """What nothing accounts for; 0 if all is well."""
        return functools.reduce(EXACT.add, [*self.parts.values(), self.in_flight, -self.early], Decimal())

    @property
    def is_well(self) -> bool:
        """Does it add up?"""
        return not self.unexplained


@dataclass(frozen=True, slots=True)
class TotalResult:
    """One total; ``faults`` are sentences about what couldn't be read, so that it proves nothing."""

    name: str
    by: tuple[str, ...]
    rows: tuple[TotalRow, ...] = ()
    faults: tuple[str, ...] = ()

    @property
    def in_sync(self) -> bool:
        """Does everything add up, and could everything be read?"""
        return not self.faults and not any(row.unexplained for row in self.rows)

    @property
    def verdict(self) -> str:
        """What it comes to, in a sentence."""
        if self.in_sync:
            return "adds up"
        wrong = [
            f"{amount(row.unexplained)} {' '.join(filter(None, [row.value, key_text(row.key)]))} unexplained"
            for row in self.rows
            if row.unexplained
        ]
        return f"{self.name}: {'; '.join([*wrong, *self.faults])}"

    def as_json(self) -> dict[str, Any]:
        """Return it as a value of plain JSON types, but for decimals."""
        rows = [
            {name: getattr(row, name) for name in ("key", "value", "parts", "in_flight", "early", "unexplained")}
            for row in self.rows
        ]
        known = {name: getattr(self, name) for name in ("name", "by", "in_sync", "verdict", "faults")}
        return known | {"rows": rows}


@dataclass(slots=True)
class _Addition:
    """What a total is made of: the databases by name, and the pairs that move between them, with their jobs."""

    databases: list[str]
    moving: list[tuple[Member, Pair]] = field(default_factory=list)

    @classmethod
    def of(cls, fleet: Fleet, total: FleetTotal, members: Sequence[Member]) -> _Addition:
        """Return it."""
        databases = matching(fleet.databases, [name for part in total.parts for name in part.databases])
        moving = [
            (member, pair)
            for member in members
            if member.producer in databases and member.consumer in databases
            for pair in member.job.pairs
            if matches(pair.topic, total.topics) and matches(pair.group, total.groups)
        ]
        return cls(databases, moving)

    def parts(self, name: str) -> list[jobs.Part]:
        """Return the sides of the tables that are read in a database."""
        sends = any(member.producer == name for member, _ in self.moving)
        takes = any(member.consumer == name for member, _ in self.moving)
        return [*(["producer"] if sends else []), *(["consumer"] if takes else [])]  # type: ignore[list-item]


def check_total(fleet: Fleet, total: FleetTotal, membership: Membership) -> None:
    """See that a total can be computed as far as that is known before anything is read.

    Raises:
        InvalidSettings: a part that no database fits, or more sessions than a server may have.
    """
    for part in total.parts:
        if not matching(fleet.databases, part.databases):
            raise total.refused(
                f"no database is like {', '.join(part.databases)}; known are {', '.join(fleet.databases)}"
            )
    addition = _Addition.of(fleet, total, membership.members)
    if lakes := [name for name in addition.databases if fleet.databases[name] == NO_DATABASE]:
        raise total.refused(f"{lakes[0]} has no database that a SELECT could ask; narrow databases")
    if foreign := [f"{pair} ({member})" for member, pair in addition.moving if member.job.tables]:
        raise total.refused(
            f"{foreign[0]} moves between tables that aren't ours, which don't tell what is under way; narrow topics, "
            "groups or databases"
        )
    servers = [membership.servers.of(fleet.databases[name]) for name in addition.databases]
    readers = max((2 * member.job.workers for member, _ in addition.moving), default=0)
    for server in dict.fromkeys(servers):
        if (number := servers.count(server) + readers) > fleet.bounds.sessions:
            raise total.refused(
                f"it needs {number} sessions on {server}, a snapshot of each database and their readers, and "
                f"sessions = {fleet.bounds.sessions}; allow more"
            )


def total_of(fleet: Fleet, total: FleetTotal, members: Sequence[Member], step: Callable[[], None]) -> TotalResult:
    """Compute a total; what goes wrong with it is a fault of the result. ``step`` is called now and then."""
    addition = _Addition.of(fleet, total, members)
    try:
        return insist(lambda: _taken(fleet, total, addition, step), waiting=step)
    except OutboxError as error:
        return TotalResult(total.name, total.by, faults=(str(error),))


def _taken(fleet: Fleet, total: FleetTotal, addition: _Addition, step: Callable[[], None]) -> TotalResult:
    settings = SessionSettings("outbox reconcile fleet", fleet.bounds.max_time)
    with ExitStack() as stack:
        snapshots: dict[str, Snapshot] = {}
        for name in addition.databases:
            taking = snapshot_of(fleet.databases[name], addition.parts(name), waiting=step, settings=settings)
            snapshots[name] = stack.enter_context(taking)
        parts = {name: Tally(total.by, len(total.values)) for name in addition.databases}
        numbers: set[int] = set()
        for name, select in _selects(total, snapshots):
            step()
            with reaching(fleet.databases[name]):
                numeric = select.check()
                numbers |= {at for at, column in enumerate(total.by) if column in numeric}
                _add(parts[name], select.tally())
        in_flight, early = Tally(total.by, len(total.values)), Tally(total.by, len(total.values))
        for member, pair in addition.moving:
            step()
            between = Snapshots({"consumer": snapshots[member.consumer], "producer": snapshots[member.producer]})
            first = _compared(member.job, pair, between)
            with reaching(member.job.producer):
                producer = between.producer
                bodies = Bodies(producer.connection, producer.access.schema, total, pair, TIMEOUT)
                _add(in_flight, bodies.in_transit(arriving(first)))
            _add(early, _early(member.job, total, pair, between, first))
    return _result(total, parts, in_flight, early, numbers)


def _selects(total: FleetTotal, snapshots: Mapping[str, Snapshot]) -> Iterator[tuple[str, Select]]:
    for part, side in zip(total.parts, total.selects, strict=True):
        for name in matching(snapshots, part.databases):
            yield name, Select(snapshots[name].connection, total, side, Window(), TIMEOUT)


def _compared(job: Job, pair: Pair, snapshots: Snapshots) -> FirstPass:
    """Compare a pair in these snapshots, from the beginning: what the tables add up to began there too."""
    job = replace(job, pairs=(pair,), measures=(), window=Window(grace=job.window.grace))
    return Pairing(uuid7(), job, pair, LocalEngine(job.workers), NoProgress(), snapshots, Common(job)).compare()


def _early(job: Job, total: FleetTotal, pair: Pair, snapshots: Snapshots, first: FirstPass) -> Tally:
    """Return what took effect in the consumer's snapshot and was committed after the producer's.

    A message that wasn't committed since either is a phantom, for which nothing accounts.
    """
    found = first.result.findings
    unknown = pc.or_(pc.is_null(found["state"]), pc.equal(found["state"], int(ProducerState.UNDECIDED)))
    taken = pc.or_(pc.equal(found["status"], int(InboxState.CONSUMED)), pc.greater(found["effects"], 0))
    ids = to_uuids(found.filter(pc.and_(pc.fill_null(unknown, True), pc.fill_null(taken, False))))
    if not ids:
        return Tally(total.by, len(total.values))
    with reaching(job.consumer):
        of_group = {"group": pair.group, "ids": ids}
        effects = execute(snapshots.consumer.connection, statement(job.consumer.schema, _EFFECTS, of_group))[0]
    with connected(job.producer) as now:
        sure = execute(now, statement(job.producer.schema, _COMMITTED, {"ids": [id_ for (id_,) in effects]}))[0]
        return Bodies(now, job.producer.schema, total, pair, TIMEOUT).in_transit([id_ for (id_,) in sure])


def _add(tally: Tally, other: Tally) -> None:
    for key, values in other.sums.items():
        tally.add(key, values)
    tally.faults += other.faults


def _result(
    total: FleetTotal, parts: Mapping[str, Tally], in_flight: Tally, early: Tally, numbers: set[int]
) -> TotalResult:
    every = {name: tally.with_numbers(numbers) for name, tally in parts.items()}
    moved, ahead = in_flight.with_numbers(numbers), early.with_numbers(numbers)
    rows = tuple(
        TotalRow(key, value, dict(zip(every, amounts, strict=False)), *amounts[-2:])
        for key, value, amounts in side_by_side(total, [*every.values(), moved, ahead])
    )
    faults = [*(f"{name}: {text}" for name, tally in every.items() for text in tally.faults)]
    return TotalResult(total.name, total.by, rows, (*faults, *moved.faults, *ahead.faults))


# --- one group in several databases ----------------------------------------------------------------------

# What took effect in more than one of them took effect twice. Each may be in sync with the producer, so that no
# comparison of two databases finds it.

Array = np.ndarray[Any, Any]

#: Inbox rows that are read at once of each database.
_ROWS = 500_000
#: Messages that are judged once more at once.
_BATCH = 2_000


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

    def ranges(self, window: Range) -> list[Range]:
        """Return the window in parts of about so many rows here."""
        access = self.member.job.consumer
        values = {**bounds_of([window]), "step": _ROWS, "group": self.result.pair.group}

        def cuts() -> list[UUID]:
            with connected(access) as connection:
                rows = execute(connection, SAMPLE_RANGES["consumer"](access.schema, **values))[0]
            return sorted(id_ for (id_,) in rows)

        return cut([window], insist(cuts))


def find_doubles(
    results: Sequence[tuple[Member, JobResult]], step: Callable[[], None]
) -> tuple[list[Double], list[str]]:
    """Return the groups that took messages in several databases, and count these as differences of each.

    Returns sentences about groups of which it can't be found out too. ``step`` is called now and then; what it raises
    ends it.
    """
    inboxes: dict[tuple[str, str, str], list[_Inbox]] = {}
    for member, job_result in results:
        # Our inbox alone tells when a message took effect.
        for result in job_result.pairs if "consumer" not in member.job.tables else ():
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
    record.findings(result, job.policy)
    record.end(result)


def _consumed(inbox: _Inbox, ids: Sequence[UUID]) -> pa.Table:
    """Return those that count as consumed as findings (`rows.FINDING`) of an effect that is there twice."""
    job, pair = inbox.member.job, inbox.result.pair
    ranges = [Range.only(each) for each in sorted(ids)]
    rules = rules_now(job, pair)
    producer, consumer = sources(job, pair)
    _, judged = judge(Both(producer.read(ranges), consumer.read(ranges)), rules, every=True)
    consumed = judged.filter(pc.equal(judged["outcome"], int(Outcome.CONSUMED)))
    kind = pa.array([int(Outcome.DUPLICATE_EFFECT)] * consumed.num_rows, FINDING.field("outcome").type)
    return consumed.set_column(consumed.schema.get_field_index("outcome"), FINDING.field("outcome"), kind)
