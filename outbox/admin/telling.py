"""Tell about one message: what happens next, what was done and when, what can be done now and what can't."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from typing import TYPE_CHECKING

from outbox.admin.gathering import Gathered
from outbox.admin.model import Action, InboxRow
from outbox.admin.states import (
    BEING_ROLLED_BACK,
    DISCARDED,
    FENCED,
    UNCONSUMED,
    UNKNOWN,
    refusal,
    states_for,
)

if TYPE_CHECKING:
    from outbox.admin.databases import Databases

_UNDECIDED = {"undecided", FENCED}


def at(moment: dt.datetime) -> str:
    """Return a time for people."""
    return f"{moment.astimezone(dt.UTC):%Y-%m-%d %H:%M:%S} UTC"


def next_of(found: Gathered, databases: Databases) -> str:
    """Return in a sentence what happens next; what waits for a human comes first."""
    told = list(_next_at_producer(found)) or list(_next_in_groups(found, databases))
    return "; ".join(told) or "nothing more is known: its half message is in no database that could be read"


def _next_at_producer(found: Gathered) -> Iterator[str]:
    """Yield what keeps the message from its consumers, if anything does."""
    op, check, undoing = found.op or {}, found.check, found.compensation
    if undoing is not None:
        yield f"rolled back (compensated) on {at(undoing['compensated_at'])} by {undoing['function']}"
    elif found.state == BEING_ROLLED_BACK:
        yield "its local transaction is being rolled back"
    elif found.state in _UNDECIDED:
        yield _next_check(found) if check else "undecided"
    elif op.get("resolution") == "rollback":
        yield f"rolled back by the {op['decided_by']} on {at(op['decided_at'])}: it is never sent"
    elif found.state == "recalled" and found.scheduled:
        yield f"recalled by {found.scheduled['recalled_by']}: it is not sent"
    elif found.state == "scheduled":
        due = (found.scheduled or found.half or {})["deliver_at"]
        yield f"scheduled for {at(due)}"
    elif found.state == "committed":
        yield "committed: a worker dispatches it next"


def _next_check(found: Gathered) -> str:
    check = found.check or {}
    limit = found.limit("checker", None, "max_checks", found.home.settings.max_checks if found.home else 0)
    if check["parked_at"] is not None:
        return f"waits for a human: its half is parked ({check['reason']})"
    if check["fenced"]:
        return f"undecided: the fence of its transaction is tried at {at(check['next_check_at'])}"
    if check["being_asked"]:
        return f"undecided: check {check['check_times']} of {limit} is being asked"
    return f"undecided: check {check['check_times'] + 1} of {limit} at {at(check['next_check_at'])}"


def _next_in_groups(found: Gathered, databases: Databases) -> Iterator[str]:
    """Yield what is to come in the inboxes, the most urgent first."""
    rows = {word: [row for row in found.inbox if _word(row) == word] for word in _IN_ORDER}
    if parked := rows["parked"]:
        yield f"waits for a human: parked by {_groups(parked)}"
    for row in rows["failed"]:
        retries = found.limit("consumer", row.group, "retries", len(databases[row.database].settings.retry_delays))
        due = f" at {at(row.next_attempt_at)}" if row.next_attempt_at else ""
        yield f"retry {row.attempts} of {retries} by {row.group}{due}"
    if unconsumed := rows[UNCONSUMED]:
        yield f"comes next to {_groups(unconsumed)}"
    for word, what in _ENDED.items():
        if rows[word]:
            yield f"{what} {_groups(rows[word])}"
    if found.state == "dispatched" and not found.inbox:
        yield "dispatched; no group of its topic is known here"


_ENDED = {
    "rolled_back": "fenced off in",
    DISCARDED: "discarded in",
    "consumed": "consumed by",
    "left_out": "left out by",
}
_IN_ORDER = ("parked", "failed", UNCONSUMED, *_ENDED)


def _word(row: InboxRow) -> str:
    return DISCARDED if row.discarded_at is not None else row.status


def _groups(rows: list[InboxRow]) -> str:
    names = sorted({row.group for row in rows})
    return f"group {names[0]}" if len(names) == 1 else f"groups {', '.join(names)}"


def actions_of(found: Gathered) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Return what can be done now, with the groups it can be done for; and what can't, with the reason."""
    able: dict[str, list[str]] = {}
    refused: dict[str, str] = {}
    for action in Action:
        if action.part == "producer":
            if (why := _refusal(action, found)) is None:
                able[action.value] = []
            else:
                refused[action.value] = why
            continue
        rows = {row: _word(row) for row in found.inbox}
        groups = sorted({row.group for row, word in rows.items() if word in states_for(action, {})})
        if groups:
            able[action.value] = groups
        else:
            refused[action.value] = _refusal_in_groups(action, rows)
    return able, refused


def _refusal(action: Action, found: Gathered) -> str | None:
    if found.home is None and found.unseen:
        return f"nobody knows its state: {', '.join(found.unseen)} can't be read now"
    state = found.state or UNKNOWN
    if state not in states_for(action, {}):
        return refusal(action, state)
    # Without any worker, nobody knows what they have: it can be ordered, and waits for one.
    if action is Action.ROLLBACK and found.workers and "compensation" not in {kind for kind, *_ in found.handlers}:
        return f"no worker that runs has a compensation for topic {found.topic}; register one with @outbox.compensation"
    return None


def _refusal_in_groups(action: Action, rows: dict[InboxRow, str]) -> str:
    reasons: dict[str, list[str]] = {}
    for row, word in rows.items():
        reasons.setdefault(refusal(action, UNCONSUMED if word == "left_out" else word), []).append(row.group)
    if len(reasons) == 1:
        return next(iter(reasons))
    whys = (f"{', '.join(sorted(set(groups)))}: {why}" for why, groups in reasons.items())
    return "; ".join(whys) or refusal(action, UNCONSUMED)
