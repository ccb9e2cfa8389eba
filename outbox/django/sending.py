"""Send, prepare and decide with the transaction of ``transaction.atomic``."""

from __future__ import annotations

import datetime as dt
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ParamSpec, TypeVar, Unpack
from uuid import UUID

from django.db import DEFAULT_DB_ALIAS, connections, transaction

from outbox.database.drivers import when_committed
from outbox.database.session import Hold, hold_open
from outbox.django.databases import outbox
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
