"""Examine an outbox and its database: report the faults in sentences, with their mends.

::

    from outbox.operator.health.examine import examine

    report = examine(outbox.engine, outbox.settings, outbox.checkers)
    for finding in report.findings:
        print(finding.sentence, finding.mend)

It only reads, reads a bounded part of everything, limits the time of each statement, and works through a transaction
pooler; so it may be asked at any time. An inspection that fails or isn't permitted says so and stops no other.
"""

from __future__ import annotations

import datetime as dt
import enum
import os
import shlex
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from outbox.database.dialect import url_of
from outbox.database.duty import PARTS, Part
from outbox.database.engines import address_of, discard, engine_of
from outbox.database.execute import STATEMENT_CANCELLED, execute, sqlstate
from outbox.database.sql import read_only
from outbox.errors import InvalidSettings, OutboxError
from outbox.operator.health import inspections, sql
from outbox.operator.health.examination import Examination
from outbox.operator.health.grants import ROLES, WHO, Read, granting, hidden, missing
from outbox.operator.health.inspections import judging
from outbox.operator.health.rules import Diagnosis, NotInspected, Severity, Thresholds
from outbox.operator.health.silences import Silence, silenced, silences_in
from outbox.settings import Settings
from outbox.telemetry.events import InspectionFailed
from outbox.telemetry.hooks import emit
from outbox.text import database_address, summary_of

if TYPE_CHECKING:
    from outbox.check.asker import Checker
    from outbox.consumer.subscription import Subscription
    from outbox.database.engines import Bind


_SHOWN = 3


def privileges(examination: Examination) -> Iterator[Diagnosis]:
    """Find which privileges the role lacks, here and in the databases that its groups read; and hidden topics."""
    schema, installed = examination.settings.schema, [part for part in PARTS if part in examination.parts]
    if examination.roles is None:
        if any(missing(examination.read, schema, ROLES[role].needs(part)) for role in ROLES for part in installed):
            raise NotInspected("it isn't known what this role is there for; say it by --role, or by --app")
        return
    remote: defaultdict[str, list[Subscription]] = defaultdict(list)
    here: list[Subscription] = []
    for each in (each for several in examination.subscriptions or () for each in several.of_sources()):
        source = None if each.sources[0] is None else address_of(each.sources[0])
        (here if source in {None, address_of(examination.url)} else remote[source or ""]).append(each)
    for role in examination.roles:
        for part in installed:
            if not (role == "consumer" and part == "producer" and remote and not here):
                yield from _lacking(examination, examination.read, role, part, examination.name)
    if "producer" in installed:
        yield from _unseen(examination, examination.read, here, examination.name)
    if "consumer" in examination.roles:
        for address, groups in remote.items():
            yield from _of_source(examination, address, groups)


def _of_source(examination: Examination, address: str, groups: Collection[Subscription]) -> Iterator[Diagnosis]:
    source = next(bind for each in groups for bind in each.sources if bind is not None)
    name = str(url_of(source).database)
    try:
        with _read_only(source, examination.thresholds.statement) as read:
            yield from _lacking(examination, read, "consumer", "producer", name)
            yield from _unseen(examination, read, groups, name)
    except DBAPIError as error:
        address = database_address(url_of(source))
        raise NotInspected(
            f"{address}, which the groups read, was not inspected: {summary_of(error.orig or error)}"
        ) from error


@contextmanager
def _read_only(source: Bind, seconds: float) -> Iterator[Read]:
    with engine_of(source).connect() as connection, connection.begin():
        execute(connection, read_only(seconds))
        yield partial(execute, connection)


def _lacking(examination: Examination, read: Read, role: str, part: Part, database: str) -> Iterator[Diagnosis]:
    schema = examination.settings.schema
    if lacks := missing(read, schema, ROLES[role].needs(part)):
        (((name, quoted),),) = read(WHO)
        others = f", and {len(lacks) - _SHOWN} more" if len(lacks) > _SHOWN else ""
        details = {"role": name, "role_of_ours": role, "part": part, "missing": [str(need) for need in lacks]}
        words = {
            "count": len(lacks),
            "first": ", ".join(str(need) for need in lacks[:_SHOWN]),
            "others": others,
            "grants": " ".join(f"{grant};" for grant in granting(lacks, name, schema)),
            "quoted_role": quoted,
            "database": database,
            "schema": _option(schema),
        }
        yield examination.finding("privilege.missing", details, **words)


def _unseen(
    examination: Examination, read: Read, groups: Collection[Subscription], database: str
) -> Iterator[Diagnosis]:
    schema, topics = examination.settings.schema, sorted({each.topic for each in groups})
    if not (unseen := hidden(read, schema, topics)):
        return
    (((name, quoted),),) = read(WHO)
    for each in groups:
        if each.topic in unseen:
            details = {"role": name, "topic": each.topic, "group": each.group}
            named = "".join(f" --topic {shlex.quote(topic)}" for topic in topics)
            words = {"quoted_role": quoted, "database": database, "schema": _option(schema), "topics": named}
            yield examination.finding("topic.hidden", details, **words)


def _option(schema: str) -> str:
    return "" if schema == "outbox" else f" --schema {schema}"


class Inspected(enum.StrEnum):
    """What came of an inspection; skipped: it could not be done, or only in part, and then found nothing."""

    OK = "ok"
    FINDING = "finding"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class InspectionResult:
    """One thing that was inspected, and what came of it; ``why`` it was skipped, or inspected only in part."""

    name: str
    outcome: Inspected
    why: str | None = None


@dataclass(frozen=True, slots=True)
class HealthReport:
    """Hold the doctor's findings in one database; ``at`` is its time. Problems come first."""

    database: str
    schema: str
    at: dt.datetime
    findings: tuple[Diagnosis, ...]
    inspections: tuple[InspectionResult, ...]

    @property
    def healthy(self) -> bool:
        """Whether there is no problem; notes and what is silenced don't count."""
        return all(finding.severity is not Severity.PROBLEM or finding.silenced for finding in self.findings)


@dataclass(frozen=True, slots=True)
class Inspection:
    """One thing to inspect; ``parts``: whose tables must be there for it, separated by spaces."""

    name: str
    run: Callable[[Examination], Iterator[Diagnosis]]
    parts: str = ""


#: In the order in which they run: those of the tables come after the migrations.
INSPECTIONS = (
    Inspection("settings", inspections.settings),
    Inspection("retention of consumers", inspections.retention_of_consumers),
    Inspection("server version", inspections.version),
    Inspection("writable", inspections.writable),
    Inspection("search path", inspections.search_path),
    Inspection("durability", inspections.durability),
    Inspection("connections left", inspections.connections),
    Inspection("clock", inspections.clock),
    Inspection("pooler", inspections.pooler),
    Inspection("migrations", inspections.migrations),
    Inspection("privileges", privileges),
    Inspection("tables", inspections.differences),
    Inspection("indexes", inspections.indexes),
    Inspection("sequences", inspections.sequences, "common"),
    Inspection("autovacuum", inspections.autovacuum),
    Inspection("open transactions", inspections.open_transactions),
    Inspection("prepared transactions", inspections.prepared_transactions),
    Inspection("replication", inspections.replication),
    Inspection("workers", inspections.workers, "common"),
    Inspection("locks", inspections.locks, "common"),
    Inspection("bulk jobs", inspections.bulk_jobs, "common"),
    Inspection("checks", inspections.checks, "producer"),
    Inspection("undecided halves", inspections.oldest_undecided, "producer"),
    Inspection("parked halves", inspections.parked_halves, "producer"),
    Inspection("dispatch", inspections.undispatched, "producer"),
    Inspection("missing halves", judging(sql.MISSING_HALVES, "half.missing"), "producer"),
    Inspection("unsent messages", judging(sql.UNSENT, "half.unsent"), "producer"),
    Inspection("torn rows", judging(sql.TORN, "message.torn"), "producer"),
    Inspection("deliveries", judging(sql.EXHAUSTED, "delivery.exhausted"), "producer"),
    Inspection("intakes", judging(sql.GAPS, "intake.gap"), "producer"),
    Inspection("sagas", judging(sql.SAGAS, "saga.overdue"), "producer"),
    Inspection("confirmed groups", inspections.confirming, "producer"),
    Inspection("scheduled messages", judging(sql.SCHEDULED, "message.overdue"), "producer"),
    Inspection("paused topics", inspections.paused_topics, "producer"),
    Inspection("schedules", inspections.schedules, "producer"),
    Inspection("topics and groups", inspections.topics_and_groups, "producer consumer"),
    Inspection("prune", judging(sql.UNPRUNED, "prune.behind", limit=1000), "producer"),
    Inspection("segments", inspections.all_segments, "producer"),
    Inspection("inbox segments", inspections.held_segments, "consumer"),
    Inspection("parked messages", judging(sql.FAILURES, "message.parked"), "consumer"),
    Inspection("retries", judging(sql.FAILURES, "retry.overdue"), "consumer"),
    Inspection("leases", judging(sql.FAILURES, "lease.lapsed"), "consumer"),
    Inspection("stopped groups", inspections.stopped_groups, "consumer"),
    Inspection("lost messages", judging(sql.LOSSES, "group.lost"), "consumer"),
    Inspection("reconciliations", inspections.reconciliations, "consumer"),
    Inspection("consuming groups", judging(sql.UNREAD, "group.pruned", "group.behind"), "producer consumer"),
)


def examine(
    bind: Bind,
    settings: Settings | None = None,
    checkers: Mapping[str, Checker] | None = None,
    *,
    subscriptions: Collection[Subscription] | None = None,
    refused: InvalidSettings | None = None,
    roles: Collection[str] | None = None,
    app: str = "MODULE:OBJECT",
    thresholds: Thresholds | None = None,
    clock: Callable[[], float] = time.time,
) -> HealthReport:
    """Inspect everything that can be wrong with one database, and return the faults.

    ``bind`` should be the engine that the application uses: how it connects is inspected as well (of an AsyncEngine or
    a URL, only the URL). ``settings`` are read from the environment by default; where they contradict each other, that
    is a finding. A caller that reads them itself says by ``refused`` why it had to take other ones.
    ``checkers`` (as of `Outbox.checkers`) show exactly which topics have no checker; without them that is concluded
    from what the workers report, and from what has been waiting for too long. ``subscriptions`` are the application's
    consumers (the values of `Outbox.subscriptions`), ``app`` is its name in commands. ``roles`` are what the role of
    this connection is there for (`outbox.operator.health.grants.ROLES`); by default that of a consumer where there are
    subscriptions, else of a producer, and where these aren't known, that isn't either. ``clock`` is this host's, in
    seconds since 1970.

    Opens up to three connections, one after the other or two at a time; and one to each source of the subscriptions.

    Raises:
        sqlalchemy.exc.DBAPIError: the database can't be reached, or not any more.
        InvalidSettings: the name of the schema can't be one.
    """
    if settings is None:
        settings, refused = read_settings()
    engine = engine_of(bind)
    if roles is None and subscriptions is not None:
        roles = ["consumer" if subscriptions else "producer"]
    examination = Examination(
        name=str(engine.url.database),
        url=engine.url,
        settings=settings,
        app=app,
        thresholds=thresholds or Thresholds(),
        engine=engine,
        own_engine=engine is bind,
        refused=refused,
        checkers=checkers,
        subscriptions=subscriptions,
        roles=roles,
        clock=clock,
    )
    findings: list[Diagnosis] = []
    try:
        at = examination.server.at
        results = [_inspect(examination, each, findings) for each in INSPECTIONS]
        silences = _silences(examination)
    finally:
        discard(examination.connection)
    findings = silenced(findings, silences)
    findings.sort(key=lambda finding: finding.severity is not Severity.PROBLEM)
    return HealthReport(database_address(engine.url), settings.schema, at, tuple(findings), tuple(results))


def _silences(examination: Examination) -> list[Silence]:
    """Return the silences that this database keeps; none where they can't be read."""
    try:
        examination.require(["common"])
        with examination.read_only() as connection:
            return silences_in(connection, examination.name, examination.settings.schema)
    except (NotInspected, DBAPIError):  # the inspections say what can't be read, and all is told
        return []


def read_settings(schema: str | None = None) -> tuple[Settings, InvalidSettings | None]:
    """Return the settings of the environment; where they are refused, the defaults, and why.

    Raises:
        InvalidSettings: the name of the schema can't be one.
    """
    try:
        return Settings.from_env(schema=schema or None), None
    except InvalidSettings as error:
        name = schema or os.environ.get("OUTBOX_SCHEMA")
        return (Settings(schema=name) if name else Settings()), error


def _inspect(examination: Examination, inspection: Inspection, findings: list[Diagnosis]) -> InspectionResult:
    before, why = len(findings), None
    try:
        examination.require(inspection.parts.split())
        # Not extend(): findings before the inspection fails are kept.
        for finding in inspection.run(examination):
            findings.append(finding)  # noqa: PERF402 - those found before an error are kept
    except (NotInspected, OutboxError) as error:
        why = str(error)
    except DBAPIError as error:
        why = _refusal(error, examination)
    except PoolTimeout as error:
        why = f"the engine has no connection to spare: {error}"
    except Exception as error:
        emit(InspectionFailed(inspection=inspection.name, error=error))
        why = f"this inspection failed, which is a defect: {summary_of(error)}"
    examination.reconnect()
    outcome = Inspected.FINDING if len(findings) > before else Inspected.OK if why is None else Inspected.SKIPPED
    return InspectionResult(inspection.name, outcome, why)


def _refusal(error: DBAPIError, examination: Examination) -> str:
    diagnostics = getattr(error.orig, "diag", None)
    reason = getattr(diagnostics, "message_primary", None) or " ".join(str(error.orig).split())
    state = sqlstate(error)
    if state == "42501":
        return f"the role {examination.server.role_name!r} may not read it: {reason}"
    if state == STATEMENT_CANCELLED:
        return f"it took longer than {examination.thresholds.statement:g} s"
    return str(reason)
