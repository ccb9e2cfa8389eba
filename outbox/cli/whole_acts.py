"""The commands of acts on what isn't a message: made of the rows of `outbox.operator.whole_acts`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, asdict, fields
from typing import Annotated, Any

import typer
from rich.table import Table

from outbox.cli import options
from outbox.cli.database import DatabasesOptions
from outbox.cli.exits import Failure
from outbox.cli.options import ActorOptions, DecidedOptions, OptionGroup, gathered, help_of, read_options
from outbox.cli.output import facts_table, print_as, rows_table, say
from outbox.operator.whole_acts import WHOLE_ACTS, WholeAct, facts_of, form_of
from outbox.reader import shape_of


def add_acts(app: typer.Typer, noun: str) -> None:
    """Add a command for each act on what a group of commands is about."""
    for act in WHOLE_ACTS.values():
        if act.noun == noun:
            app.command(act.word, help=help_of(act, f"{noun} {act.word} {act.example}"))(_command_of(act))


def _command_of(act: WholeAct) -> Callable[..., None]:
    def after_preview(*, choice: Any, acting: ActorOptions, databases: DatabasesOptions) -> None:
        values = _values(act, choice, databases)
        refusal = f"{act.named(values)} was left as it is"
        if not acting.dry_run:
            options.need_terminal(refusal, yes=acting.yes)
            _need_reason(act, acting)
        with databases.opened() as operator:
            preview = act.look(operator, act.preview, values)
            print_as(acting.output, preview, *_tables(act, values, preview))
            if not acting.dry_run:
                _ask(act, values, refusal, acting)
                say(act.perform(operator, act.with_databases(values, preview), by=acting.by, why=acting.reason))

    def at_once(*, choice: Any, acting: DecidedOptions, databases: DatabasesOptions) -> None:
        values = _values(act, choice, databases)
        _need_reason(act, acting)
        with databases.opened() as operator:
            if act.asks:
                _ask(act, values, f"nothing was done ({act.name})", acting)
            say(act.perform(operator, values, by=acting.by, why=acting.reason))

    return gathered(after_preview if act.preview else at_once, choice=_options_of(act))


def _need_reason(act: WholeAct, acting: DecidedOptions) -> None:
    if act.needs_reason and not acting.reason.strip():
        raise Failure(f"give --reason: the audit must tell why ({act.name})")


def _ask(act: WholeAct, values: dict[str, Any], refusal: str, acting: DecidedOptions) -> None:
    question = f"{act.consequence} {act.button} {act.named(values)}?"
    options.confirm(question, refusal, yes=acting.yes, typed=act.to_type(values))


def _options_of(act: WholeAct) -> OptionGroup:
    """Return the parameters of the command: the first part of the target and some fields as arguments."""
    found = dict(options.options_of(form_of(act), "database"))
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


def _values(act: WholeAct, choice: dict[str, Any], databases: DatabasesOptions) -> dict[str, Any]:
    form, values = form_of(act), read_options(form_of(act), choice)
    for shape in shape_of(form):
        if shape.default is MISSING and shape.name not in values:
            raise Failure(f"give --{shape.name}: {shape.option.help}")
    values = asdict(form(**values))
    return values | {"database": databases.only} if "database" in values else values


def _tables(act: WholeAct, values: dict[str, Any], preview: Any) -> list[Table]:
    facts, rows = facts_of(preview)
    title = f"{act.noun.capitalize()} {values[act.names[0]]}"
    found = [facts_table(title, facts)]
    for name, each in rows.items():
        columns = " ".join(f"{column.name}>" for column in fields(each[0]))
        found.append(rows_table(columns, each, name.capitalize()))
    return found
