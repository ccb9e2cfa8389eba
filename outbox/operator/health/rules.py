"""The rules of health, as data: what is wrong when which number passes which threshold, in which words, what mends it.

`outbox doctor`, the console's overview, ``/metrics`` and `outbox stats` show the same numbers (`stats`); the doctor and
the overview judge them by the same rules. A rule is declared here once. The modules beside this one read the numbers.
"""

from __future__ import annotations

import enum
import shlex
import string
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from outbox.errors import pip_install
from outbox.text import counted, duration

if TYPE_CHECKING:
    from sqlalchemy import URL

    from outbox.settings import Settings


class Severity(enum.StrEnum):
    """How bad a finding is: a problem wants mending; a note is worth knowing, and may be as it should be."""

    PROBLEM = "problem"
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Thresholds:
    """From where on something is a finding, and how long a ``statement`` may take; durations are seconds.

    ``idle_transaction``, ``running_transaction``, ``prepared_transaction``: a transaction open for so long, while
    idle, while it works, or prepared by two-phase commit. ``undispatched``: what waits so long for a worker that should
    take it at once. ``retry``: a retry so much overdue. ``check``: a check overdue by so many of its intervals.
    ``old``: a half that is so many times as old as all its checks should take. ``behind``: a group that has not read
    what is older than this share of the retention. ``lag``: a lag of so many messages that grew in the last ``growing``
    samples. ``worker_lost``: for so long a dead worker is reported. ``reconciled``: no result of a reconciliation for
    so long. ``clock``: a clock so far off. ``held_transactions``: a replication slot or standby that keeps what so many
    transactions left from being vacuumed; ``held_wal``: bytes of WAL kept by a slot. ``connections``: how many more
    must be possible; None: what one more worker needs.
    """

    idle_transaction: float = 300.0
    running_transaction: float = 3600.0
    prepared_transaction: float = 300.0
    undispatched: float = 60.0
    retry: float = 300.0
    check: float = 2.0
    old: float = 3.0
    behind: float = 0.5
    lag: int = 1_000
    growing: int = 5
    worker_lost: float = 3600.0
    reconciled: float = 2 * 86400.0
    clock: float = 5.0
    held_transactions: int = 1_000_000
    held_wal: int = 10 * 1024**3
    connections: int | None = None
    statement: float = 5.0


class AtLeast(int):
    """A count that stopped at its limit; a sentence says so."""

    __slots__ = ()

    def __str__(self) -> str:
        return f"at least {int(self)}"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One thing that is wrong.

    ``code`` is stable, for programs. ``mend`` says which command, SQL or change mends it; each further line is another
    step, or another choice. ``details`` are the numbers and names of the sentence; durations are seconds. ``page`` and
    ``query`` say where the console shows it. No finding shows a body, a query or a password.
    """

    code: str
    severity: Severity
    sentence: str
    mend: str
    details: Mapping[str, Any] = field(default_factory=dict)
    page: str = ""
    query: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule.

    ``sentence`` and ``mend`` are templates of the finding's details and of what `Subject.finding` adds to them. Beside
    the usual formats they know ``{age:duration}``, ``{name:quoted}`` for a shell, ``{n:half|halves}`` for a number with
    its noun and ``{n:=is|are}`` for the word alone. ``{at}`` are the options by which a command of ours finds the
    database, ``{app}`` is the application.

    ``code``: what follows a slash tells two sentences of one code apart. ``value``: the number of a row that must not
    be higher than ``over``, which is a number or the name of a threshold; `Subject.judge` applies it. ``details`` are
    the row's fields that the finding shows, each under its own name or another (``halves=parked``). ``page``: where the
    console shows it, with the details and values of its query (``halves?topic&status=parked``).
    """

    code: str
    sentence: str
    mend: str
    severity: Severity = Severity.PROBLEM
    value: str = ""
    over: str | float = 0
    details: str = ""
    page: str = ""


_SEE_HALF = "see it: outbox half show {half_id} {at}\n"
_DECIDE = "decide one by hand: outbox half commit|rollback {half_id} --reason … {at}"
_WORKER = "outbox run --app {app}"
_GONE = "\nif the group is gone for good: {forget}"

_RULES = (
    # --- halves at the producer ----------------------------------------------------------------------------------
    Rule(
        "half.parked",
        "{halves:half is|halves are} parked in topic {topic!r}, for {age:duration} at the longest ({half_id}): all "
        "checks were used up without a verdict.",
        "see them: outbox half list --status parked --topic {topic:quoted} {at}\n"
        "have them checked again: outbox half reset --status parked --topic {topic:quoted} --reason … {at}\n"
        "or " + _DECIDE,
        value="parked",
        details="topic halves=parked age=oldest_parked half_id=parked_id",
        page="halves?topic&status=parked",
    ),
    Rule(
        "checker.missing",
        "{halves:undecided half|undecided halves} of topic {topic!r}, such as {half_id}, can't be decided: {why}.",
        "register one with @outbox.checker({topic!r}), and run: " + _WORKER + " --roles check\nor " + _DECIDE,
        page="halves?topic&status=orphan",
    ),
    Rule(
        "check.late",
        "{halves:half|halves} of topic {topic!r} {halves:=waits|wait} for a check that was due {overdue:duration} ago: "
        "no worker checks this database, or it can't keep up.",
        _WORKER + " --roles check",
        page="halves?topic&status=orphan",
    ),
    Rule(
        "half.old",
        "The oldest undecided half, {half_id} of topic {topic!r}, is {age:duration} old, and {state}.",
        _SEE_HALF + "see that a worker checks: " + _WORKER + " --roles check\nor " + _DECIDE,
        page="halves?topic",
    ),
    # --- messages at the producer --------------------------------------------------------------------------------
    Rule(
        "op.undispatched",
        "{messages:message|messages} of topic {topic!r}, committed {oldest:duration} ago at the earliest, "
        "{messages:=is|are} not dispatched: no worker dispatches this database, or it can't keep up.",
        _WORKER + " --roles dispatch,release",
        value="oldest_undispatched",
        over="undispatched",
        details="topic messages=undispatched oldest=oldest_undispatched",
        page="messages?topic&status=committed",
    ),
    Rule(
        "message.overdue",
        "{messages:scheduled message|scheduled messages} of topic {topic!r} should have been released, the first "
        "{overdue:duration} ago: no worker releases them, or it can't keep up.",
        _WORKER + " --roles dispatch,release",
        value="overdue",
        details="topic messages=overdue overdue=oldest_overdue",
        page="scheduled?topic",
    ),
    Rule(
        "prune.behind",
        "{halves:half|halves} decided {oldest:duration} ago at the earliest should have been deleted after the "
        "retention of {retention:duration}: no worker prunes, or with another retention.",
        _WORKER + " --roles prune\nsee that the doctor reads the same OUTBOX_RETENTION as the workers",
    ),
    # --- groups at the consumer ----------------------------------------------------------------------------------
    Rule(
        "message.parked",
        "{messages:message of topic|messages of topic} {topic!r} {messages:=is|are} parked in group {group!r}, for "
        "{age:duration} at the longest ({message_id}).",
        "see it: outbox messages show {message_id} {at}\n"
        "have the group try it again: outbox dead retry {group:quoted}/{message_id} --reason … {at}",
        value="parked",
        details="group topic messages=parked age=oldest_parked message_id=parked_id",
        page="dead?group&topic",
    ),
    Rule(
        "retry.overdue",
        "{messages:retry|retries} of group {group!r} of topic {topic!r} {messages:=is|are} overdue, the first by "
        "{overdue:duration}: no worker runs this group, or it can't keep up.",
        _WORKER + " --roles consume,retry",
        value="overdue",
        details="group topic messages=overdue overdue=oldest_due",
        page="inbox?group&topic&status=failed",
    ),
    Rule(
        "group.pruned",
        "Messages of topic {topic!r} were pruned before group {group!r} had read them, in {queues:queue|queues}: the "
        "group stops there.",
        "find out what they were, let the group go on with on_pruned='skip', and keep messages longer "
        "(OUTBOX_RETENTION)" + _GONE,
        page="inbox?group&topic",
    ),
    Rule(
        "group.behind",
        "Group {group!r} is {behind:duration} behind in topic {topic!r}, whose messages are kept for "
        "{retention:duration}: soon they are pruned before the group has read them.",
        _WORKER + " --roles consume,retry\nor keep messages longer (OUTBOX_RETENTION)" + _GONE,
        page="inbox?group&topic",
    ),
    Rule(
        "group.unconsumed",
        "Group {group!r} is {lag:message|messages} behind in topic {topic!r}: no living worker consumes for it.",
        _WORKER + " --roles consume,retry",
        page="inbox?group&topic",
    ),
    Rule(
        "group.lag",
        "Group {group!r} is {lag:message|messages} behind in topic {topic!r}, and falls further behind: {grown:,} in "
        "the last minutes.",
        "give the group more workers, threads or a bigger batch",
        Severity.NOTE,
        page="inbox?group&topic",
    ),
    Rule(
        "reconciliation.failed",
        "The last reconciliation of topic {topic!r} with group {group!r} failed {age:duration} ago: {error}",
        "see: outbox reconcile runs {at}",
        page="system?group&topic",
    ),
    Rule(
        "reconciliation.differences",
        "The last reconciliation of topic {topic!r} with group {group!r} found {differences:difference|differences} "
        "{age:duration} ago{repaired}; see: outbox reconcile runs",
        "see: outbox reconcile runs {at}",
        page="system?group&topic",
    ),
    Rule(
        "reconciliation.overdue",
        "No reconciliation of topic {topic!r} with group {group!r} has come to a result {since}.",
        "see: outbox reconcile runs {at}\nrun a worker that declares it: " + _WORKER,
        Severity.NOTE,
        page="system?group&topic",
    ),
    # --- workers -------------------------------------------------------------------------------------------------
    Rule(
        "worker.none",
        "No worker is alive in database {database!r}{since}: nothing is {undone} there.",
        _WORKER,
        page="handlers",
    ),
    Rule(
        "worker.lost",
        "Worker {worker} was last seen {age:duration} ago, and has not ended in order: it died, or can't reach its "
        "database.",
        "see its log\n" + _WORKER,
        Severity.NOTE,
        page="handlers",
    ),
    Rule(
        "duty.failing",
        "Duty {duty!r} of worker {worker} has failed {failures:time|times} in a row: {error}",
        "see its log, and mend what the error names",
        page="handlers",
    ),
    Rule(
        "duty.missing/dispatch",
        "No living worker dispatches database {database!r}: what is committed there never becomes a message.",
        _WORKER + " --roles dispatch,release",
        page="handlers",
    ),
    Rule(
        "duty.missing/check",
        "No living worker checks undecided halves in database {database!r}.",
        _WORKER + " --roles check",
        page="halves",
    ),
    Rule(
        "duty.missing/bulk",
        "{jobs:bulk job waits|bulk jobs wait} in database {database!r}, the oldest for {age:duration}: no living "
        "worker there has the role bulk.",
        _WORKER + " --roles bulk",
        page="bulk-jobs",
    ),
    Rule(
        "database.unreachable",
        "Database {database!r} can't be reached: {error}",
        "start it, or mend its address and what is between\nsee: outbox doctor {at}",
        page="system",
    ),
    # --- settings ------------------------------------------------------------------------------------------------
    Rule(
        "settings.refused",
        "The settings are refused, so that nothing starts with them: {error}.",
        "change the OUTBOX_… variable (or the argument of Settings) that the sentence names\n"
        "everything else was inspected with the defaults",
    ),
    Rule(
        "settings.retries",
        "Group {group!r} of topic {topic!r} retries for {retries:.0f} s, so a message can come {needed:.0f} s after it "
        "was dispatched, and the inbox forgets after {inbox_retention:.0f} s.",
        "set inbox_retention (OUTBOX_INBOX_RETENTION) to at least {needed:.0f}, or set fewer retry_delays",
    ),
    # --- the server ----------------------------------------------------------------------------------------------
    Rule(
        "server.version",
        "The server is PostgreSQL {version}; the outbox needs {oldest} or newer.",
        "upgrade the server to PostgreSQL {oldest} or newer (pg_upgrade)",
    ),
    Rule(
        "server.standby",
        "This is a standby: it can be read, and nothing can be sent, decided, dispatched or consumed in it.",
        "connect to the primary\nwith several hosts in the URL, add target_session_attrs=read-write",
    ),
    Rule(
        "server.read_only",
        "Transactions are read-only by default (default_transaction_read_only): nothing can be sent, decided, "
        "dispatched or consumed.",
        "SET default_transaction_read_only = off; {mend}",
    ),
    Rule(
        "durability.fsync",
        "fsync is off: when the machine crashes, committed messages and business data are lost or damaged.",
        "{mend}",
    ),
    Rule(
        "durability.synchronous_commit",
        "synchronous_commit is off: a crash of the server can forget transactions whose messages were already "
        "consumed in another database.",
        "{mend}",
    ),
    Rule(
        "durability.full_page_writes",
        "full_page_writes is off: unless the file system never tears a page, a crash can damage the tables.",
        "{mend}",
        Severity.NOTE,
    ),
    Rule(
        "connections.few",
        "{left} more connections are possible ({limited}), and one more worker needs up to {needed}.",
        "{mend}",
    ),
    Rule(
        "clock.skew",
        "The clock of this host is {skew:duration} {direction} the database's: nothing is decided by it, but the ids "
        "made here carry it, so lists are out of order.",
        "synchronise this host's clock, or the database server's: timedatectl set-ntp true\nor chronyc makestep",
    ),
    Rule(
        "pooler.prepared_statements",
        "There is a transaction pooler in between, psycopg prepares statements{unless}, {trouble}.",
        'create_engine(url, connect_args={{"prepare_threshold": None}})\nor PgBouncer 1.22 or newer with '
        "max_prepared_statements > 0, and libpq 17 or newer (psycopg[binary])",
    ),
    Rule(
        "pooler.listen",
        "There is a transaction pooler in between, and listen is on: notifications never arrive; workers find that "
        "out, and poll.",
        "set listen=False (OUTBOX_LISTEN=false)",
        Severity.NOTE,
    ),
    # --- what holds vacuum back ----------------------------------------------------------------------------------
    Rule(
        "transaction.open",
        "A transaction has been open for {age:duration} (pid {pid}, {state}, application {application_name!r}{others})."
        " Vacuum can't remove what was deleted since, and a fence that it holds keeps its half undecided.",
        "SELECT pg_terminate_backend({pid});",
    ),
    Rule(
        "transaction.prepared",
        "The two-phase transaction {gid!r} has been prepared for {age:duration}{others}: it keeps its locks and holds "
        "vacuum back until it is ended.",
        "find out from its transaction manager how it was decided\n"
        "if it was rolled back: ROLLBACK PREPARED {literal};\nif it was committed: COMMIT PREPARED {literal};",
    ),
    Rule(
        "slot.horizon",
        "The {kind} replication slot {slot!r} ({used}) holds vacuum back by {transactions} transactions.",
        "{mend}",
    ),
    Rule(
        "slot.wal",
        "The {kind} replication slot {slot!r} ({used}) keeps {gibibytes:.1f} GiB of WAL on the disk.",
        "{mend}",
    ),
    Rule(
        "standby.horizon",
        "The standby {standby!r} holds vacuum back by {transactions} transactions (hot_standby_feedback).",
        "end the long queries on the standby, or set hot_standby_feedback = off there",
    ),
    # --- tables --------------------------------------------------------------------------------------------------
    Rule(
        "tables.unreadable",
        "The role {quoted_role} may not read schema {schema}, so nothing in it could be inspected.",
        "GRANT USAGE ON SCHEMA {schema} TO {quoted_role};\n"
        "GRANT SELECT ON ALL TABLES IN SCHEMA {schema} TO {quoted_role};",
    ),
    Rule(
        "tables.missing",
        "There are no outbox tables in schema {schema!r} of this database.",
        "outbox db upgrade {at}\nadd --part producer or --part consumer where only one side is used",
    ),
    Rule(
        "tables.partly",
        "Of the outbox, only the tables common to both sides are in schema {schema!r}.",
        "outbox db upgrade {at}\nadd --part producer or --part consumer where only one side is used",
    ),
    Rule(
        "tables.older",
        "The {part} tables are at {database}, older than this code ({expected}).",
        "outbox db upgrade{options} {at}",
    ),
    Rule(
        "tables.newer",
        "The {part} tables are at {database}, newer than this code ({expected}).",
        pip_install(),
    ),
    Rule(
        "tables.differ",
        "The tables differ from what this code expects: {first}{others}.",
        "see all: outbox db check {at}\nhow each is made: outbox db sql",
    ),
    Rule(
        "index.invalid",
        "The index {index} of {table} is invalid: every write pays for it, and no statement can use it.",
        "{verb} INDEX CONCURRENTLY {quoted};",
    ),
    Rule(
        "autovacuum.off",
        "autovacuum is off: dead rows pile up, the planner's statistics grow old, and in the end there are no "
        "transaction ids left.",
        "{mend}",
    ),
    Rule(
        "autovacuum.track_counts",
        "track_counts is off: autovacuum can't know which tables need it, and does nothing.",
        "{mend}",
    ),
    Rule(
        "autovacuum.table",
        "Autovacuum is off for {table} ({option}): its dead rows pile up.",
        "ALTER TABLE {table} RESET ({option});",
    ),
)

#: The rules by their codes.
RULES: Mapping[str, Rule] = {rule.code: rule for rule in _RULES}

#: The rules that judge the rows of `outbox.operator.health.stats`, of a topic and of a group.
TOPIC_RULES = ("half.parked", "op.undispatched", "message.overdue")
GROUP_RULES = ("message.parked", "retry.overdue")


class _Sentences(string.Formatter):
    """Formats the templates of rules."""

    def format_field(self, value: Any, format_spec: str) -> str:
        if format_spec == "duration":
            return duration(value)
        if format_spec == "quoted":
            return shlex.quote(str(value))
        one, separator, several = format_spec.removeprefix("=").partition("|")
        if not separator:
            return str(super().format_field(value, format_spec))
        if format_spec.startswith("="):
            return one if value == 1 else several
        return counted(value, one, several)


_SENTENCES = _Sentences()


@dataclass(kw_only=True)
class Subject:
    """A database that is judged: its name, its address, and the settings with which it is used.

    ``app`` is what the application is called in commands.
    """

    name: str
    url: URL
    settings: Settings
    app: str = "MODULE:OBJECT"
    thresholds: Thresholds = field(default_factory=Thresholds)

    @property
    def schema(self) -> str:
        """The schema of the tables."""
        return self.settings.schema

    @property
    def options(self) -> str:
        """The options by which a command of ours finds this database; a password in its URL is masked."""
        url = shlex.quote(self.url.render_as_string(hide_password=True))
        return f"--url {url}{'' if self.schema == 'outbox' else f' --schema {self.schema}'}"

    def finding(
        self, code: str, details: Mapping[str, Any], *, severity: Severity | None = None, **words: object
    ) -> Diagnosis:
        """Return a finding by the rule of this code; ``words`` are for its texts only."""
        rule = RULES[code]
        values = {"at": self.options, "app": self.app, "database": self.name, **details, **words}
        page, _, names = rule.page.partition("?")
        query = {"database": self.name} if page else {}
        for name, equals, value in (each.partition("=") for each in names.split("&") if each):
            query[name] = value if equals else str(values[name])
        return Diagnosis(
            rule.code.partition("/")[0],
            severity or rule.severity,
            _SENTENCES.format(rule.sentence, **values),
            _SENTENCES.format(rule.mend, **values),
            dict(details),
            page,
            query,
        )

    def judge(self, codes: Iterable[str], rows: Iterable[object], limit: int) -> Iterator[Diagnosis]:
        """Judge rows of numbers by their rules; a count that has reached ``limit`` stopped there."""
        for row in rows:
            for rule in (RULES[code] for code in codes):
                value = getattr(row, rule.value)
                threshold = getattr(self.thresholds, rule.over) if isinstance(rule.over, str) else rule.over
                if value is None or value <= threshold:
                    continue
                fields = [each.partition("=") for each in rule.details.split()]
                details = {name: at_most(getattr(row, source or name), limit) for name, _, source in fields}
                yield self.finding(rule.code, details)


def at_most(value: Any, limit: int) -> Any:
    """Return a number; as `AtLeast` where it is a count that has reached its limit."""
    return AtLeast(value) if isinstance(value, int) and value >= limit else value
