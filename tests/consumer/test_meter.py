"""What a handler does in a thread is counted: calls by their time, results by their commit, and the group's lag."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import Counter
from typing import Any

import pytest

from outbox import Message, Park, Retry, Skip
from outbox.consumer.meter import BOUNDS, WINDOW, HandlerMeter, HandlerReport, percentile
from tests.kit.bench import Bench, record


def report_of(*meters: HandlerMeter) -> HandlerReport:
    """Return the report of a worker whose threads have these meters."""
    return HandlerReport("t", "g", [meters])


def handle(message: Message, session: Any) -> Retry | Park | Skip | None:
    """Do what the body says."""
    record(message, session)
    match message.body:
        case "retry":
            return Retry()
        case "park":
            return Park("for the test")
        case "skip":
            return Skip()
    return None


@pytest.mark.parametrize("batch", [1, 10])
def test_results_are_counted_when_they_are_written_down(any_bench: Bench, batch: int) -> None:
    """A batch that is redone one by one counts each message once; what was skipped is no failure."""
    consumer = any_bench.declare(handle, batch=batch)
    report = report_of(consumer.meter)
    any_bench.send("fine", "retry", "park", "skip", "fine", "fine")
    any_bench.consume(consumer)
    counted = report.facts()
    assert (counted["done"], counted["failed"], counted["in_flight"]) == (4, 2, 0)
    assert sum(counted["calls"].values()) >= 6
    any_bench.retry(consumer)
    assert report.facts()["failed"] == 3


def test_what_is_in_flight(bench: Bench) -> None:
    """A handler that has a list has all of its messages in hand; after it there are none, also if it failed."""
    seen: list[int] = []

    def handle_list(messages: list[Message], session: Any) -> None:
        seen.append(consumer.meter.in_flight)
        raise ZeroDivisionError

    consumer = bench.declare(handle_list, batch=3, takes_batch=True)
    bench.send(1, 2, 3)
    bench.consume(consumer)
    assert seen[0] == 3
    assert consumer.meter.in_flight == 0


def test_outside_of_transactions_it_is_the_same(bench: Bench) -> None:
    """Many are in flight at once; results count when they are written, and a retry's too. The lag has what runs."""
    together, counted = threading.Barrier(4), []

    def call(message: Message) -> Park | None:
        together.wait(60)
        if message.body == 0:
            counted.append((consumer.meter.in_flight, consumer.meter.lag))
        together.wait(60)
        if message.body == 1:
            raise ZeroDivisionError
        return Park("for the test") if message.body == 2 else None

    bench.send(*range(4))
    consumer = bench.declare(call, transactional=False, concurrency=4, ordered=False)
    report = report_of(consumer.meter)
    bench.consume(consumer)
    assert counted == [(4, 4)]
    told = report.facts()
    assert (told["done"], told["failed"], told["in_flight"], sum(told["calls"].values())) == (2, 2, 0, 4)


def test_the_lag_is_of_the_last_look(any_bench: Bench) -> None:
    """In messages, and since when the first of them stands in its queue; a message that fails is no lag any more."""
    seen: list[tuple[Any, ...]] = []

    def look(message: Message, session: Any) -> Retry:
        seen.append((consumer.meter.lag, consumer.meter.waiting_since))
        return Retry()

    consumer = any_bench.declare(look)
    assert report_of(consumer.meter).facts()["lag"] is None
    any_bench.send(1, 2)
    with any_bench.producer.connect() as connection:
        first = connection.exec_driver_sql("SELECT min(visible_at) FROM outbox.message").scalar_one()
    any_bench.consume(consumer)
    assert seen[0] == (2, first)
    counted = report_of(consumer.meter).facts()
    assert (counted["lag"], counted["waiting_since"]) == (0, None)


def test_threads_are_added_up() -> None:
    """Their calls and results are summed; the lag is that of the thread that has looked last."""
    one, other = HandlerMeter(), HandlerMeter()
    report = report_of(one, other)
    for number, meter in enumerate((one, other), 2):
        meter.calls[number] += 1
        meter.done, meter.lag, meter.measured_at = number, number, time.monotonic() + number
    one.in_flight = 4
    counted = report.facts()
    assert (counted["done"], counted["in_flight"], counted["lag"]) == (5, 4, 3)
    assert counted["calls"] == {"2": 1, "3": 1}


def test_what_is_old_is_forgotten() -> None:
    """A report tells what happened within the window; if none was asked for in that time, since the last one."""
    meter, began = HandlerMeter(), time.monotonic()
    report = report_of(meter)

    def done_at(seconds: float) -> tuple[int, float]:
        counted = report.facts_at(began + seconds)
        return counted["done"], round(counted["seconds"], 1)

    meter.done += 1
    assert done_at(10) == (1, 10.0)
    meter.done += 10
    assert done_at(200) == (11, 200.0)
    meter.done += 100
    # A little later than what ends then: the sums of times aren't exact.
    assert done_at(WINDOW + 10.1) == (110, WINDOW + 0.1)
    assert done_at(WINDOW + 200.2) == (100, WINDOW + 0.2)
    assert done_at(3 * WINDOW) == (0, 2 * WINDOW - 200.2)
    assert done_at(3 * WINDOW + 1) == (0, WINDOW * 2 - 199.2)


def test_the_last_minute_is_told_apart() -> None:
    """It begins at the newest report that is a minute old; of a worker younger than that, when it started."""
    meter, began = HandlerMeter(), time.monotonic()
    report = report_of(meter)

    def minute_at(seconds: float) -> tuple[int, int, dict[str, int], float]:
        minute = report.facts_at(began + seconds)["minute"]
        return minute["done"], minute["failed"], minute["calls"], round(minute["seconds"], 1)

    meter.done, meter.calls[7] = 2, 2
    assert minute_at(5) == (2, 0, {"7": 2}, 5.0)
    meter.done, meter.failed, meter.calls[9] = 12, 1, 11
    assert minute_at(50) == (12, 1, {"7": 2, "9": 11}, 50.0)
    assert minute_at(70.1) == (10, 1, {"9": 11}, 65.1)
    assert minute_at(130.2) == (0, 0, {}, 60.1)


@pytest.mark.parametrize(
    "times", [[0.01], [0.01] * 99 + [5.0], [0.00001], [100_000.0], [number / 1000 for number in range(1, 1001)]]
)
@pytest.mark.parametrize("share", [0.5, 0.95, 1.0])
def test_percentiles_are_off_by_a_bucket_at_most(times: list[float], share: float) -> None:
    """They are within a quarter of the exact time, in what the buckets can tell apart."""
    calls = Counter(str(bisect_left(BOUNDS, seconds)) for seconds in times)
    found = percentile(calls, share)
    exact = min(max(sorted(times)[max(round(share * len(times)) - 1, 0)], BOUNDS[0]), BOUNDS[-1])
    assert found is not None
    assert found <= exact * 1.3
    assert found >= exact / 1.3 or exact == BOUNDS[0]


def test_no_calls_have_no_percentile() -> None:
    """What isn't known is None."""
    assert percentile({}, 0.5) is None
