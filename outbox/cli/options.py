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
from dataclasses import Field, dataclass, field, fields, is_dataclass, make_dataclass, replace
from typing import Annotated, Any, TypeVar, get_type_hints
from uuid import UUID

import typer

from outbox.cli.exits import Code, Failure
from outbox.cli.output import ListForm, ListFormOption, Output, OutputOption
from outbox.operator.model import Page, Target
from outbox.reader import FieldShape, Reader, Seconds, shape_of

T = TypeVar("T")

YesOption = Annotated[bool, typer.Option("--yes", help="Don't ask.")]
BodyOption = Annotated[bool, typer.Option("--body", help="Show the body as well.")]
LimitOption = Annotated[int, typer.Option(min=1, max=10_000, help="How many.")]
UpToOption = Annotated[int | None, typer.Option(min=1, metavar="N", help="Not more than so many. Default: all.")]
ActorOption = Annotated[
    str | None,
    typer.Option("--actor", metavar="NAME", help="Who acts; in the audit. Default: your user@host."),
]
AppOption = Annotated[
    str | None,
    typer.Option(
        "--app",
        envvar="OUTBOX_APP",
        metavar="MODULE:OBJECT",
        help="Your Outbox, such as shop.messages:outbox.",
    ),
]

#: Fields whose option has another name.
_NAMES = {
    "message_id": "--message",
    "attempts_gte": "--attempts",
    "body": "--where",
    "min_age": "--older-than",
}
_METAVARS = {
    UUID: "ID",
    dt.datetime: "TIME",
    Seconds: "DURATION",
    float: "DURATION",
    int: "N",
    tuple[str, str]: "NAME=TEXT",
}
_HELP = {
    "topic": "Only this topic.",
    "key": "Only this key.",
    "tag": "Only this tag.",
    "status": "Only those in this status.",
    "state": "Only those in this state.",
    "producer_group": "Only of this producer group.",
    "header": "Only with this header.",
    "body": "Only with this in the body, such as order.id=42.",
    "group": "Only this group.",
    "message_id": "Only this message.",
    "fingerprint": "Only with this kind of error, as `outbox dead groups` names it.",
    "error": "Only where the last error contains this.",
    "attempts_gte": "Only after so many attempts or more.",
    "discarded": "Only those that were discarded.",
    "recalled": "Only those that were recalled.",
    "min_age": "Only those at least so old: 90s, 15m, 2h, 3d.",
    "actor": "Only what this operator did.",
    "action": "Only this act, such as resend or retry.",
    "target": "Only what was done to this: a message, GROUP/ID, or a bulk job.",
    "since": "Not older: 90s, 15m, 2h, 3d, or 2026-01-31T12:00:00+00:00.",
    "until": "Older than that: a duration or a time.",
}

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_MICROSECOND = dt.timedelta(microseconds=1)


# --- dataclasses as options ------------------------------------------------------------------------------------------


def gathered(command: Callable[..., None], **groups: type) -> Callable[..., None]:
    """Return a command for Typer whose parameters that are dataclasses are given as one option for each field.

    ``groups`` name the dataclass of parameters whose class is made while the program runs.
    """
    hints = get_type_hints(command, include_extras=True) | groups
    parameters = inspect.signature(command).parameters
    classes = {name: hints[name] for name in parameters if is_dataclass(hints[name])}
    options: list[inspect.Parameter] = []
    for name, parameter in parameters.items():
        if name in classes:
            options += _options(classes[name])
        else:
            options.append(parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(command)
    def run(**values: Any) -> None:
        made = {
            name: kind(**{f.name: values.pop(_parameter(f)) for f in fields(kind)}) for name, kind in classes.items()
        }
        command(**values, **made)

    run.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    run.__annotations__ = {option.name: option.annotation for option in options}
    return run


def _options(kind: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    return [
        inspect.Parameter(_parameter(f), inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=hints[f.name])
        for f in fields(kind)
    ]


def _parameter(f: Field[Any]) -> str:
    """Return the parameter of a field: a filter's ``body`` isn't the ``body`` of a command."""
    return f.metadata.get("parameter", f.name)  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class PageOptions:
    """How much of a list, and in which form."""

    limit: LimitOption = 50
    after: Annotated[
        str | None, typer.Option(metavar="TOKEN", help="Go on after this, which the end of a list names.")
    ] = None
    output: ListFormOption = ListForm.TABLE


@dataclass(frozen=True, slots=True)
class ActorOptions:
    """Who acts and why, and how sure the operator is."""

    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why; recorded in the audit.")] = ""
    actor: ActorOption = None
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show what would be done: how many, which not and why, a sample.")
    ] = False
    yes: YesOption = False
    output: OutputOption = Output.TABLE


@dataclass(frozen=True, slots=True)
class ManyOptions:
    """How many messages, how fast, and whether to wait for them."""

    everything: Annotated[bool, typer.Option("--all", help="All there are, where no other option narrows it down.")] = (
        False
    )
    limit: Annotated[
        int | None,
        typer.Option(min=1, max=1000, metavar="N", help="Only the first N of those that are picked; 1 to try it out."),
    ] = None
    rate: Annotated[
        float | None, typer.Option(min=0.001, metavar="N", help="At most so many a second. Default: as fast as can be.")
    ] = None
    no_wait: Annotated[
        bool, typer.Option("--no-wait", help="Leave it to workers, and don't wait; print the id of the bulk job.")
    ] = False


# --- the fields of a dataclass as options ----------------------------------------------------------------------------


def option_name(name: str) -> str:
    """Return the option of a field."""
    return _NAMES.get(name, f"--{name.replace('_', '-')}")


def options_of(kind: Any, hidden: frozenset[str] = frozenset()) -> type:
    """Return a dataclass with an option for each field of another one but those ``hidden``; see `read_options`."""
    options = [
        (shape.name, annotation, field(default=default, metadata={"parameter": f"only_{shape.name}"}))
        for shape in shape_of(kind)
        if shape.name not in hidden
        for annotation, default in [_option_of(shape)]
    ]
    return make_dataclass(f"{kind.__name__}Options", options, frozen=True)


def _option_of(shape: FieldShape) -> tuple[Any, Any]:
    """Return the annotation and the default of the option of a field; of most types it is a text, read later."""
    help_ = shape.option.help or _HELP.get(shape.name)
    more: dict[str, Any] = {"help": f"{help_[:1].upper()}{help_[1:]}"} if help_ else {}
    if shape.item is bool:
        return Annotated[bool, typer.Option(option_name(shape.name), **more)], False
    if shape.many:
        return Annotated[list[str] | None, typer.Option(option_name(shape.name), **more)], None
    more["metavar"] = shape.option.metavar or _METAVARS.get(shape.item, "TEXT")
    return Annotated[str | None, typer.Option(option_name(shape.name), **more)], None


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
    texts = options_given(options)
    ages: dict[str, float] = {}
    for shape in shape_of(kind):
        if shape.item is dt.datetime and shape.name in texts:
            texts[shape.name], seconds = as_time(texts[shape.name], option_name(shape.name))
            if seconds is not None:
                ages[shape.name] = seconds
        elif shape.item in {float, Seconds} and shape.name in texts:
            texts[shape.name] = as_duration(texts[shape.name], option_name(shape.name))
    values = READER.values(kind, texts, called=option_name)
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
    """Return the options that were given, by field."""
    found = {f.name: getattr(options, f.name) for f in fields(options)}
    return {name: value for name, value in found.items() if value is not None and value is not False and value != []}


def _usage(message: str, _: str) -> Exception:
    return Failure(message, Code.USAGE)


#: Reads the texts of options.
READER = Reader(form="text", error=_usage)


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
    """Return how many seconds ``90s``, ``15m``, ``2h`` or ``3d`` are; None if the text is none of these."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text, re.ASCII)
    return float(match[1]) * _UNITS[match[2]] if match else None


def as_duration(text: str, name: str) -> float:
    """Return a duration in seconds.

    Raises:
        Failure: the text is none.
    """
    seconds = as_seconds(text)
    if seconds is None:
        raise Failure(f"{name} {text!r} must be a duration: 90s, 15m, 2h, 3d", Code.USAGE)
    return seconds


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


def operator_name(actor: str | None) -> str:
    """Return the operator's name for the audit: that of ``--actor``, else ``user@host``.

    Raises:
        Failure: the option is empty.
    """
    if actor is not None:
        if not actor.strip():
            raise Failure("--actor is empty: the audit must name the operator", Code.USAGE)
        return actor.strip()
    try:
        name = getpass.getuser()
    except (KeyError, OSError):
        # In a container, a user may have no more than a number.
        name = f"uid {os.getuid()}"
    return f"{name}@{socket.gethostname()}"
