"""The reconciliation that follows the log, as a duty of workers: found, told, repaired, by one worker at a time."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import text

from outbox.errors import ActRefused, InvalidSettings
from outbox.operator.databases import Databases
from outbox.operator.health.stats import stats
from outbox.operator.model import PageRequest
from outbox.reconcile.follow.follower import PassResult
from outbox.reconcile.job import Outcome
from outbox.reconcile.record.orders import ReconciliationOrders
from outbox.reconcile.record.views import RunFilter
from outbox.worker import Worker
from tests.kit import wait_until
from tests.worker.conftest import Bench

NewBench = Callable[..., Bench]
LIVE = "SELECT plan ->> 'passes' FROM outbox.reconciliation_run WHERE finished_at IS NULL"
OPEN = "SELECT kind FROM outbox.reconciliation_finding WHERE result IS NULL"


def declare(bench: Bench, **job: Any) -> list[PassResult]:
    """Declare a group and what follows it, each tenth of a second; return the list to which its results come."""
    bench.outbox.consumer("paid", group="mail")(bench.handle)
    results: list[PassResult] = []
    job = {"window": {"grace": 0.5}, **job}
    bench.outbox.reconciliation("live", follows=0.1, job=job, report=results.append)
    return results


def begun(bench: Bench) -> Worker:
    """Start a worker that follows, and consumes; wait until it has begun."""
    worker = bench.work(roles=["dispatch", "consume", "reconcile"])
    wait_until(lambda: bench.rows(LIVE), "it has begun")
    return worker


def forget(bench: Bench) -> None:
    """Delete the inbox."""
    with bench.observer.begin() as connection:
        connection.execute(text("DELETE FROM outbox.consumer_message"))


def test_a_worker_tells_what_differs_and_what_is_gone(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """Each is one record, with the ids; the statistics have the number, and the run is that of the schedule."""
    caplog.set_level(logging.INFO, "outbox.worker")
    declare(bench)
    begun(bench)
    (sent,) = bench.send()
    wait_until(bench.effects, "it is consumed")
    forget(bench)
    wait_until(lambda: bench.rows(OPEN) == ["missing"], "it is found")
    wait_until(lambda: told(caplog, "reconcile.differences_found"), "it is told")
    (found,) = told(caplog, "reconcile.differences_found")
    assert (found.kind, found.number, found.message_ids) == ("missing", 1, [str(sent)])  # type: ignore[attr-defined]
    with bench.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        (group,) = stats(connection, bench.outbox.settings, ["consumer"]).groups
    assert group.differences == 1
    assert group.unfollowed is not None

    bench.outbox.operator.resend(sent, by="me", why="test")

    wait_until(lambda: told(caplog, "reconcile.differences_gone"), "it is gone, and told")
    assert len(told(caplog, "reconcile.differences_found")) == 1


def told(caplog: pytest.LogCaptureFixture, code: str) -> list[logging.LogRecord]:
    """Return the records of an event."""
    return [record for record in caplog.records if getattr(record, "outbox_event", "") == code]


def test_repairs_by_the_policy(bench: Bench) -> None:
    """What is missing is sent again and consumed again, and nothing is left."""
    results = declare(bench, apply=True)
    begun(bench)
    (sent,) = bench.send()
    wait_until(bench.effects, "it is consumed")
    forget(bench)

    wait_until(lambda: len(bench.effects()) == 2, "it is consumed again")
    wait_until(lambda: any(sent in result.gone for result in results), "it is gone")
    assert bench.rows("SELECT actor FROM outbox.audit WHERE action = 'resend'") == ["reconciliation live"]


def test_workers_share_the_passes(new_bench: NewBench, url: str) -> None:
    """Two workers that follow have one run between them, and tell what is found once."""
    benches = [new_bench(url), new_bench(url)]
    results = [declare(bench) for bench in benches]
    workers = [begun(bench) for bench in benches]
    benches[0].send(count=3)
    wait_until(lambda: len(benches[0].effects()) == 3, "they are consumed")
    forget(benches[0])
    wait_until(lambda: len(benches[0].rows(OPEN)) == 3, "they are found")
    for worker in workers:
        assert worker.stop()
    assert sum(len(each.found) for of_worker in results for each in of_worker) == 3
    assert len(benches[0].rows("SELECT id FROM outbox.reconciliation_run")) == 1


def test_nothing_is_told_while_messages_come_and_go(bench: Bench) -> None:
    """Under way, consumed, sent in bursts: nothing differs, and all is judged."""
    results = declare(bench)
    begun(bench)
    for _ in range(5):
        bench.send(count=20)
        before = len(results)
        wait_until(lambda n=before: len(results) > n, "a pass has ended")  # type: ignore[misc]
    wait_until(lambda: sum(result.judged for result in results) >= 100, "all is judged")
    assert [each for result in results for each in result.found] == []
    assert all(kind is Outcome.UNCONSUMED for result in results for kind in result.open)


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"follows": True, "every": 60}, "one of at, cron, every and follows"),
        ({"follows": 0}, "must be greater than 0"),
    ],
)
def test_refused_where_it_is_declared(bench: Bench, options: dict[str, Any], hint: str) -> None:
    """A timetable beside it, or no interval, is refused at once."""
    with pytest.raises(InvalidSettings, match=re.escape(hint)):
        bench.outbox.reconciliation("live", **options)


def test_refused_when_the_worker_starts(bench: Bench) -> None:
    """What only a run does is refused at the start."""
    declare(bench, engine="spark")
    with pytest.raises(InvalidSettings, match="spark is of a run that ends"), Worker(bench.outbox):
        pass


def test_operators_repair_what_it_has_found(bench: Bench) -> None:
    """Its run has no end, and yet what it has found is repaired as of any run; a run of it can't be ordered."""
    declare(bench)
    bench.work()
    wait_until(lambda: bench.rows(LIVE), "it has begun")
    (sent,) = bench.send()
    wait_until(bench.effects, "it is consumed")
    forget(bench)
    wait_until(lambda: bench.rows(OPEN) == ["missing"], "it is found")
    desk = ReconciliationOrders(Databases.open({"shop": bench.observer}, bench.outbox.settings))
    wait_until(lambda: [each.follows for each in desk.schedules()] == [0.1], "the worker has reported it")
    with pytest.raises(ActRefused, match="there is no run to order"):
        desk.run_now("live", by="otto")
    (run,) = desk.runs(RunFilter(), PageRequest()).items

    desk.repair(run.id, kind="missing", repair="resend", by="otto", why="lost")

    wait_until(lambda: len(bench.effects()) == 2, "it is consumed again")
    assert bench.effects() == [sent, sent]
    wait_until(lambda: bench.rows(OPEN) == [], "nothing is open")
