"""What operators order of reconciliations, as workers take it: runs ahead of the timetable, and repairs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Connection, make_url, text

from outbox.acts.changes import Actor
from outbox.errors import ActRefused, InvalidRequest, SelectorChanged, SourceLost
from outbox.message.model import Counts
from outbox.operator.bulk import run as bulk_run
from outbox.operator.bulk import sql as bulk_sql
from outbox.operator.bulk.jobs import BulkJobs
from outbox.operator.databases import Databases
from outbox.operator.model import BulkItem, BulkItemFilter, BulkJob, PageRequest
from outbox.reconcile import run as reconciling
from outbox.reconcile import source
from outbox.reconcile.duty.reconciliation import JobReconciler
from outbox.reconcile.duty.repairs import Repairs
from outbox.reconcile.record.orders import ReconciliationOrders, RepairSelection
from outbox.reconcile.record.views import FindingFilter, RunFilter
from outbox.testing import drain
from outbox.worker.report import Facts, handlers_of, report_once
from tests.kit import wait_until
from tests.kit.runs import take_turn
from tests.worker.conftest import Bench
from tests.worker.test_reconcile import MISSING, NOW, ROLES, RUNS, age, declare, look, only

LEASES_OVER = "UPDATE outbox.bulk_item SET next_attempt_at = clock_timestamp()"
OTTO = Actor("otto", {"via": "console"})


@pytest.fixture
def reconciler(bench: Bench) -> JobReconciler:
    """A reconciliation with repairs, which has run and isn't due; its worker has reported."""
    declare(bench, name="all", job=MISSING)
    found = only(bench.outbox)
    assert look(bench) == 1
    reported(bench, found)
    return found


def passed(bench: Bench, duty: Any) -> int:
    """Run one pass of a duty, and return how much it did."""
    with bench.observer.connect() as connection:
        auto = connection.execution_options(isolation_level="AUTOCOMMIT")
        return int(duty(auto, auto).done)


def repairs_of(reconciler: JobReconciler) -> Callable[[Connection, Connection], Counts]:
    """Return the passes of a worker that repairs what a reconciliation has found."""
    return partial(Repairs([reconciler], "outbox"), stopping=lambda: False)


def reported(bench: Bench, found: JobReconciler) -> None:
    """Have a worker report what it has."""
    handlers = handlers_of(bench.outbox, [(found.declared.name, found.pairs)])
    with bench.observer.connect() as connection:
        report_once(connection, bench.outbox.settings, Facts(UUID(int=1), "w", "1", [], handlers, {}), lambda _: {})


def desk(bench: Bench) -> ReconciliationOrders:
    """Return what an operator sees of reconciliations and orders."""
    return ReconciliationOrders(Databases.open({"shop": bench.observer}, bench.outbox.settings))


def lost(bench: Bench, number: int = 1) -> list[UUID]:
    """Have messages consumed, and the group lose them."""
    ids = bench.send(count=number)
    drain(bench.outbox)
    with bench.observer.begin() as connection:
        connection.execute(text("DELETE FROM outbox.consumer_message"))
    return ids


def put(bench: Bench, **by_status: UUID) -> None:
    """Have the group know messages, each with a status."""
    insert = """INSERT INTO outbox.consumer_message (consumer_group, message_id, topic, queue, position, status,
                                                     attempts)
                VALUES ('mail', :id, 'paid', 0, 0, :status, 1)"""
    with bench.observer.begin() as connection:
        connection.execute(text(insert), [{"id": each, "status": status} for status, each in by_status.items()])


def dry_run(bench: Bench) -> UUID:
    """Order a dry run, have it taken, and return the run."""
    desk(bench).run_now("all", by=OTTO, dry_run=True)
    assert look(bench) == 1
    (run,) = desk(bench).runs(RunFilter(), PageRequest(size=1)).items
    return run.id


def items_of(bench: Bench, job: BulkJob) -> list[BulkItem]:
    """Return the items of a bulk job."""
    databases = Databases.open({"shop": bench.observer}, bench.outbox.settings)
    return BulkJobs(databases).bulk_items(job.id, BulkItemFilter(), PageRequest()).items


def job_now(bench: Bench, job: BulkJob) -> BulkJob:
    """Return a bulk job as it is now."""
    return BulkJobs(Databases.open({"shop": bench.observer}, bench.outbox.settings)).bulk_job(job.id)


def results(bench: Bench, run: UUID) -> list[str | None]:
    """Return what came of the findings of a run."""
    return [row.result for row in desk(bench).findings(run, FindingFilter(), PageRequest()).items]


def test_a_dry_run_is_taken_once_and_repairs_nothing(bench: Bench, reconciler: JobReconciler) -> None:
    """Though the reconciliation is declared with repairs; the timetable knows nothing of it, the audit does."""
    lost(bench)
    order = desk(bench).run_now("all", by=OTTO, why="after the restore", dry_run=True)
    assert [each.id for each in desk(bench).orders()] == [order.id]
    with pytest.raises(ActRefused, match="ordered already"):
        desk(bench).run_now("all", by=OTTO)
    assert [look(bench) for _ in range(2)] == [1, 0]
    run, first = desk(bench).runs(RunFilter(), PageRequest()).items
    assert (run.counts or {})["missing"] == 1
    assert (run.applied, run.schedule, run.ordered_by) == (False, None, "otto")
    assert first.schedule == "all"
    assert results(bench, run.id) == [None]
    assert desk(bench).orders() == []
    assert bench.rows(
        "SELECT actor || ' ' || target || ' ' || reason FROM outbox.audit WHERE action = 'reconcile'"
    ) == ["otto all after the restore"]


def test_a_run_now_repairs_as_declared(bench: Bench, reconciler: JobReconciler) -> None:
    """In the name of who ordered it."""
    lost(bench)
    desk(bench).run_now("all", by=OTTO)
    assert look(bench) == 1
    assert bench.rows("SELECT actor FROM outbox.audit WHERE action = 'resend'") == ["otto"]


def test_an_order_of_what_no_worker_has(bench: Bench, reconciler: JobReconciler) -> None:
    """It is refused, and names what there is."""
    with pytest.raises(ActRefused, match="has a reconciliation 'none' here; there is all"):
        desk(bench).run_now("none", by=OTTO)


def test_two_workers_take_an_order(bench: Bench, reconciler: JobReconciler) -> None:
    """The message is in a queue that one of them has leased: the other one comes too late for it."""
    desk(bench).run_now("all", by=OTTO)
    before = len(bench.rows(RUNS))
    turns = [threading.Thread(target=take_turn, args=(bench.engine, bench.outbox)) for _ in range(2)]
    for each in turns:
        each.start()
    for each in turns:
        each.join()
    take_turn(bench.engine, bench.outbox)
    assert len(bench.rows(RUNS)) == before + 1


def test_an_interrupted_order_is_taken_again(bench: Bench, reconciler: JobReconciler) -> None:
    """A worker that stops over a run leaves the order to another one."""
    lost(bench)
    desk(bench).run_now("all", by=OTTO)
    (first,) = desk(bench).orders()
    stopping = threading.Event()
    with pytest.MonkeyPatch.context() as patch:
        run = JobReconciler._carry_out

        def stopped(*args: Any) -> Any:
            stopping.set()
            return run(*args)

        patch.setattr(JobReconciler, "_carry_out", stopped)
        take_turn(bench.engine, bench.outbox, stopping=stopping)
    (second,) = desk(bench).orders()
    assert second == replace(first, id=second.id, created_at=second.created_at)
    assert second.id != first.id
    assert look(bench) == 1
    assert desk(bench).orders() == []
    (run_, *_) = desk(bench).runs(RunFilter(), PageRequest()).items
    assert (run_.ordered_by, run_.error) == ("otto", None)


def test_an_order_needs_the_tables_of_both_parts(bench: Bench, reconciler: JobReconciler) -> None:
    """A message goes by the producer's tables: where there are none, the order is refused, with its mend."""
    view = desk(bench)
    object.__setattr__(view.databases["shop"], "parts", ("consumer",))
    with pytest.raises(ActRefused, match=r"'shop' has only the consumer's tables.*outbox db upgrade"):
        view.run_now("all", by=OTTO)


def test_a_repair_resends_what_is_missing(bench: Bench, reconciler: JobReconciler) -> None:
    """Each item has its outcome, each finding its result, the audit the operator and the reason; once is enough."""
    lost(bench, 3)
    run = dry_run(bench)
    preview = desk(bench).preview_repair(run)
    assert (preview.number, preview.left_out, preview.workers) == (3, 0, ["w"])
    assert preview.described == "repair 3 messages of group mail, topic paid (by the policy of the run)"
    order: dict[str, Any] = {"by": OTTO, "why": "lost inbox", "number": 3, "idempotency_key": "k"}
    job = desk(bench).repair(run, **order)
    assert desk(bench).repair(run, **order).id == job.id
    assert (job.state, job.total, job.pending) == ("waiting", 3, 3)
    repairer = repairs_of(reconciler)
    assert passed(bench, repairer) == 3
    done = job_now(bench, job)
    assert (done.state, done.done) == ("done", 3)
    assert {item.outcome for item in items_of(bench, job)} == {"resend: sends it once more under its id"}
    assert results(bench, run) == ["done"] * 3
    (row, *_) = bench.rows("SELECT actor || ' ' || reason || ' ' || origin FROM outbox.audit WHERE action = 'resend'")
    assert row.startswith(f"otto reconciliation {run}: missing; lost inbox")
    assert '"via": "console"' in row
    assert str(job.id) in row
    assert passed(bench, repairer) == 0
    assert bench.rows("SELECT max(send_number) FROM outbox.message") == [2]
    with pytest.raises(ActRefused, match="nothing to repair"):
        desk(bench).repair(run, by=OTTO, why="again")
    with pytest.raises(SelectorChanged, match="something else"):
        desk(bench).repair(run, kind="missing", **order)


def test_what_has_healed_is_left_alone(bench: Bench, reconciler: JobReconciler) -> None:
    """Between the run and the repair the group has consumed it; and what is of another kind by now isn't touched."""
    healed, parked = lost(bench, 2)
    run = dry_run(bench)
    put(bench, consumed=healed, parked=parked)
    job = desk(bench).repair(run, by=OTTO, why="lost")
    passed(bench, repairs_of(reconciler))
    outcomes = {item.message_id: (item.state, item.outcome) for item in items_of(bench, job)}
    assert outcomes == {
        healed: ("done", "it has healed meanwhile: nothing was left to do"),
        parked: ("skipped", "it is parked by now; run the reconciliation again"),
    }
    assert bench.rows("SELECT max(send_number) FROM outbox.message") == [1]
    assert job_now(bench, job).state == "partly"


def test_a_repair_that_is_named(bench: Bench, reconciler: JobReconciler) -> None:
    """What the policy only reports is repaired where an operator says how, for one message or all of a kind."""
    one, other = lost(bench, 2)
    put(bench, parked=one)
    put(bench, parked=other)
    run = dry_run(bench)
    assert desk(bench).preview_repair(run).left_out == 2
    with pytest.raises(ActRefused, match="nothing to repair"):
        desk(bench).repair(run, by=OTTO, why="why")
    chosen: dict[str, Any] = {"kind": "parked", "repair": "retry", "messages": (one,)}
    assert desk(bench).preview_repair(run, **chosen).number == 1
    desk(bench).repair(run, **chosen, by=OTTO, why="mended")
    assert passed(bench, repairs_of(reconciler)) == 1
    assert sorted(map(str, results(bench, run))) == ["None", "done"]
    assert bench.rows("SELECT message_id FROM outbox.consumer_message WHERE status = 'failed'") == [one]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"kind": "odd"}, "kind 'odd' must be one of"),
        ({"repair": "resend"}, "must be one of those of a kind"),
        ({"kind": "parked", "repair": "resend"}, "that mend parked: retry"),
        ({"kind": "no_effect", "repair": "retry"}, "there are none"),
        ({"messages": ()}, "name 1 to 1000 messages, not 0"),
    ],
)
def test_selections_that_are_none(more: dict[str, Any], says: str) -> None:
    """A repair must be able to mend the kind."""
    with pytest.raises(InvalidRequest, match=says):
        RepairSelection(UUID(int=1), **more)


def test_a_repair_needs_a_reason_and_the_number_that_was_shown(bench: Bench, reconciler: JobReconciler) -> None:
    """What was confirmed is what is ordered."""
    lost(bench, 2)
    run = dry_run(bench)
    with pytest.raises(InvalidRequest, match="give a reason"):
        desk(bench).repair(run, by=OTTO, why=" ")
    with pytest.raises(SelectorChanged, match="now 2"):
        desk(bench).repair(run, by=OTTO, why="why", number=3)
    assert bench.rows("SELECT id FROM outbox.bulk_job") == []


def test_a_worker_that_dies_over_a_repair(bench: Bench, reconciler: JobReconciler) -> None:
    """When the lease of its items is over, another one takes them up; what it had done isn't done again."""
    lost(bench, 2)
    run = dry_run(bench)
    job = desk(bench).repair(run, by=OTTO, why="lost")
    repairer = repairs_of(reconciler)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bulk_sql, "give_back", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            passed(bench, repairer)
    assert bench.rows("SELECT max(send_number) FROM outbox.message") == [2]
    assert passed(bench, repairer) == 0
    assert {(item.state, item.outcome, item.attempts) for item in items_of(bench, job)} == {
        ("pending", "it is being done", 1)
    }
    with bench.observer.begin() as connection:
        connection.execute(text(LEASES_OVER))
    assert passed(bench, repairer) == 2
    assert {item.attempts for item in items_of(bench, job)} == {2}
    assert job_now(bench, job).pending == 0
    assert bench.rows("SELECT max(send_number) FROM outbox.message") == [2]


def test_no_transaction_is_open_while_a_repair_asks_other_databases(bench: Bench, reconciler: JobReconciler) -> None:
    """The worker's connection is idle for so long, and cancelling leaves alone what is being done."""
    lost(bench, 2)
    job = desk(bench).repair(dry_run(bench), by=OTTO, why="lost")
    states: list[str] = []
    cancelled: list[int] = []

    def looked(*args: Any, repair: Any = reconciling.repair_found, **options: Any) -> Any:
        found = "SELECT state FROM pg_stat_activity WHERE pid = ANY ({}) "
        states.extend(bench.rows(found.format(f"ARRAY[{worker.info['pid']}]")))
        databases = Databases.open({"shop": bench.observer}, bench.outbox.settings)
        cancelled.append(BulkJobs(databases).cancel(job.id, by=OTTO, why="no").cancelled)
        return repair(*args, **options)

    with bench.engine.connect() as worker, pytest.MonkeyPatch.context() as patch:
        worker.info["pid"] = worker.scalar(text("SELECT pg_backend_pid()"))
        worker.rollback()
        patch.setattr(reconciling, "repair_found", looked)
        assert repairs_of(reconciler)(worker, worker).done == 2
    assert (states, cancelled) == (["idle"], [0])
    assert (job_now(bench, job).done, job_now(bench, job).cancelled) == (2, 0)


def test_what_a_cancelled_job_has_left_of_its_leases_is_never_done(bench: Bench, reconciler: JobReconciler) -> None:
    """Cancelled while a worker has them; whose database is lost then, so that it gives them back."""
    lost(bench, 2)
    job = desk(bench).repair(dry_run(bench), by=OTTO, why="lost")

    def cancelled_then_lost(*_: Any, **__: Any) -> Any:
        databases = Databases.open({"shop": bench.observer}, bench.outbox.settings)
        BulkJobs(databases).cancel(job.id, by=OTTO, why="no")
        raise SourceLost("away")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reconciling, "repair_found", cancelled_then_lost)
        with pytest.raises(SourceLost):
            passed(bench, repairs_of(reconciler))
    assert passed(bench, repairs_of(reconciler)) == 0
    ended = job_now(bench, job)
    assert (ended.cancelled, ended.pending, ended.finished_at is not None) == (2, 0, True)
    assert bench.rows("SELECT max(send_number) FROM outbox.message") == [1]


def test_a_lease_that_ran_out_counts_for_nothing(bench: Bench, reconciler: JobReconciler) -> None:
    """Another worker has done it by then: the first one takes back neither its lease nor what it has written."""
    lost(bench)
    run = dry_run(bench)
    job = desk(bench).repair(run, by=OTTO, why="lost")
    other = repairs_of(reconciler)

    def slow(*args: Any, repair: Any = reconciling.repair_found, **options: Any) -> Any:
        patch.undo()
        with bench.observer.begin() as connection:
            connection.execute(text(LEASES_OVER))
        assert passed(bench, other) == 1
        return repair(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reconciling, "repair_found", slow)
        assert passed(bench, repairs_of(reconciler)) == 0
    assert [(item.state, item.attempts) for item in items_of(bench, job)] == [("done", 2)]
    assert results(bench, run) == ["done"]
    assert bench.rows("SELECT max(send_number) FROM outbox.message") == [2]


def test_what_was_done_before_another_kind_failed_is_told_so(bench: Bench, reconciler: JobReconciler) -> None:
    """It isn't looked at again: it would be taken for something else."""
    missing, parked = lost(bench, 2)
    put(bench, parked=parked)
    run = dry_run(bench)
    job = desk(bench).repair(run, messages=(missing,), by=OTTO, why="lost")
    repairer = repairs_of(reconciler)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bulk_run, "_settled", lambda *_: (_ for _ in ()).throw(SourceLost("away")))
        with pytest.raises(SourceLost):
            passed(bench, repairer)
    assert passed(bench, repairer) == 1
    assert [item.state for item in items_of(bench, job)] == ["done"]
    assert sorted(map(str, results(bench, run))) == ["None", "done"]


def test_a_repair_that_kills_its_worker_each_time_ends(bench: Bench, reconciler: JobReconciler) -> None:
    """As one that is busy each time."""
    lost(bench)
    job = desk(bench).repair(dry_run(bench), by=OTTO, why="lost")
    with bench.observer.begin() as connection:
        connection.execute(text(f"UPDATE outbox.bulk_item SET attempts = {bulk_run.MOST}"))
    assert passed(bench, repairs_of(reconciler)) == 0
    (item,) = items_of(bench, job)
    assert (item.state, item.outcome) == ("failed", f"its worker died {bulk_run.MOST} times")
    assert passed(bench, repairs_of(reconciler)) == 0
    assert job_now(bench, job).finished_at is not None


def test_one_item_that_fails_fails_alone(bench: Bench, reconciler: JobReconciler) -> None:
    """The others of its lease are done."""
    bad, good = lost(bench, 2)
    job = desk(bench).repair(dry_run(bench), by=OTTO, why="lost")

    def broken(
        mending: Any, pair: Any, run_id: Any, kinds: Any, repair: Any = reconciling.repair_found, **options: Any
    ) -> Any:
        if bad in kinds:
            raise ValueError("odd")
        return repair(mending, pair, run_id, kinds, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reconciling, "repair_found", broken)
        assert passed(bench, repairs_of(reconciler)) == 1
    outcomes = {item.message_id: (item.state, item.attempts, item.outcome) for item in items_of(bench, job)}
    assert outcomes == {
        bad: ("failed", 1, "ValueError: odd"),
        good: ("done", 1, "resend: sends it once more under its id"),
    }


def test_two_workers_repair_at_once(bench: Bench, reconciler: JobReconciler) -> None:
    """What one takes is locked: the other one leaves it alone."""
    lost(bench, 2)
    job = desk(bench).repair(dry_run(bench), by=OTTO, why="lost")
    with bench.observer.begin() as one:
        one.execute(text("SELECT FROM outbox.bulk_item WHERE number = 1 FOR UPDATE"))
        assert passed(bench, repairs_of(reconciler)) == 1
    assert [item.state for item in items_of(bench, job)] == ["pending", "done"]
    assert passed(bench, repairs_of(reconciler)) == 1
    assert job_now(bench, job).state == "done"


def test_a_database_out_of_reach_fails_no_item(bench: Bench, reconciler: JobReconciler) -> None:
    """Repairs wait until it is back, while those of other runs go on."""
    lost(bench, 1)
    waiting = desk(bench).repair(dry_run(bench), by=OTTO, why="lost")
    away = make_url(reconciler.work_at(NOW).producer.url).set(port=1).render_as_string(hide_password=False)

    def far(now: Any, work_at: Any = reconciler.work_at) -> Any:
        job = work_at(now)
        return replace(job, producer=replace(job.producer, url=away, engine=None))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reconciler, "work_at", far)
        patch.setattr(source, "_FIRST_WAIT", 0.01)
        with pytest.raises(SourceLost):
            passed(bench, repairs_of(reconciler))
    assert (job_now(bench, waiting).pending, {item.attempts for item in items_of(bench, waiting)}) == (1, {0})
    assert passed(bench, repairs_of(reconciler)) == 1


def test_a_repair_that_is_cancelled(bench: Bench, reconciler: JobReconciler) -> None:
    """What isn't done yet is never done."""
    lost(bench, 2)
    job = desk(bench).repair(dry_run(bench), by=OTTO, why="lost")
    databases = Databases.open({"shop": bench.observer}, bench.outbox.settings)
    BulkJobs(databases).cancel(job.id, by=OTTO, why="no")
    assert passed(bench, repairs_of(reconciler)) == 0
    assert (job_now(bench, job).cancelled, job_now(bench, job).state) == (2, "cancelled")
    assert bench.rows("SELECT max(send_number) FROM outbox.message") == [1]


def test_a_repair_of_another_reconciliation_is_left_to_its_worker(bench: Bench, reconciler: JobReconciler) -> None:
    """A worker carries out only what it has the databases of."""
    lost(bench)
    job = desk(bench).repair(dry_run(bench), by=OTTO, why="lost")
    with bench.observer.connect() as connection:
        assert not Repairs([], "outbox")(connection, connection, lambda: False)
    assert job_now(bench, job).pending == 1


def test_a_repair_is_no_faster_than_its_rate(bench: Bench, reconciler: JobReconciler) -> None:
    """All workers together: what was done counts until its time is over, and what one is at keeps the others off."""
    lost(bench, 3)
    job = desk(bench).repair(dry_run(bench), by=OTTO, why="test", rate=0.001)
    assert job.rate == 0.001
    assert passed(bench, repairs_of(reconciler)) == 1
    assert passed(bench, repairs_of(reconciler)) == 0
    with bench.observer.begin() as connection:
        connection.execute(text("UPDATE outbox.bulk_item SET changed_at = changed_at - interval '2000 s'"))
    with bench.observer.begin() as other:
        other.execute(text("SELECT FROM outbox.bulk_job FOR NO KEY UPDATE"))
        assert passed(bench, repairs_of(reconciler)) == 0
    assert passed(bench, repairs_of(reconciler)) == 1
    assert job_now(bench, job).done == 2


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan")])
def test_a_rate_that_is_none(bench: Bench, reconciler: JobReconciler, rate: float) -> None:
    """It is refused before anything is read."""
    with pytest.raises(InvalidRequest, match="rate"):
        desk(bench).repair(UUID(int=1), by=OTTO, why="test", rate=rate)


def test_a_repair_whose_run_is_pruned_ends(bench: Bench, reconciler: JobReconciler) -> None:
    """Nobody knows any more what it found: what is left is skipped, and says why."""
    lost(bench, 2)
    job = desk(bench).repair(dry_run(bench), by=OTTO, why="test")
    with bench.observer.begin() as connection:
        connection.execute(text("DELETE FROM outbox.reconciliation_finding"))
        connection.execute(text("DELETE FROM outbox.reconciliation_run"))
    assert passed(bench, repairs_of(reconciler)) == 0
    ended = job_now(bench, job)
    assert (ended.finished_at is not None, ended.skipped, ended.pending) == (True, 2, 0)
    assert {item.outcome for item in items_of(bench, job)} == {"its run was pruned"}


def test_a_list_of_runs_says_what_is_left(bench: Bench, reconciler: JobReconciler) -> None:
    """Beside what was found: nothing, once all of it is repaired."""
    lost(bench, 2)
    run = dry_run(bench)

    def shown() -> list[tuple[int | None, int | None]]:
        return [(each.differences, each.left) for each in desk(bench).runs(RunFilter(), PageRequest(size=1)).items]

    assert shown() == [(2, 2)]
    desk(bench).repair(run, by=OTTO, why="test")
    assert passed(bench, repairs_of(reconciler)) == 2
    assert shown() == [(2, 0)]


def test_a_worker_takes_what_is_ordered(bench: Bench, reconciler: JobReconciler) -> None:
    """A real one: it runs, and it repairs; the timetable isn't due."""
    lost(bench)
    age(bench, 1)
    bench.work(roles=ROLES)
    desk(bench).run_now("all", by=OTTO, dry_run=True)
    wait_until(
        lambda: len(bench.rows("SELECT id FROM outbox.reconciliation_run WHERE counts IS NOT NULL")) == 2, "a run"
    )
    (run, *_) = desk(bench).runs(RunFilter(), PageRequest()).items
    job = desk(bench).repair(run.id, by=OTTO, why="lost")
    wait_until(lambda: job_now(bench, job).finished_at, "it is repaired")
    assert job_now(bench, job).done == 1
