"""The chain of revisions: where its files are, and which revision belongs to which part.

One folder of revisions, three branches: ``common``, ``producer``, ``consumer``, each a line. The last two depend on
the first, which is therefore installed with either, and only once. A revision's id is its branch and its number there
(``producer_0001``): that tells the part of a revision which is newer than this code.

What the files declare is read from their text. Alembic, which runs them, is slow to import; workers and commands only
want to know which revisions there are.

For the ``env.py`` of a service whose own migrations look at all schemas.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path

from outbox.errors import InvalidSettings
from outbox.settings import Settings

VERSION_TABLE = "outbox_version"

#: What may be installed apart.
PARTS = ("producer", "consumer")
#: All branches, in the order of their installation.
BRANCHES = ("common", *PARTS)

_DECLARED = re.compile(r"^(revision|down_revision|depends_on) = (.+)$", re.MULTILINE)


def check_parts(parts: Collection[str]) -> tuple[str, ...]:
    """Return the parts in the order of installation.

    Raises:
        InvalidSettings: no part, or one that doesn't exist.
    """
    named = [parts] if isinstance(parts, str) else parts
    if not named or not set(named) <= set(PARTS):
        raise InvalidSettings(f"parts = {parts!r} must be a list of {' and '.join(map(repr, PARTS))}, at least one")
    return tuple(part for part in PARTS if part in named)


def check_schema(schema: str) -> str:
    """Return the schema's name if it may be put into SQL."""
    return Settings(schema=schema).schema


def folder() -> Path:
    """Return where Alembic finds the chain: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parents[2]
    inside = package / "migrations"
    return inside if inside.is_dir() else package.parent / "migrations"


@cache
def _built_on() -> Mapping[str, tuple[str, ...]]:
    """Return the revisions of this code, each with those that it is built on."""
    result = {}
    for path in (folder() / "versions").glob("*.py"):
        declared = {name: ast.literal_eval(value) for name, value in _DECLARED.findall(path.read_text("utf-8"))}
        before, others = declared["down_revision"], declared["depends_on"] or ()
        result[declared["revision"]] = (*([before] if before else ()), *others)
    return result


def head(branch: str) -> str:
    """Return the newest revision that this code knows of a branch."""
    return history(branch)[0]


def history(branch: str) -> list[str]:
    """Return the revisions of a branch, the newest first."""
    return sorted((revision for revision in _built_on() if revision.startswith(f"{branch}_")), reverse=True)


def known(revision: str) -> bool:
    """Does this code have the revision?"""
    return revision in _built_on()


def is_usable(branch: str, revision: str | None) -> bool:
    """Is it the newest revision of a branch that this code has, or the one that follows it? Ids are numbered."""
    newest, number = head(branch), (revision or "").rpartition("_")[2]
    return revision == newest or (number.isdigit() and int(number) == int(newest.rpartition("_")[2]) + 1)


def applied(versions: Collection[str]) -> set[str]:
    """Return all revisions which the version table's rows stand for: a row implies what it is built on."""
    result, ahead = set[str](), list(filter(known, versions))
    while ahead:
        result.add(revision := ahead.pop())
        ahead += _built_on()[revision]
    return result


def include_name(
    name: str | None, type_: str, _parent_names: Mapping[str, str | None], *, schema: str | None = None
) -> bool:
    """Hide the outbox's schema from autogenerate: ``context.configure(include_name=include_name, …)``.

    ``schema`` is ``OUTBOX_SCHEMA`` or ``outbox`` by default; bind another with `functools.partial`.
    """
    return type_ != "schema" or name != (schema or os.environ.get("OUTBOX_SCHEMA", "outbox"))


def include_object(
    object_: object, _name: str | None, type_: str, _reflected: bool, _compare_to: object, *, schema: str | None = None
) -> bool:
    """Hide the outbox's tables from autogenerate: ``context.configure(include_object=include_object, …)``.

    Slower than `include_name`, which keeps Alembic from reading the tables in the first place.
    """
    return type_ != "table" or getattr(object_, "schema", None) != (schema or os.environ.get("OUTBOX_SCHEMA", "outbox"))
