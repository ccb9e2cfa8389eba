"""Committed halves by the hundred thousand, written by the server itself, and dispatched."""

from __future__ import annotations

from sqlalchemy import Connection, Engine, text

from outbox import Settings
from outbox.dispatch.dispatch_pass import dispatch_once

#: Accounts that receive; the key of a message is one of them.
RECEIVERS = 10_000
#: Ops of one transaction; a backlog comes from many.
_TOGETHER = 1_000

#: Numbers with ids of version 7 that grow with them, as those of a producer do.
GIVEN = """
WITH given AS MATERIALIZED (
    SELECT n, (lpad(to_hex(n), 12, '0') || '7000a000' || left(md5(n::text), 12))::uuid AS id
      FROM generate_series(CAST(:first AS bigint), CAST(:last AS bigint)) n
)"""

_FILL = text(
    GIVEN
    + """, half AS (
    INSERT INTO outbox.half_message (id, producer_group, topic, key, content_type, body)
    SELECT id, 'default', :topic, 'account-' || n % :receivers, 'application/json',
           convert_to('{"transfer_id": ' || n || ', "receiver": ' || n % :receivers + 1 ||
                      ', "amount": "12.50", "purpose": "household payment"}', 'UTF8')
      FROM given ORDER BY n
)
INSERT INTO outbox.op_message (half_id, resolution, decided_by) SELECT id, 'commit', 'producer' FROM given ORDER BY n
"""
)


def backlog(engine: Engine, topic: str, count: int) -> None:
    """Write halves and their ops, in transactions of a thousand."""
    with engine.connect() as connection:
        ((begin,),) = connection.execute(text("SELECT coalesce(max(sequence), 0) FROM outbox.op_message"))
        for first in range(begin + 1, begin + count + 1, _TOGETHER):
            last = min(first + _TOGETHER - 1, begin + count)
            connection.execute(_FILL, {"first": first, "last": last, "topic": topic, "receivers": RECEIVERS})
            connection.commit()


def dispatch_all(connection: Connection, settings: Settings) -> int:
    """Dispatch until nothing is left; return how many messages that made."""
    done = 0
    while True:
        counts = dispatch_once(connection, settings)
        done += counts.done
        if not counts and not counts.more:
            return done


def messages(engine: Engine, topic: str, count: int, settings: Settings) -> None:
    """Write and dispatch messages."""
    backlog(engine, topic, count)
    with engine.connect() as connection:
        dispatch_all(connection, settings)
    vacuum(engine)


def vacuum(engine: Engine) -> None:
    """Have statistics and hint bits as autovacuum leaves them, so that it doesn't come in the middle of a round."""
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("VACUUM ANALYZE"))
