"""Send, prepare, commit, rollback: half messages in the caller's transaction."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from uuid import UUID

from outbox.database import at_commit
from outbox.database.decision import already, decide
from outbox.errors import InvalidMessage, InvalidSettings, TransactionRequired
from outbox.message import codec, limits
from outbox.message.model import Decision, HalfMessage, Outgoing, Preparation, Resolution, uuid7
from outbox.producer import carriers
from outbox.producer.carriers import Intent, Write
from outbox.producer.flow_control import FlowControl

if TYPE_CHECKING:
    import datetime as dt

    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker
    from sqlalchemy.orm import Session, sessionmaker

    from outbox.producer.carriers import Carrier
    from outbox.settings import Settings


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

    @contextmanager
    def transaction(self, *, is_async: bool) -> Iterator[Any]:
        """Open a session in a transaction, which commits when the block ends without an exception.

        ``is_async``: an AsyncSession; the block runs inside ``greenlet_spawn``.

        Raises:
            TransactionRequired: the Outbox is bound to an engine of the other kind.
        """
        if is_async and self._async_sessions is None:
            raise TransactionRequired("this Outbox is bound to a sync Engine; decorate a plain 'def' function")
        if not is_async and self._sessions is None:
            raise TransactionRequired("this Outbox is bound to an AsyncEngine; decorate an 'async def' function")
        session: Any = self._async_sessions() if is_async else self._sessions()  # type: ignore[misc]
        with getattr(session, "sync_session", session) as opened, opened.begin():
            yield session

    def send(self, carrier: Carrier, topic: str, message: Outgoing) -> UUID:
        """See `Outbox.send`."""
        half = self._half(topic, message)
        carriers.add(carrier, Write(self.schema, half, nudge=self._settings.listen, flow=self._flow), self._engine)
        return half.id

    def prepare(
        self,
        carrier: Carrier,
        topic: str,
        message: Outgoing,
        *,
        immunity: dt.timedelta | float | None = None,
        fenced: bool = False,
    ) -> UUID:
        """See `Outbox.prepare`."""
        half = self._half(topic, message)
        preparation = Preparation(fenced, self._immunity(half.topic, immunity))
        carriers.add(carrier, Write(self.schema, half, preparation, flow=self._flow), self._engine)
        return half.id

    def decide(self, half_id: UUID, resolution: Resolution, within: Carrier | None) -> Decision | None:
        """Decide alone, or at the commit of the caller's transaction; see `Outbox.commit`."""
        if within is not None:
            carriers.add(within, Intent(self.schema, half_id, resolution), self._engine)
            return None
        if self._sessions is None:
            raise TransactionRequired(
                f"this Outbox is bound to an AsyncEngine; decide half message {half_id} within an AsyncSession"
            )
        with self._sessions.begin() as session:
            return self.decide_now(session, half_id, resolution)

    def commit_within(self, carrier: Carrier, half_id: UUID) -> None:
        """Commit a half at the commit of the caller's transaction, which fails if a decision came first."""
        carriers.add(carrier, Intent(self.schema, half_id, Resolution.COMMIT), self._engine)

    def decide_now(self, session: Session, half_id: UUID, resolution: Resolution) -> Decision:
        """Decide a half at once, in the session's transaction.

        Raises:
            AlreadyCommitted, AlreadyRolledBack: it was decided otherwise before.
            HalfNotFound: no half message has this id.
        """
        decision = decide(session.connection(), self.schema, half_id, resolution)
        if decision.resolution is not resolution:
            raise already(decision)
        return decision

    def _half(self, topic: str, message: Outgoing) -> HalfMessage:
        options = message.options
        delivery = limits.check_delivery(options.get("deliver_at"), options.get("delay"), options.get("delay_level"))
        half_id = options.get("id")
        if half_id is not None and not isinstance(half_id, UUID):
            raise InvalidMessage(f"id must be a UUID, not {type(half_id).__name__}: {half_id!r}")
        raw, content_type = codec.encode(message.body)
        if len(raw) > self._settings.max_body_bytes:
            raise InvalidMessage(
                f"the body has {len(raw)} bytes; at most {self._settings.max_body_bytes} are allowed "
                "(setting max_body_bytes): store it elsewhere and send a reference"
            )
        return HalfMessage(
            half_id or uuid7(),
            self._group,
            limits.check_topic(topic),
            limits.check_text("key", options.get("key"), limits.MAX_KEY_BYTES),
            limits.check_text("tag", options.get("tag"), limits.MAX_TAG_BYTES),
            limits.check_headers(options.get("headers")),
            content_type,
            raw,
            *delivery,
        )

    def _immunity(self, topic: str, immunity: dt.timedelta | float | None) -> float:
        if immunity is None:
            return float(self._immunity_of(topic))
        return limits.check_seconds("immunity", immunity)
