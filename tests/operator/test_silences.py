"""Silences of rules: what they cover, when they end, their audit, and where they are honoured."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine

from outbox import Settings
from outbox.acts.whole_acts import LIFT_SILENCE, SILENCE
from outbox.errors import ActRefused, DatabaseUnreached, InvalidRequest, NotFound, UnknownDatabase
from outbox.operator.databases import Databases
from outbox.operator.health.attention import folded
from outbox.operator.health.examine import examine
from outbox.operator.health.silences import LONGEST_SILENCE, Silences
from outbox.operator.model import AuditFilter, PageRequest
from outbox.operator.operator import Operator
from outbox.text import counted
from tests.operator.health import consume, dispatch, overview_of, report, send, sql

NewEngine = Callable[..., Engine]
WHY = "the provider moves"
#: What the finding of ``behind`` is about.
LIMITS: dict[str, Any] = {"topic": "paid", "group": "mail", "database": "bank"}
TOMORROW = dt.datetime.now(dt.UTC) + dt.timedelta(days=1)


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
        ({"topic": "paid@1"}, True),
        ({"group": "ledger"}, False),
        *(({name: of}, False) for name in ("topic", "group") for of in ("bank", "paid", "mail") if LIMITS[name] != of),
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
    kept.silence("group.unconsumed", 3600, by="ann", why=WHY, begins=TOMORROW)
    kept.silence("group.unconsumed", 3600, by="bob", why=WHY)
    kept.silence("group.unconsumed", 60, by="cyd", why=WHY)
    assert [(row.author, row.active) for row in kept.silences()] == [("cyd", True), ("ann", False)]
    sql(behind, "UPDATE outbox.silence SET begins_at = now() - interval '2 s', ends_at = now() WHERE author = 'cyd'")
    assert [row.author for row in kept.silences()] == ["ann"]
    assert not overview_of(bank=behind).findings[0].silenced
    sql(behind, "UPDATE outbox.silence SET begins_at = now() - interval '1 s' WHERE author = 'ann'")
    assert overview_of(bank=behind).findings[0].silenced


def test_only_what_overlaps_is_replaced(engine: Engine) -> None:
    """A silence of now, and one of a window's end, each of the same limits; other limits are another silence."""
    kept, window = silences(bank=engine), TOMORROW + dt.timedelta(hours=1)
    kept.silence("group.lag", 7200, by="ann", why=WHY, begins=TOMORROW)
    kept.silence("group.lag", 7200, by="bob", why=WHY)
    kept.silence("group.lag", 7200, by="cyd", why=WHY, begins=window, group="mail")
    assert [row.author for row in kept.silences()] == ["bob", "ann", "cyd"]
    kept.silence("group.lag", 7200, by="dan", why=WHY, begins=window)
    assert [row.author for row in kept.silences()] == ["bob", "cyd", "dan"]


def test_a_silence_is_kept_in_each_database_and_lifted_there(behind: Engine, new_engine: NewEngine) -> None:
    """It is one silence, from one moment to another, which any of them tells; it counts once when it is lifted."""
    both = {"shop": new_engine(), "bank": behind}
    kept = silences(**both)
    kept.silence("group.unconsumed", 3600, by="ann", why=WHY)
    rows = kept.silences()
    assert [row.database for row in rows] == ["shop", "bank"]
    assert len({(row.begins_at, row.ends_at) for row in rows}) == 1
    for engines in (both, {"bank": behind}):
        (finding,) = (each for each in overview_of("1h", **engines).findings if each.code == "group.unconsumed")
        assert finding.silenced
    assert kept.lift_silence("group.unconsumed", by="ann", **LIMITS) == "1 silence of rule group.unconsumed lifted"
    assert kept.silences() == []
    with pytest.raises(ActRefused, match="isn't silenced; see what is"):
        kept.lift_silence("group.unconsumed", by="ann")


def test_a_silence_of_a_database_is_kept_there(behind: Engine, new_engine: NewEngine) -> None:
    """By whatever name another operator registered it; it is none of another database."""
    shop = new_engine()
    silences(shop=shop, bank=behind).silence("group.unconsumed", 60, by="ann", why=WHY, database="bank")
    assert silences(shop=shop).silences() == []
    (row,) = silences(shop=shop, pay=behind).silences()
    assert (row.database, row.of_database) == ("pay", "pay")
    (finding,) = (each for each in overview_of(shop=shop, pay=behind).findings if each.code == "group.unconsumed")
    assert finding.silenced
    with pytest.raises(ActRefused, match="isn't silenced"):
        silences(shop=shop, pay=behind).lift_silence("group.unconsumed", by="ann", database="shop")
    silences(shop=shop, pay=behind).lift_silence("group.unconsumed", by="ann", database="pay")
    with pytest.raises(UnknownDatabase):
        silences(pay=behind).lift_silence("group.unconsumed", by="ann", database="bank")


def test_a_database_that_is_away_is_named(engine: Engine) -> None:
    """The others keep the silence; one that is limited to it can't be kept."""
    gone = create_engine("postgresql+psycopg://nobody@127.0.0.1:1/nothing")
    kept = Silences(Databases.open({"gone": gone, "bank": engine}, Settings(), partly=True))
    assert kept.silence("group.lag", 60, by="ann", why=WHY).endswith("; not in gone, which can't be reached")
    assert [row.database for row in silences(bank=engine).silences()] == ["bank"]
    with pytest.raises(DatabaseUnreached):
        kept.silence("group.lag", 60, by="ann", why=WHY, database="gone")
    assert kept.lift_silence("group.lag", by="ann") == (
        "1 silence of rule group.lag lifted; not in gone, which can't be reached"
    )


@pytest.mark.parametrize(
    ("limits", "left"),
    [
        ({}, ["later", "later mail"]),
        ({"planned": True}, []),
        ({"group": "mail"}, ["ledger", "later", "later mail"]),
        ({"group": "mail", "planned": True}, ["ledger", "later"]),
        ({"group": "ledger", "topic": "paid"}, ["mail", "later", "later mail"]),
        ({"group": "other"}, ["ledger", "mail", "later", "later mail"]),
    ],
)
def test_what_is_lifted(engine: Engine, limits: dict[str, Any], left: list[str]) -> None:
    """What silences now what has the limits; a window that hasn't begun only if it is asked for and has the limits."""
    kept = silences(bank=engine)
    for why, group, begins in (
        ("all", None, None),
        ("ledger", "ledger", None),
        ("mail", "mail", None),
        ("later", None, TOMORROW),
        ("later mail", "mail", TOMORROW + dt.timedelta(hours=1)),
    ):
        kept.silence("group.lag", 3600, by="ann", why=why, group=group, begins=begins)
    said = kept.lift_silence("group.lag", by="bob", **limits)
    assert [row.reason for row in kept.silences()] == left
    assert said == f"{counted(5 - len(left), 'silence')} of rule group.lag lifted"


def test_the_form_that_lifts_has_the_limits_of_its_finding() -> None:
    """Only its link gives them, as when it was silenced; the form asks for windows alone."""
    assert LIFT_SILENCE.linked == SILENCE.linked == tuple(LIMITS)
    asked = {each.name for each in fields(LIFT_SILENCE.fields)} - {*LIFT_SILENCE.linked}
    assert asked == {"planned"}


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
        with pytest.raises((InvalidRequest, NotFound), match=said):
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


@pytest.mark.parametrize("database", [None, "bank"])
def test_the_doctor_leaves_out_what_is_silenced(behind: Engine, new_engine: NewEngine, database: str | None) -> None:
    """It is healthy then, and still tells of it, whichever names the databases have where they were silenced."""
    sql(behind, "UPDATE outbox.worker SET seen_at = now() - interval '10 minutes'")
    before = examine(behind, Settings(), roles=["consumer"])
    codes = {each.code for each in before.findings if each.severity == "problem"}
    assert "worker.none" in codes
    both = {"shop": new_engine(), "bank": behind}
    for code in codes:
        silences(**both).silence(code, 60, by="ann", why=WHY, database="shop")
    assert not any(each.silenced for each in examine(behind, Settings(), roles=["consumer"]).findings)
    for code in codes:
        silences(**both).silence(code, 60, by="ann", why=WHY, database=database)
    after = examine(behind, Settings(), roles=["consumer"])
    assert (before.healthy, after.healthy) == (False, True)
    assert {each.code for each in after.findings if each.silenced} == codes
