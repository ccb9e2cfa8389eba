"""The tables of the consumer's part."""

from __future__ import annotations

from functools import cache

from sqlalchemy import (
    ARRAY,
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Double,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    Text,
    Uuid,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB

from outbox.database.tables.common import NAME, NOW, TIME, Tables, metadata_of
from outbox.message.model import DeliveryStatus, Status
from outbox.text import sql_list

_OPEN, _TRIED = sql_list(each for each in Status if each.open), sql_list(each for each in Status if each.tried)
_UNSETTLED = sql_list([DeliveryStatus.UNCONSUMED, *(each for each in Status if each.open)])
_TIMED = sql_list(each for each in Status if each.timed)


@cache
def consumer_tables(schema: str = "outbox") -> MetaData:
    """Return the metadata of the consumer's tables in ``schema``."""
    tables: Tables = {
        # The inbox. A consumed row is inserted once and never changed; only failures are updated.
        "consumer_message": [
            Column("position", BigInteger, nullable=False),
            Column("received_at", TIME, nullable=False, server_default=NOW),
            Column("changed_at", TIME, nullable=False, server_default=NOW),
            Column("queue", Integer, nullable=False),
            Column("attempts", Integer, nullable=False),
            Column("starts", Integer, nullable=False, server_default=text("0")),
            # In which of the group's passages of the queue (consumer_passage) this row was written.
            Column("passage", SmallInteger, nullable=False, server_default=text("0")),
            # It may not be tried before it is the first of the rows of its ``order_key``.
            Column("follows", Boolean, nullable=False, server_default=text("false")),
            Column("consumer_group", NAME, primary_key=True),
            Column("message_id", Uuid, primary_key=True),
            Column("topic", NAME, nullable=False),
            Column("status", Text, nullable=False),
            Column("body_digest", LargeBinary),
            Column("next_attempt_at", TIME),
            Column("last_error", Text),
            # What failures with one cause have in common; dead letters are grouped by it.
            Column("error_kind", Text),
            # Parked, and an operator has decided that this is the end of it.
            Column("discarded_at", TIME),
            # The bulk job that quarantined the message off before a compensation, and what the inbox said before.
            Column("quarantined_by", Uuid),
            Column("quarantined_from", Text),
            # Of a group that is ordered by key: the key whose later messages this row holds back, and its number there.
            Column("order_key", NAME),
            Column("turn", BigInteger),
            # Of a message that a client has taken, until ``next_attempt_at``: the number of its lease, which stays when
            # it is settled, the client's name, and what it names the take by.
            Column("lease", BigInteger),
            Column("taken_by", Text),
            Column("take_id", Text),
            CheckConstraint(f"status IN {sql_list(Status)}", name="status"),
            CheckConstraint("attempts >= 0 AND starts >= 0", name="attempts"),
            CheckConstraint(f"(status IN {_TIMED}) = (next_attempt_at IS NOT NULL)", name="next_attempt_at"),
            CheckConstraint("discarded_at IS NULL OR status = 'parked'", name="discarded_at"),
            CheckConstraint(f"quarantined_from IN {_UNSETTLED}", name="quarantined_from"),
            CheckConstraint("(quarantined_by IS NULL) = (quarantined_from IS NULL)", name="quarantined"),
            CheckConstraint("quarantined_by IS NULL OR status = 'quarantined'", name="quarantined_by"),
            CheckConstraint("(order_key IS NULL) = (turn IS NULL)", name="turn"),
            CheckConstraint("status <> 'waiting' OR (follows AND order_key IS NOT NULL)", name="waiting"),
            CheckConstraint(
                "CASE WHEN status = 'taken' THEN lease IS NOT NULL ELSE taken_by IS NULL AND take_id IS NULL END",
                name="taken",
            ),
            # Serves the retry pass, and clients that take: the next due failures of a group, and leases that end.
            Index(
                "ix_consumer_message_due",
                "consumer_group",
                "topic",
                "next_attempt_at",
                postgresql_where=text(f"status IN {_TIMED}"),
            ),
            # Serves clients that take again what an answer has lost.
            Index(
                "ix_consumer_message_take",
                "consumer_group",
                "topic",
                "take_id",
                postgresql_where=text("take_id IS NOT NULL"),
            ),
            # Serves consumers and the retry pass: which keys are held back, and by which message first.
            Index(
                "ix_consumer_message_held",
                "consumer_group",
                "topic",
                "order_key",
                "turn",
                "position",
                "message_id",
                postgresql_where=text(f"order_key IS NOT NULL AND status IN {_OPEN} AND discarded_at IS NULL"),
            ),
            # Serves operators: parked messages.
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
            # Serves operators: discarded messages.
            Index(
                "ix_consumer_message_discarded",
                "discarded_at",
                "message_id",
                postgresql_where=text("discarded_at IS NOT NULL"),
            ),
        ],
        # Appended in the transaction that records the failure in the inbox; of each message and group the newest stay.
        # ``status`` is what became of the message by it: a skipped one is consumed.
        "attempt_history": [
            Column("message_id", Uuid, primary_key=True),
            Column("consumer_group", NAME, primary_key=True),
            Column("failed_at", TIME, primary_key=True, server_default=NOW),
            Column("topic", NAME, nullable=False),
            Column("attempt", Integer, nullable=False),
            Column("status", Text, nullable=False),
            Column("worker", Text, nullable=False),
            Column("seconds", Double),
            Column("error_kind", Text),
            Column("error", Text),
            CheckConstraint(f"status IN {_TRIED}", name="status"),
            CheckConstraint("attempt >= 0", name="attempt"),
            # Serves prune, and the trends of dead letters.
            Index(None, "failed_at"),
        ],
        # What operators write about dead letters of one kind; a few rows, written by hand.
        "dead_letter_note": [
            Column("consumer_group", NAME, primary_key=True),
            Column("topic", NAME, primary_key=True),
            Column("error_kind", NAME, primary_key=True),
            Column("note", Text),
            Column("owner", Text),
            Column("written_by", Text, nullable=False),
            Column("written_at", TIME, nullable=False, server_default=NOW),
            CheckConstraint("note IS NOT NULL OR owner IS NOT NULL", name="written"),
        ],
        # The producers' databases from which groups have read a topic (`outbox.database.identity`): number 0 is the
        # first. All that is kept of the topic of another one has ``topic@number`` for its topic. ``address`` is where
        # it was met last.
        "message_source": [
            Column("topic", NAME, primary_key=True),
            Column("number", Integer, primary_key=True, autoincrement=False),
            Column("id", Uuid, nullable=False),
            Column("address", Text),
            Column("met_at", TIME, nullable=False, server_default=NOW),
            Index(None, "id", "topic", unique=True),
        ],
        # What a group's producer still had of an old segment of the inbox when it was asked: those rows stay. Of a pair
        # of group and topic without a row here, all do.
        "segment_hold": [
            Column("consumer_group", NAME, primary_key=True),
            Column("topic", NAME, primary_key=True),
            Column("first_id", Uuid, primary_key=True),
            Column("message_ids", ARRAY(Uuid), nullable=False),
            # By this database's clock, before the producer was asked.
            Column("asked_at", TIME, nullable=False),
        ],
        # Appended; the newest (greatest position, then starts) counts, found at the end of the primary key.
        # ``starts`` counts how often the messages after this position were started without an end.
        "consumer_offset": [
            Column("consumer_group", NAME, primary_key=True),
            Column("topic", NAME, primary_key=True),
            Column("queue", Integer, primary_key=True, autoincrement=False),
            Column("position", BigInteger, primary_key=True, autoincrement=False),
            Column("starts", SmallInteger, primary_key=True, autoincrement=False),
            Column("written_at", TIME, nullable=False, server_default=NOW),
            # Of the message at this position, as far as the group has read one: by it a log that went back is known.
            Column("message_id", Uuid),
            # In which of its passages the group is: 0 is the first, consumer_passage has the others.
            Column("passage", SmallInteger, nullable=False, server_default=text("0")),
            CheckConstraint("position >= 0", name="position"),
        ],
        # Appended; the newest (greatest term, then renewal) counts. A worker that handles a queue outside of
        # transactions leases it until a time by this database's clock. Each take-over is a newer term, and a lease that
        # was given up a newer one without a worker. ``started``: what lies after it was not begun under this lease; 0
        # where nothing is in doubt.
        "consumer_lease": [
            Column("consumer_group", NAME, primary_key=True),
            Column("topic", NAME, primary_key=True),
            Column("queue", Integer, primary_key=True, autoincrement=False),
            Column("term", BigInteger, primary_key=True, autoincrement=False),
            Column("renewal", Integer, primary_key=True, autoincrement=False),
            Column("worker", Text),
            Column("started", BigInteger, nullable=False),
            Column("until", TIME, nullable=False),
            Column("written_at", TIME, nullable=False, server_default=NOW),
        ],
        # What a group had read of a log that went back: the offset, the last position that both sides agreed on, and
        # which messages the producer doesn't have any more, as far as the inbox knows them.
        "log_loss": [
            Column("id", BigInteger, Identity(always=True), primary_key=True),
            Column("consumer_group", NAME, nullable=False),
            Column("topic", NAME, nullable=False),
            Column("queue", Integer, nullable=False),
            Column("position", BigInteger, nullable=False),
            Column("agreed", BigInteger, nullable=False),
            Column("message_ids", ARRAY(Uuid), nullable=False),
            Column("found_at", TIME, nullable=False, server_default=NOW),
            # Serves the reconciliation, health and prune: what a group has lost.
            Index(None, "consumer_group", "topic", "found_at"),
        ],
        # Where a group began: what lies before was never meant for it. Written once; offsets are pruned, this is not.
        "consumer_start": [
            Column("consumer_group", NAME, primary_key=True),
            Column("topic", NAME, primary_key=True),
            Column("queue", Integer, primary_key=True, autoincrement=False),
            Column("position", BigInteger, nullable=False),
            Column("started_at", TIME, nullable=False, server_default=NOW),
        ],
        # That an operator has moved a group in a queue: back, to read again what lies up to ``former``, or ahead, to
        # never read what lies between. Written once, and deleted with the group.
        "consumer_passage": [
            Column("consumer_group", NAME, primary_key=True),
            Column("topic", NAME, primary_key=True),
            Column("queue", Integer, primary_key=True, autoincrement=False),
            Column("passage", SmallInteger, primary_key=True, autoincrement=False),
            Column("former", BigInteger, nullable=False),
            Column("position", BigInteger, nullable=False),
            Column("began_at", TIME, nullable=False, server_default=NOW),
            CheckConstraint("passage > 0 AND position <> former", name="moved"),
        ],
        # The inbox row that a message had in an earlier passage: kept in the transaction that writes over it.
        "reread_message": [
            Column("consumer_group", NAME, primary_key=True),
            Column("message_id", Uuid, primary_key=True),
            Column("passage", SmallInteger, primary_key=True, autoincrement=False),
            Column("topic", NAME, nullable=False),
            Column("queue", Integer, nullable=False),
            Column("position", BigInteger, nullable=False),
            Column("status", Text, nullable=False),
            Column("attempts", Integer, nullable=False),
            Column("body_digest", LargeBinary),
            Column("last_error", Text),
            Column("error_kind", Text),
            Column("received_at", TIME, nullable=False),
            Column("changed_at", TIME, nullable=False),
            Column("replaced_at", TIME, nullable=False, server_default=NOW),
            CheckConstraint(f"status IN {_TRIED}", name="status"),
            # Serves prune.
            Index(None, "replaced_at"),
        ],
        # What holds a group back, as operators and its breaker have it; without a row, nothing does. ``rate`` is
        # messages a second, NULL as declared. The breaker is open since ``opened_at``; failures before ``healthy_at``
        # don't count.
        "group_control": [
            Column("consumer_group", NAME, primary_key=True),
            Column("topic", NAME, primary_key=True),
            Column("paused_at", TIME),
            Column("paused_by", Text),
            Column("pause_reason", Text),
            Column("rate", Double),
            Column("opened_at", TIME),
            Column("trial_at", TIME),
            Column("opened_because", Text),
            Column("healthy_at", TIME),
            Column("openings", Integer, nullable=False, server_default=text("0")),
            CheckConstraint("(paused_at IS NULL) = (paused_by IS NULL)", name="paused"),
            CheckConstraint("rate > 0", name="rate"),
            CheckConstraint("(opened_at IS NULL) = (trial_at IS NULL)", name="opened"),
        ],
        # Appended; of a group that has a rate, which worker handles how many messages up to when. The last one counts.
        "rate_grant": [
            Column("consumer_group", NAME, primary_key=True),
            Column("topic", NAME, primary_key=True),
            Column("ends_at", TIME, primary_key=True),
            Column("messages", Integer, nullable=False),
        ],
        # A pair of topic and group, compared. ``job_id`` joins those of one job; without an end it died, or runs.
        # ``schedule`` is that of the worker by which it began, NULL if an operator began it by hand, or ordered it.
        "reconciliation_run": [
            Column("id", Uuid, primary_key=True),
            Column("topic", NAME, nullable=False),
            Column("consumer_group", NAME, nullable=False),
            Column("window_start", TIME),
            Column("window_end", TIME),
            Column("started_at", TIME, nullable=False, server_default=NOW),
            Column("finished_at", TIME),
            Column("counts", JSONB),
            Column("error", Text),
            Column("job_id", Uuid, nullable=False),
            Column("applied", Boolean, nullable=False, server_default=text("false")),
            Column("schedule", NAME),
            Column("ordered_by", Text),
            Column("plan", JSONB),
            # The sums of the pair's measures, as the report has them: all totals, and keys that don't add up.
            Column("measures", JSONB),
            # Serves "the last run of this pair".
            Index(None, "topic", "consumer_group", "started_at"),
            # Serves the look from a message that asks for a run to its runs.
            Index(None, "job_id"),
        ],
        "reconciliation_finding": [
            Column("id", BigInteger, Identity(always=True), primary_key=True),
            Column("run_id", Uuid, nullable=False),
            Column("message_id", Uuid),
            Column("kind", Text, nullable=False),
            Column("detail", JSONB),
            Column("action", Text),
            Column("acted_at", TIME),
            Column("result", Text),
            # Serves the report of one run, and the mark of the act on one of its findings.
            Index(None, "run_id", "message_id"),
            # Serves the findings of all runs about a message.
            Index(None, "message_id"),
        ],
        # Ranges of ids that were found in sync, with nothing in flight: they need not be read again.
        "reconciliation_settled": [
            Column("consumer_group", NAME, primary_key=True),
            Column("topic", NAME, primary_key=True),
            Column("first_id", Uuid, primary_key=True),
            Column("end_id", Uuid),
            Column("counts", JSONB, nullable=False),
            Column("verified_at", TIME, nullable=False, server_default=NOW),
        ],
        # Up to where all that was written is known to have left the settled ranges alone.
        "reconciliation_mark": [
            Column("consumer_group", NAME, primary_key=True),
            Column("topic", NAME, primary_key=True),
            Column("version", BigInteger, nullable=False),
            Column("mark", JSONB, nullable=False),
            Column("written_at", TIME, nullable=False, server_default=NOW),
        ],
    }
    return metadata_of(schema, tables)
