"""How many halves were committed, rolled back and checked is counted as it happens."""

from outbox.database.migration.script import run

revision = "producer_0012"
down_revision = "producer_0011"
branch_labels = None
depends_on = None

UPGRADE = (
    "ALTER TABLE {s}.dispatch_cursor ADD COLUMN IF NOT EXISTS totals JSONB NOT NULL DEFAULT '{}'",
    """
    CREATE TABLE {s}.check_total (
        id BIGINT GENERATED ALWAYS AS IDENTITY,
        topic TEXT COLLATE "C" NOT NULL,
        checks BIGINT NOT NULL,
        CONSTRAINT pk_check_total PRIMARY KEY (id)
    )""",
)

DOWNGRADE = (
    "DROP TABLE {s}.check_total",
    "ALTER TABLE {s}.dispatch_cursor DROP COLUMN totals",
)


def upgrade() -> None:
    run(UPGRADE)


def downgrade() -> None:
    run(DOWNGRADE)
