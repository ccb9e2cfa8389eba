"""What is committed, rolled back and checked is counted once, whoever does it, and however many at a time."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import text

from outbox import Outgoing, Resolution
from outbox.check import sql
from outbox.check.check_pass import check_fences, question_of
from outbox.database.decision import fence_key
from outbox.database.execute import execute
from outbox.dispatch.dispatch_pass import dispatch_once
from outbox.operator.health.stats import TopicStats, stats
from outbox.prune.prune_pass import prune_producer_once
from outbox.prune.sql import add_up_totals
from tests.check.support import Bench
from tests.kit import wait_until

NewBench = Callable[..., Bench]
COMMIT, ROLLBACK = Resolution.COMMIT, Resolution.ROLLBACK
CHECKS = "SELECT topic, sum(checks)::int FROM outbox.topic_total GROUP BY topic ORDER BY topic"
PUT = """
SELECT h.topic, count(*)::int FROM outbox.check_history c JOIN outbox.half_message h ON h.id = c.half_id
 GROUP BY h.topic ORDER BY h.topic
"""


def counted(bench: Bench, topic: str = "paid") -> tuple[int | None, int | None, int | None]:
    """Return what the statistics say was committed, rolled back and checked."""
    with bench.observer.connect() as connection:
        found = stats(connection, bench.settings, ["producer"])
    row = next((each for each in found.topics if each.topic == topic), TopicStats(topic))
    return row.committed, row.rolled_back, row.checks


def decide(bench: Bench, resolution: Resolution, count: int, topic: str = "paid") -> None:
    """Prepare halves, and decide them."""
    for half_id in [bench.prepare(topic, due=False) for _ in range(count)]:
        bench.outbox.commit(half_id) if resolution is COMMIT else bench.outbox.rollback(half_id)


@pytest.mark.parametrize("limit", [1, 3, 1000])
def test_each_decision_is_counted_once(bench: Bench, limit: int) -> None:
    """Of what was there before the first dispatch, of a backlog that is cut into batches, and of each topic."""
    decide(bench, ROLLBACK, 3)
    for number in range(4):
        decide(bench, COMMIT, 1)
        decide(bench, ROLLBACK, 2)
        decide(bench, COMMIT, 1, topic="sent")
        if number % 2:
            with bench.observer.connect() as connection:
                while dispatch_once(connection, bench.settings, limit=limit).more:
                    pass
    assert (counted(bench), counted(bench, "sent")) == ((4, 11, 0), (4, 0, 0))


def test_dispatchers_that_race_count_once(bench: Bench) -> None:
    """Only who holds the lock adds; a scheduled message counts when it is committed, not again when it is due."""
    bench.dispatch()
    with bench.engine.begin() as connection:
        for number in range(60):
            bench.outbox.send(connection, "paid", {}, delay=0.0 if number % 10 == 0 else None)
    decide(bench, ROLLBACK, 30)

    def race(_: int) -> None:
        with bench.observer.connect() as connection:
            for number in range(40):
                dispatch_once(connection, bench.settings, limit=1 + number % 5)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(race, range(4)))
    bench.dispatch()
    assert counted(bench) == (60, 30, 0)


def test_a_restore_and_a_fail_over_keep_the_numbers(bench: Bench) -> None:
    """A re-base counts nothing again, but the commits that are no messages yet; a new epoch carries the numbers on."""
    decide(bench, COMMIT, 3)
    decide(bench, ROLLBACK, 2)
    bench.dispatch()
    with bench.engine.begin() as connection:
        bench.outbox.send(connection, "paid", {})
    bench.run("UPDATE outbox.dispatch_cursor SET system_identifier = system_identifier - 1")
    bench.dispatch()
    assert counted(bench) == (4, 2, 0)
    bench.run("UPDATE outbox.dispatch_cursor SET log = 'before the fail-over'")
    decide(bench, ROLLBACK, 1)
    bench.dispatch()
    assert counted(bench) == (4, 3, 0)


def test_checks_of_checkers_and_fences(new_bench: NewBench) -> None:
    """One for each row of the history, by topic, also where several schedulers check at once."""
    bench = new_bench(checks_in_flight=3)
    for topic in ("paid", "shipped"):
        bench.register(Resolution.UNKNOWN, topic)
        for _ in range(10):
            bench.prepare(topic)
    with bench.engine.begin() as connection:
        for _ in range(10):
            bench.outbox._producer.prepare(connection, "fenced", Outgoing({}), fenced=True, immunity=0)
    rivals = [bench, bench.colleague(), bench.colleague()]
    with ThreadPoolExecutor(len(rivals)) as pool:
        list(pool.map(lambda each: each.check(), rivals))
    bench.age_and_check(2)
    assert bench.rows(CHECKS) == bench.rows(PUT)
    assert {topic for topic, _ in bench.rows(CHECKS)} == {"paid", "shipped", "fenced"}
    bench.dispatch()
    assert counted(bench, "fenced") == (0, 10, 10)


def test_a_fence_that_is_held_counts_as_asked(bench: Bench) -> None:
    """The transaction runs on: that was a check too."""
    with bench.engine.begin() as running:
        with bench.observer.begin() as connection:
            half_id = bench.outbox._producer.prepare(connection, "paid", Outgoing({}), fenced=True, immunity=0)
        running.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": fence_key("outbox", half_id)})
        with bench.observer.connect() as connection:
            assert check_fences(connection, bench.settings).failed == 1
    assert counted(bench) == (0, 0, 1)


def test_a_question_that_was_not_put_is_taken_back(bench: Bench) -> None:
    """A lease that is given back, for there was no connection for the checker, was no check."""
    bench.register(Resolution.UNKNOWN)
    half_id = bench.prepare()
    with bench.observer.begin() as connection:
        question = question_of(bench.outbox.checkers["paid"])
        ((leased,),) = execute(connection, sql.lease("outbox", "paid", 1, question))
        assert counted(bench) == (0, 0, 0)  # not committed yet
        execute(connection, sql.unasked("outbox", half_id=half_id, checks=leased[1], id=leased[2]))
    assert counted(bench) == (0, 0, 0)
    assert bench.rows(PUT) == []


def test_prune_adds_up(bench: Bench) -> None:
    """Of many rows it makes one a topic; two prunes at once, and a check between them, lose nothing."""
    count = "INSERT INTO outbox.topic_total (topic, checks) SELECT t, 2 FROM unnest(ARRAY['paid', 'sent']) t"
    for _ in range(5):
        bench.run(count)
    add_up = add_up_totals("outbox", limit=1_000)
    with ThreadPoolExecutor(1) as pool, bench.observer.connect() as first, bench.engine.connect() as second:
        with first.begin():
            execute(first, add_up)

            def rival() -> None:
                with second.begin():
                    execute(second, add_up)

            racing = pool.submit(rival)
            waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted"
            wait_until(lambda: bench.value(waiting) == 1, "the second prune waits for the first")
            bench.run(count)
        racing.result()
    assert bench.rows(CHECKS) == [("paid", 12), ("sent", 12)]
    with bench.observer.connect() as connection:
        prune_producer_once(connection, bench.settings)
    assert bench.rows("SELECT topic, checks FROM outbox.topic_total ORDER BY topic") == [("paid", 12), ("sent", 12)]
    assert counted(bench) == (0, 0, 12)
