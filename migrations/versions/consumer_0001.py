"""The consumer's tables."""

from inspect import cleandoc

from alembic import op

revision = "consumer_0001"
down_revision = None
branch_labels = ("consumer",)
depends_on = ("common_0001",)

TABLES = (
    """
    CREATE TABLE {s}.consumer_message (
        consumer_group TEXT COLLATE "C" NOT NULL,
        message_id UUID NOT NULL,
        topic TEXT COLLATE "C" NOT NULL,
        queue INTEGER NOT NULL,
        position BIGINT NOT NULL,
        status TEXT NOT NULL,
        attempts INTEGER NOT NULL,
        claims INTEGER NOT NULL DEFAULT 0,
        next_attempt_at TIMESTAMPTZ,
        body_digest BYTEA,
        last_error TEXT,
        received_at TIMESTAMPTZ NOT NULL DEFAULT clock_timestamp(),
        changed_at TIMESTAMPTZ NOT NULL DEFAULT clock_timestamp(),
        CONSTRAINT pk_consumer_message PRIMARY KEY (consumer_group, message_id),
        CONSTRAINT ck_consumer_message_status
            CHECK (status IN ('consumed', 'failed', 'parked', 'rolled_back')),
        CONSTRAINT ck_consumer_message_attempts CHECK (attempts >= 0 AND claims >= 0),
        CONSTRAINT ck_consumer_message_next_attempt_at
            CHECK ((status = 'failed') = (next_attempt_at IS NOT NULL))
    )""",
    """
    CREATE INDEX ix_consumer_message_due
        ON {s}.consumer_message (consumer_group, topic, next_attempt_at) WHERE status = 'failed'""",
    """
    CREATE INDEX ix_consumer_message_parked
        ON {s}.consumer_message (consumer_group, topic, message_id) WHERE status = 'parked'""",
    """
    CREATE TABLE {s}.consumer_offset (
        consumer_group TEXT COLLATE "C" NOT NULL,
        topic TEXT COLLATE "C" NOT NULL,
        queue INTEGER NOT NULL,
        position BIGINT NOT NULL,
        claims SMALLINT NOT NULL,
        written_at TIMESTAMPTZ NOT NULL DEFAULT clock_timestamp(),
        CONSTRAINT pk_consumer_offset PRIMARY KEY (consumer_group, topic, queue, position, claims),
        CONSTRAINT ck_consumer_offset_position CHECK (position >= 0)
    )""",
    """
    CREATE TABLE {s}.reconciliation_run (
        id UUID NOT NULL,
        topic TEXT COLLATE "C" NOT NULL,
        consumer_group TEXT COLLATE "C" NOT NULL,
        window_start TIMESTAMPTZ NOT NULL,
        window_end TIMESTAMPTZ NOT NULL,
        started_at TIMESTAMPTZ NOT NULL DEFAULT clock_timestamp(),
        finished_at TIMESTAMPTZ,
        counts JSONB,
        error TEXT,
        CONSTRAINT pk_reconciliation_run PRIMARY KEY (id)
    )""",
    """
    CREATE TABLE {s}.reconciliation_finding (
        id BIGINT GENERATED ALWAYS AS IDENTITY,
        run_id UUID NOT NULL,
        message_id UUID,
        kind TEXT NOT NULL,
        detail JSONB,
        action TEXT,
        acted_at TIMESTAMPTZ,
        CONSTRAINT pk_reconciliation_finding PRIMARY KEY (id)
    )""",
    "CREATE INDEX ix_reconciliation_finding_run_id ON {s}.reconciliation_finding (run_id)",
)


def upgrade() -> None:
    for statement in TABLES:
        op.execute(_in_schema(statement))


def downgrade() -> None:
    op.execute(
        _in_schema(
            "DROP TABLE {s}.consumer_message, {s}.consumer_offset, {s}.reconciliation_run, {s}.reconciliation_finding"
        )
    )


def _in_schema(statement: str) -> str:
    return cleandoc(statement).replace("{s}", f'"{op.get_context().version_table_schema}"')
