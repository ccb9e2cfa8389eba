"""Receiving in SQL: the inbox, for a consumer in whatever language."""

from outbox.database.migration.script import run

revision = "consumer_0003"
down_revision = "consumer_0002"
branch_labels = None
depends_on = None

# As in producer_0003: the texts have no percent sign and no colon before a word, and names are looked up in pg_catalog.
_PINNED = "SECURITY INVOKER SET search_path = pg_catalog, pg_temp"

UPGRADE = (
    # Arguments are called as the columns are: a bare name is the column's.
    f"""
    CREATE FUNCTION {{s}}.receive(consumer_group text, message_id uuid, topic text, queue integer, at_position bigint,
        body bytea DEFAULT NULL)
    RETURNS boolean LANGUAGE plpgsql {_PINNED} AS $$
    #variable_conflict use_column
    DECLARE
        digest CONSTANT bytea = substr(sha256(receive.body), 1, 16);
        said text;
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
        LOOP
            -- Whoever else is about to write this row, another consumer or a compensation, comes first or waits for us.
            INSERT INTO {{s}}.consumer_message
                (consumer_group, message_id, topic, queue, position, status, attempts, body_digest)
            VALUES (receive.consumer_group, receive.message_id, receive.topic, receive.queue, receive.at_position,
                    'consumed', 1, digest)
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
        INSERT INTO {{s}}.consumer_offset (consumer_group, topic, queue, position, claims, message_id)
        SELECT move_offset.consumer_group, move_offset.topic, move_offset.queue, move_offset.at_position, 0,
               move_offset.message_id
         WHERE NOT EXISTS (SELECT FROM {{s}}.consumer_offset o
                            WHERE o.consumer_group = move_offset.consumer_group AND o.topic = move_offset.topic
                              AND o.queue = move_offset.queue AND o.position >= move_offset.at_position)
        ON CONFLICT DO NOTHING;
        RETURN FOUND;
    END $$""",
)

DOWNGRADE = (
    "DROP FUNCTION {s}.receive(text, uuid, text, integer, bigint, bytea), "
    "{s}.move_offset(text, text, integer, bigint, uuid)",
)


def upgrade() -> None:
    run(UPGRADE)


def downgrade() -> None:
    run(DOWNGRADE)
