"""``outbox db``."""

from __future__ import annotations

import pytest
from sqlalchemy import Engine, text

from outbox.database import migration
from outbox.database.migration import chain
from tests.cli.conftest import Cli

ALL = {branch: {"database": chain.head(branch), "code": chain.head(branch)} for branch in chain.BRANCHES}
#: The producer's revisions, the newest first.
PRODUCER = list(chain.history("producer"))
#: The consumer's, likewise.
CONSUMER = list(chain.history("consumer"))


def test_upgrade_and_current(cli: Cli, empty_url: str) -> None:
    """An upgrade says on stderr what it installed, a second one that there was nothing to do."""
    first = cli("db", "upgrade", "--url", empty_url, "--part", "producer")
    assert (first.code, first.out) == (0, "")
    done = ", ".join(["common_0001", *PRODUCER[::-1]])
    assert first.err == f"installed {done} in database 'cli_empty' on 127.0.0.1, schema 'outbox'\n"
    current = cli("db", "current", "--url", empty_url, "-o", "json").json
    assert current == {**ALL, "consumer": {"database": None, "code": CONSUMER[0]}}
    second = cli("db", "upgrade", "--url", empty_url, "--part", "consumer").err
    assert second.startswith(f"installed {', '.join(CONSUMER[::-1])} in")
    assert cli("db", "upgrade", "--url", empty_url).err.startswith("nothing to do in")


def test_upgrade_adds_no_part(cli: Cli, empty_url: str) -> None:
    """Without --part both are installed in an empty database; in one that has a part, the other doesn't join it."""
    assert cli("db", "upgrade", "--url", empty_url, "--part", "producer").code == 0
    assert cli("db", "upgrade", "--url", empty_url).err.startswith("nothing to do in")
    assert cli("db", "current", "--url", empty_url, "-o", "json").json["consumer"]["database"] is None
    removed = cli("db", "downgrade", "--url", empty_url, "--yes").err
    assert removed.startswith(f"removed {', '.join(PRODUCER)}, common_0001 in")
    both = cli("db", "upgrade", "--url", empty_url).err
    assert both.startswith(f"installed common_0001, {', '.join([*PRODUCER[::-1], *CONSUMER[::-1]])} in")


def test_current_as_table(cli: Cli) -> None:
    """The table shows each part with both versions."""
    result = cli("db", "current")
    assert result.out.splitlines()[0].split() == ["part", "database", "code"]
    assert f"producer  {PRODUCER[0]}  {PRODUCER[0]}" in result.out
    assert (result.code, result.err) == (0, "")


def test_schema_by_option_and_environment(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """The option wins over the environment; both name the schema."""
    monkeypatch.setenv("OUTBOX_SCHEMA", "mail")
    assert "schema 'mail'" in cli("db", "upgrade").err
    assert "schema 'post'" in cli("db", "upgrade", "--schema", "post", "--part", "consumer").err
    assert cli("db", "current", "-o", "json", "--schema", "post").json["producer"]["database"] is None
    assert cli("db", "current", "-o", "json").json == ALL


def test_check(cli: Cli, engine: Engine) -> None:
    """No differences: 0. Differences: 6, and they are the data."""
    clean = cli("db", "check")
    assert (clean.code, clean.out) == (0, "")
    assert clean.err.startswith("no differences in")
    assert cli("db", "check", "-o", "json").json == {"differences": []}
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE outbox.topic ADD COLUMN note text"))
    difference = "column note of topic is not known to this code: text"
    found = cli("db", "check", "-o", "json")
    assert (found.code, found.json) == (6, {"differences": [difference]})
    assert found.err.startswith("error: 1 difference in")
    assert difference in cli("db", "check").out


def test_sql_is_nothing_but_sql(cli: Cli) -> None:
    """It needs no database, and prints what the migrations would run."""
    result = cli("db", "sql", "--part", "consumer", "--schema", "mail")
    assert (result.code, result.err) == (0, "")
    lines = ["BEGIN", *migration.statements(parts=["consumer"], schema="mail"), "COMMIT"]
    title = "-- the outbox from nothing to the newest"
    assert result.out == "\n".join([title, *(f"{each};" for each in lines), "\n"])


def test_downgrade_asks_first(cli: Cli, url: str) -> None:
    """Without a terminal and without --yes it refuses; with --yes the tables go."""
    refused = cli("db", "downgrade", "--part", "consumer")
    assert refused.code == 2
    assert "give --yes if you are sure" in refused.err
    assert migration.current(url)["consumer"]
    done = cli("db", "downgrade", "--part", "consumer", "--yes")
    assert (done.code, done.out) == (0, "")
    assert done.err.startswith(f"removed {', '.join(CONSUMER)} in")
    assert migration.current(url)["consumer"] is None


def test_busy(cli: Cli, engine: Engine) -> None:
    """A lock that somebody holds is a conflict: exit code 4."""
    with engine.begin() as connection:
        connection.execute(text("LOCK TABLE outbox.topic IN ACCESS SHARE MODE"))
        result = cli("db", "downgrade", "--yes", "--lock-timeout", "0.05")
    assert (result.code, result.out) == (4, "")
    assert "another transaction holds a lock" in result.err
