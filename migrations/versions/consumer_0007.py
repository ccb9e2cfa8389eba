"""Groups read a topic again: offsets and inbox rows know the reading that they are of, and what was before is kept."""

import runpy
from pathlib import Path

from outbox.database.migration.script import run

revision = "consumer_0007"
down_revision = "consumer_0006"
branch_labels = None
depends_on = None

# As in producer_0003: the texts have no percent sign and no colon before a word, and names are looked up in pg_catalog.
_PINNED = "SECURITY INVOKER SET search_path = pg_catalog, pg_temp"

_DROP_FUNCTIONS = (
    "DROP FUNCTION {s}.receive(text, uuid, text, integer, bigint, bytea), "
    "{s}.move_offset(text, text, integer, bigint, uuid)"
)

UPGRADE = (
    # In the order in which a consumer takes them.
    "LOCK TABLE {s}.consumer_offset, {s}.consumer_message IN ACCESS EXCLUSIVE MODE",
    "ALTER TABLE {s}.consumer_message ADD COLUMN IF NOT EXISTS reading SMALLINT NOT NULL DEFAULT 0",
    "ALTER TABLE {s}.consumer_offset ADD COLUMN IF NOT EXISTS reading SMALLINT NOT NULL DEFAULT 0",
    """
    CREATE TABLE {s}.consumer_reading (
        consumer_group TEXT COLLATE "C" NOT NULL,
        topic TEXT COLLATE "C" NOT NULL,
        queue INTEGER NOT NULL,
        reading SMALLINT NOT NULL,
        former BIGINT NOT NULL,
        position BIGINT NOT NULL,
        began_at TIMESTAMPTZ NOT NULL DEFAULT clock_timestamp(),
        CONSTRAINT pk_consumer_reading PRIMARY KEY (consumer_group, topic, queue, reading),
        CONSTRAINT ck_consumer_reading_moved CHECK (reading > 0 AND position <> former)
    )""",
    """
    CREATE TABLE {s}.reread_message (
        consumer_group TEXT COLLATE "C" NOT NULL,
        message_id UUID NOT NULL,
        reading SMALLINT NOT NULL,
        topic TEXT COLLATE "C" NOT NULL,
        queue INTEGER NOT NULL,
        position BIGINT NOT NULL,
        status TEXT NOT NULL,
        attempts INTEGER NOT NULL,
        body_digest BYTEA,
        last_error TEXT,
        error_kind TEXT,
        received_at TIMESTAMPTZ NOT NULL,
        changed_at TIMESTAMPTZ NOT NULL,
        replaced_at TIMESTAMPTZ NOT NULL DEFAULT clock_timestamp(),
        CONSTRAINT pk_reread_message PRIMARY KEY (consumer_group, message_id, reading),
        CONSTRAINT ck_reread_message_status CHECK (status IN ('consumed', 'failed', 'parked'))
    )""",
    "CREATE INDEX ix_reread_message_replaced_at ON {s}.reread_message (replaced_at)",
    _DROP_FUNCTIONS,
    # As in consumer_0003, but for readings: a row of an earlier one is kept, and the message is to be handled again.
    f"""
    CREATE FUNCTION {{s}}.receive(consumer_group text, message_id uuid, topic text, queue integer, at_position bigint,
        body bytea DEFAULT NULL)
    RETURNS boolean LANGUAGE plpgsql {_PINNED} AS $$
    #variable_conflict use_column
    DECLARE
        digest CONSTANT bytea = substr(sha256(receive.body), 1, 16);
        said text;
        reading_now smallint;
        began bigint;
    BEGIN
        said = CASE
            WHEN coalesce(receive.consumer_group, '') = '' THEN 'group is empty'
            WHEN length(receive.consumer_group) > 120 THEN concat('group ''', left(receive.consumer_group, 40), '''',
                chr(CASE getdatabaseencoding() WHEN 'UTF8' THEN 8230 ELSE 46 END), ' has ',
                length(receive.consumer_group), ' characters; at most 120 are allowed')
            WHEN receive.consumer_group COLLATE "C" ~ ('[^|a-zA-Z0-9_' || chr(37) || '-]') THEN concat('group ''',
                receive.consumer_group, ''' may only have the characters ', chr(37), ' | a-z A-Z 0-9 _ -')
        END;
        IF said IS NOT NULL THEN
            RAISE EXCEPTION USING ERRCODE = 'OX001', MESSAGE = said;
        END IF;
        SELECT r.reading, r.position INTO reading_now, began FROM {{s}}.consumer_reading r
         WHERE r.consumer_group = receive.consumer_group AND r.topic = receive.topic AND r.queue = receive.queue
         ORDER BY r.reading DESC LIMIT 1;
        LOOP
            -- Whoever else is about to write this row, another consumer or a compensation, comes first or waits for us.
            INSERT INTO {{s}}.consumer_message
                (consumer_group, message_id, topic, queue, position, status, attempts, body_digest, reading)
            VALUES (receive.consumer_group, receive.message_id, receive.topic, receive.queue, receive.at_position,
                    'consumed', 1, digest, coalesce(reading_now, 0))
            ON CONFLICT (consumer_group, message_id) DO NOTHING;
            IF FOUND THEN
                -- By its offsets a group is known to a compensation, which asks every inbox. This one says of no
                -- message that it was handled.
                INSERT INTO {{s}}.consumer_offset (consumer_group, topic, queue, position, claims)
                SELECT receive.consumer_group, receive.topic, receive.queue, 0, 0
                 WHERE NOT EXISTS (SELECT FROM {{s}}.consumer_offset o
                                    WHERE o.consumer_group = receive.consumer_group AND o.topic = receive.topic
                                      AND o.queue = receive.queue)
                ON CONFLICT DO NOTHING;
                RETURN true;
            END IF;
            -- The group reads again what it had from behind there.
            PERFORM FROM {{s}}.consumer_message c
              WHERE c.consumer_group = receive.consumer_group AND c.message_id = receive.message_id
                AND c.reading < reading_now AND c.queue = receive.queue AND c.position > began
                AND c.status IN ('consumed', 'failed', 'parked') AND c.discarded_at IS NULL
                FOR UPDATE;
            IF FOUND THEN
                INSERT INTO {{s}}.reread_message (consumer_group, message_id, reading, topic, queue, position, status,
                       attempts, body_digest, last_error, error_kind, received_at, changed_at)
                SELECT c.consumer_group, c.message_id, c.reading, c.topic, c.queue, c.position, c.status,
                       c.attempts, c.body_digest, c.last_error, c.error_kind, c.received_at, c.changed_at
                  FROM {{s}}.consumer_message c
                 WHERE c.consumer_group = receive.consumer_group AND c.message_id = receive.message_id
                ON CONFLICT DO NOTHING;
                UPDATE {{s}}.consumer_message c
                   SET status = 'consumed', attempts = 1, claims = 0, next_attempt_at = NULL,
                       position = receive.at_position, body_digest = coalesce(digest, c.body_digest),
                       last_error = NULL, error_kind = NULL, reading = reading_now, changed_at = clock_timestamp()
                 WHERE c.consumer_group = receive.consumer_group AND c.message_id = receive.message_id;
                RETURN true;
            END IF;
            -- An operator has given the message another go.
            UPDATE {{s}}.consumer_message c
               SET status = 'consumed', attempts = c.attempts + 1, claims = 0, next_attempt_at = NULL,
                   body_digest = coalesce(digest, c.body_digest), changed_at = clock_timestamp()
             WHERE c.consumer_group = receive.consumer_group AND c.message_id = receive.message_id
               AND c.status = 'failed';
            IF FOUND THEN
                RETURN true;
            END IF;
            -- Without a row somebody has just taken it back, and the insert may go through now.
            IF EXISTS (SELECT FROM {{s}}.consumer_message c
                        WHERE c.consumer_group = receive.consumer_group AND c.message_id = receive.message_id) THEN
                RETURN false;
            END IF;
        END LOOP;
    END $$""",
    f"""
    CREATE FUNCTION {{s}}.move_offset(consumer_group text, topic text, queue integer, at_position bigint,
        message_id uuid)
    RETURNS boolean LANGUAGE plpgsql {_PINNED} AS $$
    #variable_conflict use_column
    BEGIN
        INSERT INTO {{s}}.consumer_offset (consumer_group, topic, queue, position, claims, message_id, reading)
        SELECT move_offset.consumer_group, move_offset.topic, move_offset.queue, move_offset.at_position, 0,
               move_offset.message_id,
               coalesce((SELECT max(r.reading) FROM {{s}}.consumer_reading r
                          WHERE r.consumer_group = move_offset.consumer_group AND r.topic = move_offset.topic
                            AND r.queue = move_offset.queue), 0)
         WHERE NOT EXISTS (SELECT FROM {{s}}.consumer_offset o
                            WHERE o.consumer_group = move_offset.consumer_group AND o.topic = move_offset.topic
                              AND o.queue = move_offset.queue AND o.position >= move_offset.at_position)
        ON CONFLICT DO NOTHING;
        RETURN FOUND;
    END $$""",
)

DOWNGRADE = (
    _DROP_FUNCTIONS,
    *runpy.run_path(str(Path(__file__).with_name("consumer_0003.py")))["UPGRADE"],
    "DROP TABLE {s}.reread_message",
    "DROP TABLE {s}.consumer_reading",
    "ALTER TABLE {s}.consumer_offset DROP COLUMN reading",
    "ALTER TABLE {s}.consumer_message DROP COLUMN reading",
)


def upgrade() -> None:
    run(UPGRADE)


def downgrade() -> None:
    run(DOWNGRADE)
