"""A topic that gets more queues notes where those ended that it had, so that no key loses its order."""

from outbox.database.migration.script import run

revision = "producer_0016"
down_revision = "producer_0015"
branch_labels = None
depends_on = None

UPGRADE = (
    """
    CREATE TABLE IF NOT EXISTS {s}.topic_growth (
        topic TEXT COLLATE "C" NOT NULL,
        queues INTEGER NOT NULL,
        ends BIGINT[] NOT NULL,
        grown_at TIMESTAMPTZ NOT NULL DEFAULT clock_timestamp(),
        CONSTRAINT pk_topic_growth PRIMARY KEY (topic, queues)
    )""",
)

DOWNGRADE = ("DROP TABLE {s}.topic_growth",)


def upgrade() -> None:
    run(UPGRADE)


def downgrade() -> None:
    run(DOWNGRADE)
