"""The health model counts the messages that were given up: an index that has these alone."""

from alembic import op

revision = "producer_0007"
down_revision = "producer_0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # Only confirm passes write to this table; they wait meanwhile.
    op.execute(
        f"CREATE INDEX IF NOT EXISTS ix_delivery_exhausted ON {_schema()}.delivery (topic, half_id) "
        "WHERE status = 'resend_exhausted'"
    )


def downgrade() -> None:
    op.execute(f"DROP INDEX {_schema()}.ix_delivery_exhausted")


def _schema() -> str:
    return f'"{op.get_context().version_table_schema}"'
