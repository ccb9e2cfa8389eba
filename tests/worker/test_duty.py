"""The lanes in which duties run and the clock that wakes them, without a database."""

from __future__ import annotations

import itertools
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from apscheduler.events import EVENT_SCHEDULER_STARTED

from outbox import Counts
from outbox.database.duty import Task
from outbox.database.engines import Pass
from outbox.database.execute import Backoff
from outbox.worker import clock
from outbox.worker import duty as duty_module
from outbox.worker.clock import Clock
from outbox.worker.connections import OwnRunner
from outbox.worker.duty import (
    HOT_CAP,
    HOT_FIRST,
    HOT_FIRST_IF_WOKEN,
    HOT_IF_BUSY,
    HOT_PART,
    Lane,
    RunningDuty,
    jittered,
)
from tests.kit import wait_until

NEVER = 3600.0


class NoConnection(OwnRunner):
    """Runs passes that need no connection."""

    def __init__(self, stopping: threading.Event) -> None:
        nothing: Any = None
        super().__init__(nothing, None, stopping)

    def close(self) -> None: ...

    def cut(self) -> None: ...

    def _run(self, one_pass: Pass) -> Counts:
        nothing: Any = None
        return one_pass(nothing, nothing)


class Stand:
    """Duties, each in a lane of its own unless told otherwise, and a clock; stopped when the test ends."""

    def __init__(self) -> None:
        self.stopping = threading.Event()
        self.clock = Clock()
        self.lanes: list[Lane] = []

    def lane(self) -> Lane:
        """Make a lane."""
        self.lanes.append(Lane(NoConnection(self.stopping), self.clock, self.stopping))
        return self.lanes[-1]

    def duty(
        self,
        name: str,
        one_pass: Callable[[], Counts],
        *,
        lane: Lane | None = None,
        wait: Callable[[], float] = lambda: NEVER,
        after: Callable[[], None] | None = None,
        eager: bool = True,
        is_woken: Callable[[], bool] = lambda: False,
    ) -> RunningDuty:
        """Make a duty."""
        task = Task(name=name, one_pass=lambda *_: one_pass(), every=wait, after=after, eager=eager)
        return RunningDuty(task, lane or self.lane(), 0.01, is_woken=is_woken)

    def start(self) -> None:
        """Start all lanes and the clock."""
        for lane in self.lanes:
            lane.start()
        self.clock.start()


@pytest.fixture
def stand() -> Iterator[Stand]:
    """Duties on a clock."""
    stand = Stand()
    yield stand
    stand.stopping.set()
    stand.clock.stop()
    assert all(lane.rested(60) for lane in stand.lanes)


def test_no_wake_up_is_lost_while_a_duty_goes_quiet(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work that comes in the very moment in which a duty gives its thread back is done at once, not an hour later."""
    monkeypatch.setattr(duty_module, "QUIET_AFTER", 0.0)
    work: queue.SimpleQueue[int] = queue.SimpleQueue()
    done: queue.SimpleQueue[int] = queue.SimpleQueue()

    def one_pass() -> Counts:
        try:
            done.put(work.get_nowait())
        except queue.Empty:
            return Counts()
        return Counts(taken=1, done=1)

    duty = stand.duty("take", one_pass)
    stand.start()
    for number in range(3000):
        for _ in range(number * 37 % 2000):
            pass
        work.put(number)
        duty.wake()
        # The next one follows soon after the duty has taken this one, and so while it is going quiet.
        assert done.get(timeout=60) == number


def test_a_wake_up_during_the_last_pass_leads_to_another(stand: Stand) -> None:
    """A wake-up while a pass runs may be about what the pass did not see: the duty looks again."""
    passes = threading.Semaphore(0)
    late = iter([True])

    def one_pass() -> Counts:
        if next(late, False):
            duty.wake()
        passes.release()
        return Counts()

    duty = stand.duty("look", one_pass)
    stand.start()
    for _ in range(2):
        assert passes.acquire(timeout=60)


def test_concurrent_wake_ups_are_all_answered(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    """With several threads waking a duty, whatever was put before a wake-up is seen by a pass after it."""
    monkeypatch.setattr(duty_module, "QUIET_AFTER", 0.0)
    work: queue.SimpleQueue[queue.SimpleQueue[None]] = queue.SimpleQueue()

    def one_pass() -> Counts:
        taken = 0
        while not work.empty():
            work.get().put(None)
            taken += 1
        return Counts(taken=taken)

    duty = stand.duty("take", one_pass)
    stand.start()
    missing: list[int] = []

    def ask() -> None:
        for number in range(500):
            answer: queue.SimpleQueue[None] = queue.SimpleQueue()
            work.put(answer)
            duty.wake()
            try:
                answer.get(timeout=60)
            except queue.Empty:
                missing.append(number)
                return

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert missing == []


def test_a_busy_duty_is_repeated_until_it_is_done(stand: Stand) -> None:
    """Pass follows pass while there is more, although the next regular look would be an hour away."""
    left = iter([Counts(taken=1)] * 50 + [Counts(more=True)] * 50)
    finished = threading.Event()

    def one_pass() -> Counts:
        if (counts := next(left, None)) is None:
            finished.set()
            return Counts()
        return counts

    stand.duty("busy", one_pass)
    stand.start()
    assert finished.wait(60)


def test_a_busy_duty_leaves_its_lane_to_others_in_between(stand: Stand) -> None:
    """Two duties that always find more take turns; a long pass is asked to end when another duty of its lane is due."""
    lane, order = stand.lane(), list[str]()
    finished = threading.Event()

    def quick() -> Counts:
        order.append("quick")
        return Counts(more=True)

    def long() -> Counts:
        order.append("long")
        wait_until(lane.ending, "the pass is asked to end")
        if len(order) > 10:
            finished.set()
        return Counts()

    stand.duty("quick", quick, lane=lane)
    stand.duty("long", long, lane=lane)
    stand.start()
    assert finished.wait(60)
    assert order[:10] == ["quick", "long"] * 5


def test_a_duty_that_is_not_eager_looks_once(stand: Stand) -> None:
    """After its work a duty that isn't eager waits for its interval, unless the pass says that there is more."""
    passes = itertools.count(1)

    def one_pass() -> Counts:
        return Counts(taken=1, more=next(passes) < 3)

    duty = stand.duty("prune", one_pass, eager=False)
    assert [duty.run() < time.monotonic() + 1 for _ in range(3)] == [True, True, False]


def test_a_wait_that_changes(stand: Stand) -> None:
    """The longest wait is asked for after each pass: a duty with an hour ahead of it can be called back sooner."""
    waits = iter([3600.0, 0.01])
    passes = threading.Semaphore(0)

    def one_pass() -> Counts:
        passes.release()
        return Counts()

    duty = stand.duty("poll", one_pass, wait=lambda: next(waits, 0.01), eager=False)
    stand.start()
    assert passes.acquire(timeout=60)
    assert not passes.acquire(timeout=0.1)
    duty.wake()
    for _ in range(5):
        assert passes.acquire(timeout=60)


def test_a_duty_looks_by_itself_when_its_wait_is_over(stand: Stand) -> None:
    """Nobody wakes the duty: polling alone brings it back."""
    passes = threading.Semaphore(0)

    def one_pass() -> Counts:
        passes.release()
        return Counts()

    stand.duty("poll", one_pass, wait=lambda: 0.01)
    stand.start()
    for _ in range(5):
        assert passes.acquire(timeout=60)


def test_a_failing_duty_goes_on_and_stops_no_other(stand: Stand, caplog: pytest.LogCaptureFixture) -> None:
    """A duty that raises is tried again; its outage is one line in the log, its recovery another."""
    caplog.set_level(logging.INFO, "outbox.worker")
    tries = itertools.count(1)

    def one_pass() -> Counts:
        if next(tries) <= 5:
            raise OSError("no route to host")
        return Counts()

    bad = stand.duty("bad", one_pass)
    good = stand.duty("good", Counts)
    stand.start()
    wait_until(lambda: bad.health.last_success, "the duty recovers")
    wait_until(lambda: good.health.last_success, "the other duty runs")
    assert bad.health.last_error == "OSError: no route to host"
    assert bad.health.failures == 0
    assert good.health.last_error is None
    events = [getattr(record, "outbox_event", None) for record in caplog.records]
    assert events == ["duty.failed", "duty.recovered"]


def test_the_duties_behind_a_duty_are_woken_also_when_it_failed(stand: Stand) -> None:
    """A pass that brought work, or raised after its commit, wakes the duties behind it; one without work does not."""
    answers: Iterator[Counts | BaseException] = iter([Counts(), Counts(taken=1), OSError("lost"), SystemExit(1)])
    woken: list[None] = []

    def one_pass() -> Counts:
        match next(answers):
            case BaseException() as error:
                raise error
            case counts:
                return counts

    duty = stand.duty("dispatch", one_pass, after=lambda: woken.append(None))
    for expected in (0, 1, 2, 3):
        duty.run()
        assert len(woken) == expected


@pytest.mark.parametrize("woken", [False, True])
def test_a_duty_looks_the_less_the_longer_it_has_found_nothing(
    stand: Stand, monkeypatch: pytest.MonkeyPatch, woken: bool
) -> None:
    """After work it looks by the millisecond, unless others wake it; a wait is a part of the silence, then it rests."""
    now = 100.0
    monkeypatch.setattr(duty_module, "time", SimpleNamespace(monotonic=lambda: now, perf_counter=time.perf_counter))
    answers = iter([Counts(taken=1)])
    duty = stand.duty("take", lambda: next(answers, Counts()), is_woken=lambda: woken)
    waits = dict[float, float]()
    while (due_at := duty.run()) < math.inf:
        waits[now - 100.0] = due_at - now
        now = due_at
    shortest = HOT_FIRST_IF_WOKEN if woken else HOT_FIRST
    assert waits[0.0] == pytest.approx(shortest)
    assert all(
        wait == pytest.approx(min(max(silence * HOT_PART, shortest), HOT_CAP)) for silence, wait in waits.items()
    )
    assert duty_module.QUIET_AFTER - HOT_CAP <= max(waits) < duty_module.QUIET_AFTER


def test_a_dispatcher_that_is_not_told_looks_by_the_millisecond(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    """It finds ops of which no sender has told, as some drivers can't: so it looks often, until it is told of some."""
    now, told = 100.0, []
    monkeypatch.setattr(duty_module, "time", SimpleNamespace(monotonic=lambda: now, perf_counter=time.perf_counter))
    counts = [Counts(taken=1)] * 2 + [Counts(taken=1, more=True), Counts(taken=1), Counts(taken=1), Counts(), Counts()]
    answers = iter(counts)
    task = Task(name="t", one_pass=lambda *_: next(answers), every=NEVER, eager=True, on_ops=lambda: told.append(now))
    duty = RunningDuty(task, stand.lane(), 0.01, is_woken=lambda: True)

    def wait() -> float:
        return duty.run() - now

    duty.nudge()
    assert wait() == pytest.approx(HOT_FIRST_IF_WOKEN)
    assert wait() == pytest.approx(HOT_FIRST), "found without being told"
    duty.nudge()
    assert wait() == 0, "there is more"
    now += 0.001
    assert wait() == pytest.approx(HOT_IF_BUSY), "more came than could be told of"
    now += HOT_CAP
    assert wait() == pytest.approx(HOT_FIRST)
    now += duty_module.QUIET_AFTER
    assert wait() == math.inf
    duty.nudge()
    assert wait() == pytest.approx(HOT_FIRST_IF_WOKEN), "another worker may have had the turn"
    assert told == [100.0, 100.0, now]


def test_a_duty_whose_lane_is_held_is_not_at_work(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass hangs: those that would wake the duty by a call tell others, too."""
    monkeypatch.setattr(duty_module, "HOT_CAP", 0.0)
    begun, end = threading.Event(), threading.Event()

    def one_pass() -> Counts:
        begun.set()
        assert end.wait(60)
        return Counts()

    duty = stand.duty("take", one_pass, eager=False)
    assert duty.is_at_work
    stand.start()
    assert begun.wait(60)
    wait_until(lambda: not duty.is_at_work, "the pass has taken too long")
    end.set()
    wait_until(lambda: duty.is_at_work, "it has ended")


def test_a_wake_up_does_not_shorten_a_back_off(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    """While its database is away, a duty that is woken all the time tries again only when its wait is over."""
    monkeypatch.setattr(duty_module, "_FAILURE_FIRST", NEVER)
    tries = itertools.count(1)
    tried = threading.Event()

    def one_pass() -> Counts:
        assert next(tries) == 1
        tried.set()
        raise OSError("no route to host")

    lane = stand.lane()
    bad = RunningDuty(Task(name="bad", one_pass=lambda *_: one_pass(), every=NEVER), lane, NEVER)
    good = stand.duty("good", Counts, lane=lane)
    stand.start()
    assert tried.wait(60)
    wait_until(lambda: good.health.last_success, "the other duty runs")
    bad.wake()
    before = good.health.last_success
    good.wake()
    wait_until(lambda: good.health.last_success != before, "the other duty runs again")
    assert bad.health.failures == 1


def test_duties_go_on_when_the_clock_is_set_back(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the host's clock is set back by an hour, jobs that seem an hour away run now."""
    offset = 0.0
    monkeypatch.setattr(clock, "_WAKE_EVERY", 0.01)
    monkeypatch.setattr(clock, "_SteadyJobStore", lambda made=clock._SteadyJobStore: made(lambda: offset))
    stand.clock = Clock()
    passes = threading.Semaphore(0)

    def one_pass() -> Counts:
        passes.release()
        return Counts()

    stand.duty("poll", one_pass)
    stand.start()
    assert passes.acquire(timeout=60)
    offset = -3600.0
    assert passes.acquire(timeout=60)


def test_a_clock_is_stopped_while_it_starts(stand: Stand) -> None:
    """Another thread that stops it has to wait until the scheduler's thread is there."""
    scheduler = stand.clock._scheduler
    errors: list[BaseException] = []

    def stop() -> None:
        try:
            stand.clock.stop()
        except BaseException as error:
            errors.append(error)

    rival = threading.Thread(target=stop)

    def started(_: object) -> None:  # within start(), before the scheduler has a thread
        rival.start()
        rival.join(0.5)

    scheduler.add_listener(started, EVENT_SCHEDULER_STARTED)
    stand.clock.start()
    rival.join(60)
    assert errors == []
    assert not scheduler.running
    stand.clock.start()
    assert not scheduler.running


def test_the_scheduler_is_silent_about_busy_duties(stand: Stand, caplog: pytest.LogCaptureFixture) -> None:
    """A duty that is busy while its interval passes again and again leaves no warnings in the log."""
    caplog.set_level(logging.DEBUG)
    release = threading.Event()
    looks = threading.Semaphore(0)

    def busy() -> Counts:
        release.wait(60)
        return Counts()

    def look() -> Counts:
        looks.release()
        return Counts()

    stand.duty("busy", busy, wait=lambda: 0.001)
    stand.duty("look", look, wait=lambda: 0.01)
    stand.start()
    for _ in range(20):
        assert looks.acquire(timeout=60)
    release.set()
    assert [record for record in caplog.records if "apscheduler" in record.name] == []
    assert [record for record in caplog.records if "scheduler" in record.name] == []


def test_backoff_doubles_up_to_its_cap_and_starts_again() -> None:
    """Waits grow from the first to the cap, at least half of each, and begin anew after a success."""
    backoff = Backoff(1, 8)
    for longest in (1, 2, 4, 8, 8):
        assert longest / 2 <= backoff.next() <= longest
    backoff.reset()
    assert backoff.next() <= 1
    assert all(0.9 <= jittered(1) <= 1.1 for _ in range(100))
