"""The messages of a conversation are found by an index, which has those alone that others have caused."""

from outbox.database.migration.script import run

revision = "producer_0009"
down_revision = "producer_0008"
branch_labels = None
depends_on = None

_NAME = "ix_half_message_conversation"
_TARGET = """half_message ("left"(headers ->> 'outbox-conversation', 36), id) WHERE headers ? 'outbox-conversation'"""

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
