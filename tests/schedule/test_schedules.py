"""A schedule sends one message at each of its times, whatever happens to workers, clocks and functions."""

from __future__ import annotations

import datetime as dt
import json
import logging
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from outbox import INJECTED, Outbox, Outgoing, Settings
from outbox.database.execute import execute
from outbox.database.identity import renew
from outbox.errors import ActRefused, InvalidHandler, NotFound
from outbox.message.model import Counts
from outbox.schedule import sql
from outbox.schedule.schedule import MOST_MISSED, CronSchedule, Due
from outbox.schedule.schedule_pass import Scheduler, scheduled_id
from outbox.telemetry.events import ScheduleFailed, ScheduleMissed, ScheduleSuperseded
from outbox.telemetry.hooks import TelemetryEvent
from outbox.testing import drain, on_loop, schedules
from outbox.worker import Worker
from outbox.worker.connections import PassContext, Runners, WorkerDatabase
from tests.kit import Tables, tries
from tests.kit.processes import spoken_to
from tests.kit.waiting import wait_until
from tests.schedule.ticking import EVERY, tick_on

#: Workers at once that are killed.
WORKERS = min(tries(3), 10)
HOUR = dt.timedelta(hours=1)
NIGHTLY = "0 3 * * *"


class Clockwork(Tables):
    """An application with schedules, and passes of workers over them."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        super().__init__(engine)
        self.engine, self.settings = engine, settings
        self.app = Outbox(engine, settings=settings)
        self._open = ExitStack()

    def close(self) -> None:
        """Close the connections of all workers."""
        self._open.close()

    def declare(self, when: Any = 3600.0, function: Callable[..., Any] | None = None, **options: Any) -> CronSchedule:
        """Declare a schedule, which the database knows from now on."""
        name = options.setdefault("name", "hourly")
        self.app.every(when, topic="t", **options)(function or (lambda at: {"at": at.isoformat()}))
        self.worker()
        return self.app.schedules[name]

    def scheduler(self) -> tuple[Scheduler, Connection]:
        """Return a new worker's, and its connection."""
        connection = self._open.enter_context(self.engine.connect())
        runners = Runners(WorkerDatabase(self.engine), threading.Event(), PassContext(self.app.active), "a call")
        scheduler = Scheduler(self.settings, self.app.schedules, runners)
        self._open.callback(scheduler.end)
        return scheduler, connection

    def worker(self) -> Callable[[], Counts]:
        """Return the pass of a new worker, which has looked once."""
        scheduler, connection = self.scheduler()
        once = partial(scheduler.once, connection, connection, lambda: False)
        once()
        return once

    def pass_by(self, times: float, name: str = "hourly") -> None:
        """Let so many hours have passed since the last time."""
        self.run(f"UPDATE outbox.cron_schedule SET last_at = last_at - interval '{times} hours' WHERE name = '{name}'")

    def ids(self) -> list[Any]:
        """Return the ids of the messages."""
        return self.rows("SELECT id FROM outbox.half_message")

    def sent(self) -> list[Any]:
        """Return the bodies of the messages, in the order of their ops."""
        rows = "SELECT body FROM outbox.half_message h JOIN outbox.op_message o ON o.half_id = h.id ORDER BY o.sequence"
        texts = [bytes(body).decode() for body in self.rows(rows)]
        return [json.loads(each) if each.startswith("{") else each for each in texts]


@pytest.fixture
def clockwork(engine: Engine, settings: Settings) -> Iterator[Clockwork]:
    """An application with schedules."""
    made = Clockwork(engine, settings)
    yield made
    made.close()


# --- what is to be done ----------------------------------------------------------------------------------------------

NOON = dt.datetime(2026, 11, 30, 12, 0, tzinfo=dt.UTC)


@pytest.mark.parametrize(
    ("missed", "hours", "late", "expected"),
    [
        ("one", 0.5, 5, Due([])),
        ("one", 1, 5, Due([NOON], NOON)),
        ("one", 3, 5, Due([NOON], NOON, NOON - 2 * HOUR)),
        ("one", 3, 1800, Due([NOON], NOON, NOON - 2 * HOUR)),
        ("skip", 1, 5, Due([NOON], NOON)),
        ("skip", 3, 5, Due([NOON], NOON, NOON - 2 * HOUR)),
        ("skip", 3, 1800, Due([], NOON, NOON - 2 * HOUR)),
        ("all", 3, 1800, Due([NOON - 2 * HOUR, NOON - HOUR, NOON], NOON)),
        # A clock that went back: what was done is done.
        *((missed, -5, 0, Due([])) for missed in ("one", "skip", "all")),
    ],
)
def test_what_is_due(clockwork: Clockwork, missed: Any, hours: float, late: float, expected: Due) -> None:
    """By the last time that is done and by now, so many seconds after a time."""
    schedule = clockwork.declare(missed=missed)
    now = NOON + dt.timedelta(seconds=late)
    now -= dt.timedelta(seconds=late + 1) if hours < 1 else dt.timedelta()
    assert schedule.due(NOON - hours * HOUR, now) == expected


def test_more_than_a_pass_makes_up_for(clockwork: Clockwork) -> None:
    """The oldest come first, and then the rest."""
    schedule = clockwork.declare(missed="all")
    due = schedule.due(NOON - 250 * HOUR, NOON)
    assert (len(due.times), due.more, due.done) == (MOST_MISSED, True, due.times[-1])
    assert due.times[0] == NOON - 249 * HOUR


# --- passes ----------------------------------------------------------------------------------------------------------


def test_a_message_of_each_time(clockwork: Clockwork) -> None:
    """It begins with the first time after a worker has met it; then each time comes once, with the id of its time."""
    clockwork.declare()
    worker = clockwork.worker()
    clockwork.pass_by(1)
    assert worker().done == 1
    assert worker() == Counts()
    ((body, half_id),) = zip(clockwork.sent(), clockwork.ids(), strict=True)
    source, schedule = clockwork.value("SELECT outbox.source_id()"), clockwork.app.schedules["hourly"]
    assert half_id == scheduled_id(source, schedule, dt.datetime.fromisoformat(body["at"]))


def test_many_workers_at_once(clockwork: Clockwork) -> None:
    """Ten find the same time at the same moment; one sends."""
    clockwork.declare(missed="all")
    workers = [clockwork.worker() for _ in range(10)]
    for _ in range(tries(5)):
        clockwork.pass_by(3)
        before = len(clockwork.sent())
        with ThreadPoolExecutor(10) as pool:
            counts = list(pool.map(lambda each: each(), workers))
        assert sum(each.done for each in counts) in {3, 4}
        assert len(clockwork.sent()) - before == sum(each.done for each in counts)
        clockwork.run("DELETE FROM outbox.half_message; DELETE FROM outbox.op_message")


@pytest.mark.parametrize("missed", ["one", "skip"])
@pytest.mark.parametrize("meanwhile", ["another pass", "an order that is taken", "a pause", "a resumption"])
def test_what_was_read_before(clockwork: Clockwork, missed: Any, meanwhile: str, heard: list[TelemetryEvent]) -> None:
    """A worker that has read the row before another one's pass, or an operator's act, does nothing."""
    schedule, worker, operator = clockwork.declare(missed=missed), clockwork.worker(), clockwork.app.operator
    clockwork.pass_by(50)
    if meanwhile == "an order that is taken":
        operator.run_cron("hourly", by="ada")
    scheduler, connection = clockwork.scheduler()
    ((source, now, _, *known),) = execute(connection, sql.schedules(clockwork.settings.schema, names=["hourly"]))[0]
    if meanwhile in {"another pass", "an order that is taken"}:
        worker()
    else:
        operator.pause_cron("hourly", by="ada", why="calm")
    if meanwhile == "a resumption":
        operator.resume_cron("hourly", by="ada")
    before = len(clockwork.sent()), len(heard)
    connection.rollback()
    assert scheduler._send_due(connection, schedule, source, now, tuple(known[4:]))[0] == Counts()
    assert (len(clockwork.sent()), len(heard)) == before


def test_a_time_is_made_up_for_once_after_a_restore(clockwork: Clockwork, heard: list[TelemetryEvent]) -> None:
    """A database that was put back to before sends the message of a time under the id that it had."""
    clockwork.declare()
    worker = clockwork.worker()
    last = clockwork.value("SELECT last_at FROM outbox.cron_schedule")
    for _ in range(2):
        clockwork.run("UPDATE outbox.cron_schedule SET last_at = :last - interval '1 hour'", last=last)
        assert worker().done == 1
    assert len(clockwork.sent()) == 1
    assert not [each for each in heard if isinstance(each, ScheduleFailed)]


def test_two_schedules_of_one_name(clockwork: Clockwork, new_engine: Callable[[], Engine], settings: Settings) -> None:
    """In two databases, or of two topics, the same time is two messages: a consumer of both takes both."""
    other = Clockwork(new_engine(), settings)
    with other.engine.begin() as connection:
        renew(connection, settings.schema)
    for each in (clockwork, other):
        each.declare(NIGHTLY)
        each.pass_by(50)
        each.worker()
    clockwork.app = Outbox(clockwork.engine, settings=settings)
    clockwork.app.every(NIGHTLY, topic="u", name="hourly")(lambda at: "other")
    clockwork.worker()
    clockwork.pass_by(50)
    clockwork.worker()
    other.close()
    ids = clockwork.ids() + other.ids()
    assert len(ids) == len(set(ids)) == 3


def test_a_clock_that_jumps(clockwork: Clockwork, heard: list[TelemetryEvent]) -> None:
    """Forward, it is told what was missed; back, no time comes a second time."""
    clockwork.declare()
    worker = clockwork.worker()
    clockwork.pass_by(50)
    assert worker().done == 1
    (missed,) = [each for each in heard if isinstance(each, ScheduleMissed)]
    assert (missed.schedule, missed.policy, missed.level) == ("hourly", "one", logging.WARNING)
    clockwork.pass_by(-30)
    assert worker() == Counts()
    assert len(clockwork.sent()) == 1


def test_what_was_missed_is_left_out(clockwork: Clockwork, heard: list[TelemetryEvent]) -> None:
    """That is told once, and the schedule goes on with its next time."""
    clockwork.declare(NIGHTLY, missed="skip")
    workers = [clockwork.worker(), clockwork.worker()]
    clockwork.pass_by(50)
    assert [worker() for worker in workers] == [Counts(), Counts()]
    assert len([each for each in heard if isinstance(each, ScheduleMissed)]) == 1
    assert clockwork.sent() == []


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda at: None, []),
        (lambda at, session: session.execute(text("SELECT 7")).scalar() == 7 and "7", ["7"]),
        (lambda at: Outgoing("x", key="k", id="business"), ["x"]),
        (lambda at: Outgoing("y", dedupe="z"), ["y"]),
    ],
)
def test_what_a_function_returns(clockwork: Clockwork, function: Callable[..., Any], expected: list[Any]) -> None:
    """A body, an Outgoing that says more, or None to send nothing; it may read by a session."""
    clockwork.declare(function=function)
    clockwork.pass_by(1)
    clockwork.worker()
    assert clockwork.sent() == expected


def test_a_function_that_fails(
    clockwork: Clockwork, heard: list[TelemetryEvent], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it did is undone, that is told, and it is called again for the same time; others go on."""
    errors: list[Exception] = [ValueError("ill")]
    asked: list[dt.datetime] = []

    def fails(at: dt.datetime, session: Session = INJECTED) -> str:
        asked.append(at)
        session.execute(text("CREATE TABLE leftover (n int)"))
        if errors:
            raise errors.pop()
        return "well"

    clockwork.declare(function=fails, name="ill")
    clockwork.declare(name="well")
    worker = clockwork.worker()
    for name in ("ill", "well"):
        clockwork.pass_by(1, name)
    assert (worker().done, worker().done) == (1, 0)
    (failed,) = [each for each in heard if isinstance(each, ScheduleFailed)]
    assert (failed.schedule, failed.reason, failed.at) == ("ill", "ValueError: ill", asked[0])
    assert clockwork.value("SELECT to_regclass('leftover')") is None
    monkeypatch.setattr("outbox.schedule.schedule_pass.time.monotonic", lambda: float("inf"))
    assert worker().done == 1
    assert asked[0] == asked[1]
    assert "well" in clockwork.sent()


def test_a_connection_that_was_lost(clockwork: Clockwork, heard: list[TelemetryEvent]) -> None:
    """It is no failure of the schedule: the pass fails, and the next one sends."""
    clockwork.declare()
    worker = clockwork.worker()
    clockwork.pass_by(1)
    assert worker().done == 1
    clockwork.run("SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE application_name = 'a call'")
    clockwork.pass_by(1)
    with pytest.raises(OperationalError):
        worker()
    assert worker().done == 1
    assert not [each for each in heard if isinstance(each, ScheduleFailed)]


@pytest.mark.parametrize("first", ["aaa", "zzz"])
def test_a_schedule_that_is_ill_keeps_none_from_its_times(
    clockwork: Clockwork, first: str, heard: list[TelemetryEvent]
) -> None:
    """Also one whose function can't reach another database, or whose times can't be told."""

    def reaches(at: dt.datetime) -> None:
        create_engine("postgresql+psycopg://nobody@127.0.0.1:1/none").connect()

    clockwork.declare(function=reaches, name=first)
    clockwork.declare(name="mmm")
    clockwork.declare(name="nnn")
    worker = clockwork.worker()
    object.__setattr__(clockwork.app.schedules["nnn"], "recurrence", None)
    for name in (first, "mmm"):
        clockwork.pass_by(1, name)
    assert worker().done == 1
    assert {each.schedule for each in heard if isinstance(each, ScheduleFailed)} == {first, "nnn"}


def test_a_function_that_sends(clockwork: Clockwork) -> None:
    """Its own messages go out with that of the time; none of them is caused by a message."""

    def sends(at: dt.datetime, session: Session) -> str:
        clockwork.app.send(session, "u", {"own": 1})
        return "made"

    clockwork.declare(function=sends)
    clockwork.pass_by(1)
    clockwork.worker()
    assert sorted(map(str, clockwork.sent())) == ["made", "{'own': 1}"]


def test_what_an_order_is_told_of(clockwork: Clockwork, heard: list[TelemetryEvent]) -> None:
    """A run that an operator orders makes nothing of the times that were missed."""
    clockwork.declare(NIGHTLY)
    worker = clockwork.worker()
    clockwork.pass_by(50)
    clockwork.app.operator.run_cron("hourly", by="ada")
    assert worker().done == 2
    assert worker() == Counts()
    assert len([each for each in heard if isinstance(each, ScheduleMissed)]) == 1


def test_a_declaration_that_changes(clockwork: Clockwork) -> None:
    """One with other times begins anew: what has passed by them is no time of it. Another topic changes no time."""
    clockwork.declare()
    clockwork.pass_by(1)
    clockwork.app = Outbox(clockwork.engine, settings=clockwork.settings)
    clockwork.declare(1800.0)
    assert clockwork.worker()() == Counts()
    assert clockwork.sent() == []
    clockwork.pass_by(1)
    clockwork.app = Outbox(clockwork.engine, settings=clockwork.settings)
    clockwork.declare(1800.0, missed="all")
    clockwork.worker()
    assert len(clockwork.sent()) in {2, 3}


@pytest.mark.parametrize("changed", [{"when": dt.timedelta(days=5)}, {"missed": "all"}])
def test_two_releases_at_once(clockwork: Clockwork, changed: dict[str, Any], heard: list[TelemetryEvent]) -> None:
    """The declaration of the worker that began last counts; the other one leaves it alone, and both rest meanwhile."""
    ten: dict[str, Any] = {"when": dt.timedelta(days=10)}
    clockwork.declare(**ten)
    old, connection = clockwork.scheduler()
    old.once(connection, connection, lambda: False)
    clockwork.app = Outbox(clockwork.engine, settings=clockwork.settings)
    schedule = clockwork.declare(**{**ten, **changed})
    new, _ = clockwork.scheduler()
    for _ in range(3):
        clockwork.pass_by(240)
        assert old.once(connection, connection, lambda: False) == Counts()
        assert new.once(connection, connection, lambda: False).done >= 1
        assert min(old.every(), new.every()) > 0.1
    # Also one that has read the row before the other one's declaration.
    old._declare(connection, old._schedules["hourly"], NOON, NOON)
    assert [each.schedule for each in heard if isinstance(each, ScheduleSuperseded)] == ["hourly"]
    assert clockwork.rows("SELECT recurrence || missed FROM outbox.cron_schedule") == [
        f"{schedule.recurrence}{schedule.missed}"
    ]


def test_a_function_that_takes_long(clockwork: Clockwork, released: threading.Event) -> None:
    """Other workers don't wait for it, and an operator is told that it runs."""
    running = threading.Event()

    def slow(at: dt.datetime) -> str:
        running.set()
        released.wait()
        return "late"

    clockwork.declare(function=slow, missed="all")
    first, (second, connection) = clockwork.worker(), clockwork.scheduler()
    clockwork.pass_by(300)
    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(first)
        assert running.wait(60)
        assert second.once(connection, connection, lambda: False) == Counts()
        assert second.every() > 1
        with pytest.raises(ActRefused, match="schedule 'hourly' is busy"):
            clockwork.app.operator.pause_cron("hourly", by="ada", why="calm")
        released.set()
        assert made.result().done == MOST_MISSED


def test_what_can_not_be_declared(engine: Engine) -> None:
    """A name that is taken, a policy that isn't one, a function that can't be called."""
    app = Outbox(engine)

    @app.every(NIGHTLY, topic="t")
    def nightly(at: dt.datetime) -> str:
        return str(at)

    for options, function, why in (
        ({}, nightly, "is declared already"),
        ({"name": "b", "missed": "some"}, nightly, "must be one of one, all, skip"),
        ({"name": "c"}, lambda: None, "must take"),
        ({"name": "d", "timeout": 0.0}, nightly, "timeout = 0.0 must be greater than 0"),
        ({}, lambda at: None, "a schedule needs a name of letters"),
    ):
        with pytest.raises(InvalidHandler, match=why):
            app.every(NIGHTLY, topic="t", **options)(function)  # type: ignore[arg-type]  # what is refused
    assert list(app.schedules) == ["nightly"]


# --- operators, workers, tests of users ------------------------------------------------------------------------------


def test_an_operator(clockwork: Clockwork) -> None:
    """Sees the times; pauses, resumes, runs now and deletes."""
    clockwork.declare(NIGHTLY, zone="Europe/Berlin")
    operator, worker = clockwork.app.operator, clockwork.worker()
    (row,) = operator.cron_schedules()
    assert (row.name, row.topic, row.recurrence, row.missed) == ("hourly", "t", f"{NIGHTLY} Europe/Berlin", "one")
    assert row.next_at is not None
    operator.pause_cron("hourly", by="ada", why="calm")
    clockwork.pass_by(50)
    assert worker() == Counts()
    operator.run_cron("hourly", by="ada")
    assert worker().done == 1
    with pytest.raises(ActRefused, match="it is paused already"):
        operator.pause_cron("hourly", by="ada", why="calm")
    operator.resume_cron("hourly", by="ada")
    assert operator.cron_schedules()[0].next_at is None
    assert worker() == Counts()
    (row,) = operator.cron_schedules()
    assert (row.next_at is None, row.overdue) == (False, None)
    (body,) = clockwork.sent()
    assert dt.datetime.fromisoformat(body["at"]).utcoffset() != dt.timedelta()
    operator.delete_cron("hourly", by="ada", why="gone")
    with pytest.raises(NotFound, match="has no schedule 'hourly'; see those that it has: outbox cron list"):
        operator.run_cron("hourly", by="ada")
    actions = clockwork.rows("SELECT action FROM outbox.audit ORDER BY id")
    assert actions == ["pause_cron", "run_cron", "resume_cron", "delete_cron"]


def test_a_worker(clockwork: Clockwork) -> None:
    """Its messages reach their consumers; what an operator orders, it sends within seconds."""
    got: list[Any] = []
    clockwork.app.every(0.1, topic="t", name="often")(lambda at: {"at": at.timestamp()})
    clockwork.app.every(NIGHTLY, topic="t", name="nightly")(lambda at: "night")
    clockwork.app.consumer("t", group="g")(lambda message, session: got.append(message.body))
    with Worker(clockwork.app):
        wait_until(lambda: len(got) > 5, "it ticks")
        clockwork.app.operator.run_cron("nightly", by="ada")
        wait_until(lambda: "night" in got, "the order is carried out")
        wait_until(clockwork.app.operator.handlers, "its report is there")
        (handler,) = [each for each in clockwork.app.operator.handlers() if each.name == "nightly"]
        assert (handler.kind, handler.options["times"]) == ("schedule", f"{NIGHTLY} UTC")


def test_in_tests_of_users(clockwork: Clockwork) -> None:
    """One message of each schedule, now; their own times stay as they are."""
    got: list[Any] = []
    clockwork.app.every(NIGHTLY, topic="t", name="a")(lambda at: "a")
    clockwork.app.every(60.0, topic="t", name="b")(lambda at: "b")
    clockwork.app.consumer("t", group="g")(lambda message, session: got.append(message.body))
    assert schedules(clockwork.app).done == 2
    drain(clockwork.app)
    assert sorted(got) == ["a", "b"]


async def test_an_async_function(clockwork: Clockwork) -> None:
    """It is awaited."""

    @clockwork.app.every(NIGHTLY, topic="t")
    async def nightly(at: dt.datetime) -> str:
        return "async"

    assert (await on_loop(schedules, clockwork.app)).done == 1
    assert clockwork.sent() == ["async"]


@pytest.mark.slow
def test_each_time_once_under_kills(clockwork: Clockwork) -> None:
    """Workers are killed again and again: no time is left out, and none comes twice."""
    url = clockwork.engine.url.render_as_string(hide_password=False)
    for number in range(tries(6)):
        with ExitStack() as stack:
            for pipe in [stack.enter_context(spoken_to(tick_on)) for _ in range(WORKERS)]:
                pipe.send(url)
            least = len(clockwork.sent()) + random.randrange(1, 15)  # noqa: S311
            wait_until(
                partial(has_come, clockwork, least), f"there are messages in round {number}; then all are killed"
            )
    ticks = [round(body["at"] / EVERY) for body in clockwork.sent()]
    assert sorted(ticks) == list(range(min(ticks), min(ticks) + len(ticks)))


def has_come(clockwork: Clockwork, least: int) -> bool:
    """Tell whether there are so many messages."""
    return len(clockwork.sent()) >= least
