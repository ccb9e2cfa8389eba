"""Acts of operators: shown first, asked about, done to one message at once, or to many as an operation.

An operation under way: carried out here beside the workers, or watched, and what came of it.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import typer
from sqlalchemy.exc import DBAPIError

from outbox.cli.arguments import can_ask, make_sure, named, user_here
from outbox.cli.exits import Code, Failure, as_failure
from outbox.cli.lists import at_least, every
from outbox.cli.output import Output, age, print_json, print_table, say, table
from outbox.cli.reconcile_report import Bars
from outbox.operator.model import (
    MAX_PAGE,
    Action,
    Actor,
    OperationItem,
    OperationRow,
    PageRequest,
    Preview,
    Selector,
    Target,
)

if TYPE_CHECKING:
    from outbox.cli.arguments import Doing, Where
    from outbox.operator.service import Admin

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
    from outbox.operator.bulk.run import run_operation_once  # noqa: PLC0415

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


@dataclass(frozen=True, slots=True)
class Order:
    """What to do to which messages, how fast, and whether to wait until it is done."""

    action: Action
    selector: Selector
    options: Mapping[str, Any] = field(default_factory=dict)
    rate: float | None = None
    wait: bool = True

    @property
    def single(self) -> Target | None:
        """The message, if it is one that is acted on at once."""
        targets = self.selector.targets or ()
        return targets[0] if len(targets) == 1 and self.action is not Action.ROLLBACK else None


def actor_of(given: str | None) -> Actor:
    """Return who acts, by the option, else whose process this is.

    Raises:
        Failure: the option is empty.
    """
    name = user_here() if given is None else given.strip()
    if not name:
        raise Failure("--actor is empty: the audit must tell who did it", Code.USAGE)
    return Actor(name, {"via": "cli"})


def carry_out(admin: Admin, where: Where, order: Order, doing: Doing) -> None:
    """Show what is to be done, ask, do it, and tell what came of it.

    Raises:
        Failure: refused, or not all of it was done.
    """
    from outbox.operator.acts import NEED_REASON  # noqa: PLC0415 - what the lists needn't import

    actor = actor_of(doing.actor)
    action, single = order.action, order.single
    refusal = f"nothing was done ({action})"
    if not doing.dry_run:
        if not doing.reason.strip() and (single is None or action in NEED_REASON):
            raise Failure(f"give --reason: the audit must tell why ({action})", Code.USAGE)
        can_ask(refusal, yes=doing.yes)
    if order.selector.targets == ():
        say("nothing fits: nothing to do")
        return
    if doing.dry_run or not doing.yes or single is None:
        preview = admin.preview(action, order.selector, database=where.only, options=order.options)
        if doing.dry_run:
            print_preview(preview, doing.output)
            return
        if single is None and not preview.eligible:
            _explain(preview)
            return
        tell_preview(preview)
        make_sure(f"{capitalized(preview.described)}?", refusal, yes=doing.yes)
    if single is not None:
        outcome = admin.act(
            action,
            single,
            actor=actor,
            reason=doing.reason.strip(),
            options=order.options,
            database=where.only,
        )
        say(outcome)
        if doing.output is Output.JSON:
            print_json({"action": action, **dataclasses.asdict(single), "outcome": outcome})
        return
    operation = admin.start(
        action,
        order.selector,
        actor=actor,
        reason=doing.reason.strip(),
        token=preview.token,
        database=where.only,
        options=order.options,
        rate=order.rate,
    )
    see_through(admin, where, operation, doing.output, wait=order.wait, here=action is not Action.ROLLBACK)


def print_preview(preview: Preview, output: Output) -> None:
    """Print what would be done."""
    if output is Output.JSON:
        print_json(dataclasses.asdict(preview))
        return
    rows = [
        ("would", preview.described),
        ("in database", preview.database),
        ("matched", at_least(preview.matched)),
        ("eligible", preview.eligible),
        *((f"not: {why}", count) for why, count in preview.ineligible.items()),
        *(("such as" if not number else "", named(target)) for number, target in enumerate(preview.sample)),
    ]
    print_table(table(("dry run", ""), rows))


def tell_preview(preview: Preview) -> None:
    """Tell on stderr what is about to be done."""
    say(f"{preview.described}, in database {preview.database}")
    for why, count in preview.ineligible.items():
        say(f"  not {count}: {why}")
    if preview.eligible > 1:
        say(f"  such as {', '.join(named(target) for target in preview.sample[:3])}")


def _explain(preview: Preview) -> None:
    if not preview.matched.value:
        say("nothing fits: nothing to do")
        return
    reasons = "; ".join(f"{count}: {why}" for why, count in preview.ineligible.items())
    raise Failure(
        f"{preview.action}: nothing can be done to {counted(preview.matched.value)}: {reasons}", Code.CONFLICT
    )


def counted(count: int) -> str:
    """Return how many messages, in words."""
    return f"{count} message{'' if count == 1 else 's'}"


def capitalized(text: str) -> str:
    """Return a text as the beginning of a sentence."""
    return text[:1].upper() + text[1:]
