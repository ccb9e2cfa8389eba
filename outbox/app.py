"""The `Outbox`: one database, one producer group, its consumers; everything else hangs on it."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, Unpack, overload
from uuid import UUID

from outbox.check.checker import Checker
from outbox.compensate.compensation import Compensation, as_databases
from outbox.consumer.subscription import Handler, Subscription, as_filter
from outbox.database.engines import run_from_async
from outbox.database.execute import execute
from outbox.delivery.known_group import CallbackKind, DeliveryCallback, DeliveryDeclarations, KnownGroup
from outbox.dispatch.sql import declare_topic, topic_queues
from outbox.errors import InvalidHandler, InvalidSettings, NotBound
from outbox.message.content import Codec, Codecs, check_group, check_seconds, check_topic
from outbox.message.model import Decision, Outgoing, Resolution, SendOptions
from outbox.message.topic import Topic
from outbox.producer import decorators
from outbox.producer.producer import Producer
from outbox.reconcile.job import Reconciliation
from outbox.settings import Settings

if TYPE_CHECKING:
    from pathlib import Path

    from sqlalchemy import URL, Engine
    from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
    from sqlalchemy.orm import Session

    from outbox.database.drivers import RawAsyncConnection, RawConnection
    from outbox.database.session import Bind
    from outbox.message.content import Decoder, Encoder
    from outbox.message.declared import (
        BatchHandlerDecorator,
        CheckerDecorator,
        CheckerOptions,
        CompensationDecorator,
        CompensationOptions,
        ConsumerOptions,
        HandlerDecorator,
        PrepareOptions,
        TopicOptions,
        TransactionalDecorator,
        TwoPhaseDecorator,
    )
    from outbox.operator.operator import OutboxOperator
    from outbox.producer.producer import AnyCarrier, Carrier
    from outbox.worker.worker import Worker

F = TypeVar("F", bound=Callable[..., Any])
H = TypeVar("H", bound=Handler)
P = ParamSpec("P")
T = TypeVar("T")

#: The Outboxes of `Outbox.active` blocks around the running code, the innermost last.
_active: ContextVar[tuple[Outbox, ...]] = ContextVar("outbox_active", default=())


class Outbox(DeliveryDeclarations):
    """Send, prepare, decide and consume messages next to the business data of one database.

    ``bind`` is the database: an engine, or the session factory that the application uses anyway. Without it, the Outbox
    takes declarations (decorators, consumers, checkers) from the start, and is used after `bind`. ``group`` is the
    producer group written into its half messages. ``settings`` default to `Settings.from_env`.

    Raises:
        InvalidSettings: settings that contradict each other, or an engine that isn't PostgreSQL by psycopg 3, psycopg2
            or asyncpg.
        InvalidMessage: the group's name isn't one.
    """

    def __init__(self, bind: Bind | None = None, *, group: str = "default", settings: Settings | None = None) -> None:
        self.settings: Settings = settings or Settings.from_env()
        self.group: str = check_group(group)
        self.subscriptions: dict[tuple[str, str], Subscription] = {}
        self.checkers: dict[str, Checker] = {}
        self.compensations: dict[str, Compensation] = {}
        self.reconciliations: dict[str, Reconciliation] = {}
        self.topics: dict[str, Topic[Any]] = {}
        self.known_groups: dict[tuple[str, str], KnownGroup] = {}
        self.delivery_callbacks: dict[tuple[str, CallbackKind], DeliveryCallback] = {}
        self.codecs: Codecs = Codecs(self.settings.max_body_bytes)
        self._binding: _Binding | None = None
        if bind is not None:
            self.bind(bind)

    def __repr__(self) -> str:
        where = "not bound" if self._binding is None else repr(self.url)
        return f"Outbox({where}, group={self.group!r}, subscriptions={sorted(self.subscriptions)})"

    # --- the database --------------------------------------------------------------------------------------

    def bind(self, bind: Bind) -> None:
        """Give the Outbox its database, where it was made without one: an engine, or a session factory on one.

        To be called once, such as in the function that makes the application. The same engine or factory again changes
        nothing.

        Raises:
            InvalidSettings: it has another one already, or the engine isn't one that `Outbox` takes.
            TransactionRequired: it isn't an engine or a session factory on one.
        """
        if self._binding is None:
            self._binding = _Binding(self, bind)
        elif self._binding.bind is not bind:
            raise InvalidSettings(
                f"{self!r} is bound already, and can't be bound to {bind!r} too: for a second database, make another "
                "Outbox of it by bound_to(); where the application is made anew, as in tests, call unbind() first"
            )

    def unbind(self) -> None:
        """Take the database away again, for tests that make the application anew; what was declared stays."""
        self._binding = None

    def bound_to(self, bind: Bind, *, schema: str | None = None) -> Outbox:
        """Return an Outbox with the same functions and handlers, on the database (or in the schema) of one tenant.

        What is declared on either of them, now or later, counts for both. A `Worker` takes several. Functions that were
        decorated with this Outbox work for the tenant while its Outbox is `active`, if this one has no database itself.

        Raises:
            As `bind`; InvalidSettings also: the name of the schema isn't one.
        """
        settings = self.settings if schema is None else replace(self.settings, schema=schema)
        tenant = Outbox(group=self.group, settings=settings)
        tenant.subscriptions, tenant.checkers = self.subscriptions, self.checkers
        tenant.compensations, tenant.reconciliations = self.compensations, self.reconciliations
        tenant.topics, tenant.known_groups, tenant.codecs = self.topics, self.known_groups, self.codecs
        tenant.delivery_callbacks = self.delivery_callbacks
        tenant.bind(bind)
        return tenant

    @contextmanager
    def active(self) -> Iterator[Outbox]:
        """Have the Outbox that this one was made of (by `bound_to`) work on this database within a with block.

        For the block's thread or task, and for the tasks that are begun in it. Workers do so around each handler.
        """
        token = _active.set((*_active.get(), self))
        try:
            yield self
        finally:
            _active.reset(token)

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

    @overload
    def topic(self, topic: Topic[T]) -> Topic[T]: ...
    @overload
    def topic(self, topic: str, *, model: type[T], **options: Unpack[TopicOptions[T]]) -> Topic[T]: ...
    def topic(self, topic: Any, *, model: Any = None, **options: Any) -> Topic[Any]:
        """Declare what the bodies of a topic are, for all that is sent and read of it here; return the `Topic`.

        From here on a body is checked against ``model`` where it is sent, and read as it by consumers, checkers and
        compensations that name no model of their own. Where several services share a declaration, make a `Topic` in a
        module that they all import, and name it here. No database is asked. The options, ``version``,
        ``key`` and ``content_type``, are those of `Topic`.

        Raises:
            InvalidHandler: the topic is declared already, or has a consumer, checker or compensation that was declared
                before it and would read plain JSON; or as `Topic`.
            InvalidMessage: the name or the content type isn't one.
        """
        declared = topic if isinstance(topic, Topic) else Topic(topic, model, **options)
        self._declare(declared)
        return declared

    def codec(
        self, content_type: str, *, encode: Encoder, decode: Decoder, show: Callable[[Any], Any] | None = None
    ) -> None:
        """Register how bodies of a content type become bytes and back, such as ``application/msgpack``.

        A body is encoded so where its sender (option ``content_type``) or its `Topic` says so, and decoded wherever it
        is read here. Console and commands show it as JSON: of what ``decode`` returns, or of what ``show`` makes of
        that. Bodies of a content type without a codec are bytes.

        Raises:
            InvalidHandler: there is a codec of this content type already, or it needs none; or a function isn't one.
            InvalidMessage: it isn't a content type.
        """
        self.codecs.register(Codec(content_type, encode, decode, show))

    def _declare(self, topic: Topic[Any]) -> None:
        if (earlier := self.topics.get(topic.name)) is topic:
            return
        if earlier is not None:
            raise InvalidHandler(f"topic {topic.name!r} is declared already, as {earlier!r}")
        models = [each.model for (name, _), each in self.subscriptions.items() if name == topic.name]
        models += [each[topic.name].model for each in (self.checkers, self.compensations) if topic.name in each]
        if None in models:
            raise InvalidHandler(
                f"topic {topic.name!r} has a consumer, checker or compensation already, which would read plain JSON: "
                "declare the topic before them"
            )
        self.topics[topic.name] = topic

    def _name_of(self, topic: str | Topic[Any]) -> str:
        """Return the name of a topic; one that is declared elsewhere counts here as well from now on."""
        if isinstance(topic, Topic):
            self._declare(topic)
            return topic.name
        return topic

    def _as_read(self, topic: str | Topic[Any], model: Any) -> tuple[str, Any]:
        """Return a topic's name and what its bodies are read as: the reader's model, or the topic with all versions."""
        name = self._name_of(topic)
        return name, self.topics.get(name) if model is None else model

    def declare_topic(self, name: str, queues: int) -> None:
        """Create a topic with so many queues, or give it more (never fewer: messages may wait in them).

        More queues move keys to other queues: what a key sent before and after is not ordered across the change.

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
            _, ((now,),) = execute(connection, declare_topic(schema, name, queues), topic_queues(schema, name))
            if now > queues:
                raise InvalidHandler(f"topic {name!r} has {now} queues already and can't shrink to {queues}")

    def worker(self, *, roles: Collection[str] | None = None) -> Worker:
        """Return a `Worker` of this Outbox, not started: ``async with outbox.worker():`` runs it on this event loop."""
        from outbox.worker.worker import Worker  # noqa: PLC0415 - importing outbox must not pay for it

        return Worker(self, roles=roles)

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
        ``id``, ``content_type``, ``queue``.

        Raises:
            InvalidMessage: topic, key, tag, headers, body, or delivery can't be stored.
            OutboxBusy: (at commit at the latest) the topic has reached ``max_undispatched`` of the settings.
            TransactionRequired: ``carrier`` is in AUTOCOMMIT mode, on another database, or takes no more messages.
            SchemaMissing: (at commit) the database has no outbox tables.
            TypeError: an option that a message doesn't have.
        """
        return self._producer.send(carrier, self._name_of(topic), Outgoing(body, **options))

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
        before). ``within`` a session or connection, it decides at that transaction's commit, which fails if anybody
        decided earlier, so that the business change beside it can't be made twice; returns None. ``within`` a driver's
        own connection it decides at once, or when it is awaited: the caller rolls back if that fails, and decides last,
        so that others don't wait for the transaction.

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
        (``create.within(session, "a")``), or that its caller runs in: a decorated function, a handler, a checker. Who
        began it commits it. Otherwise it gets a new session and commits that; with ``joins=False`` always.

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

    @overload
    def checker(
        self, topic: Topic[T], *, model: None = None, **options: Unpack[CheckerOptions]
    ) -> CheckerDecorator[T]: ...
    @overload
    def checker(self, topic: str, *, model: type[T], **options: Unpack[CheckerOptions]) -> CheckerDecorator[T]: ...
    @overload
    def checker(self, topic: str, *, model: Any = None, **options: Unpack[CheckerOptions]) -> CheckerDecorator[Any]: ...
    def checker(
        self,
        topic: str | Topic[Any],
        *,
        model: Any = None,
        immunity: dt.timedelta | float | None = None,
        interval: dt.timedelta | float | None = None,
        max_checks: int | None = None,
        timeout: dt.timedelta | float | None = None,
    ) -> Any:
        """Register who is asked whether the local transaction of an undecided half of ``topic`` committed.

        ``checker(orphan)`` or ``checker(orphan, session)``, sync or async, answers a `Resolution`. An exception, a
        time-out, None or anything else means UNKNOWN: it is asked again after ``interval``, and the half is parked
        after ``max_checks`` questions. What it writes with the session commits together with the verdict, or not at
        all. Without a session no transaction is open while it runs: the form for one that asks another service.

        Durations are timedeltas or seconds and default to the settings; ``immunity`` is for halves of the topic that
        name none of their own. Fenced halves need no checker.

        Raises:
            InvalidHandler: the topic has a checker already, the function can't be called so, or a rule can't work.
            InvalidMessage: the topic isn't a name, or a duration isn't one.
        """
        topic, model = self._as_read(topic, model)
        rules = {"immunity": immunity, "interval": interval, "max_checks": max_checks, "timeout": timeout}

        def register(function: F) -> F:
            if (earlier := self.checkers.get(topic)) is not None:
                raise InvalidHandler(
                    f"topic {topic!r} has a checker already: {earlier.name}; one answers for all its halves"
                )
            self.checkers[topic] = Checker.declare(self.settings, topic, function, model, self.codecs, rules)
            return function

        return register

    @overload
    def compensation(
        self, topic: Topic[T], *, model: None = None, **options: Unpack[CompensationOptions]
    ) -> CompensationDecorator[T]: ...
    @overload
    def compensation(
        self, topic: str, *, model: type[T], **options: Unpack[CompensationOptions]
    ) -> CompensationDecorator[T]: ...
    @overload
    def compensation(
        self, topic: str, *, model: Any = None, **options: Unpack[CompensationOptions]
    ) -> CompensationDecorator[Any]: ...
    def compensation(
        self,
        topic: str | Topic[Any],
        *,
        model: Any = None,
        consumers: Collection[Engine | AsyncEngine | str] = (),
        when: Literal["ordered", "parked"] = "ordered",
        after: dt.timedelta | float = 0.0,
    ) -> Any:
        """Register how the local transaction behind a message of ``topic`` is undone when that is ordered.

        ``compensation(message, session)``, sync or async, is called by a worker in a transaction on this database,
        which also records it: once per message ever. What it raises undoes all of that, and it is tried again. Before,
        the message is quarantined in this database and in those of ``consumers``, which must be all that have groups of
        the topic: it takes no effect any more. Where it did already, that is refused, unless it was ordered knowingly.

        An operator orders it; with ``when="parked"`` also a worker, for what a group that is known (`known_group`, or
        one that consumes the topic by this Outbox in its own database) has parked ``after`` (timedelta or seconds) ago.

        Raises:
            InvalidHandler: the topic has a compensation already, or the function can't be called so.
            InvalidMessage: the topic isn't a name.
        """
        topic, model = self._as_read(topic, model)

        def register(function: F) -> F:
            if (earlier := self.compensations.get(topic)) is not None:
                raise InvalidHandler(f"topic {topic!r} has a compensation already: {earlier.name}; one undoes them all")
            databases, seconds = as_databases(topic, consumers), check_seconds("after", after)
            self.compensations[topic] = Compensation(topic, function, model, databases, when, seconds, self.codecs)
            return function

        return register

    def _immunity_of(self, topic: str) -> float:
        checker = self.checkers.get(topic)
        return self.settings.immunity if checker is None else checker.immunity

    # --- consumer ----------------------------------------------------------------------------------------

    @overload
    def consumer(
        self, topic: Topic[T], *, group: str, takes_batch: Literal[True], **options: Unpack[ConsumerOptions]
    ) -> BatchHandlerDecorator[T]: ...
    @overload
    def consumer(
        self, topic: Topic[T], *, group: str, takes_batch: Literal[False] = False, **options: Unpack[ConsumerOptions]
    ) -> HandlerDecorator[T]: ...
    @overload
    def consumer(
        self, topic: str, *, group: str, model: type[T], takes_batch: Literal[True], **options: Unpack[ConsumerOptions]
    ) -> BatchHandlerDecorator[T]: ...
    @overload
    def consumer(
        self,
        topic: str,
        *,
        group: str,
        model: type[T],
        takes_batch: Literal[False] = False,
        **options: Unpack[ConsumerOptions],
    ) -> HandlerDecorator[T]: ...
    @overload
    def consumer(
        self,
        topic: str,
        *,
        group: str,
        model: Any = None,
        takes_batch: Literal[True],
        **options: Unpack[ConsumerOptions],
    ) -> BatchHandlerDecorator[Any]: ...
    @overload
    def consumer(
        self,
        topic: str,
        *,
        group: str,
        model: Any = None,
        takes_batch: Literal[False] = False,
        **options: Unpack[ConsumerOptions],
    ) -> HandlerDecorator[Any]: ...
    def consumer(
        self,
        topic: str | Topic[Any],
        *,
        group: str,
        source: Engine | AsyncEngine | str | None = None,
        model: Any = None,
        batch: int = 1,
        takes_batch: bool = False,
        ordered: bool = False,
        on_exhausted: Literal["park", "block"] = "park",
        on_pruned: Literal["stop", "skip"] = "stop",
        tags: Collection[str] | None = None,
        keys: Collection[str] | None = None,
        start: Literal["first", "now"] = "first",
        threads: int = 1,
        retry_delays: Sequence[float] | None = None,
    ) -> Any:
        """Register a handler, ``handler(message, session)``, sync or async, as a group of a topic.

        The session is in the transaction that also writes the inbox row and the offset, so the effect on this
        database is exactly once. Returning is success; raising is a failure, and so is returning `Retry`, `Park` or
        `Skip`, which undo what the handler did. The options are those of `Subscription`.

        Raises:
            InvalidHandler: the group has a handler for this topic already, or an option that can't work.
            InvalidMessage: the topic or the group isn't a name.
        """
        topic, model = self._as_read(topic, model)

        def register(handler: H) -> H:
            if (earlier := self.subscriptions.get((topic, group))) is not None:
                raise InvalidHandler(
                    f"group {group!r} already handles topic {topic!r} by {earlier.name}; "
                    "a second handler needs a group of its own"
                )
            self.subscriptions[topic, group] = Subscription(
                topic=topic,
                group=group,
                handler=handler,
                retry_delays=self.settings.retry_delays if retry_delays is None else tuple(retry_delays),
                batch=batch,
                takes_batch=takes_batch,
                ordered=ordered,
                on_exhausted=on_exhausted,
                on_pruned=on_pruned,
                tags=as_filter(tags),
                keys=as_filter(keys),
                start=start,
                threads=threads,
                source=source,
                model=model,
                codecs=self.codecs,
            )
            return handler

        return register

    def reconciliation(
        self,
        name: str = "nightly",
        *,
        at: str | None = None,
        cron: str | None = None,
        every: dt.timedelta | float | None = None,
        timezone: str = "UTC",
        job: Mapping[str, Any] | None = None,
        config: Path | str | None = None,
        report: Callable[[Any], object] | None = None,
    ) -> None:
        """Have a worker reconcile what this Outbox consumes, with the databases that it comes from, by a timetable.

        When: ``at="03:00"`` each day, by the five fields of ``cron``, or ``every`` timedelta or seconds; one of many
        workers runs it, by the database's clock. One that was missed is made up for at the next start; the first one
        is due at once. How: ``job``, a mapping such as a TOML file has, or that file (``config``, which ``job``
        overrides); by default all consumers, without repairs. ``report`` gets each `outbox.reconcile.rows.JobResult`.
        What was found is in ``outbox reconcile runs``.

        Raises:
            InvalidHandler: there is one of this name.
            InvalidSettings: a timetable that can't be. What is wrong with the job is told when the worker starts.
        """
        if name in self.reconciliations:
            raise InvalidHandler(f"there is a reconciliation {name!r} already; a second one needs a name of its own")
        self.reconciliations[name] = Reconciliation(name, at, cron, every, timezone, job, config, report)


class _Binding:
    """What an Outbox has once it is bound."""

    def __init__(self, outbox: Outbox, bind: Bind) -> None:
        self.bind = bind
        self.producer = Producer(bind, outbox.settings, outbox.group, outbox._immunity_of, outbox.topics, outbox.codecs)
        self.engine = self.producer.bind
        self._settings = outbox.settings
        self._checkers = outbox.checkers
        self._codecs = outbox.codecs

    @cached_property
    def operator(self) -> OutboxOperator:
        # Services, which only send and consume, don't pay for it at their start.
        from outbox.operator.operator import OutboxOperator  # noqa: PLC0415 - importing outbox must not pay for it

        return OutboxOperator(self.engine, self._settings, self._checkers, self._codecs)
