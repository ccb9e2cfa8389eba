"""Handlers that leave something behind on the worker's connection, or keep their session."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from sqlalchemy import Connection, create_engine, event, text
from sqlalchemy.exc import UnboundExecutionError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from outbox import Message
from outbox.database.session import JoinedSession
from tests.kit.bench import Bench, but, record


def by_sql(statement: str) -> Callable[[Session], object]:
    """Return an act that executes a statement."""
    return lambda session: session.execute(text(statement))


def unread(session: Session) -> None:
    """Leave most rows of a server-side cursor unread."""
    rows = session.connection().execute(
        text("SELECT generate_series(1, 100000)"), execution_options={"stream_results": True, "yield_per": 10}
    )
    assert rows.fetchone() is not None


def open_cursor(session: Session) -> None:
    """Leave a cursor of the driver open."""
    cursor: Any = session.connection().connection.cursor()
    cursor.execute("SELECT 1")


#: What a handler leaves behind after its effect.
LEFT: dict[str, Callable[[Session], object]] = {
    "a savepoint": lambda session: session.begin_nested(),
    "a savepoint by SQL": by_sql("SAVEPOINT mine"),
    "rows": unread,
    "a cursor": open_cursor,
    "a cursor with hold": by_sql("DECLARE mine CURSOR WITH HOLD FOR SELECT 1"),
    "a lock of the session": by_sql("SELECT pg_advisory_lock(4711)"),
    "a temporary table": by_sql("CREATE TEMPORARY TABLE IF NOT EXISTS mine (n int)"),
    "a search path": by_sql("SET search_path = public, pg_temp"),
    "a time zone": by_sql("SET TimeZone = 'Asia/Kathmandu'"),
    "another style of dates": by_sql("SET DateStyle = 'SQL, DMY'"),
}


# psycopg warns of a server-side cursor that is forgotten.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("left", LEFT)
def test_what_a_handler_leaves_behind_harms_nobody(bench: Bench, left: str, batch: int) -> None:
    """Its effect is kept, and the messages after it are handled once, on the same connection."""

    def leave(_: Message, session: Session) -> None:
        LEFT[left](session)

    consumer = bench.declare(but(2, leave), batch=batch)
    bench.send(1, 2, 3)
    bench.consume(consumer)
    bench.send(4)
    bench.consume(consumer)
    assert bench.statuses() == [("consumed", 1)] * 4
    assert bench.ledger() == ["1", "2", "3", "4"]


class OwnCursors(psycopg.Connection[Any]):
    """A connection whose cursors are of no class that it was told."""

    def cursor(self, *_: Any, **__: Any) -> Any:
        """Return a plain one."""
        return psycopg.Cursor(self)


def test_a_commit_by_sql_is_refused_whatever_makes_the_cursors(bench: Bench) -> None:
    """SQLAlchemy tells of its statements where the driver's cursors don't."""

    def commits(message: Message, session: Session) -> None:
        record(message, session)
        session.execute(text("COMMIT"))
        session.execute(text("BEGIN"))
        raise RuntimeError("ill")

    consumer = bench.declare(commits)
    bench.send(1)
    plain: Any = bench.consumer.url.set(drivername="postgresql").render_as_string(hide_password=False)
    with bench.another(creator=lambda: OwnCursors.connect(plain)) as (connection, source):
        bench.consume_on(consumer, connection, source)
    assert bench.ledger() == []
    assert bench.statuses() == [("failed", 1)]


@pytest.mark.parametrize("is_async", [False, True])
def test_what_is_written_after_a_rollback_is_undone(bench: Bench, is_async: bool) -> None:
    """By the driver, past the session that was rolled back: it isn't for the transaction of the next message."""
    late = "INSERT INTO ledger (body) VALUES ('late')"

    def rolled_back(_: Message, session: Session) -> None:
        driver: Any = session.connection().connection.driver_connection
        session.rollback()
        driver.execute(late)

    async def rolled_back_async(message: Message, session: AsyncSession) -> None:
        driver: Any = (await (await session.connection()).get_raw_connection()).driver_connection
        await session.run_sync(lambda sync: record(message, sync))
        if message.body == 2:
            await session.rollback()
            await driver.execute(late)

    consumer = bench.declare(rolled_back_async if is_async else but(2, rolled_back))
    bench.send(1, 2, 3)
    bench.consume(consumer)
    assert bench.statuses() == [("consumed", 1), ("failed", 1), ("consumed", 1)]
    assert bench.ledger() == ["1", "3"]


def test_a_session_is_of_no_use_after_its_message(bench: Bench) -> None:
    """What a handler does later with the session of an earlier message would go with another message's effect."""
    kept: list[Session] = []

    def handler(message: Message, session: Session) -> None:
        record(message, session)
        kept.append(session)
        if message.body == 2:
            record(message, kept[0])

    consumer = bench.declare(handler)
    ids = bench.send(1, 2, 3)
    bench.consume(consumer)
    assert bench.ledger() == ["1", "3"]
    assert UnboundExecutionError.__name__ in str(bench.inbox()[ids[1]].error)
    with pytest.raises(UnboundExecutionError):
        kept[-1].execute(text("SELECT 1"))


def test_an_async_session_is_of_no_use_after_its_message(bench: Bench) -> None:
    """A task that a handler leaves behind can't write into the transaction of a later message."""
    kept: list[AsyncSession] = []

    async def handler(message: Message, session: AsyncSession) -> None:
        await session.run_sync(lambda sync: record(message, sync))
        kept.append(session)
        if message.body == 2:
            await kept[0].execute(text("INSERT INTO ledger (body) VALUES ('late')"))

    consumer = bench.declare(handler)
    bench.send(1, 2, 3)

    bench.consume(consumer)
    assert bench.ledger() == ["1", "3"]
    assert bench.statuses() == [("consumed", 1), ("failed", 1), ("consumed", 1)]


# --- nothing reaches the next message ---------------------------------------------------------------------------------

#: What a session has besides its connection.
STATE = """
SELECT current_setting('search_path'), current_setting('role'), session_user::text, current_setting('TimeZone'),
       current_setting('default_transaction_read_only'), current_setting('work_mem'), current_setting('lock_timeout'),
       coalesce(current_setting('app.tenant', true), ''), coalesce(current_setting('app.user', true), ''),
       (SELECT count(*) FROM pg_class WHERE relpersistence = 't' AND relname LIKE 'mine%'),
       ARRAY(SELECT pg_listening_channels())::text, (SELECT count(*) FROM pg_prepared_statements WHERE from_sql),
       (SELECT count(*) FROM pg_cursors WHERE is_holdable),
       (SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = 4711 AND pid = pg_backend_pid())
"""

LEAVES = {
    "search_path": "SET search_path = pg_temp, public",
    "schema": "SET SCHEMA 'pg_temp'",
    "role": "SET ROLE writer",
    "session authorization": "SET SESSION AUTHORIZATION writer",
    "time zone": "SET TIME ZONE 'Asia/Kathmandu'",
    "read only": "SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY",
    "what was set at connect": "SET work_mem = '9MB'",
    "reset": "RESET work_mem",
    "set_config": "SELECT set_config('lock_timeout', '9s', false)",
    "own setting": "SET app.tenant = 'a'",
    "own setting by a function": "SELECT set_config('app.user', 'b', false)",
    "temporary table": "CREATE TEMP TABLE mine (n int)",
    "temporary table of a query": "SELECT 1 AS n INTO TEMPORARY mine2",
    "temporary view": "CREATE OR REPLACE TEMPORARY VIEW mine3 AS SELECT 1",
    "listen": "LISTEN news",
    "prepared": "PREPARE mine AS SELECT 1",
    "cursor": "DECLARE mine CURSOR WITH HOLD FOR SELECT 1",
    "lock": "SELECT pg_advisory_lock(4711)",
    "several": "SELECT 1; SET search_path = pg_catalog; LISTEN news",
}

#: What ends with the transaction.
LEAVES_NOTHING = [
    "SET LOCAL lock_timeout = '7s'",
    "SELECT set_config('lock_timeout', '7s', true)",
    "SET CONSTRAINTS ALL DEFERRED",
    "CREATE TEMP TABLE mine (n int) ON COMMIT DROP",
    "SELECT pg_advisory_xact_lock(4711)",
    "UPDATE ledger SET body = body WHERE body = 'set; reset'",
]


def _session(statements: list[str], seen: list[Any]) -> Callable[..., Any]:
    def handler(message: Message, session: Session) -> None:
        seen.append(tuple(session.execute(text(STATE)).one()))
        record(message, session)
        for each in statements if message.body == 2 else []:
            session.execute(text(each))

    return handler


def _cursor(statements: list[str], seen: list[Any]) -> Callable[..., Any]:
    def handler(message: Message, cursor: psycopg.Cursor) -> None:
        seen.append(cursor.execute(STATE).fetchone())
        cursor.execute("INSERT INTO ledger (body) VALUES (%s)", (str(message.body),))
        for each in statements if message.body == 2 else []:
            cursor.connection.execute(each)

    return handler


def _async_session(statements: list[str], seen: list[Any]) -> Callable[..., Any]:
    async def handler(message: Message, session: AsyncSession) -> None:
        seen.append(tuple((await session.execute(text(STATE))).one()))
        await session.run_sync(lambda sync: record(message, sync))
        for each in statements if message.body == 2 else []:
            await session.execute(text(each))

    return handler


def _async_cursor(statements: list[str], seen: list[Any]) -> Callable[..., Any]:
    async def handler(message: Message, cursor: psycopg.AsyncCursor) -> None:
        await cursor.execute(STATE)
        seen.append(await cursor.fetchone())
        await cursor.execute("INSERT INTO ledger (body) VALUES (%s)", (str(message.body),))
        for each in statements if message.body == 2 else []:
            await cursor.execute(each)

    return handler


HANDLERS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "session": (_session, {}),
    "cursor": (_cursor, {}),
    "pipeline": (_cursor, {"pipeline": True}),
    "async session": (_async_session, {}),
    "async cursor": (_async_cursor, {}),
    "async pipeline": (_async_cursor, {"pipeline": True}),
}


def _at_connect(driver: Any, _record: object) -> None:
    """Make settings as an application does, by SQL, in a listener of the engine."""
    cursor = driver.cursor()
    cursor.execute("SET work_mem = '5MB'")
    cursor.execute("SET search_path = public")
    cursor.close()
    driver.commit()


def _consume(bench: Bench, handler: Callable[..., Any], bodies: list[Any], **options: Any) -> None:
    """Have messages handled on one connection, made as the application makes them."""
    consumer = bench.declare(handler, **options)
    bench.send(*bodies)

    def passes(connection: Connection) -> None:
        bench.consume_on(consumer, connection, connection)

    async def on_loop() -> None:
        engine = create_async_engine(bench.consumer.url)
        event.listen(engine.sync_engine, "connect", _at_connect)
        async with engine.connect() as connection:
            await connection.run_sync(passes)
        await engine.dispose()

    if consumer.subscription.is_async:
        asyncio.run(on_loop())
        return
    event.listen(engine := create_engine(bench.consumer.url), "connect", _at_connect)
    with engine.connect() as connection:
        passes(connection)
    engine.dispose()


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("kind", HANDLERS)
def test_nothing_that_is_left_reaches_the_next_message(bench: Bench, kind: str, batch: int) -> None:
    """All at once, in one batch or not: the next message finds the session as the application has made it."""
    make, options = HANDLERS[kind]
    apart = {"role", "session authorization", "schema", "search_path", "several"}
    together = [each for name, each in LEAVES.items() if name not in apart]
    seen: list[Any] = []
    _consume(bench, make(together, seen), [1, 2, 3], batch=batch, **options)
    assert bench.ledger() == ["1", "2", "3"]
    assert seen[0] == seen[1] == seen[2]
    assert (seen[0][0], seen[0][5]) == ("public", "5MB")


@pytest.mark.parametrize("left", LEAVES)
def test_each_that_is_left(bench: Bench, left: str) -> None:
    """One by one: each is noticed by itself."""
    bench.run("DO $$ BEGIN CREATE ROLE writer; EXCEPTION WHEN duplicate_object THEN NULL; END $$")
    seen: list[Any] = []
    _consume(bench, _session([LEAVES[left]], seen), [1, 2, 3])
    assert bench.ledger() == ["1", "2", "3"]
    assert seen[0] == seen[1] == seen[2]


@pytest.mark.parametrize("kind", ["session", "cursor", "async cursor"])
def test_what_a_failure_leaves(bench: Bench, kind: str) -> None:
    """Locks of the session and prepared statements outlive a rollback; the next message doesn't meet them either."""
    make, options = HANDLERS[kind]
    seen: list[Any] = []
    statements = [LEAVES["lock"], LEAVES["prepared"], LEAVES["search_path"], "SELECT 1 / 0"]
    _consume(bench, make(statements, seen), [1, 2, 3], **options)
    assert bench.ledger() == ["1", "3"]
    assert seen[0] == seen[1] == seen[2]


@pytest.mark.parametrize("kind", HANDLERS)
def test_where_nothing_is_left_nothing_is_done(bench: Bench, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No round trip more: what ends with the transaction is left alone, and keeps its value until then."""
    tidied: list[object] = []
    monkeypatch.setattr(JoinedSession, "_tidy_up", tidied.append)
    make, options = HANDLERS[kind]
    seen: list[Any] = []
    _consume(bench, make(LEAVES_NOTHING, seen), [1, 2, 3], **options)
    assert (bench.ledger(), tidied) == (["1", "2", "3"], [])
    assert seen[0] == seen[1] == seen[2]


def test_what_is_set_for_the_transaction_stays_in_it(bench: Bench) -> None:
    """Beside a setting that is taken back, one that was made for the transaction doesn't become one of the session."""
    seen: list[Any] = []
    statements = ["SET LOCAL lock_timeout = '7s'", "SET search_path = pg_catalog", "SET LOCAL work_mem = '7MB'"]
    _consume(bench, _session(statements, seen), [1, 2, 3])
    assert seen[0] == seen[1] == seen[2]


@pytest.mark.parametrize("batch", [1, 3])
def test_options_of_a_handler_are_not_those_of_the_next(bench: Bench, batch: int) -> None:
    """What a handler sets for the statements of its connection, such as another schema, ends with its message."""
    seen: list[Any] = []

    def handler(message: Message, session: Session) -> None:
        connection = session.connection()
        driver: Any = connection.connection.driver_connection
        seen.append((connection.get_execution_options().get("schema_translate_map"), driver.prepare_threshold))
        if message.body == 1:
            session.connection(execution_options={"schema_translate_map": {None: "tenant"}})
            driver.prepare_threshold = 0

    _consume(bench, handler, [1, 2, 3], batch=batch)
    assert seen[0] == seen[1] == seen[2]


@pytest.mark.parametrize(
    "statement",
    [
        "DO $$ BEGIN SET lock_timeout = '7s'; END $$",
        "UPDATE pg_settings SET setting = '7000' WHERE name = 'lock_timeout'",
        "-- mine\rSET lock_timeout = '7s'",
        "SELECT set_config('search_path', ' , true )', false)",
    ],
)
def test_settings_by_another_way(bench: Bench, statement: str) -> None:
    """A setting is taken back, however it was made."""
    seen: list[Any] = []
    _consume(bench, _cursor([statement], seen), [1, 2, 3])
    assert seen[0] == seen[1] == seen[2]
