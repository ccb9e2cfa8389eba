"""Migrated databases for tests, used again where that makes no difference: to clone one takes longer than most tests.

A database is made as new: connections are ended, or made as new with it; the tables of the outbox get the template's
rows, and what a test made in the schema ``public`` is dropped. If its catalog isn't that of the template then, the
database itself is dropped.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import psycopg
from psycopg import sql
from psycopg._preparing import PrepareManager
from psycopg.rows import tuple_row
from sqlalchemy import Engine, QueuePool, create_engine
from sqlalchemy.exc import DBAPIError

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
            AND pid <> ALL (current_setting('tests.kept')::int[])
            AND backend_type = 'client backend';
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
#: So many connections of an engine are used again. It can have as many as SQLAlchemy's engines can.
_MOST_KEPT = 2
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


def _listeners(engine: Engine) -> int:
    dispatches: tuple[Any, ...] = engine.pool.dispatch, engine.dialect.dispatch
    return sum(len(getattr(dispatch, name)) for dispatch in dispatches for name in dispatch._event_names)


#: What listens to an engine that a test has done nothing to.
_OWN_LISTENERS = _listeners(create_engine("postgresql+psycopg://"))


class Databases:
    """Gives clones of a migrated template away, and takes them back."""

    def __init__(self, server: ServerLike, template: str) -> None:
        self._server = server
        self._template = template
        self._free: list[str] = []
        #: Databases with an engine whose connections are open.
        self._warm: list[tuple[str, Engine]] = []
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

    def take_engine(self) -> tuple[str, Engine]:
        """Return such a database with an engine on it, which may have connections that were used before.

        A new connection learns all tables anew, which takes the server longer than most tests do.
        """
        if self._warm:
            return self._warm.pop()
        name = self.take()
        return name, create_engine(self._server.url(name), pool_size=_MOST_KEPT, max_overflow=15 - _MOST_KEPT)

    def give_back(self, name: str, engine: Engine | None = None) -> None:
        """Make a database as new, or drop it; also the connections of its engine, where a test left them whole."""
        if engine and self._is_as_new(engine):
            self._warm.append((name, engine))
            return
        if engine:
            engine.dispose()
        try:
            with self._connect(name) as connection:
                clean = self._clean(connection)
        except psycopg.Error:  # as the test left it
            clean = False
        if clean:
            self._free.append(name)
        else:
            self._server.drop_database(name)

    def close(self) -> None:
        """Close all connections."""
        for _, engine in self._warm:
            engine.dispose()

    def _is_as_new(self, engine: Engine) -> bool:
        pool = engine.pool
        assert isinstance(pool, QueuePool)
        if not pool.checkedin() or pool.checkedout() or _listeners(engine) != _OWN_LISTENERS:
            return False
        try:
            with ExitStack() as stack:
                pooled = [stack.enter_context(closing(engine.raw_connection())) for _ in range(pool.checkedin())]
                for each in pooled:
                    each.info.clear()  # as which Outbox's it was known, among others
                return self._are_as_new([each.driver_connection for each in pooled])
        except (psycopg.Error, DBAPIError):  # such as of one that was cut
            return False

    def _are_as_new(self, drivers: list[Any]) -> bool:
        if any((driver.prepare_threshold, driver.row_factory) != (5, tuple_row) for driver in drivers):
            return False
        for driver in drivers:
            driver.autocommit = True
            driver.execute("DISCARD ALL")
        clean = self._clean(*drivers)
        for driver in drivers:
            driver.execute("RESET ALL")
            driver.autocommit = False
            driver._prepared = PrepareManager()  # the other one would deallocate what is gone
        return clean

    def _clean(self, connection: psycopg.Connection[Any], *others: psycopg.Connection[Any]) -> bool:
        """Make the database of some connections as new, and end all others; return whether its catalog is as it was."""
        kept = [each.info.backend_pid for each in (connection, *others)]
        connection.execute("SELECT set_config('tests.kept', %s::int[]::text, false)", [kept])
        cursor = connection.execute(self._make_new)
        while cursor.nextset():
            pass
        return cursor.fetchone() == self._catalog

    def _connect(self, name: str) -> psycopg.Connection[Any]:
        return psycopg.connect(self._server.url(name, driver="postgresql"), autocommit=True)
