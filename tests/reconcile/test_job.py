"""A job from end to end: several pairs, its record, and what it leaves alone."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine, create_engine

from outbox import Settings
from outbox.embedded import ServerLike
from outbox.errors import InvalidMessage, InvalidSettings, SchemaMissing, SourceError
from outbox.reconcile import run as jobs
from outbox.reconcile.job import Access, Effect, Job, Outcome, Pair, Tier, Window
from outbox.reconcile.run import reconcile
from outbox.reconcile.tables import InboxState
from tests.reconcile.town import IN_SYNC, PAIR, Progress, Town, fate, kinds

MISSING = fate(status=InboxState.NONE)
RUNS = "SELECT topic, consumer_group, counts, error, finished_at IS NOT NULL FROM outbox.reconciliation_run ORDER BY id"


def test_several_pairs_of_one_run(town: Town) -> None:
    """Each pair has a result, a run and findings of its own, in the order in which it was declared."""
    (mine,) = town.plant([MISSING])
    (other,) = town.plant([fate(status=InboxState.PARKED)], topic="u")
    town.plant([IN_SYNC], topic="v")

    result = reconcile(town.job(Pair("u", "g"), Pair("t", "g"), Pair("v", "g")))

    assert [kinds(pair) for pair in result.pairs] == [{other: Outcome.PARKED}, {mine: Outcome.MISSING}, {}]
    assert [pair.in_sync for pair in result.pairs] == [False, False, True]
    assert not result.in_sync
    assert sorted(town.rows(RUNS)) == [
        ("t", "g", {"missing": 1}, None, True),
        ("u", "g", {"parked": 1}, None, True),
        ("v", "g", {"consumed": 1}, None, True),
    ]
    assert len(set(town.rows("SELECT job_id FROM outbox.reconciliation_run"))) == 1
    found = town.rows(
        "SELECT run_id, message_id, kind, action, result FROM outbox.reconciliation_finding ORDER BY kind"
    )
    assert found == [
        (result.pairs[1].run_id, mine, "missing", "resend", None),
        (result.pairs[0].run_id, other, "parked", "alert", None),
    ]


def test_a_run_is_recorded_with_its_window_plan_and_findings(town: Town) -> None:
    """Window, plan and counts are in the run; each finding says what both sides know, and what is to be done."""
    ids = town.plant([MISSING, fate(same_body=False), IN_SYNC])
    since = dt.datetime(2020, 1, 1, tzinfo=dt.UTC)
    result = town.reconcile(tier=Tier.DIGEST, window=Window(since, grace=60.0))

    ((start, end, applied, plan),) = town.rows(
        "SELECT window_start, window_end, applied, plan FROM outbox.reconciliation_run"
    )
    assert (start, end, applied) == (since, None, False)
    assert (plan["tier"], plan["engine"], plan["rows_read"]) == ("digest", "local", result.plan.rows_read)
    assert plan["why"] == list(result.plan.why)
    details = dict(town.rows("SELECT message_id, detail FROM outbox.reconciliation_finding"))
    assert details.keys() == set(ids[:2])
    assert (details[ids[0]]["state"], details[ids[0]]["sends"]) == ("dispatched", 1)
    assert "status" not in details[ids[0]]
    assert details[ids[1]]["status"] == "consumed"
    assert not any("digest" in name for detail in details.values() for name in detail)


def test_without_a_record_nothing_is_written_anywhere(town: Town) -> None:
    """Both databases may be read only, if nothing is to be recorded; else the producer's may."""
    town.plant([MISSING])
    for engine in (town.producer, town.consumer):
        _set(engine, "default_transaction_read_only", "on")
    for tier in (Tier.FULL, Tier.DIGEST):
        assert not town.reconcile(tier=tier, record=False).in_sync
    _set(town.consumer, "default_transaction_read_only", "off")
    assert not town.reconcile(tier=Tier.DIGEST).in_sync


def _set(engine: Engine, name: str, value: str) -> None:
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql("SET default_transaction_read_only = off")
        connection.exec_driver_sql(f"ALTER DATABASE {engine.url.database} SET {name} = {value}")
        connection.invalidate()


def test_thousands_of_findings_are_recorded_once_each(town: Town) -> None:
    """Findings are written in batches, none of them twice."""
    ids = town.plant([MISSING] * 4500)
    town.reconcile()
    recorded = town.rows("SELECT message_id FROM outbox.reconciliation_finding")
    assert len(recorded) == 4500
    assert set(recorded) == set(ids)


def test_what_cannot_be_read_is_recorded(town: Town) -> None:
    """A business table that isn't there fails the run: the error names it, and so does the record."""
    town.plant([IN_SYNC])
    pair = replace(PAIR, effect=Effect("no_such_table"))
    for tier in (Tier.FULL, Tier.DIGEST):
        with pytest.raises(SourceError, match="no_such_table"):
            town.reconcile(pair, tier=tier)
    runs = town.rows(RUNS)
    assert [run[4] for run in runs] == [True, True]
    assert all("no_such_table" in run[3] for run in runs)


def test_a_pair_that_fails_leaves_the_record_of_another_as_it_is(town: Town, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a job found out before it failed is in the record."""
    (missing,) = town.plant([MISSING])
    town.plant([MISSING], topic="u")
    from outbox.reconcile.repair import repair as real

    def fail(job: Job, pair: Pair, *rest: Any) -> Any:
        if pair.topic == "u":
            raise SourceError("the second one")
        return real(job, pair, *rest)

    monkeypatch.setattr(jobs, "repair", fail)
    with pytest.raises(SourceError, match="the second one"):
        reconcile(town.job(Pair("t", "g"), Pair("u", "g"), apply=True))

    runs = {run[0]: run[1:] for run in town.rows(RUNS)}
    assert runs["t"] == ("g", {"missing": 1}, None, True)
    assert "the second one" in runs["u"][2]
    assert town.rows("SELECT message_id, result FROM outbox.reconciliation_finding WHERE result IS NOT NULL") == [
        (missing, "done")
    ]


def test_an_error_of_the_callers_own_ends_the_run(town: Town) -> None:
    """What somebody who is told raises, Ctrl-C above all, ends the job, and the record says so."""

    def interrupt(title: str) -> None:
        raise KeyboardInterrupt

    town.plant([IN_SYNC])
    with pytest.raises(KeyboardInterrupt):
        town.reconcile(progress=Progress(interrupt))
    ((_, _, _, error, finished),) = town.rows(RUNS)
    assert finished
    assert error == "interrupted"
    with town.producer.connect() as connection:
        idle = "SELECT count(*) FROM pg_stat_activity WHERE starts_with(state, 'idle in transaction') AND datname = %s"
        assert connection.exec_driver_sql(idle, (town.producer.url.database,)).scalar_one() == 0


@pytest.mark.parametrize("side", ["producer", "consumer"])
def test_a_database_without_tables_is_named(
    town: Town, server: ServerLike, side: str, new_database: Callable[[], str]
) -> None:
    """A side that isn't migrated is told as that, with the mend, whichever it is."""
    bare = create_engine(new_database())
    with bare.begin() as connection:
        connection.exec_driver_sql("DROP SCHEMA outbox CASCADE")
    bare.dispose()
    access = Access(bare.url.render_as_string(hide_password=False), Settings())
    with pytest.raises(SchemaMissing, match="outbox db upgrade"):
        reconcile(replace(town.job(), producer=access) if side == "producer" else replace(town.job(), consumer=access))


def test_a_job_that_makes_no_sense_is_refused() -> None:
    """No pair, one twice, numbers below what they may be; names that aren't: refused before anything is read."""
    access = Access("postgresql+psycopg://h/d", Settings())

    def job(*pairs: Pair, **options: Any) -> Job:
        return Job(access, access, pairs, **options)

    refusals: list[tuple[Callable[[], object], str]] = [
        (job, "nothing to reconcile"),
        (lambda: job(PAIR, replace(PAIR, tags=frozenset("a"))), "named twice"),
        (lambda: job(PAIR, keep_for=-1), "keep_for"),
        (lambda: job(PAIR, workers=0), "workers"),
        (lambda: Window(grace=-1), "grace"),
        (lambda: Window(dt.datetime(2020, 1, 1)), "a time with a zone"),  # noqa: DTZ001 - that is the mistake
        (lambda: Window(dt.datetime(2020, 1, 2, tzinfo=dt.UTC), dt.datetime(2020, 1, 1, tzinfo=dt.UTC)), "before"),
        (lambda: job(PAIR, max_resends=-1), "max_resends"),
        (lambda: Effect("a; DROP TABLE b"), "plain name"),
        (lambda: Effect("a.b.c"), "plain name"),
        (lambda: Effect("a", 'b"'), "plain name"),
    ]
    for refused, match in refusals:
        with pytest.raises(InvalidSettings, match=match):
            refused()
    with pytest.raises(InvalidMessage):
        Pair("", "g")


def test_an_effect_in_a_schema_of_its_own(town: Town) -> None:
    """The business table may be in any schema, under names that SQL would take for something else."""
    town.run('CREATE SCHEMA "Books"')
    town.run('CREATE TABLE "Books"."order" ("User" uuid)')
    ids = town.plant([IN_SYNC, IN_SYNC])
    town.run('INSERT INTO "Books"."order" VALUES (:id), (NULL), (:foreign)', id=ids[0], foreign=UUID(int=5))
    pair = replace(PAIR, effect=Effect("Books.order", "User"))
    for tier in (Tier.FULL, Tier.DIGEST):
        assert kinds(town.reconcile(pair, tier=tier)) == {ids[1]: Outcome.NO_EFFECT}
