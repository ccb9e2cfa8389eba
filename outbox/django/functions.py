"""The functions of an application: send in an atomic block, prepare and decide; declare handlers that use the ORM.

Handlers, checkers and compensations take no session: `django.db.connection` is in place.
"""

from __future__ import annotations

import datetime as dt
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ParamSpec, TypeVar, Unpack
from uuid import UUID

from django.db import DEFAULT_DB_ALIAS, connections, transaction
from sqlalchemy import Connection
from sqlalchemy.orm import Session

from outbox.calling.function import check_function, is_async
from outbox.database.drivers import when_committed
from outbox.database.session import Hold, hold_open
from outbox.django.databases import declared, django_within, outbox, set_source
from outbox.errors import InvalidHandler, SchemaMissing, TransactionRequired
from outbox.message.content import check_topic
from outbox.message.model import Outgoing, SendOptions
from outbox.producer.decorators import KeyOf, send_result

P = ParamSpec("P")
R = TypeVar("R")


def send(topic: str, body: Any, *, using: str | None = None, **options: Unpack[SendOptions]) -> UUID:
    """Send a message with the transaction of ``atomic``; return its id.

    The half message is written at once, on Django's own connection; it vanishes with the transaction or the savepoint
    (a nested ``atomic``), and goes out in the order of the COMMITs. The options are those of `Outbox.send`.

    Raises:
        TransactionRequired: the code is in no ``atomic`` block of this database.
        SchemaMissing: the database has no outbox tables.
        InvalidMessage, OutboxBusy, InvalidSettings: as of `Outbox.send` and `outbox`.
        django.db.Error: the server refused it.
    """
    with _carrier(using, "send") as connection:
        half_id: UUID = outbox(using).send(connection, topic, body, **options)
        return half_id


def prepare(
    topic: str,
    body: Any,
    *,
    using: str | None = None,
    immunity: dt.timedelta | float | None = None,
    **options: Unpack[SendOptions],
) -> UUID:
    """Write a half message with the transaction of ``atomic``, to be decided later; see `Outbox.prepare`."""
    with _carrier(using, "prepare") as connection:
        half_id: UUID = outbox(using).prepare(connection, topic, body, immunity=immunity, **options)
        return half_id


def commit(half_id: UUID, *, using: str | None = None) -> None:
    """Commit a prepared half, within the transaction of ``atomic``; see `Outbox.commit`.

    Raises:
        AlreadyCommitted, AlreadyRolledBack, HalfNotFound, TransactionRequired.
    """
    with _carrier(using, "commit") as connection:
        outbox(using).commit(half_id, within=connection)


def rollback(half_id: UUID, *, using: str | None = None) -> None:
    """Roll a prepared half back, within the transaction of ``atomic``; see `commit`."""
    with _carrier(using, "rollback") as connection:
        outbox(using).rollback(half_id, within=connection)


def transactional(
    *,
    topic: str,
    using: str | None = None,
    key: KeyOf | None = None,
    tag: str | None = None,
    message: Callable[[Any], Any] | None = None,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function: it runs in ``atomic``, and what it returns is sent with that.

    Called inside an ``atomic`` block it joins that by a savepoint. ``message`` makes the body of what the function
    returns, ``key`` takes the body. It may return an `Outgoing` to say more, or None to send nothing.

    Raises:
        InvalidHandler: the function is async; Django's transactions are not.
        InvalidMessage: the topic isn't a name.
    """
    check_topic(topic)

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        if inspect.iscoroutinefunction(function):
            raise InvalidHandler(
                f"@transactional: {function.__qualname__} is async, and Django's atomic is not; decorate a plain "
                "function, and call it by sync_to_async"
            )

        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            with transaction.atomic(using):
                hold = Hold("@transactional's, which commits it together with the message", function)
                let = hold_open(connections[using or DEFAULT_DB_ALIAS].connection, hold)
                try:
                    result = function(*args, **kwargs)
                finally:
                    let()

                def send_it(outgoing: Outgoing) -> None:
                    send(topic, outgoing.body, using=using, **outgoing.options)

                returned: R = send_result(send_it, result, key=key, tag=tag, message=message)
                return returned

        return run

    return decorate


@contextmanager
def _carrier(using: str | None, verb: str) -> Iterator[Any]:
    """Yield Django's own connection of a database, which is in a transaction."""
    alias = using or DEFAULT_DB_ALIAS
    connection: Any = connections[alias]
    # Also refuses to work inside of an event loop, as all of Django's connections do.
    connection.ensure_connection()
    if connection.get_autocommit() and not connection.in_atomic_block:
        where = "" if using is None else f"using={using!r}"
        raise TransactionRequired(
            f"{verb}() is in no transaction of database {alias!r}: message and business change would not commit "
            f"together; call it inside 'with transaction.atomic({where})', or set ATOMIC_REQUESTS"
        )
    connection.validate_no_broken_transaction()
    # Django refuses to wait for a COMMIT that isn't its own.
    token = when_committed.set(partial(transaction.on_commit, using=alias) if connection.in_atomic_block else None)
    try:
        with connection.wrap_database_errors:
            yield connection.connection
    except SchemaMissing as error:
        option = "" if using is None else f" --database {alias}"
        raise SchemaMissing(f"{error.args[0].partition('; run:')[0]}; run: python manage.py migrate{option}") from error
    finally:
        when_committed.reset(token)


F = TypeVar("F", bound=Callable[..., Any])


class OrmFunction:
    """A checker or a compensation as the `Outbox` calls it: with a session, whose transaction Django gets."""

    def __init__(self, what: str, function: Callable[..., Any], using: str | None) -> None:
        check_function(what, function, ("argument",))
        if is_async(function):
            raise InvalidHandler(
                f"{what}: {getattr(function, '__qualname__', function)} is async, and Django's ORM would leave the "
                "worker's transaction for a thread of its own; write a plain function"
            )
        self.function = function
        self._using = using
        # Not __wrapped__: the called function takes one argument more.
        for name in ("__module__", "__name__", "__qualname__", "__doc__"):
            if hasattr(function, name):
                setattr(self, name, getattr(function, name))

    def __call__(self, argument: Any, session: Session) -> Any:
        """Call the function with a message or an orphan."""
        return self._call(argument, session.connection())

    def _call(self, argument: Any, connection: Connection) -> Any:
        with django_within(connection, self._using):
            return self.function(argument)


class OrmHandler(OrmFunction):
    """A handler as the `Outbox` calls it: with a connection, for which no session has to be made."""

    def __call__(self, argument: Any, connection: Connection) -> Any:  # type: ignore[override]  # by its annotation
        """Call the handler with a message, or a list of messages."""
        return self._call(argument, connection)


def outside(handler: Callable[..., Any]) -> Callable[..., Any]:
    """Return a handler that runs outside of transactions, as a view does in its thread."""
    if is_async(handler):
        return handler

    @functools.wraps(handler)
    def call(message: Any) -> Any:
        try:
            return handler(message)
        finally:
            connections.close_all()

    return call


def consumer(
    topic: str, *, group: str, using: str | None = None, source: str | Sequence[str] | None = None, **options: Any
) -> Callable[[F], F]:
    """Register a handler, ``handler(message)``, as a group of a topic; see `Outbox.consumer` for the options.

    What it does with the ORM on ``using`` commits together with the inbox row and the offset: its effect is exactly
    once. ``source`` is the alias of the producer's database, if that is another one, or those of several.
    ``transaction.on_commit`` works as in a view. With ``takes_batch=True`` the handler takes the list of messages. With
    ``transactional=False`` it runs in a thread of its own, with Django's connections of that thread, which are closed
    after it.

    Raises:
        As `Outbox.consumer`; InvalidHandler also: the handler is async.
    """

    def register(handler: F) -> F:
        what = f"consumer of {topic!r} in group {group!r}"
        if options.get("pipeline"):
            raise InvalidHandler(f"{what}: pipeline=True isn't for the ORM, which needs the answer of each statement")
        inside = options.get("transactional", True)
        called = OrmHandler(what, handler, using) if inside else outside(handler)
        declared(using).consumer(topic, group=group, **options)(called)
        set_source(using, topic, group, source)
        return handler

    return register


def checker(topic: str, *, using: str | None = None, **options: Any) -> Callable[[F], F]:
    """Register ``checker(orphan)``, which tells whether the local transaction committed; see `Outbox.checker`."""
    return _register("checker", topic, using, options)


def compensation(topic: str, *, using: str | None = None, **options: Any) -> Callable[[F], F]:
    """Register ``compensation(message)``, which undoes the local transaction; see `Outbox.compensation`."""
    return _register("compensation", topic, using, options)


def _register(decorator: str, topic: str, using: str | None, options: dict[str, Any]) -> Callable[[F], F]:
    def register(function: F) -> F:
        called = OrmFunction(f"{decorator} of {topic!r}", function, using)
        getattr(declared(using), decorator)(topic, **options)(called)
        return function

    return register
