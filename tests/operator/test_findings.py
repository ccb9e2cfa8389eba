"""Problems: what needs a human is said in a sentence, with the page on which it is seen."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine

from outbox import Outbox, Park, Retry, Settings
from outbox.operator.health.rules import IN_ORDER
from tests.operator.health import (
    DUTIES,
    consume,
    dispatch,
    findings,
    handler,
    overview_of,
    report,
    run,
    sample,
    send,
    sql,
    this_minute,
)

NewEngine = Callable[..., Engine]

PREPARED = Settings(immunity=0.0)


def prepare(engine: Engine, topic: str = "paid") -> UUID:
    """Prepare a half that is an orphan at once."""
    with engine.begin() as connection:
        return Outbox(engine, settings=PREPARED).prepare(connection, topic, "body")


def test_all_is_well(engine: Engine) -> None:
    """Messages that are sent, dispatched and consumed while a worker lives are no problem."""
    send(engine, 3)
    dispatch(engine)
    consume(engine, engine)
    report(engine, handlers=[handler("consumer", "paid", "mail")])
    assert overview_of(bank=engine).findings == []


def test_no_worker_is_alive(engine: Engine) -> None:
    """A database without a living worker; one that died is reported for a while, also beside others."""
    (problem,) = overview_of(bank=engine).findings
    assert (problem.severity, problem.page, problem.query) == ("problem", "handlers", {"database": "bank"})
    assert problem.sentence == (
        "No worker is alive in database 'bank': nothing is dispatched, checked or pruned and consumed there."
    )
    report(engine)
    assert overview_of(bank=engine).findings == []
    sql(engine, "UPDATE outbox.worker SET seen_at = seen_at - interval '31 seconds'")
    assert "seen 31" in overview_of(bank=engine).findings[0].sentence
    report(engine, number=2)
    (problem,) = overview_of(bank=engine).findings
    assert (problem.severity, "Worker host:1 was last seen 31" in problem.sentence) == ("note", True)
    sql(engine, "UPDATE outbox.worker SET seen_at = seen_at - interval '1 hour' WHERE name = 'host:1'")
    assert overview_of(bank=engine).findings == []


def test_a_duty_that_fails(engine: Engine) -> None:
    """Of a living worker, with its last error."""
    report(engine, health={"failures": 2, "last_error": "OperationalError: gone"})
    problems = findings(overview_of(bank=engine), "in a row")
    assert len(problems) == len(DUTIES)
    assert problems[0].sentence.endswith("of worker host:1 has failed 2 times in a row: OperationalError: gone")


def test_what_no_worker_does(engine: Engine) -> None:
    """Workers are alive, but none of them dispatches, checks, or carries bulk jobs out."""
    report(engine, duties=["prune"])
    prepare(engine)
    sql(
        engine,
        "INSERT INTO outbox.bulk_job (id, action, requested_by, reason, selector, total, created_at) "
        "VALUES (gen_random_uuid(), 'resend', 'ann', 'why', '{}', 1, now() - interval '1 minute')",
    )
    found = overview_of(bank=engine)
    assert [len(findings(found, word)) for word in ("dispatches", "checks undecided", "role bulk")] == [1, 1, 1]
    assert findings(found, "bulk")[0].page == "bulk-jobs"


def test_dead_letters(engine: Engine) -> None:
    """Parked messages are found by topic and group."""
    report(engine, handlers=[handler("consumer", "paid", "mail")])
    send(engine, 3)
    dispatch(engine)
    consume(engine, engine, [Park("no"), Park("no")])
    (problem,) = overview_of(bank=engine).findings
    assert problem.sentence.startswith("2 messages of topic 'paid' are parked in group 'mail', the oldest of them (")
    assert (problem.page, problem.query) == ("dead", {"database": "bank", "group": "mail", "topic": "paid"})


def test_overdue_retries(engine: Engine) -> None:
    """A retry that should have been made minutes ago."""
    report(engine)
    send(engine, 1)
    dispatch(engine)
    consume(engine, engine, [Retry()])
    assert overview_of(bank=engine).findings == []
    sql(engine, "UPDATE outbox.consumer_message SET next_attempt_at = now() - interval '6 minutes'")
    (problem,) = overview_of(bank=engine).findings
    assert (problem.page, problem.query["status"], "overdue" in problem.sentence) == ("inbox", "failed", True)


def test_halves(engine: Engine) -> None:
    """Parked ones, and orphans that no living worker could ask about; fenced ones need no checker."""
    report(engine)
    prepare(engine)
    half, fenced = prepare(engine, "order"), prepare(engine, "fenced")
    sql(engine, "UPDATE outbox.half_check SET parked_at = now(), reason = 'x' WHERE half_id = :id", id=half)
    sql(engine, "UPDATE outbox.half_check SET fenced = true WHERE half_id = :id", id=fenced)
    unasked, parked = sorted(overview_of(bank=engine).findings, key=lambda problem: problem.query["status"])
    assert unasked.sentence.startswith("1 undecided half of topic 'paid', such as ")
    assert parked.sentence.startswith("1 half is parked in topic 'order'")
    assert {unasked.page, parked.page} == {"halves"}
    report(engine, handlers=[handler("checker", "paid")])
    (finding,) = overview_of(bank=engine).findings
    assert (finding.code, finding.query) == (parked.code, parked.query)
    sql(engine, "UPDATE outbox.half_check SET next_check_at = now() - interval '1 hour'")
    assert findings(overview_of(bank=engine), "can't keep up")


def test_what_comes_late(engine: Engine) -> None:
    """Committed and not dispatched for a minute; scheduled and not released."""
    report(engine)
    send(engine, 1, delay=3600)
    dispatch(engine)
    send(engine, 2)
    assert overview_of(bank=engine).findings == []
    sql(engine, "UPDATE outbox.op_message SET decided_at = decided_at - interval '2 minutes'")
    sql(engine, "UPDATE outbox.scheduled_message SET deliver_at = now() - interval '2 minutes'")
    late, unreleased = overview_of(bank=engine).findings
    assert (late.page, late.query["status"]) == ("messages", "committed")
    assert late.sentence.startswith("2 messages of topic 'paid', committed 2m")
    assert unreleased.page == "scheduled"


@pytest.mark.parametrize("apart", [False, True])
def test_a_group_that_falls_behind(engine: Engine, new_engine: NewEngine, apart: bool) -> None:
    """A lag that no worker works off, or that only grew in the last minutes, also over the border of a database."""
    minute = this_minute(engine)  # before a report writes the row of its own minute, which may be a later one
    shop = new_engine() if apart else engine
    engines: dict[str, Any] = {"bank": engine} | ({"shop": shop} if apart else {})
    send(engine, 1200)
    dispatch(engine)
    consume(shop, engine, limit=10)
    report(engine)
    report(shop, duties=["dispatch"])
    (problem,) = overview_of(**engines).findings
    assert (
        problem.sentence == "Group 'mail' is 1,190 messages behind in topic 'paid': no living worker consumes for it."
    )
    report(shop)
    assert overview_of(**engines).findings == []
    for back in range(1, 6):
        at = minute - dt.timedelta(minutes=back)
        group = {"consumed": 10} | ({} if apart else {"lag": 1190 - back})
        if apart:
            sample(engine, at, {"paid": {"messages": 1200 - back}})
            sample(shop, at, {}, {"paid": {"mail": group}})
        else:
            sample(engine, at, {}, {"paid": {"mail": group}})
    (problem,) = overview_of(**engines).findings
    assert (problem.severity, problem.page) == ("note", "messages")
    assert problem.sentence.endswith(": 4 more than some minutes ago.")


def test_reconciliations(engine: Engine) -> None:
    """The last one counts: what it found, why it failed, or that there was none for days although one is declared."""
    send(engine, 1)
    dispatch(engine)
    consume(engine, engine)
    report(engine)
    run(engine, "3 days", counts='{"consumed": 5, "missing": 2, "digest_mismatch": 1}')
    (problem,) = overview_of(bank=engine).findings
    assert problem.sentence.startswith(
        "The last reconciliation of topic 'paid' with group 'mail' found 3 differences 3d00h ago"
    )
    run(engine, "70 hours", counts='{"missing": 1}', applied=True)
    (problem,) = overview_of(bank=engine).findings
    assert (problem.severity, "1 difference" in problem.sentence) == ("note", True)
    run(engine, "60 hours", counts='{"consumed": 5}')
    assert overview_of(bank=engine).findings == []
    report(engine, handlers=[handler("reconciliation", "")])
    assert "has come to a result for 2d12h" in overview_of(bank=engine).findings[0].sentence
    run(engine, error="SourceError: gone")
    assert "failed" in overview_of(bank=engine).findings[0].sentence


def test_what_a_reconciliation_counts() -> None:
    """What isn't a difference has the names that the reconciliation uses."""
    from outbox.reconcile.job import Outcome

    assert {outcome.label for outcome in Outcome if not outcome.differs} == IN_ORDER
