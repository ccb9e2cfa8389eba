"""What a human does about each kind of difference, by its label (`outbox.reconcile.job.Outcome`)."""

from __future__ import annotations

from collections.abc import Mapping

from outbox.database.duty import Part

#: What a human does about a difference of a kind, where no repair is.
BY_HAND: Mapping[str, str] = {
    "torn": "find out what writes or deletes rows of half_message, op_message and message behind the outbox; "
    "put back from a backup what is gone, then reconcile again",
    "consumed_though_rolled_back": "undo its effect at the consumer, or do at the producer what was rolled back; "
    "`outbox messages show ID` tells its story",
    "duplicate_effect": "undo all of its effects but one, and see that the handler writes with its session",
    "lost": "undo its effect at the consumer, or do at the producer once more what it has forgotten",
    "phantom": "see that both databases are the right ones and neither was restored to an earlier time; "
    "then undo its effect at the consumer",
    "digest_mismatch": "find out what changed the body, and correct its effect at the consumer",
    "no_effect": "make up for its effect at the consumer, or find out what took it away",
    "unrecorded": "write its inbox row, lest it takes effect once more",
    "status_mismatch": "correct the inbox row; `outbox messages show ID` tells its story",
    "uncompensated": "undo the producer's transaction: the consumer will never take this message",
    "ahead_of_clock": "see that the times of a table that isn't ours are in UTC or have a time zone, and that no "
    "server's clock was set back",
    "undispatched": "see that a worker of the producer runs; `outbox doctor` says what holds it up",
    "resend_exhausted": "find out why the consumer doesn't keep it; then allow more with max_resends",
    "missing": "send it once more: `outbox messages resend ID`",
    "unconsumed": "see that a worker of the group runs and keeps up; `outbox stats` shows its lag",
    "parked": "mend its cause, which `outbox messages show ID` tells; then give it back: `outbox dead retry ID`",
    "failed": "nothing while it is retried; `outbox messages show ID` tells its last error",
    "undecided": "see that a worker with a checker for the topic runs; `outbox half commit ID` or "
    "`outbox half rollback ID` decides by hand",
}

#: What a human does where the tables of this side aren't ours, which our commands and workers don't know.
OF_FOREIGN: Mapping[str, tuple[Part, str]] = {
    "torn": ("producer", "find out what writes such rows; then reconcile again"),
    "consumed_though_rolled_back": (
        "producer", "undo its effect at the consumer, or do at the producer what was rolled back",
    ),
    "unrecorded": ("consumer", "write its row at the consumer, lest it takes effect once more"),
    "status_mismatch": ("consumer", "correct its row at the consumer"),
    "undispatched": ("producer", "see that what sends the producer's messages runs"),
    "resend_exhausted": ("producer", "find out why the consumer doesn't keep it"),
    "missing": ("producer", "have the producer send it once more, under its id"),
    "unconsumed": ("consumer", "see that the consumer runs and keeps up"),
    "parked": ("consumer", "mend its cause, then have the consumer try it again"),
    "failed": ("consumer", "nothing while the consumer tries it again"),
    "undecided": ("producer", "have the producer decide it"),
}  # fmt: skip
