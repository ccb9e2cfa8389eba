"""A group whose messages the application takes and settles by itself: `Outbox.leased`."""

from __future__ import annotations

import datetime as dt
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar, cast

from sqlalchemy import Connection

from outbox.compensate.quarantine import quarantine_group
from outbox.consumer.leased import settlement
from outbox.consumer.leased.settlement import LONGEST_LEASE, MessageLease, Settlement, Taken
from outbox.consumer.leased.taker import MOST_TAKEN, Taker
from outbox.database.at_commit import refuse_autocommit
from outbox.database.engines import calling_engine, connect, engine_of
from outbox.database.execute import driver_of
from outbox.database.session import begin
from outbox.errors import InvalidHandler, InvalidMessage, LeaseEnded, TransactionRequired
from outbox.message.answer import HandlerFailure
from outbox.message.content import check_seconds
from outbox.message.model import Message, Status
from outbox.text import process_name, storable

if TYPE_CHECKING:
    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

    from outbox.consumer.subscription import Subscription
    from outbox.producer.producer import Carrier
    from outbox.settings import Settings

T = TypeVar("T")


def _no_handler(message: Message[Any]) -> NoReturn:
    """Refuse to handle a message: it is taken by `LeasedGroup.take`, and no worker calls anything."""
    raise InvalidHandler(f"message {message.id}: group {message.group!r} is leased, and has no handler")


#: What the subscription of a leased group has for its handler.
NO_HANDLER: Callable[[Message[Any]], NoReturn] = _no_handler


class LeasedMessage(Generic[T]):
    """A message that was taken: ``body``, ``id``, ``key``, ``headers`` and more are those of its ``message``.

    Settle it before ``until`` (a time of the database), or it is handed out again: `acknowledge` what is done, `fail`
    what isn't, `extend` what takes longer. Only the newest take of a message can settle it.
    """

    def __init__(self, group: LeasedGroup[T], taken: Taken) -> None:
        self._group = group
        self.message: Message[T] = taken.message
        self.attempt: int = taken.attempt
        self.until: dt.datetime = taken.until
        self._lease: MessageLease = taken.lease

    def __repr__(self) -> str:
        return f"LeasedMessage({self.message.id}, attempt={self.attempt}, until={self.until.isoformat()})"

    @property
    def body(self) -> T:
        """The body, as the group reads it."""
        return self.message.body

    @property
    def handle(self) -> str:
        """The lease as a text, for ``acknowledge``, ``extend`` and ``fail`` in SQL: those of another process, too."""
        return self._lease.handle

    def acknowledge(self, within: Carrier | None = None) -> bool:
        """Say that the message is done: with the transaction of a session or connection, or in one of its own.

        With that of your own change, on this database, the effect is exactly once. Return False if it was said before:
        roll back then, too, since that change is there already.

        Raises:
            LeaseEnded: the lease has ended, and the message may be in other hands: roll your change back.
            TransactionRequired: ``within`` is in AUTOCOMMIT mode or asynchronous; or the Outbox is bound to an
                AsyncEngine, outside `run_sync`.
        """
        if within is not None:
            return self._acknowledge(_connection_of(within))
        with self._group.transaction() as connection:
            return self._acknowledge(connection)

    def _acknowledge(self, connection: Connection) -> bool:
        schema = self._group.settings.schema
        outcome = settlement.acknowledge(connection, schema, [self._lease])[0]
        if outcome is Settlement.LATE:
            self._refuse("acknowledged")
        return outcome is Settlement.DONE

    def extend(self, invisible: dt.timedelta | float) -> None:
        """Have the lease end so long (timedelta or seconds, at most 12 h) from now; 0: now.

        Raises:
            LeaseEnded: it has ended.
            InvalidMessage: the duration isn't one.
        """
        seconds = _lease_time(invisible)
        with self._group.transaction() as connection:
            by = settlement.successor(self._lease)
            until = settlement.extend(connection, self._group.settings.schema, self._lease, seconds, by)
        if until is None:
            self._refuse("extended")
        self._lease, self.until = by, until

    def fail(self, reason: str, *, delay: dt.timedelta | float | None = None, park: bool = False) -> None:
        """Say that this attempt failed: the message is due again after ``delay``, or as the group's table of retries.

        After its last attempt, or with ``park``, it is parked. In a group that is ordered by key, the later messages of
        its key that came by the same take are given back, at no attempt's cost: they wait until it is settled, and
        `LeaseEnded` is raised for them. One that is parked by ``on_exhausted="skip"`` holds nothing back.

        Raises:
            LeaseEnded: the lease has ended.
            InvalidMessage: the delay isn't one.
        """
        seconds = None if delay is None else check_seconds("delay", delay)
        failure = HandlerFailure(storable(reason), Status.PARKED if park else Status.FAILED, delay=seconds)
        of, settings = self._group.subscription, self._group.settings
        with self._group.transaction() as connection:
            outcome = settlement.fail(connection, of, settings, self._lease, failure, self.message)
        if outcome is Settlement.LATE:
            self._refuse("failed")

    def _refuse(self, what: str) -> NoReturn:
        raise LeaseEnded(
            f"message {self.message.id} of topic {self.message.topic!r} can't be {what} by group "
            f"{self._group.subscription.group!r}: its lease, until {self.until.isoformat()}, has ended or was settled; "
            "roll back what was done with it, since it is handed out again; take it for longer, or extend its lease"
        )


class LeasedGroup(Generic[T]):
    """A group of a topic whose messages are taken; made by `Outbox.leased`. To be used by any threads and processes."""

    def __init__(
        self, find: Callable[[], Subscription], settings: Settings, engine: Callable[[], Engine | AsyncEngine]
    ) -> None:
        self.settings: Settings = settings
        self._find, self._engine = find, engine
        self._guard = threading.Lock()
        self._takers: list[StartedTaker] = []

    @property
    def subscription(self) -> Subscription:
        """What was declared, as it is by now: a source may be named later."""
        return self._find()

    def take(
        self,
        most: int = 1,
        *,
        invisible: dt.timedelta | float = 30.0,
        taker: str | None = None,
        take_id: str | None = None,
    ) -> list[LeasedMessage[T]]:
        """Take at most so many messages (1 to 1000), which no other take sees for ``invisible`` (timedelta or seconds).

        Those first that are due again: failed, or never settled by the one that had them. An empty list if there are
        none: wait, and take again. ``taker`` is the client's name in lists (default: this process). A take that is
        repeated with the same ``take_id``, since its result was lost, has the same messages.

        In async code: ``await outbox.run_sync(group.take, 10)``.

        Raises:
            InvalidHandler: ``most`` is out of range.
            InvalidMessage: ``invisible`` isn't a duration of up to 12 h.
            MessagesPruned: messages were pruned before the group came to them, and it is to stop then.
            TransactionRequired: the Outbox is bound to an AsyncEngine, outside `run_sync`.
        """
        if not 1 <= most <= MOST_TAKEN:
            raise InvalidHandler(f"take: most = {most} must be between 1 and {MOST_TAKEN}")
        named: dict[str, Any] = {"taker": storable(taker or process_name()), "invisible": _lease_time(invisible)}
        named["take_id"] = None if take_id is None else storable(take_id)
        with self._connections() as (connection, source):
            return [LeasedMessage(self, taken) for taken in self.take_on(connection, source, most, **named)]

    def take_on(self, connection: Connection, source: Connection, most: int, **named: Any) -> list[Taken]:
        """Take on connections that are open, neither in a transaction: as `Taker.take`, whose options these are."""
        with self._taker(connection, source) as taker:
            return taker.take(connection, source, most, **named)

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """Begin a transaction on the consumer's database."""
        with connect(calling_engine(self._engine())) as connection, begin(connection):
            yield connection

    @contextmanager
    def _connections(self) -> Iterator[tuple[Connection, Connection]]:
        engine, source = calling_engine(self._engine()), self.subscription.sources[0]
        with connect(engine) as connection:
            if source is None:
                yield connection, connection
                return
            with connect(engine_of(source, is_async=engine.dialect.is_async)) as other:
                yield connection, other

    @contextmanager
    def _taker(self, connection: Connection, source: Connection) -> Iterator[Taker]:
        """Lend a taker, which one thread uses at a time."""
        with self._guard:
            started = self._takers.pop() if self._takers else StartedTaker(self.subscription, self.settings)
        started.meet(connection, source)
        yield started.taker
        # One that has failed isn't lent again.
        with self._guard:
            self._takers.append(started)


class StartedTaker:
    """A taker, and the connection to the source that it has met; used by one thread at a time."""

    def __init__(self, subscription: Subscription, settings: Settings) -> None:
        self.taker: Taker = Taker(subscription, settings)
        self._settings = settings
        self._met: Any = None

    def meet(self, connection: Connection, source: Connection) -> None:
        """Start the taker; on another connection than before, find out whether that leads to the same source.

        A new group gets its first offsets, and what stands to be compensated is quarantined for it.

        Raises:
            MessagesPruned: as of `outbox.consumer.consumer.Consumer.start`.
        """
        driver, taker = driver_of(source), self.taker
        if self._met is None:
            taker.start(connection, source)
            of = taker.subscription
            quarantine_group(connection, source, self._settings.schema, of.group, of.feed)
        elif self._met is not driver:
            taker.find_source(connection, source)
        self._met = driver


def _lease_time(invisible: dt.timedelta | float) -> float:
    seconds = check_seconds("invisible", invisible)
    if seconds > LONGEST_LEASE:
        raise InvalidMessage(f"invisible {invisible!r} must be at most {LONGEST_LEASE:g} s: take less, and extend")
    return seconds


def _connection_of(carrier: Carrier) -> Connection:
    """Return the connection of a carrier, for what is written at once in its transaction.

    Raises:
        TransactionRequired: it is asynchronous, or in AUTOCOMMIT mode.
    """
    if hasattr(carrier, "run_sync"):
        raise TransactionRequired("acknowledge takes a Session or Connection: in async code, await session.run_sync(…)")
    connection = carrier if isinstance(carrier, Connection) else cast("Any", carrier).connection()
    refuse_autocommit(connection)
    return cast("Connection", connection)
