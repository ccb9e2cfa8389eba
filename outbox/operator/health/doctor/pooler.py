"""Is there a connection pooler in between, and does it suit prepared statements and LISTEN?

Nothing that a pooler says of itself is relied upon: what it does to connections tells. A server process that serves two
connections which are open at the same time, or one process after the other for one connection, is what transaction
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
from outbox.operator.health.doctor import sql
from outbox.operator.health.doctor.patient import Patient
from outbox.operator.health.doctor.report import Finding, note, problem

if TYPE_CHECKING:
    from sqlalchemy import Connection

_ROUNDS = 5


class Pooling(enum.StrEnum):
    """What is between us and the server."""

    DIRECT = "direct"
    SESSION = "session"
    TRANSACTION = "transaction"


@dataclass(frozen=True, slots=True)
class Served:
    """Which server processes ran the transactions of two connections, both open; ``announced`` to the first one."""

    announced: int
    first: tuple[int, ...]
    second: tuple[int, ...]


def pooling_of(served: Served) -> Pooling:
    """Return what the processes tell."""
    first, second = set(served.first), set(served.second)
    if len(first) > 1 or len(second) > 1 or first & second:
        return Pooling.TRANSACTION
    return Pooling.DIRECT if first == {served.announced} else Pooling.SESSION


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


def pooler(patient: Patient) -> Iterator[Finding]:
    """Behind a transaction pooler, sessions have no memory."""
    other = patient.connect()
    try:
        served = _served(patient, other)
    finally:
        with suppress(Exception):  # it has served
            other.close()
    if pooling_of(served) is not Pooling.TRANSACTION:
        return
    yield from _prepared(patient)
    if patient.settings.listen:
        yield note(
            "pooler.listen",
            "There is a transaction pooler in between, and listen is on: notifications never arrive; workers find that "
            "out, and poll.",
            "set listen=False (OUTBOX_LISTEN=false)",
            pooling=Pooling.TRANSACTION,
        )


def _served(patient: Patient, other: Connection) -> Served:
    pids: tuple[list[int], list[int]] = ([], [])
    for _ in range(_ROUNDS):
        for each, seen in zip((patient.connection, other), pids, strict=True):
            with patient.reading(each):
                (((pid,),),) = execute(each, sql.backend_pid())
                seen.append(pid)
    return Served(driver_of(patient.connection).pgconn.backend_pid, tuple(pids[0]), tuple(pids[1]))


def _prepared(patient: Patient) -> Iterator[Finding]:
    from psycopg import capabilities, pq  # noqa: PLC0415 - as of the store

    can_close = capabilities.has_send_close_prepared()
    tracked = _tracks(patient)
    trouble = trouble_with_prepared(patient.prepare_threshold, tracked=tracked, can_close=can_close)
    if trouble is None:
        return
    finding = problem if patient.own_engine else note
    unless = "" if patient.own_engine else " (unless your engine says prepare_threshold=None)"
    yield finding(
        "pooler.prepared_statements",
        f"There is a transaction pooler in between, psycopg prepares statements{unless}, {trouble}.",
        'create_engine(url, connect_args={"prepare_threshold": None})\nor PgBouncer 1.22 or newer with '
        "max_prepared_statements > 0, and libpq 17 or newer (psycopg[binary])",
        pooling=Pooling.TRANSACTION, prepare_threshold=patient.prepare_threshold, tracked=tracked,
        libpq=pq.version(),
    )  # fmt: skip


def _tracks(patient: Patient) -> bool:
    """Tell whether the pooler manages prepared statements: then it gives them names of its own on the server.

    One transaction stays on one server process, so nothing is left behind on it for others.
    """
    from psycopg import pq  # noqa: PLC0415

    name = f"outbox_doctor_{uuid4().hex}"
    with patient.reading() as connection:
        result = driver_of(connection).pgconn.prepare(name.encode(), b"SELECT 1")
        if result.status != pq.ExecStatus.COMMAND_OK:
            return False
        (((passed_on,),),) = execute(connection, sql.prepared_statement(name))
        if passed_on:
            execute(connection, sql.deallocate(name))
    return not passed_on
