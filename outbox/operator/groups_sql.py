"""Build the statements of acts on groups and topics: they read and move offsets, and delete both with their rows."""

from __future__ import annotations

from outbox.database.execute import Template
from outbox.database.sql import GROUP_QUEUES
from outbox.prune.segments_sql import DELETE_LOCKED

# --- in the producer's database --------------------------------------------------------------------------------------

#: Count the messages of each queue after a position and up to another one. Rows: ``(queue, messages)``.
messages_between: Template = Template("""
SELECT r.queue, (SELECT count(*) FROM {s}.message m
                  WHERE m.topic = %(topic)s AND m.queue = r.queue AND m.position > r.after AND m.position <= r.until)
  FROM unnest(%(queues)s::int[], %(after)s::bigint[], %(until)s::bigint[]) r (queue, after, until)
""")

#: Forget what confirm knows of a group as a whole.
delete_delivery_cursors: Template = Template("""
DELETE FROM {s}.delivery_cursor WHERE topic = %(topic)s AND consumer_group = %(group)s
""")

#: Read how many queues a topic has. Rows: ``(queues,)`` or none.
topic_queues: Template = Template("SELECT queues FROM {s}.topic WHERE name = %s")

# Prune keeps the newest message of each queue, with all that was sent of its half.
#: Read what there is of a topic. Rows: ``(queues, messages that prune keeps, queues that have others or younger ones,
#: something is undecided, something is scheduled)``.
left_of_topic: Template = Template("""
WITH newest AS MATERIALIZED (
    SELECT n AS queue, m.*
      FROM {s}.topic t CROSS JOIN generate_series(0, t.queues - 1) n
     CROSS JOIN LATERAL (SELECT half_id, visible_at FROM {s}.message m WHERE m.topic = t.name AND m.queue = n
                          ORDER BY position DESC LIMIT 1) m
     WHERE t.name = %(topic)s
)
SELECT t.queues, (SELECT count(*) FROM newest),
       (SELECT count(*) FROM newest n
         WHERE n.visible_at >= clock_timestamp() - make_interval(secs => %(age)s)
            OR EXISTS (SELECT FROM {s}.message m WHERE m.topic = t.name AND m.queue = n.queue
                          AND m.half_id <> ALL (ARRAY(SELECT half_id FROM newest)))),
       EXISTS (SELECT FROM {s}.half_check c WHERE c.topic = t.name),
       EXISTS (SELECT FROM {s}.scheduled_message d JOIN {s}.half_message h ON h.id = d.half_id
                WHERE h.topic = t.name AND d.recalled_at IS NULL)
  FROM {s}.topic t WHERE t.name = %(topic)s
""")

#: Each deletes some of the rows that a topic leaves behind. The first has at most one message for each queue.
forget_topic: tuple[Template, ...] = (
    Template(f"""
WITH locked AS MATERIALIZED (
    SELECT half_id FROM {{s}}.op_message
     WHERE half_id IN (SELECT half_id FROM {{s}}.message WHERE topic = %(topic)s) FOR UPDATE
), {DELETE_LOCKED}
SELECT count(*) FROM halves"""),
    Template("DELETE FROM {s}.delivery_cursor WHERE topic = %(topic)s"),
    Template("DELETE FROM {s}.topic_total WHERE topic = %(topic)s"),
    Template("DELETE FROM {s}.topic_pause WHERE topic = %(topic)s"),
    Template("DELETE FROM {s}.topic_growth WHERE topic = %(topic)s"),
    Template("DELETE FROM {s}.topic WHERE name = %(topic)s"),
)

# --- in the consumer's database --------------------------------------------------------------------------------------

# One that was deleted halfway has inbox rows only.
#: Tell whether the database knows a group of a topic. Rows: ``(known,)``.
knows_group: Template = Template("""
SELECT EXISTS (SELECT FROM {s}.consumer_offset WHERE consumer_group = %(group)s AND topic = %(topic)s)
    OR EXISTS (SELECT FROM {s}.consumer_message WHERE consumer_group = %(group)s AND topic = %(topic)s)
""")

#: Read which groups of a topic there are. Rows: ``(group,)``.
groups_of_topic: Template = Template(f"""{GROUP_QUEUES}
SELECT DISTINCT consumer_group FROM place WHERE topic = %(topic)s ORDER BY 1
""")

#: Read how far a group is in each queue that it has an offset of. Rows: ``(queue, position)``.
positions: Template = Template(f"""{GROUP_QUEUES}
SELECT p.queue, (SELECT max(position) FROM {{s}}.consumer_offset o
                  WHERE o.consumer_group = p.consumer_group AND o.topic = p.topic AND o.queue = p.queue)
  FROM place p WHERE p.consumer_group = %(group)s AND p.topic = %(topic)s
 ORDER BY 1
""")

#: Read how often operators moved each group, and when last. Rows: ``(group, topic, passages, when)``.
passages: Template = Template("""
SELECT consumer_group, topic, max(passage)::int, max(began_at) FROM {s}.consumer_passage GROUP BY 1, 2
""")

# As in the consumer's `drop_starts`, a prune waits that was about to delete the row that is written. A worker that
# handles messages outside of transactions holds no lock meanwhile: by a newer lease it finds that its results count no
# more.
#: Move a group in some queues, whose locks are held: that begins its next passage. Rows: ``(passage,)`` for each queue.
move: Template = Template("""
WITH moved AS (
    SELECT queue, former, position, message_id,
           (SELECT coalesce(max(passage), 0) + 1 FROM {s}.consumer_passage
             WHERE consumer_group = %(group)s AND topic = %(topic)s)::smallint AS passage
      FROM unnest(%(queues)s::int[], %(formers)s::bigint[], %(positions)s::bigint[], %(ids)s::uuid[])
           m (queue, former, position, message_id)
), dropped AS (
    DELETE FROM {s}.consumer_offset o USING moved m
     WHERE o.consumer_group = %(group)s AND o.topic = %(topic)s AND o.queue = m.queue
       AND (o.position > m.position OR (o.position = m.position AND o.starts > 0))
), stopped AS (
    INSERT INTO {s}.consumer_lease (consumer_group, topic, queue, term, renewal, worker, started, until)
    SELECT %(group)s, %(topic)s, m.queue, k.term + 1, 0, NULL, k.started, clock_timestamp()
      FROM moved m CROSS JOIN LATERAL (
           SELECT term, started FROM {s}.consumer_lease k
            WHERE k.consumer_group = %(group)s AND k.topic = %(topic)s AND k.queue = m.queue
            ORDER BY term DESC, renewal DESC LIMIT 1) k
), noted AS (
    INSERT INTO {s}.consumer_passage (consumer_group, topic, queue, passage, former, position)
    SELECT %(group)s, %(topic)s, queue, passage, former, position FROM moved
), written AS (
    INSERT INTO {s}.consumer_offset (consumer_group, topic, queue, position, starts, message_id, passage)
    SELECT %(group)s, %(topic)s, queue, position, 0, message_id, passage FROM moved
    ON CONFLICT (consumer_group, topic, queue, position, starts)
    DO UPDATE SET written_at = clock_timestamp(), message_id = excluded.message_id, passage = excluded.passage
)
SELECT passage FROM moved
""")

#: Count the messages of a topic in the inbox of a group. Rows: ``(status, messages)``.
contents: Template = Template("""
SELECT CASE WHEN discarded_at IS NULL THEN status ELSE 'discarded' END, count(*) FROM {s}.consumer_message
 WHERE consumer_group = %(group)s AND topic = %(topic)s GROUP BY 1 ORDER BY 1
""")

#: Each deletes, in one table, the rows that make a group known, or that are kept about it as a whole.
forget_group: tuple[Template, ...] = tuple(
    Template(f"DELETE FROM {{s}}.{table} WHERE consumer_group = %(group)s AND topic = %(topic)s")
    for table in (
        "consumer_offset",
        "consumer_lease",
        "consumer_start",
        "consumer_passage",
        "group_control",
        "rate_grant",
        "segment_hold",
        "log_loss",
        "dead_letter_note",
        "reconciliation_settled",
        "reconciliation_mark",
    )
)

# Each partition has ctids of its own.
#: Delete some of the inbox rows of a group, and some of those of earlier passages. Rows: one for each.
delete_rows: tuple[Template, ...] = tuple(
    Template(f"""
DELETE FROM {{s}}.{table}
 WHERE (tableoid, ctid) IN (SELECT tableoid, ctid FROM {{s}}.{table}
                             WHERE consumer_group = %(group)s AND topic = %(topic)s LIMIT %(limit)s)
RETURNING 1
""")
    for table in ("consumer_message", "reread_message")
)
