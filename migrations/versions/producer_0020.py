"""The function that decides is right for a snapshot that is older than a move of the half."""

import runpy
from pathlib import Path

from outbox.database.migration.script import run

revision = "producer_0020"
down_revision = "producer_0019"
branch_labels = None
depends_on = None

_EARLIER = next(
    each
    for each in runpy.run_path(str(Path(__file__).with_name("producer_0003.py")))["UPGRADE"]
    if "CREATE FUNCTION {s}.decide(" in each
).replace("CREATE FUNCTION", "CREATE OR REPLACE FUNCTION")

# As outbox/database/decision.py: the unique index knows a half that the snapshot of the transaction doesn't show.
_LOOK = """IF NOT EXISTS (SELECT FROM {s}.half_message h WHERE h.id = decide.id) THEN
            IF current_setting('transaction_isolation') IN ('repeatable read', 'serializable') THEN
                BEGIN
                    INSERT INTO {s}.half_message (id, producer_group, topic, content_type, body)
                    VALUES (decide.id, 'g', 't', '', '');
                    RAISE no_data_found;
                EXCEPTION
                    WHEN no_data_found THEN NULL;
                    WHEN unique_violation THEN there = true;
                    WHEN insufficient_privilege THEN
                        RAISE serialization_failure USING
                            MESSAGE = concat('this snapshot is too old to show half ', id, ': try again');
                END;
            END IF;
        END IF;
        IF NOT there AND NOT EXISTS (SELECT FROM {s}.half_message h WHERE h.id = decide.id) THEN"""

UPGRADE = (
    _EARLIER.replace("earlier record;", "earlier record;\n        there boolean = false;").replace(
        "IF NOT EXISTS (SELECT FROM {s}.half_message h WHERE h.id = decide.id) THEN", _LOOK
    ),
)

DOWNGRADE = (_EARLIER,)


def upgrade() -> None:
    run(UPGRADE)


def downgrade() -> None:
    run(DOWNGRADE)
