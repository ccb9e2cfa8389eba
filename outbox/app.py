"""The `Outbox`: one database, one producer group, its consumers; everything else hangs on it."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Collection, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, Unpack, overload
from uuid import UUID

from sqlalchemy import Connection

from outbox.consumer.subscription import Subscription
from outbox.database.engines import know_further, run_from_async
from outbox.database.execute import execute
from outbox.database.sql import take_lock
from outbox.declarations import Declarations
from outbox.dispatch.dispatch_pass import dispatch_lock
from outbox.dispatch.sql import declare_topic, topic_queues
from outbox.errors import InvalidHandler, InvalidSettings, NotBound, TransactionRequired, without_secrets
from outbox.message.content import check_topic
from outbox.message.model import Decision, Outgoing, Resolution, SendOptions
from outbox.message.topic import Topic
from outbox.producer import decorators
from outbox.producer.producer import Producer
from outbox.relay.intake.intake import Intake, OwnLoop
from outbox.settings import Settings
from outbox.telemetry.hooks import work_for

if TYPE_CHECKING:
    from sqlalchemy import URL, Engine
    from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
    from sqlalchemy.orm import Session

    from outbox.database.drivers import RawAsyncConnection, RawConnection
    from outbox.database.session import Bind
    from outbox.leases import LeasedGroup
    from outbox.message.declared import (
        LeasedOptions,
        PrepareOptions,
        TransactionalDecorator,
        TwoPhaseDecorator,
    )
    from outbox.operator.operator import OutboxOperator
    from outbox.producer.producer import AnyCarrier, Carrier
    from outbox.relay.intake.inline import InlineReceiver
    from outbox.relay.intake.source import Received

P = ParamSpec("P")
T = TypeVar("T")

#: The Outboxes of `Outbox.active` blocks around the running code, the innermost last.
_active: ContextVar[tuple[Outbox, ...]] = ContextVar("outbox_active", default=())


class Outbox(Declarations):
    """Send, prepare, decide and consume messages next to the business data of one database.

    ``bind`` is the database: an engine, or the session factory that the application uses anyway. Without it, the Outbox
    takes declarations (decorators, consumers, checkers) from the start, and is used after `bind`. ``group`` is the
    producer group written into its half messages. ``settings`` default to `Settings.from_env`. ``engines`` are further
    ones of psycopg 3 on the same database: workers use them where they can't connect as ``bind`` does.

    Raises:
        InvalidSettings: settings that contradict each other, or an engine that isn't PostgreSQL by psycopg 3, psycopg2
            or asyncpg.
        InvalidMessage: the group's name isn't one.
    """

    def __init__(
        self,
        bind: Bind | None = None,
        *,
        group: str = "default",
        settings: Settings | None = None,
        engines: Collection[Engine | AsyncEngine] = (),
    ) -> None:
        super().__init__(group, settings)
        self._binding: _Binding | None = None
        if bind is not None:
            self.bind(bind, engines=engines)

    def __repr__(self) -> str:
        where = "not bound" if self._binding is None else without_secrets(repr(self.url))
        return f"Outbox({where}, group={self.group!r}, subscriptions={sorted(self.subscriptions)})"

    # --- the database --------------------------------------------------------------------------------------

    def bind(self, bind: Bind, *, engines: Collection[Engine | AsyncEngine] = ()) -> None:
        """Give the Outbox its database, where it was made without one: an engine, or a session factory on one.

        To be called once, such as in the function that makes the application. The same engine or factory again changes
        nothing. ``engines`` are as of the class.

        Raises:
            InvalidSettings: it has another one already, or this isn't one that `Outbox` takes.
        """
        if self._binding is None:
            self._binding = _Binding(self, bind)
            know_further(self.engine, engines)
        elif self._binding.bind is not bind:
            raise InvalidSettings(
                f"{self!r} is bound already, and can't be bound to {bind!r} too: for a second database, make another "
                "Outbox of it by bound_to(); where the application is made anew, as in tests, call unbind() first"
            )

    def unbind(self) -> None:
        """Take the database away again, for tests that make the application anew; the declarations stay."""
        self._binding = None

    def bound_to(
        self, bind: Bind, *, schema: str | None = None, engines: Collection[Engine | AsyncEngine] = ()
    ) -> Outbox:
        """Return an Outbox with the same functions and handlers, on the database (or in the schema) of one tenant.

        A declaration on either of them, now or later, counts for both. A `Worker` takes several. Functions that were
        decorated with this Outbox work for the tenant while its Outbox is `active`, if this one has no database itself.

        Raises:
            As `bind`; InvalidSettings also: the name of the schema isn't one.
        """
        settings = self.settings if schema is None else replace(self.settings, schema=schema)
        tenant = Outbox(group=self.group, settings=settings)
        tenant._share_declarations(self)
        tenant.bind(bind, engines=engines)
        return tenant

    @contextmanager
    def active(self) -> Iterator[Outbox]:
        """Have the Outbox that this one was made of (by `bound_to`) work on this database within a with block.

        For the block's thread or task, and for the tasks that are begun in it. Workers do so around each handler.
        """
        token = _active.set((*_active.get(), self))
        try:
            with work_for(self.middlewares):
                yield self
        finally:
            _active.reset(token)

    @property
    def current(self) -> Outbox:
        """The tenant's Outbox that is `active` here, if this one or a tenant of it is; else this one."""
        tenants = (each for each in reversed(_active.get()) if each.subscriptions is self.subscriptions)
        return next(tenants, self)

    @property
    def _bound(self) -> _Binding:
        if self._binding is not None:
            return self._binding
        for tenant in reversed(_active.get()):
            if tenant.subscriptions is self.subscriptions and tenant._binding is not None:
                return tenant._binding
        raise NotBound(
            f"the Outbox of group {self.group!r} has no database yet: call outbox.bind(engine) where the application "
            "is made, before messages are sent or a worker starts"
        )

    @property
    def _producer(self) -> Producer:
        return self._bound.producer

    @property
    def engine(self) -> Engine | AsyncEngine:
        """The engine that the Outbox is bound to.

        Raises:
            NotBound: there is none yet.
        """
        return self._bound.engine

    @property
    def url(self) -> URL:
        """The URL of the database; its text hides the password."""
        return self.engine.url

    @property
    def operator(self) -> OutboxOperator:
        """What an operator sees and does in this database: acts, lists, bulk jobs; see `OutboxOperator`."""
        return self._bound.operator

    def declare_topic(self, name: str, queues: int) -> None:
        """Create a topic with so many queues, or give it more (never fewer: messages may wait in them).

        More queues move keys to other queues. The order of a key stays: a group reads messages sent from now on into a
        queue when it has come to the end, as it is now, of the queues that its keys were in.

        Raises:
            InvalidHandler: not 1 to 4096 queues, or fewer than the topic has.
            TransactionRequired: this Outbox is bound to an AsyncEngine, and the call isn't inside `run_sync`.
        """
        check_topic(name)
        if not 1 <= queues <= 4096:
            raise InvalidHandler(f"topic {name!r}: queues = {queues} must be between 1 and 4096")
        schema = self.settings.schema
        with self._producer.calling() as session:
            connection = session.connection()
            (found,) = execute(connection, topic_queues(schema, name))
            if not found or found[0][0] < queues:
                declare = take_lock(dispatch_lock(schema)), declare_topic(schema, name=name, queues=queues)
                *_, found = execute(connection, *declare, topic_queues(schema, name))
            if (now := found[0][0]) > queues:
                raise InvalidHandler(f"topic {name!r} has {now} queues already and can't shrink to {queues}")

    def new_session(self) -> Session | AsyncSession:
        """Return a new session of the factory that the Outbox is bound to, or on its engine; the caller ends it."""
        return self._producer.sessions()

    async def run_sync(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function that uses the database without an await, from async code; return what it returns.

        As `AsyncSession.run_sync` does: on the caller's loop, with the connections of the AsyncEngine. For all that has
        no session: ``await outbox.run_sync(outbox.commit, half_id)``, acts of `operator`, `declare_topic`. If the
        Outbox is bound to a sync engine, the function runs in a thread.
        """
        return await run_from_async(self.engine, partial(function, *args, **kwargs))

    # --- producer ----------------------------------------------------------------------------------------

    def _name_of(self, topic: str | Topic[Any]) -> str:
        """Return the name of a topic; one that is declared elsewhere counts here as well from now on."""
        if isinstance(topic, Topic):
            self._declare(topic)
            return topic.name
        return topic

    @overload
    def send(
        self, carrier: Carrier | RawConnection, topic: Topic[T], body: T, **options: Unpack[SendOptions]
    ) -> UUID: ...
    @overload
    def send(self, carrier: Carrier | RawConnection, topic: str, body: Any, **options: Unpack[SendOptions]) -> UUID: ...
    @overload
    def send(
        self, carrier: RawAsyncConnection, topic: Topic[T], body: T, **options: Unpack[SendOptions]
    ) -> Coroutine[Any, Any, UUID]: ...
    @overload
    def send(
        self, carrier: RawAsyncConnection, topic: str, body: Any, **options: Unpack[SendOptions]
    ) -> Coroutine[Any, Any, UUID]: ...
    def send(self, carrier: AnyCarrier, topic: str | Topic[Any], body: Any, **options: Unpack[SendOptions]) -> Any:
        """Send a message with the transaction of ``carrier``; return its id.

        With a Session, AsyncSession, Connection or AsyncConnection of SQLAlchemy it does no I/O: half message and
        op(commit) are written in the round trip of the COMMIT, or vanish with the transaction or savepoint. (Through
        psycopg2 and asyncpg they take one statement of their own, just before the COMMIT.)

        With a connection of psycopg or psycopg2 itself, which has no hook for its COMMIT, the half message is written
        at once. With psycopg's AsyncConnection, or one of asyncpg, the call only checks the message: **await** what it
        returns, for nothing is sent before. Errors of the database are the driver's own then.

        ``body`` is a dict, dataclass, pydantic model, str or bytes; of a declared `topic`, what fits its model. The
        options are those of `SendOptions`: ``key``, ``tag``, ``headers``, ``deliver_at``, ``delay``, ``delay_level``,
        ``expires_at``, ``id``, ``dedupe``, ``on_duplicate``, ``content_type``, ``queue``, ``reply_to``,
        ``correlation``, ``refusal``, ``conversation``, ``cause``.

        Raises:
            InvalidMessage: topic, key, tag, headers, body, or delivery can't be stored.
            OutboxBusy: (at commit at the latest) the topic has reached ``max_undispatched`` of the settings.
            DuplicateMessage: (at commit at the latest) the topic has it, and ``on_duplicate="error"``.
            TransactionRequired: ``carrier`` is in AUTOCOMMIT mode, on another database, or takes no more messages.
            SchemaMissing: (at commit) the database has no outbox tables.
            TypeError: an option that a message doesn't have.
        """
        return self._producer.send(carrier, self._name_of(topic), Outgoing(body, **options))

    def receive(
        self,
        carrier: Session | Connection,
        received: Received,
        topic: str | Topic[Any],
        *,
        group: str,
        source: str = "loop",
        id_from: Callable[[Received], UUID | str] | None = None,
    ) -> bool:
        """Store a message that a loop of yours has of a broker, and handle it, in the transaction of ``carrier``.

        Where an `intake` can't have the loop. Commit, and then tell the broker; one message a transaction. The handler
        is that of the `consumer` ``group`` of ``topic``, and is called in this transaction; True tells that it was.
        False: the group has had the message, or its workers will handle it: as its handler has failed, here, which
        undoes what that did and nothing else, or before; or since it is ordered, has a filter or a rate, is paused, or
        its breaker is open; or the connection isn't one of psycopg 3, or isn't of the handler's kind (an async handler
        needs an async one, a handler with a cursor one like it). In async code:
        ``await session.run_sync(outbox.receive, received, topic, group=…)``.

        Ids are as of `intake`; ``source`` names the broker, for messages whose id follows from where it has them.

        Raises:
            InvalidHandler: the group has no such handler, or the message no id.
            TransactionRequired: ``carrier`` isn't on this database, is asynchronous, or the handler has ended the
                transaction: don't tell the broker.
        """
        app, name = self if self._binding is not None else self.current, self._name_of(topic)
        subscription = self.subscriptions.get((name, group))
        if subscription is None or not subscription.transactional or subscription.sources != (None,):
            raise InvalidHandler(
                f"receive: group {group!r} of topic {name!r} has no handler that runs in transactions of this "
                "database; declare one by @outbox.consumer, without source= and transactional=False"
            )
        if hasattr(carrier, "run_sync"):
            raise TransactionRequired(
                "receive takes a Session or Connection: in async code, await session.run_sync(outbox.receive, …)"
            )
        connection = carrier if isinstance(carrier, Connection) else carrier.connection()
        return app._bound.receiver(app, subscription, source, id_from).receive(connection, received)

    @overload
    def leased(self, topic: Topic[T], **options: Unpack[LeasedOptions]) -> LeasedGroup[T]: ...
    @overload
    def leased(self, topic: str, *, model: type[T], **options: Unpack[LeasedOptions]) -> LeasedGroup[T]: ...
    @overload
    def leased(self, topic: str, *, model: Any = None, **options: Unpack[LeasedOptions]) -> LeasedGroup[Any]: ...
    def leased(self, topic: str | Topic[Any], *, model: Any = None, **options: Any) -> LeasedGroup[Any]:
        """Declare a group of a topic that has no handler: the application takes its messages, and settles each.

        For code that can't be a handler: jobs in other processes, other languages, batches that take hours. A message
        that is taken (`LeasedGroup.take`) is seen by no other take until its lease ends, and is handed out again then,
        unless it was acknowledged. Each take and each acknowledgement writes the message's row, which a handler's group
        doesn't need. The options are those of `consumer`; ``ordered`` may be "key" or False (the default).

        Raises:
            InvalidHandler: the group has the topic already, or an option can't work.
            InvalidMessage: the topic or the group isn't a name.
        """
        # Services that take nothing don't pay for it.
        from outbox.leases import NO_HANDLER, LeasedGroup  # noqa: PLC0415 - importing outbox must not

        declared: dict[str, Any] = {"ordered": False, **options, "leased": True, "transactional": False}
        self._register(Subscription, topic, model, send_reply=self._send_reply, **declared)(NO_HANDLER)
        key = self._name_of(topic), options["group"]
        return LeasedGroup(lambda: self.subscriptions[key], self.settings, lambda: self.current.engine)

    def _send_reply(self, carrier: Any, topic: str, message: Outgoing) -> Any:
        # A tenant's answer goes out from the tenant's database, also where this Outbox has one itself.
        return self.current._producer.send(carrier, topic, message)

    @overload
    def prepare(
        self, carrier: Carrier | RawConnection, topic: Topic[T], body: T, **options: Unpack[PrepareOptions]
    ) -> UUID: ...
    @overload
    def prepare(
        self, carrier: Carrier | RawConnection, topic: str, body: Any, **options: Unpack[PrepareOptions]
    ) -> UUID: ...
    @overload
    def prepare(
        self, carrier: RawAsyncConnection, topic: Topic[T], body: T, **options: Unpack[PrepareOptions]
    ) -> Coroutine[Any, Any, UUID]: ...
    @overload
    def prepare(
        self, carrier: RawAsyncConnection, topic: str, body: Any, **options: Unpack[PrepareOptions]
    ) -> Coroutine[Any, Any, UUID]: ...
    def prepare(
        self,
        carrier: AnyCarrier,
        topic: str | Topic[Any],
        body: Any,
        *,
        immunity: dt.timedelta | float | None = None,
        **options: Unpack[SendOptions],
    ) -> Any:
        """Write a half message with the transaction of ``carrier``, to be decided later; return its id.

        For an outcome that isn't known at the local commit. Decide with `commit` or `rollback`; an orphan is left
        alone for ``immunity`` (timedelta or seconds) before its first check. ``delay`` counts from the writing of
        the half. Arguments, results and errors otherwise as of `send`; `OutboxBusy` also at ``max_undecided``.
        """
        return self._producer.prepare(carrier, self._name_of(topic), Outgoing(body, **options), immunity=immunity)

    @overload
    def commit(self, half_id: UUID, within: Carrier | RawConnection | None = None) -> Decision | None: ...
    @overload
    def commit(self, half_id: UUID, within: RawAsyncConnection) -> Coroutine[Any, Any, None]: ...
    def commit(self, half_id: UUID, within: AnyCarrier | None = None) -> Any:
        """Commit a prepared half: its message goes out. The first decision wins.

        Alone, it decides in a transaction of its own and returns the decision (``first=False`` if it was committed
        before). ``within`` a session or connection, it decides at that transaction's commit, which fails if another
        decision came earlier, so that the business change beside it can't be made twice; returns None. ``within`` a
        driver's own connection it decides at once, or when it is awaited: the caller rolls back if that fails, and
        decides last, so that others don't wait for the transaction.

        Raises:
            AlreadyRolledBack: it was rolled back before.
            AlreadyCommitted: (``within``) it was committed before.
            HalfNotFound: no half message has this id.
            TransactionRequired: alone, on an Outbox bound to an AsyncEngine, outside `run_sync`. Or as of `send`.
        """
        return self._producer.decide(half_id, Resolution.COMMIT, within)

    @overload
    def rollback(self, half_id: UUID, within: Carrier | RawConnection | None = None) -> Decision | None: ...
    @overload
    def rollback(self, half_id: UUID, within: RawAsyncConnection) -> Coroutine[Any, Any, None]: ...
    def rollback(self, half_id: UUID, within: AnyCarrier | None = None) -> Any:
        """Roll a prepared half back: no consumer ever sees it. Otherwise as `commit`, with the errors swapped."""
        return self._producer.decide(half_id, Resolution.ROLLBACK, within)

    def transactional(
        self,
        *,
        topic: str | Topic[Any],
        key: Callable[[Any], str | None] | None = None,
        tag: str | None = None,
        message: Callable[[Any], Any] | None = None,
        joins: bool = True,
    ) -> TransactionalDecorator:
        """Decorate a service function: it runs in a transaction and what it returns is sent with that.

        The function takes its session first (``def create(session: Session, name: str)``, called ``create("a")``), or
        in a parameter with the default `INJECTED`. It joins the transaction of a session that it is called with
        (``create.within(session, "a")``), or that its caller runs in: a decorated function, a handler, a checker. The
        code that began it commits it. Otherwise it gets a new session and commits that; with ``joins=False`` always.

        ``message`` makes the body from what the function returns; values that the database gives have to be there, so
        flush first. ``key`` takes the body. The function, or ``message``, may return an `Outgoing` to say more (the
        function's caller gets its body), or None to send nothing.

        Raises:
            InvalidHandler: the function has no parameter for its session.
            InvalidMessage: the topic isn't a name.
        """
        return decorators.transactional(
            lambda: self._producer,
            topic=check_topic(self._name_of(topic)),
            key=key,
            tag=tag,
            message=message,
            joins=joins,
        )

    def two_phase(
        self,
        *,
        topic: str | Topic[Any],
        key: Callable[[Any], str | None] | None = None,
        tag: str | None = None,
        body: Callable[..., Any] | None = None,
        check: Callable[..., Any] | None = None,
        fenced: bool | None = None,
        immunity: dt.timedelta | float | None = None,
        rollback_on: tuple[type[BaseException], ...] = (),
    ) -> TwoPhaseDecorator:
        """Decorate a service function: prepare a half message, run the function, decide by its outcome.

        Returned: commit. Raised one of ``rollback_on``: rollback. Any other exception: unknown, left to the check;
        the original exception reaches the caller in every case. If the topic is full, the prepare raises `OutboxBusy`,
        and the function isn't run. ``body`` gets the function's arguments by name (default: the arguments themselves as
        a dict), ``key`` gets the body.

        ``fenced`` (the default without ``check``): the business change is made in this database with the session that
        the function is given; the commit is written in the same transaction, which fails if a check has rolled the half
        back meanwhile. ``fenced=False``: the outcome lies elsewhere (a payment provider, another database); the
        function takes no session, and a crash before its decision leaves an orphan that only a checker or an operator
        can decide. ``check`` registers the `checker` of the topic.

        Raises:
            InvalidHandler: a fenced function has no parameter for its session, or is given a ``check``; or the topic
                has another checker already.
            InvalidMessage: the topic isn't a name.
        """
        topic = check_topic(self._name_of(topic))
        if fenced and check is not None:
            raise InvalidHandler(
                f"@two_phase of topic {topic!r}: a fenced function needs no check, its fence tells whether it "
                "committed; leave out check, or say fenced=False"
            )
        if check is not None and (topic not in self.checkers or self.checkers[topic].function is not check):
            self.checker(topic)(check)
        return decorators.two_phase(
            lambda: self._producer,
            topic=topic,
            key=key,
            tag=tag,
            body=body,
            fenced=check is None if fenced is None else fenced,
            immunity=immunity,
            rollback_on=rollback_on,
        )


class _Binding:
    """What an Outbox has once it is bound."""

    def __init__(self, outbox: Outbox, bind: Bind) -> None:
        self.bind = bind
        self._receivers: dict[Any, InlineReceiver] = {}
        parts = outbox.settings, outbox.group, outbox._immunity_of, outbox.topics, outbox.codecs, outbox.middlewares
        self.producer = Producer(bind, *parts)
        self.engine = self.producer.bind
        self._for_operator = outbox.settings, outbox.checkers, outbox.codecs, outbox.topics

    @cached_property
    def operator(self) -> OutboxOperator:
        # Services, which only send and consume, don't pay for it at their start.
        from outbox.operator.operator import OutboxOperator  # noqa: PLC0415 - importing outbox must not pay for it

        return OutboxOperator(self.engine, *self._for_operator)

    def receiver(
        self, app: Outbox, subscription: Subscription, source: str, id_from: Callable[[Received], UUID | str] | None
    ) -> InlineReceiver:
        """Return what takes messages for a group, by the name of their source."""
        key, known = (subscription.key, source), self._receivers.get((subscription.key, source))
        if known is None or known.subscription is not subscription or known.intake.id_from is not id_from:
            # Services that have no such loop don't pay for it.
            from outbox.relay.intake.inline import InlineReceiver  # noqa: PLC0415 - importing outbox must not, too

            of = subscription.topic, OwnLoop(source), self.producer.send, id_from, app.settings.max_body_bytes
            known = self._receivers[key] = InlineReceiver(subscription, app.settings, Intake(*of), app.active)
        return known
