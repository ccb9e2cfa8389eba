"""The health model counts the messages that were given up: an index that has these alone."""

from alembic import op

revision = "producer_0007"
down_revision = "producer_0006"
branch_labels = None
depends_on = None

UPGRADE = (
    # Only confirm passes write to this table; they wait meanwhile.
    "CREATE INDEX IF NOT EXISTS ix_delivery_exhausted ON {s}.delivery (topic, half_id) "
    "WHERE status = 'resend_exhausted'",
)

DOWNGRADE = ("DROP INDEX {s}.ix_delivery_exhausted",)


def upgrade() -> None:
    for statement in UPGRADE:
        op.execute(_in_schema(statement))


def downgrade() -> None:
    for statement in DOWNGRADE:
        op.execute(_in_schema(statement))


def _in_schema(statement: str) -> str:
    return statement.replace("{s}", f'"{op.get_context().version_table_schema}"')
