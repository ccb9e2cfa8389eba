"""Column types that SQLAlchemy doesn't know, and those which all tables share."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Text
from sqlalchemy.types import UserDefinedType


class Xid8(UserDefinedType[str]):
    """PostgreSQL's 64-bit transaction id (PostgreSQL 13+, "Object Identifier Types")."""

    cache_ok = True

    def get_col_spec(self, **_: Any) -> str:
        """Return the SQL name."""
        return "xid8"


class PgSnapshot(UserDefinedType[str]):
    """A snapshot of the transactions in progress (PostgreSQL, "Transaction ID and Snapshot Information Functions")."""

    cache_ok = True

    def get_col_spec(self, **_: Any) -> str:
        """Return the SQL name."""
        return "pg_snapshot"


#: Names and keys compare by bytes: cheaper in an index, and the same under every locale.
CText = Text(collation="C")

NAMING = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "pk": "pk_%(table_name)s",
}
