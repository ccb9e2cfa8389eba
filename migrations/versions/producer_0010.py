"""Try, confirm, cancel: a row for each branch of a participant, which has each call take effect once."""

from outbox.database.migration.script import run

revision = "producer_0010"
down_revision = "producer_0009"
branch_labels = None
depends_on = None

UPGRADE = (
    """
    CREATE TABLE {s}.tcc_branch (
        transaction_id UUID NOT NULL,
        branch TEXT COLLATE "C" NOT NULL,
        participant TEXT COLLATE "C" NOT NULL,
        state TEXT NOT NULL,
        was_tried BOOLEAN NOT NULL,
        changed_at TIMESTAMPTZ NOT NULL DEFAULT clock_timestamp(),
        CONSTRAINT pk_tcc_branch PRIMARY KEY (transaction_id, branch, participant),
        CONSTRAINT ck_tcc_branch_state CHECK (state IN ('tried', 'confirmed', 'cancelled'))
    )""",
    "CREATE INDEX ix_tcc_branch_changed_at ON {s}.tcc_branch (changed_at) WHERE state <> 'tried'",
)

DOWNGRADE = ("DROP TABLE {s}.tcc_branch",)


def upgrade() -> None:
    run(UPGRADE)


def downgrade() -> None:
    run(DOWNGRADE)
