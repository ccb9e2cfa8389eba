"""The workers: each writes a row every few seconds (outbox/worker/report.py), and deletes it at its end."""

from __future__ import annotations

import datetime as dt
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal
from uuid import UUID

from outbox.consumer.meter import percentile
from outbox.database.execute import execute
from outbox.operator.health.sql import WORKERS

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from outbox.database.execute import Row
    from outbox.operator.databases import Database


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """A worker as it reported last; ``alive`` if that was within three of its reports. ``duties`` by name: health."""

    database: str
    id: UUID
    name: str
    version: str
    roles: list[str]
    started_at: dt.datetime
    seen_at: dt.datetime
    alive: bool
    duties: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ProducerRow:
    """A process that sends, as it reported last: ``name`` is its host and process id.

    ``active`` if it has sent within `outbox.database.sql.SENDS_LATELY` seconds; ``instances`` is how many active
    processes its producer group has.
    """

    database: str
    id: UUID
    name: str
    producer_group: str
    version: str
    started_at: dt.datetime
    seen_at: dt.datetime
    active: bool
    instances: int


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """What one worker reported last, ``seconds`` ago; ``handlers`` are as `outbox.worker.report` writes them."""

    row: WorkerRow
    handlers: list[dict[str, Any]]
    seconds: float


#: Whether a group goes on: ``open`` is one that its breaker has stopped, ``half_open`` one that tries a message.
GroupState = Literal["running", "paused", "open", "half_open"]


@dataclass(frozen=True, slots=True)
class HandlerRow:
    """Hold a function registered for a topic on workers; ``kind``: consumer, checker, compensation, reconciliation.

    ``workers`` are the names of those that have it, ``numbers`` the work of a consumer's handler there. ``state`` tells
    of it whether its group goes on.
    """

    database: str
    kind: str
    topic: str
    name: str
    group: str | None
    options: dict[str, Any]
    workers: list[str]
    numbers: HandlerNumbers | None = None
    state: GroupState | None = None


@dataclass(frozen=True, slots=True)
class HandlerNumbers:
    """Count the recent work of a group's handler on the living workers, as they reported it last.

    ``rate``: messages a second that were consumed. ``p50`` and ``p95``: within how many seconds half of its calls
    ended, and nearly all (95 %); None if there were none. ``failures``: attempts that failed. All of that in the last
    ``seconds``: five minutes, or since the workers started. ``in_flight``: messages that it had just then. ``lag``:
    messages that the group had not come to when a worker looked last, the oldest of them for ``oldest_lag`` seconds;
    None where none has looked.
    """

    seconds: float
    rate: float
    p50: float | None
    p95: float | None
    failures: int
    in_flight: int
    lag: int | None
    oldest_lag: float | None


def workers_in(connection: Connection, database: Database) -> list[WorkerReport]:
    """Return the reports of the workers of a database."""
    return reports(database.name, execute(connection, WORKERS(database.schema))[0])


def reports(database: str, rows: Iterable[Row]) -> list[WorkerReport]:
    """Return the rows of `sql.WORKERS`, which a database has."""
    return [
        WorkerReport(handlers=row.pop("handlers"), seconds=row.pop("seconds"), row=WorkerRow(database, **row))
        for row in WORKERS.named(rows)
    ]


def merged(reports: Iterable[WorkerReport]) -> list[HandlerRow]:
    """Return each handler once, with the living workers that have it; one that differs between them more than once."""
    found: dict[str, HandlerRow] = {}
    work: defaultdict[str, list[tuple[WorkerReport, Mapping[str, Any]]]] = defaultdict(list)
    for worker in reports:
        for handler in worker.handlers if worker.row.alive else ():
            kind, topic, name, group = (handler.get(key) for key in ("kind", "topic", "name", "group"))
            options, identity = handler.get("options", {}), json.dumps(handler, sort_keys=True)
            row = HandlerRow(worker.row.database, str(kind), str(topic), str(name), group, options, [])
            found.setdefault(identity, row).workers.append(worker.row.name)
            if kind == "consumer":
                work[identity] += [(worker, each) for each in _work_of(worker, topic, group)]
    rows = [replace(row, numbers=_numbers(work[identity])) for identity, row in found.items()]
    return sorted(rows, key=lambda row: (row.kind, row.topic, row.group or "", row.name))


def _work_of(worker: WorkerReport, topic: object, group: object) -> list[Mapping[str, Any]]:
    """Return what one worker reports of a handler, in whichever of its duties; workers of before report nothing."""
    reported = (duty.get("handler") for duty in worker.row.duties.values())
    return [each for each in reported if each and (each["topic"], each["group"]) == (topic, group)]


def _numbers(work: Sequence[tuple[WorkerReport, Mapping[str, Any]]]) -> HandlerNumbers | None:
    """Add up what workers report of a handler; None where none does."""
    if not work:
        return None
    calls: Counter[str] = Counter()
    for _, each in work:
        calls.update(each["calls"])
    measured = [(worker, each) for worker, each in work if each["looked"] is not None]
    lag, oldest = None, None
    if measured:
        worker, each = min(measured, key=lambda one: one[0].seconds + one[1]["looked"])
        lag, since = each["lag"], each["waiting_since"]
        if since is not None:
            # By the clock of the workers' database, as far as the producer's goes by the same time.
            now = worker.row.seen_at + dt.timedelta(seconds=worker.seconds)
            oldest = max((now - dt.datetime.fromisoformat(since)).total_seconds(), 0.0)
    return HandlerNumbers(
        seconds=max(each["seconds"] for _, each in work),
        rate=sum(each["done"] / max(each["seconds"], 1.0) for _, each in work),
        p50=percentile(calls, 0.5),
        p95=percentile(calls, 0.95),
        failures=sum(each["failed"] for _, each in work),
        in_flight=sum(each["in_flight"] for _, each in work),
        lag=lag,
        oldest_lag=oldest,
    )


def source_of(
    database: str, topic: str, group: str, producers: Mapping[str, str | None], reports: Iterable[WorkerReport]
) -> str | None:
    """Return from which producer's database a group of another one reads a topic, as far as the databases show it.

    ``producers`` are those that have the topic, with their addresses; ``reports`` are those of the group's database.
    Where several could be it, its living workers tell.
    """
    if database in producers or len(producers) < 2:
        return database if database in producers else next(iter(producers), None)
    reported = {
        handler.options.get("source")
        for handler in merged(reports)
        if (handler.kind, handler.topic, handler.group) == ("consumer", topic, group)
    }
    fitting = [name for name, address in producers.items() if address in reported]
    return fitting[0] if len(fitting) == 1 else None


def alive(reports: Iterable[WorkerReport]) -> bool:
    """Return whether any worker is alive."""
    return any(worker.row.alive for worker in reports)


def done(reports: Iterable[WorkerReport], duty: str) -> bool:
    """Return whether any living worker has this duty."""
    names = [name for worker in reports if worker.row.alive for name in worker.row.duties]
    return any(name == duty or name.startswith(f"{duty} #") for name in names)
