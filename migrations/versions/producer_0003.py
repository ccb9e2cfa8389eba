"""Sending in SQL: functions for whatever can call them, and the op of a message that was sent before its COMMIT."""

from outbox.database.migration.script import run

revision = "producer_0003"
down_revision = "producer_0002"
branch_labels = None
depends_on = None

# The texts have no percent sign and no colon before a word, so that a service's own revision can execute them as they
# are: there the one is a format, the other a parameter.

# Names are looked up in pg_catalog alone, whatever the caller's search path is; what is ours is named with its schema.
_PINNED = "SECURITY INVOKER SET search_path = pg_catalog, pg_temp"

# UUIDv7 (RFC 9562): 48 bits of milliseconds over a random version 4, whose version becomes 7.
_UUID7 = """encode(set_bit(set_bit(overlay(
        uuid_send(gen_random_uuid())
        PLACING substring(int8send(floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint) FROM 3) FROM 1 FOR 6
    ), 52, 1), 53, 1), 'hex')::uuid"""

# Of send, send_bytes and prepare; those of send_many are the keys of its objects.
_OPTIONS = """key text DEFAULT NULL, headers jsonb DEFAULT NULL, tag text DEFAULT NULL,
    deliver_at timestamptz DEFAULT NULL, delay interval DEFAULT NULL, id uuid DEFAULT NULL,
    producer_group text DEFAULT 'sql'"""

UPGRADE = (
    "ALTER TABLE {s}.half_message ADD COLUMN at_commit BOOLEAN",
    # A decision of this half in the same transaction came first.
    f"""
    CREATE FUNCTION {{s}}.commit_half() RETURNS trigger LANGUAGE plpgsql {_PINNED} AS $$
    BEGIN
        INSERT INTO {{s}}.op_message (half_id, resolution, decided_by) VALUES (NEW.id, 'commit', 'producer')
        ON CONFLICT (half_id) DO NOTHING;
        RETURN NULL;
    END $$""",
    # Deferred: the sequence of the op is drawn in the COMMIT, before it lets go of the row locks.
    """
    CREATE CONSTRAINT TRIGGER commit_half AFTER INSERT ON {s}.half_message
        DEFERRABLE INITIALLY DEFERRED FOR EACH ROW WHEN (NEW.at_commit) EXECUTE FUNCTION {s}.commit_half()""",
    # As Python calls the type of a JSON value: the errors of both are the same.
    f"""
    CREATE FUNCTION {{s}}.type_name(value jsonb) RETURNS text LANGUAGE sql IMMUTABLE {_PINNED} AS $$
        SELECT CASE jsonb_typeof(value)
               WHEN 'string' THEN 'str' WHEN 'array' THEN 'list' WHEN 'object' THEN 'dict' WHEN 'boolean' THEN 'bool'
               WHEN 'number' THEN CASE WHEN value::text ~ '[.]' THEN 'float' ELSE 'int' END ELSE 'NoneType' END
    $$""",
    # The rules of outbox/message/content.py, and its words.
    f"""
    CREATE FUNCTION {{s}}.write_half(topic text, body bytea, content_type text, key text, headers jsonb, tag text,
        deliver_at timestamptz, delay interval, id uuid, producer_group text, at_commit boolean)
    RETURNS uuid LANGUAGE plpgsql {_PINNED} AS $$
    DECLARE
        -- As the setting of the same name; ALTER DATABASE ... SET outbox.max_body_bytes changes it.
        max_body_bytes CONSTANT bigint = coalesce(
            nullif(current_setting('outbox.max_body_bytes', true), '')::bigint, 4 * 1024 * 1024);
        seconds CONSTANT double precision = extract(epoch FROM delay);
        -- An ellipsis, which other encodings don't have.
        more CONSTANT text = chr(CASE getdatabaseencoding() WHEN 'UTF8' THEN 8230 ELSE 46 END);
        said text;
        header_name text;
        header_value jsonb;
        header_bytes bigint = 0;
    BEGIN
        said = CASE
            WHEN coalesce(producer_group, '') = '' THEN 'group is empty'
            WHEN length(producer_group) > 120 THEN concat('group ''', left(producer_group, 40), '''', more, ' has ',
                length(producer_group), ' characters; at most 120 are allowed')
            WHEN producer_group COLLATE "C" ~ ('[^|a-zA-Z0-9_' || chr(37) || '-]') THEN concat('group ''',
                producer_group, ''' may only have the characters ', chr(37), ' | a-z A-Z 0-9 _ -')
            WHEN deliver_at IS NOT NULL AND delay IS NOT NULL THEN 'deliver_at and delay exclude each other; give one'
            WHEN NOT isfinite(deliver_at) THEN concat('deliver_at ', deliver_at, ' is no moment')
            WHEN NOT (seconds >= 0 AND seconds < 100 * 366 * 86400.0) THEN concat('delay ', seconds,
                ' must be a timedelta or seconds, not negative and under 100 years')
            WHEN body IS NULL THEN 'body is NULL'
            WHEN content_type IS NULL THEN 'content_type is NULL'
            WHEN length(body) > max_body_bytes THEN concat('the body has ', length(body), ' bytes; at most ',
                max_body_bytes, ' are allowed (setting max_body_bytes): store it elsewhere and send a reference')
            WHEN coalesce(topic, '') = '' THEN 'topic is empty'
            WHEN length(topic) > 127 THEN concat('topic ''', left(topic, 40), '''', more, ' has ', length(topic),
                ' characters; at most 127 are allowed')
            WHEN topic COLLATE "C" ~ ('[^|a-zA-Z0-9_./' || chr(37) || '-]') THEN concat('topic ''', topic,
                ''' may only have the characters ', chr(37), ' | a-z A-Z 0-9 _ - . /')
            WHEN topic IN ('TBW102', 'SELF_TEST_TOPIC', 'OFFSET_MOVED_EVENT', 'BenchmarkTest')
                OR starts_with(topic, 'RMQ_SYS_') OR starts_with(topic, 'rmq_sys_')
                OR starts_with(topic, chr(37) || 'RETRY' || chr(37))
                OR starts_with(topic, chr(37) || 'DLQ' || chr(37))
                OR starts_with(topic, 'SCHEDULE_TOPIC_') OR starts_with(topic, 'TRANS_CHECK_MAX_TIME_TOPIC')
                THEN concat('topic ''', topic, ''' is a system name; choose another')
            WHEN octet_length(convert_to(key, 'UTF8')) > 255 THEN concat('key ''', left(key, 40), '''', more, ' has ',
                octet_length(convert_to(key, 'UTF8')), ' bytes; at most 255 are allowed')
            WHEN octet_length(convert_to(tag, 'UTF8')) > 127 THEN concat('tag ''', left(tag, 40), '''', more, ' has ',
                octet_length(convert_to(tag, 'UTF8')), ' bytes; at most 127 are allowed')
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
        IF said IS NOT NULL THEN
            RAISE EXCEPTION USING ERRCODE = 'OX001', MESSAGE = said;
        END IF;
        id = coalesce(id, {_UUID7});
        INSERT INTO {{s}}.half_message
            (id, producer_group, topic, key, tag, headers, content_type, body, deliver_at, at_commit)
        VALUES (id, producer_group, topic, key, tag, nullif(nullif(headers, '{{}}'), 'null'), content_type, body,
                coalesce(deliver_at, clock_timestamp() + delay), at_commit);
        RETURN id;
    END $$""",
    f"""
    CREATE FUNCTION {{s}}.send(topic text, body jsonb, {_OPTIONS})
    RETURNS uuid LANGUAGE plpgsql {_PINNED} AS $$
    BEGIN
        RETURN {{s}}.write_half(topic, convert_to(coalesce(body, 'null')::text, 'UTF8'), 'application/json', key,
                                headers, tag, deliver_at, delay, id, producer_group, true);
    END $$""",
    f"""
    CREATE FUNCTION {{s}}.send_bytes(topic text, body bytea, {_OPTIONS},
        content_type text DEFAULT 'application/octet-stream')
    RETURNS uuid LANGUAGE plpgsql {_PINNED} AS $$
    BEGIN
        RETURN {{s}}.write_half(topic, body, content_type, key, headers, tag, deliver_at, delay, id, producer_group,
                                true);
    END $$""",
    f"""
    CREATE FUNCTION {{s}}.send_many(messages jsonb) RETURNS SETOF uuid LANGUAGE plpgsql {_PINNED} AS $$
    DECLARE
        message jsonb;
        said text;
    BEGIN
        IF jsonb_typeof(messages) IS DISTINCT FROM 'array' THEN
            RAISE EXCEPTION USING ERRCODE = 'OX001',
                MESSAGE = concat('messages must be a list of dicts, not ', {{s}}.type_name(messages));
        END IF;
        FOR message IN SELECT * FROM jsonb_array_elements(messages) LOOP
            IF jsonb_typeof(message) <> 'object' THEN
                said = concat('messages must be a list of dicts, not of ', {{s}}.type_name(message));
            ELSE
                SELECT concat('a message has no option ', string_agg(name, ', ' ORDER BY name COLLATE "C"))
                  INTO said FROM jsonb_object_keys(message) name
                 WHERE name <> ALL ('{{topic,body,key,headers,tag,deliver_at,delay,id,producer_group}}')
                HAVING count(*) > 0;
                SELECT coalesce(said, concat(name, ' must be a str, not ', {{s}}.type_name(message -> name)))
                  INTO said FROM unnest('{{topic,key,tag}}'::text[]) WITH ORDINALITY n (name, number)
                 WHERE said IS NOT NULL OR jsonb_typeof(message -> name) NOT IN ('string', 'null')
                 ORDER BY number LIMIT 1;
            END IF;
            IF said IS NOT NULL THEN
                RAISE EXCEPTION USING ERRCODE = 'OX001', MESSAGE = said;
            END IF;
            RETURN NEXT {{s}}.send(
                message ->> 'topic', message -> 'body', message ->> 'key', message -> 'headers', message ->> 'tag',
                (message ->> 'deliver_at')::timestamptz,
                CASE jsonb_typeof(message -> 'delay')
                WHEN 'number' THEN make_interval(secs => (message ->> 'delay')::double precision)
                ELSE (message ->> 'delay')::interval END,
                (message ->> 'id')::uuid, coalesce(message ->> 'producer_group', 'sql'));
        END LOOP;
    END $$""",
    f"""
    CREATE FUNCTION {{s}}.prepare(topic text, body jsonb, {_OPTIONS}, immunity interval DEFAULT '6 s')
    RETURNS uuid LANGUAGE plpgsql {_PINNED} AS $$
    DECLARE
        seconds CONSTANT double precision = extract(epoch FROM immunity);
    BEGIN
        IF (seconds >= 0 AND seconds < 100 * 366 * 86400.0) IS NOT TRUE THEN
            RAISE EXCEPTION USING ERRCODE = 'OX001', MESSAGE = concat('immunity ', coalesce(seconds::text, 'NULL'),
                ' must be a timedelta or seconds, not negative and under 100 years');
        END IF;
        id = {{s}}.write_half(topic, convert_to(coalesce(body, 'null')::text, 'UTF8'), 'application/json', key,
                              headers, tag, deliver_at, delay, id, producer_group, NULL);
        INSERT INTO {{s}}.half_check (half_id, topic, fenced, next_check_at)
        VALUES (id, topic, false, clock_timestamp() + immunity);
        RETURN id;
    END $$""",
    # As outbox/database/decision.py: whoever decides locks the half's check first, and the insert settles every race.
    f"""
    CREATE FUNCTION {{s}}.decide(id uuid, decision text) RETURNS boolean LANGUAGE plpgsql {_PINNED} AS $$
    DECLARE
        earlier record;
    BEGIN
        IF NOT EXISTS (SELECT FROM {{s}}.half_message h WHERE h.id = decide.id) THEN
            RAISE EXCEPTION USING ERRCODE = 'OX004', MESSAGE = concat('no half message ', id, ' in this database; ',
                'was it prepared in another one, or in a transaction that rolled back?');
        END IF;
        PERFORM FROM {{s}}.half_check c WHERE c.half_id = decide.id FOR UPDATE;
        INSERT INTO {{s}}.op_message (half_id, resolution, decided_by) VALUES (id, decision, 'producer')
        ON CONFLICT (half_id) DO NOTHING;
        IF FOUND THEN
            DELETE FROM {{s}}.half_check c WHERE c.half_id = decide.id;
            RETURN true;
        END IF;
        SELECT o.resolution, o.decided_by INTO STRICT earlier FROM {{s}}.op_message o WHERE o.half_id = decide.id;
        IF earlier.resolution <> decision THEN
            RAISE EXCEPTION USING
                ERRCODE = CASE earlier.resolution WHEN 'commit' THEN 'OX002' ELSE 'OX003' END,
                MESSAGE = concat('half message ', id, ' was already ',
                    CASE earlier.resolution WHEN 'commit' THEN 'committed' ELSE 'rolled back' END,
                    ' (by the ', earlier.decided_by, ')');
        END IF;
        RETURN false;
    END $$""",
    *(
        f"""
    CREATE FUNCTION {{s}}.{name}(id uuid) RETURNS boolean LANGUAGE plpgsql {_PINNED} AS $$
    BEGIN
        RETURN {{s}}.decide(id, '{name}');
    END $$"""
        for name in ("commit", "rollback")
    ),
)

_MESSAGE = "jsonb, text, jsonb, text, timestamptz, interval, uuid, text"

DOWNGRADE = (
    "DROP TRIGGER commit_half ON {s}.half_message",
    "DROP FUNCTION {s}.commit(uuid), {s}.rollback(uuid), {s}.decide(uuid, text), {s}.send_many(jsonb), "
    f"{{s}}.send(text, {_MESSAGE}), {{s}}.prepare(text, {_MESSAGE}, interval), "
    "{s}.send_bytes(text, bytea, text, jsonb, text, timestamptz, interval, uuid, text, text), "
    "{s}.write_half(text, bytea, text, text, jsonb, text, timestamptz, interval, uuid, text, boolean), "
    "{s}.type_name(jsonb), {s}.commit_half()",
    "ALTER TABLE {s}.half_message DROP COLUMN at_commit",
)


def upgrade() -> None:
    run(UPGRADE)


def downgrade() -> None:
    run(DOWNGRADE)
