"""Capture what a function sends, without a database: checked as if it were sent, written nowhere."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import UUID
from weakref import WeakKeyDictionary

from sqlalchemy import event

from outbox.database.decision import already
from outbox.database.drivers import raw_connection
from outbox.errors import HalfNotFound
from outbox.message.model import Decision, Resolution
from outbox.telemetry.hooks import emit
from outbox.testing.sent import SentMessage, SentMessages, SentState

if TYPE_CHECKING:
    from sqlalchemy.orm import Session, SessionTransaction

    from outbox.app import Outbox
    from outbox.producer.producer import Producer, Write

T = TypeVar("T")


@contextmanager
def capture(*outboxes: Outbox) -> Iterator[SentMessages]:
    """Keep what these outboxes send until the block ends, and write nothing of it; yield it, growing.

    Topic, key, headers, body and delivery are checked as always. The carrier may be anything; a message sent with a
    Session that rolls back (or a savepoint of it), or that ends without a commit, becomes ``undone``. Prepared halves
    and their decisions are captured too, and so is what decorated functions send: these are given sessions, which need
    a database only for the statements of their own.
    """
    messages = SentMessages()
    with ExitStack() as stack:
        for outbox in outboxes:
            stack.enter_context(_Captured(outbox._producer, messages).replacing())
        yield messages


class _Captured:
    """Takes the place of what a producer does with a database."""

    def __init__(self, producer: Producer, messages: SentMessages) -> None:
        self._producer = producer
        self._messages = messages
        self._decisions: dict[UUID, Decision] = {}
        self._sessions = _Sessions()

    @contextmanager
    def replacing(self) -> Iterator[None]:
        """Stand in for the producer's own methods until the block ends."""
        own = vars(self._producer)
        mine: dict[str, Any] = {name: getattr(self, name) for name in ("_add", "decide", "decide_now")}
        mine["is_captured"] = True
        before = {name: own[name] for name in mine if name in own}
        own.update(mine)
        try:
            yield
        finally:
            for name in mine:
                del own[name]
            own.update(before)
            self._sessions.forget()

    def _add(self, carrier: Any, write: Write) -> Any:
        half = write.half
        state: SentState = "sent" if write.preparation is None else "prepared"
        earlier = self._messages.find(half.id)
        if write.once is not None and earlier is not None and earlier.state != "undone":
            emit(write.once.second(half))
            return _as_of(carrier, half.id)
        self._messages.put(SentMessage.of(half, state, self._producer.codecs))
        self._sessions.undo_with(carrier, lambda: self._messages.change(half.id, "undone"))
        return _as_of(carrier, half.id)

    def decide(self, half_id: UUID, resolution: Resolution, within: Any) -> Any:
        decision = self._decide(half_id, resolution, within)
        if decision.resolution is not resolution or (within is not None and not decision.first):
            raise already(decision)
        return decision if within is None else _as_of(within, None)

    def decide_now(self, session: Any, half_id: UUID, resolution: Resolution) -> Decision:
        decision = self._decide(half_id, resolution, session)
        if decision.resolution is not resolution:
            raise already(decision)
        return decision

    def _decide(self, half_id: UUID, resolution: Resolution, within: Any) -> Decision:
        if (message := self._messages.find(half_id)) is None or message.state == "undone":
            raise HalfNotFound(half_id)
        if (earlier := self._decisions.get(half_id)) is not None:
            return Decision(half_id, earlier.resolution, earlier.decided_by, earlier.decided_at, first=False)
        decided = Decision(half_id, resolution, "producer", dt.datetime.now(dt.UTC), first=True)
        self._decisions[half_id] = decided
        self._messages.change(half_id, "sent" if resolution is Resolution.COMMIT else "rolled back")
        self._sessions.undo_with(within, lambda: self._reopen(half_id, message.state))
        return decided

    def _reopen(self, half_id: UUID, state: SentState) -> None:
        del self._decisions[half_id]
        self._messages.change(half_id, state)


def _as_of(carrier: Any, value: T) -> T | Coroutine[Any, Any, T]:
    """Return a value as a carrier does: a driver's own async connection has it awaited."""

    async def awaited() -> T:
        return value

    raw = raw_connection(carrier)
    return awaited() if raw is not None and raw.is_async else value


class _Sessions:
    """Undoes the messages sent with a session whose transaction or savepoint doesn't commit."""

    def __init__(self) -> None:
        self._undo: WeakKeyDictionary[Session, list[tuple[SessionTransaction | None, Callable[[], None]]]]
        self._undo = WeakKeyDictionary()

    def undo_with(self, carrier: Any, undo: Callable[[], None]) -> None:
        """Undo something unless the transaction of a session commits; of another carrier, nothing is known."""
        from sqlalchemy.orm import Session  # noqa: PLC0415 - importing outbox must not pay for it

        if hasattr(carrier, "registry") and not isinstance(carrier, type):  # a scoped_session
            carrier = carrier()
        session = getattr(carrier, "sync_session", carrier)
        if not isinstance(session, Session):
            return
        if not session.in_transaction():
            session.begin()
        if session not in self._undo:
            self._undo[session] = []
            event.listen(session, "after_commit", self._on_commit)
            event.listen(session, "after_transaction_end", self._on_end)
        self._undo[session].append((session.get_nested_transaction() or session.get_transaction(), undo))

    def _on_commit(self, session: Session) -> None:
        released = session.get_nested_transaction()
        outer = released.parent if released is not None else None
        while outer is not None and outer.parent is not None and not outer.nested:
            outer = outer.parent
        self._undo[session] = [
            (outer if level is released else level, undo) for level, undo in self._undo[session] if released is not None
        ]

    def _on_end(self, session: Session, ended: SessionTransaction) -> None:
        undone = [undo for level, undo in self._undo[session] if level is ended]
        self._undo[session] = [entry for entry in self._undo[session] if entry[0] is not ended]
        for undo in reversed(undone):
            undo()

    def forget(self) -> None:
        """Watch no session any more."""
        for session in self._undo:
            event.remove(session, "after_commit", self._on_commit)
            event.remove(session, "after_transaction_end", self._on_end)
        self._undo.clear()
