"""The examination: look at one thing after the other; what can't be seen stops nothing."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from outbox.database import failure
from outbox.database.execute import is_lost
from outbox.errors import InvalidSettings, OutboxError
from outbox.operator.health.doctor import activity, halves, messages, pooler, report, server, tables
from outbox.operator.health.doctor.patient import CheckerRules, Limits, Patient, SubscriptionRules, Unseen, unprepared
from outbox.operator.health.doctor.report import Finding, Looked, Outcome, Report, Severity
from outbox.settings import Settings
from outbox.text import summary_of

if TYPE_CHECKING:
    from sqlalchemy import URL, Connection, Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

logger = logging.getLogger("outbox.operator.health.doctor")

_CONNECT_TIMEOUT = 10


@dataclass(frozen=True, slots=True)
class Look:
    """One thing to look at; ``parts``: whose tables must be there for it."""

    name: str
    at: Callable[[Patient], Iterator[Finding]]
    parts: tuple[str, ...] = ()


_PRODUCER, _CONSUMER = ("producer",), ("consumer",)

#: In the order in which they are looked at: those of the tables come after the migrations.
LOOKS = (
    Look("settings", report.settings),
    Look("retention of consumers", report.consumers),
    Look("server version", server.version),
    Look("writable", server.writable),
    Look("durability", server.durability),
    Look("connections left", server.connections),
    Look("clock", server.clock),
    Look("pooler", pooler.pooler),
    Look("migrations", tables.migrations),
    Look("tables", tables.differences),
    Look("indexes", tables.indexes),
    Look("autovacuum", tables.autovacuum),
    Look("open transactions", activity.open_transactions),
    Look("prepared transactions", activity.prepared_transactions),
    Look("replication", activity.replication),
    Look("checks", halves.checks, _PRODUCER),
    Look("undecided halves", halves.oldest_undecided, _PRODUCER),
    Look("parked halves", halves.parked, _PRODUCER),
    Look("dispatch", messages.undispatched, _PRODUCER),
    Look("scheduled messages", messages.scheduled, _PRODUCER),
    Look("prune", messages.unpruned, _PRODUCER),
    Look("parked messages", messages.parked, _CONSUMER),
    Look("retries", messages.retries, _CONSUMER),
    Look("reading groups", messages.unread, _PRODUCER + _CONSUMER),
)


def examine(
    bind: Engine | AsyncEngine | URL | str,
    settings: Settings | None = None,
    checkers: Mapping[str, CheckerRules] | None = None,
    *,
    subscriptions: Collection[SubscriptionRules] | None = None,
    refused: InvalidSettings | None = None,
    app: str = "MODULE:OBJECT",
    limits: Limits | None = None,
    clock: Callable[[], float] = time.time,
) -> Report:
    """Look at everything that can be wrong with one database, and return what is.

    ``bind`` should be the engine that the application uses: how it connects is looked at as well (of an AsyncEngine or
    a URL, only the URL). ``settings`` are read from the environment by default; where they contradict each other, that
    is a finding. Those who read them by themselves tell by ``refused`` why they had to take other ones.
    ``checkers`` (as of `Outbox.checkers`) tell exactly which topics nobody can be asked about; without them that is
    concluded from what has been waiting for too long. ``subscriptions`` are the application's consumers (the values of
    `Outbox.subscriptions`), ``app`` is what it is called in commands. ``clock`` is this host's, in seconds since 1970.

    Opens up to three connections, one after the other or two at a time.

    Raises:
        sqlalchemy.exc.DBAPIError: the database can't be reached, or not any more.
        InvalidSettings: the name of the schema can't be one.
    """
    if settings is None:
        settings, refused = read_settings()
    engine, own_engine = _engine_of(bind)
    threshold: int | None = None

    def connect() -> Connection:
        nonlocal threshold
        connection = engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        connection.detach()
        threshold = unprepared(connection)
        return connection

    patient = Patient(engine, connect(), connect, settings, refused, checkers, subscriptions, app, own_engine)
    patient.prepare_threshold = threshold
    patient.limits, patient.clock = limits or Limits(), clock
    try:
        at = patient.server.at
        found: list[Finding] = []
        looked = [_look(patient, look, found) for look in LOOKS]
    finally:
        _close(patient.connection)
    found.sort(key=lambda finding: finding.severity is not Severity.PROBLEM)
    url = engine.url
    where = f"{url.host or 'local'}:{url.port or 5432}/{url.database}"
    return Report(where, settings.schema, at, tuple(found), tuple(looked))


def read_settings(schema: str | None = None) -> tuple[Settings, InvalidSettings | None]:
    """Return the settings of the environment; where they are refused, the defaults, and why.

    Raises:
        InvalidSettings: the name of the schema can't be one.
    """
    try:
        return (Settings.from_env(schema=schema) if schema else Settings.from_env()), None
    except InvalidSettings as error:
        name = schema or os.environ.get("OUTBOX_SCHEMA")
        return (Settings(schema=name) if name else Settings()), error


def _engine_of(bind: Engine | AsyncEngine | URL | str) -> tuple[Engine, bool]:
    """Return a sync engine, and whether it is the application's own."""
    from sqlalchemy import URL, Engine, NullPool, create_engine, make_url  # noqa: PLC0415

    if isinstance(bind, Engine):
        return bind, True
    url = bind if isinstance(bind, URL) else make_url(bind) if isinstance(bind, str) else bind.url
    if url.drivername == "postgresql":
        url = url.set(drivername="postgresql+psycopg")
    limit = {} if "connect_timeout" in url.query else {"connect_timeout": _CONNECT_TIMEOUT}
    return create_engine(url, poolclass=NullPool, connect_args=limit), False


def _look(patient: Patient, look: Look, found: list[Finding]) -> Looked:
    here: list[Finding] = []
    why: str | None = None
    try:
        tables.require(patient, look.parts)
        # Not extend(): what was found before something can't be seen stays found.
        for finding in look.at(patient):
            here.append(finding)  # noqa: PERF402
    except Unseen as unseen:
        why = str(unseen)
    except DBAPIError as error:
        why = _refusal(error, patient)
    except PoolTimeout as error:
        why = f"the engine has no connection to spare: {error}"
    except OutboxError as error:
        why = str(error)
    except Exception as error:
        logger.exception("looking at %s failed", look.name, extra={"event": "doctor.failed", "look": look.name})
        why = f"this look failed, which is a defect: {summary_of(error)}"
    _reconnect(patient)
    found += here
    outcome = Outcome.FINDING if here else Outcome.OK if why is None else Outcome.SKIPPED
    return Looked(look.name, outcome, why)


def _refusal(error: DBAPIError, patient: Patient) -> str:
    said = getattr(getattr(error.orig, "diag", None), "message_primary", None) or " ".join(str(error.orig).split())
    match failure.sqlstate(error):
        case "42501":
            return f"the role {patient.server.role_name!r} may not read it: {said}"
        case failure.STATEMENT_CANCELLED:
            return f"it took longer than {patient.limits.statement:g} s"
    return str(said)


def _reconnect(patient: Patient) -> None:
    """Go on with another connection where the server has cut this one."""
    if is_lost(patient.connection):
        _close(patient.connection)
        patient.connection = patient.connect()


def _close(connection: Connection) -> None:
    with suppress(Exception):  # whatever a broken connection says to its end
        if is_lost(connection):
            connection.invalidate()
    with suppress(Exception):
        connection.close()
