"""An operation under way: carried out here beside the workers, or watched, and what came of it."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

import typer
from sqlalchemy.exc import DBAPIError

from outbox.admin.model import MAX_PAGE, Action, OperationItem, OperationRow, PageRequest, Target
from outbox.cli.arguments import named
from outbox.cli.exits import Code, Failure, as_failure
from outbox.cli.lists import every
from outbox.cli.output import Output, age, print_json, say
from outbox.cli.reconcile_progress import Bars

if TYPE_CHECKING:
    from outbox.admin.service import Admin
    from outbox.cli.options import Where

_SHOWN = 20
_PAUSE = 0.5


def see_through(
    admin: Admin, where: Where, operation: OperationRow, output: Output, *, wait: bool = True, here: bool = False
) -> None:
    """Wait for an operation, carrying it out ``here`` too if that can be, and tell what came of it.

    Raises:
        Failure: not all of it was done.
        typer.Exit: interrupted; the operation goes on in workers.
    """
    watch = where.again(f"ops watch {operation.id}")
    if not wait:
        say(f"operation {operation.id} is ordered; to watch it: {watch}")
        print_json(dataclasses.asdict(operation)) if output is Output.JSON else print(operation.id)  # noqa: T201
        return
    try:
        if not here:
            _warn(admin, operation)
        done = _follow(admin, operation, here=here)
    except KeyboardInterrupt:
        say(f"interrupted; operation {operation.id} goes on where workers run; to watch it: {watch}")
        raise typer.Exit(Code.INTERRUPTED) from None
    tell_end(admin, done, output)


def tell_end(admin: Admin, operation: OperationRow, output: Output) -> None:
    """Tell what became of an operation that has ended.

    Raises:
        Failure: not all of it was done.
    """
    if output is Output.JSON:
        print_json(dataclasses.asdict(operation))
    for line in _left(admin, operation):
        say(line)
    said = f"operation {operation.id} ({operation.action}): {summary(operation)}"
    if (code := code_of(operation)) is not Code.DONE:
        raise Failure(said, code)
    say(said)


def code_of(operation: OperationRow) -> Code:
    """Return the exit code that tells how an operation has ended."""
    if operation.done == operation.total:
        return Code.DONE
    if operation.done:
        return Code.PARTIAL
    return Code.FAILED if operation.failed else Code.CONFLICT


def summary(operation: OperationRow) -> str:
    """Return how far an operation has come, in words."""
    counts = [
        f"{count} {word}"
        for word, count in (
            ("done", operation.done),
            ("skipped", operation.skipped),
            ("failed", operation.failed),
            ("cancelled", operation.cancelled),
            ("pending", operation.pending),
        )
        if count or word == "done"
    ]
    if operation.started_at and operation.finished_at:
        counts.append(f"in {age((operation.finished_at - operation.started_at).total_seconds())}")
    return ", ".join(counts)


def _follow(admin: Admin, operation: OperationRow, *, here: bool) -> OperationRow:
    """Return the operation when it has ended; a database that goes away is waited for."""
    with Bars() as bars:
        bars.stage(operation.described, operation.total)
        while operation.finished_at is None:
            try:
                moved = here and _carry_on(admin, operation)
                operation = admin.operation(operation.id)
            except DBAPIError as error:
                failure = as_failure(error)
                if failure is None or failure.code is not Code.UNAVAILABLE:
                    raise
                bars.say(f"{failure}; trying again")
                moved = False
            bars.done(operation.total - operation.pending)
            if not moved and operation.finished_at is None:
                time.sleep(_PAUSE)
    return operation


def _carry_on(admin: Admin, operation: OperationRow) -> bool:
    """Carry an operation on for a moment; tell whether anything was done."""
    from outbox.admin.operations.run import run_operation_once  # noqa: PLC0415

    database = admin.databases[operation.database]
    with database.engine.connect() as connection:
        return bool(run_operation_once(connection, database.settings, operation.id).taken)


def _warn(admin: Admin, operation: OperationRow) -> None:
    """Say so if nobody is there who would carry an operation out."""
    name = operation.database
    if not any(row.alive and row.database == name and "operate" in row.roles for row in admin.workers()):
        say(f"no worker with the role operate runs in database {name}; start one: outbox run --app MODULE:OBJECT")
        return
    if operation.action != Action.ROLLBACK:
        return
    able = {row.topic for row in admin.handlers() if row.kind == "compensation" and row.database == name}
    items = admin.operation_items(operation.id, PageRequest(MAX_PAGE), state="pending").items
    for topic in sorted({item.topic for item in items if item.topic} - able):
        say(f"no worker that runs has a compensation for topic {topic!r}; it waits for one (@outbox.compensation)")


def _left(admin: Admin, operation: OperationRow) -> list[str]:
    """Return a line for each message that wasn't done, or for the only one; not for all if there are many."""
    if operation.total == 1:
        items = list(every(lambda page: admin.operation_items(operation.id, page)))
    else:
        items = [
            item
            for state in ("skipped", "failed")
            for item in every(lambda page, of=state: admin.operation_items(operation.id, page, state=of), _SHOWN + 1)  # type: ignore[misc]
        ]
    lines = [f"{item.state}: {named_item(item)}: {item.outcome or 'no reason given'}" for item in items[:_SHOWN]]
    if len(items) > _SHOWN:
        lines.append(f"… for all of them: outbox ops show {operation.id} -o csv")
    return lines


def named_item(item: OperationItem) -> str:
    """Return the message of an item as it is written on the command line."""
    return named(Target(item.message_id, item.group))
