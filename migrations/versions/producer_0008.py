"""Sagas: a row for each that was started, and one for each command that it has sent."""

from outbox.database.migration.script import run

revision = "producer_0008"
down_revision = "producer_0007"
branch_labels = None
depends_on = None

UPGRADE = (
    """
    CREATE TABLE {s}.saga (
        id UUID NOT NULL,
        name TEXT COLLATE "C" NOT NULL,
        status TEXT NOT NULL DEFAULT 'running',
        content_type TEXT NOT NULL,
        body BYTEA NOT NULL,
        started_at TIMESTAMPTZ NOT NULL DEFAULT clock_timestamp(),
        ended_at TIMESTAMPTZ,
        reason TEXT,
        CONSTRAINT pk_saga PRIMARY KEY (id),
        CONSTRAINT ck_saga_status CHECK (status IN ('running', 'compensating', 'completed', 'compensated')),
        CONSTRAINT ck_saga_ended CHECK ((ended_at IS NULL) = (status IN ('running', 'compensating')))
    )""",
    "CREATE INDEX ix_saga_open ON {s}.saga (id) WHERE ended_at IS NULL",
    "CREATE INDEX ix_saga_ended_at ON {s}.saga (ended_at) WHERE ended_at IS NOT NULL",
    """
    CREATE TABLE {s}.saga_command (
        message_id UUID NOT NULL,
        saga_id UUID NOT NULL,
        number INTEGER NOT NULL,
        step TEXT COLLATE "C" NOT NULL,
        kind TEXT NOT NULL,
        sent_at TIMESTAMPTZ NOT NULL DEFAULT clock_timestamp(),
        overdue_at TIMESTAMPTZ,
        answered_at TIMESTAMPTZ,
        answer TEXT,
        reason TEXT,
        result_type TEXT,
        result BYTEA,
        CONSTRAINT pk_saga_command PRIMARY KEY (message_id),
        CONSTRAINT ck_saga_command_kind CHECK (kind IN ('action', 'compensation')),
        CONSTRAINT ck_saga_command_answer CHECK (answer IN ('done', 'refused')),
        CONSTRAINT ck_saga_command_answered CHECK ((answer IS NULL) = (answered_at IS NULL))
    )""",
    "CREATE UNIQUE INDEX ix_saga_command_saga_id_number ON {s}.saga_command (saga_id, number)",
)

DOWNGRADE = ("DROP TABLE {s}.saga, {s}.saga_command",)


def upgrade() -> None:
    run(UPGRADE)


def downgrade() -> None:
    run(DOWNGRADE)
