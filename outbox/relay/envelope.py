"""What a published message says beside its body: CloudEvents 1.0 in binary mode, so that the body's bytes stay as is.

Each message has the attributes ``id``, ``source``, ``specversion``, ``type``, ``time``, and as extensions
``partitionkey`` and ``subject`` (its key), ``outboxtopic``, ``outboxqueue``, ``sequence`` (its position, which tells of
gaps), ``outboxsend`` (more than 1: an operator sent it again; a duplicate of the transport has the same) and
``outboxtag``. Beside them the headers of the message keep their names, ``traceparent`` among them.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from string import Formatter
from urllib.parse import quote

from outbox.errors import InvalidHandler, InvalidMessage
from outbox.message.model import Message

# In the order in which `Envelope.headers` gives them.
_ATTRIBUTES = ["id", "source", "specversion", "type", "time", "partitionkey", "subject"]
_ATTRIBUTES += ["outboxtopic", "outboxqueue", "sequence", "outboxsend", "outboxtag"]

#: The header of a message that says its type, where that isn't its topic.
TYPE_HEADER = "type"

#: Where messages go: a text with ``{topic}``, ``{key}`` and ``{tag}``, or a function of the message.
Destination = str | Callable[[Message], str]

# What an HTTP header can have as its value, and NATS too (CloudEvents' HTTP binding, 3.1.3.2).
_AS_IT_IS = "".join(chr(code) for code in range(0x20, 0x7F) if chr(code) not in '"%')
_PLAIN = re.compile(f"[{re.escape(_AS_IT_IS)}]*")
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", re.ASCII)


def type_of_message(message: Message) -> str:
    """Return the type of a message: its header ``type``, or its topic."""
    return message.headers.get(TYPE_HEADER) or message.topic


@dataclass(frozen=True, slots=True)
class RelayRecord:
    """A message as it is published; ``id`` is its own for each send of an operator's, too."""

    message: Message
    destination: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def id(self) -> str:
        """What tells a repetition of the transport from a message that was sent or read again on purpose."""
        message = self.message
        return f"{message.id}.{message.send_number}.{message.passage}.{message.group}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """How messages are published: ``source`` is the attribute of this name, ``prefix`` comes before the attributes.

    ``names`` gives attributes other names, which have no prefix; an empty one leaves the attribute out. ``type_of``
    returns the type of a message; by default its header ``type``, or its topic.
    """

    source: str = "/outbox"
    prefix: str = "ce-"
    names: Mapping[str, str] = field(default_factory=dict)
    type_of: Callable[[Message], str] | None = None
    _called: Sequence[str] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.source:
            raise InvalidHandler("Envelope: source is empty; CloudEvents asks for a URI reference, such as '/shop'")
        if unknown := sorted(self.names.keys() - set(_ATTRIBUTES)):
            raise InvalidHandler(
                f"Envelope: names has {unknown[0]!r}, which is no attribute: those are {', '.join(sorted(_ATTRIBUTES))}"
            )
        called = tuple(self.names.get(attribute, self.prefix + attribute) for attribute in _ATTRIBUTES)
        object.__setattr__(self, "_called", called)

    def headers(self, message: Message) -> dict[str, str]:
        """Return the headers of a message, without the type of its content."""
        key = message.key
        values = (
            str(message.id),
            self.source,
            "1.0",
            (self.type_of or type_of_message)(message),
            f"{message.born_at.astimezone(dt.UTC).replace(tzinfo=None).isoformat()}Z",
            key,
            key,
            message.topic,
            str(message.queue),
            f"{message.position:020d}",
            str(message.send_number),
            message.tag,
        )
        called = zip(self._called, values, strict=True)
        return {**message.headers, **{name: value for name, value in called if name and value is not None}}


def ascii_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return headers as HTTP and NATS take them: values percent-encoded, names as they are.

    Raises:
        InvalidMessage: a name can't be one.
    """
    if wrong := [name for name in headers if not _is_token(name)]:
        raise InvalidMessage(f"header {wrong[0]!r} has a name that can't be sent; use letters, digits and hyphens")
    if _PLAIN.fullmatch("".join(headers.values())):  # as of most messages, and to look at each takes longest here
        return dict(headers)
    return {name: quote(value, safe=_AS_IT_IS) for name, value in headers.items()}


@lru_cache(1024)
def _is_token(name: str) -> bool:
    return _TOKEN.fullmatch(name) is not None


def destination_of(what: str, destination: Destination) -> Callable[[Message], str]:
    """Return the function that says where a message goes.

    Raises:
        InvalidHandler: a text with other fields.
    """
    if callable(destination):
        return destination
    try:
        fields = {name for _, name, _, _ in Formatter().parse(destination) if name is not None}
    except ValueError as error:
        raise InvalidHandler(f"{what} {destination!r} can't be read: {error}") from None
    if not fields <= {"topic", "key", "tag"} or not destination:
        raise InvalidHandler(f"{what} {destination!r} may have the fields {{topic}}, {{key}} and {{tag}}")
    return lambda message: destination.format(topic=message.topic, key=message.key or "", tag=message.tag or "")
