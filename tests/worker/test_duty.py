"""The loop of a duty and the clock around it, without a database."""

from __future__ import annotations

import itertools
import logging
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from outbox import Counts
from outbox.worker import clock
from outbox.worker import duty as duty_module
from outbox.worker.clock import Clock
from outbox.worker.duty import Backoff, Duty, jittered
from tests.conftest import wait_until

NEVER = 3600.0


class Stand:
    """Duties on a clock that is stopped when the test ends."""

    def __init__(self) -> None:
        self.stopping = threading.Event()
        self.clock = Clock()

    def duty(
        self,
        name: str,
        one_pass: Callable[[], Counts],
        *,
        wait: float = NEVER,
        after: Callable[[], None] | None = None,
        eager: bool = True,
    ) -> Duty:
        duty = Duty(
            name,
            one_pass,
            longest_wait=lambda: wait,
            stopping=self.stopping,
            reconnect_cap=0.01,
            after=after,
            eager=eager,
        )
        self.clock.add(duty)
        return duty


@pytest.fixture
def stand() -> Iterator[Stand]:
    """Duties on a clock."""
    with ExitStack() as stack:
        stand = Stand()
        stack.callback(stand.stopping.set)
        yield stand
        stand.clock.stop()


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
    stand.clock.start()
    for number in range(3000):
        for _ in range(number * 37 % 2000):
            pass
        work.put(number)
        duty.wake()
        # The next one follows soon after the duty has taken this one, and so while it is going quiet.
        assert done.get(timeout=60) == number


def test_a_wake_up_in_the_gap_between_the_last_look_and_the_scheduler(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wake-up when the duty has looked for the last time, but its job can't be started yet, starts it later."""
    passes = threading.Semaphore(0)

    def one_pass() -> Counts:
        passes.release()
        return Counts()

    class WokenLate(Duty):
        def run(self) -> None:
            super().run()
            if next(late, False):
                self.wake()

    late = iter([True])
    monkeypatch.setattr("tests.worker.test_duty.Duty", WokenLate)
    stand.duty("look", one_pass)
    stand.clock.start()
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
    stand.clock.start()
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


def test_a_busy_duty_keeps_its_thread_until_it_is_done(stand: Stand) -> None:
    """Pass follows pass while there is more, although the next regular look would be an hour away."""
    left = iter([Counts(taken=1)] * 50 + [Counts(more=True)] * 50)
    finished = threading.Event()

    def one_pass() -> Counts:
        if (counts := next(left, None)) is None:
            finished.set()
            return Counts()
        return counts

    stand.duty("busy", one_pass)
    stand.clock.start()
    assert finished.wait(60)


def test_a_duty_that_is_not_eager_looks_once(stand: Stand) -> None:
    """After its work a duty that isn't eager waits for its interval, unless the pass says that there is more."""
    passes = itertools.count(1)
    count = 0

    def one_pass() -> Counts:
        nonlocal count
        count = next(passes)
        return Counts(taken=1, more=count < 3)

    duty = stand.duty("prune", one_pass, eager=False)
    duty.run()
    assert count == 3


def test_a_duty_looks_by_itself_when_its_wait_is_over(stand: Stand) -> None:
    """Nobody wakes the duty: polling alone brings it back."""
    passes = threading.Semaphore(0)

    def one_pass() -> Counts:
        passes.release()
        return Counts()

    stand.duty("poll", one_pass, wait=0.01)
    stand.clock.start()
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
    stand.clock.start()
    wait_until(lambda: bad.health.last_success, "the duty recovers")
    wait_until(lambda: good.health.last_success, "the other duty runs")
    assert bad.health.last_error == "OSError: no route to host"
    assert bad.health.failures == 0
    assert good.health.last_error is None
    events = [getattr(record, "event", None) for record in caplog.records]
    assert events == ["duty.failed", "duty.recovered"]


def test_those_who_wait_for_a_duty_are_told_also_when_it_failed(stand: Stand) -> None:
    """A pass that brought work, or raised after its commit, wakes those behind it; one without work does not."""
    answers: Iterator[Counts | Exception] = iter([Counts(), Counts(taken=1), OSError("lost"), Counts()])
    told: list[None] = []

    def one_pass() -> Counts:
        match next(answers, stop := Counts()):
            case Exception() as error:
                raise error
            case counts:
                if counts is stop:
                    stand.stopping.set()
                return counts

    duty = stand.duty("dispatch", one_pass, after=lambda: told.append(None))
    for _ in range(2):
        duty.run()
    assert len(told) == 2


def test_duties_go_on_when_the_clock_is_set_back(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the host's clock is set back by an hour, jobs that seem an hour away run now."""
    offset = 0.0
    monkeypatch.setattr(clock, "_LOOK_EVERY", 0.01)
    monkeypatch.setattr(clock, "SteadyJobStore", lambda made=clock.SteadyJobStore: made(lambda: offset))
    stand.clock = Clock()
    passes = threading.Semaphore(0)

    def one_pass() -> Counts:
        passes.release()
        return Counts()

    stand.duty("poll", one_pass)
    stand.clock.start()
    assert passes.acquire(timeout=60)
    offset = -3600.0
    assert passes.acquire(timeout=60)


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

    stand.duty("busy", busy, wait=0.001)
    stand.duty("look", look, wait=0.01)
    stand.clock.start()
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
