"""The messages of a conversation are found by an index, which has those alone that others have caused."""

from alembic import op

revision = "producer_0009"
down_revision = "producer_0008"
branch_labels = None
depends_on = None

_NAME = "ix_half_message_conversation"
_TARGET = """half_message ("left"(headers ->> 'outbox-conversation', 36), id) WHERE headers ? 'outbox-conversation'"""

#: Indexes that are built before the transaction of this revision, while all goes on: (name, the table and columns).
BEFORE = ((_NAME, _TARGET),)


def upgrade() -> None:
    # What was built on the partitions is taken over.
    op.execute(f"CREATE INDEX IF NOT EXISTS {_NAME} ON {_schema()}.{_TARGET}")


def downgrade() -> None:
    op.execute(f"DROP INDEX {_schema()}.{_NAME}")


def _schema() -> str:
    return f'"{op.get_context().version_table_schema}"'
