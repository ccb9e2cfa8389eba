"""The report of a worker: every few seconds that it lives and how it fares, and once a minute the statistics.

The console and the doctor read it; no work depends on it.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import UUID

from sqlalchemy import make_url
from sqlalchemy.exc import DBAPIError

from outbox.database import migration
from outbox.database.duty import COUNTED_CONSUMER, COUNTED_PRODUCER, Duty
from outbox.database.execute import Row, Statement, Template, encodings, execute, is_lost
from outbox.errors import SchemaError
from outbox.message.limits import rate_text
from outbox.message.model import Counts, uuid7
from outbox.operator.health.rules import Thresholds
from outbox.operator.health.sql import WORKERS
from outbox.operator.health.stats import as_sample, stats
from outbox.operator.health.workers import held_locks, reports, work_by_group
from outbox.telemetry.events import LockHeld, SampleFailed, StatisticsRead
from outbox.telemetry.hooks import emit, listeners, middlewares_here
from outbox.text import database_address, process_name, storable, summary_of
from outbox.worker.connections import OwnRunner

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

    from outbox.app import Outbox
    from outbox.settings import Settings
    from outbox.worker.duty import RunningDuty

#: How long (seconds) a statement of a sample may run: a sample holds up prune and pings.
_SAMPLE_SECONDS = 2.0
#: How long (seconds) the end of a worker waits until its row is deleted.
_GOODBYE_SECONDS = 2.0

# What hasn't changed is left as it is: it may be long, and stored apart.
#: Write that a worker lives and how it fares: the columns by name; ``roles``, ``handlers``, ``duties`` as JSON.
_BEAT = Template("""
INSERT INTO {s}.worker AS w (id, name, version, roles, handlers, duties)
VALUES (%(id)s, %(name)s, %(version)s, %(roles)s::jsonb, %(handlers)s::jsonb, %(duties)s::jsonb)
ON CONFLICT (id) DO UPDATE
   SET seen_at = clock_timestamp(), duties = excluded.duties,
       handlers = CASE WHEN w.handlers = excluded.handlers THEN w.handlers ELSE excluded.handlers END
""")

# The worker that writes the row of a minute takes its sample. The row is empty until then, and for good if that worker
# dies over it.
#: Take this minute's sample. Rows: ``(minute as text,)``, none if another worker was faster.
_TAKE_SAMPLE = Template("""
INSERT INTO {s}.stats_sample (sampled_at, stats) VALUES (date_trunc('minute', statement_timestamp()), '{}')
ON CONFLICT (sampled_at) DO NOTHING
RETURNING sampled_at::text
""")

#: Write the statistics, as JSON, of a minute.
_WRITE_SAMPLE = Template("UPDATE {s}.stats_sample SET stats = %s::jsonb WHERE sampled_at = %s::timestamptz")

# One that a clock wrote that was ahead isn't newer for as long.
#: The newest sample. Rows: ``(statistics as JSON text, age in s)``.
_NEWEST_SAMPLE = Template("""
SELECT stats::text, extract(epoch FROM clock_timestamp() - sampled_at)::float8
  FROM {s}.stats_sample WHERE stats ? 'topics' AND sampled_at < clock_timestamp() + interval '2 minutes'
 ORDER BY sampled_at DESC LIMIT 1
""")

#: Delete the row of a worker that ends in order.
_LEAVE = Template("DELETE FROM {s}.worker WHERE id = %s")


#: The name of a reconciliation that a worker runs, and the topics and groups that it compares.
ReconciledPairs = tuple[str, Sequence[tuple[str, str]]]


@dataclass(frozen=True, slots=True)
class Facts:
    """What a worker reports of itself.

    ``id`` is made at its start. ``handlers`` are the registered functions, or the clients of a server of RocketMQ's:
    each has ``kind`` (consumer, checker, compensation, reconciliation, client), ``topic``, ``group``, ``name`` of the
    function, and ``options``. ``duties`` are by name: ``last_success``, ``last_error`` (its first line), ``failures``
    in a row, further facts. Texts are `storable`.
    """

    id: UUID
    name: str
    version: str
    roles: Sequence[str]
    handlers: Sequence[Mapping[str, Any]]
    duties: Mapping[str, Mapping[str, Any]]


def beat(connection: Connection, settings: Settings, facts: Facts, *more: Statement) -> list[list[Row]]:
    """Write that a worker, or a server that stands beside them, lives; return the rows of what is executed with it."""
    values = asdict(facts)
    values |= {name: _json(connection, values[name]) for name in ("roles", "handlers", "duties")}
    return execute(connection, _BEAT(settings.schema, **values), *more)[1:]


def report_once(
    connection: Connection, settings: Settings, facts: Facts, sample: Callable[[Connection], Mapping[str, Any]]
) -> Counts:
    """Write that the worker lives; and the statistics, unless another worker has written them for this minute.

    Each in short transactions of its own, and only one worker samples a minute. Returns ``taken`` rows, of them
    ``done`` samples. ``connection`` must not be in a transaction. So ``sample`` gets it; it returns what JSON holds.
    """
    schema = settings.schema
    with connection.begin():
        (taken,) = beat(connection, settings, facts, _TAKE_SAMPLE(schema))
    if not taken:
        return Counts(taken=1)
    statistics = sample(connection)
    with connection.begin():
        execute(connection, _WRITE_SAMPLE(schema, _json(connection, statistics), taken[0][0]))
    return Counts(taken=2, done=1)


def leave(connection: Connection, settings: Settings, worker_id: UUID) -> None:
    """Delete the row of a worker that ends in order."""
    with connection.begin():
        execute(connection, _LEAVE(settings.schema, worker_id))


def _json(connection: Connection, value: object) -> str:
    """Return a value as JSON; characters beyond ASCII as references where not every character can be stored."""
    narrow = bool(encodings(connection))
    text = json.dumps(value, default=str, separators=(",", ":"), ensure_ascii=not narrow)
    return text.encode("ascii", "xmlcharrefreplace").decode() if narrow else text


class Reporter:
    """Reports one worker into the database of its `Outbox`; its calls are the passes of a duty.

    ``duties`` are all that it does, also those that are added later; ``reconciled`` what its reconciliations compare.
    """

    def __init__(
        self,
        outbox: Outbox,
        roles: Collection[str],
        duties: Sequence[RunningDuty],
        reconciled: Collection[ReconciledPairs],
    ) -> None:
        self._outbox = outbox
        self._reconciled = reconciled
        self._settings = outbox.settings
        self._roles = sorted(roles)
        self._duties = duties
        self._id = uuid7()
        self._name = process_name()
        self._sampling_failed = False

    def __call__(self, connection: Connection, _: Connection) -> Counts:
        """Report once; the report is made anew each time, since a handler may be declared at any time."""
        from outbox import __version__  # noqa: PLC0415 - the package itself

        duties = {duty.name: health_of(duty) for duty in self._duties}
        facts = Facts(
            self._id, self._name, __version__, self._roles, handlers_of(self._outbox, self._reconciled), duties
        )
        counts = report_once(connection, self._settings, facts, self._sample)
        if listeners.hooks or middlewares_here.get():
            self._tell_statistics(connection)
        return counts

    def _tell_statistics(self, connection: Connection) -> None:
        with connection.begin():
            (newest,) = execute(connection, _NEWEST_SAMPLE(self._settings.schema))
        for text, age in newest:
            emit(StatisticsRead(age=age, statistics=json.loads(text)))

    def goodbye(self, runner: OwnRunner) -> None:
        """Delete the worker's row, on a connection that is open; whatever hinders it, the worker ends in time."""

        def forget(connection: Connection, _: Connection) -> Counts:
            leave(connection, self._settings, self._id)
            return Counts()

        thread = threading.Thread(target=runner.last, args=(forget,), name="outbox-worker-goodbye", daemon=True)
        thread.start()
        thread.join(_GOODBYE_SECONDS)

    def _sample(self, connection: Connection) -> dict[str, Any]:
        """Return the statistics; or why there are none, which is one line in the log however often it happens."""
        try:
            # Of all tables that are there, whichever of them this worker serves: one sample is for all workers.
            revisions = migration.current(connection, self._settings.schema)
            parts = [part for part in migration.PARTS if revisions[part]]
            now = stats(connection, self._settings, parts, seconds=_SAMPLE_SECONDS)
            schema = self._settings.schema
            with connection.begin():
                newest, reported = execute(connection, _NEWEST_SAMPLE(schema), WORKERS(schema))
            sample = as_sample(now, json.loads(newest[0][0]) if newest else None)
            sample["work"] = work_by_group(reports("", reported))
            self._warn_of_locks(connection, parts)
        except (DBAPIError, SchemaError) as error:
            if is_lost(connection):
                raise
            why = summary_of(error).partition("\n")[0]
            emit(SampleFailed(reason=why, repeated=self._sampling_failed, error=error))
            self._sampling_failed = True
            return {"error": why}
        self._sampling_failed = False
        return sample

    def _warn_of_locks(self, connection: Connection, parts: Collection[str]) -> None:
        """Name the session that keeps a lock from all workers for long; once a minute, by the worker that samples."""
        with connection.begin():
            read = partial(execute, connection)
            for held in held_locks(read, self._settings.schema, parts, Thresholds().lock):
                # Named, for the types to say when the two part.
                emit(
                    LockHeld(
                        lock=held.lock,
                        session=held.session,
                        pid=held.pid,
                        age=held.age,
                        state=held.state,
                        user=held.user,
                        application_name=held.application_name,
                        client=held.client,
                    )
                )


def health_of(duty: RunningDuty) -> dict[str, Any]:
    """Return how a duty fares, as JSON can hold it."""
    health = duty.health
    return {
        "last_success": None if health.last_success is None else health.last_success.isoformat(),
        "last_error": None if health.last_error is None else storable(health.last_error).partition("\n")[0],
        "failures": health.failures,
        **duty.task.facts(),
    }


def handlers_of(outbox: Outbox, reconciled: Collection[ReconciledPairs] = ()) -> list[dict[str, Any]]:
    """Return the functions registered with an `Outbox`, as JSON can hold them.

    A reconciliation that this worker runs also has its ``pairs``: one for each database that its groups consume from.
    """
    handlers: list[dict[str, Any]] = []

    def add(kind: str, topic: str, name: str, group: str | None = None, **options: Any) -> None:
        handlers.append({"kind": kind, "topic": topic, "group": group, "name": name, "options": options})

    for each in list(outbox.subscriptions.values()):
        many = ("batch", "threads") if each.transactional else ("transactional", "concurrency", "timeout_seconds")
        options = _options(each, "ordered", *many, "on_exhausted")
        source = ", ".join(_address(bind) for bind in each.sources if bind is not None) or None
        options |= {"retries": len(each.retry_delays), "source": source}
        # Only what it has: rows of releases that know no such filter are the same.
        taken = {"tags": each.tags, "keys": each.keys, "headers": each.headers}
        options |= {name: [storable(text) for text in texts] for name, texts in taken.items() if texts is not None}
        if each.rate is not None:
            options["rate"] = rate_text(each.rate)
        if each.breaker is not None:
            options["breaker"] = str(each.breaker)
        add("consumer", each.topic, storable(each.name), each.group, **options)
    for checker in list(outbox.checkers.values()):
        options = _options(checker, "immunity", "interval", "max_checks", "timeout")
        add("checker", checker.topic, storable(checker.name), **options)
    for compensation in list(outbox.compensations.values()):
        consumers = [_address(bind) for bind in compensation.consumers]
        options = {"consumers": consumers, **_options(compensation, "when", "after", "timeout")}
        add("compensation", compensation.topic, storable(compensation.name), **options)
    for schedule in list(outbox.schedules.values()):
        add("schedule", schedule.topic, schedule.schedule, times=str(schedule.recurrence), missed=schedule.missed)
    for intake in list(outbox.intakes):
        add("intake", intake.topic, intake.source.name)
    for declared in list(outbox.reconciliations.values()):
        times = declared.recurrence
        options = {"cron": times and times.fields, "every": declared.seconds, "timezone": declared.timezone}
        if declared.fleet is not None:
            options["fleet"] = storable(str(declared.fleet))
        if declared.follows is not False:
            options["follows"] = declared.pass_every
        for pairs in [pairs for name, pairs in reconciled if name == declared.name] or [()]:
            add("reconciliation", "", declared.name, **options, pairs=pairs)
    return handlers


def _options(declared: object, *names: str) -> dict[str, Any]:
    return {name: getattr(declared, name) for name in names}


def _address(bind: Engine | AsyncEngine | str) -> str:
    return storable(database_address(make_url(bind) if isinstance(bind, str) else bind.url))


DUTIES = (
    # Each worker plans it, last: it reports all of its duties.
    Duty(
        "report",
        "Tells that the worker lives and how it fares, and once a minute the statistics.",
        f"""
        producer: worker
        {COUNTED_PRODUCER}
        SELECT INSERT UPDATE DELETE ON worker
        SELECT INSERT UPDATE ON stats_sample
        consumer: consumer
        {COUNTED_CONSUMER}
        SELECT INSERT UPDATE DELETE ON worker
        SELECT INSERT UPDATE ON stats_sample
        SELECT ON group_control
        """,
    ),
)
