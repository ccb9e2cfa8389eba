"""A queue may be claimed by a worker that handles its messages outside of transactions."""

from outbox.database.migration.script import run

revision = "consumer_0008"
down_revision = "consumer_0007"
branch_labels = None
depends_on = None

UPGRADE = (
    """
    CREATE TABLE {s}.consumer_claim (
        consumer_group TEXT COLLATE "C" NOT NULL,
        topic TEXT COLLATE "C" NOT NULL,
        queue INTEGER NOT NULL,
        term BIGINT NOT NULL,
        renewal INTEGER NOT NULL,
        worker TEXT,
        started BIGINT NOT NULL,
        until TIMESTAMPTZ NOT NULL,
        written_at TIMESTAMPTZ NOT NULL DEFAULT clock_timestamp(),
        CONSTRAINT pk_consumer_claim PRIMARY KEY (consumer_group, topic, queue, term, renewal)
    )""",
)

DOWNGRADE = ("DROP TABLE {s}.consumer_claim",)


def upgrade() -> None:
    run(UPGRADE)


def downgrade() -> None:
    run(DOWNGRADE)
