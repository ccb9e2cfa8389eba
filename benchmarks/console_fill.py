"""Two databases as a console finds them after a bad week: millions of messages, and all kinds of trouble among them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import LiteralString
from uuid import UUID

from benchmarks.reconcile_fill import Books

#: How many of the messages each kind of trouble falls on: one of so many.
PARKED, FAILED, UNDECIDED, SCHEDULED, AUDITED = 50, 250, 500, 500, 50

#: Conversations: the id of the first message, and how many there are; the longest has more than are shown.
CONVERSATIONS = {UUID(f"0190000{n}-0000-7000-8000-000000000000"): messages for n, messages in enumerate((3, 100, 2000))}

# Of the last hour: messages that came after those of the day.
_LATE: LiteralString = """
CREATE OR REPLACE FUNCTION made.late(n bigint) RETURNS uuid LANGUAGE sql VOLATILE AS
    $$ SELECT (lpad(to_hex((extract(epoch FROM now()) * 1000)::int8 - 3000000 + n * 100), 12, '0') || '7000b000' ||
               right(lpad(to_hex(hashint8extended(n, 1)), 12, '0'), 12))::uuid $$;
"""

# Each message but the first is caused by the one that has half its number.
_CONVERSATION: LiteralString = """
WITH given AS (
    SELECT n, overlay(%(first)s::text placing lpad(to_hex(n), 12, '0') from 25)::uuid AS id,
           overlay(%(first)s::text placing lpad(to_hex(n / 2), 12, '0') from 25) AS cause
      FROM generate_series(0, %(messages)s::int - 1) n
)"""
_SAY: LiteralString = f"""{_CONVERSATION}, half AS (
    INSERT INTO outbox.half_message (id, producer_group, topic, headers, content_type, body)
    SELECT id, 'bank_a', 'chat', CASE WHEN n > 0 THEN
           jsonb_build_object('outbox-conversation', %(first)s::text, 'outbox-cause', cause) END,
           'application/json', made.body(n) FROM given
), op AS (
    INSERT INTO outbox.op_message (half_id, resolution, decided_by) SELECT id, 'commit', 'producer' FROM given
)
INSERT INTO outbox.message (topic, queue, position, half_id, send_number)
SELECT 'chat', 0, 1 + n + coalesce((SELECT max(position) FROM outbox.message WHERE topic = 'chat'), 0), id, 1 FROM given
"""
_HEAR: LiteralString = f"""{_CONVERSATION}
INSERT INTO outbox.consumer_message (consumer_group, message_id, topic, queue, position, status, attempts)
SELECT g, id, 'chat', 0, n + 1, 'consumed', 1
  FROM given, unnest('{{bank_b,bank_c,bank_d,bank_e}}'::text[]) g
"""

_PRODUCER: Sequence[LiteralString] = (
    # A topic with few messages among the many.
    """WITH rare AS (
           SELECT n, overlay(made.id(n)::text placing '00000000' from 29)::uuid AS id
             FROM generate_series(1, %(rows)s::int8, greatest(%(rows)s::int8 / 1000, 1)) n
       ), half AS (
           INSERT INTO outbox.half_message (id, producer_group, topic, key, tag, headers, content_type, body, born_at)
           SELECT id, 'bank_a', 'refund', 'account-' || n, 'late', '{"trace": "abc"}', 'application/json', made.body(n),
                  made.at(n) FROM rare
       ), op AS (
           INSERT INTO outbox.op_message (half_id, sequence, resolution, decided_by, decided_at)
           SELECT id, %(rows)s::int8 + row_number() OVER (ORDER BY n), 'commit', 'producer', made.at(n) FROM rare
       ), topic AS (INSERT INTO outbox.topic (name, queues) VALUES ('refund', 8) ON CONFLICT DO NOTHING)
       INSERT INTO outbox.message (topic, queue, position, half_id, send_number, visible_at)
       SELECT 'refund', 0, row_number() OVER (ORDER BY n), id, 1, made.at(n) FROM rare""",
    "SELECT setval('outbox.op_sequence', (SELECT max(sequence) FROM outbox.op_message))",
    # Undecided, of three topics; a tenth is over its checks.
    """WITH given AS MATERIALIZED (
           SELECT n, made.late(n) AS id, (ARRAY['transfer', 'refund', 'order'])[n %% 3 + 1] AS topic
             FROM generate_series(1, %(undecided)s::int8) n
       ), half AS (
           INSERT INTO outbox.half_message (id, producer_group, topic, key, content_type, body)
           SELECT id, 'bank_a', topic, 'account-' || n, 'application/json', made.body(n) FROM given
       ), history AS (
           INSERT INTO outbox.check_history (half_id, asked, worker, answer, seconds)
           SELECT id, 'checker', 'bench:1', 'unknown', 0.1 FROM given CROSS JOIN generate_series(1, 3)
       )
       INSERT INTO outbox.half_check (half_id, topic, fenced, next_check_at, check_times, last_answer, checked_at,
                                      parked_at, reason)
       SELECT id, topic, n %% 2 = 0, now() + make_interval(secs => n %% 600 - 300), n %% 15, 'unknown', now(),
              CASE WHEN n %% 10 = 0 THEN now() END, CASE WHEN n %% 10 = 0 THEN '15 checks gave no answer' END
         FROM given""",
    # Scheduled for the next days; a tenth is recalled.
    """WITH given AS MATERIALIZED (
           SELECT n, made.late(%(undecided)s::int8 + n) AS id FROM generate_series(1, %(scheduled)s::int8) n
       ), half AS (
           INSERT INTO outbox.half_message (id, producer_group, topic, key, content_type, body, deliver_at)
           SELECT id, 'bank_a', 'transfer', 'account-' || n, 'application/json', made.body(n),
                  now() + make_interval(mins => n::int) FROM given
       ), op AS (
           INSERT INTO outbox.op_message (half_id, resolution, decided_by) SELECT id, 'commit', 'producer' FROM given
       )
       INSERT INTO outbox.scheduled_message (half_id, deliver_at, recalled_at, recalled_by)
       SELECT id, now() + make_interval(mins => n::int), CASE WHEN n %% 10 = 0 THEN now() END,
              CASE WHEN n %% 10 = 0 THEN 'ann' END FROM given""",
)

# From here on, dispatch has yet to come.
_UNDISPATCHED: Sequence[LiteralString] = (
    """INSERT INTO outbox.dispatch_cursor (next_xid, in_flight, base_sequence, system_identifier)
       SELECT pg_snapshot_xmax(pg_current_snapshot()), '{}', 0, system_identifier FROM pg_control_system()""",
    # Committed a moment ago, and not dispatched.
    """WITH given AS MATERIALIZED (
           SELECT n, made.late(%(undecided)s::int8 * 2 + n) AS id FROM generate_series(1, 500) n
       ), half AS (
           INSERT INTO outbox.half_message (id, producer_group, topic, key, content_type, body)
           SELECT id, 'bank_a', 'transfer', 'account-' || n, 'application/json', made.body(n) FROM given
       )
       INSERT INTO outbox.op_message (half_id, resolution, decided_by) SELECT id, 'commit', 'producer' FROM given""",
)

_CONSUMER: Sequence[LiteralString] = (
    # Fifty kinds of errors, most of them of a few.
    """UPDATE outbox.consumer_message
          SET status = 'parked', attempts = 17, error_kind = e.kind,
              last_error = e.kind || ': account 12345 does not exist' || E'\\n\\n' ||
                           repeat(E'  File "/srv/bank/transfers.py", line 1, in pay\\n', 15),
              discarded_at = CASE WHEN k %% 20 = 0 THEN now() END
         FROM (SELECT n / 50 AS k, made.id(n) AS id,
                      'Error' || floor(50 * power((hashint8(n) & 1023) / 1024.0, 3)) || ' in transfers.py:pay' AS kind
                 FROM generate_series(3, %(rows)s::int8, 50) n) e
        WHERE consumer_group = 'bank_b' AND message_id = e.id""",
    """UPDATE outbox.consumer_message
          SET status = 'failed', attempts = 3, error_kind = 'OperationalError in transfers.py:pay',
              last_error = 'OperationalError: deadlock detected',
              next_attempt_at = now() + make_interval(secs => n %% 60)
         FROM generate_series(7, %(rows)s::int8, 250) n
        WHERE consumer_group = 'bank_b' AND message_id = made.id(n)""",
    """INSERT INTO outbox.reconciliation_run (id, job_id, topic, consumer_group, started_at, finished_at, counts)
       SELECT made.id(n), made.id(n), 'transfer', 'bank_b', now() - make_interval(days => n::int),
              now() - make_interval(days => n::int), '{"consumed": 5000000}' FROM generate_series(1, 90) n""",
    """INSERT INTO outbox.reconciliation_finding (run_id, message_id, kind)
       SELECT made.id(n %% 90 + 1), made.id(n), 'missing' FROM generate_series(1, 10000) n""",
)

_BOTH: Sequence[LiteralString] = (
    """INSERT INTO outbox.audit (acted_at, actor, action, target, reason, result, origin)
       SELECT now() - make_interval(secs => (%(audited)s - n) * 30), 'operator-' || n %% 20,
              (ARRAY['resend', 'retry', 'check', 'rollback', 'commit'])[n %% 5 + 1], made.id(n * 50)::text,
              'the account exists again', '{"messages": 1}', '{"via": "console", "ip": "10.0.0.1"}'
         FROM generate_series(1, %(audited)s::int8) n""",
    """INSERT INTO outbox.bulk_job (id, action, requested_by, reason, selector, total, created_at, started_at,
                                     finished_at)
       SELECT made.id(n), 'resend', 'ann', 'the account exists again',
              CASE WHEN n %% 5 = 0 THEN '{"described": "resend 100 messages", "counts": {"done": 90, "failed": 10}}'
                   ELSE '{"described": "resend 100 messages", "counts": {"done": 100}}' END::jsonb, 100,
              now() - make_interval(hours => n::int), now() - make_interval(hours => n::int),
              now() - make_interval(hours => n::int) FROM generate_series(1, 500) n""",
    """INSERT INTO outbox.bulk_item (bulk_job_id, number, action, message_id, topic, state, outcome)
       SELECT made.id(n), i, 'resend', made.id(n * 100 + i), 'transfer', 'done', 'sent again'
         FROM generate_series(1, 500) n, generate_series(1, 100) i""",
    # One that is under way.
    """WITH given AS MATERIALIZED (SELECT made.late(0) AS id), bulk_job AS (
           INSERT INTO outbox.bulk_job (id, action, requested_by, reason, selector, total, started_at)
           SELECT id, 'resend', 'ann', 'all of them', '{"described": "resend all"}', %(audited)s, now() FROM given)
       INSERT INTO outbox.bulk_item (bulk_job_id, number, action, message_id, topic, state, outcome)
       SELECT id, n, 'resend', made.id(n * 50 + 1), 'transfer', CASE WHEN n %% 2 = 0 THEN 'done' ELSE 'pending' END,
              CASE WHEN n %% 2 = 0 THEN 'sent again' END FROM given, generate_series(1, %(audited)s::int8) n""",
    # A week of samples, of twenty topics with two groups each.
    """INSERT INTO outbox.stats_sample (sampled_at, stats)
       SELECT t, jsonb_build_object('at', t,
              'totals', jsonb_build_object('messages', 210 * (extract(epoch FROM t)::int8 / 60), 'undispatched', 210,
                             'undecided', 210, 'consumed', 210 * (extract(epoch FROM t)::int8 / 60), 'parked', 210),
              'topics', (SELECT jsonb_object_agg('topic-' || k, jsonb_build_object(
                             'messages', k * (extract(epoch FROM t)::int8 / 60), 'undispatched', k, 'undecided', k))
                           FROM generate_series(1, 20) k),
              'groups', (SELECT jsonb_object_agg('topic-' || k, jsonb_build_object(
                             'mail', jsonb_build_object('consumed', extract(epoch FROM t)::int8 / 60 * k, 'lag', k),
                             'audit', jsonb_build_object('consumed', k * 60, 'parked', k)))
                           FROM generate_series(1, 20) k))
         FROM generate_series(date_trunc('minute', now()) - interval '8 days', now(), interval '1 minute') t
       ON CONFLICT DO NOTHING""",
)


def fill(books: Books, rows: int, now_ms: int) -> None:
    """Write ``rows`` messages, and what befell them."""
    books.prepare(rows, now_ms)
    books.fill(1, rows, in_bulk=True)
    values = {
        "rows": rows,
        "undecided": rows // UNDECIDED,
        "scheduled": rows // SCHEDULED,
        "audited": rows // AUDITED,
    }
    for name, statements, chat, last in (
        (books.producer, _PRODUCER, _SAY, _UNDISPATCHED),
        (books.consumer, _CONSUMER, _HEAR, ()),
    ):
        books.say(f"trouble in {name}")
        with books.connect(name) as connection:
            connection.execute(_LATE)
            connection.execute("SET jit = off")
            for statement in statements:
                connection.execute(statement, values)
                connection.commit()
            for first, messages in CONVERSATIONS.items():
                connection.execute(chat, {"first": first, "messages": messages})
                connection.commit()
            for statement in (*last, *_BOTH):
                connection.execute(statement, values)
                connection.commit()
    books.vacuum()
