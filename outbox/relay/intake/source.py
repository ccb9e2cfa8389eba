"""What an intake takes from: the protocol of a source, and what those with an asynchronous client have in common."""

from __future__ import annotations

import asyncio
import datetime as dt
import json
import re
from abc import abstractmethod
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, Protocol, TypeVar
from urllib.parse import unquote
from uuid import UUID, uuid5

from outbox.errors import InvalidHandler
from outbox.message.content import check_group
from outbox.message.ids import MESSAGE_NAMESPACE
from outbox.relay.client import LoopClient, settled
from outbox.text import storable

C = TypeVar("C")
R = TypeVar("R")
T = TypeVar("T")

#: Where a source begins that nothing was taken from yet: with the oldest message there is, or with what comes from now.
STARTS = ("first", "now")
#: Seconds in which a client must answer, beside those that it is to wait for messages.
ANSWER_TIMEOUT = 30.0
#: Messages of a list that are read again.
PAGE = 500
#: Where CloudEvents has its attributes: before the name in Kafka, in AMQP, NATS and HTTP.
_PREFIXES = ("ce_", "ce-", "cloudevents_", "cloudevents:")
# The attributes that an intake reads, and those of a relay; others are kept, as headers.
_READ = {"id", "specversion", "type", "partitionkey", "subject", "datacontenttype", "sequence"}
_READ |= {"outboxtopic", "outboxqueue", "outboxsend", "outboxtag"}
# What others write there is no number of ours.
_QUEUE, _POSITION = re.compile(r"[0-9]{1,4}", re.ASCII), re.compile(r"0*[0-9]{1,18}", re.ASCII)
_OURS = ("outbox-", "intake-")


@dataclass(frozen=True)
class Received:
    """A message as a broker has it; ``origin`` says where, and is the same whenever it comes; or it is empty."""

    origin: str
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    key: str | None = None
    content_type: str | None = None

    @cached_property
    def _attributes(self) -> dict[str, str]:
        """The attributes of CloudEvents, without the prefix that a broker's binding gives them."""
        folded = ((name.lower(), value) for name, value in self.headers.items())
        return {name[len(prefix) :]: value for name, value in folded for prefix in _PREFIXES if name.startswith(prefix)}

    def attribute(self, name: str) -> str | None:
        """Return an attribute of CloudEvents."""
        return self._attributes.get(name)

    @cached_property
    def kind(self) -> UUID:
        """What tells messages of one source and topic, or of one source and type, from others."""
        of = self.attribute("source"), self.attribute("outboxtopic") or self.attribute("type")
        return uuid5(MESSAGE_NAMESPACE, storable(json.dumps(of)))

    @property
    def published(self) -> tuple[str, str, int, int] | None:
        """Source, topic, queue and position that a relay has published it under; None: no relay of ours did."""
        topic, queue, position = map(self.attribute, ("outboxtopic", "outboxqueue", "sequence"))
        if topic is None or not (_QUEUE.fullmatch(queue or "") and _POSITION.fullmatch(position or "")):
            return None
        return storable(self.attribute("source") or ""), storable(topic), int(queue or 0), int(position or 0)

    @property
    def own_headers(self) -> dict[str, str]:
        """The headers that a message here has: not those which an intake reads, or that are the framework's own."""
        headers: dict[str, str] = {}
        for name, value in self.headers.items():
            folded = name.lower()
            attribute = next((folded[len(prefix) :] for prefix in _PREFIXES if folded.startswith(prefix)), "")
            if attribute not in _READ and not folded.startswith(_OURS) and folded != "content-type":
                headers[name] = value
        return headers


@dataclass(frozen=True, slots=True)
class Confirmed:
    """A message that was confirmed as stored, and that the broker still has, since ``at``."""

    received: Received
    at: dt.datetime


class IntakeSource(Protocol):
    """Where an intake takes from; used by one thread.

    One whose broker keeps what was confirmed may have ``confirmed() -> Iterator[Sequence[Confirmed]]``, which gives all
    of that again, in lists, and changes nothing: so `outbox reconcile intake` can compare.
    """

    @property
    def name(self) -> str:
        """What it is called in texts."""

    def take(self, most: int, seconds: float, /) -> Sequence[Received]:
        """Return messages, waiting so many seconds for the first; those of before again if they aren't confirmed."""

    def confirm(self) -> None:
        """Tell the broker that those which were taken last are stored."""

    def close(self) -> None:
        """Give up the connection; the next call opens it again."""


class ConnectedSource(LoopClient[C], Generic[C, R]):
    """A source with an asynchronous client; ``R`` is what the client calls a message."""

    def __init__(self, name: str, group: str, start: str) -> None:
        super().__init__()
        self.name: str = name
        self.group: str = check_group(group)
        if start not in STARTS:
            raise InvalidHandler(f"source {name!r}: start = {start!r} must be 'first' or 'now'")
        self.start: str = start
        # What was taken and isn't confirmed, by the client that it came from.
        self._taken: tuple[C, Sequence[R]] | None = None

    @abstractmethod
    async def _fetch(self, client: C, most: int, seconds: float) -> Sequence[R]:
        """Return messages, waiting so many seconds for the first."""

    @abstractmethod
    def received(self, message: R) -> Received:
        """Return a message as an intake takes it."""

    @abstractmethod
    async def _acknowledge(self, client: C, messages: Sequence[R]) -> None:
        """Tell the broker that messages are stored."""

    def take(self, most: int, seconds: float, /) -> Sequence[Received]:
        """Return messages, waiting so many seconds for the first; those of before again if they aren't confirmed."""
        return [self.received(each) for each in self._wait(self._take(most, seconds), seconds)]

    async def _take(self, most: int, seconds: float) -> Sequence[R]:
        client = await self._connected()
        # After a new connection the broker delivers again what it was told nothing of.
        if self._taken is None or self._taken[0] is not client:
            self._taken = None
            if messages := await self._fetch(client, most, seconds):
                self._taken = client, messages
        return self._taken[1] if self._taken else ()

    def confirm(self) -> None:
        """Tell the broker that those which were taken last are stored."""
        if self._taken is not None:
            self._wait(self._acknowledge(*self._taken), 0.0)
            self._taken = None

    def _again(self, pages: AsyncIterator[Sequence[Confirmed]]) -> Iterator[Sequence[Confirmed]]:
        """Yield what the client yields on its loop."""

        async def following() -> Sequence[Confirmed] | None:
            return await anext(pages, None)

        while (page := self._wait(following(), 0.0)) is not None:
            yield page

    def _wait(self, work: Coroutine[Any, Any, T], seconds: float) -> T:
        """Return what comes of some work on the client's loop; where it fails, the next one has a new connection."""
        loop, timeout = self._own_loop(), seconds + ANSWER_TIMEOUT

        async def timed() -> T:
            (outcome,) = await settled([asyncio.ensure_future(work)], timeout)
            if not isinstance(outcome, BaseException):
                return outcome
            self._give_up_opening()
            await self._drop(self._client)
            raise outcome

        return asyncio.run_coroutine_threadsafe(timed(), loop).result(2 * timeout)


def percent_decoded(headers: Mapping[str, str]) -> dict[str, str]:
    """Return headers as they were before HTTP or NATS took them."""
    return {name: _decoded(value) for name, value in headers.items()}


def _decoded(value: str) -> str:
    try:
        return unquote(value, errors="strict")
    except UnicodeDecodeError:  # it wasn't encoded so
        return value
