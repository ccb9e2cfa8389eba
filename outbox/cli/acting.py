"""Commands made from the table of acts: an act on one message is done at once, on many as a bulk job.

Each shows what it is about to do, asks, does it, and says what came of it; a bulk job under way is carried out here
beside the workers, or watched.
"""

from __future__ import annotations

import dataclasses
import enum
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer
from sqlalchemy.exc import DBAPIError

from outbox.cli.database import DatabasesOptions, now_at
from outbox.cli.exits import Code, Failure, as_failure
from outbox.cli.groups import CommandGroup, every
from outbox.cli.options import (
    ActorOptions,
    ManyOptions,
    cli_actor,
    confirm,
    gathered,
    need_terminal,
    options_of,
    read_filter,
    read_options,
    word_of,
)
from outbox.cli.output import (
    Bars,
    Output,
    age,
    at_least,
    print_json,
    print_line,
    print_table,
    say,
    table,
)
from outbox.message.model import Status
from outbox.operator.acts import ACTS, Act
from outbox.operator.model import (
    MAX_IDS,
    MAX_PAGE,
    BulkItem,
    BulkJob,
    MessageStatus,
    PageRequest,
    Preview,
    Selector,
    Target,
)
from outbox.reader import option
from outbox.text import counted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from outbox.operator.operator import Operator


_SHOWN = 20
_PAUSE = 0.5

#: What each noun is as a field of a `Selector`, and the statuses that its filter has.
_SELECTS: Mapping[str | None, str] = {"message": "messages", "half": "halves", "inbox": "inbox"}
_STATUSES: Mapping[str | None, type[enum.StrEnum]] = {"message": MessageStatus, "inbox": Status}

WordsArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="ID…", help="Messages (in inboxes: GROUP/ID); - reads them from stdin, one a line."),
]

_EXAMPLE_ID = "01997a4e-6d0f-7c52-8c1e-9f2f5f0f3f11"


# --- the commands ----------------------------------------------------------------------------------------------------


def add_acts(app: typer.Typer, group: CommandGroup[Any], **instead: Callable[..., None]) -> None:
    """Add a command for each act on the group's noun; ``instead`` are commands by act."""
    for act in ACTS.values():
        if act.noun == group.noun and (group.states is None or act.from_states & group.states):
            command = instead.get(act.name) or act_command(group, act)
            app.command(act.name, help=_help(group, act))(command)


def act_command(group: CommandGroup[Any], act: Act) -> Callable[..., None]:
    """Return the command of an act."""
    known = [
        (each.name, each.type | None, option(False if each.type is bool else None, each.help)) for each in act.options
    ]
    flags_kind = dataclasses.make_dataclass(f"{act.name.capitalize()}Flags", known)

    def command(
        ids: WordsArgument = None,
        *,
        choice: Any,
        flags: Any,
        many: ManyOptions,
        acting: ActorOptions,
        databases: DatabasesOptions,
    ) -> None:
        run_act(group, act, ids or [], databases, choice, read_options(flags_kind, flags), many, acting)

    return gathered(command, choice=group.options("discarded"), flags=options_of(flags_kind))


def run_act(
    group: CommandGroup[Any],
    act: Act,
    words: Sequence[str],
    databases: DatabasesOptions,
    choice: Any,
    options: Mapping[str, Any],
    many: ManyOptions,
    acting: ActorOptions,
) -> None:
    """Do an act to the messages that are named, or that the options pick.

    Raises:
        Failure: refused, or not all of it was done.
    """
    targets = group.targets(words, getattr(choice, "group", None))
    with databases.opened() as operator:
        read = read_filter(group.kind, choice, lambda: now_at(operator)).values
        # The group of an inbox may also be that of the ids.
        narrowed = bool(read.keys() - ({"group"} if targets else set()))
        if targets and (narrowed or many.everything or many.limit):
            raise Failure("give ids, or options that pick messages, not both", Code.USAGE)
        if not targets and not narrowed and not many.everything and not words:
            raise Failure("name the messages: give ids, options that pick messages, or --all", Code.USAGE)
        selector = Selector(targets=targets)
        if not targets and not words:
            selector = _selector(operator, group, _narrowed(group, act, read, databases.only), many.limit)
        _carry_out(operator, databases, act, selector, options, many, acting)


def _narrowed(group: CommandGroup[Any], act: Act, read: Mapping[str, Any], database: str | None) -> Any:
    """Return the filter of messages in whose states the act can begin, unless the options say which statuses."""
    if group.noun == "half":
        return group.filter_of(read, database)
    # Discarded is a parked message with a mark.
    statuses = {"parked" if state == "discarded" else state for state in act.from_states}
    values: dict[str, Any] = {"status": tuple(sorted(statuses & set(_STATUSES[group.noun])))}
    if group.noun == "inbox":
        values["discarded"] = act.from_states == {"discarded"}
    return group.filter_of(values | dict(read), database)


def _selector(operator: Operator, group: CommandGroup[Any], criteria: Any, limit: int | None) -> Selector:
    """Return all that a filter picks, or the first few of these by name.

    Raises:
        Failure: more than can be named, where only the list can tell which ones the filter picks.
    """
    if limit is None and getattr(criteria, "body", None) is None:
        return Selector(**{_SELECTS[group.noun]: criteria})
    rows = list(group.rows(operator, criteria, limit or MAX_IDS + 1))
    if len(rows) > MAX_IDS:
        raise Failure(f"more than {MAX_IDS} messages have it in the body; narrow it down, or give --limit", Code.USAGE)
    return Selector(targets=tuple(map(group.target_of, rows)))


def _help(group: CommandGroup[Any], act: Act) -> str:
    example = f"mail/{_EXAMPLE_ID}" if group.noun == "inbox" else _EXAMPLE_ID
    many = "--status parked" if group.noun == "half" else "--topic orders"
    return (
        f"{act.summary}.\n\n{act.details}\n\nSeveral messages at once, and those that options pick, need a --reason, "
        "are shown first and done as a bulk job.\n\n\b\nExamples:\n"
        f'  outbox {group.name} {act.name} {example} --reason "{act.why}"\n'
        f'  outbox {group.name} {act.name} {many} --reason "{act.why}" --dry-run\n'
        f"  outbox {group.name} list {many} -o id | outbox {group.name} {act.name} - --yes"
        f' --reason "{act.why}"'
    )


# --- one act ---------------------------------------------------------------------------------------------------------


def _carry_out(
    operator: Operator,
    databases: DatabasesOptions,
    act: Act,
    selector: Selector,
    options: Mapping[str, Any],
    many: ManyOptions,
    acting: ActorOptions,
) -> None:
    """Show what is to be done, ask, do it, and say what came of it.

    Raises:
        Failure: refused, or not all of it was done.
    """
    by, why = cli_actor(acting.actor), acting.reason.strip()
    targets = selector.targets or ()
    # One message is acted on at once, unless only a worker can do it, or is to do it.
    single = targets[0] if len(targets) == 1 and not act.as_job and not many.no_wait else None
    refusal = f"nothing was done ({act.name})"
    if not acting.dry_run:
        if not why and (single is None or act.needs_reason):
            raise Failure(f"give --reason: the audit must tell why ({act.name})", Code.USAGE)
        need_terminal(refusal, yes=acting.yes)
    if selector.targets == ():
        say("nothing fits: nothing to do")
        return
    if acting.dry_run or not acting.yes or single is None:
        preview = operator.preview(act.name, selector, database=databases.only, options=options)
        if acting.dry_run:
            _print_preview(preview, acting.output)
            return
        if single is None and not preview.eligible:
            _explain(preview)
            return
        _say_preview(preview)
        confirm(f"{preview.described[:1].upper()}{preview.described[1:]}?", refusal, yes=acting.yes)
    if single is not None:
        outcome = operator.act(act.name, single, by=by, why=why, options=options, database=databases.only)
        say(outcome)
        if acting.output is Output.JSON:
            print_json({"action": act.name, **dataclasses.asdict(single), "outcome": outcome})
        return
    job = operator.start(
        act.name,
        selector,
        by=by,
        why=why,
        token=preview.token,
        database=databases.only,
        options=options,
        rate=many.rate,
    )
    see_through(operator, databases, job, acting.output, wait=not many.no_wait, here=not act.as_job)


def _print_preview(preview: Preview, output: Output) -> None:
    if output is Output.JSON:
        print_json(dataclasses.asdict(preview))
        return
    rows = [
        ("would", preview.described),
        ("in database", preview.database),
        ("matched", at_least(preview.matched)),
        ("eligible", preview.eligible),
        *((f"not: {why}", count) for why, count in preview.ineligible.items()),
        *(("such as" if not number else "", word_of(target)) for number, target in enumerate(preview.sample)),
    ]
    print_table(table(("dry run", ""), rows))


def _say_preview(preview: Preview) -> None:
    say(f"{preview.described}, in database {preview.database}")
    for why, count in preview.ineligible.items():
        say(f"  not {count}: {why}")
    if preview.eligible > 1:
        say(f"  such as {', '.join(word_of(target) for target in preview.sample[:3])}")


def _explain(preview: Preview) -> None:
    if not preview.matched.value:
        say("nothing fits: nothing to do")
        return
    reasons = "; ".join(f"{count}: {why}" for why, count in preview.ineligible.items())
    raise Failure(
        f"{preview.action}: nothing can be done to {counted(preview.matched.value, 'message')}: {reasons}",
        Code.CONFLICT,
    )


# --- a bulk job under way --------------------------------------------------------------------------------------------


def see_through(
    operator: Operator, databases: DatabasesOptions, job: BulkJob, output: Output, *, wait: bool = True, here: bool
) -> None:
    """Wait for a bulk job, carrying it out ``here`` too, and say what came of it.

    Raises:
        Failure: not all of it was done.
        typer.Exit: interrupted; the bulk job goes on in workers.
    """
    watch = databases.again(f"bulk watch {job.id}")
    if not wait:
        say(f"bulk job {job.id} is ordered; to watch it: {watch}")
        if output is Output.JSON:
            print_json(job)
        else:
            print_line(str(job.id))
        return
    try:
        if not here:
            _warn(operator, job)
        done = _follow(operator, job, here=here)
    except KeyboardInterrupt:
        say(f"interrupted; bulk job {job.id} goes on where workers run; to watch it: {watch}")
        raise typer.Exit(Code.INTERRUPTED) from None
    if output is Output.JSON:
        print_json(done)
    for line in _left(operator, done):
        say(line)
    sentence = f"bulk job {done.id} ({done.action}): {summary(done)}"
    if (code := _code_of(done)) is not Code.DONE:
        raise Failure(sentence, code)
    say(sentence)


def summary(job: BulkJob) -> str:
    """Return how far a bulk job has come, in words."""
    counts = [
        f"{count} {word}"
        for word in ("done", "skipped", "failed", "cancelled", "pending")
        if (count := getattr(job, word)) or word == "done"
    ]
    if job.started_at and job.finished_at:
        counts.append(f"in {age((job.finished_at - job.started_at).total_seconds())}")
    return ", ".join(counts)


def item_word(item: BulkItem) -> str:
    """Return the message of an item as it is written on the command line."""
    return word_of(Target(item.message_id, item.group))


def _code_of(job: BulkJob) -> Code:
    if job.done == job.total:
        return Code.DONE
    if job.done:
        return Code.PARTIAL
    return Code.FAILED if job.failed else Code.CONFLICT


def _follow(operator: Operator, job: BulkJob, *, here: bool) -> BulkJob:
    """Return the bulk job when it has ended; a database that goes away is waited for.

    Raises:
        KeyboardInterrupt: Ctrl-C, between two steps.
    """
    with _noting_interrupts() as interrupted, Bars() as bars:
        bars.stage(job.described, job.total)
        while job.finished_at is None:
            if interrupted():
                raise KeyboardInterrupt
            try:
                moved = here and _carry_on(operator, job)
                job = operator.bulk_job(job.id)
            except DBAPIError as error:
                failure = as_failure(error)
                if failure is None or failure.code is not Code.UNAVAILABLE:
                    raise
                bars.say(f"{failure}; trying again")
                moved = False
            bars.done(job.total - job.pending)
            if not moved and job.finished_at is None and not interrupted():
                time.sleep(_PAUSE)
    return job


@contextmanager
def _noting_interrupts() -> Iterator[Callable[[], bool]]:
    """Note the first Ctrl-C instead of raising it; yield what tells whether there was one.

    In the middle of a statement, the driver answers Ctrl-C with a broken connection, whose error then hides the Ctrl-C.
    A second one ends the process at once.
    """
    found: list[int] = []
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return

    def note(number: int, _: object) -> None:
        found.append(number)
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(found)
    finally:
        signal.signal(signal.SIGINT, before)


def _carry_on(operator: Operator, job: BulkJob) -> bool:
    """Carry a bulk job on for a moment; return whether anything was done."""
    from outbox.operator.bulk.run import bulk_once  # noqa: PLC0415

    database = operator.databases[job.database]
    with database.engine.connect() as connection:
        return bool(bulk_once(connection, database.settings, bulk_job_id=job.id).taken)


def _warn(operator: Operator, job: BulkJob) -> None:
    """Say so if no worker runs that could carry a bulk job out."""
    name = job.database
    if not any(row.alive and row.database == name and "bulk" in row.roles for row in operator.workers()):
        say(f"no worker with the role bulk runs in database {name}; start one: outbox run --app MODULE:OBJECT")
        return
    if not (kind := ACTS[job.action].handler):
        return
    able = {row.topic for row in operator.handlers() if row.kind == kind and row.database == name}
    items = operator.bulk_items(job.id, PageRequest(MAX_PAGE), state="pending").items
    for topic in sorted({item.topic for item in items if item.topic} - able):
        say(f"no worker that runs has a {kind} for topic {topic!r}; it waits for one (@outbox.{kind})")


def _left(operator: Operator, job: BulkJob) -> list[str]:
    """Return a line for each message that wasn't done, or for the only one; not for all if there are many."""
    if job.total == 1:
        items = list(every(lambda page: operator.bulk_items(job.id, page)))
    else:
        items = [
            item
            for state in ("skipped", "failed")
            for item in every(lambda page, of=state: operator.bulk_items(job.id, page, state=of), _SHOWN + 1)  # type: ignore[misc]
        ]
    lines = [f"{item.state}: {item_word(item)}: {item.outcome or 'no reason given'}" for item in items[:_SHOWN]]
    if len(items) > _SHOWN:
        lines.append(f"… for all of them: outbox bulk show {job.id} -o csv")
    return lines
