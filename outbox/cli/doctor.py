"""``outbox doctor``: what is wrong, and how to mend it."""

from __future__ import annotations

import dataclasses
import os
import sys
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text
from sqlalchemy import Engine

from outbox.cli.database import URL_VARIABLE, SchemaOption, UrlOption, engine_of, find_url
from outbox.cli.exits import Code, Failure
from outbox.cli.output import Output, OutputOption, console, print_json
from outbox.cli.run import load
from outbox.errors import InvalidSettings
from outbox.text import plain

if TYPE_CHECKING:
    from sqlalchemy import URL

    from outbox.app import Outbox
    from outbox.operator.health.examine import HealthReport

_STYLES = {"problem": "bold red", "note": "bold yellow"}


def doctor(
    url: UrlOption = None,
    schema: SchemaOption = None,
    app: Annotated[
        str | None,
        typer.Option(
            "--app",
            envvar="OUTBOX_APP",
            metavar="MODULE:OBJECT",
            help="Where your Outbox is, such as shop.messages:outbox: its database, settings, checkers and consumers "
            "are looked at.",
        ),
    ] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Say what is wrong with one database, and how to mend it.

    It only reads, and reads little: it may be run at any time, and also where there is a transaction pooler in between.
    With --app (or OUTBOX_APP) it looks at the application's own database, connecting as the application does, unless
    --url names another; and it knows which topics have a checker. What it isn't permitted to see it names, and goes on.

    \b
    It looks at:
      server     version, standby, read-only, durability, connections left, clock, pooler
      tables     migrations, differences, invalid indexes, autovacuum
      vacuum     open and prepared transactions, replication slots
      halves     topics without a checker, late checks, old and parked halves
      messages   not dispatched, not released, parked, retries, groups that fell behind, not pruned
      settings   those that contradict each other
    The exit code is 6 if there is a problem; notes alone leave it at 0.

    \b
    Examples:
      outbox doctor --url postgresql+psycopg://me@localhost/shop
      outbox doctor --app shop.messages:outbox -o json
    """
    report = _examine(url, schema, app)
    if output is Output.JSON:
        print_json(_as_json(report))
    else:
        _print(report)
    if not report.healthy:
        raise typer.Exit(Code.PROBLEMS)


def _examine(url: str | None, schema: str | None, app: str | None) -> HealthReport:
    from outbox.operator.health.examine import examine, read_settings  # noqa: PLC0415

    refused: InvalidSettings | None = None
    if app:
        try:
            outbox = _load(app)
        except Failure as failure:
            # Settings that contradict each other are what the doctor is there for, where it knows a database.
            if not isinstance(failure.__cause__, InvalidSettings) or not (url or os.environ.get(URL_VARIABLE)):
                raise
            refused = failure.__cause__
        else:
            return _examine_app(app, outbox, find_url(url) if url else None, schema)
    address = find_url(url)
    engine_of(address)  # says what to install where there is no driver
    settings, of_environment = read_settings(schema)
    return examine(address, settings, refused=refused or of_environment)


def _examine_app(app: str, outbox: Outbox, url: URL | None, schema: str | None) -> HealthReport:
    from outbox.operator.health.examine import examine  # noqa: PLC0415

    settings = dataclasses.replace(outbox.settings, schema=schema) if schema else outbox.settings
    try:
        return examine(
            url or outbox.engine, settings, outbox.checkers, subscriptions=outbox.subscriptions.values(), app=app
        )
    finally:
        if isinstance(outbox.engine, Engine):
            outbox.engine.dispose()


def _load(app: str) -> Outbox:
    # Whatever it prints when it is imported is no part of the report.
    with redirect_stdout(sys.stderr):
        return load(app)


def _as_json(report: HealthReport) -> dict[str, Any]:
    return {
        "database": report.database,
        "schema": report.schema,
        "at": report.at,
        "healthy": report.healthy,
        "findings": [dataclasses.asdict(finding) for finding in report.findings],
        "inspections": [dataclasses.asdict(inspection) for inspection in report.inspections],
    }


def _print(report: HealthReport) -> None:
    terminal = console()
    for finding in report.findings:
        title = Text(finding.severity.upper(), _STYLES[finding.severity]).append(f"  {finding.code}", "default")
        mend = finding.mend.replace("\n", "\n        ")
        terminal.print(title)
        terminal.print(Text(plain(f"  {finding.sentence}\n  mend: {mend}\n")), soft_wrap=True)
    incomplete: dict[tuple[str, str], list[str]] = {}
    for each in report.inspections:
        if each.why:
            how = "not inspected" if each.outcome == "skipped" else "inspected in part"
            incomplete.setdefault((how, each.why), []).append(each.name)
    for (how, why), names in incomplete.items():
        terminal.print(Text(plain(f"{how}: {', '.join(names)}: {why}")), soft_wrap=True)
    problems = sum(finding.severity == "problem" for finding in report.findings)
    done = sum(each.outcome != "skipped" for each in report.inspections)
    terminal.print(
        f"{_counted(problems, 'problem')}, {_counted(len(report.findings) - problems, 'note')}; {done} of "
        f"{len(report.inspections)} inspections done in {report.database}, schema {report.schema!r}",
        soft_wrap=True,
    )


def _counted(count: int, noun: str) -> str:
    return f"{count or 'no'} {noun}{'' if count == 1 else 's'}"
