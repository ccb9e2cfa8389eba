"""Passwords and tokens: only their hashes are kept, and comparing takes the same time whatever differs."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping, Sequence

from outbox.console.permissions import Principal
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
                    "characters; outbox.console.hashes.hash_token makes it"
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


def _text(value: bytes) -> str:
    return base64.urlsafe_b64encode(value).decode().rstrip("=")


def _bytes(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
