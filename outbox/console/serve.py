"""The console as a server of its own, configured by `OUTBOX_CONSOLE_*` variables or options."""

from __future__ import annotations

import getpass
import ipaddress
import os
import secrets
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from fastapi import FastAPI
from sqlalchemy import make_url
from sqlalchemy.exc import ArgumentError

from outbox.console.app import Metrics, create_console_app
from outbox.console.auth import AnyOf, Basic, Bearer, TrustedHeader
from outbox.console.context import Authorizer
from outbox.console.login import hash_token
from outbox.console.permissions import Principal, Role
from outbox.database.engines import named_urls
from outbox.errors import InvalidSettings
from outbox.operator.look.redact import Redactor
from outbox.reader import Reader, environment, option
from outbox.settings import Settings

PREFIX = "OUTBOX_CONSOLE_"
_ENTRY = f"name:role:hash, separated by blanks or lines, where role is one of {', '.join(Role)}"


def _entries(text: str) -> list[tuple[str, Role, str]]:
    entries = []
    for number, word in enumerate(text.replace(",", " ").split(), 1):
        parts = word.rsplit(":", 2)
        if len(parts) != 3 or parts[1] not in set(Role):
            raise ValueError(f"{_ENTRY}; entry {number} isn't")
        entries.append((parts[0], Role(parts[1]), parts[2]))
    return entries


def named_databases(text: str) -> dict[str, str]:
    """Return URLs by name: each is ``name=url``, or an URL, which then has the name of its database.

    Raises:
        ValueError: two have the same name, or a URL can't be read; it isn't quoted, for it may have a password.
    """
    databases: dict[str, str] = {}
    for given, url in named_urls(text):
        try:
            name = given or make_url(url).database or "outbox"
        except (ArgumentError, ValueError):  # the latter of a port
            raise ValueError("name=url, or a URL like postgresql+psycopg://host/name; one can't be read") from None
        if name in databases:
            raise ValueError(f"name=url with each name once; two databases are named {name!r}")
        databases[name] = url
    return databases


@dataclass(frozen=True, slots=True)
class ConsoleConfig:
    """All options of a console of its own; see `create_console_router` for those of the same name.

    ``databases`` are URLs by name. ``users`` maps names to ``(hash, role)``, ``tokens`` hashes to principals.

    Raises:
        InvalidSettings: an option that isn't one.
    """

    databases: Mapping[str, str] = option(
        help="NAME=URL, separated by blanks or lines; else OUTBOX_DATABASE_URL.", parse=named_databases, secret=True
    )
    host: str = option("127.0.0.1", "The address to listen on.")
    port: int = option(8900, "The port to listen on; 0 takes a free one.", least=0, most=65535)
    read_only: bool = option(False, "Refuse every act and reveal.")
    allowed_hosts: tuple[str, ...] | None = option(None, "Names under which it is reached, beside localhost.")
    trusted_origins: tuple[str, ...] = option((), "Other sites that may send.")
    trusted_proxies: tuple[str, ...] = option((), "Addresses or networks whose X-Forwarded-* is believed.")
    env: str | None = option(None, "The name of the environment, shown as a badge.")
    users: Mapping[str, Any] = option(
        help="NAME:ROLE:HASH, by `outbox console hash-password`.",
        factory=dict,
        parse=lambda text: {name: (hashed, role) for name, role, hashed in _entries(text)},
        secret=True,
    )
    tokens: Mapping[str, Principal] = option(
        help="NAME:ROLE:HASH, by `outbox console token`.",
        factory=dict,
        parse=lambda text: {hashed: Principal.of(name, role) for name, role, hashed in _entries(text)},
        secret=True,
    )
    user_header: str | None = option(None, "The header in which a trusted proxy names the user.")
    user_roles: Mapping[str, Role] = option(help="NAME=ROLE of the users of that header.", factory=dict)
    user_default_role: Role | None = option(None, "The role of all other users of that header.")
    session_key: str | None = option(None, "Makes sessions outlive a restart.", secret=True)
    payload: Literal["hidden", "masked", "full"] = option("masked", "How bodies are shown.")
    metrics: Metrics = option("off", "Who may read /metrics.")
    root_path: str = option("", "The prefix that a proxy takes off the path.", parse=lambda text: text.rstrip("/"))

    def __post_init__(self) -> None:
        Reader().check(self)
        if not self.databases:
            raise InvalidSettings("no database: set OUTBOX_DATABASE_URL, or OUTBOX_CONSOLE_DATABASES=name=url …")
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise InvalidSettings(f"root_path {self.root_path!r} must begin with a slash, and not end with one")
        if self.user_header and not self.trusted_proxies:
            raise InvalidSettings(f"user_header {self.user_header!r} is believed of trusted_proxies only; name them")

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the console."""
        try:
            return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, **overrides: Any) -> ConsoleConfig:
        """Return the configuration of the environment; ``overrides`` that aren't None go before it.

        Each field is a variable ``OUTBOX_CONSOLE_…``; a secret one can be in a file that ``OUTBOX_CONSOLE_…_FILE``
        names. Lists are separated by commas or white space.

        Raises:
            InvalidSettings: a variable that can't be read, or isn't one; names it, and of a secret not its value.
        """
        # No default in the signature: help() would print the environment of the process.
        environ = os.environ if environ is None else environ
        values = environment(cls, PREFIX, environ) | {
            name: value for name, value in overrides.items() if value is not None
        }
        if not values.get("databases") and (url := environ.get("OUTBOX_DATABASE_URL")):
            try:
                values["databases"] = named_databases(url)
            except ValueError as error:
                raise InvalidSettings(f"OUTBOX_DATABASE_URL must be {error}") from None
        return cls(**({"databases": {}} | values))


def serve(
    config: ConsoleConfig, *, settings: Settings | None = None, announce: Callable[[str], None] | None = None
) -> None:
    """Serve the console until the process is stopped.

    ``settings`` default to those of the environment. Without users, tokens or a user header it makes up a token for
    this run and announces it (``announce``; default: standard error). The token is typed into the page: a link with it
    would end up in histories and logs.

    Raises:
        InvalidSettings: there is no authentication, and other machines could reach the console; or the address is in
            use.
        SchemaMissing, SchemaOutdated, sqlalchemy.exc.DBAPIError: no database can be used.
    """
    import uvicorn  # noqa: PLC0415 - only a server needs it

    announce = announce or partial(print, file=sys.stderr, flush=True)
    authorizer, token = authorizer_of(config)
    app = app_of(config, authorizer, settings)
    console = app.state.console
    # What is wrong with the databases is an error now, and not at the first request.
    _ = console.source()
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        listener = socket.create_server((config.host, config.port), family=family)
    except OSError as error:
        raise InvalidSettings(f"can't listen on {config.host} port {config.port}: {error.strerror}") from None
    with listener:
        host, port = listener.getsockname()[:2]
        announce(f"outbox console: http://{f'[{host}]' if ':' in host else host}:{port}{config.root_path}/")
        for name in console.source.missing:
            announce(f"database {name!r} can't be reached yet; it is tried again")
        if token:
            announce(f"Log in with this token, which is good until the console stops:\n\n    {token}\n")
        if not config.is_local:
            announce("The connection isn't encrypted: put a proxy with TLS in front.")
            if config.allowed_hosts is None:
                announce("It answers to localhost only: name the hosts under which it is reached (allowed_hosts).")
        # What proxies say is believed as trusted_proxies has it, not as uvicorn has it.
        options = uvicorn.Config(
            app, log_level="warning", access_log=False, proxy_headers=False, server_header=False, lifespan="on"
        )
        uvicorn.Server(options).run(sockets=[listener])


def authorizer_of(config: ConsoleConfig) -> tuple[Authorizer, str | None]:
    """Return the authorizer, and the token that was made up where nothing is configured.

    Raises:
        InvalidSettings: nothing is configured, and others than this machine could reach the console.
    """
    found: list[Any] = []
    if config.user_header:
        found.append(TrustedHeader(config.user_header, roles=config.user_roles, default=config.user_default_role))
    if config.tokens:
        found.append(Bearer(config.tokens, session_key=config.session_key))
    if config.users:
        found.append(Basic(config.users))
    if found:
        return (found[0] if len(found) == 1 else AnyOf(*found)), None
    if not config.is_local:
        raise InvalidSettings(
            f"host {config.host!r} can be reached from other machines, and there is no authentication: set "
            "OUTBOX_CONSOLE_USERS or OUTBOX_CONSOLE_TOKENS (or their _FILE), or listen on 127.0.0.1"
        )
    token, user = secrets.token_urlsafe(24), "console"
    with suppress(OSError, KeyError):
        user = getpass.getuser()
    return Bearer({hash_token(token): Principal.of(user, Role.ADMIN)}), token


def app_of(config: ConsoleConfig, authorizer: Authorizer, settings: Settings | None = None) -> FastAPI:
    """Return the application of a configuration; it hasn't connected yet. Errors are those of `create_console_app`."""
    return create_console_app(
        config.databases,
        authorizer=authorizer,
        root_path=config.root_path,
        settings=settings,
        read_only=config.read_only,
        allowed_hosts=config.allowed_hosts,
        trusted_origins=config.trusted_origins,
        trusted_proxies=config.trusted_proxies,
        environment=config.env,
        redactor=Redactor(config.payload),
        metrics=config.metrics,
    )
