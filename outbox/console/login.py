"""What people and programs log in with: hashes of passwords, tokens, the throttle of guesses, and sessions.

Only hashes of passwords and tokens are stored, and a comparison takes the same time whatever differs. A session is a
signed cookie; the server stores nothing. The token is typed into a page, so it never is in a URL, a log or a history.
"""

from __future__ import annotations

import base64
import binascii
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

    cost: int
    block: int
    parallel: int
    salt: bytes
    derived: bytes

    @classmethod
    def read(cls, text: str) -> PasswordHash:
        """Return the hash that a text is.

        Raises:
            InvalidSettings: the text isn't one of `hash_password`.
        """
        match = re.fullmatch(r"scrypt\$(\d{1,2})\$(\d{1,2})\$(\d{1,2})\$([\w-]+)\$([\w-]+)", text, re.ASCII)
        try:
            costs = [int(each) for each in match.groups()[:3]] if match else []
            found = cls(costs[0], costs[1], costs[2], _bytes(match[4]), _bytes(match[5])) if match else None
        except binascii.Error:
            found = None
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

    @classmethod
    def decoy(cls, like: PasswordHash | None) -> PasswordHash:
        """Return a hash that no password has, and which takes as long to compare with as another one."""
        return replace(
            like or cls(_COST, _BLOCK, _PARALLEL, b"", b""),
            salt=secrets.token_bytes(16),
            derived=secrets.token_bytes(32),
        )

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
    salted = PasswordHash(cost, _BLOCK, _PARALLEL, secrets.token_bytes(16), b"")
    return str(replace(salted, derived=salted.derive(password)))


def verify_password(password: str, hashed: str) -> bool:
    """Return whether a password is the one that was hashed.

    Raises:
        InvalidSettings: the hash isn't one of `hash_password`.
    """
    return PasswordHash.read(hashed).matches(password)


def hash_token(token: str) -> str:
    """Return what is stored of a token: its SHA-256, in hexadecimal. Tokens are random, so it needs no salt."""
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
                    f"a token is configured by its SHA-256 (64 lower-case hexadecimal digits), not by {len(hashed)} "
                    "characters; outbox.console.hash_token makes it"
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
        """Refuse a client that has to wait.

        Raises:
            Problem: (429) too many logins have failed; ``Retry-After`` says how many seconds are left.
        """
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
        """Return the value of the cookie for the owner of this token; None if it isn't a token.

        Raises:
            Problem: (429) too many have failed from this address.
        """
        self._throttle.check(client)
        if (found := self._tokens.find(token.strip())) is None:
            self._throttle.failed(client)
            return None
        self._throttle.succeeded(client)
        content = json.dumps([found[0], int(time.time()) + self.seconds]).encode()
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
        return self._tokens.of_subject(subject) if time.time() < expires else None

    def _signature(self, content: bytes) -> bytes:
        return hmac.digest(self._key, content, hashlib.sha256)


def _subject(hashed: str) -> str:
    return hashlib.sha256(f"session:{hashed}".encode()).hexdigest()[:32]


def _text(value: bytes) -> str:
    return base64.urlsafe_b64encode(value).decode().rstrip("=")


def _bytes(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
