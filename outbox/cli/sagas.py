"""``outbox sagas``: the flows of sagas that were started, the commands that each has sent, and answers to these."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outbox.cli.database import DatabasesOptions
from outbox.cli.groups import CommandGroup, add_list
from outbox.cli.options import as_id, command
from outbox.cli.output import Output, OutputOption, RowShape, facts_table, first_line, print_as, rows_table
from outbox.cli.whole_acts import add_acts
from outbox.flow.views import FlowFilter, FlowRow, Sagas

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


@contextmanager
def _sagas(databases: DatabasesOptions) -> Iterator[Sagas]:
    with databases.opened() as operator:
        yield Sagas(operator.databases)


add_acts(sagas_app, "sagas", part=_sagas)
