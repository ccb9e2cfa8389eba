"""Inspect settings, server and tables, workers, halves, messages and groups.

The inspections of a `Subject` are shared by the doctor and the overview. Those of an `Examination` are the doctor's
alone, which has the time to read more.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
from collections.abc import Callable, Collection, Iterator
from decimal import Decimal
from operator import itemgetter
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from sqlalchemy.exc import DBAPIError

from outbox.database import migration
from outbox.database.engines import discard
from outbox.database.execute import Statement, driver_of, execute, sqlstate, statement
from outbox.database.migration import chain
from outbox.database.sql import ALIVE, NOW
from outbox.dispatch.sql import SEQUENCE
from outbox.operator.health import sql, stats
from outbox.operator.health.rules import IN_ORDER, LIMIT, NotInspected, Severity
from outbox.operator.health.workers import DISPATCH, alive, done, held_locks, merged
from outbox.prune.ahead import last_moment, letting_in, refusal_of
from outbox.prune.inbox import INBOX
from outbox.prune.segments import PRODUCER, SegmentedSide, is_overdue, now_ms, segments
from outbox.text import at_most, counted, duration

if TYPE_CHECKING:
    from outbox.operator.databases import Query
    from outbox.operator.health.examination import Examination
    from outbox.operator.health.rules import Diagnosis
    from outbox.operator.health.subject import Subject

#: The oldest version of PostgreSQL that has what the statements need: xid8 and pg_current_snapshot() came with 13.
OLDEST = 13

# Dispatch and release share a connection, so do prune and pings; one checks, one listens.
_OF_A_WORKER = 4
_CLOCK_SAMPLES = 3
_POOLER_ROUNDS = 5
#: So many undecided halves the doctor reads to find the parked ones.
PARKED_HALVES = 100_000
# So many halves are read where halves are read topic by topic.
_CHECKS_PER_TOPIC = 1_000

# What no worker does where none is alive, by the part of the tables.
_UNDONE = {"producer": "dispatched, checked or pruned", "consumer": "consumed"}


# --- workers, checks and reconciliations: of the doctor and the overview ------------------------------------------


def workers(subject: Subject) -> Iterator[Diagnosis]:
    """Are the workers alive, and do their duties succeed?"""
    found = subject.workers
    if not alive(found):
        if found or subject.served:
            last = min((worker.seconds for worker in found), default=None)
            since = "" if last is None else f"; the last one was seen {duration(last)} ago"
            undone = " and ".join(text for part, text in _UNDONE.items() if part in subject.parts)
            yield subject.finding("worker.none", {"last_seen": last}, since=since, undone=undone)
        return
    for worker in found:
        name = worker.row.name
        if not worker.row.alive and worker.seconds < subject.thresholds.worker_lost:
            rule = "worker.lost" if worker.row.is_worker else "worker.lost/rocketmq"
            yield subject.finding(rule, {"worker": name, "age": worker.seconds})
        for duty, health in worker.row.duties.items() if worker.row.alive else ():
            if failures := health.get("failures"):
                details = {"worker": name, "duty": duty, "failures": failures, "error": health.get("last_error")}
                yield subject.finding("duty.failing", details)
    if "producer" in subject.parts and not done(found, "dispatch"):
        yield subject.finding("duty.missing/dispatch", {"duty": "dispatch"})


def confirming(subject: Subject) -> Iterator[Diagnosis]:
    """Are the known groups asked, and can they be?

    Each worker tells what its own passes met; several meet the same, which is found once.
    """
    found, groups = subject.workers, subject.rows(sql.CONFIRMED_GROUPS, limit=LIMIT)
    if not alive(found):
        return
    if not done(found, "confirm"):
        for topic, group, forget in groups:
            yield subject.finding(
                "duty.missing/confirm", {"duty": "confirm", "topic": topic, "group": group}, forget=forget
            )
        return
    longest = subject.thresholds.confirm * subject.settings.confirm_interval
    met: dict[tuple[object, object], dict[str, Any]] = {}
    for worker in found:
        for duty, health in worker.row.duties.items() if worker.row.alive else ():
            if duty != "confirm" and not duty.endswith(" confirm"):
                continue
            last = health.get("last_success")
            since = worker.row.started_at if last is None else dt.datetime.fromisoformat(last)
            age = (worker.row.seen_at - since).total_seconds() + worker.seconds
            if age > longest and not health.get("failures"):
                yield subject.finding("delivery.late", {"worker": worker.row.name, "age": age})
            for each in health.get("delivery.unreachable", ()):
                earlier = met.setdefault((each["topic"], each["group"]), each)
                met[each["topic"], each["group"]] = max(earlier, each, key=itemgetter("passes"))
    yield from subject.judge(["delivery.unreachable"], list(met.values()))


def locks(subject: Subject) -> Iterator[Diagnosis]:
    """A worker whose host has vanished keeps its lock until the server has noticed; a handler may also take long."""
    for held in held_locks(subject.read, subject.settings.schema, subject.parts, subject.thresholds.lock):
        severity = None if held.lock == DISPATCH else Severity.NOTE
        yield subject.finding("lock.held", dataclasses.asdict(held), severity=severity)


def bulk_jobs(subject: Subject) -> Iterator[Diagnosis]:
    """Bulk jobs are carried out by a worker with the role bulk."""
    ((jobs, age),) = subject.rows(sql.OPEN_BULK_JOBS, limit=LIMIT)
    if jobs and age > ALIVE and alive(subject.workers) and not done(subject.workers, "bulk"):
        yield subject.finding("duty.missing/bulk", {"duty": "bulk", "jobs": at_most(jobs, LIMIT), "age": age})


def checks(subject: Subject) -> Iterator[Diagnosis]:
    """Is there a checker for each topic, and is it asked about the halves whose check is due?

    Where the topics with a checker aren't known, those of the living workers count, and where no worker is alive,
    whether any checker was ever asked. A half with a fence needs no checker, only a worker.
    """
    found, registered = subject.workers, subject.checkers
    if subject.served and not alive(found):
        return  # The missing worker has to be mended first.
    running = {each.topic for each in merged(found) if each.kind == "checker"} if alive(found) else None
    rows = subject.rows(sql.CHECKS, limit=_CHECKS_PER_TOPIC)
    if rows and running is not None and not done(found, "check"):
        yield subject.finding("duty.missing/check", {"duty": "check"})
    for topic, unfenced, due, late, unasked, fenced_late, overdue, half_id, remote, remote_id, some_asked in rows:
        if registered is not None:
            missing = 0 if topic in registered else unfenced
            why = f"{subject.app} registers no checker for this topic"
        elif running is not None:
            missing = 0 if topic in running else due
            why = "no living worker has a checker for this topic"
        else:
            missing = 0 if some_asked else unasked
            why = f"no checker was ever asked about them, due since {duration(overdue)}"
        if missing:
            details = {"topic": topic, "halves": at_most(missing, _CHECKS_PER_TOPIC), "half_id": half_id}
            certain = registered is not None or running is not None
            yield subject.finding("checker.missing", details | {"overdue": overdue, "certain": certain}, why=why)
        if waiting := fenced_late + (0 if missing else late):
            halves = at_most(waiting, _CHECKS_PER_TOPIC)
            yield subject.finding("check.late", {"topic": topic, "halves": halves, "overdue": overdue})
        if remote:
            details = {"topic": topic, "halves": at_most(remote, _CHECKS_PER_TOPIC), "half_id": remote_id}
            yield subject.finding("check.late/remote", details | {"overdue": overdue})


def reconciliations(subject: Subject) -> Iterator[Diagnosis]:
    """Did the last reconciliation of each group come to a result, and find no difference?"""
    declared = any(handler.kind == "reconciliation" for handler in merged(subject.workers))
    for topic, group, ended, error, counts, applied, unexplained, age, settled in subject.rows(sql.LAST_RUNS):
        details = {"topic": topic, "group": group, "age": age}
        found = {kind: n for kind, n in json.loads(counts or "{}").items() if kind not in IN_ORDER}
        differences, unconsumed = sum(found.values()), found.get("unconsumed", 0)
        if ended and error:
            yield subject.finding("reconciliation.failed", details | {"error": error})
        elif unconsumed and unconsumed == differences:
            yield subject.finding("reconciliation.unconsumed", details | {"lag": unconsumed})
        elif differences:
            severity, repaired = (Severity.NOTE, ", and repaired what it could") if applied else (None, "")
            # The money that nothing explains, where a measure says it.
            money = sum((abs(Decimal(each)) for each in json.loads(unexplained or "[]")), Decimal())
            details |= {"differences": differences, "applied": applied} | ({"unexplained": str(money)} if money else {})
            yield subject.finding("reconciliation.differences", details, severity=severity, repaired=repaired)
        elif declared and (settled is None or settled > subject.thresholds.reconciled):
            since = "so far" if settled is None else f"for {duration(settled)}"
            yield subject.finding("reconciliation.overdue", details | {"age": settled}, since=since)


def topics_and_groups(examination: Examination) -> Iterator[Diagnosis]:
    """Topics that are consumed and were never sent to, and the other way round: mostly one name is written wrongly."""
    sent: dict[str, bool] = dict(examination.rows(sql.SENT_TOPICS, limit=LIMIT))
    consumed = {(each.topic, each.group) for each in examination.subscriptions or () if None in each.sources}
    for each in merged(examination.workers):
        if each.kind == "consumer" and each.options.get("source") is None:
            consumed.add((each.topic, str(each.group)))
    for topic, group in sorted(consumed):
        if topic not in sent and len(sent) < LIMIT:
            yield examination.finding("topic.silent", {"topic": topic, "group": group})
    for topic in sorted(sent.keys() - {topic for topic, _ in consumed}):
        if not sent[topic]:
            yield examination.finding("topic.unread", {"topic": topic})


# --- halves, messages and groups ---------------------------------------------------------------------------------


def judging(query: Query, *codes: str, limit: int = LIMIT) -> Callable[[Subject], Iterator[Diagnosis]]:
    """Return the inspection that judges the rows of a query by these rules."""
    return lambda subject: subject.judge(codes, query.named(subject.rows(query, limit=limit)), limit)


#: Groups that an operator has paused, and those that their breaker has stopped; topics that an operator has paused.
stopped_groups: Callable[[Subject], Iterator[Diagnosis]] = judging(sql.STOPPED, "group.paused", "breaker.open")
paused_topics: Callable[[Subject], Iterator[Diagnosis]] = judging(sql.PAUSED_TOPICS, "topic.paused")
#: Schedules that are paused, and those that no worker sends the messages of.
schedules: Callable[[Subject], Iterator[Diagnosis]] = judging(
    sql.SCHEDULES, "schedule.paused", "schedule.overdue", "schedule.ahead"
)


def undispatched(examination: Examination) -> Iterator[Diagnosis]:
    """Ops are dispatched as soon as any worker is alive."""
    with examination.read_only() as connection:
        rows = stats.undispatched(connection, examination.settings.schema)
    yield from examination.judge(["op.undispatched"], rows)


def parked_halves(examination: Examination) -> Iterator[Diagnosis]:
    """Halves that have used up their checks wait for an operator."""
    rows = sql.UNDECIDED.named(examination.rows(sql.UNDECIDED, limit=PARKED_HALVES))
    yield from examination.judge(["half.parked"], rows, PARKED_HALVES)
    if sum(row["undecided"] for row in rows) >= PARKED_HALVES:
        raise NotInspected(f"only the oldest {PARKED_HALVES} undecided halves were inspected")


def oldest_undecided(examination: Examination) -> Iterator[Diagnosis]:
    """Find the oldest half which should have been decided or parked long ago, and why it wasn't."""
    settings, thresholds = examination.settings, examination.thresholds
    for half_id, topic, fenced, times, checked, age, overdue in examination.rows(sql.OLDEST_UNDECIDED, limit=LIMIT):
        checking = settings.immunity + settings.max_checks * settings.check_interval
        if rules := (examination.checkers or {}).get(topic):
            checking = rules.immunity + rules.max_checks * rules.interval
        if age <= thresholds.old * checking:
            continue
        if not checked:
            state = f"was never checked, although its check was due {duration(max(overdue, 0))} ago"
        elif fenced:
            state = "its transaction still ran when it was checked last"
        else:
            state = f"its checker was asked {times} times without a verdict"
        late = overdue > thresholds.check * settings.check_interval
        details = {"half_id": half_id, "topic": topic, "age": age, "overdue": overdue, "checks": times}
        details |= {"fenced": fenced, "checked": checked}
        severity = Severity.PROBLEM if late else Severity.NOTE
        yield examination.finding("half.old", details, severity=severity, state=state)
        return


def all_segments(examination: Examination) -> Iterator[Diagnosis]:
    """Are segments made, and emptied when they are old? Only a role that owns the tables can do that."""
    settings = examination.settings
    schema = settings.schema
    ((role, owner, may),) = examination.rows(sql.SEGMENT_OWNER)
    with examination.read_only() as connection:
        now, found = now_ms(connection), segments(connection, schema)
    if not may and not any(each.end_ms > now for each in found) and done(examination.workers, "segments"):
        details = {"role": role, "owner": owner}
        yield examination.finding("segments.not_allowed", details, schema=f'"{schema}"')
    yield from _refused(examination, PRODUCER)
    for each in found:
        if is_overdue(each, PRODUCER, settings, now):
            age = (now - each.end_ms) / 1000 - settings.retention
            yield examination.finding("segment.overdue", {"segment": each.suffix, "age": age})


def _refused(examination: Examination, side: SegmentedSide) -> Iterator[Diagnosis]:
    settings = examination.settings
    with examination.read_only() as connection:
        now, refusal = now_ms(connection), refusal_of(connection, settings.schema, side)
    if refusal and (left := refusal.left(now)) < last_moment(settings, side):
        first = dt.datetime.fromtimestamp(now / 1000 + left, dt.UTC).isoformat(timespec="seconds")
        drop = " ".join(f"{statement.sql};" for statement in letting_in(settings.schema, side))
        details = {"part": side.part, "first": first, "left": max(left, 0.0)}
        yield examination.finding("segments.refusing", details, drop=drop)


def held_segments(examination: Examination) -> Iterator[Diagnosis]:
    """A segment of the inbox goes when the passes of all groups have told what their producers still have of it."""
    settings = examination.settings
    schema, retention = settings.schema, settings.inbox_retention
    yield from _refused(examination, INBOX)
    with examination.read_only() as connection:
        now = now_ms(connection)
        late = [each for each in segments(connection, schema, INBOX) if is_overdue(each, INBOX, settings, now)]
        for each in late:
            age = (now - each.end_ms) / 1000 - retention
            holding = sql.HOLDING(schema, first=each.first, end=each.end, limit=LIMIT)
            for group, topic in execute(connection, holding)[0]:
                details = {"group": group, "topic": topic, "segment": each.suffix, "age": age}
                yield examination.finding("segment.held", details)


# --- settings ----------------------------------------------------------------------------------------------------


def settings(examination: Examination) -> Iterator[Diagnosis]:
    """Settings that contradict each other are refused wherever they are read: nothing starts with them."""
    if examination.refused is not None:
        yield examination.finding("settings.refused", {"error": str(examination.refused)})


def retention_of_consumers(examination: Examination) -> Iterator[Diagnosis]:
    """A consumer's own retries may last longer than those of the settings, for which the inbox was made to remember."""
    if examination.subscriptions is None:
        raise NotInspected("the application and its consumers aren't known")
    known = examination.settings
    for each in examination.subscriptions:
        retries = sum(each.retry_delays) * (1 + known.retry_jitter)
        needed = known.retention + retries
        if known.inbox_retention < needed:
            details = {"group": each.group, "topic": each.topic, "retries": retries, "needed": needed}
            yield examination.finding("settings.retries", details | {"inbox_retention": known.inbox_retention})


# --- the server --------------------------------------------------------------------------------------------------


def version(examination: Examination) -> Iterator[Diagnosis]:
    """Is the server too old?"""
    server = examination.server
    if server.version_number < OLDEST * 10_000:
        details = {"version": server.version, "version_number": server.version_number, "oldest": OLDEST}
        yield examination.finding("server.version", details)


def writable(examination: Examination) -> Iterator[Diagnosis]:
    """A standby answers reads as if all were well."""
    if examination.server.standby:
        yield examination.finding("server.standby", {})
    else:
        yield from _parameters(examination, {"default_transaction_read_only": "server.read_only"}, wrong="on")


def durability(examination: Examination) -> Iterator[Diagnosis]:
    """A committed message must survive a crash, or two databases disagree after it."""
    names = ("fsync", "synchronous_commit", "full_page_writes")
    yield from _parameters(examination, {name: f"durability.{name}" for name in names})


def search_path(examination: Examination) -> Iterator[Diagnosis]:
    """What comes before pg_catalog is taken in its place."""
    for row in sql.SHADOWING.named(examination.rows(sql.SHADOWING)):
        yield examination.finding("search_path.shadows", row, role=examination.server.role)


def autovacuum(examination: Examination) -> Iterator[Diagnosis]:
    """Without it dead rows and old statistics make every pass slower, and the server stops in the end."""
    yield from _parameters(examination, {"autovacuum": "autovacuum.off", "track_counts": "autovacuum.track_counts"})
    if examination.parts:
        for table, option in examination.rows(sql.AUTOVACUUM_OFF, tables=list(examination.tables())):
            yield examination.finding("autovacuum.table", {"table": table, "option": option})


def _parameters(examination: Examination, codes: dict[str, str], wrong: str = "off") -> Iterator[Diagnosis]:
    """Find the parameters of PostgreSQL that are set wrongly, each with its rule.

    The mend sets one for all sessions, or undoes the setting where it was made otherwise (``pg_settings.source``).
    """
    role, database, right = examination.server.role, examination.server.database, "off" if wrong == "on" else "on"
    for name, value, source in examination.rows(sql.PARAMETERS, names=list(codes)):
        mends = {
            "database": f"ALTER DATABASE {database} RESET {name};",
            "user": f"ALTER ROLE {role} RESET {name};",
            "database user": f"ALTER ROLE {role} IN DATABASE {database} RESET {name};",
            "client": f"leave {name} out of the connection's options (URL, PGOPTIONS or connect_args)",
            "command line": f"start the server without {name} on its command line",
        }
        mend = mends.get(source, f"ALTER SYSTEM SET {name} = {right}; SELECT pg_reload_conf();")
        if value == wrong:
            yield examination.finding(codes[name], {"source": source}, mend=mend)


def connections(examination: Examination) -> Iterator[Diagnosis]:
    """A rolling deploy needs the connections of a second worker while the first one still has its own."""
    ((most, reserved, of_role, of_database, used, used_by_role, used_in),) = examination.rows(sql.CONNECTIONS)
    needed = examination.thresholds.connections
    if needed is None:
        subscriptions = examination.subscriptions or ()
        consuming = sum(each.threads * len(each.sources) for each in subscriptions)
        # What such groups leave behind is pruned on connections of its own, one for each database that they read.
        consuming += len({bind for each in subscriptions if not each.transactional for bind in each.sources})
        needed = _OF_A_WORKER + examination.settings.checks_in_flight + consuming
    role, database = examination.server.role, examination.server.database
    limits = [
        (
            most - reserved - used,
            "max_connections",
            f"max_connections = {most}, {reserved} of them reserved, {used} in use",
            f"ALTER SYSTEM SET max_connections = {reserved + used + needed}; and restart the server\n"
            "or put a connection pooler in between",
        )
    ]
    others = (("role", role, of_role, used_by_role), ("database", database, of_database, used_in))
    for kind, name, limit, in_use in others:
        if limit is not None:
            mend = f"ALTER {kind.upper()} {name} CONNECTION LIMIT {in_use + needed};"
            limits.append((limit - in_use, kind, f"the {kind} {name} may have {limit} and has {in_use}", mend))
    left, limited_by, limited, mend = min(limits, key=itemgetter(0))
    if left < needed:
        details = {"left": max(left, 0), "needed": needed, "limited_by": limited_by, "used": used}
        yield examination.finding("connections.few", details | {"max_connections": most}, limited=limited, mend=mend)


def clock(examination: Examination) -> Iterator[Diagnosis]:
    """Nothing is decided by this host's clock; but ids carry it, logs do, and people compare the two."""
    samples: list[tuple[float, float]] = []
    for _ in range(_CLOCK_SAMPLES):
        before = examination.clock()
        (((there,),),) = examination.read(NOW)
        after = examination.clock()
        # The server answers at some moment in between: half the round trip stays unknown.
        samples.append((abs(after - before) / 2, (before + after) / 2 - there.timestamp()))
    uncertain, ahead = min(samples)
    if abs(ahead) - uncertain > examination.thresholds.clock:
        direction = "ahead of" if ahead > 0 else "behind"
        details = {"ahead": ahead, "uncertain": uncertain}
        yield examination.finding("clock.skew", details, skew=abs(ahead), direction=direction)


# --- what keeps vacuum from removing dead rows -------------------------------------------------------------------


def open_transactions(examination: Examination) -> Iterator[Diagnosis]:
    """The oldest open transaction; never its query, which may hold secrets."""
    for pid, age, state, application, count in examination.rows(sql.OPEN_TRANSACTIONS):
        details = {"pid": pid, "age": age, "state": state, "application_name": application, "count": count}
        others = f"; {count - 1} more are open for too long" if count > 1 else ""
        yield examination.finding("transaction.open", details, others=others)
    ((hidden, untracked),) = examination.rows(sql.HIDDEN_SESSIONS)
    if hidden:
        role = examination.server.role
        raise NotInspected(f"{hidden} sessions of other roles are hidden from this one; GRANT pg_monitor TO {role};")
    if untracked:
        raise NotInspected(f"{untracked} sessions have track_activities off; ALTER SYSTEM SET track_activities = on;")


def prepared_transactions(examination: Examination) -> Iterator[Diagnosis]:
    """What PREPARE TRANSACTION left behind survives restarts, and holds its locks."""
    for gid, age, literal, count in examination.rows(sql.PREPARED_TRANSACTIONS):
        details = {"gid": gid, "age": age, "count": count}
        others = f" ({count - 1} more are prepared for too long)" if count > 1 else ""
        yield examination.finding("transaction.prepared", details, literal=literal, others=others)


def replication(examination: Examination) -> Iterator[Diagnosis]:
    """A slot remembers for its reader, also when nothing reads it any more; a standby may ask for the same."""
    limits = examination.thresholds
    for name, kind, active, held, wal, drop in examination.rows(sql.SLOTS):
        mend = "see why its reader is slow" if active else f"start its reader again\nif that is gone for good: {drop}"
        words = {"kind": kind, "used": "active" if active else "not in use", "mend": mend}
        details = {"slot": name, "active": active}
        if held is not None and held > limits.held_transactions:
            yield examination.finding("slot.horizon", details | {"transactions": held}, **words)
        if wal is not None and wal > limits.held_wal:
            yield examination.finding("slot.wal", details | {"bytes": int(wal)}, gibibytes=wal / 1024**3, **words)
    for name, held in examination.rows(sql.STANDBYS):
        if held > limits.held_transactions:
            yield examination.finding("standby.horizon", {"standby": name, "transactions": held})


# --- our tables --------------------------------------------------------------------------------------------------


def migrations(examination: Examination) -> Iterator[Diagnosis]:
    """Which parts are installed, and are they of this code's version?"""
    schema, server = examination.settings.schema, examination.server
    try:
        with examination.read_only() as connection:
            revisions = migration.current(connection, schema)
    except DBAPIError as error:
        if sqlstate(error) != "42501":
            raise
        details = {"role": server.role_name, "schema": schema}
        yield examination.finding("tables.unreadable", details, quoted_role=server.role)
        return
    examination.revisions = revisions
    examination.parts = tuple(part for part in chain.PARTS if revisions[part] == chain.head(part))
    if not any(revisions[part] for part in chain.PARTS):
        code = "tables.missing" if revisions["common"] is None else "tables.partly"
        yield examination.finding(code, {"revisions": revisions}, schema=schema)
        return
    for part, revision in revisions.items():
        if revision not in {None, expected := chain.head(part)}:
            code = "tables.older" if chain.known(str(revision)) else "tables.newer"
            details = {"part": part, "database": revision, "expected": expected}
            yield examination.finding(code, details, options=f" --part {part}" if part in chain.PARTS else "")
    for about in sorted({each.about for each in examination.subscriptions or () if each.about is not None}):
        for part in chain.PARTS:
            if revisions[part] is None:
                yield examination.finding("tables.one_part", {"part": part, "topic": about})


def differences(examination: Examination) -> Iterator[Diagnosis]:
    """Columns, defaults, constraints and indexes; storage parameters are the operator's own business."""
    server = examination.server
    if not examination.parts:
        raise NotInspected("there are no tables of this code's version to compare with")
    if server.standby:
        raise NotInspected("the comparison needs temporary tables, which can't be made on a standby")
    if not server.makes_temporary_tables:
        grant = f"GRANT TEMPORARY ON DATABASE {server.database} TO {server.role};"
        raise NotInspected(f"the comparison needs temporary tables; {grant}")
    # Other rules find these.
    tables = list(examination.tables())
    invalid = examination.rows(sql.INVALID_INDEXES, tables=tables)
    known = (
        *(f"index {name} of {table} is " for name, table, *_ in invalid),
        *(f"table {name} is '" for name in tables),
        "common is at revision ",
    )
    timeout = examination.thresholds.statement
    lines = migration.check(examination.engine, examination.parts, examination.settings.schema, timeout=timeout)
    lines = [line for line in lines if not line.startswith(known)]
    if lines:
        more = f", and {len(lines) - 3} more" if len(lines) > 3 else ""
        yield examination.finding("tables.differ", {"differences": lines}, first="; ".join(lines[:3]), others=more)


def indexes(examination: Examination) -> Iterator[Diagnosis]:
    """CREATE or REINDEX … CONCURRENTLY leaves an invalid index behind when it fails: written to, and never read."""
    tables = examination.tables().values()
    ours = {index.name for table in tables for index in table.indexes} | {table.primary_key.name for table in tables}
    invalid = examination.rows(sql.INVALID_INDEXES, tables=[table.name for table in tables])
    for name, table, quoted, of_partition in invalid:
        known = of_partition or name in ours
        details = {"index": name, "table": table, "known": known}
        verb = "REINDEX" if known else "DROP"
        yield examination.finding("index.invalid", details, verb=verb, quoted=quoted)


def sequences(examination: Examination) -> Iterator[Diagnosis]:
    """Logical replication carries rows, and no sequences: what they number then collides, or comes out of order."""
    hidden = []
    for table in examination.tables().values():
        first = table.primary_key.columns.keys()[0]
        leads = {first, *(index.columns.keys()[0] for index in table.indexes)}
        for column in table.columns:
            named = getattr(column.default, "name", None)
            # Dispatch numbers its cursors by itself.
            if (column.identity is None and named is None) or table.name == "dispatch_cursor":
                continue
            newest = "" if column.name in leads else f" ORDER BY {first} DESC LIMIT 1000"
            rows = f"SELECT {column.name} FROM {{s}}.{table.name}{newest}"
            values: dict[str, Any] = {"table": table.name, "column": column.name, "named": named}
            (found,) = examination.read(statement(examination.settings.schema, SEQUENCE, values, rows=rows))
            sequence, value, highest = found[0]
            if value is None:
                hidden.append(sequence)
            elif value < highest:
                details = {"sequence": sequence, "value": value, "column": f"{table.name}.{column.name}"}
                yield examination.finding("sequence.behind", details | {"highest": highest})
    if hidden:
        grant = f"GRANT SELECT ON SEQUENCE {', '.join(hidden)} TO {examination.server.role};"
        raise NotInspected(f"{counted(len(hidden), 'sequence')} can't be read by this role; {grant}")


# --- a connection pooler in between ------------------------------------------------------------------------------
#
# Nothing that a pooler says of itself is relied upon: what it does to connections shows it. A server process that
# serves two connections which are open at the same time, or one process after the other for one connection, is what
# transaction pooling is.


def shares_processes(first: Collection[int], second: Collection[int]) -> bool:
    """Return whether one process served two connections, both open, or several served one of them."""
    return len(set(first)) > 1 or len(set(second)) > 1 or not set(first).isdisjoint(second)


def trouble_with_prepared(threshold: int | None, *, tracked: bool, can_close: bool) -> str | None:
    """Return the fault of prepared statements behind a transaction pooler; None if there is none.

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
    from psycopg import capabilities, pq  # noqa: PLC0415 - importing outbox must not pay for the driver

    if not _pools_transactions(examination):
        return
    threshold, own_engine = examination.prepare_threshold, examination.own_engine
    tracked = _tracks(examination)
    trouble = trouble_with_prepared(threshold, tracked=tracked, can_close=capabilities.has_send_close_prepared())
    if trouble is not None:
        details = {"pooling": "transaction", "prepare_threshold": threshold, "tracked": tracked, "libpq": pq.version()}
        severity, unless = Severity.PROBLEM, ""
        if not own_engine:
            severity, unless = Severity.NOTE, " (unless your engine says prepare_threshold=None)"
        yield examination.finding(
            "pooler.prepared_statements", details, severity=severity, unless=unless, trouble=trouble
        )
    if examination.settings.listen:
        yield examination.finding("pooler.listen", {"pooling": "transaction"})


def _pools_transactions(examination: Examination) -> bool:
    connections = (examination.connection, examination.connect())
    pids: tuple[list[int], list[int]] = ([], [])
    try:
        for connection, served_by in list(zip(connections, pids, strict=True)) * _POOLER_ROUNDS:
            with examination.read_only(connection):
                (((pid,),),) = execute(connection, sql.BACKEND_PID)
                served_by.append(pid)
    finally:
        discard(connections[1])
    return shares_processes(*pids)


def _tracks(examination: Examination) -> bool:
    """Return whether the pooler manages prepared statements: then it gives them names of its own on the server.

    One transaction stays on one server process, so nothing is left behind on it for others.
    """
    from psycopg import pq  # noqa: PLC0415 - importing outbox must not pay for the driver

    name = f"outbox_doctor_{uuid4().hex}"
    with examination.read_only() as connection:
        result = driver_of(connection).pgconn.prepare(name.encode(), b"SELECT 1")
        if result.status != pq.ExecStatus.COMMAND_OK:
            return False
        (((passed_on,),),) = execute(connection, sql.PREPARED_STATEMENT(examination.settings.schema, name=name))
        if passed_on:
            execute(connection, Statement(f"DEALLOCATE {name}"))
    return not passed_on
