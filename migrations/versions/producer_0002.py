"""The check of orphans: topic by topic, with a history."""

from inspect import cleandoc

from alembic import op

revision = "producer_0002"
down_revision = "producer_0001"
branch_labels = None
depends_on = None

UPGRADE = (
    'ALTER TABLE {s}.half_check ADD COLUMN topic TEXT COLLATE "C"',
    "UPDATE {s}.half_check c SET topic = h.topic FROM {s}.half_message h WHERE h.id = c.half_id",
    "ALTER TABLE {s}.half_check ALTER COLUMN topic SET NOT NULL",
    "DROP INDEX {s}.ix_half_check_next_check_at",
    """
    CREATE INDEX ix_half_check_topic_next_check_at
        ON {s}.half_check (topic, next_check_at) WHERE parked_at IS NULL""",
    "CREATE INDEX ix_half_check_next_check_at ON {s}.half_check (next_check_at) WHERE fenced AND parked_at IS NULL",
    """
    CREATE TABLE {s}.check_history (
        half_id UUID NOT NULL,
        id BIGINT GENERATED ALWAYS AS IDENTITY,
        asked TEXT NOT NULL,
        asked_at TIMESTAMPTZ NOT NULL DEFAULT clock_timestamp(),
        worker TEXT NOT NULL,
        answer TEXT,
        seconds DOUBLE PRECISION,
        error TEXT,
        CONSTRAINT pk_check_history PRIMARY KEY (half_id, id),
        CONSTRAINT ck_check_history_asked CHECK (asked IN ('checker', 'fence')),
        CONSTRAINT ck_check_history_answer CHECK (answer IN ('commit', 'rollback', 'unknown'))
    )""",
)

DOWNGRADE = (
    "DROP TABLE {s}.check_history",
    "DROP INDEX {s}.ix_half_check_next_check_at",
    "DROP INDEX {s}.ix_half_check_topic_next_check_at",
    "CREATE INDEX ix_half_check_next_check_at ON {s}.half_check (next_check_at) WHERE parked_at IS NULL",
    "ALTER TABLE {s}.half_check DROP COLUMN topic",
)


def upgrade() -> None:
    for statement in UPGRADE:
        op.execute(_in_schema(statement))


def downgrade() -> None:
    for statement in DOWNGRADE:
        op.execute(_in_schema(statement))


def _in_schema(statement: str) -> str:
    return cleandoc(statement).replace("{s}", f'"{op.get_context().version_table_schema}"')
