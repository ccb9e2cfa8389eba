"""In which states of a message each act can be done, and what to say where it can't.

A state is a word that the database finds (outbox/store/acts.py): a status of a message or of an inbox row, or a finer
one.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from outbox.admin.model import Action

#: Beside the statuses of `outbox.messages`: an undecided half with a fence; a message whose local transaction was
#: rolled back, or is about to be; one of which its transaction is to be rolled back although it took effect; none.
FENCED = "fenced"
COMPENSATED = "compensated"
BEING_ROLLED_BACK = "being_rolled_back"
DELIVERED = "delivered"
UNKNOWN = "unknown"
#: Beside the statuses of an inbox row: parked and discarded, and no row.
DISCARDED = "discarded"
UNCONSUMED = "unconsumed"

_HALF_ACTS = (Action.CHECK, Action.RESET, Action.COMMIT, Action.ABORT)

_FROM: dict[Action, frozenset[str]] = {
    Action.RESEND: frozenset({"dispatched"}),
    Action.RECALL: frozenset({"scheduled"}),
    Action.ROLLBACK: frozenset({"committed", "dispatched", "scheduled", "recalled"}),
    Action.CHECK: frozenset({"undecided", FENCED}),
    Action.RESET: frozenset({"undecided", FENCED}),
    Action.COMMIT: frozenset({"undecided"}),
    Action.ABORT: frozenset({"undecided", FENCED}),
    Action.RETRY: frozenset({"parked", "failed"}),
    Action.PARK: frozenset({"failed"}),
    Action.DISCARD: frozenset({"parked"}),
    Action.RESTORE: frozenset({DISCARDED}),
}

#: What is said of a message to which an act can't be done: "message … can't be <this>: …".
DONE_TO: Mapping[Action, str] = MappingProxyType(
    {
        Action.RESEND: "sent again",
        Action.RECALL: "recalled",
        Action.ROLLBACK: "rolled back",
        Action.CHECK: "checked",
        Action.RESET: "reset",
        Action.COMMIT: "committed",
        Action.ABORT: "aborted",
        Action.RETRY: "retried",
        Action.PARK: "parked",
        Action.DISCARD: "discarded",
        Action.RESTORE: "restored",
    }
)

_IS = {
    "undecided": "it is not decided yet",
    FENCED: "it is not decided yet",
    "rolled_back": "it was rolled back and never sent",
    "committed": "it is committed and waits for dispatch",
    "scheduled": "it is scheduled for later",
    "dispatched": "it is dispatched",
    "recalled": "it was recalled",
    COMPENSATED: "its local transaction was rolled back by its compensation",
    BEING_ROLLED_BACK: "its local transaction is being rolled back",
    DELIVERED: "it took effect: a group has consumed it",
    UNKNOWN: "no half message has this id",
    "consumed": "it is consumed: it took effect in this group",
    "failed": "it failed and will be retried by itself",
    "parked": "it is parked",
    DISCARDED: "it is discarded",
    UNCONSUMED: "this group's inbox has no row of it",
}
#: All states of messages and inbox rows.
STATES = frozenset(_IS)

_IS_ROLLED_BACK_INBOX = "it is fenced off in this group, since its local transaction was or will be rolled back"

_NO_DECISION = "nothing is left to decide; roll its local transaction back if it must not stand"
_MEND: dict[tuple[Action, str], str] = {
    (Action.RESEND, "undecided"): "have it checked, or decide it",
    (Action.RESEND, FENCED): "have it checked",
    (Action.RESEND, "rolled_back"): "its producer has to send a new message",
    (Action.RESEND, "committed"): "a worker with the role dispatch will send it",
    (Action.RESEND, "scheduled"): "it goes out by itself when it is due",
    (Action.RESEND, "recalled"): "its producer has to send a new message",
    (Action.RESEND, COMPENSATED): "its producer has to send a new message",
    (Action.RESEND, BEING_ROLLED_BACK): "cancel that operation first",
    (Action.RECALL, "undecided"): "abort the half instead",
    (Action.RECALL, FENCED): "abort the half instead",
    (Action.RECALL, "rolled_back"): "there is nothing to take back",
    (Action.RECALL, "committed"): "it has no delivery time; roll its local transaction back instead",
    (Action.RECALL, "dispatched"): "it is out already; roll its local transaction back instead",
    (Action.RECALL, "recalled"): "there is nothing left to take back",
    (Action.RECALL, COMPENSATED): "there is nothing left to take back",
    (Action.RECALL, BEING_ROLLED_BACK): "its consumers are fenced off anyway",
    (Action.ROLLBACK, "undecided"): "abort the half instead",
    (Action.ROLLBACK, FENCED): "abort the half instead",
    (Action.ROLLBACK, "rolled_back"): "there is nothing to undo",
    (Action.ROLLBACK, COMPENSATED): "a compensation runs once ever",
    (Action.ROLLBACK, BEING_ROLLED_BACK): "wait for that operation, or cancel it",
    (Action.ROLLBACK, DELIVERED): "undo that too, and say so with acknowledge_delivered",
    (Action.COMMIT, FENCED): (
        "it is fenced and has no op, so its business change isn't committed, and its consumers would be told of a "
        "change that was never made; abort it, or use force"
    ),
    (Action.RETRY, "consumed"): "there is nothing to retry",
    (Action.RETRY, DISCARDED): "restore it first",
    (Action.RETRY, "rolled_back"): "it must not take effect any more",
    (Action.RETRY, UNCONSUMED): "it comes by itself when the group has come so far; if it was left out, send it again",
    (Action.PARK, "consumed"): "there is nothing to set aside",
    (Action.PARK, "parked"): "retry it, or discard it",
    (Action.PARK, DISCARDED): "it is set aside already",
    (Action.PARK, "rolled_back"): "it will not be tried anyway",
    (Action.PARK, UNCONSUMED): "only what has failed can be parked",
    (Action.DISCARD, "consumed"): "there is nothing to discard",
    (Action.DISCARD, "failed"): "park it first",
    (Action.DISCARD, DISCARDED): "restore it if that was wrong",
    (Action.DISCARD, "rolled_back"): "it will not be tried anyway",
    (Action.DISCARD, UNCONSUMED): "only what is parked can be discarded",
    (Action.RESTORE, "parked"): "it was not discarded; retry it, or discard it",
    (Action.RESTORE, "failed"): "it was not discarded",
    (Action.RESTORE, "consumed"): "it was not discarded",
    (Action.RESTORE, "rolled_back"): "it was not discarded",
    (Action.RESTORE, UNCONSUMED): "only what was discarded can be restored",
}


def states_for(action: Action, options: Mapping[str, Any]) -> frozenset[str]:
    """Return the states of a message in which an act with these options can be done."""
    if action is Action.COMMIT and options.get("force"):
        return _FROM[action] | {FENCED}
    if action is Action.ROLLBACK and options.get("acknowledge_delivered"):
        return _FROM[action] | {DELIVERED}
    return _FROM[action]


def refusal(action: Action, state: str) -> str:
    """Return why an act can't be done to a message in a state, and the mend: a clause without the message's name."""
    what = _IS_ROLLED_BACK_INBOX if state == "rolled_back" and action.part == "consumer" else _IS[state]
    mend = _MEND.get((action, state))
    if mend is None and action in _HALF_ACTS:
        mend = _NO_DECISION if state in {"committed", "scheduled", "dispatched", "recalled"} else "it stays so"
    if state == UNKNOWN:
        mend = "was it prepared in another database, or deleted by prune?"
    return f"{what}; {mend}" if mend else what
