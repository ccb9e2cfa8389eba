"""Undecided: have the half checked by the next pass, a parked one exactly once more.

Undispatched: make the message that the op was to become, unless dispatch will come to it by itself.

Phantoms, changed bodies, failures: set the message aside at the consumer, so that nobody runs it again.

Missing: append the message once more under its id.

Done twice it would do no harm, since the inbox knows what it has; but each night would add a send. So the newest send
number decides: only who still finds the one that the finding saw may append the next.

Parked: give the message back to its group, with all its attempts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from uuid import UUID

from sqlalchemy import Connection

from outbox.database.execute import execute
from outbox.dispatch.once import dispatch_once, dispatch_passed, newest_sends, release_due_once, resend
from outbox.message.model import Status
from outbox.operator.changes import apply
from outbox.operator.model import Target
from outbox.reconcile.job import Outcome, Repair
from outbox.reconcile.repair import sql as repair_sql
from outbox.reconcile.repair import work as inbox
from outbox.reconcile.repair.work import BUSY, DONE, HEALED, PATIENCE, InboxRow, Work, ids_of
from outbox.reconcile.rows import Finding


def check_undecided(work: Work, batch: Sequence[Finding]) -> dict[UUID, str]:
    """Request a check of what is still undecided, and not due to be checked anyway."""
    results = {}
    ids, schema = ids_of(batch), work.job.producer.schema
    with work.in_producer() as connection:
        # Whoever decides locks this row first, for as long as its transaction runs: not waited for.
        locked, there = execute(connection, repair_sql.lock_checks(schema, ids), repair_sql.checks(schema, ids))
        due: dict[UUID, bool] = dict(locked)
        busy = {half_id for (half_id,) in there} - due.keys()
        for finding in batch:
            if finding.id in busy:
                results[finding.id] = BUSY
            elif due.get(finding.id):
                results[finding.id] = "refused: a check is due already; is a worker running that has its checker?"
            else:
                results[finding.id] = _request(work, connection, finding)
    return results


def _request(work: Work, connection: Connection, finding: Finding) -> str:
    request = work.request("check", finding.outcome)
    (outcome,) = apply(connection, work.job.producer.settings, request, [Target(finding.id)])
    if outcome.state == "done":
        return DONE
    return "refused: the producer has no half message of it any more" if outcome.was == "unknown" else HEALED


_PAUSE = 0.05


def dispatch_undispatched(work: Work, batch: Sequence[Finding]) -> dict[UUID, str]:
    """Place what dispatch has passed; let it come to the others, and look again.

    What dispatch or release has made is healed: that is their work, nothing was mended.
    """
    results: dict[UUID, str] = {}
    left = ids_of(batch)
    progress = time.monotonic()
    while True:
        with work.in_producer() as connection:
            placed, ahead = dispatch_passed(
                connection,
                work.job.producer.settings,
                left,
                actor=work.job.actor,
                reason=work.reason(batch[0].outcome),
            )
        results |= dict.fromkeys(left, HEALED) | dict.fromkeys(placed, DONE)
        if not ahead:
            return results
        left = ahead
        if _run_passes(work):
            progress = time.monotonic()
        elif time.monotonic() - progress > PATIENCE:
            return results | dict.fromkeys(left, BUSY)
        else:
            time.sleep(_PAUSE)  # another worker is dispatching, or a transaction holds up the re-base


def _run_passes(work: Work) -> bool:
    """Run a pass of dispatch and one of release; tell whether they did anything."""
    settings = work.job.producer.settings
    with work.producer.connect().execution_options(isolation_level="READ COMMITTED") as connection:
        dispatched = dispatch_once(connection, settings)
        released = release_due_once(connection, settings)
    return bool(dispatched or released)


def park(work: Work, batch: Sequence[Finding]) -> dict[UUID, str]:
    """Park the failed rows that are as they were found."""
    kind, schema = batch[0].outcome, work.job.consumer.schema
    results = _look_again(work, batch)
    with work.in_consumer() as connection:
        there = inbox.lock(work, connection, batch)
        for finding in batch:
            if finding.id not in results:
                busy = finding.id in there.busy
                results[finding.id] = BUSY if busy else _result(finding, there.rows.get(finding.id))
        chosen = [finding for finding in batch if results[finding.id] == DONE]
        why = f"parked by {work.reason(kind)}"
        execute(
            connection,
            repair_sql.settle_inbox(schema, work.pair.group, Status.PARKED.value, ids_of(chosen), why),
            *work.audits(Repair.PARK, chosen, {finding.id: {"was": Status.FAILED.value} for finding in chosen}),
        )
    return results


def _result(finding: Finding, row: InboxRow | None) -> str:
    if row is None or row.status is Status.PARKED:
        return HEALED
    if row.status is Status.FAILED:
        return DONE if row.is_as(finding) else row.changed
    if finding.outcome is Outcome.FAILED:
        return HEALED  # its retry has succeeded, or was quarantined
    return f"refused: it is {row.status.value}: only what is to be retried can be parked"


def _look_again(work: Work, batch: Sequence[Finding]) -> dict[UUID, str]:
    """Return the results of what the producer has come to know meanwhile: a phantom's message, the body that it had."""
    with work.in_producer() as connection:
        (rows,) = execute(connection, repair_sql.dispatched(work.job.producer.schema, ids_of(batch)))
    digests: dict[UUID, bytes] = dict(rows)
    return {
        finding.id: HEALED
        for finding in batch
        if (finding.outcome is Outcome.PHANTOM and finding.id in digests)
        or (finding.outcome is Outcome.DIGEST_MISMATCH and digests.get(finding.id, b"") == finding.consumer_digest)
    }


def resend_missing(work: Work, batch: Sequence[Finding]) -> dict[UUID, str]:
    """Resend what the consumer still doesn't know."""
    results = _look_again_at_sends(work, batch)
    left = [finding for finding in batch if finding.id not in results]
    settings = work.job.producer.settings
    with work.in_producer() as connection:
        sends = newest_sends(connection, settings, ids_of(left))
        compensated = work.compensated(connection, left)
        chosen = []
        for finding in left:
            sent = sends.get(finding.id)
            if sent is None:
                results[finding.id] = "refused: the producer has no message of it any more"
            elif sent != finding.sends:
                results[finding.id] = HEALED  # resent meanwhile: the consumer hasn't read past that yet
            elif finding.id in compensated:
                results[finding.id] = "refused: it was compensated"
            elif sent > work.job.max_resends:
                results[finding.id] = f"refused: resent {sent - 1} times already"
            else:
                results[finding.id] = DONE
                chosen.append(finding)
        numbers = {finding.id: sends[finding.id] for finding in chosen}
        resend(connection, settings, numbers, actor=work.job.actor, reason=work.reason(batch[0].outcome))
    return results


def _look_again_at_sends(work: Work, batch: Sequence[Finding]) -> dict[UUID, str]:
    """Return the results of what needs no resend, by what the consumer has now.

    A message that comes in between is sent once too often, which its inbox row makes harmless.
    """
    with work.in_consumer() as connection:
        (rows,) = execute(connection, repair_sql.statuses(work.job.consumer.schema, work.pair.group, ids_of(batch)))
        effects = work.effects(connection, batch)
    results = {message_id: "refused: it took effect" for message_id, number in effects.items() if number}
    return results | {message_id: HEALED for message_id, _ in rows}


def retry_parked(work: Work, batch: Sequence[Finding]) -> dict[UUID, str]:
    """Resume the parked rows that are as they were found.

    One that an operator retried and that is parked again is left to a human: it would go round for ever.
    """
    results = {}
    with work.in_consumer() as connection:
        there = inbox.lock(work, connection, batch)
        for finding in batch:
            busy = finding.id in there.busy
            result = results[finding.id] = BUSY if busy else _result_of_retry(finding, there.rows.get(finding.id))
            if result == DONE:
                request = work.request("retry", finding.outcome)
                apply(connection, work.job.consumer.settings, request, [Target(finding.id, work.pair.group)])
    return results


def _result_of_retry(finding: Finding, row: InboxRow | None) -> str:
    if row is None or row.status is not Status.PARKED:
        return HEALED
    return DONE if row.is_as(finding) else row.changed
