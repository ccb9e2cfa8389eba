"""Alembic's own command, in a clone: it finds the chain, the database of the environment, and the schema."""

from __future__ import annotations

import os
import subprocess

import pytest
from sqlalchemy import Engine, inspect, text

from outbox.database import migration
from outbox.database.migration import chain
from tests.kit import ROOT
from tests.kit.warm import warm_python

HEADS = {branch: chain.head(branch) for branch in chain.BRANCHES}


def alembic(url: str | None, *arguments: str, schema: str | None = None, fails: bool = False) -> tuple[str, str]:
    """Run the command at the top of the project; return what it wrote to stdout and to stderr."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("OUTBOX_")}
    named = {} if url is None else {"OUTBOX_DATABASE_URL": url}
    named |= {} if schema is None else {"OUTBOX_SCHEMA": schema}
    done = subprocess.run(
        [warm_python(), "-W", "error", "-m", "alembic", *arguments],
        cwd=ROOT,
        env=own | named,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode != 0) is fails, done.stdout + done.stderr
    return done.stdout, done.stderr


@pytest.mark.parametrize("named", [None, "mail"])
def test_upgrade_and_downgrade(url: str, engine: Engine, named: str | None) -> None:
    """It makes what `outbox db upgrade` makes, tells which revisions it runs, and removes all again."""
    schema = named or "outbox"
    assert "Running upgrade  -> common_0001" in alembic(url, "upgrade", "heads", schema=named)[1]
    assert migration.current(url, schema) == HEADS
    assert migration.check(url, schema=schema) == migration.upgrade(url, schema=schema) == []
    assert alembic(url, "upgrade", "heads", schema=named) == alembic(url, "upgrade", "heads", schema=named)
    assert {HEADS[part] for part in migration.PARTS} <= set(alembic(url, "current", schema=named)[0].split())
    alembic(url, "downgrade", "base", schema=named)
    assert inspect(engine).get_table_names(schema=schema) == [migration.VERSION_TABLE]


def test_one_part(url: str) -> None:
    """A branch can be installed alone, with what it needs of the common one."""
    alembic(url, "upgrade", "producer@head")
    assert migration.current(url) == {**HEADS, "consumer": None}


def test_looking_makes_nothing(url: str, engine: Engine) -> None:
    """A command that only looks leaves no schema behind."""
    assert alembic(url, "current")[0] == ""
    assert not inspect(engine).has_schema("outbox")


def test_no_database() -> None:
    """Without a database it says which variable names one."""
    said = alembic(None, "upgrade", "heads", fails=True)[1]
    assert "no database: set OUTBOX_DATABASE_URL to postgresql+psycopg://" in said
    assert "Traceback" not in said


def test_written_out(url: str, engine: Engine) -> None:
    """Offline it needs no database; what it writes makes the same tables."""
    written = alembic(None, "upgrade", "heads", "--sql")[0]
    with engine.connect() as connection:
        driver = connection.connection.driver_connection
        assert driver
        driver.execute(written)
        connection.execute(text("SELECT 1"))
    assert migration.check(url) == []
