"""The record of a follower: one run for each pair and day, whose findings are open until they are gone.

The run's ``plan`` says how far the follower has come (`state`). A pass is leased there, and what it has found is
written with the new state in one transaction, unless another worker has leased the run meanwhile: so a pass counts
once, however many workers there are, and wherever one of them dies.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from sqlalchemy import Connection

from outbox.database.execute import Statement, execute, lock_key, statement
from outbox.database.sql import try_lock
from outbox.message.model import uuid7
from outbox.reconcile.follow.state import counts_as_json
from outbox.reconcile.job import HEALED, Job, Outcome, Pair
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

    def begin(self, connection: Connection, state: Mapping[str, Any]) -> None:
        """Write the first run, unless there is one."""
        key = lock_key("follow", self.job.recorder.schema, self.schedule, *self.pair.names)
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
        return {id_: KnownDifference(Outcome[kind.upper()], result) for id_, kind, result in rows}

    def keep(
        self,
        connection: Connection,
        leased: LeasedPass,
        state: Mapping[str, Any],
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
        topic, group = self.pair.names
        named = {"topic": topic, "group": group, "schedule": self.schedule}
        return statement(self.job.recorder.schema, template, named | values)


def _plan(state: Mapping[str, Any], passes: int) -> dict[str, Any]:
    why = "it follows the log: what is new, what is due, and what was touched since its last pass is compared"
    return {"follows": True, "engine": "local", "tier": "digest", "rows_read": 0, "why": [why]} | {
        "passes": passes,
        "state": state,
    }
