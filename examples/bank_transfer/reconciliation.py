"""After the day's work: compare the banks, repair, mend by hand what only a human can, compare again."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from uuid import UUID

from rich.console import Console
from rich.status import Status
from sqlalchemy import ARRAY, Uuid, any_, func, literal, select

from outbox.reconcile.job import DONE, EngineName, Outcome, Repair, Spark
from outbox.reconcile.rows import JobResult, Repaired, to_findings
from outbox.reconcile.run import reconcile
from outbox.text import key_text

from . import back_office, comparison, faults
from .back_office import ByHand
from .banks import Banks
from .evidence import INBOX
from .message import GROUP
from .options import DemoOptions
from .sentences import counted, counts_differ
from .workday import wait_for, workers_running

_SETTLED = ("consumed", "parked")


@dataclass(frozen=True, slots=True)
class Reconciliation:
    """Hold the faults planted, found, repaired and mended by hand, and those found after that.

    Nothing is repaired where nothing was planted: then ``after`` is ``found``.
    """

    planted: faults.Planted
    found: JobResult
    repaired: JobResult | None
    by_hand: tuple[ByHand, ...]
    after: JobResult
    seconds: float

    @property
    def for_the_page(self) -> JobResult:
        """The comparison that is worth a page: the one that repaired, if there was anything to repair."""
        return self.repaired or self.after

    @property
    def repairs(self) -> tuple[Repaired, ...]:
        """Return the repairs without a human."""
        return repairs(self.repaired) if self.repaired else ()

    @property
    def resent(self) -> int:
        """How many messages were sent once more."""
        return sum(repair.action is Repair.RESEND for repair in self.repairs)

    def faults(self, parked: int) -> Iterator[str]:
        """Yield the faults, as sentences; ``parked`` is how many messages bank B can't credit, and rightly so."""
        yield from self._badly_found()
        left = by_kind(self.after)
        yield from counts_differ(
            "parked at the reconciliation", len(left.pop(Outcome.PARKED, ())), "at the audit", parked
        )
        for kind, ids in left.items():
            yield from _messages(kind.label, ids)
        for measure in self.after.measures:
            yield from measure.faults
            for row in measure.unexplained:
                yield f"{measure.name}: {row.unexplained} {row.value} unexplained at {key_text(row.key)}"

    def _badly_found(self) -> Iterator[str]:
        """Yield the differences between the findings and the planted faults."""
        if not self.planted:
            return
        found = by_kind(self.found)
        for kind in sorted({*self.planted, *found}):
            planted, seen = self.planted.get(kind, frozenset()), found.get(kind, frozenset())
            yield from _messages(f"planted as {kind.label}, and not found as such", planted - seen)
            if kind is not Outcome.PARKED:
                yield from _messages(f"found as {kind.label}, and not planted as such", seen - planted)


class StageDisplay:
    """Shows on a terminal what the reconciliation is at."""

    def __init__(self, status: Status) -> None:
        self._status = status
        self._title = ""
        self._total: int | None = None

    def stage(self, title: str, total: int | None) -> None:
        """A stage begins."""
        self._title, self._total = title, total
        self._status.update(title)

    def done(self, steps: int) -> None:
        """So many steps of the stage are done."""
        of = "" if self._total is None else f" of {self._total:,}"
        self._status.update(f"{self._title}: {steps:,}{of}")

    def say(self, sentence: str) -> None:
        """Something was decided: the report says what."""


def run(banks: Banks, options: DemoOptions, screen: Console) -> Reconciliation:
    """Reconcile the banks, whose processes have ended; with faults planted before, and repaired after, if asked for."""
    begun = time.monotonic()
    planted = faults.plant(banks, options.seed) if options.faults else {}
    hit = f"; {counted(sum(map(len, planted.values())), 'fault')} planted" if planted else ""
    screen.print(f"The day's work is done{hit}. The banks are reconciled by {comparison.engine_in_words(options)}.")
    with _one_session(options), screen.status("") as status:
        show = StageDisplay(status)
        found = after = reconcile(comparison.job(banks, options), show)
        repaired, by_hand = _repair(banks, options, show) if planted else (None, ())
        if planted:
            after = reconcile(comparison.job(banks, options), show)
    return Reconciliation(planted, found, repaired, by_hand, after, time.monotonic() - begun)


def by_kind(result: JobResult) -> dict[Outcome, frozenset[UUID]]:
    """Return the messages that differ, by kind, gravest first."""
    ids: defaultdict[Outcome, set[UUID]] = defaultdict(set)
    for pair in result.pairs:
        for finding in to_findings(pair.findings):
            ids[finding.outcome].add(finding.id)
    return {kind: frozenset(ids[kind]) for kind in sorted(ids)}


def repairs(result: JobResult) -> tuple[Repaired, ...]:
    """Return the repairs."""
    return tuple(repair for pair in result.pairs for repair in pair.repairs if repair.result == DONE)


@contextmanager
def _one_session(options: DemoOptions) -> Iterator[None]:
    """Keep one Spark session for all comparisons, since Java takes its time to start."""
    if comparison.engine_of(options) is not EngineName.SPARK:
        yield
        return
    from outbox.reconcile.spark.session import session  # noqa: PLC0415 - an extra

    with session(Spark(), comparison.WORKERS):
        yield


def _repair(banks: Banks, options: DemoOptions, show: StageDisplay) -> tuple[JobResult, tuple[ByHand, ...]]:
    """Repair, first by policy and then by hand, while the banks' workers consume what they are given again."""
    with workers_running(banks.environment) as processes:
        repaired = reconcile(comparison.job(banks, options, apply=True), show)
        by_hand = tuple(back_office.mend(repaired, banks))
        again = {repair.id for repair in repairs(repaired)} | {hand.message for hand in by_hand if hand.retried}
        wait_for(lambda: _settled(banks, again) == len(again), processes)
    return repaired, by_hand


def _settled(banks: Banks, ids: Collection[UUID]) -> int:
    """Return how many of these messages bank B is done with."""
    of_ids = INBOX.c.message_id == any_(literal(list(ids), ARRAY(Uuid)))
    query = select(func.count()).where(INBOX.c.consumer_group == GROUP, of_ids, INBOX.c.status.in_(_SETTLED))
    with banks.b.connect() as b:
        return b.scalar(query) or 0


def _messages(what: str, ids: Collection[UUID]) -> Iterator[str]:
    if found := sorted(ids):
        some = ", ".join(map(str, found[:3])) + (", …" if len(found) > 3 else "")
        yield f"{counted(len(found), 'message')} {what}: {some}"
