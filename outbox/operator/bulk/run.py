"""Carry bulk jobs out: item by item in small transactions, so that a crash at any point leaves nothing half done.

A worker, the command line that ordered the job, or several of these at once run it. Each locks the next items, skips
those that another one has, acts on their messages, and commits what became of them together with that. An act that asks
other databases, such as a repair, is done under a lease instead, which no transaction is open for: of a process that
died over its items, another one finds done what it did.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import UUID

from outbox.acts.changes import BUSY, ActOutcome, ActRequest, Target, apply
from outbox.acts.messages import ACTS
from outbox.database.duty import APPEND, BULK, DECIDE, Duty, Post, Task, alone
from outbox.database.execute import CONTENDED, CUT_OFF, Row, by_size, execute, is_lost, query, sqlstate, statement
from outbox.database.sql import begin_bulk_job, finish_bulk_jobs, wait_at_most
from outbox.errors import ErrorKind, OutboxError
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
#: For how long (seconds) items are leased. What takes longer may be begun by another worker; then what the first one
#: says of it counts for nothing.
LEASE = 120.0

NOTHING = Counts()
_ACTIONS = sorted(name for name, act in ACTS.items() if not act.as_job)


@dataclass(frozen=True, slots=True)
class OpenJob:
    """A bulk job that isn't done: what was ordered, by which actor, and why; ``origin`` names the bulk job, too.

    ``rate`` is items a second at most.
    """

    id: UUID
    action: str
    actor: str
    reason: str
    options: Mapping[str, Any]
    origin: Mapping[str, str]
    rate: float | None
    begun: bool


#: Acts on the messages of some items, which are locked by the transaction of the connection, or leased, and then it is
#: in none; returns what came of each.
ActOnItems = Callable[["Connection", Sequence[Target]], Sequence[ActOutcome]]


def bulk_once(
    connection: Connection,
    settings: Settings,
    *,
    bulk_job_id: UUID | None = None,
    stopping: Callable[[], bool] = lambda: False,
    rated: bool = True,
) -> Counts:
    """Carry on with every open bulk job, or with one, each for a while; end those of which nothing is left.

    Compensations and repairs are left to duties of their own. ``connection`` must not be in a transaction. ``rated``
    False ignores the rates that were ordered. Returns counts as of `carry_out`.
    """

    def act_of(job: OpenJob) -> ActOnItems:
        request = ActRequest(ACTS[job.action], job.actor, job.reason, job.origin, job.options)
        return lambda connection, targets: apply(connection, settings, request, targets, wait=False)

    schema = settings.schema
    return carry_out(connection, schema, _ACTIONS, act_of, bulk_job_id=bulk_job_id, stopping=stopping, rated=rated)


def carry_out(
    connection: Connection,
    schema: str,
    actions: Collection[str],
    act_of: Callable[[OpenJob], ActOnItems | None],
    *,
    bulk_job_id: UUID | None = None,
    stopping: Callable[[], bool] = lambda: False,
    rated: bool = True,
    leased: bool = False,
) -> Counts:
    """Carry on with the open bulk jobs of these actions, each for a while; end those of which nothing is left.

    ``act_of`` returns how a bulk job is carried out here, None: it is left to other workers. ``leased``: the act asks
    other databases, and no transaction is open meanwhile.

    Returns ``taken`` items, of these ``done`` ones and ``failed`` ones (those that were refused are neither); ``more``
    if something is left that could be done now.

    Raises:
        OutboxError: a database that an act needs is out of reach; the other bulk jobs were carried on with.
    """
    limit = BULK_JOBS if bulk_job_id is None else 1
    with connection.begin():
        values = {"actions": list(actions), "limit": limit, "id": bulk_job_id}
        _, rows = execute(connection, finish_bulk_jobs(schema, bulk_job_id), statement(schema, sql.OPEN, values))
    counts, unreached = NOTHING, None
    for job_id, action, actor, reason, options, origin, rate, begun in rows:
        if stopping():
            break
        via = {**(json.loads(origin) if origin else {}), "bulk_job": str(job_id)}
        limited = rate if rated else None
        job = OpenJob(job_id, action, actor, reason, json.loads(options or "{}"), via, limited, begun)
        if (act := act_of(job)) is not None:
            try:
                counts += _Run(connection, schema, job, act, stopping, leased).carry_on()
            except OutboxError as error:
                if not _is_unreached(error):
                    raise
                unreached = unreached or error
    if unreached is not None:
        raise unreached
    return counts


def _is_unreached(error: Exception) -> bool:
    """Is a database out of reach, so that it isn't for the item that the act failed?"""
    return isinstance(error, OutboxError) and error.kind is ErrorKind.UNAVAILABLE


@dataclass(slots=True)
class _Run:
    """One bulk job, as it is carried out here; ``_taken`` are the items of the transaction that is open."""

    _connection: Connection
    _schema: str
    _job: OpenJob
    _apply: ActOnItems
    _stopping: Callable[[], bool]
    _leased: bool
    _taken: list[Row] = field(default_factory=list)

    def carry_on(self) -> Counts:
        """Take batch after batch, in the order of the items, until none is left, the worker stops, or time is up."""
        schema, job, until = self._schema, self._job, time.monotonic() + SLICE
        if not job.begun:
            with self._connection.begin():
                execute(self._connection, begin_bulk_job(schema, job.id))
        counts, after = NOTHING, 0
        while not self._stopping() and time.monotonic() < until:
            step = by_size(self._connection, ("bulk", job.action), BATCH, partial(self._batch, after))
            counts += step
            if not step.more:
                with self._connection.begin():
                    execute(self._connection, finish_bulk_jobs(schema, job.id))
                return replace(counts, more=False)
            after = self._taken[-1][0]
        return replace(counts, more=True)

    def _batch(self, after: int, limit: int) -> Counts:
        """Act on the next items in one transaction; if it fails otherwise than by time, on each in one of its own."""
        try:
            return self._act(after, limit)
        except Exception as error:
            taken = list(self._taken)
            if is_lost(self._connection) or not taken or _is_unreached(error):
                raise
            if len(taken) > 1 and sqlstate(error) in CUT_OFF - CONTENDED:
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
        schema, job, settled = self._schema, self._job, list[sql.Settled]()
        self._taken = []
        with self._connection.begin():
            left = [statement(schema, sql.CANCEL_LEFT, {"id": job.id})] if self._leased else []
            execute(self._connection, wait_at_most(PATIENCE), *left)
            limit = self._within_rate(limit)
            self._taken = query(self._connection, schema, sql.TAKE, id=job.id, after=after, limit=limit)
            if not self._taken:
                return NOTHING
            numbers = [number for number, *_ in self._taken]
            if self._leased:
                execute(self._connection, statement(schema, sql.LEASE, {"id": job.id, "numbers": numbers, "s": LEASE}))
            else:
                settled = self._applied()
                execute(self._connection, sql.settle(schema, job.id, settled))
        if self._leased:
            settled = self._act_under_lease()
        done = sum(item.state == "done" for item in settled)
        failed = sum(item.state == "failed" for item in settled)
        return Counts(len(settled), done, failed, more=len(settled) == limit)

    def _act_under_lease(self) -> list[sql.Settled]:
        settled: list[sql.Settled] = []
        dying = [row for row in self._taken if row[3] >= MOST]
        try:
            settled = [sql.Settled(row[0], "failed", f"its worker died {row[3]} times") for row in dying]
            settled += [] if dying else self._applied()
        except Exception as error:
            if len(self._taken) > 1 or is_lost(self._connection) or _is_unreached(error):
                raise
            settled = [self._failure(self._taken[0], error)]
        finally:
            if not is_lost(self._connection):
                with self._connection.begin():
                    (rows,) = execute(self._connection, sql.give_back(self._schema, self._job.id, self._taken))
                    mine = {number for (number,) in rows}
                    if settled := [item for item in settled if item.number in mine]:
                        execute(self._connection, sql.settle(self._schema, self._job.id, settled))
        return settled

    def _applied(self) -> list[sql.Settled]:
        targets = [Target(message_id, group) for _, message_id, group, _ in self._taken]
        return [_settled(*each) for each in zip(self._taken, self._apply(self._connection, targets), strict=True)]

    def _failed(self, row: Row, error: Exception) -> Counts:
        """Write down that the item which was acted on alone has failed, for now or for good."""
        settled = self._failure(row, error)
        with self._connection.begin():
            execute(self._connection, sql.settle(self._schema, self._job.id, [settled]))
        return Counts(1, failed=int(settled.state == "failed"), more=True)

    def _failure(self, row: Row, error: Exception) -> sql.Settled:
        original = getattr(error, "orig", None) or error
        if sqlstate(original) in CONTENDED | CUT_OFF:
            why = BUSY if sqlstate(original) in CONTENDED else "it took longer than the server lets it"
            return _settled(row, ActOutcome("busy", why, None))
        if isinstance(error, OutboxError):
            return sql.Settled(row[0], "failed", message_of(error))
        emit(BulkItemFailed(bulk_job=self._job.id, item=row[0], error=error))
        return sql.Settled(row[0], "failed", summary_of(original).partition("\n")[0])

    def _within_rate(self, limit: int) -> int:
        """Return how many items may be tried now; 0 if another worker carries the job out, which counts for itself."""
        job = self._job
        if job.rate is None:
            return limit
        if not query(self._connection, self._schema, sql.LOCK_RATED, id=job.id):
            return 0
        ((budget,),) = query(self._connection, self._schema, sql.BUDGET, id=job.id, rate=job.rate)
        return min(limit, int(budget))


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
