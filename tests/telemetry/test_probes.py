"""What ``outbox run --http`` serves."""

from __future__ import annotations

import http.client
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import make_url, text

from outbox import Message, Park
from outbox.cli.output import Code
from outbox.cli.processes import address
from outbox.embedded import ServerLike
from outbox.errors import InvalidSettings
from outbox.worker import Worker
from outbox.worker.probes import ProbeServer, serving
from tests.kit import wait_until
from tests.worker.conftest import Bench

ROOT = Path(__file__).parents[2]


@pytest.fixture
def bench(new_bench: Callable[..., Bench]) -> Bench:
    """A bench on which retries come soon."""
    return new_bench(retry_delays=(0.0,), reconnect_cap=0.2)


@pytest.fixture
def cli_run(tmp_path: Path) -> Callable[..., tuple[int, str]]:
    """A function that runs ``outbox run`` with some options until it ends; it returns exit code and stderr."""

    def run(bench: Bench, *options: str) -> tuple[int, str]:
        url = bench.engine.url.render_as_string(hide_password=False)
        imports = "from sqlalchemy import create_engine\nfrom outbox import Outbox\n"
        (tmp_path / "probes_shop.py").write_text(f"{imports}outbox = Outbox(create_engine({url!r}))\n")
        command = [sys.executable, "-m", "outbox.cli", "run", "--app", "probes_shop:outbox", *options]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        return ran.returncode, ran.stderr

    return run


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """What ends with the test."""
    with ExitStack() as opened:
        yield opened


def connect(server: ProbeServer) -> socket.socket:
    """Return a connection that has said nothing so far."""
    return socket.create_connection(("127.0.0.1", server.server_port), timeout=60)


def get(server: ProbeServer, path: str, method: str = "GET") -> tuple[int, str]:
    """Return status and body of an answer."""
    with closing(http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)) as connection:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def values(server: ProbeServer) -> dict[tuple[str, ...], float]:
    """Return all measurements by their name and their labels' values, in the order of the labels' names."""
    status, body = get(server, "/metrics")
    assert status == 200
    samples = (sample for family in text_string_to_metric_families(body) for sample in family.samples)
    return {(sample.name, *(sample.labels[each] for each in sorted(sample.labels))): sample.value for sample in samples}


def test_metrics(bench: Bench, stack: ExitStack) -> None:
    """Counters of what is sent and handled, the time that handlers and passes take, gauges of the statistics."""

    @bench.outbox.consumer("paid", group="mail")
    def handle(message: Message, session: Any) -> Park | None:
        if message.body["number"] == 0 and message.attempt == 1:
            raise ZeroDivisionError
        return Park("no such customer") if message.body["number"] == 1 else None

    worker = Worker(bench.outbox)
    server = stack.enter_context(serving(worker, "127.0.0.1", 0))
    bench.send(count=3)
    stack.enter_context(worker)

    def handled(outcome: str) -> float:
        return values(server).get(("outbox_handled_total", "mail", outcome, "paid"), 0.0)

    wait_until(lambda: handled("consumed") == 2, "two are consumed")
    wait_until(lambda: handled("parked") == 1, "one is parked")
    now = values(server)
    assert handled("failed") == 1
    assert now["outbox_sent_total", "paid"] == 3
    assert now["outbox_handle_seconds_count", "mail", "paid"] == 4
    assert now["outbox_events_total", "", "message.parked", "mail", "paid"] == 1
    assert now["outbox_pass_seconds_count", "dispatch"] > 0
    assert now["outbox_duty_failures", "dispatch"] == 0
    # The first worker that reports takes the statistics of the minute; each reads them with its reports.
    wait_until(lambda: ("outbox_sample_age_seconds",) in values(server), "the statistics are read")


def test_the_gauges_are_those_of_the_newest_sample(bench: Bench, stack: ExitStack) -> None:
    """By topic, and by group; what a sample leaves out is zero, but for a lag, which may be unknown."""
    worker = Worker(bench.outbox, roles=["dispatch"])
    with bench.engine.begin() as connection:
        connection.execute(
            text(
                """INSERT INTO outbox.stats_sample (sampled_at, stats) VALUES (now() + interval '1 minute', :stats)"""
            ),
            {
                "stats": """{"topics": {"paid": {"undispatched": 7, "oldest_undispatched": 2.5}},
                             "groups": {"paid": {"mail": {"parked": 3, "lag": 0}, "audit": {}}}}"""
            },
        )
    server = stack.enter_context(serving(worker, "127.0.0.1", 0))
    stack.enter_context(worker)
    wait_until(lambda: ("outbox_pending_messages", "paid") in values(server), "the statistics are read")
    now = values(server)
    assert now["outbox_pending_messages", "paid"] == 7
    assert now["outbox_oldest_pending_age_seconds", "paid"] == 2.5
    assert now["outbox_parked_halves", "paid"] == 0
    assert now["outbox_dead_messages", "mail", "paid"] == 3
    assert now["outbox_dead_messages", "audit", "paid"] == 0
    assert now["outbox_lag_messages", "mail", "paid"] == 0
    assert ("outbox_lag_messages", "audit", "paid") not in now
    assert now["outbox_oldest_lag_age_seconds", "mail", "paid"] == 0
    assert ("outbox_oldest_lag_age_seconds", "audit", "paid") not in now


def test_readiness(bench: Bench, server: ServerLike, stack: ExitStack) -> None:
    """Not before the start, not while the database refuses connections, not while it stops; alive all the time."""
    bench.outbox.consumer("paid", group="mail")(bench.handle)
    worker = Worker(bench.outbox)
    probes = stack.enter_context(serving(worker, "127.0.0.1", 0))
    assert (get(probes, "/readyz"), get(probes, "/healthz")) == ((503, "not ready\n"), (200, "alive\n"))
    stack.callback(worker.stop)
    worker.start()
    wait_until(lambda: get(probes, "/readyz")[0] == 200, "it is ready")
    name = make_url(bench.engine.url).database
    with psycopg.connect(server.url().replace("+psycopg", ""), autocommit=True) as connection:
        connection.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
        try:
            connection.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [name])
            wait_until(lambda: get(probes, "/readyz")[0] == 503, "it is not ready")
            assert get(probes, "/healthz")[0] == 200
        finally:
            connection.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")
    # A duty may yet find that its connection was ended: it is ready for good when each has had a turn.
    wait_until(lambda: values(probes)["outbox_worker_ready",] == 1, "it is ready again")
    wait_until(lambda: get(probes, "/readyz")[0] == 200, "it says so")
    worker.stop()
    assert (get(probes, "/readyz")[0], get(probes, "/healthz")[0]) == (503, 200)


def test_a_worker_whose_loops_stand_still_is_not_alive(
    bench: Bench, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler that hasn't read its clock for a minute; a lane whose thread has ended. A long handler is neither."""
    worker = Worker(bench.outbox, roles=["dispatch"])
    server = stack.enter_context(serving(worker, "127.0.0.1", 0))
    stack.enter_context(worker)
    wait_until(lambda: get(server, "/readyz")[0] == 200, "it is ready")
    monkeypatch.setattr(worker._plans[0].lanes[0]._thread, "is_alive", lambda: False)
    assert (get(server, "/healthz")[0], get(server, "/readyz")[0]) == (503, 503)
    monkeypatch.undo()
    assert get(server, "/healthz")[0] == 200
    worker._clock._scheduler.pause()
    worker._clock._jobs.beat_at -= 120
    assert get(server, "/healthz")[0] == 503


@pytest.mark.parametrize(("path", "status"), [("/", 404), ("/metrics/", 404), ("/readyz?x=<b>", 503), ("//etc", 404)])
def test_other_paths(bench: Bench, stack: ExitStack, path: str, status: int) -> None:
    """There is nothing else, and nothing of a request is in its answer."""
    server = stack.enter_context(serving(Worker(bench.outbox), "127.0.0.1", 0))
    found, body = get(server, path)
    assert (found, "<" in body) == (status, False)


def test_requests_that_are_none(bench: Bench, stack: ExitStack) -> None:
    """Another method, and no HTTP at all: the server goes on, and says neither version nor a word of the request."""
    server = stack.enter_context(serving(Worker(bench.outbox), "127.0.0.1", 0))
    assert get(server, "/metrics", "POST") == (501, "Not Implemented\n")
    with connect(server) as client:
        client.sendall(b"<script> / HTTP/9.9\r\n\r\n")
        answer = b"".join(iter(lambda: client.recv(4096), b""))
    assert b"script" not in answer
    assert b"Python" not in answer
    assert get(server, "/healthz") == (200, "alive\n")


def test_clients_that_say_nothing_dont_hinder_others_for_long(bench: Bench, stack: ExitStack) -> None:
    """Some silent connections leave others free; more than that are turned away."""
    server = stack.enter_context(serving(Worker(bench.outbox), "127.0.0.1", 0))
    silent = [stack.enter_context(connect(server)) for _ in range(7)]
    assert get(server, "/healthz")[0] == 200
    turned_away = [stack.enter_context(connect(server)) for _ in range(3)]
    # Nothing was answered to those who are let in and say nothing, until their time is up.
    assert all(client.recv(1) == b"" for client in (*turned_away, *silent))
    wait_until(lambda: get(server, "/healthz")[0] == 200, "others are answered")


def test_metrics_end_with_the_server(bench: Bench) -> None:
    """Nothing listens any more: neither at the port nor to events."""
    from outbox.telemetry import hooks

    with serving(Worker(bench.outbox), "127.0.0.1", 0) as server:
        assert hooks.listeners.hooks
        port = server.server_port
    assert not hooks.listeners.hooks
    assert not hooks.observers.hooks
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=60)


def test_a_port_that_is_taken(bench: Bench, cli_run: Callable[..., tuple[int, str]]) -> None:
    """The command says so in a line, and starts nothing."""
    with serving(Worker(bench.outbox), "127.0.0.1", 0) as server:
        code, said = cli_run(bench, "--http", f"127.0.0.1:{server.server_port}")
    assert code == Code.CONFIG
    assert said.splitlines() == [f"error: --http 127.0.0.1:{server.server_port}: Address already in use"]


@pytest.mark.parametrize(
    ("given", "host", "port"),
    [("127.0.0.1:9100", "127.0.0.1", 9100), (":9100", "", 9100), ("[::1]:0", "::1", 0), ("db.local:1", "db.local", 1)],
)
def test_addresses(given: str, host: str, port: int) -> None:
    """HOST:PORT, in brackets where the host has colons, or :PORT for every address."""
    assert address(given) == (host, port)


@pytest.mark.parametrize("given", ["9100", "localhost", "localhost:http", "localhost:65536", "localhost:-1", ""])
def test_no_addresses(given: str) -> None:
    """They are refused with the form that is meant."""
    with pytest.raises(InvalidSettings, match="must be HOST:PORT"):
        address(given)
