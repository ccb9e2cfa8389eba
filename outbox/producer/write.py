"""What a transaction has yet to write of its messages: halves, decisions, and what all of one Outbox have in common."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import UUID

from outbox.errors import DuplicateMessage
from outbox.message import content
from outbox.message.model import HalfMessage, OnDuplicate, Preparation, Resolution
from outbox.telemetry.events import DuplicateIgnored

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session
    from sqlalchemy.orm import Session, scoped_session

    from outbox.database.drivers import RawAsyncConnection, RawConnection
    from outbox.database.identity import OwnDatabase
    from outbox.producer.flow_control import FlowControl
    from outbox.producer.process import ProcessReport
    from outbox.telemetry.hooks import Middleware, Registry, Sending

    Carrier = Session | AsyncSession | Connection | AsyncConnection | scoped_session[Any] | async_scoped_session[Any]
    AnyCarrier = Carrier | RawConnection | RawAsyncConnection


@dataclass(frozen=True, slots=True)
class Once:
    """A business string of which a topic is to have one message, and what a second send does."""

    dedupe: str
    on_duplicate: OnDuplicate

    def second(self, half: HalfMessage) -> DuplicateIgnored:
        """Return the event that tells of a second message.

        Raises:
            DuplicateMessage: its sender wants that.
        """
        if self.on_duplicate == "error":
            raise DuplicateMessage(half.topic, self.dedupe, half.id)
        return DuplicateIgnored(topic=half.topic, message_id=half.id, dedupe=self.dedupe)


@dataclass(frozen=True, slots=True, eq=False)
class Sender:
    """What all messages of an Outbox have in common.

    ``flow`` may refuse one: None where no limit is set. ``limit``: bytes of all bodies that one transaction may send.
    ``report`` is what the process tells of itself; ``nudges``: dispatchers listen.
    """

    own: OwnDatabase
    schema: str
    limit: int
    middlewares: Registry[Middleware]
    report: ProcessReport
    flow: FlowControl | None
    nudges: bool


@dataclass(frozen=True, slots=True)
class Write:
    """A half message to write; prepared, if it comes with a preparation, else committed with the transaction.

    ``sending`` is what send hooks wait for. ``once``: it is only written if its id isn't there.
    """

    sender: Sender
    half: HalfMessage
    preparation: Preparation | None = None
    sending: Sequence[Sending] = ()
    once: Once | None = None

    def refuse_now(self, engine: Engine) -> None:
        """Raise, without I/O, if the message would be refused when it is written on a connection of ``engine``.

        Raises:
            OutboxBusy: its topic is known to be full.
        """
        if self.sender.flow is not None:
            self.sender.flow.refuse_now(engine.pool, self.half.topic, prepared=self.preparation is not None)

    def refuse_unstorable(self, encodings: Iterable[str]) -> None:
        """Raise if the database or its client has no code for a character of the message.

        Raises:
            InvalidMessage: names the text.
        """
        for encoding in encodings:
            texts = [("key", self.half.key), ("tag", self.half.tag)]
            texts += [(f"header {name!a}", text) for name, value in self.half.headers.items() for text in (name, value)]
            for what, text in texts:
                content.check_encoding(what, text or "", encoding)


@dataclass(frozen=True, slots=True)
class Intent:
    """A decision to write; the transaction fails unless it is the first."""

    sender: Sender
    half_id: UUID
    resolution: Resolution
