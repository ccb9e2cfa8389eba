"""The health model counts the messages that were given up: an index that has these alone."""

from outbox.database.migration.script import run

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
    run(UPGRADE)


def downgrade() -> None:
    run(DOWNGRADE)
