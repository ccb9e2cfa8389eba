"""Each failed attempt of a message, and not only the last one's error."""

from outbox.database.migration.script import run

revision = "consumer_0004"
down_revision = "consumer_0003"
branch_labels = None
depends_on = None

UPGRADE = (
    """
    CREATE TABLE {s}.attempt_history (
        message_id UUID NOT NULL,
        consumer_group TEXT COLLATE "C" NOT NULL,
        failed_at TIMESTAMPTZ NOT NULL DEFAULT clock_timestamp(),
        topic TEXT COLLATE "C" NOT NULL,
        attempt INTEGER NOT NULL,
        status TEXT NOT NULL,
        worker TEXT NOT NULL,
        seconds DOUBLE PRECISION,
        error_kind TEXT,
        error TEXT,
        CONSTRAINT pk_attempt_history PRIMARY KEY (message_id, consumer_group, failed_at),
        CONSTRAINT ck_attempt_history_status CHECK (status IN ('consumed', 'failed', 'parked')),
        CONSTRAINT ck_attempt_history_attempt CHECK (attempt >= 0)
    )""",
    "CREATE INDEX ix_attempt_history_failed_at ON {s}.attempt_history (failed_at)",
)

DOWNGRADE = ("DROP TABLE {s}.attempt_history",)


def upgrade() -> None:
    run(UPGRADE)


def downgrade() -> None:
    run(DOWNGRADE)
