"""The chain of revisions: where its files are, and which revision belongs to which part.

One folder of revisions, three branches: ``common``, ``producer``, ``consumer``, each a line. The last two depend on
the first, which is therefore installed with either, and only once. A revision's id begins with its branch
(``producer_0001``): that tells the part of a revision which is newer than this code.

For the ``env.py`` of a service whose own migrations look at all schemas.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

from alembic.config import Config
from alembic.script import ScriptDirectory

from outbox.errors import InvalidSettings
from outbox.settings import Settings

VERSION_TABLE = "outbox_version"

#: What may be installed apart.
PARTS = ("producer", "consumer")
#: All branches, in the order of their installation.
BRANCHES = ("common", *PARTS)


def check_parts(parts: Collection[str]) -> tuple[str, ...]:
    """Return the parts in the order of installation.

    Raises:
        InvalidSettings: no part, or one that doesn't exist.
    """
    unknown = sorted(set([parts] if isinstance(parts, str) else parts).difference(PARTS))
    if unknown or not parts:
        raise InvalidSettings(f"parts = {parts!r} must be a list of {' and '.join(map(repr, PARTS))}, at least one")
    named = [parts] if isinstance(parts, str) else parts
    return tuple(part for part in PARTS if part in named)


def check_schema(schema: str) -> str:
    """Return the schema's name if it may be put into SQL."""
    return Settings(schema=schema).schema


def config(**attributes: object) -> Config:
    """Return Alembic's configuration for this chain, with what ``env.py`` needs to know."""
    result = Config()
    # The path is no format string: Alembic would read a % in it.
    result.set_main_option("script_location", str(_folder()).replace("%", "%%"))
    result.attributes.update(attributes)
    return result


@cache
def scripts() -> ScriptDirectory:
    """Return the revisions of this code."""
    return ScriptDirectory.from_config(config())


def head(branch: str) -> str:
    """Return the newest revision that this code knows of a branch."""
    return scripts().as_revision_number(f"{branch}@head")  # type: ignore[return-value]


def history(branch: str) -> Iterator[str]:
    """Yield the revisions of a branch, the newest first."""
    revision: str | None = head(branch)
    while revision:
        yield revision
        revision = _only(scripts().get_revision(revision).down_revision)


def known(revision: str) -> bool:
    """Does this code have the revision?"""
    return any(revision in history(branch) for branch in BRANCHES)


def is_next(revision: str) -> bool:
    """Is it the revision that follows the newest one which this code has? Ids of a branch are numbered."""
    branch, _, number = revision.rpartition("_")
    if branch not in BRANCHES or not number.isdigit():
        return False
    return int(number) == int(head(branch).rpartition("_")[2]) + 1


def applied(versions: Collection[str]) -> set[str]:
    """Return all revisions which the version table's rows stand for: a row implies what it is built on."""
    result: set[str] = set()
    todo = [version for version in versions if known(version)]
    while todo:
        script = scripts().get_revision(todo.pop())
        result.add(script.revision)
        todo += [*_several(script.down_revision), *_several(script.dependencies)]
    return result


def _folder() -> Path:
    """Return the folder of the migrations: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parents[2]
    inside = package / "migrations"
    return inside if inside.is_dir() else package.parent / "migrations"


def _several(revisions: str | Sequence[str] | None) -> tuple[str, ...]:
    if revisions is None:
        return ()
    return (revisions,) if isinstance(revisions, str) else tuple(revisions)


def _only(revisions: str | Sequence[str] | None) -> str | None:
    several = _several(revisions)
    return several[0] if several else None


def include_name(
    name: str | None, type_: str, _parent_names: Mapping[str, str | None], *, schema: str | None = None
) -> bool:
    """Hide the outbox's schema from autogenerate: ``context.configure(include_name=include_name, …)``.

    ``schema`` is ``OUTBOX_SCHEMA`` or ``outbox`` by default; bind another with `functools.partial`.
    """
    return type_ != "schema" or name != (schema or _default())


def include_object(
    object_: object, _name: str | None, type_: str, _reflected: bool, _compare_to: object, *, schema: str | None = None
) -> bool:
    """Hide the outbox's tables from autogenerate: ``context.configure(include_object=include_object, …)``.

    Slower than `include_name`, which keeps Alembic from reading the tables in the first place.
    """
    if type_ != "table":
        return True
    return getattr(object_, "schema", None) != (schema or _default())


def _default() -> str:
    return os.environ.get("OUTBOX_SCHEMA", "outbox")
