"""The functions that send refuse what Python's send refuses: times, content types, headers of ours, types in a list."""

import runpy
from pathlib import Path

from outbox.database.migration.script import run

revision = "producer_0019"
down_revision = "producer_0018"
branch_labels = None
depends_on = None

_EARLIER = runpy.run_path(str(Path(__file__).with_name("producer_0005.py")))["UPGRADE"]


def _earlier(name: str) -> str:
    """Return the text of a function as producer_0005 has made it, to be put over the one that there is."""
    (text,) = (text for text in _EARLIER if f"CREATE FUNCTION {{s}}.{name}(" in text)
    return str(text.replace("CREATE FUNCTION", "CREATE OR REPLACE FUNCTION"))


def _changed(name: str, *changes: tuple[str, str]) -> str:
    """Return the text of a function with parts of it replaced, each of which it has once."""
    text = _earlier(name)
    for before, after in changes:
        assert text.count(before) == 1, before  # noqa: S101 - of texts that never change
        text = text.replace(before, after)
    return text


# As in producer_0003: the texts have no percent sign and no colon before a word.
_ISO = (
    (
        "'^[0-9]{{4}}-[0-9]{{2}}-[0-9]{{2}}[T ]([01][0-9]|2[0-3]):[0-5][0-9](:[0-5][0-9]([.][0-9]{{1,6}})?)?"
        "(Z|[+-][0-9]{{2}}(:?[0-9]{{2}})?)$'"
    )
    .replace("{{", "{")
    .replace("}}", "}")
)
_UUID = "'^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$'"
_WORD = "[a-zA-Z0-9_!#$' || chr(37) || '&''*+.^`|~-]+"
_FIRST, _LAST = (f"make_timestamptz({year}, 1, 1, 0, 0, 0, 'UTC')" for year in (1, 10000))

#: What headers say that options of Python's send would have made.
_HEADERS = f"""
        -- As outbox/message/model.py makes and reads them.
        IF said IS NULL AND jsonb_typeof(headers) = 'object' THEN
            IF headers ? 'outbox-encoding' THEN
                said = 'header ''outbox-encoding'' is for compressed bodies alone; leave it out';
            END IF;
            FOR header_name, header_text IN SELECT * FROM jsonb_each_text(headers) LOOP
                EXIT WHEN said IS NOT NULL;
                IF header_name IN ('outbox-conversation', 'outbox-cause', 'outbox-correlation')
                   AND header_text !~ {_UUID} THEN
                    said = concat('header ''', header_name, ''' must be an id, not ''', left(header_text, 40), '''');
                ELSIF header_name = 'outbox-reply-to' AND (header_text = '' OR length(header_text) > 127
                   OR header_text COLLATE "C" ~ ('[^|a-zA-Z0-9_./' || chr(37) || '-]')) THEN
                    said = concat('header ''outbox-reply-to'' must be a topic, not ''', left(header_text, 40), '''');
                ELSIF header_name = 'outbox-expires-at' THEN
                    BEGIN
                        IF header_text ~ {_ISO} THEN
                            expires_at = header_text;
                        END IF;
                    EXCEPTION WHEN data_exception THEN
                        NULL;
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
"""

UPGRADE = (
    _changed(
        "write_half",
        (
            "        header_bytes bigint = 0;\n",
            """\
        header_bytes bigint = 0;
        header_text text;
        expires_at timestamptz;
""",
        ),
        (
            "WHEN NOT isfinite(deliver_at) THEN concat('deliver_at ', deliver_at, ' is no moment')",
            f"""\
WHEN NOT (deliver_at >= {_FIRST} AND deliver_at < {_LAST})
                THEN concat('deliver_at ', deliver_at, ' is out of range in UTC')""",
        ),
        (
            "WHEN content_type IS NULL THEN 'content_type is NULL'",
            f"""\
WHEN content_type IS NULL THEN 'content_type is NULL'
            WHEN length(content_type) > 255
                OR content_type COLLATE "C" !~ ('^{_WORD}/{_WORD} *(;[ -~]*)?$')
                THEN concat('content_type ''', left(content_type, 80), ''' must be like ''application/msgpack'', with ',
                            'at most 255 characters')""",
        ),
        (
            "        -- As outbox/producer/producer.py, in the same words.",
            f"""\
{_HEADERS.lstrip(chr(10))}\
        -- As outbox/producer/producer.py, in the same words.""",
        ),
    ),
    _changed(
        "send_many",
        (
            "concat(name, ' must be a str, not '",
            """\
concat(replace(name, 'producer_', ''), ' must be a str, not '""",
        ),
        (
            "unnest('{{topic,key,tag}}'::text[])".replace("{{", "{").replace("}}", "}"),
            "unnest('{topic,key,tag,producer_group}'::text[])",
        ),
        (
            """\
            END IF;
            IF said IS NOT NULL THEN
                RAISE EXCEPTION USING ERRCODE = 'OX001', MESSAGE = said;
            END IF;
            RETURN NEXT""",
            f"""\
                said = coalesce(said, CASE
                    WHEN jsonb_typeof(message -> 'deliver_at') NOT IN ('string', 'null')
                        THEN concat('deliver_at must be a datetime, not ', {{s}}.type_name(message -> 'deliver_at'))
                    WHEN message ->> 'deliver_at' !~ {_ISO}
                        THEN concat('deliver_at ''', left(message ->> 'deliver_at', 40), ''' must be a time with its ',
                                    'zone, such as 2031-01-01T00:00:00Z')
                    WHEN jsonb_typeof(message -> 'delay') NOT IN ('number', 'string', 'null')
                        THEN concat('delay ', message -> 'delay', ' must be a timedelta or seconds, not negative and ',
                                    'under 100 years')
                    WHEN jsonb_typeof(message -> 'id') NOT IN ('string', 'null') OR message ->> 'id' !~ {_UUID}
                        THEN concat('id ', message -> 'id', ' must be a UUID')
                    WHEN jsonb_typeof(message -> 'queue') NOT IN ('number', 'null')
                        OR message ->> 'queue' !~ '^[0-9]+$'
                        THEN concat('queue ', message -> 'queue', ' must be a whole number from 0 on')
                END);
            END IF;
            IF said IS NOT NULL THEN
                RAISE EXCEPTION USING ERRCODE = 'OX001', MESSAGE = said;
            END IF;
            BEGIN
                deliver_at = message ->> 'deliver_at';
                delay = CASE jsonb_typeof(message -> 'delay')
                        WHEN 'number' THEN make_interval(secs => (message ->> 'delay')::double precision)
                        ELSE (message ->> 'delay')::interval END;
                queue = message ->> 'queue';
            EXCEPTION WHEN data_exception THEN
                RAISE EXCEPTION USING ERRCODE = 'OX001', MESSAGE = concat('a time, a delay or a queue is none', chr(58),
                                                                          ' ', SQLERRM);
            END;
            RETURN NEXT""",
        ),
        (
            """\
                (message ->> 'deliver_at')::timestamptz,
                CASE jsonb_typeof(message -> 'delay')
                WHEN 'number' THEN make_interval(secs => (message ->> 'delay')::double precision)
                ELSE (message ->> 'delay')::interval END,
                (message ->> 'id')::uuid, coalesce(message ->> 'producer_group', 'sql'),
                (message ->> 'queue')::integer);""",
            """\
                deliver_at, delay, (message ->> 'id')::uuid, coalesce(message ->> 'producer_group', 'sql'), queue);""",
        ),
        (
            "        said text;\n",
            """\
        said text;
        deliver_at timestamptz;
        delay interval;
        queue integer;
""",
        ),
    ),
)

DOWNGRADE = (_earlier("write_half"), _earlier("send_many"))


def upgrade() -> None:
    run(UPGRADE)


def downgrade() -> None:
    run(DOWNGRADE)
