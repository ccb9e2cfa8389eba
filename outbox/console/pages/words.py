"""What the pages call things: icon, tone and word of each status, and what an action means for who confirms it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from outbox.operator.acts import NEED_REASON
from outbox.operator.model import Action


@dataclass(frozen=True, slots=True)
class Chip:
    """How a status is shown: never by its colour alone."""

    icon: str
    tone: str
    word: str
    meaning: str


@dataclass(frozen=True, slots=True)
class Act:
    """How an action is asked for and told.

    ``consequence`` is what happens if it is confirmed, ``told`` what has happened then. ``grave`` is what can't be
    taken back, or loses something.
    """

    label: str
    icon: str
    consequence: str
    told: str
    grave: bool = False


_UNKNOWN = Chip("question", "", "unknown", "this version of the console doesn't know it")

_CHIPS = MappingProxyType(
    {
        # A message, on the producer's side.
        "undecided": Chip("half", "warn", "undecided", "a half message that is neither committed nor rolled back"),
        "committed": Chip("check", "info", "committed", "decided, and about to be dispatched"),
        "dispatched": Chip("send", "info", "dispatched", "in its topic's queue; consumers read it from there"),
        "scheduled": Chip("clock", "info", "scheduled", "waits for the time at which it is to be delivered"),
        "recalled": Chip("undo", "", "recalled", "taken out of the schedule before its time"),
        # A message, in the inbox of a group.
        "consumed": Chip("check", "good", "consumed", "handled, with its effect, once"),
        "failed": Chip("retry", "warn", "failed", "will be retried"),
        "parked": Chip("stop", "bad", "parked", "set aside for a human"),
        "rolled_back": Chip("undo", "", "rolled back", "will never be delivered"),
        "quarantined": Chip("undo", "", "quarantined", "can't take effect any more"),
        "unconsumed": Chip("hourglass", "info", "unconsumed", "the group hasn't come so far"),
        "left_out": Chip("dash", "", "left out", "the group's filter left it out, or the row was pruned"),
        "discarded": Chip("archive", "", "discarded", "parked, and somebody decided that this is the end of it"),
        # An undecided half.
        "immune": Chip("shield", "", "immune", "left alone before its first check"),
        "orphan": Chip("question", "warn", "orphan", "its check is due"),
        "waiting": Chip("clock", "info", "waiting", "waits for its turn"),
        # A bulk job and its items.
        "running": Chip("play", "info", "running", "workers are at it"),
        "done": Chip("check", "good", "done", "all of it was done"),
        "partly": Chip("half", "warn", "partly", "some items were skipped or failed"),
        "cancelled": Chip("x", "", "cancelled", "what was left of it was not done"),
        "pending": Chip("hourglass", "info", "pending", "a worker will come to it"),
        "skipped": Chip("dash", "warn", "skipped", "it couldn't be done any more"),
        "given_up": Chip("x", "bad", "failed", "it was tried, and given up"),
        # A worker, a finding, a check.
        "alive": Chip("check", "good", "alive", "reported within the last three of its reports"),
        "silent": Chip("alert", "warn", "silent", "missed three of its reports"),
        "answered": Chip("check", "", "answered", "the checker gave an answer"),
        "being_asked": Chip("hourglass", "info", "being asked", "somebody is being asked at this moment"),
        "no_answer": Chip("alert", "warn", "no answer", "the worker died over it, or was cut off"),
    }
)

ACTS = MappingProxyType(
    {
        Action.RESEND: Act(
            "Resend",
            "send",
            "The same message goes out once more, with the same id: groups that have consumed it leave it out, groups "
            "that lack it get it.",
            "Resent: the message goes out once more with its id.",
        ),
        Action.RECALL: Act(
            "Recall",
            "undo",
            "It is taken out of the schedule, and no group ever sees it.",
            "Recalled: the message isn't delivered.",
            grave=True,
        ),
        Action.COMPENSATE: Act(
            "Compensate",
            "undo",
            "Every inbox is quarantined first, so that the message can't take effect later. Then a worker runs the "
            "compensation that the service registered, once, which undoes the local transaction.",
            "Ordered: a worker compensates the local transaction.",
            grave=True,
        ),
        Action.CHECK: Act(
            "Check now",
            "question",
            "Whether the local transaction committed is asked at once, instead of at the next check.",
            "A check was asked for; its answer stands in the history below as soon as there is one.",
        ),
        Action.RESET: Act(
            "Reset checks",
            "retry",
            "Checks are counted from nothing again: a parked half will be checked again.",
            "Reset: the half is checked again from the beginning.",
        ),
        Action.COMMIT: Act(
            "Commit",
            "check",
            "You decide in place of the checker: the local transaction is taken to have committed, and the message "
            "goes out.",
            "Committed: the message goes out.",
            grave=True,
        ),
        Action.ROLLBACK: Act(
            "Roll back",
            "x",
            "You decide in place of the checker: the local transaction is taken to have failed, and no group ever sees "
            "the message.",
            "Rolled back: no group ever sees the message.",
            grave=True,
        ),
        Action.RETRY: Act(
            "Retry",
            "retry",
            "The group gets the message again as soon as a worker comes to it. A parked message has all of its "
            "attempts again.",
            "It will be tried again as soon as a worker comes to it.",
        ),
        Action.PARK: Act(
            "Park",
            "stop",
            "It is set aside: no more attempts, until somebody retries it.",
            "Parked: it isn't tried any more, until somebody retries it.",
        ),
        Action.DISCARD: Act(
            "Discard",
            "archive",
            "It is accepted that this group never handles it. It no longer counts as a dead letter, and can be "
            "restored until it is pruned.",
            "Discarded. It can be restored until it is pruned.",
            grave=True,
        ),
        Action.RESTORE: Act(
            "Restore",
            "undo",
            "It is a dead letter again, and can be retried.",
            "Restored: it is a dead letter again.",
        ),
    }
)


#: The icon of each kind of event in a timeline.
EVENTS: Mapping[str, str] = MappingProxyType(
    {
        "written": "half",
        "committed": "check",
        "dispatched": "send",
        "recalled": "undo",
        "compensated": "undo",
        "checked": "question",
        "half_parked": "stop",
        "received": "inbox",
        "consumed": "check",
        "failed": "retry",
        "parked": "stop",
        "rolled_back": "undo",
        "quarantined": "undo",
        "discarded": "archive",
        "act": "person",
        "found": "search",
    }
)


def needs_reason(action: Action) -> bool:
    """Tell whether who does it must say why."""
    return action in NEED_REASON


def chip(status: str | None) -> Chip:
    """Return how a status is shown."""
    return _CHIPS.get(status or "", _UNKNOWN)
