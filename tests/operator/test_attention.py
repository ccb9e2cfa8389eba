"""What needs an operator, by weight: causes with their consequences inside, topics with the heaviest backlog first."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Engine

from outbox.operator.backlog import BacklogFilter, backlogs
from outbox.operator.health.attention import FOLDS_OF_AWAY, FOLLOWS, by_weight, folded, weight_of
from outbox.operator.health.rules import RULES, Diagnosis, Severity
from tests.operator.health import consume, dispatch, handler, overview_of, report, run, sample, send, this_minute

NewEngine = Callable[..., Engine]


def finding(code: str, database: str = "bank", severity: Severity = Severity.PROBLEM, **details: Any) -> Diagnosis:
    """A finding of a rule."""
    return Diagnosis(code, severity, code, "mend it", details, database=database)


def shape(*findings: Diagnosis) -> list[tuple[str, list[str]]]:
    """The codes of the causes, each with those of its consequences."""
    return [(each.finding.code, [one.code for one in each.consequences]) for each in folded(findings)]


def test_each_rule_that_is_folded_is_one() -> None:
    """No name of a rule is written wrongly, and no cause follows from itself."""
    codes = {code.partition("/")[0] for code in RULES}
    assert {*FOLLOWS, *(code for each in FOLLOWS.values() for code in each), *FOLDS_OF_AWAY} <= codes
    for cause in FOLLOWS:
        seen: set[str] = set()
        further = {cause}
        while further:
            further = {code for each in further for code in FOLLOWS.get(each, ())} - seen
            seen |= further
        assert cause not in seen


@pytest.mark.parametrize(
    ("details", "weight"),
    [
        ({}, 1),
        ({"messages": 3}, 3),
        ({"messages": 3, "age": 20.0}, 60),
        ({"lag": 2, "behind": 7.0}, 14),
        ({"halves": 5, "overdue": 0.2}, 5),
        ({"differences": 2, "age": 10.0, "unexplained": "-4.50"}, 110),
    ],
)
def test_the_weight_is_messages_times_age_times_money(details: dict[str, Any], weight: float) -> None:
    """What isn't known counts as one, and an age under a second as one."""
    assert weight_of(finding("message.parked", **details)) == weight


def test_the_heaviest_comes_first() -> None:
    """What stops a database is before all, problems are before notes, however heavy these are."""
    stopped = finding("worker.none")
    small, big = (finding("message.parked", group=str(n), messages=n, age=60.0) for n in (1, 300))
    note = finding("group.lag", severity=Severity.NOTE, lag=10**6, age=3600.0)
    assert by_weight([note, small, stopped, big]) == [stopped, big, small, note]


def test_symptoms_stand_under_their_cause() -> None:
    """By database, topic and group; a chain of causes has one root, which is as heavy as all of it."""
    place: dict[str, Any] = {"topic": "paid", "group": "mail"}
    unconsumed = finding("group.unconsumed", lag=40, age=10.0, **place)
    backlog = finding("reconciliation.unconsumed", severity=Severity.NOTE, lag=39, age=5.0, **place)
    assert shape(backlog, unconsumed) == [("group.unconsumed", ["reconciliation.unconsumed"])]
    elsewhere = finding("group.unconsumed", "shop", lag=1, **place)
    (cause, other) = folded([backlog, unconsumed, finding("worker.none"), elsewhere])
    assert [one.code for one in cause.consequences] == ["group.unconsumed", "reconciliation.unconsumed"]
    assert (cause.messages, cause.weight, other.finding) == (79, 1 + 400 + 195, elsewhere)
    paused = finding("group.paused", severity=Severity.NOTE, age=9.0, **place)
    lagging = finding("group.lag", severity=Severity.NOTE, lag=7, topic="paid@2", group="mail")
    assert shape(lagging, paused) == [("group.paused", ["group.lag"])]
    assert shape(finding("group.lag", lag=7, topic="paid", group="ledger"), paused) == [
        ("group.lag", []),
        ("group.paused", []),
    ]


def test_a_database_that_is_away_is_one_entry() -> None:
    """What fails elsewhere with its error follows from it, and nothing that fails otherwise."""
    error = 'connection to server at "10.0.0.7", port 5432 failed: Connection refused'
    away = finding("database.unreachable", "shop", error=error)
    duty = finding("duty.failing", duty="consume", failures=4, error=f"OperationalError: {error}")
    asked = finding("delivery.unreachable", topic="paid", group="mail", passes=3, error=error)
    other = finding("duty.failing", duty="check", failures=4, error="KeyError: 'x'")
    found = {each.finding.code: each for each in folded([duty, other, asked, away])}
    assert [each.code for each in found["database.unreachable"].consequences] == [
        "duty.failing",
        "delivery.unreachable",
    ]
    assert found["duty.failing"].finding is other


def test_a_reconciliation_that_found_a_backlog(engine: Engine) -> None:
    """It is weighed as a lag, as a note, and stands under the group that no worker consumes for."""
    send(engine, 5)
    dispatch(engine)
    consume(engine, engine, limit=2)
    report(engine)
    run(engine, "2 hours", counts='{"consumed": 2, "unconsumed": 3}')
    (note,) = overview_of(bank=engine).findings
    assert (note.code, note.severity, note.details["lag"]) == ("reconciliation.unconsumed", "note", 3)
    report(engine, duties=["dispatch"])
    assert shape(*overview_of(bank=engine).findings) == [("group.unconsumed", ["reconciliation.unconsumed"])]


@pytest.mark.parametrize("apart", [False, True])
def test_how_fast_a_group_goes_and_how_long_it_waits(engine: Engine, new_engine: NewEngine, apart: bool) -> None:
    """Its rate, since when its first message waits, and when it has caught up; also over the border of a database."""
    minute = this_minute(engine)
    shop = new_engine() if apart else engine
    engines: dict[str, Any] = {"bank": engine} | ({"shop": shop} if apart else {})
    send(engine, 30)
    dispatch(engine)
    consume(shop, engine, limit=10)
    report(shop, handlers=[handler("consumer", "paid", "mail")])
    report(engine, handlers=[handler("consumer", "paid", "mail")])
    at = minute - dt.timedelta(minutes=2)
    for each in {engine, shop}:
        sample(each, at, {"paid": {"messages": 30}} if each is engine else {}, {"paid": {"mail": {"consumed": 4}}})
    (place,) = backlogs(overview_of(**engines), BacklogFilter())
    group = place.group
    assert group is not None
    assert (group.lag, place.stopped) == (20, False)
    assert group.oldest_lag is not None
    assert group.oldest_lag > 0
    assert group.rate is not None
    assert 0 < group.rate <= 3
    assert group.eta == pytest.approx(20 / group.rate * 60)
    report(shop, duties=["dispatch"])
    (place,) = backlogs(overview_of(**engines), BacklogFilter())
    assert place.stopped


def test_places_by_their_backlog(engine: Engine) -> None:
    """The heaviest first; selected by a part of a name of either, in any case, and by a database."""
    send(engine, 2, "few")
    send(engine, 9, "many")
    sent = overview_of(bank=engine)
    assert [row.topic.topic for row in sorted(backlogs(sent, BacklogFilter()), key=lambda row: row.order)] == [
        "many",
        "few",
    ]
    assert [row.topic.topic for row in backlogs(sent, BacklogFilter(q="MAN"))] == ["many"]
    assert backlogs(sent, BacklogFilter(q="mail")) == []
    assert backlogs(sent, BacklogFilter(database="elsewhere")) == []
