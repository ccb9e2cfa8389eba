"""Reconciliations: the sums of measures are kept with the run, and operators order runs."""

from outbox.database.migration.script import run

revision = "consumer_0005"
down_revision = "consumer_0004"
branch_labels = None
depends_on = None

UPGRADE = (
    "ALTER TABLE {s}.reconciliation_run ADD COLUMN IF NOT EXISTS measures JSONB",
    """
    CREATE TABLE {s}.reconciliation_order (
        id UUID NOT NULL,
        schedule TEXT COLLATE "C" NOT NULL,
        topic TEXT COLLATE "C" NOT NULL,
        consumer_group TEXT COLLATE "C" NOT NULL,
        dry_run BOOLEAN NOT NULL,
        requested_by TEXT NOT NULL,
        reason TEXT NOT NULL,
        origin JSONB,
        created_at TIMESTAMPTZ DEFAULT clock_timestamp() NOT NULL,
        taken_at TIMESTAMPTZ,
        job_id UUID,
        CONSTRAINT pk_reconciliation_order PRIMARY KEY (id),
        CONSTRAINT ck_reconciliation_order_taken CHECK ((taken_at IS NULL) = (job_id IS NULL))
    )""",
    """
    CREATE INDEX ix_reconciliation_order_open ON {s}.reconciliation_order (created_at) WHERE taken_at IS NULL""",
    "CREATE INDEX ix_reconciliation_order_job_id ON {s}.reconciliation_order (job_id)",
)

DOWNGRADE = (
    "DROP TABLE {s}.reconciliation_order",
    "ALTER TABLE {s}.reconciliation_run DROP COLUMN measures",
)


def upgrade() -> None:
    run(UPGRADE)


def downgrade() -> None:
    run(DOWNGRADE)
