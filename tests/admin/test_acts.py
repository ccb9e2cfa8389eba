"""One act on one message, from every state it may be in: done and audited together, or refused and nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from uuid import UUID

import pytest

from outbox.embedded import ServerLike
from outbox.errors import ActRefused, InvalidRequest, MessageNotFound, UnknownDatabase, VersionMismatch
from outbox.message.model import uuid7
from outbox.operator.model import Action, Actor
from tests.admin.acting import ANN, Desk, open_desk

HALF_STATES = ("undecided", "fenced", "rolled_back", "committed", "deferred", "scheduled", "dispatched", "recalled",
               "compensated", "compensating")  # fmt: skip
INBOX_STATES = ("consumed", "failed", "parked", "discarded", "quarantined")

#: What each act does, by the state in which it can be done: the state afterwards, and what is audited.
DONE = {
    (Action.RESEND, "dispatched"): ("dispatched", "resend", {"send_number": 2}),
    (Action.RECALL, "scheduled"): ("recalled", "recall", None),
    (Action.RECALL, "deferred"): ("recalled", "recall", None),
    (Action.CHECK, "undecided"): ("undecided", "check", {"asked": "next pass"}),
    (Action.CHECK, "fenced"): ("fenced", "check", {"asked": "next pass"}),
    (Action.RESET, "undecided"): ("undecided", "reset", None),
    (Action.RESET, "fenced"): ("fenced", "reset", None),
    (Action.COMMIT, "undecided"): ("committed", "commit", {"resolution": "commit", "force": False}),
    (Action.ROLLBACK, "undecided"): ("rolled_back", "rollback", {"resolution": "rollback", "force": False}),
    (Action.ROLLBACK, "fenced"): ("rolled_back", "rollback", {"resolution": "rollback", "force": False}),
    (Action.RETRY, "parked"): (("failed", 0, True, False), "retry", {"was": "parked"}),
    (Action.RETRY, "failed"): (("failed", 3, True, False), "retry", {"was": "failed"}),
    (Action.PARK, "failed"): (("parked", 3, False, False), "park", {"was": "failed"}),
    (Action.DISCARD, "parked"): (("parked", 3, False, True), "discard", {"was": "parked"}),
    (Action.RESTORE, "discarded"): (("parked", 3, False, False), "restore", {"was": "discarded"}),
}

#: What the refusal must say, of some of the others.
SAID = {
    (Action.RESEND, "compensated"): "its local transaction was compensated; its producer has to",
    (Action.RESEND, "undecided"): "can't be sent again: it is not decided yet; have it checked, or decide it",
    (Action.RESEND, "committed"): "waits for dispatch; a worker with the role dispatch",
    (Action.RECALL, "dispatched"): "it is out already; compensate it instead",
    (Action.RECALL, "committed"): "it has no delivery time",
    (Action.COMMIT, "fenced"): "use force",
    (Action.COMMIT, "dispatched"): "nothing is left to decide",
    (Action.CHECK, "rolled_back"): "it was rolled back and never sent",
    (Action.RETRY, "discarded"): "restore it first",
    (Action.RETRY, "consumed"): "can't be retried: it is consumed",
    (Action.RETRY, "quarantined"): "quarantined in this group",
    (Action.PARK, "parked"): "it is parked; retry it, or discard it",
    (Action.DISCARD, "failed"): "park it first",
    (Action.RESTORE, "parked"): "it was not discarded",
}

OF_HALVES = [action for action in Action if action.part == "producer" and action is not Action.COMPENSATE]
OF_INBOX = [action for action in Action if action.part == "consumer"]


@pytest.fixture(scope="module")
def desk(server: ServerLike, template: str) -> Iterator[Desk]:
    """A desk over one database that is the producer's and the consumer's."""
    with open_desk(server, template, "bank") as opened:
        yield opened


def state_of(desk: Desk, half_id: UUID) -> str:
    """Return the state of a half, as the statement of the acts tells it."""
    from outbox.database.execute import execute
    from outbox.operator.sql import half_states

    with desk.engine.connect() as connection:
        return str(execute(connection, half_states("outbox", [half_id]))[0][0][1])


@pytest.mark.parametrize("state", HALF_STATES)
@pytest.mark.parametrize("action", OF_HALVES)
def test_each_act_on_a_half_from_each_state(desk: Desk, action: Action, state: str) -> None:
    """Done from the states in which it makes sense; refused from the others, with what it is and what to do."""
    half_id = desk.half(state)
    before, was = desk.audited(half_id), state_of(desk, half_id)
    if (action, state) not in DONE:
        with pytest.raises(ActRefused, match=SAID.get((action, state), "can't be")) as refused:
            desk.act(action, half_id)
        assert str(refused.value).startswith(f"message {half_id} can't be ")
        assert (desk.audited(half_id), state_of(desk, half_id)) == (before, was)
        return
    after, audited, result = DONE[action, state]
    assert desk.act(action, half_id).startswith(f"message {half_id} ")
    assert state_of(desk, half_id) == after
    assert desk.audited(half_id)[len(before) :] == [("ann", audited, "because", result, dict(ANN.origin))]


@pytest.mark.parametrize("state", INBOX_STATES)
@pytest.mark.parametrize("action", OF_INBOX)
def test_each_act_on_an_inbox_row_from_each_state(desk: Desk, action: Action, state: str) -> None:
    """Done from the states in which it makes sense; refused from the others, with what it is and what to do."""
    (message_id,) = desk.inbox(state)
    target, before = f"bank-b/{message_id}", desk.inbox_row(message_id)
    if (action, state) not in DONE:
        with pytest.raises(ActRefused, match=SAID.get((action, state), "can't be")) as refused:
            desk.act(action, message_id, "bank-b")
        assert str(refused.value).startswith(f"message {message_id} of group bank-b can't be ")
        assert (desk.audited(target), desk.inbox_row(message_id)) == ([], before)
        return
    after, audited, result = DONE[action, state]
    desk.act(action, message_id, "bank-b")
    assert desk.inbox_row(message_id) == after
    assert desk.audited(target) == [("ann", audited, "because", result, dict(ANN.origin))]


def test_a_fenced_half_is_committed_by_force(desk: Desk) -> None:
    """`force` is what lets an operator tell consumers of a change that nobody saw committed; the audit says so."""
    half_id = desk.half("fenced")
    assert desk.act(Action.COMMIT, half_id, force=True) == f"message {half_id} is committed: it will be sent"
    assert desk.audited(half_id)[0][3] == {"resolution": "commit", "force": True}


def test_a_resend_has_the_next_send_number(desk: Desk) -> None:
    """The same id once more: the sentence and the audit tell which send it is."""
    half_id = desk.half("dispatched")
    assert desk.act(Action.RESEND, half_id) == f"message {half_id} is sent again (send 2)"
    assert desk.act(Action.RESEND, half_id) == f"message {half_id} is sent again (send 3)"
    assert desk.rows("SELECT send_number FROM outbox.message WHERE half_id = :id ORDER BY 1", id=half_id) == [1, 2, 3]


def test_a_retry_says_how_many_attempts_it_has(desk: Desk) -> None:
    """A parked message begins anew; a failed one goes on where it was."""
    parked, failed = desk.inbox("parked") + desk.inbox("failed")
    assert desk.act(Action.RETRY, parked, "bank-b").endswith("is due now, with all its attempts")
    assert desk.act(Action.RETRY, failed, "bank-b").endswith("is due now, with the attempts it has left")


def test_what_is_parked_by_hand_keeps_its_kind_of_error(desk: Desk) -> None:
    """It is found among the dead letters of its kind; one that failed without any gets a kind that says who did it."""
    known, unknown = desk.inbox("failed", 2)
    desk.run("UPDATE outbox.consumer_message SET error_kind = NULL WHERE message_id = :id", id=unknown)
    for message_id in (known, unknown):
        desk.act(Action.PARK, message_id, "bank-b")
    sql = "SELECT error_kind FROM outbox.consumer_message WHERE message_id = ANY (:ids) ORDER BY message_id"
    assert desk.rows(sql, ids=[known, unknown]) == ["NoAccount in bank_b.py:credit", "parked by an operator"]


@pytest.mark.parametrize(
    "action", [Action.DISCARD, Action.COMMIT, Action.ROLLBACK, Action.RECALL, Action.RESET, Action.PARK]
)
def test_acts_that_need_a_reason(desk: Desk, action: Action) -> None:
    """What can't be taken back, or nobody would understand later, isn't done without one."""
    with pytest.raises(InvalidRequest, match="give a reason") as refused:
        desk.act(action, uuid7(), "bank-b" if action.part == "consumer" else None, reason=" ")
    assert refused.value.field == "reason"


@pytest.mark.parametrize(
    ("action", "state"),
    [
        (Action.RESEND, "dispatched"),
        (Action.CHECK, "undecided"),
        (Action.RETRY, "parked"),
        (Action.RESTORE, "discarded"),
    ],
)
def test_acts_that_need_no_reason(desk: Desk, action: Action, state: str) -> None:
    """What only tries again may be done without one."""
    group = "bank-b" if action.part == "consumer" else None
    message_id = desk.inbox(state)[0] if group else desk.half(state)
    desk.act(action, message_id, group, reason="")


def test_what_is_no_act(desk: Desk) -> None:
    """Unknown options, options of the wrong type, groups where there are none, and rollbacks are refused by name."""
    half_id = desk.half("dispatched")
    bads: list[tuple[Callable[[], object], str]] = [
        (lambda: desk.act(Action.RESEND, half_id, force=True), "options"),
        (lambda: desk.act(Action.COMMIT, half_id, force="yes"), "options"),
        (lambda: desk.act(Action.RESEND, half_id, "bank-b"), "group"),
        (lambda: desk.act(Action.RETRY, half_id), "group"),
        (lambda: desk.act(Action.COMPENSATE, half_id), "action"),
        (lambda: desk.act(Action.RESEND, half_id, actor=Actor(" ")), "actor"),
        (lambda: desk.act(Action.RESEND, half_id, reason="nul \0"), "reason"),
    ]
    for bad, field in bads:
        with pytest.raises(InvalidRequest) as refused:
            bad()
        assert refused.value.field == field
    with pytest.raises(UnknownDatabase, match="no database 'nowhere'"):
        desk.act(Action.RESEND, half_id, database="nowhere")


def test_a_message_that_nobody_knows(desk: Desk) -> None:
    """It isn't found; but one that is known elsewhere is refused with the reason."""
    stranger = uuid7()
    for action, group in ((Action.RESEND, None), (Action.RETRY, "bank-b")):
        with pytest.raises(MessageNotFound, match=f"no registered database .bank. knows message {stranger}"):
            desk.act(action, stranger, group)
    half_id = desk.half("dispatched")
    with pytest.raises(ActRefused, match="this group's inbox has no row of it; it comes by itself"):
        desk.act(Action.RETRY, half_id, "bank-b")
    (message_id,) = desk.inbox("parked")
    with pytest.raises(ActRefused, match="no half message has this id"):
        desk.act(Action.RESEND, message_id)


def test_what_has_changed_since_it_was_looked_at(desk: Desk) -> None:
    """With the version that the operator saw, the act is done only if nothing about the message has changed since."""
    from outbox.operator.look.message import version_of

    half_id = desk.half("dispatched")
    seen = version_of(desk.databases, half_id)
    desk.inbox("parked", ids=[half_id])
    for action, group in ((Action.RESEND, None), (Action.DISCARD, "bank-b")):
        with pytest.raises(VersionMismatch, match="has changed since you looked at it; look again"):
            desk.act(action, half_id, group, version=seen)
    assert (desk.inbox_row(half_id)[3], desk.audited(half_id)) == (False, [])
    desk.act(Action.DISCARD, half_id, "bank-b", version=version_of(desk.databases, half_id))
    assert desk.inbox_row(half_id)[3]
