"""Service functions that decorators take, sync or async, called alike; and what they raise."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from sqlalchemy import Engine, insert
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Session

from outbox import INJECTED, Outbox
from tests.producer.bank import change


class Declined(Exception):
    """An outcome that is known: nothing happened."""


class Crash(BaseException):
    """What no `except Exception` catches."""


class Caller:
    """Decorated functions, sync or async, called alike."""

    def __init__(self, outbox: Outbox, bind: Engine | AsyncEngine, asynchronous: bool) -> None:
        self.outbox = outbox
        self.bind = bind
        self.asynchronous = asynchronous
        self.runner = asyncio.Runner() if asynchronous else None

    def decorate(self, decorator: Any, body: Callable[[Any, int], Any]) -> Callable[..., Any]:
        """Decorate a function of a session and a number that does ``body``; return it, callable from sync code."""
        if self.runner is None:

            def function(number: int, session: Session = INJECTED) -> Any:
                session.execute(insert(change).values(number=number))
                return body(session, number)

            return decorator(function)  # type: ignore[no-any-return]

        async def async_function(number: int, session: AsyncSession = INJECTED) -> Any:
            await session.execute(insert(change).values(number=number))
            return body(session, number)

        return self.sync(decorator(async_function))

    def sync(self, function: Any) -> Callable[..., Any]:
        """Return an async function as one that can be called here."""
        runner = self.runner
        if runner is None:
            return function  # type: ignore[no-any-return]
        return lambda *args, **kwargs: runner.run(function(*args, **kwargs))
