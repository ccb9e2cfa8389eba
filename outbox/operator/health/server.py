"""Is the server fit for the outbox: version, writable, durable, connections left, clock; what holds vacuum back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from outbox.database.sql import NOW
from outbox.operator.health import sql
from outbox.operator.health.examination import NotInspected

if TYPE_CHECKING:
    from outbox.operator.health.examination import Examination, ServerIdentity
    from outbox.operator.health.rules import Diagnosis, Subject

#: The oldest version of PostgreSQL that has what the statements need: xid8 and pg_current_snapshot() came with 13.
OLDEST = 13

# Dispatch and release share a connection, so do prune and probes; one checks, one listens.
_OF_A_WORKER = 4
_CLOCK_PROBES = 3


def version(examination: Examination) -> Iterator[Diagnosis]:
    """Is the server too old?"""
    yield from judge_version(examination, examination.server)


def judge_version(subject: Subject, server: ServerIdentity) -> Iterator[Diagnosis]:
    """Judge the version of a server."""
    if server.version_number < OLDEST * 10_000:
        details = {"version": server.version, "version_number": server.version_number, "oldest": OLDEST}
        yield subject.finding("server.version", details)


def writable(examination: Examination) -> Iterator[Diagnosis]:
    """A standby answers reads as if all were well."""
    if examination.server.standby:
        yield examination.finding("server.standby", {})
        return
    read_only = examination.parameters("default_transaction_read_only")["default_transaction_read_only"]
    if read_only.value == "on":
        mend = examination.set_to(read_only, "off")
        yield examination.finding("server.read_only", {"source": read_only.source}, mend=mend)


def durability(examination: Examination) -> Iterator[Diagnosis]:
    """A committed message must survive a crash, or two databases disagree after it.

    Without fsync a crash of the machine loses or tears what was committed. With asynchronous commit the server forgets
    the last transactions in a crash, whose messages other databases may have consumed. Without full pages a crash can
    tear pages, unless the file system writes them whole (ZFS does): hence a note.
    """
    names = ("fsync", "synchronous_commit", "full_page_writes")
    for name, parameter in examination.parameters(*names).items():
        if parameter.value == "off":
            mend = examination.set_to(parameter, "on")
            yield examination.finding(f"durability.{name}", {"source": parameter.source}, mend=mend)


def connections(examination: Examination) -> Iterator[Diagnosis]:
    """A rolling deploy needs the connections of a second worker while the first one still has its own."""
    ((row,),) = examination.read(sql.CONNECTIONS)
    most, reserved, of_role, of_database, used, used_by_role, used_in_database = row
    left = {"max_connections": most - reserved - used}
    if of_role is not None:
        left["role"] = of_role - used_by_role
    if of_database is not None:
        left["database"] = of_database - used_in_database
    least = min(left, key=lambda name: left[name])
    consuming = sum(each.threads for each in examination.subscriptions or ())
    needed = examination.thresholds.connections
    if needed is None:
        needed = _OF_A_WORKER + examination.settings.checks_in_flight + consuming
    if left[least] >= needed:
        return
    role, database = examination.server.role, examination.server.database
    limited, mend = {
        "max_connections": (
            f"max_connections = {most}, {reserved} of them reserved, {used} in use",
            f"ALTER SYSTEM SET max_connections = {most + needed - left[least]}; and restart the server\n"
            "or put a connection pooler in between",
        ),
        "role": (
            f"the role {role} may have {of_role} and has {used_by_role}",
            f"ALTER ROLE {role} CONNECTION LIMIT {used_by_role + needed};",
        ),
        "database": (
            f"the database {database} may have {of_database} and has {used_in_database}",
            f"ALTER DATABASE {database} CONNECTION LIMIT {used_in_database + needed};",
        ),
    }[least]
    details = {"left": max(left[least], 0), "needed": needed, "limited_by": least, "used": used}
    yield examination.finding("connections.few", details | {"max_connections": most}, limited=limited, mend=mend)


def clock(examination: Examination) -> Iterator[Diagnosis]:
    """Nothing is decided by this host's clock; but ids carry it, logs do, and people compare the two."""
    probes: list[tuple[float, float]] = []
    for _ in range(_CLOCK_PROBES):
        before = examination.clock()
        (((there,),),) = examination.read(NOW)
        after = examination.clock()
        # The server answers at some moment in between: half the round trip is what can't be known.
        probes.append((abs(after - before) / 2, (before + after) / 2 - there.timestamp()))
    uncertain, ahead = min(probes)
    if abs(ahead) - uncertain > examination.thresholds.clock:
        yield examination.finding(
            "clock.skew",
            {"ahead": ahead, "uncertain": uncertain},
            skew=abs(ahead),
            direction="ahead of" if ahead > 0 else "behind",
        )


# --- what keeps vacuum from removing dead rows -------------------------------------------------------------------


def open_transactions(examination: Examination) -> Iterator[Diagnosis]:
    """The oldest open transaction; never its query, which may hold secrets."""
    limits = examination.thresholds
    oldest, ((hidden, untracked),) = examination.read(
        sql.open_transactions(limits.idle_transaction, limits.running_transaction), sql.HIDDEN_SESSIONS
    )
    for pid, age, state, application, count in oldest:
        details = {"pid": pid, "age": age, "state": state, "application_name": application, "count": count}
        others = f"; {count - 1} more are open for too long" if count > 1 else ""
        yield examination.finding("transaction.open", details, others=others)
    if hidden:
        role = examination.server.role
        raise NotInspected(f"{hidden} sessions of other roles are hidden from this one; GRANT pg_monitor TO {role};")
    if untracked:
        raise NotInspected(f"{untracked} sessions have track_activities off; ALTER SYSTEM SET track_activities = on;")


def prepared_transactions(examination: Examination) -> Iterator[Diagnosis]:
    """What PREPARE TRANSACTION left behind survives restarts, and holds its locks."""
    (rows,) = examination.read(sql.prepared_transactions(examination.thresholds.prepared_transaction))
    for gid, age, literal, count in rows:
        others = f" ({count - 1} more are prepared for too long)" if count > 1 else ""
        details = {"gid": gid, "age": age, "count": count}
        yield examination.finding("transaction.prepared", details, literal=literal, others=others)


def replication(examination: Examination) -> Iterator[Diagnosis]:
    """A slot remembers for its reader, also when nothing reads it any more; a standby may ask for the same."""
    limits = examination.thresholds
    slots, standbys = examination.read(sql.SLOTS, sql.STANDBYS)
    for name, kind, active, held, wal, drop in slots:
        words = {
            "kind": kind,
            "used": "active" if active else "not in use",
            "mend": "see why its reader is slow"
            if active
            else f"start its reader again\nif that is gone for good: {drop}",
        }
        details = {"slot": name, "active": active}
        if held is not None and held > limits.held_transactions:
            yield examination.finding("slot.horizon", details | {"transactions": held}, **words)
        if wal is not None and wal > limits.held_wal:
            yield examination.finding("slot.wal", details | {"bytes": int(wal)}, gibibytes=wal / 1024**3, **words)
    for name, held in standbys:
        if held > limits.held_transactions:
            yield examination.finding("standby.horizon", {"standby": name, "transactions": held})
