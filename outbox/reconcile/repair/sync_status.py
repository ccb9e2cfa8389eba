"""The inbox contradicts what is known: write the truth into it, in the consumer's database.

The truth is `consumed` where the business table has exactly one row of the message and the producer stands by it, and
`quarantined` where the producer has withdrawn it and it took no effect.

A handler may be running this very message. What keeps the two apart:

- There is an inbox row, to be retried: the consumer that runs its handler holds the row's lock from before the handler
  until the commit (a retry, and an ordered queue). While it does, the row is skipped here. While we hold it, no
  consumer begins; and afterwards the row isn't failed any more, so none does.
- There is no row: a handler inserts it with its commit, and so do we; the primary key lets one of the two through.
  If we are first, the handler's insert waits for us and fails, and its business change is rolled back with it; the
  consumer reads the inbox again, and skips the message. (Its change isn't in our count: it isn't committed.) If the
  handler is first, our insert waits for it if need be and does nothing, and what the inbox says then is the result. Had
  both got through, the quarantine would stand over a message that took effect, or the effect would be there twice.
- A parked row, or a quarantine: no consumer runs it. An operator's retry waits for our lock, and finds that it isn't
  parked any more.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from uuid import UUID

from sqlalchemy import Connection

from outbox.database.execute import execute
from outbox.message.model import Status
from outbox.reconcile.job import Repair
from outbox.reconcile.repair import sql as repair_sql
from outbox.reconcile.repair.work import DONE, HEALED, LockedRow, Work, had_none, ids_of, with_locked
from outbox.reconcile.rows import Finding, InboxState, ProducerState

_WITHDRAWN = frozenset({ProducerState.ROLLED_BACK, ProducerState.RECALLED})


def sync_status(work: Work, batch: Sequence[Finding]) -> dict[UUID, str]:
    """Write what is true where the row, or its absence, is as it was found and the effects still bear it out."""
    results = _compensated_since(work, batch)
    left = [finding for finding in batch if finding.id not in results]
    with work.in_consumer() as connection:
        # Counted after the locks: an effect that came before them counts.
        effects = functools.cache(lambda: work.effects(connection, left))
        results |= with_locked(work, connection, left, lambda each, row: _result(each, row, effects().get(each.id)))
        for truth in (Status.CONSUMED, Status.QUARANTINED):
            chosen = [finding for finding in left if results[finding.id] == DONE and truth_of(finding) is truth]
            results |= _write(work, connection, truth, chosen)
    return results


def truth_of(finding: Finding) -> Status:
    """Return the status that the inbox should have."""
    withdrawn = finding.state in _WITHDRAWN or finding.compensated
    return Status.QUARANTINED if withdrawn else Status.CONSUMED


def _compensated_since(work: Work, batch: Sequence[Finding]) -> dict[UUID, str]:
    """Return the results of what the producer has compensated since: its quarantine must not be released."""
    quarantined = [finding for finding in batch if finding.status is InboxState.QUARANTINED]
    if not quarantined:
        return {}
    with work.in_producer() as connection:
        return dict.fromkeys(work.compensated(connection, quarantined), "refused: it was compensated")


def _result(finding: Finding, row: LockedRow | None, effects: int | None) -> str:
    """Decide what is to be done about a message; ``effects`` is None where no business table is named."""
    truth = truth_of(finding)
    if row is not None and row.status is truth:
        return HEALED
    if truth is Status.CONSUMED and effects != 1:
        return "refused: no business table is named" if effects is None else f"refused: it took effect {effects} times"
    if truth is Status.QUARANTINED and effects:
        return "refused: it took effect"
    if row is not None:
        return DONE if row.is_as(finding) else row.changed
    return DONE if had_none(finding) else "refused: its inbox row is gone"


def _write(work: Work, connection: Connection, truth: Status, chosen: Sequence[Finding]) -> dict[UUID, str]:
    """Insert or update the rows of ``chosen``, and record it; return the results of those that came too late."""
    schema, group = work.job.consumer.schema, work.pair.group
    missing = [finding for finding in chosen if had_none(finding)]
    why = f"quarantined by {work.reason(chosen[0].outcome)}" if chosen and truth is Status.QUARANTINED else None
    rows = [
        repair_sql.NewRow(finding.id, finding.queue or 0, finding.position or 0, finding.producer_digest)
        for finding in missing
    ]
    attempts = 1 if truth is Status.CONSUMED else 0
    inserted, _, now = execute(
        connection,
        repair_sql.insert_inbox(schema, group, work.pair.topic, truth.value, attempts, rows, why),
        repair_sql.settle_inbox(schema, group, truth.value, ids_of([f for f in chosen if f not in missing]), why),
        repair_sql.statuses(schema, group, ids_of(missing)),
    )
    mine = {message_id for (message_id,) in inserted}
    status: dict[UUID, str] = dict(now)
    late = {
        finding.id: HEALED if status.get(finding.id) == truth else f"refused: it is {status.get(finding.id)} now"
        for finding in missing
        if finding.id not in mine
    }
    done = [finding for finding in chosen if finding.id not in late]
    changes = {each: {"was": each.status.name.lower() if each.status else None, "is": truth.value} for each in done}
    execute(connection, *work.audits(Repair.SYNC_STATUS, changes))
    return late
