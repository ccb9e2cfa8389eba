"""What a worker says when it is started on the wrong tables."""

from __future__ import annotations

import re

import pytest
from sqlalchemy import Connection, Engine, make_url, text
from sqlalchemy.orm import Session

from outbox import Message, Outbox, Settings, Worker
from outbox.database import migration
from outbox.database.migration import chain
from outbox.errors import SchemaMissing, SchemaOutdated
from tests.kit import wait_until

HEADS = {branch: chain.head(branch) for branch in chain.BRANCHES}


def say(connection: Connection, *parts: str, schema: str = "outbox") -> str:
    """Return the message of the error that `require` raises."""
    with pytest.raises((SchemaMissing, SchemaOutdated)) as caught:
        migration.require(connection, parts, schema)
    return f"{type(caught.value).__name__}: {caught.value}"


def test_nothing_installed(engine: Engine) -> None:
    """The message names the tables, the place and the exact command."""
    url = engine.url.render_as_string(hide_password=True)
    with engine.connect() as connection:
        assert say(connection, "producer") == (
            f"SchemaMissing: the producer tables of the outbox are not in database {engine.url.database!r} on "
            f"{engine.url.host}, schema 'outbox'; run: outbox db upgrade --url {url} --part producer"
        )
        assert say(connection, "consumer", "producer", schema="mail").endswith(
            f"run: outbox db upgrade --url {url} --part producer --part consumer --schema mail"
        )


def test_password_is_masked(engine: Engine) -> None:
    """A password in the URL never gets into a message."""
    with engine.connect() as connection:
        connection.engine.url = make_url(str(engine.url)).set(password="hunter2")  # noqa: S106
        assert "hunter2" not in say(connection, "producer")


def test_one_part_missing(url: str, engine: Engine) -> None:
    """Only the missing part is named; the installed one passes, and nothing stays open."""
    migration.upgrade(url, ["producer"])
    with engine.connect() as connection:
        migration.require(connection, ["producer"])
        assert not connection.in_transaction()
        message = say(connection, "producer", "consumer")
        assert message.startswith("SchemaMissing: the consumer tables")
        assert message.endswith("--part consumer")
        assert "--part producer" not in message


def test_keeps_the_callers_transaction(url: str, engine: Engine) -> None:
    """Inside a transaction it neither ends nor breaks it, also where nothing is installed."""
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE mine (id int)"))
        say(connection, "producer")
        assert connection.scalar(text("SELECT count(*) FROM mine")) == 0
    migration.upgrade(url)
    with engine.begin() as connection:
        migration.require(connection)
        assert connection.scalar(text("SELECT count(*) FROM mine")) == 0


def test_database_older_than_code(url: str, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of an older version: run the upgrade."""
    migration.upgrade(url)
    monkeypatch.setattr("outbox.database.migration.chain.head", lambda branch: f"{branch}_9999")
    monkeypatch.setattr(
        "outbox.database.migration.chain.history", lambda branch: iter([f"{branch}_9999", HEADS[branch]])
    )
    with engine.connect() as connection:
        message = say(connection, "consumer")
    assert re.search(
        r"SchemaOutdated: .* are at (\w+)_\d{4}, this code needs \1_9999; run: outbox db upgrade .* --part consumer$",
        message,
    )


def make_newer(engine: Engine, branch: str, number: int) -> None:
    """Have the tables of a branch look as if a newer version of the code had upgraded them."""
    with engine.begin() as connection:
        connection.execute(text("DELETE FROM outbox.outbox_version WHERE version_num LIKE :b"), {"b": f"{branch}%"})
        connection.execute(text("INSERT INTO outbox.outbox_version VALUES (:v)"), {"v": f"{branch}_{number:04}"})


@pytest.mark.parametrize("branch", ["common", "producer", "consumer"])
def test_code_runs_on_tables_that_are_one_revision_newer(url: str, engine: Engine, branch: str) -> None:
    """While a deployment rolls, the old code starts on the tables of the new one, and its upgrade changes nothing."""
    migration.upgrade(url)
    following = int(HEADS[branch].rpartition("_")[2]) + 1
    make_newer(engine, branch, following)
    with engine.connect() as connection:
        migration.require(connection)
        migration.require(connection, ["producer"])
        migration.require(connection, ["consumer"])
    assert migration.upgrade(url) == migration.upgrade(url, ["producer", "consumer"]) == []
    with pytest.raises(SchemaOutdated, match=f"{branch}_{following:04}"):
        migration.downgrade(url)
    make_newer(engine, branch, following + 1)
    with engine.connect() as connection:
        assert f"are at {branch}_{following + 1:04}, newer than this code" in say(connection, "producer", "consumer")


#: What a next version of the tables may add while this code still runs: columns, tables, indexes, looser constraints.
EXPANDED = (
    "ALTER TABLE outbox.half_message ADD COLUMN next_version text",
    "ALTER TABLE outbox.op_message ADD COLUMN next_version text DEFAULT 'x'",
    "ALTER TABLE outbox.message ADD COLUMN next_version text",
    "ALTER TABLE outbox.consumer_message ADD COLUMN next_version text NOT NULL DEFAULT ''",
    "ALTER TABLE outbox.consumer_offset ADD COLUMN next_version text",
    "ALTER TABLE outbox.worker ADD COLUMN next_version text",
    "ALTER TABLE outbox.half_message DROP CONSTRAINT ck_half_message_key",
    "CREATE TABLE outbox.next_version (id int PRIMARY KEY)",
    "CREATE INDEX ON outbox.consumer_message (received_at)",
)


def test_code_works_on_expanded_tables(url: str, engine: Engine) -> None:
    """Not only starts: sends, dispatches, consumes, retries and reports on the tables of the next version."""
    migration.upgrade(url)
    for branch, head in HEADS.items():
        make_newer(engine, branch, int(head.rpartition("_")[2]) + 1)
    with engine.begin() as connection:
        for change in EXPANDED:
            connection.execute(text(change))
    outbox = Outbox(engine, settings=Settings(retry_delays=(0.01,)))
    attempts: list[int] = []

    @outbox.consumer("t", group="g")
    def handle(message: Message, session: Session) -> None:
        attempts.append(message.attempt)
        if message.attempt == 1:
            raise ValueError("once")

    with engine.begin() as connection:
        outbox.send(connection, "t", {})
    with Worker(outbox) as worker:
        wait_until(lambda: attempts == [1, 2], "it was consumed at the second attempt")
        wait_until(lambda: all(health.last_success for health in worker.health().values()), "each duty succeeds")
        assert [health.failures for health in worker.health().values() if health.failures] == []


def test_newer_tables_of_one_part_are_no_reason_to_install_the_other(url: str, engine: Engine) -> None:
    """Where a part is missing, this code can't add it beside tables that it doesn't know."""
    migration.upgrade(url, ["producer"])
    make_newer(engine, "producer", int(HEADS["producer"].rpartition("_")[2]) + 1)
    assert migration.upgrade(url) == []
    with pytest.raises(SchemaOutdated, match="newer than this code"):
        migration.upgrade(url, ["consumer", "producer"])


@pytest.mark.parametrize("branch", ["common", "producer", "consumer"])
def test_database_newer_than_code(url: str, engine: Engine, branch: str) -> None:
    """Tables of a much newer version: update the code; upgrade and downgrade refuse as well. Nothing is to be lost."""
    migration.upgrade(url)
    make_newer(engine, branch, 42)
    with engine.connect() as connection:
        message = say(connection, "producer", "consumer")
    assert f"are at {branch}_0042, newer than this code ({HEADS[branch]})" in message
    assert "pip install --upgrade outbox-postgres" in message
    assert "downgrade" not in message
    for act in (migration.upgrade, migration.downgrade):
        with pytest.raises(SchemaOutdated, match=f"{branch}_0042"):
            act(url)
