"""What is too old when a group comes to it is known to its producer."""

from outbox.database.migration.script import run

revision = "producer_0013"
down_revision = "producer_0012"
branch_labels = None
depends_on = None

_STATUSES = "'consumed', 'unconsumed', 'failed', 'parked', 'quarantined', 'resend_exhausted', 'left_out'"

# NOT VALID, so that no row is read while all others wait: each of them meets the CHECK that it takes the place
# of. A table without a row has it as one that is made with it.
_CHECK = (
    "ALTER TABLE {s}.delivery DROP CONSTRAINT ck_delivery_status",
    "ALTER TABLE {s}.delivery ADD CONSTRAINT ck_delivery_status CHECK (status IN (%s)) NOT VALID",
    """
    DO $$
    BEGIN
        IF NOT EXISTS (SELECT FROM {s}.delivery) THEN
            ALTER TABLE {s}.delivery VALIDATE CONSTRAINT ck_delivery_status;
        END IF;
    END $$""",
)

# As in producer_0002.
_LOCK_INBOX = """
DO $$ BEGIN
    IF to_regclass('{s}.consumer_message') IS NOT NULL THEN
        LOCK TABLE {s}.consumer_offset, {s}.consumer_message IN ACCESS EXCLUSIVE MODE;
    END IF;
END $$"""

UPGRADE = (_LOCK_INBOX, *(sql.replace("%s", _STATUSES + ", 'expired'") for sql in _CHECK))

DOWNGRADE = (
    "UPDATE {s}.delivery SET status = 'resend_exhausted' WHERE status = 'expired'",
    *(sql.replace("%s", _STATUSES) for sql in _CHECK),
)


def upgrade() -> None:
    run(UPGRADE)


def downgrade() -> None:
    run(DOWNGRADE)
