"""What operators write about a kind of dead letters, and who looks after it."""

from outbox.database.migration.script import run

revision = "consumer_0006"
down_revision = "consumer_0005"
branch_labels = None
depends_on = None

UPGRADE = (
    """
    CREATE TABLE {s}.dead_letter_note (
        consumer_group TEXT COLLATE "C" NOT NULL,
        topic TEXT COLLATE "C" NOT NULL,
        error_kind TEXT COLLATE "C" NOT NULL,
        note TEXT,
        owner TEXT,
        written_by TEXT NOT NULL,
        written_at TIMESTAMPTZ NOT NULL DEFAULT clock_timestamp(),
        CONSTRAINT pk_dead_letter_note PRIMARY KEY (consumer_group, topic, error_kind),
        CONSTRAINT ck_dead_letter_note_written CHECK (note IS NOT NULL OR owner IS NOT NULL)
    )""",
)

DOWNGRADE = ("DROP TABLE {s}.dead_letter_note",)


def upgrade() -> None:
    run(UPGRADE)


def downgrade() -> None:
    run(DOWNGRADE)
