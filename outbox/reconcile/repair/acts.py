"""The repairs that are acts of an operator, and dispatch; what is particular here is what they see to before they act.

Each locks what it is about, and acts only where it still is as it was found. A resend done twice would do no harm,
since the inbox knows what it has; but each night would add a send. So the newest send number decides: only a repair
that still finds the one which the finding has may append the next.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from uuid import UUID

from outbox.database.execute import execute
from outbox.dispatch.once import dispatch_once, dispatch_passed, release_due_once
from outbox.message.model import Status
from outbox.operator.acts import STATES
from outbox.operator.changes import apply, lock, resend
from outbox.operator.model import Target
from outbox.reconcile.job import Outcome, Repair
from outbox.reconcile.repair import sql as repair_sql
from outbox.reconcile.repair.work import BUSY, DONE, HEALED, PATIENCE, LockedRow, Work, ids_of, with_locked
from outbox.reconcile.rows import Finding


def check_undecided(work: Work, batch: Sequence[Finding]) -> dict[UUID, str]:
    """Have the halves checked by the next pass, parked ones exactly once more, unless they are due to be checked."""
    results = {}
    ids, schema = ids_of(batch), work.job.producer.schema
    with work.in_producer() as connection:
        # A decision locks this row first, for as long as its transaction runs: not waited for.
        locked, there = execute(connection, repair_sql.lock_checks(schema, ids), repair_sql.checks(schema, ids))
        due: dict[UUID, bool] = dict(locked)
        for half_id in ids:
            if due.get(half_id):
                results[half_id] = "refused: a check is due already; is a worker running that has its checker?"
        results |= {half_id: BUSY for (half_id,) in there if half_id not in due}
        left = [Target(half_id) for half_id in ids if half_id not in results]
        request = work.request("check", batch[0].outcome)
        outcomes = apply(connection, work.job.producer.settings, request, left)
    for target, outcome in zip(left, outcomes, strict=True):
        gone = "refused: the producer has no half message of it any more" if outcome.was == "unknown" else HEALED
        results[target.message_id] = DONE if outcome.state == "done" else gone
    return results


_PAUSE = 0.05


def dispatch_undispatched(work: Work, batch: Sequence[Finding]) -> dict[UUID, str]:
    """Place what dispatch has passed; let it come to the others, and try again.

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
    """Park the failed rows that are as they were found, and say why in their error."""
    results = _known_since(work, batch)
    left = [finding for finding in batch if finding.id not in results]
    with work.in_consumer() as connection:
        results |= with_locked(work, connection, left, _result)
        chosen = [finding for finding in left if results[finding.id] == DONE]
        why = f"parked by {work.reason(batch[0].outcome)}"
        schema, group = work.job.consumer.schema, work.pair.group
        execute(
            connection,
            repair_sql.settle_inbox(schema, group, Status.PARKED.value, ids_of(chosen), why),
            *work.audits(Repair.PARK, {finding: {"was": Status.FAILED.value} for finding in chosen}),
        )
    return results


def _result(finding: Finding, row: LockedRow | None) -> str:
    if row is None or row.status is Status.PARKED:
        return HEALED
    if row.status is Status.FAILED:
        return DONE if row.is_as(finding) else row.changed
    if finding.outcome is Outcome.FAILED:
        return HEALED  # its retry has succeeded, or was quarantined
    return f"refused: it is {row.status.value}: only what is to be retried can be parked"


def _known_since(work: Work, batch: Sequence[Finding]) -> dict[UUID, str]:
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
    """Append what the consumer still doesn't know once more, under its id."""
    results = _consumed_since(work, batch)
    left = {Target(finding.id): finding for finding in batch if finding.id not in results}
    if not left:
        return results
    settings, request = work.job.producer.settings, work.request("resend", batch[0].outcome)
    with work.in_producer() as connection:
        messages = lock(connection, settings, request.act, list(left), wait=True)
        for target, finding in left.items():
            sent = messages[target].sends
            if not sent:
                results[finding.id] = "refused: the producer has no message of it any more"
            elif sent != finding.sends:
                results[finding.id] = HEALED  # resent meanwhile: the consumer hasn't read past that yet
            elif messages[target].state != "dispatched":
                results[finding.id] = f"refused: {STATES[messages[target].state or '']}"
            elif sent > work.job.max_resends:
                results[finding.id] = f"refused: resent {sent - 1} times already"
            else:
                results[finding.id] = DONE
        chosen = {target: messages[target] for target in left if results[target.message_id] == DONE}
        resend(connection, settings, request, chosen)
    return results


def _consumed_since(work: Work, batch: Sequence[Finding]) -> dict[UUID, str]:
    """Return the results of what needs no resend, by what the consumer has now.

    A message that comes in between is sent once too often, which its inbox row makes harmless.
    """
    with work.in_consumer() as connection:
        (rows,) = execute(connection, repair_sql.statuses(work.job.consumer.schema, work.pair.group, ids_of(batch)))
        effects = work.effects(connection, batch)
    results = {message_id: "refused: it took effect" for message_id, number in effects.items() if number}
    return results | {message_id: HEALED for message_id, _ in rows}


def retry_parked(work: Work, batch: Sequence[Finding]) -> dict[UUID, str]:
    """Give the parked rows that are as they were found all of their attempts again.

    One that an operator retried and that is parked again is left to a human: it would go round for ever.
    """
    with work.in_consumer() as connection:
        results = with_locked(work, connection, batch, _result_of_retry)
        targets = [Target(finding.id, work.pair.group) for finding in batch if results[finding.id] == DONE]
        apply(connection, work.job.consumer.settings, work.request("retry", batch[0].outcome), targets)
    return results


def _result_of_retry(finding: Finding, row: LockedRow | None) -> str:
    if row is None or row.status is not Status.PARKED:
        return HEALED
    return DONE if row.is_as(finding) else row.changed
