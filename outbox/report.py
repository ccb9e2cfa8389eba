"""Report: a worker tells every few seconds that it is there and how it fares, and one of them once a minute how things
stand.

The console and the doctor read it; no work depends on it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import UUID

from outbox.model import Counts
from outbox.store import report as store
from outbox.store.execute import execute

if TYPE_CHECKING:
    from sqlalchemy import URL, Connection

    from outbox.settings import Settings

#: Seconds between two reports of a worker.
EVERY = 10.0
#: A worker that wasn't seen for so many seconds is taken for dead.
ALIVE = 3 * EVERY

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
        _, ((missing,),) = execute(connection, store.beat(schema, _values(facts)), store.sample_missing(schema))
        claimed = execute(connection, store.claim_sample(schema))[0] if missing else []
    if not claimed:
        return Counts(taken=1)
    told = look(connection)
    with connection.begin():
        execute(connection, store.write_sample(schema, claimed[0][0], _json(told)))
    return Counts(taken=2, done=1)


def leave(connection: Connection, settings: Settings, worker_id: UUID) -> None:
    """Forget a worker that ends in order."""
    with connection.begin():
        execute(connection, store.leave(settings.schema, worker_id))


def place(url: URL) -> str:
    """Return where a database is, as it may be told to everybody."""
    return f"{url.host or 'local'}:{url.port or 5432}/{url.database}"


def _values(facts: Facts) -> store.WorkerValues:
    return store.WorkerValues(
        facts.id,
        facts.name,
        facts.version,
        _json(list(facts.roles)),
        _json(list(facts.handlers)),
        _json(dict(facts.duties)),
    )


def _json(value: object) -> str:
    return json.dumps(value, default=str, separators=(",", ":"))
