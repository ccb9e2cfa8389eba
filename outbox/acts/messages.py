"""The acts of operators on messages, as one table: from which states each begins, what it is called, what it does.

Everything about an act follows from its row: the command, the HTTP endpoint, the button and the question of the page,
the word in the audit, the permission, the refusal, the page of the documentation. To add an act, add a row: of an act
on messages to `ACTS`, of one on anything else to `outbox.acts.whole_acts.WHOLE_ACTS`.

A state is a word that the database finds (`outbox.acts.changes`): a status of a message or of an inbox row, or a
finer one.
"""

from __future__ import annotations

from collections.abc import Mapping

from outbox.acts import changes
from outbox.acts.changes import Act, ActOption, MessageStatus, Noun
from outbox.errors import InvalidRequest
from outbox.message.model import Status

_TIMED = frozenset(each.value for each in Status if each.timed)
_COMMITTED = frozenset(each.value for each in MessageStatus if each.committed)
_DECIDED = {
    **dict.fromkeys(
        _COMMITTED,
        "nothing is left to decide; compensate its local transaction if it must not stand",
    ),
    **dict.fromkeys(("rolled_back", "compensated", "compensating", "replaced"), "it stays so"),
}
_UNDECIDED = frozenset({"undecided", "fenced"})

_TABLE = (
    Act(
        name="resend",
        noun="message",
        from_states=frozenset({"dispatched"}),
        change=changes.resend,
        summary="Send a dispatched message once more, under the same id",
        details="A group that has consumed the message knows its id and does nothing. A group that has parked or "
        "failed it tries again. A group that has lost it gets it. Only a dispatched message can be sent again.",
        why="mail lost its inbox",
        consequence="The same message goes out once more, with the same id: groups that have consumed it leave it out, "
        "groups that have parked or failed it try again, groups that lack it get it.",
        happened="Resent: the message goes out once more with its id.",
        participle="sent again",
        permission="message:resend",
        needs_reason=False,
        mends={
            "undecided": "have it checked, or decide it",
            "fenced": "have it checked",
            "committed": "a worker with the role dispatch will send it",
            "scheduled": "it goes out by itself when it is due",
            **dict.fromkeys(("rolled_back", "recalled", "compensated"), "its producer has to send a new message"),
            "compensating": "cancel that bulk job first",
            "replaced": "resend the copy",
        },
    ),
    Act(
        name="recall",
        noun="message",
        from_states=frozenset({"scheduled"}),
        change=changes.recall,
        summary="Take a scheduled message back before it is due",
        details="No group ever sees it.",
        why="the order was cancelled",
        consequence="It is taken out of the schedule, and no group ever sees it.",
        happened="Recalled: the message isn't delivered.",
        participle="recalled",
        permission="message:recall",
        grave=True,
        mends={
            **dict.fromkeys(_UNDECIDED, "roll the half back instead"),
            "rolled_back": "there is nothing to take back",
            "committed": "it has no delivery time; compensate its local transaction instead",
            "dispatched": "it is out already; compensate its local transaction instead",
            **dict.fromkeys(("recalled", "compensated"), "there is nothing left to take back"),
            **dict.fromkeys(("compensating", "replaced"), "its consumers are kept from it anyway"),
        },
    ),
    Act(
        name="compensate",
        noun="message",
        from_states=_COMMITTED,
        change=None,
        as_job=True,
        handler="compensation",
        summary="Undo the local transaction of a message that must not, or can't, take effect",
        details="First the message is quarantined in the inbox of each group, so that it can't take effect later. Then "
        "a worker runs the function that the service registered for the topic (`@outbox.compensation`), once per "
        "message ever. If a group has consumed the message already, that is refused.",
        why="no such account at bank B",
        consequence="The message is quarantined in every inbox first, so that it can't take effect later. Then a "
        "worker runs the compensation that the service registered, once, which undoes the local transaction.",
        happened="Ordered: a worker compensates the local transaction.",
        participle="compensated",
        permission="tx:compensate",
        role="admin",
        grave=True,
        options=(
            ActOption(
                "acknowledge_delivered",
                "Also where a group has consumed the message: its effect there stays.",
                frozenset({"delivered"}),
            ),
        ),
        mends={
            **dict.fromkeys(_UNDECIDED, "roll the half back instead"),
            "rolled_back": "there is nothing to undo",
            "compensated": "a compensation runs once ever",
            "compensating": "wait for that bulk job, or cancel it",
            "delivered": "undo that too, and say so with acknowledge_delivered",
            "replaced": "compensate the copy, if that must not stand",
        },
    ),
    Act(
        name="check",
        noun="half",
        from_states=_UNDECIDED,
        change=changes.check,
        summary="Have an undecided half message checked",
        details="A fence is tried at once. Else the next check pass asks the checker, about a parked half exactly once "
        "more.",
        why="the provider is back",
        button="Check now",
        consequence="Whether the local transaction committed is asked at once, instead of at the next check.",
        happened="A check was requested; its answer stands in the history below as soon as there is one.",
        participle="checked",
        permission="half:check",
        needs_reason=False,
        mends=_DECIDED,
    ),
    Act(
        name="reset",
        noun="half",
        from_states=_UNDECIDED,
        change=changes.reset,
        summary="Give an undecided half message all of its checks again",
        details="The next check pass asks, and goes on as with a new orphan (RocketMQ: resume).",
        why="the checker is mended",
        button="Reset checks",
        consequence="Checks are counted from nothing again: a parked half will be checked again.",
        happened="Reset: the half is checked again from the beginning.",
        participle="reset",
        permission="half:check",
        mends=_DECIDED,
    ),
    Act(
        name="commit",
        noun="half",
        from_states=frozenset({"undecided"}),
        change=changes.commit,
        summary="Decide an undecided half message: commit",
        details="The message goes out, and nothing can undo that. The first decision wins: one that the producer or a "
        "check made before stays.",
        why="the provider has captured the payment",
        consequence="You decide in place of the checker: the local transaction is taken to have committed, and the "
        "message goes out.",
        happened="Committed: the message goes out.",
        participle="committed",
        permission="half:decide",
        role="admin",
        grave=True,
        options=(
            ActOption(
                "force",
                "Commit a fenced half message, though its business change was never committed.",
                frozenset({"fenced"}),
            ),
        ),
        mends={
            **_DECIDED,
            "fenced": "it is fenced and has no op, so its business change isn't committed, and its consumers would be "
            "told of a change that was never made; roll it back, or use force",
        },
    ),
    Act(
        name="rollback",
        noun="half",
        from_states=_UNDECIDED,
        change=changes.rollback,
        summary="Decide an undecided half message: roll back",
        details="No consumer ever sees the message, and nothing can undo that. The first decision wins: one that the "
        "producer or a check made before stays. A function that still runs fails at its commit.",
        why="the order was cancelled by phone",
        consequence="You decide in place of the checker: the local transaction is taken to have failed, and no group "
        "ever sees the message.",
        happened="Rolled back: no group ever sees the message.",
        participle="rolled back",
        verb="roll back",
        permission="half:decide",
        role="admin",
        grave=True,
        mends=_DECIDED,
    ),
    Act(
        name="retry",
        noun="inbox",
        from_states=_TIMED | {"parked"},
        change=changes.retry,
        summary="Have a failed or parked message tried again now",
        details="A failed message keeps its attempts; a parked one gets all of them anew. One that a client has taken "
        "is taken from it.",
        why="the mail server is back",
        consequence="The group gets the message again as soon as a worker comes to it. A parked message has all of its "
        "attempts again.",
        happened="It will be tried again as soon as a worker comes to it.",
        participle="retried",
        permission="dead:retry",
        needs_reason=False,
        mends={
            "consumed": "there is nothing to retry",
            "expired": "it is too old; send it anew",
            "discarded": "restore it first",
            "quarantined": "it must not take effect any more",
            "waiting": "retry that one, or discard it",
            "unconsumed": "it comes by itself when the group has come so far; if it was left out, send it again",
        },
    ),
    Act(
        name="park",
        noun="inbox",
        from_states=_TIMED,
        change=changes.park,
        summary="Park a failed message: it is not tried again until an operator retries it",
        details="It is a dead letter then.",
        why="crashes the renderer",
        consequence="It is set aside: no more attempts, until an operator retries it.",
        happened="Parked: it isn't tried any more, until an operator retries it.",
        participle="parked",
        permission="dead:retry",
        mends={
            "consumed": "there is nothing to set aside",
            "expired": "it will not be tried anyway",
            "parked": "retry it, or discard it",
            "discarded": "it is set aside already",
            "quarantined": "it will not be tried anyway",
            "waiting": "retry or discard that one",
            "unconsumed": "only a failed message can be parked",
        },
    ),
    Act(
        name="discard",
        noun="inbox",
        from_states=frozenset({"parked"}),
        change=changes.discard,
        summary="Discard a parked message that the group will never need",
        details="It no longer counts as a dead letter, and can be restored until it is pruned.",
        why="test orders",
        consequence="It is accepted that this group never handles it. It no longer counts as a dead letter, and can be "
        "restored until it is pruned.",
        happened="Discarded. It can be restored until it is pruned.",
        participle="discarded",
        permission="dead:discard",
        grave=True,
        undone_by="restore",
        mends={
            "consumed": "there is nothing to discard",
            "expired": "it will not be tried anyway",
            "failed": "park it first",
            "discarded": "restore it if that was wrong",
            "quarantined": "it will not be tried anyway",
            "waiting": "retry or discard that one",
            "taken": "park it first",
            "unconsumed": "only a parked message can be discarded",
        },
    ),
    Act(
        name="restore",
        noun="inbox",
        from_states=frozenset({"discarded"}),
        change=changes.restore,
        summary="Make a discarded message a dead letter again",
        details="It can be retried then.",
        why="the orders were real after all",
        consequence="It is a dead letter again, and can be retried.",
        happened="Restored: it is a dead letter again.",
        participle="restored",
        permission="dead:discard",
        needs_reason=False,
        mends={
            "parked": "it was not discarded; retry it, or discard it",
            **dict.fromkeys((each for each in Status if each != Status.PARKED), "it was not discarded"),
            "unconsumed": "only a discarded message can be restored",
        },
    ),
)

#: Every act by its name.
ACTS: Mapping[str, Act] = {act.name: act for act in _TABLE}


def acts_for(noun: Noun) -> tuple[Act, ...]:
    """Return the acts on one kind of thing, in the order in which they are shown."""
    return tuple(act for act in _TABLE if act.noun == noun)


def act_named(name: str) -> Act:
    """Return an act by its name; raise InvalidRequest if there is none."""
    if not isinstance(name, str) or name not in ACTS:
        raise InvalidRequest(f"action {name!r} must be one of: {', '.join(ACTS)}", field="action")
    return ACTS[name]
