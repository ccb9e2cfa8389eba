"""The commands of acts that ask for more than a yes: made of the rows of `outbox.acts.whole_acts`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import MISSING, asdict, fields
from typing import Annotated, Any

import typer
from rich.table import Table

from outbox.acts.whole_acts import PINNED, WHOLE_ACTS, WholeAct, facts_of, form_of
from outbox.cli import options
from outbox.cli.database import DatabasesOptions
from outbox.cli.exits import Failure
from outbox.cli.options import ActorOptions, DecidedOptions, OptionGroup, gathered, help_of, read_options
from outbox.cli.output import facts_table, print_as, rows_table, say
from outbox.reader import shape_of

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
            if not acting.dry_run:
                _ask(act, values, refusal, acting)
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


def _ask(act: WholeAct, values: dict[str, Any], refusal: str, acting: DecidedOptions) -> None:
    question = f"{act.consequence} {act.button} {act.named(values)}?"
    options.confirm(question, refusal, yes=acting.yes, typed=act.to_type(values))


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
