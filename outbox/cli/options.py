"""Dataclasses as options of commands: those that commands share, and those made from the fields of a filter.

Times of options may be durations: they count from the database's now, which stays the same on the pages that follow.
"""

from __future__ import annotations

import datetime as dt
import functools
import getpass
import inspect
import os
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, is_dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypeVar, get_origin, get_type_hints
from uuid import UUID

import typer
from sqlalchemy import URL

from outbox.acts.changes import Actor
from outbox.cli.output import FORM_HELP, LIST_FORM_HELP, Code, Failure, ListForm, Output
from outbox.database.dialect import parsed_url
from outbox.reader import DURATION, FieldShape, Reader, Seconds, option, seconds_of, shape_of, variable
from outbox.settings import Settings
from outbox.text import duration

if TYPE_CHECKING:
    from outbox.acts.changes import Declaration

#: The parameters of options, by the field of a dataclass.
OptionGroup: TypeAlias = Mapping[str, inspect.Parameter]
Command = TypeVar("Command", bound=Callable[..., None])

YesOption = Annotated[bool, typer.Option("--yes", help="Don't ask.")]
LimitOption = Annotated[int, typer.Option(min=1, max=10_000, help="How many.")]
UpToOption = Annotated[int | None, typer.Option(min=1, metavar="N", help="Not more than so many. Default: all.")]
ACTOR_HELP = "The actor, in the audit. Default: your user@host."
ActorOption = Annotated[str | None, typer.Option("--actor", metavar="NAME", help=ACTOR_HELP)]
AppOption = Annotated[
    str | None,
    typer.Option(envvar="OUTBOX_APP", metavar="MODULE:OBJECT", help="Your Outbox, such as shop.messages:outbox."),
]
CodecsOption = Annotated[
    # Not from the environment: what only looks must work where the application can't be imported.
    str | None,
    typer.Option("--app", metavar="MODULE:OBJECT", help="Your Outbox, whose codecs read the bodies."),
]

URL_VARIABLE = "OUTBOX_DATABASE_URL"
URL_EXAMPLE = "postgresql+psycopg://user:***@host:5432/database"

_METAVARS = {UUID: "ID", dt.datetime: "TIME", Seconds: "DURATION", int: "N", tuple[str, str]: "NAME=TEXT"}
_TIMES = {"since": "Not older.", "until": "Older."}


# --- dataclasses as options ------------------------------------------------------------------------------------------


def gathered(command: Callable[..., None], **groups: OptionGroup) -> Callable[..., None]:
    """Return a command for Typer whose parameters that are dataclasses have one option for each field.

    Parameters of ``groups`` take the texts that were typed, by field, to read them later (`read_options`).
    """
    hints = get_type_hints(command, include_extras=True)
    kinds: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    groups |= {name: options_of(kind) for name, kind in kinds.items()}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name in groups:
            parameters += groups[name].values()
        else:
            parameters.append(parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(command)
    def run(**values: Any) -> None:
        for name, options in groups.items():
            typed = {field: values.pop(parameter.name) for field, parameter in options.items()}
            texts = {field: value for field, value in typed.items() if value not in (None, False, [])}
            values[name] = kinds[name](**read_options(kinds[name], texts)) if name in kinds else texts
        command(**values)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what typer reads
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def command(app: typer.Typer, name: str | None = None, **groups: OptionGroup) -> Callable[[Command], Command]:
    """Return a decorator that adds a command to a group, with options as `gathered` has them."""

    def decorate(function: Command) -> Command:
        app.command(name)(gathered(function, **groups))
        return function

    return decorate


@dataclass(frozen=True, slots=True)
class PageOptions:
    """How much of a list, and in which form."""

    limit: int = option(50, "How many.", least=1, most=10_000)
    after: str | None = option(None, "Go on after this, which the end of a list names.", metavar="TOKEN")
    output: ListForm = option(ListForm.TABLE, LIST_FORM_HELP)


@dataclass(frozen=True, slots=True)
class DecidedOptions:
    """The actor and the reason of an act, and whether the operator is asked once more."""

    reason: str = option("", "Why; recorded in the audit.")
    actor: str | None = option(None, ACTOR_HELP, metavar="NAME")
    yes: bool = option(False, "Don't ask.")
    output: Output = option(Output.TABLE, FORM_HELP)

    @property
    def in_json(self) -> bool:
        """Is stdout to be read by a program?"""
        return self.output is Output.JSON

    @property
    def by(self) -> Actor:
        """Return the actor, for the audit."""
        return cli_actor(self.actor)


@dataclass(frozen=True, slots=True)
class ActorOptions(DecidedOptions):
    """The actor and the reason of an act, and how sure the operator is."""

    dry_run: bool = option(False, "Only show what would be done: how many, which not and why, a sample.")


@dataclass(frozen=True, slots=True)
class ActOptions(ActorOptions):
    """How many messages, how fast, and whether to wait for them."""

    everything: bool = option(False, "All there are, where no other option narrows it down.", aliases=("all",))
    limit: int | None = option(None, "Only the first N of those that are picked; 1 to try it out.", least=1, most=1000)
    rate: float | None = option(None, "At most so many a second. Default: as fast as can be.", above=0, metavar="N")
    no_wait: bool = option(False, "Leave it to workers, and don't wait; print the id of the bulk job.")


# --- the fields of a dataclass as options ----------------------------------------------------------------------------


def options_of(kind: type, *hidden: str) -> OptionGroup:
    """Return the options of a dataclass, by field, without those ``hidden``."""
    prefix, options = kind.__name__.lower(), {}
    for shape in shape_of(kind):
        if shape.name not in hidden:
            annotation, default = _option_of(shape, _option(shape))
            # A filter's ``body`` isn't the ``body`` of a command.
            options[shape.name] = inspect.Parameter(
                f"{prefix}_{shape.name}", inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
            )
    return options


def _option_of(shape: FieldShape, name: str) -> tuple[Any, Any]:
    """Return the annotation and the default of the option of a field; of most types it is a text, read later."""
    text, is_mapping = shape.option.help, get_origin(shape.hint) is Mapping
    if shape.option.file:
        return Annotated[typer.FileText | None, typer.Option(name, metavar="FILE", help=f"{text} - reads stdin.")], None
    many = shape.many or is_mapping
    if shape.item is bool:
        if shape.default is True:
            name, text = f"--no-{shape.name}", f"Don't {text[:1].lower()}{text[1:]}"
        return Annotated[bool, typer.Option(name, help=text)], False
    names = (name, "-o") if shape.name == "output" else (name,)
    if shape.item is dt.datetime:
        # The times of a filter may count back from now (`read_filter`); when an act begins is a moment.
        ago = "90s, 15m, 2h, 3d, or " if shape.name in _TIMES else ""
        text = f"{text or _TIMES.get(shape.name, '')} As {ago}2026-01-31T12:00:00+00:00."
    if shape.choices and not is_mapping:
        text += f" One of: {', '.join(shape.choices)}."
    if many and "given again" not in text:
        text += " May be given again."
    if shape.default not in (None, MISSING, (), "") and not is_mapping:
        text += f" Default: {duration(shape.default) if shape.item is Seconds else shape.default}."
    made = typer.Option(*names, help=text, metavar=shape.option.metavar or _METAVARS.get(shape.item, "TEXT"))
    return Annotated[list[str] | None if many else str | None, made], None


def _option(shape: FieldShape) -> str:
    """Return the option of a field: its first alias, or its name; of a list, the singular."""
    name = (*shape.option.aliases, shape.name)[0].replace("_", "-")
    return f"--{name.removesuffix('s') if shape.many and not name.endswith('ss') and name != 'status' else name}"


def read_options(kind: type, texts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a dataclass's fields that its options give; other objects are values already."""
    shapes = {shape.name: shape for shape in shape_of(kind)}
    # The option of a field that is true by default says that it is false: --no-record.
    values = {name: not text if shapes[name].default is True else text for name, text in texts.items()}
    return _READER.values(kind, values, called=lambda name: _option(shapes[name]) if name in shapes else name)


def read_filter(
    kind: type, texts: Mapping[str, Any], now: Callable[[], dt.datetime]
) -> tuple[dict[str, Any], dt.datetime | None]:
    """Return the values of a filter's options, and the now from which durations among them count back, if any do."""
    times = {
        shape.name: _as_time(texts[shape.name], _option(shape))
        for shape in shape_of(kind)
        if shape.item is dt.datetime and shape.name in texts
    }
    moment = now() if any(isinstance(time, dt.timedelta) for time in times.values()) else None
    ends = {name: moment - time if moment and isinstance(time, dt.timedelta) else time for name, time in times.items()}
    return read_options(kind, {**texts, **ends}), moment


def _as_time(text: str, name: str) -> dt.datetime | dt.timedelta:
    """Return the time that a text is, or how long before now."""
    try:
        if DURATION.fullmatch(text):
            return dt.timedelta(seconds=seconds_of(text))
        moment = dt.datetime.fromisoformat(text)
    except (ValueError, OverflowError):
        raise Failure(
            f"{name} {text!r} must be a duration (90s, 15m, 2h, 3d) or a time (2026-01-31T12:00:00+00:00)"
        ) from None
    if moment.tzinfo is None:
        raise Failure(f"{name} {text!r} has no time zone; write {text}+00:00 for UTC")
    return moment


_READER = Reader(form="text", error=lambda message, _: Failure(message))


def as_id(text: str, name: str = "ID") -> UUID:
    """Return the id that a text is; ``name`` is its name in the error where it is none."""
    try:
        return UUID(text)
    except ValueError:
        raise Failure(f"{name} {text!r} is not a message id (a UUID)") from None


# --- the operator at the terminal ------------------------------------------------------------------------------------


def need_terminal(refusal: str, *, yes: bool) -> None:
    """Refuse to go on without a terminal to ask at, unless ``yes`` was given; ``refusal`` says what isn't done."""
    if not yes and not sys.stdin.isatty():
        raise Failure(f"{refusal}: there is no terminal to ask at; give --yes if you are sure")


def confirm(question: str, refusal: str, *, yes: bool, typed: str = "") -> None:
    """Ask the operator at the terminal, unless ``yes`` was given; ``refusal`` says what isn't done after a no.

    ``typed`` is what has to be typed instead of a yes, before what can't be taken back.
    """
    need_terminal(refusal, yes=yes)
    if not yes and not ask(question, typed):
        raise Failure(refusal)


def ask(question: str, typed: str = "") -> bool:
    """Ask the operator at the terminal, for a yes or for ``typed``."""
    # Not by typer.confirm, which lets a blank slip to stdout.
    print(f"{question} [{f'type {typed}' if typed else 'y/N'}] ", end="", file=sys.stderr, flush=True)  # noqa: T201 - a question is no line
    answer = sys.stdin.readline().strip()
    return answer == typed if typed else answer.lower() in {"y", "yes"}


def cli_actor(actor: str | None) -> Actor:
    """Return the actor, for the audit: the name of ``--actor``, else ``user@host``."""
    if actor is not None and not actor.strip():
        raise Failure("--actor is empty: the audit must name the operator")
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        # In a container, a user may have no more than a number.
        user = f"uid {os.getuid()}"
    return Actor((actor or f"{user}@{socket.gethostname()}").strip(), {"via": "cli"})


def help_of(act: Declaration, example: str) -> str:
    """Return the help of the command of an act; ``example`` is its command line, but for the reason."""
    reason = f' --reason "{act.why}"' if act.why else ""
    return f"{act.summary}.\n\n{act.details}\n\n\b\nExample:\n  outbox {example}{reason}"


# --- which database --------------------------------------------------------------------------------------------------


def find_url(text: str | None, option: str = "--url", *variables: str) -> URL:
    """Return the URL of the option, else of the first of these variables that is set; PostgreSQL by psycopg only."""
    names = variables or (URL_VARIABLE,)
    text = text or next(filter(None, map(variable, names)), None)
    if not text:
        Settings.from_env()  # names a misspelt variable
        raise Failure(f"no database: give {option} {URL_EXAMPLE}, or set {names[0]}")
    url = parsed_url(text, f"the URL {text!r}")
    backend, _, driver = url.drivername.partition("+")
    if backend not in {"postgresql", "postgres"}:
        raise Failure(
            f"the outbox needs PostgreSQL, not {backend!r}; the URL must look like {URL_EXAMPLE}", Code.CONFIG
        )
    if driver not in {"", "psycopg", "psycopg_async"}:
        raise Failure(f"the outbox needs the driver psycopg (3), not {driver!r}; write {URL_EXAMPLE}", Code.CONFIG)
    return url.set(drivername="postgresql+psycopg")
