"""What a batch has counted of each topic is a row of its own; the sums of all topics were written with each batch."""

from outbox.database.migration.script import run

revision = "producer_0018"
down_revision = "producer_0017"
branch_labels = None
depends_on = None

UPGRADE = (
    """
    CREATE TABLE IF NOT EXISTS {s}.topic_total (
        id BIGINT GENERATED ALWAYS AS IDENTITY,
        topic TEXT COLLATE "C" NOT NULL,
        committed BIGINT NOT NULL DEFAULT 0,
        rolled_back BIGINT NOT NULL DEFAULT 0,
        checks BIGINT NOT NULL DEFAULT 0,
        CONSTRAINT pk_topic_total PRIMARY KEY (id)
    )""",
    # Nobody counts meanwhile.
    "LOCK TABLE {s}.dispatch_cursor, {s}.check_total IN ACCESS EXCLUSIVE MODE",
    """
    INSERT INTO {s}.topic_total (topic, committed, rolled_back)
    SELECT t.key, (t.value ->> 0)::bigint, (t.value ->> 1)::bigint
      FROM (SELECT totals FROM {s}.dispatch_cursor ORDER BY id DESC LIMIT 1) c CROSS JOIN jsonb_each(c.totals) t""",
    "INSERT INTO {s}.topic_total (topic, checks) SELECT topic, sum(checks) FROM {s}.check_total GROUP BY topic",
    "DROP TABLE {s}.check_total",
    "ALTER TABLE {s}.dispatch_cursor DROP COLUMN totals",
)

DOWNGRADE = (
    "LOCK TABLE {s}.dispatch_cursor, {s}.topic_total IN ACCESS EXCLUSIVE MODE",
    "ALTER TABLE {s}.dispatch_cursor ADD COLUMN totals JSONB NOT NULL DEFAULT '{}'",
    """
    UPDATE {s}.dispatch_cursor
       SET totals = coalesce((SELECT jsonb_object_agg(topic, jsonb_build_array(committed, rolled_back))
                                FROM (SELECT topic, sum(committed)::bigint AS committed,
                                             sum(rolled_back)::bigint AS rolled_back
                                        FROM {s}.topic_total GROUP BY topic) t), '{}')
     WHERE id = (SELECT max(id) FROM {s}.dispatch_cursor)""",
    """
    CREATE TABLE {s}.check_total (
        id BIGINT GENERATED ALWAYS AS IDENTITY,
        topic TEXT COLLATE "C" NOT NULL,
        checks BIGINT NOT NULL,
        CONSTRAINT pk_check_total PRIMARY KEY (id)
    )""",
    "INSERT INTO {s}.check_total (topic, checks) SELECT topic, sum(checks) FROM {s}.topic_total GROUP BY topic",
    "DROP TABLE {s}.topic_total",
)


def upgrade() -> None:
    run(UPGRADE)


def downgrade() -> None:
    run(DOWNGRADE)
