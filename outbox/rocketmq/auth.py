"""Tell which user has signed a request, and what it may do: AK, SK, and rights by topic and group.

The header ``authorization`` is ``MQv2-HMAC-SHA1 Credential=AK, SignedHeaders=x-mq-date-time, Signature=HEX``, and the
signature is the HMAC-SHA1 of the value of ``x-mq-date-time`` by the secret. Clients give a local time as if it were
UTC, so how fresh it is can't be judged: without TLS a signature that was overheard is good for ever.
"""

from __future__ import annotations

import binascii
import hashlib
import hmac
import re
from collections.abc import Mapping

from outbox.rocketmq.options import RocketmqOptions, UserOptions
from outbox.rocketmq.rules import Refused
from outbox.rocketmq.wire import Code

_ALGORITHM = "MQv2-HMAC-SHA1"
_PART = re.compile(r"\s*(\w+)=([^,]*)")
#: What a client may do where no users are declared.
ANYONE: UserOptions = UserOptions(send=("*",), receive=("*",), groups=("*",))


class Guard:
    """Lets requests in by the users of a server's options."""

    def __init__(self, options: RocketmqOptions) -> None:
        self._users = options.users
        self._secrets = options.secrets()

    def user_of(self, metadata: Mapping[str, str]) -> UserOptions:
        """Return the user that has signed a request; raise Refused if none has."""
        if not self._users:
            return ANYONE
        name, signature = _credential(metadata.get("authorization", ""))
        if (secret := self._secrets.get(name)) is None:
            raise Refused(Code.UNAUTHORIZED, f"User:{name} is not found.")
        signed = metadata.get("x-mq-date-time", "").encode()
        if not hmac.compare_digest(hmac.new(secret, signed, hashlib.sha1).digest(), signature):
            raise Refused(Code.UNAUTHORIZED, "check signature failed.")
        return self._users[name]


def _credential(header: str) -> tuple[str, bytes]:
    """Return the access key and the signature of a header."""
    algorithm, _, rest = header.partition(" ")
    parts = dict(_PART.findall(rest))
    # Go's client adds the name of a region.
    name = parts.get("Credential", "").partition("/")[0].strip()
    if not header or (algorithm == _ALGORITHM and not name):
        raise Refused(Code.UNAUTHORIZED, "username cannot be null.")
    try:
        if algorithm != _ALGORITHM:
            raise ValueError(algorithm)
        return name, binascii.unhexlify(parts.get("Signature", "").strip())
    except ValueError:
        raise Refused(Code.UNAUTHORIZED, "authentication header is incorrect.") from None


def must(allowed: bool, what: str) -> None:
    """Raise Refused unless a user may do what it asks for."""
    if not allowed:
        raise Refused(Code.FORBIDDEN, f"the user may not {what}")
