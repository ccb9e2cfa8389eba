"""The functions of the outbox schema: sending from anything that can run SQL, with Python's rules and words."""

from __future__ import annotations

import asyncio
import datetime as dt
import json
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import asyncpg
import psycopg
import psycopg2
import pytest
from hypothesis import HealthCheck, example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from psycopg.types.json import Jsonb
from sqlalchemy import Engine, create_engine, text

from outbox import Outbox, Settings
from outbox.errors import AlreadyCommitted, AlreadyRolledBack, HalfNotFound, InvalidMessage
from outbox.message import content
from outbox.message.model import expiry_in, uuid7
from tests.kit import Tables, tries, wait_until
from tests.kit.programs import lacks
from tests.producer.bank import changes, halves, leftovers, messages, waits_for_a_lock
from tests.producer.conftest import NODE, SECOND_SCHEMA, at_the_commit

#: The SQLSTATEs of what Python raises.
STATES = {InvalidMessage: "OX001", AlreadyCommitted: "OX002", AlreadyRolledBack: "OX003", HalfNotFound: "OX004"}


@pytest.fixture
def connection(dsn: str) -> Iterator[psycopg.Connection[Any]]:
    """A connection of the driver's own; nothing of Outbox is needed."""
    with psycopg.connect(dsn) as connection:
        yield connection


@pytest.fixture
def dsn(url: str) -> str:
    """What other drivers take for an URL."""
    return url.replace("postgresql+psycopg", "postgresql")


def refused(connection: psycopg.Connection[Any], sql: str, *values: Any) -> tuple[str | None, str]:
    """Return the SQLSTATE and the message with which a statement fails."""
    with pytest.raises(psycopg.Error) as error:
        connection.execute(sql.encode(), values)
    connection.rollback()
    return error.value.sqlstate, error.value.diag.message_primary or ""


def value(connection: psycopg.Connection[Any], sql: str, *values: Any) -> Any:
    """Return the one value that a statement gives."""
    row = connection.execute(sql.encode(), values).fetchone()
    assert row is not None
    return row[0]


def test_send(connection: psycopg.Connection[Any], engine: Engine) -> None:
    """All that can be said of a message arrives as from Python; the id is of version 7 and of now."""
    when = dt.datetime(2031, 1, 1, tzinfo=dt.UTC)
    sent = value(
        connection,
        "SELECT outbox.send('t', %s, key => 'k', headers => %s, tag => 'g', deliver_at => %s,"
        " producer_group => 'shop')",
        Jsonb({"number": 1, "text": "ä"}),
        Jsonb({"h": "v"}),
        when,
    )
    given = uuid7()
    connection.execute("SELECT outbox.send('t', '{\"number\": 2}', id => %s, delay => '1 hour')", (given,))
    connection.commit()
    first, second = halves(engine)
    assert first.body == {"number": 1, "text": "ä"}
    assert (first.id, first.key, first.tag, first.headers) == (sent, "k", "g", {"h": "v"})
    assert (first.deliver_at, first.producer_group, first.content_type) == (when, "shop", "application/json")
    assert (first.resolution, first.decided_by) == ("commit", "producer")
    assert (second.id, second.producer_group, second.headers) == (given, "sql", None)
    assert dt.timedelta(minutes=59) < second.deliver_at - second.born_at < dt.timedelta(minutes=61)
    assert (sent.version, sent.variant) == (7, "specified in RFC 4122")
    assert abs((sent.int >> 80) / 1000 - first.born_at.timestamp()) < 60


def test_ids_are_of_version_7(connection: psycopg.Connection[Any]) -> None:
    """Ids differ and sort by the time of their making."""
    ids = [row[0] for row in connection.execute("SELECT outbox.send('t', '1') FROM generate_series(1, 100)")]
    assert len(set(ids)) == 100
    assert {(each.version, each.variant) for each in ids} == {(7, "specified in RFC 4122")}
    assert [each.int >> 80 for each in ids] == sorted(each.int >> 80 for each in ids)


def test_bytes_and_nothing(connection: psycopg.Connection[Any], engine: Engine) -> None:
    """A body may be bytes of any content type, or NULL, which is JSON's null."""
    connection.execute("SELECT outbox.send_bytes('t', '\\x00ff')")
    connection.execute("SELECT outbox.send_bytes('t', 'text', content_type => 'text/plain; charset=utf-8')")
    connection.execute("SELECT outbox.send('t', NULL)")
    connection.commit()
    with engine.connect() as reader:
        rows = reader.execute(
            text(
                "SELECT body, content_type FROM outbox.half_message JOIN outbox.op_message ON id = half_id"
                " ORDER BY sequence"
            )
        )
        assert [tuple(row) for row in rows] == [
            (b"\x00\xff", "application/octet-stream"),
            (b"text", "text/plain; charset=utf-8"),
            (b"null", "application/json"),
        ]


def test_send_many(connection: psycopg.Connection[Any], engine: Engine) -> None:
    """Many messages in one call, each with options of its own, in their order."""
    given = uuid7()
    many = [
        {"topic": "t", "body": {"number": 1}, "key": "k", "headers": {"a": "b"}, "tag": None},
        {"topic": "t", "body": {"number": 2}, "delay": 3600, "id": str(given), "producer_group": "shop"},
        {"topic": "t", "body": {"number": 3}, "deliver_at": "2031-01-01T00:00:00Z", "delay": None},
        {"topic": "t", "body": {"number": 4}, "delay": "1 day"},
    ]
    ids = [row[0] for row in connection.execute("SELECT outbox.send_many(%s)", (Jsonb(many),))]
    assert list(connection.execute("SELECT outbox.send_many('[]')")) == []
    connection.commit()
    assert messages(engine) == [1, 2, 3, 4]
    found = halves(engine)
    assert [half.id for half in found] == ids
    assert ids[1] == given
    assert (found[0].key, found[0].headers, found[0].tag) == ("k", {"a": "b"}, None)
    assert [half.producer_group for half in found] == ["sql", "shop", "sql", "sql"]
    assert found[2].deliver_at == dt.datetime(2031, 1, 1, tzinfo=dt.UTC)


@pytest.mark.parametrize(
    ("many", "said"),
    [
        ({}, "messages must be a list of dicts, not dict"),
        ([1], "messages must be a list of dicts, not of int"),
        ([{"topic": "t", "bdy": 1, "Kee": 2}], "a message has no option Kee, bdy"),
        ([{"topic": 1}], "topic must be a str, not int"),
        ([{"topic": "t", "key": 1.5}], "key must be a str, not float"),
        ([{"topic": "t", "producer_group": 5}], "group must be a str, not int"),
        ([{"topic": "t", "tag": ["a"]}], "tag must be a str, not list"),
        ([{"body": 1}], "topic is empty"),
        ([{"topic": "t", "body": 1}, {"topic": "a b", "body": 1}], "topic 'a b' may only have"),
    ],
)
def test_bad_many(many: Any, said: str, connection: psycopg.Connection[Any], engine: Engine) -> None:
    """A mistake in one of many refuses them all, and names it."""
    state, message = refused(connection, "SELECT outbox.send_many(%s)", Jsonb(many))
    assert (state, message[: len(said)]) == ("OX001", said)
    assert halves(engine) == []


def test_decisions(connection: psycopg.Connection[Any], engine: Engine, outbox: Outbox) -> None:
    """The first decision wins, whoever makes it; the others learn what came first, in Python's words."""
    ids = [
        row[0] for row in connection.execute("SELECT outbox.prepare('t', '{\"number\": 1}') FROM generate_series(1, 3)")
    ]
    connection.commit()
    assert [(half.waits, half.fenced, half.resolution) for half in halves(engine)] == [(True, False, None)] * 3
    assert connection.execute("SELECT outbox.commit(%s)", (ids[0],)).fetchone() == (True,)
    assert connection.execute("SELECT outbox.rollback(%s)", (ids[1],)).fetchone() == (True,)
    connection.commit()
    decision = outbox.commit(ids[2])
    assert decision is not None
    assert decision.first
    assert connection.execute("SELECT outbox.commit(%s)", (ids[2],)).fetchone() == (False,)
    connection.commit()
    for call, half_id, kind in (
        ("rollback", ids[0], AlreadyCommitted),
        ("commit", ids[1], AlreadyRolledBack),
        ("commit", uuid7(), HalfNotFound),
    ):
        with pytest.raises(kind) as error:
            getattr(outbox, call)(half_id, connection)
        connection.rollback()
        assert refused(connection, f"SELECT outbox.{call}(%s)", half_id) == (STATES[kind], str(error.value))
    assert [half.waits for half in halves(engine)] == [False] * 3
    assert leftovers(engine) == 0


@pytest.mark.parametrize("immunity", ["-1 s", "101 years", None])
def test_bad_immunity(immunity: str | None, connection: psycopg.Connection[Any]) -> None:
    """An immunity must be a length of time."""
    state, message = refused(connection, "SELECT outbox.prepare('t', '1', immunity => %s)", immunity)
    assert state == "OX001"
    assert "must be a timedelta or seconds, not negative and under 100 years" in message


def test_race_of_decisions(dsn: str, engine: Engine) -> None:
    """Who decides a half that another transaction is deciding waits for it, and loses."""
    with psycopg.connect(dsn) as first, psycopg.connect(dsn) as second:
        half_id = value(first, "SELECT outbox.prepare('t', '{\"number\": 1}')")
        first.commit()
        first.execute("SELECT outbox.commit(%s)", (half_id,))

        async def race() -> None:
            late = asyncio.create_task(asyncio.to_thread(refused, second, "SELECT outbox.rollback(%s)", half_id))
            await asyncio.to_thread(wait_until, lambda: waits_for_a_lock(engine, second.info.backend_pid), "it waits")
            first.commit()
            assert (await late)[0] == "OX002"

        asyncio.run(race())
    assert messages(engine) == [1]


def test_changed_mind(connection: psycopg.Connection[Any], engine: Engine) -> None:
    """What is rolled back by its id in the transaction that sends it doesn't go out."""
    connection.execute("SELECT outbox.send('t', '{\"number\": 1}')")
    connection.execute("SELECT outbox.rollback(outbox.send('t', '{\"number\": 2}'))")
    connection.commit()
    assert messages(engine) == [1]
    assert leftovers(engine) == 0


# --- order ---------------------------------------------------------------------------------------------------


def test_sequence_is_drawn_by_the_commit(dsn: str, engine: Engine) -> None:
    """A sends, then waits for the row that B has locked; B sends and commits first, and B's message is the first."""
    with psycopg.connect(dsn) as a, psycopg.connect(dsn) as b:
        b.execute("INSERT INTO change VALUES (1)")
        a.execute("SELECT outbox.send('t', '{\"number\": 2}')")

        async def race() -> None:
            waiting = asyncio.create_task(
                asyncio.to_thread(a.execute, "INSERT INTO change VALUES (1) ON CONFLICT DO NOTHING")
            )
            await asyncio.to_thread(wait_until, lambda: waits_for_a_lock(engine, a.info.backend_pid), "A waits for B")
            b.execute("SELECT outbox.send('t', '{\"number\": 1}')")
            b.commit()
            await waiting

        asyncio.run(race())
        a.commit()
    assert messages(engine) == [1, 2]


def test_savepoints_and_order_of_one_transaction(connection: psycopg.Connection[Any], engine: Engine) -> None:
    """Within a transaction messages keep the order of their calls, without those of savepoints that were undone."""
    for number in range(6):
        connection.execute("SAVEPOINT one")
        connection.execute("SELECT outbox.send('t', %s)", (Jsonb({"number": number}),))
        connection.execute("ROLLBACK TO one" if number % 3 == 1 else "RELEASE one")
    connection.commit()
    assert messages(engine) == [0, 2, 3, 5]
    assert leftovers(engine) == 0


def test_python_comes_first_in_a_transaction_of_both(engine: Engine, outbox: Outbox) -> None:
    """SQLAlchemy writes before the COMMIT, where the trigger's turn is."""
    with engine.begin() as connection:
        connection.execute(text("SELECT outbox.send('t', '{\"number\": 2}')"))
        outbox.send(connection, "t", {"number": 1})
    assert messages(engine) == [1, 2]


def test_prepared_transaction(dsn: str, engine: Engine) -> None:
    """A two-phase transaction draws its sequence when it is prepared."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        if connection.execute("SHOW max_prepared_transactions").fetchone() == ("0",):
            pytest.skip("the server takes no prepared transactions")
        with connection.transaction():
            connection.execute("SELECT outbox.send('t', '{\"number\": 1}')")
            connection.execute("PREPARE TRANSACTION 'carriers'")
        assert messages(engine) == []
        connection.execute("COMMIT PREPARED 'carriers'")
    assert messages(engine) == [1]


# --- safety --------------------------------------------------------------------------------------------------


def test_search_path_of_the_caller(connection: psycopg.Connection[Any], engine: Engine) -> None:
    """Functions and tables of the caller's, in its search path or temporary, take no part."""
    connection.execute("CREATE TEMPORARY TABLE half_message (id int)")
    connection.execute("CREATE FUNCTION pg_temp.length(text) RETURNS int LANGUAGE sql AS 'SELECT 1 / 0'")
    connection.execute("SET search_path = pg_temp, public")
    connection.execute("SELECT outbox.send('t', '{\"number\": 1}')")
    connection.commit()
    assert messages(engine) == [1]
    with engine.connect() as reader:
        unpinned = reader.execute(
            text(
                "SELECT proname FROM pg_proc WHERE pronamespace = 'outbox'::regnamespace"
                " AND (prosecdef OR proconfig IS DISTINCT FROM ARRAY['search_path=pg_catalog, pg_temp'])"
            )
        )
        assert list(unpinned) == []


#: What a role needs to send, as the page on sending says.
_RIGHTS = """
GRANT USAGE ON SCHEMA outbox TO seller;
GRANT USAGE ON SEQUENCE outbox.op_sequence TO seller;
GRANT INSERT ON outbox.half_message TO seller;
GRANT INSERT, SELECT (half_id) ON outbox.op_message TO seller;
"""


@pytest.mark.parametrize("missing", [None, "half_message", "op_message"])
def test_rights_are_those_of_the_caller(missing: str | None, dsn: str, engine: Engine) -> None:
    """A role sends with the rights that a producer needs, and not without them."""
    with psycopg.connect(dsn) as connection:
        connection.execute("CREATE ROLE seller")
        rights = [line for line in _RIGHTS.split(";") if missing is None or missing not in line]
        connection.execute(";".join(rights).encode())
        connection.execute("SET LOCAL ROLE seller")
        send = "SELECT outbox.send('t', '{\"number\": 1}'); SET CONSTRAINTS ALL IMMEDIATE"
        if missing is None:
            connection.execute(send)
            connection.execute("RESET ROLE")
            assert connection.execute("SELECT count(*) FROM outbox.op_message").fetchone() == (1,)
        else:
            with pytest.raises(psycopg.errors.InsufficientPrivilege, match=missing):
                connection.execute(send)
        connection.rollback()


def test_another_schema(connection: psycopg.Connection[Any], engine: Engine) -> None:
    """The functions of a schema write its tables."""
    connection.execute(f"SELECT {SECOND_SCHEMA}.send('t', '{{\"number\": 1}}')")
    connection.commit()
    assert (messages(engine), messages(engine, SECOND_SCHEMA)) == ([], [1])


# --- one declaration of what a message may be ------------------------------------------------------------------

_TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=200)
_NAMES = st.one_of(
    st.text("abZ09%|_./- ", max_size=140),
    st.sampled_from(
        ["a" * 127, "a" * 128, "%RETRY%x", "%DLQ%", "RMQ_SYS_x", "TBW102", "outbox.x", "x\n", "\n", "ä", "a:b"]
    ),
)
_KEYS = st.none() | _TEXTS | st.sampled_from(["ä" * 127, "ä" * 128, "k" * 255, "k" * 256])
_HEADERS = st.one_of(
    st.none(),
    st.dictionaries(_TEXTS, _TEXTS, max_size=4),
    st.dictionaries(st.sampled_from(["a"]), st.integers() | _TEXTS, max_size=1),
    st.sampled_from([["a"], {str(n): "v" for n in range(128)}, {str(n): "v" for n in range(129)}]),
    st.sampled_from([{"a": "x" * (16 * 1024 - 1)}, {"a": "x" * 16 * 1024}, {"ä": "ä" * 8192}]),
)
_DELAYS = st.none() | st.sampled_from([0, 1, -1, 0.5, 100 * 366 * 86400 - 1, 100 * 366 * 86400])


@example("x", None, None, None, "x" * (4 * 1024 * 1024), None)
@example("x", None, None, None, "x" * (4 * 1024 * 1024 - 2), None)
@example("topic" * 30, "k" * 300, "t" * 300, None, "", 1)
@given(_NAMES, _KEYS, _KEYS, _HEADERS, _TEXTS, _DELAYS)
@hypothesis_settings(
    max_examples=tries(30), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_python_and_sql_agree(
    connection: psycopg.Connection[Any],
    outbox: Outbox,
    topic: str,
    key: str | None,
    tag: str | None,
    headers: Any,
    body: str,
    delay: float | None,
) -> None:
    """What one takes the other takes, and what one refuses the other refuses, in the same words."""
    by_python = by_sql = None
    with connection.transaction(force_rollback=True):
        try:
            # As JSON: bodies are compared by the size of their text.
            outbox.send(connection, topic, [body], key=key, tag=tag, headers=headers, delay=delay)
        except InvalidMessage as error:
            by_python = str(error)
        values = (topic, json.dumps([body], ensure_ascii=False), key, Jsonb(headers), tag, delay)
        sql = "SELECT outbox.send(%s, %s, %s, %s, %s, delay => make_interval(secs => %s))"
        try:
            with connection.transaction(force_rollback=True):
                connection.execute(sql, values)
        except psycopg.Error as error:
            assert error.sqlstate == "OX001"
            by_sql = error.diag.message_primary
    quoted = any(repr(text)[1:-1] != text for text in (topic, key or "", tag or "", *(headers or ())))
    if quoted or by_python is None:
        # Python writes the characters of some texts out.
        assert (by_python is None) == (by_sql is None), (by_python, by_sql)
    else:
        assert by_sql == by_python


#: What neither Python nor `send_many` takes for an option. The SQL functions' own types have no way to say it.
_WRONG_VALUES: dict[str, list[Any]] = {
    "deliver_at": [5, "soon", "now", "tomorrow", "2031-01-01T00:00:00", "2031-02-30T00:00:00Z",
                   "+010000-01-01T00:00:00Z"],
    "expires_at": ["2031-01-01T00:00:00Z"],
    "delay": [True, [1], "soon", "infinity", 1e300],
    "queue": [True, 1.5, "1", 2**31],
    "id": [5, [], ""],
    "key": [5],
    "tag": [[]],
}  # fmt: skip


@pytest.mark.parametrize(("name", "wrong"), [(name, each) for name, wrong in _WRONG_VALUES.items() for each in wrong])
def test_values_of_no_fit_type(
    name: str, wrong: Any, connection: psycopg.Connection[Any], outbox: Outbox, engine: Engine
) -> None:
    """Python and `send_many` refuse them, and write nothing."""
    with pytest.raises(InvalidMessage):
        outbox.send(connection, "t", 1, **{name: wrong})
    many = Jsonb([{"topic": "t", "body": 1, name: wrong}])
    assert refused(connection, "SELECT outbox.send_many(%s)", many)[0] == "OX001"
    assert halves(engine) == []


_NEW_YORK = dt.timezone(dt.timedelta(hours=-5))
_NEW_YEAR = dt.datetime(2031, 1, 1, tzinfo=dt.UTC)
#: The last hour of the year 9999 in New York, and the first one of our era in Berlin: in UTC they are of no year.
_TOO_LATE = dt.datetime(9999, 12, 31, 23, tzinfo=_NEW_YORK)
_TOO_EARLY = dt.datetime(1, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=1)))
_KEY, _TAG = "k" * (content.MAX_KEY_BYTES + 1), "t" * (content.MAX_TAG_BYTES + 1)
#: Times from which on a message is too old that can't be: what is wrong, by Python, and by SQL.
_EXPIRIES: list[tuple[str, dict[str, Any] | None, list[str]]] = [
    ("isn't a time", {"expires_at": "soon"}, ["soon"]),
    ("naive", {"expires_at": dt.datetime(2031, 1, 1)}, ["2031-01-01T00:00:00", "2031-01-01"]),  # noqa: DTZ001
    ("in 10000", {"expires_at": _TOO_LATE}, ["9999-12-31T23:00:00-05:00", "10000-01-01T00:00:00Z"]),
    ("in 0", {"expires_at": _TOO_EARLY}, ["0000-01-01T00:00:00Z", "0001-01-01T00:00:00+01:00"]),
    ("without end", None, ["infinity"]),
    ("on a day that isn't", None, ["2031-02-30T00:00:00Z"]),
    ("at 24", None, ["2031-01-01T24:00:00Z", "2031-01-01T23:59:60Z"]),
]
#: What a message can't be: by Python's options (None: it has no way to say so), and by those of SQL, which functions
#: take by name and `send_many` as keys. The one list of the rules: a new one is a new row.
_BAD: dict[str, tuple[dict[str, Any] | None, list[dict[str, Any]]]] = {
    "naive time": ({"deliver_at": dt.datetime(2031, 1, 1)}, []),  # noqa: DTZ001
    "year 10000": (None, [{"deliver_at": "10000-01-01 00:00:00+00"}]),
    "year 10000 in UTC": ({"deliver_at": _TOO_LATE}, [{"deliver_at": "9999-12-31 23:00:00-05"}]),
    "year 200000": (None, [{"deliver_at": "200000-01-01 00:00:00+00"}]),
    "year 0 in UTC": ({"deliver_at": _TOO_EARLY}, [{"deliver_at": "0001-01-01T00:00:00+01:00"}]),
    "before Christ": (None, [{"deliver_at": "0044-03-15 00:00:00+00 BC"}]),
    "never": (None, [{"deliver_at": "infinity"}, {"deliver_at": "-infinity"}]),
    "negative delay": ({"delay": -1}, [{"delay": "-1 s"}]),
    "long delay": ({"delay": 1e300}, [{"delay": "100 years 1000 days"}]),
    "endless delay": ({"delay": float("inf")}, []),
    "two times": ({"delay": 1, "deliver_at": _NEW_YEAR}, [{"delay": "1 s", "deliver_at": "2031-01-01T00:00:00Z"}]),
    "negative queue": ({"queue": -1}, [{"queue": -1}]),
    "long key": ({"key": _KEY}, [{"key": _KEY}]),
    "long tag": ({"tag": _TAG}, [{"tag": _TAG}]),
    "headers in a list": ({"headers": ["a"]}, [{"headers": ["a"]}]),
    "a number in a header": ({"headers": {"a": 1}}, [{"headers": {"a": 1}}]),
    "nothing in a header": ({"headers": {"a": None}}, [{"headers": {"a": None}}]),
    "compressed": ({"headers": {"outbox-encoding": "gzip"}}, [{"headers": {"outbox-encoding": "gzip"}}]),
    "conversation": ({"conversation": "c"}, [{"headers": {"outbox-conversation": "c"}}]),
    "cause": ({"cause": "c"}, [{"headers": {"outbox-cause": ""}}]),
    "correlation": ({"correlation": "7"}, [{"headers": {"outbox-correlation": "7"}}]),
    "reply to": ({"reply_to": "a b"}, [{"headers": {"outbox-reply-to": "a b"}}]),
    "expired before it is out": (
        {"expires_at": _NEW_YEAR, "deliver_at": _NEW_YEAR},
        [{"headers": {"outbox-expires-at": "2031-01-01T00:00:00Z"}, "deliver_at": "2031-01-01T00:00:00Z"}],
    ),
    "a group that isn't": (None, [{"producer_group": "a b"}]),
    **{
        f"expiry {wrong}": (python, [{"headers": {"outbox-expires-at": said}} for said in sql])
        for wrong, python, sql in _EXPIRIES
    },
}


@pytest.mark.parametrize(("python", "sql"), _BAD.values(), ids=_BAD)
def test_what_python_refuses_the_functions_refuse(
    python: dict[str, Any] | None,
    sql: list[dict[str, Any]],
    connection: psycopg.Connection[Any],
    outbox: Outbox,
    engine: Engine,
) -> None:
    """Each with the SQLSTATE of InvalidMessage, and nothing is written."""
    if python is not None:
        with pytest.raises(InvalidMessage):
            outbox.send(connection, "t", 1, **python)
    for options in sql:
        names = ", ".join(f"{name} => %s" for name in options)
        values = [json.dumps(each) if isinstance(each, dict | list) else str(each) for each in options.values()]
        for call in ("send", "send_bytes", "prepare"):
            assert refused(connection, f"SELECT outbox.{call}('t', '1', {names})", *values)[0] == "OX001"
        many = Jsonb([{"topic": "t", "body": 1, **options}])
        assert refused(connection, "SELECT outbox.send_many(%s)", many)[0] == "OX001"
    assert halves(engine) == []


@pytest.mark.parametrize(
    "content_type",
    ["", "text", "text/", "/plain", "text/plain, x", "text/plain;ä", "a b/c", "text/plain\n", "x/" + "y" * 254,
     "text/plain", "text/plain; charset=utf-8", "application/vnd.a+json;v=1", "x/" + "y" * 253, "%/!#$&'*+.^_`|~-"],
)  # fmt: skip
def test_content_types(content_type: str, connection: psycopg.Connection[Any]) -> None:
    """What isn't one is refused in Python's words."""
    call = "SELECT outbox.send_bytes('t', '1', content_type => %s)"
    try:
        content.check_content_type(content_type)
    except InvalidMessage as error:
        state, said = refused(connection, call, content_type)
        assert state == "OX001"
        assert said == str(error) or not content_type.isprintable()
    else:
        connection.execute(call.encode(), (content_type,))


def test_what_is_just_within_the_limits(connection: psycopg.Connection[Any], outbox: Outbox, engine: Engine) -> None:
    """The largest that Python takes the functions take; what a time may be, lists and statistics can show."""
    last = dt.datetime.max.replace(tzinfo=dt.UTC)
    many: list[dict[str, Any]] = [
        {"deliver_at": "9999-12-31T23:59:59.999999Z"},
        {"deliver_at": "0001-01-01 00:00+00"},
        {"delay": 100 * 366 * 86400 - 1},
        {"key": "k" * content.MAX_KEY_BYTES, "tag": "t" * content.MAX_TAG_BYTES},
        {"headers": {"outbox-expires-at": "9999-12-31T23:59:59.999999+0000"}},
        {"headers": {"outbox-expires-at": "2031-01-01T00:00:00-05", "outbox-reply-to": "%|a/b.c_-"}},
        {"headers": {each: str(uuid7()) for each in ("outbox-conversation", "outbox-cause", "outbox-correlation")}},
        {"headers": {str(number): "" for number in range(content.MAX_HEADERS)}},
        {"headers": {"a": "x" * (content.MAX_HEADER_BYTES - 1)}},
    ]
    rows = json.dumps([{"topic": "t", "body": number, **each} for number, each in enumerate(many)])
    assert len(connection.execute("SELECT outbox.send_many(%s)", (rows,)).fetchall()) == len(many)
    outbox.send(connection, "t", 1, deliver_at=last)
    connection.commit()
    found = halves(engine)
    assert [half.deliver_at for half in found if half.deliver_at][-1] == last
    assert all(expiry_in(half.headers) for half in found if "outbox-expires-at" in (half.headers or ()))


@pytest.mark.parametrize("group", ["", "a b", "x" * 120, "x" * 121, "%|-_", "a.b"])
def test_groups(group: str, connection: psycopg.Connection[Any], engine: Engine) -> None:
    """The producer group must be a name as in Python."""
    try:
        Outbox(engine, group=group, settings=Settings())
    except InvalidMessage as error:
        said = refused(connection, "SELECT outbox.send('t', '1', producer_group => %s)", group)
        assert said == ("OX001", str(error))
    else:
        connection.execute("SELECT outbox.send('t', '1', producer_group => %s)", (group,))


def test_size_of_bodies_can_be_set(connection: psycopg.Connection[Any]) -> None:
    """A database that takes other bodies says so by a setting of its own."""
    connection.execute("SET outbox.max_body_bytes = 10")
    connection.execute("SELECT outbox.send('t', '\"12345678\"')")
    assert refused(connection, "SELECT outbox.send('t', '\"123456789\"')")[1].startswith(
        "the body has 11 bytes; at most 10"
    )


# --- whoever calls -----------------------------------------------------------------------------------------------


def test_from_psycopg2(dsn: str, engine: Engine) -> None:
    """psycopg2, in its usual way."""
    connection = psycopg2.connect(dsn)
    for number in (1, 2):
        with connection.cursor() as cursor:
            cursor.execute("INSERT INTO change VALUES (%s)", (number,))
            cursor.execute("SELECT outbox.send(%s, %s, key => %s)", ("t", json.dumps({"number": number}), "k"))
        connection.commit() if number == 1 else connection.rollback()
    connection.close()
    assert (changes(engine), messages(engine)) == ({1}, [1])


async def test_from_asyncpg(dsn: str, engine: Engine) -> None:
    """asyncpg, in its usual way."""
    connection = await asyncpg.connect(dsn)
    async with connection.transaction():
        await connection.execute("INSERT INTO change VALUES (1)")
        await connection.fetchval("SELECT outbox.send($1, $2, key => $3)", "t", json.dumps({"number": 1}), "k")
    await connection.close()
    assert (changes(engine), messages(engine)) == ({1}, [1])


def test_from_a_trigger(engine: Engine) -> None:
    """A trigger on a business table sends, however the row came there; also one that fires at the COMMIT."""
    tables = Tables(engine)
    tell = "PERFORM outbox.send('t', jsonb_build_object('number', NEW.number), key => CAST(NEW.number AS text));"
    with at_the_commit(engine, tell, when="NEW.number > 2"):
        tables.run("CREATE TRIGGER tell AFTER INSERT ON change FOR EACH ROW EXECUTE FUNCTION late()")
        tables.run("INSERT INTO change SELECT generate_series(1, 3)")
        assert messages(engine) == [1, 2, 3, 3]


_NODE = """
const { Client } = require('pg');
(async () => {
  const client = new Client({ connectionString: process.argv[1] });
  await client.connect();
  for (const number of [1, 2]) {
    await client.query('BEGIN');
    await client.query('INSERT INTO change VALUES ($1)', [number]);
    const { rows } = await client.query('SELECT outbox.send($1, $2, key => $3) AS id', ['t', { number }, 'k']);
    console.log(rows[0].id);
    await client.query(number === 1 ? 'COMMIT' : 'ROLLBACK');
  }
  try {
    await client.query("SELECT outbox.send('a b', '{}')");
  } catch (error) {
    console.log(error.code, error.message);
  }
  await client.end();
})();
"""


def test_from_node(dsn: str, engine: Engine) -> None:
    """Node's `pg`, as npm installs it in tests/node."""
    node = shutil.which("node")
    if node is None or not (NODE / "pg").exists():
        lacks("Node with its module pg", "npm install --prefix tests/node")
    done = subprocess.run([node, "-e", _NODE, dsn], capture_output=True, text=True, check=True, cwd=NODE.parent)
    first, _, error = done.stdout.splitlines()
    assert (changes(engine), messages(engine)) == ({1}, [1])
    assert str(halves(engine)[0].id) == first
    assert error == "OX001 topic 'a b' may only have the characters % | a-z A-Z 0-9 _ - . /"


def test_in_a_database_of_another_encoding(server: Any) -> None:
    """A database in LATIN1 has the functions, and keeps bodies in UTF-8."""
    from outbox.database import migration

    engine = create_engine(server.url("postgres"), isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(
            text("CREATE DATABASE latin ENCODING 'LATIN1' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0")
        )
    engine.dispose()
    try:
        migration.upgrade(server.url("latin"))
        with psycopg.connect(server.url("latin", driver="postgresql")) as connection:
            connection.execute("SELECT outbox.send('t', '{\"a\": \"ä\"}', key => 'ä')")
            connection.commit()
            assert connection.execute("SELECT body FROM outbox.half_message").fetchone() == (b'{"a": "\xc3\xa4"}',)
            said = refused(connection, "SELECT outbox.send('t', '1', key => %s)", "ä" * 128)
            assert said == ("OX001", f"key '{'ä' * 40}'. has 256 bytes; at most 255 are allowed")
    finally:
        server.drop_database("latin")


def test_a_chosen_queue(connection: psycopg.Connection[Any], outbox: Outbox, engine: Engine) -> None:
    """Every function that sends takes the queue; what the topic hasn't is refused in Python's words."""
    outbox.declare_topic("t", 4)
    for call in ("send('t', '1', queue => 3)", "prepare('t', '1', queue => 2)", "send_bytes('t', '1', queue => 1)"):
        connection.execute(f"SELECT outbox.{call}".encode())
    connection.execute("SELECT outbox.send_many(%s)", (Jsonb([{"topic": "t", "body": 1, "queue": 0}]),))
    connection.commit()
    chosen = connection.execute("SELECT queue FROM outbox.half_message ORDER BY queue").fetchall()
    assert chosen == [(0,), (1,), (2,), (3,)]
    for topic, queue in (("t", 4), ("t", -1), ("other", 0)):
        with pytest.raises(InvalidMessage) as error, engine.begin() as other:
            outbox.send(other, topic, 1, queue=queue)
        said = refused(connection, "SELECT outbox.send(%s, '1', queue => %s)", topic, queue)
        assert said == (STATES[InvalidMessage], str(error.value))
