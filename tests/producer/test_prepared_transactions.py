"""Two-phase transactions of the database itself (PREPARE TRANSACTION): the half messages are inside."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import Connection, Engine, create_engine, event, insert, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from outbox import Outbox, Settings
from outbox.errors import TransactionRequired
from outbox.message.model import uuid7
from tests.producer.bank import change, changes, idle_in_transaction, messages


@pytest.fixture(autouse=True)
def nothing_stays_prepared(engine: Engine) -> Iterator[None]:
    """Roll back what a failed test left prepared, so that it fails alone."""
    yield
    with engine.connect() as connection:
        connection.execution_options(isolation_level="AUTOCOMMIT")
        left = prepared(connection)
        for name in left:
            connection.exec_driver_sql(f"ROLLBACK PREPARED '{name}'")
    assert left == []


def prepared(connection: Connection) -> list[str]:
    """Return the transactions that are prepared in this database."""
    return list(connection.scalars(text("SELECT gid FROM pg_prepared_xacts WHERE database = current_database()")))


def work(session: Session, outbox: Outbox, number: int) -> None:
    """Make a change and send its message."""
    session.execute(insert(change).values(number=number))
    outbox.send(session, "t", {"number": number})


def test_session_commits_in_two_phases(engine: Engine, outbox: Outbox) -> None:
    """A session with `twophase=True` has its messages in the prepared transaction; COMMIT PREPARED shows them."""
    between = []

    def before_second_phase(connection: Connection, xid: str, is_prepared: bool) -> None:
        between.append((is_prepared, messages(engine)))

    event.listen(engine, "commit_twophase", before_second_phase)
    with Session(engine, twophase=True) as session:
        for number in (1, 2):
            work(session, outbox, number)
            session.commit()
    assert between == [(True, []), (True, [1])]
    assert (changes(engine), messages(engine)) == ({1, 2}, [1, 2])


def test_session_rolled_back_after_prepare(engine: Engine, outbox: Outbox) -> None:
    """A prepared transaction that is rolled back takes its messages along."""
    with Session(engine, twophase=True) as session:
        work(session, outbox, 1)
        session.prepare()
        with pytest.raises(TransactionRequired, match="prepared"):
            outbox.send(session, "t", {"number": 2})
        session.rollback()
        work(session, outbox, 3)
        session.rollback()
        work(session, outbox, 4)
        session.prepare()
        session.commit()
    assert (changes(engine), messages(engine)) == ({4}, [4])


def test_connection_prepares_and_commits(engine: Engine, outbox: Outbox) -> None:
    """A connection's two-phase transaction holds its messages, refuses later ones, and taints none that follow."""
    with engine.connect() as connection:
        transaction = connection.begin_twophase()
        connection.execute(insert(change).values(number=1))
        outbox.send(connection, "t", {"number": 1})
        transaction.prepare()
        with pytest.raises(TransactionRequired, match="is prepared"):
            outbox.send(connection, "t", {"number": 2})
        transaction.commit()
        outbox.send(connection, "t", {"number": 3})
        connection.rollback()
        outbox.send(connection, "t", {"number": 4})
        connection.commit()
    assert (changes(engine), messages(engine)) == ({1}, [1, 4])


def test_connection_commits_without_preparing(engine: Engine, outbox: Outbox) -> None:
    """A two-phase transaction that is committed in one phase writes its messages with that."""
    with engine.connect() as connection:
        transaction = connection.begin_twophase()
        connection.execute(insert(change).values(number=1))
        outbox.send(connection, "t", {"number": 1})
        transaction.commit()
        assert messages(engine) == [1]
        outbox.send(connection, "t", {"number": 2})
        connection.commit()
    assert (changes(engine), messages(engine)) == ({1}, [1, 2])


@pytest.mark.parametrize("prepare", [True, False])
def test_message_that_cannot_be_written(prepare: bool, engine: Engine, outbox: Outbox) -> None:
    """When the message can't be written, nothing is prepared or committed, and the pool's connection is usable."""
    half_id = uuid7()
    with engine.begin() as connection:
        outbox.send(connection, "t", {"number": 0}, id=half_id)
    small = create_engine(engine.url, pool_size=1, max_overflow=0, pool_timeout=5)
    with small.connect() as connection:
        transaction = connection.begin_twophase()
        connection.execute(insert(change).values(number=1))
        outbox.send(connection, "t", {"number": 1}, id=half_id)
        with pytest.raises(IntegrityError):
            transaction.prepare() if prepare else transaction.commit()
        transaction.rollback()
        assert idle_in_transaction(engine) == 0
    for twophase in (True, False):
        with Session(small, twophase=twophase) as session:
            work(session, outbox, 2 + twophase)
            session.commit()
    small.dispose()
    assert (changes(engine), messages(engine)) == ({2, 3}, [0, 3, 2])


def test_send_in_a_listener_for_prepare(engine: Engine, outbox: Outbox) -> None:
    """A listener that sends when the messages are written is refused; no later transaction takes what it sent."""

    def late(connection: Connection, xid: str) -> None:
        outbox.send(connection, "t", {"number": 9})

    with engine.connect() as connection:
        outbox.send(connection, "t", {"number": 1})
        connection.commit()
        event.listen(engine, "prepare_twophase", late, once=True)
        transaction = connection.begin_twophase()
        outbox.send(connection, "t", {"number": 2})
        with pytest.raises(TransactionRequired, match="takes no more"):
            transaction.prepare()
        transaction.rollback()
        transaction = connection.begin_twophase()
        outbox.send(connection, "t", {"number": 3})
        transaction.prepare()
        transaction.commit()
    assert messages(engine) == [1, 3]


def test_session_whose_message_cannot_be_written(engine: Engine, outbox: Outbox) -> None:
    """A two-phase session fails at prepare, rolls back, and works on."""
    half_id = uuid7()
    with Session(engine, twophase=True) as session:
        outbox.send(session, "t", {"number": 1}, id=half_id)
        session.commit()
        session.execute(insert(change).values(number=2))
        outbox.send(session, "t", {"number": 2}, id=half_id)
        with pytest.raises(IntegrityError):
            session.commit()
        session.rollback()
        work(session, outbox, 3)
        session.commit()
    assert (changes(engine), messages(engine)) == ({3}, [1, 3])


def test_two_databases_in_two_phases(engine: Engine, other_engine: Engine, outbox: Outbox) -> None:
    """A session over two engines prepares both; each outbox's messages are in its own part."""
    second = Outbox(other_engine, settings=Settings(schema="second"))
    with Session(twophase=True) as session:
        session.connection(bind_arguments={"bind": engine}).execute(insert(change).values(number=1))
        session.connection(bind_arguments={"bind": other_engine}).execute(insert(change).values(number=2))
        outbox.send(session, "t", {"number": 1})
        second.send(session, "t", {"number": 2})
        session.commit()
    assert changes(engine) == {1, 2}
    assert (messages(engine), messages(engine, "second")) == ([1], [2])
