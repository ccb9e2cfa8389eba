"""The digest of a body beside it, for the reconciliation. Rewrites half_message, and locks it meanwhile."""

from inspect import cleandoc

from alembic import op

revision = "producer_0003"
down_revision = "producer_0002"
branch_labels = None
depends_on = None

UPGRADE = (
    """
    ALTER TABLE {s}.half_message
        ADD COLUMN body_digest BYTEA GENERATED ALWAYS AS (substr(sha256(body), 1, 16)) STORED""",
)

DOWNGRADE = ("ALTER TABLE {s}.half_message DROP COLUMN body_digest",)


def upgrade() -> None:
    for statement in UPGRADE:
        op.execute(_in_schema(statement))


def downgrade() -> None:
    for statement in DOWNGRADE:
        op.execute(_in_schema(statement))


def _in_schema(statement: str) -> str:
    return cleandoc(statement).replace("{s}", f'"{op.get_context().version_table_schema}"')
