"""What Alembic runs around the revisions: for ``outbox.database.migration``, which sets attributes, and ``alembic``."""

import logging
from typing import Any

from alembic import context
from alembic.util import CommandError

from outbox.database.migration.chain import VERSION_TABLE
from outbox.database.migration.runner import turn_of_environment
from outbox.errors import OutboxError
from outbox.settings import Settings


def run(schema: str, **options: Any) -> None:
    context.configure(version_table=VERSION_TABLE, version_table_schema=schema, **options)
    with context.begin_transaction():
        if context.is_offline_mode():
            context.execute(f'CREATE SCHEMA IF NOT EXISTS "{schema}"')
        context.run_migrations()


if context.config.attributes:
    run(**context.config.attributes)
else:
    logging.basicConfig(format="%(message)s")
    logging.getLogger("alembic").setLevel(logging.INFO)
    try:
        name = Settings.from_env().schema
        if context.is_offline_mode():
            run(name, dialect_name="postgresql", dialect_opts={"paramstyle": "named"}, literal_binds=True)
        else:
            with turn_of_environment(name) as connection:
                run(name, connection=connection)
    except OutboxError as error:
        raise CommandError(str(error)) from error
