"""Statements that follow one message through all tables, by index."""

from __future__ import annotations

from outbox.database.execute import Template
from outbox.database.sql import GROUP_QUEUES, message_status
from outbox.message.content import CAUSE_HEADER, CONVERSATION_HEADER, CORRELATION_HEADER, ENCODING_HEADER
from outbox.operator.databases import Query
from outbox.operator.look.inbox_sql import GROUPS

#: The status of an undecided half by its check ``c``: a `outbox.operator.model.HalfStatus`.
HALF_STATUS = """CASE WHEN c.parked_at IS NOT NULL THEN 'parked'
            WHEN c.next_check_at <= statement_timestamp() THEN 'orphan'
            WHEN c.checked_at IS NULL THEN 'immune'
            ELSE 'waiting' END"""

# Written when the question is put, and kept until it is answered. Once the lease has run out, the worker that asked is
# dead.
IS_BEING_ASKED = "(c.last_error IS NOT DISTINCT FROM %(unanswered)s AND c.next_check_at > statement_timestamp())"

#: The facts about the last question, by the check ``c``; ``{error}`` is how much of its error is wanted.
LAST_CHECK = f"""{IS_BEING_ASKED}, CASE WHEN NOT {IS_BEING_ASKED} THEN c.last_answer END,
       CASE WHEN NOT {IS_BEING_ASKED} THEN {{error}} END, c.checked_at, c.next_check_at"""

#: The rows of a message in the producer's tables. A check without an answer counts as being asked until ``timeout``
#: seconds have passed, or its lease has run out: a decision deletes the lease, and the worker that was asking at that
#: moment may still answer.
PRODUCER_SIDE = {
    "half": Query(f"""
-- id producer_group topic key tag headers:json content_type body_bytes raw deliver_at born_at status
SELECT h.id, h.producer_group, h.topic, h.key, h.tag, h.headers::text, h.content_type, octet_length(h.body),
       substring(h.body FROM 1 FOR %(most)s), h.deliver_at, h.born_at, {message_status()}
  FROM {{s}}.half_message h
  LEFT JOIN {{s}}.op_message o ON o.half_id = h.id
  LEFT JOIN {{s}}.scheduled_message d ON d.half_id = h.id
 WHERE h.id = %(id)s
"""),
    "check": Query(f"""
-- status fenced check_times being_asked last_answer last_error checked_at next_check_at next_check_in parked_at reason
SELECT {HALF_STATUS}, c.fenced, c.check_times, {LAST_CHECK.replace("{error}", "c.last_error")},
       extract(epoch FROM c.next_check_at - statement_timestamp())::float8, c.parked_at, c.reason
  FROM {{s}}.half_check c WHERE c.half_id = %(id)s
"""),
    "history": Query("""
-- asked_at asked worker answer seconds error state
SELECT a.asked_at, a.asked, a.worker, a.answer, a.seconds, a.error,
       CASE WHEN a.answer IS NOT NULL THEN 'answered'
            WHEN a.asked_at > statement_timestamp() - make_interval(secs => %(timeout)s)
                 OR a.back = 1 AND c.next_check_at > statement_timestamp() THEN 'being_asked'
            ELSE 'no_answer' END
  FROM (SELECT *, row_number() OVER (ORDER BY id DESC) AS back FROM {s}.check_history
         WHERE half_id = %(id)s ORDER BY id DESC LIMIT 1000) a
  LEFT JOIN {s}.half_check c ON c.half_id = a.half_id
 ORDER BY a.id
"""),
    "op": Query("""
-- resolution decided_by decided_at sequence xid
SELECT resolution, decided_by, decided_at, sequence, xid::text FROM {s}.op_message WHERE half_id = %(id)s
"""),
    "raised": Query("""
-- error_kind error raised_at
SELECT error_kind, error, raised_at FROM {s}.half_error WHERE half_id = %(id)s
"""),
    "deliveries": Query("""
-- group status settled reason recorded_at
SELECT consumer_group, status, settled, reason, recorded_at FROM {s}.delivery
 WHERE half_id = %(id)s ORDER BY recorded_at, consumer_group, number LIMIT 1000
"""),
    "sends": Query("""
-- send_number queue position visible_at
SELECT send_number, queue, position, visible_at FROM {s}.message WHERE half_id = %(id)s ORDER BY send_number
"""),
    "scheduled": Query("""
-- deliver_at recalled_at recalled_by held_topic
SELECT deliver_at, recalled_at, recalled_by, held_topic FROM {s}.scheduled_message WHERE half_id = %(id)s
"""),
    "compensation": Query("""
-- function requested_by reason result:json compensated_at
SELECT function, requested_by, reason, result::text, compensated_at FROM {s}.compensation WHERE half_id = %(id)s
"""),
}

#: A message's body. Rows: ``(content_type, bytes, encoding)`` or none.
BODY = f"SELECT content_type, body, headers ->> '{ENCODING_HEADER}' FROM {{s}}.half_message WHERE id = %(id)s"

#: Which groups of a topic have come to a position in a queue, 1,000 at most. Rows: ``(group, left_out or unconsumed)``.
REACHED = (
    GROUP_QUEUES
    + """, known AS (SELECT DISTINCT consumer_group FROM place WHERE topic = %(topic)s)
SELECT consumer_group,
       CASE WHEN (SELECT max(position) FROM {s}.consumer_offset o
                   WHERE o.consumer_group = k.consumer_group AND o.topic = %(topic)s AND o.queue = %(queue)s)
                 >= %(position)s THEN 'left_out' ELSE 'unconsumed' END
  FROM known k
 ORDER BY 1 LIMIT 1000
"""
)

#: The failed attempts of groups at a message, the oldest first, 1,000 at most. Rows: the fields of `FailedAttempt`.
ATTEMPTS: Template = Template("""
SELECT * FROM (SELECT consumer_group, failed_at, attempt, status, worker, seconds, error_kind, error
                 FROM {s}.attempt_history WHERE message_id = %s
                ORDER BY failed_at DESC LIMIT 1000) a
 ORDER BY failed_at, consumer_group
""")

#: What these groups' inboxes said of a message before they read it again.
EARLIER = Query("""
-- group passage status attempts error received_at changed_at
SELECT consumer_group, passage, status, attempts, left(split_part(last_error, E'\\n', 1), 1000), received_at, changed_at
  FROM {s}.reread_message WHERE consumer_group = ANY (%(groups)s::text[]) AND message_id = %(id)s
 ORDER BY consumer_group, passage
""")

#: What reconciliations found about a message, the newest first, 100 at most.
FINDINGS = Query("""
-- run_id topic group kind detail:json action acted_at result:json started_at finished_at
SELECT f.run_id, r.topic, r.consumer_group, f.kind, f.detail::text, f.action, f.acted_at,
       to_jsonb(f.result)::text, r.started_at, r.finished_at
  FROM (SELECT * FROM {s}.reconciliation_finding WHERE message_id = %(id)s LIMIT 1000) f
  LEFT JOIN LATERAL (SELECT * FROM {s}.reconciliation_run WHERE id = f.run_id LIMIT 1) r ON true
 ORDER BY f.id DESC LIMIT 100
""")

#: Which conversation a message belongs to. Rows: ``(the header or None,)``, none where its half isn't here.
CONVERSATION_OF = f"SELECT headers ->> '{CONVERSATION_HEADER}' FROM {{s}}.half_message WHERE id = %(id)s"

# Each branch by an index, in each partition; the header's condition is that of the partial one.
#: The messages of a conversation, in the order of their ids.
CONVERSATION = Query(f"""
-- id cause correlation topic key tag producer_group born_at deliver_at status compensated_at compensated_by
SELECT h.id, h.headers ->> '{CAUSE_HEADER}', h.headers ->> '{CORRELATION_HEADER}', h.topic, h.key, h.tag,
       h.producer_group, h.born_at, h.deliver_at, {message_status()}, c.compensated_at, c.function
  FROM (SELECT * FROM {{s}}.half_message WHERE id = %(id)s
         UNION ALL
        (SELECT * FROM {{s}}.half_message m
          WHERE m.headers ? '{CONVERSATION_HEADER}' AND "left"(m.headers ->> '{CONVERSATION_HEADER}', 36) = %(id)s::text
            AND m.id <> %(id)s
          ORDER BY "left"(m.headers ->> '{CONVERSATION_HEADER}', 36), m.id LIMIT %(limit)s)) h
  LEFT JOIN LATERAL (SELECT * FROM {{s}}.op_message WHERE half_id = h.id OFFSET 0) o ON true
  LEFT JOIN LATERAL (SELECT * FROM {{s}}.scheduled_message WHERE half_id = h.id OFFSET 0) d ON true
  LEFT JOIN LATERAL (SELECT * FROM {{s}}.compensation WHERE half_id = h.id OFFSET 0) c ON true
 ORDER BY h.id LIMIT %(limit)s
""")

#: The inbox rows of messages, by group.
RECEIPTS = Query(
    f"""
-- message_id group status attempts error received_at changed_at discarded_at
WITH RECURSIVE {GROUPS}
SELECT m.message_id, m.consumer_group, m.status, m.attempts, left(split_part(m.last_error, E'\\n', 1), 1000),
       m.received_at, m.changed_at, m.discarded_at
  FROM place p CROSS JOIN unnest(%(ids)s::uuid[]) wanted (id)
 CROSS JOIN LATERAL (SELECT * FROM {{s}}.consumer_message
                      WHERE consumer_group = p.consumer_group AND message_id = wanted.id OFFSET 0) m
 ORDER BY m.changed_at, m.consumer_group
"""
)
