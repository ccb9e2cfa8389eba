"""Duties: work that is done again and again in a database, each declared once by the package that does it.

Workers, grants, the doctor, `outbox.testing`, commands and docs read these rows. A new duty is a row beside its pass,
and its module in `MODULES`.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, Protocol, TypeVar, cast, get_args

from outbox.database.engines import NewRunner
from outbox.message.model import Counts

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

    from outbox.message.content import Codecs
    from outbox.settings import Settings

P = ParamSpec("P")
F = TypeVar("F")

Part = Literal["producer", "consumer"]
PARTS: tuple[Part, ...] = get_args(Part)
#: What a worker may be kept to (`outbox run --roles`).
Role = Literal[
    "dispatch", "release", "check", "prune", "consume", "retry", "reconcile", "bulk", "confirm", "schedule", "intake"
]
ROLES: tuple[Role, ...] = get_args(Role)

#: The modules whose ``DUTIES`` are all that there are, in the order in which a worker plans them.
MODULES = (
    "outbox.producer.sql",
    "outbox.producer.flow_control",
    "outbox.flow.sql",
    "outbox.dispatch.dispatch_pass",
    "outbox.check.check_pass",
    "outbox.schedule.schedule_pass",
    "outbox.relay.intake.intake",
    "outbox.relay.published",
    "outbox.delivery.confirm_pass",
    "outbox.consumer.retry",
    "outbox.reconcile.duty",
    "outbox.operator.bulk.run",
    "outbox.compensate.compensate_pass",
    "outbox.prune.prune_pass",
    "outbox.operator.databases",
    "outbox.worker.report",
)


@dataclass(frozen=True, slots=True, order=True)
class Need:
    """A privilege on a table or a sequence; on some columns only, if they are named."""

    table: str
    privilege: str
    columns: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.privilege}{self.listed} ON {self.table}"

    @property
    def listed(self) -> str:
        """The columns as SQL has them after a privilege."""
        return f" ({', '.join(self.columns)})" if self.columns else ""


@dataclass(frozen=True, slots=True)
class Rights:
    """What a duty needs in the database of a part, and which `outbox.operator.health.grants.ROLES` do it there."""

    part: Part
    granted: frozenset[str]
    needs: tuple[Need, ...]


#: To make messages of ops, to send, to decide halves, to carry out items of bulk jobs: what several duties need.
APPEND = """SELECT ON op_message
SELECT(id topic key deliver_at queue) ON half_message
SELECT INSERT ON message dispatch_cursor
SELECT INSERT UPDATE ON topic
INSERT ON audit"""
SEND = """INSERT ON half_check op_message
SELECT(id) INSERT ON half_message
USAGE ON op_sequence
SELECT(name queues) ON topic"""
DECIDE = """SELECT(id) ON half_message
SELECT UPDATE DELETE ON half_check
SELECT INSERT ON op_message
USAGE ON op_sequence"""
BULK = """SELECT UPDATE ON bulk_job bulk_item
INSERT ON audit"""
#: What the statistics of a part are counted from.
COUNTED_PRODUCER = """SELECT ON half_message half_check topic_total op_message message scheduled_message
SELECT ON dispatch_cursor topic delivery saga saga_command"""
COUNTED_CONSUMER = """
SELECT ON consumer_message consumer_offset consumer_passage log_loss message_source reconciliation_run"""

_NEED = re.compile(r"([A-Z]+)(?:\(([a-z_ ]+)\))?")


@cache
def _rights(text: str) -> tuple[Rights, ...]:
    """Read rights: ``part: role …``, and then lines such as ``SELECT(column …) INSERT ON table …``."""
    found: list[Rights] = []
    for line in filter(None, map(str.strip, text.splitlines())):
        privileges, on, tables = line.partition(" ON ")
        if not on:
            part, _, roles = line.partition(":")
            found.append(Rights(cast("Part", part), frozenset(roles.split()), ()))
            continue
        for table in tables.split():
            needs = (Need(table, privilege, tuple(columns.split())) for privilege, columns in _NEED.findall(privileges))
            found[-1] = replace(found[-1], needs=(*found[-1].needs, *needs))
    return tuple(found)


#: One pass, on the own database and on that of the topic's producer, neither in a transaction; the third is asked
#: between batches whether to end.
DutyPass = Callable[["Connection", "Connection", Callable[[], bool]], Counts]


def alone(function: Callable[Concatenate[Connection, P], Counts], *values: P.args, **named: P.kwargs) -> DutyPass:
    """Return a pass on the own database, of a function that takes ``stopping``."""
    options: dict[str, Any] = dict(named)
    return lambda connection, _, stopping: function(connection, *values, **{**options, "stopping": stopping})


def whole(function: Callable[[Connection, Connection], Counts]) -> DutyPass:
    """Return a pass of a function that asks for itself whether to end, or needn't."""
    return lambda connection, source, _: function(connection, source)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A pass as a worker is to run it, again and again.

    ``every`` is the longest wait (seconds) between two passes, or returns it. ``eager``: it goes on looking for a while
    after its last work; another one only as long as its pass says that there is more. ``after`` is called when a pass
    brought work, or failed and may have. ``on_ops`` is called, and then the pass runs, when others tell of ops.
    ``facts`` returns what is reported beside its health.

    ``lane`` names the connection and thread that it shares with others; by default it has its own. ``parts`` are those
    whose tables, and rights of its duty, it needs in its database. ``source`` is the producer's database, None where
    that is the own one; ``is_async``: the pass calls async functions on its connection; ``group`` is its group.
    ``compares`` are the name of a reconciliation, and the topics and groups of its runs.
    """

    name: str
    one_pass: DutyPass
    every: float | Callable[[], float]
    eager: bool = False
    after: Callable[[], object] | None = None
    on_ops: Callable[[], object] | None = None
    facts: Callable[[], Mapping[str, Any]] = dict
    lane: str | None = None
    parts: Iterable[Part] = ()
    source: Engine | AsyncEngine | str | None = None
    is_async: bool = False
    group: str | None = None
    compares: tuple[str, Sequence[tuple[str, str]]] | None = None


class Functions(Protocol):
    """The functions that an application has declared: `outbox.calling.function.CalledFunctions`."""

    def of(self, kind: type[F]) -> dict[Any, F]:
        """Return those of a class by their keys, which those declared later join."""


class ServedOutbox(Protocol):
    """An `Outbox`, which stands above all duties, as far as they know it."""

    @property
    def engine(self) -> Engine | AsyncEngine:
        """The engine that it is bound to."""

    @property
    def settings(self) -> Settings:
        """Its settings."""

    @property
    def functions(self) -> Functions:
        """What the application has declared with it."""

    @property
    def codecs(self) -> Codecs:
        """What reads bodies."""

    def active(self) -> AbstractContextManager[object]:
        """Return the frame of code that works for it."""

    @property
    def intakes(self) -> Sequence[Any]:
        """What is taken in from brokers (`outbox.relay.intake.intake.Intake`)."""

    @property
    def reconciliations(self) -> Mapping[str, Any]:
        """What is to be reconciled, by name (`outbox.reconcile.record.timetable.Reconciliation`)."""

    def groups_to_confirm(self) -> Sequence[Any]:
        """Return the groups that are asked what became of messages (`outbox.delivery.known_group.KnownGroup`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Post:
    """Where a duty is done: an `Outbox`, and what runs its passes there.

    ``parts`` of the Outbox's database are served here, by a worker with these ``roles``; ``consumes``: it has consumers
    whose topics and tables both are in that database. ``new_runner`` makes further connections. ``stopping`` is set
    when the worker ends; ``at_end`` takes a function to call when its duties have ended. ``wake_dispatch`` has
    committed ops dispatched now, ``wake_consumers`` new messages consumed: of what `outbox.database.sql.read_news`
    reads, or (None) of any topic.
    ``at_once``: all is done now, also what is young, and faster than an operator has ordered.
    """

    outbox: ServedOutbox
    settings: Settings
    parts: Collection[Part]
    roles: frozenset[Role]
    consumes: bool
    stopping: threading.Event
    new_runner: NewRunner
    at_end: Callable[[Callable[[], object]], object]
    wake_dispatch: Callable[[], object]
    wake_consumers: Callable[[str | None], object]
    at_once: bool = False


@dataclass(frozen=True, slots=True)
class Duty:
    """Work that is done again and again: its name, its help, its needs (as text), and its passes.

    ``role`` is the worker's that does it. ``tasks`` returns its passes at a post; a worker plans the duties of a group
    itself, and what an application does has none. ``functions`` are the declarations of an `Outbox` that it calls.
    """

    name: str
    help: str
    needs: str = ""
    role: Role | None = None
    tasks: Callable[[Post], Iterable[Task]] | None = None
    functions: str | None = None

    @property
    def rights(self) -> tuple[Rights, ...]:
        """What it needs in the database of each part."""
        return _rights(self.needs)


@cache
def duties() -> tuple[Duty, ...]:
    """Return all duties. Their modules are imported now: an application that only sends doesn't pay for them."""
    return tuple(duty for module in MODULES for duty in import_module(module).DUTIES)
