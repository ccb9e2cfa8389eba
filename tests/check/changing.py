"""A table beside the outbox, in which checkers make changes."""

from __future__ import annotations

from sqlalchemy import ForeignKey
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from tests.check.support import Bench


class Base(DeclarativeBase):
    """Mapped classes of the tests."""


class Change(Base):
    """What a checker writes; what it is of is looked up at COMMIT."""

    __tablename__ = "change"

    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    of: Mapped[int | None] = mapped_column(ForeignKey("change.number", deferrable=True, initially="DEFERRED"))


def with_changes(bench: Bench) -> Bench:
    """Make the table in the database of a bench; return the bench."""
    Base.metadata.create_all(bench.engine)
    return bench


def changes(bench: Bench) -> list[int]:
    """Return what is in the table."""
    return [row[0] for row in bench.rows("SELECT number FROM change ORDER BY 1")]
