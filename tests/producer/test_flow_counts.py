"""What flow control counts: right, and at a bounded cost."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from uuid import UUID

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from sqlalchemy import Connection, Engine, text

from outbox import Outbox, Resolution, Settings
from outbox.database.execute import Statement, Template, execute
from outbox.dispatch.dispatch_pass import dispatch_once
from outbox.producer import sql as producer_sql
from tests.dispatch.support import rows_read, table_scans
from tests.kit import dispatch_all, empty, tries
from tests.producer.backlog import FURTHER_TABLES, prepare_many, send_many, waiting

TABLES = (*FURTHER_TABLES, "outbox.half_message", "outbox.half_check", "outbox.op_message")
TOPICS = ("a", "b", "c")
SETTINGS = Settings(listen=False)
#: What the count asks of the planner.
BY_INDEX = producer_sql.plan_by_index_until_back("outbox", seconds=1.0)


def clear(engine: Engine) -> None:
    """Empty the tables."""
    with engine.begin() as connection:
        empty(connection, *TABLES)


@pytest.fixture(autouse=True)
def cleared(engine: Engine) -> Iterator[None]:
    """Begin with no messages, and leave none behind."""
    clear(engine)
    yield
    clear(engine)


def counting(count: Template, limit: int) -> Statement:
    """Return the statement that counts topics at a limit."""
    return count("outbox", least=limit, limit=limit, **producer_sql.SAMPLE)


def counted(count: Template, engine: Engine, limit: int = 1) -> dict[str, int]:
    """Return what flow control counts of each topic."""
    with engine.begin() as connection:
        _, rows = execute(connection, BY_INDEX, counting(count, limit))
    return {str(row[0]): int(row[1]) for row in rows}


undispatched = partial(counted, producer_sql.undispatched)
undecided = partial(counted, producer_sql.undecided)


# --- undispatched ------------------------------------------------------------------------------------------

act = st.one_of(
    st.tuples(st.just("send"), st.sampled_from(TOPICS), st.integers(1, 6)),
    st.tuples(st.just("delay"), st.sampled_from(TOPICS), st.integers(1, 3)),
    st.tuples(st.just("prepare"), st.sampled_from(TOPICS), st.integers(1, 3)),
    st.tuples(st.just("decide"), st.sampled_from((Resolution.COMMIT, Resolution.ROLLBACK)), st.integers(0, 9)),
    st.tuples(st.just("dispatch"), st.none(), st.integers(1, 8)),
    st.tuples(st.just("begin"), st.none(), st.none()),
    st.tuples(st.just("end"), st.sampled_from(TOPICS), st.integers(1, 3)),
    st.tuples(st.just("abort"), st.sampled_from(TOPICS), st.integers(1, 3)),
)


class World:
    """A producer, a dispatcher, and transactions that stay open for a while."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.outbox = Outbox(engine, settings=SETTINGS)
        self.prepared: list[UUID] = []
        self.open: list[Connection] = []

    def step(self, name: str, what: object, number: int) -> None:
        """Do one thing."""
        if name == "dispatch":
            with self.engine.connect() as connection:
                dispatch_once(connection, SETTINGS, limit=number)
        elif name == "begin":
            connection = self.engine.connect()
            # Its transaction id is older than those of all that is sent while it is open.
            connection.execute(text("SELECT pg_current_xact_id()"))
            self.open.append(connection)
        elif name in {"end", "abort"} and self.open:
            self._finish(self.open.pop(0), str(what), number, commit=name == "end")
        elif name == "decide" and self.prepared:
            half_id = self.prepared.pop(number % len(self.prepared))
            (self.outbox.commit if what is Resolution.COMMIT else self.outbox.rollback)(half_id)
        elif name in {"send", "delay", "prepare"}:
            with self.engine.begin() as connection:
                for n in range(number):
                    if name == "prepare":
                        self.prepared.append(self.outbox.prepare(connection, str(what), {"number": n}))
                    else:
                        delay = 3600 if name == "delay" else None
                        self.outbox.send(connection, str(what), {"number": n}, delay=delay)

    def _finish(self, connection: Connection, topic: str, number: int, *, commit: bool) -> None:
        for n in range(number):
            self.outbox.send(connection, topic, {"number": n})
        if commit:
            connection.commit()
        else:
            execute(connection, *_numbers_drawn_in_vain(number))
        connection.close()


def _numbers_drawn_in_vain(number: int) -> Iterator[Statement]:
    for _ in range(number):
        yield Statement("SELECT nextval('outbox.op_sequence')")


@hypothesis_settings(
    max_examples=tries(10), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(acts=st.lists(act, min_size=3, max_size=25))
def test_few_ops_are_counted_exactly(acts: list[tuple[str, object, int]], engine: Engine) -> None:
    """Whatever was sent, delayed, decided, cut and dispatched in between, in long transactions too: no op is missed."""
    clear(engine)
    world = World(engine)
    try:
        for one in acts:
            world.step(*one)
            exact = waiting(engine)
            assert undispatched(engine) == exact
        for limit in (2, 5):
            assert undispatched(engine, limit) == {topic: n for topic, n in exact.items() if n >= limit}
    finally:
        for connection in world.open:
            connection.close()


def test_ops_of_a_long_transaction(engine: Engine) -> None:
    """What a transaction sends that was in flight at the last dispatch counts when it has committed, not before."""
    outbox = Outbox(engine, settings=SETTINGS)
    send_many(engine, 3, "a")
    with engine.connect() as held:
        held.execute(text("SELECT pg_current_xact_id()"))
        send_many(engine, 3, "a")
        dispatch_all(engine, SETTINGS)
        for number in range(5):
            outbox.send(held, "b", {"number": number})
        assert undispatched(engine) == {}
        held.commit()
    assert undispatched(engine) == waiting(engine) == {"b": 5}


def test_after_a_restore_into_another_cluster(engine: Engine) -> None:
    """Where the cursor's transaction ids mean nothing any more, what is dispatched doesn't count."""
    world = World(engine)
    send_many(engine, 50, "a")
    world.step("delay", "a", 5)
    dispatch_all(engine, SETTINGS)
    send_many(engine, 20, "b")
    with engine.begin() as connection:
        connection.execute(text("UPDATE outbox.dispatch_cursor SET system_identifier = 1, next_xid = '4000000000'"))
    assert undispatched(engine) == {"b": 20}
    with engine.begin() as connection:
        connection.execute(text("UPDATE outbox.dispatch_cursor SET next_xid = '3'"))
    assert undispatched(engine) == {"b": 20}


def test_pruned_ops_leave_the_count_right(engine: Engine) -> None:
    """When all that was dispatched is pruned, what came since is counted."""
    send_many(engine, 50, "a")
    dispatch_all(engine, SETTINGS)
    send_many(engine, 20, "b")
    with engine.begin() as connection:
        connection.execute(text("DELETE FROM outbox.op_message WHERE half_id IN (SELECT half_id FROM outbox.message)"))
    assert undispatched(engine) == {"b": 20}


@pytest.mark.parametrize("dispatched", [0, 3000])
def test_many_ops_are_estimated(dispatched: int, engine: Engine) -> None:
    """Of more ops than are looked at, each topic's share is about right, also where topics alternate."""
    if dispatched:
        send_many(engine, dispatched, "a")
        dispatch_all(engine, SETTINGS)
    send_many(engine, 4 * producer_sql.SAMPLED, "a", "b")
    send_many(engine, 2 * producer_sql.SAMPLED, "c")
    found = undispatched(engine)
    # Seven standard deviations of what is drawn.
    assert found == {topic: pytest.approx(2 * producer_sql.SAMPLED, rel=0.2) for topic in TOPICS}
    assert sum(found.values()) == 6 * producer_sql.SAMPLED
    assert undispatched(engine, 3 * producer_sql.SAMPLED) == {}


def test_topic_of_few_messages_beside_a_large_backlog(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A topic with few messages among very many of another is never taken for one with more."""
    monkeypatch.setattr(producer_sql, "SAMPLE", {**producer_sql.SAMPLE, "looked_at": 100})
    send_many(engine, 10_000, "a")
    send_many(engine, 20, "b")
    send_many(engine, 10_000, "a")
    # One of b's that is found stands for 201.
    assert {tuple(undispatched(engine, 50)) for _ in range(100)} == {("a",)}


def test_topic_with_its_share_of_a_large_backlog(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A topic at its limit is found behind a multiple of that of another's."""
    send_many(engine, 5 * producer_sql.SAMPLED, "a")
    send_many(engine, producer_sql.SAMPLED, "b")
    assert undispatched(engine, producer_sql.SAMPLED // 2)["b"] == pytest.approx(producer_sql.SAMPLED, rel=0.1)


def tuples_read(connection: Connection) -> dict[str, int]:
    """Return how often this backend has scanned a table from end to end, and how many of its rows it found by index."""
    rows = connection.execute(
        text(
            "SELECT regexp_replace(relname, '_default$', '') AS relname, coalesce(sum(seq_scan), 0) AS seq_scan,"
            " coalesce(sum(idx_tup_fetch), 0) AS idx_tup_fetch"
            "  FROM pg_stat_xact_user_tables WHERE schemaname = 'outbox' GROUP BY 1"
        )
    )
    return {
        f"{row.relname}.{kind}": number
        for row in rows
        for kind, number in (("sequential", row.seq_scan), ("by_index", row.idx_tup_fetch))
    }


def read_rows(engine: Engine, statement: Statement) -> list[dict[str, object]]:
    """Run a statement as flow control does, and return the scans of its plan."""
    with engine.begin() as connection:
        execute(connection, BY_INDEX)
        return table_scans(connection, statement)


def test_cost_is_bounded_whatever_waits(engine: Engine) -> None:
    """Of ten times as many ops no more are looked at, by index, of a table that is said to be empty."""
    with engine.begin() as connection:
        connection.execute(text("ANALYZE outbox.op_message, outbox.half_message, outbox.message, outbox.half_check"))
    statement = counting(producer_sql.undispatched, 100)
    with engine.connect() as connection:
        for _ in range(8):  # by now the server has settled on a plan
            with connection.begin():
                execute(connection, BY_INDEX, statement, producer_sql.PLAN_BACK)
        send_many(engine, 2_000, "a")
        dispatch_all(engine, SETTINGS)
        send_many(engine, 10 * producer_sql.SAMPLED, "a")
        with connection.begin():
            before = tuples_read(connection)
            execute(connection, BY_INDEX, statement, producer_sql.PLAN_BACK)
            read = {name: rows - before[name] for name, rows in tuples_read(connection).items()}
    beside = 202  # where the stretches begin and end
    assert read["op_message.sequential"] == read["half_message.sequential"] == read["message.sequential"] == 0
    assert producer_sql.SAMPLED <= read["op_message.by_index"] <= producer_sql.SAMPLED + beside
    assert read["half_message.by_index"] <= producer_sql.SAMPLED
    scans = read_rows(engine, statement)
    assert {str(node["Node Type"]) for node in scans} <= {"Index Scan", "Index Only Scan"}
    assert rows_read(scans, "op_message") <= producer_sql.SAMPLED + beside


def test_nothing_is_drawn_below_the_limit(engine: Engine) -> None:
    """While all topics together wait for fewer ops than the limit, no op is looked up."""
    send_many(engine, 500, "a")
    dispatch_all(engine, SETTINGS)
    send_many(engine, 500, "a")
    assert rows_read(read_rows(engine, counting(producer_sql.undispatched, 501)), "half_message") == 0
    assert rows_read(read_rows(engine, counting(producer_sql.undispatched, 500)), "half_message") == 500


# --- undecided ---------------------------------------------------------------------------------------------


def test_undecided_halves_are_counted_by_topic(engine: Engine) -> None:
    """Each topic stops at the limit; parked halves wait for a human, and don't count."""
    prepare_many(engine, 3, "a")
    prepare_many(engine, 7, "b", fenced=True)
    prepare_many(engine, 2, "c")
    prepare_many(engine, 9, "c", parked=True)
    assert undecided(engine) == {"a": 1, "b": 1, "c": 1}
    assert undecided(engine, 3) == {"a": 3, "b": 3}
    assert undecided(engine, 4) == {"b": 4}
    assert undecided(engine, 8) == {}


def test_counting_undecided_halves_stops_at_the_limit(engine: Engine) -> None:
    """Of each topic, no more halves are looked at than the limit says."""
    for topic in TOPICS:
        prepare_many(engine, 2_000, topic)
    scans = read_rows(engine, counting(producer_sql.undecided, 100))
    assert {str(node["Node Type"]) for node in scans} <= {"Index Scan", "Index Only Scan"}
    assert rows_read(scans, "half_check") <= len(TOPICS) * 101 + 1
