"""Sessions as applications really use them: joined, bound to many engines, with hooks, closed, broken."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, create_engine, event, insert, text
from sqlalchemy.exc import IntegrityError, InvalidRequestError
from sqlalchemy.orm import Session, sessionmaker

from outbox import Outbox, Settings
from outbox.errors import TransactionRequired
from tests.producer.bank import Account, accounts, change, changes, create_business_tables, messages


def send(outbox: Outbox, carrier: Any, number: int) -> None:
    """Send a message about a number."""
    outbox.send(carrier, "t", {"number": number})


def do(outbox: Outbox, session: Session, number: int) -> None:
    """Change and message, the change by the unit of work."""
    session.add(Account(id=number, owner=f"owner {number}"))
    send(outbox, session, number)


@pytest.fixture
def other(new_engine: Callable[..., Engine]) -> Engine:
    """An engine on another database, with the same tables."""
    engine = new_engine()
    create_business_tables(engine)
    return engine


# --- the unit of work ------------------------------------------------------------------------------------


def test_objects_flushed_by_the_commit_itself(engine: Engine, outbox: Outbox) -> None:
    """Objects which only the commit flushes, and the message, are written together."""
    with Session(engine) as session:
        do(outbox, session, 1)
        session.commit()
    assert (accounts(engine), messages(engine)) == ({1}, [1])


def test_flush_that_fails_in_the_commit(engine: Engine, outbox: Outbox) -> None:
    """When the flush inside the commit fails, nothing stays, and the session works again after its rollback."""
    with Session(engine) as session:
        session.add(Account(id=1, owner="same"))
        session.add(Account(id=2, owner="same"))
        send(outbox, session, 1)
        with pytest.raises(IntegrityError):
            session.commit()
        with pytest.raises(TransactionRequired, match="has failed"):
            send(outbox, session, 2)
        session.rollback()
        do(outbox, session, 3)
        session.commit()
    assert (accounts(engine), messages(engine)) == ({3}, [3])


def test_flush_that_fails_in_a_savepoint(engine: Engine, outbox: Outbox) -> None:
    """A savepoint whose flush failed takes its message along, and leaves those around it."""
    with Session(engine) as session, session.begin():
        do(outbox, session, 1)
        with pytest.raises(IntegrityError), session.begin_nested():
            send(outbox, session, 2)
            session.add(Account(id=2, owner="owner 1"))
        do(outbox, session, 3)
    assert (accounts(engine), messages(engine)) == ({1, 3}, [1, 3])


@pytest.mark.parametrize("name", ["before_commit", "before_flush", "after_flush", "after_flush_postexec"])
@pytest.mark.parametrize("nested", [False, True])
def test_hooks_may_send(name: str, nested: bool, engine: Engine, outbox: Outbox) -> None:
    """A session hook that runs inside the commit sends with that commit, also as the only one that sends."""
    with Session(engine) as session:
        sent: list[int] = []

        def hook(*_: Any) -> None:
            if not sent:
                sent.append(1)
                send(outbox, session, 1)

        session.begin()
        event.listen(session, name, hook)
        if nested:
            session.begin_nested()
        session.add(Account(id=1, owner="one"))
        session.commit()
    assert (accounts(engine), messages(engine)) == ({1}, [1])


@pytest.mark.parametrize("name", ["before_commit", "before_flush", "after_flush"])
def test_message_of_a_hook_vanishes_with_the_commit(name: str, engine: Engine, outbox: Outbox) -> None:
    """What a hook sent inside a commit that fails is gone, and doesn't come back with the next one."""
    with engine.begin() as connection:
        connection.execute(insert(Account).values(id=1, owner="taken"))
        connection.execute(text("ALTER TABLE account ADD CONSTRAINT late UNIQUE (owner) DEFERRABLE INITIALLY DEFERRED"))
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE account DROP CONSTRAINT account_owner_key"))
    try:
        with Session(engine) as session:
            event.listen(session, name, lambda *_: send(outbox, session, 2), once=True)
            session.add(Account(id=2, owner="taken"))
            with pytest.raises(IntegrityError):
                session.commit()
            session.rollback()
            do(outbox, session, 3)
            session.commit()
    finally:
        with engine.begin() as connection:
            connection.execute(text("ALTER TABLE account ADD CONSTRAINT account_owner_key UNIQUE (owner)"))
            connection.execute(text("ALTER TABLE account DROP CONSTRAINT late"))
    assert (accounts(engine), messages(engine)) == ({1, 3}, [3])


def test_hook_sends_instead_of_a_row(engine: Engine, outbox: Outbox) -> None:
    """A flush hook that turns an object into a message sends in a transaction that runs no other statement."""
    with Session(engine) as session:

        def instead(*_: Any) -> None:
            for account in list(session.new):
                session.expunge(account)
                send(outbox, session, account.id)

        event.listen(session, "before_flush", instead)
        for number in (1, 2):
            session.add(Account(id=number, owner="one"))
            session.commit()
    assert (accounts(engine), messages(engine)) == (set(), [1, 2])


@pytest.mark.parametrize("name", ["after_commit", "after_rollback"])
def test_hook_after_the_end_is_refused(name: str, engine: Engine, outbox: Outbox) -> None:
    """What can't be written any more isn't taken: after the COMMIT or ROLLBACK there is no transaction to send with."""
    seen = []

    def hook(session: Session) -> None:
        with pytest.raises(TransactionRequired, match="takes no message now") as error:
            send(outbox, session, 2)
        seen.append(error)

    with Session(engine) as session:
        do(outbox, session, 1)
        event.listen(session, name, hook, once=True)
        session.commit() if name == "after_commit" else session.rollback()
    assert len(seen) == 1
    assert messages(engine) == ([1] if name == "after_commit" else [])


# --- joined to a transaction that goes on ------------------------------------------------------------------


@pytest.fixture
def outer(engine: Engine) -> Iterator[Connection]:
    """A connection in a transaction, as a test suite opens it to roll everything back."""
    with engine.connect() as connection:
        connection.begin()
        yield connection


@pytest.mark.parametrize("mode", ["create_savepoint", "rollback_only", "conditional_savepoint"])
def test_joined_session_writes_with_the_outer_commit(
    mode: Any, engine: Engine, outbox: Outbox, outer: Connection
) -> None:
    """The commits of a joined session write nothing yet; the outer commit writes all, in order."""
    for number in (1, 2, 3):
        with Session(outer, join_transaction_mode=mode) as session:
            do(outbox, session, number)
            session.commit()
            do(outbox, session, 10 * number)
            session.commit()
    assert messages(engine) == []
    outer.commit()
    assert (accounts(engine), messages(engine)) == ({1, 10, 2, 20, 3, 30}, [1, 10, 2, 20, 3, 30])


@pytest.mark.parametrize("mode", ["create_savepoint", "rollback_only", "conditional_savepoint"])
def test_joined_session_vanishes_with_the_outer_rollback(
    mode: Any, engine: Engine, outbox: Outbox, outer: Connection
) -> None:
    """The rollback after a test takes what its sessions committed, and the connection starts afresh."""
    with Session(outer, join_transaction_mode=mode) as session:
        do(outbox, session, 1)
        session.commit()
    outer.rollback()
    with Session(outer) as session:
        do(outbox, session, 2)
        session.commit()
    outer.commit()
    assert (accounts(engine), messages(engine)) == ({2}, [2])


def test_joined_by_savepoint_rolls_back_alone(engine: Engine, outbox: Outbox, outer: Connection) -> None:
    """Rolled back or closed, a session in a savepoint of its own takes its messages, and no others, with it."""
    send(outbox, outer, 1)
    outer.execute(insert(Account).values(id=1, owner="1"))
    with Session(outer, join_transaction_mode="create_savepoint") as session:
        do(outbox, session, 2)
        session.commit()
        do(outbox, session, 3)
        session.flush()
        session.rollback()
        do(outbox, session, 4)
        session.commit()
        do(outbox, session, 5)
        session.flush()
    send(outbox, outer, 6)
    outer.execute(insert(Account).values(id=6, owner="6"))
    outer.commit()
    assert (accounts(engine), messages(engine)) == ({1, 2, 4, 6}, [1, 2, 4, 6])


@pytest.mark.parametrize("closed_first", [True, False])
def test_joined_session_without_a_commit(closed_first: bool, engine: Engine, outbox: Outbox, outer: Connection) -> None:
    """What a `rollback_only` session flushed and sent goes with the outer transaction, closed before it or not."""
    session = Session(outer, join_transaction_mode="rollback_only")
    do(outbox, session, 1)
    session.flush()
    for end in (session.close, outer.commit) if closed_first else (outer.commit, session.close):
        end()
    assert (accounts(engine), messages(engine)) == ({1}, [1])


def test_savepoint_around_a_joined_session(engine: Engine, outbox: Outbox, outer: Connection) -> None:
    """An outer savepoint that is rolled back takes what a joined session committed inside of it."""
    for number, end in ((1, "commit"), (2, "rollback"), (3, "commit")):
        savepoint = outer.begin_nested()
        with Session(outer, join_transaction_mode="create_savepoint") as session:
            do(outbox, session, number)
            session.commit()
        getattr(savepoint, end)()
    outer.commit()
    assert (accounts(engine), messages(engine)) == ({1, 3}, [1, 3])


def test_session_and_its_connection_send_in_turn(engine: Engine, outbox: Outbox) -> None:
    """Messages sent with the session and with its connection keep the order in which they were sent."""
    with Session(engine) as session:
        for number in range(6):
            send(outbox, session.connection() if number % 2 else session, number)
        session.commit()
    assert messages(engine) == list(range(6))


# --- which connection ------------------------------------------------------------------------------------


def test_session_with_binds_and_no_default(engine: Engine, other: Engine, outbox: Outbox) -> None:
    """A session that can't tell its engine uses the Outbox's: there the change is, too."""
    for flush_first in (True, False):
        with Session(binds={Account: engine, change: other}) as session:
            session.execute(insert(change).values(number=int(flush_first)))
            do(outbox, session, int(flush_first))
            if flush_first:
                session.flush()
            session.commit()
    assert (accounts(engine), sorted(messages(engine))) == ({0, 1}, [0, 1])
    assert (changes(other), messages(other)) == ({0, 1}, [])


@pytest.mark.parametrize("touched_first", ["own", "default", "neither"])
def test_session_with_another_default(touched_first: str, engine: Engine, other: Engine, outbox: Outbox) -> None:
    """A session whose default is another database writes the message where the Outbox is and the change goes."""
    with Session(other, binds={Account: engine}) as session:
        if touched_first == "own":
            session.get(Account, 1)
        elif touched_first == "default":
            session.execute(text("SELECT 1"))
        do(outbox, session, 1)
        session.commit()
    assert (accounts(engine), messages(engine)) == ({1}, [1])
    assert messages(other) == []


def test_two_outboxes_in_one_session(engine: Engine, other: Engine, outbox: Outbox) -> None:
    """A session on two databases writes each Outbox's messages into its own."""
    second = Outbox(other, settings=Settings())
    with Session(binds={Account: engine, change: other}) as session:
        for number in (1, 2):
            do(outbox, session, number)
            session.execute(insert(change).values(number=10 * number))
            send(second, session, 10 * number)
        session.commit()
    assert (accounts(engine), messages(engine)) == ({1, 2}, [1, 2])
    assert (changes(other), messages(other)) == ({10, 20}, [10, 20])


def test_another_engine_on_the_same_database(engine: Engine, url: str, outbox: Outbox) -> None:
    """The message goes through the session's own connection, whichever engine object the Outbox was given."""
    own = create_engine(url)
    with Session(own) as session:
        do(outbox, session, 1)
        session.rollback()
        do(outbox, session, 2)
        session.commit()
    own.dispose()
    assert (accounts(engine), messages(engine)) == ({2}, [2])


def test_engine_with_options(engine: Engine, outbox: Outbox) -> None:
    """An engine derived by `execution_options` shares its parent's events: nothing is written twice or forgotten."""
    for number in (1, 2, 3):
        derived = engine.execution_options(
            isolation_level=["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"][number - 1]
        )
        with Session(derived) as session:
            do(outbox, session, number)
            with session.begin_nested() as savepoint:
                do(outbox, session, 10 * number)
                savepoint.rollback()
            session.commit()
        with derived.begin() as connection:
            send(outbox, connection, 100 * number)
            savepoint_ = connection.begin_nested()
            send(outbox, connection, 1000 * number)
            savepoint_.rollback()
        with engine.begin() as connection:
            send(outbox, connection, 100 * number + 1)
    assert messages(engine) == [1, 100, 101, 2, 200, 201, 3, 300, 301]


# --- beginnings and ends ---------------------------------------------------------------------------------


def test_session_without_autobegin(engine: Engine, outbox: Outbox) -> None:
    """With `autobegin=False` a message needs `begin()`, as everything does."""
    with Session(engine, autobegin=False) as session:
        with pytest.raises(TransactionRequired, match=r"autobegin=False .* call session\.begin\(\)"):
            send(outbox, session, 1)
        with session.begin():
            do(outbox, session, 2)
        with pytest.raises(TransactionRequired):
            send(outbox, session, 3)
    assert (accounts(engine), messages(engine)) == ({2}, [2])


def test_session_that_sent_is_in_a_transaction(engine: Engine, outbox: Outbox) -> None:
    """Sending begins the session's transaction as adding an object does, so that no other `begin()` can slip in."""
    with Session(engine) as session:
        send(outbox, session, 1)
        assert session.in_transaction()
        with pytest.raises(InvalidRequestError):
            session.begin()
        session.commit()
        assert not session.in_transaction()


@pytest.mark.parametrize("end", ["close", "reset", "invalidate", "expunge_all"])
def test_session_ended_without_commit(end: str, engine: Engine, outbox: Outbox) -> None:
    """Close, reset and invalidate forget the messages; `expunge_all` ends no transaction and keeps them."""
    with Session(engine) as session:
        do(outbox, session, 1)
        session.flush()
        getattr(session, end)()
        do(outbox, session, 2)
        session.commit()
    kept = [1, 2] if end == "expunge_all" else [2]
    assert (accounts(engine), messages(engine)) == (set(kept), kept)


def test_session_dropped_without_a_word(engine: Engine, outbox: Outbox) -> None:
    """A session that is garbage-collected with messages in it leaves nothing behind, in its pool neither."""
    import gc

    small = create_engine(engine.url, pool_size=1, max_overflow=0, pool_timeout=5)
    session = Session(small)
    send(outbox, session, 1)
    del session
    gc.collect()
    with Session(small) as session:
        do(outbox, session, 2)
        session.commit()
    small.dispose()
    assert messages(engine) == [2]


def test_messages_do_not_cross_sessions(engine: Engine, outbox: Outbox) -> None:
    """Two sessions at once, also with shared `info`, commit and roll back their own messages."""
    factory = sessionmaker(engine, info={"tenant": "a"})
    with factory() as first, factory() as second:
        do(outbox, first, 1)
        do(outbox, second, 2)
        second.flush()
        first.commit()
        second.rollback()
        do(outbox, second, 3)
        second.commit()
    assert (accounts(engine), messages(engine)) == ({1, 3}, [1, 3])


LATE = """
import sys
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session
from outbox import Outbox, Settings

engine = create_engine(sys.argv[1])
with Session(engine) as session, engine.connect() as connection:
    session.execute(text("INSERT INTO change VALUES (1)"))
    savepoint = connection.begin_nested()
    connection.execute(text("INSERT INTO change VALUES (2)"))
    # Nothing has listened so far.
    outbox = Outbox(engine, settings=Settings())
    outbox.send(session, "t", {"number": 1})
    nested = session.begin_nested()
    outbox.send(session, "t", {"number": 9})
    nested.rollback()
    outbox.send(connection, "t", {"number": 8})
    savepoint.rollback()
    connection.execute(text("INSERT INTO change VALUES (3)"))
    outbox.send(connection, "t", {"number": 3})
    session.commit()
    connection.commit()
"""


def test_outbox_made_in_the_middle_of_a_transaction(url: str, engine: Engine) -> None:
    """Transactions that began before the process made its first Outbox carry messages all the same."""
    subprocess.run([sys.executable, "-c", LATE, url], check=True, cwd=Path(__file__).parents[2])
    assert (changes(engine), messages(engine)) == ({1, 3}, [1, 3])
