"""The producer's tables, and the first row of the dispatch cursor."""

from outbox.database.migration.script import run

revision = "producer_0001"
down_revision = None
branch_labels = ("producer",)
depends_on = ("common_0001",)

UPGRADE = (
    """
    CREATE TABLE {s}.half_message (
        id UUID NOT NULL,
        producer_group TEXT COLLATE "C" NOT NULL,
        topic TEXT COLLATE "C" NOT NULL,
        key TEXT COLLATE "C",
        tag TEXT COLLATE "C",
        headers JSONB,
        content_type TEXT NOT NULL,
        body BYTEA NOT NULL,
        deliver_at TIMESTAMPTZ,
        born_at TIMESTAMPTZ NOT NULL DEFAULT clock_timestamp(),
        body_digest BYTEA GENERATED ALWAYS AS (substr(sha256(body), 1, 16)) STORED,
        CONSTRAINT pk_half_message PRIMARY KEY (id),
        CONSTRAINT ck_half_message_topic CHECK (octet_length(topic) BETWEEN 1 AND 127),
        CONSTRAINT ck_half_message_key CHECK (octet_length(key) <= 255)
    )""",
    """
    CREATE TABLE {s}.half_check (
        half_id UUID NOT NULL,
        fenced BOOLEAN NOT NULL,
        next_check_at TIMESTAMPTZ NOT NULL,
        check_times INTEGER NOT NULL DEFAULT 0,
        last_answer TEXT,
        last_error TEXT,
        checked_at TIMESTAMPTZ,
        parked_at TIMESTAMPTZ,
        reason TEXT,
        topic TEXT COLLATE "C" NOT NULL,
        CONSTRAINT pk_half_check PRIMARY KEY (half_id),
        CONSTRAINT ck_half_check_check_times CHECK (check_times >= 0),
        CONSTRAINT ck_half_check_last_answer CHECK (last_answer IN ('commit', 'rollback', 'unknown')),
        CONSTRAINT ck_half_check_parked CHECK ((parked_at IS NULL) = (reason IS NULL))
    ) WITH (fillfactor = 70)""",
    """
    CREATE INDEX ix_half_check_topic_next_check_at
        ON {s}.half_check (topic, next_check_at) WHERE parked_at IS NULL""",
    "CREATE INDEX ix_half_check_next_check_at ON {s}.half_check (next_check_at) WHERE fenced AND parked_at IS NULL",
    """
    CREATE TABLE {s}.check_history (
        half_id UUID NOT NULL,
        id BIGINT GENERATED ALWAYS AS IDENTITY,
        asked TEXT NOT NULL,
        asked_at TIMESTAMPTZ NOT NULL DEFAULT clock_timestamp(),
        worker TEXT NOT NULL,
        answer TEXT,
        seconds DOUBLE PRECISION,
        error TEXT,
        CONSTRAINT pk_check_history PRIMARY KEY (half_id, id),
        CONSTRAINT ck_check_history_asked CHECK (asked IN ('checker', 'fence')),
        CONSTRAINT ck_check_history_answer CHECK (answer IN ('commit', 'rollback', 'unknown'))
    )""",
    "CREATE SEQUENCE {s}.op_sequence",
    """
    CREATE TABLE {s}.op_message (
        half_id UUID NOT NULL,
        sequence BIGINT NOT NULL DEFAULT nextval('{s}.op_sequence'),
        resolution TEXT NOT NULL,
        decided_by TEXT NOT NULL,
        decided_at TIMESTAMPTZ NOT NULL DEFAULT clock_timestamp(),
        xid XID8 NOT NULL DEFAULT pg_current_xact_id(),
        CONSTRAINT pk_op_message PRIMARY KEY (half_id),
        CONSTRAINT ck_op_message_resolution CHECK (resolution IN ('commit', 'rollback')),
        CONSTRAINT ck_op_message_decided_by CHECK (decided_by IN ('producer', 'check', 'operator'))
    )""",
    "CREATE INDEX ix_op_message_xid ON {s}.op_message (xid)",
    "CREATE UNIQUE INDEX ix_op_message_sequence ON {s}.op_message (sequence)",
    """
    CREATE TABLE {s}.message (
        topic TEXT COLLATE "C" NOT NULL,
        queue INTEGER NOT NULL,
        position BIGINT NOT NULL,
        half_id UUID NOT NULL,
        send_number SMALLINT NOT NULL,
        visible_at TIMESTAMPTZ NOT NULL DEFAULT clock_timestamp(),
        CONSTRAINT pk_message PRIMARY KEY (topic, queue, position),
        CONSTRAINT ck_message_position CHECK (position > 0),
        CONSTRAINT ck_message_send_number CHECK (send_number > 0)
    )""",
    "CREATE UNIQUE INDEX ix_message_half_id_send_number ON {s}.message (half_id, send_number)",
    """
    CREATE TABLE {s}.scheduled_message (
        half_id UUID NOT NULL,
        deliver_at TIMESTAMPTZ NOT NULL,
        recalled_at TIMESTAMPTZ,
        recalled_by TEXT,
        CONSTRAINT pk_scheduled_message PRIMARY KEY (half_id),
        CONSTRAINT ck_scheduled_message_recalled CHECK ((recalled_at IS NULL) = (recalled_by IS NULL))
    )""",
    """
    CREATE INDEX ix_scheduled_message_deliver_at_half_id
        ON {s}.scheduled_message (deliver_at, half_id) WHERE recalled_at IS NULL""",
    """
    CREATE TABLE {s}.dispatch_cursor (
        id BIGINT GENERATED ALWAYS AS IDENTITY,
        next_xid XID8 NOT NULL,
        in_flight XID8[] NOT NULL,
        target PG_SNAPSHOT,
        after_sequence BIGINT,
        until_sequence BIGINT,
        base_sequence BIGINT NOT NULL DEFAULT 0,
        system_identifier BIGINT NOT NULL,
        written_at TIMESTAMPTZ NOT NULL DEFAULT clock_timestamp(),
        epoch BIGINT NOT NULL DEFAULT 0,
        log TEXT,
        CONSTRAINT pk_dispatch_cursor PRIMARY KEY (id),
        CONSTRAINT ck_dispatch_cursor_cut CHECK ((after_sequence IS NULL) = (until_sequence IS NULL)),
        CONSTRAINT ck_dispatch_cursor_target CHECK (target IS NULL OR until_sequence IS NOT NULL)
    )""",
    """
    CREATE TABLE {s}.topic (
        name TEXT COLLATE "C" NOT NULL,
        queues INTEGER NOT NULL,
        created_at TIMESTAMPTZ NOT NULL DEFAULT clock_timestamp(),
        CONSTRAINT pk_topic PRIMARY KEY (name),
        CONSTRAINT ck_topic_queues CHECK (queues BETWEEN 1 AND 4096)
    )""",
    """
    CREATE TABLE {s}.compensation (
        half_id UUID NOT NULL,
        function TEXT NOT NULL,
        requested_by TEXT NOT NULL,
        reason TEXT NOT NULL,
        result JSONB,
        compensated_at TIMESTAMPTZ NOT NULL DEFAULT clock_timestamp(),
        bulk_job_id UUID,
        CONSTRAINT pk_compensation PRIMARY KEY (half_id)
    )""",
    # No op has been dispatched: all xids are still to come (3 is PostgreSQL's first), none is being waited for.
    """
    INSERT INTO {s}.dispatch_cursor (next_xid, in_flight, system_identifier)
    SELECT '3', '{}', system_identifier FROM pg_control_system()""",
)

DOWNGRADE = (
    "DROP TABLE {s}.half_message, {s}.half_check, {s}.check_history, {s}.op_message, {s}.message, "
    "{s}.scheduled_message, {s}.dispatch_cursor, {s}.topic, {s}.compensation",
    "DROP SEQUENCE {s}.op_sequence",
)


def upgrade() -> None:
    run(UPGRADE)


def downgrade() -> None:
    run(DOWNGRADE)
