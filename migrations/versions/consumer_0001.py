"""The consumer's tables, and those of the reconciliation."""

from outbox.database.migration.script import run

revision = "consumer_0001"
down_revision = None
branch_labels = ("consumer",)
depends_on = ("common_0001",)

UPGRADE = (
    """
    CREATE TABLE {s}.consumer_message (
        consumer_group TEXT COLLATE "C" NOT NULL,
        message_id UUID NOT NULL,
        topic TEXT COLLATE "C" NOT NULL,
        queue INTEGER NOT NULL,
        position BIGINT NOT NULL,
        status TEXT NOT NULL,
        attempts INTEGER NOT NULL,
        claims INTEGER NOT NULL DEFAULT 0,
        next_attempt_at TIMESTAMPTZ,
        body_digest BYTEA,
        last_error TEXT,
        received_at TIMESTAMPTZ NOT NULL DEFAULT clock_timestamp(),
        changed_at TIMESTAMPTZ NOT NULL DEFAULT clock_timestamp(),
        error_kind TEXT,
        discarded_at TIMESTAMPTZ,
        quarantined_by UUID,
        quarantined_from TEXT,
        CONSTRAINT pk_consumer_message PRIMARY KEY (consumer_group, message_id),
        CONSTRAINT ck_consumer_message_status
            CHECK (status IN ('consumed', 'failed', 'parked', 'quarantined')),
        CONSTRAINT ck_consumer_message_attempts CHECK (attempts >= 0 AND claims >= 0),
        CONSTRAINT ck_consumer_message_next_attempt_at
            CHECK ((status = 'failed') = (next_attempt_at IS NOT NULL)),
        CONSTRAINT ck_consumer_message_discarded_at CHECK (discarded_at IS NULL OR status = 'parked'),
        CONSTRAINT ck_consumer_message_quarantined_from CHECK (quarantined_from IN ('unconsumed', 'failed', 'parked')),
        CONSTRAINT ck_consumer_message_quarantined CHECK ((quarantined_by IS NULL) = (quarantined_from IS NULL)),
        CONSTRAINT ck_consumer_message_quarantined_by CHECK (quarantined_by IS NULL OR status = 'quarantined')
    )""",
    """
    CREATE INDEX ix_consumer_message_due
        ON {s}.consumer_message (consumer_group, topic, next_attempt_at) WHERE status = 'failed'""",
    """
    CREATE INDEX ix_consumer_message_parked
        ON {s}.consumer_message (consumer_group, topic, message_id) WHERE status = 'parked'""",
    """
    CREATE INDEX ix_consumer_message_dead
        ON {s}.consumer_message (consumer_group, topic, coalesce(error_kind, 'unclassified'), message_id)
        WHERE status = 'parked' AND discarded_at IS NULL""",
    """
    CREATE INDEX ix_consumer_message_discarded
        ON {s}.consumer_message (discarded_at, message_id)
        WHERE discarded_at IS NOT NULL""",
    """
    CREATE TABLE {s}.consumer_offset (
        consumer_group TEXT COLLATE "C" NOT NULL,
        topic TEXT COLLATE "C" NOT NULL,
        queue INTEGER NOT NULL,
        position BIGINT NOT NULL,
        claims SMALLINT NOT NULL,
        written_at TIMESTAMPTZ NOT NULL DEFAULT clock_timestamp(),
        message_id UUID,
        CONSTRAINT pk_consumer_offset PRIMARY KEY (consumer_group, topic, queue, position, claims),
        CONSTRAINT ck_consumer_offset_position CHECK (position >= 0)
    )""",
    """
    CREATE TABLE {s}.log_loss (
        id BIGINT GENERATED ALWAYS AS IDENTITY,
        consumer_group TEXT COLLATE "C" NOT NULL,
        topic TEXT COLLATE "C" NOT NULL,
        queue INTEGER NOT NULL,
        position BIGINT NOT NULL,
        agreed BIGINT NOT NULL,
        message_ids UUID[] NOT NULL,
        found_at TIMESTAMPTZ NOT NULL DEFAULT clock_timestamp(),
        CONSTRAINT pk_log_loss PRIMARY KEY (id)
    )""",
    """
    CREATE INDEX ix_log_loss_consumer_group_topic_found_at
        ON {s}.log_loss (consumer_group, topic, found_at)""",
    """
    CREATE TABLE {s}.consumer_start (
        consumer_group TEXT COLLATE "C" NOT NULL,
        topic TEXT COLLATE "C" NOT NULL,
        queue INTEGER NOT NULL,
        position BIGINT NOT NULL,
        started_at TIMESTAMPTZ NOT NULL DEFAULT clock_timestamp(),
        CONSTRAINT pk_consumer_start PRIMARY KEY (consumer_group, topic, queue)
    )""",
    """
    CREATE TABLE {s}.reconciliation_run (
        id UUID NOT NULL,
        topic TEXT COLLATE "C" NOT NULL,
        consumer_group TEXT COLLATE "C" NOT NULL,
        window_start TIMESTAMPTZ,
        window_end TIMESTAMPTZ,
        started_at TIMESTAMPTZ NOT NULL DEFAULT clock_timestamp(),
        finished_at TIMESTAMPTZ,
        counts JSONB,
        error TEXT,
        job_id UUID NOT NULL,
        applied BOOLEAN NOT NULL DEFAULT false,
        schedule TEXT COLLATE "C",
        plan JSONB,
        CONSTRAINT pk_reconciliation_run PRIMARY KEY (id)
    )""",
    """
    CREATE INDEX ix_reconciliation_run_topic_consumer_group_started_at
        ON {s}.reconciliation_run (topic, consumer_group, started_at)""",
    """
    CREATE TABLE {s}.reconciliation_finding (
        id BIGINT GENERATED ALWAYS AS IDENTITY,
        run_id UUID NOT NULL,
        message_id UUID,
        kind TEXT NOT NULL,
        detail JSONB,
        action TEXT,
        acted_at TIMESTAMPTZ,
        result TEXT,
        CONSTRAINT pk_reconciliation_finding PRIMARY KEY (id)
    )""",
    """
    CREATE INDEX ix_reconciliation_finding_run_id_message_id
        ON {s}.reconciliation_finding (run_id, message_id)""",
    "CREATE INDEX ix_reconciliation_finding_message_id ON {s}.reconciliation_finding (message_id)",
    """
    CREATE TABLE {s}.reconciliation_settled (
        consumer_group TEXT COLLATE "C" NOT NULL,
        topic TEXT COLLATE "C" NOT NULL,
        first_id UUID NOT NULL,
        end_id UUID,
        counts JSONB NOT NULL,
        verified_at TIMESTAMPTZ NOT NULL DEFAULT clock_timestamp(),
        CONSTRAINT pk_reconciliation_settled PRIMARY KEY (consumer_group, topic, first_id)
    )""",
    """
    CREATE TABLE {s}.reconciliation_mark (
        consumer_group TEXT COLLATE "C" NOT NULL,
        topic TEXT COLLATE "C" NOT NULL,
        version BIGINT NOT NULL,
        mark JSONB NOT NULL,
        written_at TIMESTAMPTZ NOT NULL DEFAULT clock_timestamp(),
        CONSTRAINT pk_reconciliation_mark PRIMARY KEY (consumer_group, topic)
    )""",
)

DOWNGRADE = (
    "DROP TABLE {s}.consumer_message, {s}.consumer_offset, {s}.consumer_start, {s}.log_loss, {s}.reconciliation_run, "
    "{s}.reconciliation_finding, {s}.reconciliation_settled, {s}.reconciliation_mark",
)


def upgrade() -> None:
    run(UPGRADE)


def downgrade() -> None:
    run(DOWNGRADE)
