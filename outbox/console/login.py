"""What people and programs log in with: hashes of passwords, tokens, the throttle of guesses, and sessions.

Only hashes of passwords and tokens are stored, and a comparison takes the same time whatever differs. A session is a
signed cookie; the server stores nothing. The token is typed into a page, so it never is in a URL, a log or a history.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import hmac
import json
import math
import re
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace

from outbox.console.permissions import Principal
from outbox.console.problems import Problem
from outbox.errors import InvalidSettings

#: scrypt's cost (a power of two), block size and parallelism: 16 MB and a fifth of a second, as OWASP has it.
_COST, _BLOCK, _PARALLEL = 14, 8, 5
_MOST_COST = 17
_MEMORY = 256 * 1024 * 1024


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

    def decoy(self) -> PasswordHash:
        """Return a hash that no password has, and which takes as long to compare with as this one."""
        return replace(self, salt=secrets.token_bytes(16), derived=secrets.token_bytes(32))

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
    """Return what is stored of a password: ``scrypt$cost$block$parallel$salt$hash``."""
    salted = PasswordHash(salt=secrets.token_bytes(16), cost=cost)
    return str(replace(salted, derived=salted.derive(password)))


def hash_token(token: str) -> str:
    """Return what is stored of a token: its SHA-256, in hexadecimal. Tokens are random, so it needs no salt."""
    return hashlib.sha256(token.encode()).hexdigest()


class Throttle:
    """Counts failed logins by client; after ``free`` of them each next one has to wait twice as long, in seconds.

    At most ``most`` clients are remembered, those that failed last, each for ``memory`` seconds.
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

    def check(self, client: Hashable) -> None:
        """Refuse a client that has to wait by a `Problem` (429); ``Retry-After`` says how many seconds are left."""
        with self._lock:
            count, last = self._failures.get(client, (0, 0.0))
        wait = min(2.0 ** min(count - self._free, 30), self._longest) if count >= self._free else 0.0
        if count and (left := last + wait - self._clock()) > 0:
            seconds = str(math.ceil(left))
            raise Problem(
                "too-many-attempts",
                f"too many logins have failed; try again in {seconds} s",
                headers={"Retry-After": seconds},
            )

    def failed(self, client: Hashable) -> None:
        """Count a failed login."""
        now = self._clock()
        with self._lock:
            count, last = self._failures.pop(client, (0, now))
            self._failures[client] = (1 if now - last > self._memory else count + 1, now)
            while len(self._failures) > self._most:
                self._failures.popitem(last=False)

    def succeeded(self, client: Hashable) -> None:
        """Forget the failures of a client that has logged in."""
        with self._lock:
            self._failures.pop(client, None)


#: The name of the cookie.
COOKIE = "outbox_console"
_LONGEST_COOKIE = 1000


class Sessions:
    """Finds the principals of tokens, and opens and recognises their sessions.

    ``tokens`` maps the hash of a token (by `hash_token`) to its principal. A session ends with its token, after
    ``seconds``, or with the process. Its cookie names the token (not what may be done with it) and is signed by
    HMAC-SHA-256, for which the standard library is enough. Without ``key`` the process makes one of its own: nothing to
    configure, nothing to leak, and a restart logs everybody out. Several processes behind one address need the same
    key (at least 32 characters).

    Raises:
        InvalidSettings: a key of ``tokens`` isn't a hash, or the key is too short.
    """

    def __init__(
        self,
        tokens: Mapping[str, Principal],
        throttle: Throttle | None = None,
        *,
        key: str | None = None,
        seconds: int = 12 * 3600,
    ) -> None:
        for hashed in tokens:
            if not re.fullmatch(r"[0-9a-f]{64}", hashed):
                raise InvalidSettings(
                    f"a token is configured by its SHA-256 (64 lower-case hexadecimal digits), not by {len(hashed)} "
                    "characters; outbox.console.hash_token makes it"
                )
        if key is not None and len(key) < 32:
            raise InvalidSettings(f"the session key has {len(key)} characters; it must have at least 32, and be random")
        self._tokens, self._throttle, self.seconds = dict(tokens), throttle or Throttle(), seconds
        self._key = key.encode() if key is not None else secrets.token_bytes(32)

    def find(self, token: str, client: str) -> tuple[str, Principal] | None:
        """Return the hash of a token that a client sent, and its principal; None if it isn't one, or raise a 429."""
        self._throttle.check(client)
        presented = hash_token(token)
        matches = [hashed for hashed in self._tokens if hmac.compare_digest(hashed, presented)]
        if not matches:
            self._throttle.failed(client)
            return None
        return matches[0], self._tokens[matches[0]]

    def log_in(self, token: str, client: str) -> str | None:
        """Return the value of the cookie for the owner of this token; as `find`."""
        if (found := self.find(token.strip(), client)) is None:
            return None
        self._throttle.succeeded(client)
        content = json.dumps([_subject(found[0]), int(time.time()) + self.seconds]).encode()
        return f"{_text(content)}.{_text(self._signature(content))}"

    def principal(self, cookie: str | None) -> Principal | None:
        """Return whose session a cookie is; None if it was forged, has expired, or its token is gone."""
        text, _, signature = (cookie or "")[:_LONGEST_COOKIE].partition(".")
        try:
            content, presented = _bytes(text), _bytes(signature)
        except ValueError:
            return None
        if not hmac.compare_digest(self._signature(content), presented):
            return None
        subject, expires = json.loads(content)
        if time.time() >= expires:
            return None
        matches = (p for hashed, p in self._tokens.items() if hmac.compare_digest(_subject(hashed), subject))
        return next(matches, None)

    def _signature(self, content: bytes) -> bytes:
        return hmac.digest(self._key, content, hashlib.sha256)


def _subject(hashed: str) -> str:
    return hashlib.sha256(f"session:{hashed}".encode()).hexdigest()[:32]


def _text(value: bytes) -> str:
    return base64.urlsafe_b64encode(value).decode().rstrip("=")


def _bytes(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
