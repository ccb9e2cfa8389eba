"""The messages sent, and assertions about them, which print the messages that were there instead."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher, ndiff
from pprint import pformat
from typing import TYPE_CHECKING, Any, ClassVar, Literal, overload
from unittest.mock import ANY
from uuid import UUID

from outbox.database.execute import Row, execute
from outbox.errors import InvalidMessage
from outbox.message import content
from outbox.message.compression import decompress
from outbox.message.content import CAUSE_HEADER, CONVERSATION_HEADER, ENCODING_HEADER
from outbox.message.model import HalfMessage, Resolution, read_headers
from outbox.testing import sql
from outbox.testing.runners import PassRunners, read

if TYPE_CHECKING:
    from outbox.app import Outbox
    from outbox.message.content import Codecs

#: ``undone``: the transaction or savepoint in which it was sent did not commit.
SentState = Literal["sent", "prepared", "rolled back", "undone"]
#: How many messages the text of a failed assertion lists.
_LISTED = 20


@dataclass(frozen=True, slots=True)
class SentMessage:
    """A message as its producer sent it; ``body`` as consumers read it, without a model.

    ``headers`` are without those of the cause and the conversation, which no test can know.

    ``delay`` (seconds) is known of captured messages only: in the database it has become ``deliver_at``.
    """

    id: UUID
    topic: str
    body: Any
    key: str | None = None
    tag: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    deliver_at: dt.datetime | None = None
    delay: float | None = None
    state: SentState = "sent"

    def __str__(self) -> str:
        values = {name: getattr(self, name) for name in ("key", "tag", "headers", "deliver_at", "delay")}
        texts = [f"{name}={value!r}" for name, value in values.items() if value]
        state = "" if self.state == "sent" else f" ({self.state})"
        return " ".join([f"{self.topic}{state}", *texts, f"body={self.body!r}"])

    @classmethod
    def of(cls, half: HalfMessage, state: SentState, codecs: Codecs) -> SentMessage:
        """Return a half as it would be read."""
        headers = dict(half.headers)
        raw = decompress(half.body, headers.pop(ENCODING_HEADER, None), codecs.max_body_bytes)
        names = half.topic, codecs.decode(raw, half.content_type), half.key, half.tag, _chosen(headers)
        return cls(half.id, *names, half.deliver_at, half.delay, state)


def _chosen(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers without those that no sender chooses, and no test can know."""
    return {name: value for name, value in headers.items() if name not in {CONVERSATION_HEADER, CAUSE_HEADER}}


class SentMessages(Sequence[SentMessage]):
    """Messages in the order in which they were sent."""

    def __init__(self, messages: Sequence[SentMessage] = ()) -> None:
        self._messages = {message.id: message for message in messages}

    def put(self, message: SentMessage) -> None:
        """Add a message, or put it in the place of the one with its id."""
        self._messages[message.id] = message

    def change(self, message_id: UUID, state: SentState) -> None:
        """Say what has become of a message."""
        self._messages[message_id] = replace(self._messages[message_id], state=state)

    def find(self, message_id: UUID) -> SentMessage | None:
        """Return the message with an id."""
        return self._messages.get(message_id)

    @overload
    def __getitem__(self, index: int) -> SentMessage: ...
    @overload
    def __getitem__(self, index: slice) -> list[SentMessage]: ...
    def __getitem__(self, index: int | slice) -> SentMessage | list[SentMessage]:
        return list(self._messages.values())[index]

    def __len__(self) -> int:
        return len(self._messages)

    def __repr__(self) -> str:
        return f"SentMessages({list(self._messages.values())!r})"


def sent_messages(outbox: Outbox) -> SentMessages:
    """Return the messages sent in an outbox's database: the newest thousand halves, with their decisions."""
    runners = PassRunners("sent_messages")
    (rows,) = read(runners.of(outbox), lambda connection: execute(connection, sql.halves(outbox.settings.schema)))
    return SentMessages([_of_row(row, outbox.codecs) for row in rows])


def _of_row(row: Row, codecs: Codecs) -> SentMessage:
    topic, key, tag, headers, content_type, body, deliver_at, message_id, resolution = row
    states: dict[str | None, SentState] = {
        None: "prepared",
        Resolution.COMMIT: "sent",
        Resolution.ROLLBACK: "rolled back",
    }
    names, encoding = read_headers(headers)
    value = codecs.decode(decompress(body, encoding, codecs.max_body_bytes), content_type)
    return SentMessage(message_id, topic, value, key, tag, _chosen(names), deliver_at, None, states[resolution])


class Partial:
    """Equals every mapping that has at least these values: ``body=Partial(total="12.50")``."""

    __hash__: ClassVar[None]  # type: ignore[assignment]  # as of any mapping

    def __init__(self, expected: Mapping[str, Any] | None = None, /, **more: Any) -> None:
        self.expected: dict[str, Any] = {**(expected or {}), **more}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mapping) and all(
            name in other and value == other[name] for name, value in self.expected.items()
        )

    def __repr__(self) -> str:
        return f"Partial({self.expected!r})"


def assert_sent(
    sent: SentMessages | Outbox,
    topic: str = ANY,
    *,
    body: Any = ANY,
    key: str | None = ANY,
    tag: str | None = ANY,
    headers: Mapping[str, str] | Partial = ANY,
    delay: dt.timedelta | float | None = ANY,
    state: SentState = "sent",
    times: int | None = 1,
) -> SentMessage:
    """Make sure that such a message was sent exactly ``times`` (None: at least once); return the first of them.

    ``sent`` is what `capture` yields, or an outbox on a sync engine, whose database is read. A value that isn't given
    may be anything. ``body`` and ``headers`` are compared as consumers read them, so a body may be the dataclass or
    model that was sent; with `Partial`, only the named values are.

    Raises:
        AssertionError: its text lists the messages sent instead, and how the nearest message differs.
    """
    __tracebackhide__ = True
    seconds = delay.total_seconds() if isinstance(delay, dt.timedelta) else delay
    expected = {"topic": topic, "key": key, "tag": tag, "headers": headers, "delay": seconds, "body": _plain(body)}
    expected = {name: value for name, value in expected.items() if value is not ANY}
    messages = sent if isinstance(sent, SentMessages) else sent_messages(sent)
    found = [each for each in messages if each.state == state and not _differing(expected, each)]
    if not found if times is None else len(found) != times:
        raise AssertionError("\n".join(_report(expected, state, times, found, messages)))
    return found[0] if found else SentMessage(UUID(int=0), topic, body)


def assert_not_sent(sent: SentMessages | Outbox, topic: str = ANY, **expected: Any) -> None:
    """Make sure that no such message was sent; the arguments are those of `assert_sent`."""
    __tracebackhide__ = True
    assert_sent(sent, topic, **expected, times=0)


def _plain(value: Any) -> Any:
    """Return an expected value as it would be read; what can't be encoded, such as ANY, as it is."""
    if value is None or type(value) in {bool, int, float, str, bytes}:
        return value
    match value:
        case Partial(expected=expected):
            return Partial(_plain(expected))
        case Mapping():
            return {name: _plain(each) for name, each in value.items()}
        case list() | tuple():
            return [_plain(each) for each in value]
    try:
        (plain,) = json.loads(content.encode([value])[0])
    except InvalidMessage:  # it can't be a body, so no body equals it
        return value
    return plain


def _differing(expected: Mapping[str, Any], message: SentMessage) -> list[str]:
    return [name for name, value in expected.items() if value != getattr(message, name)]


# --- the text of a failed assertion ----------------------------------------------------------------------


def _report(
    expected: Mapping[str, Any],
    state: SentState,
    times: int | None,
    found: Sequence[SentMessage],
    messages: Sequence[SentMessage],
) -> Iterator[str]:
    description = ", ".join(f"{name}={value!r}" for name, value in expected.items()) or "anything"
    number = "at least one message" if times is None else "no message" if times == 0 else f"{times} message(s)"
    yield f"expected {number} {state} with {description}"
    yield f"there {'is' if len(found) == 1 else 'are'} {len(found)}"
    if not messages:
        yield "nothing was sent at all"
        return
    yield f"messages sent ({len(messages)}):"
    if len(messages) > _LISTED:
        yield f"  … {len(messages) - _LISTED} older ones"
    for number_, message in list(enumerate(messages, 1))[-_LISTED:]:
        mark = "*" if message in found else " "
        yield f" {mark}{number_}. {message}"
    if found:
        return
    nearest = min(messages, key=lambda message: _distance(expected, state, message))
    yield f"the nearest is {list(messages).index(nearest) + 1}; it differs in:"
    if nearest.state != state:
        yield f"  state: it is {nearest.state!r}"
    for name in _differing(expected, nearest):
        yield f"  {name} (- expected, + sent):"
        aligned = _aligned(expected[name], getattr(nearest, name))
        mine, theirs = (pformat(value, width=100, sort_dicts=True).splitlines() for value in aligned)
        yield from (f"    {line.rstrip()}" for line in ndiff(mine, theirs))


def _distance(expected: Mapping[str, Any], state: SentState, message: SentMessage) -> tuple[int, int, float, bool]:
    differing = _differing(expected, message)
    likeness = [SequenceMatcher(None, repr(expected[name]), repr(getattr(message, name))).ratio() for name in differing]
    return int("topic" in differing), len(differing), -sum(likeness), message.state != state


def _aligned(expected: Any, actual: Any) -> tuple[Any, Any]:
    """Return both so that only what differs looks different: ANY has the value that is there, a Partial its names."""
    if expected == actual:
        return actual, actual
    names: Sequence[str] | None = None
    if isinstance(expected, Partial) and isinstance(actual, Mapping):
        names, expected = list(expected.expected), expected.expected
    elif isinstance(expected, Mapping) and isinstance(actual, Mapping):
        names = [*expected, *(name for name in actual if name not in expected)]
    if names is None:
        return expected, actual
    pairs = {name: _aligned(expected.get(name, _MISSING), actual.get(name, _MISSING)) for name in names}
    return (
        {name: mine for name, (mine, _) in pairs.items() if mine is not _MISSING},
        {name: theirs for name, (_, theirs) in pairs.items() if theirs is not _MISSING},
    )


_MISSING = object()
