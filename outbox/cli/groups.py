"""Groups of commands on one kind of thing, and the commands that are made from them: lists, exports and acts.

An act on one message is done at once, on many as a bulk job. Its command shows what it is about to do, asks, does it,
and says what came of it; a bulk job under way is carried out here beside the workers, or watched.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import inspect
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, TypeVar

import typer
from rich.table import Table
from sqlalchemy.exc import DBAPIError

from outbox.acts.changes import Act, Target
from outbox.acts.messages import ACTS
from outbox.acts.whole_acts import PINNED, WHOLE_ACTS, WholeAct, facts_of, form_of
from outbox.cli import options, output
from outbox.cli.database import DatabasesOptions, now_at
from outbox.cli.options import (
    ActOptions,
    ActorOptions,
    DecidedOptions,
    OptionGroup,
    PageOptions,
    as_id,
    gathered,
    help_of,
    read_filter,
    read_options,
)
from outbox.cli.output import (
    Code,
    Failure,
    ListForm,
    Output,
    RowShape,
    at_least,
    facts_table,
    if_away,
    print_as,
    print_json,
    rows_table,
    say,
)
from outbox.errors import DatabaseUnreached
from outbox.operator.look.paging import every
from outbox.operator.model import (
    MAX_IDS,
    MAX_PAGE,
    BulkItem,
    BulkItemFilter,
    BulkItemState,
    BulkJob,
    Page,
    PageRequest,
    Preview,
    Selector,
)
from outbox.reader import option, shape_of
from outbox.text import counted

if TYPE_CHECKING:
    from outbox.operator.operator import Operator


Row = TypeVar("Row")

#: How many rows a list searches through that the filter leaves out, before it says where to go on.
SEARCHED = 100_000
_SHOWN = 20
_PAUSE = 0.5
EXAMPLE_ID = "01997a4e-6d0f-7c52-8c1e-9f2f5f0f3f11"
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_MICROSECOND = dt.timedelta(microseconds=1)

WordsArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="ID…", help="Messages (in inboxes: GROUP/ID); - reads them from stdin, one a line."),
]


@dataclass(frozen=True, slots=True)
class CommandGroup(Generic[Row]):
    """A group of commands on one kind of thing: how it is listed, and how messages are picked for an act.

    ``name`` and ``help`` are those of the group, ``listing`` is the help of its list, ``plural`` what its rows are
    called; the operator's ``method`` returns a page of them. ``part`` is that of the databases in which they are, None
    for both. ``preset`` are values of the filter that options go over, ``hidden`` fields of it without an option.

    Where acts can be done: ``noun`` is what they are done to, and ``states`` keeps those that can't begin in any of
    these states out of the group.
    """

    name: str
    plural: str
    help: str
    listing: str
    kind: type[Any]
    shape: RowShape[Row]
    method: str
    part: Literal["producer", "consumer"] | None = None
    preset: Mapping[str, Any] = field(default_factory=dict)
    hidden: frozenset[str] = frozenset()
    noun: Literal["message", "half", "inbox"] | None = None
    states: frozenset[str] | None = None

    def options(self, *hidden: str) -> options.OptionGroup:
        """Return the options of the filter."""
        return options.options_of(self.kind, "database", *self.hidden, *hidden)

    def filter_of(self, values: Mapping[str, Any], database: str | None) -> Any:
        """Return the filter of values that were read."""
        return self.kind(**{"database": database, **self.preset, **values})

    def pages(self, operator: Operator, criteria: Any) -> Callable[[PageRequest], Page[Row]]:
        """Return what fetches a page of a filter."""
        return partial(getattr(operator, self.method), criteria)

    def targets(self, words: Sequence[str], group: str | None) -> tuple[Target, ...]:
        """Return the messages that words of the command line name, each once; those of stdin in place of ``-``."""
        found: dict[Target, None] = {}
        for word in words:
            for text in filter(None, map(str.strip, sys.stdin)) if word == "-" else [word]:
                own, _, id_ = text.rpartition("/")
                # A group before an id (GROUP/ID), as lists of inboxes have it, doesn't matter to a message or a half.
                name = (own or group) if self.noun == "inbox" else None
                if self.noun == "inbox" and not name:
                    raise Failure(f"{text!r} has no group: write GROUP/{text}, or give --group")
                found[Target(as_id(id_), name)] = None
        return tuple(found)


# --- lists and exports -----------------------------------------------------------------------------------------------


def page_of(fetch: Callable[[PageRequest], Page[Row]], limit: int, token: str | None) -> Page[Row]:
    """Return so many rows as one page, from as many pages as it takes, or until it has searched through `SEARCHED`."""
    items: list[Row] = []
    total, searched = None, 0
    while True:
        page = fetch(PageRequest(min(MAX_PAGE, limit - len(items)), token))
        items += page.items
        total = total or page.total
        searched += page.searched or 0
        token = page.next_page_token
        complete = token is None or len(items) >= limit
        if complete or searched >= SEARCHED or page.unreached:
            return Page(items, token, total, complete, None if complete else searched, page.unreached)


def commands_of(group: CommandGroup[Any], **instead: Callable[..., None]) -> typer.Typer:
    """Return a group with its list, and a command for each act on its noun; ``instead`` are commands by act."""
    app = typer.Typer(name=group.name, help=group.help, no_args_is_help=True, rich_markup_mode=None)
    add_list(app, group)
    for act in ACTS.values():
        if act.noun == group.noun and (group.states is None or act.from_states & group.states):
            app.command(act.name, help=_help(group, act))(instead.get(act.name) or act_command(group, act))
    return app


def add_list(app: typer.Typer, group: CommandGroup[Any], name: str = "list") -> None:
    """Add the command that lists a page, in each form."""

    def show_list(choice: Any, page: PageOptions, databases: DatabasesOptions) -> None:
        with databases.opened(partly=True) as operator:
            away = operator.databases.away_for(databases.only)
            if group.part and not away and not operator.databases.having(group.part, databases.only):
                other = "consumer" if group.part == "producer" else "producer"
                there = ", ".join(str(database.engine.url) for database in operator.databases.values())
                raise Failure(
                    f"only the {other}'s tables are in {there}; name the {group.part}'s database", Code.CONFIG
                )
            found = _listed(operator, group, choice, page, databases.only)
            if page.output is ListForm.JSON:
                print_json(found)
                _check_whole(found)
                return
            output.print_rows(found.items, group.shape, page.output, databases=len(operator.databases) > 1)
            if found.next_page_token:
                known = f"{len(found.items)} of {at_least(found.total)}; " if found.total else ""
                further = f"searched {found.searched or 0} {group.plural}; to search further"
                say(f"{f'{known}there may be more' if found.complete else further}: --after {found.next_page_token}")
            _check_whole(found)

    app.command(name, help=group.listing)(gathered(show_list, choice=group.options()))


def _check_whole(page: Page[Any]) -> None:
    if page.unreached:
        raise DatabaseUnreached(page.unreached)


def _listed(
    operator: Operator, group: CommandGroup[Row], choice: Any, page: PageOptions, database: str | None
) -> Page[Row]:
    """Return the page of a list.

    A page's token is one of the very same filter, and ``15m`` ago is another time at each call. So where durations
    count from a now, the token that the next call is given brings it along.
    """
    after = page.after
    values, now = read_filter(group.kind, choice, lambda: _now_of(after) if after else now_at(operator))
    token = after.partition(".")[0] if after and now else after
    found = page_of(group.pages(operator, group.filter_of(values, database)), page.limit, token)
    if found.next_page_token is None or now is None:
        return found
    return dataclasses.replace(found, next_page_token=f"{found.next_page_token}.{(now - _EPOCH) // _MICROSECOND}")


def _now_of(after: str) -> dt.datetime:
    try:
        return _EPOCH + int(after.partition(".")[2]) * _MICROSECOND
    except (ValueError, OverflowError):
        raise Failure(f"--after {after!r} isn't a token of this list") from None


def all_rows(
    operator: Operator, databases: DatabasesOptions, group: CommandGroup[Any], choice: Any, limit: int | None
) -> Iterator[Any]:
    """Return all rows that the options of a filter pick, the first ``limit`` of them if given."""
    values, _ = read_filter(group.kind, choice, lambda: now_at(operator))
    return every(group.pages(operator, group.filter_of(values, databases.only)), limit)


# --- acts ------------------------------------------------------------------------------------------------------------


def act_command(group: CommandGroup[Any], act: Act) -> Callable[..., None]:
    """Return the command of an act."""
    flags_kind = dataclasses.make_dataclass(
        f"{act.name.capitalize()}Flags", [(each.name, bool, option(False, each.help)) for each in act.options]
    )

    def command(
        ids: WordsArgument = None, *, choice: Any, flags: Any, acting: ActOptions, databases: DatabasesOptions
    ) -> None:
        run_act(group, act, ids or [], choice, options.read_options(flags_kind, flags), acting, databases)

    return gathered(command, choice=group.options("discarded"), flags=options.options_of(flags_kind))


def run_act(
    group: CommandGroup[Any],
    act: Act,
    words: Sequence[str],
    choice: Mapping[str, Any],
    flags: Mapping[str, Any],
    acting: ActOptions,
    databases: DatabasesOptions,
) -> None:
    """Do an act to the messages that are named, or that the options pick."""
    targets = group.targets(words, choice.get("group"))
    with databases.opened() as operator:
        values, _ = read_filter(group.kind, choice, lambda: now_at(operator))
        # The group of an inbox may also be that of the ids.
        narrowed = bool(values.keys() - ({"group"} if targets else set()))
        if targets and (narrowed or acting.everything or acting.limit):
            raise Failure("give ids, or options that pick messages, not both")
        if not words and not narrowed and not acting.everything:
            raise Failure("name the messages: give ids, options that pick messages, or --all")
        if words:
            selector = Selector(targets=targets)
        else:
            criteria = group.filter_of(_beginning(group, act) | values, databases.only)
            selector = _selector(operator, group, criteria, acting.limit)
        _carry_out(operator, databases, act, selector, flags, acting)


def _beginning(group: CommandGroup[Any], act: Act) -> dict[str, Any]:
    """Return the filter's values for the states in which the act can begin, unless the options say which."""
    kind: Any = group.kind
    (status,) = (shape for shape in shape_of(kind) if shape.name == "status")
    if not status.many:
        return {}
    # Discarded is a parked message with a mark.
    statuses = {"parked" if state == "discarded" else state for state in act.from_states}
    marked = {"discarded": act.from_states == {"discarded"}} if group.noun == "inbox" else {}
    return {"status": tuple(sorted(statuses & set(status.choices)))} | marked


def _selector(operator: Operator, group: CommandGroup[Any], criteria: Any, limit: int | None) -> Selector:
    """Return all that a filter picks, or the first few by name; by name too where only the list can tell which."""
    if limit is None and getattr(criteria, "body", None) is None:
        return Selector(**{group.method: criteria})
    rows = list(every(group.pages(operator, criteria), limit or MAX_IDS + 1))
    if len(rows) > MAX_IDS:
        raise Failure(f"more than {MAX_IDS} messages have it in the body; narrow it down, or give --limit")
    return Selector(targets=group.targets([str(group.shape.id_of(row)) for row in rows], None))


def _help(group: CommandGroup[Any], act: Act) -> str:
    example = f"mail/{EXAMPLE_ID}" if group.noun == "inbox" else EXAMPLE_ID
    many = "--status parked" if group.noun == "half" else "--topic orders"
    return (
        f"{act.summary}.\n\n{act.details}\n\nSeveral messages at once, and those that options pick, need a --reason, "
        "are shown first and done as a bulk job.\n\n\b\nExamples:\n"
        f'  outbox {group.name} {act.name} {example} --reason "{act.why}"\n'
        f'  outbox {group.name} {act.name} {many} --reason "{act.why}" --dry-run\n'
        f"  outbox {group.name} list {many} -o id | outbox {group.name} {act.name} - --yes"
        f' --reason "{act.why}"'
    )


def _carry_out(
    operator: Operator,
    databases: DatabasesOptions,
    act: Act,
    selector: Selector,
    flags: Mapping[str, Any],
    acting: ActOptions,
) -> None:
    """Show the act to be done, ask, do it, and report the outcome."""
    by, why, targets = options.cli_actor(acting.actor), acting.reason.strip(), selector.targets or ()
    common: dict[str, Any] = {"database": databases.only, "options": flags}
    # One message is acted on at once, unless only a worker can do it, or is to do it.
    single = targets[0] if len(targets) == 1 and not act.as_job and not acting.no_wait else None
    refusal = f"nothing was done ({act.name})"
    if not acting.dry_run:
        if not why and (single is None or act.needs_reason):
            raise Failure(f"give --reason: the audit must tell why ({act.name})")
        options.need_terminal(refusal, yes=acting.yes)
    if selector.targets == ():
        say("nothing fits: nothing to do")
        return
    if acting.dry_run or not acting.yes or single is None:
        preview = operator.preview(act.name, selector, **common)
        if acting.dry_run:
            output.print_as(acting.output, preview, _preview_table(preview))
            return
        if single is None and not preview.matched.value:
            say("nothing fits: nothing to do")
            return
        if single is None and not preview.eligible and preview.matched.relation == "eq":
            matched = counted(preview.matched.value, "message")
            reasons = "; ".join(f"{count}: {why}" for why, count in preview.ineligible.items())
            raise Failure(f"{act.name}: nothing can be done to {matched}: {reasons}", Code.CONFLICT)
        say(f"{preview.described}, in database {preview.database}")
        for reason, count in preview.ineligible.items():
            say(f"  not {count}: {reason}")
        if preview.eligible > 1:
            say(f"  such as {', '.join(target.audited for target in preview.sample[:3])}")
        typed = act.number_to_type(preview.reach) if single is None else ""
        question = f"{preview.described[:1].upper()}{preview.described[1:]}?"
        options.confirm(question, refusal, yes=acting.yes, typed=typed)
    if single is not None:
        outcome = operator.act(act.name, single, by=by, why=why, **common)
        say(outcome)
        if acting.output is Output.JSON:
            print_json({"action": act.name, **dataclasses.asdict(single), "outcome": outcome})
        return
    job = operator.start(act.name, selector, by=by, why=why, token=preview.token, rate=acting.rate, **common)
    see_through(operator, databases, job, acting.output, wait=not acting.no_wait, here=not act.as_job)


def _preview_table(preview: Preview) -> Any:
    rows = [
        ("would", preview.described),
        ("in database", preview.database),
        ("matched", at_least(preview.matched)),
        ("eligible", at_least(replace(preview.matched, value=preview.eligible))),
        *((f"not: {why}", count) for why, count in preview.ineligible.items()),
        *(("such as" if not number else "", target.audited) for number, target in enumerate(preview.sample)),
    ]
    return output.table(("dry run", ""), rows)


# --- a bulk job under way --------------------------------------------------------------------------------------------


def see_through(
    operator: Operator, databases: DatabasesOptions, job: BulkJob, form: Output, *, wait: bool = True, here: bool
) -> None:
    """Wait for a bulk job, carrying it out ``here`` too, and say what came of it; fail unless all of it was done."""
    watch = databases.again(f"bulk watch {job.id}")
    if not wait:
        say(f"bulk job {job.id} is ordered; to watch it: {watch}")
        if form is Output.JSON:
            print_json(job)
        else:
            output.print_line(str(job.id))
        return
    try:
        if not here:
            _warn(operator, job)
        done = _follow(operator, job, here=here)
    except KeyboardInterrupt:
        say(f"interrupted; bulk job {job.id} goes on where workers run; to watch it: {watch}")
        raise typer.Exit(Code.INTERRUPTED) from None
    if form is Output.JSON:
        print_json(done)
    for line in _left(operator, done):
        say(line)
    sentence = f"bulk job {done.id} ({done.action}): {summary(done)}"
    if done.done < done.total:
        raise Failure(sentence, Code.PARTIAL if done.done else Code.FAILED if done.failed else Code.CONFLICT)
    say(sentence)


def summary(job: BulkJob) -> str:
    """Return how far a bulk job has come, in words."""
    counts = [
        f"{count} {word}"
        for word in sorted(BulkItemState, key=lambda state: state is BulkItemState.PENDING)
        if (count := getattr(job, word)) or word == "done"
    ]
    if job.started_at and job.finished_at:
        counts.append(f"in {output.age((job.finished_at - job.started_at).total_seconds())}")
    return ", ".join(counts)


def item_word(item: BulkItem) -> str:
    """Return the message of an item as it is written on the command line."""
    return Target(item.message_id, item.group).audited


def _follow(operator: Operator, job: BulkJob, *, here: bool) -> BulkJob:
    """Return the bulk job when it has ended; a database that goes away is waited for."""
    from outbox.operator.bulk.run import bulk_once  # noqa: PLC0415 - needed by this command alone

    database = operator.databases[job.database]
    with _noting_interrupts() as interrupted, output.Bars() as bars:
        bars.stage(job.described, job.total)
        while job.finished_at is None:
            if interrupted():
                raise KeyboardInterrupt
            try:
                moved = 0
                if here:
                    with database.engine.connect() as connection:
                        moved = bulk_once(connection, database.settings, bulk_job_id=job.id).taken
                job = operator.bulk_job(job.id)
            except (DBAPIError, DatabaseUnreached) as error:
                bars.say(f"{if_away(error)}; trying again")
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


def _warn(operator: Operator, job: BulkJob) -> None:
    """Say so if no worker runs that could carry a bulk job out."""
    name = job.database
    if not any(row.alive and row.database == name and "bulk" in row.roles for row in operator.workers()):
        say(f"no worker with the role bulk runs in database {name}; start one: outbox run --app MODULE:OBJECT")
        return
    if not (kind := ACTS[job.action].handler):
        return
    able = {row.topic for row in operator.handlers() if row.kind == kind and row.database == name}
    items = operator.bulk_items(job.id, BulkItemFilter(BulkItemState.PENDING), PageRequest(MAX_PAGE)).items
    for topic in sorted({item.topic for item in items if item.topic} - able):
        say(f"no worker that runs has a {kind} for topic {topic!r}; it waits for one (@outbox.{kind})")


def _left(operator: Operator, job: BulkJob) -> list[str]:
    """Return a line for each message that wasn't done, or for the only one; not for all if there are many."""
    states = (None,) if job.total == 1 else (BulkItemState.SKIPPED, BulkItemState.FAILED)
    fetches = [partial(operator.bulk_items, job.id, BulkItemFilter(state)) for state in states]
    items = [item for fetch in fetches for item in every(fetch, _SHOWN + 1)]
    lines = [f"{item.state}: {item_word(item)}: {item.outcome or 'no reason given'}" for item in items[:_SHOWN]]
    if len(items) > _SHOWN:
        lines.append(f"… for all of them: outbox bulk show {job.id} -o csv")
    return lines


#: What opens the databases that options name, for the methods of an act.
Opened = Callable[[Any], AbstractContextManager[Any]]


def add_acts(
    app: typer.Typer, noun: str, where: type = DatabasesOptions, part: Opened = lambda where: where.opened()
) -> None:
    """Add a command for each act on what a group of commands is about.

    ``where`` are the options that name databases, ``part`` opens them and yields what has the methods of the acts.
    """
    for act in WHOLE_ACTS.values():
        if act.noun == noun:
            app.command(act.word, help=help_of(act, f"{noun} {act.word} {act.example}"))(_command_of(act, where, part))


def _command_of(act: WholeAct, where: type, opened: Opened) -> Callable[..., None]:
    def after_preview(*, choice: Any, acting: ActorOptions, databases: Any) -> None:
        values = _values(act, choice, databases)
        refusal = f"{act.named(values)} was left as it is"
        if not acting.dry_run:
            options.need_terminal(refusal, yes=acting.yes)
            _need_reason(act, acting)
        with opened(databases) as part:
            preview = act.look(part, act.preview, values)
            if acting.dry_run or not acting.in_json:
                print_as(acting.output, preview, *_tables(act, values, preview))
            elif note := getattr(preview, "note", ""):
                say(f"note: {note}")
            if acting.dry_run and (refused := getattr(preview, "refusal", "")):
                say(f"it would be refused: {refused}")
            if not acting.dry_run:
                _ask(act, values, refusal, acting, preview)
                _do(act, part, act.pinned(values, preview), acting)

    def at_once(*, choice: Any, acting: DecidedOptions, databases: Any) -> None:
        values = _values(act, choice, databases)
        _need_reason(act, acting)
        with opened(databases) as part:
            if act.asks:
                _ask(act, values, f"nothing was done ({act.name})", acting)
            _do(act, part, values, acting)

    command = after_preview if act.preview else at_once
    command.__annotations__["databases"] = where
    return gathered(command, choice=_options_of(act))


def _do(act: WholeAct, part: Any, values: Mapping[str, Any], acting: DecidedOptions) -> None:
    done = act.perform(part, values, by=acting.by, why=acting.reason)
    found = {"outcome": done} if isinstance(done, str) else asdict(done)
    if acting.in_json or "outcome" not in found:
        print_as(acting.output, found, facts_table(act.button, found))
    say(found.get("outcome", act.happened))


def _need_reason(act: WholeAct, acting: DecidedOptions) -> None:
    if act.needs_reason and not acting.reason.strip():
        raise Failure(f"give --reason: the audit must tell why ({act.name})")


def _ask(act: WholeAct, values: dict[str, Any], refusal: str, acting: DecidedOptions, preview: Any = None) -> None:
    question = f"{act.consequence} {act.button} {act.named(values)}?"
    options.confirm(question, refusal, yes=acting.yes, typed=act.to_type(values, preview))


def _options_of(act: WholeAct) -> OptionGroup:
    """Return the parameters of the command: the first part of the target and some fields as arguments."""
    found = dict(options.options_of(form_of(act), "database", *({*PINNED} - {"source"} if act.preview else ())))
    shapes = {shape.name: shape for shape in shape_of(form_of(act))}
    first = act.names[0]
    arguments = {
        name: found.pop(name).replace(
            annotation=Annotated[str, typer.Argument(metavar=name.upper(), help=shapes[name].option.help)],
            default=inspect.Parameter.empty,
        )
        for name in (first, *act.positional)
    }
    return arguments | found


def _values(act: WholeAct, choice: dict[str, Any], databases: Any) -> dict[str, Any]:
    form, shapes = form_of(act), shape_of(form_of(act))
    files = {shape.name: choice[shape.name].read() for shape in shapes if shape.option.file and shape.name in choice}
    values = read_options(form, choice | files)
    for shape in shapes:
        if shape.default is MISSING and shape.name not in values:
            raise Failure(f"give --{shape.name}: {shape.option.help}")
    values = asdict(form(**values))
    return values | {"database": getattr(databases, "only", None)} if "database" in values else values


def _tables(act: WholeAct, values: dict[str, Any], preview: Any) -> list[Table]:
    facts, rows = facts_of(preview)
    title = f"{act.noun.capitalize()} {values[act.names[0]]}"
    found = [facts_table(title, facts)]
    for name, each in rows.items():
        columns = " ".join(f"{column.name}>" for column in fields(each[0]))
        found.append(rows_table(columns, each, name.capitalize()))
    return found
