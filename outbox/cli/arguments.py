"""What several commands are given, and what they ask back."""

from __future__ import annotations

import datetime as dt
import getpass
import os
import re
import socket
import sys
from typing import Annotated
from uuid import UUID

import typer

from outbox.admin.model import Target
from outbox.cli.exits import Code, Failure

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
