"""Statements by which workers report that they live, and the statistics."""

from __future__ import annotations

from outbox.database.execute import Template

# What hasn't changed is left as it is: it may be long, and stored apart.
#: Write that a worker lives and how it fares: the columns by name; ``roles``, ``handlers``, ``duties`` as JSON.
beat = Template("""
INSERT INTO {s}.worker AS w (id, name, version, roles, handlers, duties)
VALUES (%(id)s, %(name)s, %(version)s, %(roles)s::jsonb, %(handlers)s::jsonb, %(duties)s::jsonb)
ON CONFLICT (id) DO UPDATE
   SET seen_at = clock_timestamp(), duties = excluded.duties,
       handlers = CASE WHEN w.handlers = excluded.handlers THEN w.handlers ELSE excluded.handlers END
""")

# The worker that writes the row of a minute takes its sample. The row is empty until then, and for good if that worker
# dies over it.
#: Claim this minute's sample. Rows: ``(minute as text,)``, none if another worker was faster.
claim_sample = Template("""
INSERT INTO {s}.stats_sample (sampled_at, stats) VALUES (date_trunc('minute', statement_timestamp()), '{}')
ON CONFLICT (sampled_at) DO NOTHING
RETURNING sampled_at::text
""")

#: Write the statistics, as JSON, of a minute.
write_sample = Template("UPDATE {s}.stats_sample SET stats = %s::jsonb WHERE sampled_at = %s::timestamptz")

#: Delete the row of a worker that ends in order.
leave = Template("DELETE FROM {s}.worker WHERE id = %s")
