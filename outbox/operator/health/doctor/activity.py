"""Who keeps vacuum from removing dead rows: transactions, two-phase transactions, replication.

PostgreSQL's configuration parameters: their values, and the SQL that changes one where it was set.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from outbox.operator.health.doctor import sql
from outbox.operator.health.doctor.patient import Patient, Unseen
from outbox.operator.health.doctor.report import Finding, problem
from outbox.text import duration


def open_transactions(patient: Patient) -> Iterator[Finding]:
    """The oldest one; never what it was doing, since a query may hold secrets."""
    limits = patient.limits
    oldest, ((hidden, untracked),) = patient.read(
        sql.open_transactions(limits.idle_transaction, limits.running_transaction), sql.hidden_sessions()
    )
    for pid, age, state, application, count in oldest:
        who = f"pid {pid}, {state}, application {application!r}"
        others = f"; {count - 1} more are open for too long" if count > 1 else ""
        yield problem(
            "transaction.open",
            f"A transaction has been open for {duration(age)} ({who}{others}). "
            "Vacuum can't remove what was deleted since, and a fence that it holds keeps its half undecided.",
            f"SELECT pg_terminate_backend({pid});",
            pid=pid, age=age, state=state, application_name=application, count=count,
        )  # fmt: skip
    if hidden:
        raise Unseen(
            f"{hidden} sessions of other roles are hidden from this one; GRANT pg_monitor TO {patient.server.role};"
        )
    if untracked:
        raise Unseen(f"{untracked} sessions have track_activities off; ALTER SYSTEM SET track_activities = on;")


def prepared_transactions(patient: Patient) -> Iterator[Finding]:
    """What PREPARE TRANSACTION left behind survives restarts, and holds its locks."""
    (rows,) = patient.read(sql.prepared_transactions(patient.limits.prepared_transaction))
    for gid, age, mend, count in rows:
        others = f" ({count - 1} more are prepared for too long)" if count > 1 else ""
        yield problem(
            "transaction.prepared",
            f"The two-phase transaction {gid!r} has been prepared for {duration(age)}{others}: it keeps its locks and "
            "holds vacuum back until somebody ends it.",
            f"{mend}\nor COMMIT PREPARED, as its transaction manager says",
            gid=gid, age=age, count=count,
        )  # fmt: skip


def replication(patient: Patient) -> Iterator[Finding]:
    """A slot remembers for its reader, also when nobody reads any more; a standby may ask for the same."""
    limits = patient.limits
    slots, standbys = patient.read(sql.slots(), sql.standbys())
    for name, kind, active, held, wal, drop in slots:
        used = "active" if active else "used by nobody"
        mend = "see why its reader is slow" if active else f"start its reader again\nif that is gone for good: {drop}"
        if held is not None and held > limits.held_transactions:
            yield problem(
                "slot.horizon",
                f"The {kind} replication slot {name!r} ({used}) holds vacuum back by {held} transactions.",
                mend,
                slot=name, active=active, transactions=held,
            )  # fmt: skip
        if wal is not None and wal > limits.held_wal:
            yield problem(
                "slot.wal",
                f"The {kind} replication slot {name!r} ({used}) keeps {wal / 1024**3:.1f} GiB of WAL on the disk.",
                mend,
                slot=name, active=active, bytes=int(wal),
            )  # fmt: skip
    for name, held in standbys:
        if held > limits.held_transactions:
            yield problem(
                "standby.horizon",
                f"The standby {name!r} holds vacuum back by {held} transactions (hot_standby_feedback).",
                "end the long queries on the standby, or set hot_standby_feedback = off there",
                standby=name, transactions=held,
            )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter as it is for the doctor's session, and where that value comes from (``pg_settings.source``)."""

    name: str
    value: str
    source: str


def parameters(patient: Patient, *names: str) -> dict[str, Parameter]:
    """Return parameters by name."""
    (rows,) = patient.read(sql.parameters(names))
    return {row[0]: Parameter(*row) for row in rows}


def set_to(patient: Patient, parameter: Parameter, value: str) -> str:
    """Return the SQL that gives a parameter this value, for all or where it was set otherwise."""
    role, database = patient.server.role, patient.server.database
    match parameter.source:
        case "database":
            return f"ALTER DATABASE {database} RESET {parameter.name};"
        case "user":
            return f"ALTER ROLE {role} RESET {parameter.name};"
        case "database user":
            return f"ALTER ROLE {role} IN DATABASE {database} RESET {parameter.name};"
        case "client":
            return f"leave {parameter.name} out of the connection's options (URL, PGOPTIONS or connect_args)"
        case "command line":
            return f"start the server without {parameter.name} on its command line"
    return f"ALTER SYSTEM SET {parameter.name} = {value}; SELECT pg_reload_conf();"
