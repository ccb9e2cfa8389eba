"""The dispatch of a topic can be paused: what it holds waits in the schedule."""

from outbox.database.migration.script import run

revision = "producer_0014"
down_revision = "producer_0013"
branch_labels = None
depends_on = None

UPGRADE = (
    """
    CREATE TABLE IF NOT EXISTS {s}.topic_pause (
        topic TEXT COLLATE "C" NOT NULL,
        paused_at TIMESTAMPTZ NOT NULL DEFAULT clock_timestamp(),
        paused_by TEXT NOT NULL,
        pause_reason TEXT NOT NULL,
        resumed_at TIMESTAMPTZ,
        CONSTRAINT pk_topic_pause PRIMARY KEY (topic)
    )""",
    """
    ALTER TABLE {s}.scheduled_message
        ADD COLUMN IF NOT EXISTS held_topic TEXT COLLATE "C",
        ADD COLUMN IF NOT EXISTS held_sequence BIGINT
            CONSTRAINT ck_scheduled_message_held CHECK ((held_topic IS NULL) = (held_sequence IS NULL))""",
    """
    CREATE INDEX IF NOT EXISTS ix_scheduled_message_held ON {s}.scheduled_message (held_topic, held_sequence)
     WHERE held_topic IS NOT NULL AND recalled_at IS NULL""",
)

# What is held goes out: nothing would know of it any more.
DOWNGRADE = (
    "UPDATE {s}.scheduled_message SET deliver_at = clock_timestamp() WHERE held_topic IS NOT NULL",
    "DROP INDEX {s}.ix_scheduled_message_held",
    """
    ALTER TABLE {s}.scheduled_message
        DROP CONSTRAINT ck_scheduled_message_held, DROP COLUMN held_sequence, DROP COLUMN held_topic""",
    "DROP TABLE {s}.topic_pause",
)


def upgrade() -> None:
    run(UPGRADE)


def downgrade() -> None:
    run(DOWNGRADE)
