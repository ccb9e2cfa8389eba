"""Tables of the producer's side (design: nothing on the hot path is updated or deleted)."""

from __future__ import annotations

from functools import cache

from sqlalchemy import (
    ARRAY,
    DDL,
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Computed,
    DateTime,
    Double,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Sequence,
    SmallInteger,
    Table,
    Text,
    Uuid,
    event,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB

from outbox.database.tables.common import NAMING, CText, PgSnapshot, Xid8

_TIME = DateTime(timezone=True)
_NOW = func.clock_timestamp()


@cache
def producer_tables(schema: str = "outbox") -> MetaData:
    """Return the metadata of the producer's tables in ``schema``."""
    metadata = MetaData(schema=schema, naming_convention=NAMING)
    _half_message(metadata)
    _half_check(metadata)
    _check_history(metadata)
    _op_message(metadata)
    _message(metadata)
    _scheduled_message(metadata)
    _dispatch_cursor(metadata)
    _topic(metadata)
    _compensation(metadata)
    return metadata


def _half_message(metadata: MetaData) -> None:
    # Written in the caller's transaction; never changed. Prune reads it by id, which begins with the time.
    Table(
        "half_message",
        metadata,
        Column("id", Uuid, primary_key=True),
        Column("producer_group", CText, nullable=False),
        Column("topic", CText, nullable=False),
        Column("key", CText),
        Column("tag", CText),
        Column("headers", JSONB),
        Column("content_type", Text, nullable=False),
        Column("body", LargeBinary, nullable=False),
        Column("deliver_at", _TIME),
        Column("born_at", _TIME, nullable=False, server_default=_NOW),
        # As the inbox keeps it (outbox/consumer/reading.py). Made once, here: a reconciliation that computed it for
        # each row would take three times as long. Generated, so that it changes with a body that somebody changes.
        Column("body_digest", LargeBinary, Computed("substr(sha256(body), 1, 16)", persisted=True)),
        CheckConstraint("octet_length(topic) BETWEEN 1 AND 127", name="topic"),
        CheckConstraint("octet_length(key) <= 255", name="key"),
    )


def _half_check(metadata: MetaData) -> None:
    # The one row of the producer's side that changes: it lives from prepare to decision.
    table = Table(
        "half_check",
        metadata,
        Column("half_id", Uuid, primary_key=True),
        Column("fenced", Boolean, nullable=False),
        Column("next_check_at", _TIME, nullable=False),
        Column("check_times", Integer, nullable=False, server_default=text("0")),
        Column("last_answer", Text),
        Column("last_error", Text),
        Column("checked_at", _TIME),
        Column("parked_at", _TIME),
        Column("reason", Text),
        Column("topic", CText, nullable=False),
        CheckConstraint("check_times >= 0", name="check_times"),
        CheckConstraint("last_answer IN ('commit', 'rollback', 'unknown')", name="last_answer"),
        CheckConstraint("(parked_at IS NULL) = (reason IS NULL)", name="parked"),
    )
    # Table(postgresql_with=…) is of SQLAlchemy 2.1.
    fillfactor = DDL("ALTER TABLE %(fullname)s SET (fillfactor = 70)")  # type: ignore[no-untyped-call]
    event.listen(table, "after_create", fillfactor)
    # Serves the check pass, which asks topic by topic: halves of a topic without a checker cost the others nothing.
    Index(None, table.c.topic, table.c.next_check_at, postgresql_where=table.c.parked_at.is_(None))
    # Serves the check pass: fenced halves need no checker, whatever their topic.
    Index(None, table.c.next_check_at, postgresql_where=table.c.fenced & table.c.parked_at.is_(None))


def _check_history(metadata: MetaData) -> None:
    # One row a check, written when the question is put: without an answer, the worker died or was cut off over it.
    Table(
        "check_history",
        metadata,
        Column("half_id", Uuid, primary_key=True),
        Column("id", BigInteger, Identity(always=True), primary_key=True),
        Column("asked", Text, nullable=False),
        Column("asked_at", _TIME, nullable=False, server_default=_NOW),
        Column("worker", Text, nullable=False),
        Column("answer", Text),
        Column("seconds", Double),
        Column("error", Text),
        CheckConstraint("asked IN ('checker', 'fence')", name="asked"),
        CheckConstraint("answer IN ('commit', 'rollback', 'unknown')", name="answer"),
    )


def _op_message(metadata: MetaData) -> None:
    # A half is undecided if and only if it has no row here; the primary key decides every race.
    sequence = Sequence("op_sequence", metadata=metadata, schema=metadata.schema)
    table = Table(
        "op_message",
        metadata,
        Column("half_id", Uuid, primary_key=True),
        Column("sequence", BigInteger, sequence, server_default=sequence.next_value(), nullable=False),
        Column("resolution", Text, nullable=False),
        Column("decided_by", Text, nullable=False),
        Column("decided_at", _TIME, nullable=False, server_default=_NOW),
        Column("xid", Xid8, nullable=False, server_default=func.pg_current_xact_id()),
        CheckConstraint("resolution IN ('commit', 'rollback')", name="resolution"),
        CheckConstraint("decided_by IN ('producer', 'check', 'operator')", name="decided_by"),
    )
    # Serves dispatch: ops of transactions begun or finished since the last snapshot.
    Index(None, table.c.xid)
    # Serves dispatch: the rest of a backlog that was cut into batches, in the order it was written.
    Index(None, table.c.sequence, unique=True)


def _message(metadata: MetaData) -> None:
    table = Table(
        "message",
        metadata,
        Column("topic", CText, primary_key=True),
        Column("queue", Integer, primary_key=True, autoincrement=False),
        Column("position", BigInteger, primary_key=True, autoincrement=False),
        Column("half_id", Uuid, nullable=False),
        Column("send_number", SmallInteger, nullable=False),
        Column("visible_at", _TIME, nullable=False, server_default=_NOW),
        CheckConstraint("position > 0", name="position"),
        CheckConstraint("send_number > 0", name="send_number"),
    )
    # Serves "was this half dispatched, how often": resend, re-base after a restore, `messages show`;
    # and refuses a second message for the same send, whatever a dispatcher does.
    Index(None, table.c.half_id, table.c.send_number, unique=True)


def _scheduled_message(metadata: MetaData) -> None:
    # Deleted when due. A recalled one stays as the evidence why its op never became a message.
    table = Table(
        "scheduled_message",
        metadata,
        Column("half_id", Uuid, primary_key=True),
        Column("deliver_at", _TIME, nullable=False),
        Column("recalled_at", _TIME),
        Column("recalled_by", Text),
        CheckConstraint("(recalled_at IS NULL) = (recalled_by IS NULL)", name="recalled"),
    )
    # Serves the release pass: the next due messages.
    Index(None, table.c.deliver_at, table.c.half_id, postgresql_where=table.c.recalled_at.is_(None))


def _dispatch_cursor(metadata: MetaData) -> None:
    # Appended by each batch; the newest row counts. What the columns mean: outbox/dispatch.py.
    Table(
        "dispatch_cursor",
        metadata,
        Column("id", BigInteger, Identity(always=True), primary_key=True),
        Column("next_xid", Xid8, nullable=False),
        Column("in_flight", ARRAY(Xid8), nullable=False),
        Column("target", PgSnapshot),
        Column("after_sequence", BigInteger),
        Column("until_sequence", BigInteger),
        Column("base_sequence", BigInteger, nullable=False, server_default=text("0")),
        Column("system_identifier", BigInteger, nullable=False),
        Column("written_at", _TIME, nullable=False, server_default=_NOW),
        CheckConstraint("(after_sequence IS NULL) = (until_sequence IS NULL)", name="cut"),
        CheckConstraint("target IS NULL OR until_sequence IS NOT NULL", name="target"),
    )


def _topic(metadata: MetaData) -> None:
    Table(
        "topic",
        metadata,
        Column("name", CText, primary_key=True),
        Column("queues", Integer, nullable=False),
        Column("created_at", _TIME, nullable=False, server_default=_NOW),
        CheckConstraint("queues BETWEEN 1 AND 4096", name="queues"),
    )


def _compensation(metadata: MetaData) -> None:
    # The primary key is what makes a compensation happen once ever.
    Table(
        "compensation",
        metadata,
        Column("half_id", Uuid, primary_key=True),
        Column("function", Text, nullable=False),
        Column("requested_by", Text, nullable=False),
        Column("reason", Text, nullable=False),
        Column("result", JSONB),
        Column("compensated_at", _TIME, nullable=False, server_default=_NOW),
        Column("bulk_job_id", Uuid),
    )
