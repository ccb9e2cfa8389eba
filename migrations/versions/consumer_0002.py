"""The reconciliation: its runs and findings, what it found settled; and where a group began."""

from inspect import cleandoc

from alembic import op

revision = "consumer_0002"
down_revision = "consumer_0001"
branch_labels = None
depends_on = None

UPGRADE = (
    """
    CREATE TABLE {s}.consumer_start (
        consumer_group TEXT COLLATE "C" NOT NULL,
        topic TEXT COLLATE "C" NOT NULL,
        queue INTEGER NOT NULL,
        position BIGINT NOT NULL,
        started_at TIMESTAMPTZ NOT NULL DEFAULT clock_timestamp(),
        CONSTRAINT pk_consumer_start PRIMARY KEY (consumer_group, topic, queue)
    )""",
    """
    ALTER TABLE {s}.reconciliation_run
        ALTER COLUMN window_start DROP NOT NULL,
        ALTER COLUMN window_end DROP NOT NULL,
        ADD COLUMN job_id UUID NOT NULL DEFAULT gen_random_uuid(),
        ADD COLUMN applied BOOLEAN NOT NULL DEFAULT false,
        ADD COLUMN schedule TEXT COLLATE "C",
        ADD COLUMN plan JSONB""",
    "ALTER TABLE {s}.reconciliation_run ALTER COLUMN job_id DROP DEFAULT",
    """
    CREATE INDEX ix_reconciliation_run_topic_consumer_group_started_at
        ON {s}.reconciliation_run (topic, consumer_group, started_at)""",
    "ALTER TABLE {s}.reconciliation_finding ADD COLUMN result TEXT",
    "DROP INDEX {s}.ix_reconciliation_finding_run_id",
    """
    CREATE INDEX ix_reconciliation_finding_run_id_message_id
        ON {s}.reconciliation_finding (run_id, message_id)""",
    "CREATE INDEX ix_reconciliation_finding_message_id ON {s}.reconciliation_finding (message_id)",
    """
    CREATE TABLE {s}.reconciliation_settled (
        consumer_group TEXT COLLATE "C" NOT NULL,
        topic TEXT COLLATE "C" NOT NULL,
        first_id UUID NOT NULL,
        end_id UUID,
        counts JSONB NOT NULL,
        verified_at TIMESTAMPTZ NOT NULL DEFAULT clock_timestamp(),
        CONSTRAINT pk_reconciliation_settled PRIMARY KEY (consumer_group, topic, first_id)
    )""",
    """
    CREATE TABLE {s}.reconciliation_mark (
        consumer_group TEXT COLLATE "C" NOT NULL,
        topic TEXT COLLATE "C" NOT NULL,
        version BIGINT NOT NULL,
        mark JSONB NOT NULL,
        written_at TIMESTAMPTZ NOT NULL DEFAULT clock_timestamp(),
        CONSTRAINT pk_reconciliation_mark PRIMARY KEY (consumer_group, topic)
    )""",
)

DOWNGRADE = (
    "DROP TABLE {s}.consumer_start, {s}.reconciliation_settled, {s}.reconciliation_mark",
    "DROP INDEX {s}.ix_reconciliation_finding_message_id",
    "DROP INDEX {s}.ix_reconciliation_finding_run_id_message_id",
    "CREATE INDEX ix_reconciliation_finding_run_id ON {s}.reconciliation_finding (run_id)",
    "ALTER TABLE {s}.reconciliation_finding DROP COLUMN result",
    "DROP INDEX {s}.ix_reconciliation_run_topic_consumer_group_started_at",
    "DELETE FROM {s}.reconciliation_run WHERE window_start IS NULL OR window_end IS NULL",
    """
    ALTER TABLE {s}.reconciliation_run
        DROP COLUMN job_id,
        DROP COLUMN applied,
        DROP COLUMN plan,
        DROP COLUMN schedule,
        ALTER COLUMN window_start SET NOT NULL,
        ALTER COLUMN window_end SET NOT NULL""",
)


def upgrade() -> None:
    for statement in UPGRADE:
        op.execute(_in_schema(statement))


def downgrade() -> None:
    for statement in DOWNGRADE:
        op.execute(_in_schema(statement))


def _in_schema(statement: str) -> str:
    return cleandoc(statement).replace("{s}", f'"{op.get_context().version_table_schema}"')
