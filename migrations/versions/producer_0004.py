"""The console: which operation a compensation belongs to."""

from inspect import cleandoc

from alembic import op

revision = "producer_0004"
down_revision = "producer_0003"
branch_labels = None
depends_on = ("common_0002",)

UPGRADE = ("ALTER TABLE {s}.compensation ADD COLUMN operation_id UUID",)

DOWNGRADE = ("ALTER TABLE {s}.compensation DROP COLUMN operation_id",)


def upgrade() -> None:
    for statement in UPGRADE:
        op.execute(_in_schema(statement))


def downgrade() -> None:
    for statement in DOWNGRADE:
        op.execute(_in_schema(statement))


def _in_schema(statement: str) -> str:
    return cleandoc(statement).replace("{s}", f'"{op.get_context().version_table_schema}"')
