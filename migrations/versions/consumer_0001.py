"""The consumer's tables, those of the reconciliation, and the functions by which other languages receive."""

from outbox.database.migration.script import dropping, run

revision = "consumer_0001"
down_revision = None
branch_labels = ("consumer",)
depends_on = ("common_0001",)

UPGRADE = (
    """CREATE TABLE {s}.consumer_message (
        position BIGINT NOT NULL, received_at {now}, changed_at {now}, queue INTEGER NOT NULL,
        attempts INTEGER NOT NULL, starts INTEGER NOT NULL DEFAULT 0, passage SMALLINT NOT NULL DEFAULT 0,
        follows BOOLEAN NOT NULL DEFAULT false, consumer_group {name}, message_id UUID, topic {name} NOT NULL,
        status TEXT NOT NULL CONSTRAINT ck_consumer_message_status
            CHECK (status IN ('consumed', 'failed', 'waiting', 'taken', 'parked', 'quarantined', 'expired')),
        body_digest BYTEA, next_attempt_at TIMESTAMPTZ, last_error TEXT, error_kind TEXT, discarded_at TIMESTAMPTZ,
        quarantined_by UUID, quarantined_from TEXT CONSTRAINT ck_consumer_message_quarantined_from
            CHECK (quarantined_from IN ('unconsumed', 'failed', 'waiting', 'taken', 'parked')),
        order_key {name}, turn BIGINT, lease BIGINT, taken_by TEXT, take_id TEXT,
        CONSTRAINT pk_consumer_message PRIMARY KEY (consumer_group, message_id),
        CONSTRAINT ck_consumer_message_attempts CHECK (attempts >= 0 AND starts >= 0),
        CONSTRAINT ck_consumer_message_next_attempt_at
            CHECK ((status IN ('failed', 'taken')) = (next_attempt_at IS NOT NULL)),
        CONSTRAINT ck_consumer_message_discarded_at CHECK (discarded_at IS NULL OR status = 'parked'),
        CONSTRAINT ck_consumer_message_quarantined CHECK ((quarantined_by IS NULL) = (quarantined_from IS NULL)),
        CONSTRAINT ck_consumer_message_quarantined_by CHECK (quarantined_by IS NULL OR status = 'quarantined'),
        CONSTRAINT ck_consumer_message_turn CHECK ((order_key IS NULL) = (turn IS NULL)),
        CONSTRAINT ck_consumer_message_waiting CHECK (status <> 'waiting' OR (follows AND order_key IS NOT NULL)),
        CONSTRAINT ck_consumer_message_taken CHECK (
            CASE WHEN status = 'taken' THEN lease IS NOT NULL ELSE taken_by IS NULL AND take_id IS NULL END)
    ) PARTITION BY RANGE (message_id)""",
    "CREATE TABLE {s}.consumer_message_default PARTITION OF {s}.consumer_message DEFAULT",
    """CREATE INDEX ix_consumer_message_due ON {s}.consumer_message (consumer_group, topic, next_attempt_at)
     WHERE status IN ('failed', 'taken')""",
    """CREATE INDEX ix_consumer_message_take ON {s}.consumer_message (consumer_group, topic, take_id)
     WHERE take_id IS NOT NULL""",
    """CREATE INDEX ix_consumer_message_parked ON {s}.consumer_message (consumer_group, topic, message_id)
     WHERE status = 'parked'""",
    """CREATE INDEX ix_consumer_message_dead
        ON {s}.consumer_message (consumer_group, topic, coalesce(error_kind, 'unclassified'), message_id)
     WHERE status = 'parked' AND discarded_at IS NULL""",
    """CREATE INDEX ix_consumer_message_discarded ON {s}.consumer_message (discarded_at, message_id)
     WHERE discarded_at IS NOT NULL""",
    """CREATE INDEX ix_consumer_message_held
        ON {s}.consumer_message (consumer_group, topic, order_key, turn, position, message_id)
     WHERE order_key IS NOT NULL AND status IN ('failed', 'waiting', 'taken', 'parked') AND discarded_at IS NULL""",
    # Ids of business strings are in the DEFAULT partition alone. Written as prune's statement has it, and no other: one
    # that is given such an id may take this index for as good as the key, and walk through its group.
    """CREATE INDEX ix_consumer_message_default_business
        ON {s}.consumer_message_default (consumer_group, topic, changed_at, message_id)
     WHERE (message_id >= 'f0000000-0000-0000-0000-000000000000') IS TRUE""",
    """CREATE TABLE {s}.attempt_history (message_id UUID, consumer_group {name}, failed_at {now}, topic {name} NOT NULL,
        attempt INTEGER NOT NULL CONSTRAINT ck_attempt_history_attempt CHECK (attempt >= 0),
        status TEXT NOT NULL CONSTRAINT ck_attempt_history_status CHECK (status IN ('consumed', 'failed', 'parked')),
        worker TEXT NOT NULL, seconds DOUBLE PRECISION, error_kind TEXT, error TEXT,
        CONSTRAINT pk_attempt_history PRIMARY KEY (message_id, consumer_group, failed_at))""",
    "CREATE INDEX ix_attempt_history_failed_at ON {s}.attempt_history (failed_at)",
    """CREATE TABLE {s}.dead_letter_note (consumer_group {name}, topic {name}, error_kind {name}, note TEXT, owner TEXT,
        written_by TEXT NOT NULL, written_at {now},
        CONSTRAINT pk_dead_letter_note PRIMARY KEY (consumer_group, topic, error_kind),
        CONSTRAINT ck_dead_letter_note_written CHECK (note IS NOT NULL OR owner IS NOT NULL))""",
    """CREATE TABLE {s}.message_source (topic {name}, number INTEGER, id UUID NOT NULL, address TEXT, met_at {now},
        CONSTRAINT pk_message_source PRIMARY KEY (topic, number))""",
    "CREATE UNIQUE INDEX ix_message_source_id_topic ON {s}.message_source (id, topic)",
    """CREATE TABLE {s}.segment_hold (
        consumer_group {name}, topic {name}, first_id UUID, message_ids UUID[] NOT NULL, asked_at TIMESTAMPTZ NOT NULL,
        CONSTRAINT pk_segment_hold PRIMARY KEY (consumer_group, topic, first_id))""",
    """CREATE TABLE {s}.consumer_offset (consumer_group {name}, topic {name}, queue INTEGER,
        position BIGINT CONSTRAINT ck_consumer_offset_position CHECK (position >= 0),
        starts SMALLINT, written_at {now}, message_id UUID, passage SMALLINT NOT NULL DEFAULT 0,
        CONSTRAINT pk_consumer_offset PRIMARY KEY (consumer_group, topic, queue, position, starts))""",
    """CREATE TABLE {s}.consumer_lease (
        consumer_group {name}, topic {name}, queue INTEGER, term BIGINT, renewal INTEGER,
        worker TEXT, started BIGINT NOT NULL, until TIMESTAMPTZ NOT NULL, written_at {now},
        CONSTRAINT pk_consumer_lease PRIMARY KEY (consumer_group, topic, queue, term, renewal))""",
    """CREATE TABLE {s}.log_loss (id BIGINT GENERATED ALWAYS AS IDENTITY CONSTRAINT pk_log_loss PRIMARY KEY,
        consumer_group {name} NOT NULL, topic {name} NOT NULL, queue INTEGER NOT NULL,
        position BIGINT NOT NULL, agreed BIGINT NOT NULL, message_ids UUID[] NOT NULL, found_at {now})""",
    "CREATE INDEX ix_log_loss_consumer_group_topic_found_at ON {s}.log_loss (consumer_group, topic, found_at)",
    """CREATE TABLE {s}.consumer_start (
        consumer_group {name}, topic {name}, queue INTEGER, position BIGINT NOT NULL, started_at {now},
        CONSTRAINT pk_consumer_start PRIMARY KEY (consumer_group, topic, queue))""",
    """CREATE TABLE {s}.consumer_passage (consumer_group {name}, topic {name}, queue INTEGER, passage SMALLINT,
        former BIGINT NOT NULL, position BIGINT NOT NULL, began_at {now},
        CONSTRAINT pk_consumer_passage PRIMARY KEY (consumer_group, topic, queue, passage),
        CONSTRAINT ck_consumer_passage_moved CHECK (passage > 0 AND position <> former))""",
    """CREATE TABLE {s}.reread_message (consumer_group {name}, message_id UUID, passage SMALLINT,
        topic {name} NOT NULL, queue INTEGER NOT NULL, position BIGINT NOT NULL,
        status TEXT NOT NULL CONSTRAINT ck_reread_message_status CHECK (status IN ('consumed', 'failed', 'parked')),
        attempts INTEGER NOT NULL, body_digest BYTEA, last_error TEXT, error_kind TEXT,
        received_at TIMESTAMPTZ NOT NULL, changed_at TIMESTAMPTZ NOT NULL, replaced_at {now},
        CONSTRAINT pk_reread_message PRIMARY KEY (consumer_group, message_id, passage))""",
    "CREATE INDEX ix_reread_message_replaced_at ON {s}.reread_message (replaced_at)",
    """CREATE TABLE {s}.group_control (
        consumer_group {name}, topic {name}, paused_at TIMESTAMPTZ, paused_by TEXT, pause_reason TEXT,
        rate DOUBLE PRECISION CONSTRAINT ck_group_control_rate CHECK (rate > 0),
        opened_at TIMESTAMPTZ, trial_at TIMESTAMPTZ, opened_because TEXT,
        healthy_at TIMESTAMPTZ, openings INTEGER NOT NULL DEFAULT 0,
        CONSTRAINT pk_group_control PRIMARY KEY (consumer_group, topic),
        CONSTRAINT ck_group_control_paused CHECK ((paused_at IS NULL) = (paused_by IS NULL)),
        CONSTRAINT ck_group_control_opened CHECK ((opened_at IS NULL) = (trial_at IS NULL)))""",
    """CREATE TABLE {s}.rate_grant (consumer_group {name}, topic {name}, ends_at TIMESTAMPTZ, messages INTEGER NOT NULL,
        CONSTRAINT pk_rate_grant PRIMARY KEY (consumer_group, topic, ends_at))""",
    """CREATE TABLE {s}.reconciliation_run (
        id UUID CONSTRAINT pk_reconciliation_run PRIMARY KEY, topic {name} NOT NULL, consumer_group {name} NOT NULL,
        window_start TIMESTAMPTZ, window_end TIMESTAMPTZ, started_at {now}, finished_at TIMESTAMPTZ,
        counts JSONB, error TEXT, job_id UUID NOT NULL, applied BOOLEAN NOT NULL DEFAULT false,
        schedule {name}, ordered_by TEXT, plan JSONB, measures JSONB)""",
    """CREATE INDEX ix_reconciliation_run_topic_consumer_group_started_at
        ON {s}.reconciliation_run (topic, consumer_group, started_at)""",
    "CREATE INDEX ix_reconciliation_run_job_id ON {s}.reconciliation_run (job_id)",
    """CREATE TABLE {s}.reconciliation_finding (
        id BIGINT GENERATED ALWAYS AS IDENTITY CONSTRAINT pk_reconciliation_finding PRIMARY KEY,
        run_id UUID NOT NULL, message_id UUID, kind TEXT NOT NULL, detail JSONB,
        action TEXT, acted_at TIMESTAMPTZ, result TEXT)""",
    "CREATE INDEX ix_reconciliation_finding_run_id_message_id ON {s}.reconciliation_finding (run_id, message_id)",
    "CREATE INDEX ix_reconciliation_finding_message_id ON {s}.reconciliation_finding (message_id)",
    """CREATE TABLE {s}.reconciliation_settled (
        consumer_group {name}, topic {name}, first_id UUID, end_id UUID, counts JSONB NOT NULL, verified_at {now},
        CONSTRAINT pk_reconciliation_settled PRIMARY KEY (consumer_group, topic, first_id))""",
    """CREATE TABLE {s}.reconciliation_mark (
        consumer_group {name}, topic {name}, version BIGINT NOT NULL, mark JSONB NOT NULL, written_at {now},
        CONSTRAINT pk_reconciliation_mark PRIMARY KEY (consumer_group, topic))""",
    # Arguments are called as the columns are: a bare name is the column's.
    """CREATE FUNCTION {s}.receive(consumer_group text, message_id uuid, topic text, queue integer, at_position bigint,
        body bytea DEFAULT NULL) RETURNS boolean LANGUAGE plpgsql {pinned}
    #variable_conflict use_column
    DECLARE
        digest CONSTANT bytea = substr(sha256(receive.body), 1, 16); said text; passage_now smallint; began bigint;
    BEGIN
        said = CASE
            WHEN coalesce(receive.consumer_group, '') = '' THEN 'group is empty'
            WHEN length(receive.consumer_group) > 120 THEN concat('group ''', left(receive.consumer_group, 40), '''',
                chr(CASE getdatabaseencoding() WHEN 'UTF8' THEN 8230 ELSE 46 END), ' has ',
                length(receive.consumer_group), ' characters; at most 120 are allowed')
            WHEN receive.consumer_group COLLATE "C" ~ ('[^|a-zA-Z0-9_.' || chr(37) || '-]') THEN concat('group ''',
                receive.consumer_group, ''' may only have the characters ', chr(37), ' | a-z A-Z 0-9 _ - .')
        END;
        IF said IS NOT NULL THEN RAISE EXCEPTION USING ERRCODE = 'OX001', MESSAGE = said; END IF;
        SELECT r.passage, r.position INTO passage_now, began FROM {s}.consumer_passage r
         WHERE r.consumer_group = receive.consumer_group AND r.topic = receive.topic AND r.queue = receive.queue
         ORDER BY r.passage DESC LIMIT 1;
        LOOP
            -- Another consumer or a compensation that is about to write this row comes first, or waits for us.
            INSERT INTO {s}.consumer_message
                (consumer_group, message_id, topic, queue, position, status, attempts, body_digest, passage)
            VALUES (receive.consumer_group, receive.message_id, receive.topic, receive.queue, receive.at_position,
                    'consumed', 1, digest, coalesce(passage_now, 0))
            ON CONFLICT (consumer_group, message_id) DO NOTHING;
            IF FOUND THEN
                -- By its offsets a group is known to a compensation, which asks every inbox. This one says of no
                -- message that it was handled.
                INSERT INTO {s}.consumer_offset (consumer_group, topic, queue, position, starts)
                SELECT receive.consumer_group, receive.topic, receive.queue, 0, 0
                 WHERE NOT EXISTS (SELECT FROM {s}.consumer_offset o WHERE o.consumer_group = receive.consumer_group
                                      AND o.topic = receive.topic AND o.queue = receive.queue)
                ON CONFLICT DO NOTHING;
                RETURN true;
            END IF;
            -- The group reads again what it had from behind there: the row of before is kept.
            PERFORM FROM {s}.consumer_message c
              WHERE c.consumer_group = receive.consumer_group AND c.message_id = receive.message_id
                AND c.passage < passage_now AND c.queue = receive.queue AND c.position > began
                AND c.status IN ('consumed', 'failed', 'parked') AND c.discarded_at IS NULL FOR UPDATE;
            IF FOUND THEN
                INSERT INTO {s}.reread_message (consumer_group, message_id, passage, topic, queue, position, status,
                       attempts, body_digest, last_error, error_kind, received_at, changed_at)
                SELECT c.consumer_group, c.message_id, c.passage, c.topic, c.queue, c.position, c.status,
                       c.attempts, c.body_digest, c.last_error, c.error_kind, c.received_at, c.changed_at
                  FROM {s}.consumer_message c
                 WHERE c.consumer_group = receive.consumer_group AND c.message_id = receive.message_id
                ON CONFLICT DO NOTHING;
                UPDATE {s}.consumer_message c
                   SET status = 'consumed', attempts = 1, starts = 0, next_attempt_at = NULL,
                       position = receive.at_position, body_digest = coalesce(digest, c.body_digest),
                       last_error = NULL, error_kind = NULL, passage = passage_now, changed_at = clock_timestamp()
                 WHERE c.consumer_group = receive.consumer_group AND c.message_id = receive.message_id;
                RETURN true;
            END IF;
            -- An operator has given the message another go.
            UPDATE {s}.consumer_message c
               SET status = 'consumed', attempts = c.attempts + 1, starts = 0, next_attempt_at = NULL,
                   body_digest = coalesce(digest, c.body_digest), changed_at = clock_timestamp()
             WHERE c.consumer_group = receive.consumer_group AND c.message_id = receive.message_id
               AND c.status = 'failed';
            IF FOUND THEN RETURN true; END IF;
            -- Without a row, another transaction has just taken it back, and the insert may go through now.
            IF EXISTS (SELECT FROM {s}.consumer_message c WHERE c.consumer_group = receive.consumer_group
                          AND c.message_id = receive.message_id) THEN RETURN false; END IF;
        END LOOP;
    END $$""",
    """CREATE FUNCTION {s}.move_offset(consumer_group text, topic text, queue integer, at_position bigint,
        message_id uuid) RETURNS boolean LANGUAGE plpgsql {pinned}
    #variable_conflict use_column
    BEGIN
        INSERT INTO {s}.consumer_offset (consumer_group, topic, queue, position, starts, message_id, passage)
        SELECT move_offset.consumer_group, move_offset.topic, move_offset.queue, move_offset.at_position, 0,
               move_offset.message_id, coalesce((SELECT max(r.passage) FROM {s}.consumer_passage r
                                                  WHERE r.consumer_group = move_offset.consumer_group
                                                    AND r.topic = move_offset.topic AND r.queue = move_offset.queue), 0)
         WHERE NOT EXISTS (SELECT FROM {s}.consumer_offset o
                            WHERE o.consumer_group = move_offset.consumer_group AND o.topic = move_offset.topic
                              AND o.queue = move_offset.queue AND o.position >= move_offset.at_position)
        ON CONFLICT DO NOTHING;
        RETURN FOUND;
    END $$""",
    # Handles are `outbox.consumer.leased.settlement.MessageLease.handle`: base64url of a checksum, the form, and the
    # parts. The checksum isn't looked at: the number of a lease is drawn.
    """CREATE FUNCTION {s}.lease_of(handle text, OUT consumer_group text, OUT topic text, OUT message_id uuid,
        OUT lease bigint) LANGUAGE plpgsql IMMUTABLE {pinned}
    DECLARE words text[];
    BEGIN
        words = string_to_array(convert_from(decode(rpad(translate(handle, '-_', '+/'),
            (length(handle) + 3) / 4 * 4, '='), 'base64'), 'UTF8'), ' ');
        IF array_length(words, 1) = 8 AND words[2] = '1' THEN
            consumer_group = words[3]; topic = words[4];
            message_id = CAST(words[7] AS uuid); lease = CAST(words[8] AS bigint);
        END IF;
        IF lease IS NULL THEN RAISE EXCEPTION USING MESSAGE = 'other parts'; END IF;
    EXCEPTION WHEN OTHERS THEN
        RAISE EXCEPTION USING ERRCODE = 'OX001', MESSAGE = concat('handle ''', left(handle, 40),
            ''' is none of a leased message; give that which came with the message');
    END $$""",
    """CREATE FUNCTION {s}.lease_ended(handle text, what text) RETURNS void LANGUAGE plpgsql {pinned}
    DECLARE held record;
    BEGIN
        held = {s}.lease_of(handle);
        RAISE EXCEPTION USING ERRCODE = 'OX005', MESSAGE = concat('message ', held.message_id, ' of topic ''',
            held.topic, ''' can''t be ', what, ' by group ''', held.consumer_group,
            ''': its lease has ended or was settled; roll your change back, since it is handed out again');
    END $$""",
    # The number of the lease stays, as in Python: a client that says it twice is told so.
    """CREATE FUNCTION {s}.acknowledge(handle text) RETURNS boolean LANGUAGE plpgsql {pinned}
    DECLARE held record;
    BEGIN
        held = {s}.lease_of(handle);
        UPDATE {s}.consumer_message m
           SET status = 'consumed', attempts = attempts + 1, next_attempt_at = NULL, last_error = NULL,
               error_kind = NULL, taken_by = NULL, take_id = NULL, order_key = NULL, turn = NULL, follows = false,
               changed_at = clock_timestamp()
         WHERE m.consumer_group = held.consumer_group AND m.topic = held.topic AND m.message_id = held.message_id
           AND m.status = 'taken' AND m.lease = held.lease AND m.next_attempt_at > clock_timestamp();
        IF FOUND THEN RETURN true; END IF;
        PERFORM FROM {s}.consumer_message m
          WHERE m.consumer_group = held.consumer_group AND m.topic = held.topic AND m.message_id = held.message_id
            AND m.status = 'consumed' AND m.lease = held.lease;
        IF NOT FOUND THEN PERFORM {s}.lease_ended(handle, 'acknowledged'); END IF;
        RETURN false;
    END $$""",
    """CREATE FUNCTION {s}.extend(handle text, seconds double precision) RETURNS timestamptz
        LANGUAGE plpgsql {pinned}
    DECLARE held record; until timestamptz;
    BEGIN
        IF (seconds BETWEEN 0 AND 43200) IS NOT TRUE THEN
            RAISE EXCEPTION USING ERRCODE = 'OX001',
                MESSAGE = concat('seconds = ', coalesce(CAST(seconds AS text), 'NULL'), ' must be between 0 and 43200');
        END IF;
        held = {s}.lease_of(handle);
        UPDATE {s}.consumer_message m
           SET next_attempt_at = clock_timestamp() + make_interval(secs => seconds), changed_at = clock_timestamp()
         WHERE m.consumer_group = held.consumer_group AND m.topic = held.topic AND m.message_id = held.message_id
           AND m.status = 'taken' AND m.lease = held.lease AND m.next_attempt_at > clock_timestamp()
        RETURNING m.next_attempt_at INTO until;
        IF NOT FOUND THEN PERFORM {s}.lease_ended(handle, 'extended'); END IF;
        RETURN until;
    END $$""",
    # The lease ends later, without a client: the group's next take writes the attempt, by the rules of the group, which
    # only its declaration has. Until then the message holds its key, so that the later ones of its take wait behind it,
    # as in Python; one that another transaction settles at this moment is left to it.
    """CREATE FUNCTION {s}.fail(handle text, reason text, delay double precision) RETURNS void
        LANGUAGE plpgsql {pinned}
    DECLARE held record; first record;
    BEGIN
        IF (delay BETWEEN 0 AND 31536000) IS NOT TRUE THEN
            RAISE EXCEPTION USING ERRCODE = 'OX001',
                MESSAGE = concat('delay = ', coalesce(CAST(delay AS text), 'NULL'), ' must be between 0 and 31536000');
        END IF;
        held = {s}.lease_of(handle);
        SELECT m.* INTO first FROM {s}.consumer_message m
         WHERE m.consumer_group = held.consumer_group AND m.topic = held.topic AND m.message_id = held.message_id
           AND m.status = 'taken' AND m.lease = held.lease AND m.next_attempt_at > clock_timestamp() FOR UPDATE;
        IF NOT FOUND THEN PERFORM {s}.lease_ended(handle, 'failed'); END IF;
        UPDATE {s}.consumer_message m
           SET lease = CAST(random() * 9007199254740991 AS bigint), taken_by = NULL, take_id = NULL,
               next_attempt_at = clock_timestamp() + make_interval(secs => delay),
               last_error = coalesce(nullif(left(reason, 4000), ''), 'no reason'), error_kind = NULL,
               changed_at = clock_timestamp()
         WHERE m.consumer_group = held.consumer_group AND m.message_id = held.message_id;
        UPDATE {s}.consumer_message m
           SET status = 'waiting', follows = true, next_attempt_at = NULL, lease = NULL, taken_by = NULL,
               take_id = NULL, changed_at = clock_timestamp()
         WHERE first.order_key IS NOT NULL AND m.consumer_group = held.consumer_group AND m.message_id = ANY (ARRAY(
               SELECT w.message_id FROM {s}.consumer_message w
                WHERE w.consumer_group = held.consumer_group AND w.topic = held.topic
                  AND w.order_key = first.order_key AND w.order_key IS NOT NULL
                  AND (w.turn, w.position, w.message_id) > (first.turn, first.position, first.message_id)
                  AND w.status = 'taken' AND w.discarded_at IS NULL AND w.attempts = 0 AND w.last_error IS NULL
                  AND w.taken_by IS NOT DISTINCT FROM first.taken_by AND w.take_id IS NOT DISTINCT FROM first.take_id
                  FOR UPDATE SKIP LOCKED));
    END $$""",
)

DOWNGRADE = dropping(UPGRADE)


def upgrade() -> None:
    run(UPGRADE)


def downgrade() -> None:
    run(DOWNGRADE)
