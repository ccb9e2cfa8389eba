"""Send, prepare, commit, rollback: from the session or connection that the caller passes to the COMMIT.

A send only remembers. All that a transaction has sent is written in one statement, in the round trip of its COMMIT
(`outbox.database.at_commit`).

Writing at the end has a second reason: the sequence of an op is drawn while the caller holds its row locks, so
that transactions which a lock serialised are dispatched in that order.

A driver's own connection doesn't tell of its COMMIT: there a send writes the half message at once, and the database
draws the sequence at the COMMIT, by a deferred trigger.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast
from uuid import UUID

from sqlalchemy import Connection, Engine

from outbox.database import at_commit
from outbox.database.at_commit import (
    Item,
    OpsAddress,
    Pending,
    SentWith,
    certain,
    dispatcher_here,
    hook_sessions,
    new_item,
    nudges_now,
    refuse_autocommit,
    sent_of,
    unscoped,
)
from outbox.database.decision import already, decide, decide_first, deciding_first
from outbox.database.dialect import PSYCOPG, check_driver, is_of_driver
from outbox.database.drivers import call_once_committed, raw_connection
from outbox.database.engines import address_of_connections, calling_engine
from outbox.database.execute import Statement, encodings, execute, raise_if_missing
from outbox.database.identity import OwnDatabase
from outbox.database.session import RunningTransaction, factories
from outbox.database.sql import nudge
from outbox.errors import InvalidMessage, TransactionRequired
from outbox.message import content
from outbox.message.compression import compress
from outbox.message.ids import FOLLOWING_VERSION
from outbox.message.model import Decision, HalfMessage, Outgoing, Preparation, Resolution, followed, headers_of, uuid7
from outbox.producer.dedupe import Once, chosen_id, following_id, once_of, refuse_once
from outbox.producer.flow_control import FlowControl
from outbox.producer.process import ProcessReport
from outbox.producer.sql import queues_of, write_halves, write_late, write_once
from outbox.telemetry import hooks
from outbox.telemetry.events import DuplicateIgnored, HalfDecided, HalfDeciding, HeadersRefused, MessagesSent
from outbox.telemetry.hooks import Middleware, Registry, Sending

if TYPE_CHECKING:
    import datetime as dt

    from sqlalchemy.ext.asyncio import (
        AsyncConnection,
        AsyncEngine,
        AsyncSession,
        async_scoped_session,
        async_sessionmaker,
    )
    from sqlalchemy.orm import Session, scoped_session, sessionmaker

    from outbox.database.drivers import Raw, RawAsyncConnection, RawConnection
    from outbox.database.execute import Row, Steps
    from outbox.database.session import Bind
    from outbox.message.content import Codecs
    from outbox.message.topic import Topic
    from outbox.settings import Settings

    Carrier = Session | AsyncSession | Connection | AsyncConnection | scoped_session[Any] | async_scoped_session[Any]
    AnyCarrier = Carrier | RawConnection | RawAsyncConnection


@dataclass(frozen=True, slots=True, eq=False)
class Sender:
    """What all messages of an Outbox have in common.

    ``flow`` may refuse one: None where no limit is set. ``limit``: bytes of all bodies that one transaction may send.
    ``report`` is what the process tells of itself; ``nudges``: dispatchers listen. ``address`` is where its ops are.
    """

    own: OwnDatabase
    schema: str
    limit: int
    middlewares: Registry[Middleware]
    report: ProcessReport
    flow: FlowControl | None
    nudges: bool
    address: OpsAddress

    def waking(self, *, nudges: bool) -> tuple[list[Statement], list[Callable[[], None]]]:
        """Return what follows a COMMIT that has ops: a nudge in a transaction of its own, or a call in this process.

        NOTIFY locks database-wide at commit: never in the transaction itself. ``nudges``: a statement can follow.
        """
        if (dispatcher := dispatcher_here(self.address)) is not None:
            return [], [dispatcher.wake]
        return ([nudge(self.schema)] if nudges and self.nudges and nudges_now(self.address) else []), []


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


#: The options that give a message its id.
_NAMING = frozenset({"id", "dedupe", "on_duplicate"})


def _count_bytes(write: Write, transaction: Pending | SentWith, earlier: Callable[[], Iterable[Item]]) -> None:
    """Add a body to what its transaction sends, or refuse it.

    ``earlier`` gives what the transaction still sends: what savepoints have undone is counted until it matters.

    Raises:
        InvalidMessage: the bodies are too much for one transaction.
    """
    size = len(write.half.body)
    total = transaction.bytes_sent + size
    if total > (limit := write.sender.limit):
        total = size + sum(len(item.value.half.body) for item in earlier() if isinstance(item.value, Write))
        if total > limit:
            raise InvalidMessage(
                f"the bodies that this transaction sends have {total} bytes; at most {limit} are allowed "
                "(setting max_transaction_bytes): send in several transactions"
            )
    transaction.bytes_sent = total


def _write(
    connection: Connection, values: Sequence[Write | Intent], *, then_commit: bool
) -> tuple[list[Statement], list[Statement], list[Callable[[], None]]]:
    """Make statements of all that a transaction has sent; decide what it decides. A `Writer` of the at-commit hook."""
    senders = {value.sender for value in values}
    for own in {sender.own for sender in senders}:
        if _is_foreign(connection, own.engine):
            own.check(connection)
    refuse_autocommit(connection)
    writes = [value for value in values if isinstance(value, Write)]
    intents = [value for value in values if isinstance(value, Intent)]
    if narrow := encodings(connection):
        for write in writes:
            write.refuse_unstorable(narrow)
    for sender in senders:
        if sender.flow is not None:
            sender.flow.admit(connection, [(w.half.topic, bool(w.preparation)) for w in writes if w.sender is sender])
    statements, duplicates = _statements(connection, writes)
    afterwards = then_commit and connection.dialect.driver == PSYCOPG
    nudges, waiting = _waiting(writes, intents, duplicates, afterwards=afterwards)
    if intents:
        # A decision must be known to be the first before COMMIT goes out, so it has its own round trip.
        if statements:
            execute(connection, *statements)
        for intent in intents:
            waiting += _tell_deciding(intent.sender, intent.half_id, intent.resolution)
            decide_first(connection, intent.sender.schema, intent.half_id, intent.resolution)
        statements = []
    if not then_commit:
        return statements, [], waiting
    return statements, [*nudges, *(report.statement() for report in _due_reports(writes))], waiting


def _statements(connection: Connection, writes: Sequence[Write]) -> tuple[list[Statement], dict[int, DuplicateIgnored]]:
    """Return what writes messages, but for what has to be known before; and the events of those that aren't written.

    These are named by the identities of their writes.
    """
    by_schema: dict[str, list[Write]] = {}
    for write in writes:
        by_schema.setdefault(write.sender.schema, []).append(write)
    statements: list[Statement] = []
    duplicates: dict[int, DuplicateIgnored] = {}
    for schema, of_schema in by_schema.items():
        if choosing := [write.half for write in of_schema if write.half.queue is not None]:
            (rows,) = execute(connection, queues_of(schema, list({half.topic for half in choosing})))
            for half in choosing:
                content.check_queue_of(half.topic, half.queue, dict(rows))
        if any(write.once for write in of_schema):
            statements += _firsts(connection, schema, of_schema, duplicates)
        else:
            statements.append(write_halves(schema, [(write.half, write.preparation) for write in of_schema]))
    return statements, duplicates


def _waiting(
    writes: list[Write], intents: list[Intent], duplicates: Mapping[int, DuplicateIgnored], *, afterwards: bool
) -> tuple[list[Statement], list[Callable[[], None]]]:
    """Return what wakes dispatchers behind the COMMIT, and the functions to call then.

    ``afterwards``: can statements follow it in its round trip?
    """
    heard = hooks.listeners.hooks or any(w.sending or w.once or w.sender.middlewares.hooks for w in writes)
    functions: list[Callable[[], None]] = [partial(_tell_sent, writes, duplicates)] if heard else []
    reports = {} if afterwards else _due_reports(writes)
    functions += [partial(report.write_apart, engine) for report, engine in reports.items()]
    senders = {write.sender for write in writes if write.preparation is None}
    senders |= {intent.sender for intent in intents if intent.resolution is Resolution.COMMIT}
    statements: list[Statement] = []
    for sender in senders:
        nudges, calls = sender.waking(nudges=afterwards)
        statements += nudges
        functions += calls
    return statements, functions


def _due_reports(writes: Iterable[Write]) -> dict[ProcessReport, Engine]:
    """Return the reports that are due, each with the engine of its Outbox."""
    return {w.sender.report: w.sender.own.engine for w in writes if w.sender.report.due_at <= time.monotonic()}


def _tell_sent(writes: Sequence[Write], duplicates: Mapping[int, DuplicateIgnored]) -> None:
    for write in writes:
        hooks.committed(write.sending)
    ids: dict[tuple[Registry[Middleware], str, bool], list[UUID]] = {}
    for write in writes:
        if (duplicate := duplicates.get(id(write))) is not None:
            with hooks.work_for(write.sender.middlewares):
                hooks.emit(duplicate)
            continue
        of_same = write.sender.middlewares, write.half.topic, write.preparation is not None
        ids.setdefault(of_same, []).append(write.half.id)
    for (middlewares, topic, prepared), of_topic in ids.items():
        with hooks.work_for(middlewares):
            if hooks.listeners.hooks or middlewares.hooks:
                hooks.emit(MessagesSent(topic=topic, message_ids=tuple(of_topic), prepared=prepared))


def _tell_deciding(sender: Sender, half_id: UUID, resolution: Resolution) -> list[Callable[[], None]]:
    """Tell hooks that a half is about to be decided; return what tells them after the COMMIT. Nothing without hooks."""
    if not (hooks.listeners.hooks or sender.middlewares.hooks):
        return []
    decision: dict[str, Any] = {"half_id": half_id, "resolution": resolution.value}
    began = time.monotonic()

    def tell_decided() -> None:
        with hooks.work_for(sender.middlewares):
            hooks.emit(HalfDecided(**decision, seconds=time.monotonic() - began))

    with hooks.work_for(sender.middlewares):
        hooks.emit(HalfDeciding(**decision))
    return [tell_decided]


def _firsts(
    connection: Connection, schema: str, writes: Sequence[Write], duplicates: dict[int, DuplicateIgnored]
) -> list[Statement]:
    """Return what writes messages, but those that the transaction has sent before, or that their topics have already.

    ``duplicates`` gets the events of these, by the identities of their writes, once that is answered. Where a second
    message may be an error, it is written here.

    Raises:
        DuplicateMessage: a second message whose sender wants that; the transaction is to be rolled back.
    """
    first_of: dict[UUID, Write] = {}
    for write in writes:
        first_of.setdefault(write.half.id, write)
    written = [write for write in writes if write.once is None or first_of[write.half.id] is write]
    once = {write.half.id for write in written if write.once is not None}

    def answered(rows: list[Row]) -> None:
        there = {half_id for (half_id,) in rows}
        for write in writes:
            if write.once is not None and (write.half.id in there or first_of[write.half.id] is not write):
                duplicates[id(write)] = write.once.second(write.half)

    statement = write_once(schema, [(write.half, write.preparation) for write in written], once)
    statement = replace(statement, answered=answered)
    if all(write.once is None or write.once.on_duplicate == "ignore" for write in writes):
        return [statement]
    execute(connection, statement)
    return []


def add(carrier: Carrier, value: Write | Intent, engine: Engine) -> None:
    """Remember a message or a decision until the transaction of ``carrier`` commits.

    ``engine`` is that of the Outbox: a session that uses several writes on its connection to this one.

    Raises:
        TransactionRequired: no transaction that could take it, or one on another database.
        InvalidMessage: ``carrier`` is neither a session nor a connection.
        InvalidSettings: its driver is none that messages can be sent through.
        OutboxBusy: the topic is known to be full.
    """
    unwrapped = unscoped(carrier)
    target = getattr(unwrapped, "sync_session", None) or getattr(unwrapped, "sync_connection", unwrapped)
    if isinstance(target, Connection):
        if _is_foreign(target, engine):
            value.sender.own.check_name(target.engine)
        if isinstance(value, Write):
            value.refuse_now(target.engine)
            value.refuse_unstorable(encodings(target))
            _count_bytes(value, at_commit.pending_of(target), lambda: at_commit.items_of(target))
        at_commit.add(target, new_item(value, _write))
        return
    if target is None and unwrapped is not None:
        raise TransactionRequired("the AsyncConnection isn't connected; use it inside 'async with engine.begin()'")
    from sqlalchemy.orm import Session  # noqa: PLC0415 - a caller that passes a session has paid for the import

    if not isinstance(target, Session):
        raise InvalidMessage(
            "a message is sent with a Session, AsyncSession, Connection or AsyncConnection of SQLAlchemy, or a "
            f"connection of psycopg, psycopg2 or asyncpg, not {target!r}"
        )
    _add_to_session(target, value, engine)


def _is_foreign(used: Connection | Engine, engine: Engine) -> bool:
    """Tell whether a connection isn't of the pool of an Outbox's own engine."""
    return used.engine.pool is not engine.pool


def _add_to_session(session: Session, value: Write | Intent, engine: Engine) -> None:
    if not session.in_transaction():
        if not session.autobegin:
            raise TransactionRequired("the session has autobegin=False and is in no transaction; call session.begin()")
        session.begin()
    elif not session.is_active:
        raise TransactionRequired(
            "the session's transaction takes no message now: it has failed, is prepared, or is committed already; "
            "send before, or roll it back first"
        )
    sent = sent_of(session)
    if (carries := certain(session, sent, engine)) is not None:
        if _is_foreign(carries, engine):
            value.sender.own.check_name(carries.engine)
        if isinstance(carries, Connection):
            refuse_autocommit(carries)
    if isinstance(value, Write) and value.sender.flow is not None:
        used = sent.target(engine) or session.bind
        # A session that uses another engine so far may come to use the Outbox's: then only the COMMIT will tell.
        if used is not None and not _is_foreign(used, engine):
            value.refuse_now(engine)
    if isinstance(value, Write):
        _count_bytes(value, sent, lambda: (entry.item for entry in sent.entries))
    at_commit.add_with(session, sent, new_item(value, _write), engine)


@contextmanager
def _own_error_first(errors: list[BaseException]) -> Iterator[None]:
    """Raise the error in the list, if there is one, in the place of any that came after it."""
    try:
        yield
    except Exception as later:
        if not errors or later is errors[0]:
            raise
        context = errors[0].__context__
        try:
            raise errors[0]
        finally:
            errors[0].__context__ = context


class Producer:
    """The producer's half of an `Outbox`: bound to a database, a producer group and settings."""

    #: Does a test keep the messages sent, so that there is no half to take the fence of?
    is_captured = False

    def __init__(
        self,
        bind: Bind,
        settings: Settings,
        group: str,
        immunity_of: Callable[[str], float],
        topics: Mapping[str, Topic[Any]],
        codecs: Codecs,
        middlewares: Registry[Middleware],
    ) -> None:
        #: Those of the Outbox.
        self.middlewares: Registry[Middleware] = middlewares
        self.codecs: Codecs = codecs
        self.schema: str = settings.schema
        #: The engine that the application uses.
        self.bind: Engine | AsyncEngine
        self.bind, engine, sessions, async_sessions = factories(bind)
        self._engine = engine
        self._settings = settings
        self._group = content.check_group(group)
        self._sessions = sessions
        self._async_sessions = async_sessions
        self._immunity_of = immunity_of
        self._topics = topics
        self._flow = FlowControl(settings, middlewares) if settings.max_undecided or settings.max_undispatched else None
        check_driver(engine.dialect)
        self._own = OwnDatabase(engine)
        self._report = ProcessReport(self.schema, self._group)
        of_settings = settings.max_transaction_bytes, middlewares, self._report, self._flow, settings.listen
        self._sender = Sender(self._own, self.schema, *of_settings, (address_of_connections(engine), self.schema))
        hook_sessions()
        # Now, since listening to an engine that is in use by other threads isn't safe.
        at_commit.hook(engine)

    @property
    def sessions(self) -> sessionmaker[Session] | async_sessionmaker[AsyncSession]:
        """What makes its sessions: the application's own factory, if the Outbox is bound to one."""
        sessions: sessionmaker[Session] | async_sessionmaker[AsyncSession] = self._sessions or self._async_sessions
        assert sessions is not None  # noqa: S101 - there is one of the two
        return sessions

    @contextmanager
    def transaction(self, *, is_async: bool) -> Iterator[Any]:
        """Open a session in a transaction, which commits when the block ends without an exception.

        ``is_async``: an AsyncSession; the block runs inside ``greenlet_spawn``. The block's own exception reaches the
        caller, also where the connection was lost under it and the ROLLBACK fails, which the server does by itself.

        Raises:
            TransactionRequired: the Outbox is bound to an engine of the other kind.
        """
        if is_async and self._async_sessions is None:
            raise TransactionRequired("this Outbox is bound to a sync Engine; decorate a plain 'def' function")
        if not is_async and self._sessions is None:
            raise TransactionRequired("this Outbox is bound to an AsyncEngine; decorate an 'async def' function")
        session: Any = self._async_sessions() if is_async else self._sessions()
        opened = getattr(session, "sync_session", session)
        errors: list[BaseException] = []
        with _own_error_first(errors), opened, opened.begin(), self.within(session, is_async=is_async):
            try:
                yield session
            except BaseException as error:
                errors.append(error)
                raise

    @contextmanager
    def within(self, session: Any, *, is_async: bool) -> Iterator[Any]:
        """Have decorated functions that are called in the block join the transaction of a session."""
        with RunningTransaction(self._engine, is_async, lambda: session).around():
            yield session

    def running_session(self, *, is_async: bool) -> Any:
        """Return the session of the transaction that the calling code runs in on this database; None without one."""
        running = RunningTransaction.of_caller()
        joinable = running is not None and running.engine is self._engine and running.is_async is is_async
        return running.open() if running is not None and joinable else None

    def send(self, carrier: AnyCarrier, topic: str, message: Outgoing) -> Any:
        """See `Outbox.send`."""
        half = self._half(topic, message, carrier)
        once = None if _NAMING.isdisjoint(message.options) else once_of(message.options)
        if half.id.version == FOLLOWING_VERSION and message.options.get("id") is None:
            once = Once(str(half.id), "ignore")  # what a replay sends again isn't to fail where it is there
        return self._add(carrier, self._new_write(half, None, once))

    def prepare(
        self,
        carrier: AnyCarrier,
        topic: str,
        message: Outgoing,
        *,
        immunity: dt.timedelta | float | None = None,
        fenced: bool = False,
    ) -> Any:
        """See `Outbox.prepare`."""
        if not _NAMING.isdisjoint(message.options):
            refuse_once(message.options)
        half = self._half(topic, message)
        own = self._immunity_of(half.topic) if immunity is None else content.check_seconds("immunity", immunity)
        return self._add(carrier, self._new_write(half, Preparation(fenced, float(own)), None))

    def take(
        self,
        connection: Connection,
        topic: str,
        message: Outgoing,
        own: Mapping[str, str],
        preparation: Preparation | None = None,
        again: Callable[[], object] | None = None,
    ) -> UUID:
        """Send, or prepare, what a client of another protocol sends by the id in the options; return the id.

        A second one of that id is no message and no error: a client that has lost the answer sends again. Then
        ``again`` is called, before the COMMIT. ``own`` are headers of the protocol, which the limits of a sender's
        headers don't count; they may say that the body is compressed.

        Raises:
            As `Outbox.send`, or `Outbox.prepare`.
        """
        half = self._half(topic, message)
        body = bytes(message.body) if content.ENCODING_HEADER in own else half.body
        half = replace(half, headers={**half.headers, **own}, body=body)
        add(connection, self._new_write(half, preparation, Once(str(half.id), "ignore", again)), self._engine)
        return half.id

    def _new_write(self, half: HalfMessage, preparation: Preparation | None, once: Once | None) -> Write:
        """Return the write of a half; headers that hooks or middlewares add and that can't be stored are left out."""
        added = hooks.sending(half, self.middlewares) if hooks.send_hooks.hooks or self.middlewares.hooks else ()
        for each in added:
            try:
                half = replace(half, headers=content.check_headers({**half.headers, **content.added(each.headers)}))
            except InvalidMessage as error:
                names = tuple(each.headers)
                with hooks.work_for(self.middlewares):
                    hooks.emit(HeadersRefused(message_id=half.id, topic=half.topic, names=names, reason=str(error)))
        return Write(self._sender, half, preparation, added, once)

    def _add(self, carrier: AnyCarrier, write: Write) -> Any:
        """Write with the transaction of ``carrier``; return the id, or what to await for it."""
        if (raw := self._raw(carrier)) is not None:
            write.refuse_now(self._engine)
            return raw.run(self._writing(raw, write), self._tell_of_missing)
        add(cast("Carrier", carrier), write, self._engine)
        return write.half.id

    def _raw(self, carrier: AnyCarrier | None) -> Raw | None:
        """Return a driver's own connection that takes messages now; None if ``carrier`` is none.

        Raises:
            TransactionRequired: it is in no transaction, or on another database.
        """
        raw = raw_connection(carrier) if is_of_driver(cast("type", type(carrier))) else None
        if raw is not None:
            raw.refuse_autocommit()
        return raw

    def _writing(self, raw: Raw, write: Write) -> Steps[UUID]:
        yield from self._own.checking(raw.connection)
        write.refuse_unstorable(raw.encodings)
        if write.half.queue is not None:
            rows = yield queues_of(self.schema, [write.half.topic])
            content.check_queue_of(write.half.topic, write.half.queue, dict(rows))
        if write.once is not None:
            if not (yield write_late(self.schema, write.half, once=True)):
                duplicate = write.once.second(write.half)
                with hooks.work_for(self.middlewares):
                    hooks.emit(duplicate)
        elif write.preparation is None:
            yield write_late(self.schema, write.half)
        else:
            yield write_halves(self.schema, [(write.half, write.preparation)])
        # The driver doesn't tell of the COMMIT, so what waits for it ends here; that it was sent can't be told.
        hooks.committed(write.sending)
        if self._report.due_at <= time.monotonic():
            call_once_committed(partial(self._report.write_apart, self._engine))
        return write.half.id

    def _deciding(self, raw: Raw, half_id: UUID, resolution: Resolution) -> Steps[None]:
        yield from self._own.checking(raw.connection)
        _tell_deciding(self._sender, half_id, resolution)
        yield from deciding_first(self.schema, half_id, resolution)

    def _tell_of_missing(self, error: Exception, statement: Statement) -> None:
        raise_if_missing(self._engine.url, error, [statement])

    def decide(self, half_id: UUID, resolution: Resolution, within: AnyCarrier | None) -> Any:
        """Decide alone, or at the commit of the caller's transaction; see `Outbox.commit`."""
        if (raw := self._raw(within)) is not None:
            return raw.run(self._deciding(raw, half_id, resolution), self._tell_of_missing)
        if within is not None:
            add(cast("Carrier", within), Intent(self._sender, half_id, resolution), self._engine)
            return None
        with self.calling() as session:
            return self.decide_now(session, half_id, resolution)

    @contextmanager
    def calling(self) -> Iterator[Session]:
        """Open a session in a transaction for code that is plain, or inside ``run_sync`` on an AsyncEngine.

        Raises:
            TransactionRequired: it is an AsyncEngine, and the code isn't inside ``run_sync``.
        """
        if is_async := self._sessions is None:
            calling_engine(self.bind)
        with self.transaction(is_async=is_async) as session:
            yield getattr(session, "sync_session", session)

    def decide_now(self, session: Session, half_id: UUID, resolution: Resolution) -> Decision:
        """Decide a half at once, in the session's transaction.

        Raises:
            AlreadyCommitted, AlreadyRolledBack: it was decided otherwise before.
            HalfNotFound: no half message has this id.
        """
        waiting, connection = _tell_deciding(self._sender, half_id, resolution), session.connection()
        decision = decide(connection, self.schema, half_id, resolution)
        if decision.resolution is not resolution:
            raise already(decision)
        if decision.first:
            if resolution is Resolution.COMMIT:
                self.wake_dispatchers(connection)
            for function in waiting:
                at_commit.after_commit(connection, function)
        return decision

    def wake_dispatchers(self, connection: Connection) -> None:
        """Have dispatchers woken after the COMMIT of the running transaction, which has committed halves."""
        nudges, calls = self._sender.waking(nudges=connection.dialect.driver == PSYCOPG)
        for nudging in nudges:
            at_commit.behind_commit(connection, nudging)
        for function in calls:
            at_commit.after_commit(connection, function)

    def _half(self, topic: str, message: Outgoing, carrier: AnyCarrier | None = None) -> HalfMessage:
        options = message.options
        times = options.get("deliver_at"), options.get("delay"), options.get("delay_level")
        delivery = content.check_delivery(*times, self._settings.delay_levels)
        expires_at = content.check_expiry(options.get("expires_at"), delivery[0])
        topic, queue = content.check_topic(topic), content.check_queue(options.get("queue"))
        half_id = None if _NAMING.isdisjoint(options) else chosen_id(topic, options)
        key, headers = options.get("key"), options.get("headers")
        # A refusal has no body of the topic's model.
        declared = None if isinstance(message.body, content.StoredBytes) else self._topics.get(topic)
        if declared is None or options.get("refusal") is not None:
            raw, content_type = self.codecs.encode(message.body, options.get("content_type"))
        else:
            body = declared.validated(message.body)
            raw, content_type = declared.encode(body, self.codecs, options.get("content_type"))
            key = declared.key(body) if key is None and declared.key else key
            headers = {**(headers or {}), **declared.headers()}
        content.check_size(raw, self._settings.max_body_bytes)
        key = content.check_text("key", key, content.MAX_KEY_BYTES)
        tag = content.check_text("tag", options.get("tag"), content.MAX_TAG_BYTES)
        headers = headers_of(content.check_headers(headers), options, expires_at)
        if half_id is None and carrier is not None and (follows := followed(options)) is not None:
            half_id = following_id(carrier, topic, follows, options, (key, raw))
        if 0 < self._settings.compress_above < len(raw):
            raw, encoding = compress(raw)
            headers = {**headers, content.ENCODING_HEADER: encoding} if encoding else headers
        return HalfMessage(
            half_id or uuid7(), self._group, topic, key, tag, headers, content_type, raw, *delivery, queue
        )
