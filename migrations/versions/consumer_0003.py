"""The console: dead letters by their kind, discarded ones, and fences of compensations."""

from inspect import cleandoc

from alembic import op

revision = "consumer_0003"
down_revision = "consumer_0002"
branch_labels = None
depends_on = ("common_0002",)

UPGRADE = (
    """
    ALTER TABLE {s}.consumer_message
        ADD COLUMN error_kind TEXT,
        ADD COLUMN discarded_at TIMESTAMPTZ,
        ADD COLUMN fenced_by UUID,
        ADD COLUMN fenced_from TEXT,
        ADD CONSTRAINT ck_consumer_message_discarded_at CHECK (discarded_at IS NULL OR status = 'parked'),
        ADD CONSTRAINT ck_consumer_message_fenced_from CHECK (fenced_from IN ('unconsumed', 'failed', 'parked')),
        ADD CONSTRAINT ck_consumer_message_fenced CHECK ((fenced_by IS NULL) = (fenced_from IS NULL)),
        ADD CONSTRAINT ck_consumer_message_fenced_by CHECK (fenced_by IS NULL OR status = 'rolled_back')""",
    """
    CREATE INDEX ix_consumer_message_dead
        ON {s}.consumer_message (consumer_group, topic, coalesce(error_kind, 'unclassified'), message_id)
        WHERE status = 'parked' AND discarded_at IS NULL""",
    """
    CREATE INDEX ix_consumer_message_discarded
        ON {s}.consumer_message (discarded_at, message_id)
        WHERE discarded_at IS NOT NULL""",
)

DOWNGRADE = (
    "DROP INDEX {s}.ix_consumer_message_discarded",
    "DROP INDEX {s}.ix_consumer_message_dead",
    """
    ALTER TABLE {s}.consumer_message
        DROP COLUMN error_kind,
        DROP COLUMN discarded_at,
        DROP COLUMN fenced_from,
        DROP COLUMN fenced_by""",
)


def upgrade() -> None:
    for statement in UPGRADE:
        op.execute(_in_schema(statement))


def downgrade() -> None:
    for statement in DOWNGRADE:
        op.execute(_in_schema(statement))


def _in_schema(statement: str) -> str:
    return cleandoc(statement).replace("{s}", f'"{op.get_context().version_table_schema}"')
