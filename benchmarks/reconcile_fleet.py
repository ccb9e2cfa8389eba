"""A fleet: every group of 20 consumers reads the topics of 20 producers, and all 400 pairs are compared as one."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import LiteralString

import psycopg
from psycopg import sql
from sqlalchemy import make_url

from benchmarks.lab import Benchmark, Lab
from benchmarks.measure import Figure
from benchmarks.usage import Usage
from outbox import Settings
from outbox.reconcile.fleet.config import Bounds, Fleet, PairPattern
from outbox.reconcile.fleet.run import compare_fleet
from outbox.reconcile.job import Access, EngineName, Outcome

_SESSIONS, _SECONDS = 16, 600
# The message n of a topic: made from both by either server.
_ID: LiteralString = """
(lpad(to_hex(1767225600000 + n * 1000), 12, '0') || '7000a000' || right(md5(topic || n), 12))::uuid"""
_PRODUCER: tuple[LiteralString, ...] = (
    "INSERT INTO outbox.topic (name, queues) VALUES (%(topic)s, 8)",
    f"""INSERT INTO outbox.half_message (id, producer_group, topic, key, content_type, body, born_at)
        SELECT {_ID}, 'p', topic, 'k', 'text/plain', convert_to(topic || n, 'UTF8'), now() - interval '1 hour'
          FROM generate_series(1, %(number)s) n, (SELECT %(topic)s::text) t (topic)""",
    f"""INSERT INTO outbox.op_message (half_id, resolution, decided_by, decided_at)
        SELECT {_ID}, 'commit', 'producer', now() - interval '1 hour'
          FROM generate_series(1, %(number)s) n, (SELECT %(topic)s::text) t (topic)""",
    f"""INSERT INTO outbox.message (topic, queue, position, half_id, send_number, visible_at)
        SELECT topic, n %% 8, n / 8 + 1, {_ID}, 1, now() - interval '1 hour'
          FROM generate_series(1, %(number)s) n, (SELECT %(topic)s::text) t (topic)""",
)
# The first message of every tenth pair is missing.
_CONSUMER: tuple[LiteralString, ...] = (
    f"""INSERT INTO outbox.consumer_message
               (consumer_group, message_id, topic, queue, position, status, attempts, body_digest, received_at,
                changed_at)
        SELECT %(group)s, {_ID}, topic, n %% 8, n / 8 + 1, 'consumed', 1,
               substr(sha256(convert_to(topic || n, 'UTF8')), 1, 16), now() - interval '1 hour',
               now() - interval '1 hour'
          FROM unnest(%(topics)s::text[]) WITH ORDINALITY t (topic, place), generate_series(1, %(number)s) n
         WHERE n > 1 OR (place + %(place)s) %% 10 > 0""",
    """INSERT INTO outbox.consumer_offset (consumer_group, topic, queue, position, starts)
       SELECT %(group)s, topic, q, %(number)s / 8 + 1, 0
         FROM unnest(%(topics)s::text[]) t (topic), generate_series(0, 7) q""",
)
_WATCH: LiteralString = """
SELECT count(*), coalesce(max(extract(epoch FROM clock_timestamp() - xact_start))
                          FILTER (WHERE application_name LIKE 'outbox reconcile%%'), 0)::float8
  FROM pg_stat_activity WHERE datname LIKE 'fleet\\_%%' AND backend_type = 'client backend'
"""


@dataclass(slots=True)
class _Watched:
    """Hold the server's load: the most sessions at once, and how long (seconds) the longest snapshot was held."""

    sessions: int = 0
    held: float = 0.0


@contextmanager
def _watching(connection: psycopg.Connection[tuple[object, ...]]) -> Iterator[_Watched]:
    seen, ended = _Watched(), threading.Event()

    def watch() -> None:
        while not ended.wait(0.01):
            row = connection.execute(_WATCH).fetchone()
            assert row is not None
            seen.sessions = max(seen.sessions, int(str(row[0])))
            seen.held = max(seen.held, float(str(row[1])))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        ended.set()
        thread.join()


def run(lab: Lab) -> Iterator[Figure]:
    """Compare all pairs twice: all anew, and the unsettled ranges; then all anew on one Spark."""
    size, number = lab.scale(20, 3), lab.scale(2_000, 100)
    with lab.psycopg("main") as template:
        name = template.info.dbname
    url = make_url(lab.urls["main"])
    admin = url.set(drivername="postgresql", database="postgres").render_as_string(hide_password=False)
    names = [f"fleet_{kind}{place:02}" for kind in "pc" for place in range(size)]
    with psycopg.connect(admin, autocommit=True) as connection:
        try:
            for each in names:
                lab.say(f"filling {each}")
                make = sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(sql.Identifier(each), sql.Identifier(name))
                connection.execute(make)
                where = url.set(drivername="postgresql", database=each).render_as_string(hide_password=False)
                _fill(where, each, size, number)
            accesses = {
                each: Access(url.set(database=each).render_as_string(hide_password=False), Settings()) for each in names
            }
            fleet = Fleet(accesses, (PairPattern(),), bounds=Bounds(at_once=2, sessions=_SESSIONS))
            backend = connection.info.backend_pid
            yield from _figures(fleet, size, number, lambda: _watching(connection), backend)
            on_spark = replace(fleet, job={"keep_for": 0.0, "engine": EngineName.SPARK})
            yield from _figures(on_spark, size, number, lambda: _watching(connection), backend, ("all anew, on Spark",))
            one = replace(fleet, bounds=replace(fleet.bounds, at_once=1), job={"keep_for": 0.0})
            yield Figure("all anew, one job at a time", f"{compare_fleet(one).seconds:,.1f} s")
        finally:
            for each in names:
                connection.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(each)))


def _fill(where: str, name: str, size: int, number: int) -> None:
    place = int(name[-2:])
    topics = [f"t{each:02}" for each in range(size)]
    values = {"topic": topics[place], "topics": topics, "group": name, "number": number, "place": place}
    with psycopg.connect(where) as connection:
        for statement in _PRODUCER if "_p" in name else _CONSUMER:
            connection.execute(statement, values)
        connection.execute("ANALYZE")


def _figures(
    fleet: Fleet,
    size: int,
    number: int,
    watching: Callable[[], AbstractContextManager[_Watched]],
    backend: int,
    nights: tuple[str, ...] = ("all anew", "the next night, all settled"),
) -> Iterator[Figure]:
    for night in nights:
        with watching() as seen, Usage(os.getpid(), backend) as usage:
            result = compare_fleet(fleet)
        pairs = [pair for _, job in result.results for pair in job.pairs]
        assert len(pairs) == size * size
        assert not result.failed
        assert sum(pair.counts[Outcome.MISSING] for pair in pairs) == sum(
            (topic + 1 + place) % 10 == 0 for topic in range(size) for place in range(size)
        )
        what = f"{size} by {size} pairs of {number:,} messages, {night}"
        took = f"{result.seconds:,.1f} s, {len(pairs) / result.seconds:,.1f} pairs/s"
        yield Figure(what, took, bar=f"≤ {_SECONDS} s", met=result.seconds <= _SECONDS)
        yield Figure("sessions at once", str(seen.sessions), bar=f"≤ {_SESSIONS}", met=seen.sessions <= _SESSIONS)
        yield Figure("the longest snapshot", f"{seen.held * 1000:,.0f} ms")
        yield Figure("processors, with those of the server", f"{usage.cpu:,.1f} s")
        yield Figure("memory of the processes that compare", f"{usage.peak:,.0f} MiB")


BENCHMARK = Benchmark(run)
