"""Missing: append the message once more under its id.

Done twice it would do no harm, since the inbox knows what it has; but each night would add a send. So the newest send
number decides: only who still finds the one that the finding saw may append the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from outbox.dispatch import newest_sends, resend
from outbox.reconcile.repair.work import DONE, HEALED, Work, ids_of
from outbox.reconcile.result import Finding
from outbox.store import repair as store
from outbox.store.execute import execute


def resend_missing(work: Work, batch: Sequence[Finding]) -> dict[UUID, str]:
    """Resend what the consumer still doesn't know."""
    results = _look_again(work, batch)
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
            elif sent > work.job.policy.max_resends:
                results[finding.id] = f"refused: resent {sent - 1} times already"
            else:
                results[finding.id] = DONE
                chosen.append(finding)
        resend(connection, settings, ids_of(chosen), actor=work.job.actor, reason=work.reason(batch[0].outcome))
    return results


def _look_again(work: Work, batch: Sequence[Finding]) -> dict[UUID, str]:
    """Return the results of what needs no resend, by what the consumer has now.

    A message that comes in between is sent once too often, which its inbox row makes harmless.
    """
    with work.in_consumer() as connection:
        (rows,) = execute(connection, store.statuses(work.job.consumer.schema, work.pair.group, ids_of(batch)))
        effects = work.effects(connection, batch)
    results = {message_id: "refused: it took effect" for message_id, number in effects.items() if number}
    return results | {message_id: HEALED for message_id, _ in rows}
