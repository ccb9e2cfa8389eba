"""The types of functions that an application declares: what a decorator takes, and what it makes of it.

For type checkers: a handler, checker or compensation that doesn't fit its ``model`` or its session is refused there.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, Generic, Literal, ParamSpec, Protocol, TypedDict, TypeVar, overload

from outbox.message.model import HandlerAnswer, Message, Orphan, Resolution, SendOptions, Start

if TYPE_CHECKING:
    from psycopg import AsyncCursor, Cursor
    from sqlalchemy import Connection, Engine
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession
    from sqlalchemy.orm import Session

    from outbox.message.limits import Breaker

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
TakenT = TypeVar("TakenT")
P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
S_contra = TypeVar("S_contra", contravariant=True)
AnswerT = TypeVar("AnswerT", bound=HandlerAnswer)
AnswersT = TypeVar("AnswersT", bound=HandlerAnswer | Sequence[HandlerAnswer])
#: What a handler takes beside its message (`outbox.calling.carrier`).
CarrierT = TypeVar("CarrierT", "Session", "Connection", "Cursor[Any]")
AsyncCarrierT = TypeVar("AsyncCarrierT", "AsyncSession", "AsyncConnection", "AsyncCursor[Any]")
VerdictT = TypeVar("VerdictT", bound=Resolution | None)

#: The values that headers may have: by name one or several, or each as ``name=value``.
HeaderFilter = Mapping[str, str | Collection[str]] | Collection[str]


class PrepareOptions(SendOptions, total=False):
    """The options of `Outbox.prepare`."""

    immunity: dt.timedelta | float | None


class TopicOptions(TypedDict, Generic[T], total=False):
    """The options of `Outbox.topic`: those of `Topic`."""

    version: int
    key: Callable[[T], str | None] | None
    content_type: str


#: What becomes of a message that is out of attempts.
OnExhausted = Literal["park", "park_sequence", "skip", "block"]


class _NamedGroup(TypedDict):
    """What each consumer names."""

    group: str


class _CommonOptions(_NamedGroup, total=False):
    """What each consumer may say."""

    source: Engine | AsyncEngine | str | Sequence[Engine | AsyncEngine | str] | None
    ordered: bool | Literal["key"] | None
    on_exhausted: OnExhausted
    on_pruned: Literal["stop", "skip"]
    tags: Collection[str] | None
    keys: Collection[str] | None
    headers: HeaderFilter | None
    rate: str | float | None
    breaker: Breaker | None
    retry_delays: Sequence[float] | None


class ConsumerOptions(_CommonOptions, total=False):
    """The options of `Outbox.consumer` that say nothing of the handler's types."""

    batch: int
    pipeline: bool
    transactional: Literal[True]
    start: Start
    threads: int


class OutsideOptions(_CommonOptions, total=False):
    """The options of `Outbox.consumer` with ``transactional=False`` that say nothing of the handler's types."""

    concurrency: int
    timeout: dt.timedelta | float | None
    start: Literal["first", "now"]


class OutsideBatchOptions(OutsideOptions, total=False):
    """Those of a handler that takes lists."""

    batch: int


class LeasedOptions(_NamedGroup, total=False):
    """The options of `Outbox.leased`."""

    source: Engine | AsyncEngine | str | None
    ordered: Literal["key", False]
    on_exhausted: OnExhausted
    on_pruned: Literal["stop", "skip"]
    tags: Collection[str] | None
    keys: Collection[str] | None
    headers: HeaderFilter | None
    start: Start
    rate: str | float | None
    retry_delays: Sequence[float] | None


class RelayOptions(TypedDict, total=False):
    """The options of `Outbox.relay`: those of its group that can be other ones."""

    group: str | None
    ordered: Literal["key", False] | None
    on_exhausted: Literal["park", "park_sequence", "skip"]
    batch: int
    concurrency: int
    tags: Collection[str] | None
    keys: Collection[str] | None
    headers: HeaderFilter | None
    start: Literal["first", "now"]
    rate: str | float | None
    breaker: Breaker | None
    retry_delays: Sequence[float] | None


class CheckerOptions(TypedDict, total=False):
    """The options of `Outbox.checker` that say nothing of the checker's types."""

    immunity: dt.timedelta | float | None
    interval: dt.timedelta | float | None
    max_checks: int | None
    timeout: dt.timedelta | float | None


class CompensationOptions(TypedDict, total=False):
    """The options of `Outbox.compensation` that say nothing of the function's types."""

    consumers: Collection[Engine | AsyncEngine | str]
    when: Literal["ordered", "parked"]
    after: dt.timedelta | float
    timeout: dt.timedelta | float | None


class HandlerDecorator(Protocol[TakenT]):
    """Takes a handler of a message, or of a list of them, with what carries its changes."""

    @overload
    def __call__(self, handler: Callable[[TakenT, CarrierT], AnswerT], /) -> Callable[[TakenT, CarrierT], AnswerT]: ...
    @overload
    def __call__(
        self, handler: Callable[[TakenT, AsyncCarrierT], Coroutine[Any, Any, AnswerT]], /
    ) -> Callable[[TakenT, AsyncCarrierT], Coroutine[Any, Any, AnswerT]]: ...


class OutsideHandlerDecorator(Protocol[T]):
    """Takes a handler of messages with a body of type T, outside of transactions, sync or async."""

    @overload
    def __call__(
        self, handler: Callable[[Message[T]], Coroutine[Any, Any, AnswerT]], /
    ) -> Callable[[Message[T]], Coroutine[Any, Any, AnswerT]]: ...
    @overload
    def __call__(self, handler: Callable[[Message[T]], AnswerT], /) -> Callable[[Message[T]], AnswerT]: ...


class OutsideBatchDecorator(Protocol[T]):
    """Takes a handler of lists of messages outside of transactions, which returns None or an answer for each."""

    @overload
    def __call__(
        self, handler: Callable[[list[Message[T]]], Coroutine[Any, Any, AnswersT]], /
    ) -> Callable[[list[Message[T]]], Coroutine[Any, Any, AnswersT]]: ...
    @overload
    def __call__(
        self, handler: Callable[[list[Message[T]]], AnswersT], /
    ) -> Callable[[list[Message[T]]], AnswersT]: ...


class CheckerDecorator(Protocol[T]):
    """Takes a checker of orphans with a body of type T, with or without a session."""

    @overload
    def __call__(
        self, function: Callable[[Orphan[T]], Coroutine[Any, Any, VerdictT]], /
    ) -> Callable[[Orphan[T]], Coroutine[Any, Any, VerdictT]]: ...
    @overload
    def __call__(self, function: Callable[[Orphan[T]], VerdictT], /) -> Callable[[Orphan[T]], VerdictT]: ...
    @overload
    def __call__(
        self, function: Callable[[Orphan[T], AsyncSession], Coroutine[Any, Any, VerdictT]], /
    ) -> Callable[[Orphan[T], AsyncSession], Coroutine[Any, Any, VerdictT]]: ...
    @overload
    def __call__(
        self, function: Callable[[Orphan[T], Session], VerdictT], /
    ) -> Callable[[Orphan[T], Session], VerdictT]: ...


class CallbackDecorator(Protocol[TakenT]):
    """Takes the function to call with a message or its fate, and a Session, or an AsyncSession if it is async."""

    @overload
    def __call__(self, function: Callable[[TakenT, Session], R], /) -> Callable[[TakenT, Session], R]: ...
    @overload
    def __call__(
        self, function: Callable[[TakenT, AsyncSession], Coroutine[Any, Any, R]], /
    ) -> Callable[[TakenT, AsyncSession], Coroutine[Any, Any, R]]: ...


class ScheduleDecorator(Protocol):
    """Takes the function that makes the message of a time, alone or with a Session; an AsyncSession if it is async."""

    @overload
    def __call__(self, function: Callable[[dt.datetime], R], /) -> Callable[[dt.datetime], R]: ...
    @overload
    def __call__(self, function: Callable[[dt.datetime, Session], R], /) -> Callable[[dt.datetime, Session], R]: ...
    @overload
    def __call__(
        self, function: Callable[[dt.datetime, AsyncSession], Coroutine[Any, Any, R]], /
    ) -> Callable[[dt.datetime, AsyncSession], Coroutine[Any, Any, R]]: ...


class Transactional(Protocol[P, R_co, S_contra]):
    """A service function without its session, which it is given: a new one, or by `within` the caller's."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Call the function in a transaction of its own."""

    def within(self, session: S_contra, /, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Call the function in the transaction of a session, which the caller commits."""


class TransactionalDecorator(Protocol):
    """Takes a service function: one that begins with its session is called without, any other one stays as it is."""

    @overload
    def __call__(
        self, function: Callable[Concatenate[AsyncSession, P], Coroutine[Any, Any, R]], /
    ) -> Transactional[P, Coroutine[Any, Any, R], AsyncSession]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[Session, P], R], /) -> Transactional[P, R, Session]: ...
    @overload
    def __call__(self, function: F, /) -> F: ...


class TwoPhaseDecorator(Protocol):
    """Takes a service function as `TransactionalDecorator` does; it can't join a transaction."""

    @overload
    def __call__(
        self, function: Callable[Concatenate[AsyncSession, P], Coroutine[Any, Any, R]], /
    ) -> Callable[P, Coroutine[Any, Any, R]]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[Session, P], R], /) -> Callable[P, R]: ...
    @overload
    def __call__(self, function: F, /) -> F: ...
