"""What the console is started with when it is an application of its own: `OUTBOX_CONSOLE_*` variables, or options.

The console as a server of its own.
"""

from __future__ import annotations

import getpass
import ipaddress
import os
import secrets
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from sqlalchemy import make_url
from sqlalchemy.exc import ArgumentError

from outbox.console.app import app_of, build_console
from outbox.console.auth import AnyOf, Basic, Bearer, TrustedHeader
from outbox.console.context import Authorizer, Console
from outbox.console.login import hash_token
from outbox.console.permissions import Principal, Role
from outbox.errors import InvalidSettings
from outbox.operator.look.redact import Redactor
from outbox.settings import Settings

if TYPE_CHECKING:
    from outbox.console.app import Metrics
    from outbox.console.context import Console

PREFIX = "OUTBOX_CONSOLE_"
#: What is read from a file where the variable with ``_FILE`` at its end names one.
_SECRET = frozenset({"DATABASES", "USERS", "TOKENS", "SESSION_KEY"})
_NAMES = frozenset({
    "DATABASES", "HOST", "PORT", "READ_ONLY", "ALLOWED_HOSTS", "TRUSTED_ORIGINS", "TRUSTED_PROXIES", "ENV", "USERS",
    "TOKENS", "USER_HEADER", "USER_ROLES", "USER_DEFAULT_ROLE", "SESSION_KEY", "PAYLOAD", "METRICS", "ROOT_PATH",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class ConsoleConfig:
    """All options of a console of its own; see `create_console_router` for those of the same name.

    ``databases`` are URLs by name. ``users`` maps names to ``(hash, role)``, ``tokens`` hashes to principals.
    ``user_header`` is the header in which a trusted proxy names the user, ``user_roles`` their roles,
    ``user_default_role`` that of all others. ``payload`` is hidden, masked or full. ``root_path`` is the prefix that a
    proxy takes off.

    Raises:
        InvalidSettings: an option that isn't one.
    """

    databases: Mapping[str, str] = field(repr=False)
    host: str = "127.0.0.1"
    port: int = 8900
    read_only: bool = False
    allowed_hosts: tuple[str, ...] | None = None
    trusted_origins: tuple[str, ...] = ()
    trusted_proxies: tuple[str, ...] = ()
    env: str | None = None
    users: Mapping[str, tuple[str, Role]] = field(default_factory=dict, repr=False)
    tokens: Mapping[str, Principal] = field(default_factory=dict, repr=False)
    user_header: str | None = None
    user_roles: Mapping[str, Role] = field(default_factory=dict)
    user_default_role: Role | None = None
    session_key: str | None = field(default=None, repr=False)
    payload: str = "masked"
    metrics: str = "off"
    root_path: str = ""
    settings: Settings = field(default_factory=Settings)

    def __post_init__(self) -> None:
        if not self.databases:
            raise InvalidSettings("no database: set OUTBOX_DATABASE_URL, or OUTBOX_CONSOLE_DATABASES=name=url …")
        if not 0 <= self.port <= 65535:
            raise InvalidSettings(f"port {self.port} must be 0 to 65535")
        _one_of("payload", self.payload, ("hidden", "masked", "full"))
        _one_of("metrics", self.metrics, ("off", "authenticated", "open"))
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

    def authorizer(self) -> Authorizer | None:
        """Return who may come in; None where nothing is configured."""
        ways: list[Any] = []
        if self.user_header:
            ways.append(TrustedHeader(self.user_header, roles=self.user_roles, default=self.user_default_role))
        if self.tokens:
            ways.append(Bearer(self.tokens, session_key=self.session_key))
        if self.users:
            ways.append(Basic(self.users))
        return (ways[0] if len(ways) == 1 else AnyOf(*ways)) if ways else None

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, **overrides: Any) -> ConsoleConfig:
        """Return the configuration of the environment; ``overrides`` that aren't None go before it.

        Lists are separated by commas or white space: ``DATABASES`` of ``name=url`` (default: ``OUTBOX_DATABASE_URL``),
        ``USERS`` of ``name:role:hash`` (by `hash_password`), ``TOKENS`` of ``name:role:hash`` (by `hash_token`),
        ``USER_ROLES`` of ``name=role``. ``OUTBOX_CONSOLE_USERS_FILE`` names a file with the value; so do
        ``DATABASES_FILE``, ``TOKENS_FILE``, ``SESSION_KEY_FILE``.

        Raises:
            InvalidSettings: a variable that can't be read, or isn't one; names it, and of a secret not its value.
        """
        environ = os.environ if environ is None else environ
        given = {name.removeprefix(PREFIX): text for name, text in environ.items() if name.startswith(PREFIX)}
        unknown = {name for name in given if name not in _NAMES and name.removesuffix("_FILE") not in _SECRET}
        if unknown:
            raise InvalidSettings(f"{PREFIX}{min(unknown)} isn't a setting; there are: {', '.join(sorted(_NAMES))}")
        values: dict[str, Any] = {}
        for name, read in _READERS.items():
            if (text := _text_of(name, given)) is not None:
                values[name.lower()] = read(name, text)
        values |= {name: value for name, value in overrides.items() if value is not None}
        if not values.get("databases") and (url := environ.get("OUTBOX_DATABASE_URL")):
            values["databases"] = named_databases([url])
        values.setdefault("databases", {})
        values.setdefault("settings", Settings.from_env(environ))
        return cls(**values)


def named_databases(urls: list[str]) -> dict[str, str]:
    """Return URLs by name: each is ``name=url``, or an URL, which then has the name of its database.

    Raises:
        InvalidSettings: two have the same name, or a URL can't be read; it isn't quoted, for it may have a password.
    """
    databases: dict[str, str] = {}
    for text in urls:
        head, separator, rest = text.partition("=")
        named = bool(separator) and "://" not in head
        url = rest if named else text
        try:
            name = head if named else make_url(url).database or "outbox"
        except ArgumentError:
            raise InvalidSettings(
                "a database URL can't be read; it must be like postgresql+psycopg://host/name"
            ) from None
        if name in databases:
            raise InvalidSettings(f"two databases are named {name!r}; give them as name=url")
        databases[name] = url
    return databases


def _text_of(name: str, given: Mapping[str, str]) -> str | None:
    path = given.get(f"{name}_FILE") if name in _SECRET else None
    if path is None:
        return given.get(name)
    try:
        return Path(path).read_text().strip()
    except OSError as error:
        raise InvalidSettings(f"{PREFIX}{name}_FILE={path!r} can't be read: {error.strerror}") from None


def _words(_: str, text: str) -> tuple[str, ...]:
    return tuple(text.replace(",", " ").split())


def _flag(name: str, text: str) -> bool:
    if text.lower() not in {"1", "0", "true", "false", "yes", "no", "on", "off"}:
        raise InvalidSettings(f"{PREFIX}{name}={text!r} must be 1 or 0")
    return text.lower() in {"1", "true", "yes", "on"}


def _number(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise InvalidSettings(f"{PREFIX}{name}={text!r} must be a number") from None


def _users(name: str, text: str) -> dict[str, tuple[str, Role]]:
    return {user: (hashed, role) for user, role, hashed in _triples(name, text)}


def _tokens(name: str, text: str) -> dict[str, Principal]:
    return {hashed: Principal.of(owner, role) for owner, role, hashed in _triples(name, text)}


def _triples(name: str, text: str) -> list[tuple[str, Role, str]]:
    triples = []
    for number, word in enumerate(_words(name, text), 1):
        parts = word.rsplit(":", 2)
        if len(parts) != 3:
            raise InvalidSettings(f"{PREFIX}{name}: entry {number} must be name:role:hash")
        triples.append((parts[0], Role.named(parts[1]), parts[2]))
    return triples


def _roles(name: str, text: str) -> dict[str, Role]:
    pairs = [word.rpartition("=") for word in _words(name, text)]
    return {user: Role.named(role) for user, _, role in pairs}


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise InvalidSettings(f"{name} = {value!r} must be one of: {', '.join(allowed)}")


_READERS: Mapping[str, Callable[[str, str], Any]] = {
    "DATABASES": lambda name, text: named_databases(list(_words(name, text))),
    "HOST": lambda _, text: text,
    "PORT": _number,
    "READ_ONLY": _flag,
    "ALLOWED_HOSTS": _words,
    "TRUSTED_ORIGINS": _words,
    "TRUSTED_PROXIES": _words,
    "ENV": lambda _, text: text,
    "USERS": _users,
    "TOKENS": _tokens,
    "USER_HEADER": lambda _, text: text,
    "USER_ROLES": _roles,
    "USER_DEFAULT_ROLE": lambda _, text: Role.named(text),
    "SESSION_KEY": lambda _, text: text,
    "PAYLOAD": lambda _, text: text,
    "METRICS": lambda _, text: text,
    "ROOT_PATH": lambda _, text: text.rstrip("/"),
}


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
    _ = console.source()
    with _listening(config) as listener:
        host, port = listener.getsockname()[:2]
        tell(f"outbox console: http://{f'[{host}]' if ':' in host else host}:{port}{config.root_path}/")
        for name in console.source.missing:
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
