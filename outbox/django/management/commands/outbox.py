"""``manage.py outbox …``: the whole command line, on the databases of Django's settings."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from django.core.management.base import BaseCommand, CommandParser
from django.db import DEFAULT_DB_ALIAS

from outbox import cli
from outbox.django.databases import configuration, database_url


class OutboxCommand(BaseCommand):
    """Passes its arguments on; ``--using ALIAS`` before them names the database."""

    help = "The command line of the outbox (run, stats, messages, dead, …); see: manage.py outbox --help"
    #: What comes before the arguments.
    before: tuple[str, ...] = ()

    def add_arguments(self, parser: CommandParser) -> None:
        """Declare what ``call_command`` may pass."""
        parser.add_argument("arguments", nargs="*")

    def run_from_argv(self, argv: list[str]) -> None:
        """Run with all arguments as they are: the options are those of the command line, not Django's."""
        self._run(argv[2:], f"{os.path.basename(argv[0])} outbox")  # noqa: PTH119 - what it was called as

    def handle(self, *_: Any, arguments: Sequence[str] = (), **__: Any) -> None:
        """Run for ``call_command``."""
        self._run(arguments, "manage.py outbox")

    def _run(self, arguments: Sequence[str], program: str) -> None:
        using, rest = DEFAULT_DB_ALIAS, list(arguments)
        if rest[:1] == ["--using"] and len(rest) > 1:
            using, rest = rest[1], rest[2:]
        os.environ.update(environment(using))
        cli.main([*self.before, *rest], program)


def environment(using: str) -> dict[str, str]:
    """Return the variables by which the command line knows Django's databases; its own options go before them."""
    own, settings = configuration()
    variables = {"OUTBOX_APP": "outbox.django:outboxes()", "OUTBOX_SCHEMA": settings.schema}
    urls = {alias: database_url(alias).render_as_string(hide_password=False) for alias in own.databases}
    if using not in urls:
        urls = {using: database_url(using).render_as_string(hide_password=False), **urls}
    variables["OUTBOX_DATABASE_URL"] = urls.pop(using)
    if urls:
        variables["OUTBOX_CONSOLE_DATABASES"] = " ".join(f"{alias}={url}" for alias, url in urls.items())
    return variables


Command = OutboxCommand
