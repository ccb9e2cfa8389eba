"""The chain as plain statements from one revision to another, for a service that keeps our tables in its own history.

::

    def upgrade() -> None:
        for statement in outbox.database.migration.statements("producer_0001", "producer_0002"):
            op.execute(statement)

Alembic isn't run for that: inside a migration of the service's, ours would take the place of what Alembic is doing.

A revision of ours declares ``UPGRADE`` and ``DOWNGRADE``: statements in which ``{s}`` stands for the schema, ``{name}``
and ``{now}`` for the two types that most tables have, ``{pinned}`` for how a function begins. They have no percent sign
and no colon before a word, so that a service's revision can execute them as they are: there the one is a format, the
other a parameter.
"""

from __future__ import annotations

import re
import runpy
from collections.abc import Collection
from inspect import cleandoc
from typing import Any

from outbox.database.execute import in_schema
from outbox.database.migration import chain
from outbox.errors import InvalidSettings

# As Alembic makes it.
_VERSIONS = f"""
CREATE TABLE {{s}}.{chain.VERSION_TABLE} (
    version_num VARCHAR(32) NOT NULL,
    CONSTRAINT {chain.VERSION_TABLE}_pkc PRIMARY KEY (version_num)
)"""

_WORDS = {
    # Names and keys compare by bytes: cheaper in an index, and the same under every locale.
    "{name}": 'TEXT COLLATE "C"',
    "{now}": "TIMESTAMPTZ NOT NULL DEFAULT clock_timestamp()",
    # Names are looked up in pg_catalog alone, whatever the caller's search path is; those of ours have their schema.
    "{pinned}": "SECURITY INVOKER SET search_path = pg_catalog, pg_temp AS $$",
}
# Partitions go with their table.
_MADE = re.compile(r"CREATE (TABLE|SEQUENCE|FUNCTION) (\{s\}\.\w+)(?! PARTITION OF)\b")

Revisions = str | Collection[str]


def statements(
    from_: Revisions = (),
    to: Revisions | None = None,
    *,
    parts: Collection[str] | None = None,
    schema: str = "outbox",
) -> list[str]:
    """Return what leads from some revisions (as `current` shows them) to others, one statement each, in order.

    They also write the version table, so that `require`, `upgrade` and `check` know afterwards where the tables are.
    Without ``from_`` they install; with an empty ``to`` they remove. ``to`` None is the newest of what ``from_`` has,
    or of ``parts`` (both, if there are none either); a branch that it doesn't name stays where it is. The same
    revisions always give the same statements.

    No statement has a parameter in SQLAlchemy's eyes, so ``op.execute`` takes each as it is; written out offline it
    stays so where ``env.py`` configures ``dialect_opts={"paramstyle": "named"}``, as Alembic's own templates do.

    Raises:
        InvalidSettings: a revision that this code doesn't have; or some would go up, and others down.
    """
    schema = chain.check_schema(schema)
    before = chain.applied(_known(from_))
    after = _target(before, to, parts)
    if (down := before - after) and (up := after - before):
        raise InvalidSettings(f"from {sorted(down)} down and to {sorted(up)} up at once: write that as two migrations")
    return between(before, after, schema)


def between(before: set[str], after: set[str], schema: str) -> list[str]:
    """Return what leads from all revisions that are there up, or down, to others, as `statements` does."""
    result = [] if before else [f'CREATE SCHEMA IF NOT EXISTS "{schema}"', in_schema(cleandoc(_VERSIONS), schema)]
    reached, up = set(before), after > before
    for revision in sorted(before ^ after, key=_order, reverse=not up):
        result += _texts(declared(revision)["UPGRADE" if up else "DOWNGRADE"], schema)
        rows = _rows(reached)
        reached ^= {revision}
        result += _writing(rows, _rows(reached), schema)
    return result if after else [*result, in_schema(f"DROP TABLE {{s}}.{chain.VERSION_TABLE}", schema)]


def dropping(upgrade: Collection[str]) -> tuple[str, ...]:
    """Return what drops the tables, sequences and functions that a revision makes: the ``DOWNGRADE`` of a first one."""
    made = [match.groups() for text in upgrade if (match := _MADE.match(text))]
    kinds = ("TABLE", "SEQUENCE", "FUNCTION")
    names = {kind: ", ".join(name for each, name in made if each == kind) for kind in kinds}
    return tuple(f"DROP {kind} {names[kind]}" for kind in kinds if names[kind])


def run(templates: Collection[str]) -> None:
    """Run the statements of a revision; only revisions call it, while Alembic is at work on them."""
    from alembic import op  # noqa: PLC0415 - slow to import

    for statement in _texts(templates, op.get_context().opts["version_table_schema"]):
        op.execute(statement)


def _texts(templates: Collection[str], schema: str) -> list[str]:
    # As they are printed: without the indentation of the tuple in which they are declared.
    texts = [re.sub("^ {4}", "", template.strip(), flags=re.MULTILINE) for template in templates]
    for word, meaning in _WORDS.items():
        texts = [text.replace(word, meaning) for text in texts]
    return [in_schema(text, schema) for text in texts]


def _known(revisions: Revisions) -> list[str]:
    names = [revisions] if isinstance(revisions, str) else list(revisions)
    for name in names:
        if not chain.known(name):
            known = ", ".join(each for branch in chain.BRANCHES for each in reversed(chain.history(branch)))
            raise InvalidSettings(f"this code has no revision {name!r} of the outbox; it has {known}")
    return names


def _target(before: set[str], to: Revisions | None, parts: Collection[str] | None) -> set[str]:
    """Return all revisions that are to be there."""
    branches = {_branch(revision) for revision in before} & set(chain.PARTS)
    if to is None:
        named = chain.check_parts(parts) if parts else tuple(branches) or chain.PARTS
        return chain.applied([chain.head(branch) for branch in ("common", *branches, *named)])
    names = _known(to)
    if not names:
        return set()
    there = {_branch(name) for name in names}
    untouched = [revision for revision in before if _branch(revision) not in there]
    return chain.applied([*names, *untouched])


def _branch(revision: str) -> str:
    return revision.partition("_")[0]


def _order(revision: str) -> tuple[int, str]:
    return chain.BRANCHES.index(_branch(revision)), revision


def declared(revision: str) -> dict[str, Any]:
    """Return what the file of a revision declares."""
    return runpy.run_path(str(chain.folder() / "versions" / f"{revision}.py"))


def _rows(revisions: set[str]) -> set[str]:
    """Return the rows of the version table for these revisions: those on which no other is built."""
    return {one for one in revisions if not any(one in chain.applied([other]) - {other} for other in revisions)}


def _writing(before: set[str], after: set[str], schema: str) -> list[str]:
    table = in_schema(f"{{s}}.{chain.VERSION_TABLE}", schema)
    gone = [f"DELETE FROM {table} WHERE version_num = '{revision}'" for revision in sorted(before - after)]
    return gone + [f"INSERT INTO {table} (version_num) VALUES ('{revision}')" for revision in sorted(after - before)]
