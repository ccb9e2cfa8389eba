"""Processes that stop after a round trip to the server, to be killed there; and the service that they run."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection as Pipe
from typing import Any

import psycopg
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from outbox import INJECTED, Orphan, Outbox, Resolution, Settings
from tests.check.support import Bench

NAME = "outbox-killed"
#: A lease lasts longer than any test. One question at a time: while a thread is stopped, no other goes on.
SETTINGS = Settings(max_checks=2, check_interval=1000, checks_in_flight=1)
CHANGE = text("INSERT INTO change VALUES (:number, :part)")
PAYMENT = text("INSERT INTO payment VALUES (:number, 1)")
PAID = text("SELECT count(*) FROM payment WHERE number = :number")
NOTE = text("INSERT INTO note VALUES (:number)")


class Refused(Exception):
    """The function's outcome is known: nothing happened."""


class Stops:
    """Counts the round trips of this process, and stops it after one of them until the parent says to go on.

    ``where`` is what it says then.
    """

    def __init__(self, pipe: Pipe) -> None:
        self.where = ""
        self._pipe = pipe
        self._left = 0
        self._guard = threading.Lock()
        self._count_round_trips(psycopg.Connection)
        self._count_round_trips(psycopg.AsyncConnection)

    def arm(self, after: int) -> None:
        """Stop after so many round trips from now on; 0: never."""
        self._left = after

    def stop(self) -> None:
        """Stop here."""
        self._pipe.send(("stopped", self.where))
        self._pipe.recv()

    def _passed(self) -> None:
        with self._guard:
            self._left -= 1
            if self._left != 0:
                return
        self.stop()

    def _count_round_trips(self, kind: Any) -> None:
        wait = kind.wait
        passed = self._passed

        def counting(connection: Any, *args: Any, **options: Any) -> Any:
            try:
                return wait(connection, *args, **options)
            finally:
                passed()

        async def counting_async(connection: Any, *args: Any, **options: Any) -> Any:
            try:
                return await wait(connection, *args, **options)
            finally:
                passed()

        kind.wait = counting_async if asyncio.iscoroutinefunction(wait) else counting


def service(engine: Engine, provider: Engine) -> dict[str, Callable[[int], Any]]:
    """Return the functions of a service, by name; each is called with the number of its business change.

    ``provider`` is where the outcome of the unfenced ones lies: each of its statements commits by itself.
    """
    outbox = Outbox(engine, settings=SETTINGS)

    @outbox.transactional(topic="sent")
    def transactional(number: int, refuse: bool = False, session: Session = INJECTED) -> dict[str, int]:
        _change(session, number)
        if refuse:
            raise Refused
        return {"number": number}

    @outbox.two_phase(topic="fenced", rollback_on=(Refused,))
    def fenced(number: int, refuse: bool = False, session: Session = INJECTED) -> None:
        _change(session, number)
        if refuse:
            raise Refused

    @outbox.two_phase(topic="paid", fenced=False, rollback_on=(Refused,))
    def unfenced(number: int, refuse: bool = False) -> None:
        with provider.connect() as connection:
            connection.execute(text("SELECT 1") if refuse else PAYMENT, {"number": number})
        if refuse:
            raise Refused

    def connect(_: int) -> None:
        for each in (engine, provider):
            with each.connect() as connection:
                connection.execute(text("SELECT 1"))

    return {"connect": connect, **_each(transactional, fenced, unfenced)}


def async_service(url: str, provider_url: str, runner: asyncio.Runner) -> dict[str, Callable[[int], Any]]:
    """Do the same with coroutine functions."""
    engine = create_async_engine(url)
    outbox = Outbox(engine, settings=SETTINGS)
    provider = create_async_engine(provider_url, isolation_level="AUTOCOMMIT")

    @outbox.transactional(topic="sent")
    async def transactional(number: int, refuse: bool = False, session: AsyncSession = INJECTED) -> dict[str, int]:
        await session.run_sync(_change, number)
        if refuse:
            raise Refused
        return {"number": number}

    @outbox.two_phase(topic="fenced", rollback_on=(Refused,))
    async def fenced(number: int, refuse: bool = False, session: AsyncSession = INJECTED) -> None:
        await session.run_sync(_change, number)
        if refuse:
            raise Refused

    @outbox.two_phase(topic="paid", fenced=False, rollback_on=(Refused,))
    async def unfenced(number: int, refuse: bool = False) -> None:
        async with provider.connect() as connection:
            await connection.execute(text("SELECT 1") if refuse else PAYMENT, {"number": number})
        if refuse:
            raise Refused

    async def connect(_: int) -> None:
        for each in (engine, provider):
            async with each.connect() as connection:
                await connection.execute(text("SELECT 1"))

    def run_here(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: runner.run(function(*args))

    return {"connect": run_here(connect), **_each(run_here(transactional), run_here(fenced), run_here(unfenced))}


def _change(session: Session, number: int) -> None:
    for part in (1, 2):
        session.execute(CHANGE, {"number": number, "part": part})


def _each(
    transactional: Callable[..., Any], fenced: Callable[..., Any], unfenced: Callable[..., Any]
) -> dict[str, Callable[[int], Any]]:
    return {
        "transactional": transactional,
        "transactional, refused": lambda number: transactional(number, True),
        "fenced": fenced,
        "fenced, refused": lambda number: fenced(number, True),
        "unfenced": unfenced,
        "unfenced, refused": lambda number: unfenced(number, True),
    }


def call(pipe: Pipe, url: str, provider_url: str, name: str, is_async: bool, warm: int) -> None:
    """Call a function each time the parent says ``(number, after how many round trips to stop)``; say how it ended.

    The pools have a connection already; with a number for ``warm``, the function has been called with that before, so
    that its statements are prepared there.
    """
    stops = Stops(pipe)
    with asyncio.Runner() as runner:
        if is_async:
            functions = async_service(url, provider_url, runner)
        else:
            functions = service(create_engine(url), create_engine(provider_url, isolation_level="AUTOCOMMIT"))
        functions["connect"](0)
        if warm:
            _outcome(functions[name], warm)
        while True:
            number, after = pipe.recv()
            stops.arm(after)
            outcome = _outcome(functions[name], number)
            stops.arm(0)
            pipe.send(("ended", outcome))


def _outcome(function: Callable[[int], Any], number: int) -> str:
    try:
        function(number)
    except Exception as error:
        return type(error).__name__
    return "returned"


def check(pipe: Pipe, url: str, kind: str, answer: Resolution) -> None:
    """Make a pass each time the parent says after how many round trips to stop (0: in the question); say how it ended.

    The checker is of a ``kind``: "plain", "session", "async session", or none for the "fence".
    """
    stops = Stops(pipe)
    in_question = False

    def ask() -> Resolution:
        stops.where = "asked"
        if in_question:
            stops.stop()
        return answer

    def plain(orphan: Orphan) -> Resolution:
        return ask()

    def with_session(orphan: Orphan, session: Session) -> Resolution:
        session.execute(NOTE, {"number": orphan.body["number"]})
        return ask()

    async def with_async_session(orphan: Orphan, session: AsyncSession) -> Resolution:
        await session.execute(NOTE, {"number": orphan.body["number"]})
        return ask()

    checkers: dict[str, Any] = {"plain": plain, "session": with_session, "async session": with_async_session}
    with ExitStack() as stack:
        engine = create_engine(url)
        outbox = Outbox(engine, settings=SETTINGS)
        if kind in checkers:
            outbox.checker("paid")(checkers[kind])
        bench = Bench(outbox, engine, stack)
        while True:
            after = pipe.recv()
            in_question, stops.where = after == 0, "not asked"
            stops.arm(after)
            try:
                bench.check()
                outcome = "returned"
            except Exception as error:
                outcome = type(error).__name__
            stops.arm(0)
            pipe.send(("ended", outcome))
