"""The tables that both sides have: what operators did and have ordered, who works here, and how things stood.

Column types that SQLAlchemy doesn't know, and those which all tables share.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    DateTime,
    Double,
    Identity,
    Index,
    Integer,
    MetaData,
    Table,
    Text,
    Uuid,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB
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


_TIME = DateTime(timezone=True)
_NOW = func.clock_timestamp()


@cache
def common_tables(schema: str = "outbox") -> MetaData:
    """Return the metadata of the tables that a producer and a consumer both need, in ``schema``."""
    metadata = MetaData(schema=schema, naming_convention=NAMING)
    _audit(metadata)
    _bulk_job(metadata)
    _bulk_item(metadata)
    _worker(metadata)
    _stats_sample(metadata)
    return metadata


def _audit(metadata: MetaData) -> None:
    # Appended in the transaction of the act that it records. ``origin`` tells by which way it came: console (with
    # address and request id), command line, worker.
    table = Table(
        "audit",
        metadata,
        Column("id", BigInteger, Identity(always=True), primary_key=True),
        Column("acted_at", _TIME, nullable=False, server_default=_NOW),
        Column("actor", Text, nullable=False),
        Column("action", Text, nullable=False),
        Column("target", Text, nullable=False),
        Column("reason", Text),
        Column("result", JSONB),
        Column("origin", JSONB),
    )
    # Serves "what was done to this message".
    Index(None, table.c.target)


def _bulk_job(metadata: MetaData) -> None:
    # What was ordered for many messages at once, and each rollback of a local transaction. It is done when no item is
    # pending any more; ``rate`` is items a second.
    table = Table(
        "bulk_job",
        metadata,
        Column("id", Uuid, primary_key=True),
        Column("action", Text, nullable=False),
        Column("requested_by", Text, nullable=False),
        Column("reason", Text, nullable=False),
        Column("options", JSONB, nullable=False, server_default=text("'{}'")),
        Column("selector", JSONB, nullable=False),
        Column("rate", Double),
        Column("total", Integer, nullable=False),
        Column("idempotency_key", Text),
        Column("origin", JSONB),
        Column("created_at", _TIME, nullable=False, server_default=_NOW),
        Column("started_at", _TIME),
        Column("finished_at", _TIME),
        Column("cancelled_at", _TIME),
        Column("cancelled_by", Text),
        CheckConstraint("rate > 0", name="rate"),
        CheckConstraint("total >= 0", name="total"),
        CheckConstraint("(cancelled_at IS NULL) = (cancelled_by IS NULL)", name="cancelled"),
    )
    # Makes a repeated order the same order.
    Index(None, table.c.idempotency_key, unique=True)
    # Serves workers: what is to be done.
    Index("ix_bulk_job_open", table.c.created_at, postgresql_where=table.c.finished_at.is_(None))


def _bulk_item(metadata: MetaData) -> None:
    # Each item is acted on in a transaction that also writes its state here. A rollback runs outside of it, and claims
    # its item by moving ``next_attempt_at`` ahead.
    table = Table(
        "bulk_item",
        metadata,
        Column("bulk_job_id", Uuid, primary_key=True),
        Column("number", Integer, primary_key=True, autoincrement=False),
        Column("action", Text, nullable=False),
        Column("message_id", Uuid, nullable=False),
        Column("topic", CText),
        Column("consumer_group", CText),
        Column("state", Text, nullable=False, server_default=text("'pending'")),
        Column("outcome", Text),
        Column("attempts", Integer, nullable=False, server_default=text("0")),
        Column("next_attempt_at", _TIME, nullable=False, server_default=_NOW),
        Column("changed_at", _TIME, nullable=False, server_default=_NOW),
        CheckConstraint("state IN ('pending', 'done', 'skipped', 'failed', 'cancelled')", name="state"),
        CheckConstraint("number > 0", name="number"),
        CheckConstraint("attempts >= 0", name="attempts"),
    )
    # Serves workers: the next items of a bulk job.
    Index(
        "ix_bulk_item_pending",
        table.c.bulk_job_id,
        table.c.number,
        postgresql_where=table.c.state == "pending",
    )
    # Nobody rolls a message back while somebody else is at it.
    Index(
        "ix_bulk_item_compensate",
        table.c.message_id,
        unique=True,
        postgresql_where=(table.c.action == "compensate") & (table.c.state == "pending"),
    )
    # Serves "which bulk jobs had this message".
    Index(None, table.c.message_id)


def _worker(metadata: MetaData) -> None:
    # A row for each worker that runs, written again every few seconds, and deleted when it ends in order.
    table = Table(
        "worker",
        metadata,
        Column("id", Uuid, primary_key=True),
        Column("name", Text, nullable=False),
        Column("version", Text, nullable=False),
        Column("started_at", _TIME, nullable=False, server_default=_NOW),
        Column("seen_at", _TIME, nullable=False, server_default=_NOW),
        Column("roles", JSONB, nullable=False),
        Column("handlers", JSONB, nullable=False),
        Column("duties", JSONB, nullable=False),
    )
    # Serves prune: workers that died.
    Index(None, table.c.seen_at)


def _stats_sample(metadata: MetaData) -> None:
    # How things stood, once a minute; the charts of the console are made of it.
    Table(
        "stats_sample",
        metadata,
        Column("sampled_at", _TIME, primary_key=True),
        Column("stats", JSONB, nullable=False),
    )
