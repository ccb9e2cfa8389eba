"""Statements of the doctor: what is wrong with a server and with what waits in the tables, each read in part only."""

from __future__ import annotations

import re
from collections.abc import Sequence

from outbox.check.sql import KNOWN_TOPICS
from outbox.database.execute import Statement, in_schema
from outbox.operator.health.stats_sql import PLACES

# --- the server ------------------------------------------------------------------------------------------

_SERVER = """
SELECT current_setting('server_version_num')::int, current_setting('server_version'), pg_is_in_recovery(),
       session_user::text, quote_ident(session_user), quote_ident(current_database()), clock_timestamp()
"""

_PARAMETERS = "SELECT name, setting, source FROM pg_settings WHERE name = ANY (%s::text[])"

_CLOCK = "SELECT extract(epoch FROM clock_timestamp())::float8"

# Superusers are held back by neither limit, and may take what is reserved. Walsenders have a limit of their own.
_CONNECTIONS = """
SELECT current_setting('max_connections')::int,
       CASE WHEN r.rolsuper THEN 0 ELSE current_setting('superuser_reserved_connections')::int
            + coalesce(current_setting('reserved_connections', true)::int, 0) END,
       CASE WHEN r.rolsuper OR r.rolconnlimit < 0 THEN NULL ELSE r.rolconnlimit END,
       CASE WHEN r.rolsuper OR d.datconnlimit < 0 THEN NULL ELSE d.datconnlimit END,
       a.everybody, a.role, a.database
  FROM pg_roles r CROSS JOIN pg_database d CROSS JOIN LATERAL (
       SELECT count(*) AS everybody, count(*) FILTER (WHERE usesysid = r.oid) AS role,
              count(*) FILTER (WHERE datid = d.oid) AS database
         FROM pg_stat_activity WHERE usesysid IS NOT NULL AND datid IS NOT NULL AND pid <> pg_backend_pid()) a
 WHERE r.rolname = session_user AND d.datname = current_database()
"""

_MAY_MAKE_TEMPORARY_TABLES = "SELECT has_database_privilege(current_database(), 'TEMPORARY')"

# --- what holds vacuum back ------------------------------------------------------------------------------

_TRANSACTIONS = """
SELECT pid, extract(epoch FROM clock_timestamp() - xact_start)::float8, state, application_name, count(*) OVER ()
  FROM pg_stat_activity
 WHERE datname = current_database() AND backend_type = 'client backend' AND pid <> pg_backend_pid()
   AND xact_start < clock_timestamp() - make_interval(secs =>
       CASE WHEN state LIKE 'idle in transaction%%' THEN %(idle)s::float8 ELSE %(running)s END)
 ORDER BY xact_start LIMIT 1
"""

_HIDDEN_SESSIONS = """
SELECT count(*) FILTER (WHERE backend_type IS NULL), count(*) FILTER (WHERE state = 'disabled')
  FROM pg_stat_activity WHERE datname = current_database()
"""

_PREPARED_TRANSACTIONS = """
SELECT gid, extract(epoch FROM clock_timestamp() - prepared)::float8, format('ROLLBACK PREPARED %%L;', gid),
       count(*) OVER ()
  FROM pg_prepared_xacts
 WHERE database = current_database() AND prepared < clock_timestamp() - make_interval(secs => %(age)s)
 ORDER BY prepared LIMIT 1
"""

_SLOTS = """
SELECT slot_name::text, slot_type, active, age(xmin),
       pg_wal_lsn_diff(CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_lsn() END,
                       restart_lsn)::float8,
       format('SELECT pg_drop_replication_slot(%%L);', slot_name)
  FROM pg_replication_slots ORDER BY slot_name LIMIT 100
"""

_STANDBYS = """
SELECT application_name, age(backend_xmin) FROM pg_stat_replication
 WHERE backend_xmin IS NOT NULL ORDER BY age(backend_xmin) DESC LIMIT 1
"""

# --- our tables in the catalog ---------------------------------------------------------------------------

# One that is being built is not valid yet either.
_INVALID_INDEXES = """
SELECT i.relname::text, t.relname::text, format('%%I.%%I', n.nspname, i.relname)
  FROM pg_namespace n
  JOIN pg_class t ON t.relnamespace = n.oid AND t.relname = ANY (%(tables)s::text[])
  JOIN pg_index x ON x.indrelid = t.oid
  JOIN pg_class i ON i.oid = x.indexrelid
 WHERE n.nspname = %(schema)s AND NOT (x.indisvalid AND x.indisready AND x.indislive)
   AND NOT EXISTS (SELECT FROM pg_stat_progress_create_index p WHERE p.index_relid = x.indexrelid)
 ORDER BY 2, 1
"""

_AUTOVACUUM_OFF = """
SELECT format('%%I.%%I', n.nspname, c.relname), o.prefix || 'autovacuum_enabled'
  FROM pg_namespace n
  JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = ANY (%(tables)s::text[])
  LEFT JOIN pg_class toast ON toast.oid = c.reltoastrelid
 CROSS JOIN LATERAL (
       SELECT '' AS prefix, * FROM pg_options_to_table(c.reloptions)
        UNION ALL
       SELECT 'toast.', * FROM pg_options_to_table(toast.reloptions)) o
 WHERE n.nspname = %(schema)s
   AND CASE WHEN o.option_name = 'autovacuum_enabled' THEN NOT o.option_value::bool ELSE false END
 ORDER BY 1, 2
"""

# --- the producer's side ---------------------------------------------------------------------------------

# Of each topic the halves whose check has been due the longest, and whether anybody was asked about those which were
# looked at last.
_ORPHANS = (
    KNOWN_TOPICS
    + """
SELECT k.topic, f.*,
       EXISTS (SELECT FROM (SELECT c.check_times FROM {s}.half_check c
                             WHERE c.topic = k.topic AND c.parked_at IS NULL AND NOT c.fenced
                             ORDER BY c.next_check_at DESC LIMIT %(limit)s) l WHERE check_times > 0)
  FROM (SELECT topic FROM known WHERE topic IS NOT NULL LIMIT %(limit)s) k
 CROSS JOIN LATERAL (
       SELECT count(*) FILTER (WHERE NOT fenced), count(*) FILTER (WHERE NOT fenced AND late),
              count(*) FILTER (WHERE NOT fenced AND late AND NOT asked), count(*) FILTER (WHERE fenced AND late),
              extract(epoch FROM statement_timestamp() - min(next_check_at))::float8,
              (array_agg(half_id ORDER BY next_check_at) FILTER (WHERE NOT fenced))[1]
         FROM (SELECT half_id, fenced, next_check_at,
                      next_check_at < statement_timestamp() - make_interval(secs => %(grace)s) AS late,
                      check_times > 0 OR EXISTS (SELECT FROM {s}.check_history h
                                                  WHERE h.half_id = c.half_id AND h.asked = 'checker') AS asked
                 FROM {s}.half_check c WHERE c.topic = k.topic AND c.parked_at IS NULL
                ORDER BY next_check_at LIMIT %(limit)s) c) f
 ORDER BY k.topic
"""
)

# Oldest first, since ids begin with the time; what is parked has outlived all its checks.
_PARKED_HALVES = """
WITH looked AS MATERIALIZED (
    SELECT half_id, topic, parked_at FROM {s}.half_check ORDER BY half_id LIMIT %(limit)s
)
SELECT NULL, count(*), NULL, NULL FROM looked
 UNION ALL
(SELECT topic, count(*), extract(epoch FROM clock_timestamp() - min(parked_at))::float8,
        (array_agg(half_id ORDER BY parked_at))[1]
   FROM looked WHERE parked_at IS NOT NULL
  GROUP BY topic ORDER BY 3 DESC LIMIT %(topics)s)
"""

_OLDEST_UNDECIDED = """
SELECT c.half_id, c.topic, c.fenced, c.check_times, c.checked_at IS NOT NULL,
       extract(epoch FROM clock_timestamp() - h.born_at)::float8,
       extract(epoch FROM clock_timestamp() - c.next_check_at)::float8
  FROM (SELECT * FROM (SELECT * FROM {s}.half_check ORDER BY half_id LIMIT %(limit)s) o
         WHERE parked_at IS NULL AND (checked_at IS NOT NULL OR next_check_at <= clock_timestamp())
         ORDER BY half_id LIMIT 100) c
  JOIN {s}.half_message h ON h.id = c.half_id
 ORDER BY h.born_at
"""

_OVERDUE_SCHEDULED = """
SELECT count(*), extract(epoch FROM clock_timestamp() - min(deliver_at))::float8
  FROM (SELECT deliver_at FROM {s}.scheduled_message
         WHERE recalled_at IS NULL AND deliver_at < clock_timestamp() - make_interval(secs => %(grace)s)
         ORDER BY deliver_at, half_id LIMIT %(limit)s) d
"""

# What prune would delete, of the oldest halves that are decided.
_UNPRUNED = """
SELECT count(*), extract(epoch FROM clock_timestamp() - min(decided_at))::float8
  FROM (SELECT h.id, o.resolution, o.decided_at
          FROM {s}.half_message h JOIN {s}.op_message o ON o.half_id = h.id
         ORDER BY h.id LIMIT %(limit)s) old
 WHERE decided_at < clock_timestamp() - make_interval(secs => %(age)s)
   AND (resolution = 'rollback' OR EXISTS (
        SELECT FROM {s}.message m
         WHERE m.half_id = old.id AND m.visible_at < clock_timestamp() - make_interval(secs => %(age)s)
           AND EXISTS (SELECT FROM {s}.message n
                        WHERE n.topic = m.topic AND n.queue = m.queue AND n.position > m.position)))
"""

# --- the consumer's side ---------------------------------------------------------------------------------

_GROUPS = (
    PLACES
    + """
SELECT g.consumer_group, g.topic, p.*, r.*
  FROM (SELECT DISTINCT consumer_group, topic FROM place) g
 CROSS JOIN LATERAL (
       SELECT count(*), extract(epoch FROM clock_timestamp() - min(changed_at))::float8,
              (array_agg(message_id ORDER BY changed_at))[1]
         FROM (SELECT message_id, changed_at FROM {s}.consumer_message m
                WHERE m.consumer_group = g.consumer_group AND m.topic = g.topic AND status = 'parked'
                  AND discarded_at IS NULL
                ORDER BY message_id LIMIT %(limit)s) m) p
 CROSS JOIN LATERAL (
       SELECT count(*), extract(epoch FROM clock_timestamp() - min(next_attempt_at))::float8
         FROM (SELECT next_attempt_at FROM {s}.consumer_message m
                WHERE m.consumer_group = g.consumer_group AND m.topic = g.topic AND status = 'failed'
                  AND next_attempt_at < statement_timestamp() - make_interval(secs => %(grace)s)
                ORDER BY next_attempt_at LIMIT %(limit)s) m) r
 ORDER BY 1, 2
"""
)

# Positions are dense: where the next message isn't the next position, those in between were pruned. A queue that came
# after the group has no offset, and is read from its first message.
_UNREAD = (
    PLACES
    + """
SELECT g.consumer_group, g.topic, count(*) FILTER (WHERE n.position > o.position + 1),
       max(extract(epoch FROM clock_timestamp() - n.visible_at))::float8
  FROM (SELECT DISTINCT consumer_group, topic FROM place) g
  JOIN {s}.topic t ON t.name = g.topic
 CROSS JOIN LATERAL generate_series(0, t.queues - 1) q (queue)
 CROSS JOIN LATERAL (
       SELECT coalesce(max(position), 0) FROM {s}.consumer_offset o
        WHERE o.consumer_group = g.consumer_group AND o.topic = g.topic AND o.queue = q.queue) o (position)
 CROSS JOIN LATERAL (
       SELECT position, visible_at FROM {s}.message m
        WHERE m.topic = g.topic AND m.queue = q.queue AND m.position > o.position
        ORDER BY position LIMIT 1) n
 GROUP BY 1, 2 ORDER BY 1, 2
"""
)

_NAME = re.compile(r"[a-z_0-9]+", re.ASCII)


def server() -> Statement:
    """Read where we are.

    Rows: ``(version as a number, version, is a standby, role, role quoted, database quoted, time)``, one.
    """
    return Statement(_SERVER)


def parameters(names: Sequence[str]) -> Statement:
    """Read configuration parameters as they are for this session. Rows: ``(name, value, source)``."""
    return Statement(_PARAMETERS, (list(names),))


def clock() -> Statement:
    """Read the database's clock. Rows: ``(seconds since 1970,)``."""
    return Statement(_CLOCK)


def connections() -> Statement:
    """Read how many connections there may be, and are besides this one.

    Rows: ``(max, reserved for others, limit of the role, limit of the database, all, of the role, of the database)``,
    one; a limit is NULL where there is none.
    """
    return Statement(_CONNECTIONS)


def may_make_temporary_tables() -> Statement:
    """Tell whether this role may make temporary tables. Rows: ``(may,)``."""
    return Statement(_MAY_MAKE_TEMPORARY_TABLES)


def open_transactions(idle: float, running: float) -> Statement:
    """Read the oldest transaction of this database that is open for longer, in seconds; and nothing of its queries.

    Rows: ``(pid, age in s, state, application name, how many there are)`` or none.
    """
    return Statement(_TRANSACTIONS, {"idle": idle, "running": running})


def hidden_sessions() -> Statement:
    """Count the sessions of this database that don't show their transactions. Rows: ``(no privilege, not tracked)``."""
    return Statement(_HIDDEN_SESSIONS)


def prepared_transactions(age: float) -> Statement:
    """Read the oldest two-phase transaction of this database that is prepared for longer than ``age`` seconds.

    Rows: ``(name, age in s, SQL that rolls it back, how many there are)`` or none.
    """
    return Statement(_PREPARED_TRANSACTIONS, {"age": age})


def slots() -> Statement:
    """Read replication slots, 100 at most.

    Rows: ``(name, type, active, age of xmin in transactions or NULL, bytes of WAL kept or NULL, SQL that drops it)``.
    """
    return Statement(_SLOTS)


def standbys() -> Statement:
    """Read the standby without a slot that holds vacuum back most. Rows: ``(name, age in transactions)`` or none."""
    return Statement(_STANDBYS)


def invalid_indexes(schema: str, tables: Sequence[str]) -> Statement:
    """Read indexes of these tables that can't be used. Rows: ``(index, table, index quoted with its schema)``."""
    return Statement(_INVALID_INDEXES, {"schema": schema, "tables": list(tables)})


def autovacuum_off(schema: str, tables: Sequence[str]) -> Statement:
    """Read which of these tables have autovacuum off. Rows: ``(table quoted with its schema, storage parameter)``."""
    return Statement(_AUTOVACUUM_OFF, {"schema": schema, "tables": list(tables)})


def orphans(schema: str, grace: float, limit: int) -> Statement:
    """Look, topic by topic, at the ``limit`` undecided halves whose check comes first; late: due ``grace`` s ago.

    Rows: ``(topic, unfenced, of them late, of them late and never asked, fenced and late, seconds since the first
    was due, the first unfenced id, anybody was asked about the topic's last ones)``; what is parked isn't looked at.
    """
    return Statement(in_schema(_ORPHANS, schema), {"grace": grace, "limit": limit})


def parked_halves(schema: str, limit: int, topics: int) -> Statement:
    """Count the parked ones of the oldest ``limit`` undecided halves.

    Rows: first ``(NULL, halves looked at, NULL, NULL)``, then ``(topic, parked, seconds since the first was, its id)``,
    of ``topics`` topics at most.
    """
    return Statement(in_schema(_PARKED_HALVES, schema), {"limit": limit, "topics": topics})


def oldest_undecided(schema: str, limit: int) -> Statement:
    """Read the oldest undecided halves past their immunity that aren't parked, of the oldest ``limit``; 100 at most.

    Rows: ``(id, topic, fenced, checks, was checked, age in s, seconds since its check was due)``, the oldest first.
    """
    return Statement(in_schema(_OLDEST_UNDECIDED, schema), {"limit": limit})


def overdue_scheduled(schema: str, grace: float, limit: int) -> Statement:
    """Count scheduled messages that were due ``grace`` seconds ago. Rows: ``(messages, s since the first was due)``."""
    return Statement(in_schema(_OVERDUE_SCHEDULED, schema), {"grace": grace, "limit": limit})


def unpruned(schema: str, age: float, limit: int) -> Statement:
    """Count what could have been pruned ``age`` seconds after its decision, of the oldest ``limit`` decided halves.

    Rows: ``(halves, seconds since the decision of the first)``.
    """
    return Statement(in_schema(_UNPRUNED, schema), {"age": age, "limit": limit})


def groups(schema: str, grace: float, limit: int) -> Statement:
    """Count parked messages, and failed ones whose retry was due ``grace`` seconds ago; ``limit`` of each at most.

    What is discarded doesn't count.
    Rows: ``(group, topic, parked, seconds since the first was, its id, retries overdue, seconds since the first was)``.
    """
    return Statement(in_schema(_GROUPS, schema), {"grace": grace, "limit": limit})


def unread(schema: str) -> Statement:
    """Read where groups stand that have something to read in this database.

    Rows: ``(group, topic, queues in which messages were pruned before they were read, age of the oldest in s)``.
    """
    return Statement(in_schema(_UNREAD, schema))


def backend_pid() -> Statement:
    """Read which server process runs this. Rows: ``(pid,)``."""
    return Statement("SELECT pg_backend_pid()")


def prepared_statement(name: str) -> Statement:
    """Tell whether the server process has a prepared statement of this name. Rows: ``(has it,)``."""
    return Statement("SELECT EXISTS (SELECT FROM pg_prepared_statements WHERE name = %s)", (name,))


def deallocate(name: str) -> Statement:
    """Drop a prepared statement; the name must be of letters, digits and underscores."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} can't name a prepared statement of ours")
    return Statement(f"DEALLOCATE {name}")
