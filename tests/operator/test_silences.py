"""Silences of rules: what they cover, when they end, their audit, and where they are honoured."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Engine

from outbox import Settings
from outbox.errors import ActRefused, InvalidRequest
from outbox.operator.databases import Databases
from outbox.operator.health.attention import folded
from outbox.operator.health.examine import examine
from outbox.operator.health.silences import LONGEST_SILENCE, Silences
from outbox.operator.model import AuditFilter, PageRequest
from outbox.operator.operator import Operator
from tests.operator.health import consume, dispatch, overview_of, report, send, sql

NewEngine = Callable[..., Engine]
WHY = "the provider moves"


def silences(**engines: Engine) -> Silences:
    """The silences of these databases."""
    return Silences(Databases.open(engines, Settings()))


@pytest.fixture
def behind(engine: Engine) -> Engine:
    """A database in which group mail has a backlog, and no worker consumes for it."""
    send(engine, 5)
    dispatch(engine)
    consume(engine, engine, limit=2)
    report(engine, duties=["dispatch"])
    return engine


@pytest.mark.parametrize(
    ("limits", "covered"),
    [
        ({}, True),
        ({"topic": "paid"}, True),
        ({"topic": "paid", "group": "mail", "database": "bank"}, True),
        ({"topic": "sent"}, False),
        ({"group": "ledger"}, False),
    ],
)
def test_what_a_silence_covers(behind: Engine, limits: dict[str, Any], covered: bool) -> None:
    """A finding of its rule that has all of its limits; it is shown as silenced, last and no cause of attention."""
    (loud,) = overview_of(bank=behind).findings
    assert (loud.code, loud.silenced) == ("group.unconsumed", "")
    said = silences(bank=behind).silence("group.unconsumed", 7200, by="ann", why=WHY, **limits)
    assert said.startswith("rule group.unconsumed is silenced for 2h00m, until ")
    (finding,) = overview_of(bank=behind).findings
    assert bool(finding.silenced) is covered
    if covered:
        assert finding.silenced.startswith("until ")
        assert finding.silenced.endswith(f" UTC by ann: {WHY}")


def test_other_rules_are_told(behind: Engine) -> None:
    """And what is silenced comes last, however heavy it is."""
    sql(behind, "UPDATE outbox.worker SET seen_at = now() - interval '10 minutes'")
    silences(bank=behind).silence("worker.none", 60, by="ann", why=WHY)
    found = folded(overview_of(bank=behind).findings)
    assert [bool(each.finding.silenced) for each in found] == [True]
    silences(bank=behind).lift_silence("worker.none", by="ann")
    silences(bank=behind).silence("group.unconsumed", 60, by="ann", why=WHY)
    (cause, *_) = folded(overview_of(bank=behind).findings)
    assert (cause.finding.code, cause.finding.silenced) == ("worker.none", "")


def test_a_silence_ends_and_a_window_begins(behind: Engine) -> None:
    """By the database's clock; a window that is still to come silences nothing; what has ended is forgotten."""
    kept = silences(bank=behind)
    tomorrow = dt.datetime.now(dt.UTC) + dt.timedelta(days=1)
    kept.silence("group.unconsumed", 3600, by="ann", why=WHY, begins=tomorrow, topic="paid")
    kept.silence("group.unconsumed", 3600, by="bob", why=WHY)
    kept.silence("group.unconsumed", 60, by="cyd", why=WHY)
    assert [(row.author, row.active) for row in kept.silences()] == [("cyd", True), ("ann", False)]
    sql(behind, "UPDATE outbox.silence SET begins_at = now() - interval '2 s', ends_at = now() WHERE author = 'cyd'")
    assert [row.author for row in kept.silences()] == ["ann"]
    assert not overview_of(bank=behind).findings[0].silenced
    sql(behind, "UPDATE outbox.silence SET begins_at = now() - interval '1 s' WHERE author = 'ann'")
    assert overview_of(bank=behind).findings[0].silenced


def test_a_silence_is_kept_in_one_database_and_counts_for_all(behind: Engine, new_engine: NewEngine) -> None:
    """Also for a database whose own tables say nothing of it; it is lifted wherever it is."""
    shop = new_engine()
    silences(shop=shop, bank=behind).silence("group.unconsumed", 60, by="ann", why=WHY)
    assert [row.database for row in silences(shop=shop, bank=behind).silences()] == ["shop"]
    (finding,) = (each for each in overview_of(shop=shop, bank=behind).findings if each.code == "group.unconsumed")
    assert finding.silenced
    assert "any more" in silences(shop=shop, bank=behind).lift_silence("group.unconsumed", by="ann")
    with pytest.raises(ActRefused, match="isn't silenced; see what is"):
        silences(shop=shop, bank=behind).lift_silence("group.unconsumed", by="ann")


def test_what_is_no_silence(engine: Engine) -> None:
    """No such rule, no reason, no length, one too long, a moment without a zone, a window that is over."""
    kept, past = silences(bank=engine), dt.datetime(2020, 1, 1, tzinfo=dt.UTC)
    for rule, lasts, why, begins, said in (
        ("group.uncomsumed", 60.0, WHY, None, "there is no rule 'group.uncomsumed'"),
        ("group.lag", 60.0, "", None, "reason"),
        ("group.lag", 0.0, WHY, None, "must be more than 0"),
        ("group.lag", LONGEST_SILENCE + 1, WHY, None, "at most"),
        ("group.lag", 60.0, WHY, past.replace(tzinfo=None), "time zone"),
    ):
        with pytest.raises(InvalidRequest, match=said):
            kept.silence(rule, lasts, by="ann", why=why, begins=begins)
    with pytest.raises(ActRefused, match="would have ended"):
        kept.silence("group.lag", 60, by="ann", why=WHY, begins=past)
    assert kept.silences() == []


def test_it_is_in_the_audit(engine: Engine) -> None:
    """The act, its limits and its end; and that it was lifted."""
    operator = Operator.open({"bank": engine}, Settings())
    operator.silence("group.lag", 60, by="ann", why=WHY, group="mail")
    operator.lift_silence("group.lag", by="bob", why="it has moved")
    lifted, begun = operator.audit(AuditFilter(), PageRequest()).items
    assert (begun.actor, begun.action, begun.target, begun.reason) == ("ann", "silence", "group.lag", WHY)
    assert begun.result["group"] == "mail"
    assert dt.datetime.fromisoformat(begun.result["until"]).tzinfo is not None
    assert (lifted.actor, lifted.action, lifted.result) == ("bob", "lift_silence", {"lifted": 1})


def test_the_doctor_leaves_out_what_is_silenced(behind: Engine) -> None:
    """It is healthy then, and still tells of it."""
    sql(behind, "UPDATE outbox.worker SET seen_at = now() - interval '10 minutes'")
    before = examine(behind, Settings(), roles=["consumer"])
    codes = {each.code for each in before.findings if each.severity == "problem"}
    assert "worker.none" in codes
    for code in codes:
        silences(bank=behind).silence(code, 60, by="ann", why=WHY)
    after = examine(behind, Settings(), roles=["consumer"])
    assert (before.healthy, after.healthy) == (False, True)
    assert {each.code for each in after.findings if each.silenced} == codes
