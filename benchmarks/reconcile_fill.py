"""Two databases with millions of messages that were sent, dispatched and consumed, and some that differ.

Message n is the same on both sides, and made from n by the servers themselves; so they fill their tables at the same
time, and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, LiteralString

import psycopg
from psycopg import sql

TOPIC, GROUP = "transfer", "bank_b"
_CHUNK = 250_000
#: The table of each side; all is in the schema of the outbox.
_TABLES = {"producer": ("half_message", "op_message", "message"), "consumer": ("consumer_message",)}

Connect = Callable[[str], psycopg.Connection[tuple[Any, ...]]]

# A day of messages that ended an hour ago; every hundredth was rolled back, and only the producer knows it.
# STABLE, which they are not: only so does the planner put what they say into the statement.
_FUNCTIONS: LiteralString = """
CREATE SCHEMA made;
CREATE FUNCTION made.at(n bigint) RETURNS timestamptz LANGUAGE sql STABLE AS
    $$ SELECT to_timestamp(({first_ms} + n * 86400000 / {most}) / 1000.0::float8) $$;
CREATE FUNCTION made.id(n bigint) RETURNS uuid LANGUAGE sql STABLE AS
    $$ SELECT (lpad(to_hex({first_ms} + n * 86400000 / {most}), 12, '0') || '7000a000' ||
               right(lpad(to_hex(hashint8extended(n, 0)), 12, '0'), 12))::uuid $$;
CREATE FUNCTION made.body(n bigint) RETURNS bytea LANGUAGE sql STABLE AS
    $$ SELECT convert_to('{{"transfer_id": ' || n || ', "receiver": ' || n % 10000 + 1 || ', "amount": "12.50", ' ||
              '"purpose": "household payment", "reference": "' || n || repeat('-', 60) || '"}}', 'UTF8') $$;
CREATE FUNCTION made.committed(n bigint) RETURNS boolean LANGUAGE sql IMMUTABLE AS $$ SELECT n % 100 <> 37 $$;
"""

_FILL: dict[str, LiteralString] = {
    "half_message": """
        INSERT INTO outbox.half_message (id, producer_group, topic, key, content_type, body, born_at)
        SELECT made.id(n), 'bank_a', 'transfer', 'account-' || n %% 10000, 'application/json', made.body(n), made.at(n)
          FROM generate_series(%s::int8, %s::int8) n""",
    "op_message": """
        INSERT INTO outbox.op_message (half_id, sequence, resolution, decided_by, decided_at)
        SELECT made.id(n), n, CASE WHEN made.committed(n) THEN 'commit' ELSE 'rollback' END, 'producer', made.at(n)
          FROM generate_series(%s::int8, %s::int8) n""",
    "message": """
        INSERT INTO outbox.message (topic, queue, position, half_id, send_number, visible_at)
        SELECT 'transfer', n %% 8, n / 8 + 1, made.id(n), 1, made.at(n) + interval '4 ms'
          FROM generate_series(%s::int8, %s::int8) n WHERE made.committed(n)""",
    "consumer_message": """
        INSERT INTO outbox.consumer_message
               (consumer_group, message_id, topic, queue, position, status, attempts, body_digest, received_at,
                changed_at)
        SELECT 'bank_b', made.id(n), 'transfer', n %% 8, n / 8 + 1, 'consumed', 1,
               substr(sha256(made.body(n)), 1, 16), made.at(n) + interval '9 ms', made.at(n) + interval '9 ms'
          FROM generate_series(%s::int8, %s::int8) n WHERE made.committed(n)""",
}

# `pg_get_indexdef` tells the index of a partitioned table as ON ONLY: without those of its partitions.
_INDEXES: LiteralString = """
SELECT i.relname, replace(pg_get_indexdef(x.indexrelid), ' ON ONLY ', ' ON '), c.conname, pg_get_constraintdef(c.oid)
  FROM pg_index x JOIN pg_class i ON i.oid = x.indexrelid
  LEFT JOIN pg_constraint c ON c.conindid = x.indexrelid
 WHERE x.indrelid = %s::regclass
"""

# Of a partitioned table it is one that some partition hasn't got.
_INVALID: LiteralString = "SELECT indexrelid::regclass FROM pg_index WHERE indrelid = %s::regclass AND NOT indisvalid"

_TOPIC: LiteralString = "INSERT INTO outbox.topic (name, queues) VALUES ('transfer', 8) ON CONFLICT DO NOTHING"
_OFFSETS: LiteralString = """
INSERT INTO outbox.consumer_offset (consumer_group, topic, queue, position, starts)
SELECT 'bank_b', 'transfer', q, %s::int8 / 8 + 1, 0 FROM generate_series(0, 7) q ON CONFLICT DO NOTHING
"""

_SETTLED = ("reconciliation_settled", "reconciliation_mark")
_REMEMBER = sql.SQL("CREATE TABLE made.{} AS TABLE outbox.{}")
_RECALL = sql.SQL("INSERT INTO outbox.{} TABLE made.{}")

# --- differences -----------------------------------------------------------------------------------------

# The k-th of ``count`` differences in messages ``first`` to ``last``: those of a share never fall on those of another.
# Of ten, three are missing, two have another digest, and one each failed, is parked, is a phantom, was consumed though
# rolled back, or was never dispatched. A share of 1 would fall on those that were rolled back.
_CHOSEN: LiteralString = """
WITH chosen AS MATERIALIZED (
    SELECT k %% 10 AS kind,
           (%(first)s::int8 + k * (%(last)s::int8 - %(first)s::int8) / (%(count)s::int8 + 1)) / 4 * 4
           + %(share)s::int8 AS n
      FROM generate_series(1, %(count)s::int8) k
)
"""
_PLANT: dict[str, tuple[LiteralString, ...]] = {
    "producer": (
        """UPDATE outbox.op_message SET resolution = 'rollback'
            WHERE half_id IN (SELECT made.id(n) FROM chosen WHERE kind = 8)""",
        "DELETE FROM outbox.message WHERE half_id IN (SELECT made.id(n) FROM chosen WHERE kind IN (8, 9))",
    ),
    "consumer": (
        "DELETE FROM outbox.consumer_message WHERE message_id IN "
        "(SELECT made.id(n) FROM chosen WHERE kind IN (0, 1, 2, 9)) AND consumer_group = 'bank_b'",
        """UPDATE outbox.consumer_message SET body_digest = substr(sha256(body_digest), 1, 16)
            WHERE message_id IN (SELECT made.id(n) FROM chosen WHERE kind IN (3, 4)) AND consumer_group = 'bank_b'""",
        """UPDATE outbox.consumer_message
              SET status = 'failed', attempts = 3, last_error = 'ValueError', next_attempt_at = changed_at
            WHERE message_id IN (SELECT made.id(n) FROM chosen WHERE kind = 5) AND consumer_group = 'bank_b'""",
        """UPDATE outbox.consumer_message SET status = 'parked', attempts = 17, last_error = 'ValueError'
            WHERE message_id IN (SELECT made.id(n) FROM chosen WHERE kind = 6) AND consumer_group = 'bank_b'""",
        """INSERT INTO outbox.consumer_message
                  (consumer_group, message_id, topic, queue, position, status, attempts, body_digest, received_at,
                   changed_at)
           SELECT 'bank_b', overlay(made.id(n)::text placing '0000' from 33)::uuid, 'transfer', 0, 1, 'consumed', 1,
                  substr(sha256(made.body(n)), 1, 16), made.at(n), made.at(n) FROM chosen WHERE kind = 7""",
    ),
}


@dataclass(frozen=True, slots=True)
class Books:
    """Both databases. ``connect`` opens one by its name; ``say`` is told each step."""

    connect: Connect
    producer: str
    consumer: str
    say: Callable[[str], None]

    def prepare(self, most: int, now_ms: int) -> None:
        """Make what the messages are made with; ``most`` messages of one day will fit."""
        for name in (self.producer, self.consumer):
            with self.connect(name) as connection:
                values = {"first_ms": sql.Literal(now_ms - 90_000_000), "most": sql.Literal(most)}
                connection.execute("DROP SCHEMA IF EXISTS made CASCADE")
                connection.execute(sql.SQL(_FUNCTIONS).format(**values))

    def fill(self, first: int, last: int, *, in_bulk: bool) -> None:
        """Write the messages of these numbers; ``in_bulk`` makes all indexes anew, which is faster for millions."""
        _at_once(partial(self._fill, side, table, first, last, in_bulk) for side, table in self._tables)
        with self.connect(self.producer) as connection:
            connection.execute(_TOPIC)
        with self.connect(self.consumer) as connection:
            connection.execute(_OFFSETS, (last,))
            connection.execute("ANALYZE outbox.consumer_offset")

    def remember_settled(self) -> None:
        """Keep the ranges settled now."""
        with self.connect(self.consumer) as connection:
            for table in _SETTLED:
                connection.execute(_REMEMBER.format(*map(sql.Identifier, (table, table))))

    def recall_settled(self) -> None:
        """Put the ranges back that were settled then."""
        with self.connect(self.consumer) as connection:
            for table in _SETTLED:
                connection.execute(sql.SQL("TRUNCATE outbox.{}").format(sql.Identifier(table)))
                connection.execute(_RECALL.format(*map(sql.Identifier, (table, table))))

    def plant(self, count: int, first: int, last: int, share: int) -> None:
        """Make ``count`` of the messages differ, spread evenly; each ``share`` (0, 2 or 3) other ones."""
        values = {"count": count, "first": first, "last": last, "share": share}
        for side, statements in _PLANT.items():
            with self.connect(self._name(side)) as connection:
                for statement in statements:
                    connection.execute(_CHOSEN + statement, values)

    def vacuum(self) -> None:
        """Have statistics and hint bits as autovacuum leaves them."""
        self.say("vacuum")
        _at_once(partial(self._vacuum, name) for name in (self.producer, self.consumer))

    def empty(self) -> None:
        """Remove all rows."""
        for side, table in self._tables:
            with self.connect(self._name(side)) as connection:
                connection.execute(sql.SQL("TRUNCATE outbox.{}").format(sql.Identifier(table)))
        with self.connect(self.consumer) as connection:
            connection.execute(
                "TRUNCATE outbox.consumer_offset, outbox.reconciliation_settled, outbox.reconciliation_mark, "
                "outbox.reconciliation_run, outbox.reconciliation_finding"
            )

    def _name(self, side: str) -> str:
        return self.producer if side == "producer" else self.consumer

    @property
    def _tables(self) -> list[tuple[str, str]]:
        return [(side, table) for side, tables in _TABLES.items() for table in tables]

    def _fill(self, side: str, table: str, first: int, last: int, in_bulk: bool) -> None:
        with self.connect(self._name(side)) as connection:
            connection.autocommit = True
            connection.execute("SET synchronous_commit = off")
            rebuild = _drop_indexes(connection, table) if in_bulk else []
            for start in range(first, last + 1, _CHUNK):
                self.say(f"filling {table}, {start:,} of {last:,}")
                connection.execute(_FILL[table], (start, min(start + _CHUNK - 1, last)))
            connection.execute("SET maintenance_work_mem = '512MB'")
            for statement in rebuild:
                self.say(f"indexes of {table}")
                connection.execute(statement)
            (invalid,) = connection.execute(_INVALID, (f"outbox.{table}",)).fetchone() or (None,)
            assert invalid is None, f"{table} was filled without its index {invalid}"

    def _vacuum(self, name: str) -> None:
        with self.connect(name) as connection:
            connection.autocommit = True
            connection.execute("VACUUM ANALYZE")


def _drop_indexes(connection: psycopg.Connection[tuple[Any, ...]], table: str) -> list[sql.Composed]:
    """Drop all indexes of a table; return the statements that make them again."""
    name, rebuild = sql.Identifier("outbox", table), []
    for index, index_sql, constraint, constraint_sql in connection.execute(_INDEXES, (f"outbox.{table}",)).fetchall():
        if constraint is None:
            connection.execute(sql.SQL("DROP INDEX {}").format(sql.Identifier("outbox", index)))
            rebuild.append(sql.SQL("{}").format(sql.SQL(index_sql)))
        else:
            connection.execute(sql.SQL("ALTER TABLE {} DROP CONSTRAINT {}").format(name, sql.Identifier(constraint)))
            rebuild.append(
                sql.SQL("ALTER TABLE {} ADD CONSTRAINT {} {}").format(
                    name, sql.Identifier(constraint), sql.SQL(constraint_sql)
                )
            )
    return rebuild


def _at_once(work: Iterable[Callable[[], None]]) -> None:
    with ThreadPoolExecutor() as pool:
        for future in [pool.submit(each) for each in work]:
            future.result()
