"""What the tests of repair share: two databases that were put out of step, what is found in them, and its repair."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any
from uuid import UUID

from sqlalchemy import Engine, text

from outbox import Settings
from outbox.message.model import uuid7
from outbox.reconcile.job import FIRST_ID, Access, Effect, Job, Outcome, Pair, Range, Repair, Window
from outbox.reconcile.pairing import rules_now
from outbox.reconcile.repair import repair
from outbox.reconcile.rows import Collected, Finding, Repaired, compared, to_findings
from outbox.reconcile.source import PostgresSide
from tests.kit.bench import Bench, make_ledger

PAIR = Pair("t", "g", effect=Effect("ledger"))
#: What the tests do about each kind: all that can be done.
ACTIVE = {
    Outcome.PHANTOM: Repair.PARK,
    Outcome.DIGEST_MISMATCH: Repair.PARK,
    Outcome.PARKED: Repair.RETRY,
    Outcome.FAILED: Repair.PARK,
    Outcome.UNDECIDED: Repair.CHECK,
}


class Night(Bench):
    """A producer and a consumer whose tables are reconciled and repaired; the group's handler fills the ledger."""

    def __init__(self, producer: Engine, consumer: Engine, settings: Settings) -> None:
        super().__init__(producer, consumer, settings)
        make_ledger(consumer)
        self.run("CREATE INDEX ON ledger (message_id)")
        # So that dispatch has a cursor, and has passed what comes with an old xid.
        self.send("first", topic="other")
        self.group = self.declare()

    def job(self, actions: Mapping[Outcome, Repair] | None = None, max_resends: int = 3) -> Job:
        """Return a job without a grace period, that does something about every kind."""
        urls = [engine.url.render_as_string(hide_password=False) for engine in (self.producer, self.consumer)]
        producer, consumer = (Access(url, self.settings) for url in urls)
        return Job(
            producer,
            consumer,
            (PAIR,),
            Window(grace=0.0),
            policy=ACTIVE if actions is None else actions,
            max_resends=max_resends,
            actor="night",
            apply=True,
        )

    def found(self, pair: Pair = PAIR, job: Job | None = None) -> list[Finding]:
        """Compare the two sides now; return the differences."""
        job = job or self.job()
        rules = rules_now(job, pair)
        everything = [Range(FIRST_ID, None)]
        collected = Collected()
        producer = PostgresSide(job.producer, "producer", pair).read(everything)
        collected.add(compared(producer, PostgresSide(job.consumer, "consumer", pair).read(everything), rules))
        return [finding for finding in to_findings(collected.table) if finding.outcome.differs]

    def kinds(self) -> Counter[Outcome]:
        """Return how many differences of each kind there are now."""
        return Counter(finding.outcome for finding in self.found())

    def repair(
        self, findings: Collection[Finding] | None = None, job: Job | None = None, pair: Pair = PAIR
    ) -> dict[UUID, str]:
        """Repair these differences, or those of now; return the result of each attempt."""
        done = self.repaired(findings, job, pair)
        return {each.id: each.result for each in done}

    def repaired(
        self, findings: Collection[Finding] | None = None, job: Job | None = None, pair: Pair = PAIR
    ) -> list[Repaired]:
        """Do the same; return all of what is told."""
        given = self.found(pair) if findings is None else findings
        return repair(job or self.job(), pair, uuid7(), given, self.producer, self.consumer)

    def settle(self) -> None:
        """Let dispatch, consumer and retries do all there is to do."""
        self.dispatch()
        self.consume(self.group)
        while self.retry(self.group, due=False).taken:
            pass

    def send_only(self, *bodies: Any, **options: Any) -> list[UUID]:
        """Send bodies in one transaction, without dispatching them."""
        with self.producer.begin() as connection:
            return [self.app.send(connection, "t", body, key="k", **options) for body in bodies]

    def passed(self, *bodies: Any, **options: Any) -> list[UUID]:
        """Send bodies that dispatch will never come to: their xid lies before the cursor."""
        ids = self.send_only(*bodies, **options)
        self.run_at_producer("UPDATE outbox.op_message SET xid = '3' WHERE half_id = ANY (:ids)", ids=ids)
        return ids

    def consumed(self, *bodies: Any) -> list[UUID]:
        """Send bodies, and have them consumed."""
        ids = self.send(*bodies)
        self.settle()
        return ids

    def forget(self, *ids: UUID, ledger: bool = True) -> None:
        """Delete inbox rows, and what the messages did in the ledger."""
        self.run("DELETE FROM outbox.consumer_message WHERE message_id = ANY (:ids)", ids=list(ids))
        if ledger:
            self.run("DELETE FROM ledger WHERE message_id = ANY (:ids)", ids=list(ids))

    def set_status(self, status: str, *ids: UUID) -> None:
        """Give inbox rows another status."""
        self.run(
            """UPDATE outbox.consumer_message SET status = :status, last_error = 'boom',
                      next_attempt_at = CASE WHEN :status = 'failed' THEN now() + interval '1 day' END
                WHERE message_id = ANY (:ids)""",
            status=status,
            ids=list(ids),
        )

    def compensate(self, *ids: UUID) -> None:
        """Write down that the producer's transactions were compensated."""
        self.run_at_producer(
            """INSERT INTO outbox.compensation (half_id, function, requested_by, reason)
               SELECT id, 'undo', 'me', 'test' FROM unnest(CAST(:ids AS uuid[])) id""",
            ids=list(ids),
        )

    def run_at_producer(self, sql: str, **values: Any) -> None:
        """Run a statement in the producer's database."""
        with self.producer.begin() as connection:
            connection.execute(text(sql), values)

    def rows_at_producer(self, sql: str, **values: Any) -> list[Any]:
        """Return the rows of a query in the producer's database, or the values where it has one column."""
        with self.producer.begin() as connection:
            rows = connection.execute(text(sql), values).all()
        return [row[0] if len(row) == 1 else tuple(row) for row in rows]

    def sends(self, *ids: UUID) -> list[int]:
        """Return how often each message was sent, in the order of ``ids``."""
        rows = self.rows_at_producer("SELECT half_id, count(*) FROM outbox.message GROUP BY half_id")
        counts = dict(rows)
        return [counts.get(half_id, 0) for half_id in ids]

    def status(self, *ids: UUID) -> list[str | None]:
        """Return what the inbox says of each message."""
        inbox = self.inbox()
        return [inbox[half_id].status if half_id in inbox else None for half_id in ids]

    def acts(self, action: Repair) -> list[tuple[str, str, str]]:
        """Return what the audits of both databases say of an action: who, on what, why."""
        sql = "SELECT actor, target, reason FROM outbox.audit WHERE action = :action ORDER BY id"
        found = self.rows_at_producer(sql, action=action.value)
        return found if self.producer is self.consumer else found + self.rows(sql, action=action.value)
