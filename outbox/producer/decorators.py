"""Decorators on service functions: send what the function returns, or prepare, run and decide.

They keep the function's types, docstring and return value. The function takes its session in its first parameter,
which its callers don't see then, or in any parameter whose default is `INJECTED`. A caller that passes a session, by
``within`` or in that parameter, keeps its transaction. A caller may ask what came of each call (`outcomes`).
"""

from __future__ import annotations

import datetime as dt
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast
from uuid import UUID

from sqlalchemy.exc import ProgrammingError

from outbox.database.at_commit import at_commit
from outbox.database.decision import already, fence_key, op
from outbox.database.execute import execute
from outbox.database.session import holding, wait_for
from outbox.database.sql import take_lock
from outbox.errors import AlreadyCommitted, AlreadyDecided, InvalidHandler, SchemaMissing
from outbox.message.answer import finished
from outbox.message.model import Decision, Outgoing, Resolution, SendOptions
from outbox.producer.sql import store_error
from outbox.telemetry.events import HalfErrorLost, RollbackFailed
from outbox.telemetry.hooks import emit, work_for
from outbox.text import error_text, function_name, kind_of_error, message_of

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from outbox.database.execute import Statement
    from outbox.message.declared import TransactionalDecorator, TwoPhaseDecorator
    from outbox.producer.producer import Producer

F = TypeVar("F", bound=Callable[..., Any])
KeyOf = Callable[[Any], str | None]
#: Returns the producer that a call works for: its Outbox may be bound later, or serve several tenants.
ProducerOf = Callable[[], "Producer"]


@dataclass(slots=True, eq=False)
class CallOutcome:
    """What came of one call of a function that ``@outbox.two_phase`` or ``@outbox.transactional`` decorates.

    ``function`` is its name with its module. ``message_id``: of ``@two_phase`` that of its half message, None until
    this is committed; of ``@transactional`` that of the message sent, None if it sent none.

    ``resolution``: of ``@two_phase`` UNKNOWN while the half is undecided, and to be left to the check if the call has
    ended so; COMMIT or ROLLBACK as soon as this call knows the decision, whether its own or a checker's or an
    operator's. Of ``@transactional`` COMMIT when the function's own transaction has committed; None in the transaction
    of a caller, which decides.
    """

    function: str
    topic: str
    message_id: UUID | None = None
    resolution: Resolution | None = None


#: The lists of the `outcomes` blocks around the running code.
_lists: ContextVar[tuple[list[CallOutcome], ...]] = ContextVar("outbox_outcomes", default=())


@contextmanager
def outcomes() -> Iterator[list[CallOutcome]]:
    """Yield a list that gets an `CallOutcome` for each call of a decorated function within a with block.

    In the order in which the calls began, so that of a function that calls others comes before theirs; also of calls
    that raise, for the list can be read after the block. It is for the block's thread or task, and for the tasks that
    are begun in it.
    """
    outcomes: list[CallOutcome] = []
    token = _lists.set((*_lists.get(), outcomes))
    try:
        yield outcomes
    finally:
        _lists.reset(token)


def _new_outcome(function: str, topic: str) -> CallOutcome:
    """Return the outcome of a call that begins, and tell it to the blocks around the call."""
    outcome = CallOutcome(function, topic)
    for each in _lists.get():
        each.append(outcome)
    return outcome


class _Injected:
    """The default of a session parameter that the decorator fills."""

    def __repr__(self) -> str:
        return "INJECTED"


INJECTED: Any = _Injected()


class _SessionParameter:
    """Where a function takes its session, and whether a caller gave one.

    ``leads``: in its first parameter, without a default. Callers leave that one out.
    """

    def __init__(self, function: Callable[..., Any], decorator: str) -> None:
        # A decorated function is taken as it was: its session is passed on.
        self.signature = inspect.signature(getattr(function, _UNDECORATED, function))
        parameters = list(self.signature.parameters.values())
        injected = [p.name for p in parameters if p.default is INJECTED]
        named = ["session"] if "session" in self.signature.parameters else []
        first = [p.name for p in parameters[:1] if _is_session_type(p.annotation)]
        names = injected or named or first
        if len(names) != 1:
            raise InvalidHandler(
                f"@{decorator}: {function.__qualname__} must take its session in one parameter, "
                "the first one ('session: Session') or one such as 'session: Session = INJECTED'"
            )
        self.name = names[0]
        self.leads = parameters[0].name == self.name and parameters[0].default is parameters[0].empty

    def passed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the session that the caller passed, or None."""
        if self.leads and not _has_session(args):
            return kwargs.get(self.name)
        session = self.signature.bind_partial(*args, **kwargs).arguments.get(self.name)
        return None if session is INJECTED else session

    def fill(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], session: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with the session in its place, wherever the function has it."""
        if self.leads:
            rest = args[1:] if _has_session(args) else args
            return (session, *rest), {name: value for name, value in kwargs.items() if name != self.name}
        bound = self.signature.bind_partial(*args, **kwargs)
        bound.arguments[self.name] = session
        return bound.args, bound.kwargs


#: The attribute in which a decorated function keeps the one that has a session.
_UNDECORATED = "_outbox_undecorated"


def _is_session_type(annotation: Any) -> bool:
    """Is it Session or AsyncSession, as a class or as a text?"""
    name = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    return name.rpartition(".")[2] in {"Session", "AsyncSession"}


def _has_session(args: tuple[Any, ...]) -> bool:
    """Is the first of these arguments a session, rather than the function's own first argument?"""
    from sqlalchemy.orm import Session, scoped_session  # noqa: PLC0415 - its callers need a session

    return bool(args) and (isinstance(args[0], Session | scoped_session) or hasattr(args[0], "sync_session"))


def _shaped(decorated: Any, function: Callable[..., Any], parameter: _SessionParameter) -> Any:
    """Give a decorated function its form ``within``, and the signature that its callers see."""

    @functools.wraps(function)
    def within(session: Any, /, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = parameter.fill(args, kwargs, session)
        return decorated(*args, **kwargs)

    decorated.within = within
    if parameter.leads:
        parameters = [each for name, each in parameter.signature.parameters.items() if name != parameter.name]
        decorated.__signature__ = parameter.signature.replace(parameters=parameters)
        setattr(decorated, _UNDECORATED, getattr(function, _UNDECORATED, function))
    return decorated


def _decorated(function: F, run: Callable[..., Any]) -> F:
    """Return ``run(call, *args, **kwargs)`` in the shape of the function; ``call`` calls the function itself.

    ``run`` is plain code. For an async function it runs inside a greenlet, as all of SQLAlchemy's own asyncio does:
    there ``call`` waits for the coroutine, which runs in the caller's task.
    """
    is_async = inspect.iscoroutinefunction(function)

    def call(*args: Any, **kwargs: Any) -> Any:
        result = wait_for(function(*args, **kwargs)) if is_async else function(*args, **kwargs)
        return finished(function.__qualname__, result)  # it would run when its transaction is over

    if not is_async:

        @functools.wraps(function)
        def plain(*args: Any, **kwargs: Any) -> Any:
            return run(call, *args, **kwargs)

        return cast("F", plain)

    @functools.wraps(function)
    async def coroutine(*args: Any, **kwargs: Any) -> Any:
        from sqlalchemy.util import greenlet_spawn  # noqa: PLC0415 - needs what only async callers have installed

        return await greenlet_spawn(functools.partial(run, call, *args, **kwargs))

    return cast("F", coroutine)


def send_result(
    send: Callable[[Outgoing], object],
    result: Any,
    *,
    key: KeyOf | None,
    tag: str | None,
    message: Callable[[Any], Any] | None,
) -> Any:
    """Send what a decorated function returned, unless that is None; return what its caller gets."""
    content = message(result) if message else result
    if content is not None:
        outgoing = content if isinstance(content, Outgoing) else Outgoing(content)
        options = SendOptions(**outgoing.options)
        if options.get("key") is None and key:
            options["key"] = key(outgoing.body)
        if options.get("tag") is None:
            options["tag"] = tag
        send(Outgoing(outgoing.body, **options))
    return result.body if isinstance(result, Outgoing) else result


def transactional(
    producer_of: ProducerOf,
    *,
    topic: str,
    key: KeyOf | None,
    tag: str | None,
    message: Callable[[Any], Any] | None,
    joins: bool,
) -> TransactionalDecorator:
    """Make ``@outbox.transactional``; see `Outbox.transactional`."""

    def decorate(function: Callable[..., Any]) -> Any:
        parameter = _SessionParameter(function, "transactional")
        is_async = inspect.iscoroutinefunction(function)
        name = function_name(function)

        def run(call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
            producer = producer_of()
            outcome = _new_outcome(name, topic)
            session = parameter.passed(args, kwargs)
            if session is None and joins:
                session = producer.running_session(is_async=is_async)
            joined = None if session is None else producer.within(session, is_async=is_async)

            def send(outgoing: Outgoing) -> None:
                outcome.message_id = producer.send(session, topic, outgoing)

            with joined or producer.transaction(is_async=is_async) as session:
                args, kwargs = parameter.fill(args, kwargs, session)
                with holding(session, name, "transactional"):
                    result = call(*args, **kwargs)
                returned = send_result(send, result, key=key, tag=tag, message=message)
            if joined is None:
                outcome.resolution = Resolution.COMMIT
            return returned

        return _shaped(_decorated(function, run), function, parameter)

    return cast("TransactionalDecorator", decorate)


def two_phase(
    producer_of: ProducerOf,
    *,
    topic: str,
    key: KeyOf | None,
    tag: str | None,
    body: Callable[..., Any] | None,
    fenced: bool,
    immunity: dt.timedelta | float | None,
    rollback_on: tuple[type[BaseException], ...],
) -> TwoPhaseDecorator:
    """Make ``@outbox.two_phase``; see `Outbox.two_phase`."""

    def decorate(function: Callable[..., Any]) -> Any:
        parameter = _SessionParameter(function, "two_phase") if fenced else None
        signature = inspect.signature(function)
        is_async = inspect.iscoroutinefunction(function)
        name = function_name(function)

        def message_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Outgoing:
            if parameter:
                if parameter.passed(args, kwargs) is not None:
                    raise InvalidHandler(
                        f"@two_phase: {function.__qualname__} was given a session; it must own its transaction, since "
                        "the half message has to be committed before it begins. Use outbox.prepare() to join a "
                        "transaction"
                    )
                args, kwargs = parameter.fill(args, kwargs, None)
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            if parameter:
                del bound.arguments[parameter.name]
            content = dict(bound.arguments) if body is None else body(**bound.arguments)
            return Outgoing(content, key=key(content) if key else None, tag=tag)

        def run(call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
            message = message_of(args, kwargs)
            producer = producer_of()
            outcome = _new_outcome(name, topic)
            transaction = functools.partial(producer.transaction, is_async=is_async)
            with transaction() as session:
                half_id = producer.prepare(session, topic, message, immunity=immunity, fenced=fenced)
            half = _HalfOfCall(producer, half_id, message, outcome, transaction)
            with half.deciding_failures(rollback_on):
                if parameter:
                    with transaction() as session:
                        if not producer.is_captured:
                            _take_fence(session, producer.schema, half_id)
                        args, kwargs = parameter.fill(args, kwargs, session)
                        with holding(session, name, "two_phase"):
                            result = call(*args, **kwargs)
                        producer.decide(half_id, Resolution.COMMIT, session)
                    outcome.resolution = Resolution.COMMIT
                    return result
                result = call(*args, **kwargs)
            # The effect is out there: a decision that fails from here on must never become a rollback.
            half.decide(Resolution.COMMIT)
            return result

        decorated = _decorated(function, run)
        return decorated if parameter is None else _shaped(decorated, function, parameter)

    return cast("TwoPhaseDecorator", decorate)


def _take_fence(session: Any, schema: str, half_id: UUID) -> None:
    """Take the fence as the transaction's first statement, and stop early if the half was decided meanwhile."""
    connection: Connection = getattr(session, "sync_session", session).connection()
    _, decided = execute(connection, take_lock(fence_key(schema, half_id)), op(schema, half_id))
    if decided:
        resolution, by, at = decided[0]
        raise already(Decision(half_id, Resolution(resolution), by, at, first=False))


@dataclass(slots=True, eq=False)
class _HalfOfCall:
    """The half of one call of a ``@two_phase`` function: decides it, and stores what the function raised with it."""

    _producer: Producer
    _half_id: UUID
    _message: Outgoing
    _outcome: CallOutcome
    _transaction: Callable[[], AbstractContextManager[Any]]

    def __post_init__(self) -> None:
        self._outcome.message_id, self._outcome.resolution = self._half_id, Resolution.UNKNOWN

    @contextmanager
    def deciding_failures(self, rollback_on: tuple[type[BaseException], ...]) -> Iterator[None]:
        """Let the exception of a block reach the caller, but first roll the half back, or leave it to the check."""
        try:
            yield
        except rollback_on as error:
            self._roll_back(error)
            raise
        except Exception as error:
            # A half that was decided meanwhile has its op: no more is to be told of that.
            if not self._learn(error):
                self._store(error)
            raise

    def decide(self, resolution: Resolution, error: BaseException | None = None) -> None:
        """Decide the half in a transaction of its own, which also stores what the function raised."""
        try:
            with self._transaction() as session:
                own = getattr(session, "sync_session", session)
                self._producer.decide_now(own, self._half_id, resolution)
                if error is not None and not self._producer.is_captured:
                    at_commit(own.connection(), self._stored_error(error))
        except AlreadyDecided as decided:
            self._learn(decided)
            raise
        self._outcome.resolution = resolution

    def _roll_back(self, error: BaseException) -> None:
        try:
            try:
                self.decide(Resolution.ROLLBACK, error)
            except (SchemaMissing, ProgrammingError) as failure:
                # There is no such table, or this role may not write there: the decision goes first.
                with work_for(self._producer.middlewares):
                    emit(HalfErrorLost(half_id=self._half_id, error=failure))
                self.decide(Resolution.ROLLBACK)
        except AlreadyDecided as failure:
            self._store(error)
            self._note(error, failure)
        except Exception as failure:
            self._note(error, failure)

    def _note(self, error: BaseException, failure: Exception) -> None:
        """Tell that the half couldn't be rolled back, by the exception that reaches the caller."""
        with suppress(BaseException):  # it may keep something else by the name of its notes
            error.add_note(
                f"half message {self._half_id} was not rolled back ({message_of(failure)}); the check will decide it"
            )
        with work_for(self._producer.middlewares):
            emit(RollbackFailed(half_id=self._half_id, error=failure))

    def _store(self, error: BaseException) -> None:
        """Store what the function raised, in a transaction of its own; what hinders that doesn't reach the caller."""
        if self._producer.is_captured:
            return
        try:
            with self._transaction() as session:
                at_commit(getattr(session, "sync_session", session).connection(), self._stored_error(error))
        except Exception as failure:
            with work_for(self._producer.middlewares):
                emit(HalfErrorLost(half_id=self._half_id, error=failure))

    def _stored_error(self, error: BaseException) -> Statement:
        kind, text = kind_of_error(error), error_text(error, self._message.secrets)
        return store_error(self._producer.schema, half_id=self._half_id, kind=kind, error=text)

    def _learn(self, error: Exception) -> bool:
        """Note the decision that came first, if the error tells of one about this half and no other; tell whether."""
        if not issubclass(type(error), AlreadyDecided) or error.half_id != self._half_id:  # type: ignore[attr-defined]
            return False
        is_committed = isinstance(error, AlreadyCommitted)
        self._outcome.resolution = Resolution.COMMIT if is_committed else Resolution.ROLLBACK
        return True
