"""Django migrations made of the revisions of the outbox's own chain: one for each, by the name of its file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeAlias

from django.db import connections, router
from django.db.migrations import Migration
from django.db.migrations.operations.base import Operation

from outbox.database.migration import chain
from outbox.database.migration.script import between
from outbox.django.databases import configuration

FOLDER = Path(__file__).parent / "migrations"
MigrationType: TypeAlias = type[Migration]


def migration_of(module: str) -> MigrationType:
    """Return the migration of a module such as ``0002_consumer_0001``: its revision, after the one before it."""
    number, _, revision = module.rpartition(".")[2].partition("_")
    before = sorted(path.stem for path in FOLDER.glob(f"{int(number) - 1:04}_*.py"))
    members = {
        "dependencies": [("outbox", name) for name in before],
        "operations": [RunRevision(revision)],
        "__module__": module,
    }
    return type("Migration", (Migration,), members)


class RunRevision(Operation):
    """Run the SQL of one revision on the databases that have an outbox; no model belongs to it."""

    reduces_to_sql = True
    reversible = True

    def __init__(self, revision: str) -> None:
        self.revision = revision

    def deconstruct(self) -> tuple[str, list[Any], dict[str, Any]]:
        """Return how it is made again."""
        return type(self).__qualname__, [self.revision], {}

    def state_forwards(self, app_label: str, state: Any) -> None:
        """Change nothing: there are no models."""

    def database_forwards(self, app_label: str, schema_editor: Any, *_: Any) -> None:
        """Make the revision, unless the database has it already (by ``outbox db upgrade``)."""
        self._run(app_label, schema_editor, forwards=True)

    def database_backwards(self, app_label: str, schema_editor: Any, *_: Any) -> None:
        """Remove the revision with all that is in its tables."""
        self._run(app_label, schema_editor, forwards=False)

    def describe(self) -> str:
        """Return what ``migrate --plan`` shows."""
        return f"Outbox tables: {self.revision}"

    @property
    def migration_name_fragment(self) -> str:
        """Return what a migration of it is called."""
        return self.revision

    def _run(self, app_label: str, schema_editor: Any, *, forwards: bool) -> None:
        connection = schema_editor.connection
        if not has_outbox(connection.alias) or not router.allow_migrate(connection.alias, app_label, outbox=True):
            return
        schema = configuration().outbox.schema
        # Upgrades at the same time, also those of the command line, wait for each other.
        schema_editor.execute(f"SELECT pg_advisory_xact_lock(hashtextextended('outbox migration {schema}', 0))", None)
        applied = self._applied(connection, schema, collecting=schema_editor.collect_sql, forwards=forwards)
        if forwards is (self.revision in applied):
            return
        statements = between(applied, applied ^ {self.revision}, schema)
        if not applied and not schema_editor.collect_sql and _has_schema(connection, schema):
            # CREATE SCHEMA IF NOT EXISTS asks for the privilege to create one even where it exists.
            statements = statements[1:]
        for statement in statements:
            schema_editor.execute(statement, None)

    def _applied(self, connection: Any, schema: str, *, collecting: bool, forwards: bool) -> set[str]:
        """Return the revisions that a database has; where SQL is only printed, those that it would have."""
        if collecting:
            names = [path.stem.partition("_")[2] for path in sorted(FOLDER.glob("0*.py"))]
            return set(names[: names.index(self.revision) + (not forwards)])
        with connection.cursor() as cursor:
            table = f'"{schema}".{chain.VERSION_TABLE}'
            cursor.execute("SELECT to_regclass(%s) IS NOT NULL", [table])
            if not cursor.fetchone()[0]:
                return set()
            cursor.execute(f"SELECT version_num FROM {table}")
            return chain.applied([version for (version,) in cursor.fetchall()])


def has_outbox(alias: str) -> bool:
    """Does ``OUTBOX`` name a database, and is it PostgreSQL?"""
    return alias in configuration().own.databases and connections[alias].vendor == "postgresql"


def _has_schema(connection: Any, schema: str) -> bool:
    with connection.cursor() as cursor:
        cursor.execute("SELECT to_regnamespace(%s) IS NOT NULL", [f'"{schema}"'])
        return bool(cursor.fetchone()[0])
