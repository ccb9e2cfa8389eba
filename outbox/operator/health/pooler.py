"""Is there a connection pooler in between, and does it suit prepared statements and LISTEN?

Nothing that a pooler says of itself is relied upon: what it does to connections shows it. A server process that serves
two connections which are open at the same time, or one process after the other for one connection, is what transaction
pooling is. PostgreSQL tells each connection at its start which process serves it; a pooler invents that number.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import uuid4

from outbox.database.execute import driver_of, execute
from outbox.operator.health import sql
from outbox.operator.health.rules import Severity

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from outbox.operator.health.examination import Examination
    from outbox.operator.health.rules import Diagnosis

_ROUNDS = 5


class Pooling(enum.StrEnum):
    """What is between this process and the server."""

    DIRECT = "direct"
    SESSION = "session"
    TRANSACTION = "transaction"


@dataclass(frozen=True, slots=True)
class PoolerProbe:
    """Which server processes ran the transactions of two connections, both open; ``announced`` to the first one."""

    announced: int
    first: tuple[int, ...]
    second: tuple[int, ...]


def pooling_of(probe: PoolerProbe) -> Pooling:
    """Return what the processes show."""
    first, second = set(probe.first), set(probe.second)
    if len(first) > 1 or len(second) > 1 or first & second:
        return Pooling.TRANSACTION
    return Pooling.DIRECT if first == {probe.announced} else Pooling.SESSION


def trouble_with_prepared(threshold: int | None, *, tracked: bool, can_close: bool) -> str | None:
    """Return what is wrong with prepared statements behind a transaction pooler; None if nothing is.

    ``threshold`` is psycopg's ``prepare_threshold``, ``tracked``: the pooler knows prepared statements,
    ``can_close``: libpq can tell it that one is dropped.
    """
    if threshold is None:
        return None
    if not tracked:
        return "and the pooler knows nothing of them: they end up on server processes that other clients use"
    if not can_close:
        return "and this libpq is older than 17, so the pooler isn't told which are dropped"
    return None


def pooler(examination: Examination) -> Iterator[Diagnosis]:
    """Behind a transaction pooler, sessions have no memory."""
    other = examination.connect()
    try:
        probe = _probe(examination, other)
    finally:
        with suppress(Exception):  # it has served
            other.close()
    if pooling_of(probe) is not Pooling.TRANSACTION:
        return
    yield from _prepared(examination)
    if examination.settings.listen:
        yield examination.finding("pooler.listen", {"pooling": Pooling.TRANSACTION})


def _probe(examination: Examination, other: Connection) -> PoolerProbe:
    pids: tuple[list[int], list[int]] = ([], [])
    for _ in range(_ROUNDS):
        for connection, served_by in zip((examination.connection, other), pids, strict=True):
            with examination.reading(connection):
                (((pid,),),) = execute(connection, sql.BACKEND_PID)
                served_by.append(pid)
    return PoolerProbe(driver_of(examination.connection).pgconn.backend_pid, tuple(pids[0]), tuple(pids[1]))


def _prepared(examination: Examination) -> Iterator[Diagnosis]:
    from psycopg import capabilities, pq  # noqa: PLC0415 - importing outbox must not pay for the driver

    threshold, own_engine = examination.prepare_threshold, examination.own_engine
    tracked = _tracks(examination)
    trouble = trouble_with_prepared(threshold, tracked=tracked, can_close=capabilities.has_send_close_prepared())
    if trouble is not None:
        details = {"pooling": Pooling.TRANSACTION, "prepare_threshold": threshold, "tracked": tracked}
        yield examination.finding(
            "pooler.prepared_statements",
            details | {"libpq": pq.version()},
            severity=Severity.PROBLEM if own_engine else Severity.NOTE,
            unless="" if own_engine else " (unless your engine says prepare_threshold=None)",
            trouble=trouble,
        )


def _tracks(examination: Examination) -> bool:
    """Return whether the pooler manages prepared statements: then it gives them names of its own on the server.

    One transaction stays on one server process, so nothing is left behind on it for others.
    """
    from psycopg import pq  # noqa: PLC0415

    name = f"outbox_doctor_{uuid4().hex}"
    with examination.reading() as connection:
        result = driver_of(connection).pgconn.prepare(name.encode(), b"SELECT 1")
        if result.status != pq.ExecStatus.COMMAND_OK:
            return False
        (((passed_on,),),) = execute(connection, sql.prepared_statement(name))
        if passed_on:
            execute(connection, sql.deallocate(name))
    return not passed_on
