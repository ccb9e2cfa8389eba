"""Tables of the consumer's side."""

from __future__ import annotations

from functools import cache

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    DateTime,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    Table,
    Text,
    Uuid,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB

from outbox.database.tables.common import NAMING, CText

_TIME = DateTime(timezone=True)
_NOW = func.clock_timestamp()


@cache
def consumer_tables(schema: str = "outbox") -> MetaData:
    """Return the metadata of the consumer's tables in ``schema``."""
    metadata = MetaData(schema=schema, naming_convention=NAMING)
    _consumer_message(metadata)
    _consumer_offset(metadata)
    _consumer_start(metadata)
    _reconciliation_run(metadata)
    _reconciliation_finding(metadata)
    _reconciliation_settled(metadata)
    _reconciliation_mark(metadata)
    return metadata


def _consumer_message(metadata: MetaData) -> None:
    # The inbox. A consumed row is inserted once and never changed; only failures are updated.
    table = Table(
        "consumer_message",
        metadata,
        Column("consumer_group", CText, primary_key=True),
        Column("message_id", Uuid, primary_key=True),
        Column("topic", CText, nullable=False),
        Column("queue", Integer, nullable=False),
        Column("position", BigInteger, nullable=False),
        Column("status", Text, nullable=False),
        Column("attempts", Integer, nullable=False),
        Column("claims", Integer, nullable=False, server_default=text("0")),
        Column("next_attempt_at", _TIME),
        Column("body_digest", LargeBinary),
        Column("last_error", Text),
        Column("received_at", _TIME, nullable=False, server_default=_NOW),
        Column("changed_at", _TIME, nullable=False, server_default=_NOW),
        # What failures with one cause have in common; dead letters are grouped by it.
        Column("error_kind", Text),
        # Parked, and somebody has decided that this is the end of it.
        Column("discarded_at", _TIME),
        # The bulk job that quarantined the message off before a compensation, and what the inbox said before.
        Column("quarantined_by", Uuid),
        Column("quarantined_from", Text),
        CheckConstraint("status IN ('consumed', 'failed', 'parked', 'quarantined')", name="status"),
        CheckConstraint("attempts >= 0 AND claims >= 0", name="attempts"),
        CheckConstraint("(status = 'failed') = (next_attempt_at IS NOT NULL)", name="next_attempt_at"),
        CheckConstraint("discarded_at IS NULL OR status = 'parked'", name="discarded_at"),
        CheckConstraint("quarantined_from IN ('unconsumed', 'failed', 'parked')", name="quarantined_from"),
        CheckConstraint("(quarantined_by IS NULL) = (quarantined_from IS NULL)", name="quarantined"),
        CheckConstraint("quarantined_by IS NULL OR status = 'quarantined'", name="quarantined_by"),
    )
    # Serves the retry pass: the next due failures of a group.
    Index(
        "ix_consumer_message_due",
        table.c.consumer_group,
        table.c.topic,
        table.c.next_attempt_at,
        postgresql_where=table.c.status == "failed",
    )
    # Serves operators: what is parked.
    Index(
        "ix_consumer_message_parked",
        table.c.consumer_group,
        table.c.topic,
        table.c.message_id,
        postgresql_where=table.c.status == "parked",
    )
    # Serves operators: dead letters by their kind.
    Index(
        "ix_consumer_message_dead",
        table.c.consumer_group,
        table.c.topic,
        func.coalesce(table.c.error_kind, text("'unclassified'::text")),
        table.c.message_id,
        postgresql_where=(table.c.status == "parked") & table.c.discarded_at.is_(None),
    )
    # Serves operators: what was discarded.
    Index(
        "ix_consumer_message_discarded",
        table.c.discarded_at,
        table.c.message_id,
        postgresql_where=table.c.discarded_at.is_not(None),
    )


def _consumer_offset(metadata: MetaData) -> None:
    # Appended; the newest (greatest position, then claims) counts, found at the end of the primary key.
    # ``claims`` counts how often the messages after this position were started without an end.
    Table(
        "consumer_offset",
        metadata,
        Column("consumer_group", CText, primary_key=True),
        Column("topic", CText, primary_key=True),
        Column("queue", Integer, primary_key=True, autoincrement=False),
        Column("position", BigInteger, primary_key=True, autoincrement=False),
        Column("claims", SmallInteger, primary_key=True, autoincrement=False),
        Column("written_at", _TIME, nullable=False, server_default=_NOW),
        CheckConstraint("position >= 0", name="position"),
    )


def _consumer_start(metadata: MetaData) -> None:
    # Where a group began: what lies before was never meant for it. Written once; offsets are pruned, this is not.
    Table(
        "consumer_start",
        metadata,
        Column("consumer_group", CText, primary_key=True),
        Column("topic", CText, primary_key=True),
        Column("queue", Integer, primary_key=True, autoincrement=False),
        Column("position", BigInteger, nullable=False),
        Column("started_at", _TIME, nullable=False, server_default=_NOW),
    )


def _reconciliation_run(metadata: MetaData) -> None:
    # A pair of topic and group, compared. ``job_id`` joins those of one job; without an end it died, or runs.
    # ``schedule`` is that of the worker by which it began, NULL if somebody began it by hand.
    table = Table(
        "reconciliation_run",
        metadata,
        Column("id", Uuid, primary_key=True),
        Column("topic", CText, nullable=False),
        Column("consumer_group", CText, nullable=False),
        Column("window_start", _TIME),
        Column("window_end", _TIME),
        Column("started_at", _TIME, nullable=False, server_default=_NOW),
        Column("finished_at", _TIME),
        Column("counts", JSONB),
        Column("error", Text),
        Column("job_id", Uuid, nullable=False),
        Column("applied", Boolean, nullable=False, server_default=text("false")),
        Column("schedule", CText),
        Column("plan", JSONB),
    )
    # Serves "the last run of this pair".
    Index(None, table.c.topic, table.c.consumer_group, table.c.started_at)


def _reconciliation_finding(metadata: MetaData) -> None:
    table = Table(
        "reconciliation_finding",
        metadata,
        Column("id", BigInteger, Identity(always=True), primary_key=True),
        Column("run_id", Uuid, nullable=False),
        Column("message_id", Uuid),
        Column("kind", Text, nullable=False),
        Column("detail", JSONB),
        Column("action", Text),
        Column("acted_at", _TIME),
        Column("result", Text),
    )
    # Serves the report of one run, and the mark of what was done about one of its findings.
    Index(None, table.c.run_id, table.c.message_id)
    # Serves "what was ever found about this message".
    Index(None, table.c.message_id)


def _reconciliation_settled(metadata: MetaData) -> None:
    # Ranges of ids that were found in sync, with nothing in flight: they need not be read again.
    Table(
        "reconciliation_settled",
        metadata,
        Column("consumer_group", CText, primary_key=True),
        Column("topic", CText, primary_key=True),
        Column("first_id", Uuid, primary_key=True),
        Column("end_id", Uuid),
        Column("counts", JSONB, nullable=False),
        Column("verified_at", _TIME, nullable=False, server_default=_NOW),
    )


def _reconciliation_mark(metadata: MetaData) -> None:
    # Up to where all that was written is known to have left the settled ranges alone.
    Table(
        "reconciliation_mark",
        metadata,
        Column("consumer_group", CText, primary_key=True),
        Column("topic", CText, primary_key=True),
        Column("version", BigInteger, nullable=False),
        Column("mark", JSONB, nullable=False),
        Column("written_at", _TIME, nullable=False, server_default=_NOW),
    )
