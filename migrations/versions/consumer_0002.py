"""The inbox in partitions by message id, which prune empties as a whole, and what the producers still have of them.

The old table becomes the DEFAULT partition, with all its rows and without being read.
"""

from outbox.database.migration.partition import partition, refuse
from outbox.database.migration.script import run

revision = "consumer_0002"
down_revision = "consumer_0001"
branch_labels = None
depends_on = None

UPGRADE = (
    refuse("consumer_message"),
    "LOCK TABLE {s}.consumer_offset, {s}.consumer_message IN ACCESS EXCLUSIVE MODE",
    partition("consumer_message", "message_id", ["consumer_group", "message_id"]),
    """
    CREATE TABLE {s}.segment_hold (
        consumer_group TEXT COLLATE "C" NOT NULL,
        topic TEXT COLLATE "C" NOT NULL,
        first_id UUID NOT NULL,
        message_ids UUID[] NOT NULL,
        asked_at TIMESTAMPTZ NOT NULL,
        CONSTRAINT pk_segment_hold PRIMARY KEY (consumer_group, topic, first_id)
    )""",
)

# What comes next drops the inbox, in whatever form it is.
DOWNGRADE = ("DROP TABLE {s}.segment_hold",)


def upgrade() -> None:
    run(UPGRADE)


def downgrade() -> None:
    run(DOWNGRADE)
