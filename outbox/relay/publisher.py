"""What publishes: the protocol that a relay's destination follows, and what those with a connection have in common.

A publisher answers for each message as any handler does. None: the broker has confirmed it. `Park`: it can't take this
message, and would take others. `Unavailable`: no message would fare better, or it isn't known whether the broker has
this one; it is published again then, and a reader may meet it twice, under one id.
"""

from __future__ import annotations

import asyncio
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol, TypeVar

from outbox.errors import InvalidMessage, without_secrets
from outbox.message.content import check_seconds
from outbox.message.model import HandlerAnswer, Message, Park, Unavailable
from outbox.relay.client import CANCEL_TIMEOUT, LoopClient, settled
from outbox.relay.envelope import Destination, Envelope, RelayRecord, destination_of
from outbox.text import message_of, summary_of

C = TypeVar("C")

_TYPE = "content-type"
# How long ago (seconds) another message may have been routed, so that one which isn't is at fault.
_ROUTED_LATELY = 60.0
#: How long (seconds) a publisher waits for confirmations, unless it is said so.
PUBLISH_TIMEOUT = 30.0


class Publisher(Protocol):
    """Where a relay publishes; ``name`` is that of its group, where the relay gives it none: ``relay-`` and this.

    ``timeout`` is how long (seconds) a call of `publish` takes, at most twice. One that takes no long lists may have
    the most messages of a call in ``batch``.
    """

    name: str
    timeout: float

    async def publish(self, messages: list[Message], /) -> Sequence[HandlerAnswer]:
        """Publish messages; return what came of each, in their order. An exception counts as a failure of
        each, but for a `TimeoutError`, by which none is at fault.
        """

    def close(self) -> None:
        """Give up what is open, from any thread; the next call of `publish` opens it again."""


class Undeliverable(Exception):
    """This message can't be delivered, and others can."""


class BrokerPublisher(ABC):
    """Makes records of messages, and publishes those; in ``destination`` and ``envelope`` it is said where and how."""

    name: str
    prefix: ClassVar[str] = "ce-"
    #: What a destination must be; another one is the fault of the message that it was made of.
    possible: ClassVar[re.Pattern[str]] = re.compile(r".+", re.DOTALL)

    def __init__(self, destination: Destination, envelope: Envelope | None, timeout: Any) -> None:
        self.timeout: float = check_seconds("timeout", timeout)
        self._destination = destination_of("destination", destination)
        self._envelope = envelope or Envelope(prefix=self.prefix)

    async def publish(self, messages: list[Message], /) -> Sequence[HandlerAnswer]:
        """Publish messages; return what came of each, in their order."""
        answers: dict[int, HandlerAnswer] = {}
        records: list[RelayRecord] = []
        numbers: list[int] = []
        for number, message in enumerate(messages):
            try:
                records.append(self._record(message))
                numbers.append(number)
            except (InvalidMessage, Undeliverable) as error:
                answers[number] = Park(message_of(error))
        if records:
            answers.update(zip(numbers, await self._deliver(records), strict=True))
        return [answers[number] for number in range(len(messages))]

    def _record(self, message: Message) -> RelayRecord:
        """Return a message as it is published.

        Raises:
            InvalidMessage, Undeliverable: it never can be.
        """
        destination = self._destination(message)
        if not self.possible.fullmatch(destination):
            raise Undeliverable(f"{self.name}: {destination!r} can't be a destination; it comes of the message")
        return RelayRecord(message, destination, self._headers(message), message.raw)

    def _headers(self, message: Message) -> dict[str, str]:
        headers = {name: value for name, value in self._envelope.headers(message).items() if name.lower() != _TYPE}
        return {**headers, _TYPE: message.content_type}

    @abstractmethod
    async def _deliver(self, records: Sequence[RelayRecord]) -> Sequence[HandlerAnswer]:
        """Publish records; return what came of each."""

    @abstractmethod
    def close(self) -> None:
        """Give up what is open, from any thread; the next call of `publish` opens it again."""


class ConnectedPublisher(LoopClient[C], BrokerPublisher):
    """One with an asynchronous client, which all groups of a process share, on a loop of its own."""

    def __init__(self, destination: Destination, envelope: Envelope | None, timeout: Any) -> None:
        BrokerPublisher.__init__(self, destination, envelope, timeout)
        LoopClient.__init__(self)
        self._routed_at = -_ROUTED_LATELY

    def _unroutable(self, text: str) -> HandlerAnswer:
        """Return the answer for a message that has nowhere to go: its own fault, if another one was routed lately."""
        is_its_own = time.monotonic() - self._routed_at < _ROUTED_LATELY
        return Park(text) if is_its_own else Unavailable(text)

    async def _send(self, client: C, record: RelayRecord) -> HandlerAnswer:
        """Publish one record, and wait until it is confirmed; to be defined where `_send_all` isn't.

        Raises:
            Undeliverable: others can be, this one can't.
            Exception: something isn't available.
        """
        raise NotImplementedError

    async def _deliver(self, records: Sequence[RelayRecord]) -> Sequence[HandlerAnswer]:
        future = asyncio.run_coroutine_threadsafe(self._deliver_here(records), self._own_loop())
        return await asyncio.wrap_future(future)

    async def _deliver_here(self, records: Sequence[RelayRecord]) -> Sequence[HandlerAnswer]:
        """Publish records on the loop of the client."""
        until = asyncio.get_running_loop().time() + self.timeout
        (client,) = await settled([asyncio.ensure_future(self._connected())], self.timeout)
        if isinstance(client, BaseException):
            if isinstance(client, TimeoutError):
                self._give_up_opening()
            return [Unavailable(self._why(client))] * len(records)
        left = until - asyncio.get_running_loop().time()
        sending = asyncio.ensure_future(self._send_all(client, records, until))
        (outcomes,) = await settled([sending], left + 2 * CANCEL_TIMEOUT)
        if isinstance(outcomes, BaseException):
            outcomes = [outcomes] * len(records)
        answers = [self._answer_to(each) if isinstance(each, BaseException) else each for each in outcomes]
        # Where one of them has got through, others may be on their way by this client.
        if all(isinstance(each, BaseException) and not isinstance(each, Undeliverable) for each in outcomes):
            await self._drop(client)
        return answers

    async def _send_all(
        self, client: C, records: Sequence[RelayRecord], until: float
    ) -> Sequence[HandlerAnswer | BaseException]:
        """Publish records at once, until a time of the loop; return what came of each, or the exception."""
        tasks = [asyncio.ensure_future(self._send(client, record)) for record in records]
        return await settled(tasks, until - asyncio.get_running_loop().time())

    def _answer_to(self, error: BaseException) -> HandlerAnswer:
        """Return what an exception says of a message."""
        return Park(message_of(error)) if isinstance(error, Undeliverable) else Unavailable(self._why(error))

    def _why(self, error: BaseException) -> str:
        if isinstance(error, TimeoutError | asyncio.CancelledError) and not message_of(error):
            return f"{self.name} has confirmed nothing within {self.timeout:g} s"
        return f"{self.name}: {without_secrets(summary_of(error))}"
