"""What several commands are given, and what they ask back.

Options that many commands share: dataclasses whose fields are options, as parameters of a command.

From when until when: by the clock of the database, and the same on the pages that follow.
"""

from __future__ import annotations

import datetime as dt
import functools
import getpass
import inspect
import os
import re
import shlex
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints
from uuid import UUID

import typer

from outbox.cli.database import DatabaseOption, SchemaOption, UrlOption, admin_over, find_databases, find_settings
from outbox.cli.exits import Code, Failure
from outbox.cli.output import Form, Output, OutputOption
from outbox.operator.model import Page, Target

if TYPE_CHECKING:
    from outbox.operator.service import Admin

AfterOption = Annotated[str | None, typer.Option(metavar="ID", help="Go on after this id: the end of a list.")]
LimitOption = Annotated[int, typer.Option(min=1, max=10_000, help="How many.")]
BodyOption = Annotated[bool, typer.Option("--body", help="Show the body as well.")]
YesOption = Annotated[bool, typer.Option("--yes", help="Don't ask.")]
ActorOption = Annotated[
    str | None, typer.Option("--actor", metavar="NAME", help="Who; recorded too. Default: your user@host.")
]

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


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


def make_sure(question: str, otherwise: str, *, yes: bool) -> None:
    """Ask whoever sits at the terminal, unless ``yes`` was given; ``otherwise`` is what then doesn't happen.

    Raises:
        Failure: the answer is no, or nobody is there.
    """
    can_ask(otherwise, yes=yes)
    if not yes and not ask(question):
        raise Failure(otherwise, Code.USAGE)


def can_ask(otherwise: str, *, yes: bool) -> None:
    """See that somebody sits at the terminal, unless ``yes`` was given.

    Raises:
        Failure: nobody is there.
    """
    if not yes and not sys.stdin.isatty():
        raise Failure(f"{otherwise}: nobody here to ask; give --yes if you are sure", Code.USAGE)


def ask(question: str) -> bool:
    """Ask whoever sits at the terminal."""
    # Not by typer.confirm, which lets a blank slip to stdout.
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)  # noqa: T201
    return sys.stdin.readline().strip().lower() in {"y", "yes"}


def user_here() -> str:
    """Return who uses the command line, as ``user@host``."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):
        # In a container, a user may have no more than a number.
        name = f"uid {os.getuid()}"
    return f"{name}@{socket.gethostname()}"


def named(target: Target) -> str:
    """Return a message as it is written on the command line."""
    return str(target.message_id) if target.group is None else f"{target.group}/{target.message_id}"


def gathered(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command have parameters that are dataclasses; their fields become its options."""
    hints = get_type_hints(command, include_extras=True)
    parameters = inspect.signature(command).parameters
    groups = {name: hints[name] for name in parameters if is_dataclass(hints[name])}
    options: list[inspect.Parameter] = []
    for name, parameter in parameters.items():
        if name in groups:
            options += _options(groups[name])
        else:
            options.append(parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(command)
    def run(**given: Any) -> None:
        made = {name: kind(**{f.name: given.pop(f.name) for f in fields(kind)}) for name, kind in groups.items()}
        command(**given, **made)

    run.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    run.__annotations__ = {option.name: option.annotation for option in options}
    return run


def _options(kind: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    return [
        inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=hints[f.name])
        for f in fields(kind)
    ]


@dataclass(frozen=True, slots=True)
class Where:
    """Which databases."""

    url: UrlOption = None
    database: DatabaseOption = None
    only: Annotated[
        str | None, typer.Option("--in", metavar="NAME", help="Of several databases: only the one of this name.")
    ] = None
    schema: SchemaOption = None

    @contextmanager
    def opened(self) -> Iterator[Admin]:
        """Give an admin over all of them.

        Raises:
            Failure: none given, one that can't be used, or is unavailable.
            SchemaMissing, SchemaOutdated: one isn't migrated.
        """
        with admin_over(find_databases(self.url, self.database), find_settings(self.schema)) as admin:
            yield admin

    def again(self, command: str) -> str:
        """Return a command as it can be typed again with the same databases; passwords are left out."""
        words = ["outbox", command]
        if self.url is not None:
            words += ["--url", shlex.quote(_shown(self.url))]
        for text in self.database or ():
            name, _, url = text.partition("=")
            words += ["--database", shlex.quote(f"{name}={_shown(url)}")]
        if self.schema is not None:
            words += ["--schema", shlex.quote(self.schema)]
        return " ".join(words)


@dataclass(frozen=True, slots=True)
class Listing:
    """How much of a list, and in which form."""

    limit: Annotated[int, typer.Option(min=1, max=10_000, help="How many.")] = 50
    after: Annotated[
        str | None, typer.Option(metavar="TOKEN", help="Go on after this: what the end of a list told.")
    ] = None
    output: Annotated[
        Form,
        typer.Option(
            "--output", "-o", help="The form of the data on stdout; ndjson: a JSON object a line; id: only the ids."
        ),
    ] = Form.TABLE


@dataclass(frozen=True, slots=True)
class Doing:
    """Who does something, why, and how sure they are."""

    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why; recorded in the audit table.")] = ""
    actor: ActorOption = None
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show what would be done: how many, which not and why, a sample.")
    ] = False
    yes: YesOption = False
    output: OutputOption = Output.TABLE


@dataclass(frozen=True, slots=True)
class Many:
    """How many, and how fast."""

    everything: Annotated[bool, typer.Option("--all", help="All there are, where no other option narrows it down.")] = (
        False
    )
    limit: Annotated[
        int | None,
        typer.Option(min=1, max=1000, metavar="N", help="Only the N newest of those that are picked; 1 to try it out."),
    ] = None
    rate: Annotated[
        float | None, typer.Option(min=0.001, metavar="N", help="At most so many a second. Default: as fast as can be.")
    ] = None


def _shown(url: str) -> str:
    from sqlalchemy import make_url  # noqa: PLC0415

    address = make_url(url)
    query = {name: value for name, value in address.query.items() if "password" not in name}
    return address.set(password=None, query=query).render_as_string(hide_password=False)


T = TypeVar("T")

SinceOption = Annotated[
    str | None, typer.Option(metavar="TIME", help="Not older: 90s, 15m, 2h, 3d, or 2026-01-31T12:00:00+00:00.")
]
UntilOption = Annotated[str | None, typer.Option(metavar="TIME", help="Older than that, given likewise.")]

_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_MICROSECOND = dt.timedelta(microseconds=1)


@dataclass(frozen=True, slots=True)
class Span:
    """Two times, either may be open, and the token of a page.

    A page's token is one of the very same filter, and ``15m`` ago is another time at each call. So what is given on to
    the next call also has the times that a duration has led to.
    """

    since: dt.datetime | None = None
    until: dt.datetime | None = None
    token: str | None = None
    moving: bool = False

    @classmethod
    def of(cls, admin: Admin, since: str | None, until: str | None, after: str | None = None) -> Span:
        """Return the times of the options, as they were at the first page.

        Raises:
            Failure: one of them can't be read.
        """
        given = [
            as_time(text, name) if text else (None, None) for text, name in ((since, "--since"), (until, "--until"))
        ]
        moving = any(seconds is not None for _, seconds in given)
        if not moving:
            return cls(given[0][0], given[1][0], after)
        if after is None:
            now = _now(admin)
            times = [now - dt.timedelta(seconds=seconds) if seconds is not None else time for time, seconds in given]
            return cls(times[0], times[1], None, moving)
        token, *moments = after.split(".")
        try:
            first, last = (_EPOCH + int(text) * _MICROSECOND if text else None for text in moments)
        except (ValueError, OverflowError):
            raise Failure(f"--after {after!r} isn't what the end of this list told", Code.USAGE) from None
        return cls(first, last, token, moving)

    def onward(self, page: Page[T]) -> Page[T]:
        """Return the page with a token that brings these times along."""
        if page.next_page_token is None or not self.moving:
            return page
        moments = ["" if time is None else str((time - _EPOCH) // _MICROSECOND) for time in (self.since, self.until)]
        return replace(page, next_page_token=".".join([page.next_page_token, *moments]))


def _now(admin: Admin) -> dt.datetime:
    from outbox.database.execute import execute  # noqa: PLC0415
    from outbox.database.sql import NOW  # noqa: PLC0415

    database = next(iter(admin.databases.values()))
    with database.looking() as connection:
        ((time,),) = execute(connection, NOW)[0]
    return time  # type: ignore[no-any-return]
