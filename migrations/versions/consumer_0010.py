"""What holds a group back: pauses, rates and breakers."""

from outbox.database.migration.script import run

revision = "consumer_0010"
down_revision = "consumer_0009"
branch_labels = None
depends_on = None

UPGRADE = (
    """
    CREATE TABLE IF NOT EXISTS {s}.group_control (
        consumer_group TEXT COLLATE "C" NOT NULL,
        topic TEXT COLLATE "C" NOT NULL,
        paused_at TIMESTAMPTZ,
        paused_by TEXT,
        pause_reason TEXT,
        rate DOUBLE PRECISION,
        opened_at TIMESTAMPTZ,
        probe_at TIMESTAMPTZ,
        opened_because TEXT,
        healthy_at TIMESTAMPTZ,
        openings INTEGER NOT NULL DEFAULT 0,
        CONSTRAINT pk_group_control PRIMARY KEY (consumer_group, topic),
        CONSTRAINT ck_group_control_paused CHECK ((paused_at IS NULL) = (paused_by IS NULL)),
        CONSTRAINT ck_group_control_rate CHECK (rate > 0),
        CONSTRAINT ck_group_control_opened CHECK ((opened_at IS NULL) = (probe_at IS NULL))
    )""",
    """
    CREATE TABLE IF NOT EXISTS {s}.rate_grant (
        consumer_group TEXT COLLATE "C" NOT NULL,
        topic TEXT COLLATE "C" NOT NULL,
        ends_at TIMESTAMPTZ NOT NULL,
        messages INTEGER NOT NULL,
        CONSTRAINT pk_rate_grant PRIMARY KEY (consumer_group, topic, ends_at)
    )""",
)

DOWNGRADE = ("DROP TABLE {s}.rate_grant", "DROP TABLE {s}.group_control")


def upgrade() -> None:
    run(UPGRADE)


def downgrade() -> None:
    run(DOWNGRADE)
