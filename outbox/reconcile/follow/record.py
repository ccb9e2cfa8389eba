"""The record of a follower: one run for each pair and day, whose findings are open until they are gone.

The run's ``plan`` says how far the follower has come (`FollowerState`). A pass is leased there, and what it has found
is written with the new state in one transaction, unless another worker has leased the run meanwhile: so a pass counts
once, however many workers there are, and wherever one of them dies.

Ids below the frontier were judged once. Of them there are judged again: single messages that are watched, at their
time; and pending ranges, which hold too much to name it one by one, a backlog say.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import UUID

from sqlalchemy import Connection

from outbox.database.execute import Statement, execute, lock_key, statement
from outbox.database.sql import try_lock
from outbox.message.model import uuid7
from outbox.reader import plain
from outbox.reconcile.job import HEALED, LABELED, LAST_ID, Job, Outcome, Pair, Range, counts_as_json, counts_of_json
from outbox.reconcile.record.settled import Mark
from outbox.reconcile.record.views import SETTLED
from outbox.reconcile.record.write import FINDINGS, of_findings
from outbox.reconcile.rows import Finding

#: For so many seconds a pass is left to the worker that has leased it; if that one dies, another one takes it then.
LEASE = 60.0
#: After so many seconds a run is ended, and another one goes on with the open findings.
RUN_LASTS = 86_400.0
_BATCH = 2_000

_LIVE = """
SELECT id FROM {s}.reconciliation_run
 WHERE topic = %(topic)s AND consumer_group = %(group)s AND schedule = %(schedule)s AND finished_at IS NULL
   AND plan ->> 'follows' IS NOT NULL
 ORDER BY started_at DESC LIMIT 1
"""

# Only what another worker has written is read.
_TAKE = f"""
UPDATE {{s}}.reconciliation_run r
   SET plan = plan || jsonb_build_object('holder', %(holder)s::text, 'alive_at', clock_timestamp(),
                                         'leased_until', clock_timestamp() + make_interval(secs => {LEASE}))
 WHERE id = ({_LIVE} FOR UPDATE SKIP LOCKED)
   AND (plan ->> 'holder' = %(holder)s OR coalesce((plan ->> 'leased_until')::timestamptz, '-infinity')
                                        < clock_timestamp())
   AND (plan ->> 'due_at')::timestamptz <= clock_timestamp()
RETURNING id, (plan ->> 'passes')::int8, extract(epoch FROM clock_timestamp() - started_at)::float8,
          CASE WHEN (id, (plan ->> 'passes')::int8) IS DISTINCT FROM (%(run)s::uuid, %(passes)s::int8)
               THEN (plan -> 'state')::text END
"""

_RENEW = f"""
UPDATE {{s}}.reconciliation_run
   SET plan = plan || jsonb_build_object('leased_until', clock_timestamp() + make_interval(secs => {LEASE}))
 WHERE id = %(run)s AND plan ->> 'holder' = %(holder)s
"""

_OPEN = f"""
SELECT message_id, kind, result FROM {{s}}.reconciliation_finding
 WHERE run_id = %(run)s AND message_id IS NOT NULL AND {SETTLED} IS NOT TRUE
 ORDER BY id
"""

_BEGIN = """
INSERT INTO {s}.reconciliation_run (id, job_id, topic, consumer_group, schedule, window_start, counts, plan, applied)
SELECT %(id)s, %(id)s, %(topic)s, %(group)s, %(schedule)s, %(since)s::timestamptz, jsonb_build_object(),
       %(plan)s::jsonb || jsonb_build_object('due_at', clock_timestamp(), 'alive_at', clock_timestamp()), %(applied)s
"""

_KEEP = """
UPDATE {s}.reconciliation_run
   SET counts = %(counts)s::jsonb,
       plan = %(plan)s::jsonb || jsonb_build_object(
           'alive_at', clock_timestamp(), 'passed_at', clock_timestamp(),
           'due_at', clock_timestamp() + make_interval(secs => %(wait)s))
 WHERE id = %(run)s AND plan ->> 'holder' = %(holder)s AND finished_at IS NULL
RETURNING id
"""

# A message that is a finding of the run already, and differs again, or in another way.
_FOUND_AGAIN = """
UPDATE {s}.reconciliation_finding f
   SET kind = n.kind, detail = n.detail, action = n.action, result = NULL, acted_at = NULL
  FROM unnest(%(ids)s::uuid[], %(kinds)s::text[], %(details)s::jsonb[], %(actions)s::text[])
       AS n (message, kind, detail, action)
 WHERE f.run_id = %(run)s AND f.message_id = n.message
"""

_GONE = f"""
UPDATE {{s}}.reconciliation_finding
   SET result = '{HEALED}', acted_at = clock_timestamp()
 WHERE run_id = %(run)s AND message_id = ANY (%(ids)s::uuid[]) AND {SETTLED} IS NOT TRUE
"""

_MOVE = f"""
UPDATE {{s}}.reconciliation_finding SET run_id = %(new)s WHERE run_id = %(run)s AND {SETTLED} IS NOT TRUE
"""

_SUCCEED = """
WITH ended AS (
    UPDATE {s}.reconciliation_run
       SET finished_at = clock_timestamp(), plan = plan - '{state,holder,leased_until,due_at}'::text[]
     WHERE id = %(run)s
    RETURNING topic, consumer_group, schedule, applied
)
INSERT INTO {s}.reconciliation_run (id, job_id, topic, consumer_group, schedule, window_start, counts, plan, applied)
SELECT %(new)s, %(new)s, topic, consumer_group, schedule, clock_timestamp(), %(counts)s::jsonb,
       %(plan)s::jsonb || jsonb_build_object('due_at', clock_timestamp(), 'alive_at', clock_timestamp(),
                                             'passed_at', clock_timestamp()), applied
  FROM ended
"""


@dataclass(frozen=True, slots=True)
class LeasedPass:
    """A pass that is this worker's: of which run, the number of passes before it, and the run's age (seconds).

    ``state`` is what another worker has written (`FollowerState`), None where this one was the last to write.
    """

    run: UUID
    passes: int
    age: float
    state: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class KnownDifference:
    """A difference that is open; ``result`` is what came of its repair, None before it was tried."""

    kind: Outcome
    result: str | None = None


@dataclass(frozen=True, slots=True)
class FollowerRecord:
    """The record of what one follower finds of one pair; ``holder`` names the worker's follower.

    Its connection is in the database of the record, and in no transaction.
    """

    job: Job
    pair: Pair
    schedule: str
    holder: str

    def lease_pass(self, connection: Connection, last: tuple[UUID | None, int]) -> LeasedPass | None:
        """Lease a pass; None if none is due, or another worker is at it. ``last``: the run and passes known here."""
        values = {"holder": self.holder, "run": last[0], "passes": last[1]}
        with connection.begin():
            (rows,) = execute(connection, self._statement(_TAKE, **values))
        if not rows:
            return None
        run, passes, age, state = rows[0]
        return LeasedPass(run, passes, age, None if state is None else json.loads(state))

    def renew(self, connection: Connection, leased: LeasedPass) -> None:
        """Have the lease of a pass begin anew: it takes long."""
        with connection.begin():
            execute(connection, self._statement(_RENEW, run=leased.run, holder=self.holder))

    def begin(self, connection: Connection, state: FollowerState) -> None:
        """Write the first run, unless there is one."""
        key = lock_key("follow", self.job.recorder.schema, self.schedule, self.pair.feed, self.pair.group)
        with connection.begin():
            ((taken, *_),) = execute(connection, try_lock(key))[0]
            # By a statement that sees what earlier holders of the lock have committed.
            if not taken or execute(connection, self._statement(_LIVE))[0]:
                return
            values = {"id": uuid7(), "since": self.job.window.since, "plan": json.dumps(_plan(state, 0))}
            execute(connection, self._statement(_BEGIN, applied=self.job.apply, **values))

    def has_run(self, connection: Connection) -> bool:
        """Is there a run to go on with?"""
        with connection.begin():
            return bool(execute(connection, self._statement(_LIVE))[0])

    def open(self, connection: Connection, run: UUID) -> dict[UUID, KnownDifference]:
        """Return the differences of a run that are open, the oldest first."""
        with connection.begin():
            (rows,) = execute(connection, self._statement(_OPEN, run=run))
        return {id_: KnownDifference(LABELED[kind], result) for id_, kind, result in rows}

    def keep(
        self,
        connection: Connection,
        leased: LeasedPass,
        state: FollowerState,
        counts: Counter[Outcome],
        found: Sequence[Finding],
        gone: Collection[UUID],
        wait: float,
        facts: Mapping[str, Any],
    ) -> UUID | None:
        """Write how a pass ended, and when the next one is due (seconds); return the run that goes on.

        None: another worker has leased the run since, and nothing is written.
        """
        run, plan = leased.run, {**_plan(state, leased.passes + 1), "holder": self.holder, **facts}
        values = {"run": run, "counts": json.dumps(counts_as_json(counts)), "wait": wait, "holder": self.holder}
        with connection.begin() as transaction:
            (written,) = execute(connection, self._statement(_KEEP, plan=json.dumps(plan), **values))
            if not written:
                transaction.rollback()
                return None
            for start in range(0, len(found), _BATCH):
                news = of_findings(run, found[start : start + _BATCH], self.job.policy)
                execute(connection, *(self._statement(each, **news) for each in (_FOUND_AGAIN, FINDINGS)))
            if gone:
                execute(connection, self._statement(_GONE, run=run, ids=list(gone)))
            if leased.age < RUN_LASTS:
                return run
            new = uuid7()
            values |= {"new": new, "plan": json.dumps(plan)}
            execute(connection, self._statement(_SUCCEED, **values), self._statement(_MOVE, run=run, new=new))
            return new

    def _statement(self, template: str, **values: object) -> Statement:
        named = {"topic": self.pair.feed, "group": self.pair.group, "schedule": self.schedule}
        return statement(self.job.recorder.schema, template, named | values)


def _plan(state: FollowerState, passes: int) -> dict[str, Any]:
    why = "it follows the log: what is new, what is due, and what was touched since its last pass is compared"
    return {"follows": True, "engine": "local", "tier": "digest", "rows_read": 0, "why": [why]} | {
        "passes": passes,
        "state": plain(state),
    }


# --- how far a follower has come -------------------------------------------------------------------------

#: With another meaning of what is written, an older state is begun anew, from its frontier.
FORMAT = 1
#: So many messages are watched one by one; more of them become ranges.
MOST_WATCHED = 20_000
#: Of ids that were made within so many milliseconds of each other, so many make a range.
_CLOSE, _MANY = 4_096, 50
#: Beyond so many pending ranges, neighbors become one, up to so many messages.
MOST_PENDING, _ROWS_OF_PENDING = 500, 50_000
#: Never, in microseconds: a range of which nothing but the group's offset decides when it is judged again.
NEVER = 2**62


@dataclass(frozen=True, slots=True)
class PendingRange:
    """Ids below the frontier that are to be judged again.

    ``due_at`` is when, by the producer's clock in microseconds; sooner, once the group has come to the positions
    ``up_to``, by queue. ``counts`` are what it came to when it was judged last, with differences that aren't listed.
    """

    ids: Range
    due_at: int = 0
    up_to: Mapping[int, int] = field(default_factory=dict)
    counts: Counter[Outcome] = field(default_factory=Counter)

    def is_passed(self, offsets: Mapping[int, int]) -> bool:
        """Has the group come to the end of what was ahead of it?"""
        return bool(self.up_to) and all(offsets.get(queue, 0) >= position for queue, position in self.up_to.items())

    def joined(self, other: PendingRange) -> PendingRange:
        """Return one range for both, of which the other follows."""
        up_to = {
            queue: max(self.up_to.get(queue, 0), other.up_to.get(queue, 0))
            for queue in self.up_to.keys() | other.up_to.keys()
        }
        whole = Range(self.ids.first, other.ids.end)
        return PendingRange(whole, min(self.due_at, other.due_at), up_to, self.counts + other.counts)

    @classmethod
    def of_json(cls, value: Mapping[str, Any]) -> PendingRange:
        """Return what `reader.plain` returned."""
        positions = {int(queue): position for queue, position in value["up_to"].items()}
        ids, counts = Range(*map(UUID, value["ids"])), counts_of_json(value["counts"])
        return cls(ids, value["due_at"], positions, counts)


@dataclass(slots=True)
class FollowerState:
    """How far a follower of one pair has come.

    ``frontier``: ids below it were judged. ``mark``: all that was written up to it is known (`settled`). ``watch``:
    messages to be judged again, and when (microseconds by the producer's clock). ``pending`` is in order and doesn't
    overlap. ``span`` is how many seconds of ids a pass takes at most. ``judged`` are the messages in order that were
    counted since the run began.
    """

    frontier: UUID
    mark: Mark | None = None
    watch: dict[UUID, int] = field(default_factory=dict)
    pending: list[PendingRange] = field(default_factory=list)
    span: float = 60.0
    judged: Counter[Outcome] = field(default_factory=Counter)
    format: int = FORMAT

    @classmethod
    def of_json(cls, value: Mapping[str, Any]) -> FollowerState:
        """Return what `reader.plain` returned; of another format the frontier alone."""
        state = cls(UUID(value["frontier"]))
        if value.get("format") != FORMAT:
            return state
        return replace(
            state,
            mark=value["mark"],
            watch={UUID(id_): due_at for id_, due_at in value["watch"].items()},
            pending=[PendingRange.of_json(each) for each in value["pending"]],
            span=value["span"],
            judged=counts_of_json(value["judged"]),
        )

    def due(self, now: int, offsets: Mapping[int, int]) -> list[PendingRange]:
        """Return the pending ranges that are to be judged now.

        Of those that the group is just working at it is the oldest, so that what it leaves out there is found before
        it has come to the end.
        """
        due = [each for each in self.pending if each.due_at <= now or each.is_passed(offsets)]
        ahead = (each for each in self.pending if each.up_to and each not in due)
        return due + [each for each in ahead if not due][:1]

    def add_pending(self, ranges: Iterable[PendingRange]) -> None:
        """Add pending ranges; keep them in order, apart, and few."""
        apart: list[PendingRange] = []
        for each in sorted([*self.pending, *ranges], key=lambda each: each.ids.first):
            if apart and each.ids.first < (end := _end(apart[-1].ids)):
                if _end(each.ids) > end:
                    apart[-1] = apart[-1].joined(each)
                else:
                    apart[-1] = replace(apart[-1], due_at=min(apart[-1].due_at, each.due_at))
            else:
                apart.append(each)
        self.pending = apart
        most = _ROWS_OF_PENDING
        while len(self.pending) > MOST_PENDING:
            self.pending = _fewer(self.pending, most)
            most *= 2

    def watch_all(self, ids: Iterable[UUID], due_at: int) -> None:
        """Watch messages, unless they are due earlier; many that were made together as a range."""
        single, ranges = clustered(ids)
        for id_ in single:
            self.watch[id_] = min(self.watch.get(id_, due_at), due_at)
        self.add_pending(PendingRange(each, due_at) for each in ranges)
        if len(self.watch) > MOST_WATCHED:
            last = max(self.watch.values())
            single, ranges = clustered(self.watch, _CLOSE * 256, 1)
            self.watch = {id_: self.watch[id_] for id_ in single}
            self.add_pending(PendingRange(each, last) for each in ranges)


def _end(ids: Range) -> UUID:
    return LAST_ID if ids.end is None else ids.end


def _fewer(ranges: Sequence[PendingRange], most: int) -> list[PendingRange]:
    """Join neighbors that together have no more than so many messages."""
    result: list[PendingRange] = []
    for each in ranges:
        if result and result[-1].counts.total() + each.counts.total() <= most:
            result[-1] = result[-1].joined(each)
        else:
            result.append(each)
    return result


def clustered(ids: Iterable[UUID], close: int = _CLOSE, many: int = _MANY) -> tuple[list[UUID], list[Range]]:
    """Return ids that are alone, and ranges around those of which ``many`` were made ``close`` together (ms)."""
    clusters: dict[int, list[UUID]] = {}
    for id_ in ids:
        clusters.setdefault((id_.int >> 80) // close, []).append(id_)
    single = [id_ for found in clusters.values() if len(found) < many for id_ in found]
    ranges = [
        Range(min(found), UUID(int=min(max(found).int + 1, 2**128 - 1)))
        for found in clusters.values()
        if len(found) >= many
    ]
    return single, sorted(ranges)
