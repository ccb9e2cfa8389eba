"""Logging in with a token by a page, for people: the token is typed, so it never is in a URL, a log or a history.

What the browser keeps is a cookie that only the console can read and make (see `outbox.console.login`).

Sessions of people who log in with a token by a page: a signed cookie, and nothing kept on the server.

Passwords and tokens: only their hashes are kept, and comparing takes the same time whatever differs.

Slows down who guesses passwords.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import logging
import math
import re
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Annotated

from fastapi import APIRouter, Form, Query, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse
from jinja2 import Environment

from outbox.console.console import Console
from outbox.console.pages import routes
from outbox.console.permissions import Principal
from outbox.console.problems import Problem, log
from outbox.console.routing import console_router
from outbox.errors import InvalidSettings

#: scrypt's cost (a power of two), block size and parallelism: 16 MB and a fifth of a second, as OWASP has it.
_COST, _BLOCK, _PARALLEL = 14, 8, 5
_MOST_COST = 17
_MEMORY = 256 * 1024 * 1024


def hash_password(password: str, *, cost: int = _COST) -> str:
    """Return what is kept of a password: ``scrypt$cost$block$parallel$salt$hash``."""
    salt = secrets.token_bytes(16)
    derived = _derive(password, salt, cost, _BLOCK, _PARALLEL)
    return "$".join(["scrypt", str(cost), str(_BLOCK), str(_PARALLEL), _text(salt), _text(derived)])


def verify_password(password: str, hashed: str) -> bool:
    """Tell whether a password is the one that was hashed.

    Raises:
        InvalidSettings: the hash isn't one of `hash_password`.
    """
    cost, block, parallel, salt, expected = _parts(hashed)
    return hmac.compare_digest(_derive(password, salt, cost, block, parallel), expected)


def hash_of_nobody(others: Sequence[str]) -> str:
    """Return a hash that no password has, and which takes as long to compare with as the others."""
    cost, block, parallel, *_ = _parts(others[0]) if others else (_COST, _BLOCK, _PARALLEL)
    random = _text(secrets.token_bytes(16)), _text(secrets.token_bytes(32))
    return "$".join(["scrypt", str(cost), str(block), str(parallel), *random])


def check_hash(hashed: str) -> str:
    """Return a hash of `hash_password` as it is.

    Raises:
        InvalidSettings: it isn't one.
    """
    _parts(hashed)
    return hashed


def hash_token(token: str) -> str:
    """Return what is kept of a token: its SHA-256, in hexadecimal. Tokens are random, so it needs no salt."""
    return hashlib.sha256(token.encode()).hexdigest()


class Tokens:
    """Principals by the hashes of their tokens.

    Raises:
        InvalidSettings: a key isn't a hash of `hash_token`.
    """

    def __init__(self, principals: Mapping[str, Principal]) -> None:
        for hashed in principals:
            if not re.fullmatch(r"[0-9a-f]{64}", hashed):
                raise InvalidSettings(
                    f"a token is given by its SHA-256 (64 hexadecimal digits, in lower case), not by {len(hashed)} "
                    "characters; outbox.console.login.hash_token makes it"
                )
        self._principals = dict(principals)

    def find(self, token: str) -> tuple[str, Principal] | None:
        """Return the principal of a token, and the name under which its sessions know it."""
        presented = hash_token(token)
        matches = [hashed for hashed in self._principals if hmac.compare_digest(hashed, presented)]
        return (_subject(matches[0]), self._principals[matches[0]]) if matches else None

    def of_subject(self, subject: str) -> Principal | None:
        """Return the principal of the token that a session was opened with, if it is still good."""
        return next(
            (p for hashed, p in self._principals.items() if hmac.compare_digest(_subject(hashed), subject)), None
        )


def _subject(hashed: str) -> str:
    return hashlib.sha256(f"session:{hashed}".encode()).hexdigest()[:32]


def _derive(password: str, salt: bytes, cost: int, block: int, parallel: int) -> bytes:
    return hashlib.scrypt(password.encode(), salt=salt, n=2**cost, r=block, p=parallel, maxmem=_MEMORY, dklen=32)


def _parts(hashed: str) -> tuple[int, int, int, bytes, bytes]:
    match = re.fullmatch(r"scrypt\$(\d{1,2})\$(\d{1,2})\$(\d{1,2})\$([\w-]+)\$([\w-]+)", hashed, re.ASCII)
    if match:
        cost, block, parallel = (int(match[n]) for n in (1, 2, 3))
        try:
            salt, expected = _bytes(match[4]), _bytes(match[5])
        except binascii.Error:
            match = None
    if not match or not (1 <= cost <= _MOST_COST and 1 <= block <= 16 and 1 <= parallel <= 16 and len(expected) == 32):
        raise InvalidSettings(
            f"the hash of a password must look like scrypt${_COST}${_BLOCK}${_PARALLEL}$salt$hash; "
            "outbox console hash-password makes it"
        )
    return cost, block, parallel, salt, expected


class Throttle:
    """Counts failed logins by who and from where; after ``free`` of them each next one has to wait twice as long.

    At most ``most`` are remembered, those that failed last, each for ``memory`` seconds.
    """

    def __init__(
        self,
        *,
        free: int = 5,
        longest: float = 300.0,
        memory: float = 900.0,
        most: int = 10_000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._free, self._longest, self._memory, self._most, self._clock = free, longest, memory, most, clock
        self._failures: OrderedDict[Hashable, tuple[int, float]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._failures)

    def check(self, who: Hashable) -> None:
        """Refuse who has to wait.

        Raises:
            Problem: (429) too many logins have failed; ``Retry-After`` says how many seconds are left.
        """
        with self._lock:
            count, last = self._failures.get(who, (0, 0.0))
        left = last + self._wait(count) - self._clock() if count else 0.0
        if left > 0:
            seconds = str(math.ceil(left))
            raise Problem(
                "too-many-attempts",
                f"too many logins have failed; try again in {seconds} s",
                headers={"Retry-After": seconds},
            )

    def failed(self, who: Hashable) -> None:
        """Count a failed login."""
        now = self._clock()
        with self._lock:
            count, last = self._failures.pop(who, (0, now))
            self._failures[who] = (1 if now - last > self._memory else count + 1, now)
            while len(self._failures) > self._most:
                self._failures.popitem(last=False)

    def succeeded(self, who: Hashable) -> None:
        """Forget the failures of somebody who has logged in."""
        with self._lock:
            self._failures.pop(who, None)

    def _wait(self, count: int) -> float:
        return min(2.0 ** min(count - self._free, 30), self._longest) if count >= self._free else 0.0


#: The name of the cookie.
COOKIE = "outbox_console"
_LONGEST_COOKIE = 1000


class Sessions:
    """Opens and recognises sessions; each ends with its token, after ``seconds``, or with the process.

    The cookie names the token (not what may be done with it) and is signed by HMAC-SHA-256, for which the standard
    library is enough. Without ``key`` the process makes one of its own: nothing to configure, nothing to leak, and a
    restart logs everybody out. Several processes behind one address need the same key (at least 32 characters).

    Raises:
        InvalidSettings: the key is too short.
    """

    def __init__(self, tokens: Tokens, throttle: Throttle, *, key: str | None = None, seconds: int = 12 * 3600) -> None:
        if key is not None and len(key) < 32:
            raise InvalidSettings(f"the session key has {len(key)} characters; it must have at least 32, and be random")
        self._tokens, self._throttle, self.seconds = tokens, throttle, seconds
        self._key = key.encode() if key is not None else secrets.token_bytes(32)

    def log_in(self, token: str, client: str) -> str | None:
        """Return the value of the cookie for who has this token; None if it isn't a token.

        Raises:
            Problem: (429) too many have failed from this address.
        """
        self._throttle.check(client)
        if (found := self._tokens.find(token.strip())) is None:
            self._throttle.failed(client)
            return None
        self._throttle.succeeded(client)
        return self._sign(json.dumps([found[0], int(time.time()) + self.seconds]).encode())

    def principal(self, cookie: str | None) -> Principal | None:
        """Return whose session a cookie is; None if it was forged, has expired, or its token is gone."""
        content = self._verified(cookie or "")
        if content is None:
            return None
        subject, expires = json.loads(content)
        return self._tokens.of_subject(subject) if time.time() < expires else None

    def _sign(self, content: bytes) -> str:
        return f"{_text(content)}.{_text(hmac.digest(self._key, content, hashlib.sha256))}"

    def _verified(self, cookie: str) -> bytes | None:
        text, _, signature = cookie[:_LONGEST_COOKIE].partition(".")
        try:
            content, presented = _bytes(text), _bytes(signature)
        except (binascii.Error, ValueError):
            return None
        return content if hmac.compare_digest(hmac.digest(self._key, content, hashlib.sha256), presented) else None


def _text(value: bytes) -> str:
    return base64.urlsafe_b64encode(value).decode().rstrip("=")


def _bytes(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


_PAGE = Environment(autoescape=True).from_string("""\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Log in · outbox console</title>
<link rel="icon" type="image/svg+xml" href="{{ icon }}">
<link rel="stylesheet" href="{{ css }}">
</head>
<body class="login">
<main>
<h1>outbox console</h1>
{% if message %}<p class="banner bad" role="alert">{{ message }}</p>
{% endif %}<form method="post" action="{{ action }}">
<input type="hidden" name="next" value="{{ next }}">
<p><label for="token">Token</label>
<input id="token" name="token" type="password" autocomplete="current-password" required autofocus></p>
<p><button type="submit" class="primary">Log in</button></p>
</form>
<p>Started with <code>outbox console</code>? Its terminal shows the token. Otherwise ask whoever runs the console.</p>
<p>Logged in already? <a href="{{ onward }}">Go on</a>.</p>
</main>
</body>
</html>
""")

#: A path below the console's root: nothing that a browser could take for another host.
_BELOW = re.compile(r"/(?![/\\])[^\\\x00-\x20\x7f]*")


def login_routes(console: Console) -> APIRouter:
    """Return the pages for logging in and out; nothing where nobody logs in by a page."""
    router = console_router(
        console, render=lambda request, problem: _page(console, request, problem=problem), public=True
    )
    if console.sessions is not None:
        _add(router, console, console.sessions)
    return router


def _add(router: APIRouter, console: Console, sessions: Sessions) -> None:
    @router.get("/login", include_in_schema=False)
    def login(request: Request, onward: Annotated[str, Query(alias="next")] = "/") -> Response:
        """Show the page for logging in."""
        return _page(console, request, onward)

    @router.post("/login", include_in_schema=False)
    def log_in(
        request: Request, token: Annotated[str, Form()], onward: Annotated[str, Form(alias="next")] = "/"
    ) -> Response:
        """Log in with a token: set the cookie, and go where the person wanted to."""
        facts = console.facts(request)
        cookie = sessions.log_in(token, facts.client)
        if cookie is None:
            log(logging.WARNING, "login.failed", client=facts.client, request_id=facts.request_id)
            return _page(console, request, onward, Problem("unauthenticated", "That isn't a token of this console."))
        log(logging.INFO, "login.succeeded", client=facts.client, request_id=facts.request_id)
        response = RedirectResponse(facts.base + _below(onward), 303)
        response.set_cookie(
            COOKIE,
            cookie,
            max_age=sessions.seconds,
            path=facts.base or "/",
            secure=facts.secure,
            httponly=True,
            samesite="strict",
        )
        return response

    @router.post("/logout", include_in_schema=False)
    def log_out(request: Request) -> Response:
        """Log out: take the cookie away."""
        facts = console.facts(request)
        response = RedirectResponse(console.path(request, "login"), 303)
        response.delete_cookie(COOKIE, path=facts.base or "/", secure=facts.secure, httponly=True, samesite="strict")
        return response


def _page(console: Console, request: Request, onward: str = "/", problem: Problem | None = None) -> Response:
    below = _below(onward)
    content = _PAGE.render(
        icon=console.path(request, "static", routes.by_file()["icon.svg"].name),
        css=console.path(request, "static", routes.by_file()["console.css"].name),
        action=console.path(request, "login"),
        next=below,
        onward=console.facts(request).base + below,
        message=problem.detail if problem else None,
    )
    return HTMLResponse(content, problem.status if problem else 200, dict(problem.headers) if problem else None)


def _below(path: str) -> str:
    return path if _BELOW.fullmatch(path) else "/"
