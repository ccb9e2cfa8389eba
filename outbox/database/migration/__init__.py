"""The outbox tables in a database: install, remove, compare, and refuse to run without them.

::

    from outbox.database import migration

    migration.upgrade("postgresql+psycopg://…/bank", parts=["producer"])

The tables live in a schema of their own with a version table of their own (``outbox.outbox_version``), so that the
migrations of the service around them (``alembic upgrade head``, ``revision --autogenerate``, ``check``) don't see
them. Where the service's ``env.py`` sets ``include_schemas=True``, it also sets ``include_name=include_name``.
A service that wants our tables in its own history executes `statements` there.

A part is what one side needs: ``producer`` or ``consumer``; the tables which both need come with either.
"""

from outbox.database.migration.chain import PARTS, VERSION_TABLE, current, include_name, include_object, require
from outbox.database.migration.compare import check
from outbox.database.migration.runner import downgrade, upgrade
from outbox.database.migration.script import statements

__all__ = [
    "PARTS",
    "VERSION_TABLE",
    "check",
    "current",
    "downgrade",
    "include_name",
    "include_object",
    "require",
    "statements",
    "upgrade",
]
