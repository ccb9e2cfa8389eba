"""``outbox db``: install, remove and compare the tables."""

from __future__ import annotations

import enum
import sys
from typing import Annotated

import typer

from outbox.cli.arguments import YesOption, make_sure
from outbox.cli.database import SchemaOption, UrlOption, engine_of, find_settings, find_url, where
from outbox.cli.exits import Code, Failure
from outbox.cli.output import Output, OutputOption, print_json, print_table, say, table

app = typer.Typer(
    help="Install, remove and compare the outbox tables.\n\n"
    "The tables live in a schema and have a version table of their own, so your own migrations never see them. "
    "A database that only sends needs the part `producer`, one that only consumes the part `consumer`.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


class Part(enum.StrEnum):
    """What may be installed apart."""

    PRODUCER = "producer"
    CONSUMER = "consumer"


PartOption = Annotated[
    list[Part] | None,
    typer.Option("--part", metavar="producer|consumer", help="Only this part; may be given twice. Default: both."),
]
LockTimeoutOption = Annotated[
    float,
    typer.Option(
        "--lock-timeout",
        min=0.001,
        metavar="SECONDS",
        help="How long to wait for a lock on a table. All INSERTs queue up behind it.",
    ),
]


@app.command()
def upgrade(
    url: UrlOption = None, schema: SchemaOption = None, part: PartOption = None, lock_timeout: LockTimeoutOption = 5.0
) -> None:
    """Install the tables, or bring them up to date.

    Safe to run any number of times, and from several places at once.

    \b
    Examples:
      outbox db upgrade --url postgresql+psycopg://me@localhost/shop
      outbox db upgrade --part consumer
    """
    from outbox.database import migration  # noqa: PLC0415 - Alembic is slow to import

    address, settings = find_url(url), find_settings(schema)
    done = migration.upgrade(engine_of(address), _parts(part), settings.schema, lock_timeout=lock_timeout)
    say(f"{_listed('installed', done)} in {where(address, settings.schema)}")


@app.command()
def downgrade(
    url: UrlOption = None,
    schema: SchemaOption = None,
    part: PartOption = None,
    lock_timeout: LockTimeoutOption = 5.0,
    yes: YesOption = False,
) -> None:
    """Remove the tables, with all messages in them.

    \b
    Example:
      outbox db downgrade --part consumer
    """
    from outbox.database import migration  # noqa: PLC0415

    address, settings, parts = find_url(url), find_settings(schema), _parts(part)
    what = f"the {' and '.join(parts)} tables in {where(address, settings.schema)}"
    make_sure(f"Remove {what}, with all messages in them?", f"not removing {what}", yes=yes)
    done = migration.downgrade(engine_of(address), parts, settings.schema, lock_timeout=lock_timeout)
    say(f"{_listed('removed', done)} in {where(address, settings.schema)}")


@app.command()
def current(url: UrlOption = None, schema: SchemaOption = None, output: OutputOption = Output.TABLE) -> None:
    """Show the versions of the tables and of this code."""
    from outbox.database import migration  # noqa: PLC0415
    from outbox.database.migration import chain  # noqa: PLC0415

    address, settings = find_url(url), find_settings(schema)
    revisions = migration.current(engine_of(address), settings.schema)
    if output is Output.JSON:
        print_json(
            {branch: {"database": revision, "code": chain.head(branch)} for branch, revision in revisions.items()}
        )
        return
    rows = [(branch, revision or "not installed", chain.head(branch)) for branch, revision in revisions.items()]
    print_table(table(("part", "database", "code"), rows))


@app.command()
def check(
    url: UrlOption = None, schema: SchemaOption = None, part: PartOption = None, output: OutputOption = Output.TABLE
) -> None:
    """Compare the tables with what this code expects.

    Columns, defaults, constraints, and indexes with their conditions are compared, of the parts which are
    installed (or, with --part, of those which should be). The exit code is 6 if anything differs. Nothing is
    changed, but the privilege to make temporary tables is needed.
    """
    from outbox.database import migration  # noqa: PLC0415

    address, settings = find_url(url), find_settings(schema)
    parts = _parts(part) if part else None
    differences = migration.check(engine_of(address), parts, settings.schema)
    if output is Output.JSON:
        print_json({"differences": differences})
    elif differences:
        print_table(table(("difference",), [(difference,) for difference in differences]))
    if differences:
        raise Failure(f"{len(differences)} differences in {where(address, settings.schema)}", Code.PROBLEMS)
    say(f"no differences in {where(address, settings.schema)}")


@app.command("sql")
def show_sql(schema: SchemaOption = None, part: PartOption = None) -> None:
    """Print the SQL that installs the tables.

    For an empty database, and for those who may not let a program change it.

    \b
    Example:
      outbox db sql --part producer > outbox.sql
    """
    from outbox.database import migration  # noqa: PLC0415

    sys.stdout.write(migration.sql(_parts(part), find_settings(schema).schema))


def _parts(given: list[Part] | None) -> tuple[str, ...]:
    return tuple(part.value for part in given or Part)


def _listed(done: str, revisions: list[str]) -> str:
    return f"{done} {', '.join(revisions)}" if revisions else "nothing to do"
