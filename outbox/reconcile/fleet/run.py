"""Run a fleet: its members some at a time, within the sessions that each server allows, those of high priority first.

An error of a member ends that member alone. An end of the fleet ends the members at work, each at its next step; their
records say so.

By a timetable its run is in the record of the database whose workers run it: when it began and ended, and what it came
to. It is of the pair `timetable.FLEET`, which no topic and group can be. The findings are in the consumers' databases,
as always.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from threading import Event
from typing import Any
from uuid import UUID

from outbox.errors import ReconcileError
from outbox.reconcile import run
from outbox.reconcile.fleet.config import Bounds, Fleet
from outbox.reconcile.fleet.members import Member, members_of
from outbox.reconcile.fleet.totals import Double, TotalResult, check_total, find_doubles, total_of
from outbox.reconcile.job import Access, EngineName, NoProgress, Progress, Stoppable, Window
from outbox.reconcile.pairing import Engine
from outbox.reconcile.plan import choose_engine
from outbox.reconcile.record.timetable import FLEET
from outbox.reconcile.record.write import Record, RunIds, why_of
from outbox.reconcile.report import Verdict, verdict
from outbox.reconcile.rows import JobResult
from outbox.text import counted, duration

#: Progress is told at least so often (seconds), and what is free is given away.
_TELL_EVERY = 0.2


@dataclass(slots=True)
class MemberResult:
    """What came of a member: a result, or why there is none; or why not all of it was repaired."""

    member: Member
    result: JobResult | None = None
    error: str = ""


@dataclass(slots=True)
class FleetResult:
    """What came of a fleet. ``unreachable`` are databases that couldn't be asked what they have, and why.

    ``doubles`` are groups that took messages in several databases; their messages are differences of each of these.
    ``faults`` are sentences about groups of which that couldn't be found out.
    """

    members: list[MemberResult]
    unreachable: dict[str, str] = field(default_factory=dict)
    doubles: list[Double] = field(default_factory=list)
    totals: list[TotalResult] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def results(self) -> list[tuple[Member, JobResult]]:
        """The members that have a result."""
        return [(each.member, each.result) for each in self.members if each.result is not None]

    @property
    def failed(self) -> int:
        """How many members, databases and groups came to no result, or not to the end of it."""
        return sum(bool(each.error) for each in self.members) + len(self.unreachable) + len(self.faults)

    @property
    def verdict(self) -> Verdict:
        """What the members that have a result come to."""
        every = [(member, verdict(each)) for member, each in self.results]
        texts = [f"{member}: {text}" for member, each in every for text in each.measures]
        texts += [each.verdict for each in self.totals if not each.in_sync]
        return Verdict(sum(each.differences for _, each in every), sum(each.left for _, each in every), tuple(texts))

    @property
    def sentence(self) -> str:
        """The verdict for people."""
        if not self.failed:
            return self.verdict.sentence
        which = counted(self.failed, "member or database", "members and databases")
        failed = f"{which} came to no result, or not to its end"
        return f"{failed}; of the others: {self.verdict.sentence}" if self.results else failed

    @property
    def in_sync(self) -> bool:
        """Did everything come to a result, and is nothing different?"""
        return not self.failed and self.verdict.in_sync


def compare_fleet(fleet: Fleet, progress: Progress | None = None) -> FleetResult:
    """Compare all members, and find what took effect in several databases; repair nothing.

    Raises:
        InvalidSettings: as `members_of`; a total that can't be computed.
    """
    began, progress = time.monotonic(), progress or NoProgress()
    membership = members_of(fleet, progress)
    for total in () if fleet.only else fleet.totals:
        check_total(fleet, total, membership)
    for member in membership.members:
        if member.job.record and not member.is_recorded:
            progress.say(f"{member}: nothing is recorded: the consumer's tables aren't ours; name [job.record]")
    result = FleetResult([MemberResult(member) for member in membership.members], membership.unreachable)

    with ExitStack() as stack:
        engine, why = _shared_engine(membership.members, fleet.bounds, progress, stack)

        def compare(each: MemberResult, listener: Progress) -> None:
            # A member has no more time than is left of the fleet's.
            left = max(began + fleet.bounds.max_time - time.monotonic(), 1.0)
            job = each.member.job
            by_spark = choose_engine(job)[0] is EngineName.SPARK
            if by_spark and engine is None:
                raise ReconcileError(why)
            limited = replace(job, max_time=min(job.max_time, left))
            result = run.compare(limited, listener, engine=engine if by_spark else None)
            each.result = replace(result, labels=(each.member.producer, each.member.consumer))

        progress.stage("databases compared", len(result.members))
        in_turn(result.members, compare, fleet.bounds, progress)
    progress.stage("effects in several databases", None)
    result.doubles, result.faults = find_doubles(result.results, lambda: progress.done(0))
    for total in () if fleet.only else fleet.totals:
        progress.stage(f"total {total.name}", None)
        result.totals.append(total_of(fleet, total, membership.members, lambda: progress.done(0)))
    result.seconds = time.monotonic() - began
    return result


def _shared_engine(
    members: Sequence[Member], bounds: Bounds, progress: Progress, stack: ExitStack
) -> tuple[Engine | None, str]:
    """Return one Spark for all members that are compared on it, which ends with the stack; or why there is none.

    Where it doesn't start, the others are compared all the same.
    """
    jobs = [member.job for member in members if choose_engine(member.job)[0] is EngineName.SPARK]
    if not jobs:
        return None, "no member is compared on Spark"
    try:
        return stack.enter_context(run.engine_for(jobs[0], progress, bounds.at_once)), ""
    except ReconcileError as error:
        return None, str(error)


def mend_fleet(fleet: Fleet, result: FleetResult, progress: Progress | None = None) -> None:
    """Repair what `compare_fleet` found, by the policy of the jobs; what became of it is added to the result."""
    began, progress = time.monotonic(), progress or NoProgress()
    compared = [each for each in result.members if each.result is not None and not each.result.in_sync]

    def mend(each: MemberResult, listener: Progress) -> None:
        if each.result is not None:
            run.mend(each.member.job, each.result, listener)

    progress.stage("databases repaired", len(compared))
    in_turn(compared, mend, fleet.bounds, progress)
    result.seconds += time.monotonic() - began


def in_turn(
    members: Sequence[MemberResult], act: Callable[[MemberResult, Progress], None], bounds: Bounds, progress: Progress
) -> None:
    """Do something with each member, in threads: in their order, and a later one first where an earlier doesn't fit.

    An error becomes that of the member. What hasn't begun when the time is over doesn't begin.

    Raises:
        Interrupted, KeyboardInterrupt: what ``progress`` raises, after the members at work have ended.
    """
    began = time.monotonic()
    # Not all at the same moment: others begin at the full hour too.
    waiting = [(began + random.uniform(0.0, bounds.jitter), each) for each in members]  # noqa: S311 - no secret
    running: dict[Future[None], MemberResult] = {}
    used: Counter[str] = Counter()
    ending = Event()
    with ThreadPoolExecutor(bounds.at_once, "fleet") as pool:
        try:
            while waiting or running:
                now = time.monotonic()
                if now > began + bounds.max_time:
                    for _, each in waiting:
                        each.error = f"it didn't begin within the fleet's max_time = {duration(bounds.max_time)}"
                    waiting = []
                for since, each in list(waiting):
                    sessions = each.member.sessions
                    fits = all(used[server] + number <= bounds.sessions for server, number in sessions.items())
                    if since <= now and fits and len(running) < bounds.at_once:
                        waiting.remove((since, each))
                        used.update(sessions)
                        running[pool.submit(act, each, Stoppable(ending))] = each
                if not running:
                    ending.wait(_TELL_EVERY)
                for future in wait(running, _TELL_EVERY, FIRST_COMPLETED).done:
                    each = running.pop(future)
                    used.subtract(each.member.sessions)
                    if error := future.exception():
                        each.error = why_of(error, each.member.job)
                        progress.say(f"{each.member}: {each.error}")
                progress.done(len(members) - len(waiting) - len(running))
        except BaseException:
            ending.set()
            progress.say(f"{len(running)} at work, which end at their next step")
            raise


# --- by a timetable --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FleetRun:
    """A fleet, the database that records that it is run, and which messages are compared."""

    fleet: Fleet
    recorder: Access
    window: Window
    record: bool = True

    @property
    def names(self) -> tuple[tuple[str, str], ...]:
        """What its run is called in place of a topic and a group."""
        return (FLEET,)

    @property
    def accesses(self) -> tuple[Access, ...]:
        """All databases that it speaks to."""
        of_jobs = self.fleet.job.get("record_in")
        return (*self.fleet.databases.values(), self.recorder, *([of_jobs] if of_jobs else []))

    def carry_out(self, ids: RunIds, progress: Progress) -> FleetResult:
        """Compare the fleet, repair what differs if its jobs say so, and record what came of it.

        A run in which something came to no result is recorded as failed, with what was counted of the rest.

        Raises:
            InvalidSettings: as `compare_fleet`.
            SourceLost: the record can't be written.
        """
        record = Record(self)
        with run.recorded(record, ids.runs), record.alive(ids.runs):
            result = compare_fleet(self.fleet, progress)
            if self.fleet.job.get("apply"):
                mend_fleet(self.fleet, result, progress)
        self._end(record, ids.runs[0], result)
        return result

    def _end(self, record: Record, run_id: UUID, result: FleetResult) -> None:
        if result.failed:
            record.fail(run_id, result.sentence)
        pairs = [pair for _, each in result.results for pair in each.pairs]
        counts = sum((pair.counts for pair in pairs), Counter())
        plan: Mapping[str, Any] = {
            "engine": max((pair.plan.engine for pair in pairs), default=EngineName.LOCAL),
            "why": [result.sentence, f"{len(result.members)} jobs of two databases each, {len(pairs)} pairs in all"],
            "rows_read": sum(pair.plan.rows_read for pair in pairs),
            "healed": sum(pair.healed for pair in pairs),
            # All findings are in the consumers' databases.
            "left_out": result.verdict.left,
            "members": len(result.members),
            "failed": result.failed,
        }
        record.close(run_id, counts, plan)
