"""What can't work is refused with an error that names the thing and the mend, before anything is written."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, create_engine, event, insert, text
from sqlalchemy.exc import ResourceClosedError
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from outbox import Outbox, OutboxError, Settings
from outbox.embedded import ServerLike
from outbox.errors import InvalidMessage, InvalidSettings, SchemaMissing, TransactionRequired
from tests.producer.bank import Account, accounts, change, changes, halves, messages
from tests.producer.conftest import at_the_commit


@pytest.mark.parametrize("way", ["engine option", "connection option", "session option"])
@pytest.mark.parametrize("carrier", ["session", "connection"])
def test_autocommit(way: str, carrier: str, engine: Engine, outbox: Outbox) -> None:
    """AUTOCOMMIT is refused, however it was chosen: no message is written, and no pending object is flushed."""
    own = create_engine(engine.url, isolation_level="AUTOCOMMIT") if way == "engine option" else engine
    option: dict[str, Any] = {} if way == "engine option" else {"isolation_level": "AUTOCOMMIT"}
    if carrier == "connection":
        with own.connect().execution_options(**option) as connection:
            with pytest.raises(TransactionRequired, match="AUTOCOMMIT mode"):
                outbox.send(connection, "t", {"number": 1})
            connection.rollback()
    else:
        with Session(own) as session:
            if way == "connection option":
                session.connection(execution_options=option)
            elif way == "session option":
                session = Session(own.execution_options(**option))  # noqa: PLW2901
            with session:
                session.add(Account(id=1, owner="one"))
                # A session with a connection tells at once, another one at its commit.
                with pytest.raises(TransactionRequired, match="AUTOCOMMIT mode"):
                    outbox.send(session, "t", {"number": 1})
                    assert way != "connection option"
                    session.commit()
    if own is not engine:
        own.dispose()
    assert (accounts(engine), halves(engine)) == (set(), [])


def test_autocommit_elsewhere_is_none_of_our_business(engine: Engine, outbox: Outbox) -> None:
    """An AUTOCOMMIT connection with which nothing is sent commits as ever, also when a session joins it."""
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        with Session(connection) as session:
            session.add(Account(id=1, owner="one"))
            session.commit()
        connection.commit()
    assert accounts(engine) == {1}


def test_engine_of_another_database_system(outbox: Outbox) -> None:
    """An engine that isn't PostgreSQL is refused when the Outbox is made, with the URL that works."""
    with pytest.raises(InvalidSettings, match=r"not sqlite.*postgresql\+psycopg://"):
        Outbox(create_engine("sqlite://"), settings=Settings())


@pytest.mark.parametrize("carrier", [Session, Engine.connect])
def test_carrier_of_another_database_system(carrier: Any, outbox: Outbox) -> None:
    """A session or connection that isn't PostgreSQL's is refused by the send itself; the transaction goes on."""
    sqlite = create_engine("sqlite://")
    change.create(sqlite)
    with carrier(sqlite) as opened:
        opened.execute(insert(change).values(number=1))
        with pytest.raises(InvalidSettings, match=r"not sqlite.*postgresql\+psycopg://"):
            outbox.send(opened, "t", {"number": 1})
        opened.commit()
    assert changes(sqlite) == {1}
    sqlite.dispose()


@pytest.mark.parametrize("schema", ["outbox", "elsewhere"])
def test_database_without_the_tables(schema: str, server: ServerLike) -> None:
    """Without the tables the commit fails with the name of the database and the command; no password, no change."""
    name = f"bare_{schema}"
    server.create_database(name)
    engine = create_engine(server.url(name))
    change.create(engine)
    outbox = Outbox(engine, settings=Settings(schema=schema))
    with Session(engine) as session:
        session.execute(insert(change).values(number=1))
        outbox.send(session, "t", {"number": 1})
        with pytest.raises(SchemaMissing) as error:
            session.commit()
        session.rollback()
        session.execute(insert(change).values(number=2))
        session.commit()
    said = str(error.value)
    assert repr(name) in said
    assert "outbox db upgrade --url postgresql+psycopg://" in said
    assert ("--schema elsewhere" in said) == (schema == "elsewhere")
    assert "***" in said
    assert engine.url.password
    assert engine.url.password not in said
    assert changes(engine) == {2}
    engine.dispose()
    server.drop_database(name)


def test_error_of_the_users_own_tables_keeps_its_name(engine: Engine, outbox: Outbox) -> None:
    """A user's deferred trigger that misses a table of its own isn't reported as missing outbox tables."""
    missed = pytest.raises(Exception, match="audit_of_mine")
    with at_the_commit(engine, "INSERT INTO audit_of_mine VALUES (1);"), missed as error, engine.begin() as connection:
        connection.execute(insert(change).values(number=1))
        outbox.send(connection, "t", {"number": 1})
    assert not isinstance(error.value, OutboxError)
    assert (changes(engine), halves(engine)) == (set(), [])


@pytest.mark.parametrize("carrier", [None, 1, "session", object(), Session, sessionmaker()])
def test_neither_session_nor_connection(carrier: Any, outbox: Outbox) -> None:
    """Anything else than a session or a connection is refused by name."""
    with pytest.raises(OutboxError, match="Connection or AsyncConnection of SQLAlchemy, or a connection of"):
        outbox.send(carrier, "t", {})


def test_engine_instead_of_a_connection(engine: Engine, outbox: Outbox) -> None:
    """An engine is no transaction."""
    with pytest.raises(InvalidMessage, match="Engine"):
        outbox.send(engine, "t", {})  # type: ignore[call-overload]


async def test_async_connection_before_it_is_connected(url: str) -> None:
    """An AsyncConnection that wasn't awaited yet can't carry anything, and the error says what to write."""
    engine = create_async_engine(url)
    outbox = Outbox(engine, settings=Settings())
    connection = engine.connect()
    with pytest.raises(TransactionRequired, match="async with"):
        outbox.send(connection, "t", {})
    await engine.dispose()


def test_closed_connection(engine: Engine, outbox: Outbox) -> None:
    """A closed connection is refused like any statement on it."""
    with engine.connect() as connection:
        pass
    with pytest.raises(ResourceClosedError):
        outbox.send(connection, "t", {})


@pytest.mark.parametrize(
    "bind",
    ["postgresql+psycopg://h/d", sessionmaker(), async_sessionmaker(), object()],
    ids=lambda bind: type(bind).__name__,
)
def test_bind_that_is_none(bind: Any) -> None:
    """An Outbox is made on an engine or a session factory with an engine, and says so."""
    with pytest.raises(InvalidSettings, match=r"[eE]ngine"):
        Outbox(bind, settings=Settings())


@pytest.mark.parametrize("group", ["", "a b", "x" * 121, "g\n", None, 1])
def test_producer_group_that_is_no_name(group: Any, engine: Engine) -> None:
    """The producer group must be a name."""
    with pytest.raises(InvalidMessage, match="group"):
        Outbox(engine, group=group, settings=Settings())


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "empty topic": ({"topic": ""}, "topic is empty"),
    "topic with a space": ({"topic": "a b"}, "topic 'a b' may only have"),
    "system topic": ({"topic": "%RETRY%x"}, "topic '%RETRY%x' is a system name"),
    "unencodable body": ({"body": object()}, "object can't be encoded as JSON"),
    "too big": ({"body": "x" * 101}, "101 bytes; at most 100"),
    "key too long": ({"key": "ä" * 128}, "256 bytes; at most 255"),
    "key with NUL": ({"key": "\0"}, "key has a NUL"),
    "key that is a number": ({"key": 7}, "key must be a str, not int: 7"),
    "tag with NUL": ({"tag": "\0"}, "tag has a NUL"),
    "header that isn't text": ({"headers": {"a": 1}}, "header 'a' must be text, not int: 1"),
    "headers that aren't a mapping": ({"headers": ["a"]}, "headers must be a mapping .*not list"),
    "naive datetime": ({"deliver_at": __import__("datetime").datetime(2030, 1, 1)}, "has no time zone"),
    "negative delay": ({"delay": -1}, "delay -1 must be"),
    "unknown level": ({"delay_level": 0}, "delay_level 0 is unknown; levels are 1 to 18"),
    "id that is the text of one": (
        {"id": str(uuid.uuid4())},
        "is the text of a UUID, which would stand for another id",
    ),
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("call", ["send", "prepare"])
def test_bad_message_changes_nothing(bad: str, call: str, engine: Engine) -> None:
    """A message that can't be stored is refused by the call itself; the transaction it didn't join goes on."""
    outbox = Outbox(engine, settings=Settings(max_body_bytes=100))
    changed, said = BAD[bad]
    arguments = {"topic": "t", "body": {}} | changed
    with Session(engine) as session:
        with pytest.raises(InvalidMessage, match=said):
            getattr(outbox, call)(session, arguments.pop("topic"), arguments.pop("body"), **arguments)
        assert not session.in_transaction()
        outbox.send(session, "t", {"number": 1})
        session.commit()
    assert messages(engine) == [1]


@pytest.mark.parametrize("immunity", [-1, float("nan"), float("inf"), True, "6", "29*1000", 1e300])
def test_immunity_that_is_none(immunity: Any, engine: Engine, outbox: Outbox) -> None:
    """An immunity time must be a length of time that PostgreSQL can add."""
    with Session(engine) as session, pytest.raises(InvalidMessage, match="immunity"):
        outbox.prepare(session, "t", {}, immunity=immunity)


def test_a_send_in_a_commit_listener(engine: Engine) -> None:
    """A listener that sends when the COMMIT is out is refused; one whose turn comes before is heard. None is lost."""
    own = create_engine(engine.url)
    late: list[int] = []

    @event.listens_for(own, "commit")
    def before(connection: Connection) -> None:
        outbox.send(connection, "t", {"number": 3})

    outbox = Outbox(own)

    @event.listens_for(own, "commit")
    def after(connection: Connection) -> None:
        if late:
            outbox.send(connection, "t", {"number": late.pop()})

    late.append(4)
    with pytest.raises(TransactionRequired, match="takes no more"), own.begin() as connection:
        outbox.send(connection, "t", {"number": 1})
    with own.begin() as connection:
        outbox.send(connection, "t", {"number": 2})
    own.dispose()
    assert messages(engine)[-2:] == [2, 3]
    assert 4 not in messages(engine)


@pytest.mark.parametrize("carrier", ["session", "connection"])
def test_too_much_for_one_transaction(carrier: str, engine: Engine) -> None:
    """The bodies of a transaction have a limit: the send that passes it is refused, whatever savepoints have undone."""
    outbox = Outbox(engine, settings=Settings(max_body_bytes=100, max_transaction_bytes=250))
    with Session(engine) if carrier == "session" else engine.connect() as opened:
        outbox.send(opened, "t", b"x" * 100)
        for _ in range(3):
            undone = opened.begin_nested()
            outbox.send(opened, "t", b"y" * 100)
            undone.rollback()
        outbox.prepare(opened, "t", b"x" * 100)
        with pytest.raises(InvalidMessage, match=r"300 bytes; at most 250.*max_transaction_bytes"):
            outbox.send(opened, "t", b"z" * 100)
        outbox.send(opened, "t", b"x" * 50)
        opened.commit()
        outbox.send(opened, "t", b"x" * 100)
        opened.rollback()
    with pytest.raises(InvalidSettings, match="max_transaction_bytes"):
        Settings(max_transaction_bytes=100)
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT count(*) FROM outbox.half_message")) == 3
