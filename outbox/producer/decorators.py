"""Decorators on service functions: send what the function returns, or prepare, run and decide.

They keep the function's signature, types, docstring and return value. The function takes its session in a
parameter whose default is `INJECTED`; a caller who passes a session keeps its transaction.
"""

from __future__ import annotations

import datetime as dt
import functools
import inspect
import logging
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast
from uuid import UUID

from outbox.database.decision import already, fence_key, op, take_lock
from outbox.database.execute import execute
from outbox.errors import InvalidHandler
from outbox.message.model import Decision, Outgoing, Resolution

if TYPE_CHECKING:
    from sqlalchemy import Connection
    from sqlalchemy.orm import Session

    from outbox.producer.producer import Producer

P = ParamSpec("P")
R = TypeVar("R")
Function = Callable[P, R]
KeyOf = Callable[[Any], str | None]

log = logging.getLogger("outbox.producer")


class _Injected:
    """The default of a session parameter that the decorator fills."""

    def __repr__(self) -> str:
        return "INJECTED"


INJECTED: Any = _Injected()


class _SessionParameter:
    """Where a function takes its session, and whether a caller gave one."""

    def __init__(self, function: Callable[..., Any], decorator: str) -> None:
        self.signature = inspect.signature(function)
        injected = [p.name for p in self.signature.parameters.values() if p.default is INJECTED]
        named = ["session"] if "session" in self.signature.parameters else []
        names = injected or named
        if len(names) != 1:
            raise InvalidHandler(
                f"@{decorator}: {function.__qualname__} must take its session in one parameter, "
                "such as 'session: Session = INJECTED'"
            )
        self.name = names[0]

    def given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the session that the caller passed, or None."""
        session = self.signature.bind_partial(*args, **kwargs).arguments.get(self.name)
        return None if session is INJECTED else session

    def fill(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], session: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with the session in its place, wherever the function has it."""
        bound = self.signature.bind_partial(*args, **kwargs)
        bound.arguments[self.name] = session
        return bound.args, bound.kwargs


def transactional(
    producer: Producer, *, topic: str, key: KeyOf | None, tag: str | None
) -> Callable[[Function[P, R]], Function[P, R]]:
    """Make ``@outbox.transactional``; see `Outbox.transactional`."""

    def send(session: Any, result: Any) -> None:
        if result is None:
            return
        out = result if isinstance(result, Outgoing) else Outgoing(result)
        producer.send(
            session,
            topic,
            out.body,
            key=out.key if out.key is not None else (key(out.body) if key else None),
            tag=out.tag if out.tag is not None else tag,
            headers=out.headers,
            deliver_at=out.deliver_at,
            delay=out.delay,
            delay_level=out.delay_level,
            id=out.id,
        )

    def decorate(function: Function[P, R]) -> Function[P, R]:
        parameter = _SessionParameter(function, "transactional")

        @functools.wraps(function)
        async def run_async(*args: Any, **kwargs: Any) -> Any:
            call = cast("Callable[..., Coroutine[Any, Any, Any]]", function)
            if (session := parameter.given(args, kwargs)) is not None:
                result = await call(*args, **kwargs)
                send(session, result)
                return result
            async with producer.async_sessions().begin() as session:
                args, kwargs = parameter.fill(args, kwargs, session)
                result = await call(*args, **kwargs)
                send(session, result)
            return result

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            call = cast("Callable[..., Any]", function)
            if (session := parameter.given(args, kwargs)) is not None:
                result = call(*args, **kwargs)
                send(session, result)
                return result
            with producer.sessions().begin() as session:
                args, kwargs = parameter.fill(args, kwargs, session)
                result = call(*args, **kwargs)
                send(session, result)
            return result

        return cast("Function[P, R]", run_async if inspect.iscoroutinefunction(function) else run)

    return decorate


@dataclass(frozen=True, slots=True)
class _MessageOf:
    """Makes body and key of a ``@two_phase`` function's message from the arguments of a call."""

    name: str
    signature: inspect.Signature
    parameter: _SessionParameter | None
    body: Callable[..., Any] | None
    key: KeyOf | None

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        if self.parameter:
            self._refuse_session(self.parameter, args, kwargs)
            args, kwargs = self.parameter.fill(args, kwargs, None)
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        if self.parameter:
            del bound.arguments[self.parameter.name]
        body = dict(bound.arguments) if self.body is None else self.body(**bound.arguments)
        return {"body": body, "key": self.key(body) if self.key else None}

    def _refuse_session(self, parameter: _SessionParameter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if parameter.given(args, kwargs) is not None:
            raise InvalidHandler(
                f"@two_phase: {self.name} was given a session; it must own its transaction, since the "
                "half message has to be committed before it begins. Use outbox.prepare() to join a transaction"
            )


def two_phase(
    producer: Producer,
    *,
    topic: str,
    key: KeyOf | None,
    tag: str | None,
    body: Callable[..., Any] | None,
    fenced: bool,
    immunity: dt.timedelta | float | None,
    rollback_on: tuple[type[BaseException], ...],
) -> Callable[[Function[P, R]], Function[P, R]]:
    """Make ``@outbox.two_phase``; see `Outbox.two_phase`."""

    def decorate(function: Function[P, R]) -> Function[P, R]:
        parameter = _SessionParameter(function, "two_phase") if fenced else None
        message = _MessageOf(function.__qualname__, inspect.signature(function), parameter, body, key)
        options: dict[str, Any] = {"topic": topic, "tag": tag, "immunity": immunity, "fenced": fenced}

        @functools.wraps(function)
        async def run_async(*args: Any, **kwargs: Any) -> Any:
            call = cast("Callable[..., Coroutine[Any, Any, Any]]", function)
            content = message(args, kwargs)
            async with producer.async_sessions().begin() as session:
                half_id = producer.prepare(session, **content, **options)
            try:
                if parameter:
                    own = _OwnError()
                    with own.restored():
                        async with producer.async_sessions().begin() as session:
                            await session.run_sync(_take_fence, producer.schema, half_id)
                            args, kwargs = parameter.fill(args, kwargs, session)
                            with own.kept():
                                result = await call(*args, **kwargs)
                            producer.commit_within(session, half_id)
                    return result
                result = await call(*args, **kwargs)
            except rollback_on as error:
                with _noting(error, half_id):
                    async with producer.async_sessions().begin() as session:
                        await session.run_sync(producer.rollback_now, half_id)
                raise
            # The effect is out there: a decision that fails from here on must never become a rollback.
            async with producer.async_sessions().begin() as session:
                await session.run_sync(producer.commit_now, half_id)
            return result

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            call = cast("Callable[..., Any]", function)
            content = message(args, kwargs)
            with producer.sessions().begin() as session:
                half_id = producer.prepare(session, **content, **options)
            try:
                if parameter:
                    own = _OwnError()
                    with own.restored(), producer.sessions().begin() as session:
                        _take_fence(session, producer.schema, half_id)
                        args, kwargs = parameter.fill(args, kwargs, session)
                        with own.kept():
                            result = call(*args, **kwargs)
                        producer.commit_within(session, half_id)
                    return result
                result = call(*args, **kwargs)
            except rollback_on as error:
                with _noting(error, half_id), producer.sessions().begin() as session:
                    producer.rollback_now(session, half_id)
                raise
            # The effect is out there: a decision that fails from here on must never become a rollback.
            with producer.sessions().begin() as session:
                producer.commit_now(session, half_id)
            return result

        return cast("Function[P, R]", run_async if inspect.iscoroutinefunction(function) else run)

    return decorate


def _take_fence(session: Session, schema: str, half_id: UUID) -> None:
    """Take the fence as the transaction's first statement, and stop early if the half was decided meanwhile."""
    connection: Connection = session.connection()
    _, decided = execute(connection, take_lock(fence_key(schema, half_id)), op(schema, half_id))
    if decided:
        resolution, by, at = decided[0]
        raise already(Decision(half_id, Resolution(resolution), by, at, first=False))


class _OwnError:
    """Lets the function's own exception reach the caller, also when the connection was lost under its transaction.

    The ROLLBACK that follows it fails then, and that error would take its place. The server rolls back by itself.
    """

    _error: BaseException | None = None

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep the exception with which the function ends."""
        try:
            yield
        except BaseException as error:
            self._error = error
            raise

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Put it back in the place of any that came after it."""
        try:
            yield
        except Exception as later:
            if self._error is None or later is self._error:
                raise
            context = self._error.__context__
            try:
                raise self._error
            finally:
                self._error.__context__ = context


@contextmanager
def _noting(error: BaseException, half_id: UUID) -> Iterator[None]:
    """Let the original exception reach the caller, also when the half couldn't be rolled back."""
    try:
        yield
    except Exception as failure:
        error.add_note(f"half message {half_id} was not rolled back ({failure}); the check will decide it")
        log.warning("half.rollback_failed", extra={"half_id": str(half_id)}, exc_info=failure)
