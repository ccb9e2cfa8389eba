"""The table that a producer and a consumer both have."""

from inspect import cleandoc

from alembic import op

revision = "common_0001"
down_revision = None
branch_labels = ("common",)
depends_on = None

TABLES = (
    """
    CREATE TABLE {s}.audit (
        id BIGINT GENERATED ALWAYS AS IDENTITY,
        acted_at TIMESTAMPTZ NOT NULL DEFAULT clock_timestamp(),
        actor TEXT NOT NULL,
        action TEXT NOT NULL,
        target TEXT NOT NULL,
        reason TEXT,
        result JSONB,
        CONSTRAINT pk_audit PRIMARY KEY (id)
    )""",
    "CREATE INDEX ix_audit_target ON {s}.audit (target)",
)


def upgrade() -> None:
    for statement in TABLES:
        op.execute(_in_schema(statement))


def downgrade() -> None:
    op.execute(_in_schema("DROP TABLE {s}.audit"))


def _in_schema(statement: str) -> str:
    return cleandoc(statement).replace("{s}", f'"{op.get_context().version_table_schema}"')
