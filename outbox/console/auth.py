"""Authentication: authorizers for passwords, tokens and proxies, or any FastAPI dependency of the application.

An authorizer is a FastAPI dependency, sync or async, that returns a `Principal`, or None for a stranger. Those here are
objects that are called with the request.

Only hashes of passwords and tokens are stored, and a comparison takes the same time whatever differs. A session is a
signed cookie; stored is only which sessions have been ended: in the process, and where several processes may share a
key, in the audit of each database. The token is typed into a page, so it never is in a URL, a log or a history.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import hashlib
import hmac
import inspect
import json
import math
import re
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from fastapi import Depends, Request
from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError
from starlette.concurrency import run_in_threadpool

from outbox.acts.whole_acts import LOG_OUT
from outbox.console.context import SAFE_METHODS, VIEW, Authorizer, Context, Principal, RequestContext, Role, context_of
from outbox.console.events import LoginFailed
from outbox.console.problems import Problem
from outbox.database.execute import Template, execute
from outbox.database.sql import audit
from outbox.errors import InvalidSettings, OutboxError
from outbox.operator.databases import Database, is_away, read_each
from outbox.telemetry.hooks import emit

E = TypeVar("E", bound=Callable[..., Any])

_LONGEST_COOKIE = 1000
#: Tell whether a session was ended. Rows: ``(ended,)``.
_ENDED = Template(f"SELECT EXISTS (SELECT FROM {{s}}.audit WHERE target = %(session)s AND action = '{LOG_OUT}')")
_REALM = 'Basic realm="outbox console", charset="UTF-8"'
_REMEMBERED = 256
#: After so many wrong passwords from one address, for whatever names, only those of users are compared, and what is
#: wrong is told after so many seconds.
_SPRAYED, _DELAY = 20, 1.0
#: How many passwords are tried at once: each takes 16 MB and a processor.
_TRIES = 2
#: scrypt's cost (a power of two), block size and parallelism: 16 MB and a fifth of a second, as OWASP has it.
_COST, _BLOCK, _PARALLEL = 14, 8, 5
_MOST_COST = 17
_MEMORY = 256 * 1024 * 1024


def authentication(authorizer: Authorizer) -> Callable[..., Awaitable[None]]:
    """Return a dependency that lets in a sender known to the authorizer, to act only unless the console only reads.

    An endpoint that changes nothing although its method is POST is marked by `only_reads`.

    Raises (the dependency):
        Problem: (401) an unknown sender; (403) no permission to see anything, or an act in read-only mode.
        TypeError: the authorizer returned something else.
    """
    is_plain = inspect.isroutine(authorizer) or inspect.isclass(authorizer)
    # FastAPI reads the annotations of a method, but can't resolve those of an object that is called.
    dependency = authorizer if is_plain else authorizer.__call__  # type: ignore[operator]  # an object that is called

    async def authenticate(request: Request, context: Context, found: Any = Depends(dependency)) -> None:  # noqa: B008 - FastAPI's way
        found = await found if inspect.isawaitable(found) else found
        if found is not None and not isinstance(found, Principal):
            raise TypeError(f"the authorizer returned {type(found).__name__}; it must return a Principal or None")
        context.identity = found
        context.demand(VIEW)
        if context.is_export:
            context.search()
        reads = request.method in SAFE_METHODS or getattr(request.scope["endpoint"], "only_reads", False)
        context.acts = not reads
        if context.console.read_only and not reads:
            raise Problem.read_only()

    return authenticate


def only_reads(endpoint: E) -> E:
    """Mark an endpoint that changes nothing, although its method is POST: it works in a console that only reads."""
    endpoint.only_reads = True  # type: ignore[attr-defined]  # a mark that authentication reads
    return endpoint


class AllowAll:
    """Let every sender in, as an admin or as ``role`` says. For a laptop; never where others reach the console."""

    def __init__(self, role: Role | str = Role.ADMIN) -> None:
        self._principal = Principal.of("anonymous", role)

    def __call__(self, request: Request) -> Principal:  # noqa: ARG002 - as all authorizers are called
        """Return the same principal for every request."""
        return self._principal


class Basic:
    """Names and passwords, for which the browser has a dialog (HTTP Basic).

    ``users`` maps a name to ``(hash, role)``, the hash by `hash_password`. Failed logins are slowed down by name and
    address. Where many names are tried from one address, a right password lets in all the same: names that there aren't
    cost no comparison there, and each wrong answer takes a second, in which it keeps no other request waiting. A
    password that was right is recognised by a keyed digest for as long as the process runs, since scrypt is slow on
    purpose and browsers send the password each time. It is called with ``await``.

    Raises:
        InvalidSettings: a hash or role that isn't one.
    """

    challenges: tuple[str, ...] = (_REALM,)
    schemes: Mapping[str, Mapping[str, str]] = {"basic": {"type": "http", "scheme": "basic"}}

    def __init__(self, users: Mapping[str, tuple[str, Role | str]], *, throttle: Throttle | None = None) -> None:
        self._users = {
            name: (PasswordHash.read(hashed), Principal.of(name, role)) for name, (hashed, role) in users.items()
        }
        self._throttle = throttle or Throttle()
        # Of an unknown user: no password has it, and it takes as long to compare with.
        costs = max((hashed for hashed, _ in self._users.values()), key=lambda each: each.cost, default=PasswordHash())
        self._decoy = replace(costs, salt=secrets.token_bytes(16), derived=secrets.token_bytes(32))
        self._key = secrets.token_bytes(32)
        self._right: OrderedDict[bytes, None] = OrderedDict()
        # Threads of their own, so that a flood of passwords takes none of those that answer requests.
        self._comparing = ThreadPoolExecutor(_TRIES, "outbox-passwords")

    async def __call__(self, request: Request) -> Principal | None:
        """Return the user whose name came with the right password; raise a `Problem` (429) if too many have failed."""
        if (sent := _credentials(request, "basic")) is None:
            return None
        try:
            name, colon, password = base64.b64decode(sent, validate=True).decode().partition(":")
        except ValueError:  # base64, its letters, or UTF-8
            return None
        if not colon:
            return None
        hashed, principal = self._users.get(name, (self._decoy, None))
        digest = hmac.digest(self._key, f"{hashed}:{name}:{password}".encode(), hashlib.sha256)
        # A user that is in stays in, whatever others try from the same address.
        if digest in self._right:
            return principal
        context, loop = context_of(request), asyncio.get_running_loop()
        attempt, began = (name[:100], context.client), loop.time()
        compare = partial(self._compare, hashed, password, attempt, is_user=principal is not None)
        async with context.slot.away():
            is_right, refusal = await loop.run_in_executor(self._comparing, compare)
        if not is_right or principal is None:
            # Of the user, but never a name that there isn't: a password may have been typed in its place.
            facts = context.facts
            facts["principal"] = principal.id if principal else None
            await run_in_threadpool(emit, LoginFailed(**facts))
            if refusal:
                async with context.slot.away():
                    await asyncio.sleep(began + _DELAY - loop.time())
                raise refusal
            return None
        self._right[digest] = None
        while len(self._right) > _REMEMBERED:
            self._right.popitem(last=False)
        return principal

    def _compare(
        self, hashed: PasswordHash, password: str, attempt: tuple[str, str], *, is_user: bool
    ) -> tuple[bool, Problem | None]:
        """Tell whether a password is right, and how a wrong one is refused; raise a `Problem` where its name waits."""
        _, address = attempt
        # Here, when its turn has come: of a flood all would have come before the first has failed.
        self._throttle.check(attempt)
        refusal = self._throttle.refusal(address, free=_SPRAYED)
        is_right = (is_user or refusal is None) and hashed.matches(password) and is_user
        if is_right:
            # Those of the address stay: a spray could have one right password in it.
            self._throttle.succeeded(attempt)
        else:
            self._throttle.failed(attempt)
            self._throttle.failed(address)
        return is_right, refusal


@dataclass(frozen=True, slots=True)
class ConsoleSession:
    """A session that a cookie stands for; ``expires`` and ``used`` (when last) are in seconds since 1970."""

    subject: str
    number: str
    expires: int
    used: int
    principal: Principal

    @property
    def audited(self) -> str:
        """Return its name in the audit, which doesn't tell its number."""
        return f"session/{hashlib.sha256(self.number.encode()).hexdigest()[:32]}"


class Bearer:
    """Accept tokens: from programs in the header ``Authorization: Bearer …``, from people on a page, for a session.

    ``tokens`` maps the hash of a token (by `hash_token`) to its principal. A session ends with its token, after
    ``seconds``, when it wasn't used for ``idle`` seconds, or with the process. The cookie says when it was used last,
    by the clock of the console's host, and is replaced with use; a page that refreshes itself doesn't use it. Its
    cookie names the token (not what may be done with it) and is signed by
    HMAC-SHA-256, for which the standard library is enough. Without ``session_key`` the process makes one of its own:
    nothing to configure, nothing to leak, and a restart logs all users out. Several processes behind one address need
    the same key (at least 32 characters).

    Logging out ends a session wherever copies of its cookie are. With a ``session_key``, every process that has the key
    learns that from the databases of the console: the end is written into the audit of each of them, or the logout is
    refused; and a session isn't believed while none of them can be read. A console that only reads can't write it:
    there a session ends in the process in which its owner logged out, and else with its time.

    Raises:
        InvalidSettings: a key of ``tokens`` isn't a hash, or the session key is too short.
    """

    challenges: tuple[str, ...] = ("Bearer",)
    schemes: Mapping[str, Mapping[str, str]] = {"bearer": {"type": "http", "scheme": "bearer"}}

    def __init__(
        self,
        tokens: Mapping[str, Principal],
        *,
        session_key: str | None = None,
        throttle: Throttle | None = None,
        seconds: int = 12 * 3600,
        idle: float = 3600,
    ) -> None:
        for hashed in tokens:
            if not re.fullmatch(r"[0-9a-f]{64}", hashed):
                raise InvalidSettings(
                    f"a token is configured by its SHA-256 (64 lower-case hexadecimal digits), not by {len(hashed)} "
                    "characters; outbox.console.hash_token makes it"
                )
        if session_key is not None and len(session_key) < 32:
            raise InvalidSettings(
                f"the session key has {len(session_key)} characters; it must have at least 32, and be random"
            )
        self.seconds: int = seconds
        self.idle: float = idle
        self._tokens, self._throttle = dict(tokens), throttle or Throttle()
        self._key = secrets.token_bytes(32) if session_key is None else session_key.encode()
        self._is_shared = session_key is not None
        #: The sessions that were ended here before their time, and when that would have been.
        self._ended: dict[str, int] = {}
        self._lock = threading.Lock()
        self.sessions = self

    def __call__(self, request: Request) -> Principal | None:
        """Return whose token was sent, or whose session it is; raise a `Problem` (429) if too many have failed."""
        context = context_of(request)
        if (token := _credentials(request, "bearer")) is None:
            return self._principal_of_session(context, request.cookies.get(context.cookie))
        if (found := self.find(token, context.client)) is None:
            emit(LoginFailed(**context.facts))
        return found and found[1]

    def find(self, token: str, client: str) -> tuple[str, Principal] | None:
        """Return the hash of a token that a client sent, and its principal; None if it isn't one, or raise a 429.

        A right one is never refused, whatever others send from the same address: tokens are too long to be guessed, so
        only wrong ones are slowed down.
        """
        presented = hash_token(token)
        matches = [hashed for hashed in self._tokens if hmac.compare_digest(hashed, presented)]
        if not matches:
            self._throttle.check(client)
            self._throttle.failed(client)
            return None
        return matches[0], self._tokens[matches[0]]

    def log_in(self, token: str, client: str) -> tuple[str, Principal] | None:
        """Return the value of the cookie for the owner of this token, and the owner; as `find`."""
        if (found := self.find(token.strip(), client)) is None:
            return None
        hashed, principal = found
        return self._cookie(_subject(hashed), int(time.time()) + self.seconds, secrets.token_urlsafe(12)), principal

    def _cookie(self, *session: str | int) -> str:
        content = json.dumps([*session, int(time.time())]).encode()
        return f"{_text(content)}.{_text(self._signature(content))}"

    def session(self, cookie: str | None) -> ConsoleSession | None:
        """Return the session of a cookie; None if it was forged, has expired or ended here, or its token is gone."""
        text, _, signature = (cookie or "")[:_LONGEST_COOKIE].partition(".")
        try:
            content, presented = _bytes(text), _bytes(signature)
        except ValueError:
            return None
        if not hmac.compare_digest(self._signature(content), presented):
            return None
        subject, expires, number, used = json.loads(content)
        if time.time() >= min(expires, used + self.idle) or number in self._ended:
            return None
        matches = (p for hashed, p in self._tokens.items() if hmac.compare_digest(_subject(hashed), subject))
        principal = next(matches, None)
        return ConsoleSession(subject, number, expires, used, principal) if principal else None

    def end(self, session: ConsoleSession, context: RequestContext) -> None:
        """End a session, wherever copies of its cookie are.

        Raises:
            Problem: (503) another process may still take it, since a database couldn't be told.
        """
        with self._lock:
            now = time.time()
            self._ended = {number: expires for number, expires in self._ended.items() if expires > now}
            self._ended[session.number] = session.expires
        if self._is_shared and not context.console.read_only:
            _record_end(session, context)

    def _principal_of_session(self, context: RequestContext, cookie: str | None) -> Principal | None:
        session = self.session(cookie)
        if session is None or (self._is_shared and _has_ended(session, context)):
            return None
        if context.by_hand and time.time() >= session.used + self.idle / 20:
            context.renewed = self._cookie(session.subject, session.expires, session.number)
        return session.principal

    def _signature(self, content: bytes) -> bytes:
        return hmac.digest(self._key, content, hashlib.sha256)


def _has_ended(session: ConsoleSession, context: RequestContext) -> bool:
    """Return whether a process has ended a session, as far as the databases can be read; one that knows it is enough.

    Raises:
        Problem: (503) none can be read, so that the answer is unknown.
    """
    found = read_each(context.console.source().databases.values(), partial(_is_recorded, session), [])
    if found:
        return any(found.values())
    raise Problem(
        "unavailable",
        "no database of this console can be read, so that it is unknown whether this session was ended elsewhere; a "
        "program may send the token itself: Authorization: Bearer …",
    )


def _is_recorded(session: ConsoleSession, connection: Connection, database: Database) -> bool:
    return bool(execute(connection, _ENDED(database.schema, session=session.audited))[0][0][0])


def _record_end(session: ConsoleSession, context: RequestContext) -> None:
    """Write into each database that a session was ended; raise a `Problem` (503) if one can't be told."""
    databases = context.console.source().databases
    missing = list(databases.away)
    for database in databases.values():
        try:
            with database.acting() as connection:
                if not _is_recorded(session, connection, database):
                    actor = context.actor
                    record = audit(database.schema, actor.name, LOG_OUT, session.audited, "", None, actor.origin)
                    execute(connection, record)
        except (SQLAlchemyError, OutboxError) as error:
            if not is_away(error):
                raise
            missing.append(database.name)
    if missing:
        raise Problem(
            "unavailable",
            f"you are logged out here, but not in other processes of the console: database {', '.join(missing)} can't "
            "be told; log out again when it is back, or have the session key changed",
        )


class TrustedHeader:
    """Believes a proxy that has authenticated the caller and says so in a header; only one of ``trusted_proxies``.

    ``header`` has the name. ``roles`` maps names to roles; with ``groups`` (the header with the groups, separated by
    commas) it maps groups, and the biggest role counts. A user without a role gets ``default``, or isn't let in.

    Raises:
        InvalidSettings: a role that isn't one.
    """

    needs_proxies = True

    def __init__(
        self,
        header: str = "X-Forwarded-User",
        *,
        roles: Mapping[str, Role | str] | None = None,
        groups: str | None = None,
        default: Role | str | None = None,
    ) -> None:
        self._header, self._groups = header, groups
        self._roles = {name: Role(role) for name, role in (roles or {}).items()}
        self._default = None if default is None else Role(default)

    def __call__(self, request: Request) -> Principal | None:
        """Return the user that the proxy names."""
        sent = request.headers.getlist(self._header)
        if not context_of(request).by_proxy or len(sent) != 1 or not (name := sent[0].strip()):
            return None
        among = re.split(r"\s*,\s*", request.headers.get(self._groups, "").strip()) if self._groups else [name]
        roles = [self._roles[one] for one in among if one in self._roles]
        role = max(roles, key=list(Role).index, default=self._default)
        return None if role is None else Principal.of(name, role)


class AnyOf:
    """Let in each sender that one of some authorizers lets in, tried in turn; each is one of this module."""

    def __init__(self, *authorizers: Callable[[Request], Principal | Awaitable[Principal | None] | None]) -> None:
        if not authorizers:
            raise InvalidSettings("AnyOf needs at least one authorizer")
        self._authorizers = authorizers
        self.challenges: tuple[str, ...] = tuple(text for one in authorizers for text in getattr(one, "challenges", ()))
        #: How programs send credentials, as an OpenAPI document has it.
        self.schemes: Mapping[str, Mapping[str, str]] = {
            name: scheme for one in authorizers for name, scheme in getattr(one, "schemes", {}).items()
        }
        self.sessions: Bearer | None = next((one for one in authorizers if isinstance(one, Bearer)), None)
        self.needs_proxies: bool = any(getattr(one, "needs_proxies", False) for one in authorizers)

    async def __call__(self, request: Request) -> Principal | None:
        """Return the first principal that one of them knows; raise a `Problem` (429) if too many have failed."""
        for one in self._authorizers:
            found = await run_in_threadpool(one, request)
            if (principal := await found if isinstance(found, Awaitable) else found) is not None:
                return principal
        return None


def _credentials(request: Request, scheme: str) -> str | None:
    """Return what a header ``Authorization`` of this scheme has."""
    scheme_name, _, sent = request.headers.get("authorization", "").partition(" ")
    return sent.strip() if scheme_name.lower() == scheme and sent.strip() else None


# --- hashes and failed logins ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PasswordHash:
    """The scrypt hash of a password; as a text it is ``scrypt$cost$block$parallel$salt$hash``."""

    cost: int = _COST
    block: int = _BLOCK
    parallel: int = _PARALLEL
    salt: bytes = b""
    derived: bytes = b""

    @classmethod
    def read(cls, text: str) -> PasswordHash:
        """Return the hash that a text is; raise `InvalidSettings` if it isn't one of `hash_password`."""
        match = re.fullmatch(r"scrypt\$(\d{1,2})\$(\d{1,2})\$(\d{1,2})\$([\w-]+)\$([\w-]+)", text, re.ASCII)
        found = None
        with contextlib.suppress(binascii.Error):
            found = match and cls(int(match[1]), int(match[2]), int(match[3]), _bytes(match[4]), _bytes(match[5]))
        if not found or not (
            1 <= found.cost <= _MOST_COST
            and 1 <= found.block <= 16
            and 1 <= found.parallel <= 16
            and len(found.derived) == 32
        ):
            raise InvalidSettings(
                f"the hash of a password must look like scrypt${_COST}${_BLOCK}${_PARALLEL}$salt$hash; "
                "outbox console hash-password makes it"
            )
        return found

    def derive(self, password: str) -> bytes:
        """Return what scrypt makes of a password with this salt and these costs."""
        return hashlib.scrypt(
            password.encode(), salt=self.salt, n=2**self.cost, r=self.block, p=self.parallel, maxmem=_MEMORY, dklen=32
        )

    def matches(self, password: str) -> bool:
        """Return whether a password is the one that was hashed."""
        return hmac.compare_digest(self.derive(password), self.derived)

    def __str__(self) -> str:
        return f"scrypt${self.cost}${self.block}${self.parallel}${_text(self.salt)}${_text(self.derived)}"


def hash_password(password: str, *, cost: int = _COST) -> str:
    """Return the stored form of a password: ``scrypt$cost$block$parallel$salt$hash``."""
    salted = PasswordHash(salt=secrets.token_bytes(16), cost=cost)
    return str(replace(salted, derived=salted.derive(password)))


def hash_token(token: str) -> str:
    """Return the stored form of a token: its SHA-256, in hexadecimal. Tokens are random, so it needs no salt."""
    return hashlib.sha256(token.encode()).hexdigest()


@dataclass(eq=False, kw_only=True)
class Throttle:
    """Counts failed logins by client; after ``free`` of them each next one has to wait twice as long, in seconds.

    At most ``most`` clients are remembered, those that failed last, each for ``memory`` seconds.
    """

    free: int = 5
    longest: float = 300.0
    memory: float = 900.0
    most: int = 10_000
    clock: Callable[[], float] = time.monotonic
    _failures: OrderedDict[Hashable, tuple[int, float]] = field(default_factory=OrderedDict, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def __len__(self) -> int:
        return len(self._failures)

    def check(self, client: Hashable) -> None:
        """Refuse a client that has to wait by a `Problem` (429), as `refusal` has it."""
        if refusal := self.refusal(client):
            raise refusal

    def refusal(self, client: Hashable, *, free: int | None = None) -> Problem | None:
        """Return the `Problem` (429) of a client that has to wait: ``Retry-After`` says how many seconds are left.

        ``free`` is how many failures this one has, where it isn't the usual number.
        """
        free = self.free if free is None else free
        with self._lock:
            count, last = self._failures.get(client, (0, 0.0))
        wait = min(2.0 ** min(count - free, 30), self.longest) if count >= free else 0.0
        if not count or (left := last + wait - self.clock()) <= 0:
            return None
        seconds = str(math.ceil(left))
        detail = f"too many logins have failed; try again in {seconds} s"
        return Problem("too-many-attempts", detail, headers={"Retry-After": seconds})

    def failed(self, client: Hashable) -> None:
        """Count a failed login."""
        now = self.clock()
        with self._lock:
            count, last = self._failures.pop(client, (0, now))
            self._failures[client] = (1 if now - last > self.memory else count + 1, now)
            while len(self._failures) > self.most:
                self._failures.popitem(last=False)

    def succeeded(self, client: Hashable) -> None:
        """Forget the failures of a client that has logged in."""
        with self._lock:
            self._failures.pop(client, None)


def _subject(hashed: str) -> str:
    return hashlib.sha256(f"session:{hashed}".encode()).hexdigest()[:32]


def _text(value: bytes) -> str:
    return base64.urlsafe_b64encode(value).decode().rstrip("=")


def _bytes(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
