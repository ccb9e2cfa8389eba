"""Install, remove, compare: on a real database."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Collection
from pathlib import Path

import pytest
from sqlalchemy import URL, Connection, Engine, NullPool, create_engine, inspect, make_url, text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from outbox import Outbox, Settings
from outbox.database import migration
from outbox.database.migration import chain
from outbox.database.tables import common_tables, consumer_tables, producer_tables
from outbox.embedded import find_binaries
from outbox.errors import InvalidSettings, SchemaMissing

#: Columns that are always there, and that may have padding before them.
PADDED = text("""
SELECT a.attrelid::regclass, a.attname
  FROM pg_attribute a JOIN pg_attribute b ON b.attrelid = a.attrelid AND b.attnum BETWEEN 1 AND a.attnum - 1
 WHERE a.attrelid IN (SELECT to_regclass('outbox.' || name) FROM unnest(CAST(:tables AS text[])) name) AND a.attnotnull
   AND (b.attlen < 0 AND a.attlen > 0 AND a.attalign <> 'c'
        OR b.attlen > 0 AND b.attlen % CASE a.attalign WHEN 'd' THEN 8 WHEN 'i' THEN 4 WHEN 's' THEN 2 ELSE 1 END > 0
           AND a.attlen > 0)
""")
NOTHING = {"common": None, "producer": None, "consumer": None}
#: The revisions of each branch, the oldest first.
CHAIN = {branch: chain.history(branch)[::-1] for branch in chain.BRANCHES}
ALL = {branch: revisions[-1] for branch, revisions in CHAIN.items()}
COMMON, PRODUCER, CONSUMER = (
    {table.name for table in tables().tables.values()} for tables in (common_tables, producer_tables, consumer_tables)
)


def tables(engine: Engine, schema: str = "outbox") -> set[str]:
    """Return the tables in the schema, without Alembic's own and without partitions."""
    found = set(inspect(engine).get_table_names(schema=schema)) - {migration.VERSION_TABLE}
    return {name for name in found if not name.endswith("_default")}


def fill(connection: Connection, schema: str = "outbox") -> None:
    """Write a row into a table of each part."""
    connection.execute(text(f"INSERT INTO {schema}.audit (actor, action, target) VALUES ('a', 'b', 'c')"))
    connection.execute(
        text(
            f"INSERT INTO {schema}.op_message (half_id, resolution, decided_by) "
            "VALUES (gen_random_uuid(), 'commit', 'producer')"
        )
    )
    connection.execute(text(f"INSERT INTO {schema}.consumer_offset VALUES ('g', 't', 0, 5, 0) ON CONFLICT DO NOTHING"))


def test_both_parts_together(url: str, engine: Engine) -> None:
    """Both parts are installed by default, once; a second upgrade does nothing."""
    assert migration.current(url) == NOTHING
    assert migration.upgrade(url) == [*CHAIN["common"], *CHAIN["producer"], *CHAIN["consumer"]]
    assert migration.upgrade(url) == []
    assert migration.current(url) == ALL
    assert tables(engine) == COMMON | PRODUCER | CONSUMER


@pytest.mark.parametrize(("first", "second"), [("producer", "consumer"), ("consumer", "producer")])
def test_parts_apart(url: str, engine: Engine, first: str, second: str) -> None:
    """Each part can be installed alone, the other added later, and each removed without the other."""
    own = {"producer": PRODUCER, "consumer": CONSUMER}
    assert migration.upgrade(url, [first]) == [*CHAIN["common"], *CHAIN[first]]
    assert tables(engine) == COMMON | own[first]
    assert migration.current(url) == {**ALL, second: None}
    assert migration.check(url) == []

    assert migration.upgrade(url, [second]) == CHAIN[second]
    assert migration.current(url) == ALL
    assert migration.check(url) == []

    assert migration.downgrade(url, [first]) == CHAIN[first][::-1]
    assert tables(engine) == COMMON | own[second]
    assert migration.current(url) == {**ALL, first: None}
    assert migration.check(url) == []

    assert migration.downgrade(url, [second]) == [*CHAIN[second][::-1], *CHAIN["common"][::-1]]
    assert migration.current(url) == NOTHING
    assert inspect(engine).get_table_names(schema="outbox") == []


@pytest.mark.parametrize("part", ["producer", "consumer"])
def test_upgrade_of_what_is_installed(url: str, engine: Engine, part: str) -> None:
    """Without a named part, a database that has one keeps to it."""
    own = {"producer": PRODUCER, "consumer": CONSUMER}
    migration.upgrade(url, [part])
    assert migration.upgrade(url) == []
    assert tables(engine) == COMMON | own[part]


def test_missing_part_is_named(url: str, engine: Engine) -> None:
    """What misses the tables of one part says how to install that one."""
    migration.upgrade(url, ["consumer"])
    outbox = Outbox(engine, settings=Settings())
    with (
        pytest.raises(SchemaMissing, match=r"run: outbox db upgrade --url \S+ --part producer$"),
        engine.begin() as each,
    ):
        outbox.send(each, "t", {})


def test_down_and_up_with_data(url: str, engine: Engine) -> None:
    """A downgrade takes the data along; an upgrade after it starts afresh."""
    migration.upgrade(url)
    with engine.begin() as connection:
        fill(connection)
    assert migration.downgrade(url, ["producer"]) == CHAIN["producer"][::-1]
    with engine.begin() as connection:
        assert connection.scalar(text("SELECT count(*) FROM outbox.consumer_offset")) == 1
        assert connection.scalar(text("SELECT count(*) FROM outbox.audit")) == 1
    migration.upgrade(url, ["producer"])
    with engine.begin() as connection:
        assert connection.scalar(text("SELECT count(*) FROM outbox.op_message")) == 0
        fill(connection)
    migration.downgrade(url)
    assert tables(engine) == set()
    assert migration.downgrade(url) == []
    migration.upgrade(url)
    assert migration.check(url) == []


def test_schema_of_another_name(url: str, engine: Engine) -> None:
    """The schema may have any name that is one, a reserved word too, and two may share a database."""
    migration.upgrade(url, schema="user")
    migration.upgrade(url, ["producer"], schema="payments")
    assert tables(engine, "user") == COMMON | PRODUCER | CONSUMER
    assert tables(engine, "payments") == COMMON | PRODUCER
    assert not inspect(engine).has_schema("outbox")
    assert migration.check(url, schema="user") == migration.check(url, schema="payments") == []
    with engine.begin() as connection:
        fill(connection, '"user"')
    migration.downgrade(url, schema="user")
    assert tables(engine, "payments") == COMMON | PRODUCER


def test_existing_schema_is_used_and_kept(url: str, engine: Engine) -> None:
    """A schema made beforehand is used without the privilege to create one, and not dropped."""
    with engine.begin() as connection:
        role, database = f"app_{make_url(url).database}", make_url(url).database
        connection.execute(text(f"CREATE ROLE {role} LOGIN PASSWORD 'app'"))
        connection.execute(text(f'REVOKE CREATE ON DATABASE "{database}" FROM PUBLIC'))
        connection.execute(text(f"CREATE SCHEMA outbox AUTHORIZATION {role}"))
    try:
        own = make_url(url).set(username=role, password="app")  # noqa: S106
        migration.upgrade(own)
        assert migration.check(own) == []
        migration.downgrade(own)
        assert inspect(engine).has_schema("outbox")
    finally:
        with engine.begin() as connection:
            connection.execute(text(f"DROP OWNED BY {role} CASCADE"))
            connection.execute(text(f"DROP ROLE {role}"))


def test_first_cursor(url: str, engine: Engine) -> None:
    """The first row of the dispatch cursor says: nothing dispatched, in this cluster."""
    migration.upgrade(url, ["producer"])
    with engine.begin() as connection:
        rows = connection.execute(
            text(
                "SELECT next_xid::text, in_flight::text[], target, after_sequence, until_sequence, base_sequence, "
                "c.system_identifier = s.system_identifier FROM outbox.dispatch_cursor c, pg_control_system() s"
            )
        ).all()
    assert rows == [("3", [], None, None, None, 0, True)]


@pytest.mark.parametrize("kind", ["url", "engine", "async engine"])
def test_what_upgrade_takes(url: str, engine: Engine, kind: str) -> None:
    """A URL, an engine or an async engine will do."""
    binds: dict[str, URL | Engine | AsyncEngine] = {
        "url": make_url(url),
        "engine": engine,
        "async engine": create_async_engine(url),
    }
    bind = binds[kind]
    assert migration.upgrade(bind, ["consumer"])
    assert migration.current(bind)["consumer"] == CHAIN["consumer"][-1]


def test_engine_with_another_isolation_level(url: str) -> None:
    """The engine's isolation level doesn't matter."""
    engine = create_engine(url, poolclass=NullPool, isolation_level="SERIALIZABLE")
    assert migration.upgrade(engine)
    assert migration.check(engine) == []


@pytest.mark.parametrize("parts", [[], ["producers"], "all"])
def test_refuses_unknown_parts(parts: list[str]) -> None:
    """A part that doesn't exist is refused before anything is connected."""
    with pytest.raises(InvalidSettings, match="'producer' and 'consumer'"):
        migration.upgrade("postgresql+psycopg://nobody@127.0.0.1:1/none", parts)


def test_refuses_a_name_that_is_no_schema() -> None:
    """A schema name that could be SQL is refused."""
    with pytest.raises(InvalidSettings, match="schema"):
        migration.upgrade("postgresql+psycopg://nobody@127.0.0.1:1/none", schema='x"; DROP TABLE y')


def _dump(url: str) -> str:
    program = shutil.which("pg_dump") or str(Path(find_binaries().folder) / "pg_dump")
    if not Path(program).exists():
        pytest.skip("there is no pg_dump; test_check_compares_with_metadata compares the catalogs")
    done = subprocess.run(
        [
            program,
            "--schema-only",
            "--no-owner",
            "-T",
            f"*.{migration.VERSION_TABLE}",
            # The DEFAULT partitions are the tables of before: the metadata has none.
            "-T",
            "*.*_default",
            "--dbname",
            url.replace("+psycopg", ""),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if "server version mismatch" in done.stderr:
        pytest.skip("this pg_dump is older than the server")
    assert done.returncode == 0, done.stderr
    # Newer ones print a random token to keep psql from being tricked.
    return "\n".join(line for line in done.stdout.splitlines() if not line.startswith((r"\restrict", r"\unrestrict")))


def test_same_dump_as_metadata(url: str, engine: Engine) -> None:
    """What the migrations make is what the metadata says, down to pg_dump's text."""
    migration.upgrade(url)
    migrated = _dump(url)
    migration.downgrade(url)
    with engine.begin() as connection:
        for metadata in (common_tables(), producer_tables(), consumer_tables()):
            metadata.create_all(connection)
        # The metadata has tables, no functions.
        for statement in migration.statements():
            if statement.startswith(("CREATE FUNCTION", "CREATE CONSTRAINT TRIGGER", "SELECT")):
                connection.exec_driver_sql(statement, execution_options={"no_parameters": True})
    assert "CREATE TABLE outbox.half_message" in migrated
    # Each migration draws another id of the source.
    drawn = r"SELECT '[0-9a-f-]{36}'::uuid"
    assert re.sub(drawn, "", _dump(url)) == re.sub(drawn, "", migrated)


def go(engine: Engine, start: Collection[str], end: Collection[str]) -> None:
    """Lead a database from some revisions to others by plain statements."""
    with engine.begin() as connection:
        for statement in migration.statements(start, end):
            connection.exec_driver_sql(statement, execution_options={"no_parameters": True})


def test_large_tables_have_no_padding(url: str, engine: Engine) -> None:
    """Each byte of a row is written to the log, too: columns of a fixed length come first, the widest before others."""
    migration.upgrade(url)
    large = ["half_message", "op_message", "message", "consumer_message"]
    with engine.connect() as connection:
        assert connection.execute(PADDED, {"tables": large}).all() == []


def test_statements_leave_nothing_behind(engine: Engine) -> None:
    """Those that remove remove all that those before them made."""
    go(engine, [], ALL.values())
    go(engine, ALL.values(), [])
    assert inspect(engine).get_table_names(schema="outbox") == []


def test_check_compares_with_metadata(url: str) -> None:
    """A freshly migrated database has no differences, and a check leaves nothing behind."""
    migration.upgrade(url)
    assert migration.check(url) == []
    assert migration.check(url, ["producer", "consumer"]) == []
    engine = create_engine(url)
    with engine.connect() as connection:
        assert migration.check(engine) == []
        assert not connection.scalar(text("SELECT count(*) FROM pg_class WHERE relpersistence = 't'"))
    engine.dispose()


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ("DROP TABLE outbox.topic", "table topic is missing"),
        ("ALTER TABLE outbox.topic DROP COLUMN queues", "column queues of topic is missing"),
        ("ALTER TABLE outbox.topic ADD COLUMN note text", "column note of topic is not known to this code: text"),
        (
            "ALTER TABLE outbox.half_message ALTER COLUMN key TYPE text COLLATE \"default\"",
            "column key of half_message is 'text', this code expects 'text COLLATE \"C\"'",
        ),
        (
            "ALTER TABLE outbox.op_message ALTER COLUMN xid DROP DEFAULT",
            "column xid of op_message is 'xid8 NOT NULL', "
            "this code expects 'xid8 NOT NULL DEFAULT pg_current_xact_id()'",
        ),
        (
            "ALTER TABLE outbox.half_check RESET (fillfactor)",
            "table half_check is '', this code expects '{fillfactor=70}'",
        ),
        (
            "DROP INDEX outbox.ix_half_check_next_check_at; "
            "CREATE INDEX ix_half_check_next_check_at ON outbox.half_check (next_check_at)",
            "this code expects 'CREATE INDEX ix_half_check_next_check_at ON half_check USING btree (next_check_at) "
            "WHERE fenced AND parked_at IS NULL'",
        ),
        (
            "ALTER TABLE outbox.message DROP CONSTRAINT ck_message_position; "
            "ALTER TABLE outbox.message ADD CONSTRAINT ck_message_position CHECK (position >= 0)",
            "constraint ck_message_position of message is 'CHECK (\"position\" >= 0)'",
        ),
        ("DROP SEQUENCE outbox.op_sequence CASCADE", "sequence op_sequence is missing"),
        ("UPDATE outbox.outbox_version SET version_num = 'producer_0099' WHERE version_num LIKE 'producer%'",
         f"producer is at revision producer_0099, this code has {ALL['producer']}"),
        (
            "ALTER TABLE outbox.half_message DROP COLUMN body_digest, ADD COLUMN body_digest bytea DEFAULT sha256('')",
            "this code expects 'bytea GENERATED substr(sha256(body), 1, 16)'",
        ),
        (
            "ALTER TABLE outbox.half_message ALTER COLUMN body_digest DROP EXPRESSION",
            "column body_digest of half_message is 'bytea', this code expects 'bytea GENERATED",
        ),
    ],
)  # fmt: skip
def test_check_finds(url: str, engine: Engine, change: str, difference: str) -> None:
    """Each kind of difference is found and named."""
    migration.upgrade(url)
    with engine.begin() as connection:
        connection.execute(text(change))
    found = migration.check(url)
    assert any(difference in line for line in found), found


def test_check_of_a_part_that_is_not_there(url: str) -> None:
    """A part that was asked for and isn't installed is a difference; no part at all is an error."""
    with pytest.raises(SchemaMissing, match="outbox db upgrade --url"):
        migration.check(url)
    migration.upgrade(url, ["producer"])
    found = migration.check(url, ["producer", "consumer"])
    assert f"consumer is at revision none, this code has {ALL['consumer']}" in found
    assert "table consumer_message is missing" in found


@pytest.mark.parametrize("parts", [("producer",), ("consumer",), ("producer", "consumer")])
def test_statements_are_the_upgrade(url: str, engine: Engine, parts: tuple[str, ...]) -> None:
    """They are always the same, can be run by any client as one text, and leave what an upgrade leaves."""
    script = ";\n".join(["BEGIN", *migration.statements(parts=parts, schema="mail"), "COMMIT"])
    assert migration.statements(parts=parts) == migration.statements(parts=parts[::-1])
    with engine.connect() as connection:
        driver = connection.connection.driver_connection
        assert driver
        driver.execute(script)
    assert migration.upgrade(url, parts, "mail") == []
    assert migration.check(url, parts, "mail") == []
