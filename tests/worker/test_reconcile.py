"""The reconciliation as a duty of a worker: when it is due, once for all workers, and whatever goes wrong."""

from __future__ import annotations

import datetime as dt
import logging
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, make_url, text

from outbox import Outbox, Settings, embedded
from outbox.database import migration
from outbox.database.execute import execute as database_execute
from outbox.embedded import ServerLike
from outbox.errors import InvalidHandler, InvalidMessage, InvalidSettings, SchemaMissing
from outbox.message.model import uuid7
from outbox.reconcile.duty.reconciliation import JobReconciler, reconcilers
from outbox.reconcile.job import Pair
from outbox.reconcile.record.timetable import LOST_AFTER, RETRY_AFTER, LastRun, Reconciliation, RunRequest, Timetable
from outbox.reconcile.rows import JobResult
from outbox.worker import Worker
from tests.kit import wait_until
from tests.kit.runs import take_turn
from tests.worker.conftest import Bench

NewBench = Callable[..., Bench]
NOW = dt.datetime(2026, 3, 10, 12, 0, tzinfo=dt.UTC)
RUNS = "SELECT id FROM outbox.reconciliation_run"
ENDED = f"{RUNS} WHERE finished_at IS NOT NULL"
ASKED = "SELECT deliver_at FROM outbox.half_message WHERE topic = 'outbox.reconcile'"
ERRORS = "SELECT error FROM outbox.reconciliation_run WHERE error IS NOT NULL"
BEGAN = "started_at = started_at - make_interval(secs => {0}), finished_at = finished_at - make_interval(secs => {0})"
ROLES = ["dispatch", "release", "reconcile"]
MISSING = {"window": {"grace": 0.0}, "apply": True}


def declare(bench: Bench, **options: Any) -> list[JobResult]:
    """Declare a group and a reconciliation of it; return the list to which its results come."""
    if ("paid", "mail") not in bench.outbox.subscriptions:
        bench.outbox.consumer("paid", group="mail")(bench.handle)
    results: list[JobResult] = []
    if not {"at", "cron", "every"} & options.keys():
        options["every"] = 3600
    bench.outbox.reconciliation(report=results.append, **options)
    return results


def execute(bench: Bench, sql: str) -> None:
    """Run a statement."""
    with bench.observer.begin() as connection:
        connection.execute(text(sql))


def age(bench: Bench, seconds: float) -> None:
    """Make all runs so much older, and the leases of workers."""
    execute(bench, f"UPDATE outbox.reconciliation_run SET {BEGAN.format(seconds)}")
    execute(bench, f"UPDATE outbox.consumer_lease SET until = until - make_interval(secs => {seconds})")


def only(outbox: Outbox) -> JobReconciler:
    """Return the only reconciliation of an outbox, as a worker runs it."""
    (reconciler,) = reconcilers(outbox, threading.Event())
    assert isinstance(reconciler, JobReconciler)
    return reconciler


def look(bench: Bench, outbox: Outbox | None = None) -> int:
    """Let a worker look once whether it is due, and return how many pairs it compared."""
    before = len(bench.rows(RUNS))
    take_turn(bench.engine, outbox or bench.outbox)
    return len(bench.rows(RUNS)) - before


@contextmanager
def held(bench: Bench, table: str) -> Iterator[Callable[[], bool]]:
    """Lock a table, so that who reads it waits; yields whether somebody does."""
    waiting = text(
        "SELECT count(*) FROM pg_locks l JOIN pg_class c ON c.oid = l.relation "
        "WHERE NOT l.granted AND c.relname = :name"
    )

    def waits() -> bool:
        with bench.observer.connect() as other:
            return bool(other.scalar(waiting, {"name": table}))

    with bench.observer.connect() as connection, connection.begin():
        connection.execute(text(f"LOCK TABLE outbox.{table} IN ACCESS EXCLUSIVE MODE"))
        yield waits


def test_a_worker_reconciles_and_repairs(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """The first one is due at once: what is missing is found, repaired and consumed again; the record names all."""
    caplog.set_level(logging.INFO, "outbox.worker")
    results = declare(bench, name="all", job=MISSING)
    (sent,) = bench.send()
    bench.work(roles=["dispatch", "consume"])
    wait_until(bench.effects, "the message is consumed")
    execute(bench, "DELETE FROM outbox.consumer_message")
    bench.work(roles=["release", "reconcile"])
    wait_until(lambda: results, "the reconciliation has come to a result")
    assert [{kind.label: number for kind, number in pair.differences.items()} for pair in results[0].pairs] == [
        {"missing": 1}
    ]
    wait_until(lambda: len(bench.effects()) == 2, "the message is consumed again")
    assert bench.effects() == [sent, sent]
    assert bench.rows("SELECT schedule FROM outbox.reconciliation_run WHERE applied") == ["all"]
    assert bench.rows("SELECT actor FROM outbox.audit WHERE action = 'resend'") == ["reconciliation all"]
    (line,) = [record for record in caplog.records if getattr(record, "outbox_event", "") == "reconcile.finished"]
    assert line.getMessage().startswith("reconcile all: paid → mail: ")
    assert line.getMessage().endswith("1 of 1 repaired")


def test_one_of_many_workers_runs_it(new_bench: NewBench, url: str) -> None:
    """Workers that start together run it once between them."""
    benches = [new_bench(url) for _ in range(4)]
    results = [declare(bench) for bench in benches]
    workers = [bench.work(roles=ROLES) for bench in benches]
    wait_until(lambda: benches[0].rows(ENDED), "it was run")
    for worker in workers:
        wait_until(lambda w=worker: all(h.last_success for h in w.health().values()), "every worker has looked")  # type: ignore[misc]
    assert len(benches[0].rows(RUNS)) == 1
    assert sum(map(len, results)) == 1


def test_workers_send_one_message_for_a_run(bench: Bench) -> None:
    """However many, and however often: what the time and the name make is there, or is sent."""
    declare(bench)
    with bench.engine.connect() as connection:
        for each in (only(bench.outbox), only(bench.outbox)):
            each.schedule(connection, connection)
    assert len(bench.rows(ASKED)) == 1
    assert look(bench) == 1
    # That of the next run was sent when this one had ended.
    assert len(bench.rows(ASKED)) == 2
    assert look(bench) == 0
    (deliver_at,) = bench.rows(f"{ASKED} AND deliver_at > now()")
    assert deliver_at is not None


def test_a_timetable_that_changed(bench: Bench) -> None:
    """The message of a time that it doesn't have any more is passed over; the right one is sent."""
    declare(bench, every=3600)
    assert look(bench) == 1
    bench.outbox.reconciliations.clear()
    declare(bench, every=86400)
    assert look(bench) == 0
    execute(bench, "UPDATE outbox.scheduled_message SET deliver_at = now()")
    assert look(bench) == 0
    assert bench.rows("SELECT count(*) FROM outbox.consumer_message WHERE status = 'consumed'") == [3]
    age(bench, 2 * 3600)
    bench.outbox.reconciliations.clear()
    declare(bench, every=3600)
    assert look(bench) == 1


def test_a_message_that_is_handled_again(bench: Bench) -> None:
    """What was run isn't run once more; a run without an end is, since its worker was lost over it."""
    declare(bench, every=86400)
    assert look(bench) == 1
    execute(bench, "DELETE FROM outbox.consumer_message")
    execute(bench, "DELETE FROM outbox.consumer_offset")
    assert look(bench) == 0
    execute(bench, "UPDATE outbox.reconciliation_run SET finished_at = NULL, plan = NULL")
    execute(bench, "DELETE FROM outbox.consumer_message")
    execute(bench, "DELETE FROM outbox.consumer_offset")
    assert look(bench) == 1
    assert bench.rows(ERRORS) == ["its worker was lost over it; run again"]
    assert len(bench.rows("SELECT DISTINCT job_id FROM outbox.reconciliation_run")) == 1


def test_a_worker_of_another_reconciliation_leaves_it_alone(bench: Bench) -> None:
    """Each has a group of its own: workers share the topic, and not what they declare."""
    declare(bench)
    other = Outbox(bench.engine, settings=Settings())
    other.consumer("paid", group="mail")(bench.handle)
    other.reconciliation("other", every=3600)
    assert look(bench, other) == 1
    assert look(bench) == 1
    assert sorted(bench.rows("SELECT schedule FROM outbox.reconciliation_run")) == ["nightly", "other"]


def test_runs_are_not_reconciled(bench: Bench) -> None:
    """The internal topic is none that an application consumes."""
    declare(bench)
    assert only(bench.outbox).pairs == [("paid", "mail")]


def test_no_two_runs_at_once(new_bench: NewBench, url: str) -> None:
    """While one worker runs it, another one leaves what is due, and what is ordered, in the queue."""
    one, other = new_bench(url), new_bench(url)
    results = declare(one, every=0.01), declare(other, every=0.01)
    with held(one, "reconciliation_mark") as waits:
        one.work(roles=ROLES)
        wait_until(waits, "the reconciliation hangs")
        request = RunRequest("nightly", "paid", "mail", "ada")
        with other.engine.begin() as connection:
            database_execute(connection, request.send("outbox", uuid7()))
        take_turn(other.engine, other.outbox)
        assert len(one.rows(RUNS)) == 1
        assert results == ([], [])
    wait_until(lambda: len(one.rows(ENDED)) >= 3, "what was asked for meanwhile is run, too")
    runs = one.rows("SELECT started_at FROM outbox.reconciliation_run ORDER BY started_at OFFSET 1")
    ends = one.rows("SELECT finished_at FROM outbox.reconciliation_run WHERE finished_at IS NOT NULL ORDER BY 1")
    assert all(began >= ended for began, ended in zip(runs, ends, strict=False))


def test_a_database_without_the_producers_tables(server: ServerLike, url: str) -> None:
    """Runs are messages of it: a worker with a reconciliation says at its start what is missing, and how to mend it."""
    server.create_database("consumer_only")
    try:
        migration.upgrade(server.url("consumer_only"), ["consumer"])
        engine = create_engine(server.url("consumer_only"))
        outbox = Outbox(engine)
        outbox.consumer("paid", group="mail", source=url)(lambda message, session: None)
        outbox.reconciliation(every=3600)
        for roles in (["reconcile"], None):
            with (
                pytest.raises(SchemaMissing, match=r"producer.*outbox db upgrade"),
                Worker(outbox, roles=roles),
            ):
                pass
        engine.dispose()
    finally:
        server.drop_database("consumer_only")


def test_missed_while_no_worker_ran(bench: Bench) -> None:
    """Missed for days, it is made up for once; then it is due by its timetable again."""
    declare(bench, at="03:00")
    assert look(bench) == 1
    assert look(bench) == 0
    age(bench, 3 * 86400)
    assert look(bench) == 1
    assert look(bench) == 0
    assert len(bench.rows(RUNS)) == 2


def test_runs_by_hand_are_not_those_of_the_timetable(bench: Bench) -> None:
    """What somebody compares by hand doesn't take the place of what is due."""
    declare(bench)
    by_hand = "INSERT INTO outbox.reconciliation_run (id, job_id, topic, consumer_group)"
    execute(bench, f"{by_hand} VALUES (gen_random_uuid(), gen_random_uuid(), 'paid', 'mail')")
    assert look(bench) == 1
    execute(bench, f"{by_hand} VALUES (gen_random_uuid(), gen_random_uuid(), 'paid', 'mail')")
    age(bench, 3600)
    assert look(bench) == 1


def test_by_the_clock_of_a_worker(bench: Bench) -> None:
    """A running worker looks by itself when it is due again."""
    results = declare(bench, every=0.2)
    bench.work(roles=ROLES)
    wait_until(lambda: len(results) >= 3, "it ran three times")


def test_a_failure_is_recorded_and_told_in_one_line(
    bench: Bench, caplog: pytest.LogCaptureFixture, new_database: Callable[[], str]
) -> None:
    """The producer can't be reached: record and log say why without the password; it is tried again after a while."""
    source = make_url(new_database())
    bench.outbox.consumer("far", group="mail", source=source.set(port=1, password="hunter2").render_as_string(False))(  # noqa: S106
        bench.handle
    )
    bench.outbox.reconciliation(every=86400)
    assert look(bench) == 1
    (why,) = bench.rows(ERRORS)
    (line,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert line.getMessage() == f"reconcile nightly: far → mail: {why}"
    assert why.startswith("database ")
    assert "Connection refused" in why
    assert "hunter2" not in caplog.text + why
    assert "\n" not in why
    assert line.exc_info is None
    assert look(bench) == 0
    age(bench, RETRY_AFTER + 1)
    assert look(bench) == 1


def test_a_run_that_was_killed(bench: Bench) -> None:
    """A run without an end may be running; nothing heard of it for minutes, it counts as lost, and is run again."""
    declare(bench, every=60)
    assert look(bench) == 1
    execute(bench, "UPDATE outbox.reconciliation_run SET finished_at = NULL, plan = NULL")
    age(bench, LOST_AFTER - 100)
    assert look(bench) == 0
    age(bench, 3600)
    heard = """UPDATE outbox.reconciliation_run
                  SET plan = jsonb_build_object('alive_at', now() - make_interval(secs => {}))
                WHERE finished_at IS NULL"""
    execute(bench, heard.format(LOST_AFTER - 100))
    assert look(bench) == 0
    execute(bench, heard.format(LOST_AFTER + 1))
    assert look(bench) == 1


def test_nothing_waits_for_it(bench: Bench) -> None:
    """While a reconciliation hangs, messages are dispatched, consumed and pruned as ever."""
    declare(bench)
    with held(bench, "reconciliation_mark") as waits:
        bench.work()
        wait_until(waits, "the reconciliation hangs")
        ids = bench.send(count=5)
        wait_until(lambda: len(bench.effects()) == 5, "the messages are consumed")
        assert sorted(bench.effects()) == sorted(ids)
        assert bench.rows(ENDED) == []


def test_a_worker_that_stops_cuts_it(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """The drain is bounded; the run ends at its next step, is recorded as interrupted, and is run again later."""
    caplog.set_level(logging.INFO, "outbox.worker")
    results = declare(bench, every=86400)
    with held(bench, "reconciliation_mark") as waits:
        worker = bench.work(roles=ROLES)
        wait_until(waits, "the reconciliation hangs")
        assert not worker.stop(0.1)
    wait_until(lambda: bench.rows(ERRORS) == ["interrupted"], "the record says so")
    assert results == []
    wait_until(lambda: "was interrupted, and will be run again" in caplog.text, "the log says so")
    age(bench, RETRY_AFTER + 1)
    assert look(bench) == 1


def test_a_worker_that_stops_waits_for_no_query(bench: Bench) -> None:
    """A read that takes long is cancelled: the worker drains in time."""
    declare(bench)
    with held(bench, "compensation") as waits:
        worker = bench.work(roles=ROLES)
        wait_until(waits, "the read hangs")
        assert worker.stop()
    assert bench.rows(ERRORS) == ["interrupted"]


def test_a_server_that_restarts(own_server: embedded.Server, own_url: str, new_bench: NewBench) -> None:
    """After the database was restarted the timetable goes on by itself, and what was due meanwhile is made up for."""
    bench = new_bench(own_url)
    results = declare(bench, every=0.2)
    worker = bench.work(roles=ROLES)
    wait_until(lambda: results, "it ran")
    own_server.restart()
    # What the restart has cut off would else be waited for.
    age(bench, LOST_AFTER + RETRY_AFTER)
    before = len(results)
    wait_until(lambda: len(results) > before, "it ran again")
    assert worker.stop()


def test_groups_that_consume_from_several_databases(bench: Bench, new_database: Callable[[], str]) -> None:
    """Each source is a job of its own, with the filters of the subscriptions; pairs may be chosen."""
    bench.outbox.consumer("far", group="mail", source=new_database(), tags={"x"})(bench.handle)
    declare(bench)
    bench.outbox.reconciliation("one", every=60, job={"pairs": [Pair("far", "mail")]})
    names = [each.name for each in reconcilers(bench.outbox, threading.Event())]
    assert names == ["reconcile nightly: far → mail", "reconcile nightly: paid → mail", "reconcile one: far → mail"]
    bench.work(roles=ROLES)
    wait_until(lambda: len(bench.rows(ENDED)) == 3, "all three were run")
    assert bench.rows(ERRORS) == []


def test_a_job_as_a_file(bench: Bench, tmp_path: Path) -> None:
    """A file says how to reconcile, what is said in code counts more."""
    config = tmp_path / "night.toml"
    config.write_text('tier = "digest"\n[window]\nlast = "24h"\ngrace = "1h"\n')
    results = declare(bench, config=config, job={"window": {"grace": "5s"}})
    assert look(bench) == 1
    (pair,) = results[0].pairs
    assert (pair.plan.tier.value, pair.window.grace) == ("digest", 5.0)
    assert pair.window.since is not None


def test_refused_without_the_libraries(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker without the extra says at its start how to install it, and doesn't fail at night."""
    declare(bench)
    monkeypatch.setitem(sys.modules, "outbox.reconcile.run", None)
    with pytest.raises(InvalidSettings, match=re.escape("it needs outbox.reconcile.run; pip install")):
        reconcilers(bench.outbox, threading.Event())


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"every": 60, "job": {"grace": 1}}, "grace is unknown; known are producer, consumer"),
        ({"every": 60, "job": {"record": False}}, "leave record out"),
        ({"every": 60, "job": {"record": {"url": "postgresql://far/x"}}}, "leave record out"),
        ({"every": 60, "job": {"pair": [{"topic": "paid", "group": "nobody"}]}}, "paid:nobody is no subscription"),
        ({"every": 60, "job": {"workers": 0}}, "workers = 0"),
        ({"every": 60, "config": "/nowhere.toml"}, "can't be read"),
    ],
)
def test_refused_when_the_worker_starts(bench: Bench, options: dict[str, Any], hint: str) -> None:
    """A job that can't be run is refused at the start, and not found out at night."""
    bench.outbox.consumer("paid", group="mail")(bench.handle)
    bench.outbox.reconciliation(**options)
    with pytest.raises(InvalidSettings, match=re.escape(hint)), Worker(bench.outbox):
        pass


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"at": "03:00", "every": 60},
        {"at": "3 o'clock"},
        {"at": "03:00", "timezone": "Mars/Olympus"},
        {"cron": "61 3 * * *"},
        {"at": "24:00"},
        {"cron": "0 3 * *"},
        {"cron": "0 3 * * 1"},
        {"every": 0},
        {"every": 60, "name": "a b"},
    ],
)
def test_refused_where_it_is_declared(bench: Bench, options: dict[str, Any]) -> None:
    """A timetable that can't be is refused at once."""
    with pytest.raises(InvalidSettings, match="reconciliation "):
        bench.outbox.reconciliation(**options)
    assert bench.outbox.reconciliations == {}


def test_refused_twice_and_no_duration(bench: Bench) -> None:
    """One name is one reconciliation, and an interval is a duration."""
    bench.outbox.reconciliation(every=60)
    with pytest.raises(InvalidHandler, match="'nightly' already"):
        bench.outbox.reconciliation(at="03:00")
    with pytest.raises(InvalidMessage, match="every"):
        bench.outbox.reconciliation("x", every=-1)


def test_the_role_alone_needs_a_reconciliation(bench: Bench) -> None:
    """A worker with nothing but this role, and nothing to reconcile, is refused."""
    with (
        pytest.raises(InvalidSettings, match="nothing to do for the roles reconcile"),
        Worker(bench.outbox, roles=["reconcile"]),
    ):
        pass


@pytest.mark.parametrize(
    ("when", "last", "due_in"),
    [
        ({"every": 60}, (None, None, None, None), 0),
        ({"every": 60}, (10, 5, False, False), 50),
        ({"every": 60}, (70, 5, False, False), -10),
        ({"every": 60}, (70, None, True, False), LOST_AFTER - 70),
        ({"every": 86400}, (700, 650, False, True), RETRY_AFTER - 650),
        ({"every": 60}, (50, 40, False, True), 10),
        ({"at": "13:30"}, (3600, 3500, False, False), 5400),
        ({"at": "11:30"}, (3600, 3500, False, False), -1800),
        ({"at": "11:00"}, (3600, 3500, False, False), 23 * 3600),
        ({"at": "14:00", "timezone": "Europe/Berlin"}, (60, 50, False, False), 3600),
        ({"cron": "15,45 * * * *"}, (60, 50, False, False), 900),
        ({"cron": "0 12 * * mon"}, (60, 50, False, False), 6 * 86400),
    ],
)
def test_when_it_is_due(when: dict[str, Any], last: tuple[Any, ...], due_in: float) -> None:
    """On a Tuesday at noon (UTC), after a run that began and ended so many seconds ago; a boundary is taken once."""
    began, ended = (None if ago is None else NOW - dt.timedelta(seconds=ago) for ago in last[:2])
    assert Timetable(Reconciliation("x", **when)).due_in(LastRun(NOW, began, began, ended, *last[2:])) == due_in
