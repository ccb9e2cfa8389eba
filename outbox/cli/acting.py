"""Commands made from the table of acts: an act on one message is done at once, on many as a bulk job.

Each shows what it is about to do, asks, does it, and says what came of it; a bulk job under way is carried out here
beside the workers, or watched.
"""

from __future__ import annotations

import dataclasses
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, TypeVar

import typer
from sqlalchemy.exc import DBAPIError

from outbox.cli.database import DatabasesOptions, now_at
from outbox.cli.exits import Code, Failure, as_failure
from outbox.cli.options import (
    ActorOptions,
    ManyOptions,
    as_id,
    confirm,
    gathered,
    need_terminal,
    operator_name,
    options_given,
    options_of,
    read_filter,
    targets_of,
    word_of,
    words_of,
)
from outbox.cli.output import (
    Bars,
    Output,
    RowShape,
    age,
    at_least,
    print_json,
    print_line,
    print_table,
    say,
    table,
)
from outbox.operator.acts import ACTS, Act
from outbox.operator.model import (
    MAX_IDS,
    MAX_PAGE,
    Actor,
    BulkItem,
    BulkJob,
    Page,
    PageRequest,
    Preview,
    Selector,
    Target,
)
from outbox.text import counted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from outbox.operator.operator import Operator


_SHOWN = 20
_PAUSE = 0.5
Row = TypeVar("Row")

_EXAMPLE_ID = "01997a4e-6d0f-7c52-8c1e-9f2f5f0f3f11"


@dataclass(frozen=True, slots=True)
class Noun(Generic[Row]):
    """What a command group is about: how it is listed, and how messages are picked for an act.

    ``plural`` is what rows are called. ``part`` is that of the databases in which they are, None for both. ``fixed``
    are values of the filter without an option, ``defaults`` those of options that aren't given, ``hidden`` further
    fields without an option.

    Where acts can be done: ``select`` is the filter's field of a `Selector`, ``target_of`` makes a target of a row, and
    ``states`` are the states of the messages; an act that can begin in one of them is a command of the group.
    """

    plural: str
    kind: type[Any]
    shape: RowShape[Row]
    fetch: Callable[[Operator, Any, PageRequest], Page[Row]]
    part: Literal["producer", "consumer"] | None = None
    fixed: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    hidden: frozenset[str] = frozenset()
    select: Literal["messages", "inbox", "halves"] = "messages"
    target_of: Callable[[Row], Target] = lambda row: Target(row.id)  # type: ignore[attr-defined]
    states: frozenset[str] = frozenset()

    def options(self, *hidden: str) -> type:
        """Return the dataclass of the filter's options."""
        return options_of(self.kind, frozenset({"database", *self.hidden, *self.fixed, *hidden}))

    def filter_of(self, values: Mapping[str, Any], database: str | None) -> Any:
        """Return the filter of values that were read."""
        return self.kind(**{"database": database, **self.defaults, **self.fixed, **values})

    def rows(self, admin: Operator, chosen: Any, limit: int | None = None) -> Iterator[Row]:
        """Return all rows of a filter, page by page, the first ``limit`` of them if given."""
        return every(lambda page: self.fetch(admin, chosen, page), limit)

    def targets(self, words: Sequence[str], group: str | None) -> tuple[Target, ...]:
        """Return the messages that words of the command line name, each once; those of stdin in place of ``-``.

        Raises:
            Failure: a word is no id, or has no group where one is needed.
        """
        found = words_of(words)
        if self.select == "inbox":
            return tuple(targets_of(found, group))
        # A group before an id (GROUP/ID), as lists of inboxes have it, doesn't matter here.
        return tuple(dict.fromkeys(Target(as_id(text.rpartition("/")[2])) for text in found))


def every(fetch: Callable[[PageRequest], Page[Row]], limit: int | None = None) -> Iterator[Row]:
    """Yield the rows of all pages, the first ``limit`` of them if given."""
    token, left = None, limit
    while left is None or left > 0:
        page = fetch(PageRequest(MAX_PAGE if left is None else min(MAX_PAGE, left), token))
        yield from page.items
        left = None if left is None else left - len(page.items)
        token = page.next_page_token
        if token is None:
            return


# --- the commands ----------------------------------------------------------------------------------------------------


def add_acts(app: typer.Typer, group: str, noun: Noun[Any], **instead: Callable[..., None]) -> None:
    """Add a command for each act that can be done to messages of this noun; ``instead`` are commands by act."""
    for act in ACTS.values():
        if act.part == noun.part and act.from_states & noun.states:
            command = instead.get(act.name) or act_command(noun, act)
            app.command(act.name, help=_help(group, noun, act))(command)


def act_command(noun: Noun[Any], act: Act) -> Callable[..., None]:
    """Return the command of an act."""
    metavar = "GROUP/ID…" if noun.select == "inbox" else "ID…"
    words = Annotated[
        list[str] | None, typer.Argument(metavar=metavar, help="Messages by name; - reads them from stdin, one a line.")
    ]
    flags = dataclasses.make_dataclass(
        f"{act.name.capitalize()}Flags",
        [
            (
                option.name,
                Annotated[bool, typer.Option(f"--{option.name.replace('_', '-')}", help=option.help)],
                field(default=False),
            )
            for option in act.options
        ],
    )

    def command(
        ids: words = None,
        *,
        databases: DatabasesOptions,
        choice: Any,
        flags: Any,
        many: ManyOptions,
        acting: ActorOptions,
    ) -> None:
        run_act(noun, act, ids or [], databases, choice, options_given(flags), many, acting)

    command.__annotations__["ids"] = words
    return gathered(command, choice=noun.options("discarded"), flags=flags)


def run_act(
    noun: Noun[Any],
    act: Act,
    words: Sequence[str],
    databases: DatabasesOptions,
    choice: Any,
    options: Mapping[str, bool],
    many: ManyOptions,
    acting: ActorOptions,
) -> None:
    """Do an act to the messages that are named, or that the options pick.

    Raises:
        Failure: refused, or not all of it was done.
    """
    targets = noun.targets(words, getattr(choice, "group", None))
    with databases.opened() as admin:
        read = read_filter(noun.kind, choice, lambda: now_at(admin)).values
        # The group of an inbox may also be that of the ids.
        narrowed = bool(read.keys() - ({"group"} if targets else set()))
        if targets and (narrowed or many.everything or many.limit):
            raise Failure("give ids, or options that pick messages, not both", Code.USAGE)
        if not targets and not narrowed and not many.everything and not words:
            raise Failure("name the messages: give ids, options that pick messages, or --all", Code.USAGE)
        selector = Selector(targets=targets)
        if not targets and not words:
            selector = _selector(admin, noun, _narrowed(noun, act, read, databases.only), many.limit)
        carry_out(admin, databases, ActRequest(act, selector, options, many.rate, not many.no_wait), acting)


def _narrowed(noun: Noun[Any], act: Act, read: Mapping[str, Any], database: str | None) -> Any:
    """Return the filter of messages in whose states the act can begin, unless the options say which statuses."""
    states = act.from_states & noun.states
    values: dict[str, Any] = {}
    if noun.select != "halves":
        # Discarded is a parked message with a mark.
        values["status"] = tuple(sorted({"parked" if state == "discarded" else state for state in states}))
    if noun.select == "inbox":
        values["discarded"] = states == {"discarded"}
    return noun.filter_of(values | dict(read), database)


def _selector(admin: Operator, noun: Noun[Any], chosen: Any, limit: int | None) -> Selector:
    """Return all that a filter picks, or the first few of these by name.

    Raises:
        Failure: more than can be named, where only the list can tell which ones the filter picks.
    """
    if limit is None and getattr(chosen, "body", None) is None:
        return Selector(**{noun.select: chosen})
    rows = list(noun.rows(admin, chosen, limit or MAX_IDS + 1))
    if len(rows) > MAX_IDS:
        raise Failure(f"more than {MAX_IDS} messages have it in the body; narrow it down, or give --limit", Code.USAGE)
    return Selector(targets=tuple(map(noun.target_of, rows)))


def _help(group: str, noun: Noun[Any], act: Act) -> str:
    example = f"mail/{_EXAMPLE_ID}" if noun.select == "inbox" else _EXAMPLE_ID
    why = f' --reason "{act.why}"'
    many = "--status parked" if noun.select == "halves" else "--topic orders"
    return (
        f"{act.summary}.\n\n{act.details}\n\nSeveral messages at once, and those that options pick, need a --reason, "
        "are shown first and done as a bulk job.\n\n\b\nExamples:\n"
        f"  outbox {group} {act.name} {example}{why if act.needs_reason else ''}\n"
        f"  outbox {group} {act.name} {many}{why} --dry-run\n"
        f"  outbox {group} list {many} -o id | outbox {group} {act.name} -{why} --yes"
    )


# --- one act ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ActRequest:
    """What to do to which messages, how fast, and whether to wait until it is done."""

    act: Act
    selector: Selector
    options: Mapping[str, Any] = field(default_factory=dict)
    rate: float | None = None
    wait: bool = True

    @property
    def single(self) -> Target | None:
        """The message, if it is one on which the act is done at once."""
        targets = self.selector.targets or ()
        return targets[0] if len(targets) == 1 and not self.act.as_job and self.wait else None


def carry_out(admin: Operator, databases: DatabasesOptions, request: ActRequest, acting: ActorOptions) -> None:
    """Show what is to be done, ask, do it, and say what came of it.

    Raises:
        Failure: refused, or not all of it was done.
    """
    actor, reason = Actor(operator_name(acting.actor), {"via": "cli"}), acting.reason.strip()
    act, single = request.act, request.single
    refusal = f"nothing was done ({act.name})"
    if not acting.dry_run:
        if not reason and (single is None or act.needs_reason):
            raise Failure(f"give --reason: the audit must tell why ({act.name})", Code.USAGE)
        need_terminal(refusal, yes=acting.yes)
    if request.selector.targets == ():
        say("nothing fits: nothing to do")
        return
    if acting.dry_run or not acting.yes or single is None:
        preview = admin.preview(act.name, request.selector, database=databases.only, options=request.options)
        if acting.dry_run:
            _print_preview(preview, acting.output)
            return
        if single is None and not preview.eligible:
            _explain(preview)
            return
        _say_preview(preview)
        confirm(f"{preview.described[:1].upper()}{preview.described[1:]}?", refusal, yes=acting.yes)
    if single is not None:
        outcome = admin.act(act.name, single, by=actor, why=reason, options=request.options, database=databases.only)
        say(outcome)
        if acting.output is Output.JSON:
            print_json({"action": act.name, **dataclasses.asdict(single), "outcome": outcome})
        return
    job = admin.start(
        act.name,
        request.selector,
        by=actor,
        why=reason,
        token=preview.token,
        database=databases.only,
        options=request.options,
        rate=request.rate,
    )
    see_through(admin, databases, job, acting.output, wait=request.wait, here=not act.as_job)


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
    admin: Operator, databases: DatabasesOptions, job: BulkJob, output: Output, *, wait: bool = True, here: bool
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
            _warn(admin, job)
        done = _follow(admin, job, here=here)
    except KeyboardInterrupt:
        say(f"interrupted; bulk job {job.id} goes on where workers run; to watch it: {watch}")
        raise typer.Exit(Code.INTERRUPTED) from None
    if output is Output.JSON:
        print_json(done)
    for line in _left(admin, done):
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


def _follow(admin: Operator, job: BulkJob, *, here: bool) -> BulkJob:
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
                moved = here and _carry_on(admin, job)
                job = admin.bulk_job(job.id)
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


def _carry_on(admin: Operator, job: BulkJob) -> bool:
    """Carry a bulk job on for a moment; return whether anything was done."""
    from outbox.operator.bulk.run import bulk_once  # noqa: PLC0415

    database = admin.databases[job.database]
    with database.engine.connect() as connection:
        return bool(bulk_once(connection, database.settings, bulk_job_id=job.id).taken)


def _warn(admin: Operator, job: BulkJob) -> None:
    """Say so if no worker runs that could carry a bulk job out."""
    name = job.database
    if not any(row.alive and row.database == name and "bulk" in row.roles for row in admin.workers()):
        say(f"no worker with the role bulk runs in database {name}; start one: outbox run --app MODULE:OBJECT")
        return
    if not ACTS[job.action].as_job:
        return
    able = {row.topic for row in admin.handlers() if row.kind == "compensation" and row.database == name}
    items = admin.bulk_items(job.id, PageRequest(MAX_PAGE), state="pending").items
    for topic in sorted({item.topic for item in items if item.topic} - able):
        say(f"no worker that runs has a compensation for topic {topic!r}; it waits for one (@outbox.compensation)")


def _left(admin: Operator, job: BulkJob) -> list[str]:
    """Return a line for each message that wasn't done, or for the only one; not for all if there are many."""
    if job.total == 1:
        items = list(every(lambda page: admin.bulk_items(job.id, page)))
    else:
        items = [
            item
            for state in ("skipped", "failed")
            for item in every(lambda page, of=state: admin.bulk_items(job.id, page, state=of), _SHOWN + 1)  # type: ignore[misc]
        ]
    lines = [f"{item.state}: {item_word(item)}: {item.outcome or 'no reason given'}" for item in items[:_SHOWN]]
    if len(items) > _SHOWN:
        lines.append(f"… for all of them: outbox bulk show {job.id} -o csv")
    return lines
