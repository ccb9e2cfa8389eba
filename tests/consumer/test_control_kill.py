"""Pause, rate and breaker hold over three workers of which one after the other is killed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess as Process

import pytest
from sqlalchemy import Engine, text

from outbox import Settings
from tests.consumer.test_kill import CREW, Spawn, kill, spawn, unfinished
from tests.kit import wait_until
from tests.kit.bench import Bench, make_ledger

__all__ = ["spawn"]

RATE = 60


@pytest.fixture
def banks(new_engine: Callable[[], Engine], settings: Settings) -> Iterator[Bench]:
    """A producer and a consumer in two databases, and what the handlers need."""
    producer, consumer = new_engine(), new_engine()
    make_ledger(consumer)
    with consumer.begin() as connection:
        connection.execute(text("CREATE TABLE dependency (down bool NOT NULL)"))
        connection.execute(text("INSERT INTO dependency VALUES (false)"))
    with Bench(producer, consumer, settings) as bench:
        yield bench


def send(bench: Bench, count: int) -> None:
    """Send messages of several keys, which the workers dispatch."""
    with bench.producer.begin() as connection:
        for number in range(count):
            bench.app.send(connection, "t", number, key=f"k{number % 10}")


def handled(bench: Bench) -> int:
    """Return how many messages took effect."""
    return int(bench.rows("SELECT count(*) FROM ledger")[0])


def failures(bench: Bench) -> int:
    """Return how many attempts have failed."""
    return int(bench.rows("SELECT count(*) FROM outbox.attempt_history")[0])


def state(bench: Bench) -> str:
    """Return whether the group goes on."""
    return bench.sink.operator.control_of("g", "t").state


def looks(bench: Bench) -> int:
    """Return how often workers have looked at what holds the group back."""
    scans = (
        "SELECT coalesce(seq_scan, 0) + coalesce(idx_scan, 0) FROM pg_stat_user_tables WHERE relname = 'group_control'"
    )
    return int(bench.rows(scans)[0])


def replace(crew: list[Process], number: int, spawn: Spawn, mode: str, seed: int) -> None:
    """Kill a worker, and start another one in its place."""
    kill(crew[number])
    crew[number] = spawn(mode, seed)


def test_a_rate_under_kills(banks: Bench, spawn: Spawn) -> None:
    """By the times that the database has written, three workers never handle more together than the group may."""
    chance, count = random.Random(3), 150  # noqa: S311 - which one is killed
    send(banks, count)
    crew = [spawn("limited", seed) for seed in range(CREW)]
    for kills in range(4):
        goal = (kills + 1) * 30
        wait_until(lambda goal=goal: handled(banks) >= goal, "the workers get on")  # type: ignore[misc]
        replace(crew, chance.randrange(CREW), spawn, "limited", 10 + kills)
    wait_until(lambda: unfinished(banks) == 0, "all are handled")
    assert handled(banks) == count
    # A grant is for a quarter of a second; a tenth may be made up, and each worker may have a batch of nine in hand.
    most = (
        "SELECT max(number) FROM (SELECT count(*) OVER (ORDER BY changed_at RANGE BETWEEN CURRENT ROW"
        " AND interval '1 s' FOLLOWING) AS number FROM outbox.consumer_message) n"
    )
    assert banks.rows(most)[0] <= RATE * (1 + 0.25 + 0.1) + CREW * 9
    grants = (
        "SELECT bool_and(starts_at >= lag_ends_at) FROM (SELECT ends_at - make_interval(secs => messages / 60.0)"
        " AS starts_at, lag(ends_at) OVER (ORDER BY ends_at) AS lag_ends_at FROM outbox.rate_grant) g"
    )
    assert banks.rows(grants) == [True]


def test_a_pause_under_kills(banks: Bench, spawn: Spawn) -> None:
    """A worker that starts in place of a killed one is paused as they all are; resumed, they handle each message."""
    send(banks, 10)
    crew = [spawn("limited", seed) for seed in range(CREW)]
    wait_until(lambda: handled(banks) > 0, "the group is known")
    banks.sink.operator.pause_group("g", by="me", why="test")
    for number in range(CREW):
        replace(crew, number, spawn, "limited", 10 + number)
    before, looked = handled(banks), looks(banks)
    send(banks, 20)
    wait_until(lambda: unfinished(banks) == 30 - before, "the messages are there to be consumed")
    wait_until(lambda: looks(banks) >= looked + 4 * CREW, "the new workers look, again and again")
    assert handled(banks) == before
    banks.sink.operator.resume_group("g", by="me")
    wait_until(lambda: handled(banks) == 30, "all are handled")


def test_a_breaker_under_kills(banks: Bench, spawn: Spawn) -> None:
    """It opens for all three, stays open for those that come after, tries a message at a time, and closes for all."""
    send(banks, 30)
    crew = [spawn("broken", seed) for seed in range(CREW)]
    wait_until(lambda: handled(banks) == 30, "all are handled")
    banks.run("UPDATE dependency SET down = true")
    send(banks, 300)
    wait_until(lambda: state(banks) != "running", "the breaker opens")
    for number in range(CREW):
        tried = failures(banks)
        replace(crew, number, spawn, "broken", 10 + number)
        wait_until(lambda tried=tried: failures(banks) > tried, "another one tries a message")  # type: ignore[misc]
        assert state(banks) != "running"
    # Three had a few in hand when it opened; since then, one by one.
    assert failures(banks) < 100
    assert handled(banks) == 30
    banks.run("UPDATE dependency SET down = false")
    wait_until(lambda: unfinished(banks) == 0, "all are handled")
    assert handled(banks) == 330
    assert state(banks) == "running"
