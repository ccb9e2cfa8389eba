"""What a report says of a kind of difference, and of one finding: the same on a terminal, in JSON and on the page."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from decimal import Decimal

from outbox.reconcile.model import Action, InboxState, Outcome, ProducerState
from outbox.reconcile.options import POSSIBLE, Policy
from outbox.reconcile.result import Finding
from outbox.text import duration

#: What each outcome means.
MEANING: Mapping[Outcome, str] = {
    Outcome.CONSUMED: "committed, dispatched and consumed",
    Outcome.ROLLED_BACK: "rolled back or recalled, and without effect; or compensated, and fenced off",
    Outcome.LEFT_OUT: "the group's filter leaves it out, or it was sent before the group began",
    Outcome.IN_FLIGHT: "on its way for less than the grace period, or scheduled for later",
    Outcome.UNJUDGED: "only the consumer has it, and the producer may have pruned it",
    Outcome.CONSUMED_THOUGH_ROLLED_BACK: "it took effect, though it was rolled back, recalled or compensated",
    Outcome.DUPLICATE_EFFECT: "the business table has more than one row of it",
    Outcome.PHANTOM: "the consumer has it, and the producer never sent it",
    Outcome.DIGEST_MISMATCH: "the body that the producer has isn't the one that the consumer handled",
    Outcome.NO_EFFECT: "the inbox says consumed, and the business table has no row of it",
    Outcome.UNRECORDED: "it took effect, and the inbox has no row of it",
    Outcome.STATUS_MISMATCH: "the inbox contradicts what is known to be true",
    Outcome.UNCOMPENSATED: "fenced off at the consumer, and the producer's transaction was never compensated",
    Outcome.UNDISPATCHED: "committed, and never made a message",
    Outcome.RESEND_EXHAUSTED: "the consumer doesn't know it, though it was resent as often as is allowed",
    Outcome.MISSING: "the consumer has read past it, and doesn't know it",
    Outcome.UNCONSUMED: "the consumer hasn't come so far, for longer than the grace period",
    Outcome.PARKED: "set aside by the consumer, which won't try it again by itself",
    Outcome.FAILED: "the consumer's handler failed at it",
    Outcome.UNDECIDED: "neither committed nor rolled back, for longer than the grace period",
}

# What a human does about it, where no action is.
_BY_HAND: Mapping[Outcome, str] = {
    Outcome.CONSUMED_THOUGH_ROLLED_BACK: "undo its effect at the consumer, or do at the producer what was rolled back; "
    "`outbox messages show ID` tells its story",
    Outcome.DUPLICATE_EFFECT: "undo all of its effects but one, and see that the handler writes with its session",
    Outcome.PHANTOM: "see that both databases are the right ones and neither was restored to an earlier time; "
    "then undo its effect at the consumer",
    Outcome.DIGEST_MISMATCH: "find out who changed the body, and correct its effect at the consumer",
    Outcome.NO_EFFECT: "make up for its effect at the consumer, or find out who took it away",
    Outcome.UNRECORDED: "write its inbox row, lest it takes effect once more",
    Outcome.STATUS_MISMATCH: "correct the inbox row; `outbox messages show ID` tells its story",
    Outcome.UNCOMPENSATED: "undo the producer's transaction: the consumer will never take this message",
    Outcome.UNDISPATCHED: "see that a worker of the producer runs; `outbox doctor` says what holds it up",
    Outcome.RESEND_EXHAUSTED: "find out why the consumer doesn't keep it; then allow more with max_resends",
    Outcome.MISSING: "send it once more: `Outbox.resend`",
    Outcome.UNCONSUMED: "see that a worker of the group runs and keeps up; `outbox stats` shows its lag",
    Outcome.PARKED: "mend its cause, which `outbox messages show ID` tells; then give it back: `Outbox.resume`",
    Outcome.FAILED: "nothing while it is retried; `outbox messages show ID` tells its last error",
    Outcome.UNDECIDED: "see that a worker with a checker for the topic runs; `outbox half resolve ID` decides by hand",
}

# What an action does, and what has been done.
_DOES: Mapping[Action, str] = {
    Action.ALERT: "only tells of it",
    Action.RESEND: "sends it once more under its id",
    Action.DISPATCH: "dispatches it",
    Action.SYNC_STATUS: "writes what is known to be true into the inbox",
    Action.PARK: "sets it aside at the consumer",
    Action.RESUME: "gives it back to the consumer",
    Action.CHECK: "has it checked",
}


def mend(kind: Outcome, policy: Policy) -> str:
    """Return what mends a kind of difference under a policy: an action with ``--apply``, or what a human does."""
    action = policy.action(kind)
    if action is not Action.ALERT:
        return f"--apply {_DOES[action]} ({kind.label} = {action.value})"
    others = [
        f"the policy {kind.label} = {other.value} {_DOES[other]}"
        for other in POSSIBLE[kind]
        if other is not Action.ALERT
    ]
    return "; ".join([_BY_HAND[kind], *others])


def seen(finding: Finding, now: dt.datetime) -> str:
    """Return what was seen of one message at ``now``, the time of the comparison, in a sentence without its kind."""
    parts = [_producer(finding, now), _consumer(finding, now)]
    if finding.outcome is Outcome.DIGEST_MISMATCH:
        parts.append(f"digest {_short(finding.producer_digest)} there, {_short(finding.consumer_digest)} here")
    return "; ".join(parts)


def _producer(finding: Finding, now: dt.datetime) -> str:
    if finding.state is None:
        return "the producer doesn't know it"
    state = finding.state.name.lower().replace("_", " ")
    parts = [state]
    if finding.state is ProducerState.DISPATCHED:
        parts = [f"{state} at queue {finding.queue}", f"position {finding.position}"]
        if finding.sends and finding.sends > 1:
            parts.append(counted(finding.sends, "send"))
    if finding.compensated:
        parts.append("compensated")
    return ", ".join([*parts, *_when(finding.at, now)])


def _consumer(finding: Finding, now: dt.datetime) -> str:
    if not finding.status:
        parts = ["the inbox doesn't know it"]
    else:
        parts = [f"the inbox says {finding.status.name.lower().replace('_', ' ')}"]
        if finding.status is not InboxState.ROLLED_BACK and finding.attempts is not None:
            parts.append(counted(finding.attempts, "attempt"))
        parts += _when(finding.changed_at, now)
    if finding.effects is not None:
        parts.append(f"{counted(finding.effects, 'row')} in the business table")
    return ", ".join(parts)


def _when(moment: dt.datetime | None, now: dt.datetime) -> list[str]:
    if moment is None:
        return []
    seconds = (now - moment).total_seconds()
    return [f"{duration(seconds)} ago" if seconds >= 0 else f"in {duration(-seconds)}"]


def _short(digest: bytes | None) -> str:
    return "(none)" if digest is None else digest.hex()[:8]


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """Return a number with its noun: ``no rows``, ``1 row``, ``1,200 rows``."""
    return f"{f'{number:,}' if number else 'no'} {noun if number == 1 else plural or noun + 's'}"


def amount(value: Decimal) -> str:
    """Return a decimal for people, with all of its digits: ``-1,234.50``."""
    return f"{value:,f}"


def bound(seconds: float) -> str:
    """Return a bound of the lag histogram: ``30 ms``, ``10 s``, ``5 min``, ``1 h``."""
    if seconds < 1:
        return f"{seconds * 1000:g} ms"
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= size and seconds % size == 0:
            return f"{seconds / size:g} {unit}"
    return f"{seconds:g} s"
