"""The tables of the producer's part."""

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
    Text,
    Uuid,
    event,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB

from outbox.database.tables.common import NAME, NOW, PG_SNAPSHOT, TIME, XID8, Tables, metadata_of
from outbox.message.model import DeliveryStatus, Resolution
from outbox.text import sql_list


@cache
def producer_tables(schema: str = "outbox") -> MetaData:
    """Return the metadata of the producer's tables in ``schema``; nothing on the hot path is updated or deleted."""
    sequence = Sequence("op_sequence", schema=schema)
    tables: Tables = {
        # Written in the caller's transaction; never changed. Columns of a fixed length come first: nothing is padded.
        "half_message": [
            Column("id", Uuid, primary_key=True),
            Column("born_at", TIME, nullable=False, server_default=NOW),
            Column("producer_group", NAME, nullable=False),
            Column("topic", NAME, nullable=False),
            Column("content_type", Text, nullable=False),
            # As the inbox keeps it (outbox/consumer/passage.py). Made once, here: a reconciliation that computed it for
            # each row would take three times as long. Generated, so that it follows a body changed by hand.
            Column("body_digest", LargeBinary, Computed("substr(sha256(body), 1, 16)", persisted=True)),
            Column("key", NAME),
            Column("tag", NAME),
            Column("sender", Text),  # the host and the process that wrote it, if that was Python
            Column("headers", JSONB),
            Column("body", LargeBinary, nullable=False),
            Column("deliver_at", TIME),
            Column("queue", Integer),  # that the sender chose
            # True: a deferred trigger writes the op(commit), at the COMMIT (see the SQL functions of the migrations).
            Column("at_commit", Boolean),
            CheckConstraint("octet_length(topic) BETWEEN 1 AND 127", name="topic"),
            CheckConstraint("octet_length(key) <= 255", name="key"),
            # Serve operators: the messages of a key (all, or by another index), and of a topic, however few among all
            # others. A send pays a hundredth of its time for each.
            Index("ix_half_message_key", "key", postgresql_where=text("key IS NOT NULL")),
            Index("ix_half_message_topic", "topic", "id"),
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
            Column("next_check_at", TIME, nullable=False),
            Column("check_times", Integer, nullable=False, server_default=text("0")),
            Column("last_answer", Text),
            Column("last_error", Text),
            Column("checked_at", TIME),
            Column("parked_at", TIME),
            Column("reason", Text),
            Column("topic", NAME, nullable=False),
            # What asks about it, where that is no checker of an application, such as a server of RocketMQ's protocol.
            Column("asker", Text),
            CheckConstraint("check_times >= 0", name="check_times"),
            CheckConstraint(f"last_answer IN {sql_list(Resolution)}", name="last_answer"),
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
            Column("asked_at", TIME, nullable=False, server_default=NOW),
            Column("worker", Text, nullable=False),
            Column("answer", Text),
            Column("seconds", Double),
            Column("error", Text),
            CheckConstraint("asked IN ('checker', 'fence')", name="asked"),
            CheckConstraint(f"answer IN {sql_list(Resolution)}", name="answer"),
        ],
        # How many halves of a topic a batch of dispatch found committed, and how many rolled back; how many checks a
        # lease, or a try of fences, put. The sum of a topic's rows is how many there ever were, as far as dispatch has
        # come. Prune makes one row of them.
        "topic_total": [
            Column("id", BigInteger, Identity(always=True), primary_key=True),
            Column("topic", NAME, nullable=False),
            Column("committed", BigInteger, nullable=False, server_default=text("0")),
            Column("rolled_back", BigInteger, nullable=False, server_default=text("0")),
            Column("checks", BigInteger, nullable=False, server_default=text("0")),
        ],
        # What the function of a half raised: the call failed, by whatever way the half was decided then. Written once.
        "half_error": [
            Column("half_id", Uuid, primary_key=True),
            Column("error_kind", Text, nullable=False),
            Column("error", Text, nullable=False),
            Column("raised_at", TIME, nullable=False, server_default=NOW),
        ],
        # A row for each process that sends, written again about once a minute behind a COMMIT of its own.
        "producer_process": [
            Column("id", Uuid, primary_key=True),
            Column("name", Text, nullable=False),
            Column("producer_group", NAME, nullable=False),
            Column("version", Text, nullable=False),
            Column("started_at", TIME, nullable=False),
            Column("seen_at", TIME, nullable=False, server_default=NOW),
            # Serves prune: processes that send no more.
            Index(None, "seen_at"),
        ],
        # A half is undecided if and only if it has no row here; the primary key decides every race.
        "op_message": [
            Column("half_id", Uuid, primary_key=True),
            Column("sequence", BigInteger, sequence, server_default=sequence.next_value(), nullable=False),
            Column("decided_at", TIME, nullable=False, server_default=NOW),
            Column("xid", XID8, nullable=False, server_default=func.pg_current_xact_id()),
            Column("resolution", Text, nullable=False),
            Column("decided_by", Text, nullable=False),
            CheckConstraint("resolution IN ('commit', 'rollback')", name="resolution"),
            CheckConstraint("decided_by IN ('producer', 'check', 'operator')", name="decided_by"),
            # Serves dispatch: ops of transactions begun or finished since the last snapshot.
            Index(None, "xid"),
            # Serves dispatch: the rest of a backlog that was cut into batches, in the order it was written.
            Index(None, "sequence"),
        ],
        "message": [
            # The primary key serves "was this half dispatched, how often": resend, re-base after a restore, `messages
            # show`; and refuses a second message for the same send, whatever a dispatcher does.
            Column("half_id", Uuid, primary_key=True),
            Column("position", BigInteger, nullable=False),
            Column("visible_at", TIME, nullable=False, server_default=NOW),
            Column("queue", Integer, nullable=False),
            Column("send_number", SmallInteger, primary_key=True, autoincrement=False),
            Column("topic", NAME, nullable=False),
            CheckConstraint("position > 0", name="position"),
            CheckConstraint("send_number > 0", name="send_number"),
            # Serves consumers, and dispatch, whose lock makes positions unique.
            Index("ix_message_topic_queue_position", "topic", "queue", "position"),
        ],
        # Deleted when due. A recalled one stays as the evidence why its op never became a message.
        "scheduled_message": [
            Column("half_id", Uuid, primary_key=True),
            Column("deliver_at", TIME, nullable=False),
            Column("recalled_at", TIME),
            Column("recalled_by", Text),
            # What a paused topic holds, in the order of its ops.
            Column("held_topic", NAME),
            Column("held_sequence", BigInteger),
            CheckConstraint("(recalled_at IS NULL) = (recalled_by IS NULL)", name="recalled"),
            CheckConstraint("(held_topic IS NULL) = (held_sequence IS NULL)", name="held"),
            # Serves the release pass: what a topic held that is resumed.
            Index(
                "ix_scheduled_message_held",
                "held_topic",
                "held_sequence",
                postgresql_where=text("held_topic IS NOT NULL AND recalled_at IS NULL"),
            ),
            # Serves the release pass: the next due messages.
            Index(None, "deliver_at", "half_id", postgresql_where=text("recalled_at IS NULL")),
        ],
        # Appended by each batch; the newest row counts. What the columns mean: outbox/dispatch/sql.py.
        "dispatch_cursor": [
            Column("id", BigInteger, Identity(always=True), primary_key=True),
            Column("next_xid", XID8, nullable=False),
            Column("in_flight", ARRAY(XID8), nullable=False),
            Column("target", PG_SNAPSHOT),
            Column("after_sequence", BigInteger),
            Column("until_sequence", BigInteger),
            Column("base_sequence", BigInteger, nullable=False, server_default=text("0")),
            Column("system_identifier", BigInteger, nullable=False),
            Column("written_at", TIME, nullable=False, server_default=NOW),
            Column("epoch", BigInteger, nullable=False, server_default=text("0")),
            Column("log", Text),
            CheckConstraint("(after_sequence IS NULL) = (until_sequence IS NULL)", name="cut"),
            CheckConstraint("target IS NULL OR until_sequence IS NOT NULL", name="target"),
        ],
        "topic": [
            Column("name", NAME, primary_key=True),
            Column("queues", Integer, nullable=False),
            Column("created_at", TIME, nullable=False, server_default=NOW),
            CheckConstraint("queues BETWEEN 1 AND 4096", name="queues"),
        ],
        # Topics of which nothing is dispatched. One that is resumed stays until what it held is dispatched.
        "topic_pause": [
            Column("topic", NAME, primary_key=True),
            Column("paused_at", TIME, nullable=False, server_default=NOW),
            Column("paused_by", Text, nullable=False),
            Column("pause_reason", Text, nullable=False),
            Column("resumed_at", TIME),
        ],
        # All times of a schedule up to ``last_at`` are done.
        "cron_schedule": [
            Column("name", NAME, primary_key=True),
            Column("topic", NAME, nullable=False),
            Column("recurrence", Text, nullable=False),
            Column("missed", Text, nullable=False),
            Column("declared_at", TIME, nullable=False),
            Column("last_at", TIME, nullable=False),
            Column("next_at", TIME),
            Column("paused_at", TIME),
            Column("paused_by", Text),
            Column("pause_reason", Text),
            Column("ordered_at", TIME),
        ],
        # To how many queues a topic grew, and the last position of each queue that it had before.
        "topic_growth": [
            Column("topic", NAME, primary_key=True),
            Column("queues", Integer, primary_key=True, autoincrement=False),
            Column("ends", ARRAY(BigInteger), nullable=False),
            Column("grown_at", TIME, nullable=False, server_default=NOW),
        ],
        # Which positions of a queue that another database's relay publishes are stored in a topic here.
        "intake_range": [
            Column("id", BigInteger, Identity(always=True), primary_key=True),
            Column("topic", NAME, nullable=False),
            Column("source", Text, nullable=False),
            Column("published", Text, nullable=False),
            Column("queue", Integer, nullable=False),
            Column("first", BigInteger, nullable=False),
            Column("last", BigInteger, nullable=False),
            Column("stored_at", TIME, nullable=False, server_default=NOW),
            Column("told", Boolean, nullable=False, server_default=text("false")),
        ],
        # In which topic messages of a kind that are taken in have their own ids.
        "intake_kind": [
            Column("id", Uuid, primary_key=True),
            Column("topic", NAME, nullable=False),
            Column("met_at", TIME, nullable=False, server_default=NOW),
        ],
        # The primary key is what makes a compensation happen once ever.
        "compensation": [
            Column("half_id", Uuid, primary_key=True),
            Column("function", Text, nullable=False),
            Column("requested_by", Text, nullable=False),
            Column("reason", Text, nullable=False),
            Column("result", JSONB),
            Column("compensated_at", TIME, nullable=False, server_default=NOW),
            Column("bulk_job_id", Uuid),
        ],
        # Appended; the newest of a message and a group counts. Without one, a message before the cursor is consumed.
        "delivery": [
            Column("half_id", Uuid, primary_key=True),
            Column("consumer_group", NAME, primary_key=True),
            Column("number", Integer, primary_key=True, autoincrement=False),
            Column("topic", NAME, nullable=False),
            Column("status", Text, nullable=False),
            Column("settled", Boolean, nullable=False),
            Column("reason", Text),
            Column("recorded_at", TIME, nullable=False, server_default=NOW),
            CheckConstraint("number > 0", name="number"),
            CheckConstraint(f"status IN {sql_list(DeliveryStatus)}", name="status"),
            # Serves the confirm pass: deliveries not settled yet.
            Index("ix_delivery_open", "topic", "consumer_group", "half_id", postgresql_where=text("NOT settled")),
            # Serves the health model: deliveries given up, which should be few.
            Index("ix_delivery_exhausted", "topic", "half_id", postgresql_where=text("status = 'resend_exhausted'")),
        ],
        # What change data capture reads in the WAL, under the names that Debezium takes by default.
        "published": [
            Column("id", Uuid, primary_key=True),
            # In the order in which they were written. A message that a group reads again has one more row.
            Column("number", BigInteger, Identity(always=True), primary_key=True),
            Column("aggregatetype", NAME, nullable=False),
            Column("aggregateid", NAME),
            Column("type", Text, nullable=False),
            Column("payload", LargeBinary, nullable=False),
            # In UTC: with a time zone, or as a number, it would end Debezium.
            Column("timestamp", DateTime, nullable=False),
            Column("content_type", Text, nullable=False),
            Column("headers", JSONB, nullable=False),
            Column("traceparent", Text),
            Column("tag", NAME),
            Column("queue", Integer, nullable=False),
            Column("position", BigInteger, nullable=False),
            Column("send_number", SmallInteger, nullable=False),
        ],
        # Appended by each confirm pass that came further; the newest of a topic and a group counts. By queue: where the
        # group began, and up to which position the fate of each message is known. See outbox/delivery/confirm_pass.py.
        "delivery_cursor": [
            Column("topic", NAME, primary_key=True),
            Column("consumer_group", NAME, primary_key=True),
            Column("number", BigInteger, primary_key=True, autoincrement=False),
            Column("starts", ARRAY(BigInteger), nullable=False),
            Column("positions", ARRAY(BigInteger), nullable=False),
            Column("written_at", TIME, nullable=False, server_default=NOW),
            CheckConstraint("cardinality(starts) = cardinality(positions)", name="queues"),
        ],
        # A saga that was started. It changes until it has ended. What the columns mean: outbox/flow/saga.py.
        "saga": [
            Column("id", Uuid, primary_key=True),
            Column("name", NAME, nullable=False),
            Column("status", Text, nullable=False, server_default=text("'running'")),
            Column("content_type", Text, nullable=False),
            Column("body", LargeBinary, nullable=False),
            Column("started_at", TIME, nullable=False, server_default=NOW),
            Column("ended_at", TIME),
            Column("reason", Text),
            CheckConstraint("status IN ('running', 'compensating', 'completed', 'compensated')", name="status"),
            CheckConstraint("(ended_at IS NULL) = (status IN ('running', 'compensating'))", name="ended"),
            # Serves the list of open sagas.
            Index("ix_saga_open", "id", postgresql_where=text("ended_at IS NULL")),
            # Serves prune.
            Index(None, "ended_at", postgresql_where=text("ended_at IS NOT NULL")),
        ],
        # A command of a saga, by the id of its message, and the answer to it.
        "saga_command": [
            Column("message_id", Uuid, primary_key=True),
            Column("saga_id", Uuid, nullable=False),
            Column("number", Integer, nullable=False),
            Column("step", NAME, nullable=False),
            Column("kind", Text, nullable=False),
            Column("sent_at", TIME, nullable=False, server_default=NOW),
            Column("overdue_at", TIME),
            Column("answered_at", TIME),
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
            Column("branch", NAME, primary_key=True),
            Column("participant", NAME, primary_key=True),
            Column("state", Text, nullable=False),
            Column("was_tried", Boolean, nullable=False),
            Column("changed_at", TIME, nullable=False, server_default=NOW),
            CheckConstraint("state IN ('tried', 'confirmed', 'cancelled')", name="state"),
            # Serves prune.
            Index(None, "changed_at", postgresql_where=text("state <> 'tried'")),
        ],
    }
    metadata = metadata_of(schema, tables)
    # Table(postgresql_with=…) is of SQLAlchemy 2.1.
    fillfactor = DDL("ALTER TABLE %(fullname)s SET (fillfactor = 70)")  # type: ignore[no-untyped-call]  # SQLAlchemy gives no types
    event.listen(metadata.tables[f"{schema}.half_check"], "after_create", fillfactor)
    return metadata
