"""What every repair works with: the two databases, short transactions in them, locked inbox rows, and its results."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from uuid import UUID

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError

from outbox.database.execute import Statement, execute
from outbox.database.failure import CONTENDED, sqlstate
from outbox.database.sql import audit, plan_by_index, wait_at_most
from outbox.dispatch.sql import compensated
from outbox.message.model import Status
from outbox.operator.acts import ACTS
from outbox.operator.changes import ActRequest
from outbox.reconcile.job import Job, Outcome, Pair, Repair
from outbox.reconcile.repair import sql as repair_sql
from outbox.reconcile.rows import Finding, InboxState
from outbox.text import summary_of

DONE = "done"
HEALED = "healed"
BUSY = "refused: busy: another transaction is working on it; run the reconciliation again"

#: How long (seconds) a statement waits for a lock; and how long a repair waits for dispatch to get on.
PATIENCE = 3.0


@dataclass(frozen=True, slots=True)
class Work:
    """The repairs of one pair in one run, with an engine for each side's database."""

    job: Job
    pair: Pair
    run_id: UUID
    producer: Engine
    consumer: Engine

    def in_producer(self) -> AbstractContextManager[Connection]:
        """Open a transaction in the producer's database; it commits at the end of the block."""
        return _transaction(self.producer)

    def in_consumer(self) -> AbstractContextManager[Connection]:
        """Open a transaction in the consumer's database; it commits at the end of the block."""
        return _transaction(self.consumer)

    def reason(self, kind: Outcome) -> str:
        """Return what the audit gives as the reason of an act."""
        return f"reconciliation {self.run_id}: {kind.label}"

    def request(self, name: str, kind: Outcome) -> ActRequest:
        """Return an operator's act, as this run requests it for a finding of a kind."""
        return ActRequest(ACTS[name], self.job.actor, self.reason(kind))

    def audits(self, action: Repair, results: Mapping[Finding, object]) -> list[Statement]:
        """Return what records acts in the consumer's database, each with its result."""
        schema, actor, group = self.job.consumer.schema, self.job.actor, self.pair.group
        return [
            audit(schema, actor, action.value, f"{group}/{finding.id}", self.reason(finding.outcome), result)
            for finding, result in results.items()
        ]

    def effects(self, connection: Connection, findings: Sequence[Finding]) -> dict[UUID, int]:
        """Count the rows of each message in the consumer's business table; nothing where none is named."""
        if self.pair.effect is None:
            return {}
        (rows,) = execute(connection, repair_sql.effects(*self.pair.effect.quoted, ids_of(findings)))
        return dict(rows)

    def compensated(self, connection: Connection, findings: Sequence[Finding]) -> set[UUID]:
        """Return which messages were compensated by now; ``connection`` is on the producer's database."""
        (rows,) = execute(connection, compensated(self.job.producer.schema, ids_of(findings)))
        return {half_id for (half_id,) in rows}


def ids_of(findings: Sequence[Finding]) -> list[UUID]:
    """Return the ids of findings, in their order."""
    return [finding.id for finding in findings]


@contextmanager
def _transaction(engine: Engine) -> Iterator[Connection]:
    # READ COMMITTED, whatever the server's default: what is read after a lock must be newer than the lock.
    with engine.connect().execution_options(isolation_level="READ COMMITTED") as connection, connection.begin():
        execute(connection, wait_at_most(PATIENCE), plan_by_index())
        yield connection


#: Does something about findings of one kind, in transactions of its own; returns the result of each, by id.
Repairer = Callable[[Work, Sequence[Finding]], dict[UUID, str]]

# So many messages of one batch that are locked mean that all are: a table is locked, or all of dispatch.
_MOST_BUSY = 3


def attempt(repairer: Repairer, work: Work, batch: Sequence[Finding]) -> dict[UUID, str]:
    """Return the result of each message of a batch.

    Where the batch fails, it is done message by message, so that a bad row never stops the others.

    Raises:
        sqlalchemy.exc.DBAPIError: the connection was lost.
    """
    try:
        return repairer(work, batch)
    except DBAPIError as error:
        refusal = _refusal(error)
    results: dict[UUID, str] = {}
    vain = 0
    for finding in batch:
        if len(batch) > 1 and vain < _MOST_BUSY:
            try:
                results |= repairer(work, [finding])
                continue
            except DBAPIError as error:
                refusal = _refusal(error)
                vain += refusal == BUSY
        results[finding.id] = refusal
    return results


def _refusal(error: DBAPIError) -> str:
    code = sqlstate(error)
    if error.connection_invalidated or not code:
        raise error
    return BUSY if code in CONTENDED else f"refused: {summary_of(error.orig or error)}"


@dataclass(frozen=True, slots=True)
class LockedRow:
    """An inbox row as it is now; it is locked."""

    status: Status
    attempts: int
    changed_at: dt.datetime

    def is_as(self, finding: Finding) -> bool:
        """Is it unchanged since the finding?"""
        found = (finding.status, finding.attempts, finding.changed_at)
        return (InboxState[self.status.name], self.attempts, self.changed_at) == found

    @property
    def changed(self) -> str:
        """The result where it isn't."""
        return f"refused: it has changed meanwhile: {self.status.value} after {self.attempts} attempts"


def with_locked(
    work: Work,
    connection: Connection,
    findings: Sequence[Finding],
    result: Callable[[Finding, LockedRow | None], str],
) -> dict[UUID, str]:
    """Lock the inbox rows of findings; return what ``result`` decides of each, by its row if there is one.

    A row that another transaction has locked isn't waited for, and is `BUSY`. The locks last until the commit.
    """
    schema, group, ids = work.job.consumer.schema, work.pair.group, ids_of(findings)
    # In this order: what is there and isn't locked by us has come meanwhile, or another transaction has it.
    locked, there = execute(
        connection, repair_sql.lock_inbox(schema, group, ids), repair_sql.statuses(schema, group, ids)
    )
    rows = {row[0]: LockedRow(Status(row[1]), *row[2:]) for row in locked}
    busy = {message_id for message_id, _ in there} - rows.keys()
    return {each.id: BUSY if each.id in busy else result(each, rows.get(each.id)) for each in findings}


def had_none(finding: Finding) -> bool:
    """Tell whether the inbox had no row of it when it was found."""
    return finding.status in {None, InboxState.NONE}
