"""Migrated databases for tests, used again where that makes no difference: to clone one takes longer than most tests.

A database is made as new: connections are ended, the tables of the outbox get the template's rows, and what a test made
in the schema ``public`` is dropped. If its catalog isn't that of the template then, the database itself is dropped.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import psycopg
from psycopg import sql
from sqlalchemy import Engine, create_engine

from outbox.embedded import ServerLike

_numbers = itertools.count()

#: Connections that are ending by themselves take a moment too: asking often is faster than to wait in
#: pg_terminate_backend, which looks ten times a second.
_EMPTY = """
SET lock_timeout = '5s';
DO $$
DECLARE each record; tables text; until timestamptz := clock_timestamp() + interval '10 s';
BEGIN
    LOOP
        PERFORM pg_terminate_backend(pid) FROM pg_stat_get_activity(NULL)
          WHERE datid = (SELECT oid FROM pg_database WHERE datname = current_database())
            AND pid <> pg_backend_pid() AND backend_type = 'client backend';
        EXIT WHEN NOT FOUND OR clock_timestamp() > until;
        PERFORM pg_sleep(0.002), pg_stat_clear_snapshot();
    END LOOP;
    FOR each IN SELECT oid::regclass AS name, relkind FROM pg_class
                 WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'p', 'v', 'm', 'S') LOOP
        IF to_regclass(each.name::text) IS NOT NULL THEN
            EXECUTE format('DROP %s %s CASCADE', CASE each.relkind WHEN 'v' THEN 'VIEW' WHEN 'S' THEN 'SEQUENCE'
                           WHEN 'm' THEN 'MATERIALIZED VIEW' ELSE 'TABLE' END, each.name);
        END IF;
    END LOOP;
    FOR each IN SELECT oid::regprocedure AS name FROM pg_proc WHERE pronamespace = 'public'::regnamespace LOOP
        EXECUTE format('DROP ROUTINE %s CASCADE', each.name);
    END LOOP;
    FOR each IN SELECT oid::regclass AS name FROM pg_class
                 WHERE relnamespace = 'outbox'::regnamespace AND relkind = 'r' AND relispartition
                   AND relname !~ '_default$' LOOP
        EXECUTE format('DROP TABLE %s', each.name);
    END LOOP;
    SELECT string_agg(oid::regclass::text, ', ') INTO tables FROM pg_class
     WHERE relnamespace = 'outbox'::regnamespace AND relkind = 'r' AND position('version' IN relname) = 0
       AND pg_relation_size(oid) > 0;
    IF tables IS NOT NULL THEN
        EXECUTE 'TRUNCATE ' || tables;
    END IF;
END $$
"""
_TABLES = """
SELECT relname FROM pg_class
 WHERE relnamespace = 'outbox'::regnamespace AND relkind = 'r' AND position('version' IN relname) = 0
"""
_SEQUENCES = "SELECT schemaname || '.' || sequencename, last_value, start_value FROM pg_sequences"
#: The template's catalog has the same object ids as that of each clone.
_CATALOG = """
SELECT md5(string_agg(entry, ',' ORDER BY entry)) FROM (
    SELECT concat_ws('.', 'class', oid, relname, relnatts, relchecks, relhastriggers, relowner, relacl, reloptions)
      FROM pg_class WHERE oid >= 16384 AND relkind <> 'i'
     UNION ALL
    SELECT concat_ws('.', 'index', indexrelid, indrelid, indisvalid) FROM pg_index WHERE indexrelid >= 16384
     UNION ALL
    SELECT concat_ws('.', 'column', attrelid, attnum, attname, atttypid, attnotnull, attacl, attstattarget)
      FROM pg_attribute WHERE attrelid >= 16384
     UNION ALL
    SELECT concat_ws('.', 'default', oid, pg_get_expr(adbin, adrelid)) FROM pg_attrdef
     UNION ALL
    SELECT concat_ws('.', 'constraint', oid, conname, convalidated) FROM pg_constraint WHERE oid >= 16384
     UNION ALL
    SELECT concat_ws('.', 'function', oid) FROM pg_proc WHERE oid >= 16384
     UNION ALL
    SELECT concat_ws('.', 'trigger', oid, tgenabled) FROM pg_trigger
     UNION ALL
    SELECT concat_ws('.', 'type', oid) FROM pg_type WHERE oid >= 16384
     UNION ALL
    SELECT concat_ws('.', 'schema', oid, nspname, nspacl) FROM pg_namespace WHERE nspname !~ '^pg_(toast_)?temp'
     UNION ALL
    SELECT concat_ws('.', 'setting', setrole, setconfig) FROM pg_db_role_setting
      JOIN pg_database d ON d.oid = setdatabase AND d.datname = current_database()
     UNION ALL
    SELECT concat_ws('.', 'database', datconnlimit, datallowconn, datacl) FROM pg_database
     WHERE datname = current_database()
     UNION ALL
    SELECT concat_ws('.', 'analyzed', starelid, staattnum) FROM pg_statistic WHERE starelid >= 16384
     UNION ALL
    SELECT concat_ws('.', 'prepared', gid) FROM pg_prepared_xacts WHERE database = current_database()
     UNION ALL
    SELECT concat_ws('.', 'extension', oid) FROM pg_extension
     UNION ALL
    SELECT concat_ws('.', 'event trigger', oid) FROM pg_event_trigger
     UNION ALL
    SELECT concat_ws('.', 'revision', version_num) FROM outbox.outbox_version
) AS entries (entry)
"""


@contextmanager
def clones(server: ServerLike, template: str, *names: str) -> Iterator[list[Engine]]:
    """Make databases of these names, for several tests to share; give an engine on each, and drop them at the end."""
    with ExitStack() as stack:
        engines = []
        for name in names:
            server.create_database(name, template=template)
            stack.callback(server.drop_database, name)
            engines.append(create_engine(server.url(name)))
            stack.callback(engines[-1].dispose)
        yield engines


class Databases:
    """Gives clones of a migrated template away, and takes them back."""

    def __init__(self, server: ServerLike, template: str) -> None:
        self._server = server
        self._template = template
        self._free: list[str] = []
        with self._connect(template) as connection:
            self._catalog = connection.execute(_CATALOG).fetchone()
            tables = [row[0] for row in connection.execute(_TABLES)]
            rows = [
                sql.SQL(
                    "INSERT INTO outbox.{0} OVERRIDING SYSTEM VALUE SELECT (jsonb_populate_record(x, {1})).*"
                    " FROM (SELECT NULL::outbox.{0}) AS r (x)"
                ).format(sql.Identifier(table), row)
                for table in tables
                for (row,) in connection.execute(f"SELECT to_jsonb(t)::text FROM outbox.{table} t".encode())
            ]
            sequences = [
                sql.SQL("setval({}, {}, {})").format(name, last or start, last is not None)
                for name, last, start in connection.execute(_SEQUENCES)
            ]
        numbered = sql.SQL("SELECT ") + sql.SQL(", ").join(sequences)
        #: In one round trip, and one transaction.
        self._make_new = sql.SQL("; ").join([sql.SQL(_EMPTY), *rows, numbered, sql.SQL(_CATALOG)])

    def take(self) -> str:
        """Return the name of a database as it is after the migration."""
        if self._free:
            return self._free.pop()
        name = f"test_{next(_numbers)}"
        self._server.create_database(name, template=self._template)
        return name

    def give_back(self, name: str) -> None:
        """Make a database as new, or drop it."""
        try:
            clean = self._clean(name)
        except psycopg.Error:  # as the test left it
            clean = False
        if clean:
            self._free.append(name)
        else:
            self._server.drop_database(name)

    def _clean(self, name: str) -> bool:
        with self._connect(name) as connection:
            cursor = connection.execute(self._make_new)
            while cursor.nextset():
                pass
            return cursor.fetchone() == self._catalog

    def _connect(self, name: str) -> psycopg.Connection[Any]:
        return psycopg.connect(self._server.url(name, driver="postgresql"), autocommit=True)
