"""${message}."""

from alembic import op

revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}
branch_labels = ${repr(branch_labels)}
depends_on = ${repr(depends_on)}


def upgrade() -> None:
    schema = op.get_context().version_table_schema
    raise NotImplementedError(schema)


def downgrade() -> None:
    schema = op.get_context().version_table_schema
    raise NotImplementedError(schema)
