"""The command line: ``outbox``, or ``python -m outbox.cli``.

Data go to stdout, everything else to stderr; exit codes are those of `outbox.cli.output.Code`, into which errors are
made here, once.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from outbox import __version__
from outbox.cli import database, health, messages, nouns, output, processes, reconcile, reconcilers, rocketmq
from outbox.cli.output import Code, as_failure
from outbox.errors import without_secrets
from outbox.text import trace_of

_EXAMPLES = """Examples:

\b
  outbox db upgrade --url postgresql+psycopg://me@localhost/shop
  outbox run --app shop.messages:outbox
  outbox stats --watch 2
  outbox messages list --since 1h
  outbox half list --status parked
  outbox dead groups
  outbox console
  outbox topics list --app shop.messages:outbox
  outbox reconcile --topic orders --group mail --since 24h
"""

_EPILOG = (
    "\b\nEnvironment:\n"
    "  OUTBOX_DATABASE_URL  the database (or --url)\n"
    "  OUTBOX_SCHEMA        the schema of the outbox tables (or --schema; default: outbox)\n"
    "  OUTBOX_CONSOLE_DATABASES  more databases, NAME=URL (or --database); see also `outbox console --help`\n"
    "  OUTBOX_APP           the application of `outbox run`, `half check` and `doctor` (or --app)\n"
    "  OUTBOX_PROCESSES     how many processes `outbox run` has (or --processes)\n"
    "  OUTBOX_PRODUCER_URL, OUTBOX_CONSUMER_URL  the databases of `outbox reconcile` (or --producer, --consumer)\n"
    "  OUTBOX_RECORD_URL    where its runs are recorded, if not in the consumer's database (or --record)\n"
    "\n\b\nExit codes:\n" + "\n".join(f"  {code.value:>3}  {code.meaning}" for code in Code)
)


class _Group(TyperGroup):
    """Turn expected errors into one line on stderr and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            output.say("interrupted")
            raise typer.Exit(Code.INTERRUPTED) from None
        except Exception as error:
            if hasattr(error, "format_message"):  # wrong usage, which the library tells
                error.message = without_secrets(error.message)  # type: ignore[attr-defined]  # as above
            failure = as_failure(error)
            if failure is None:
                raise
            if ctx.params.get("debug"):
                output.say(trace_of(error))
            output.say(f"error: {failure}")
            raise typer.Exit(failure.code) from None


app: typer.Typer = typer.Typer(
    name="outbox",
    cls=_Group,
    help="Transactional messages as tables next to your data: install them, run the worker, see and heal messages.\n\n"
    + _EXAMPLES,
    epilog=_EPILOG,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(database.app, name="db")
app.command()(processes.run)
app.command("stats")(health.show_stats)
app.command()(health.doctor)
for _app in (
    *(messages.messages_app, messages.half_app, messages.inbox_app, messages.dead_app),
    *(nouns.bulk_app, nouns.audit_app),
):
    app.add_typer(_app)
app.add_typer(processes.app, name="console")
app.command("workers")(health.show_workers)
app.command("producers")(health.show_producers)
app.command("handlers")(health.show_handlers)
app.add_typer(health.lock_app)
app.add_typer(health.rule_app)
app.add_typer(nouns.group_app)
reconcile.app.add_typer(reconcilers.app)
app.add_typer(reconcile.app, name="reconcile")
app.add_typer(nouns.sagas_app)
app.add_typer(nouns.topics_app)
app.add_typer(nouns.cron_app)
app.add_typer(nouns.filter_app)
app.add_typer(rocketmq.app)
app.command()(processes.demo)


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Print the traceback of an error as well.")] = False,
) -> None:
    pass


@app.command("version")
def show_version() -> None:
    """Print the versions of outbox and its libraries."""
    output.print_line(f"outbox {__version__}")
    output.print_line(f"Python {platform.python_version()}")
    for package in ("sqlalchemy", "psycopg", "alembic"):
        try:
            output.print_line(f"{package} {version(package)}")
        except PackageNotFoundError:
            output.print_line(f"{package} not installed")


def main(arguments: Sequence[str] | None = None, program: str | None = None) -> None:
    """Run the command line and leave with its exit code; ``program`` is its name in its help."""
    # A message may hold characters that the terminal can't show; that is no reason to fail.
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    app(args=arguments, prog_name=program)
