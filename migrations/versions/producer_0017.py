"""The messages of a topic are found by an index."""

from outbox.database.migration.script import run

revision = "producer_0017"
down_revision = "producer_0016"
branch_labels = None
depends_on = None

_NAME = "ix_half_message_topic"
_TARGET = "half_message (topic, id)"

#: Indexes that are built before the transaction of this revision, while all goes on: (name, the table and columns).
BEFORE = ((_NAME, _TARGET),)

UPGRADE = (
    # What was built on the partitions is taken over.
    f"CREATE INDEX IF NOT EXISTS {_NAME} ON {{s}}.{_TARGET}",
)

DOWNGRADE = (f"DROP INDEX {{s}}.{_NAME}",)


def upgrade() -> None:
    run(UPGRADE)


def downgrade() -> None:
    run(DOWNGRADE)
