"""The console as a server of its own."""

from __future__ import annotations

import getpass
import secrets
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

from outbox.admin.redact import Redactor
from outbox.console.auth import Authorizer, Bearer, Principal, Role, hash_token
from outbox.console.config import ConsoleConfig
from outbox.console.router import app_of, build_console
from outbox.errors import InvalidSettings

if TYPE_CHECKING:
    from outbox.console.console import Console
    from outbox.console.router import Metrics


def serve(config: ConsoleConfig, *, tell: Callable[[str], None] | None = None) -> None:
    """Serve the console until the process is told to stop.

    Without users, tokens or a user header it makes up a token for this run and tells it (``tell``; default: standard
    error). The token is typed into the page: a link with it would end up in histories and logs.

    Raises:
        InvalidSettings: nobody could be asked who they are, and others than this machine could reach it; or the
            address can't be had.
        SchemaMissing, SchemaOutdated, sqlalchemy.exc.DBAPIError: no database can be used.
    """
    import uvicorn  # noqa: PLC0415 - only who serves needs it

    tell = tell or _tell
    authorizer, token = authorizer_of(config)
    console = console_of(config, authorizer)
    # What is wrong with the databases is told now, and not to the first visitor.
    _ = console.admin
    with _listening(config) as listener:
        host, port = listener.getsockname()[:2]
        tell(f"outbox console: http://{f'[{host}]' if ':' in host else host}:{port}{config.root_path}/")
        for name in console.missing:
            tell(f"database {name!r} can't be reached yet; it is tried again")
        if token:
            tell(f"Log in with this token, which is good until the console stops:\n\n    {token}\n")
        if not config.is_local:
            tell("Anybody who can listen on the network sees what goes over it: put a proxy with TLS before it.")
            if config.allowed_hosts is None:
                tell("It answers to localhost only: name the hosts under which it is reached (allowed_hosts).")
        # What proxies say is believed as trusted_proxies has it, not as uvicorn has it.
        app = app_of(console, cast("Metrics", config.metrics), config.root_path)
        options = uvicorn.Config(
            app, log_level="warning", access_log=False, proxy_headers=False, server_header=False, lifespan="on"
        )
        uvicorn.Server(options).run(sockets=[listener])


def authorizer_of(config: ConsoleConfig) -> tuple[Authorizer, str | None]:
    """Return who may come in, and the token that was made up where nothing is configured.

    Raises:
        InvalidSettings: nothing is configured, and others than this machine could reach the console.
    """
    if (authorizer := config.authorizer()) is not None:
        return authorizer, None
    if not config.is_local:
        raise InvalidSettings(
            f"host {config.host!r} can be reached from other machines, and nobody is asked who they are: set "
            "OUTBOX_CONSOLE_USERS or OUTBOX_CONSOLE_TOKENS (or their _FILE), or listen on 127.0.0.1"
        )
    token = secrets.token_urlsafe(24)
    return Bearer({hash_token(token): Principal.of(_user(), Role.ADMIN)}), token


def console_of(config: ConsoleConfig, authorizer: Authorizer) -> Console:
    """Return the console of a configuration; it hasn't connected yet.

    Raises:
        InvalidSettings: an option that isn't one.
    """
    return build_console(
        config.databases,
        authorizer=authorizer,
        settings=config.settings,
        read_only=config.read_only,
        allowed_hosts=config.allowed_hosts,
        trusted_origins=config.trusted_origins,
        trusted_proxies=config.trusted_proxies,
        environment=config.env,
        redactor=Redactor(cast("Any", config.payload)),
    )


def _listening(config: ConsoleConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        return socket.create_server((config.host, config.port), family=family)
    except OSError as error:
        raise InvalidSettings(f"can't listen on {config.host} port {config.port}: {error.strerror}") from None


def _user() -> str:
    with suppress(OSError, KeyError):
        return getpass.getuser()
    return "console"


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201 - it is for who has started it
