"""Rows in a producer's and a consumer's database that differ in many ways, for the tests of the Spark engine."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections import Counter
from collections.abc import Sequence
from uuid import UUID

import pyarrow as pa
from sqlalchemy import create_engine, make_url, text

from outbox import Settings
from outbox.message.ids import uuid7_at
from outbox.reconcile.job import Access, Outcome, Pair, Range
from outbox.reconcile.rows import Collected, Comparison, Rules
from outbox.reconcile.source import PostgresSide

PAIR = Pair("transfer", "bank_b")
#: 2026-01-01 in seconds; each message is born 10 ms after the one before it.
BEGAN = 1_767_225_600.0
ROLE = "night_reader"
#: Needs quoting in a URL, and is found in no other text.
PASSWORD = "Ge/hei:m@%41nis-7319"  # noqa: S105

_HALVES = """
INSERT INTO outbox.half_message (id, producer_group, topic, key, content_type, body, born_at)
VALUES (:id, 'bank_a', 'transfer', :key, 'text/plain', :body, to_timestamp(:at))
"""
_OPS = """
INSERT INTO outbox.op_message (half_id, resolution, decided_by, decided_at)
VALUES (:id, :resolution, 'producer', to_timestamp(:at))
"""
_MESSAGES = """
INSERT INTO outbox.message (topic, queue, position, half_id, send_number, visible_at)
VALUES ('transfer', :queue, :position, :id, 1, to_timestamp(:at))
"""
_INBOX = """
INSERT INTO outbox.consumer_message (consumer_group, message_id, topic, queue, position, status, attempts,
                                     next_attempt_at, body_digest, last_error, received_at, changed_at)
VALUES ('bank_b', :id, 'transfer', :queue, :position, :status, 1,
        CASE WHEN :status = 'failed' THEN to_timestamp(:at) END, :digest, NULL, to_timestamp(:at), to_timestamp(:at))
"""


def plant(producer: str, consumer: str, messages: int, seed: int) -> list[UUID]:
    """Write messages into both databases, one in ten of them with a difference; return their ids, sorted."""
    chance = random.Random(seed)  # noqa: S311 - which rows differ is no secret
    ids = [uuid7_at(BEGAN + number / 100) for number in range(messages)]
    rows = [_row(number, message_id) for number, message_id in enumerate(ids)]
    halves, ops, sent, inbox = list(rows), list(rows), list(rows), [row | {"status": "consumed"} for row in rows]
    for number in sorted(chance.sample(range(messages), messages // 10), reverse=True):
        match chance.randrange(6):
            case 0:
                del inbox[number]
            case 1:
                inbox[number]["digest"] = bytes(16)
            case 2:
                inbox[number]["status"] = chance.choice(["failed", "parked"])
            case 3:
                ops[number] |= {"resolution": "rollback"}
                sent.remove(rows[number])
            case 4:
                sent.remove(rows[number])
                inbox = [row for row in inbox if row["id"] != ids[number]]
            case 5:
                inbox.append(inbox[number] | {"id": UUID(int=ids[number].int + 1), "position": 10**6 + number})
    _write(producer, [(_HALVES, halves), (_OPS, ops), (_MESSAGES, sent)])
    _write(consumer, [(_INBOX, inbox)])
    return sorted(ids)


def reader(url: str) -> str:
    """Return a URL of the database with a role that may read, and whose password is `PASSWORD`."""
    engine = create_engine(url)
    with engine.begin() as connection:
        known = connection.execute(text("SELECT 1 FROM pg_roles WHERE rolname = :role"), {"role": ROLE}).scalar()
        if known is None:
            connection.exec_driver_sql(f"CREATE ROLE {ROLE} LOGIN PASSWORD '{PASSWORD.replace('%', '%%')}'")
        connection.exec_driver_sql(f"GRANT USAGE ON SCHEMA outbox TO {ROLE}")
        connection.exec_driver_sql(f"GRANT SELECT ON ALL TABLES IN SCHEMA outbox TO {ROLE}")
    engine.dispose()
    return make_url(url).set(username=ROLE, password=PASSWORD).render_as_string(hide_password=False)


def comparison(producer: str, consumer: str) -> Comparison:
    """Return the comparison of two databases, long after everything in them happened."""
    later = int((BEGAN + 86_400) * 1e6)
    return Comparison(
        PostgresSide(Access(producer, Settings()), "producer", PAIR),
        PostgresSide(Access(consumer, Settings()), "consumer", PAIR),
        Rules(later, later, 300 * 10**6, offsets=dict.fromkeys(range(8), 10**6)),
    )


def tasks(ids: Sequence[UUID], number: int) -> list[Sequence[Range]]:
    """Cut all ids into tasks of one range each, and the last into two that don't touch."""
    bounds = [UUID(int=0), *(ids[len(ids) * cut // number] for cut in range(1, number)), None]
    ranges = [Range(first or UUID(int=0), end) for first, end in itertools.pairwise(bounds)]
    last = ranges.pop()
    middle = ids[-3]
    return [*((each,) for place, each in enumerate(ranges)), (Range(last.first, middle), Range(middle, None))]


def summed(results: Sequence[Collected]) -> tuple[Counter[Outcome], Counter[int], int, pa.Table]:
    """Return the counts, the lags, the rows read and the findings of results, whatever their order and number."""
    collected = Collected()
    for result in results:
        collected.add(result)
    return collected.counts, collected.lags, collected.rows_read, collected.table


def findings(result: Collected) -> int:
    """Return how many findings a result has."""
    return int(result.table.num_rows)


def _row(number: int, message_id: UUID) -> dict[str, object]:
    body = f"amount {number}".encode()
    return {
        "id": message_id,
        "key": f"account-{number % 100}",
        "body": body,
        "at": BEGAN + number / 100,
        "resolution": "commit",
        "queue": number % 8,
        "position": number // 8 + 1,
        "digest": hashlib.sha256(body).digest()[:16],
    }


def _write(url: str, statements: Sequence[tuple[str, list[dict[str, object]]]]) -> None:
    engine = create_engine(url)
    with engine.begin() as connection:
        for statement, rows in statements:
            connection.execute(text(statement), rows)
    engine.dispose()
