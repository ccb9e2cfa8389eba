"""Statements for those who look at everything at once: workers, samples, what runs late, and the server itself."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence

from outbox.database.execute import Statement, in_schema

_WORKERS = """
SELECT id, name, version, roles::text, handlers::text, duties::text, started_at, seen_at,
       seen_at > clock_timestamp() - make_interval(secs => %(alive)s),
       extract(epoch FROM clock_timestamp() - seen_at)::float8
  FROM {s}.worker ORDER BY name, id LIMIT 1000
"""

_TOPICS = "SELECT name, queues FROM {s}.topic ORDER BY name"

_SAMPLES = """
SELECT s.stats::text
  FROM unnest(%(edges)s::timestamptz[]) WITH ORDINALITY e (edge, number)
  LEFT JOIN LATERAL (SELECT stats FROM {s}.stats_sample
                      WHERE sampled_at >= edge AND sampled_at < edge + make_interval(secs => %(within)s)
                      ORDER BY sampled_at LIMIT 1) s ON true
 ORDER BY e.number
"""

# A half that is fenced needs no checker.
_UNFENCED = """
SELECT topic, count(*), extract(epoch FROM clock_timestamp() - min(next_check_at))::float8
  FROM (SELECT topic, next_check_at FROM {s}.half_check
         WHERE NOT fenced AND parked_at IS NULL AND next_check_at <= statement_timestamp()
         ORDER BY half_id LIMIT %(limit)s) c
 GROUP BY topic ORDER BY topic
"""

_OPEN_BULK_JOBS = """
SELECT count(*), extract(epoch FROM clock_timestamp() - min(created_at))::float8
  FROM (SELECT created_at FROM {s}.bulk_job WHERE finished_at IS NULL ORDER BY created_at LIMIT %(limit)s) o
"""

# The newest run of each pair, and the newest that came to a result.
_LAST_RUNS = """
SELECT p.topic, p.consumer_group, r.finished_at IS NOT NULL, r.error, r.counts::text, r.applied,
       extract(epoch FROM clock_timestamp() - r.started_at)::float8,
       extract(epoch FROM clock_timestamp() - (
           SELECT max(started_at) FROM {s}.reconciliation_run d
            WHERE d.topic = p.topic AND d.consumer_group = p.consumer_group AND d.counts IS NOT NULL))::float8
  FROM unnest(%(topics)s::text[], %(groups)s::text[]) p (topic, consumer_group)
 CROSS JOIN LATERAL (SELECT * FROM {s}.reconciliation_run n
                      WHERE n.topic = p.topic AND n.consumer_group = p.consumer_group
                      ORDER BY started_at DESC LIMIT 1) r
 ORDER BY 1, 2
"""

_SERVER_VERSION = "SELECT current_setting('server_version')"

# Of others in this database; without the privilege to see their sessions there is nothing to tell.
_OLDEST_TRANSACTION = """
SELECT extract(epoch FROM clock_timestamp() - min(xact_start))::float8
  FROM pg_stat_activity
 WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'
"""

_TABLES = """
SELECT c.relname, greatest(c.reltuples, 0)::int8, pg_total_relation_size(c.oid), coalesce(t.n_dead_tup, 0),
       greatest(t.last_vacuum, t.last_autovacuum)
  FROM pg_class c LEFT JOIN pg_stat_user_tables t ON t.relid = c.oid
 WHERE c.relnamespace = %(schema)s::regnamespace AND c.relkind = 'r'
 ORDER BY 3 DESC, 1
"""


def workers(schema: str, alive: float) -> Statement:
    """Read the workers; alive is one that was seen within ``alive`` seconds.

    Rows: ``(id, name, version, roles, handlers, duties, started at, seen at, is alive, seconds since it was seen)``.
    """
    return Statement(in_schema(_WORKERS, schema), {"alive": alive})


def topics(schema: str) -> Statement:
    """Read the topics. Rows: ``(name, number of queues)``."""
    return Statement(in_schema(_TOPICS, schema))


def samples(schema: str, edges: Sequence[dt.datetime], within: float) -> Statement:
    """Read the first sample at or after each of these moments, ``within`` seconds.

    Rows: one for each moment, in order: ``(statistics as JSON or NULL,)``.
    """
    return Statement(in_schema(_SAMPLES, schema), {"edges": list(edges), "within": within})


def unfenced_orphans(schema: str, limit: int) -> Statement:
    """Count halves that a checker must be asked about. Rows: ``(topic, halves, seconds since the first was due)``."""
    return Statement(in_schema(_UNFENCED, schema), {"limit": limit})


def open_bulk_jobs(schema: str, limit: int) -> Statement:
    """Count bulk jobs that haven't finished. Rows: ``(bulk jobs, age of the oldest in s)``, one."""
    return Statement(in_schema(_OPEN_BULK_JOBS, schema), {"limit": limit})


def last_runs(schema: str, pairs: Sequence[tuple[str, str]]) -> Statement:
    """Read the newest reconciliation of each pair (topic, group) that has one.

    Rows: ``(topic, group, ended, error, counts, applied, age in s, age of the newest that came to a result in s)``.
    """
    topics, groups = ([pair[side] for pair in pairs] for side in (0, 1))
    return Statement(in_schema(_LAST_RUNS, schema), {"topics": topics, "groups": groups})


def server_version() -> Statement:
    """Read the server's version. Rows: ``(version,)``."""
    return Statement(_SERVER_VERSION)


def oldest_transaction() -> Statement:
    """Read how long the oldest transaction in this database is open. Rows: ``(seconds or NULL,)``."""
    return Statement(_OLDEST_TRANSACTION)


def tables(schema: str) -> Statement:
    """Read the tables, the biggest first. Rows: ``(name, estimated rows, bytes, dead rows, last vacuum)``."""
    return Statement(_TABLES, {"schema": f'"{schema}"'})
