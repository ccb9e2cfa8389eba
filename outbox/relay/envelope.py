"""What a published message says beside its body: CloudEvents 1.0 in binary mode, so that the body's bytes stay as is.

Each message has the attributes ``id``, ``source``, ``specversion``, ``type``, ``time``, and as extensions
``partitionkey`` and ``subject`` (its key), ``outboxtopic``, ``outboxqueue``, ``sequence`` (its position, which tells of
gaps), ``outboxsend`` (more than 1: an operator sent it again; a duplicate of the transport has the same) and
``outboxtag``. Beside them the headers of the message keep their names, ``traceparent`` among them.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from string import Formatter
from urllib.parse import quote

from outbox.errors import InvalidHandler, InvalidMessage
from outbox.message.model import Message

_ATTRIBUTES = {"id", "source", "specversion", "type", "time", "partitionkey", "subject", "sequence"}
_ATTRIBUTES |= {"outboxtopic", "outboxqueue", "outboxsend", "outboxtag"}

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

    def __post_init__(self) -> None:
        if not self.source:
            raise InvalidHandler("Envelope: source is empty; CloudEvents asks for a URI reference, such as '/shop'")
        if unknown := sorted(self.names.keys() - _ATTRIBUTES):
            raise InvalidHandler(
                f"Envelope: names has {unknown[0]!r}, which is no attribute: those are {', '.join(sorted(_ATTRIBUTES))}"
            )

    def headers(self, message: Message) -> dict[str, str]:
        """Return the headers of a message, without the type of its content."""
        attributes = {
            "id": str(message.id),
            "source": self.source,
            "specversion": "1.0",
            "type": (self.type_of or type_of_message)(message),
            "time": message.born_at.astimezone(dt.UTC).isoformat().replace("+00:00", "Z"),
            "partitionkey": message.key,
            "subject": message.key,
            "outboxtopic": message.topic,
            "outboxqueue": str(message.queue),
            "sequence": f"{message.position:020d}",
            "outboxsend": str(message.send_number),
            "outboxtag": message.tag,
        }
        headers = dict(message.headers)
        for attribute, value in attributes.items():
            name = self.names.get(attribute, self.prefix + attribute)
            if name and value is not None:
                headers[name] = value
        return headers


def ascii_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return headers as HTTP and NATS take them: values percent-encoded, names as they are.

    Raises:
        InvalidMessage: a name can't be one.
    """
    if wrong := [name for name in headers if not _TOKEN.fullmatch(name)]:
        raise InvalidMessage(f"header {wrong[0]!r} has a name that can't be sent; use letters, digits and hyphens")
    plain = _PLAIN.fullmatch  # most are, and to encode one takes longer than all else here
    return {name: value if plain(value) else quote(value, safe=_AS_IT_IS) for name, value in headers.items()}


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
