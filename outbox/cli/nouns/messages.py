"""Messages: one with all that is known of it, its conversation, the lists, the export, a copy with another body."""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any
from uuid import UUID

import typer

from outbox.acts.changes import Actor
from outbox.cli import groups, options, output, processes
from outbox.cli.database import DatabasesOptions, find_url
from outbox.cli.exits import Code, Failure
from outbox.cli.groups import CommandGroup, all_rows, commands_of
from outbox.cli.options import ActorOption, CodecsOption, as_id, cli_actor, command, gathered
from outbox.cli.output import ExportForm, ExportFormOption, Output, OutputOption, RowShape, say
from outbox.cli.whole_acts import add_acts
from outbox.errors import NotFound
from outbox.message.masking import Body
from outbox.operator import model
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
    RowShape(model.MessageRow, "id topic key tag status born_at deliver_at decided_by"),
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
        "id topic key deliver_at recalled_at recalled_by",
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
