"""The tables, in SQLAlchemy Core: one metadata for each part, in a schema of their own.

`producer_tables` go into the producer's business database, `consumer_tables` into the consumer's, which may be the
same one; `common_tables` go with either. The migrations build the same tables (a test compares the two).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

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
from sqlalchemy.types import UserDefinedType


class _PgType(UserDefinedType[str]):
    """A column type of PostgreSQL which SQLAlchemy doesn't know, by its name in SQL."""

    cache_ok = True

    def __init__(self, name: str) -> None:
        self.name = name

    def get_col_spec(self, **_: Any) -> str:
        """Return the SQL name."""
        return self.name


# PostgreSQL's 64-bit transaction id (PostgreSQL 13+, "Object Identifier Types"), and a snapshot of the transactions in
# progress ("Transaction ID and Snapshot Information Functions").
_XID8 = _PgType("xid8")
_PG_SNAPSHOT = _PgType("pg_snapshot")
# Names and keys compare by bytes: cheaper in an index, and the same under every locale.
_NAME = Text(collation="C")
_TIME = DateTime(timezone=True)
_NOW = func.clock_timestamp()

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
    "producer": {"message": "half_id", "half_message": "id", "op_message": "half_id", "delivery": "half_id"},
    "consumer": {"consumer_message": "message_id"},
}


def _metadata(schema: str, tables: Tables) -> MetaData:
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
            Column("acted_at", _TIME, nullable=False, server_default=_NOW),
            Column("actor", Text, nullable=False),
            Column("action", Text, nullable=False),
            Column("target", Text, nullable=False),
            Column("reason", Text),
            Column("result", JSONB),
            Column("origin", JSONB),
            # Serves "what was done to this message".
            Index(None, "target"),
        ],
        # What was ordered for many messages at once, and each rollback of a local transaction. It is done when no item
        # is pending any more; ``rate`` is items a second.
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
            Column("created_at", _TIME, nullable=False, server_default=_NOW),
            Column("started_at", _TIME),
            Column("finished_at", _TIME),
            Column("cancelled_at", _TIME),
            Column("cancelled_by", Text),
            CheckConstraint("rate > 0", name="rate"),
            CheckConstraint("total >= 0", name="total"),
            CheckConstraint("(cancelled_at IS NULL) = (cancelled_by IS NULL)", name="cancelled"),
            # Makes a repeated order the same order.
            Index(None, "idempotency_key", unique=True),
            # Serves workers: what is to be done.
            Index("ix_bulk_job_open", "created_at", postgresql_where=text("finished_at IS NULL")),
        ],
        # Each item is acted on in a transaction that also writes its state here. A rollback runs outside of it, and
        # claims its item by moving ``next_attempt_at`` ahead.
        "bulk_item": [
            Column("bulk_job_id", Uuid, primary_key=True),
            Column("number", Integer, primary_key=True, autoincrement=False),
            Column("action", Text, nullable=False),
            Column("message_id", Uuid, nullable=False),
            Column("topic", _NAME),
            Column("consumer_group", _NAME),
            Column("state", Text, nullable=False, server_default=text("'pending'")),
            Column("outcome", Text),
            Column("attempts", Integer, nullable=False, server_default=text("0")),
            Column("next_attempt_at", _TIME, nullable=False, server_default=_NOW),
            Column("changed_at", _TIME, nullable=False, server_default=_NOW),
            CheckConstraint("state IN ('pending', 'done', 'skipped', 'failed', 'cancelled')", name="state"),
            CheckConstraint("number > 0", name="number"),
            CheckConstraint("attempts >= 0", name="attempts"),
            # Serves workers: the next items of a bulk job.
            Index("ix_bulk_item_pending", "bulk_job_id", "number", postgresql_where=text("state = 'pending'")),
            # Nobody rolls a message back while somebody else is at it.
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
            Column("started_at", _TIME, nullable=False, server_default=_NOW),
            Column("seen_at", _TIME, nullable=False, server_default=_NOW),
            Column("roles", JSONB, nullable=False),
            Column("handlers", JSONB, nullable=False),
            Column("duties", JSONB, nullable=False),
            # Serves prune: workers that died.
            Index(None, "seen_at"),
        ],
        # How things stood, once a minute; the charts of the console are made of it.
        "stats_sample": [
            Column("sampled_at", _TIME, primary_key=True),
            Column("stats", JSONB, nullable=False),
        ],
    }
    return _metadata(schema, tables)


@cache
def producer_tables(schema: str = "outbox") -> MetaData:
    """Return the metadata of the producer's tables in ``schema``; nothing on the hot path is updated or deleted."""
    sequence = Sequence("op_sequence", schema=schema)
    tables: Tables = {
        # Written in the caller's transaction; never changed. Prune reads it by id, which begins with the time.
        "half_message": [
            Column("id", Uuid, primary_key=True),
            Column("producer_group", _NAME, nullable=False),
            Column("topic", _NAME, nullable=False),
            Column("key", _NAME),
            Column("tag", _NAME),
            Column("headers", JSONB),
            Column("content_type", Text, nullable=False),
            Column("body", LargeBinary, nullable=False),
            Column("deliver_at", _TIME),
            Column("born_at", _TIME, nullable=False, server_default=_NOW),
            # As the inbox keeps it (outbox/consumer/reading.py). Made once, here: a reconciliation that computed it for
            # each row would take three times as long. Generated, so that it changes with a body that somebody changes.
            Column("body_digest", LargeBinary, Computed("substr(sha256(body), 1, 16)", persisted=True)),
            # True: a deferred trigger writes the op(commit), at the COMMIT (see the SQL functions of the migrations).
            Column("at_commit", Boolean),
            # The queue that the sender chose.
            Column("queue", Integer),
            CheckConstraint("octet_length(topic) BETWEEN 1 AND 127", name="topic"),
            CheckConstraint("octet_length(key) <= 255", name="key"),
            # Serves operators: the messages of a conversation. An id has 36 characters; a header may be too long for an
            # index.
            Index(
                "ix_half_message_conversation",
                text("\"left\"(headers ->> 'outbox-conversation', 36)"),
                "id",
                postgresql_where=text("headers ? 'outbox-conversation'"),
            ),
        ],
        # The one row of the producer's side that changes: it lives from prepare to decision.
        "half_check": [
            Column("half_id", Uuid, primary_key=True),
            Column("fenced", Boolean, nullable=False),
            Column("next_check_at", _TIME, nullable=False),
            Column("check_times", Integer, nullable=False, server_default=text("0")),
            Column("last_answer", Text),
            Column("last_error", Text),
            Column("checked_at", _TIME),
            Column("parked_at", _TIME),
            Column("reason", Text),
            Column("topic", _NAME, nullable=False),
            CheckConstraint("check_times >= 0", name="check_times"),
            CheckConstraint("last_answer IN ('commit', 'rollback', 'unknown')", name="last_answer"),
            CheckConstraint("(parked_at IS NULL) = (reason IS NULL)", name="parked"),
            # Serves the check pass, which asks topic by topic: halves of a topic without a checker cost others nothing.
            Index(None, "topic", "next_check_at", postgresql_where=text("parked_at IS NULL")),
            # Serves the check pass: fenced halves need no checker, whatever their topic.
            Index(None, "next_check_at", postgresql_where=text("fenced AND parked_at IS NULL")),
        ],
        # One row a check, written when the question is put: without an answer, the worker died or was cut off over it.
        "check_history": [
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
        ],
        # How many checks a claim, or a try of fences, put; the sum of a topic's rows is how many there ever were. Prune
        # makes one row of them.
        "check_total": [
            Column("id", BigInteger, Identity(always=True), primary_key=True),
            Column("topic", _NAME, nullable=False),
            Column("checks", BigInteger, nullable=False),
        ],
        # What the function of a half raised: the call failed, whoever decided the half then. Written once.
        "half_error": [
            Column("half_id", Uuid, primary_key=True),
            Column("error_kind", Text, nullable=False),
            Column("error", Text, nullable=False),
            Column("raised_at", _TIME, nullable=False, server_default=_NOW),
        ],
        # A row for each process that sends, written again about once a minute behind a COMMIT of its own.
        "producer_process": [
            Column("id", Uuid, primary_key=True),
            Column("name", Text, nullable=False),
            Column("producer_group", _NAME, nullable=False),
            Column("version", Text, nullable=False),
            Column("started_at", _TIME, nullable=False),
            Column("seen_at", _TIME, nullable=False, server_default=_NOW),
            # Serves prune: processes that send no more.
            Index(None, "seen_at"),
        ],
        # A half is undecided if and only if it has no row here; the primary key decides every race.
        "op_message": [
            Column("half_id", Uuid, primary_key=True),
            Column("sequence", BigInteger, sequence, server_default=sequence.next_value(), nullable=False),
            Column("resolution", Text, nullable=False),
            Column("decided_by", Text, nullable=False),
            Column("decided_at", _TIME, nullable=False, server_default=_NOW),
            Column("xid", _XID8, nullable=False, server_default=func.pg_current_xact_id()),
            CheckConstraint("resolution IN ('commit', 'rollback')", name="resolution"),
            CheckConstraint("decided_by IN ('producer', 'check', 'operator')", name="decided_by"),
            # Serves dispatch: ops of transactions begun or finished since the last snapshot.
            Index(None, "xid"),
            # Serves dispatch: the rest of a backlog that was cut into batches, in the order it was written.
            Index(None, "sequence"),
        ],
        "message": [
            Column("topic", _NAME, nullable=False),
            Column("queue", Integer, nullable=False),
            Column("position", BigInteger, nullable=False),
            # The primary key serves "was this half dispatched, how often": resend, re-base after a restore, `messages
            # show`; and refuses a second message for the same send, whatever a dispatcher does.
            Column("half_id", Uuid, primary_key=True),
            Column("send_number", SmallInteger, primary_key=True, autoincrement=False),
            Column("visible_at", _TIME, nullable=False, server_default=_NOW),
            CheckConstraint("position > 0", name="position"),
            CheckConstraint("send_number > 0", name="send_number"),
            # Serves consumers, and dispatch, whose lock makes positions unique.
            Index("ix_message_topic_queue_position", "topic", "queue", "position"),
        ],
        # Deleted when due. A recalled one stays as the evidence why its op never became a message.
        "scheduled_message": [
            Column("half_id", Uuid, primary_key=True),
            Column("deliver_at", _TIME, nullable=False),
            Column("recalled_at", _TIME),
            Column("recalled_by", Text),
            CheckConstraint("(recalled_at IS NULL) = (recalled_by IS NULL)", name="recalled"),
            # Serves the release pass: the next due messages.
            Index(None, "deliver_at", "half_id", postgresql_where=text("recalled_at IS NULL")),
        ],
        # Appended by each batch; the newest row counts. What the columns mean: outbox/dispatch/sql.py. ``totals`` says
        # for each topic how many halves were committed, and how many rolled back, up to here.
        "dispatch_cursor": [
            Column("id", BigInteger, Identity(always=True), primary_key=True),
            Column("next_xid", _XID8, nullable=False),
            Column("in_flight", ARRAY(_XID8), nullable=False),
            Column("target", _PG_SNAPSHOT),
            Column("after_sequence", BigInteger),
            Column("until_sequence", BigInteger),
            Column("base_sequence", BigInteger, nullable=False, server_default=text("0")),
            Column("system_identifier", BigInteger, nullable=False),
            Column("written_at", _TIME, nullable=False, server_default=_NOW),
            Column("epoch", BigInteger, nullable=False, server_default=text("0")),
            Column("log", Text),
            Column("totals", JSONB, nullable=False, server_default=text("'{}'")),
            CheckConstraint("(after_sequence IS NULL) = (until_sequence IS NULL)", name="cut"),
            CheckConstraint("target IS NULL OR until_sequence IS NOT NULL", name="target"),
        ],
        "topic": [
            Column("name", _NAME, primary_key=True),
            Column("queues", Integer, nullable=False),
            Column("created_at", _TIME, nullable=False, server_default=_NOW),
            CheckConstraint("queues BETWEEN 1 AND 4096", name="queues"),
        ],
        # The primary key is what makes a compensation happen once ever.
        "compensation": [
            Column("half_id", Uuid, primary_key=True),
            Column("function", Text, nullable=False),
            Column("requested_by", Text, nullable=False),
            Column("reason", Text, nullable=False),
            Column("result", JSONB),
            Column("compensated_at", _TIME, nullable=False, server_default=_NOW),
            Column("bulk_job_id", Uuid),
        ],
        # Appended; the newest of a message and a group counts. ``settled``: nobody asks about it any more. ``callback``
        # is which one ran in the transaction of the row. What the columns mean: outbox/delivery/once.py.
        "delivery": [
            Column("half_id", Uuid, primary_key=True),
            Column("consumer_group", _NAME, primary_key=True),
            Column("number", Integer, primary_key=True, autoincrement=False),
            Column("topic", _NAME, nullable=False),
            Column("status", Text, nullable=False),
            Column("settled", Boolean, nullable=False),
            Column("callback", Text),
            Column("reason", Text),
            Column("recorded_at", _TIME, nullable=False, server_default=_NOW),
            CheckConstraint("number > 0", name="number"),
            CheckConstraint(
                "status IN ('consumed', 'unconsumed', 'failed', 'parked', 'quarantined', 'resend_exhausted',"
                " 'left_out')",
                name="status",
            ),
            CheckConstraint("callback IN ('delivered', 'undeliverable')", name="callback"),
            # Serves the confirm pass: what isn't settled yet.
            Index("ix_delivery_open", "topic", "consumer_group", "half_id", postgresql_where=text("NOT settled")),
            # Serves the health model: what was given up, which should be little.
            Index("ix_delivery_exhausted", "topic", "half_id", postgresql_where=text("status = 'resend_exhausted'")),
            # Makes a callback happen once for each message and group.
            Index(
                "ix_delivery_callback",
                "half_id",
                "consumer_group",
                "callback",
                unique=True,
                postgresql_where=text("callback IS NOT NULL"),
            ),
        ],
        # Appended by each confirm pass that came further; the newest of a topic and a group counts. By queue: where the
        # group began, and up to which position each message has a delivery in it.
        "delivery_cursor": [
            Column("topic", _NAME, primary_key=True),
            Column("consumer_group", _NAME, primary_key=True),
            Column("number", BigInteger, primary_key=True, autoincrement=False),
            Column("starts", ARRAY(BigInteger), nullable=False),
            Column("positions", ARRAY(BigInteger), nullable=False),
            Column("written_at", _TIME, nullable=False, server_default=_NOW),
            CheckConstraint("cardinality(starts) = cardinality(positions)", name="queues"),
        ],
        # A saga that was started. It changes until it has ended. What the columns mean: outbox/flow/saga.py.
        "saga": [
            Column("id", Uuid, primary_key=True),
            Column("name", _NAME, nullable=False),
            Column("status", Text, nullable=False, server_default=text("'running'")),
            Column("content_type", Text, nullable=False),
            Column("body", LargeBinary, nullable=False),
            Column("started_at", _TIME, nullable=False, server_default=_NOW),
            Column("ended_at", _TIME),
            Column("reason", Text),
            CheckConstraint("status IN ('running', 'compensating', 'completed', 'compensated')", name="status"),
            CheckConstraint("(ended_at IS NULL) = (status IN ('running', 'compensating'))", name="ended"),
            # Serves "what is on its way".
            Index("ix_saga_open", "id", postgresql_where=text("ended_at IS NULL")),
            # Serves prune.
            Index(None, "ended_at", postgresql_where=text("ended_at IS NOT NULL")),
        ],
        # A command of a saga, by the id of its message, and what was answered.
        "saga_command": [
            Column("message_id", Uuid, primary_key=True),
            Column("saga_id", Uuid, nullable=False),
            Column("number", Integer, nullable=False),
            Column("step", _NAME, nullable=False),
            Column("kind", Text, nullable=False),
            Column("sent_at", _TIME, nullable=False, server_default=_NOW),
            Column("overdue_at", _TIME),
            Column("answered_at", _TIME),
            Column("answer", Text),
            Column("reason", Text),
            Column("result_type", Text),
            Column("result", LargeBinary),
            CheckConstraint("kind IN ('action', 'compensation')", name="kind"),
            CheckConstraint("answer IN ('done', 'refused')", name="answer"),
            CheckConstraint("(answer IS NULL) = (answered_at IS NULL)", name="answered"),
            # Serves each transition: all commands of a saga; and no two have the same number.
            Index(None, "saga_id", "number", unique=True),
        ],
        # A participant's branch of a transaction: what the last call that took effect has made of it. The primary key
        # is what has each call take effect once (outbox/flow/tcc.py).
        "tcc_branch": [
            Column("transaction_id", Uuid, primary_key=True),
            Column("branch", _NAME, primary_key=True),
            Column("participant", _NAME, primary_key=True),
            Column("state", Text, nullable=False),
            Column("was_tried", Boolean, nullable=False),
            Column("changed_at", _TIME, nullable=False, server_default=_NOW),
            CheckConstraint("state IN ('tried', 'confirmed', 'cancelled')", name="state"),
            # Serves prune.
            Index(None, "changed_at", postgresql_where=text("state <> 'tried'")),
        ],
    }
    metadata = _metadata(schema, tables)
    # Table(postgresql_with=…) is of SQLAlchemy 2.1.
    fillfactor = DDL("ALTER TABLE %(fullname)s SET (fillfactor = 70)")  # type: ignore[no-untyped-call]  # SQLAlchemy gives no types
    event.listen(metadata.tables[f"{schema}.half_check"], "after_create", fillfactor)
    return metadata


@cache
def consumer_tables(schema: str = "outbox") -> MetaData:
    """Return the metadata of the consumer's tables in ``schema``."""
    tables: Tables = {
        # The inbox. A consumed row is inserted once and never changed; only failures are updated.
        "consumer_message": [
            Column("consumer_group", _NAME, primary_key=True),
            Column("message_id", Uuid, primary_key=True),
            Column("topic", _NAME, nullable=False),
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
            # Serves the retry pass: the next due failures of a group.
            Index(
                "ix_consumer_message_due",
                "consumer_group",
                "topic",
                "next_attempt_at",
                postgresql_where=text("status = 'failed'"),
            ),
            # Serves operators: what is parked.
            Index(
                "ix_consumer_message_parked",
                "consumer_group",
                "topic",
                "message_id",
                postgresql_where=text("status = 'parked'"),
            ),
            # Serves operators: dead letters by their kind.
            Index(
                "ix_consumer_message_dead",
                "consumer_group",
                "topic",
                text("coalesce(error_kind, 'unclassified'::text)"),
                "message_id",
                postgresql_where=text("status = 'parked' AND discarded_at IS NULL"),
            ),
            # Serves operators: what was discarded.
            Index(
                "ix_consumer_message_discarded",
                "discarded_at",
                "message_id",
                postgresql_where=text("discarded_at IS NOT NULL"),
            ),
        ],
        # Appended in the transaction that records the failure in the inbox; of each message and group the newest stay.
        # ``status`` is what became of the message by it: what was skipped is consumed.
        "attempt_history": [
            Column("message_id", Uuid, primary_key=True),
            Column("consumer_group", _NAME, primary_key=True),
            Column("failed_at", _TIME, primary_key=True, server_default=_NOW),
            Column("topic", _NAME, nullable=False),
            Column("attempt", Integer, nullable=False),
            Column("status", Text, nullable=False),
            Column("worker", Text, nullable=False),
            Column("seconds", Double),
            Column("error_kind", Text),
            Column("error", Text),
            CheckConstraint("status IN ('consumed', 'failed', 'parked')", name="status"),
            CheckConstraint("attempt >= 0", name="attempt"),
            # Serves prune, and the trends of dead letters.
            Index(None, "failed_at"),
        ],
        # What operators write about dead letters of one kind; a few rows, written by hand.
        "dead_letter_note": [
            Column("consumer_group", _NAME, primary_key=True),
            Column("topic", _NAME, primary_key=True),
            Column("error_kind", _NAME, primary_key=True),
            Column("note", Text),
            Column("owner", Text),
            Column("written_by", Text, nullable=False),
            Column("written_at", _TIME, nullable=False, server_default=_NOW),
            CheckConstraint("note IS NOT NULL OR owner IS NOT NULL", name="written"),
        ],
        # What a group's producer still had of an old segment of the inbox when it was asked: those rows stay. Of a pair
        # of group and topic without a row here, all do.
        "segment_hold": [
            Column("consumer_group", _NAME, primary_key=True),
            Column("topic", _NAME, primary_key=True),
            Column("first_id", Uuid, primary_key=True),
            Column("message_ids", ARRAY(Uuid), nullable=False),
            # By this database's clock, before the producer was asked.
            Column("asked_at", _TIME, nullable=False),
        ],
        # Appended; the newest (greatest position, then claims) counts, found at the end of the primary key.
        # ``claims`` counts how often the messages after this position were started without an end.
        "consumer_offset": [
            Column("consumer_group", _NAME, primary_key=True),
            Column("topic", _NAME, primary_key=True),
            Column("queue", Integer, primary_key=True, autoincrement=False),
            Column("position", BigInteger, primary_key=True, autoincrement=False),
            Column("claims", SmallInteger, primary_key=True, autoincrement=False),
            Column("written_at", _TIME, nullable=False, server_default=_NOW),
            # Of the message at this position, as far as the group has read one: by it a log that went back is known.
            Column("message_id", Uuid),
            CheckConstraint("position >= 0", name="position"),
        ],
        # What a group had read of a log that went back: the offset, the last position that both sides agreed on, and
        # which messages the producer doesn't have any more, as far as the inbox knows them.
        "log_loss": [
            Column("id", BigInteger, Identity(always=True), primary_key=True),
            Column("consumer_group", _NAME, nullable=False),
            Column("topic", _NAME, nullable=False),
            Column("queue", Integer, nullable=False),
            Column("position", BigInteger, nullable=False),
            Column("agreed", BigInteger, nullable=False),
            Column("message_ids", ARRAY(Uuid), nullable=False),
            Column("found_at", _TIME, nullable=False, server_default=_NOW),
            # Serves the reconciliation, health and prune: what a group has lost.
            Index(None, "consumer_group", "topic", "found_at"),
        ],
        # Where a group began: what lies before was never meant for it. Written once; offsets are pruned, this is not.
        "consumer_start": [
            Column("consumer_group", _NAME, primary_key=True),
            Column("topic", _NAME, primary_key=True),
            Column("queue", Integer, primary_key=True, autoincrement=False),
            Column("position", BigInteger, nullable=False),
            Column("started_at", _TIME, nullable=False, server_default=_NOW),
        ],
        # A pair of topic and group, compared. ``job_id`` joins those of one job; without an end it died, or runs.
        # ``schedule`` is that of the worker by which it began, NULL if somebody began it by hand.
        "reconciliation_run": [
            Column("id", Uuid, primary_key=True),
            Column("topic", _NAME, nullable=False),
            Column("consumer_group", _NAME, nullable=False),
            Column("window_start", _TIME),
            Column("window_end", _TIME),
            Column("started_at", _TIME, nullable=False, server_default=_NOW),
            Column("finished_at", _TIME),
            Column("counts", JSONB),
            Column("error", Text),
            Column("job_id", Uuid, nullable=False),
            Column("applied", Boolean, nullable=False, server_default=text("false")),
            Column("schedule", _NAME),
            Column("plan", JSONB),
            # The sums of the pair's measures, as the report has them: all totals, and keys that don't add up.
            Column("measures", JSONB),
            # Serves "the last run of this pair".
            Index(None, "topic", "consumer_group", "started_at"),
        ],
        # A run that an operator has ordered of a worker's reconciliation, which is known by its name and its first
        # pair. The worker that takes it writes of which job the runs are.
        "reconciliation_order": [
            Column("id", Uuid, primary_key=True),
            Column("schedule", _NAME, nullable=False),
            Column("topic", _NAME, nullable=False),
            Column("consumer_group", _NAME, nullable=False),
            Column("dry_run", Boolean, nullable=False),
            Column("requested_by", Text, nullable=False),
            Column("reason", Text, nullable=False),
            Column("origin", JSONB),
            Column("created_at", _TIME, nullable=False, server_default=_NOW),
            Column("taken_at", _TIME),
            Column("job_id", Uuid),
            CheckConstraint("(taken_at IS NULL) = (job_id IS NULL)", name="taken"),
            # Serves workers: what is to be done.
            Index("ix_reconciliation_order_open", "created_at", postgresql_where=text("taken_at IS NULL")),
            # Serves "who ordered this".
            Index(None, "job_id"),
        ],
        "reconciliation_finding": [
            Column("id", BigInteger, Identity(always=True), primary_key=True),
            Column("run_id", Uuid, nullable=False),
            Column("message_id", Uuid),
            Column("kind", Text, nullable=False),
            Column("detail", JSONB),
            Column("action", Text),
            Column("acted_at", _TIME),
            Column("result", Text),
            # Serves the report of one run, and the mark of what was done about one of its findings.
            Index(None, "run_id", "message_id"),
            # Serves "what was ever found about this message".
            Index(None, "message_id"),
        ],
        # Ranges of ids that were found in sync, with nothing in flight: they need not be read again.
        "reconciliation_settled": [
            Column("consumer_group", _NAME, primary_key=True),
            Column("topic", _NAME, primary_key=True),
            Column("first_id", Uuid, primary_key=True),
            Column("end_id", Uuid),
            Column("counts", JSONB, nullable=False),
            Column("verified_at", _TIME, nullable=False, server_default=_NOW),
        ],
        # Up to where all that was written is known to have left the settled ranges alone.
        "reconciliation_mark": [
            Column("consumer_group", _NAME, primary_key=True),
            Column("topic", _NAME, primary_key=True),
            Column("version", BigInteger, nullable=False),
            Column("mark", JSONB, nullable=False),
            Column("written_at", _TIME, nullable=False, server_default=_NOW),
        ],
    }
    return _metadata(schema, tables)
