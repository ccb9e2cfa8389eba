"""Carry bulk jobs out: item by item in small transactions, so that a crash at any point leaves nothing half done.

A worker, the command line that ordered the job, or several of these at once run it. Each locks the next items, skips
those that another one has, acts on their messages, and commits what became of them together with that.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING
from uuid import UUID

from outbox.acts.changes import BUSY, ActOutcome, ActRequest, Target, apply
from outbox.acts.messages import ACTS
from outbox.database.duty import APPEND, BULK, DECIDE, Duty, Post, Task, alone
from outbox.database.execute import CONTENDED, CUT_OFF, Row, by_size, execute, is_lost, query, sqlstate, statement
from outbox.database.sql import begin_bulk_job, finish_bulk_jobs, wait_at_most
from outbox.errors import OutboxError
from outbox.message.model import Counts
from outbox.operator.bulk import sql
from outbox.telemetry.events import BulkItemFailed
from outbox.telemetry.hooks import emit
from outbox.text import message_of, summary_of

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from outbox.settings import Settings

#: How many items share a transaction, and how many bulk jobs are looked at in one pass.
BATCH = 100
BULK_JOBS = 1_000
#: How long (seconds) one bulk job is carried out before the next has its turn.
SLICE = 1.0
#: How long (seconds) a statement waits for a lock; an item whose message is locked is tried again after `AGAIN`
#: seconds, `MOST` times.
PATIENCE = 0.5
AGAIN = 5.0
MOST = 60

NOTHING = Counts()
_ACTIONS = sorted(name for name, act in ACTS.items() if not act.as_job)


def bulk_once(
    connection: Connection,
    settings: Settings,
    *,
    bulk_job_id: UUID | None = None,
    stopping: Callable[[], bool] = lambda: False,
    rated: bool = True,
) -> Counts:
    """Carry on with every open bulk job, or with one, each for a while; end those of which nothing is left.

    Compensations are left to a duty of their own. ``connection`` must not be in a transaction. ``rated`` False ignores
    the rates that were ordered.

    Returns ``taken`` items, of these ``done`` ones and ``failed`` ones (those that were refused are neither); ``more``
    if something is left that could be done now.
    """
    schema, limit = settings.schema, BULK_JOBS if bulk_job_id is None else 1
    with connection.begin():
        values = {"actions": _ACTIONS, "limit": limit, "id": bulk_job_id}
        _, rows = execute(connection, finish_bulk_jobs(schema, bulk_job_id), statement(schema, sql.OPEN, values))
    counts = NOTHING
    for job_id, action, actor, reason, options, origin, rate, begun in rows:
        if stopping():
            break
        via = {**(json.loads(origin) if origin else {}), "bulk_job": str(job_id)}
        request = ActRequest(ACTS[action], actor, reason, via, json.loads(options))
        run = _Run(connection, settings, job_id, request, rate if rated else None, begun, stopping)
        counts += run.carry_on()
    return counts


@dataclass(slots=True)
class _Run:
    """One bulk job, as it is carried out here; ``_taken`` are the items of the transaction that is open."""

    _connection: Connection
    _settings: Settings
    _id: UUID
    _request: ActRequest
    _rate: float | None
    _begun: bool
    _stopping: Callable[[], bool]
    _taken: list[Row] = field(default_factory=list)

    def carry_on(self) -> Counts:
        """Take batch after batch, in the order of the items, until none is left, the worker stops, or time is up."""
        schema, until = self._settings.schema, time.monotonic() + SLICE
        if not self._begun:
            with self._connection.begin():
                execute(self._connection, begin_bulk_job(schema, self._id))
        counts, after = NOTHING, 0
        while not self._stopping() and time.monotonic() < until:
            step = by_size(self._connection, ("bulk", self._request.act.name), BATCH, partial(self._batch, after))
            counts += step
            if not step.more:
                with self._connection.begin():
                    execute(self._connection, finish_bulk_jobs(schema, self._id))
                return replace(counts, more=False)
            after = self._taken[-1][0]
        return replace(counts, more=True)

    def _batch(self, after: int, limit: int) -> Counts:
        """Act on the next items in one transaction; if it fails otherwise than by time, on each in one of its own."""
        try:
            return self._act(after, limit)
        except Exception as error:
            taken = list(self._taken)
            if is_lost(self._connection) or not taken or (len(taken) > 1 and sqlstate(error) in CUT_OFF - CONTENDED):
                raise
            if len(taken) == 1:
                return self._failed(taken[0], error)
        counts = NOTHING
        for number, *_ in taken:
            if self._stopping():
                break
            counts += self._batch(number - 1, 1)
        self._taken = taken
        return counts

    def _act(self, after: int, limit: int) -> Counts:
        schema = self._settings.schema
        self._taken = []
        with self._connection.begin():
            execute(self._connection, wait_at_most(PATIENCE))
            if self._rate is not None:
                limit = min(limit, budget(self._connection, self._settings.schema, self._id, self._rate))
            self._taken = query(self._connection, schema, sql.TAKE, id=self._id, after=after, limit=limit)
            if not self._taken:
                return NOTHING
            targets = [Target(message_id, group) for _, message_id, group, _ in self._taken]
            outcomes = apply(self._connection, self._settings, self._request, targets, wait=False)
            settled = [_settled(row, outcome) for row, outcome in zip(self._taken, outcomes, strict=True)]
            execute(self._connection, sql.settle(schema, self._id, settled))
        done = sum(item.state == "done" for item in settled)
        failed = sum(item.state == "failed" for item in settled)
        return Counts(len(settled), done, failed, more=len(settled) == limit)

    def _failed(self, row: Row, error: Exception) -> Counts:
        """Write down that the item which was acted on alone has failed, for now or for good."""
        original = getattr(error, "orig", None) or error
        if sqlstate(original) in CONTENDED | CUT_OFF:
            why = BUSY if sqlstate(original) in CONTENDED else "it took longer than the server lets it"
            settled = _settled(row, ActOutcome("busy", why, None))
        elif isinstance(error, OutboxError):
            settled = sql.Settled(row[0], "failed", message_of(error))
        else:
            emit(BulkItemFailed(bulk_job=self._id, item=row[0], error=error))
            settled = sql.Settled(row[0], "failed", summary_of(original).partition("\n")[0])
        with self._connection.begin():
            execute(self._connection, sql.settle(self._settings.schema, self._id, [settled]))
        return Counts(1, failed=int(settled.state == "failed"), more=True)


def budget(connection: Connection, schema: str, bulk_job_id: UUID, rate: float) -> int:
    """Return how many items may be tried now; 0 if another worker carries the job out, which counts for itself."""
    if not query(connection, schema, sql.LOCK_RATED, id=bulk_job_id):
        return 0
    return int(query(connection, schema, sql.BUDGET, id=bulk_job_id, rate=rate)[0][0])


def _settled(row: Row, outcome: ActOutcome) -> sql.Settled:
    number, _, _, attempts = row
    if outcome.state != "busy":
        return sql.Settled(number, outcome.state, outcome.text)
    if attempts + 1 >= MOST:
        return sql.Settled(number, "failed", f"{outcome.text}, and was so {attempts + 1} times")
    return sql.Settled(number, "pending", f"{outcome.text}; tried again in a while", AGAIN)


def _tasks(at: Post) -> Iterator[Task]:
    # A lane of its own: operators wait for what they ordered. Jobs are carried out in the tables that there are.
    one_pass = alone(bulk_once, at.settings, rated=not at.at_once)
    yield Task(name="bulk", one_pass=one_pass, every=at.settings.idle_wait, after=at.wake_dispatch, parts=at.parts)


DUTIES = (
    Duty(
        "bulk",
        "Carries out what operators have ordered of many messages.",
        f"""
        producer: worker operator admin
        {BULK}
        {APPEND}
        {DECIDE}
        SELECT INSERT ON check_history
        INSERT ON topic_total
        SELECT(half_id) ON compensation
        UPDATE ON op_message
        SELECT INSERT UPDATE ON scheduled_message
        SELECT(target action result) ON audit
        consumer: consumer operator admin
        {BULK}
        SELECT UPDATE ON consumer_message
        """,
        role="bulk",
        tasks=_tasks,
    ),
)
