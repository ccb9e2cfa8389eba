"""The producer's tables, the first row of the dispatch cursor, and the functions by which other languages send."""

from outbox.database.migration.script import dropping, run

revision = "producer_0001"
down_revision = None
branch_labels = ("producer",)
depends_on = ("common_0001",)

_RAISE = "RAISE EXCEPTION USING ERRCODE = 'OX001', MESSAGE ="
_REFUSE = f"IF said IS NOT NULL THEN {_RAISE} said; END IF;"

# Of send, send_bytes and prepare; those of send_many are the keys of its objects.
_OPTIONS = """key text DEFAULT NULL, headers jsonb DEFAULT NULL, tag text DEFAULT NULL,
        deliver_at timestamptz DEFAULT NULL, delay interval DEFAULT NULL, id uuid DEFAULT NULL,
        producer_group text DEFAULT 'sql'"""

# UUIDv7 (RFC 9562): 48 bits of milliseconds over a random version 4, whose version becomes 7.
_UUID7 = """encode(set_bit(set_bit(overlay(uuid_send(gen_random_uuid()) PLACING
            substring(int8send(floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint) FROM 3) FROM 1 FOR 6
            ), 52, 1), 53, 1), 'hex')::uuid"""
_UUID = "'^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$'"
_DAY, _ZONE = "[0-9]{4}-[0-9]{2}-[0-9]{2}", "(Z|[+-][0-9]{2}(:?[0-9]{2})?)"
_TIME = f"'^{_DAY}[T ]([01][0-9]|2[0-3]):[0-5][0-9](:[0-5][0-9]([.][0-9]{{1,6}})?)?{_ZONE}$'"
_FIRST, _LAST = (f"make_timestamptz({year}, 1, 1, 0, 0, 0, 'UTC')" for year in (1, 10000))
_WORD = "[a-zA-Z0-9_!#$' || chr(37) || '&''*+.^`|~-]+"
_TOPIC = """COLLATE "C" ~ ('[^|a-zA-Z0-9_./' || chr(37) || '-]')"""

UPGRADE = (
    """CREATE TABLE {s}.half_message (id UUID CONSTRAINT pk_half_message PRIMARY KEY, born_at {now},
        producer_group {name} NOT NULL,
        topic {name} NOT NULL CONSTRAINT ck_half_message_topic CHECK (octet_length(topic) BETWEEN 1 AND 127),
        content_type TEXT NOT NULL, body_digest BYTEA GENERATED ALWAYS AS (substr(sha256(body), 1, 16)) STORED,
        key {name} CONSTRAINT ck_half_message_key CHECK (octet_length(key) <= 255),
        tag {name}, sender TEXT, headers JSONB, body BYTEA NOT NULL, deliver_at TIMESTAMPTZ, queue INTEGER,
        at_commit BOOLEAN) PARTITION BY RANGE (id)""",
    "CREATE TABLE {s}.half_message_default PARTITION OF {s}.half_message DEFAULT",
    "CREATE INDEX ix_half_message_key ON {s}.half_message (key) WHERE key IS NOT NULL",
    "CREATE INDEX ix_half_message_topic ON {s}.half_message (topic, id)",
    """CREATE INDEX ix_half_message_conversation ON {s}.half_message ("left"(headers ->> 'outbox-conversation', 36), id)
     WHERE headers ? 'outbox-conversation'""",
    """CREATE TABLE {s}.half_check (
        half_id UUID CONSTRAINT pk_half_check PRIMARY KEY, fenced BOOLEAN NOT NULL, next_check_at TIMESTAMPTZ NOT NULL,
        check_times INTEGER NOT NULL DEFAULT 0 CONSTRAINT ck_half_check_check_times CHECK (check_times >= 0),
        last_answer TEXT CONSTRAINT ck_half_check_last_answer CHECK (last_answer IN ('commit', 'rollback', 'unknown')),
        last_error TEXT, checked_at TIMESTAMPTZ, parked_at TIMESTAMPTZ, reason TEXT, topic {name} NOT NULL, asker TEXT,
        CONSTRAINT ck_half_check_parked CHECK ((parked_at IS NULL) = (reason IS NULL))) WITH (fillfactor = 70)""",
    "CREATE INDEX ix_half_check_topic_next_check_at ON {s}.half_check (topic, next_check_at) WHERE parked_at IS NULL",
    "CREATE INDEX ix_half_check_next_check_at ON {s}.half_check (next_check_at) WHERE fenced AND parked_at IS NULL",
    """CREATE TABLE {s}.check_history (half_id UUID, id BIGINT GENERATED ALWAYS AS IDENTITY,
        asked TEXT NOT NULL CONSTRAINT ck_check_history_asked CHECK (asked IN ('checker', 'fence')),
        asked_at {now}, worker TEXT NOT NULL,
        answer TEXT CONSTRAINT ck_check_history_answer CHECK (answer IN ('commit', 'rollback', 'unknown')),
        seconds DOUBLE PRECISION, error TEXT, CONSTRAINT pk_check_history PRIMARY KEY (half_id, id))""",
    """CREATE TABLE {s}.half_error (
        half_id UUID CONSTRAINT pk_half_error PRIMARY KEY, error_kind TEXT NOT NULL, error TEXT NOT NULL,
        raised_at {now})""",
    "CREATE SEQUENCE {s}.op_sequence",
    """CREATE TABLE {s}.op_message (
        half_id UUID CONSTRAINT pk_op_message PRIMARY KEY, sequence BIGINT NOT NULL DEFAULT nextval('{s}.op_sequence'),
        decided_at {now}, xid XID8 NOT NULL DEFAULT pg_current_xact_id(),
        resolution TEXT NOT NULL CONSTRAINT ck_op_message_resolution CHECK (resolution IN ('commit', 'rollback')),
        decided_by TEXT NOT NULL CONSTRAINT ck_op_message_decided_by
            CHECK (decided_by IN ('producer', 'check', 'operator'))) PARTITION BY RANGE (half_id)""",
    "CREATE TABLE {s}.op_message_default PARTITION OF {s}.op_message DEFAULT",
    "CREATE INDEX ix_op_message_sequence ON {s}.op_message (sequence)",
    "CREATE INDEX ix_op_message_xid ON {s}.op_message (xid)",
    """CREATE TABLE {s}.message (
        half_id UUID, position BIGINT NOT NULL CONSTRAINT ck_message_position CHECK (position > 0), visible_at {now},
        queue INTEGER NOT NULL, send_number SMALLINT CONSTRAINT ck_message_send_number CHECK (send_number > 0),
        topic {name} NOT NULL,
        CONSTRAINT pk_message PRIMARY KEY (half_id, send_number)) PARTITION BY RANGE (half_id)""",
    "CREATE TABLE {s}.message_default PARTITION OF {s}.message DEFAULT",
    "CREATE INDEX ix_message_topic_queue_position ON {s}.message (topic, queue, position)",
    """CREATE TABLE {s}.scheduled_message (
        half_id UUID CONSTRAINT pk_scheduled_message PRIMARY KEY, deliver_at TIMESTAMPTZ NOT NULL,
        recalled_at TIMESTAMPTZ, recalled_by TEXT, held_topic {name}, held_sequence BIGINT,
        CONSTRAINT ck_scheduled_message_recalled CHECK ((recalled_at IS NULL) = (recalled_by IS NULL)),
        CONSTRAINT ck_scheduled_message_held CHECK ((held_topic IS NULL) = (held_sequence IS NULL)))""",
    """CREATE INDEX ix_scheduled_message_deliver_at_half_id ON {s}.scheduled_message (deliver_at, half_id)
     WHERE recalled_at IS NULL""",
    """CREATE INDEX ix_scheduled_message_held ON {s}.scheduled_message (held_topic, held_sequence)
     WHERE held_topic IS NOT NULL AND recalled_at IS NULL""",
    """CREATE TABLE {s}.dispatch_cursor (
        id BIGINT GENERATED ALWAYS AS IDENTITY CONSTRAINT pk_dispatch_cursor PRIMARY KEY,
        next_xid XID8 NOT NULL, in_flight XID8[] NOT NULL, target PG_SNAPSHOT,
        after_sequence BIGINT, until_sequence BIGINT, base_sequence BIGINT NOT NULL DEFAULT 0,
        system_identifier BIGINT NOT NULL, written_at {now}, epoch BIGINT NOT NULL DEFAULT 0, log TEXT,
        CONSTRAINT ck_dispatch_cursor_cut CHECK ((after_sequence IS NULL) = (until_sequence IS NULL)),
        CONSTRAINT ck_dispatch_cursor_target CHECK (target IS NULL OR until_sequence IS NOT NULL))""",
    # No op has been dispatched: all xids are still to come (3 is PostgreSQL's first), none is being waited for.
    """INSERT INTO {s}.dispatch_cursor (next_xid, in_flight, system_identifier)
    SELECT '3', '{}', system_identifier FROM pg_control_system()""",
    """CREATE TABLE {s}.topic (name {name} CONSTRAINT pk_topic PRIMARY KEY,
        queues INTEGER NOT NULL CONSTRAINT ck_topic_queues CHECK (queues BETWEEN 1 AND 4096), created_at {now})""",
    """CREATE TABLE {s}.topic_total (
        id BIGINT GENERATED ALWAYS AS IDENTITY CONSTRAINT pk_topic_total PRIMARY KEY, topic {name} NOT NULL,
        committed BIGINT NOT NULL DEFAULT 0, rolled_back BIGINT NOT NULL DEFAULT 0,
        checks BIGINT NOT NULL DEFAULT 0)""",
    """CREATE TABLE {s}.topic_pause (topic {name} CONSTRAINT pk_topic_pause PRIMARY KEY,
        paused_at {now}, paused_by TEXT NOT NULL, pause_reason TEXT NOT NULL, resumed_at TIMESTAMPTZ)""",
    """CREATE TABLE {s}.cron_schedule (name {name} CONSTRAINT pk_cron_schedule PRIMARY KEY,
        topic {name} NOT NULL, recurrence TEXT NOT NULL, missed TEXT NOT NULL,
        declared_at TIMESTAMPTZ NOT NULL, last_at TIMESTAMPTZ NOT NULL, next_at TIMESTAMPTZ, paused_at TIMESTAMPTZ,
        paused_by TEXT, pause_reason TEXT, ordered_at TIMESTAMPTZ)""",
    """CREATE TABLE {s}.topic_growth (topic {name}, queues INTEGER, ends BIGINT[] NOT NULL, grown_at {now},
        CONSTRAINT pk_topic_growth PRIMARY KEY (topic, queues))""",
    """CREATE TABLE {s}.intake_range (
        id BIGINT GENERATED ALWAYS AS IDENTITY CONSTRAINT pk_intake_range PRIMARY KEY, topic {name} NOT NULL,
        source TEXT NOT NULL, published TEXT NOT NULL, queue INTEGER NOT NULL, first BIGINT NOT NULL,
        last BIGINT NOT NULL, stored_at {now}, told BOOLEAN NOT NULL DEFAULT false)""",
    """CREATE TABLE {s}.intake_kind (
        id UUID CONSTRAINT pk_intake_kind PRIMARY KEY, topic {name} NOT NULL, met_at {now})""",
    """CREATE TABLE {s}.compensation (
        half_id UUID CONSTRAINT pk_compensation PRIMARY KEY, function TEXT NOT NULL, requested_by TEXT NOT NULL,
        reason TEXT NOT NULL, result JSONB, compensated_at {now}, bulk_job_id UUID)""",
    """CREATE TABLE {s}.delivery (
        half_id UUID, consumer_group {name}, number INTEGER CONSTRAINT ck_delivery_number CHECK (number > 0),
        topic {name} NOT NULL,
        status TEXT NOT NULL CONSTRAINT ck_delivery_status CHECK (status IN ('consumed', 'unconsumed', 'failed',
            'parked', 'quarantined', 'resend_exhausted', 'left_out', 'expired')), settled BOOLEAN NOT NULL,
        reason TEXT, recorded_at {now},
        CONSTRAINT pk_delivery PRIMARY KEY (half_id, consumer_group, number)) PARTITION BY RANGE (half_id)""",
    "CREATE TABLE {s}.delivery_default PARTITION OF {s}.delivery DEFAULT",
    "CREATE INDEX ix_delivery_open ON {s}.delivery (topic, consumer_group, half_id) WHERE NOT settled",
    "CREATE INDEX ix_delivery_exhausted ON {s}.delivery (topic, half_id) WHERE status = 'resend_exhausted'",
    """CREATE TABLE {s}.published (
        id UUID, number BIGINT GENERATED ALWAYS AS IDENTITY, aggregatetype {name} NOT NULL, aggregateid {name},
        type TEXT NOT NULL, payload BYTEA NOT NULL, timestamp TIMESTAMP NOT NULL, content_type TEXT NOT NULL,
        headers JSONB NOT NULL, traceparent TEXT, tag {name}, queue INTEGER NOT NULL, position BIGINT NOT NULL,
        send_number SMALLINT NOT NULL,
        CONSTRAINT pk_published PRIMARY KEY (id, number)) PARTITION BY RANGE (id)""",
    "CREATE TABLE {s}.published_default PARTITION OF {s}.published DEFAULT",
    """CREATE TABLE {s}.delivery_cursor (topic {name}, consumer_group {name}, number BIGINT,
        starts BIGINT[] NOT NULL, positions BIGINT[] NOT NULL, written_at {now},
        CONSTRAINT pk_delivery_cursor PRIMARY KEY (topic, consumer_group, number),
        CONSTRAINT ck_delivery_cursor_queues CHECK (cardinality(starts) = cardinality(positions)))""",
    """CREATE TABLE {s}.saga (id UUID CONSTRAINT pk_saga PRIMARY KEY, name {name} NOT NULL,
        status TEXT NOT NULL DEFAULT 'running' CONSTRAINT ck_saga_status
            CHECK (status IN ('running', 'compensating', 'completed', 'compensated')),
        content_type TEXT NOT NULL, body BYTEA NOT NULL, started_at {now}, ended_at TIMESTAMPTZ, reason TEXT,
        CONSTRAINT ck_saga_ended CHECK ((ended_at IS NULL) = (status IN ('running', 'compensating'))))""",
    "CREATE INDEX ix_saga_open ON {s}.saga (id) WHERE ended_at IS NULL",
    "CREATE INDEX ix_saga_ended_at ON {s}.saga (ended_at) WHERE ended_at IS NOT NULL",
    """CREATE TABLE {s}.saga_command (message_id UUID CONSTRAINT pk_saga_command PRIMARY KEY,
        saga_id UUID NOT NULL, number INTEGER NOT NULL, step {name} NOT NULL,
        kind TEXT NOT NULL CONSTRAINT ck_saga_command_kind CHECK (kind IN ('action', 'compensation')),
        sent_at {now}, overdue_at TIMESTAMPTZ, answered_at TIMESTAMPTZ,
        answer TEXT CONSTRAINT ck_saga_command_answer CHECK (answer IN ('done', 'refused')),
        reason TEXT, result_type TEXT, result BYTEA,
        CONSTRAINT ck_saga_command_answered CHECK ((answer IS NULL) = (answered_at IS NULL)))""",
    "CREATE UNIQUE INDEX ix_saga_command_saga_id_number ON {s}.saga_command (saga_id, number)",
    """CREATE TABLE {s}.tcc_branch (transaction_id UUID, branch {name}, participant {name},
        state TEXT NOT NULL CONSTRAINT ck_tcc_branch_state CHECK (state IN ('tried', 'confirmed', 'cancelled')),
        was_tried BOOLEAN NOT NULL, changed_at {now},
        CONSTRAINT pk_tcc_branch PRIMARY KEY (transaction_id, branch, participant))""",
    "CREATE INDEX ix_tcc_branch_changed_at ON {s}.tcc_branch (changed_at) WHERE state <> 'tried'",
    """CREATE TABLE {s}.producer_process (
        id UUID CONSTRAINT pk_producer_process PRIMARY KEY, name TEXT NOT NULL, producer_group {name} NOT NULL,
        version TEXT NOT NULL, started_at TIMESTAMPTZ NOT NULL, seen_at {now})""",
    "CREATE INDEX ix_producer_process_seen_at ON {s}.producer_process (seen_at)",
    # A decision of this half in the same transaction came first.
    """CREATE FUNCTION {s}.commit_half() RETURNS trigger LANGUAGE plpgsql {pinned} BEGIN
        INSERT INTO {s}.op_message (half_id, resolution, decided_by) VALUES (NEW.id, 'commit', 'producer')
        ON CONFLICT (half_id) DO NOTHING;
        RETURN NULL;
    END $$""",
    # Deferred: the sequence of the op is drawn in the COMMIT, before it lets go of the row locks.
    """CREATE CONSTRAINT TRIGGER commit_half AFTER INSERT ON {s}.half_message
        DEFERRABLE INITIALLY DEFERRED FOR EACH ROW WHEN (NEW.at_commit) EXECUTE FUNCTION {s}.commit_half()""",
    # As Python calls the type of a JSON value: the errors of both are the same.
    """CREATE FUNCTION {s}.type_name(value jsonb) RETURNS text LANGUAGE sql IMMUTABLE {pinned}
        SELECT CASE jsonb_typeof(value)
               WHEN 'string' THEN 'str' WHEN 'array' THEN 'list' WHEN 'object' THEN 'dict' WHEN 'boolean' THEN 'bool'
               WHEN 'number' THEN CASE WHEN value::text ~ '[.]' THEN 'float' ELSE 'int' END ELSE 'NoneType' END
    $$""",
    # The rules of outbox/message/content.py, model.py and outbox/producer/producer.py, and their words.
    f"""CREATE FUNCTION {{s}}.write_half(topic text, body bytea, content_type text, key text, headers jsonb, tag text,
        deliver_at timestamptz, delay interval, id uuid, producer_group text, at_commit boolean, queue integer)
    RETURNS uuid LANGUAGE plpgsql {{pinned}}
    DECLARE
        -- As the setting of the same name; ALTER DATABASE ... SET outbox.max_body_bytes changes it.
        max_body_bytes CONSTANT bigint = coalesce(nullif(current_setting('outbox.max_body_bytes', true), '')::bigint,
                                                  4 * 1024 * 1024);
        seconds CONSTANT double precision = extract(epoch FROM delay);
        more CONSTANT text = chr(CASE getdatabaseencoding() WHEN 'UTF8' THEN 8230 ELSE 46 END);  -- an ellipsis
        said text; header_name text; header_value jsonb; header_bytes bigint = 0; header_text text;
        expires_at timestamptz; queues bigint;
    BEGIN
        said = CASE
            WHEN coalesce(producer_group, '') = '' THEN 'group is empty'
            WHEN length(producer_group) > 120 THEN concat('group ''', left(producer_group, 40), '''', more, ' has ',
                length(producer_group), ' characters; at most 120 are allowed')
            WHEN producer_group COLLATE "C" ~ ('[^|a-zA-Z0-9_.' || chr(37) || '-]') THEN concat('group ''',
                producer_group, ''' may only have the characters ', chr(37), ' | a-z A-Z 0-9 _ - .')
            WHEN deliver_at IS NOT NULL AND delay IS NOT NULL THEN 'deliver_at and delay exclude each other; give one'
            WHEN NOT (deliver_at >= {_FIRST} AND deliver_at < {_LAST})
                THEN concat('deliver_at ', deliver_at, ' is out of range in UTC')
            WHEN NOT (seconds >= 0 AND seconds < 100 * 366 * 86400.0) THEN concat('delay ', seconds,
                ' must be a timedelta or seconds, not negative and under 100 years')
            WHEN body IS NULL THEN 'body is NULL' WHEN content_type IS NULL THEN 'content_type is NULL'
            WHEN length(content_type) > 255 OR content_type COLLATE "C" !~ ('^{_WORD}/{_WORD} *(;[ -~]*)?$')
                THEN concat('content_type ''', left(content_type, 80), ''' must be like ''application/msgpack'', with ',
                            'at most 255 characters')
            WHEN length(body) > max_body_bytes THEN concat('the body has ', length(body), ' bytes; at most ',
                max_body_bytes, ' are allowed (setting max_body_bytes): store it elsewhere and send a reference')
            WHEN coalesce(topic, '') = '' THEN 'topic is empty'
            WHEN length(topic) > 127 THEN concat('topic ''', left(topic, 40), '''', more, ' has ', length(topic),
                ' characters; at most 127 are allowed')
            WHEN topic {_TOPIC}
                THEN concat('topic ''', topic, ''' may only have the characters ', chr(37), ' | a-z A-Z 0-9 _ - . /')
            WHEN topic IN ('TBW102', 'SELF_TEST_TOPIC', 'OFFSET_MOVED_EVENT', 'BenchmarkTest')
                OR starts_with(topic, 'RMQ_SYS_') OR starts_with(topic, 'rmq_sys_')
                OR starts_with(topic, chr(37) || 'RETRY' || chr(37)) OR starts_with(topic, chr(37) || 'DLQ' || chr(37))
                OR starts_with(topic, 'SCHEDULE_TOPIC_') OR starts_with(topic, 'TRANS_CHECK_MAX_TIME_TOPIC')
                THEN concat('topic ''', topic, ''' is a system name; choose another')
            WHEN starts_with(topic, 'outbox.') THEN concat('topic ''', topic, ''' can''t be used: names that begin ',
                'with ''outbox.'' are those of internal topics, by which the framework calls functions such as ',
                'on_delivered; choose another')
            WHEN octet_length(convert_to(key, 'UTF8')) > 255 THEN concat('key ''', left(key, 40), '''', more, ' has ',
                octet_length(convert_to(key, 'UTF8')), ' bytes; at most 255 are allowed')
            WHEN octet_length(convert_to(tag, 'UTF8')) > 127 THEN concat('tag ''', left(tag, 40), '''', more, ' has ',
                octet_length(convert_to(tag, 'UTF8')), ' bytes; at most 127 are allowed')
            WHEN queue < 0 THEN concat('queue ', queue, ' must be a whole number from 0 on')
            WHEN jsonb_typeof(headers) NOT IN ('object', 'null')
                THEN concat('headers must be a mapping of str to str, not ', {{s}}.type_name(headers))
        END;
        IF said IS NULL AND jsonb_typeof(headers) = 'object' AND headers <> '{{}}' THEN
            IF (SELECT count(*) FROM jsonb_object_keys(headers)) > 128 THEN
                said = concat((SELECT count(*) FROM jsonb_object_keys(headers)), ' headers; at most 128 are allowed');
            ELSE
                FOR header_name, header_value IN SELECT * FROM jsonb_each(headers) LOOP
                    IF jsonb_typeof(header_value) <> 'string' THEN
                        said = concat('header ''', header_name, ''' must be text, not ',
                                      {{s}}.type_name(header_value), chr(58), ' ', header_value);
                        EXIT;
                    END IF;
                    header_bytes = header_bytes + octet_length(convert_to(header_name, 'UTF8'))
                                   + octet_length(convert_to(header_value #>> '{{}}', 'UTF8'));
                END LOOP;
                IF said IS NULL AND header_bytes > 16384 THEN
                    said = concat('the headers have ', header_bytes, ' bytes; at most 16384 are allowed');
                END IF;
            END IF;
        END IF;
        IF said IS NULL AND jsonb_typeof(headers) = 'object' THEN
            IF headers ? 'outbox-encoding' THEN
                said = 'header ''outbox-encoding'' is for compressed bodies alone; leave it out';
            END IF;
            FOR header_name, header_text IN SELECT * FROM jsonb_each_text(headers) LOOP
                EXIT WHEN said IS NOT NULL;
                IF header_name IN ('outbox-conversation', 'outbox-cause', 'outbox-correlation')
                   AND header_text !~ {_UUID} THEN
                    said = concat('header ''', header_name, ''' must be an id, not ''', left(header_text, 40), '''');
                ELSIF header_name = 'outbox-reply-to'
                      AND (header_text = '' OR length(header_text) > 127 OR header_text {_TOPIC}) THEN
                    said = concat('header ''outbox-reply-to'' must be a topic, not ''', left(header_text, 40), '''');
                ELSIF header_name = 'outbox-expires-at' THEN
                    BEGIN
                        IF header_text ~ {_TIME} THEN expires_at = header_text; END IF;
                    EXCEPTION WHEN data_exception THEN NULL;
                    END;
                    IF (expires_at >= {_FIRST} AND expires_at < {_LAST}) IS NOT TRUE THEN
                        said = concat('header ''outbox-expires-at'' must be a time between the years 1 and 9999, with ',
                                      'its zone, such as 2031-01-01T00:00:00Z, not ''', left(header_text, 40), '''');
                    ELSIF expires_at <= deliver_at THEN
                        said = concat('expires_at = ', expires_at, ' must be after deliver_at = ', deliver_at);
                    END IF;
                END IF;
            END LOOP;
        END IF;
        -- A topic never loses queues.
        IF said IS NULL AND queue IS NOT NULL THEN
            SELECT t.queues INTO queues FROM {{s}}.topic t WHERE t.name = write_half.topic;
            IF queues IS NULL THEN
                said = concat('queue ', queue, ' of topic ''', topic, ''' can''t be chosen, for the topic has no ',
                              'queues yet; declare it before, by outbox.declare_topic');
            ELSIF queue >= queues THEN
                said = concat('queue ', queue, ' of topic ''', topic, ''' must be from 0 to ', queues - 1);
            END IF;
        END IF;
        {_REFUSE}
        id = coalesce(id, {_UUID7});
        INSERT INTO {{s}}.half_message (id, producer_group, topic, key, tag, headers, content_type, body, deliver_at,
                                        at_commit, queue)
        VALUES (id, producer_group, topic, key, tag, nullif(nullif(headers, '{{}}'), 'null'), content_type, body,
                coalesce(deliver_at, clock_timestamp() + delay), at_commit, queue);
        RETURN id;
    END $$""",
    f"""CREATE FUNCTION {{s}}.send(topic text, body jsonb, {_OPTIONS}, queue integer DEFAULT NULL)
    RETURNS uuid LANGUAGE plpgsql {{pinned}} BEGIN
        RETURN {{s}}.write_half(topic, convert_to(coalesce(body, 'null')::text, 'UTF8'), 'application/json', key,
                                headers, tag, deliver_at, delay, id, producer_group, true, queue);
    END $$""",
    f"""CREATE FUNCTION {{s}}.send_bytes(topic text, body bytea, {_OPTIONS},
        content_type text DEFAULT 'application/octet-stream', queue integer DEFAULT NULL)
    RETURNS uuid LANGUAGE plpgsql {{pinned}} BEGIN
        RETURN {{s}}.write_half(topic, body, content_type, key, headers, tag, deliver_at, delay, id, producer_group,
                                true, queue);
    END $$""",
    f"""CREATE FUNCTION {{s}}.send_many(messages jsonb) RETURNS SETOF uuid LANGUAGE plpgsql {{pinned}}
    DECLARE message jsonb; said text; deliver_at timestamptz; delay interval; queue integer;
    BEGIN
        IF jsonb_typeof(messages) IS DISTINCT FROM 'array' THEN
            {_RAISE} concat('messages must be a list of dicts, not ', {{s}}.type_name(messages));
        END IF;
        FOR message IN SELECT * FROM jsonb_array_elements(messages) LOOP
            IF jsonb_typeof(message) <> 'object' THEN
                said = concat('messages must be a list of dicts, not of ', {{s}}.type_name(message));
            ELSE
                SELECT concat('a message has no option ', string_agg(name, ', ' ORDER BY name COLLATE "C"))
                  INTO said FROM jsonb_object_keys(message) name
                 WHERE name <> ALL ('{{topic,body,key,headers,tag,deliver_at,delay,id,producer_group,queue}}')
                HAVING count(*) > 0;
                SELECT coalesce(said, concat(replace(name, 'producer_', ''), ' must be a str, not ',
                                             {{s}}.type_name(message -> name)))
                  INTO said FROM unnest('{{topic,key,tag,producer_group}}'::text[]) WITH ORDINALITY n (name, number)
                 WHERE said IS NOT NULL OR jsonb_typeof(message -> name) NOT IN ('string', 'null')
                 ORDER BY number LIMIT 1;
                said = coalesce(said, CASE
                    WHEN jsonb_typeof(message -> 'deliver_at') NOT IN ('string', 'null')
                        THEN concat('deliver_at must be a datetime, not ', {{s}}.type_name(message -> 'deliver_at'))
                    WHEN message ->> 'deliver_at' !~ {_TIME}
                        THEN concat('deliver_at ''', left(message ->> 'deliver_at', 40), ''' must be a time with its ',
                                    'zone, such as 2031-01-01T00:00:00Z')
                    WHEN jsonb_typeof(message -> 'delay') NOT IN ('number', 'string', 'null')
                        THEN concat('delay ', message -> 'delay', ' must be a timedelta or seconds, not negative and ',
                                    'under 100 years')
                    WHEN jsonb_typeof(message -> 'id') NOT IN ('string', 'null') OR message ->> 'id' !~ {_UUID}
                        THEN concat('id ', message -> 'id', ' must be a UUID')
                    WHEN jsonb_typeof(message -> 'queue') NOT IN ('number', 'null') OR message ->> 'queue' !~ '^[0-9]+$'
                        THEN concat('queue ', message -> 'queue', ' must be a whole number from 0 on')
                END);
            END IF;
            {_REFUSE}
            BEGIN
                deliver_at = message ->> 'deliver_at';
                delay = CASE jsonb_typeof(message -> 'delay')
                        WHEN 'number' THEN make_interval(secs => (message ->> 'delay')::double precision)
                        ELSE (message ->> 'delay')::interval END;
                queue = message ->> 'queue';
            EXCEPTION WHEN data_exception THEN
                {_RAISE} concat('a time, a delay or a queue is none', chr(58), ' ', SQLERRM);
            END;
            RETURN NEXT {{s}}.send(
                message ->> 'topic', message -> 'body', message ->> 'key', message -> 'headers', message ->> 'tag',
                deliver_at, delay, (message ->> 'id')::uuid, coalesce(message ->> 'producer_group', 'sql'), queue);
        END LOOP;
    END $$""",
    f"""CREATE FUNCTION {{s}}.prepare(topic text, body jsonb, {_OPTIONS}, immunity interval DEFAULT '6 s',
        queue integer DEFAULT NULL) RETURNS uuid LANGUAGE plpgsql {{pinned}}
    DECLARE seconds CONSTANT double precision = extract(epoch FROM immunity);
    BEGIN
        IF (seconds >= 0 AND seconds < 100 * 366 * 86400.0) IS NOT TRUE THEN
            {_RAISE} concat('immunity ', coalesce(seconds::text, 'NULL'),
                ' must be a timedelta or seconds, not negative and under 100 years');
        END IF;
        id = {{s}}.write_half(topic, convert_to(coalesce(body, 'null')::text, 'UTF8'), 'application/json', key,
                              headers, tag, deliver_at, delay, id, producer_group, NULL, queue);
        INSERT INTO {{s}}.half_check (half_id, topic, fenced, next_check_at)
        VALUES (id, topic, false, clock_timestamp() + immunity);
        RETURN id;
    END $$""",
    # As outbox/database/decision.py: a decision locks the half's check first, and the insert settles every race. The
    # unique index knows a half that the snapshot of the transaction doesn't show, because it is older than a move.
    """CREATE FUNCTION {s}.decide(id uuid, decision text) RETURNS boolean LANGUAGE plpgsql {pinned}
    DECLARE earlier record; there boolean = false;
    BEGIN
        IF NOT EXISTS (SELECT FROM {s}.half_message h WHERE h.id = decide.id) THEN
            IF current_setting('transaction_isolation') IN ('repeatable read', 'serializable') THEN
                BEGIN
                    INSERT INTO {s}.half_message (id, producer_group, topic, content_type, body)
                    VALUES (decide.id, 'g', 't', '', '');
                    RAISE no_data_found;
                EXCEPTION
                    WHEN no_data_found THEN NULL;
                    WHEN unique_violation THEN there = true;
                    WHEN insufficient_privilege THEN RAISE serialization_failure USING MESSAGE =
                        concat('this snapshot is too old to show half ', id, ': try again');
                END;
            END IF;
        END IF;
        IF NOT there AND NOT EXISTS (SELECT FROM {s}.half_message h WHERE h.id = decide.id) THEN
            RAISE EXCEPTION USING ERRCODE = 'OX004', MESSAGE = concat('no half message ', id, ' in this database; ',
                'was it prepared in another one, or in a transaction that rolled back?');
        END IF;
        PERFORM FROM {s}.half_check c WHERE c.half_id = decide.id FOR UPDATE;
        INSERT INTO {s}.op_message (half_id, resolution, decided_by) VALUES (id, decision, 'producer')
        ON CONFLICT (half_id) DO NOTHING;
        IF FOUND THEN
            DELETE FROM {s}.half_check c WHERE c.half_id = decide.id;
            RETURN true;
        END IF;
        SELECT o.resolution, o.decided_by INTO STRICT earlier FROM {s}.op_message o WHERE o.half_id = decide.id;
        IF earlier.resolution <> decision THEN
            RAISE EXCEPTION USING
                ERRCODE = CASE earlier.resolution WHEN 'commit' THEN 'OX002' ELSE 'OX003' END,
                MESSAGE = concat('half message ', id, ' was already ',
                    CASE earlier.resolution WHEN 'commit' THEN 'committed' ELSE 'rolled back' END,
                    ' (by the ', earlier.decided_by, ')');
        END IF;
        RETURN false;
    END $$""",
    # Which database this is, for the consumers of its messages: dumps and replicas keep it, and no TRUNCATE forgets it.
    """CREATE FUNCTION {s}.renew_source_id() RETURNS uuid LANGUAGE plpgsql {pinned} BEGIN
        EXECUTE format('CREATE OR REPLACE FUNCTION {s}.source_id() RETURNS uuid LANGUAGE sql STABLE SET search_path = '
                       'pg_catalog, pg_temp AS %L', format('SELECT %L::uuid', gen_random_uuid()));
        RETURN {s}.source_id();
    END $$""",
    "SELECT {s}.renew_source_id()",
    """CREATE FUNCTION {s}.commit(id uuid) RETURNS boolean LANGUAGE plpgsql {pinned}
    BEGIN RETURN {s}.decide(id, 'commit'); END $$""",
    """CREATE FUNCTION {s}.rollback(id uuid) RETURNS boolean LANGUAGE plpgsql {pinned}
    BEGIN RETURN {s}.decide(id, 'rollback'); END $$""",
)

DOWNGRADE = ("DROP FUNCTION {s}.source_id()", *dropping(UPGRADE))


def upgrade() -> None:
    run(UPGRADE)


def downgrade() -> None:
    run(DOWNGRADE)
