"""What every repair works with: the two databases, short transactions in them, and words for what came of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from uuid import UUID

from sqlalchemy import Connection, Engine

from outbox.reconcile.model import Action, Outcome, Pair
from outbox.reconcile.options import Job
from outbox.reconcile.result import Finding
from outbox.store import repair as store
from outbox.store.dispatch import plan_by_index
from outbox.store.execute import Statement, execute
from outbox.store.operator import audit, wait_at_most

DONE = "done"
HEALED = "healed"
BUSY = "refused: busy: somebody else is working on it; run the reconciliation again"

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

    @contextmanager
    def in_producer(self) -> Iterator[Connection]:
        """Open a transaction in the producer's database; it commits at the end of the block."""
        with _transaction(self.producer) as connection:
            yield connection

    @contextmanager
    def in_consumer(self) -> Iterator[Connection]:
        """Open a transaction in the consumer's database; it commits at the end of the block."""
        with _transaction(self.consumer) as connection:
            yield connection

    def reason(self, kind: Outcome) -> str:
        """Return what the audit gives as the reason of an act."""
        return f"reconciliation {self.run_id}: {kind.label}"

    def audits(self, action: Action, findings: Sequence[Finding], results: Mapping[UUID, object]) -> list[Statement]:
        """Return what records acts in the consumer's database, each with its result."""
        return [
            audit(
                self.job.consumer.schema,
                self.job.actor,
                action.value,
                f"{self.pair.group}/{finding.id}",
                self.reason(finding.outcome),
                results[finding.id],
            )
            for finding in findings
        ]

    def effects(self, connection: Connection, findings: Sequence[Finding]) -> dict[UUID, int]:
        """Count the rows of each message in the consumer's business table; nothing where none is named."""
        if self.pair.effect is None:
            return {}
        (rows,) = execute(connection, store.effects(*self.pair.effect.quoted, ids_of(findings)))
        return dict(rows)

    def compensated(self, connection: Connection, findings: Sequence[Finding]) -> set[UUID]:
        """Return which messages were compensated by now; ``connection`` is on the producer's database."""
        (rows,) = execute(connection, store.compensated(self.job.producer.schema, ids_of(findings)))
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
