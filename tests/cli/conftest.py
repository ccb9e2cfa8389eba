from __future__ import annotations

import functools
import io
import json
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any

import pytest
import typer
from sqlalchemy import Engine, create_engine

from outbox.cli import app
from outbox.embedded import ServerLike
from tests.cli.books import Books


@dataclass
class Result:
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Stdout, which must be one JSON value and nothing else."""
        return json.loads(self.out)


Cli = Callable[..., Result]


@functools.cache
def command() -> Callable[..., None]:
    """Return the command line, which takes a while to build, once."""
    return typer.main.get_command(app)


def run_cli(*arguments: str) -> Result:
    """Run a command in this process; its streams are no terminals."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as left:
        command()(list(arguments), prog_name="outbox")
    code = left.value.code
    assert isinstance(code, int)
    return Result(code, out.getvalue(), err.getvalue())


@pytest.fixture
def cli(url: str, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """The command line with the test's database in the environment."""
    monkeypatch.setenv("OUTBOX_DATABASE_URL", url)
    monkeypatch.delenv("OUTBOX_SCHEMA", raising=False)
    return run_cli


@pytest.fixture
def engine(url: str) -> Iterator[Engine]:
    """An engine on the database of the command line."""
    engine = create_engine(url)
    yield engine
    engine.dispose()


@pytest.fixture
def empty_url(server: ServerLike) -> Iterator[str]:
    """A database without any tables."""
    server.create_database("cli_empty")
    yield server.url("cli_empty")
    server.drop_database("cli_empty")


@pytest.fixture
def books(engine: Engine) -> Books:
    """A shop in the database of the command line."""
    return Books.open(engine)
