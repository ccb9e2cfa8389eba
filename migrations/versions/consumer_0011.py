"""Order per key: rows of the inbox hold back the later messages of their key, which wait."""

from outbox.database.migration.script import run

revision = "consumer_0011"
down_revision = "consumer_0010"
branch_labels = None
depends_on = None

_NAME = "ix_consumer_message_held"
_TARGET = """consumer_message (consumer_group, topic, order_key, turn, position, message_id)
    WHERE order_key IS NOT NULL AND status IN ('failed', 'waiting', 'parked') AND discarded_at IS NULL"""

#: Columns and the index of them are made before the transaction of this revision, while all goes on.
COLUMNS_BEFORE = (
    ("consumer_message", 'order_key TEXT COLLATE "C"'),
    ("consumer_message", "turn BIGINT"),
    ("consumer_message", "follows BOOLEAN NOT NULL DEFAULT false"),
)
BEFORE = ((_NAME, _TARGET),)

UPGRADE = (
    *(f"ALTER TABLE {{s}}.{table} ADD COLUMN IF NOT EXISTS {column}" for table, column in COLUMNS_BEFORE),
    # NOT VALID: all rows that there are meet the CHECKs, and aren't read for them while all others wait. A
    # table without a row has them as one that is made with them.
    """
    ALTER TABLE {s}.consumer_message
        DROP CONSTRAINT ck_consumer_message_status,
        DROP CONSTRAINT ck_consumer_message_quarantined_from,
        ADD CONSTRAINT ck_consumer_message_status
            CHECK (status IN ('consumed', 'failed', 'waiting', 'parked', 'quarantined', 'expired')) NOT VALID,
        ADD CONSTRAINT ck_consumer_message_quarantined_from
            CHECK (quarantined_from IN ('unconsumed', 'failed', 'waiting', 'parked')) NOT VALID,
        ADD CONSTRAINT ck_consumer_message_turn CHECK ((order_key IS NULL) = (turn IS NULL)) NOT VALID,
        ADD CONSTRAINT ck_consumer_message_waiting
            CHECK (status <> 'waiting' OR (follows AND order_key IS NOT NULL)) NOT VALID""",
    """
    DO $$
    BEGIN
        IF NOT EXISTS (SELECT FROM {s}.consumer_message) THEN
            ALTER TABLE {s}.consumer_message
                VALIDATE CONSTRAINT ck_consumer_message_status,
                VALIDATE CONSTRAINT ck_consumer_message_quarantined_from,
                VALIDATE CONSTRAINT ck_consumer_message_turn,
                VALIDATE CONSTRAINT ck_consumer_message_waiting;
        END IF;
    END $$""",
    f"CREATE INDEX IF NOT EXISTS {_NAME} ON {{s}}.{_TARGET}",
)

# What waits is due: the release before knows no order of keys.
DOWNGRADE = (
    "DROP INDEX {s}.ix_consumer_message_held",
    """
    ALTER TABLE {s}.consumer_message
        DROP CONSTRAINT ck_consumer_message_waiting, DROP CONSTRAINT ck_consumer_message_turn""",
    """
    UPDATE {s}.consumer_message
       SET status = 'failed', next_attempt_at = clock_timestamp() WHERE status = 'waiting'""",
    "UPDATE {s}.consumer_message SET quarantined_from = 'failed' WHERE quarantined_from = 'waiting'",
    """
    ALTER TABLE {s}.consumer_message
        DROP CONSTRAINT ck_consumer_message_status,
        DROP CONSTRAINT ck_consumer_message_quarantined_from,
        ADD CONSTRAINT ck_consumer_message_status
            CHECK (status IN ('consumed', 'failed', 'parked', 'quarantined', 'expired')) NOT VALID,
        ADD CONSTRAINT ck_consumer_message_quarantined_from
            CHECK (quarantined_from IN ('unconsumed', 'failed', 'parked')) NOT VALID,
        DROP COLUMN order_key, DROP COLUMN turn, DROP COLUMN follows""",
)


def upgrade() -> None:
    run(UPGRADE)


def downgrade() -> None:
    run(DOWNGRADE)
