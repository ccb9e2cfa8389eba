"""The command groups of messages: in producers, undecided, in inboxes, and dead letters.

Each has a list, some an export, and the acts that can be done to what it lists (`outbox.cli.groups`). A message is
shown with all that is known of it, and so is its conversation; one has a half checked here and now.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, redirect_stdout
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any
from uuid import UUID

import typer

from outbox.acts.changes import Actor
from outbox.acts.messages import ACTS
from outbox.cli import groups, options, output, processes
from outbox.cli.database import DatabasesOptions
from outbox.cli.groups import CommandGroup, WordsArgument, add_acts, all_rows, commands_of
from outbox.cli.options import ActOptions, ActorOption, CodecsOption, as_id, cli_actor, command, find_url, gathered
from outbox.cli.output import (
    Code,
    ExportForm,
    ExportFormOption,
    Failure,
    ListForm,
    Output,
    OutputOption,
    RowShape,
    at_least,
    say,
)
from outbox.database import migration
from outbox.errors import NotFound
from outbox.message.model import Answer, Resolution, Status
from outbox.operator import model
from outbox.operator.look.redactor import Body
from outbox.reader import option
from outbox.text import MASK

if TYPE_CHECKING:
    from outbox.operator.operator import Operator


# --- one message -----------------------------------------------------------------------------------------------------


@gathered
def show_message(
    id_: Annotated[str, typer.Argument(metavar="ID", help="The id of the message.")],
    databases: DatabasesOptions,
    consumer_url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="The consumer's database, where it is another one, and not a --database."),
    ] = None,
    body: Annotated[
        bool, typer.Option("--body", help="Show the body as well; what may be secret in it is masked.")
    ] = False,
    reveal: Annotated[
        bool, typer.Option("--reveal", help="With --body: nothing is masked, which is recorded in the audit.")
    ] = False,
    app: CodecsOption = None,
    actor: ActorOption = None,
    form: OutputOption = Output.TABLE,
) -> None:
    """Show all that is known of one message: half, checks, decision, queue, inboxes, and what operators did.

    A check has the answer of the checker or the fence: commit, rollback, or unknown with its error. In its place there
    may be "being asked", or "no answer": the worker that asked died over it, or was cut off.

    \b
    In the inbox of a group a message is one of:
      consumed, failed (will be retried), parked (waits for an operator), quarantined;
      unconsumed  the group hasn't come so far
      left_out    the group has, but has no inbox row: its filter left the message out, or the row was pruned
    \b
    Example:
      outbox messages show 01997a4e-6d0f-7c52-8c1e-9f2f5f0f3f11 --body
    """
    message_id, shown, by = as_id(id_), None, _revealing(actor, body=body, reveal=reveal)
    consumer = find_url(consumer_url) if consumer_url else None
    with databases.opened(partly=True, codecs=processes.declared_by(app).codecs, consumer=consumer) as operator:
        if "consumer" in operator.databases and consumer and "consumer" not in operator.databases["consumer"].parts:
            raise Failure("--consumer-url: the consumer's tables are not in this database", Code.CONFIG)
        view = operator.message(message_id, reveal=by)
        if body and view.body is not None:
            raw = operator.body(message_id) if by else None
            shown = output.readable(*raw, operator.codecs) if raw else _masked(view.body)
        document = {name: value for name, value in dataclasses.asdict(view).items() if name != "body"}
        output.print_as(form, document | {"body": shown} if body else document, *_tables_of(view, shown))


def _revealing(actor: str | None, *, body: bool, reveal: bool) -> Actor | None:
    """Return the actor to reveal a body to; None if it is masked."""
    if reveal and not body:
        raise Failure("--reveal goes with --body")
    return cli_actor(actor) if reveal else None


def _masked(body: Body) -> Any:
    """Return a body as it may be shown: read, where all that is shown of it is JSON."""
    try:
        return MASK if body.text is None else json.loads(body.text)
    except ValueError:  # it is cut
        return body.text


def fates_text(found: list[model.FateSince]) -> str:
    """Return what became of a message since an act, in each group, in words."""
    return "; ".join(
        f"{f'{fate.group}: ' if fate.group else ''}{fate.status}{f' ({fate.error})' if fate.error else ''}"
        for fate in found
    )


def _tables_of(view: model.MessageView, body: Any) -> Iterator[Any]:
    """Yield the message, its checks, what happened to it in order of time, and its state in each group."""
    half = {name: value for name, value in (view.half or {}).items() if name != "id"}
    facts = {"id": view.id, "next": view.next, "copy_of": view.copy_of, "copies": view.copies, **half}
    if check := view.check:
        facts |= {"fenced": check["fenced"], "checks": check["check_times"], "parked_at": check["parked_at"]}
        facts |= {"reason": check["reason"]} if check["parked_at"] else {"next_check_at": check["next_check_at"]}
    if view.raised:
        facts |= {"raised_at": view.raised["raised_at"], "raised": output.first_line(view.raised["error"])}
    yield output.facts_table("message", facts | {"body": output.cell(body)})
    if view.history:
        yield output.rows_table(
            "when=asked_at asked answer seconds> error worker",
            view.history,
            "Checks",
            answer=lambda entry: entry["answer"] or f"({entry['state'].replace('_', ' ')})",
            seconds=lambda entry: "" if entry["seconds"] is None else f"{entry['seconds']:.3f}",
            error=lambda entry: output.first_line(entry["error"]),
        )
    if view.outcomes:
        yield output.rows_table(
            "when=acted_at act=action by=actor since_then",
            view.outcomes,
            "Outcome",
            since_then=lambda each: fates_text(each.fates),
        )
    if view.attempts:
        yield output.rows_table(
            "when=failed_at group attempt> status seconds> error worker",
            view.attempts,
            "Failed attempts",
            seconds=lambda each: "" if each.seconds is None else f"{each.seconds:.3f}",
            error=lambda each: output.first_line(each.error),
        )
    if view.deliveries:
        yield output.rows_table("when=recorded_at group status reason", view.deliveries, "Deliveries")
    events = "when=at what=title detail by=actor database"
    yield output.rows_table(
        events, view.timeline, "What happened", detail=lambda event: output.first_line(event.detail)
    )
    if view.inbox:
        yield output.rows_table(
            "group status attempts> next_attempt=next_attempt_at position last_error",
            view.inbox,
            "Inboxes",
            position=lambda row: "" if row.position is None else f"queue {row.queue}, position {row.position}",
            last_error=lambda row: output.first_line(row.last_error),
        )


@gathered
def show_conversation(
    id_: Annotated[str, typer.Argument(metavar="ID", help="The id of one of its messages.")],
    databases: DatabasesOptions,
    form: OutputOption = Output.TABLE,
) -> None:
    """Show the chain of messages that one belongs to: what a handler sent stands below the message that it handled.

    \b
    Example:
      outbox messages conversation 01997a4e-6d0f-7c52-8c1e-9f2f5f0f3f11
    """
    with databases.opened(partly=True) as operator:
        found = operator.conversation(as_id(id_))
        output.print_as(form, dataclasses.asdict(found), *_tables_of_conversation(found))


def _tables_of_conversation(found: model.Conversation) -> Iterator[Any]:
    tree = list(_tree(found.messages))
    yield output.rows_table(
        "message topic key sender status receipts when=born_at",
        tree,
        f"Conversation {found.id}",
        message=lambda each: f"{'  ' * each.depth}{each.id}",
        status=lambda each: f"compensated by {each.compensated_by}" if each.compensated_by else each.status,
        receipts=lambda each: ", ".join(f"{receipt.group}: {receipt.status}" for receipt in each.receipts),
    )
    if not found.complete:
        yield output.facts_table("There are more messages than are shown", {"shown": len(tree)})
    if found.unseen:
        yield output.facts_table("Not reached", {"databases": ", ".join(found.unseen)})


def _tree(messages: list[model.ConversationMessage]) -> Iterator[model.ConversationMessage]:
    """Yield each message before its effects, and these before the next one."""
    known = {each.id for each in messages}
    roots = [each for each in messages if each.depth == 0]
    effects = {cause: [each for each in messages if each.depth and each.cause == cause] for cause in known}
    waiting = roots[::-1]
    while waiting:
        message = waiting.pop()
        yield message
        waiting += effects[message.id][::-1]


# --- messages --------------------------------------------------------------------------------------------------------

_MESSAGES = CommandGroup(
    "messages",
    "messages",
    "Find messages, show one with all that happened to it; resend, recall or compensate.\n\n"
    "What is done is recorded in the audit, with the operator's name and reason.",
    """List messages, the newest first.

    They are those of the producers' databases. A search goes through many messages at a time and says where to go on;
    undecided, scheduled and recalled messages are found however many others there are.

    \b
    Statuses:
      undecided    prepared; neither committed nor rolled back yet
      rolled_back  will never be delivered
      committed    to be dispatched
      dispatched   in its queue
      scheduled    to be delivered later
      recalled     taken back before it was due
    \b
    Examples:
      outbox messages list --topic orders --since 1h
      outbox messages list --where order.id=42
      outbox messages list --status undecided -o json
      outbox messages list --status unconsumed --group mailer
    """,
    model.MessageFilter,
    RowShape(model.MessageRow),
    "messages",
    "producer",
    noun="message",
)
_SCHEDULED = CommandGroup(
    "messages",
    "scheduled messages",
    "",
    """List scheduled messages, the next due first; with --recalled those that were recalled, the newest first.

    \b
    Example:
      outbox messages scheduled --topic reminders
    """,
    model.ScheduledFilter,
    RowShape(
        model.ScheduledRow,
        {"deliver_at": lambda row: "(held: its topic is paused)" if row.held else row.deliver_at},
    ),
    "scheduled",
    "producer",
)

messages_app: typer.Typer = commands_of(_MESSAGES)
messages_app.command("show")(show_message)
messages_app.command("conversation")(show_conversation)
groups.add_list(messages_app, _SCHEDULED, "scheduled")

#: What an export with bodies has besides; ``body_base64`` only for bytes that are no text, and are revealed.
_BODY = ("content_type", "size", "headers", "body", "body_base64", "masked", "truncated")


@command(messages_app, "export", choice=_MESSAGES.options())
def export_messages(
    databases: DatabasesOptions,
    choice: Any,
    limit: options.UpToOption = None,
    body: Annotated[
        bool, typer.Option("--body", help="With headers and bodies; what may be secret in them is masked.")
    ] = False,
    reveal: Annotated[
        bool, typer.Option("--reveal", help="With --body: nothing is masked. Each message is recorded in the audit.")
    ] = False,
    app: CodecsOption = None,
    actor: ActorOption = None,
    form: ExportFormOption = ExportForm.NDJSON,
) -> None:
    """Export messages, the newest first.

    \b
    Examples:
      outbox messages export --topic orders --since 1d > orders.ndjson
      outbox messages export --status dispatched --header tenant=acme --body -o csv > acme.csv
    """
    by = _revealing(actor, body=body, reveal=reveal)
    with databases.opened(codecs=processes.declared_by(app).codecs) as operator:
        found = all_rows(operator, databases, _MESSAGES, choice, limit)
        rows = (dataclasses.asdict(row) | (_contents(operator, row.id, by) if body else {}) for row in found)
        names = [*_MESSAGES.shape.names, *(_BODY if body else ())]
        say(f"{output.print_stream(rows, names, form)} messages")


def _contents(operator: Operator, message_id: UUID, by: Actor | None) -> dict[str, Any]:
    try:
        view = operator.message(message_id, reveal=by)
    except NotFound:
        view = None  # pruned since it was listed
    if view is None or (body := view.body) is None:
        return dict.fromkeys(_BODY)
    raw = operator.body(message_id)[1] if by and (body.text is None or body.truncated) else None
    return {
        "content_type": body.content_type,
        "size": body.size,
        "headers": view.half and view.half["headers"],
        "body": body.text if raw is None else None,
        "body_base64": None if raw is None else base64.b64encode(raw).decode(),
        "masked": list(body.masked),
        "truncated": body.truncated and raw is None,
    }


@dataclass(frozen=True, slots=True)
class EditOptions(DatabasesOptions):
    """Where a message is edited, and the application that knows what its body may be."""

    app: str | None = option(None, "Your Outbox, whose codecs read the bodies.", metavar="MODULE:OBJECT")


def _with_codecs(where: EditOptions) -> AbstractContextManager[Operator]:
    declared = processes.declared_by(where.app)
    return where.opened(codecs=declared.codecs, topics=declared.topics)


add_acts(messages_app, "messages", EditOptions, _with_codecs)


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


def _inbox(name: str, help_: str, listing: str, **more: Any) -> CommandGroup[model.InboxRow]:
    shape = RowShape(
        model.InboxRow,
        {"status": lambda row: "discarded" if row.discarded_at else row.status},
        lambda row: f"{row.group}/{row.message_id}",
    )
    return CommandGroup(
        name, "rows", help_, listing, model.InboxFilter, shape, "inbox", "consumer", noun="inbox", **more
    )


inbox_app: typer.Typer = commands_of(
    _inbox(
        "inbox",
        "See what groups have handled, failed at or parked; have it tried again, or park it.\n\n"
        "A message in an inbox is written GROUP/ID.",
        """List messages in inboxes, the newest id first.

    \b
    Statuses:
      consumed     handled
      failed       will be retried, at its next attempt
      waiting      an earlier message of its key is to be settled first (see waits_for)
      taken        a client has it until its next attempt, or settles it before
      parked       a dead letter: waits for an operator (see `outbox dead`)
      quarantined  kept out of the group for ever: its local transaction was compensated
    \b
    Examples:
      outbox inbox list --group mail --status failed
      outbox inbox list --status failed --error timeout -o id | outbox inbox retry - --reason "it is back" --yes
    """,
        hidden=frozenset({"discarded"}),
        states=frozenset({*Status, "unconsumed"} - {Status.PARKED}),
    )
)
dead_app: typer.Typer = commands_of(
    _inbox(
        "dead",
        "See dead letters by their kind of error; retry, discard or restore them.\n\n"
        "A dead letter is a message that a group has parked: over its attempts, or set aside. It is written GROUP/ID.",
        """List dead letters, the newest id first; with --discarded those that were discarded, instead.

    \b
    Examples:
      outbox dead list --group mail --topic orders
      outbox dead list --discarded --since 3d -o csv > discarded.csv
    """,
        preset={"status": ("parked",), "discarded": False},
        hidden=frozenset({"status"}),
        states=frozenset({"parked", "discarded"}),
    )
)


@command(dead_app, "groups")
def show_dead_groups(
    databases: DatabasesOptions,
    group: Annotated[str | None, typer.Option(metavar="NAME", help="Only this group.")] = None,
    topic: Annotated[str | None, typer.Option(help="Only this topic.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many.")] = 50,
    form: output.ListFormOption = ListForm.TABLE,
) -> None:
    """Show dead letters by group, topic and kind of error, the most first.

    Those with one fingerprint died of one cause: retry one of them, then all.

    \b
    Example:
      outbox dead groups --topic orders
    """
    chosen: Any = {"database": databases.only, "group": group, "topic": topic, "limit": limit}
    databases.show(lambda operator: operator.dead_groups(**chosen), _DEAD_GROUPS, form)


_DEAD_GROUPS = RowShape(
    model.DeadGroup,
    {
        "count": lambda row: at_least(row.count),
        "day": lambda row: str(sum(row.trend)),
        "last_error": lambda row: row.sample.last_error,
    },
    attrgetter("fingerprint"),
)
