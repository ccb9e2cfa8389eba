"""Single revisions as SQL, for a history that isn't Alembic's: each of its steps is one of ours."""

from __future__ import annotations

from collections.abc import Collection

from outbox.database.migration import chain, script


def in_order() -> list[str]:
    """Return all revisions of this code, each after those that it is built on."""
    result: list[str] = []
    for branch in chain.BRANCHES:
        result += reversed(chain.history(branch))
    return result


def upgrade_sql(revision: str, schema: str = "outbox") -> list[str]:
    """Return the SQL that makes one revision, and notes it in the version table, as Alembic would.

    Schema and version table are made if they aren't there. Each text may be several statements without parameters.
    """
    table = f'"{chain.check_schema(schema)}".{chain.VERSION_TABLE}'
    replaced = ", ".join(f"'{each}'" for each in chain.built_on(revision))
    notes = [f"DELETE FROM {table} WHERE version_num IN ({replaced})"] if replaced else []
    return [
        f'CREATE SCHEMA IF NOT EXISTS "{schema}"',
        f"CREATE TABLE IF NOT EXISTS {table} "
        "(version_num VARCHAR(32) NOT NULL, CONSTRAINT outbox_version_pkc PRIMARY KEY (version_num))",
        ";\n".join(script.upgrade_of(revision, schema)),
        *notes,
        f"INSERT INTO {table} (version_num) VALUES ('{revision}')",
    ]


def downgrade_sql(revision: str, left: Collection[str], schema: str = "outbox") -> list[str]:
    """Return the SQL that removes one revision, and all that is in its tables; ``left`` are those that remain."""
    table = f'"{chain.check_schema(schema)}".{chain.VERSION_TABLE}'
    covered = {each for other in left for each in chain.applied([other]) - {other}}
    rows = ", ".join(f"('{each}')" for each in sorted(set(left) - covered))
    notes = f"INSERT INTO {table} (version_num) VALUES {rows} ON CONFLICT DO NOTHING" if rows else f"DROP TABLE {table}"
    return [
        ";\n".join(script.downgrade_of(revision, schema)),
        f"DELETE FROM {table} WHERE version_num = '{revision}'",
        notes,
    ]
