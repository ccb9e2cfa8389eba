"""Prune of what both sides have: samples, workers, bulk jobs; and of what was discarded."""

from __future__ import annotations

import json
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Connection, Engine, text

from outbox import Settings
from outbox.prune.prune_pass import prune_consumer_once, prune_records_once

SAMPLE = "INSERT INTO outbox.stats_sample (sampled_at, stats) VALUES (clock_timestamp() - interval '{}', '{{}}')"
WORKER = """
INSERT INTO outbox.worker (id, name, version, seen_at, roles, handlers, duties)
VALUES (gen_random_uuid(), :name, '1', clock_timestamp() - CAST(:seen AS interval), '[]', '[]', '{}')
"""
BULK_JOB = """
INSERT INTO outbox.bulk_job (id, action, requested_by, reason, selector, total, finished_at)
VALUES (:id, 'resend', 'test', 'why', '{}', 7, clock_timestamp() - CAST(:finished AS interval))
"""
ITEM = """
INSERT INTO outbox.bulk_item (bulk_job_id, number, action, message_id, state)
SELECT :id, n, 'resend', gen_random_uuid(), :state FROM generate_series(1, 7) n
"""
INBOX = """
INSERT INTO outbox.consumer_message (consumer_group, message_id, topic, queue, position, status, attempts, changed_at,
                                     discarded_at)
VALUES ('g', :id, 't', 0, 1, 'parked', 17, clock_timestamp() - interval '1 year',
        clock_timestamp() - CAST(:discarded AS interval))
"""


def column(connection: Connection, sql: str) -> list[Any]:
    """Return a column of a query, in a transaction of its own."""
    with connection.begin():
        return list(connection.scalars(text(sql)))


def test_samples_go_after_eight_days(engine: Engine) -> None:
    """Samples are kept for longer than any chart shows, and then go in batches."""
    with engine.begin() as connection:
        for age in ("1 minute", "7 days 23 hours", *(f"{days} days" for days in range(9, 14))):
            connection.execute(text(SAMPLE.format(age)))
    with engine.connect() as connection:
        assert prune_records_once(connection, Settings(prune_batch=2)).taken == 5
        assert len(column(connection, "SELECT 1 FROM outbox.stats_sample")) == 2


def test_dead_workers_go_after_a_day(engine: Engine, settings: Settings) -> None:
    """A worker that wasn't seen for a day is forgotten."""
    with engine.begin() as connection:
        for name, seen in (("alive", "1 second"), ("dead", "23 hours"), ("forgotten", "25 hours")):
            connection.execute(text(WORKER), {"name": name, "seen": seen})
    with engine.connect() as connection:
        assert prune_records_once(connection, settings).taken == 1
        assert column(connection, "SELECT name FROM outbox.worker ORDER BY 1") == ["alive", "dead"]


def test_old_bulk_jobs_go_with_their_items_and_the_audit_stays(engine: Engine) -> None:
    """Bulk jobs go ``record_retention`` after their end; one that isn't finished never does, nor anything audited."""
    ended, recent, unfinished = (UUID(int=n) for n in (1, 2, 3))
    with engine.begin() as connection:
        for id_, finished in ((ended, "91 days"), (recent, "89 days"), (unfinished, None)):
            connection.execute(text(BULK_JOB), {"id": id_, "finished": finished})
            connection.execute(text(ITEM), {"id": id_, "state": "done" if finished else "pending"})
        connection.execute(
            text(
                "INSERT INTO outbox.audit (acted_at, actor, action, target) "
                "VALUES (now() - interval '10 years', 'me', 'resend', 'x')"
            )
        )
    with engine.connect() as connection:
        counts = prune_records_once(connection, Settings(prune_batch=3))
        assert (counts.taken, counts.done) == (8, 1)
        assert column(connection, "SELECT id FROM outbox.bulk_job ORDER BY id") == [recent, unfinished]
        assert len(column(connection, "SELECT 1 FROM outbox.bulk_item")) == 14
        assert len(column(connection, "SELECT 1 FROM outbox.audit")) == 1


def test_bulk_jobs_outlive_what_an_inbox_knows(engine: Engine) -> None:
    """With a short ``record_retention`` bulk jobs are kept as long as inbox rows are."""
    settings = Settings(record_retention=3600.0)
    with engine.begin() as connection:
        for number, finished in ((1, "5 days"), (2, "7 days")):
            connection.execute(text(BULK_JOB), {"id": UUID(int=number), "finished": finished})
    with engine.connect() as connection:
        assert prune_records_once(connection, settings).done == 1


def test_more_bulk_jobs_than_a_batch(engine: Engine) -> None:
    """A pass takes the items of as many bulk jobs as a batch has, and the next ones the next time."""
    settings = Settings(prune_batch=2)
    with engine.begin() as connection:
        for number in range(1, 6):
            connection.execute(text(BULK_JOB), {"id": UUID(int=number), "finished": "91 days"})
            connection.execute(text(ITEM), {"id": UUID(int=number), "state": "done"})
    with engine.connect() as connection:
        done = [prune_records_once(connection, settings).done for _ in range(4)]
    assert (sum(done), done[-1]) == (5, 0)


@pytest.mark.parametrize(("discarded", "gone"), [(None, False), ("143 hours", False), ("145 hours", True)])
def test_discarded_messages_go_after_the_retention_of_the_inbox(
    engine: Engine, settings: Settings, discarded: str | None, gone: bool
) -> None:
    """What was discarded can be restored for ``inbox_retention``, however long it had been parked before."""
    with engine.begin() as connection:
        connection.execute(text(INBOX), {"id": UUID(int=1), "discarded": discarded})
    with engine.connect() as connection:
        assert prune_consumer_once(connection, connection, settings, "g", "t").done == gone
        assert len(column(connection, "SELECT 1 FROM outbox.consumer_message")) == (not gone)


def test_a_discarded_message_outlives_the_producers(engine: Engine, settings: Settings) -> None:
    """While the producer could still send a message again, its inbox row stays, discarded or not."""
    body = json.dumps({"n": 1}).encode()
    with engine.begin() as connection:
        connection.execute(text(INBOX), {"id": UUID(int=1), "discarded": "1 year"})
        connection.execute(
            text(
                "INSERT INTO outbox.half_message (id, producer_group, topic, content_type, body) "
                "VALUES (:id, 'p', 't', 'application/json', :body)"
            ),
            {"id": UUID(int=1), "body": body},
        )
    with engine.connect() as connection:
        assert prune_consumer_once(connection, connection, settings, "g", "t").done == 0
