"""Is the server fit for it: version, writable, durable, with connections left, and a clock like ours."""

from __future__ import annotations

from collections.abc import Iterator

from outbox.operator.health.doctor import sql
from outbox.operator.health.doctor.activity import parameters, set_to
from outbox.operator.health.doctor.patient import Patient, Server
from outbox.operator.health.doctor.report import Finding, note, problem
from outbox.text import duration

#: The oldest version of PostgreSQL that has what the statements need.
OLDEST = 13

# Dispatch and release share a connection, so do prune and probes; one checks, one listens.
_OF_A_WORKER = 4
_PROBES = 3


def version(patient: Patient) -> Iterator[Finding]:
    """Xid8 and pg_current_snapshot() came with 13."""
    yield from too_old(patient.server)


def too_old(server: Server) -> Iterator[Finding]:
    """Tell if a server is older than what is supported."""
    if server.version_number < OLDEST * 10_000:
        yield problem(
            "server.version",
            f"The server is PostgreSQL {server.version}; the outbox needs {OLDEST} or newer.",
            f"upgrade the server to PostgreSQL {OLDEST} or newer (pg_upgrade)",
            version=server.version, version_number=server.version_number, oldest=OLDEST,
        )  # fmt: skip


def writable(patient: Patient) -> Iterator[Finding]:
    """A standby answers reads as if all were well."""
    if patient.server.standby:
        yield problem(
            "server.standby",
            "This is a standby: it can be read, and nothing can be sent, decided, dispatched or consumed in it.",
            "connect to the primary\nwith several hosts in the URL, add target_session_attrs=read-write",
        )
        return
    read_only = parameters(patient, "default_transaction_read_only")["default_transaction_read_only"]
    if read_only.value == "on":
        yield problem(
            "server.read_only",
            "Transactions are read-only by default (default_transaction_read_only): nothing can be sent, decided, "
            "dispatched or consumed.",
            f"SET default_transaction_read_only = off; {set_to(patient, read_only, 'off')}",
            source=read_only.source,
        )


def durability(patient: Patient) -> Iterator[Finding]:
    """A committed message must survive a crash, or two databases disagree after it.

    Without fsync a crash of the machine loses or tears what was committed. With asynchronous commit the server forgets
    the last transactions in a crash, whose messages others may have consumed. Without full pages a crash can tear
    pages, unless the file system writes them whole (ZFS does): hence a note.
    """
    found = parameters(patient, "fsync", "synchronous_commit", "full_page_writes")
    if found["fsync"].value == "off":
        yield problem(
            "durability.fsync",
            "fsync is off: when the machine crashes, committed messages and business data are lost or damaged.",
            set_to(patient, found["fsync"], "on"),
        )
    if found["synchronous_commit"].value == "off":
        yield problem(
            "durability.synchronous_commit",
            "synchronous_commit is off: a crash of the server can forget transactions whose messages were consumed "
            "elsewhere.",
            set_to(patient, found["synchronous_commit"], "on"),
            source=found["synchronous_commit"].source,
        )
    if found["full_page_writes"].value == "off":
        yield note(
            "durability.full_page_writes",
            "full_page_writes is off: unless the file system never tears a page, a crash can damage the tables.",
            set_to(patient, found["full_page_writes"], "on"),
        )


def connections(patient: Patient) -> Iterator[Finding]:
    """A rolling deploy needs the connections of a second worker while the first one still has its own."""
    ((row,),) = patient.read(sql.connections())
    everybody, reserved, of_role, of_database, used, used_by_role, used_in_database = row
    left = {"max_connections": everybody - reserved - used}
    if of_role is not None:
        left["role"] = of_role - used_by_role
    if of_database is not None:
        left["database"] = of_database - used_in_database
    least = min(left, key=lambda name: left[name])
    consuming = sum(each.threads for each in patient.subscriptions or ())
    needed = patient.limits.connections
    if needed is None:
        needed = _OF_A_WORKER + patient.settings.checks_in_flight + consuming
    if left[least] >= needed:
        return
    role, database = patient.server.role, patient.server.database
    limited, mend = {
        "max_connections": (
            f"max_connections = {everybody}, {reserved} of them reserved, {used} in use",
            f"ALTER SYSTEM SET max_connections = {everybody + needed - left[least]}; and restart the server\n"
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
    yield problem(
        "connections.few",
        f"{max(left[least], 0)} more connections are possible ({limited}), and one more worker needs up to {needed}.",
        mend,
        left=max(left[least], 0), needed=needed, limited_by=least, used=used, max_connections=everybody,
    )  # fmt: skip


def clock(patient: Patient) -> Iterator[Finding]:
    """Nothing is decided by this host's clock; but ids carry it, logs do, and people compare the two."""
    best: tuple[float, float] | None = None
    for _ in range(_PROBES):
        before = patient.clock()
        (((there,),),) = patient.read(sql.clock())
        after = patient.clock()
        # The answer is from some moment in between: half the round trip is what can't be known.
        probe = (abs(after - before) / 2, (before + after) / 2 - there)
        best = min(best or probe, probe)
    assert best is not None  # noqa: S101 - there is at least one probe
    unknown, ahead = best
    if abs(ahead) - unknown > patient.limits.clock:
        yield problem(
            "clock.skew",
            f"The clock of this host is {duration(abs(ahead))} {'ahead of' if ahead > 0 else 'behind'} the database's: "
            "nothing is decided by it, but the ids made here carry it, so lists are out of order.",
            "synchronise this host's clock, or the database server's: timedatectl set-ntp true\nor chronyc makestep",
            ahead=ahead, uncertain=unknown,
        )  # fmt: skip
