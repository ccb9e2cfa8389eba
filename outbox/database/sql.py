"""SQL that several duties share: the status of a message, the audit, locks, time-outs, and notifications.

A notification says that there are new messages in a topic. It carries no truth, only haste.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

from outbox.database.execute import SYNCHRONOUSLY, Statement, Template, lock_key
from outbox.message.model import NUMBERS, Status
from outbox.text import OF_SOURCE, sql_list

# Statistics of a table that was empty a second ago would have the planner read all of it in a burst; or, by bitmap,
# all that is left of a backlog for each of its batches, where an index scan in order stops at the limit.
_PLAN_BY_INDEX = """
SELECT set_config('enable_seqscan', 'off', true), set_config('enable_bitmapscan', 'off', true),
       set_config('jit', 'off', true)
"""
_PLAN_ONCE = f"{_PLAN_BY_INDEX.rstrip()}, set_config('plan_cache_mode', 'force_generic_plan', true)"
#: What `plan_by_index` sets, planned once, among the columns of another statement.
PLANNED_ONCE = _PLAN_ONCE.partition("SELECT")[2]

#: For this transaction, plan statements for each of their values: few rows fit one, and nearly all another. A prepared
#: statement else gets one plan for all values, once that seems as good on average (PostgreSQL: ``plan_cache_mode``).
PLAN_FOR_VALUES = Statement("SELECT set_config('plan_cache_mode', 'force_custom_plan', true)")

_AUDIT = Template("""
INSERT INTO {s}.audit (actor, action, target, reason, result, origin)
VALUES (%s, %s, %s, %s, %s::jsonb, %s::jsonb)
""")

_WAIT = "SELECT set_config('lock_timeout', %s, true)"
_LIMITS = "SELECT set_config('statement_timeout', %s, true), set_config('lock_timeout', %s, true)"

#: For this transaction, have COMMIT wait for the disk, and for a synchronous standby, whatever the setting says: what
#: others act on must not be lost. All that it has read is written out with it.
COMMIT_SYNCHRONOUSLY = Statement(f"SELECT set_config('synchronous_commit', {SYNCHRONOUSLY}, true)")

_READ_ONLY = """
SELECT set_config('transaction_read_only', 'on', true), set_config('statement_timeout', %s, true)
"""

#: The database's clock. One row: ``(time,)``.
NOW = Statement("SELECT clock_timestamp()")

#: Seconds between two reports of a worker.
REPORT_INTERVAL = 10.0
#: A worker that has not reported for so many seconds is taken for dead.
ALIVE = 3 * REPORT_INTERVAL


#: A producing process reports at most once a minute, and only when it sends (seconds).
SENDS_LATELY = 180.0

#: The parts of the name of a database's storage, in SQL that reads ``pg_control_system() s``. It changes when tables
#: may have lost what others have seen: a promotion and a recovery to a point in time change the timeline; pg_upgrade
#: and a restore of a dump into another cluster change the system identifier, into another database, or a copy of one,
#: its oid. A crash and a volume that its storage put back change nothing. The control file
#: tells a new timeline only after its first checkpoint: it is read on standbys alone, where nothing is written. The
#: name of a WAL file has the timeline that is written now; of a constant it would be computed by the planner, which
#: fails on a standby.
STORAGE = """s.system_identifier,
       CASE WHEN pg_is_in_recovery() THEN (SELECT timeline_id FROM pg_control_checkpoint())
            ELSE ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::int END,
       (SELECT oid FROM pg_database WHERE datname = current_database())"""
#: Names the log that a producer's tables are; it changes with their storage, and where a dump is restored over them.
LOG = f"concat_ws('.', {STORAGE}, '{{s}}.message'::regclass::oid)"


def number(position: str) -> str:
    """Return the SQL expression of a position's number."""
    return f"({position} & {NUMBERS})"


#: The feeds that a topic stands for, as an array: of all of its sources; or the one feed that it names.
FEEDS = f"""ARRAY(SELECT %(topic)s::text
            UNION ALL SELECT concat(topic, '{OF_SOURCE}', number) FROM {{s}}.message_source
                       WHERE topic = %(topic)s AND number > 0)"""
#: Joins the source ``s`` of the feed ``p.topic``; NULL where no group has met it.
JOINED_SOURCE = f"LEFT JOIN {{s}}.message_source s ON concat(s.topic, '{OF_SOURCE}' || nullif(s.number, 0)) = p.topic"


def topic_sql(feed: str) -> str:
    """Return the SQL expression of a feed's topic."""
    return f"split_part({feed}, '{OF_SOURCE}', 1)"


def jumps(
    name: str,
    table: str,
    *keys: str,
    where: str = "true",
    start: str = "true",
    selected: str = "",
    then: Sequence[str] = (),
    backwards: bool = False,
) -> str:
    """Return the part ``name`` of a WITH RECURSIVE: one row for each value of ``keys``, found by jumps in an index.

    PostgreSQL walks through all rows for a DISTINCT. The index of the table begins with the columns that ``where`` has
    equal to something, and with the keys; one of these may be an ``expression AS name``. ``start`` is the condition of
    the first row alone: beside it in ``where``, each jump would begin there anew. ``selected`` is the list of columns,
    if a row has more than the keys. It is the first of its value, in the order of the keys and the columns ``then``; or
    the last one, ``backwards``. A LIMIT of the query that reads the part ends the jumps.
    """
    columns, names = zip(*((key.partition(" AS ")[0], key.rpartition(" AS ")[2]) for key in keys), strict=True)
    direction, beyond = (" DESC", "<") if backwards else ("", ">")
    order = ", ".join(f"{column}{direction}" for column in (*names, *then))
    rows = f"SELECT {selected or ', '.join(keys)} FROM {table} WHERE {where}"
    last = ", ".join(f"p.{each}" for each in names)
    return f"""{name} AS (
    ({rows} AND {start} ORDER BY {order} LIMIT 1)
    UNION ALL
    SELECT n.* FROM {name} p CROSS JOIN LATERAL (
        {rows} AND ({", ".join(columns)}) {beyond} ({last})
         ORDER BY {order} LIMIT 1) n
)"""


#: The queues of which each group has an offset, as ``place``: the table has a row for each batch.
GROUP_QUEUES = "\nWITH RECURSIVE " + jumps("place", "{s}.consumer_offset", "consumer_group", "topic", "queue")

#: All groups that have an offset, as ``one (consumer_group)``.
OFFSET_GROUPS = "\nWITH RECURSIVE " + jumps("one", "{s}.consumer_offset", "consumer_group")

# What a later reset or a log that went back has cut off is read again, or is gone.
#: The ranges of positions that a group will never read, since an operator had it skip them, as ``skipped (queue,
#: former, position)``: those after ``former`` and up to ``position``; none where that isn't behind it.
SKIPPED = """skipped AS (
    SELECT r.queue, r.former,
           least(r.position,
                 (SELECT min(l.position) FROM {s}.consumer_passage l
                   WHERE l.consumer_group = r.consumer_group AND l.topic = r.topic AND l.queue = r.queue
                     AND l.passage > r.passage AND l.position < l.former),
                 (SELECT min(l.agreed) FROM {s}.log_loss l
                   WHERE l.consumer_group = r.consumer_group AND l.topic = r.topic AND l.queue = r.queue
                     AND l.found_at > r.began_at)) AS position
      FROM {s}.consumer_passage r
     WHERE r.consumer_group = %(group)s AND r.topic = %(topic)s AND r.position > r.former
)"""

#: Whether an earlier passage of the group has consumed the message of an inbox row ``c``: it took effect, whatever
#: became of it when it was read again.
TOOK_EFFECT = """EXISTS (SELECT FROM {s}.reread_message e WHERE e.status = 'consumed'
                     AND e.consumer_group = c.consumer_group AND e.message_id = c.message_id)"""

#: Whether a known group's cursor ``g`` has come past a message ``m``: without a delivery, the group has consumed it.
IS_CONFIRMED = "m.position > coalesce(g.starts[m.queue + 1], 0) AND m.position <= coalesce(g.positions[m.queue + 1], 0)"

#: The statuses of the inbox that have a property (`Status`), as ``IN`` takes them.
OPEN, TRIED, ALONE, TIMED, REREAD = (
    sql_list(each for each in Status if getattr(each, name)) for name in ("open", "tried", "alone", "timed", "reread")
)
SETTLED: str = sql_list(each for each in Status if not each.open)

_BY_INDEX = {Status.WAITING: "order_key IS NOT NULL AND discarded_at IS NULL"}


def open_rows(where: str) -> str:
    """Return the SQL of the ids of a group's open messages in a topic ``c``, each status by its index, with a tail.

    It binds ``group`` and ``feed``, the name under which the group keeps the topic.
    """
    return " UNION ALL ".join(
        f"""(SELECT c.message_id FROM {{s}}.consumer_message c
         WHERE consumer_group = %(group)s AND topic = %(feed)s AND status = '{each}'
           AND {_BY_INDEX.get(each, "true")} AND {where})"""
        for each in Status
        if each.open
    )


#: Write down that a bulk job, by its id, has begun.
begin_bulk_job: Template = Template(
    "UPDATE {s}.bulk_job SET started_at = clock_timestamp() WHERE id = %s AND started_at IS NULL"
)

BULK_COUNTS = """(SELECT jsonb_object_agg(state, items)
          FROM (SELECT state, count(*) AS items FROM {s}.bulk_item i WHERE i.bulk_job_id = p.id
                 GROUP BY state) n)"""

# Nothing becomes pending again, so that the counts are the last ones.
_FINISH = Template(f"""
WITH finished AS (
    UPDATE {{s}}.bulk_job p
       SET finished_at = clock_timestamp(), started_at = coalesce(started_at, clock_timestamp()),
           selector = selector || jsonb_build_object('counts', {BULK_COUNTS})
     WHERE finished_at IS NULL AND (%(id)s::uuid IS NULL OR id = %(id)s::uuid)
       AND NOT EXISTS (SELECT FROM {{s}}.bulk_item i WHERE i.bulk_job_id = p.id AND i.state = 'pending')
    RETURNING *
), audited AS (
    INSERT INTO {{s}}.audit (actor, action, target, reason, result, origin)
    SELECT requested_by, 'bulk', id::text, reason,
           jsonb_build_object('did', 'end', 'action', action, 'items', total) || (selector -> 'counts'), origin
      FROM finished WHERE total > 1 AND cancelled_at IS NULL
)
SELECT id FROM finished
""")


@dataclass(frozen=True, slots=True)
class GroupQueue:
    """One queue of a topic as one group sees it."""

    schema: str
    group: str
    topic: str
    queue: int

    @property
    def values(self) -> tuple[str, str, int]:
        """The three columns that name it."""
        return self.group, self.topic, self.queue

    @property
    def lock(self) -> int:
        """The advisory lock that a worker holds while it consumes the queue for the group."""
        return lock_key("queue", *self.values, self.schema)


def finish_bulk_jobs(schema: str, bulk_job_id: UUID | None = None) -> Statement:
    """End the bulk jobs of which no item is pending; only this one, if one is named. Rows: ``(id,)``.

    The end of one over many messages has one row in the audit, with its counts.
    """
    return _FINISH(schema, id=bulk_job_id)


def take_lock(key: int) -> Statement:
    """Take a transaction-level advisory lock, waiting for it."""
    return Statement("SELECT pg_advisory_xact_lock(%s)", (key,))


#: Has the server end this transaction when the client leaves it idle: a worker that can't go on, for whatever reason,
#: mustn't keep all others from work.
UNLESS_IDLE = "set_config('idle_in_transaction_session_timeout', '60s', true)"


def try_lock(key: int, setting: str = UNLESS_IDLE) -> Statement:
    """Try a transaction-level advisory lock without waiting. Rows: ``(taken, …)``.

    ``setting`` is the SQL that sets something for the transaction: by default, that the server ends it when the client
    leaves it idle, which must not be where code of the application's runs in it.
    """
    return Statement(f"SELECT pg_try_advisory_xact_lock(%s), {setting}", (key,))


def plan_by_index(*, once: bool = False) -> Statement:
    """For this transaction, have the planner use indexes whatever the statistics say.

    ``once``: a prepared statement is planned once, and not for each of its values; for statements whose best plan is
    the same for all values, and that come so often that to plan them takes longer than to run them.
    """
    return Statement(_PLAN_ONCE if once else _PLAN_BY_INDEX)


def wait_at_most(seconds: float) -> Statement:
    """For this transaction, let no statement wait longer for a lock."""
    return Statement(_WAIT, (f"{max(int(seconds * 1000), 1)}ms",))


def limits(seconds: float, wait: float) -> Statement:
    """For this transaction, let no statement take longer, and none ``wait`` longer (seconds) for a lock."""
    return Statement(_LIMITS, (f"{max(int(seconds * 1000), 1)}ms", f"{max(int(wait * 1000), 1)}ms"))


def read_only(seconds: float) -> Statement:
    """For this transaction, write nothing and let no statement run longer than ``seconds``."""
    return Statement(_READ_ONLY, (f"{int(seconds * 1000)}ms",))


def audit(
    schema: str,
    actor: str,
    action: str,
    target: str,
    reason: str,
    result: object = None,
    origin: Mapping[str, str] | None = None,
) -> Statement:
    """Record an act in the audit: its actor and target, why, with what result, and by which way it came."""
    shown = None if result is None else json.dumps(result, default=str)
    return _AUDIT(schema, actor, action, target, reason, shown, json.dumps(dict(origin)) if origin else None)


def channel(schema: str) -> str:
    """Return the channel on which dispatch tells which topics, or queues, have new messages (`read_news`)."""
    return f"{schema}.message"


def listen(schema: str) -> str:
    """Return the SQL that subscribes a session to the channel."""
    return f'LISTEN "{channel(schema)}"'


#: The action under which the audit has a committed op that dispatch could make no message of.
HALF_MISSING = "half missing"

#: The payload that tells dispatchers, and no consumers, that ops are waiting. No topic has this name.
OPS = "!"

#: The payload that a listener sends to itself, to see whether notifications arrive.
PING = "?"

#: Between topic and queue in the news of a queue that has new messages. No topic has it in its name.
NEWS_OF_QUEUE = ":"


def read_news(news: str) -> tuple[str, int | None]:
    """Return the topic that has new messages, and the queue, if the news is of one.

    Any role that may connect to a database may notify there: a text that is no number is no queue.
    """
    topic, _, queue = news.partition(NEWS_OF_QUEUE)
    return topic, int(queue) if queue.isdecimal() and len(queue) < len(str(2**31)) else None


_NOTIFY = """
SELECT pg_notify(%s, payload)
  FROM unnest(%s::text[]) payload, set_config('synchronous_commit', 'off', true)
"""


_NUDGE = """
SELECT pg_notify(%s, %s) FROM set_config('synchronous_commit', 'off', true)
 WHERE pg_try_advisory_xact_lock_shared(%s)
"""


def awake_lock(schema: str) -> int:
    """Return the advisory lock of a dispatcher that is at work, and looks again when it has ended."""
    return lock_key("awake", schema)


def nudge(schema: str) -> Statement:
    """Tell dispatchers, unless one is awake, that ops were committed; as `notify`, in a transaction of its own.

    A dispatcher that holds its lock now looks again after that, and sees what was committed before this.
    """
    return Statement(_NUDGE, (channel(schema), OPS, awake_lock(schema)))


def notify(schema: str, *payloads: str) -> Statement:
    """Send notifications, in a transaction of its own that waits for no disk: they may get lost.

    Such a COMMIT takes a lock of the whole cluster, waits for all others that notify, and fails while the queue is
    full, which a session that listens and idles in a transaction is enough for. So it does nothing else.
    """
    return Statement(_NOTIFY, (channel(schema), list(payloads)))


_IS_MESSAGE = "EXISTS (SELECT FROM {s}.message m WHERE m.half_id = h.id)"


def message_status(
    *,
    is_message: str = _IS_MESSAGE,
    of_committed: str = "",
    of_undispatched: str = "",
    value: Callable[[str], str] = "'{}'".format,
) -> str:
    """Return the expression that tells how far a half message ``h`` with its op ``o`` and its schedule ``d`` has come.

    ``is_message`` is the condition that the message is in a queue. ``of_committed`` and ``of_undispatched`` are WHEN
    clauses for finer states of committed halves, and of those neither in a queue nor scheduled. ``value`` returns the
    SQL of a status. A message in a queue has no schedule, and a recalled one is in no queue, so that the order of these
    cases doesn't matter. The schema is ``{s}``.
    """
    return f"""CASE WHEN o.half_id IS NULL THEN {value("undecided")}
            WHEN o.resolution = 'rollback' THEN {value("rolled_back")}{of_committed}
            WHEN d.recalled_at IS NOT NULL THEN {value("recalled")}
            WHEN d.half_id IS NOT NULL THEN {value("scheduled")}
            WHEN {is_message} THEN {value("dispatched")}{of_undispatched}
            ELSE {value("committed")} END"""
