"""``outbox sagas``: the flows of sagas that were started, the commands that each has sent, and answers to these."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outbox.cli.database import DatabasesOptions
from outbox.cli.groups import EXAMPLE_ID, CommandGroup, add_list
from outbox.cli.options import ActorOption, YesOption, as_id, cli_actor, command, confirm, gathered, help_of
from outbox.cli.output import Output, OutputOption, RowShape, facts_table, first_line, print_as, rows_table, say
from outbox.flow.saga import CommandAnswer
from outbox.flow.views import FlowFilter, FlowRow, Sagas
from outbox.operator.acts import ANSWER

if TYPE_CHECKING:
    from outbox.operator.model import Page, PageRequest
    from outbox.operator.operator import Operator

sagas_app: typer.Typer = typer.Typer(
    name="sagas",
    help="Sagas: changes over several services, that are done everywhere or undone.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@dataclass(frozen=True, slots=True)
class _FlowCommands(CommandGroup[FlowRow]):
    """The commands on flows, which are read by `Sagas`."""

    def pages(self, operator: Operator, criteria: Any) -> Callable[[PageRequest], Page[FlowRow]]:
        """Return what fetches a page of a filter."""
        return partial(Sagas(operator.databases).flows, criteria)


add_list(
    sagas_app,
    _FlowCommands(
        "sagas",
        "flows",
        "",
        """List the flows of sagas, the newest first.

    \b
    Examples:
      outbox sagas list --open
      outbox sagas list --saga trip --overdue
    """,
        FlowFilter,
        RowShape(
            FlowRow,
            "saga id status step command overdue=overdue_at started=started_at ended=ended_at reason",
            {"reason": lambda row: first_line(row.reason)},
        ),
        "flows",
        "producer",
    ),
)


@command(sagas_app, "show")
def show_saga(
    id_: Annotated[str, typer.Argument(metavar="ID", help="The id of the flow: that of the message that started it.")],
    databases: DatabasesOptions,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show a flow and the commands that it has sent; each is a message, which outbox messages show tells more of."""
    with databases.opened(partly=True) as operator:
        view = Sagas(operator.databases).flow(as_id(id_, "flow"))
        facts = {name: getattr(view.flow, name) for name in RowShape(FlowRow, "").names}
        columns = (
            "step command=kind message=message_id sent=sent_at deadline=deadline_at overdue=overdue_at "
            "answered=answered_at answer reason"
        )
        shown = rows_table(columns, view.commands, "Commands", reason=lambda each: first_line(each.reason))
        print_as(output, view, facts_table("Saga", facts), shown)


@gathered
def answer_command(
    id_: Annotated[str, typer.Argument(metavar="ID", help="The id of the command's message, as of outbox sagas show.")],
    answer: Annotated[CommandAnswer, typer.Argument(help="What the participant did.")],
    databases: DatabasesOptions,
    result: Annotated[
        str | None, typer.Option(metavar="JSON", help="The participant's reply, where later steps need that.")
    ] = None,
    reason: Annotated[str, typer.Option(help="Why; recorded in the audit.")] = "",
    actor: ActorOption = None,
    yes: YesOption = False,
) -> None:
    """Answer a command."""
    message_id, by = as_id(id_), cli_actor(actor)
    with databases.opened() as operator:
        confirm(f"{ANSWER.consequence} Go on?", f"nothing was done ({ANSWER.name})", yes=yes)
        say(Sagas(operator.databases).answer(message_id, answer, by=by, why=reason, result=result))


sagas_app.command(ANSWER.name, help=help_of(ANSWER, f"sagas answer {EXAMPLE_ID} done"))(answer_command)
