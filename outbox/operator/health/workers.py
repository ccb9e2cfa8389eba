"""What living workers report of themselves, and which sessions hold the locks of dispatch and of groups' queues."""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal
from uuid import UUID

from sqlalchemy.exc import DBAPIError

from outbox.acts.changes import Actor, checked_actor, record_of
from outbox.acts.whole_acts import END
from outbox.consumer.meter import percentile
from outbox.database.execute import Row, Statement, Template, execute, lock_key, sqlstate
from outbox.database.sql import GroupQueue
from outbox.dispatch.dispatch_pass import dispatch_lock
from outbox.errors import ActRefused, DatabaseUnreached
from outbox.operator.databases import OverDatabases
from outbox.operator.health import sql
from outbox.operator.health.sql import WORKERS
from outbox.text import MASK, topic_of

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from outbox.operator.databases import Database


#: The kinds of what consumes for a group: a function of a worker, and a client of a server.
CONSUMING = frozenset({"consumer", "client"})
#: The role of a server of RocketMQ's clients, which reports as workers do.
SERVER_ROLE = "rocketmq"


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """A worker as it reported last; ``alive`` if that was within three of its reports. ``duties`` by name: health."""

    columns: ClassVar[str] = "id name version alive started_at seen_at roles"
    database: str
    id: UUID
    name: str
    version: str
    roles: list[str]
    started_at: dt.datetime
    seen_at: dt.datetime
    alive: bool
    duties: dict[str, Any]

    @property
    def is_worker(self) -> bool:
        """Does it do duties of a worker? A server of RocketMQ's clients, which reports too, does none in its place."""
        return self.roles != [SERVER_ROLE]


@dataclass(frozen=True, slots=True)
class ProducerRow:
    """A process that sends, as it reported last: ``name`` is its host and process id.

    ``active`` if it has sent within `outbox.database.sql.SENDS_LATELY` seconds; ``instances`` is how many active
    processes its producer group has.
    """

    columns: ClassVar[str] = "producer_group instances> name id version active started_at seen_at"
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

    @property
    def works(self) -> bool:
        """Is it a worker that is alive?"""
        return self.row.alive and self.row.is_worker


#: Whether a group goes on: ``open`` is one that its breaker has stopped, ``half_open`` one that tries a message. Of one
#: that nothing holds back, a list of groups says ``unattended`` if no living worker consumes for it.
GroupState = Literal["running", "paused", "open", "half_open", "unattended"]


@dataclass(frozen=True, slots=True)
class HandlerRow:
    """Hold a function registered for a topic on workers; ``kind``: consumer, checker, compensation, reconciliation.

    ``workers`` are the names of those that have it, ``numbers`` the work of a consumer's handler there. ``state`` tells
    of it whether its group goes on. A ``client`` of RocketMQ's is one too: its ``workers`` are its servers.
    """

    columns: ClassVar[str] = (
        "kind topic group name state rate> p50> p95> failures> in_flight> lag> oldest>=oldest_lag workers"
    )
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


def work_by_group(reports: Iterable[WorkerReport]) -> dict[str, dict[str, dict[str, Any]]]:
    """Return what the handlers of each group did in the last minute on the living workers, by topic and group."""
    found: defaultdict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for duty in (duty for worker in reports if worker.row.alive for duty in worker.row.duties.values()):
        if (each := duty.get("handler")) and (minute := each.get("minute")):
            pace = 60 / max(minute["seconds"], 60.0)
            counts = {name: minute[name] * pace for name in minute.keys() - {"seconds", "calls"}}
            found[each["topic"], each["group"]].append({**counts, "calls": minute["calls"]})
    work: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
    for (topic, group), parts in found.items():
        work[topic][group] = joined(parts) or {}
    return work


def joined(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Add up what several workers did in a minute: calls by bucket, since percentiles can't be; None without any."""
    total: dict[str, Any] | None = None
    for each in parts:
        total = total or {"calls": Counter()}
        total |= {name: round(total.get(name, 0.0) + each[name], 1) for name in each.keys() - {"calls"}}
        total["calls"].update(each["calls"])
    return total


def alive(reports: Iterable[WorkerReport]) -> bool:
    """Return whether any worker is alive."""
    return any(worker.works for worker in reports)


def done(reports: Iterable[WorkerReport], duty: str) -> bool:
    """Return whether any living worker has this duty."""
    names = [name for worker in reports if worker.row.alive for name in worker.row.duties]
    return any(name == duty or name.startswith(f"{duty} ") for name in names)


def consuming(reports: Iterable[WorkerReport]) -> Counter[str]:
    """Return by ``TOPIC of GROUP`` how many living workers, and servers of RocketMQ's clients, consume for a group."""
    prefix, found = "consume ", Counter[str]()
    for duties in (worker.row.duties for worker in reports if worker.row.alive):
        # One with several lanes has a duty for each, which are numbered.
        found.update({name.partition(" #")[0].removeprefix(prefix) for name in duties if name.startswith(prefix)})
    return found


#: The name of the lock that a session holds while it appends messages.
DISPATCH = "dispatch"
_NO_PRIVILEGE = "42501"
#: The keys of all advisory locks of this database that are held. Rows: ``(key,)``.
_HELD = Template("""
SELECT DISTINCT (l.classid::bigint << 32) | l.objid::bigint
  FROM pg_locks l JOIN pg_database d ON d.oid = l.database AND d.datname = current_database()
 WHERE l.locktype = 'advisory' AND l.objsubid = 1 AND l.granted
""")


@dataclass(frozen=True, slots=True)
class HeldLock:
    """A lock that one transaction, ``age`` seconds old, keeps from all other workers; or one session, of that age.

    ``session`` is PostgreSQL's name of the session, of its start and its ``pid`` (``%c`` in its log): another session
    that is given the same pid has another name. It is the name of a prepared transaction, which has no session (pid 0).
    """

    lock: str
    session: str
    pid: int
    age: float
    state: str
    user: str
    application_name: str
    client: str


@dataclass(frozen=True, slots=True)
class LockRow(HeldLock):
    """A held lock of one of several databases."""

    columns: ClassVar[str] = "session lock age state user application=application_name client"
    database: str


def held_locks(
    read: Callable[[Statement], list[list[Row]]], schema: str, parts: Collection[str], seconds: float
) -> list[HeldLock]:
    """Return which sessions have held locks of ours for longer than ``seconds``, or hold them outside a transaction."""
    if not (names := _names(read, schema, parts)):
        return []
    (rows,) = read(sql.LOCK_HOLDERS(schema, keys=list(names), lock=seconds))
    return [HeldLock(names[key], *facts) for key, *facts in rows]


def _names(read: Callable[[Statement], list[list[Row]]], schema: str, parts: Collection[str]) -> dict[int, str]:
    """Return what those of our locks that are held now are called, by their keys."""
    held = {key for (key,) in read(_HELD(schema))[0]}
    names = {lock_key("segments", schema, part): f"the {part}'s segments" for part in parts}
    if "producer" in parts:
        names[dispatch_lock(schema)] = DISPATCH
    # A key is a hash: whose it is can only be told by those of all queues, of which there may be very many.
    if "consumer" in parts and held - names.keys():
        for group, topic, queue, _ in read(sql.OFFSETS(schema))[0]:
            of_group = f"topic {topic!r} in group {group!r}"
            names[lock_key("group", schema, group, topic)] = f"the start of {of_group}"
            names[lock_key("rate", group, topic_of(topic), schema)] = f"the rate of {of_group}"
            names[GroupQueue(schema, group, topic, queue).lock] = f"queue {queue} of {of_group}"
    return {key: names[key] for key in held & names.keys()}


class LockViews(OverDatabases):
    """Show the held locks to an operator, and end a holder."""

    def locks(self, database: str | None = None) -> list[LockRow]:
        """Return which of our locks are held at this moment, and by which sessions, longest first.

        A session's user, client and application are an address.

        Only sessions that the role of this connection may see: its own role's, or with pg_monitor all.

        Raises:
            UnknownDatabase: no database of that name.
        """
        rows = []
        for each in self.databases.having(None, database):
            with each.read_only() as connection:
                held = held_locks(partial(execute, connection), each.schema, each.parts, 0.0)
            rows += [LockRow(**dataclasses.asdict(lock), database=each.name) for lock in held]
        if not self.addresses:
            rows = [dataclasses.replace(row, user=MASK, client=MASK, application_name=MASK) for row in rows]
        return sorted(rows, key=lambda row: -row.age)

    def lock_of(self, session: str, database: str | None = None) -> LockRow:
        """Return the lock that a session holds, in one of the databases or the one named.

        Raises:
            ActRefused: it holds none of ours, or not any more.
            DatabaseUnreached: a database can't be read in which it may.
            UnknownDatabase: no database of that name.
        """
        for row in self.locks(database):
            if row.session == session:
                return row
        if away := self.databases.away_for(database):
            raise DatabaseUnreached(away)
        raise ActRefused(_refusal(session))

    def end(self, session: str, *, by: str | Actor, why: str, database: str | None = None) -> str:
        """End the session that holds a lock of dispatch or of a group's queue; return a sentence about it.

        Its transaction rolls back, and another worker goes on. ``session`` is as in `HeldLock`.

        Raises:
            ActRefused: the session holds none of our locks, or not any more; this role may not end it; or it is a
                prepared transaction.
            UnknownDatabase: no database of that name.
            InvalidRequest: no reason, an actor without a name, or a text that the audit can't record.
        """
        actor = checked_actor(END, by, why)
        held = self.lock_of(session, database)
        chosen = self.databases[held.database]
        if not held.pid:
            raise ActRefused(
                f"{session!r} is a prepared transaction, without a session: let its owner end it, by COMMIT PREPARED "
                "or ROLLBACK PREPARED with this name"
            )
        recorded = record_of(chosen.schema, END.name, actor, why, session, dataclasses.asdict(held))
        try:
            with chosen.acting() as connection:
                keys = list(_names(partial(execute, connection), chosen.schema, chosen.parts))
                _, ended = execute(connection, recorded, sql.END_HOLDER(chosen.schema, keys=keys, session=session))
                if not any(row[0] for row in ended):
                    raise ActRefused(_refusal(session))
        except DBAPIError as error:
            if sqlstate(error) != _NO_PRIVILEGE:
                raise
            role = chosen.engine.url.username or "that role"  # a URL may leave it to the environment
            raise ActRefused(
                f"session {session}, which holds the lock of {held.lock}, can't be ended by the role of this "
                f"connection: connect as the session's role, or GRANT pg_signal_backend TO {role}"
            ) from error
        return f"session {session}, which held the lock of {held.lock}, is ended: another worker goes on"


def _refusal(session: str) -> str:
    return (
        f"session {session} can't be ended: it holds no lock of ours (any more); see which sessions do: "
        "outbox lock list"
    )
