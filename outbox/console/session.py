"""Sessions of people who log in with a token by a page: a signed cookie, and nothing kept on the server."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import secrets
import time

from outbox.console.hashes import Tokens
from outbox.console.permissions import Principal
from outbox.console.throttle import Throttle
from outbox.errors import InvalidSettings

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
