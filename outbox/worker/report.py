"""Report: a worker tells every few seconds that it is there and how it fares, and one of them once a minute how things
stand.

The console and the doctor read it; no work depends on it.

What a worker reports of itself, and the goodbye that it leaves.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import UUID

from sqlalchemy import make_url
from sqlalchemy.exc import DBAPIError

from outbox.database.execute import execute, is_lost
from outbox.errors import SchemaError
from outbox.message.model import Counts, uuid7
from outbox.operator.health.stats import as_sample, stats
from outbox.text import database_address, storable, summary_of
from outbox.worker import sql
from outbox.worker.connections import OwnRunner
from outbox.worker.duty import Duty

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

    from outbox.app import Outbox
    from outbox.settings import Settings

#: How things stand, as JSON can hold it; gets a connection that is in no transaction.
Look = Callable[["Connection"], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Facts:
    """What a worker tells of itself.

    ``id`` is made at its start. ``handlers`` are what is registered: each has ``kind`` (consumer, checker,
    compensation, reconciliation), ``topic``, ``group``, ``name`` of the function, and ``options``. ``duties`` are by
    name: ``last_success``, ``last_error`` (its first line) and ``failures`` in a row. Texts are `storable`.
    """

    id: UUID
    name: str
    version: str
    roles: Sequence[str]
    handlers: Sequence[Mapping[str, Any]]
    duties: Mapping[str, Mapping[str, Any]]


def report_once(connection: Connection, settings: Settings, facts: Facts, look: Look) -> Counts:
    """Write that the worker is there; and, if nobody has done it this minute, how things stand by ``look``.

    Each in short transactions of its own, and a minute is looked at by one worker only. Returns ``taken`` rows, of them
    ``done`` samples. ``connection`` must not be in a transaction.
    """
    schema = settings.schema
    with connection.begin():
        _, ((missing,),) = execute(connection, sql.beat(schema, _values(facts)), sql.sample_missing(schema))
        claimed = execute(connection, sql.claim_sample(schema))[0] if missing else []
    if not claimed:
        return Counts(taken=1)
    told = look(connection)
    with connection.begin():
        execute(connection, sql.write_sample(schema, claimed[0][0], _json(told)))
    return Counts(taken=2, done=1)


def leave(connection: Connection, settings: Settings, worker_id: UUID) -> None:
    """Forget a worker that ends in order."""
    with connection.begin():
        execute(connection, sql.leave(settings.schema, worker_id))


def _values(facts: Facts) -> sql.WorkerValues:
    return sql.WorkerValues(
        facts.id,
        facts.name,
        facts.version,
        _json(list(facts.roles)),
        _json(list(facts.handlers)),
        _json(dict(facts.duties)),
    )


def _json(value: object) -> str:
    return json.dumps(value, default=str, separators=(",", ":"))


logger = logging.getLogger("outbox.worker")

#: How long (seconds) a statement of a sample may run: who samples holds up prune and probes.
_SAMPLE_SECONDS = 2.0
#: How long (seconds) the end of a worker waits for its goodbye.
_GOODBYE_SECONDS = 2.0


class Reporter:
    """Reports one worker into the database of its `Outbox`; its calls are the passes of a duty.

    ``duties`` are all that it does, also those that are added later.
    """

    def __init__(self, outbox: Outbox, roles: Collection[str], duties: Sequence[Duty]) -> None:
        self._outbox = outbox
        self._settings = outbox.settings
        self._roles = sorted(roles)
        self._duties = duties
        self._id = uuid7()
        self._name = storable(f"{socket.gethostname()}:{os.getpid()}")
        self._sampling_failed = False

    def __call__(self, connection: Connection, _: Connection) -> Counts:
        """Report once; what a report says is made anew each time, since anything may be declared at any time."""
        from outbox import __version__  # noqa: PLC0415 - the package itself

        facts = Facts(
            self._id,
            self._name,
            __version__,
            self._roles,
            handlers_of(self._outbox),
            {duty.name: health_of(duty) for duty in self._duties},
        )
        return report_once(connection, self._settings, facts, self._sample)

    def goodbye(self, runner: OwnRunner) -> None:
        """Forget the worker, on a connection that is open already; whatever hinders it, the worker ends in time."""

        def forget(connection: Connection, _: Connection) -> Counts:
            leave(connection, self._settings, self._id)
            return Counts()

        thread = threading.Thread(target=runner.last, args=(forget,), name="outbox-worker-goodbye", daemon=True)
        thread.start()
        thread.join(_GOODBYE_SECONDS)

    def _sample(self, connection: Connection) -> dict[str, Any]:
        """Return how things stand; or why that can't be told, which is one line in the log however often it is so."""
        from outbox.database import migration  # noqa: PLC0415 - Alembic is slow to import

        try:
            # Of all tables that are there, whichever of them this worker serves: one sample is for all workers.
            revisions = migration.current(connection, self._settings.schema)
            parts = [part for part in migration.PARTS if revisions[part]]
            told = as_sample(stats(connection, self._settings, parts, seconds=_SAMPLE_SECONDS))
        except (DBAPIError, SchemaError) as error:
            if is_lost(connection):
                raise
            why = summary_of(error).partition("\n")[0]
            if not self._sampling_failed:
                logger.warning(
                    "no sample of the statistics could be taken: %s", why, extra={"event": "report.sample_failed"}
                )
            self._sampling_failed = True
            return {"error": why}
        self._sampling_failed = False
        return told


def health_of(duty: Duty) -> dict[str, Any]:
    """Return how a duty fares, as JSON can hold it."""
    health = duty.health
    return {
        "last_success": None if health.last_success is None else health.last_success.isoformat(),
        "last_error": None if health.last_error is None else storable(health.last_error).partition("\n")[0],
        "failures": health.failures,
    }


def handlers_of(outbox: Outbox) -> list[dict[str, Any]]:
    """Return what is registered with an `Outbox`, as JSON can hold it."""
    consumers = [
        _handler(
            "consumer",
            each.topic,
            each.handler,
            group=each.group,
            ordered=each.ordered,
            batch=each.batch,
            threads=each.threads,
            retries=len(each.retry_delays),
            on_exhausted=each.on_exhausted,
            source=None if each.source is None else _place(each.source),
        )
        for each in list(outbox.subscriptions.values())
    ]
    checkers = [
        _handler(
            "checker",
            each.topic,
            each.function,
            immunity=each.immunity,
            interval=each.interval,
            max_checks=each.max_checks,
            timeout=each.timeout,
        )
        for each in list(outbox.checkers.values())
    ]
    compensations = [
        _handler("compensation", each.topic, each.function, consumers=[_place(bind) for bind in each.consumers])
        for each in list(outbox.compensations.values())
    ]
    reconciliations = [
        {
            "kind": "reconciliation",
            "topic": "",
            "group": None,
            "name": each.name,
            "options": {"cron": each.fields, "every": each.seconds, "timezone": each.timezone},
        }
        for each in list(outbox.reconciliations.values())
    ]
    return [*consumers, *checkers, *compensations, *reconciliations]


def _place(bind: Engine | AsyncEngine | str) -> str:
    return storable(database_address(make_url(bind) if isinstance(bind, str) else bind.url))


def _handler(
    kind: str, topic: str, function: Callable[..., Any], group: str | None = None, **options: Any
) -> dict[str, Any]:
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    module = getattr(function, "__module__", None) or type(function).__module__
    return {"kind": kind, "topic": topic, "group": group, "name": storable(f"{module}.{name}"), "options": options}
