"""What a message may look like: names, lengths, delays, and its body as bytes. Checked before anything is written.

A body is written and read by its content type: JSON, texts and bytes here, others by a codec of the application's own.

The rules are RocketMQ's (``TopicValidator``, ``ScheduleMessageService``), but that a topic may also have dots and
slashes, which are the custom elsewhere (``orders.created``).
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cache, lru_cache
from typing import Any
from uuid import UUID

from outbox.errors import InvalidHandler, InvalidMessage, pip_install
from outbox.text import named, why_invalid

MAX_TOPIC = 127
#: A topic with the number of its source.
MAX_FEED = MAX_TOPIC + len("@9999")
MAX_GROUP = 120
MAX_KEY_BYTES = 255
MAX_TAG_BYTES = 127
MAX_CONTENT_TYPE = 255
MAX_HEADERS = 128
MAX_HEADER_BYTES = 16 * 1024

#: The header that says how a body is compressed; readers take it off.
ENCODING_HEADER = "outbox-encoding"
#: The header with the process that wrote the message, as ``host:pid``: SQL writes it, and an operator sees it.
SENDER_HEADER = "outbox-sender"
#: Headers that tie messages together. The first message of the chain, where that isn't the message itself; the one
#: whose handler sent this one; the topic that an answer goes to; the message that this one answers.
CONVERSATION_HEADER = "outbox-conversation"
CAUSE_HEADER = "outbox-cause"
REPLY_TO_HEADER = "outbox-reply-to"
CORRELATION_HEADER = "outbox-correlation"
#: The header of a copy that an operator sent with another body: the id of its original.
COPY_HEADER = "outbox-copy-of"
#: The header of an answer that says no.
REFUSAL_HEADER = "outbox-refusal"
#: The header with the business string that keeps a message from being sent twice.
DEDUPE_HEADER = "outbox-dedupe"
#: The header with the time from which on no group handles the message.
EXPIRES_HEADER = "outbox-expires-at"
#: The header of a notice: what it tells (`outbox.message.notice`).
NOTICE_HEADER = "outbox-notice"
#: Those that only the options of a send set, or the message that is handled.
OPTION_HEADERS: frozenset[str] = frozenset(
    {
        CONVERSATION_HEADER,
        CAUSE_HEADER,
        REPLY_TO_HEADER,
        CORRELATION_HEADER,
        REFUSAL_HEADER,
        DEDUPE_HEADER,
        EXPIRES_HEADER,
    }
)

#: What the names of topics and of groups consist of, as a regular expression.
TOPIC_PATTERN = r"^[%|a-zA-Z0-9_./-]+$"
FEED_PATTERN = r"^[%|a-zA-Z0-9_./-]+(@[0-9]+)?$"
GROUP_PATTERN = r"^[%|a-zA-Z0-9_.-]+$"
# RFC 9110: a token, a slash, a token; then parameters.
_CONTENT_TYPE = re.compile(r"[\w!#$%&'*+.^`|~-]+/[\w!#$%&'*+.^`|~-]+ *(;[ -~]*)?", re.ASCII)
_SYSTEM_NAMES = frozenset({"TBW102", "SELF_TEST_TOPIC", "OFFSET_MOVED_EVENT", "BenchmarkTest"})
#: What the names of internal topics begin with: the framework alone sends to them.
INTERNAL_PREFIX = "outbox."
_SYSTEM_PREFIXES = ("RMQ_SYS_", "rmq_sys_", "%RETRY%", "%DLQ%", "SCHEDULE_TOPIC_", "TRANS_CHECK_MAX_TIME_TOPIC")


def check_topic(topic: object) -> str:
    """Return the topic's name if it is one.

    Raises:
        InvalidMessage: empty, longer than 127, other characters than ``[%|a-zA-Z0-9_./-]``, a system name, or that of
            an internal topic.
    """
    # An application has few, and each send names one.
    return _check_topic_once(topic) if type(topic) is str else _check_topic(topic)


def check_any_topic(topic: object) -> str:
    """Return the topic's name if it is one, also that of an internal topic; raise InvalidMessage as `check_topic`."""
    name = _check_name("topic", topic, MAX_TOPIC, TOPIC_PATTERN, "% | a-z A-Z 0-9 _ - . /")
    if name in _SYSTEM_NAMES or name.startswith(_SYSTEM_PREFIXES):
        raise InvalidMessage(f"topic {name!r} is a system name; choose another")
    return name


def is_internal(topic: str) -> bool:
    """Tell whether a topic is one of the framework's own."""
    return topic.startswith(INTERNAL_PREFIX)


def _check_topic(topic: object) -> str:
    if is_internal(name := check_any_topic(topic)):
        raise InvalidMessage(
            f"topic {name!r} can't be used: names that begin with {INTERNAL_PREFIX!r} are those of internal topics, by "
            "which the framework calls functions such as on_delivered; choose another"
        )
    return name


_check_topic_once = lru_cache(maxsize=1000)(_check_topic)


def check_group(group: object) -> str:
    """Return the name of a producer or consumer group if it is one (at most 120 characters)."""
    return _check_name("group", group, MAX_GROUP, GROUP_PATTERN, "% | a-z A-Z 0-9 _ - .")


def _check_name(what: str, name: object, longest: int, pattern: str, characters: str) -> str:
    if not isinstance(name, str):
        raise InvalidMessage(f"{what} must be a str, not {type(name).__name__}")
    name = _exactly(name)
    if not name:
        raise InvalidMessage(f"{what} is empty")
    if len(name) > longest:
        raise InvalidMessage(f"{what} {name[:40]!r}… has {len(name)} characters; at most {longest} are allowed")
    if not re.fullmatch(pattern, name, re.ASCII):
        raise InvalidMessage(f"{what} {name!r} may only have the characters {characters}")
    return name


def _exactly(value: str) -> str:
    """Return a plain str: the driver refuses an array of str and its subclasses, such as enum members."""
    return value if type(value) is str else str.__str__(value)


def check_text(what: str, value: object, longest: int) -> str | None:
    """Return a key or tag if PostgreSQL can store it and it isn't longer than ``longest`` bytes."""
    if value is None:
        return None
    if not isinstance(value, str):
        raise InvalidMessage(f"{what} must be a str, not {type(value).__name__}: {value!r}")
    value = _exactly(value)
    size = len(_utf8(what, value))
    if size > longest:
        raise InvalidMessage(f"{what} {value[:40]!r}… has {size} bytes; at most {longest} are allowed")
    return value


def check_headers(headers: Mapping[str, str] | None) -> Mapping[str, str]:
    """Return the headers if all are text, not too many and not too long."""
    if headers is None:
        return {}
    if not isinstance(headers, Mapping):
        raise InvalidMessage(f"headers must be a mapping of str to str, not {type(headers).__name__}")
    if len(headers) > MAX_HEADERS:
        raise InvalidMessage(f"{len(headers)} headers; at most {MAX_HEADERS} are allowed")
    size = 0
    for name, value in headers.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise InvalidMessage(f"header {name!r} must be text, not {type(value).__name__}: {value!r}")
        size += len(_utf8(f"header {name!r}", name)) + len(_utf8(f"header {name!r}", value))
    if size > MAX_HEADER_BYTES:
        raise InvalidMessage(f"the headers have {size} bytes; at most {MAX_HEADER_BYTES} are allowed")
    return {_exactly(name): _exactly(value) for name, value in headers.items()}


def added(headers: Mapping[str, str]) -> Mapping[str, str]:
    """Return the headers that a hook or a middleware adds.

    Raises:
        InvalidMessage: one is among those that options of a send make, or the framework alone.
    """
    if own := sorted({*OPTION_HEADERS, ENCODING_HEADER, NOTICE_HEADER}.intersection(headers)):
        raise InvalidMessage(f"header {own[0]!r} is made of an option of the send, or by the framework; leave it out")
    return headers


def _utf8(what: str, value: str) -> bytes:
    if "\0" in value:
        raise InvalidMessage(f"{what} has a NUL character, which PostgreSQL can't store")
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise InvalidMessage(f"{what} has a character that UTF-8 can't hold: {error}") from None


def check_encoding(what: str, text: str, encoding: str) -> None:
    """Make sure that an encoding of PostgreSQL's, by its name, has all characters of a text.

    One that Python doesn't know by that name isn't judged: the server does.

    Raises:
        InvalidMessage: it lacks one.
    """
    try:
        text.encode(re.sub("^WIN", "cp", encoding))
    except LookupError:
        return
    except UnicodeEncodeError as error:
        raise InvalidMessage(
            f"{what} {text[:40]!a} can't be stored: the database or its client is in {encoding}, which has no "
            f"{text[error.start]!a}; use other characters, or a database and client in UTF8"
        ) from None


def check_delivery(
    deliver_at: dt.datetime | None,
    delay: dt.timedelta | float | int | None,
    delay_level: int | None,
    levels: Sequence[float],
) -> tuple[dt.datetime | None, float | None]:
    """Return ``(deliver_at, seconds of delay)``, at most one of which is set.

    ``levels`` are the delays of level 1, 2 and so on, in seconds; a level above the last is the last, as RocketMQ's.

    Raises:
        InvalidMessage: more than one way given, a naive datetime, a negative delay, a level below 1.
    """
    if deliver_at is None and delay is None and delay_level is None:
        return None, None
    options = {"deliver_at": deliver_at, "delay": delay, "delay_level": delay_level}
    named = [name for name, value in options.items() if value is not None]
    if len(named) > 1:
        raise InvalidMessage(f"{' and '.join(named)} exclude each other; give one")
    if deliver_at is not None:
        if not isinstance(deliver_at, dt.datetime):
            raise InvalidMessage(f"deliver_at must be a datetime, not {type(deliver_at).__name__}")
        return _moment("deliver_at", deliver_at), None
    if delay_level is not None:
        of_int = isinstance(delay_level, int) and not isinstance(delay_level, bool)
        if not of_int or delay_level < 1:
            raise InvalidMessage(f"delay_level {delay_level!r} is unknown; levels are 1 to {len(levels)}")
        return None, float(levels[min(delay_level, len(levels)) - 1])
    return None, check_seconds("delay", delay)


def check_expiry(expires_at: object, deliver_at: dt.datetime | None) -> dt.datetime | None:
    """Return when a message expires; ``deliver_at`` is when it is to be delivered, where that is a given time.

    Raises:
        InvalidMessage: it isn't a time with a time zone, or not after ``deliver_at``.
    """
    if expires_at is None:
        return None
    if not isinstance(expires_at, dt.datetime):
        raise InvalidMessage(f"expires_at must be a datetime, not {type(expires_at).__name__}: {expires_at!r}")
    moment = _moment("expires_at", expires_at)
    if deliver_at is not None and moment <= deliver_at:
        raise InvalidMessage(f"expires_at = {moment.isoformat()} must be after deliver_at = {deliver_at.isoformat()}")
    return moment


def check_size(body: bytes, most: int) -> None:
    """Raise for an encoded body that is longer than so many bytes.

    Raises:
        InvalidMessage: it is.
    """
    if len(body) > most:
        raise InvalidMessage(
            f"the body has {len(body)} bytes; at most {most} are allowed "
            "(setting max_body_bytes): store it elsewhere and send a reference"
        )


def check_queue(value: object) -> int | None:
    """Return the number of a queue that a sender chose, if there can be one.

    Raises:
        InvalidMessage: it isn't a whole number from 0 on.
    """
    if value is not None and (type(value) is not int or not 0 <= value < 2**31):
        raise InvalidMessage(f"queue {value!r} must be a whole number from 0 on")
    return value


def check_queue_of(topic: str, queue: int | None, queues: Mapping[str, int]) -> None:
    """Raise for a queue that its topic doesn't have, by how many those that there are have; none ever loses any.

    Raises:
        InvalidMessage: it doesn't.
    """
    if topic not in queues:
        raise InvalidMessage(
            f"queue {queue} of topic {topic!r} can't be chosen, for the topic has no queues yet; "
            "declare it before, by outbox.declare_topic"
        )
    if queue is not None and queue >= queues[topic]:
        raise InvalidMessage(f"queue {queue} of topic {topic!r} must be from 0 to {queues[topic] - 1}")


def check_seconds(what: str, value: object) -> float:
    """Return a length of time in seconds if PostgreSQL can add it to a time.

    Raises:
        InvalidMessage: neither timedelta nor number, negative, or 100 years and more.
    """
    seconds = value.total_seconds() if isinstance(value, dt.timedelta) else value
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < 100 * 366 * 86400:
        raise InvalidMessage(f"{what} {value!r} must be a timedelta or seconds, not negative and under 100 years")
    return float(seconds)


def _moment(what: str, value: dt.datetime) -> dt.datetime:
    """Return the moment in UTC, as a plain datetime: the driver refuses an array of several datetime classes."""
    offset = value.utcoffset()
    if offset is None:
        raise InvalidMessage(f"{what} {value.isoformat()} has no time zone; add one, such as datetime.UTC")
    day, time = (value.year, value.month, value.day), (value.hour, value.minute, value.second, value.microsecond)
    try:
        return dt.datetime(*day, *time, tzinfo=dt.UTC) - offset
    except OverflowError:
        raise InvalidMessage(f"{what} {value.isoformat()} is out of range in UTC") from None


JSON = "application/json"
TEXT = "text/plain; charset=utf-8"
BYTES = "application/octet-stream"
# A union would be made anew for each body.
_BYTES = (bytes, bytearray, memoryview)


class StoredBytes(bytes):
    """A body as it is to be stored: no codec of its content type encodes it."""


def encode(body: Any) -> tuple[bytes, str]:
    """Return the bytes and the content type of a body.

    Raises:
        InvalidMessage: the body has no encoding; names the type or the value that has none.
    """
    if isinstance(body, _BYTES):
        return bytes(body), BYTES
    return (_encode_text(body), TEXT) if isinstance(body, str) else (encode_json(body), JSON)


def encode_as(body: Any, content_type: str) -> bytes:
    """Return the bytes of a body as a content type that the sender chose; bytes as they are.

    Raises:
        InvalidMessage: this body can't be of that type.
    """
    if isinstance(body, _BYTES):
        return bytes(body)
    if is_json(content_type):
        return encode_json(body)
    if isinstance(body, str) and kind_of(content_type).startswith("text/"):
        return _encode_text(body)
    raise InvalidMessage(
        f"a body of type {type(body).__name__} can't be sent as {content_type!r}: register a codec by "
        f"outbox.codec({kind_of(content_type)!r}, encode=…, decode=…), or send bytes"
    )


def _encode_text(body: str) -> bytes:
    try:
        return body.encode()
    except UnicodeEncodeError as error:
        raise InvalidMessage(f"the body has a character that UTF-8 can't hold: {error}") from None


def encode_json(body: Any) -> bytes:
    """Return a body as JSON that comes back as it went: equal, but for tuples, sets, and what JSON writes as a text.

    Raises:
        InvalidMessage: it has no JSON form, or would come back as something else; names the type or the value.
    """
    try:
        raw = _to_json(body)
        check_comes_back(body, raw, body.model_dump if _is_model(body) else None)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidMessage(
            f"the body of type {type(body).__name__} can't be encoded as JSON: {error}; "
            "send a dict, a dataclass, a pydantic model, str or bytes"
        ) from None
    return raw


def _to_json(body: Any) -> bytes:
    return body.model_dump_json().encode() if _is_model(body) else _ENCODER.encode(body).encode()


def _is_model(value: Any) -> bool:  # pydantic may not be installed
    return type(value) is not dict and hasattr(value, "model_dump_json") and not isinstance(value, type)


def check_comes_back(body: Any, raw: bytes, dump: Callable[[], Any] | None = None) -> None:
    """Raise for a body of which its JSON loses something; ``dump`` has pydantic, which wrote it, make plain values.

    Raises:
        ValueError: a key would come back as another one, or NaN as null; names where.
    """
    has_nan = _check_keys(body, typed=dump is not None)
    if has_nan and dump is not None and _is_lost(dump(), json.loads(raw)):
        raise ValueError("NaN or an infinite number in it would come back as null")


def _check_keys(value: Any, path: str = "", *, typed: bool = False) -> bool:
    """Raise for a dict with keys that aren't texts; where a model reads them, by their type, with texts among them.

    Returns whether a number in it isn't one.
    """
    if isinstance(value, dict):
        kinds = set(map(type, value))
        others = [] if kinds <= _TEXTS else [key for key in value if not isinstance(key, str)]
        if others and not (typed and len(others) == len(value)):
            where = f" at {path[1:]!r}" if path else ""
            name = type(others[0]).__name__
            raise ValueError(f"the key {others[0]!r}{where} is of type {name}, and would come back as str")
        inside: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, list | tuple):
        inside = enumerate(value)
    elif _is_model(value):
        inside, typed = [*vars(value).items(), *(value.model_extra or {}).items()], True
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        inside, typed = [(each.name, getattr(value, each.name)) for each in dataclasses.fields(value)], True
    else:
        return False
    has_nan = False
    for key, each in inside:
        if (kind := type(each)) is float:
            has_nan = has_nan or not math.isfinite(each)
        elif kind not in _LEAVES:
            has_nan = _check_keys(each, f"{path}.{key}", typed=typed) or has_nan
    return has_nan


_TEXTS = frozenset({str})
# What has nothing inside.
_LEAVES = frozenset({str, int, bool, type(None), Decimal, UUID, dt.datetime, dt.date})


def _is_lost(value: Any, back: Any) -> bool:
    """Tell whether a number that isn't one has become null; a model may as well write it as a text."""
    if isinstance(value, dict) and isinstance(back, dict):
        return any(map(_is_lost, value.values(), back.values()))
    if isinstance(value, list | tuple) and isinstance(back, list):
        return any(map(_is_lost, value, back))
    return back is None and isinstance(value, float) and not math.isfinite(value)


_AS_TEXT = (Decimal, UUID)


def _plain(value: Any) -> Any:
    """Encode what JSON doesn't know and business data is full of."""
    if type(value) in _AS_TEXT:  # of all others the most frequent
        return str(value)
    if _is_model(value):
        return json.loads(encode_json(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    for kinds, plain in _PLAIN:
        if isinstance(value, kinds):
            return plain(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")


_PLAIN: tuple[tuple[tuple[type, ...], Callable[[Any], Any]], ...] = (
    (_AS_TEXT, str),
    ((dt.datetime, dt.date, dt.time), lambda value: value.isoformat()),
    ((dt.timedelta,), lambda value: value.total_seconds()),
    ((enum.Enum,), lambda value: value.value),
    ((set, frozenset), sorted),
)

# One for all: `json.dumps` makes a new one each time it is given an option.
_ENCODER = json.JSONEncoder(default=_plain, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def is_json(content_type: str) -> bool:
    """Tell whether bodies of a content type are JSON."""
    kind = kind_of(content_type)
    return kind == JSON or kind.endswith("+json")


def is_known(content_type: str) -> bool:
    """Tell whether bodies of a content type are read without a codec."""
    kind = kind_of(content_type)
    return is_json(kind) or kind == BYTES or kind.startswith("text/")


def kind_of(content_type: str) -> str:
    """Return a content type without its parameters, in lower case."""
    return content_type.partition(";")[0].strip().lower()


def check_content_type(content_type: object) -> str:
    """Return a content type if it is one: at most 255 characters, such as ``application/msgpack``.

    Raises:
        InvalidMessage: it isn't.
    """
    if not isinstance(content_type, str):
        raise InvalidMessage(f"content_type must be a str, not {type(content_type).__name__}: {content_type!r}")
    content_type = _exactly(content_type)
    if len(content_type) > MAX_CONTENT_TYPE or not _CONTENT_TYPE.fullmatch(content_type):
        raise InvalidMessage(
            f"content_type {content_type[:80]!r} must be like 'application/msgpack', with at most {MAX_CONTENT_TYPE} "
            "characters"
        )
    return content_type


def decode(raw: bytes, content_type: str, model: Any = None, *, exact: bool = False) -> Any:
    """Return the body of ``raw``; as ``model`` (pydantic model, dataclass or any type) if given.

    ``exact`` makes JSON numbers with a fraction Decimals, not floats.

    Raises:
        InvalidMessage: the bytes don't fit the content type or the model.
    """
    value: Any = raw
    try:
        if model is not None and is_json(content_type):
            return adapter(model).validate_json(raw)
        if is_json(content_type):
            value = json.loads(raw, parse_float=Decimal if exact else None)
        elif kind_of(content_type).startswith("text/"):
            value = raw.decode()
    except (ValueError, RecursionError) as error:
        raise _unreadable(content_type, model, error) from None
    return value if model is None else as_model(value, content_type, model)


def as_model(value: Any, content_type: str, model: Any) -> Any:
    """Return the value read of a body of a content type as ``model``.

    Raises:
        InvalidMessage: it doesn't fit the model.
    """
    try:
        return adapter(model).validate_python(value)
    except (ValueError, RecursionError) as error:
        raise _unreadable(content_type, model, error) from None


def _unreadable(content_type: str, model: Any, error: Exception) -> InvalidMessage:
    expected = f" as {getattr(model, '__name__', model)}" if model is not None else ""
    # Instead of pydantic's error, which a traceback would show with the values.
    return InvalidMessage(f"the body ({content_type}) can't be read{expected}: {why_invalid(error)}")


@cache
def adapter(model: Any) -> Any:
    """Return pydantic's ``TypeAdapter`` of a type.

    Raises:
        InvalidHandler: pydantic isn't installed, or knows no way to read the type.
    """
    try:
        from pydantic import PydanticUserError, TypeAdapter  # noqa: PLC0415 - optional dependency
    except ImportError:
        raise InvalidHandler(f"reading bodies as {model!r} needs pydantic: {pip_install('pydantic')}") from None
    try:
        return TypeAdapter(model)
    except PydanticUserError as error:
        raise InvalidHandler(f"bodies can't be read as {model!r}: {error.message}") from None


Encoder = Callable[[Any], bytes]
Decoder = Callable[[bytes], Any]


@dataclass(frozen=True, slots=True)
class Codec:
    """How bodies of one content type are written and read.

    ``show`` makes of what ``decode`` returns a value with a JSON form, for console and commands; None: it has one.

    Raises:
        InvalidHandler: the content type is read by the framework itself or has parameters, or a function isn't one.
        InvalidMessage: it isn't a content type.
    """

    content_type: str
    encode: Encoder
    decode: Decoder
    show: Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        kind = kind_of(check_content_type(self.content_type))
        if kind != self.content_type:
            raise InvalidHandler(
                f"a codec is for a content type without parameters, in lower case: {kind!r}, not {self.content_type!r}"
            )
        # Lists, measures and reports look into JSON inside the database.
        if is_known(kind):
            raise InvalidHandler(f"bodies of {kind!r} are read without a codec; choose a content type of your own")
        for name in ("encode", "decode", "show"):
            function = getattr(self, name)
            if not callable(function) and not (name == "show" and function is None):
                raise InvalidHandler(f"the codec of {kind!r}: {name} = {function!r} must be a function")

    def to_bytes(self, body: Any) -> bytes:
        """Return the bytes of a body.

        Raises:
            InvalidMessage: the codec can't make any.
        """
        try:
            raw: Any = self.encode(body)
        except Exception as error:
            raise InvalidMessage(
                f"the body of type {type(body).__name__} can't be encoded by the codec of {self.content_type!r}: "
                f"{named(error)}"
            ) from error
        if not isinstance(raw, _BYTES):
            raise InvalidMessage(f"the codec of {self.content_type!r} must make bytes, not {type(raw).__name__}")
        return bytes(raw)

    def from_bytes(self, raw: bytes) -> Any:
        """Return the body that the bytes are.

        Raises:
            InvalidMessage: the codec can't read them.
        """
        try:
            return self.decode(raw)
        except Exception as error:
            raise InvalidMessage(
                f"the body can't be read by the codec of {self.content_type!r}: {named(error)}"
            ) from error


#: More than the server takes in one message: no body is larger.
_NO_BODY_IS_LARGER = 1 << 30


class Codecs(dict[str, Codec]):
    """The codecs of an Outbox by content type, and with them all ways in which bodies are written and read.

    ``max_body_bytes`` limits what a compressed body may be when it is decompressed.
    """

    def __init__(self, max_body_bytes: int = _NO_BODY_IS_LARGER) -> None:
        super().__init__()
        self.max_body_bytes: int = max_body_bytes

    def register(self, codec: Codec) -> None:
        """Add a codec.

        Raises:
            InvalidHandler: its content type has one already.
        """
        if codec.content_type in self:
            raise InvalidHandler(f"content type {codec.content_type!r} has a codec already")
        self[codec.content_type] = codec

    def encode(self, body: Any, content_type: str | None = None) -> tuple[bytes, str]:
        """Return the bytes of a body and its content type, which its Python type chooses where none is given.

        Raises:
            InvalidMessage: it isn't a content type, none that this body can be encoded as, or the body has no encoding.
        """
        if content_type is None:
            return encode(body)
        kind = kind_of(check_content_type(content_type))
        if (codec := self.get(kind)) is not None and not isinstance(body, StoredBytes):
            return codec.to_bytes(body), content_type
        return encode_as(body, content_type), content_type

    def decode(self, raw: bytes, content_type: str, model: Any = None) -> Any:
        """Return the body of ``raw``, as ``model`` if given; of a content type that no codec reads, the bytes.

        Raises:
            InvalidMessage: the bytes don't fit the content type or the model.
        """
        # Nearly no application has a codec, and all messages come this way.
        if not self or (codec := self.get(kind_of(content_type))) is None:
            return decode(raw, content_type, model)
        body = codec.from_bytes(raw)
        return body if model is None else as_model(body, content_type, model)

    def as_json(self, raw: bytes, content_type: str) -> bytes | None:
        """Return a body that a codec reads as JSON, for people; None where no codec has its content type.

        Raises:
            InvalidMessage: the codec can't read it, or what it reads has no JSON form.
        """
        if (codec := self.get(kind_of(content_type))) is None:
            return None
        body = codec.from_bytes(raw)
        try:
            return _to_json(body if codec.show is None else codec.show(body))
        except Exception as error:
            raise InvalidMessage(
                f"what the codec of {content_type!r} reads can't be shown as JSON; give it show=, a function that "
                f"makes a dict of it: {named(error)}"
            ) from error


#: For bodies that only the framework itself has encoded.
NO_CODECS: Codecs = Codecs()
