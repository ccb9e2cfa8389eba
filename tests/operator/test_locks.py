"""The act that ends the session which keeps a lock from all workers: real sessions, and what comes after them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import psycopg
import pytest
from sqlalchemy import Connection, Engine, create_engine, make_url

from outbox import Message, Outbox
from outbox.consumer.consumer import Consumer
from outbox.database.execute import Row, Statement, execute
from outbox.dispatch.dispatch_pass import dispatch_lock, dispatch_once
from outbox.errors import ActRefused, InvalidRequest
from outbox.operator.health.examine import examine
from outbox.operator.health.rules import Thresholds
from outbox.operator.health.workers import LockRow, held_locks
from outbox.operator.model import AuditFilter, AuditRow, PageRequest
from outbox.operator.operator import Operator
from tests.kit import dispatch_all, wait_until

ROLE = "night_watch"


@contextmanager
def session_of(engine: Engine, **options: Any) -> Iterator[psycopg.Connection[Any]]:
    """A session that is in a transaction."""
    url = make_url(engine.url).set(drivername="postgresql").render_as_string(hide_password=False)
    with closing(psycopg.connect(url, **options)) as connection:
        connection.execute("SELECT 1")
        yield connection


def is_over(connection: psycopg.Connection[Any]) -> bool:
    """Tell whether the server has ended a session."""
    try:
        connection.execute("SELECT 1")
    except psycopg.OperationalError:
        return True
    return False


def held_by(operator: Operator, connection: psycopg.Connection[Any]) -> LockRow:
    """The lock that a session holds."""
    (row,) = (each for each in operator.locks() if each.pid == connection.info.backend_pid)
    return row


def audited(operator: Operator) -> list[AuditRow]:
    """What the audit says."""
    return operator.audit(AuditFilter(), PageRequest()).items


def take_dispatch(connection: psycopg.Connection[Any]) -> None:
    """Take the lock of dispatch, and keep it."""
    connection.execute("SELECT pg_advisory_xact_lock(%s)", (dispatch_lock("outbox"),))


@pytest.fixture
def outbox(engine: Engine) -> Outbox:
    """An outbox on a database of its own."""
    return Outbox(engine)


@pytest.fixture
def operator(outbox: Outbox) -> Operator:
    """Its operator."""
    return outbox.operator


def test_the_holder_of_dispatch_is_ended(engine: Engine, outbox: Outbox, operator: Operator) -> None:
    """The session ends, its transaction rolls back, another worker dispatches, and the audit says whose it was."""
    with engine.begin() as connection:
        outbox.send(connection, "orders", {})
    with session_of(engine, application_name="gone") as holder, engine.connect() as connection:
        take_dispatch(holder)
        assert dispatch_once(connection, outbox.settings).done == 0
        held = held_by(operator, holder)
        assert (held.lock, held.application_name, held.state) == ("dispatch", "gone", "idle in transaction")
        assert "is ended" in operator.end(held.session, by="eve", why="its host is gone")
        wait_until(lambda: dispatch_once(connection, outbox.settings).done, "another one dispatches")
        assert is_over(holder)
    (row,) = audited(operator)
    assert (row.actor, row.action, row.target, row.reason) == ("eve", "end", held.session, "its host is gone")
    assert (row.result or {})["lock"] == "dispatch"


def test_queues_are_named_only_where_one_may_be_held(engine: Engine, outbox: Outbox) -> None:
    """There may be very many: they are read for a key that is held and isn't another lock of ours, and for no other."""
    read: list[str] = []

    def held(connection: Connection) -> list[str]:
        def run(statement: Statement) -> list[list[Row]]:
            read.append(statement.sql)
            return execute(connection, statement)

        read.clear()
        return [each.lock for each in held_locks(run, "outbox", {"producer", "consumer"}, 0.0)]

    with session_of(engine) as holder, engine.connect() as connection:
        assert (held(connection), len(read)) == ([], 1)
        take_dispatch(holder)
        assert held(connection) == ["dispatch"]
        assert not any("consumer_offset" in each for each in read)
        holder.execute("SELECT pg_advisory_xact_lock(42)")  # the application's own, for all that we know
        assert held(connection) == ["dispatch"]
        assert any("consumer_offset" in each for each in read)


def test_the_holder_of_a_queue_is_ended(engine: Engine, outbox: Outbox, operator: Operator) -> None:
    """A worker whose handler hangs loses its session; nothing of it takes effect, and another handles the message."""
    handled: list[Any] = []
    stuck: list[str] = []

    @outbox.consumer("orders", group="till")
    def handle(message: Message, session: Any) -> None:
        if not stuck:
            (held,) = operator.locks()
            assert held.lock.endswith("of topic 'orders' in group 'till'")
            stuck.append(operator.end(held.session, by="eve", why="it hangs"))
            session.connection().exec_driver_sql("SELECT pg_sleep(60)")
        handled.append(message.body)

    def consume(connection: Connection) -> None:
        consumer = Consumer(outbox.subscriptions["orders", "till"], outbox.settings)
        consumer.start(connection, connection)
        while consumer.consume_once(connection, connection):
            pass

    with engine.begin() as connection:
        outbox.send(connection, "orders", {"n": 1}, key="k")
    dispatch_all(engine)
    with engine.connect() as connection, pytest.raises(Exception, match="terminating connection"):
        consume(connection)
    with engine.connect() as connection:
        consume(connection)
    assert handled == [{"n": 1}]


def test_others_are_refused(engine: Engine, operator: Operator) -> None:
    """A session that holds no lock of ours, one that has let go, and one that was given the pid later go on."""
    with session_of(engine) as other, session_of(engine) as holder:
        other.execute("SELECT pg_advisory_xact_lock(4711)")
        take_dispatch(holder)
        held = held_by(operator, holder)
        start, _, pid = held.session.partition(".")
        earlier = f"{int(start, 16) - 1:x}.{pid}"  # a session that had this pid before
        not_ours = f"{start}.{other.info.backend_pid:x}"
        for session in (earlier, not_ours, "", "'; --"):
            with pytest.raises(ActRefused, match="holds no lock"):
                operator.end(session, by="eve", why="mistaken")
        with pytest.raises(InvalidRequest, match="reason"):
            operator.end(held.session, by="eve", why=" ")
        holder.rollback()
        with pytest.raises(ActRefused, match="holds no lock"):
            operator.end(held.session, by="eve", why="too late")
        assert not is_over(other)
        assert not is_over(holder)
    assert audited(operator) == []


def test_it_lets_go_between_the_look_and_the_act(
    engine: Engine, operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The statement that ends the session looks itself: what was seen before isn't believed, and nothing is audited."""
    with session_of(engine) as holder:
        take_dispatch(holder)
        held = held_by(operator, holder)
        holder.rollback()
        monkeypatch.setattr(operator, "lock_of", lambda *_: held)
        with pytest.raises(ActRefused, match="holds no lock"):
            operator.end(held.session, by="eve", why="too late")
        assert not is_over(holder)
    assert audited(operator) == []


def test_a_role_that_may_not(engine: Engine, operator: Operator) -> None:
    """Without the database's privilege there is one clear error with the mend, and the session goes on."""
    with session_of(engine) as holder, session_of(engine, autocommit=True) as admin:
        take_dispatch(holder)
        session = held_by(operator, holder).session
        admin.execute(f"CREATE ROLE {ROLE} LOGIN PASSWORD 'secret' IN ROLE pg_read_all_stats".encode())
        admin.execute(f"GRANT USAGE ON SCHEMA outbox TO {ROLE}".encode())
        admin.execute(f"GRANT ALL ON ALL TABLES IN SCHEMA outbox TO {ROLE}".encode())
        admin.execute(f"GRANT ALL ON ALL SEQUENCES IN SCHEMA outbox TO {ROLE}".encode())
        url = engine.url.set(username=ROLE, password="secret")  # noqa: S106 - as made above
        poor = create_engine(url)
        try:
            with pytest.raises(ActRefused, match=f"GRANT pg_signal_backend TO {ROLE}"):
                Outbox(poor).operator.end(session, by="eve", why="its host is gone")
            assert not is_over(holder)
        finally:
            poor.dispose()
            admin.execute(f"DROP OWNED BY {ROLE}".encode())
            admin.execute(f"DROP ROLE {ROLE}".encode())
    assert audited(operator) == []


def _for_the_session(connection: psycopg.Connection[Any]) -> str:
    connection.execute("SELECT pg_advisory_lock(%s)", (dispatch_lock("outbox"),))
    connection.commit()
    return "idle, locked for the session"


def _shared_for_the_session(connection: psycopg.Connection[Any]) -> str:
    connection.execute("SELECT pg_advisory_lock_shared(%s)", (dispatch_lock("outbox"),))
    connection.commit()
    return "idle, locked for the session"


def _shared_for_a_transaction(connection: psycopg.Connection[Any]) -> str:
    connection.execute("SELECT pg_advisory_xact_lock_shared(%s)", (dispatch_lock("outbox"),))
    return "idle in transaction"


@pytest.mark.parametrize("take", [_for_the_session, _shared_for_the_session, _shared_for_a_transaction])
def test_another_application_that_holds_a_key_of_ours_is_named_and_ended(
    engine: Engine, outbox: Outbox, operator: Operator, take: Callable[[psycopg.Connection[Any]], str]
) -> None:
    """A pooled connection may keep a lock for as long as it lives, in no transaction: list, doctor and act know it."""
    with engine.begin() as connection:
        outbox.send(connection, "orders", {})
    with session_of(engine, application_name="pool") as holder, engine.connect() as connection:
        state = take(holder)
        assert dispatch_once(connection, outbox.settings).done == 0
        held = held_by(operator, holder)
        assert (held.lock, held.application_name, held.state) == ("dispatch", "pool", state)
        assert held.user == holder.info.user
        thresholds = Thresholds() if state.startswith("idle,") else Thresholds(lock=0.0)
        report = examine(engine, outbox.settings, thresholds=thresholds)
        (finding,) = (each for each in report.findings if each.code == "lock.held")
        for named in (str(held.pid), "'pool'", f"user {held.user!r}", held.client):
            assert named in finding.sentence
        operator.end(held.session, by="eve", why="it isn't ours")
        wait_until(lambda: dispatch_once(connection, outbox.settings).done, "dispatch goes on")


def test_keys_of_two_numbers_are_others(engine: Engine, outbox: Outbox, operator: Operator) -> None:
    """They have a space of their own: what locks the same bits so keeps nothing from us, and isn't named."""
    key = dispatch_lock("outbox") & (2**64 - 1)
    halves = [part - 2**32 if part >= 2**31 else part for part in (key >> 32, key & (2**32 - 1))]
    with engine.begin() as connection:
        outbox.send(connection, "orders", {})
    with session_of(engine) as holder, engine.connect() as connection:
        holder.execute("SELECT pg_advisory_lock(%s::int, %s::int)", halves)
        assert operator.locks() == []
        assert dispatch_once(connection, outbox.settings).done == 1


def test_a_prepared_transaction_that_holds_a_lock_is_named(engine: Engine, operator: Operator) -> None:
    """It has no session that could be ended; the refusal says what ends it."""
    with session_of(engine, autocommit=True) as holder:
        holder.execute("BEGIN")
        take_dispatch(holder)
        holder.execute("PREPARE TRANSACTION 'moving'")
        try:
            (held,) = operator.locks()
            assert (held.session, held.lock, held.pid, held.state) == ("moving", "dispatch", 0, "prepared transaction")
            with pytest.raises(ActRefused, match="ROLLBACK PREPARED"):
                operator.end("moving", by="eve", why="it is in the way")
        finally:
            holder.execute("ROLLBACK PREPARED 'moving'")
        assert operator.locks() == []
