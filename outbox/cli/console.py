"""``outbox console``: serve the console, and make what people log in with."""

from __future__ import annotations

import contextlib
import enum
import getpass
import secrets
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer
from sqlalchemy.exc import DBAPIError

from outbox.cli.database import DatabaseOption, SchemaOption, UrlOption, engine_of, find_databases, find_settings, where
from outbox.cli.exits import Code, Failure, as_failure
from outbox.cli.output import Output, OutputOption, print_json, say
from outbox.errors import SchemaError, pip_install

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import NoReturn

    from sqlalchemy import URL

    from outbox.settings import Settings

app = typer.Typer(invoke_without_command=True, rich_markup_mode=None)


class RoleName(enum.StrEnum):
    """What somebody may do: see; act where nothing is lost; decide, compensate and see bodies as well."""

    VIEWER = "viewer"
    OPERATOR = "operator"
    ADMIN = "admin"


RoleOption = Annotated[
    RoleName, typer.Option(help="What they may do: see; act; decide, compensate, see bodies as well.")
]


@app.callback()
def serve(  # noqa: PLR0917 - options of the command line
    context: typer.Context,
    url: UrlOption = None,
    database: DatabaseOption = None,
    schema: SchemaOption = None,
    host: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Where to listen. Default: 127.0.0.1, for this machine only.")
    ] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Default: 8900; 0 takes a free one.")] = None,
    read_only: Annotated[bool, typer.Option("--read-only", help="Only show; nothing can be changed.")] = False,
    environment: Annotated[
        str | None, typer.Option(metavar="NAME", help="Shown as a badge, such as staging; prod is red.")
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(metavar="HOST", help="A name under which it is reached, beside localhost; may be given again."),
    ] = None,
    trusted_proxy: Annotated[
        list[str] | None,
        typer.Option(metavar="ADDRESS", help="A proxy whose X-Forwarded-* is believed; may be given again."),
    ] = None,
    root_path: Annotated[
        str | None, typer.Option(metavar="PATH", help="The prefix that a proxy takes off, such as /outbox.")
    ] = None,
) -> None:
    """Serve the admin console: pages and HTTP endpoints to see every message, and to heal what is stuck.

    It runs until Ctrl-C or SIGTERM. It needs no code of yours, but compensations and checks are done by workers.

    Where nothing is configured it tells a token for this run, to log in with. Users and tokens come from the
    environment or files, never from options (see `hash-password` and `token`); without them it serves this machine
    only. In front of others put a proxy with TLS.

    \b
    Environment, each also with OUTBOX_CONSOLE_ before it, secrets also with _FILE after it:
      DATABASES      NAME=URL, separated by blanks or lines
      USERS, TOKENS  NAME:ROLE:HASH, as `hash-password` and `token` print them
      SESSION_KEY    makes sessions outlive a restart
      HOST, PORT, READ_ONLY, ENV, ALLOWED_HOSTS, TRUSTED_PROXIES, ROOT_PATH  as the options
      TRUSTED_ORIGINS, USER_HEADER, USER_ROLES, USER_DEFAULT_ROLE            behind a proxy that logs people in
      PAYLOAD        hidden, masked (default) or full: how bodies are shown
      METRICS        off (default), authenticated or open: /metrics for Prometheus
    \b
    Examples:
      outbox console --url postgresql+psycopg://me@localhost/shop
      outbox console --database a=postgresql+psycopg://me@db/bank_a --database b=postgresql+psycopg://me@db/bank_b
      OUTBOX_CONSOLE_USERS_FILE=/etc/outbox/users outbox console --host 0.0.0.0 --allow-host ops.example.com
    """
    if context.invoked_subcommand is not None:
        return
    with _extra():
        import uvicorn  # noqa: F401, PLC0415 - so that its lack is told at once

        from outbox.console import serve as standalone  # noqa: PLC0415
        from outbox.console.serve import ConsoleConfig  # noqa: PLC0415
    settings = find_settings(schema)
    urls = find_databases(url, database)
    config = ConsoleConfig.from_env(
        databases={name: address.render_as_string(hide_password=False) for name, address in urls.items()},
        settings=settings,
        host=host,
        port=port,
        read_only=read_only or None,
        env=environment,
        allowed_hosts=tuple(allow_host) if allow_host else None,
        trusted_proxies=tuple(trusted_proxy) if trusted_proxy else None,
        root_path=root_path and root_path.rstrip("/"),
    )
    standalone.authorizer_of(config)
    for line in _databases(urls, settings):
        say(line)
    signal.signal(signal.SIGTERM, _interrupt)
    say("Ctrl-C ends it.")
    with contextlib.suppress(KeyboardInterrupt):
        standalone.serve(config, tell=say)
    say("the console has stopped")


@app.command("hash-password")
def hash_password(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Whose it is.")] = None,
    role: RoleOption = RoleName.VIEWER,
) -> None:
    """Hash a password for OUTBOX_CONSOLE_USERS; it is asked for, or the first line of stdin.

    With a name, the whole entry NAME:ROLE:HASH is printed, else the hash alone.

    \b
    Examples:
      outbox console hash-password ann --role operator >> users
      printf '%s' "$PASSWORD" | outbox console hash-password
    """
    with _extra():
        from outbox.console.login import hash_password as hashed  # noqa: PLC0415
    _check_name(name)
    entry = hashed(_password())
    print(entry if name is None else f"{name}:{role}:{entry}")  # noqa: T201


@app.command()
def token(
    name: Annotated[str, typer.Argument(help="Whose it is; the audit shows it.")],
    role: RoleOption = RoleName.VIEWER,
    output: OutputOption = Output.TABLE,
) -> None:
    """Make a token for OUTBOX_CONSOLE_TOKENS, to log in with or to send as a bearer token.

    The entry NAME:ROLE:HASH goes to stdout; the token itself is shown this once, on stderr (with -o json both on
    stdout).

    \b
    Example:
      outbox console token nightly-report --role viewer >> tokens
    """
    with _extra():
        from outbox.console.login import hash_token  # noqa: PLC0415
    _check_name(name)
    made = secrets.token_urlsafe(32)
    entry = f"{name}:{role}:{hash_token(made)}"
    if output is Output.JSON:
        print_json({"token": made, "entry": entry})
        return
    print(entry)  # noqa: T201
    say(f"the token, shown this once: {made}")


def _databases(urls: Mapping[str, URL], settings: Settings) -> Iterator[str]:
    """Yield, for each database, where it is and what is in it, or why it can't be used.

    Raises:
        Failure: none can be used.
    """
    from outbox.operator.databases import open_database  # noqa: PLC0415

    failures: list[Failure] = []
    for name, url in urls.items():
        try:
            parts = open_database(name, engine_of(url), settings).parts
        except (DBAPIError, SchemaError) as error:
            failures.append(as_failure(error) or Failure(str(error)))
            yield f"{name}: {failures[-1]}"
        else:
            yield f"{name} ({' and '.join(sorted(parts, reverse=True))}): {where(url, settings.schema)}"
    if len(failures) == len(urls):
        raise failures[0]


def _check_name(name: str | None) -> None:
    if name is not None and (not name.strip() or any(char.isspace() or char in ":,=" for char in name)):
        raise Failure(f"NAME {name!r} must have no blanks, commas, colons or equals signs", Code.USAGE)


def _password() -> str:
    if not sys.stdin.isatty():
        given = sys.stdin.readline().rstrip("\r\n")
    else:
        given = getpass.getpass("Password: ", stream=sys.stderr)
        if getpass.getpass("Again: ", stream=sys.stderr) != given:
            raise Failure("the two passwords differ", Code.USAGE)
    if not given:
        raise Failure("no password was given", Code.USAGE)
    return given


@contextlib.contextmanager
def _extra() -> Iterator[None]:
    """Say which extra is to be installed where one of its libraries isn't there."""
    try:
        yield
    except ImportError as error:
        if error.name and error.name.startswith("outbox"):
            raise
        raise Failure(f"outbox console can't start: {error}; {pip_install('console')}", Code.CONFIG) from error


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt
