"""What the function of a half raised is stored with the half."""

from outbox.database.migration.script import run

revision = "producer_0006"
down_revision = "producer_0005"
branch_labels = None
depends_on = None

UPGRADE = (
    """
    CREATE TABLE {s}.half_error (
        half_id UUID NOT NULL,
        error_kind TEXT NOT NULL,
        error TEXT NOT NULL,
        raised_at TIMESTAMPTZ NOT NULL DEFAULT clock_timestamp(),
        CONSTRAINT pk_half_error PRIMARY KEY (half_id)
    )""",
)

DOWNGRADE = ("DROP TABLE {s}.half_error",)


def upgrade() -> None:
    run(UPGRADE)


def downgrade() -> None:
    run(DOWNGRADE)
