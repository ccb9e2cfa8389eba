"""The transaction of a decorated function is the decorator's: the function and its helpers can't end it by themselves.

Where one did, its change was kept and its message lost; or the half of a change that is there was rolled back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import psycopg
import pytest
from psycopg import sql
from sqlalchemy import Engine, create_engine, insert, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

from outbox import INJECTED, Outbox, Settings
from outbox.database.session import effects_of
from outbox.errors import TransactionRequired
from tests.producer.bank import Account, change, changes, halves, idle_in_transaction, messages, settle
from tests.producer.caller import Declined

# SQLAlchemy's, of a session whose connection was rolled back without it.
pytestmark = pytest.mark.filterwarnings("ignore:transaction already deassociated")

#: The drivers, each by its URL, and whether it is async.
DRIVERS = {"psycopg": False, "psycopg async": True, "psycopg2": False, "asyncpg": True}


@dataclass
class Town:
    """An Outbox on an engine of one driver."""

    outbox: Outbox
    bind: Any
    is_async: bool

    def decorated(self, decorator: str, body: Callable[[Any, int], Any], **options: Any) -> Callable[..., Any]:
        """Return a function that writes a number, does ``body`` and sends the number; called without an await."""
        decorate: Any = getattr(self.outbox, decorator)(topic="t", **options)
        if not self.is_async:

            @decorate  # type: ignore[untyped-decorator]
            def pay(number: int, session: Session = INJECTED) -> dict[str, int]:
                session.execute(insert(change).values(number=number))
                body(session, number)
                return {"number": number}

            return pay  # type: ignore[no-any-return]

        @decorate  # type: ignore[untyped-decorator]
        async def pay_async(number: int, session: AsyncSession = INJECTED) -> dict[str, int]:
            await session.execute(insert(change).values(number=number))
            await settle(body(session, number))
            return {"number": number}

        return lambda *args: self.run(pay_async(*args))

    @staticmethod
    def run(awaitable: Any) -> Any:
        """Wait for what an async function returns."""
        return asyncio.run(_closing(awaitable))


async def _closing(awaitable: Any) -> Any:
    return await awaitable


def town_of(url: str, driver: str) -> Town:
    """Return an Outbox on an engine of a driver."""
    is_async = DRIVERS[driver]
    called = make_url(url).set(drivername=f"postgresql+{driver.partition(' ')[0]}")
    make: Any = create_async_engine if is_async else create_engine
    bind = make(called, poolclass=NullPool)
    return Town(Outbox(bind, settings=Settings()), bind, is_async)


@pytest.fixture(params=["psycopg", "psycopg async"])
def town(request: pytest.FixtureRequest, url: str) -> Iterator[Town]:
    """Sync and async functions, through psycopg 3."""
    yield town_of(url, request.param)


def by_sql(*statements: str) -> Callable[[Any, int], Any]:
    """Return an act that executes statements with the session."""

    async def act_async(session: Any) -> None:
        for each in statements:
            await session.execute(text(each))

    def act(session: Any, _: int) -> Any:
        if isinstance(session, AsyncSession):
            return act_async(session)
        for each in statements:
            session.execute(text(each))
        return None

    return act


async def _of_connection(session: Any, act: Callable[[Any], Any]) -> None:
    await settle(act(await session.connection()))


def by_connection(act: Callable[[Any], Any]) -> Callable[[Any, int], Any]:
    """Return an act with the session's connection."""

    def run(session: Any, _: int) -> Any:
        if isinstance(session, AsyncSession):
            return _of_connection(session, act)
        return act(session.connection())

    return run


def driver_of(connection: Any) -> Any:
    """Return the connection of the driver under one of SQLAlchemy's."""
    return getattr(connection, "sync_connection", connection).connection.driver_connection


def _in_driver_transaction(connection: Any) -> Any:
    async def nested_async() -> None:
        async with driver_of(connection).transaction(force_rollback=True):
            await driver_of(connection).execute("INSERT INTO change VALUES (-1)")

    if hasattr(connection, "sync_connection"):
        return nested_async()
    with driver_of(connection).transaction(force_rollback=True):
        driver_of(connection).execute("INSERT INTO change VALUES (-1)")
    return None


def by_driver(method: str, *arguments: Any) -> Callable[[Any, int], Any]:
    """Return an act that calls a method of the driver's connection."""
    return by_connection(lambda connection: getattr(driver_of(connection), method)(*arguments))


def by_adapter(method: str) -> Callable[[Any, int], Any]:
    """Return an act that calls a method of what the pool gives, which is the driver's or SQLAlchemy's around it."""
    return by_connection(
        lambda connection: (
            connection.run_sync(lambda sync: getattr(sync.connection, method)())
            if hasattr(connection, "run_sync")
            else getattr(connection.connection, method)()
        )
    )


def by_cursor(query: Any) -> Callable[[Any, int], Any]:
    """Return an act that executes a statement with a cursor of the driver's."""
    return by_connection(lambda connection: driver_of(connection).cursor().execute(query))


#: What ends the transaction, and what the error calls it.
ENDS: dict[str, tuple[Callable[[Any, int], Any], str]] = {
    "session.commit()": (lambda session, _: session.commit(), r"session\.commit\(\)"),
    "session.rollback()": (lambda session, _: session.rollback(), "a rollback, commit or close"),
    "session.close()": (lambda session, _: session.close(), "a rollback, commit or close"),
    "connection.commit()": (by_connection(lambda connection: connection.commit()), r"connection\.commit\(\)"),
    "connection.rollback()": (by_connection(lambda connection: connection.rollback()), "a rollback, commit or close"),
    "driver commit": (by_driver("commit"), r"commit\(\) of the driver's connection"),
    "driver rollback": (by_driver("rollback"), r"rollback\(\) of the driver's connection"),
    "driver execute": (by_driver("execute", "COMMIT"), "COMMIT"),
    "adapter commit": (by_adapter("commit"), r"commit\(\) of the driver's connection"),
    "cursor": (by_cursor("COMMIT"), "COMMIT"),
    "cursor, bytes": (by_cursor(b"-- done\nend"), "END"),
    "cursor, composed": (by_cursor(sql.SQL("SELECT {}; COMMIT").format(1)), "COMMIT"),
    "SQL COMMIT": (by_sql("COMMIT"), "COMMIT"),
    "SQL END": (by_sql("end transaction"), "END"),
    "SQL COMMIT AND CHAIN": (by_sql("COMMIT AND CHAIN"), "COMMIT"),
    "SQL ROLLBACK": (by_sql("ROLLBACK", "BEGIN"), "ROLLBACK"),
    "SQL ROLLBACK AND CHAIN": (by_sql("ROLLBACK AND CHAIN"), "ROLLBACK"),
    "SQL ABORT": (by_sql("ABORT"), "ABORT"),
    "SQL PREPARE TRANSACTION": (by_sql("PREPARE TRANSACTION 'mine'"), "PREPARE TRANSACTION"),
    "SQL of several statements": (by_sql("SELECT 1; /* now */ COMMIT; BEGIN"), "COMMIT"),
}


@pytest.mark.parametrize("decorator", ["transactional", "two_phase"])
@pytest.mark.parametrize("end", ENDS)
def test_a_decorated_function_cannot_end_its_transaction(town: Town, engine: Engine, end: str, decorator: str) -> None:
    """Nothing is committed; the error names call, function and mend; a half stays undecided; the next call works."""
    act, named = ENDS[end]
    pay = town.decorated(decorator, lambda session, number: act(session, number) if number == 1 else None)
    with pytest.raises(TransactionRequired, match=f"{named}.* inside .*pay.*@{decorator}.*Remove the call"):
        pay(1)
    assert (changes(engine), messages(engine), idle_in_transaction(engine)) == (set(), [], 0)
    assert [half.resolution for half in halves(engine)] == [None] * (decorator == "two_phase")
    pay(2)
    assert (changes(engine), messages(engine)) == ({2}, [2])


@pytest.mark.parametrize("driver", ["psycopg2", "asyncpg"])
@pytest.mark.parametrize(
    "end", ["session.commit()", "connection.commit()", "session.rollback()", "SQL COMMIT", "SQL END"]
)
def test_other_drivers(url: str, engine: Engine, driver: str, end: str) -> None:
    """The same through the drivers that only send."""
    act, named = ENDS[end]
    for decorator in ("transactional", "two_phase"):
        with pytest.raises(TransactionRequired, match=named):
            town_of(url, driver).decorated(decorator, act)(1)
    assert (changes(engine), messages(engine)) == (set(), [])


def test_a_driver_that_tells_nobody(url: str, engine: Engine) -> None:
    """What ends through psycopg2's own connection is found out when the function returns: no success, no message."""
    for decorator in ("transactional", "two_phase"):
        with pytest.raises(TransactionRequired, match="a rollback, commit or close"):
            town_of(url, "psycopg2").decorated(decorator, by_driver("rollback"))(1)
    assert (changes(engine), messages(engine)) == (set(), [])


@pytest.mark.parametrize("end", ["session.commit()", "connection.commit()", "driver commit", "SQL COMMIT"])
@pytest.mark.parametrize("begun", [False, True])
def test_a_joined_session(outbox: Outbox, engine: Engine, end: str, begun: bool) -> None:
    """A function that works in its caller's transaction can't commit that either; the caller decides, and goes on."""
    act, named = ENDS[end]
    pay = Town(outbox, engine, False).decorated("transactional", act)
    with Session(engine) as session:
        if begun:
            session.execute(insert(change).values(number=7))
        with pytest.raises(TransactionRequired, match=named):
            pay(1, session)
        session.rollback()
        session.execute(insert(change).values(number=8))
        session.commit()
    bound = partial(Session, join_transaction_mode="create_savepoint")
    with engine.connect() as connection, bound(connection) as session, pytest.raises(TransactionRequired, match=named):
        pay(1, session)
    assert (changes(engine), messages(engine)) == ({8}, [])


def test_a_block_of_the_functions_own_is_refused_at_its_end(outbox: Outbox, engine: Engine) -> None:
    """`with session.begin()` in a function that joined a session which had begun nothing would commit it too early."""

    @outbox.transactional(topic="t")
    def pay(number: int, session: Session = INJECTED) -> dict[str, int]:
        with session.begin():
            session.execute(insert(change).values(number=number))
        return {"number": number}

    with Session(engine) as session, pytest.raises(TransactionRequired, match=r"session\.commit"):
        pay(1, session)
    assert (changes(engine), messages(engine)) == (set(), [])


def test_nested_functions_name_the_one_that_ended_it(outbox: Outbox, engine: Engine) -> None:
    """The innermost function is named; after it the outer one is held again."""
    first = True

    @outbox.transactional(topic="t")
    def inner(number: int, session: Session = INJECTED) -> None:
        session.execute(insert(change).values(number=number))
        if first:
            session.commit()

    @outbox.transactional(topic="t")
    def outer(number: int, session: Session = INJECTED) -> None:
        inner(number)
        session.connection().connection.commit()

    with pytest.raises(TransactionRequired, match=r"inside .*inner:"):
        outer(1)
    first = False
    with pytest.raises(TransactionRequired, match=r"inside .*outer:"):
        outer(1)
    assert (changes(engine), messages(engine)) == (set(), [])


def test_savepoints_stay_allowed(town: Town, engine: Engine) -> None:
    """By SQLAlchemy, in SQL, and by the driver: what is undone is gone, and the rest goes with the message."""
    undone = (
        "SAVEPOINT a",
        "INSERT INTO change VALUES (-1)",
        "ROLLBACK TO SAVEPOINT a",
        "ROLLBACK WORK TO a",
        "RELEASE a",
        "SELECT CASE WHEN true THEN 'COMMIT; COMMIT' END",
        "DO $$ BEGIN PERFORM 1; END $$; SELECT 'it''s; ROLLBACK' -- ; COMMIT",
    )
    acts = [by_sql(*undone), lambda session, _: _nested(session), by_connection(_in_driver_transaction)]
    for number, act in enumerate(acts, 1):
        town.decorated("transactional", act)(number)
    assert (changes(engine), messages(engine)) == ({1, 2, 3}, [1, 2, 3])


def _nested(session: Any) -> Any:
    async def nested_async() -> None:
        async with session.begin_nested() as undone:
            await session.execute(insert(change).values(number=-1))
            await undone.rollback()
        async with session.begin_nested():
            pass

    if isinstance(session, AsyncSession):
        return nested_async()
    with session.begin_nested() as undone:
        session.execute(insert(change).values(number=-1))
        undone.rollback()
    with session.begin_nested():
        pass
    return None


def test_the_first_statement_cannot_begin_one_of_the_drivers_own(outbox: Outbox, engine: Engine) -> None:
    """A block of psycopg's that comes before any statement would commit at its end."""

    @outbox.transactional(topic="t")
    def pay(number: int, session: Session = INJECTED) -> dict[str, int]:
        driver: Any = session.connection().connection.driver_connection
        with driver.transaction():
            driver.execute("INSERT INTO change VALUES (1)")
        return {"number": number}

    with pytest.raises(TransactionRequired, match=r"transaction\(\)"):
        pay(1)
    assert (changes(engine), messages(engine)) == (set(), [])


def test_an_autocommit_session_is_refused_before_its_first_statement(outbox: Outbox, engine: Engine) -> None:
    """Where the driver would commit each statement by itself, none is run."""

    @outbox.transactional(topic="t")
    def pay(number: int, session: Session = INJECTED) -> dict[str, int]:
        session.connection(execution_options={"isolation_level": "AUTOCOMMIT"})
        session.execute(insert(change).values(number=number))
        return {"number": number}

    with pytest.raises(TransactionRequired, match="AUTOCOMMIT"):
        pay(1)
    assert (changes(engine), messages(engine)) == (set(), [])


@pytest.mark.parametrize("decorator", ["transactional", "two_phase"])
def test_an_exception_of_the_functions_own_wins(outbox: Outbox, engine: Engine, decorator: str) -> None:
    """`except: rollback; raise` works as ever: the caller gets the error, and a half its decision."""
    options: Any = {"rollback_on": (Declined,)} if decorator == "two_phase" else {}

    def body(session: Session, _: int) -> None:
        try:
            raise Declined
        except Declined:
            session.rollback()
            raise

    with pytest.raises(Declined):
        Town(outbox, engine, False).decorated(decorator, body, **options)(1)
    assert (changes(engine), [half.resolution for half in halves(engine)]) == (set(), ["rollback"] * len(options))


def test_a_flush_that_failed_is_told_as_it_was(outbox: Outbox, engine: Engine) -> None:
    """SQLAlchemy's own rollback after a failed flush isn't mistaken for the function's."""

    def body(session: Session, number: int) -> None:
        session.add_all([Account(id=1, owner="x"), Account(id=2, owner="x")])
        session.flush()

    with pytest.raises(IntegrityError):
        Town(outbox, engine, False).decorated("transactional", body)(1)
    swallowing = Town(outbox, engine, False).decorated("transactional", partial(_swallowing, body))
    with pytest.raises(TransactionRequired):
        swallowing(1)
    assert (changes(engine), messages(engine)) == (set(), [])


def _swallowing(body: Callable[..., None], session: Session, number: int) -> None:
    try:
        body(session, number)
    except IntegrityError:
        session.rollback()


def test_connections_are_as_before_when_they_go_back(outbox: Outbox, engine: Engine) -> None:
    """What holds a transaction is gone from the driver's connection after the call, however that ended."""
    for act in (lambda *_: None, ENDS["session.commit()"][0], ENDS["connection.rollback()"][0], _crash):
        with suppress(TransactionRequired, ZeroDivisionError):
            Town(outbox, engine, False).decorated("transactional", act)(1)
        with engine.connect() as connection:
            driver: Any = connection.connection.driver_connection
            assert not {"commit", "rollback", "transaction", "outbox_hold"} & vars(driver).keys()
            assert driver.cursor_factory is psycopg.Cursor
            driver.execute("DELETE FROM change")
            driver.commit()


def test_a_connection_that_was_rolled_back_is_held_no_more(outbox: Outbox, engine: Engine) -> None:
    """It is in its pool again, and others may have it: also for what they commit while the function still runs."""
    lone = create_engine(engine.url, pool_size=1, max_overflow=0, pool_timeout=5)
    town = Town(Outbox(lone), lone, False)

    def others(number: int) -> None:
        with lone.begin() as connection:
            connection.execute(insert(change).values(number=number))

    def inner(session: Session, number: int) -> None:
        session.rollback()
        others(number + 1)

    def outer(session: Session, number: int) -> None:
        session.rollback()
        with pytest.raises(TransactionRequired):
            town.decorated("transactional", inner, joins=False)(10)
        others(number + 1)

    with pytest.raises(TransactionRequired):
        town.decorated("transactional", outer)(1)
    assert changes(engine) == {2, 11}
    with lone.connect() as connection:
        driver: Any = connection.connection.driver_connection
        assert (driver.cursor_factory, "outbox_hold" in vars(driver)) == (psycopg.Cursor, False)
    lone.dispose()


class _Traced:
    """What tools that trace put before psycopg's connection: it says that it is one, and its cursors are of its own."""

    def __init__(self, traced: Any) -> None:
        object.__setattr__(self, "_traced", traced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._traced, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._traced, name, value)

    @property  # type: ignore[misc] # what a proxy is
    def __class__(self) -> Any:
        return type(self._traced)

    @property
    def __dict__(self) -> Any:  # type: ignore[override] # what a proxy is
        return vars(self._traced)

    def cursor(self, *args: Any, **options: Any) -> Any:
        return self._traced.cursor(*args, **options)


@pytest.mark.parametrize("act", ["COMMIT", "driver"])
def test_connections_that_are_traced(engine: Engine, act: str) -> None:
    """A function runs on them, and can't end its transaction."""
    plain: Any = engine.url.set(drivername="postgresql").render_as_string(hide_password=False)
    traced = create_engine(engine.url, creator=lambda: _Traced(psycopg.connect(plain)))
    town = Town(Outbox(traced), traced, False)

    def ends(session: Session, _: int) -> None:
        if act == "COMMIT":
            session.execute(text("COMMIT"))
        cast("Any", session.connection().connection.driver_connection).commit()

    with pytest.raises(TransactionRequired):
        town.decorated("transactional", ends)(1)
    assert (changes(engine), messages(engine)) == (set(), [])
    town.decorated("transactional", lambda *_: None)(2)
    assert (changes(engine), len(messages(engine))) == ({2}, 1)
    traced.dispose()


def _crash(session: Session, _: int) -> None:
    session.rollback()
    raise ZeroDivisionError


@pytest.mark.parametrize(
    ("statements", "ending"),
    [
        ("INSERT INTO a VALUES ('COMMIT;')", None),
        ("  /* a ; b */ commit", "COMMIT"),
        ("SELECT $q$; COMMIT $q$", None),
        ("SELECT E'it\\'s; COMMIT'; ROLLBACK", "ROLLBACK"),
        ('SELECT 1 AS "x; COMMIT"', None),
        ("ROLLBACK TO a; rollback transaction", "ROLLBACK"),
        ("rollback transaction to savepoint a", None),
        ("PREPARE a AS SELECT 1", None),
        ("ENDPOINT", None),
        ("CREATE FUNCTION f() RETURNS int BEGIN ATOMIC SELECT 1; END; COMMIT", "COMMIT"),
        ("CREATE FUNCTION f() RETURNS int BEGIN ATOMIC SELECT 1; END", None),
        ("CREATE FUNCTION f() RETURNS int BEGIN ATOMIC SELECT 1; END; COMMIT; SELECT 1 AS end", "COMMIT"),
        ("-- a comment ends with its line\rCOMMIT", "COMMIT"),
        ("SELECT 1 /* a /* nested ' */ comment */ ; COMMIT; SELECT 'x'", "COMMIT"),
        ("SELECT 1 AS a$$; COMMIT; SELECT 1 AS b$$", "COMMIT"),
    ],
)
def test_what_ends_a_transaction(statements: str, ending: str | None) -> None:
    """Commands are told from texts, names, comments and bodies of functions."""
    assert effects_of(statements)[0] == ending
