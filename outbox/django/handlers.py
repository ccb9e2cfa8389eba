"""Declare handlers, checkers and compensations that use the ORM: they take no session, `connection` is in place."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from django.db import connections
from sqlalchemy import Connection
from sqlalchemy.orm import Session

from outbox.calling.function import check_function, is_async
from outbox.django.connection import django_within
from outbox.django.databases import declared, set_source
from outbox.errors import InvalidHandler

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
    topic: str, *, group: str, using: str | None = None, source: str | None = None, **options: Any
) -> Callable[[F], F]:
    """Register a handler, ``handler(message)``, as a group of a topic; see `Outbox.consumer` for the options.

    What it does with the ORM on ``using`` commits together with the inbox row and the offset: its effect is exactly
    once. ``source`` is the alias of the producer's database, if that is another one. ``transaction.on_commit`` works
    as in a view. With ``takes_batch=True`` the handler takes the list of messages. With ``transactional=False`` it runs
    in a thread of its own, with Django's connections of that thread, which are closed after it.

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
