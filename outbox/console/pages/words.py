"""How the pages show things: icon, tone and word of each status, and the icon of each act."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Chip:
    """How a status is shown: never by its colour alone."""

    icon: str
    tone: str
    word: str
    meaning: str


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

_ICONS = MappingProxyType(
    {
        "resend": "send",
        "recall": "undo",
        "compensate": "undo",
        "check": "question",
        "reset": "retry",
        "commit": "check",
        "rollback": "x",
        "retry": "retry",
        "park": "stop",
        "discard": "archive",
        "restore": "undo",
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


def act_icon(action: str) -> str:
    """Return the icon of an act."""
    return _ICONS.get(action, "play")


def chip(status: str | None) -> Chip:
    """Return how a status is shown."""
    return _CHIPS.get(status or "", _UNKNOWN)
