"""What several commands are given, and what they ask back."""

from __future__ import annotations

import re
import sys
from typing import Annotated
from uuid import UUID

import typer

from outbox.cli.exits import Code, Failure

AfterOption = Annotated[str | None, typer.Option(metavar="ID", help="Go on after this id: the end of a list.")]
LimitOption = Annotated[int, typer.Option(min=1, max=10_000, help="How many.")]
BodyOption = Annotated[bool, typer.Option("--body", help="Show the body as well.")]
YesOption = Annotated[bool, typer.Option("--yes", help="Don't ask.")]

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


def make_sure(question: str, otherwise: str, *, yes: bool) -> None:
    """Ask whoever sits at the terminal, unless ``yes`` was given; ``otherwise`` is what then doesn't happen.

    Raises:
        Failure: the answer is no, or nobody is there.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise Failure(f"{otherwise}: nobody here to ask; give --yes if you are sure", Code.USAGE)
    # Not by typer.confirm, which lets a blank slip to stdout.
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)  # noqa: T201
    if sys.stdin.readline().strip().lower() not in {"y", "yes"}:
        raise Failure(otherwise, Code.USAGE)
