"""The tables that a producer and a consumer both have."""

from outbox.database.migration.script import dropping, run

revision = "common_0001"
down_revision = None
branch_labels = ("common",)
depends_on = None

UPGRADE = (
    """CREATE TABLE {s}.audit (id BIGINT GENERATED ALWAYS AS IDENTITY CONSTRAINT pk_audit PRIMARY KEY, acted_at {now},
        actor TEXT NOT NULL, action TEXT NOT NULL, target TEXT NOT NULL, reason TEXT, result JSONB, origin JSONB)""",
    "CREATE INDEX ix_audit_target ON {s}.audit (target)",
    """CREATE TABLE {s}.bulk_job (
        id UUID CONSTRAINT pk_bulk_job PRIMARY KEY, action TEXT NOT NULL, requested_by TEXT NOT NULL,
        reason TEXT NOT NULL, options JSONB NOT NULL DEFAULT '{}', selector JSONB NOT NULL,
        rate DOUBLE PRECISION CONSTRAINT ck_bulk_job_rate CHECK (rate > 0),
        total INTEGER NOT NULL CONSTRAINT ck_bulk_job_total CHECK (total >= 0),
        idempotency_key TEXT, origin JSONB,
        created_at {now}, started_at TIMESTAMPTZ, finished_at TIMESTAMPTZ, cancelled_at TIMESTAMPTZ, cancelled_by TEXT,
        CONSTRAINT ck_bulk_job_cancelled CHECK ((cancelled_at IS NULL) = (cancelled_by IS NULL)))""",
    "CREATE UNIQUE INDEX ix_bulk_job_idempotency_key ON {s}.bulk_job (idempotency_key)",
    "CREATE INDEX ix_bulk_job_open ON {s}.bulk_job (created_at) WHERE finished_at IS NULL",
    """CREATE TABLE {s}.bulk_item (bulk_job_id UUID, number INTEGER CONSTRAINT ck_bulk_item_number CHECK (number > 0),
        action TEXT NOT NULL, message_id UUID NOT NULL, topic {name}, consumer_group {name},
        state TEXT NOT NULL DEFAULT 'pending' CONSTRAINT ck_bulk_item_state
            CHECK (state IN ('pending', 'done', 'skipped', 'failed', 'cancelled')),
        outcome TEXT, attempts INTEGER NOT NULL DEFAULT 0 CONSTRAINT ck_bulk_item_attempts CHECK (attempts >= 0),
        next_attempt_at {now}, changed_at {now}, CONSTRAINT pk_bulk_item PRIMARY KEY (bulk_job_id, number))""",
    "CREATE INDEX ix_bulk_item_pending ON {s}.bulk_item (bulk_job_id, number) WHERE state = 'pending'",
    """CREATE UNIQUE INDEX ix_bulk_item_compensate ON {s}.bulk_item (message_id)
     WHERE action = 'compensate' AND state = 'pending'""",
    "CREATE INDEX ix_bulk_item_message_id ON {s}.bulk_item (message_id)",
    """CREATE TABLE {s}.worker (id UUID CONSTRAINT pk_worker PRIMARY KEY, name TEXT NOT NULL, version TEXT NOT NULL,
        started_at {now}, seen_at {now}, roles JSONB NOT NULL, handlers JSONB NOT NULL, duties JSONB NOT NULL)""",
    "CREATE INDEX ix_worker_seen_at ON {s}.worker (seen_at)",
    """CREATE TABLE {s}.silence (id BIGINT GENERATED ALWAYS AS IDENTITY CONSTRAINT pk_silence PRIMARY KEY,
        rule TEXT NOT NULL, of_database TEXT, topic {name}, consumer_group {name}, begins_at TIMESTAMPTZ NOT NULL,
        ends_at TIMESTAMPTZ NOT NULL, author TEXT NOT NULL, reason TEXT NOT NULL,
        CONSTRAINT ck_silence_ends CHECK (ends_at > begins_at))""",
    """CREATE TABLE {s}.stats_sample (
        sampled_at TIMESTAMPTZ CONSTRAINT pk_stats_sample PRIMARY KEY, stats JSONB NOT NULL,
        totals JSONB GENERATED ALWAYS AS (stats - '{topics,groups,sagas,work}'::text[]) STORED)""",
)

DOWNGRADE = dropping(UPGRADE)


def upgrade() -> None:
    run(UPGRADE)


def downgrade() -> None:
    run(DOWNGRADE)
