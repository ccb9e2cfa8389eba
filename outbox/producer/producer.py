"""Send, prepare, commit, rollback: half messages in the caller's transaction."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypedDict, Unpack
from uuid import UUID

from outbox.database import at_commit
from outbox.database.decision import already, decide
from outbox.errors import InvalidMessage, InvalidSettings, TransactionRequired
from outbox.message import codec, limits
from outbox.message.model import Decision, HalfMessage, Preparation, Resolution, uuid7
from outbox.producer import carriers
from outbox.producer.flow_control import FlowControl

if TYPE_CHECKING:
    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker
    from sqlalchemy.orm import Session, sessionmaker

    from outbox.producer.carriers import Carrier
    from outbox.settings import Settings


class Options(TypedDict, total=False):
    """What may be said of a message beside its topic and body; see `Outbox.send`."""

    key: str | None
    tag: str | None
    headers: Mapping[str, str] | None
    deliver_at: dt.datetime | None
    delay: dt.timedelta | float | int | None
    delay_level: int | None
    id: UUID | None


class Producer:
    """The producer's half of an `Outbox`: bound to a database, a producer group and settings."""

    def __init__(
        self,
        engine: Engine,
        settings: Settings,
        group: str,
        sessions: sessionmaker[Session] | None,
        async_sessions: async_sessionmaker[AsyncSession] | None,
        immunity_of: Callable[[str], float],
    ) -> None:
        self.schema = settings.schema
        self._engine = engine
        self._settings = settings
        self._group = limits.check_group(group)
        self._sessions = sessions
        self._async_sessions = async_sessions
        self._immunity_of = immunity_of
        self._flow = FlowControl.of(settings)
        if engine.dialect.name != "postgresql" or engine.dialect.driver != "psycopg":
            raise InvalidSettings(
                f"the outbox needs PostgreSQL through psycopg 3, not {engine.dialect.name} through "
                f"{engine.dialect.driver}; make the engine with a URL that begins with postgresql+psycopg://"
            )
        carriers.hook_sessions()
        # Now, since listening to an engine that is in use by other threads isn't safe.
        at_commit.hook(engine)

    def sessions(self) -> sessionmaker[Session]:
        """Return the factory of sessions for sync functions."""
        if self._sessions is None:
            raise TransactionRequired("this Outbox is bound to an AsyncEngine; decorate an 'async def' function")
        return self._sessions

    def async_sessions(self) -> async_sessionmaker[AsyncSession]:
        """Return the factory of sessions for async functions."""
        if self._async_sessions is None:
            raise TransactionRequired("this Outbox is bound to a sync Engine; decorate a plain 'def' function")
        return self._async_sessions

    def send(self, carrier: Carrier, topic: str, body: Any, **options: Unpack[Options]) -> UUID:
        """See `Outbox.send`."""
        half = self._half(topic, body, **options)
        write = at_commit.Write(self.schema, half, nudge=self._settings.listen, flow=self._flow)
        carriers.add(carrier, write, self._engine)
        return half.id

    def prepare(
        self,
        carrier: Carrier,
        topic: str,
        body: Any,
        *,
        immunity: dt.timedelta | float | None = None,
        fenced: bool = False,
        **options: Unpack[Options],
    ) -> UUID:
        """See `Outbox.prepare`."""
        half = self._half(topic, body, **options)
        preparation = Preparation(fenced, self._immunity(half.topic, immunity))
        carriers.add(carrier, at_commit.Write(self.schema, half, preparation, flow=self._flow), self._engine)
        return half.id

    def decide(self, half_id: UUID, resolution: Resolution, within: Carrier | None) -> Decision | None:
        """Decide alone, or at the commit of the caller's transaction; see `Outbox.commit`."""
        if within is not None:
            carriers.add(within, at_commit.Intent(self.schema, half_id, resolution), self._engine)
            return None
        if self._sessions is None:
            raise TransactionRequired(
                f"this Outbox is bound to an AsyncEngine; decide half message {half_id} within an AsyncSession"
            )
        with self._sessions.begin() as session:
            return self._decide_now(session, half_id, resolution)

    def commit_within(self, carrier: Carrier, half_id: UUID) -> None:
        """Commit a half at the commit of the caller's transaction, which fails if a decision came first."""
        carriers.add(carrier, at_commit.Intent(self.schema, half_id, Resolution.COMMIT), self._engine)

    def commit_now(self, session: Session, half_id: UUID) -> Decision:
        """Commit a half at once, in the session's transaction."""
        return self._decide_now(session, half_id, Resolution.COMMIT)

    def rollback_now(self, session: Session, half_id: UUID) -> Decision:
        """Roll a half back at once, in the session's transaction."""
        return self._decide_now(session, half_id, Resolution.ROLLBACK)

    def _decide_now(self, session: Session, half_id: UUID, resolution: Resolution) -> Decision:
        decision = decide(session.connection(), self.schema, half_id, resolution)
        if decision.resolution is not resolution:
            raise already(decision)
        return decision

    def _half(
        self,
        topic: str,
        body: Any,
        *,
        key: str | None = None,
        tag: str | None = None,
        headers: Mapping[str, str] | None = None,
        deliver_at: dt.datetime | None = None,
        delay: dt.timedelta | float | int | None = None,
        delay_level: int | None = None,
        id: UUID | None = None,  # noqa: A002
    ) -> HalfMessage:
        delivery = limits.check_delivery(deliver_at, delay, delay_level)
        if id is not None and not isinstance(id, UUID):
            raise InvalidMessage(f"id must be a UUID, not {type(id).__name__}: {id!r}")
        raw, content_type = codec.encode(body)
        if len(raw) > self._settings.max_body_bytes:
            raise InvalidMessage(
                f"the body has {len(raw)} bytes; at most {self._settings.max_body_bytes} are allowed "
                "(setting max_body_bytes): store it elsewhere and send a reference"
            )
        return HalfMessage(
            id or uuid7(),
            self._group,
            limits.check_topic(topic),
            limits.check_text("key", key, limits.MAX_KEY_BYTES),
            limits.check_text("tag", tag, limits.MAX_TAG_BYTES),
            limits.check_headers(headers),
            content_type,
            raw,
            *delivery,
        )

    def _immunity(self, topic: str, immunity: dt.timedelta | float | None) -> float:
        if immunity is None:
            return float(self._immunity_of(topic))
        return limits.check_seconds("immunity", immunity)
