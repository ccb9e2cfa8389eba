"""What is too old when its group comes to it is expired; and prune finds old rows of business strings by their age."""

from outbox.database.migration.script import run

revision = "consumer_0009"
down_revision = "consumer_0008"
branch_labels = None
depends_on = None

_INDEX = "ix_consumer_message_default_business"
# Written out, as in the statement that prune reads by: ids of business strings are in the DEFAULT partition alone.
_TARGET = """consumer_message_default (consumer_group, topic, changed_at, message_id)
       WHERE message_id >= 'f0000000-0000-0000-0000-000000000000'"""

#: Indexes that are built before the transaction of this revision, while all goes on: (name, the table and columns).
BEFORE = ((_INDEX, _TARGET),)

_STATUSES = "'consumed', 'failed', 'parked', 'quarantined'"

# NOT VALID, so that no row is read while all others wait: each of them meets the CHECK that it takes the place
# of. A table without a row has it as one that is made with it.
_CHECK = (
    "ALTER TABLE {s}.consumer_message DROP CONSTRAINT ck_consumer_message_status",
    "ALTER TABLE {s}.consumer_message ADD CONSTRAINT ck_consumer_message_status CHECK (status IN (%s)) NOT VALID",
    """
    DO $$
    BEGIN
        IF NOT EXISTS (SELECT FROM {s}.consumer_message) THEN
            ALTER TABLE {s}.consumer_message VALIDATE CONSTRAINT ck_consumer_message_status;
        END IF;
    END $$""",
)

UPGRADE = (
    *(sql.replace("%s", _STATUSES + ", 'expired'") for sql in _CHECK),
    f"CREATE INDEX IF NOT EXISTS {_INDEX} ON {{s}}.{_TARGET}",
)

DOWNGRADE = (
    f"DROP INDEX {{s}}.{_INDEX}",
    "UPDATE {s}.consumer_message SET status = 'consumed', last_error = 'expired' WHERE status = 'expired'",
    *(sql.replace("%s", _STATUSES) for sql in _CHECK),
)


def upgrade() -> None:
    run(UPGRADE)


def downgrade() -> None:
    run(DOWNGRADE)
