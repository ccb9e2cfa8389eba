"""Declare what a server offers, and to which users; read from the table ``[rocketmq]`` of a TOML file.

```toml
[rocketmq]
auto_create = false            # is a topic made by its first use?

[rocketmq.topics.orders]
type = "FIFO"                  # MIXED (default), NORMAL, FIFO, DELAY or TRANSACTION

[rocketmq.groups.mail]
fifo = true                    # messages of one message group one after the other
max_attempts = 5

[rocketmq.users.shop]          # its name is the access key
secret_env = "SHOP_SECRET"
send = ["orders", "order-*"]   # topics, as patterns
receive = ["orders"]
groups = ["mail"]
```
"""

from __future__ import annotations

import binascii
import hashlib
import hmac
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from outbox.errors import InvalidSettings
from outbox.reader import Reader, Seconds, option
from outbox.rocketmq.rules import Refused
from outbox.rocketmq.wire import WireCode
from outbox.settings import DELAY_LEVELS

TopicType = Literal["MIXED", "NORMAL", "FIFO", "DELAY", "TRANSACTION"]

#: As RocketMQ's own `retryMaxTimes`, and the delivery before the first retry.
_MAX_ATTEMPTS = 17


@dataclass(frozen=True, slots=True)
class ServedTopic:
    """What a topic takes; ``queues`` is its number of queues if the server makes it."""

    type: TopicType = "MIXED"
    queues: int | None = option(None, least=1, most=4096)


@dataclass(frozen=True, slots=True)
class GroupOptions:
    """How messages are delivered to a group.

    ``retry_delays`` are the pauses (seconds) before its retries, of which the last one is repeated. ``raise_nacks``: a
    push consumer that gives a message back at once waits for the delay of that attempt all the same; by default where
    the client is known to give back so.
    """

    fifo: bool = False
    max_attempts: int = option(_MAX_ATTEMPTS, least=1, most=1000)
    retry_delays: tuple[Seconds, ...] = DELAY_LEVELS
    start: Literal["first", "now"] = "first"
    raise_nacks: bool | None = None


@dataclass(frozen=True, slots=True)
class UserOptions:
    """A user with its secret, and the topics and groups that it may use, as patterns with ``*``."""

    secret: str | None = option(None, secret=True)
    secret_env: str | None = None
    send: tuple[str, ...] = ()
    receive: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()

    def may_send(self, topic: str) -> bool:
        """May it send to a topic, decide its halves, and recall what it has sent?"""
        return _fits(self.send, topic)

    def may_receive(self, topic: str, group: str) -> bool:
        """May it receive the messages of a topic for a group, and settle them?"""
        return _fits(self.receive, topic) and _fits(self.groups, group)

    def may_join(self, group: str) -> bool:
        """Tell whether it may be a consumer of a group, of any topic."""
        return _fits(self.groups, group)

    def may_see(self, topic: str) -> bool:
        """May it know of a topic?"""
        return _fits((*self.send, *self.receive), topic)


@dataclass(frozen=True, slots=True)
class NamedUser(UserOptions):
    """A user by its name, which is part of what it is: two users may have the same rights."""

    name: str = ""


def _fits(patterns: tuple[str, ...], name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


@dataclass(frozen=True, slots=True)
class RocketmqOptions:
    """What a server offers.

    Topics and groups that aren't named are as `ServedTopic` and `GroupOptions` are by default; a topic must be there
    unless ``auto_create``. With ``users`` each request must be signed by one of them; without, any client may do
    everything. ``recall`` lets clients take delayed messages back.

    Raises:
        InvalidSettings: (`of_file`) a value that can't be read, an unknown name, or a user without a secret.
    """

    auto_create: bool = False
    recall: bool = True
    topics: Mapping[str, ServedTopic] = field(default_factory=dict)
    groups: Mapping[str, GroupOptions] = field(default_factory=dict)
    users: Mapping[str, UserOptions] = field(default_factory=dict)

    def topic(self, name: str) -> ServedTopic:
        """Return what is said of a topic."""
        return self.topics.get(name, _TOPIC)

    def group(self, name: str) -> GroupOptions:
        """Return what is said of a group."""
        return self.groups.get(name, _GROUP)

    @classmethod
    def of_file(cls, path: Path) -> RocketmqOptions:
        """Return what the table ``[rocketmq]`` of a TOML file says."""
        try:
            table: dict[str, Any] = tomllib.loads(path.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise InvalidSettings(f"{path} can't be read as TOML: {error}") from None
        options = Reader().read(cls, table.get("rocketmq", {}), "rocketmq")
        return cls(
            options.auto_create,
            options.recall,
            options.topics,
            options.groups,
            {name: _with_secret(name, user) for name, user in options.users.items()},
        )


def _with_secret(name: str, user: UserOptions) -> UserOptions:
    secret = user.secret
    if user.secret_env is not None:
        if secret is not None:
            raise InvalidSettings(f"rocketmq.users.{name} has secret and secret_env; give one of them")
        secret = os.environ.get(user.secret_env)
    if not secret:
        where = (
            f"the variable {user.secret_env} is not set" if user.secret_env else "it has neither secret nor secret_env"
        )
        raise InvalidSettings(f"rocketmq.users.{name}: {where}; a user needs a secret to sign with")
    return UserOptions(secret, None, user.send, user.receive, user.groups)


_TOPIC, _GROUP = ServedTopic(), GroupOptions()


# --- letting in    ------------------------------------------------------------------------------------------------

# The header ``authorization`` is ``MQv2-HMAC-SHA1 Credential=AK, SignedHeaders=x-mq-date-time, Signature=HEX``, and the
# signature is the HMAC-SHA1 of the value of ``x-mq-date-time`` by the secret. Clients give a local time as if it were
# UTC, so how fresh it is can't be judged: without TLS a signature that was overheard is good for ever.
_ALGORITHM = "MQv2-HMAC-SHA1"
#: What a client may do where no users are declared.
ANYONE: NamedUser = NamedUser(send=("*",), receive=("*",), groups=("*",))


class UserGuard:
    """Lets requests in by the users of a server's options."""

    def __init__(self, options: RocketmqOptions) -> None:
        self._users = {
            name: NamedUser(user.secret, None, user.send, user.receive, user.groups, name)
            for name, user in options.users.items()
        }

    def user_of(self, metadata: Mapping[str, str]) -> NamedUser:
        """Return the user that has signed a request; raise Refused if none has."""
        if not self._users:
            return ANYONE
        name, signature = _credential(metadata.get("authorization", ""))
        if (user := self._users.get(name)) is None:
            raise Refused(WireCode.UNAUTHORIZED, f"User:{name} is not found.")
        signed = metadata.get("x-mq-date-time", "").encode()
        if not hmac.compare_digest(hmac.new((user.secret or "").encode(), signed, hashlib.sha1).digest(), signature):
            raise Refused(WireCode.UNAUTHORIZED, "check signature failed.")
        return user


def _credential(header: str) -> tuple[str, bytes]:
    """Return the access key and the signature of a header."""
    algorithm, _, rest = header.partition(" ")
    # Split, and searched by no expression: any client sends a header, signed or not.
    split = (part.partition("=") for part in rest.split(","))
    parts = {key.strip(): value for key, _, value in split}
    # Go's client adds the name of a region.
    name = parts.get("Credential", "").partition("/")[0].strip()
    if not header or (algorithm == _ALGORITHM and not name):
        raise Refused(WireCode.UNAUTHORIZED, "username cannot be null.")
    try:
        if algorithm != _ALGORITHM:
            raise ValueError(algorithm)
        return name, binascii.unhexlify(parts.get("Signature", "").strip())
    except ValueError:
        raise Refused(WireCode.UNAUTHORIZED, "authentication header is incorrect.") from None


def must(allowed: bool, what: str) -> None:
    """Raise Refused unless a user may do what it asks for."""
    if not allowed:
        raise Refused(WireCode.FORBIDDEN, f"the user may not {what}")
