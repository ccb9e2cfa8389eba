"""A follower of one pair: pass after pass it looks, looks again at what differs, writes that down, and repairs it.

Nothing it does is its own: outcomes are those of `rows.judge`, the second look is that of `pairing`, repairs are those
of `repair`. What it adds is that it never begins anew: each pass goes on from where the last one came to, whichever
worker took it.

What a pass has to tell is one event for each kind of difference, however many messages they are.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid4

import pyarrow as pa
import pyarrow.compute as pc

from outbox.database.execute import execute
from outbox.errors import InvalidSettings
from outbox.message.ids import uuid7_at
from outbox.message.model import Counts
from outbox.reconcile.follow.record import (
    LEASE,
    FollowerRecord,
    FollowerState,
    KnownDifference,
    LeasedPass,
    PendingRange,
)
from outbox.reconcile.follow.survey import SLACK, Chunk, LogSurvey, LogSurveyor, Sessions, ahead_of, due_of, pending_of
from outbox.reconcile.job import DONE, HEALED, EngineName, Job, Outcome, Pair, Repair
from outbox.reconcile.pairing import recheck, rules_of
from outbox.reconcile.record import settled
from outbox.reconcile.record.write import acted
from outbox.reconcile.repair import BUSY, repair
from outbox.reconcile.report import gravest
from outbox.reconcile.rows import Finding, Repaired, in_flight, to_findings, to_uuids
from outbox.reconcile.source import SessionSettings, engine_of
from outbox.telemetry.events import DifferencesFound, DifferencesGone, DifferencesRepaired, FollowerRewound
from outbox.telemetry.hooks import TelemetryEvent

if TYPE_CHECKING:
    from sqlalchemy import Connection

#: So many differences of a pair are listed at most; of others it is known how many there are, and in which ranges.
MOST_OPEN = 10_000
#: After so many microseconds it is looked again at what differs and isn't listed.
_UNLISTED_AGAIN = 300_000_000
#: So many differences are repaired in a pass at most.
_REPAIRED = 500
#: How long (seconds) a statement of a pass may take.
_MAX_TIME = 600.0


@dataclass(frozen=True, slots=True)
class PassResult:
    """What a pass has come to, once it is in the record.

    ``found`` are new differences, or known ones of another kind; ``gone`` those that are none any more, by what they
    were. ``open`` is how many differences there are now of each kind, and ``before`` how many there were: with those
    that aren't listed, and with the backlog (`Outcome.UNCONSUMED`). ``judged`` is how many messages were.
    """

    run: UUID
    pair: Pair
    found: tuple[Finding, ...]
    gone: Mapping[UUID, Outcome]
    open: Counter[Outcome]
    before: Counter[Outcome]
    judged: int
    watched: int
    fell_back: bool
    repaired: tuple[Repaired, ...] = ()


def check_followed(job: Job) -> None:
    """Check that a job can be followed.

    Raises:
        InvalidSettings: it has what only a run does; names it.
    """
    only_of_runs = {
        "window.until": job.window.until is not None,
        "measures": bool(job.measures),
        "spark": job.engine is EngineName.SPARK,
        "record = false": not job.record,
        **{f"{part}.tables": True for part in job.tables},
    }
    if found := [name for name, is_set in only_of_runs.items() if is_set]:
        raise InvalidSettings(
            f"{found[0]} is of a run that ends; leave it out, and have a second reconciliation each night for that"
        )


@dataclass(slots=True)
class Follower:
    """Follows one pair of a job; its calls are the passes of a duty. Not thread-safe.

    ``name`` is that of the reconciliation, ``every`` how many seconds there are between passes. ``waiting`` is called
    now and then while another session has locked a table; what it raises ends the pass. ``report`` gets the result of
    each pass that did anything.
    """

    job: Job
    pair: Pair
    name: str
    every: float
    report: Callable[[PassResult], None] = lambda _: None
    waiting: Callable[[], None] = lambda: None
    _sessions: Sessions = field(init=False)
    _record: FollowerRecord = field(init=False)
    _state: FollowerState | None = None
    _open: dict[UUID, KnownDifference] = field(default_factory=dict)
    _examined: set[UUID] = field(default_factory=set)
    _last: tuple[UUID | None, int] = (None, 0)
    _leased_at: float = 0.0

    def __post_init__(self) -> None:
        check_followed(self.job)
        self._sessions = Sessions(self.job, SessionSettings(f"outbox follow {self.name}", _MAX_TIME))
        self._record = FollowerRecord(self.job, self.pair, self.name, str(uuid4()))

    def __call__(self, connection: Connection) -> Counts:
        """Take a pass, if one is due and no other worker is at it; ``connection`` is to the record, and autocommits.

        Raises:
            SourceError: a database can't be read; the next pass takes up what this one hasn't written.
            sqlalchemy.exc.DBAPIError: the record can't be written, or a connection was lost over a repair.
        """
        leased = self._record.lease_pass(connection, self._last)
        if leased is None:
            if self._record.has_run(connection):
                return Counts()
            self._begin(connection)
            return Counts(more=True)
        try:
            return self._pass(connection, leased)
        except BaseException:
            # The state in memory is ahead of the record.
            self._forget()
            raise

    def close(self) -> None:
        """Close the connections on which it reads."""
        self._sessions.close()

    @property
    def backends(self) -> list[int]:
        """The processes of the servers behind the connections on which it reads."""
        return self._sessions.backends

    # --- a pass ------------------------------------------------------------------------------------------

    def _begin(self, connection: Connection) -> None:
        """Write from where it follows: all that is past the grace period by now is left to other runs."""
        with self._sessions.snapshots(self.waiting) as snapshots:
            grace = rules_of(self.job, self.pair, snapshots).grace
            since = (snapshots.producer.now - grace) / 1e6 - SLACK
            if self.job.window.since is not None:
                since = min(since, self.job.window.since.timestamp())
            state = FollowerState(uuid7_at(since), settled.mark_of(snapshots, self.pair))
        self._record.begin(connection, state)

    def _pass(self, connection: Connection, leased: LeasedPass) -> Counts:
        began = self._leased_at = time.monotonic()
        state = self._resume(connection, leased)
        before = self._counts(state)
        with self._sessions.snapshots(self.waiting) as snapshots:
            known = {id_: each.kind for id_, each in self._open.items()}
            urgent = [id_ for id_, each in self._open.items() if self._is_urgent(each)]
            surveyor = LogSurveyor(self.job, self.pair, snapshots, state, known, urgent, self._examined)
            look = surveyor.take()
        self._open = {id_: self._open[id_] for id_ in known}
        listed = self._confirm(state, look, lambda: self._stay(connection, leased))
        found = tuple(to_findings(listed))
        gone = {id_: self._open.pop(id_).kind for id_ in look.gone}
        self._open |= {each.id: KnownDifference(each.outcome) for each in found}
        wait = 0.0 if look.behind else max(self.every - (time.monotonic() - began), 0.0)
        counts = self._counts(state)
        totals = counts + state.judged + Counter({Outcome.IN_FLIGHT: len(state.watch)})
        facts = {"rows_read": look.judged, "left_out": (counts - self._listed()).total()}
        run = self._record.keep(connection, leased, state, totals, found, gone, wait, facts)
        if run is None:
            self._forget()
            return Counts(taken=look.judged)
        self._state, self._last = state, (run, leased.passes + 1)
        result = PassResult(run, self.pair, found, gone, counts, before, look.judged, len(state.watch), look.fell_back)
        try:
            if self.job.apply:
                repaired = self._repair(connection, run, [*found, *to_findings(look.known)])
                result = replace(result, repaired=tuple(repaired))
        finally:
            self.report(result)
        return Counts(taken=look.judged, done=look.judged - len(found), failed=len(found), more=look.behind)

    def _resume(self, connection: Connection, leased: LeasedPass) -> FollowerState:
        if leased.state is None and self._state is not None:
            return self._state
        state = FollowerState.of_json(leased.state or {})
        self._open = self._record.open(connection, leased.run)
        self._examined.clear()
        return state

    def _forget(self) -> None:
        self._state, self._last = None, (None, 0)

    def _stay(self, connection: Connection, leased: LeasedPass) -> None:
        """Keep a pass that takes long from other workers."""
        if time.monotonic() - self._leased_at > LEASE / 4:
            self._record.renew(connection, leased)
            self._leased_at = time.monotonic()

    def _confirm(self, state: FollowerState, look: LogSurvey, stay: Callable[[], None]) -> pa.Table:
        """Take the second look; return the listed findings, and have the state know the messages to look at again.

        ``stay`` is called now and then.
        """
        stay()
        read_again = partial(self._sessions.read_again, self.pair)
        confirmed, opened, _ = recheck(look.found, read_again, lambda _: stay())
        now = look.rules.producer_now
        state.watch |= dict(due_of(look.rules, in_flight(opened)))
        state.watch_all(to_uuids(ahead_of(confirmed)), now + _UNLISTED_AGAIN // 10)
        real = confirmed.filter(pc.not_equal(confirmed["outcome"], int(Outcome.UNCONSUMED)))
        listed = gravest(real, max(MOST_OPEN - len(self._open) + len(look.gone), 0))
        ids = set(to_uuids(listed))
        unlisted: dict[int, Counter[Outcome]] = {}
        for id_, kind in zip(to_uuids(real), map(Outcome, real["outcome"].to_pylist()), strict=True):
            if id_ in ids:
                continue
            number = next((number for number, chunk in enumerate(look.chunks) if id_ in chunk.ids), None)
            if number is None:
                state.watch[id_] = now + _UNLISTED_AGAIN
            else:
                unlisted.setdefault(number, Counter())[kind] += 1
        state.add_pending(_pending(look.chunks, unlisted, now + _UNLISTED_AGAIN))
        return listed

    def _counts(self, state: FollowerState) -> Counter[Outcome]:
        """Return how many differences there are of each kind."""
        counts = self._listed()
        for pending in state.pending:
            counts.update({kind: number for kind, number in pending.counts.items() if kind.differs})
        return counts

    def _listed(self) -> Counter[Outcome]:
        return Counter(each.kind for each in self._open.values() if each.result not in {DONE, HEALED})

    # --- repairs -----------------------------------------------------------------------------------------

    def _is_urgent(self, known: KnownDifference) -> bool:
        """Is it to be read in the next pass: was its repair done, or is it to be tried?"""
        if not self.job.apply or known.kind.repair(self.job.policy) is Repair.ALERT:
            return False
        return known.result in {None, DONE, HEALED}

    def _repair(self, connection: Connection, run: UUID, findings: Sequence[Finding]) -> list[Repaired]:
        """Repair untried findings by the policy; the next pass tries those again that another transaction was at."""
        untried = (each for each in findings if (known := self._open.get(each.id)) and known.result is None)
        repairable = (each for each in untried if each.outcome.repair(self.job.policy) is not Repair.ALERT)
        repaired: list[Repaired] = []

        def write_down(news: Sequence[Repaired]) -> None:
            settled_now = [each for each in news if each.result != BUSY]
            if settled_now:
                with connection.begin():
                    execute(connection, acted(self.job.recorder.schema, run, settled_now))
            for each in settled_now:
                self._open[each.id] = replace(self._open[each.id], result=each.result)
            repaired.extend(news)

        some = list(itertools.islice(repairable, _REPAIRED))
        if some:
            repair(
                self.job, self.pair, run, some, engine_of(self.job.producer), engine_of(self.job.consumer), write_down
            )
        return repaired


def _pending(
    chunks: Sequence[Chunk], unlisted: Mapping[int, Counter[Outcome]], again_at: int
) -> Iterator[PendingRange]:
    for number, chunk in enumerate(chunks):
        pending = pending_of(chunk, unlisted.get(number, Counter()), again_at)
        if pending is not None:
            yield pending


# --- what a pass has to tell ------------------------------------------------------------------------------

#: So many messages of a kind are named in one event.
NAMED = 100


def events_of(result: PassResult, duty: str, name: str) -> Iterator[TelemetryEvent]:
    """Yield what a pass has to tell."""
    topic, group = result.pair.names
    named: dict[str, Any] = {"duty": duty, "reconciliation": name, "topic": topic, "group": group}
    if result.fell_back:
        yield FollowerRewound(**named)
    found: dict[Outcome, list[UUID]] = {}
    for each in result.found:
        found.setdefault(each.outcome, []).append(each.id)
    more, fewer = unlisted(result)
    for kind in sorted(found.keys() | more.keys()):
        ids = found.get(kind, [])
        yield DifferencesFound(
            **named, kind=kind.label, number=len(ids) + more[kind], message_ids=tuple(ids[:NAMED]), mend=kind.by_hand()
        )
    gone: dict[Outcome, list[UUID]] = {}
    for id_, kind in result.gone.items():
        gone.setdefault(kind, []).append(id_)
    for kind in sorted(gone.keys() | fewer.keys()):
        ids = gone.get(kind, [])
        number = len(ids) + fewer[kind]
        yield DifferencesGone(
            **named, kind=kind.label, number=number, message_ids=tuple(ids[:NAMED]), left=result.open[kind]
        )
    if result.repaired:
        results = Counter(each.result for each in result.repaired)
        yield DifferencesRepaired(**named, results=dict(results))


def unlisted(result: PassResult) -> tuple[Counter[Outcome], Counter[Outcome]]:
    """Return how many differences there are more, and fewer, of each kind, besides those that are listed.

    A backlog is told when it begins and when it is over.
    """
    change: Counter[Outcome] = Counter(result.open)
    change.subtract(result.before)
    change.subtract(each.outcome for each in result.found)
    change.update(result.gone.values())
    ahead = Outcome.UNCONSUMED
    if result.before[ahead] and result.open[ahead]:
        del change[ahead]
    return +change, -change
