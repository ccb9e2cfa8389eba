"""The processes that send report themselves."""

from outbox.database.migration.script import run

revision = "producer_0011"
down_revision = "producer_0010"
branch_labels = None
depends_on = None

UPGRADE = (
    """
    CREATE TABLE {s}.producer_process (
        id UUID NOT NULL,
        name TEXT NOT NULL,
        producer_group TEXT COLLATE "C" NOT NULL,
        version TEXT NOT NULL,
        started_at TIMESTAMPTZ NOT NULL,
        seen_at TIMESTAMPTZ NOT NULL DEFAULT clock_timestamp(),
        CONSTRAINT pk_producer_process PRIMARY KEY (id)
    )""",
    "CREATE INDEX ix_producer_process_seen_at ON {s}.producer_process (seen_at)",
)

DOWNGRADE = ("DROP TABLE {s}.producer_process",)


def upgrade() -> None:
    run(UPGRADE)


def downgrade() -> None:
    run(DOWNGRADE)
