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

import pyarrow.compute as pc

from outbox.database.execute import execute, statement
from outbox.errors import OutboxError
from outbox.message.model import uuid7
from outbox.reconcile import job as jobs
from outbox.reconcile.compare import LocalEngine
from outbox.reconcile.fleet.config import Fleet, FleetTotal
from outbox.reconcile.fleet.members import Member, Membership, matches, matching
from outbox.reconcile.job import Job, NoProgress, Pair, Window
from outbox.reconcile.measure.compute import TIMEOUT, Bodies, Key, Select, Tally, shown
from outbox.reconcile.pairing import Common, FirstPass, Pairing
from outbox.reconcile.report import amount
from outbox.reconcile.rows import EXACT, to_uuids
from outbox.reconcile.run import arriving
from outbox.reconcile.source import SessionSettings, Snapshot, Snapshots, connected, insist, reaching, snapshot_of
from outbox.reconcile.tables.declare import InboxState, ProducerState
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
    zeros = [Decimal()] * len(total.values)
    keys = {key for tally in (*every.values(), moved, ahead) for key in tally.sums}
    rows = tuple(
        TotalRow(
            label,
            value,
            {name: tally.sums.get(key, zeros)[at] for name, tally in every.items()},
            moved.sums.get(key, zeros)[at],
            ahead.sums.get(key, zeros)[at],
        )
        for key, label in shown(total.by, keys)
        for at, value in enumerate(total.values)
    )
    faults = [*(f"{name}: {text}" for name, tally in every.items() for text in tally.faults)]
    return TotalResult(total.name, total.by, rows, (*faults, *moved.faults, *ahead.faults))
