"""Dataclasses as options of commands: those that commands share, and those made from the fields of a filter.

Times of options may be durations: they count from the database's now, which stays the same on the pages that follow.
"""

from __future__ import annotations

import datetime as dt
import functools
import getpass
import inspect
import os
import re
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, make_dataclass, replace
from typing import Annotated, Any, TypeVar, get_origin, get_type_hints
from uuid import UUID

import typer

from outbox.cli.exits import Code, Failure
from outbox.cli.output import FORM_HELP, LIST_FORM_HELP, ListForm, Output
from outbox.operator.model import Actor, Page, Target
from outbox.reader import FieldShape, Reader, Seconds, option, shape_of
from outbox.text import duration

T = TypeVar("T")

YesOption = Annotated[bool, typer.Option("--yes", help="Don't ask.")]
BodyOption = Annotated[bool, typer.Option("--body", help="Show the body as well.")]
LimitOption = Annotated[int, typer.Option(min=1, max=10_000, help="How many.")]
UpToOption = Annotated[int | None, typer.Option(min=1, metavar="N", help="Not more than so many. Default: all.")]
ACTOR_HELP = "Who acts; in the audit. Default: your user@host."
ActorOption = Annotated[str | None, typer.Option("--actor", metavar="NAME", help=ACTOR_HELP)]
AppOption = Annotated[
    str | None,
    typer.Option(
        "--app",
        envvar="OUTBOX_APP",
        metavar="MODULE:OBJECT",
        help="Your Outbox, such as shop.messages:outbox.",
    ),
]

_METAVARS = {UUID: "ID", dt.datetime: "TIME", Seconds: "DURATION", int: "N", tuple[str, str]: "NAME=TEXT"}
_TIMES = {"since": "Not older.", "until": "Older."}
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_MICROSECOND = dt.timedelta(microseconds=1)


# --- dataclasses as options ------------------------------------------------------------------------------------------


def gathered(command: Callable[..., None], **groups: type) -> Callable[..., None]:
    """Return a command for Typer whose parameters that are dataclasses have one option for each field.

    ``groups`` are the dataclasses of `options_of` for parameters that take what was typed, to read it later.
    """
    hints = get_type_hints(command, include_extras=True)
    parameters = inspect.signature(command).parameters
    kinds = {name: hints[name] for name in parameters if is_dataclass(hints[name])}
    classes = {name: options_of(kind) for name, kind in kinds.items()} | groups
    options: list[inspect.Parameter] = []
    for name, parameter in parameters.items():
        if name in classes:
            options += _options(classes[name])
        else:
            options.append(parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(command)
    def run(**values: Any) -> None:
        typed = {
            name: kind(**{f.name: values.pop(f.metadata["parameter"]) for f in fields(kind)})
            for name, kind in classes.items()
        }
        read = {name: kind(**read_options(kind, typed[name])) for name, kind in kinds.items()}
        command(**values, **typed | read)

    run.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    run.__annotations__ = {option.name: option.annotation for option in options}
    return run


def _options(kind: Any) -> list[inspect.Parameter]:
    hints, keyword = get_type_hints(kind, include_extras=True), inspect.Parameter.KEYWORD_ONLY
    return [
        inspect.Parameter(f.metadata["parameter"], keyword, default=f.default, annotation=hints[f.name])
        for f in fields(kind)
    ]


@dataclass(frozen=True, slots=True)
class PageOptions:
    """How much of a list, and in which form."""

    limit: int = option(50, "How many.", least=1, most=10_000)
    after: str | None = option(None, "Go on after this, which the end of a list names.", metavar="TOKEN")
    output: ListForm = option(ListForm.TABLE, LIST_FORM_HELP)


@dataclass(frozen=True, slots=True)
class ActorOptions:
    """Who acts and why, and how sure the operator is."""

    reason: str = option("", "Why; recorded in the audit.")
    actor: str | None = option(None, ACTOR_HELP, metavar="NAME")
    dry_run: bool = option(False, "Only show what would be done: how many, which not and why, a sample.")
    yes: bool = option(False, "Don't ask.")
    output: Output = option(Output.TABLE, FORM_HELP)


@dataclass(frozen=True, slots=True)
class ManyOptions:
    """How many messages, how fast, and whether to wait for them."""

    everything: bool = option(False, "All there are, where no other option narrows it down.", aliases=("all",))
    limit: int | None = option(None, "Only the first N of those that are picked; 1 to try it out.", least=1, most=1000)
    rate: float | None = option(None, "At most so many a second. Default: as fast as can be.", above=0, metavar="N")
    no_wait: bool = option(False, "Leave it to workers, and don't wait; print the id of the bulk job.")


# --- the fields of a dataclass as options ----------------------------------------------------------------------------


def options_of(kind: type, hidden: frozenset[str] = frozenset(), *, prefixed: frozenset[str] = frozenset()) -> type:
    """Return a dataclass with an option for each field of another one but those ``hidden``; see `read_options`.

    Those of ``prefixed`` fields begin with the name of the dataclass: ``--spark-ui``.
    """
    options = []
    for shape in shape_of(kind):
        if shape.name in hidden:
            continue
        name = _option(shape) if shape.name not in prefixed else f"--{kind.__name__.lower()}-{shape.name}"
        annotation, default = _option_of(shape, name)
        # A filter's ``body`` isn't the ``body`` of a command.
        more = {"parameter": f"{kind.__name__.lower()}_{shape.name}", "negates": shape.default is True}
        options.append((shape.name, annotation, field(default=default, metadata=more)))
    return make_dataclass(f"{kind.__name__}Options", options, frozen=True)


def _option_of(shape: FieldShape, name: str) -> tuple[Any, Any]:
    """Return the annotation and the default of the option of a field; of most types it is a text, read later."""
    text = shape.option.help
    if shape.item is bool:
        if shape.default is True:
            name, text = f"--no-{shape.name}", f"Don't {text[:1].lower()}{text[1:]}"
        return Annotated[bool, typer.Option(name, help=text)], False
    names = (name, "-o") if shape.name == "output" else (name,)
    if shape.item is dt.datetime:
        text = f"{text or _TIMES.get(shape.name, '')} As 90s, 15m, 2h, 3d, or 2026-01-31T12:00:00+00:00."
    if shape.choices and not _is_mapping(shape):
        text += f" One of: {', '.join(shape.choices)}."
    if _is_many(shape) and "given again" not in text:
        text += " May be given again."
    if shape.default not in (None, MISSING, (), "") and not _is_mapping(shape):
        default = duration(shape.default) if shape.item is Seconds else shape.default
        text += f" Default: {default}."
    made = typer.Option(*names, help=text, metavar=shape.option.metavar or _METAVARS.get(shape.item, "TEXT"))
    return Annotated[list[str] | None if _is_many(shape) else str | None, made], None


def _option(shape: FieldShape) -> str:
    """Return the option of a field: its first alias, or its name; of a list, the singular."""
    name = (*shape.option.aliases, shape.name)[0].replace("_", "-")
    return f"--{name.removesuffix('s') if shape.many and not name.endswith('ss') and name != 'status' else name}"


def _is_mapping(shape: FieldShape) -> bool:
    return get_origin(shape.hint) is Mapping


def _is_many(shape: FieldShape) -> bool:
    return shape.many or _is_mapping(shape)


def read_options(kind: type, options: Any, read: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the values of a dataclass's fields that its options give; those in ``read`` are read already.

    Raises:
        Failure: an option can't be read; names it, its value and the mend.
    """
    names = {shape.name: _option(shape) for shape in shape_of(kind)}
    return _READER.values(kind, options_given(options) | dict(read or {}), called=lambda name: names.get(name, name))


def read_times(kind: type, options: Any, now: Callable[[], dt.datetime]) -> dict[str, Any]:
    """Return the values of `read_options`, with the times that durations lead to from now back."""
    read = read_filter(kind, options, now)
    return dict(read.values)


@dataclass(frozen=True, slots=True)
class FilterRead:
    """The values of a filter, and the token of the page.

    A page's token is one of the very same filter, and ``15m`` ago is another time at each call. So the token that the
    next call is given brings the times along that durations have led to: those of the fields ``moving``.
    """

    values: Mapping[str, Any]
    token: str | None = None
    moving: tuple[str, ...] = ()

    def onward(self, page: Page[T]) -> Page[T]:
        """Return the page with a token that brings the times along."""
        if page.next_page_token is None or not self.moving:
            return page
        moments = [str((self.values[name] - _EPOCH) // _MICROSECOND) for name in self.moving]
        return replace(page, next_page_token=".".join([page.next_page_token, *moments]))


def read_filter(kind: type, options: Any, now: Callable[[], dt.datetime], after: str | None = None) -> FilterRead:
    """Return the values of a filter's fields of its options, as they were at the first page of the list.

    Raises:
        Failure: an option can't be read; names it, its value and the mend.
    """
    texts, ages = options_given(options), dict[str, float]()
    times: dict[str, dt.datetime | None] = {}
    for shape in shape_of(kind):
        if shape.item is dt.datetime and shape.name in texts:
            times[shape.name], seconds = as_time(texts[shape.name], _option(shape))
            if seconds is not None:
                ages[shape.name] = seconds
    values = read_options(kind, options, times)
    moving = tuple(ages)
    if not moving:
        return FilterRead(values, after)
    if after is None:
        moment = now()
        return FilterRead(values | {name: moment - dt.timedelta(seconds=ages[name]) for name in moving}, None, moving)
    token, *moments = after.split(".")
    try:
        times = {name: _EPOCH + int(text) * _MICROSECOND for name, text in zip(moving, moments, strict=True)}
    except (ValueError, OverflowError):
        raise Failure(f"--after {after!r} isn't a token of this list", Code.USAGE) from None
    return FilterRead(values | times, token, moving)


def options_given(options: Any) -> dict[str, Any]:
    """Return the options that were given, by field; ``--no-record`` is the field ``record`` that is false."""
    found = {f: value for f in fields(options) if (value := getattr(options, f.name)) not in (f.default, [])}
    return {f.name: not value if f.metadata.get("negates") else value for f, value in found.items()}


def _usage(message: str, _: str) -> Exception:
    return Failure(message, Code.USAGE)


_READER = Reader(form="text", error=_usage)


# --- values ----------------------------------------------------------------------------------------------------------


def as_id(text: str, name: str = "ID") -> UUID:
    """Return the id of a message.

    Raises:
        Failure: the text is none.
    """
    try:
        return UUID(text)
    except ValueError:
        raise Failure(f"{name} {text!r} is not a message id (a UUID)", Code.USAGE) from None


def as_seconds(text: str) -> float | None:
    """Return how many seconds ``90s``, ``15m``, ``1h30m`` or ``3d`` are; None if the text is none of these."""
    if not re.fullmatch(r"(\d+(\.\d+)?[smhdw])+", text, re.ASCII):
        return None
    return sum(float(number) * _UNITS[unit] for number, unit in re.findall(r"([\d.]+)([smhdw])", text, re.ASCII))


def as_time(text: str, name: str) -> tuple[dt.datetime | None, float | None]:
    """Return the time that a text is, or the seconds before now, as `as_seconds` reads them.

    Raises:
        Failure: the text is neither, or a time without its zone.
    """
    if (seconds := as_seconds(text)) is not None:
        return None, seconds
    try:
        moment = dt.datetime.fromisoformat(text)
    except ValueError:
        raise Failure(
            f"{name} {text!r} must be a duration (90s, 15m, 2h, 3d) or a time (2026-01-31T12:00:00+00:00)", Code.USAGE
        ) from None
    if moment.tzinfo is None:
        raise Failure(f"{name} {text!r} has no time zone; write {text}+00:00 for UTC", Code.USAGE)
    return moment, None


def words_of(words: Sequence[str]) -> list[str]:
    """Return the words of the command line, each once; the lines of stdin in place of ``-``."""
    found: list[str] = []
    for text in words:
        found += [line.strip() for line in sys.stdin if line.strip()] if text == "-" else [text]
    return list(dict.fromkeys(found))


def targets_of(words: Sequence[str], group: str | None) -> Iterator[Target]:
    """Yield the messages in inboxes that words (GROUP/ID) name; ``group`` is that of the ids without one.

    Raises:
        Failure: a word is no id, or has no group.
    """
    for text in words:
        own, _, id_ = text.rpartition("/")
        if not (name := own or group):
            raise Failure(f"{text!r} has no group: write GROUP/{text}, or give --group", Code.USAGE)
        yield Target(as_id(id_), name)


def word_of(target: Target) -> str:
    """Return a message as it is written on the command line."""
    return str(target.message_id) if target.group is None else f"{target.group}/{target.message_id}"


# --- the operator at the terminal ------------------------------------------------------------------------------------


def need_terminal(refusal: str, *, yes: bool) -> None:
    """Refuse to go on where there is no terminal to ask at, unless ``yes`` was given.

    Raises:
        Failure: stdin is no terminal; begins with ``refusal``, which says what isn't done.
    """
    if not yes and not sys.stdin.isatty():
        raise Failure(f"{refusal}: there is no terminal to ask at; give --yes if you are sure", Code.USAGE)


def confirm(question: str, refusal: str, *, yes: bool) -> None:
    """Ask the operator at the terminal, unless ``yes`` was given.

    Raises:
        Failure: the answer is no, or there is no terminal; begins with ``refusal``, which says what isn't done.
    """
    need_terminal(refusal, yes=yes)
    if not yes and not ask(question):
        raise Failure(refusal, Code.USAGE)


def ask(question: str) -> bool:
    """Ask the operator at the terminal."""
    # Not by typer.confirm, which lets a blank slip to stdout.
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)  # noqa: T201
    return sys.stdin.readline().strip().lower() in {"y", "yes"}


def cli_actor(actor: str | None) -> Actor:
    """Return who acts, for the audit: the name of ``--actor``, else ``user@host``.

    Raises:
        Failure: the option is empty.
    """
    if actor is not None and not actor.strip():
        raise Failure("--actor is empty: the audit must name the operator", Code.USAGE)
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        # In a container, a user may have no more than a number.
        user = f"uid {os.getuid()}"
    return Actor((actor or f"{user}@{socket.gethostname()}").strip(), {"via": "cli"})
