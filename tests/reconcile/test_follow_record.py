"""The record of a follower: one run that doesn't grow, leased by one worker at a time; any other goes on from it."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, text

from outbox.errors import InvalidSettings, SourceLost
from outbox.operator.databases import Databases, open_database
from outbox.operator.model import PageRequest
from outbox.reconcile.follow import follower as following
from outbox.reconcile.follow.record import RUN_LASTS
from outbox.reconcile.job import Outcome, Repair, Window
from outbox.reconcile.pairing import recheck
from outbox.reconcile.record.views import Reconciliations, RunFilter
from outbox.reconcile.tables import InboxState
from tests.kit import python, wait_until
from tests.reconcile.following import NAME, Watched
from tests.reconcile.test_follow import consume
from tests.reconcile.town import HOUR, IN_SYNC, Town, fate, ids_at

Follow = Callable[..., Watched]
RUNS = "SELECT count(*) FROM outbox.reconciliation_run"
FINDINGS = "SELECT coalesce(result, 'open') FROM outbox.reconciliation_finding ORDER BY id"
MISSING = fate(status=InboxState.NONE)


def runs(town: Town) -> Reconciliations:
    """Return what operators see of runs."""
    return Reconciliations(Databases([open_database("consumer", town.consumer, town.settings)]))


def test_rows_dont_grow_with_the_passes(town: Town, follow: Follow) -> None:
    """However many passes: one run, and a finding for each difference."""
    town.plant([IN_SYNC] * 5 + [MISSING], ids=ids_at(HOUR, 6))
    watched = follow()

    for _ in range(5):
        watched.pass_()

    assert (town.rows(RUNS), town.rows(FINDINGS)) == ([1], ["open"])
    (run,) = runs(town).runs(RunFilter(), PageRequest()).items
    assert (run.state, run.schedule, run.differences, run.left) == ("running", NAME, 1, 1)
    assert run.counts == {"consumed": 5, "missing": 1}
    assert "state" not in (run.plan or {})


def test_a_restart_goes_on_where_it_was(town: Town, follow: Follow) -> None:
    """Another worker judges nothing twice, tells nothing twice, and tells what is gone of what the first one found."""
    ids = town.plant([IN_SYNC] * 5 + [MISSING], ids=ids_at(HOUR, 6))
    follow().pass_()
    consume(town, ids[5])
    second = follow()
    second.pass_()

    assert (second.found, second.gone) == ({}, {ids[5]: Outcome.MISSING})
    assert second.results[-1].judged == 1
    assert (town.rows(RUNS), town.rows(FINDINGS)) == ([1], ["healed"])


def test_two_workers_take_turns(town: Town, follow: Follow) -> None:
    """A pass that is leased isn't taken by another one, and what is found is told by one of the two."""
    town.plant([MISSING] * 3, ids=ids_at(HOUR, 3))
    first, second = follow(), follow()
    first.pass_()
    assert not second.follower(second.connection)  # none is due
    second.pass_()
    first.pass_()

    assert (len(first.found), len(second.found)) == (3, 0)
    assert town.rows(RUNS) == [1]


def test_a_pass_that_another_worker_has_leased_since_counts_nothing(
    town: Town, follow: Follow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that was frozen over a pass for longer than its lease writes nothing, and tells nothing."""
    town.plant([MISSING] * 3, ids=ids_at(HOUR, 3))
    first, second = follow(), follow()

    def frozen(*values: Any) -> Any:
        monkeypatch.setattr(following, "recheck", recheck)
        expire(town)
        second.pass_()
        return recheck(*values)

    monkeypatch.setattr(following, "recheck", frozen)
    first.pass_()

    assert (len(first.found), len(second.found), len(town.rows(FINDINGS))) == (0, 3, 3)
    first.pass_()
    assert (first.found, first.open) == ({}, {Outcome.MISSING: 3})


def expire(town: Town) -> None:
    """Have the lease of a pass end."""
    town.run("UPDATE {s}.reconciliation_run SET plan = plan - 'leased_until'")


def test_a_worker_that_is_killed_over_a_pass(town: Town, follow: Follow) -> None:
    """Another worker takes the same pass again, once the lease is over."""
    town.plant([IN_SYNC] * 5 + [MISSING], ids=ids_at(HOUR, 6))
    watched = follow()
    watched.follower(watched.connection)  # it has begun, and judged nothing
    waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'outbox.message'::regclass"
    with town.producer.begin() as connection:
        connection.execute(text("LOCK TABLE outbox.message IN ACCESS EXCLUSIVE MODE"))
        with python("tests.reconcile.follow_process", town.producer, town.consumer) as child:
            wait_until(lambda: connection.scalar(text(waiting)), "it is at its pass")
            child.kill()
            child.wait()
    assert not watched.pass_()
    expire(town)

    watched.pass_()

    assert list(watched.found.values()) == [Outcome.MISSING]
    assert (town.rows(RUNS), town.rows(FINDINGS)) == ([1], ["open"])


def test_after_a_day_another_run_goes_on(town: Town, follow: Follow) -> None:
    """What is open goes with it; what is gone stays with the run that has found it, and is pruned with that."""
    ids = town.plant([MISSING] * 3, ids=ids_at(HOUR, 3))
    watched = follow()
    watched.pass_()
    consume(town, ids[0])
    town.run("UPDATE {s}.reconciliation_run SET started_at = started_at - make_interval(secs => :age)", age=RUN_LASTS)

    watched.pass_()
    consume(town, ids[1])
    watched.pass_()

    live = "SELECT count(*) FROM outbox.reconciliation_run WHERE finished_at IS NULL AND plan ->> 'passes' <> ''"
    assert (town.rows(RUNS), town.rows(live)) == ([2], [1])
    per_run = """SELECT string_agg(coalesce(result, 'open'), ' ' ORDER BY coalesce(result, 'open'))
                   FROM outbox.reconciliation_run r JOIN outbox.reconciliation_finding f ON f.run_id = r.id
                  GROUP BY r.id ORDER BY r.finished_at NULLS LAST"""
    assert town.rows(per_run) == ["healed", "healed open"]
    assert set(watched.gone) == set(ids[:2])


def test_a_database_that_is_away_for_some_passes(town: Town, follow: Follow, monkeypatch: pytest.MonkeyPatch) -> None:
    """The passes fail; the first one after it is back takes up all that came meanwhile."""
    town.plant([IN_SYNC] * 5, ids=ids_at(HOUR, 5))
    watched = follow()
    watched.pass_()
    ids = town.plant([MISSING], ids=ids_at(HOUR / 2))
    for backend in watched.follower.backends:
        town.at_producer("SELECT pg_terminate_backend(:pid)", pid=backend)
    for _ in range(2):
        with monkeypatch.context() as away, pytest.raises(SourceLost):
            away.setattr("outbox.reconcile.follow.survey.engine_of", lambda access: gone(town))
            watched.pass_()

    watched.pass_()
    watched.later()
    watched.pass_()

    assert watched.found == {ids[0]: Outcome.MISSING}


def gone(town: Town) -> Engine:
    """Return an engine on a host where nothing listens."""
    return create_engine(town.producer.url.set(host="127.0.0.1", port=1, query={}))


def test_repairs_by_the_policy(town: Town, follow: Follow) -> None:
    """What is missing is sent again, once, and is gone when the consumer has it; what is parked is only told."""
    ids = town.plant([MISSING, fate(status=InboxState.PARKED)], ids=ids_at(HOUR, 2))
    watched = follow(apply=True)
    watched.pass_()
    watched.pass_()

    assert [(each.id, each.action, each.result) for result in watched.results for each in result.repaired] == [
        (ids[0], Repair.RESEND, "done")
    ]
    with town.producer.connect() as connection:
        assert connection.scalar(text("SELECT half_id FROM outbox.message WHERE send_number = 2")) == ids[0]
    assert sorted(town.rows(FINDINGS)) == ["done", "open"]
    assert (watched.gone, watched.open) == ({ids[0]: Outcome.MISSING}, {Outcome.PARKED: 1})


def test_repairs_of_a_worker_that_died_are_made_up_for(town: Town, follow: Follow) -> None:
    """What was found and not repaired is repaired by the next pass, whoever takes it."""
    town.plant([MISSING], ids=ids_at(HOUR))
    follow().pass_()
    second = follow(apply=True)

    second.pass_()

    assert [each.result for result in second.results for each in result.repaired] == ["done"]


def test_refused_where_a_run_has_an_end(town: Town) -> None:
    """What only a run does is refused, by its name."""
    job = town.job(window=Window(until=dt.datetime(2026, 1, 1, tzinfo=dt.UTC)))
    with pytest.raises(InvalidSettings, match=r"window\.until is of a run that ends"):
        following.check_followed(job)


def test_a_pass_that_takes_long_keeps_others_off(town: Town, follow: Follow, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as it gets on, its lease begins anew."""
    monkeypatch.setattr(following, "LEASE", 0.0)
    town.plant([MISSING] * 3, ids=ids_at(HOUR, 3))
    first, second = follow(), follow()

    def long(findings: Any, read_again: Any, done: Any) -> Any:
        monkeypatch.setattr(following, "recheck", recheck)
        expire(town)
        done(1)
        assert not second.pass_()
        return recheck(findings, read_again, done)

    monkeypatch.setattr(following, "recheck", long)
    first.pass_()

    assert (len(first.found), len(second.found)) == (3, 0)
