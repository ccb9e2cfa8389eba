"""Halves about which no checker is asked, or asked in vain, or that are just old."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine, text

from outbox import Orphan, Outbox, Resolution, Settings
from outbox.check.asker import Asker
from outbox.check.check_pass import check_once
from outbox.database.engines import EngineRunner
from outbox.operator.health import inspections
from outbox.operator.health.rules import Severity
from tests.doctor.support import codes, examine, inspected, mend_by_command, sql, the
from tests.kit import dispatch_all


def prepare(outbox: Outbox, topic: str, count: int = 1, *, fenced: bool = False, **options: Any) -> list[UUID]:
    """Leave halves undecided."""
    engine: Any = outbox.engine
    with engine.begin() as connection:
        ids = [outbox.prepare(connection, topic, {}, **options) for _ in range(count)]
    if fenced:
        sql(engine, "UPDATE outbox.half_check SET fenced = true WHERE half_id = ANY (:ids)", ids=ids)
    return ids


def age(engine: Engine, ids: list[UUID], *, due: float, born: float | None = None) -> None:
    """Have a check be due for so many seconds, and a half be so old."""
    sql(engine, "UPDATE outbox.half_check SET next_check_at = now() - make_interval(secs => :due) "
                "WHERE half_id = ANY (:ids)", ids=ids, due=due)  # fmt: skip
    sql(engine, "UPDATE outbox.half_message SET born_at = now() - make_interval(secs => :born) "
                "WHERE id = ANY (:ids)", ids=ids, born=due + 6 if born is None else born)  # fmt: skip


def check(outbox: Outbox) -> None:
    """Run one pass of the check."""
    engine: Any = outbox.engine
    asker = Asker(lambda _: EngineRunner(engine), 1)
    with engine.connect() as connection:
        check_once(connection, outbox.settings, outbox.checkers, asker)
    asker.end()


def unknown(orphan: Orphan) -> Resolution:
    """Answer that the outcome isn't known."""
    return Resolution.UNKNOWN


# --- no checker is asked ---------------------------------------------------------------------------------


def test_never_asked(engine: Engine, outbox: Outbox) -> None:
    """From the data alone: halves due for more than two intervals, and no checker was ever asked about their topic."""
    ids = prepare(outbox, "payments", 3)
    prepare(outbox, "payments", immunity=3600)
    age(engine, ids, due=61)
    report = examine(engine)
    assert codes(report) == ["checker.missing"]
    finding = the(report, "checker.missing")
    assert (finding.details["topic"], finding.details["halves"], finding.details["certain"]) == ("payments", 3, False)
    assert "@outbox.checker('payments')" in finding.mend


def test_due_just_now(engine: Engine, outbox: Outbox) -> None:
    """A check that is due since one interval may be next."""
    age(engine, prepare(outbox, "payments"), due=45)
    assert codes(examine(engine)) == []
    assert codes(examine(engine, Settings(check_interval=10))) == ["checker.missing"]


def test_decision_by_hand_mends_it(engine: Engine, outbox: Outbox) -> None:
    """The command that the finding gives decides the half that it names."""
    age(engine, prepare(outbox, "pay|ments"), due=100)
    line = the(examine(engine), "checker.missing").mend.splitlines()[1]
    line = line.replace("commit|rollback", "rollback").replace("…", "test")
    assert mend_by_command(engine, line, "--yes").code == 0
    assert codes(examine(engine)) == []


def test_topic_that_was_asked_about(engine: Engine, outbox: Outbox) -> None:
    """Where a checker was asked about the topic there is one; then checks that wait mean that no worker checks."""
    ids = prepare(outbox, "payments", 4, immunity=0)
    outbox.checker("payments")(unknown)
    check(outbox)
    assert codes(examine(engine)) == []
    age(engine, ids[:2], due=500)
    report = examine(engine)
    assert codes(report) == ["check.late"]
    assert the(report, "check.late").details["halves"] == 2


def test_topic_of_which_others_were_asked_about(engine: Engine, outbox: Outbox) -> None:
    """A burst of new halves is late; that others of the topic were asked about shows that it has a checker."""
    prepare(outbox, "payments", immunity=0)
    outbox.checker("payments")(unknown)
    check(outbox)
    age(engine, prepare(outbox, "payments", 5), due=500)
    assert codes(examine(engine)) == ["check.late"]


def test_half_that_was_reset(engine: Engine, outbox: Outbox) -> None:
    """A counter that an operator set back hides nothing: the history shows that a checker was asked."""
    (half_id,) = prepare(outbox, "payments", immunity=0)
    outbox.checker("payments")(unknown)
    check(outbox)
    outbox.operator.reset(half_id, by="ann", why="again")
    age(engine, [half_id], due=500)
    assert codes(examine(engine)) == ["check.late"]


def test_application_without_the_checker(engine: Engine, outbox: Outbox) -> None:
    """With the application known it is certain, before anything is late; other topics aren't touched."""
    prepare(outbox, "payments", 2, immunity=3600)
    prepare(outbox, "stock", 2, immunity=3600)
    outbox.checker("stock")(unknown)
    report = examine(engine, outbox.settings, outbox.checkers, app="shop.messages:outbox")
    assert codes(report) == ["checker.missing"]
    finding = the(report, "checker.missing")
    assert (finding.details["topic"], finding.details["halves"], finding.details["certain"]) == ("payments", 2, True)
    assert "shop.messages:outbox registers no checker" in finding.sentence
    assert "outbox run --app shop.messages:outbox --roles check" in finding.mend


def test_application_with_the_checker(engine: Engine, outbox: Outbox) -> None:
    """A checker that is registered, and never asked: no worker runs."""
    age(engine, prepare(outbox, "payments", 2), due=500)
    outbox.checker("payments")(unknown)
    report = examine(engine, outbox.settings, outbox.checkers)
    assert codes(report) == ["check.late"]
    assert the(report, "check.late").mend == "outbox run --app MODULE:OBJECT --roles check"


def test_fenced_halves_need_no_checker(engine: Engine, outbox: Outbox) -> None:
    """What has a fence is decided without anybody being asked; when it is late, no worker checks."""
    ids = prepare(outbox, "stock", 2, fenced=True, immunity=3600)
    assert codes(examine(engine, outbox.settings, outbox.checkers)) == []
    age(engine, ids, due=500)
    for report in (examine(engine), examine(engine, outbox.settings, outbox.checkers)):
        assert codes(report) == ["check.late"]
    check(outbox)
    assert codes(examine(engine)) == []


def test_several_topics(engine: Engine, outbox: Outbox) -> None:
    """Each topic without a checker is a finding of its own, whatever the others have."""
    for topic in ("a", "b", "c"):
        age(engine, prepare(outbox, topic, 2), due=500)
    age(engine, prepare(outbox, "b", fenced=True), due=500)
    outbox.checker("c")(unknown)
    report = examine(engine, outbox.settings, outbox.checkers)
    assert codes(report) == ["check.late", "check.late", "checker.missing", "checker.missing"]
    late = [finding.details for finding in report.findings if finding.code == "check.late"]
    assert [(details["topic"], details["halves"]) for details in late] == [("b", 1), ("c", 2)]


def test_counting_stops(engine: Engine, outbox: Outbox) -> None:
    """A count that stopped at its limit is "at least" so many."""
    age(engine, prepare(outbox, "payments", 1001), due=500)
    assert "at least 1,000 undecided halves" in the(examine(engine), "checker.missing").sentence


# --- parked ----------------------------------------------------------------------------------------------


def test_parked(engine: Engine) -> None:
    """Parked halves are found by topic; those that are checked again by the mend's command are no finding any more."""
    outbox = Outbox(engine, settings=Settings(max_checks=1))
    outbox.checker("payments")(unknown)
    outbox.checker("stock")(unknown)
    ids = prepare(outbox, "payments", 2, immunity=0) + prepare(outbox, "stock", immunity=0)
    check(outbox)
    sql(engine, "UPDATE outbox.half_check SET parked_at = now() - interval '2 days' WHERE half_id = :id", id=ids[1])
    report = examine(engine)
    assert codes(report) == ["half.parked", "half.parked"]
    oldest, other = report.findings[:2] if report.findings[0].code == "half.parked" else report.findings[1:3]
    assert (oldest.details["topic"], oldest.details["halves"], oldest.details["half_id"]) == ("payments", 2, ids[1])
    assert "2d00h at the longest" in oldest.sentence
    look_at, again, _ = oldest.mend.splitlines()
    listed = mend_by_command(engine, look_at, "-o", "json")
    assert [row["id"] for row in listed.json["items"]] == sorted(map(str, ids[:2]))
    assert mend_by_command(engine, again.replace("…", "test"), "--yes").code == 0
    report = examine(engine)
    assert codes(report) == ["half.parked"]
    assert the(report, "half.parked").details["topic"] == other.details["topic"] == "stock"


def test_parked_halves_are_not_late(engine: Engine, outbox: Outbox) -> None:
    """What is parked waits for an operator: that no checker is asked, and that it is old, is no further finding."""
    ids = prepare(outbox, "payments")
    age(engine, ids, due=90_000)
    sql(engine, "UPDATE outbox.half_check SET parked_at = now(), reason = 'hunter2'")
    report = examine(engine)
    assert codes(report) == ["half.parked"]
    assert "hunter2" not in repr(report)
    assert codes(examine(engine, outbox.settings, {})) == ["half.parked"]


def test_more_than_are_inspected(engine: Engine, outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where only the oldest were inspected, the report says so."""

    monkeypatch.setattr(inspections, "PARKED_HALVES", 2)
    prepare(outbox, "payments", 3, immunity=3600)
    assert inspected(examine(engine), "parked halves").why == "only the oldest 2 undecided halves were inspected"


# --- sent, and never to go out -----------------------------------------------------------------------------


def test_trigger_that_did_not_run(engine: Engine, outbox: Outbox) -> None:
    """What was sent in SQL while triggers were switched off is found, and goes out by the decision of an operator."""
    with engine.begin() as connection:
        connection.execute(text("SELECT outbox.send('payments', '1'), outbox.prepare('payments', '1')"))
    assert codes(examine(engine)) == []
    with engine.begin() as connection:
        connection.execute(text("SET LOCAL session_replication_role = replica"))
        half_id = connection.scalar(text("SELECT outbox.send('payments', '1')"))
    report = examine(engine)
    assert codes(report) == ["half.unsent"]
    finding = the(report, "half.unsent")
    assert (finding.details["halves"], finding.details["half_id"]) == (1, half_id)
    assert "has no op: the trigger commit_half of half_message didn't run" in finding.sentence
    assert mend_by_command(engine, finding.mend.splitlines()[1], "--yes").code == 0
    assert codes(examine(engine)) == []


# --- torn ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tear", "how"),
    [
        ("DELETE FROM outbox.half_message WHERE id = :id", "is a message without a half message"),
        ("UPDATE outbox.op_message SET resolution = 'rollback' WHERE half_id = :id", "though it was rolled back"),
        ("DELETE FROM outbox.op_message WHERE half_id = :id", "though it is undecided"),
        ("UPDATE outbox.message SET topic = 'other' WHERE half_id = :id", "of another topic than its half message"),
        (
            "WITH m AS (DELETE FROM outbox.message WHERE half_id = :id), o AS (UPDATE outbox.op_message"
            " SET resolution = 'rollback' WHERE half_id = :id) DELETE FROM outbox.half_message WHERE id = :id",
            "is a rollback without a half message",
        ),
    ],
)
def test_rows_that_contradict_each_other(engine: Engine, outbox: Outbox, tear: str, how: str) -> None:
    """What was written or deleted behind the outbox is told, whichever row of a message it was."""
    with engine.begin() as connection:
        half_id = outbox.send(connection, "payments", "1")
    dispatch_all(engine)
    assert "message.torn" not in codes(examine(engine))
    with engine.begin() as connection:
        connection.execute(text(tear), {"id": half_id})
    finding = the(examine(engine), "message.torn")
    assert (finding.details["messages"], finding.details["half_id"]) == (1, half_id)
    assert how in finding.sentence


# --- old -------------------------------------------------------------------------------------------------


def test_old_and_never_checked(engine: Engine, outbox: Outbox) -> None:
    """A half that is older than three times all its checks could take, and was never checked."""
    (half_id,) = prepare(outbox, "payments")
    age(engine, [half_id], due=3600)
    report = examine(engine)
    assert codes(report) == ["checker.missing", "half.old"]
    finding = the(report, "half.old")
    assert finding.severity is Severity.PROBLEM
    assert (finding.details["half_id"], finding.details["checked"]) == (half_id, False)
    assert "was never checked, although its check was due 1h00m ago" in finding.sentence
    shown = mend_by_command(engine, finding.mend.splitlines()[0], "-o", "json")
    assert shown.json["id"] == str(half_id)


def test_old_and_asked_about(engine: Engine, outbox: Outbox) -> None:
    """One that is asked about in time, and again, is a note: it will find its verdict, or be parked."""
    (half_id,) = prepare(outbox, "payments", immunity=0)
    outbox.checker("payments")(unknown)
    check(outbox)
    age(engine, [half_id], due=-20, born=90_000)
    report = examine(engine)
    assert codes(report) == ["half.old"]
    finding = the(report, "half.old")
    assert finding.severity is Severity.NOTE
    assert "its checker was asked 1 times without a verdict" in finding.sentence


def test_old_and_still_running(engine: Engine, outbox: Outbox) -> None:
    """A fenced half whose transaction runs for a day is undecided for a day; the finding says that it still runs."""
    from outbox.check.sql import RUNNING

    (half_id,) = prepare(outbox, "stock", fenced=True)
    age(engine, [half_id], due=-20, born=90_000)
    sql(engine, "UPDATE outbox.half_check SET checked_at = now(), last_answer = 'unknown', last_error = :error",
        error=RUNNING)  # fmt: skip
    finding = the(examine(engine), "half.old")
    assert finding.severity is Severity.NOTE
    assert "its transaction still ran when it was checked last" in finding.sentence


def test_long_immunity_is_not_old(engine: Engine, outbox: Outbox) -> None:
    """A half that is left alone for a day, as its immunity says, is fine."""
    ids = prepare(outbox, "payments", immunity=86_400)
    age(engine, ids, due=-60, born=86_000)
    assert codes(examine(engine)) == []


def test_patience_is_that_of_the_checker(engine: Engine, outbox: Outbox) -> None:
    """What a checker's own rules allow is not old yet."""
    (half_id,) = prepare(outbox, "payments", immunity=0)
    outbox.checker("payments", interval=7200, max_checks=5)(unknown)
    check(outbox)
    age(engine, [half_id], due=-20, born=90_000)
    assert codes(examine(engine, outbox.settings, outbox.checkers)) == []
    assert codes(examine(engine)) == ["half.old"]


def test_oldest_of_many(engine: Engine, outbox: Outbox) -> None:
    """Only the oldest is found, by its age and not by its id."""
    ids = prepare(outbox, "payments", 5)
    age(engine, ids, due=5000)
    age(engine, [ids[3]], due=90_000)
    assert the(examine(engine), "half.old").details["half_id"] == ids[3]
