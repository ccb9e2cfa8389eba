"""A Django project on a database of its own, whose commands and tests run in other processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from sqlalchemy import Connection, Engine, NullPool, create_engine, text

from outbox.embedded import ServerLike
from tests.kit import ROOT
from tests.kit.warm import warm_python

SHOP = ROOT / "examples" / "django_shop"
INSIDE = Path(__file__).parent / "inside"


@dataclass(frozen=True)
class Project:
    """The shop, in processes of its own; ``engine`` sees its database."""

    engine: Engine

    @property
    def environment(self) -> dict[str, str]:
        """That of its processes."""
        url = self.engine.url.render_as_string(hide_password=False)
        path = os.pathsep.join([str(ROOT), str(SHOP)])
        return {**os.environ, "OUTBOX_DATABASE_URL": url, "PYTHONPATH": path, "OUTBOX_IDLE_WAIT": "0.05"}

    def run(self, *command: str, **environment: str) -> str:
        """Run Python with a command; return what it wrote, or fail with that.

        pytest finds out what it is to rewrite before it is imported, so a Python for it has imported nothing.
        """
        ran = subprocess.run(
            [sys.executable if "pytest" in command else warm_python(), *command],
            cwd=SHOP,
            env=self.environment | environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout

    def manage(self, *arguments: str, **environment: str) -> str:
        """Run ``manage.py``."""
        return self.run("manage.py", *arguments, **environment)

    def order(self, customer: str, *totals: int) -> None:
        """Place orders through the view."""
        code = (
            "import django, sys; django.setup(); from django.test import Client\n"
            "for total in sys.argv[2:]:\n"
            "    answer = Client().post('/orders', {'customer': sys.argv[1], 'total': total})\n"
            "    assert answer.status_code == 201, answer"
        )
        self.run("-c", code, customer, *map(str, totals), DJANGO_SETTINGS_MODULE="shop.settings")

    @contextmanager
    def worker(self, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
        """Run a worker; it is killed at the end if it is still there."""
        command = [warm_python(), "manage.py", "outbox_run"]
        environment = self.environment | environment
        with subprocess.Popen(command, cwd=SHOP, env=environment, stderr=subprocess.DEVNULL) as process:
            try:
                yield process
            finally:
                process.kill()

    def scalar(self, sql: str, connection: Connection | None = None) -> object:
        """Return one value."""
        if connection is not None:
            return connection.scalar(text(sql))
        with self.engine.connect() as own:
            return own.scalar(text(sql))


@contextmanager
def _database(server: ServerLike, name: str, template: str | None = None) -> Iterator[Project]:
    server.create_database(name, template)
    yield Project(create_engine(server.url(name), poolclass=NullPool))
    server.drop_database(name)


@pytest.fixture
def empty(server: ServerLike) -> Iterator[Project]:
    """The project on an empty database."""
    with _database(server, f"django_empty_{os.getpid()}") as project:
        yield project


@pytest.fixture(scope="module")
def migrated(server: ServerLike) -> Iterator[str]:
    """The name of a database that Django has migrated."""
    name = f"django_migrated_{os.getpid()}"
    with _database(server, name) as project:
        project.manage("migrate")
        yield name


@pytest.fixture
def project(server: ServerLike, migrated: str) -> Iterator[Project]:
    """The project, migrated."""
    with _database(server, f"django_{os.getpid()}", migrated) as project:
        yield project
