"""Each repair by itself: what it mends, what it leaves alone, and what it writes down."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from uuid import UUID

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from outbox import Message, Settings
from outbox.consumer.consumer import Consumer
from outbox.message.model import uuid7
from outbox.reconcile import repair as package
from outbox.reconcile.job import Outcome, Pair, Repair
from outbox.reconcile.repair import repair
from outbox.reconcile.rows import Repaired
from outbox.reconcile.tables import ProducerState
from outbox.testing import make_due
from tests.consumer.test_reread import reset
from tests.kit.bench import record
from tests.reconcile.repairing import PAIR, Night

HUNDREDS = 120
GONE = "refused: the group has no offset at or beyond it: it would come to it later, and never handle it"


@pytest.fixture(params=["one database", "two databases"])
def any_night(request: pytest.FixtureRequest, new_engine: Callable[[], Engine], settings: Settings) -> Iterator[Night]:
    """Producer and consumer in one database, then in two."""
    producer = new_engine()
    with Night(producer, producer if request.param == "one database" else new_engine(), settings) as night:
        yield night


@pytest.fixture(params=[1, HUNDREDS])
def many(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many messages are broken: one, or several batches of them."""
    monkeypatch.setattr(package, "BATCH", 50)
    return int(request.param)


def explode(message: Message, session: object) -> None:
    """Fail."""
    raise RuntimeError("boom")


def assert_repaired(night: Night, kind: Outcome, action: Repair, ids: list[UUID]) -> None:
    """The differences are these and no others; they are mended and recorded; doing it again changes nothing."""
    findings = night.found()
    assert Counter(finding.outcome for finding in findings) == {kind: len(ids)}
    before = len(night.acts(action))
    repaired = night.repaired(findings)
    assert {(each.kind, each.action, each.result) for each in repaired} == {(kind, action, "done")}
    assert [each.id for each in repaired] == sorted(ids)
    acts = night.acts(action)[before:]
    consumers = action in {Repair.SYNC_STATUS, Repair.PARK, Repair.RETRY}
    assert [target for _, target, _ in acts] == [f"{'g/' if consumers else ''}{each}" for each in sorted(ids)]
    assert {actor for actor, _, _ in acts} == {"night"}
    reasons = {reason for _, _, reason in acts}
    assert len(reasons) == 1
    assert reasons.pop().endswith(f": {kind.label}")
    state = dump(night)
    again = night.repair(findings)
    assert not [result for result in again.values() if result == "done"]
    assert dump(night) == state


def dump(night: Night) -> list[object]:
    """Return all that a repair could change."""
    return [
        night.rows_at_producer("SELECT half_id, send_number, queue, position FROM outbox.message ORDER BY 1, 2"),
        night.rows_at_producer("SELECT half_id, deliver_at, recalled_at FROM outbox.scheduled_message ORDER BY 1"),
        night.rows_at_producer("SELECT half_id, next_check_at, parked_at FROM outbox.half_check ORDER BY 1"),
        night.rows_at_producer("SELECT count(*) FROM outbox.audit"),
        night.rows("SELECT * FROM outbox.consumer_message ORDER BY message_id"),
        night.rows("SELECT * FROM ledger ORDER BY n"),
        night.rows("SELECT count(*) FROM outbox.audit"),
    ]


# --- resend ----------------------------------------------------------------------------------------------


def test_missing_is_resent(night: Night, many: int) -> None:
    """What the consumer has lost is sent once more and consumed once, whatever the others have done."""
    ids = night.consumed(*range(many + 5))
    night.forget(*ids[:many])
    assert_repaired(night, Outcome.MISSING, Repair.RESEND, ids[:many])
    assert night.sends(*ids) == [2] * many + [1] * 5
    night.settle()
    assert night.found() == []
    assert sorted(map(int, night.ledger())) == list(range(many + 5))


def test_resent_up_to_a_limit(night: Night) -> None:
    """A message that goes missing night after night is resent as often as the policy says, and no more."""
    (half_id,) = night.consumed("lost")
    job = night.job(max_resends=2)
    for sends in (2, 3):
        night.forget(half_id)
        assert night.repair(night.found(job=job), job) == {half_id: "done"}
        assert night.sends(half_id) == [sends]
        night.settle()
    night.forget(half_id)
    (exhausted,) = night.found(job=job)
    assert exhausted.outcome is Outcome.RESEND_EXHAUSTED
    assert night.repair([exhausted], job) == {}
    assert night.repair([replace(exhausted, outcome=Outcome.MISSING)], job) == {
        half_id: "refused: resent 2 times already"
    }
    assert night.sends(half_id) == [3]


def test_resend_of_what_healed(night: Night) -> None:
    """What has come meanwhile, was resent, took effect, was compensated or pruned is not resent."""
    come, resent, effect, compensated, pruned, lost = ids = night.consumed(*range(6))
    night.forget(*ids)
    findings = night.found()
    night.resend(come, resent)
    night.run("INSERT INTO ledger (message_id, body) VALUES (:id, 'x')", id=effect)
    night.compensate(compensated)
    for table, column in (("message", "half_id"), ("op_message", "half_id"), ("half_message", "id")):
        night.run_at_producer(f"DELETE FROM outbox.{table} WHERE {column} = :id", id=pruned)
    night.settle()
    night.forget(resent)
    assert night.repair(findings) == {
        come: "healed",
        resent: "healed",
        effect: "refused: it took effect",
        compensated: "refused: its local transaction was compensated",
        pruned: "refused: the producer has no message of it any more",
        lost: "done",
    }
    assert night.sends(*ids) == [2, 2, 1, 1, 0, 2]


def test_resend_without_a_business_table(night: Night) -> None:
    """A pair that names no business table is resent by what the inbox says."""
    ids = night.consumed(1, 2)
    night.forget(*ids, ledger=False)
    pair = Pair("t", "g")
    findings = night.found(pair)
    assert [finding.outcome for finding in findings] == [Outcome.MISSING] * 2
    assert night.repair(findings, pair=pair) == dict.fromkeys(ids, "done")


# --- dispatch --------------------------------------------------------------------------------------------


def test_undispatched_is_placed(night: Night, many: int) -> None:
    """An op that dispatch has passed without making its message gets one, and positions stay dense."""
    before = night.consumed(1, 2, 3)
    ids = night.passed(*range(many))
    night.dispatch()
    assert night.sends(*ids) == [0] * many
    assert_repaired(night, Outcome.UNDISPATCHED, Repair.DISPATCH, ids)
    assert night.sends(*ids, *before) == [1] * (many + 3)
    later = night.send(*range(5))
    positions = "SELECT position FROM outbox.message WHERE topic = 't' ORDER BY 1"
    assert night.rows_at_producer(positions) == list(range(1, many + 9))
    night.settle()
    assert night.found() == []
    assert len(night.ledger()) == many + 8
    assert set(night.status(*ids, *later)) == {"consumed"}


def test_what_dispatch_will_come_to_is_left_to_it(night: Night, many: int) -> None:
    """A backlog is dispatched by dispatch itself: placed by hand, it would stop dispatch for ever."""
    ids = night.send_only(*range(many))
    findings = night.found()
    assert {finding.outcome for finding in findings} == {Outcome.UNDISPATCHED}
    assert night.repair(findings) == dict.fromkeys(ids, "healed")
    assert night.acts(Repair.DISPATCH) == []
    assert night.sends(*ids) == [1] * many
    night.send("after")
    night.settle()
    assert night.found() == []


def test_a_backlog_that_was_cut(new_engine: Callable[[], Engine], settings: Settings) -> None:
    """While a backlog is being worked off, nothing is placed out of turn: it is worked off first."""
    small = replace(settings, dispatch_batch=3)
    with Night(new_engine(), new_engine(), small) as night:
        backlog = night.send_only(*range(10))
        with night.producer.connect() as connection:
            from outbox.dispatch.dispatch_pass import dispatch_once

            assert dispatch_once(connection, small).more
        lost = night.passed("lost")
        results = night.repair()
        # The sequence of the lost op lies behind the cut, its xid before the cursor.
        assert results == {**dict.fromkeys(backlog[3:], "healed"), lost[0]: "done"}
        assert night.sends(*backlog, *lost) == [1] * 11
        night.settle()
        assert night.found() == []


def test_dispatch_without_a_cursor(new_engine: Callable[[], Engine], settings: Settings) -> None:
    """Before the first dispatch there is no cursor that could have passed anything."""
    with Night(new_engine(), new_engine(), settings) as night:
        night.run_at_producer("TRUNCATE outbox.dispatch_cursor")
        ids = night.send_only(1, 2)
        assert night.repair() == dict.fromkeys(ids, "healed")
        assert night.sends(*ids) == [1, 1]
        night.settle()
        assert night.found() == []


def test_dispatch_after_a_restore(new_engine: Callable[[], Engine], settings: Settings) -> None:
    """In another cluster the cursor says nothing of the ops' xids: dispatch begins anew, and finds all."""
    with Night(new_engine(), new_engine(), settings) as night:
        lost = night.passed("lost")
        findings = night.found()
        night.run_at_producer("UPDATE outbox.dispatch_cursor SET system_identifier = 1")
        ids = night.send_only(1, 2)
        assert night.repair(findings) == {lost[0]: "healed"}
        assert night.sends(*ids, *lost) == [1, 1, 1]
        night.settle()
        assert night.found() == []


def test_what_is_due_later_is_scheduled(night: Night) -> None:
    """An op of a later delivery that dispatch has passed gets its schedule, and can be recalled or released."""
    (half_id,) = night.passed("later", delay=3600)
    (found,) = night.found()
    assert night.repair([found]) == {half_id: "done"}
    assert night.sends(half_id) == [0]
    assert night.rows_at_producer("SELECT half_id FROM outbox.scheduled_message") == [half_id]
    assert night.repair([found]) == {half_id: "healed"}
    make_due(night.app, failed=False, orphans=False)
    night.settle()
    assert night.ledger() == ["later"]


def test_an_overdue_schedule_is_released(night: Night) -> None:
    """A schedule that nobody released is released by release itself."""
    (half_id,) = night.send("late", delay=3600)
    night.run_at_producer("UPDATE outbox.scheduled_message SET deliver_at = now() - interval '1 day'")
    assert [finding.state for finding in night.found()] == [ProducerState.SCHEDULED]
    assert night.repair() == {half_id: "healed"}
    assert night.sends(half_id) == [1]
    night.settle()
    assert night.found() == []


def test_dispatch_of_what_healed(night: Night) -> None:
    """What is a message by now, was recalled or compensated is left alone."""
    placed, recalled, compensated = ids = night.passed(*range(3), delay=0)
    findings = night.found()
    assert {finding.outcome for finding in findings} == {Outcome.UNDISPATCHED}
    assert night.repair([finding for finding in findings if finding.id == placed]) == {placed: "done"}
    night.run_at_producer(
        "INSERT INTO outbox.scheduled_message VALUES (:id, now() - interval '1 h', now(), 'me')", id=recalled
    )
    night.compensate(compensated)
    assert night.repair(findings) == dict.fromkeys(ids, "healed")
    assert night.sends(*ids) == [1, 0, 0]


# --- sync_status -----------------------------------------------------------------------------------------


def test_unrecorded_is_written_down(night: Night, many: int) -> None:
    """What took effect and isn't in the inbox is written there, as a consumer would have written it."""
    ids = night.consumed(*range(many))
    columns = "SELECT message_id, topic, queue, position, status, attempts, body_digest, last_error, starts"
    before = night.rows(f"{columns} FROM outbox.consumer_message ORDER BY message_id")
    night.forget(*ids, ledger=False)
    assert_repaired(night, Outcome.UNRECORDED, Repair.SYNC_STATUS, ids)
    assert night.rows(f"{columns} FROM outbox.consumer_message ORDER BY message_id") == before
    night.resend(*ids)
    night.settle()
    assert night.found() == []
    assert len(night.ledger()) == many


def test_unrecorded_and_undispatched(night: Night) -> None:
    """An effect without a message is written down first, so that the message that is made then does nothing."""
    (half_id,) = night.passed("early")
    night.run("INSERT INTO ledger (message_id, body) VALUES (:id, 'early')", id=half_id)
    assert night.kinds() == {Outcome.UNRECORDED: 1}
    assert night.repair() == {half_id: "done"}
    assert night.kinds() == {Outcome.UNDISPATCHED: 1}
    assert night.repair() == {half_id: "done"}
    night.settle()
    assert night.found() == []
    assert night.ledger() == ["early"]


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_group_that_is_gone_gets_no_rows(night: Night, when: str) -> None:
    """It would read the messages when it is created again, and never handle them."""
    *ids, undispatched = [*night.consumed(1, 2), *night.passed("early")]
    night.run("INSERT INTO ledger (message_id, body) VALUES (:id, 'early')", id=undispatched)
    night.forget(*ids, ledger=False)
    findings = night.found()

    def delete() -> None:
        for table in ("consumer_offset", "consumer_start"):
            night.run(f"DELETE FROM outbox.{table} WHERE consumer_group = 'g'")

    delete()
    assert night.repair(None if when == "before" else findings) == dict.fromkeys([*ids, undispatched], GONE)
    assert night.inbox() == {}
    assert night.acts(Repair.SYNC_STATUS) == []


def test_what_a_group_has_yet_to_read_gets_no_row(night: Night) -> None:
    """A group that was created again behind it, or moved back, reads it as any other, and handles it."""
    first, second = ids = night.consumed(1, 2)
    night.forget(*ids, ledger=False)
    findings = night.found()
    night.run(
        """DELETE FROM outbox.consumer_offset
            WHERE consumer_group = 'g' AND position >= (SELECT position FROM outbox.consumer_offset
                                                         WHERE consumer_group = 'g' ORDER BY position DESC LIMIT 1)"""
    )
    queue, position = night.rows_at_producer(
        "SELECT queue, position FROM outbox.message WHERE half_id = :id", id=first
    )[0]
    night.run(
        """INSERT INTO outbox.consumer_offset (consumer_group, topic, queue, position, starts)
           VALUES ('g', 't', :queue, :position, 0) ON CONFLICT DO NOTHING""",
        queue=queue,
        position=position,
    )
    assert night.repair(findings) == {first: "done", second: GONE}
    assert night.status(*ids) == ["consumed", None]


@pytest.mark.parametrize("status", ["failed", "parked", "quarantined"])
def test_what_took_effect_is_consumed(night: Night, many: int, status: str) -> None:
    """A row that contradicts the business table is consumed from then on: no retry, no resume."""
    ids = night.consumed(*range(many))
    night.set_status(status, *ids)
    assert_repaired(night, Outcome.STATUS_MISMATCH, Repair.SYNC_STATUS, ids)
    assert night.found() == []
    assert night.rows("SELECT DISTINCT status, attempts, last_error FROM outbox.consumer_message") == [
        ("consumed", 1, None)
    ]
    night.retry(night.group)
    assert len(night.ledger()) == many


@pytest.mark.parametrize("status", ["failed", "parked"])
@pytest.mark.parametrize("how", ["rolled back", "compensated", "recalled"])
def test_what_was_withdrawn_is_quarantined_off(night: Night, status: str, how: str) -> None:
    """A row that waits for a message which the producer has withdrawn is quarantined."""
    ids = night.consumed(*range(3))
    night.set_status(status, *ids)
    night.run("DELETE FROM ledger")
    if how == "compensated":
        night.compensate(*ids)
    else:
        night.run_at_producer("DELETE FROM outbox.message WHERE topic = 't'")
    if how == "rolled back":
        night.run_at_producer(
            "UPDATE outbox.op_message SET resolution = 'rollback' WHERE half_id = ANY (:ids)", ids=ids
        )
    if how == "recalled":
        night.run_at_producer(
            "INSERT INTO outbox.scheduled_message SELECT id, now(), now(), 'me' FROM unnest(CAST(:ids AS uuid[])) id",
            ids=ids,
        )
    assert_repaired(night, Outcome.STATUS_MISMATCH, Repair.SYNC_STATUS, ids)
    assert night.status(*ids) == ["quarantined"] * 3
    assert night.found() == []
    (error,) = set(night.rows("SELECT last_error FROM outbox.consumer_message"))
    assert error.startswith("quarantined by reconciliation ")
    assert error.endswith(": status_mismatch; before: boom")


def read_again(night: Night) -> tuple[Consumer, list[UUID]]:
    """Have a group that is ordered by key consume three messages of one key, go back, and fail at the first one."""
    night.app.declare_topic("t", 1)
    ill = [False]

    def handler(message: Message, session: Session) -> None:
        if ill[0]:
            raise RuntimeError("boom")
        record(message, session)

    group = night.group = night.declare(handler, ordered="key", retry_delays=(60.0,))
    ids = night.consumed(1, 2, 3)
    reset(night)
    ill[0] = True
    night.consume(group)
    ill[0] = False
    assert night.status(*ids) == ["failed", "waiting", "waiting"]
    return group, ids


def test_what_a_group_is_to_read_again_isnt_marked(night: Night) -> None:
    """What took effect in an earlier passage, and waits for its key in this one, stays the handler's."""
    group, ids = read_again(night)
    findings = night.found()
    assert {finding.outcome for finding in findings} == {Outcome.FAILED}
    by_default = night.job(actions={})
    assert night.repair(findings, by_default) == {}
    # As a run finds it that has read the passages before the group came to them, and the inbox after.
    late = [replace(finding, outcome=Outcome.STATUS_MISMATCH) for finding in findings]
    refusal = "refused: the group reads it again: it took effect in an earlier passage"
    assert night.repair(late, by_default) == dict.fromkeys(ids, refusal)
    for _ in ids:
        night.retry(group)
    assert night.ledger() == ["1", "2", "3"] * 2
    assert night.status(*ids) == ["consumed"] * 3


def test_an_effect_of_an_earlier_passage_is_one(night: Night) -> None:
    """A compensated message that took effect in an earlier passage did, whatever its inbox row says now."""
    _, ids = read_again(night)
    night.compensate(*ids)
    plain = replace(PAIR, effect=None)
    assert {finding.outcome for finding in night.found(plain)} == {Outcome.CONSUMED_THOUGH_ROLLED_BACK}


def test_what_waits_isnt_called_healed(night: Night) -> None:
    """A message that waits for an earlier one of its key can't be parked, and the result says so."""
    _, (failed, *waiting) = read_again(night)
    refusal = "refused: it is waiting: only a message that will be retried can be parked"
    assert night.repair() == {failed: "done", **dict.fromkeys(waiting, refusal)}


def test_what_was_compensated_gets_its_quarantine(night: Night, many: int) -> None:
    """A compensated message that the consumer hasn't seen is quarantined there, and takes no effect when it comes."""
    ids = night.send(*range(many))
    night.compensate(*ids)
    assert_repaired(night, Outcome.STATUS_MISMATCH, Repair.SYNC_STATUS, ids)
    assert night.status(*ids) == ["quarantined"] * many
    night.settle()
    assert night.ledger() == []
    assert night.found() == []


def test_sync_status_of_what_healed(night: Night) -> None:
    """What was consumed, or changed, or whose effect went or came, is left as it is."""
    consumed, changed, gone, undone, doubled, same = ids = night.consumed(*range(6))
    night.set_status("failed", *ids)
    findings = night.found()
    night.run("UPDATE outbox.consumer_message SET attempts = 7 WHERE message_id = :id", id=changed)
    night.run(
        """UPDATE outbox.consumer_message SET status = 'consumed', next_attempt_at = NULL, changed_at = now()
            WHERE message_id = :id""",
        id=consumed,
    )
    night.forget(gone, ledger=False)
    night.run("DELETE FROM ledger WHERE message_id = :id", id=undone)
    night.run("INSERT INTO ledger (message_id, body) VALUES (:id, 'again')", id=doubled)
    assert night.repair(findings) == {
        consumed: "healed",
        changed: "refused: it has changed meanwhile: failed after 7 attempts",
        gone: "refused: its inbox row is gone",
        undone: "refused: it took effect 0 times",
        doubled: "refused: it took effect 2 times",
        same: "done",
    }
    assert night.status(*ids) == ["consumed", "failed", None, "failed", "failed", "consumed"]


def test_unrecorded_of_what_healed(night: Night) -> None:
    """A row that has come meanwhile is left as it is, whatever it says."""
    consumed, failed, undone = ids = night.consumed(*range(3))
    keep = night.rows("SELECT message_id, topic, queue, position FROM outbox.consumer_message ORDER BY message_id")
    night.forget(*ids, ledger=False)
    findings = night.found()
    for (message_id, topic, queue, position), status in zip(keep, ("consumed", "failed"), strict=False):
        night.run(
            """INSERT INTO outbox.consumer_message
                      (consumer_group, message_id, topic, queue, position, status, attempts, next_attempt_at)
               VALUES ('g', :id, :topic, :queue, :position, :status, 1, CASE WHEN :status = 'failed' THEN now() END)""",
            id=message_id,
            topic=topic,
            queue=queue,
            position=position,
            status=status,
        )
    night.run("DELETE FROM ledger WHERE message_id = :id", id=undone)
    assert night.repair(findings) == {
        consumed: "healed",
        failed: "refused: it has changed meanwhile: failed after 1 attempts",
        undone: "refused: it took effect 0 times",
    }
    assert night.status(*ids) == ["consumed", "failed", None]


def test_a_quarantine_that_was_meant(night: Night) -> None:
    """A quarantine over an effect stays where the producer has compensated the message meanwhile."""
    (half_id,) = night.consumed("x")
    night.set_status("quarantined", half_id)
    findings = night.found()
    night.compensate(half_id)
    assert night.repair(findings) == {half_id: "refused: it was compensated"}
    assert night.status(half_id) == ["quarantined"]


def test_no_quarantine_over_an_effect(night: Night) -> None:
    """A compensated message that took effect after it was found isn't quarantined: that would hide it."""
    unseen, waiting = ids = night.send(1, 2)
    night.settle()
    night.set_status("failed", waiting)
    night.forget(unseen)
    night.run("DELETE FROM ledger")
    night.compensate(*ids)
    findings = night.found()
    night.run("INSERT INTO ledger (message_id, body) SELECT id, 'x' FROM unnest(CAST(:ids AS uuid[])) id", ids=ids)
    assert night.repair(findings) == dict.fromkeys(ids, "refused: it took effect")
    assert night.status(*ids) == [None, "failed"]
    assert night.kinds() == {Outcome.CONSUMED_THOUGH_ROLLED_BACK: 2}


def test_nothing_is_written_without_a_business_table(night: Night) -> None:
    """A finding that was made with a business table isn't repaired by a pair that names none."""
    (half_id,) = night.consumed("x")
    night.forget(half_id, ledger=False)
    findings = night.found()
    assert night.repair(findings, pair=Pair("t", "g")) == {half_id: "refused: no business table is named"}


# --- park ------------------------------------------------------------------------------------------------


def test_failed_is_parked(night: Night, many: int) -> None:
    """A message that fails and fails is set in_savepoint, says why, and keeps what it said."""
    ids = night.send(*range(many))
    night.consume(night.declare(explode))
    assert_repaired(night, Outcome.FAILED, Repair.PARK, ids)
    assert night.status(*ids) == ["parked"] * many
    error = night.inbox()[ids[0]].error or ""
    assert error.startswith("parked by reconciliation ")
    assert ": failed; before: RuntimeError: boom" in error
    assert not night.retry(night.group)


def test_phantom_is_parked(night: Night, many: int) -> None:
    """What the producer never wrote is set aside before it is retried; what was consumed can't be."""
    ids = night.consumed(*range(many))
    night.set_status("failed", *ids)
    night.run("DELETE FROM ledger")
    for table, column in (("message", "half_id"), ("op_message", "half_id"), ("half_message", "id")):
        night.run_at_producer(f"DELETE FROM outbox.{table} WHERE {column} = ANY (:ids)", ids=ids)
    assert_repaired(night, Outcome.PHANTOM, Repair.PARK, ids)
    assert night.status(*ids) == ["parked"] * many


def test_a_changed_body_is_parked(night: Night) -> None:
    """A message whose body changed on the way is set aside before it is retried, unless it was consumed."""
    failed, consumed, restored = ids = night.consumed(1, 2, 3)
    night.set_status("failed", failed, restored)
    night.run("DELETE FROM ledger WHERE message_id = ANY (:ids)", ids=[failed, restored])
    night.run_at_producer("UPDATE outbox.half_message SET body = body || '0' WHERE id = ANY (:ids)", ids=ids)
    findings = night.found()
    assert {finding.outcome for finding in findings} == {Outcome.DIGEST_MISMATCH}
    night.run_at_producer("UPDATE outbox.half_message SET body = '3' WHERE id = :id", id=restored)
    assert night.repair(findings) == {
        failed: "done",
        consumed: "refused: it is consumed: only a message that will be retried can be parked",
        restored: "healed",
    }
    assert night.status(*ids) == ["parked", "consumed", "failed"]


def test_park_of_what_healed(night: Night) -> None:
    """What was retried meanwhile, with success or without, is left as it is."""
    ids = night.send(*range(4))
    night.consume(night.declare(explode))
    night.run("UPDATE outbox.consumer_message SET next_attempt_at = now() + interval '1 day'")
    findings = night.found()
    retried, again, gone, parked = ids
    night.run("UPDATE outbox.consumer_message SET next_attempt_at = now() WHERE message_id = :id", id=retried)
    assert night.retry(night.group, due=False).done == 1
    night.run("UPDATE outbox.consumer_message SET attempts = 2 WHERE message_id = :id", id=again)
    night.forget(gone)
    night.set_status("parked", parked)
    assert night.repair(findings) == {
        retried: "healed",
        again: "refused: it has changed meanwhile: failed after 2 attempts",
        gone: "healed",
        parked: "healed",
    }


def test_a_phantom_that_has_come(night: Night) -> None:
    """A phantom whose message the producer has by now is not parked."""
    (half_id,) = night.consumed("x")
    night.set_status("failed", half_id)
    night.run("DELETE FROM ledger")
    (failed,) = night.found()
    assert night.repair([replace(failed, outcome=Outcome.PHANTOM)]) == {half_id: "healed"}
    assert night.status(half_id) == ["failed"]


# --- resume ----------------------------------------------------------------------------------------------


def test_parked_is_resumed(night: Night, many: int) -> None:
    """A dead letter is given back to its group, and consumed by the next retry."""
    ids = night.consumed(*range(many))
    night.set_status("parked", *ids)
    night.run("DELETE FROM ledger")
    assert_repaired(night, Outcome.PARKED, Repair.RETRY, ids)
    while night.retry(night.group).more:
        pass
    assert night.status(*ids) == ["consumed"] * many
    assert len(night.ledger()) == many


def test_resume_of_what_healed(night: Night) -> None:
    """What an operator has resumed is left alone, also where it is parked again."""
    resumed, again, gone = ids = night.consumed(*range(3))
    night.set_status("parked", *ids)
    night.run("DELETE FROM ledger")
    findings = night.found()
    for each in (resumed, again):
        night.sink.operator.retry(each, group="g", by="me", why="test")
    night.set_status("parked", again)
    night.forget(gone)
    assert night.repair(findings) == {
        resumed: "healed",
        again: "refused: it has changed meanwhile: parked after 0 attempts",
        gone: "healed",
    }
    assert night.status(*ids) == ["failed", "parked", None]


# --- check -----------------------------------------------------------------------------------------------


def prepared(night: Night, number: int) -> list[UUID]:
    """Prepare halves that nobody decides."""
    with night.producer.begin() as connection:
        return [night.app.prepare(connection, "t", n, key="k", immunity=3600) for n in range(number)]


@pytest.mark.parametrize("parked", [False, True])
def test_undecided_is_checked(night: Night, many: int, parked: bool) -> None:
    """An undecided half is due for the next pass, also if it was parked."""
    ids = prepared(night, many)
    if parked:
        night.run_at_producer("UPDATE outbox.half_check SET parked_at = now(), reason = 'no verdict'")
    assert_repaired(night, Outcome.UNDECIDED, Repair.CHECK, ids)
    due = "SELECT count(*) FROM outbox.half_check WHERE next_check_at <= now() AND parked_at IS NULL"
    assert night.rows_at_producer(due) == [many]


def test_check_of_what_healed(night: Night) -> None:
    """What was decided meanwhile needs no check; what is due already gets one anyway."""

    committed, rolled_back, due, pruned = ids = prepared(night, 4)
    findings = night.found()
    night.app.operator.commit(committed, by="me", why="test")
    night.app.operator.rollback(rolled_back, by="me", why="test")
    night.run_at_producer("UPDATE outbox.half_check SET next_check_at = now() WHERE half_id = :id", id=due)
    for table, column in (("half_check", "half_id"), ("half_message", "id")):
        night.run_at_producer(f"DELETE FROM outbox.{table} WHERE {column} = :id", id=pruned)
    assert night.repair(findings) == {
        committed: "healed",
        rolled_back: "healed",
        due: "refused: a check is due already; is a worker running that has its checker?",
        pruned: "refused: the producer has no half message of it any more",
    }
    assert night.acts(Repair.CHECK) == []
    assert len(ids) == 4


# --- the whole -------------------------------------------------------------------------------------------


def test_what_the_policy_only_tells_of(night: Night) -> None:
    """Kinds that are only told of, and what is no difference, are left alone."""
    ids = night.consumed(1, 2)
    night.forget(ids[0])
    night.set_status("parked", ids[1])
    night.run("DELETE FROM ledger")
    findings = night.found()
    flight = [replace(finding, outcome=Outcome.IN_FLIGHT) for finding in findings]
    state = dump(night)
    quiet = night.job({Outcome.MISSING: Repair.ALERT})
    assert night.repair([*findings, *flight], quiet) == {}
    assert dump(night) == state


def test_the_results_are_told_batch_by_batch(night: Night, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each batch is told when it is committed: who writes that down loses one batch at most to a kill."""
    monkeypatch.setattr(package, "BATCH", 2)
    ids = night.consumed(*range(5))
    night.forget(*ids)
    told: list[tuple[int, int]] = []

    def listen(news: object) -> None:
        assert isinstance(news, list)
        told.append((len(news), sum(night.sends(*ids)) - len(ids)))

    results = repair(night.job(), PAIR, uuid7(), night.found(), night.producer, night.consumer, listen)
    assert told == [(2, 2), (2, 4), (1, 5)]
    assert [each.id for each in results] == sorted(ids)
    assert {type(each) for each in results} == {Repaired}


def test_a_bad_row_stops_no_other(night: Night) -> None:
    """A row that the database refuses to change is told with the reason; the others of its batch are repaired."""
    ids = night.consumed(*range(5))
    night.set_status("failed", *ids)
    night.run(f"""CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
                  IF new.message_id = '{ids[2]}' THEN RAISE 'not this one'; END IF; RETURN new; END $$""")
    night.run("CREATE TRIGGER refuse BEFORE UPDATE ON outbox.consumer_message FOR EACH ROW EXECUTE FUNCTION refuse()")
    results = night.repair()
    assert "not this one" in results.pop(ids[2])
    assert results == dict.fromkeys([*ids[:2], *ids[3:]], "done")


def test_every_kind_in_one_go(any_night: Night) -> None:
    """All that can be repaired is repaired by one call, each by its action; the next night is in sync."""
    missing, unrecorded, mismatch, parked, _ = ids = any_night.consumed(*range(5))
    any_night.forget(missing)
    any_night.forget(unrecorded, ledger=False)
    any_night.set_status("failed", mismatch)
    any_night.set_status("parked", parked)
    any_night.run("DELETE FROM ledger WHERE message_id = :id", id=parked)
    (undispatched,) = any_night.passed("lost")
    (undecided,) = prepared(any_night, 1)
    (withdrawn,) = any_night.send("withdrawn")
    any_night.compensate(withdrawn)
    repaired = any_night.repaired()
    assert {(each.id, each.action, each.result) for each in repaired} == {
        (missing, Repair.RESEND, "done"),
        (unrecorded, Repair.SYNC_STATUS, "done"),
        (mismatch, Repair.SYNC_STATUS, "done"),
        (parked, Repair.RETRY, "done"),
        (undispatched, Repair.DISPATCH, "done"),
        (undecided, Repair.CHECK, "done"),
        (withdrawn, Repair.SYNC_STATUS, "done"),
    }
    any_night.settle()
    assert any_night.kinds() == {Outcome.UNDECIDED: 1}
    assert any_night.status(*ids) == ["consumed"] * 5
    assert sorted(any_night.ledger()) == sorted([*map(str, range(5)), "lost"])
