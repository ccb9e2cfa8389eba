"""``outbox sagas``: the flows of sagas that were started, and the commands that each has sent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from outbox.cli.database import DatabaseOptions, opened
from outbox.cli.exits import Code, Failure
from outbox.cli.options import as_id, command
from outbox.cli.output import Output, OutputOption, facts_table, first_line, print_as, table
from outbox.flow.saga import SagaStatus, read_flows

if TYPE_CHECKING:
    from outbox.flow.saga import Flow, SagaCommand

sagas_app: typer.Typer = typer.Typer(
    name="sagas",
    help="Sagas: changes over several services, that are done everywhere or undone.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@command(sagas_app, "list")
def show_sagas(
    database: DatabaseOptions,
    saga: Annotated[str | None, typer.Option(metavar="NAME", help="Of this saga only.")] = None,
    status: Annotated[SagaStatus | None, typer.Option(help="In this status only.")] = None,
    is_open: Annotated[bool, typer.Option("--open", help="Only those that haven't ended.")] = False,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="So many at most, the newest first.")] = 50,
    output: OutputOption = Output.TABLE,
) -> None:
    """List the flows of sagas, the newest first.

    \b
    Example:
      outbox sagas list --open
    """
    settings = database.settings
    with opened(database.address, settings) as (connection, parts):
        flows = (
            read_flows(connection, settings.schema, name=saga, status=status, is_open=is_open, limit=limit)
            if "producer" in parts
            else []
        )
    columns = ("saga", "id", "status", "step", "started", "ended", "reason")
    rows = [
        (each.name, each.id, each.status.value, _last(each), each.started_at, each.ended_at, first_line(each.reason))
        for each in flows
    ]
    print_as(output, {"sagas": [_document(each) for each in flows]}, table(columns, rows))


@command(sagas_app, "show")
def show_saga(
    id_: Annotated[str, typer.Argument(metavar="ID", help="The id of the flow: that of the message that started it.")],
    database: DatabaseOptions,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show a flow and the commands that it has sent; each is a message, which outbox messages show tells more of."""
    settings, flow_id = database.settings, as_id(id_)
    with opened(database.address, settings) as (connection, parts):
        flows = read_flows(connection, settings.schema, flow_id=flow_id) if "producer" in parts else []
    if not flows:
        raise Failure(f"no saga {flow_id} was started in {database}, as far as its workers have come", Code.NOT_FOUND)
    (flow,) = flows
    document = _document(flow)
    facts = {name: value for name, value in document.items() if name != "commands"}
    columns = ("step", "command", "message", "sent", "overdue", "answered", "answer", "reason")
    rows = [
        (
            *(each.step, each.kind.value, each.message_id, each.sent_at, each.overdue_at, each.answered_at),
            *(each.answer and each.answer.value, first_line(each.reason)),
        )
        for each in flow.commands
    ]
    print_as(output, document, facts_table("Saga", facts), table(columns, rows, "Commands"))


def _last(flow: Flow[Any]) -> str | None:
    return flow.commands[-1].step if flow.commands else None


def _document(flow: Flow[Any]) -> dict[str, Any]:
    return {
        "saga": flow.name,
        "id": flow.id,
        "status": flow.status.value,
        "reason": flow.reason,
        "started_at": flow.started_at,
        "ended_at": flow.ended_at,
        "commands": [_command(each) for each in flow.commands],
    }


def _command(sent: SagaCommand) -> dict[str, Any]:
    return {
        "step": sent.step,
        "command": sent.kind.value,
        "message_id": sent.message_id,
        "sent_at": sent.sent_at,
        "overdue_at": sent.overdue_at,
        "answered_at": sent.answered_at,
        "answer": sent.answer and sent.answer.value,
        "reason": sent.reason,
    }
