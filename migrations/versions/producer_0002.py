"""Half messages, ops and messages in partitions by id, which prune empties as a whole.

The old tables become the DEFAULT partitions, with all their rows and without being read. What is built before, outside
of the transaction, keeps the time short in which nobody can send.
"""

from outbox.database.migration.partition import partition, refuse
from outbox.database.migration.script import run

revision = "producer_0002"
down_revision = "producer_0001"
branch_labels = None
depends_on = None

#: Indexes that are built before the transaction of this revision, while all goes on: (name, the table and columns).
BEFORE = (
    ("op_message_sequence_0002", "op_message (sequence)"),
    ("ix_message_topic_queue_position", "message (topic, queue, position)"),
)

# A consumer in this database looks into its inbox first, and then reads messages. An upgrade of both parts locks them
# in the same order, or the two would wait for each other.
_LOCK_INBOX = """
DO $$ BEGIN
    IF to_regclass('{s}.consumer_message') IS NOT NULL THEN
        LOCK TABLE {s}.consumer_offset, {s}.consumer_message IN ACCESS EXCLUSIVE MODE;
    END IF;
END $$"""

# In the order in which a pass of dispatch takes them: it has read no cursor that is out of date below.
_LOCK = "LOCK TABLE {s}.dispatch_cursor, {s}.half_message, {s}.op_message, {s}.message IN ACCESS EXCLUSIVE MODE"

UPGRADE = (
    refuse("half_message", "op_message", "message"),
    _LOCK_INBOX,
    _LOCK,
    *(f"CREATE INDEX IF NOT EXISTS {name} ON {{s}}.{target}" for name, target in BEFORE),
    "DROP INDEX {s}.ix_op_message_sequence",
    "ALTER INDEX {s}.op_message_sequence_0002 RENAME TO ix_op_message_sequence",
    "ALTER TABLE {s}.message DROP CONSTRAINT pk_message",
    "ALTER TABLE {s}.message ADD CONSTRAINT pk_message PRIMARY KEY USING INDEX ix_message_half_id_send_number",
    partition("half_message", "id", ["id"]),
    partition("op_message", "half_id", ["half_id"]),
    partition("message", "half_id", ["half_id", "send_number"]),
    # The log is still the same one, though its table isn't.
    """
    UPDATE {s}.dispatch_cursor SET log = regexp_replace(log, '[0-9]+$', '{s}.message'::regclass::oid::text)
     WHERE log LIKE concat('%.', '{s}.message_default'::regclass::oid)""",
)

# What comes next drops the tables, in whatever form they are.
DOWNGRADE = ()


def upgrade() -> None:
    run(UPGRADE)


def downgrade() -> None:
    run(DOWNGRADE)
