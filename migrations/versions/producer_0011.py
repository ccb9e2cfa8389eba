"""The processes that send report themselves."""

from inspect import cleandoc

from alembic import op

revision = "producer_0011"
down_revision = "producer_0010"
branch_labels = None
depends_on = None

UPGRADE = (
    """
    CREATE TABLE {s}.producer_process (
        id UUID NOT NULL,
        name TEXT NOT NULL,
        producer_group TEXT COLLATE "C" NOT NULL,
        version TEXT NOT NULL,
        started_at TIMESTAMPTZ NOT NULL,
        seen_at TIMESTAMPTZ NOT NULL DEFAULT clock_timestamp(),
        CONSTRAINT pk_producer_process PRIMARY KEY (id)
    )""",
    "CREATE INDEX ix_producer_process_seen_at ON {s}.producer_process (seen_at)",
)

DOWNGRADE = ("DROP TABLE {s}.producer_process",)


def upgrade() -> None:
    for statement in UPGRADE:
        op.execute(_in_schema(statement))


def downgrade() -> None:
    for statement in DOWNGRADE:
        op.execute(_in_schema(statement))


def _in_schema(statement: str) -> str:
    return cleandoc(statement).replace("{s}", f'"{op.get_context().version_table_schema}"')
