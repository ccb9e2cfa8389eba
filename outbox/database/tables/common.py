"""What the tables of all parts are made of, and those that a producer and a consumer both need."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    Computed,
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


class _PgType(UserDefinedType[str]):
    """A column type of PostgreSQL which SQLAlchemy doesn't know, by its name in SQL."""

    cache_ok: bool | None = True

    def __init__(self, name: str) -> None:
        self.name = name

    def get_col_spec(self, **_: Any) -> str:
        """Return the SQL name."""
        return self.name


# PostgreSQL's 64-bit transaction id (PostgreSQL 13+, "Object Identifier Types"), and a snapshot of the transactions in
# progress ("Transaction ID and Snapshot Information Functions").
XID8 = _PgType("xid8")
PG_SNAPSHOT = _PgType("pg_snapshot")
# Names and keys compare by bytes: cheaper in an index, and the same under every locale.
NAME = Text(collation="C")
TIME = DateTime(timezone=True)
NOW = func.clock_timestamp()

# By the table's name.
Tables = dict[str, list[Column[Any] | CheckConstraint | Index]]

_NAMING = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "pk": "pk_%(table_name)s",
}


#: The tables of each part that are partitioned by ranges of message ids, which begin with the time, and the column with
#: the id. Prune empties such a range as a whole (`outbox.prune.segments`). A pass takes them in this order.
SEGMENTED: Mapping[str, Mapping[str, str]] = {
    "producer": {
        "message": "half_id",
        "half_message": "id",
        "op_message": "half_id",
        "delivery": "half_id",
        "published": "id",
    },
    "consumer": {"consumer_message": "message_id"},
}


def metadata_of(schema: str, tables: Tables) -> MetaData:
    """Return the metadata of tables in ``schema``, with those of `SEGMENTED` partitioned."""
    metadata = MetaData(schema=schema, naming_convention=_NAMING)
    ids = {table: column for of_part in SEGMENTED.values() for table, column in of_part.items()}
    for name, columns_and_more in tables.items():
        by: dict[str, Any] = {"postgresql_partition_by": f"RANGE ({ids[name]})"} if name in ids else {}
        Table(name, metadata, *columns_and_more, **by)
    return metadata


@cache
def common_tables(schema: str = "outbox") -> MetaData:
    """Return the metadata of the tables that a producer and a consumer both need, in ``schema``."""
    tables: Tables = {
        # Appended in the transaction of the act that it records. ``origin`` tells by which way it came: console (with
        # address and request id), command line, worker.
        "audit": [
            Column("id", BigInteger, Identity(always=True), primary_key=True),
            Column("acted_at", TIME, nullable=False, server_default=NOW),
            Column("actor", Text, nullable=False),
            Column("action", Text, nullable=False),
            Column("target", Text, nullable=False),
            Column("reason", Text),
            Column("result", JSONB),
            Column("origin", JSONB),
            # Serves the list of acts on a message.
            Index(None, "target"),
        ],
        # One act ordered for many messages, and each rollback of a local transaction. It is done when no item is
        # pending any more; ``rate`` is items a second.
        "bulk_job": [
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
            Column("created_at", TIME, nullable=False, server_default=NOW),
            Column("started_at", TIME),
            Column("finished_at", TIME),
            Column("cancelled_at", TIME),
            Column("cancelled_by", Text),
            CheckConstraint("rate > 0", name="rate"),
            CheckConstraint("total >= 0", name="total"),
            CheckConstraint("(cancelled_at IS NULL) = (cancelled_by IS NULL)", name="cancelled"),
            # Makes a repeated order the same order.
            Index(None, "idempotency_key", unique=True),
            # Serves workers: the open bulk jobs.
            Index("ix_bulk_job_open", "created_at", postgresql_where=text("finished_at IS NULL")),
        ],
        # Each item is acted on in a transaction that also writes its state here. A rollback runs outside of it, and
        # leases its item by moving ``next_attempt_at`` ahead.
        "bulk_item": [
            Column("bulk_job_id", Uuid, primary_key=True),
            Column("number", Integer, primary_key=True, autoincrement=False),
            Column("action", Text, nullable=False),
            Column("message_id", Uuid, nullable=False),
            Column("topic", NAME),
            Column("consumer_group", NAME),
            Column("state", Text, nullable=False, server_default=text("'pending'")),
            Column("outcome", Text),
            Column("attempts", Integer, nullable=False, server_default=text("0")),
            Column("next_attempt_at", TIME, nullable=False, server_default=NOW),
            Column("changed_at", TIME, nullable=False, server_default=NOW),
            CheckConstraint("state IN ('pending', 'done', 'skipped', 'failed', 'cancelled')", name="state"),
            CheckConstraint("number > 0", name="number"),
            CheckConstraint("attempts >= 0", name="attempts"),
            # Serves workers: the next items of a bulk job.
            Index("ix_bulk_item_pending", "bulk_job_id", "number", postgresql_where=text("state = 'pending'")),
            # No order rolls a message back while another one is at it.
            Index(
                "ix_bulk_item_compensate",
                "message_id",
                unique=True,
                postgresql_where=text("action = 'compensate' AND state = 'pending'"),
            ),
            # Serves "which bulk jobs had this message".
            Index(None, "message_id"),
        ],
        # A row for each worker that runs, written again every few seconds, and deleted when it ends in order.
        "worker": [
            Column("id", Uuid, primary_key=True),
            Column("name", Text, nullable=False),
            Column("version", Text, nullable=False),
            Column("started_at", TIME, nullable=False, server_default=NOW),
            Column("seen_at", TIME, nullable=False, server_default=NOW),
            Column("roles", JSONB, nullable=False),
            Column("handlers", JSONB, nullable=False),
            Column("duties", JSONB, nullable=False),
            # Serves prune: workers that died.
            Index(None, "seen_at"),
        ],
        # Rules of health that need no attention for a time: in which database, of which topic and group, where it says.
        "silence": [
            Column("id", BigInteger, Identity(always=True), primary_key=True),
            Column("rule", Text, nullable=False),
            Column("of_database", Text),
            Column("topic", NAME),
            Column("consumer_group", NAME),
            Column("begins_at", TIME, nullable=False),
            Column("ends_at", TIME, nullable=False),
            Column("author", Text, nullable=False),
            Column("reason", Text, nullable=False),
            CheckConstraint("ends_at > begins_at", name="ends"),
        ],
        # How things stood, once a minute; the charts of the console are made of it. What is known of each topic and
        # group may be long, and is kept out of line: totals are read without it.
        "stats_sample": [
            Column("sampled_at", TIME, primary_key=True),
            Column("stats", JSONB, nullable=False),
            Column("totals", JSONB, Computed("stats - '{topics,groups,sagas,work}'::text[]", persisted=True)),
        ],
    }
    return metadata_of(schema, tables)
