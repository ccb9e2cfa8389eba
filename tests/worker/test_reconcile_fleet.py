"""A fleet by the worker's timetable: once for all workers, recorded where the workers are, whatever goes wrong."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text

from outbox import Settings
from outbox.errors import InvalidSettings
from outbox.operator.databases import Databases
from outbox.prune.prune_pass import prune_runs_once
from outbox.reconcile.duty.reconciliation import reconcilers
from outbox.reconcile.fleet.run import FleetResult
from outbox.reconcile.record.orders import ReconciliationOrders
from outbox.reconcile.record.timetable import LOST_AFTER, RETRY_AFTER
from outbox.reconcile.tables import InboxState
from outbox.worker import Worker
from tests.kit import python, wait_until
from tests.reconcile.town import IN_SYNC, Town, fate, url_of
from tests.worker.conftest import Bench
from tests.worker.test_reconcile import ENDED, ERRORS, ROLES, RUNS, age, execute, held, look

NewBench = Callable[..., Bench]
STATES = "SELECT concat_ws(' ', topic, consumer_group, schedule, counts) FROM outbox.reconciliation_run"


@dataclass
class Yard:
    """A shop and a bank that are compared, and the file that says so."""

    town: Town
    file: Path

    def declare(self, bench: Bench, **options: Any) -> list[FleetResult]:
        """Declare the fleet in a database that has nothing to do with it; return the list to which its results come."""
        results: list[FleetResult] = []
        if not {"at", "cron", "every"} & options.keys():
            options["every"] = 3600
        bench.outbox.reconciliation("fleet", fleet=self.file, report=results.append, **options)
        return results

    def resends(self) -> list[str]:
        """Return who has resent messages."""
        with self.town.producer.connect() as connection:
            return list(connection.scalars(text("SELECT actor FROM outbox.audit WHERE action = 'resend'")))


@pytest.fixture
def yard(new_database: Callable[[], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Yard]:
    """Two databases in sync but for one message that the consumer has lost."""
    with ExitStack() as stack:
        producer, consumer = (create_engine(new_database()) for _ in range(2))
        for engine in (producer, consumer):
            stack.callback(engine.dispose)
        town = stack.enter_context(Town(producer, consumer, Settings()))
        town.plant([IN_SYNC, IN_SYNC, fate(status=InboxState.NONE)])
        for name, engine in (("SHOP", town.producer), ("BANK", town.consumer)):
            monkeypatch.setenv(f"{name}_URL", url_of(engine))
        file = tmp_path / "fleet.toml"
        file.write_text(
            '[[database]]\nnames = ["shop", "bank"]\nurl_env = "{NAME}_URL"\n'
            "[[compare]]\n[job]\napply = true\nwindow = { grace = 60 }\n"
        )
        yield Yard(town, file)


def test_a_worker_runs_a_fleet(bench: Bench, yard: Yard, caplog: pytest.LogCaptureFixture) -> None:
    """It compares and repairs databases of which the worker's own is none, which records that it was run."""
    caplog.set_level(logging.INFO, "outbox.worker")
    results = yard.declare(bench)
    bench.work(roles=ROLES)
    wait_until(lambda: results, "the fleet has come to a result")
    assert [(str(each.member), each.error) for each in results[0].members] == [("shop → bank", "")]
    assert bench.rows(STATES) == ['* * fleet {"missing": 1, "consumed": 2}']
    assert yard.resends() == ["reconciliation fleet"]
    wait_until(lambda: "1 of 1 repaired" in caplog.text, "the log says what came of it")
    # The pairs are in the consumer's record, as those of a run by hand.
    assert yard.town.rows("SELECT count(*) FROM outbox.reconciliation_run WHERE applied AND schedule IS NULL") == [1]


def test_one_of_many_workers_runs_it(new_bench: NewBench, url: str, yard: Yard) -> None:
    """Workers that start together run it once between them."""
    benches = [new_bench(url) for _ in range(3)]
    results = [yard.declare(bench) for bench in benches]
    workers = [bench.work(roles=ROLES) for bench in benches]
    wait_until(lambda: benches[0].rows(ENDED), "it was run")
    for worker in workers:
        wait_until(lambda w=worker: all(h.last_success for h in w.health().values()), "every worker has looked")  # type: ignore[misc]
    assert len(benches[0].rows(RUNS)) == 1
    assert sum(map(len, results)) == 1


def test_it_is_due_by_its_timetable_and_lost_after_a_while(bench: Bench, yard: Yard) -> None:
    """One that was missed is made up for once; of one that died nothing is heard any more, and it is run again."""
    yard.declare(bench, at="03:00")
    assert look(bench) == 1
    age(bench, 3 * 86400)
    assert look(bench) == 1
    assert look(bench) == 0
    execute(bench, "UPDATE outbox.reconciliation_run SET finished_at = NULL, plan = NULL")
    age(bench, LOST_AFTER - 100)
    assert look(bench) == 0
    age(bench, 200)
    assert look(bench) == 1


def test_what_came_to_no_result_is_told_and_tried_again(
    bench: Bench, yard: Yard, caplog: pytest.LogCaptureFixture
) -> None:
    """A database is away: the others are compared, the record says what failed, and it is run again after a while."""
    with yard.file.open("a") as file:
        file.write('[[database]]\nnames = ["gone"]\nurl = "postgresql+psycopg://nobody@127.0.0.1:1/none"\n')
    results = yard.declare(bench, every=86400)
    assert look(bench) == 1
    (why,) = bench.rows(ERRORS)
    assert why.startswith("1 member or database came to no result, or not to its end; of the others: ")
    assert bench.rows(STATES) == ['* * fleet {"missing": 1, "consumed": 2}']
    assert list(results[0].unreachable) == ["gone"]
    (line,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert line.getMessage() == f"reconcile fleet: fleet {yard.file}: {why}"
    assert look(bench) == 0
    age(bench, RETRY_AFTER + 1)
    assert look(bench) == 1


def test_a_worker_that_stops_cuts_it(bench: Bench, yard: Yard, caplog: pytest.LogCaptureFixture) -> None:
    """The members at work end at their next step, once the fleet has looked; it is recorded, and run again later."""
    caplog.set_level(logging.DEBUG, "outbox.worker")
    results = yard.declare(bench, every=86400)
    with held(_beside(bench, yard), "reconciliation_mark") as waits:
        worker = bench.work(roles=ROLES)
        wait_until(waits, "the reconciliation hangs")
        assert not worker.stop(0.1)
        wait_until(lambda: "1 at work, which end at their next step" in caplog.text, "the fleet has stopped the member")
    wait_until(lambda: "was interrupted, and will be run again" in caplog.text, "the log says so")
    assert (results, bench.rows(ERRORS)) == ([], ["interrupted"])
    assert yard.town.rows("SELECT error FROM outbox.reconciliation_run") == ["interrupted"]
    age(bench, RETRY_AFTER + 1)
    assert look(bench) == 1


def _beside(bench: Bench, yard: Yard) -> Bench:
    """Return a bench on the consumer's database."""
    return Bench(yard.town.consumer, yard.town.consumer, bench.outbox)


def test_operators_see_it_and_order_it(bench: Bench, yard: Yard) -> None:
    """A dry run is ordered as that of any timetable, and repairs nothing."""
    yard.declare(bench)
    worker = bench.work(roles=ROLES)
    wait_until(lambda: bench.rows(ENDED), "it was run")
    yard.town.plant([fate(status=InboxState.NONE)])
    operators = ReconciliationOrders(Databases.open({"own": bench.observer}, bench.outbox.settings))
    wait_until(lambda: any(each.pairs for each in operators.schedules()), "the worker has reported")
    (schedule,) = operators.schedules()
    assert schedule.compares == [f"fleet {yard.file}"]
    assert [run.title for run in schedule.last] == ["a fleet"]
    assert schedule.next_at is not None
    operators.run_now("fleet", by="ada", dry_run=True)
    wait_until(lambda: len(bench.rows(ENDED)) == 2, "the order was taken")
    assert worker.stop()
    (newest, _) = bench.rows("SELECT plan ->> 'left_out' FROM outbox.reconciliation_run ORDER BY started_at DESC")
    assert newest == "1"
    assert len(yard.resends()) == 1


def test_its_old_runs_are_pruned(bench: Bench, yard: Yard) -> None:
    """The newest is kept, by which it is due; workers that prune delete the others."""
    yard.declare(bench)
    for _ in range(3):
        assert look(bench) == 1
        age(bench, 91 * 86400)
    with bench.engine.connect() as connection:
        assert prune_runs_once(connection, Settings(), "*", "*").done == 2
    worker = bench.work(roles=[*ROLES, "prune"])
    wait_until(lambda: "prune run fleet" in worker.health(), "the worker prunes them")


@pytest.mark.parametrize(
    ("written", "hint"),
    [
        ("at_once = 0\n", "at_once = 0"),
        ("[job]\nworkers = 0\n", "workers = 0"),
        ("[[compare]]\n", "no database"),
    ],
)
def test_refused_when_the_worker_starts(bench: Bench, tmp_path: Path, written: str, hint: str) -> None:
    """A file that can't be is refused at the start, and not found out at night."""
    file = tmp_path / "fleet.toml"
    database = "" if "no database" in hint else '[[database]]\nnames = ["a"]\nurl = "postgresql://u@h/a"\n[[compare]]\n'
    file.write_text(written + database if "[job]" not in written else database + written)
    bench.outbox.reconciliation("fleet", every=60, fleet=file)
    with pytest.raises(InvalidSettings, match=f"reconciliation 'fleet': .*{re.escape(hint)}"), Worker(bench.outbox):
        pass


def test_refused_where_it_is_declared(bench: Bench) -> None:
    """The file says all that is compared, and how."""
    with pytest.raises(InvalidSettings, match="leave job and config out"):
        bench.outbox.reconciliation("fleet", every=60, fleet="fleet.toml", job={"apply": True})
    with pytest.raises(InvalidSettings, match=r"can't be read"):
        bench.outbox.reconciliation("fleet", every=60, fleet="/nowhere.toml")
        reconcilers(bench.outbox, threading.Event())


def test_a_worker_that_is_killed_leaves_it_to_the_next(bench: Bench, yard: Yard) -> None:
    """After SIGKILL in the middle of a member the run has no end; another worker begins it anew when the lease ends."""
    with held(_beside(bench, yard), "reconciliation_mark") as waits:
        with python("tests.worker.fleet_worker", bench.engine, str(yard.file)) as process:
            wait_until(waits, "the reconciliation hangs")
            process.kill()
            process.wait(timeout=60)
        results = yard.declare(bench)
        assert look(bench) == 0
    execute(bench, "UPDATE outbox.consumer_lease SET until = clock_timestamp() WHERE worker IS NOT NULL")
    assert look(bench) == 1
    assert [each.result.in_sync for each in results[0].members if each.result] == [False]
    assert bench.rows(ERRORS) == ["its worker was lost over it; run again"]
    assert len(bench.rows("SELECT DISTINCT job_id FROM outbox.reconciliation_run")) == 1
