"""For the ``env.py`` of a service whose own migrations look at all schemas."""

from __future__ import annotations

import os
from collections.abc import Mapping


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
