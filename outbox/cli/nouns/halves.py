"""Half messages that are undecided: the list, and to have one checked here and now."""

from __future__ import annotations

import dataclasses
import sys
import threading
from contextlib import ExitStack, redirect_stdout
from typing import Any
from uuid import UUID

import typer

from outbox.acts.changes import Actor
from outbox.acts.messages import ACTS
from outbox.cli import groups, options, output, processes
from outbox.cli.database import DatabasesOptions
from outbox.cli.exits import Failure
from outbox.cli.groups import CommandGroup, WordsArgument, commands_of
from outbox.cli.nouns.messages import show_message
from outbox.cli.options import (
    ActOptions,
    cli_actor,
    gathered,
)
from outbox.cli.output import Output, RowShape, say
from outbox.database import migration
from outbox.message.model import Answer, Resolution
from outbox.operator import model


def _next_check(row: model.HalfRow) -> str:
    """Return when a half is checked next, counted from the now that its age counts to."""
    if row.parked_at or row.born_at is None or row.age is None:
        return "" if row.parked_at else output.cell(row.next_check_at)
    seconds = (row.next_check_at - row.born_at).total_seconds() - row.age
    return f"in {output.age(seconds)}" if seconds > 0 else "due"


_HALVES = CommandGroup(
    "half",
    "half messages",
    "Find undecided half messages, see how they were checked, have them checked again, or decide them.\n\n"
    "What is done to one is recorded in the audit, with the operator's name and reason.",
    """List undecided half messages, the oldest first.

    A search goes through many of them at a time and says where to go on.

    \b
    Statuses:
      immune   young: left alone until its first check
      orphan   its check is due; if it stays so, no worker is running, or none that has a checker for its topic
      waiting  an orphan that was checked without a verdict; it is checked again at its next check
      parked   checked as often as may be: waits for an operator
    \b
    Examples:
      outbox half list --status parked
      outbox half list --topic payments --older-than 1h -o json
    """,
    model.HalfFilter,
    RowShape(
        model.HalfRow,
        "id topic key status age> fenced checks> last_answer last_error next_check parked_at reason",
        {
            "age": lambda row: output.age(row.age),
            "last_answer": lambda row: "(being asked)" if row.being_asked else row.last_answer,
            "next_check": _next_check,
        },
    ),
    "halves",
    "producer",
    noun="half",
)


def check_half(
    ids: WordsArgument = None,
    *,
    choice: Any,
    acting: ActOptions,
    app: options.AppOption = None,
    databases: DatabasesOptions,
) -> None:
    """Have halves checked by the next pass of a worker; with --app one, here and now by the application's checker."""
    if app is None:
        groups.run_act(_HALVES, ACTS["check"], ids or [], choice, {}, acting, databases)
        return
    if databases.url or databases.schema or databases.database:
        raise Failure("--app has a database and a schema of its own: leave out --url and --schema")
    targets = _HALVES.targets(ids or [], None)
    if acting.dry_run:
        raise Failure("--app checks at once: leave out --dry-run, or --app (and OUTBOX_APP)")
    if len(targets) != 1:
        raise Failure("--app checks one half message: give its id, or leave out --app")
    half_id = targets[0].message_id
    answer = _check_by_app(app, half_id, cli_actor(acting.actor), acting.reason.strip())
    if answer.resolution is Resolution.UNKNOWN:
        say(f"no verdict on half message {half_id}: {answer.error}")
    else:
        done = "committed" if answer.resolution is Resolution.COMMIT else "rolled back"
        by = answer.decided_by or "check"
        say(f"half message {half_id} was {done} by the {by}; it took {answer.seconds:.3f} s")
    if acting.output is Output.JSON:
        fields = dataclasses.asdict(answer)
        output.print_json({"id": half_id, "answer": fields.pop("resolution"), **fields})


def _check_by_app(app: str, half_id: UUID, by: Actor, why: str) -> Answer:
    """Check a half by its fence or by the application's checker, in the application's database."""
    from outbox.operator.operator import OutboxOperator  # noqa: PLC0415 - needed by this command alone
    from outbox.worker.connections import Runners, WorkerDatabase  # noqa: PLC0415 - needed by this command alone

    # What the application prints must not get among our data.
    with redirect_stdout(sys.stderr), ExitStack() as ended:
        outbox = processes.load(app)
        # Not the engine itself: it may be an async one.
        database = WorkerDatabase(outbox.engine)
        ended.callback(database.engine.dispose)
        with database.engine.connect() as connection:
            migration.require(connection, ("producer",), outbox.settings.schema)
        operator = OutboxOperator(database.engine, outbox.settings, outbox.checkers, outbox.codecs, outbox.topics)
        return operator.check_now(half_id, by=by, why=why, new_runner=Runners(database, threading.Event()))


half_app: typer.Typer = commands_of(_HALVES, check=gathered(check_half, choice=_HALVES.options()))
half_app.command("show")(show_message)
