"""What Alembic runs around the revisions; only called by ``outbox.database.migration``, which sets the attributes."""

from alembic import context

from outbox.database.migration.chain import VERSION_TABLE

attributes = context.config.attributes
schema = attributes["schema"]

if context.is_offline_mode():
    context.configure(
        dialect_name="postgresql",
        dialect_opts={"paramstyle": "named"},
        literal_binds=True,
        version_table=VERSION_TABLE,
        version_table_schema=schema,
    )
else:
    context.configure(
        connection=attributes["connection"],
        version_table=VERSION_TABLE,
        version_table_schema=schema,
        on_version_apply=attributes["on_version_apply"],
    )

with context.begin_transaction():
    if context.is_offline_mode():
        context.execute(f'CREATE SCHEMA IF NOT EXISTS "{schema}"')
    context.run_migrations()
