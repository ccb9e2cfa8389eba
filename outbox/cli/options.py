"""Options that many commands share: dataclasses whose fields are options, as parameters of a command."""

from __future__ import annotations

import functools
import inspect
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from outbox.cli.arguments import ActorOption, YesOption
from outbox.cli.database import DatabaseOption, SchemaOption, UrlOption, admin_over, find_databases, find_settings
from outbox.cli.output import Form, Output, OutputOption

if TYPE_CHECKING:
    from outbox.admin.service import Admin


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
