"""What a benchmark is given: migrated databases of its own, a scale, and a voice."""

from __future__ import annotations

import importlib
import resource
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import psycopg
from sqlalchemy import Connection, Engine, create_engine, make_url

from benchmarks.measure import Figure
from outbox.database.execute import driver_of
from outbox.worker.connections import WorkerDatabase


@dataclass(frozen=True, slots=True)
class Lab:
    """``urls`` are the databases by name. ``quick`` is for a look at whether everything runs: its figures are rough."""

    urls: Mapping[str, str]
    quick: bool

    def engine(self, name: str) -> Engine:
        """Return a new engine on a database."""
        return create_engine(self.urls[name])

    def worker_connection(self, name: str) -> Connection:
        """Return a connection as the worker opens it."""
        return WorkerDatabase(self.engine(name)).connect()

    def psycopg(self, name: str) -> psycopg.Connection[tuple[object, ...]]:
        """Return a bare connection of the driver to a database."""
        url = make_url(self.urls[name]).set(drivername="postgresql")
        return psycopg.connect(url.render_as_string(hide_password=False))

    def scale(self, full: int, quick: int) -> int:
        """Return how many, for this run."""
        return quick if self.quick else full

    def say(self, text: str) -> None:
        """Show what is being done, on a terminal."""
        if sys.stderr.isatty():
            sys.stderr.write(f"\r\033[K{text[:100]}")
            sys.stderr.flush()


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A module's entry: the databases it needs, and the function that measures."""

    run: Callable[[Lab], Iterable[Figure]]
    databases: tuple[str, ...] = ("main",)


def load(name: str) -> Benchmark:
    """Return the benchmark of a module."""
    benchmark = importlib.import_module(f"benchmarks.{name}").BENCHMARK
    assert isinstance(benchmark, Benchmark)
    return benchmark


def measure(name: str, lab: Lab) -> tuple[list[Figure], float]:
    """Run one benchmark in this process; return its figures and the peak memory in MiB."""
    return list(load(name).run(lab)), peak_memory()


def peak_memory() -> float:
    """Return the most memory that this process has had (MiB)."""
    unit = 1024 if sys.platform == "linux" else 1024 * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def backend_pid(connection: Connection) -> int:
    """Return the process of the server behind a connection."""
    return int(driver_of(connection).info.backend_pid)
