"""Workers tell that they are there and how they fare, and once a minute how things stand."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Connection, Engine, text

import outbox
from outbox import Message, Outbox, Park, Resolution, Settings
from outbox.message.model import uuid7
from outbox.worker import Worker
from outbox.worker.report import Facts, handlers_of, leave, report_once
from tests.kit import wait_until
from tests.worker.conftest import Bench


def facts(number: int = 1) -> Facts:
    """What a worker without anything to do would tell."""
    return Facts(UUID(int=number), f"host:{number}", "1", ["dispatch"], [], {})


def rows(bench: Bench, sql: str) -> list[Any]:
    """Return all columns of a query."""
    with bench.observer.connect() as connection:
        return [tuple(row) for row in connection.execute(text(sql))]


def test_a_worker_reports_itself(bench: Bench) -> None:
    """From its start a worker is in the table with all that it does; when it ends in order it is gone from there."""
    bench.outbox.consumer("paid", group="mail", ordered=True)(bench.handle)
    worker = bench.work(roles=["dispatch", "consume"])
    wait_until(lambda: worker.health()["report"].last_success, "the worker has reported")
    worker.wake()
    wait_until(
        lambda: bench.rows("SELECT duties->'dispatch'->>'last_success' FROM outbox.worker")[0], "dispatch is reported"
    )
    ((id_, name, version, roles, handlers, duties, lived),) = rows(
        bench, "SELECT id, name, version, roles, handlers, duties, seen_at > started_at FROM outbox.worker"
    )
    assert (id_.version, version, roles, lived) == (7, outbox.__version__, ["consume", "dispatch"], True)
    assert name.rpartition(":")[2].isdigit()
    assert [(each["kind"], each["topic"], each["group"]) for each in handlers] == [("consumer", "paid", "mail")]
    assert handlers[0]["options"]["ordered"] is True
    assert set(duties) == {"dispatch", "consume paid of mail", "report"}
    assert duties["dispatch"]["failures"] == 0
    worker.stop()
    assert bench.rows("SELECT id FROM outbox.worker") == []


def test_what_handlers_do_is_reported(bench: Bench) -> None:
    """One duty of a group tells of its handler, for all threads; a worker that only retries tells of it too."""

    calls: list[UUID] = []

    def handle(message: Message, session: Any) -> Park | None:
        calls.append(message.id)
        bench.handle(message, session)
        return Park("for the test") if message.body["number"] == 0 else None

    bench.outbox.consumer("paid", group="mail", threads=2)(handle)
    told = "SELECT d.value -> 'handler' FROM outbox.worker, jsonb_each(duties) d WHERE d.value ? 'handler'"
    worker = bench.work(roles=["dispatch", "consume", "retry"])
    bench.send(count=3)
    wait_until(lambda: len(bench.inbox()) == 3, "all are done with")

    def reported() -> list[Any]:
        worker.wake()
        return [each for each in bench.rows(told) if each["done"] == 2 and each["failed"] == 1]

    (numbers,) = wait_until(reported, "the numbers are reported")
    assert (numbers["topic"], numbers["group"], numbers["in_flight"]) == ("paid", "mail", 0)
    # A thread that meets the other one at a queue may undo its call, and begin it again.
    assert sum(numbers["calls"].values()) == len(calls)
    worker.stop()
    bench.work(roles=["retry"])
    (numbers,) = wait_until(lambda: bench.rows(told), "a worker without consuming threads reports")
    assert (numbers["done"], numbers["lag"]) == (0, None)


def test_a_sample_has_what_handlers_did_in_the_minute(bench: Bench) -> None:
    """The times of all workers are added up by bucket; one that reports late counts as much as it did in a minute."""

    def worker(number: int, seconds: float, done: int, **calls: int) -> Facts:
        minute = {"seconds": seconds, "done": done, "failed": 1, "calls": calls}
        duty = {"handler": {"topic": "paid", "group": "mail", "minute": minute}}
        return Facts(UUID(int=number), f"host:{number}", "1", ["consume"], [], {"consume paid of mail": duty})

    with bench.engine.connect() as connection:
        for facts in (worker(1, 20.0, 8, a=5, b=3), worker(2, 120.0, 8, b=9), worker(3, 60.0, 500, a=500)):
            report_once(connection, Settings(), facts, lambda _: {})
        with connection.begin():
            connection.execute(text("DELETE FROM outbox.stats_sample"))
            connection.execute(text("UPDATE outbox.worker SET seen_at = now() - interval '1 h' WHERE name = 'host:3'"))
    bench.work(roles=["dispatch"])
    (sample,) = wait_until(
        lambda: bench.rows("SELECT stats FROM outbox.stats_sample WHERE stats ? 'at'"), "there is a sample"
    )
    assert sample["work"] == {"paid": {"mail": {"done": 12.0, "failed": 1.5, "calls": {"a": 5, "b": 12}}}}


def test_a_worker_that_is_cut_off_stays_in_the_table(bench: Bench) -> None:
    """A goodbye that can't be said doesn't keep the worker from ending."""
    worker = bench.work(roles=["dispatch"])
    wait_until(lambda: bench.rows("SELECT id FROM outbox.worker"), "the worker has reported")
    wait_until(lambda: bench.rows("SELECT stats ->> 'at' FROM outbox.stats_sample")[0], "there is a sample")
    with bench.engine.begin() as connection:
        connection.execute(text("LOCK TABLE outbox.worker IN ACCESS EXCLUSIVE MODE"))
        worker.stop()
    assert len(bench.rows("SELECT id FROM outbox.worker")) == 1


def test_a_sample_of_each_side(new_bench: Callable[..., Bench], bench: Bench) -> None:
    """What is sampled says how topics and groups stand, whatever part of it the worker serves."""
    bench.outbox.consumer("paid", group="mail")(bench.handle)
    worker = bench.work()
    bench.send(count=3)
    wait_until(lambda: len(bench.effects()) == 3, "all messages are handled")
    worker.stop()
    with bench.engine.begin() as connection:
        connection.execute(text("DELETE FROM outbox.stats_sample"))
    other = new_bench(bench.engine.url.render_as_string(hide_password=False))
    other.work(roles=["dispatch"])
    (sample,) = wait_until(
        lambda: bench.rows("SELECT stats FROM outbox.stats_sample WHERE stats ? 'at'"), "there is a sample"
    )
    assert sample["topics"] == {"paid": {"messages": 3, "committed": 3}}
    assert sample["groups"] == {"paid": {"mail": {"consumed": 3, "lag": 0}}}


def test_a_minute_is_sampled_once(engine: Engine, settings: Settings) -> None:
    """However many workers report at once, one of them looks how things stand."""
    looks: list[int] = []

    def report(number: int) -> None:
        def look(_: Connection) -> Mapping[str, Any]:
            looks.append(number)
            return {"at": "now", "by": number}

        with engine.connect() as connection:
            for _ in range(5):
                report_once(connection, settings, facts(number), look)

    threads = [threading.Thread(target=report, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with engine.connect() as connection:
        by = list(connection.scalars(text("SELECT stats -> 'by' FROM outbox.stats_sample ORDER BY sampled_at")))
        assert connection.scalar(text("SELECT count(*) FROM outbox.worker")) == 4
    assert by == looks  # more than one if the minute ended meanwhile


def test_who_dies_over_a_sample_leaves_a_gap(engine: Engine, settings: Settings) -> None:
    """A look that fails has the worker reported all the same, and isn't repeated in that minute."""

    def look(_: Connection) -> Mapping[str, Any]:
        raise RuntimeError("cut off")

    with engine.connect() as connection:
        with pytest.raises(RuntimeError):
            report_once(connection, settings, facts(), look)
        assert connection.scalar(text("SELECT name FROM outbox.worker")) == "host:1"
        assert connection.scalar(text("SELECT stats::text FROM outbox.stats_sample")) == "{}"


def test_a_report_is_made_anew_and_ends_with_the_worker(engine: Engine, settings: Settings) -> None:
    """A second report changes what is reported and when it was seen; a goodbye takes this worker only."""
    with engine.connect() as connection:
        for number in (1, 1, 2):
            report_once(connection, settings, facts(number), lambda _: {})
        seen = connection.scalar(text("SELECT max(seen_at - started_at) > interval '0' FROM outbox.worker"))
        connection.rollback()
        leave(connection, settings, UUID(int=1))
        assert connection.scalars(text("SELECT id FROM outbox.worker")).all() == [UUID(int=2)]
    assert seen


def test_a_sample_that_fails_is_told_once(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """Statistics that can't be had are no failure of the worker: it goes on, the sample says why, the log once."""
    with bench.engine.begin() as connection:
        connection.execute(text("ALTER TABLE outbox.scheduled_message RENAME TO hidden"))
    worker = bench.work(roles=["check"])
    for _ in range(2):
        (told,) = wait_until(
            lambda: bench.rows("SELECT stats ->> 'error' FROM outbox.stats_sample WHERE stats ? 'error'"), "why not"
        )
        assert "scheduled_message" in told
        with bench.engine.begin() as connection:
            connection.execute(text("DELETE FROM outbox.stats_sample"))
        worker.wake()
    assert worker.health()["report"].failures == 0
    assert [record.levelno for record in caplog.records if "no sample" in record.getMessage()] == [logging.WARNING]


def test_a_report_that_fails_stops_nothing(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """Without its table the worker works on, and the log has one line about it until it works again."""
    bench.outbox.consumer("paid", group="mail")(bench.handle)
    with bench.engine.begin() as connection:
        connection.execute(text("ALTER TABLE outbox.worker RENAME TO hidden"))
    worker = bench.work()
    wait_until(lambda: worker.health()["report"].failures > 1, "the report fails")
    bench.send(count=3)
    wait_until(lambda: len(bench.effects()) == 3, "all messages are handled")
    assert worker.health()["dispatch"].failures == 0
    with bench.engine.begin() as connection:
        connection.execute(text("ALTER TABLE outbox.hidden RENAME TO worker"))
    wait_until(lambda: bench.rows("SELECT id FROM outbox.worker"), "the worker reports again")
    assert sum(r.levelno >= logging.ERROR for r in caplog.records if "report" in r.getMessage()) == 1


def test_what_is_registered(engine: Engine, settings: Settings) -> None:
    """Consumers, checkers, compensations and reconciliations are told by topic and function; no password is."""
    app = Outbox(engine, settings=settings)
    source = "postgresql+psycopg://me:secret@elsewhere:6432/bank?password=secret"

    @app.consumer("paid", group="mail", source=source, batch=5, retry_delays=(1.0, 2.0))
    def mail(message: Any, session: Any) -> None: ...

    @app.checker("order")
    def ask(orphan: Any) -> Resolution:
        return Resolution.UNKNOWN

    @app.compensation("order", consumers=[source])
    def undo(message: Any, session: Any) -> None: ...

    app.reconciliation("nightly", at="03:00")
    consumer, checker, compensation, reconciliation = handlers_of(app)
    assert consumer["name"].endswith("test_what_is_registered.<locals>.mail")
    assert consumer["options"]["source"] == "elsewhere:6432/bank"
    assert {name: consumer["options"][name] for name in ("batch", "retries", "on_exhausted")} == {
        "batch": 5, "retries": 2, "on_exhausted": "park",
    }  # fmt: skip
    assert (checker["kind"], checker["topic"], checker["options"]["max_checks"]) == ("checker", "order", 15)
    options = {"consumers": ["elsewhere:6432/bank"], "when": "ordered", "after": 0.0, "timeout": 30.0}
    assert (compensation["kind"], compensation["options"]) == ("compensation", options)
    assert reconciliation["options"]["cron"] == "0 3 * * *"
    assert "secret" not in json.dumps(handlers_of(app))


def test_each_worker_is_another(bench: Bench) -> None:
    """Two workers in one process are told apart by ids that grow with the time."""
    before = uuid7()
    workers: list[Worker] = [bench.work(roles=["dispatch"]) for _ in range(2)]
    wait_until(lambda: len(bench.rows("SELECT id FROM outbox.worker")) == 2, "both have reported")
    assert all(before < id_ for id_ in bench.rows("SELECT id FROM outbox.worker"))
    workers[0].stop()
    assert len(bench.rows("SELECT id FROM outbox.worker")) == 1
