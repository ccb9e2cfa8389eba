"""Declare the rules of health, as data: number, threshold, words and mend of each fault.

`outbox doctor`, the console's overview, ``/metrics`` and `outbox stats` show the same numbers (`stats`); the doctor and
the overview judge them by the same rules. A rule is declared here once. The modules beside this one read the numbers.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from outbox.errors import pip_install

#: So many are counted; a number that has come to it means "at least".
LIMIT = 10_000
#: The outcomes of a reconciliation that are in order (`outbox.reconcile.job.Outcome`).
IN_ORDER = frozenset({"consumed", "rolled_back", "left_out", "in_flight", "unjudged"})


class Severity(enum.StrEnum):
    """How bad a finding is: a problem wants mending; a note is worth knowing, and may be as it should be."""

    PROBLEM = "problem"
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Thresholds:
    """From where on something is a finding, and how long a ``statement`` may take; durations are seconds.

    ``lock``: a lock of dispatch or of a group's queue held by one transaction for so long.
    ``idle_transaction``, ``running_transaction``, ``prepared_transaction``: a transaction open for so long, while idle,
    while it works, or prepared by two-phase commit. ``undispatched``: what waits so long for a worker that should take
    it at once. ``retry``: a retry so much overdue. ``check``: a check overdue by so many of its intervals. ``old``: a
    half that is so many times as old as all its checks should take. ``behind``: a group that hasn't read messages older
    than this share of the retention. ``lag``: a lag of so many messages that grew in the last ``growing`` samples.
    ``saga``: an answer to a saga's command overdue for so long.
    ``worker_lost``: for so long a dead worker is reported. ``lost``: for so long, a loss of the producer.
    ``unreachable``: a known group that can't be asked for more passes than that.
    ``confirm``: no pass has ended for so many of its intervals. ``reconciled``: no result of a reconciliation for so
    long. ``clock``: a clock so far off. ``held_transactions``: a replication slot or standby that keeps what so many
    transactions left from being vacuumed; ``held_wal``: bytes of WAL kept by a slot. ``connections``: how many more
    must be possible; None: what one more worker needs.
    """

    lock: float = 60.0
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
    saga: float = 300.0
    worker_lost: float = 3600.0
    lost: float = 7 * 86400.0
    unreachable: int = 1
    confirm: float = 10.0
    reconciled: float = 2 * 86400.0
    clock: float = 5.0
    held_transactions: int = 1_000_000
    held_wal: int = 10 * 1024**3
    connections: int | None = None
    statement: float = 5.0


class NotInspected(Exception):
    """Something could not be inspected, or only in part; says why, and how it could be."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One thing that is wrong.

    ``code`` is stable, for programs. ``mend`` says which command, SQL or change mends it; each further line is another
    step, or another choice. ``details`` are the numbers and names of the sentence; durations are seconds. ``page`` and
    ``query`` say where the console shows it, ``database`` where it was found. ``silenced`` says until when, by which
    operator and why it needs no attention; it is empty where it does. No finding shows a body, a query or a password.
    """

    code: str
    severity: Severity
    sentence: str
    mend: str
    details: Mapping[str, Any] = field(default_factory=dict)
    page: str = ""
    query: Mapping[str, str] = field(default_factory=dict)
    database: str = ""
    silenced: str = ""


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule.

    ``sentence`` and ``mend`` are templates of the finding's details and of what `Subject.finding` adds to them. Beside
    the usual formats they know ``{age:duration}``, ``{name:quoted}`` for a shell, ``{n:half|halves}`` for a number with
    its noun and ``{n:=is|are}`` for the word alone. ``{at}`` are the options by which a command of ours finds the
    database, ``{app}`` is the application; ``{mend}`` is the finding's own.

    ``value``: the number of a row that must not be higher than the threshold ``over``, or than 0; `Subject.judge`
    applies it. ``details`` are the row's fields that the finding shows, each under its own name or another
    (``halves=parked``); its templates know the others too. ``page``: where the console shows it, with the details and
    values of its query (``halves?topic&status=parked``).
    """

    sentence: str
    mend: str = "{mend}"
    severity: Severity = Severity.PROBLEM
    value: str = ""
    over: str = ""
    details: str = ""
    page: str = ""


_SEE_HALF = "see it: outbox half show {half_id} {at}\n"
_DECIDE = "decide one by hand: outbox half commit|rollback {half_id} --reason … {at}"
_WORKER = "outbox run --app {app}"
_GONE = "\nif the group is gone for good: {forget}"

#: The rules by their codes. What follows a slash tells two sentences of one code apart.
RULES: Mapping[str, Rule] = {
    # --- halves at the producer ----------------------------------------------------------------------------------
    "half.parked": Rule(
        "{halves:half is|halves are} parked in topic {topic!r}, for {age:duration} at the longest ({half_id}): all "
        "checks were used up without a verdict.",
        "see them: outbox half list --status parked --topic {topic:quoted} {at}\n"
        "have them checked again: outbox half reset --status parked --topic {topic:quoted} --reason … {at}\n"
        "or " + _DECIDE,
        value="parked",
        details="topic halves=parked age=oldest_parked half_id=parked_id",
        page="halves?topic&status=parked",
    ),
    "checker.missing": Rule(
        "{halves:undecided half|undecided halves} of topic {topic!r}, such as {half_id}, can't be decided: {why}.",
        "register one with @outbox.checker({topic!r}), and run: " + _WORKER + " --roles check\nor " + _DECIDE,
        page="halves?topic&status=orphan",
    ),
    "check.late": Rule(
        "{halves:half|halves} of topic {topic!r} {halves:=waits|wait} for a check that was due {overdue:duration} ago: "
        "no worker checks this database, or it can't keep up.",
        _WORKER + " --roles check",
        page="halves?topic&status=orphan",
    ),
    "check.late/remote": Rule(
        "{halves:half|halves} of {topic!r} can't be checked since {overdue:duration}: no RocketMQ client is connected.",
        "start the producer again, and see that a server runs: outbox rocketmq serve {at}\nor " + _DECIDE,
        page="halves?topic&status=orphan",
    ),
    "half.old": Rule(
        "The oldest undecided half, {half_id} of topic {topic!r}, is {age:duration} old, and {state}.",
        _SEE_HALF + "see that a worker checks: " + _WORKER + " --roles check\nor " + _DECIDE,
        page="halves?topic",
    ),
    # --- messages at the producer --------------------------------------------------------------------------------
    "op.undispatched": Rule(
        "{messages:message|messages} of topic {topic!r}, committed {oldest:duration} ago at the earliest, "
        "{messages:=is|are} not dispatched: no worker dispatches this database, or it can't keep up.",
        _WORKER + " --roles dispatch,release",
        value="oldest_undispatched",
        over="undispatched",
        details="topic messages=undispatched oldest=oldest_undispatched",
        page="messages?topic&status=committed",
    ),
    "half.missing": Rule(
        "{halves:committed half is|committed halves are} gone, the first ({half_id}) since {age:duration} or longer: "
        "{halves:=it was|they were} deleted, so that dispatch could make no message.",
        "find out which program deletes from half_message\n"
        "put the rows back from a backup, and let a reconciliation dispatch them: outbox reconcile --apply …",
        value="halves",
        details="halves half_id age",
    ),
    "half.unsent": Rule(
        "{halves:message|messages} sent in SQL or with a driver's own connection, the first ({half_id}) {age:duration} "
        "ago, {halves:=has|have} no op: the trigger commit_half of half_message didn't run, and "
        "{halves:=it|they} will never go out.",
        "have the trigger run: ALTER TABLE … ENABLE TRIGGER commit_half, and session_replication_role = origin\n"
        "send {halves:=it|each of them}: outbox half commit {half_id} --reason … {at}",
        value="halves",
        details="halves half_id age",
    ),
    "message.torn": Rule(
        "{messages:message has|messages have} rows that contradict each other: the first ({half_id}) {how}, since "
        "{age:duration}. Something else than the outbox writes or deletes rows of half_message, op_message or message.",
        "find out what does, and take its privileges away\n"
        "put the lost rows back from a backup, and list them all by a reconciliation (torn): outbox reconcile …",
        value="messages",
        details="messages half_id how age",
    ),
    "message.overdue": Rule(
        "{messages:scheduled message|scheduled messages} of topic {topic!r} should have been released, the first "
        "{overdue:duration} ago: no worker releases them, or it can't keep up.",
        _WORKER + " --roles dispatch,release",
        value="overdue",
        details="topic messages=overdue overdue=oldest_overdue",
        page="scheduled?topic",
    ),
    "delivery.exhausted": Rule(
        "{messages:message of topic|messages of topic} {topic!r} {messages:=was|were} sent again as often as the "
        "settings say, and {messages:=isn't|aren't} in the inbox of a known group; the first ({message_id}, in group "
        "{group!r}) for {age:duration}.",
        "see it: outbox messages show {message_id} {at}\n"
        "find out why the inbox loses it; then send it again: outbox messages resend {message_id} --reason … {at}",
        value="exhausted",
        details="topic messages=exhausted age=oldest_exhausted message_id=exhausted_id group=exhausted_group",
        page="messages?topic&status=resend_exhausted",
    ),
    "intake.gap": Rule(
        "{missing:message|messages} of topic {published!r} of {source!r} {missing:=hasn't|haven't} come to topic "
        "{topic!r}, though later ones of the same queues have for {age:duration}; the first are {first} to {last} of "
        "queue {queue}.",
        "see what the relay of {source!r} has parked, and what the broker has: outbox reconcile intake {topic} --app "
        "{app}\nan intake that takes a part of the topic only: declare it with complete=False",
        value="missing",
        details="topic source published missing queue first last age",
    ),
    "saga.overdue": Rule(
        "{flows:flow|flows} of saga {saga!r} {flows:=waits|wait} for an answer that is overdue, the first ({flow_id}) "
        "for {age:duration}: whether step {step!r} was done, or undone, is unknown.",
        "see it: outbox sagas show {flow_id} {at}\n"
        "find out what its participant did with message {message_id}; have its group try it again where it is parked\n"
        "or answer for it: outbox sagas answer {message_id} done --reason … {at}",
        value="oldest_overdue",
        over="saga",
        details="saga flows=overdue age=oldest_overdue flow_id=overdue_id step=overdue_step message_id=overdue_message",
        page="sagas?saga&overdue=yes",
    ),
    "delivery.unreachable": Rule(
        "Group {group!r} of topic {topic!r} can't be asked what became of its messages, for {passes:pass|passes} in a "
        "row: {error}",
        "see that its database or status service is there, and that its address and token are right",
        value="passes",
        over="unreachable",
        details="topic group passes error",
        page="handlers",
    ),
    "delivery.late": Rule(
        "Worker {worker} has not ended a pass that confirms deliveries for {age:duration}: a consumer doesn't answer.",
        "see the log of the worker; what hangs is cut off when it is stopped, and a pass goes on where that one was",
        page="handlers",
    ),
    "prune.behind": Rule(
        "{halves:half|halves} decided {oldest:duration} ago at the earliest should have been deleted after the "
        "retention of {retention:duration}: no worker prunes, or with another retention.",
        _WORKER + " --roles prune\nsee that the doctor reads the same OUTBOX_RETENTION as the workers",
        value="halves",
        details="halves oldest retention",
    ),
    "segments.not_allowed": Rule(
        "The role {role} may not make or empty segments: halves, ops and messages are deleted row by row, which leaves "
        "dead rows for as long as a transaction keeps an old snapshot.",
        "GRANT {owner} TO {role}; GRANT CREATE ON SCHEMA {schema} TO {role};\nif workers have another role: that one",
        severity=Severity.NOTE,
    ),
    "segments.refusing": Rule(
        "In {left:duration}, at {first}, the {part} refuses all messages: a worker that was making segments for the "
        "time from then on has left a CHECK behind, and none has gone on.",
        _WORKER + " --roles prune\nor by hand: {drop}",
    ),
    "segment.overdue": Rule(
        "Segment {segment} could not be emptied for {age:duration} after its retention: it has many messages that must "
        "be kept, or a transaction always has a lock of it. Its rows are deleted one by one, unless it waits for known "
        "groups.",
        "see the undecided, scheduled and undispatched messages, and the groups behind: outbox stats {at}\n"
        "and which transactions run for long: outbox doctor {at}",
        severity=Severity.NOTE,
    ),
    "segment.held": Rule(
        "Group {group!r} keeps inbox rows of topic {topic!r} that are older than the inbox's retention by "
        "{age:duration} at least: its worker hasn't told which of their messages the producer still has, so that the "
        "segment they are in ({segment}) can't go as a whole.",
        _WORKER + " --roles prune, with this group's consumer\n"
        "see that the producer prunes, and that its retention is shorter than that of the inbox",
        severity=Severity.NOTE,
    ),
    # --- groups at the consumer ----------------------------------------------------------------------------------
    "message.parked": Rule(
        "{messages:message of topic|messages of topic} {topic!r} {messages:=is|are} parked in group {group!r}, the "
        "oldest of them ({message_id}) for {age:duration}.",
        "see it: outbox messages show {message_id} {at}\n"
        "have the group try it again: outbox dead retry {group:quoted}/{message_id} --reason … {at}",
        value="parked",
        details="group topic messages=parked age=oldest_parked message_id=parked_id",
        page="dead?group&topic",
    ),
    "retry.overdue": Rule(
        "{messages:retry|retries} of group {group!r} of topic {topic!r} {messages:=is|are} overdue, the first by "
        "{overdue:duration}: no worker runs this group, or it can't keep up.",
        _WORKER + " --roles consume,retry",
        value="overdue",
        details="group topic messages=overdue overdue=oldest_due",
        page="inbox?group&topic&status=failed",
    ),
    "lease.lapsed": Rule(
        "{messages:message|messages} of topic {topic!r} {messages:=was|were} taken for group {group!r}, and the leases "
        "ended long ago: no client takes what is left, or a handler has the group now.",
        "start a client\nor hand them to the handler: "
        "outbox inbox retry --status taken --group {group:quoted} --topic {topic:quoted} --reason … {at}",
        value="lapsed",
        details="group topic messages=lapsed",
        page="inbox?group&topic&status=taken",
    ),
    "group.pruned": Rule(
        "Messages of topic {topic!r} were pruned before group {group!r} had read them, in {queues:queue|queues}: the "
        "group stops there.",
        "find out what they were, let the group go on with on_pruned='skip', and keep messages longer "
        "(OUTBOX_RETENTION)" + _GONE,
        value="queues",
        details="group topic behind queues",
        page="inbox?group&topic",
    ),
    "group.lost": Rule(
        "The producer has lost {messages:message|messages} of topic {topic!r} that group {group!r} had read, such as "
        "{message_id}: its log went back (a fail-over, a restore), which the group saw {age:duration} ago.",
        "see it: outbox messages show {message_id} {at}\n"
        "see all of them, as lost, after a reconciliation: outbox reconcile runs {at}\n"
        "undo their effects at the consumer, or do at the producer once more what it has forgotten",
        value="lost",
        details="group topic messages=lost age=newest_loss message_id=lost_id",
        page="inbox?group&topic",
    ),
    "group.behind": Rule(
        "Group {group!r} is {behind:duration} behind in topic {topic!r}, whose messages are kept for "
        "{retention:duration}: soon they are pruned before the group has read them.",
        _WORKER + " --roles consume,retry\nor keep messages longer (OUTBOX_RETENTION)" + _GONE,
        value="share",
        over="behind",
        details="group topic behind retention",
        page="inbox?group&topic",
    ),
    "group.paused": Rule(
        "Group {group!r} of topic {topic!r} has been paused for {age:duration} by {by}: {why}",
        "when that is over: outbox group resume {group:quoted} --topic {topic:quoted} {at}",
        Severity.NOTE,
        value="paused",
        details="group topic age=paused by why",
        page="groups",
    ),
    "breaker.open": Rule(
        "Group {group!r} of topic {topic!r} has handled nothing for {age:duration}: its breaker is open, since "
        "everything failed: {because}",
        "mend what the error names; a message is tried from time to time, and the group goes on when that succeeds\n"
        "to have one tried at once: outbox group resume {group:quoted} --topic {topic:quoted} {at}",
        value="opened",
        details="group topic age=opened because",
        page="groups",
    ),
    "topic.silent": Rule(
        "Group {group!r} consumes topic {topic!r}, of which no message was ever dispatched here.",
        "see that its name is that which producers send to: outbox stats {at}",
        severity=Severity.NOTE,
        details="topic group",
    ),
    "topic.unread": Rule(
        "Topic {topic!r} has messages, and no group reads it that this database knows of.",
        "see that the workers which consume it run, and that its name is right: outbox group list {at}\n"
        "or leave it, where its groups are in other databases",
        severity=Severity.NOTE,
        details="topic",
        page="messages?topic",
    ),
    "topic.paused": Rule(
        "The dispatch of topic {topic!r} has been paused for {age:duration} by {by}: {why}",
        "when that is over: outbox topics resume {topic:quoted} {at}",
        Severity.NOTE,
        value="paused",
        details="topic age=paused by why",
        page="groups",
    ),
    "schedule.paused": Rule(
        "Schedule {schedule!r} of topic {topic!r} has been paused for {age:duration} by {by}: {why}",
        "when that is over: outbox cron resume {schedule:quoted} {at}",
        Severity.NOTE,
        value="paused",
        details="schedule topic age=paused by why",
        page="cron",
    ),
    "schedule.overdue": Rule(
        "Schedule {schedule!r} of topic {topic!r} has been due for {age:duration}: no worker has sent its message.",
        _WORKER + " --roles schedule\nif no application declares it: outbox cron delete {schedule:quoted} {at}",
        value="overdue",
        details="schedule topic age=overdue",
        page="cron",
    ),
    "schedule.ahead": Rule(
        "Schedule {schedule!r} sends nothing for {age:duration}: the database's clock was ahead when it sent last.",
        "to have it begin anew with its next time: outbox cron delete {schedule:quoted} {at}",
        value="ahead",
        details="schedule topic age=ahead",
        page="cron",
    ),
    "group.unconsumed": Rule(
        "Group {group!r} is {lag:message|messages} behind in topic {topic!r}: no living worker consumes for it.",
        _WORKER + " --roles consume,retry",
        page="messages?group&topic&status=unconsumed",
    ),
    "group.lag": Rule(
        "Group {group!r} is {lag:message|messages} behind in topic {topic!r}: {grown:,} more than some minutes ago.",
        "give the group more workers, threads or a bigger batch",
        Severity.NOTE,
        page="messages?group&topic&status=unconsumed",
    ),
    "reconciliation.failed": Rule(
        "The last reconciliation of topic {topic!r} with group {group!r} failed {age:duration} ago: {error}",
        "see: outbox reconcile runs {at}",
        page="reconciliations?group&topic",
    ),
    "reconciliation.differences": Rule(
        "The last reconciliation of topic {topic!r} with group {group!r} found {differences:difference|differences} "
        "{age:duration} ago{repaired}.",
        "see: outbox reconcile runs {at}",
        page="reconciliations?group&topic",
    ),
    "reconciliation.unconsumed": Rule(
        "Group {group!r} had {lag:message|messages} of topic {topic!r} yet to consume at the reconciliation "
        "{age:duration} ago: a backlog, and no other difference.",
        "see that workers consume for it: outbox group list {at}",
        Severity.NOTE,
        page="reconciliations?group&topic",
    ),
    "reconciliation.overdue": Rule(
        "No reconciliation of topic {topic!r} with group {group!r} has come to a result {since}.",
        "see: outbox reconcile runs {at}\nrun a worker that declares it: " + _WORKER,
        Severity.NOTE,
        page="reconciliations?group&topic",
    ),
    # --- workers -------------------------------------------------------------------------------------------------
    "worker.none": Rule(
        "No worker is alive in database {database!r}{since}: nothing is {undone} there.", _WORKER, page="handlers"
    ),
    "worker.lost": Rule(
        "Worker {worker} was last seen {age:duration} ago, and has not ended in order: it died, or can't reach its "
        "database.",
        "see its log\n" + _WORKER,
        Severity.NOTE,
        page="handlers",
    ),
    "worker.lost/rocketmq": Rule(
        "Server {worker} of RocketMQ's clients was last seen {age:duration} ago, and has not ended in order: it died, "
        "or can't reach its database.",
        "see its log\noutbox rocketmq serve",
        Severity.NOTE,
        page="handlers",
    ),
    "duty.failing": Rule(
        "Duty {duty!r} of worker {worker} has failed {failures:time|times} in a row: {error}",
        "see its log, and mend what the error names",
        page="handlers",
    ),
    "lock.held": Rule(
        "The lock of {lock} has been held for {age:duration} by one transaction or session (pid {pid}, {state}, user "
        "{user!r}, application {application_name!r}, client {client}): no other worker can go on there.",
        "outbox lock end {session} --reason … {at}\nthe server rolls back what the transaction did, and others go on\n"
        'an application that locks this key for itself: give it other keys, see "Locks" in docs/deploying.md',
        page="locks",
    ),
    "duty.missing/dispatch": Rule(
        "No living worker dispatches database {database!r}: a half committed there never becomes a message.",
        _WORKER + " --roles dispatch,release",
        page="handlers",
    ),
    "duty.missing/check": Rule(
        "No living worker checks undecided halves in database {database!r}.", _WORKER + " --roles check", page="halves"
    ),
    "duty.missing/confirm": Rule(
        "No living worker asks what became of the messages of topic {topic!r} in group {group!r}, which is known in "
        "database {database!r}.",
        _WORKER + " --roles confirm" + _GONE,
        Severity.NOTE,
        page="handlers",
    ),
    "duty.missing/bulk": Rule(
        "{jobs:bulk job waits|bulk jobs wait} in database {database!r}, the oldest for {age:duration}: no living "
        "worker there has the role bulk.",
        _WORKER + " --roles bulk",
        page="bulk-jobs",
    ),
    "database.unreachable": Rule(
        "Database {database!r} can't be reached: {error}",
        "start it, or mend its address and the network between\nsee: outbox doctor {at}",
        page="system",
    ),
    # --- settings ------------------------------------------------------------------------------------------------
    "settings.refused": Rule(
        "The settings are refused, so that nothing starts with them: {error}.",
        "change the OUTBOX_… variable (or the argument of Settings) that the sentence names\n"
        "everything else was inspected with the defaults",
    ),
    "settings.retries": Rule(
        "Group {group!r} of topic {topic!r} retries for {retries:.0f} s, so a message can come {needed:.0f} s after it "
        "was dispatched, and the inbox forgets after {inbox_retention:.0f} s.",
        "set inbox_retention (OUTBOX_INBOX_RETENTION) to at least {needed:.0f}, or set fewer retry_delays",
    ),
    # --- the server ----------------------------------------------------------------------------------------------
    "server.version": Rule(
        "The server is PostgreSQL {version}; the outbox needs {oldest} or newer.",
        "upgrade the server to PostgreSQL {oldest} or newer (pg_upgrade)",
    ),
    "server.standby": Rule(
        "This is a standby: it can be read, and nothing can be sent, decided, dispatched or consumed in it.",
        "connect to the primary\nwith several hosts in the URL, add target_session_attrs=read-write",
    ),
    "server.read_only": Rule(
        "Transactions are read-only by default (default_transaction_read_only): nothing can be sent or consumed.",
        "SET default_transaction_read_only = off; {mend}",
    ),
    "search_path.shadows": Rule(
        "Schema {schema!r} comes before pg_catalog in the search path of role {role}, and has functions or operators "
        "of its own in place of PostgreSQL's ({names}): statements of the outbox, and others, mean something else.",
        "ALTER ROLE {role} RESET search_path;\nor name pg_catalog first in it, or leave pg_catalog out of it",
    ),
    "durability.fsync": Rule(
        "fsync is off: when the machine crashes, committed messages and business data are lost or damaged."
    ),
    "durability.synchronous_commit": Rule(
        "synchronous_commit is off: a crash of the server can forget transactions whose messages were already "
        "consumed in another database.",
    ),
    "durability.full_page_writes": Rule(
        "full_page_writes is off: unless the file system never tears a page, a crash can damage the tables.",
        severity=Severity.NOTE,
    ),
    "connections.few": Rule("{left} more connections are possible ({limited}), and one more worker needs {needed}."),
    "clock.skew": Rule(
        "The clock of this host is {skew:duration} {direction} the database's: nothing is decided by it, but the ids "
        "made here carry it, so lists are out of order.",
        "synchronise this host's clock, or the database server's: timedatectl set-ntp true\nor chronyc makestep",
    ),
    "pooler.prepared_statements": Rule(
        "There is a transaction pooler in between, psycopg prepares statements{unless}, {trouble}.",
        'create_engine(url, connect_args={{"prepare_threshold": None}})\nor PgBouncer 1.22 or newer with '
        "max_prepared_statements > 0, and libpq 17 or newer (psycopg[binary])",
    ),
    "pooler.listen": Rule(
        "There is a transaction pooler in between, and listen is on: notifications never arrive, and workers poll.",
        "set listen=False (OUTBOX_LISTEN=false)",
        Severity.NOTE,
    ),
    # --- what holds vacuum back ----------------------------------------------------------------------------------
    "transaction.open": Rule(
        "A transaction has been open for {age:duration} (pid {pid}, {state}, application {application_name!r}{others})."
        " Vacuum can't remove rows deleted since, and a fence that it holds keeps its half undecided.",
        "SELECT pg_terminate_backend({pid});",
    ),
    "transaction.prepared": Rule(
        "The two-phase transaction {gid!r} has been prepared for {age:duration}{others}: it keeps its locks and holds "
        "vacuum back until it is ended.",
        "find out from its transaction manager how it was decided\n"
        "if it was rolled back: ROLLBACK PREPARED {literal};\nif it was committed: COMMIT PREPARED {literal};",
    ),
    "slot.horizon": Rule(
        "The {kind} replication slot {slot!r} ({used}) holds vacuum back by {transactions} transactions."
    ),
    "slot.wal": Rule("The {kind} replication slot {slot!r} ({used}) keeps {gibibytes:.1f} GiB of WAL on the disk."),
    "standby.horizon": Rule(
        "The standby {standby!r} holds vacuum back by {transactions} transactions (hot_standby_feedback).",
        "end the long queries on the standby, or set hot_standby_feedback = off there",
    ),
    # --- tables --------------------------------------------------------------------------------------------------
    "tables.unreadable": Rule(
        "The role {quoted_role} may not read schema {schema}, so nothing in it could be inspected.",
        "GRANT USAGE ON SCHEMA {schema} TO {quoted_role};\n"
        "GRANT SELECT ON ALL TABLES IN SCHEMA {schema} TO {quoted_role};",
    ),
    "privilege.missing": Rule(
        "The role {quoted_role} is to act as {role_of_ours}, and lacks {count:privilege|privileges} on the {part}'s "
        "tables of database {database!r}: {first}{others}. What needs them fails.",
        "{grants}\nall that it needs: outbox db grants --role {role_of_ours} --to {role:quoted} --part {part}{schema}",
    ),
    "topic.hidden": Rule(
        "Row security hides the messages of topic {topic!r} from the role {quoted_role} in database {database!r}: "
        "group {group!r} would wait for them for ever, and say nothing.",
        "outbox db grants --role consumer --to {role:quoted} --part producer{schema}{topics}\n"
        "and have the owner of the tables run what it prints",
    ),
    "tables.missing": Rule(
        "There are no outbox tables in schema {schema!r} of this database.",
        "outbox db upgrade {at}\nadd --part producer or --part consumer where only one side is used",
    ),
    "tables.partly": Rule(
        "Of the outbox, only the tables common to both sides are in schema {schema!r}.",
        "outbox db upgrade {at}\nadd --part producer or --part consumer where only one side is used",
    ),
    "tables.one_part": Rule(
        "The callbacks of topic {topic!r} need the tables of both parts, and this database has no {part} tables.",
        "outbox db upgrade --part {part} {at}",
    ),
    "tables.older": Rule(
        "The {part} tables are at {database}, older than this code ({expected}).", "outbox db upgrade{options} {at}"
    ),
    "tables.newer": Rule("The {part} tables are at {database}, newer than this code ({expected}).", pip_install()),
    "tables.differ": Rule(
        "The tables differ from what this code expects: {first}{others}.",
        "see all: outbox db check {at}\nhow each is made: outbox db sql",
    ),
    "sequence.behind": Rule(
        "Sequence {sequence} is at {value}, and {column}, which it numbers, has come to {highest}: a switch-over by "
        "logical replication doesn't carry sequences.",
        "SELECT setval('{sequence}', {highest});",
    ),
    "index.invalid": Rule(
        "The index {index} of {table} is invalid: every write pays for it, and no statement can use it.",
        "{verb} INDEX CONCURRENTLY {quoted};",
    ),
    "autovacuum.off": Rule("autovacuum is off: dead rows pile up, statistics grow old, and transaction ids run out."),
    "autovacuum.track_counts": Rule("track_counts is off: autovacuum can't know which tables need it, and does none."),
    "autovacuum.table": Rule(
        "Autovacuum is off for {table} ({option}): its dead rows pile up.", "ALTER TABLE {table} RESET ({option});"
    ),
}
