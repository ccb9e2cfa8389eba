"""``migrate`` makes the outbox tables as the outbox's own chain does, in its own way: planned, printed, undone."""

from __future__ import annotations

from outbox.database import migration
from tests.django.conftest import Project


def test_the_tables_are_those_of_the_chain(empty: Project) -> None:
    """Nothing is missing, nothing differs, and each side knows what the other has done."""
    assert "Outbox tables: common_0001" in empty.manage("migrate", "--plan")
    empty.manage("migrate")
    assert migration.check(empty.engine) == []
    assert migration.upgrade(empty.engine) == []
    assert "No changes detected" in empty.manage("makemigrations", "--check", "--dry-run")
    assert empty.manage("migrate", "--check") == ""


def test_a_database_that_has_the_tables_already_keeps_them(empty: Project) -> None:
    """Who has upgraded by the command line may migrate afterwards."""
    migration.upgrade(empty.engine)
    empty.manage("migrate")
    assert migration.check(empty.engine) == []


def test_migrations_are_undone_one_by_one(project: Project) -> None:
    """At each one, the version table says what is there; at the end the tables are gone, and can be made anew."""
    versions = "SELECT string_agg(version_num, ' ' ORDER BY 1) FROM outbox.outbox_version"
    newest = project.scalar(versions)
    project.manage("migrate", "outbox", "0002")
    assert project.scalar(versions) == "consumer_0001"
    assert migration.current(project.engine)["producer"] is None
    project.manage("migrate", "outbox", "0001")
    assert project.scalar(versions) == "common_0001"
    project.manage("migrate", "outbox", "zero")
    assert project.scalar("SELECT count(*) FROM pg_tables WHERE schemaname = 'outbox'") == 0
    project.manage("migrate")
    assert project.scalar(versions) == newest
    assert migration.check(project.engine) == []


def test_sqlmigrate_prints_what_would_be_run(empty: Project) -> None:
    """The text makes the tables where somebody else runs it."""
    printed = "".join(empty.manage("sqlmigrate", "outbox", f"000{number}") for number in (1, 2, 3))
    with empty.engine.begin() as connection:
        connection.exec_driver_sql("SET lock_timeout = '5s'")
        connection.connection.cursor().execute(printed.replace("BEGIN;", "").replace("COMMIT;", ""))
    assert migration.current(empty.engine)["consumer"] == "consumer_0001"
    assert "DROP TABLE" in empty.manage("sqlmigrate", "outbox", "0003", "--backwards")


def test_another_database_is_left_alone(empty: Project) -> None:
    """Only the databases that OUTBOX names have an outbox, and a router may say no."""
    code = (
        "import django; django.setup()\n"
        "from django.core.management import call_command\n"
        "call_command('migrate', verbosity=0)\n"
        "from django.db import connection\n"
        "print(connection.cursor().execute(\"SELECT to_regnamespace('outbox') IS NULL\").fetchone()[0])"
    )
    for settings in ("unnamed", "routed"):
        written = empty.run("-c", code, DJANGO_SETTINGS_MODULE=f"tests.django.inside.{settings}")
        assert written.strip() == "True"
