"""Deliveries: what became of each message in each group that its producer knows, and how far that was asked."""

from outbox.database.migration.script import run

revision = "producer_0004"
down_revision = "producer_0003"
branch_labels = None
depends_on = None

# Deliveries have the segments of the messages that they are about: prune empties both together. Those that there are
# already are read from the catalog, as they are when a segment is made.
_SEGMENTS = """
DO $$
DECLARE each record;
BEGIN
    LOCK TABLE {s}.half_message IN SHARE UPDATE EXCLUSIVE MODE;
    FOR each IN SELECT regexp_replace(c.relname, '^half_message_', '') AS suffix,
                       pg_get_expr(c.relpartbound, c.oid) AS bounds
                  FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
                 WHERE i.inhparent = '{s}.half_message'::regclass LOOP
        EXECUTE format('CREATE TABLE {s}.%I PARTITION OF {s}.delivery ', 'delivery_' || each.suffix) || each.bounds;
    END LOOP;
END $$"""

UPGRADE = (
    """
    CREATE TABLE {s}.delivery (
        half_id UUID NOT NULL,
        consumer_group TEXT COLLATE "C" NOT NULL,
        number INTEGER NOT NULL,
        topic TEXT COLLATE "C" NOT NULL,
        status TEXT NOT NULL,
        settled BOOLEAN NOT NULL,
        callback TEXT,
        reason TEXT,
        recorded_at TIMESTAMPTZ NOT NULL DEFAULT clock_timestamp(),
        CONSTRAINT pk_delivery PRIMARY KEY (half_id, consumer_group, number),
        CONSTRAINT ck_delivery_number CHECK (number > 0),
        CONSTRAINT ck_delivery_status CHECK (status IN ('consumed', 'unconsumed', 'failed', 'parked', 'quarantined',
                                                        'resend_exhausted', 'left_out')),
        CONSTRAINT ck_delivery_callback CHECK (callback IN ('delivered', 'undeliverable'))
    ) PARTITION BY RANGE (half_id)""",
    "CREATE INDEX ix_delivery_open ON {s}.delivery (topic, consumer_group, half_id) WHERE NOT settled",
    """
    CREATE UNIQUE INDEX ix_delivery_callback
        ON {s}.delivery (half_id, consumer_group, callback) WHERE callback IS NOT NULL""",
    _SEGMENTS,
    """
    CREATE TABLE {s}.delivery_cursor (
        topic TEXT COLLATE "C" NOT NULL,
        consumer_group TEXT COLLATE "C" NOT NULL,
        number BIGINT NOT NULL,
        starts BIGINT[] NOT NULL,
        positions BIGINT[] NOT NULL,
        written_at TIMESTAMPTZ NOT NULL DEFAULT clock_timestamp(),
        CONSTRAINT pk_delivery_cursor PRIMARY KEY (topic, consumer_group, number),
        CONSTRAINT ck_delivery_cursor_queues CHECK (cardinality(starts) = cardinality(positions))
    )""",
)

DOWNGRADE = ("DROP TABLE {s}.delivery, {s}.delivery_cursor",)


def upgrade() -> None:
    run(UPGRADE)


def downgrade() -> None:
    run(DOWNGRADE)
