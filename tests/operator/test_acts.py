"""One act on one message, from every state it may be in: done and audited together, or refused and nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from uuid import UUID

import pytest

from outbox.acts.changes import Actor
from outbox.acts.messages import ACTS
from outbox.embedded import ServerLike
from outbox.errors import ActRefused, InvalidRequest, NotFound, UnknownDatabase, VersionMismatch
from outbox.message.model import uuid7
from tests.operator.acting import ANN, Desk, open_desk

HALF_STATES = ("undecided", "fenced", "rolled_back", "committed", "deferred", "scheduled", "dispatched", "recalled",
               "compensated", "compensating")  # fmt: skip
INBOX_STATES = ("consumed", "failed", "parked", "discarded", "quarantined", "expired")

#: What each act does, by the state in which it can be done: the state afterwards, and what is audited.
DONE = {
    ("resend", "dispatched"): ("dispatched", "resend", {"send_number": 2}),
    ("recall", "scheduled"): ("recalled", "recall", None),
    ("recall", "deferred"): ("recalled", "recall", None),
    ("check", "undecided"): ("undecided", "check", {"asked": "next pass"}),
    ("check", "fenced"): ("rolled_back", "check", {"asked": "fence", "answer": "rollback", "error": None}),
    ("reset", "undecided"): ("undecided", "reset", None),
    ("reset", "fenced"): ("fenced", "reset", None),
    ("commit", "undecided"): ("committed", "commit", None),
    ("rollback", "undecided"): ("rolled_back", "rollback", None),
    ("rollback", "fenced"): ("rolled_back", "rollback", None),
    ("retry", "parked"): (("failed", 0, True, False), "retry", {"was": "parked"}),
    ("retry", "failed"): (("failed", 3, True, False), "retry", {"was": "failed"}),
    ("park", "failed"): (("parked", 3, False, False), "park", {"was": "failed"}),
    ("discard", "parked"): (("parked", 3, False, True), "discard", {"was": "parked"}),
    ("restore", "discarded"): (("parked", 3, False, False), "restore", {"was": "discarded"}),
}

#: What the refusal must say, of some of the others.
SAID = {
    ("resend", "compensated"): "its local transaction was compensated; its producer has to",
    ("resend", "undecided"): "can't be sent again: it is not decided yet; have it checked, or decide it",
    ("resend", "committed"): "waits for dispatch; a worker with the role dispatch",
    ("recall", "dispatched"): "it is out already; compensate its local transaction instead",
    ("recall", "committed"): "it has no delivery time",
    ("commit", "fenced"): "use force",
    ("commit", "dispatched"): "nothing is left to decide",
    ("check", "rolled_back"): "it was rolled back and never sent",
    ("retry", "discarded"): "restore it first",
    ("retry", "consumed"): "can't be retried: it is consumed",
    ("retry", "quarantined"): "quarantined in this group",
    ("retry", "expired"): "it had expired when this group came to it; it is too old",
    ("park", "parked"): "it is parked; retry it, or discard it",
    ("discard", "failed"): "park it first",
    ("restore", "parked"): "it was not discarded",
}

OF_HALVES = [action for action in ACTS if ACTS[action].part == "producer" and action != "compensate"]
OF_INBOX = [action for action in ACTS if ACTS[action].part == "consumer"]


@pytest.fixture(scope="module")
def desk(server: ServerLike, template: str) -> Iterator[Desk]:
    """A desk over one database that is the producer's and the consumer's."""
    with open_desk(server, template, "bank") as opened:
        yield opened


def state_of(desk: Desk, half_id: UUID) -> str:
    """Return the state of a half, as the statement of the acts tells it."""
    from outbox.acts.changes import message_states
    from outbox.database.execute import execute

    with desk.engine.connect() as connection:
        return str(execute(connection, message_states("outbox", [half_id]))[0][0][1])


@pytest.mark.parametrize("state", HALF_STATES)
@pytest.mark.parametrize("action", OF_HALVES)
def test_each_act_on_a_half_from_each_state(desk: Desk, action: str, state: str) -> None:
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
def test_each_act_on_an_inbox_row_from_each_state(desk: Desk, action: str, state: str) -> None:
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
    assert desk.act("commit", half_id, force=True) == f"message {half_id} is committed: it will be sent"
    assert desk.audited(half_id)[0][3] == {"force": True}


def test_a_resend_has_the_next_send_number(desk: Desk) -> None:
    """The same id once more: the sentence and the audit tell which send it is."""
    half_id = desk.half("dispatched")
    assert desk.act("resend", half_id) == f"message {half_id} is sent again (send 2)"
    assert desk.act("resend", half_id) == f"message {half_id} is sent again (send 3)"
    assert desk.rows("SELECT send_number FROM outbox.message WHERE half_id = :id ORDER BY 1", id=half_id) == [1, 2, 3]


def test_a_retry_says_how_many_attempts_it_has(desk: Desk) -> None:
    """A parked message begins anew; a failed one goes on where it was."""
    parked, failed = desk.inbox("parked") + desk.inbox("failed")
    assert desk.act("retry", parked, "bank-b").endswith("is due now, with all its attempts")
    assert desk.act("retry", failed, "bank-b").endswith("is due now, with the attempts it has left")


def test_what_is_parked_by_hand_keeps_its_kind_of_error(desk: Desk) -> None:
    """It is found among the dead letters of its kind; one that failed without any gets a kind that says who did it."""
    known, unknown = desk.inbox("failed", 2)
    desk.run("UPDATE outbox.consumer_message SET error_kind = NULL WHERE message_id = :id", id=unknown)
    for message_id in (known, unknown):
        desk.act("park", message_id, "bank-b")
    sql = "SELECT error_kind FROM outbox.consumer_message WHERE message_id = ANY (:ids) ORDER BY message_id"
    assert desk.rows(sql, ids=[known, unknown]) == ["NoAccount in bank_b.py:credit", "parked by an operator"]


@pytest.mark.parametrize("action", ["discard", "commit", "rollback", "recall", "reset", "park"])
def test_acts_that_need_a_reason(desk: Desk, action: str) -> None:
    """What can't be taken back, or nobody would understand later, isn't done without one."""
    with pytest.raises(InvalidRequest, match="give a reason") as refused:
        desk.act(action, uuid7(), "bank-b" if ACTS[action].part == "consumer" else None, why=" ")
    assert refused.value.field == "reason"


@pytest.mark.parametrize(
    ("action", "state"),
    [("resend", "dispatched"), ("check", "undecided"), ("retry", "parked"), ("restore", "discarded")],
)
def test_acts_that_need_no_reason(desk: Desk, action: str, state: str) -> None:
    """What only tries again may be done without one."""
    group = "bank-b" if ACTS[action].part == "consumer" else None
    message_id = desk.inbox(state)[0] if group else desk.half(state)
    desk.act(action, message_id, group, why="")


def test_what_is_no_act(desk: Desk) -> None:
    """Unknown options, options of the wrong type, groups where there are none, and rollbacks are refused by name."""
    half_id = desk.half("dispatched")
    bads: list[tuple[Callable[[], object], str]] = [
        (lambda: desk.act("resend", half_id, force=True), "options"),
        (lambda: desk.act("commit", half_id, force="yes"), "options"),
        (lambda: desk.act("resend", half_id, "bank-b"), "group"),
        (lambda: desk.act("retry", half_id), "group"),
        (lambda: desk.act("compensate", half_id), "action"),
        (lambda: desk.act("resend", half_id, by=Actor(" ")), "actor"),
        (lambda: desk.act("resend", half_id, why="nul \0"), "reason"),
    ]
    for bad, field in bads:
        with pytest.raises(InvalidRequest) as refused:
            bad()
        assert refused.value.field == field
    with pytest.raises(UnknownDatabase, match="no database 'nowhere'"):
        desk.act("resend", half_id, database="nowhere")


def test_a_message_that_nobody_knows(desk: Desk) -> None:
    """It isn't found; but one that is known elsewhere is refused with the reason."""
    stranger = uuid7()
    for action, group in (("resend", None), ("retry", "bank-b")):
        with pytest.raises(NotFound, match=f"no registered database .bank. knows message {stranger}"):
            desk.act(action, stranger, group)
    half_id = desk.half("dispatched")
    with pytest.raises(ActRefused, match="this group's inbox has no row of it; it comes by itself"):
        desk.act("retry", half_id, "bank-b")
    (message_id,) = desk.inbox("parked")
    with pytest.raises(ActRefused, match="no half message has this id"):
        desk.act("resend", message_id)


def test_what_has_changed_since_it_was_looked_at(desk: Desk) -> None:
    """With the version that the operator saw, the act is done only if nothing about the message has changed since."""
    from outbox.operator.look.message import gather

    half_id = desk.half("dispatched")
    seen = gather(desk.databases, half_id).version
    desk.inbox("parked", ids=[half_id])
    for action, group in (("resend", None), ("discard", "bank-b")):
        with pytest.raises(VersionMismatch, match="has changed since you looked at it; look again"):
            desk.act(action, half_id, group, version=seen)
    assert (desk.inbox_row(half_id)[3], desk.audited(half_id)) == (False, [])
    desk.act("discard", half_id, "bank-b", version=gather(desk.databases, half_id).version)
    assert desk.inbox_row(half_id)[3]
