"""Flow control in transactions of every kind: long ones, savepoints, commits in two phases."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, event, insert, text
from sqlalchemy.orm import Session

from outbox import Outbox, Settings
from outbox.check.check_pass import check_fences
from outbox.errors import OutboxBusy, TransactionRequired
from outbox.producer import flow_control
from tests.kit import dispatch_all
from tests.producer.backlog import prepare_many, send_many
from tests.producer.bank import KINDS, Databases, Kind, change, changes, drive, halves, messages, opened, settle
from tests.producer.conftest import SECOND_SCHEMA
from tests.producer.flow_control.limits import accepted, forget, limited, tell


def test_what_counts_is_the_commit(engine: Engine, always_counted: None) -> None:
    """A long transaction is judged when it commits: it is refused if the topic filled since it sent, or let through."""
    outbox = limited(engine)
    with engine.connect() as early, engine.connect() as late:
        early.execute(insert(change).values(number=1))
        outbox.send(early, "t", {"number": 1})
        send_many(engine, 3)
        late.execute(insert(change).values(number=2))
        outbox.send(late, "t", {"number": 2})
        with pytest.raises(OutboxBusy):
            early.commit()
        early.rollback()
        dispatch_all(engine, outbox.settings)
        late.commit()
    assert changes(engine) == {2}


def test_long_transaction_elsewhere(engine: Engine, always_counted: None) -> None:
    """What a transaction has sent that isn't committed doesn't count; nor does it keep others from counting."""
    outbox = limited(engine)
    with engine.connect() as held:
        held.execute(text("SELECT pg_current_xact_id()"))
        for number in range(10):
            outbox.send(held, "t", {"number": number})
        dispatch_all(engine, outbox.settings)
        for number in range(20, 23):
            tell(outbox, engine, number)
        with pytest.raises(OutboxBusy):
            tell(outbox, engine, 23)
        dispatch_all(engine, outbox.settings)
        tell(outbox, engine, 24)
        held.commit()
    with pytest.raises(OutboxBusy):
        tell(outbox, engine, 25)
    dispatch_all(engine, outbox.settings)
    tell(outbox, engine, 26)


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_snapshot_of_the_past(level: Any, engine: Engine, counts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A transaction that sees only what was long ago doesn't judge by it, and nobody else does."""
    send_many(engine, 3)
    outbox = limited(engine)
    with engine.connect().execution_options(isolation_level=level) as old:
        old.execute(text("SELECT count(*) FROM outbox.op_message")).one()
        old.execute(insert(change).values(number=1))
        outbox.send(old, "t", {"number": 1})
        dispatch_all(engine, outbox.settings)
        monkeypatch.setattr(flow_control, "INTERVAL", 0.0)  # whatever is older than that is long ago
        old.commit()
    monkeypatch.setattr(flow_control, "INTERVAL", 3600.0)
    send_many(engine, 2)
    with pytest.raises(OutboxBusy):
        tell(outbox, engine, 2)
    assert (changes(engine), len(counts)) == ({1}, 2)


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_young_snapshot(level: Any, engine: Engine, counted_once: None) -> None:
    """Also where all transactions run at a higher level, the limit holds."""
    send_many(engine, 3)
    outbox = limited(engine)
    strict = engine.execution_options(isolation_level=level)
    for number in (1, 2):
        with pytest.raises(OutboxBusy):
            tell(outbox, strict, number)
    assert changes(engine) == set()


def test_savepoints(engine: Engine, always_counted: None) -> None:
    """A message that vanished with its savepoint is nobody's business; one that didn't fails the whole transaction."""
    send_many(engine, 3)
    outbox = limited(engine)
    for keeps in (False, True):
        with Session(engine) as session:
            session.execute(insert(change).values(number=1 + keeps))
            savepoint = session.begin_nested()
            outbox.send(session, "t", {"number": 1})
            (savepoint.commit if keeps else savepoint.rollback)()
            outbox.send(session, "other", {"number": 1})
            accepted(session.commit)
    assert (changes(engine), len(halves(engine))) == ({1}, 4)


def test_refused_in_a_savepoint(engine: Engine, counted_once: None) -> None:
    """Where the topic is known to be full, only the savepoint fails, and the transaction may go on without it."""
    send_many(engine, 3)
    outbox = limited(engine)
    accepted(lambda: tell(outbox, engine, 0))
    with Session(engine) as session, session.begin():
        session.execute(insert(change).values(number=1))
        with pytest.raises(OutboxBusy), session.begin_nested():
            session.execute(insert(change).values(number=2))
            outbox.send(session, "t", {"number": 2})
        outbox.send(session, "other", {"number": 3})
    assert changes(engine) == {1}
    assert messages(engine) == [0, 0, 0, 3]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("known", [False, True])
def test_message_that_begins_the_transaction(known: bool, kind: Kind, url: str, engine: Engine) -> None:
    """A carrier in no transaction yet is usable at once after a refusal, and nothing stays open."""
    send_many(engine, 3)

    async def act(databases: Databases) -> None:
        outbox = Outbox(databases.engine_for(kind), settings=Settings(max_undispatched=3, max_undecided=3))
        async with opened(kind, databases) as carrier:
            for number in range(3):
                if not known:
                    forget(outbox)
                with pytest.raises(OutboxBusy):
                    outbox.send(carrier, "t", {"number": number})
                    await settle(carrier.commit())
                await settle(carrier.rollback())
                assert not carrier.in_transaction()
        dispatch_all(engine, outbox.settings)
        forget(outbox)
        async with opened(kind, databases) as carrier:
            outbox.send(carrier, "t", {"number": 9})
            await settle(carrier.commit())

    drive(url, act)
    assert messages(engine) == [0, 0, 0, 9]


def prepared_transactions(engine: Engine) -> int:
    """Count what is prepared in this database by PREPARE TRANSACTION."""
    with engine.connect() as connection:
        sql = "SELECT count(*) FROM pg_prepared_xacts WHERE database = current_database()"
        return int(connection.scalar(text(sql)) or 0)


@pytest.mark.parametrize("prepare", [True, False])
def test_two_phase_commit_of_a_connection(prepare: bool, engine: Engine, always_counted: None) -> None:
    """PREPARE TRANSACTION, or the commit without it, is refused; the connection is usable, nothing is prepared."""
    send_many(engine, 3)
    outbox = limited(engine)
    small = create_engine(engine.url, pool_size=1, max_overflow=0, pool_timeout=5)
    with small.connect() as connection:
        transaction = connection.begin_twophase()
        connection.execute(insert(change).values(number=1))
        outbox.send(connection, "t", {"number": 1})
        with pytest.raises(OutboxBusy):
            transaction.prepare() if prepare else transaction.commit()
        transaction.rollback()
        assert prepared_transactions(engine) == 0
        dispatch_all(engine, outbox.settings)
        transaction = connection.begin_twophase()
        connection.execute(insert(change).values(number=2))
        outbox.send(connection, "t", {"number": 2})
        transaction.prepare()
        # What was counted locks nothing that dispatch or a check would need.
        dispatch_all(engine, outbox.settings)
        prepare_many(engine, 1, "fenced", fenced=True)
        with engine.connect() as checking:
            assert check_fences(checking, outbox.settings).done == 1
        transaction.commit()
    small.dispose()
    assert (changes(engine), messages(engine)) == ({2}, [0, 0, 0, 2])


@pytest.mark.parametrize("again", ["prepare", "commit"])
def test_tried_again_after_a_refused_prepare(again: str, engine: Engine, always_counted: None) -> None:
    """A transaction that was refused at PREPARE can only be rolled back: it would commit its change alone."""
    send_many(engine, 3)
    outbox = limited(engine)
    with engine.connect() as connection:
        transaction = connection.begin_twophase()
        connection.execute(insert(change).values(number=1))
        outbox.send(connection, "t", {"number": 1})
        with pytest.raises(OutboxBusy):
            transaction.prepare()
        dispatch_all(engine, outbox.settings)
        with pytest.raises(TransactionRequired, match="roll it back"):
            outbox.send(connection, "t", {"number": 1})
        with pytest.raises(TransactionRequired, match="roll it back"):
            getattr(transaction, again)()
        transaction.rollback()
        connection.execute(insert(change).values(number=2))
        outbox.send(connection, "t", {"number": 2})
        connection.commit()
    assert prepared_transactions(engine) == 0
    assert (changes(engine), messages(engine)) == ({2}, [0, 0, 0, 2])


def test_two_phase_commit_over_two_engines(engine: Engine, other_engine: Engine, always_counted: None) -> None:
    """One database that refuses makes both roll back."""
    first, second = limited(engine), limited(other_engine, schema=SECOND_SCHEMA)
    send_many(engine, 3, schema=SECOND_SCHEMA)
    with Session(twophase=True) as session:
        for number in (1, 2):
            session.connection(bind_arguments={"bind": engine}).execute(insert(change).values(number=number))
            session.connection(bind_arguments={"bind": other_engine}).execute(insert(change).values(number=10 + number))
            first.send(session, "t", {"number": number})
            second.send(session, "t", {"number": number})
            if number == 1:
                with pytest.raises(OutboxBusy):
                    session.commit()
                session.rollback()
                assert prepared_transactions(engine) == 0
                dispatch_all(engine, second.settings)
            else:
                session.commit()
    assert changes(engine) == {2, 12}
    assert (messages(engine), messages(engine, SECOND_SCHEMA)) == ([2], [0, 0, 0, 2])


def test_refused_commit_in_a_hook_of_the_session(engine: Engine, always_counted: None) -> None:
    """A message that a flush hook sends inside the commit is refused with it."""
    send_many(engine, 3)
    outbox = limited(engine)
    with Session(engine) as session:
        event.listen(session, "before_commit", lambda s: outbox.send(s, "t", {"number": 1}), once=True)
        session.execute(insert(change).values(number=1))
        with pytest.raises(OutboxBusy):
            session.commit()
        session.rollback()
        session.execute(insert(change).values(number=2))
        session.commit()
    assert changes(engine) == {2}
