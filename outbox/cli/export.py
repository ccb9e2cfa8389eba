"""``outbox messages export``: all that fit, as they come."""

from __future__ import annotations

import base64
import enum
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outbox.admin.model import Actor, MessageFilter, MessageRow
from outbox.cli.arguments import ActorOption
from outbox.cli.bulk import actor_of
from outbox.cli.choosing import MessageChoice
from outbox.cli.exits import Code, Failure
from outbox.cli.lists import Shape, every, print_stream
from outbox.cli.options import Where, gathered
from outbox.cli.output import say
from outbox.cli.span import Span
from outbox.errors import MessageNotFound

if TYPE_CHECKING:
    from outbox.admin.service import Admin

#: How a list shows messages.
MESSAGES = Shape(
    MessageRow,
    ("id", "topic", "key", "tag", "status", "born", "deliver at", "decided by"),
    lambda row: (row.id, row.topic, row.key, row.tag, row.status, row.born_at, row.deliver_at, row.decided_by),
    lambda row: row.id,
)

#: What an export with bodies has beside that; ``body_base64`` only where bytes that are no text are revealed.
_BODY = ("content_type", "size", "headers", "body", "body_base64", "masked", "truncated")


class ExportForm(enum.StrEnum):
    """The form of an export."""

    NDJSON = "ndjson"
    CSV = "csv"


ExportOption = Annotated[
    ExportForm, typer.Option("--output", "-o", help="The form of the data on stdout; ndjson: a JSON object a line.")
]
UpToOption = Annotated[int | None, typer.Option(min=1, metavar="N", help="Not more than so many. Default: all.")]


@gathered
def export_messages(
    where: Where,
    choice: MessageChoice,
    limit: UpToOption = None,
    body: Annotated[
        bool, typer.Option("--body", help="With headers and bodies; what may be secret in them is masked.")
    ] = False,
    reveal: Annotated[
        bool, typer.Option("--reveal", help="With --body: nothing is masked. Each is recorded in the audit table.")
    ] = False,
    actor: ActorOption = None,
    output: ExportOption = ExportForm.NDJSON,
) -> None:
    """Export messages, the newest first.

    \b
    Examples:
      outbox messages export --topic orders --since 1d > orders.ndjson
      outbox messages export --status dispatched --header tenant=acme --body -o csv > acme.csv
    """
    if reveal and not body:
        raise Failure("--reveal goes with --body", Code.USAGE)
    by = actor_of(actor) if reveal else None
    with where.opened() as admin:
        wanted = choice.wanted(Span.of(admin, choice.since, choice.until), where.only)
        names = [*MESSAGES.names, *(_BODY if body else ())]
        told(print_stream(_rows(admin, wanted, limit, by, body=body), names, csv_=output is ExportForm.CSV), "messages")


def _rows(
    admin: Admin, wanted: MessageFilter, limit: int | None, by: Actor | None, *, body: bool
) -> Iterator[dict[str, Any]]:
    for row in every(lambda page: admin.messages(wanted, page), limit):
        fields = MESSAGES.fields(row)
        yield fields | _contents(admin, row, by) if body else fields


def _contents(admin: Admin, row: MessageRow, by: Actor | None) -> dict[str, Any]:
    try:
        view = admin.message(row.id, reveal=by)
    except MessageNotFound:
        # Pruned since it was listed.
        return dict.fromkeys(_BODY)
    if view.body is None:
        return dict.fromkeys(_BODY)
    raw = admin.body(row.id)[1] if by and (view.body.text is None or view.body.truncated) else None
    return {
        "content_type": view.body.content_type,
        "size": view.body.size,
        "headers": view.half and view.half["headers"],
        "body": None if raw is not None else view.body.text,
        "body_base64": None if raw is None else base64.b64encode(raw).decode(),
        "masked": list(view.body.masked),
        "truncated": view.body.truncated and raw is None,
    }


def told(count: int, what: str) -> None:
    """Tell how many rows were exported."""
    say(f"{count} {what}")
