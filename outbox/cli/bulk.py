"""Acts of operators: shown first, asked about, done to one message at once, or to many as a bulk job.

A bulk job under way: carried out here beside the workers, or watched, and what came of it.
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
    BulkItem,
    BulkJob,
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
    admin: Admin, where: Where, bulk_job: BulkJob, output: Output, *, wait: bool = True, here: bool = False
) -> None:
    """Wait for a bulk job, carrying it out ``here`` too if that can be, and tell what came of it.

    Raises:
        Failure: not all of it was done.
        typer.Exit: interrupted; the bulk job goes on in workers.
    """
    watch = where.again(f"bulk watch {bulk_job.id}")
    if not wait:
        say(f"bulk job {bulk_job.id} is ordered; to watch it: {watch}")
        print_json(dataclasses.asdict(bulk_job)) if output is Output.JSON else print(bulk_job.id)  # noqa: T201
        return
    try:
        if not here:
            _warn(admin, bulk_job)
        done = _follow(admin, bulk_job, here=here)
    except KeyboardInterrupt:
        say(f"interrupted; bulk job {bulk_job.id} goes on where workers run; to watch it: {watch}")
        raise typer.Exit(Code.INTERRUPTED) from None
    tell_end(admin, done, output)


def tell_end(admin: Admin, bulk_job: BulkJob, output: Output) -> None:
    """Tell what became of a bulk job that has ended.

    Raises:
        Failure: not all of it was done.
    """
    if output is Output.JSON:
        print_json(dataclasses.asdict(bulk_job))
    for line in _left(admin, bulk_job):
        say(line)
    said = f"bulk job {bulk_job.id} ({bulk_job.action}): {summary(bulk_job)}"
    if (code := code_of(bulk_job)) is not Code.DONE:
        raise Failure(said, code)
    say(said)


def code_of(bulk_job: BulkJob) -> Code:
    """Return the exit code that tells how a bulk job has ended."""
    if bulk_job.done == bulk_job.total:
        return Code.DONE
    if bulk_job.done:
        return Code.PARTIAL
    return Code.FAILED if bulk_job.failed else Code.CONFLICT


def summary(bulk_job: BulkJob) -> str:
    """Return how far a bulk job has come, in words."""
    counts = [
        f"{count} {word}"
        for word, count in (
            ("done", bulk_job.done),
            ("skipped", bulk_job.skipped),
            ("failed", bulk_job.failed),
            ("cancelled", bulk_job.cancelled),
            ("pending", bulk_job.pending),
        )
        if count or word == "done"
    ]
    if bulk_job.started_at and bulk_job.finished_at:
        counts.append(f"in {age((bulk_job.finished_at - bulk_job.started_at).total_seconds())}")
    return ", ".join(counts)


def _follow(admin: Admin, bulk_job: BulkJob, *, here: bool) -> BulkJob:
    """Return the bulk job when it has ended; a database that goes away is waited for."""
    with Bars() as bars:
        bars.stage(bulk_job.described, bulk_job.total)
        while bulk_job.finished_at is None:
            try:
                moved = here and _carry_on(admin, bulk_job)
                bulk_job = admin.bulk_job(bulk_job.id)
            except DBAPIError as error:
                failure = as_failure(error)
                if failure is None or failure.code is not Code.UNAVAILABLE:
                    raise
                bars.say(f"{failure}; trying again")
                moved = False
            bars.done(bulk_job.total - bulk_job.pending)
            if not moved and bulk_job.finished_at is None:
                time.sleep(_PAUSE)
    return bulk_job


def _carry_on(admin: Admin, bulk_job: BulkJob) -> bool:
    """Carry a bulk job on for a moment; tell whether anything was done."""
    from outbox.operator.bulk.run import run_bulk_job_once  # noqa: PLC0415

    database = admin.databases[bulk_job.database]
    with database.engine.connect() as connection:
        return bool(run_bulk_job_once(connection, database.settings, bulk_job.id).taken)


def _warn(admin: Admin, bulk_job: BulkJob) -> None:
    """Say so if nobody is there who would carry a bulk job out."""
    name = bulk_job.database
    if not any(row.alive and row.database == name and "bulk" in row.roles for row in admin.workers()):
        say(f"no worker with the role bulk runs in database {name}; start one: outbox run --app MODULE:OBJECT")
        return
    if bulk_job.action != Action.COMPENSATE:
        return
    able = {row.topic for row in admin.handlers() if row.kind == "compensation" and row.database == name}
    items = admin.bulk_items(bulk_job.id, PageRequest(MAX_PAGE), state="pending").items
    for topic in sorted({item.topic for item in items if item.topic} - able):
        say(f"no worker that runs has a compensation for topic {topic!r}; it waits for one (@outbox.compensation)")


def _left(admin: Admin, bulk_job: BulkJob) -> list[str]:
    """Return a line for each message that wasn't done, or for the only one; not for all if there are many."""
    if bulk_job.total == 1:
        items = list(every(lambda page: admin.bulk_items(bulk_job.id, page)))
    else:
        items = [
            item
            for state in ("skipped", "failed")
            for item in every(lambda page, of=state: admin.bulk_items(bulk_job.id, page, state=of), _SHOWN + 1)  # type: ignore[misc]
        ]
    lines = [f"{item.state}: {named_item(item)}: {item.outcome or 'no reason given'}" for item in items[:_SHOWN]]
    if len(items) > _SHOWN:
        lines.append(f"… for all of them: outbox bulk show {bulk_job.id} -o csv")
    return lines


def named_item(item: BulkItem) -> str:
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
        return targets[0] if len(targets) == 1 and self.action is not Action.COMPENSATE else None


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
    bulk_job = admin.start(
        action,
        order.selector,
        actor=actor,
        reason=doing.reason.strip(),
        token=preview.token,
        database=where.only,
        options=order.options,
        rate=order.rate,
    )
    see_through(admin, where, bulk_job, doing.output, wait=order.wait, here=action is not Action.COMPENSATE)


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
