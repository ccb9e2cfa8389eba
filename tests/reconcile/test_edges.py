"""The edges: of the window, of the tables, of the ids; other topics, groups, schemas and databases."""

from __future__ import annotations

import datetime as dt
import itertools
import random
from collections.abc import Callable
from typing import Any
from uuid import UUID

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from sqlalchemy import Engine

from outbox import Settings
from outbox.database import migration
from outbox.database.execute import Statement, driver_of, execute
from outbox.database.tables import SEGMENTED
from outbox.embedded import ServerLike
from outbox.errors import ReconcileError
from outbox.reconcile import sql as reconcile_sql
from outbox.reconcile.job import FIRST_ID, Outcome, Pair, Range, Tier, Window
from outbox.reconcile.source import (
    PostgresSide,
    SessionSettings,
    engine_of,
    literal,
    snapshots_of,
)
from outbox.reconcile.tables import InboxState
from outbox.testing import make_due
from tests.reconcile.town import (
    HOUR,
    IN_SYNC,
    PAIR,
    WITH_EFFECT,
    Town,
    counted,
    explain,
    fate,
    ids_at,
    ids_in,
    kinds,
    url_of,
)

NONE = InboxState.NONE
MISSING = fate(status=NONE)
TIERS = [Tier.FULL, Tier.DIGEST]


def moment(id_: UUID) -> dt.datetime:
    """Return the millisecond of an id."""
    return dt.datetime.fromtimestamp(0, dt.UTC) + dt.timedelta(milliseconds=id_.int >> 80)


# --- the window -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", TIERS)
def test_a_window_has_its_first_millisecond_and_not_its_last(town: Town, tier: Tier) -> None:
    """Of ids at both edges those of the first millisecond are in, whatever their other bits, those of the last out."""
    edge = ids_at(HOUR, 7)
    low = [UUID(int=each.int >> 80 << 80 | 7 << 76 | 0b10 << 62) for each in edge]
    high = [UUID(int=each.int | 0xFFF << 64 | (1 << 62) - 1) for each in edge]
    town.plant([MISSING] * 14, ids=[*low, *high])

    result = town.reconcile(window=Window(moment(edge[2]), moment(edge[5]), grace=60.0), tier=tier)

    assert set(kinds(result)) == {*low[2:5], *high[2:5]}


@given(st.integers(0, 4_102_444_800_000), st.integers(0, 999))
@example(1001, 0)
def test_the_bounds_of_a_window_are_exact(ms: int, micros: int) -> None:
    """A bound lies before all ids of its millisecond and after all earlier ones, whatever floats make of it."""
    since = dt.datetime.fromtimestamp(0, dt.UTC) + dt.timedelta(milliseconds=ms, microseconds=micros)
    first = Window(since=since).range.first
    assert first.int == ms << 80


def test_a_window_from_before_all_time() -> None:
    """A bound before 1970 is before all ids that have a time."""
    assert Window(since=dt.datetime(1960, 1, 1, tzinfo=dt.UTC)).range == Range(FIRST_ID, None)


def test_windows_that_follow_each_other_share_nothing_and_miss_nothing(town: Town) -> None:
    """Each message is in exactly one of three windows."""
    ids = town.plant([MISSING] * 30, ids=ids_at(HOUR, 30))
    edges = [None, moment(ids[10]), moment(ids[20]), None]
    found = [kinds(town.reconcile(window=Window(*pair, grace=60.0))) for pair in itertools.pairwise(edges)]
    assert [sorted(each) for each in found] == [ids[:10], ids[10:20], ids[20:]]


def test_what_is_in_flight_at_the_edges_is_in_flight(town: Town) -> None:
    """The window is about when a message was made, the grace period about what is done since."""
    ids = ids_at(HOUR, 3)
    town.plant([fate(status=NONE, age=0), MISSING, fate(status=NONE, age=59)], ids=ids)
    window = Window(moment(ids[0]), moment(ids[2]) + dt.timedelta(milliseconds=1), grace=60.0)
    result = town.reconcile(window=window)
    assert kinds(result) == {ids[1]: Outcome.MISSING}
    assert ids_in(result.open) == {ids[0], ids[2]}


# --- the sides --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", TIERS)
def test_nothing_at_all_is_in_sync(town: Town, tier: Tier) -> None:
    """Two empty databases agree, of a topic and a group that nobody knows."""
    result = town.reconcile(Pair("unknown", "nobody"), tier=tier)
    assert result.in_sync
    assert counted(result) == {}
    assert result.lag is None


@pytest.mark.parametrize("tier", TIERS)
def test_one_side_empty(town: Town, tier: Tier) -> None:
    """A group that nobody knows has consumed nothing; to a topic that nobody knows, all it has is a phantom."""
    ids = town.plant([IN_SYNC] * 5)
    town.at_producer("UPDATE outbox.message SET visible_at = visible_at - interval '1 hour'")
    assert kinds(town.reconcile(Pair("t", "nobody"), tier=tier)) == dict.fromkeys(ids, Outcome.UNCONSUMED)
    town.at_producer("TRUNCATE outbox.half_message, outbox.op_message, outbox.message, outbox.topic")
    assert kinds(town.reconcile(tier=tier)) == dict.fromkeys(ids, Outcome.PHANTOM)


@pytest.mark.parametrize("tier", TIERS)
def test_other_topics_and_groups_in_the_same_tables_do_not_matter(town: Town, tier: Tier) -> None:
    """Differences of a neighbour are the neighbour's; several pairs of one run keep theirs apart."""
    (mine,) = town.plant([MISSING])
    (other_topic,) = town.plant([fate(status=InboxState.PARKED, effects=2)], topic="u")
    (other_group,) = town.plant([fate(state=None, effects=1)], group="h")
    town.plant([IN_SYNC] * 3, topic="u")

    found = [kinds(town.reconcile(pair, tier=tier)) for pair in (WITH_EFFECT, Pair("u", "g"), Pair("t", "h"))]

    assert found[0] == {mine: Outcome.MISSING}
    assert found[1] == {other_topic: Outcome.PARKED}
    assert found[2] == {mine: Outcome.UNCONSUMED, other_group: Outcome.PHANTOM} | found[2]


def test_both_sides_in_one_database(village: Town) -> None:
    """A producer that is its own consumer is compared like any other."""
    missing, phantom, _ = village.plant([MISSING, fate(state=None), IN_SYNC])
    for tier in TIERS:
        result = village.reconcile(tier=tier)
        assert kinds(result) == {missing: Outcome.MISSING, phantom: Outcome.PHANTOM}
        assert result.counts[Outcome.CONSUMED] == 1


def test_a_schema_of_another_name(server: ServerLike, new_engine: Callable[[], Engine]) -> None:
    """Tables in another schema are compared, and no others, in both tiers."""
    settings = Settings(schema="letters")
    engines = new_engine(), new_engine()
    for engine in engines:
        migration.upgrade(url_of(engine), schema="letters")
    with Town(*engines, settings) as town:
        (missing, *_) = town.plant([MISSING, *[IN_SYNC] * 5])
        for tier in TIERS:
            assert kinds(town.reconcile(tier=tier)) == {missing: Outcome.MISSING}
        assert town.rows("SELECT count(*) FROM outbox.reconciliation_run") == [0]
        assert town.rows("SELECT count(*) FROM letters.reconciliation_run") == [2]


# --- the ids ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", TIERS)
def test_ids_of_any_kind(town: Town, tier: Tier) -> None:
    """Ids that aren't UUIDv7, the first and the last of all among them, and those with zeros at the end, are told."""
    odd = [
        FIRST_ID,
        UUID(int=1),
        UUID(int=2**128 - 1),
        UUID(int=2**128 - 2),
        UUID(int=2**127),
        UUID(int=2**127 - 256),
        UUID("00ff0000-0000-0000-0000-000000000000"),
        UUID("ff000000-0000-0000-0000-000000000000"),
        *(UUID(int=random.getrandbits(128)) for _ in range(20)),
    ]
    town.plant([IN_SYNC, MISSING] * 14, ids=odd)
    assert kinds(town.reconcile(tier=tier)) == dict.fromkeys(odd[1::2], Outcome.MISSING)

    town.run("DELETE FROM outbox.consumer_message")
    result = town.reconcile(tier=tier)
    assert kinds(result) == dict.fromkeys(odd, Outcome.MISSING)
    assert [id_ for id_, _ in sorted(kinds(result).items())] == sorted(odd)


def test_the_last_of_all_ids_among_scattered_ranges(town: Town) -> None:
    """A range without an end has the last id in it, alone and among others."""
    last = UUID(int=2**128 - 1)
    town.plant([IN_SYNC, IN_SYNC], ids=[FIRST_ID, last])
    side = PostgresSide(town.accesses[0], "producer", PAIR)
    assert side.read([Range(FIRST_ID, None)]).num_rows == 2
    assert side.read([Range(FIRST_ID, UUID(int=1)), Range(UUID(int=2), None)]).num_rows == 2
    assert side.read([Range(FIRST_ID, UUID(int=1)), Range(UUID(int=2), last)]).num_rows == 1
    assert side.read([]).num_rows == 0


def test_filters_of_any_text(town: Town) -> None:
    """Quotes, backslashes, percent signs and braces in tags and keys are text, in both tiers."""
    texts = [
        "it's",
        'say "so"',
        "back\\slash",
        "50%",
        "%(topic)s",
        "{s}",
        "{h.id}",
        "a,b",
        "",
        "ü",
        "NULL",
        "under_score",
    ]
    ids = town.plant([fate(status=NONE, tag=each, key=each) for each in texts])
    near = town.plant([fate(status=NONE, tag="underXscore", key="underXscore")])
    for tier in TIERS:
        assert set(kinds(town.reconcile(Pair("t", "g", tags=texts), tier=tier))) == set(ids)
        assert set(kinds(town.reconcile(Pair("t", "g", keys=texts), tier=tier))) == set(ids)
    for text, id_ in zip(texts, ids, strict=True):
        pair = Pair("t", "g", tags=[text], keys=[text])
        rows = PostgresSide(town.accesses[0], "producer", pair).read([Range(FIRST_ID, None)])
        assert [UUID(bytes=row["id"]) for row in rows.to_pylist() if row["addressed"]] == [id_]
    assert near[0] in kinds(town.reconcile(Pair("t", "g", keys=["under*"])))


def test_a_filter_on_headers(town: Town) -> None:
    """What it leaves out isn't missed, in both tiers; a value is any text."""
    consumer = town.declare(headers={"region": ["eu", "it's 50%"]})
    for region in ("eu", "us", "it's 50%"):
        town.send(region, headers={"region": region})
    town.consume(consumer)
    for tier in TIERS:
        result = town.reconcile(Pair("t", "g", headers=["region=eu", "region=it's 50%"]), tier=tier)
        assert (result.in_sync, result.counts) == (True, {Outcome.CONSUMED: 2, Outcome.LEFT_OUT: 1})
        wider = town.reconcile(Pair("t", "g", headers=["region=us"]), window=Window(grace=0.0), tier=tier)
        assert (
            list(kinds(wider).values()).count(Outcome.UNCONSUMED) + list(kinds(wider).values()).count(Outcome.MISSING)
            == 1
        )


# --- what the framework itself writes ---------------------------------------------------------------------


def test_what_the_framework_writes_is_in_sync(town: Town) -> None:
    """Sent, resent, filtered, failed and retried, skipped, recalled, scheduled and released: nothing differs."""
    from outbox.message.model import Skip

    failing = {"once"}

    def handle(message, session):  # type: ignore[no-untyped-def]
        if message.body in failing:
            failing.discard(message.body)
            raise ValueError(message.body)
        return Skip("not mine") if message.body == "skip" else None

    consumer = town.declare(handle, tags=["mine"])
    sent = town.send(*"abc", "once", "skip", tag="mine")
    town.send("other", tag="other")
    town.resend(*sent[:2])
    with town.producer.begin() as connection:
        (later, recalled) = (
            town.app.send(connection, "t", body, tag="mine", delay=3600.0) for body in ("later", "recalled")
        )
        rolled_back = town.app.prepare(connection, "t", "back", tag="mine")
    town.app.rollback(rolled_back)
    town.dispatch()
    town.app.operator.recall(recalled, by="me", why="test")
    town.consume(consumer)
    pair, now = Pair("t", "g", tags=["mine"]), Window(grace=0.0)

    for tier in TIERS:
        result = town.reconcile(pair, window=now, tier=tier)
        assert kinds(result) == {sent[3]: Outcome.FAILED}
        assert result.counts == {
            Outcome.CONSUMED: 4,
            Outcome.ROLLED_BACK: 2,
            Outcome.LEFT_OUT: 1,
            Outcome.IN_FLIGHT: 1,
            Outcome.FAILED: 1,
        }
        assert ids_in(result.open) == {later}
    town.retry(consumer)
    make_due(town.app, failed=False, orphans=False)
    town.dispatch()
    town.consume(consumer)
    for tier in TIERS:
        result = town.reconcile(pair, window=now, tier=tier)
        assert result.in_sync
        assert result.counts == {Outcome.CONSUMED: 6, Outcome.ROLLED_BACK: 2, Outcome.LEFT_OUT: 1}


def test_a_group_that_begins_now_leaves_out_what_was_before(town: Town) -> None:
    """With start="now" earlier messages aren't missing; one that is resent afterwards is for the group too."""
    old = town.send(*"abcd")
    consumer = town.declare(start="now")
    town.send(*"ef")
    town.consume(consumer)
    window = Window(grace=0.0)
    assert town.reconcile(window=window).counts == {Outcome.LEFT_OUT: 4, Outcome.CONSUMED: 2}

    town.resend(old[0])
    assert kinds(town.reconcile(window=window)) == {old[0]: Outcome.UNCONSUMED}
    town.consume(consumer)
    assert town.reconcile(window=window).counts == {Outcome.LEFT_OUT: 3, Outcome.CONSUMED: 3}


def test_queues_that_are_added_later(town: Town) -> None:
    """Messages in new queues aren't consumed before the group has read them, and are then."""
    consumer = town.declare()
    town.send(*"ab")
    town.consume(consumer)
    town.app.declare_topic("t", 64)
    with town.producer.begin() as connection:
        ids = [town.app.send(connection, "t", n, key=str(n)) for n in range(100)]
    town.dispatch()
    for tier in TIERS:
        assert kinds(town.reconcile(window=Window(grace=0.0), tier=tier)) == dict.fromkeys(ids, Outcome.UNCONSUMED)
    town.consume(consumer)
    for tier in TIERS:
        assert town.reconcile(window=Window(grace=0.0), tier=tier).counts == {Outcome.CONSUMED: 102}


# --- the server -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("statistics", ["none", "stale", "fresh"])
def test_the_plans_do_not_depend_on_statistics(town: Town, statistics: str) -> None:
    """Rows are read by joins that grow with the rows, and scattered ranges by one look-up each, whatever is known."""
    for run, tables in (
        (town.at_producer, ("half_message", "op_message", "message", "scheduled_message", "compensation")),
        (town.run, ("consumer_message",)),
    ):
        for table in tables:
            leaf = f"{table}_default" if table in {**SEGMENTED["producer"], **SEGMENTED["consumer"]} else table
            run(f"ALTER TABLE outbox.{leaf} SET (autovacuum_enabled = off)")
    town.plant([IN_SYNC] * 20, ids=ids_at(40 * 86400, 20), topic="u")
    if statistics == "stale":
        town.at_producer("ANALYZE")
        town.run("ANALYZE")
    ids = sorted(town.plant_bulk(20_000))
    town.run("INSERT INTO ledger (message_id) SELECT message_id FROM outbox.consumer_message")
    if statistics == "fresh":
        town.at_producer("ANALYZE")
        town.run("ANALYZE")
    scattered = [Range(each, UUID(int=each.int + (1 << 80))) for each in ids[::10]]

    with snapshots_of(town.job().databases) as snapshots:
        for snapshot, part, pair in (
            (snapshots.producer, "producer", PAIR),
            (snapshots.consumer, "consumer", PAIR),
            (snapshots.consumer, "consumer", WITH_EFFECT),
        ):
            execute(snapshot.connection, reconcile_sql.PLAN_FOR_ROWS)
            side = PostgresSide(snapshot.access, part, pair)  # type: ignore[arg-type]
            assert shown(side, "enable_nestloop") == ["off"]

            def plan(ranges: list[Range], side: PostgresSide = side, snapshot=snapshot) -> list[str]:  # type: ignore[no-untyped-def]
                rows = execute(snapshot.connection, explain(side.statement(ranges)))[0]
                # PostgreSQL 18 says of a node on a line of its own that its kind is disabled.
                return [line for (line,) in rows if "Disabled:" not in line]

            for ranges in ([Range(FIRST_ID, None)], [Range(ids[10], ids[900])]):
                assert "Nested Loop" not in "\n".join(plan(ranges))
            lines = plan(scattered)
            assert "Nested Loop" in lines[0]
            assert "Function Scan" in lines[1]
            assert "Nested Loop" not in "\n".join(lines[1:])
            assert "Seq Scan on half_message" not in "\n".join(lines)
            assert "Seq Scan on consumer_message" not in "\n".join(lines)


def test_time_outs_of_the_role_do_not_end_a_comparison(town: Town) -> None:
    """A database whose transactions mustn't idle, or whose statements mustn't last, is compared all the same.

    What is set in their place is how long the run may take: a snapshot that is forgotten doesn't stop vacuum for ever.
    """
    for engine in (town.producer, town.consumer):
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            name = engine.url.database
            connection.exec_driver_sql(f"ALTER DATABASE {name} SET idle_in_transaction_session_timeout = '20s'")
            connection.exec_driver_sql(f"ALTER DATABASE {name} SET statement_timeout = '30s'")
    expected = {
        "idle_in_transaction_session_timeout": "2h",
        "statement_timeout": "2h",
        "tcp_user_timeout": "25000",
        "application_name": f"outbox reconcile {FIRST_ID}",
    }
    sessions = SessionSettings.of_run(FIRST_ID, 7200.0)
    assert set(dict(socket_options(town)).values()) == {"10", "5", "3"}
    with snapshots_of(town.job().databases, settings=sessions) as snapshots:
        for snapshot in (snapshots.producer, snapshots.consumer):
            side = PostgresSide(snapshot.access, "producer", PAIR, snapshot.name, snapshot.settings)
            for name, value in expected.items():
                assert execute(snapshot.connection, Statement(f"SHOW {name}")) == [[(value,)]]
                assert shown(side, name) == [value]


def shown(side: PostgresSide, name: str) -> list[Any]:
    """Return a setting of a reader's session; ADBC copies what it reads, which SHOW can't be."""
    with side.session(side.access, []) as ask:
        values: list[Any] = ask(Statement(f"SELECT current_setting('{name}') AS s"))["s"].to_pylist()
        return values


def socket_options(town: Town) -> dict[str, str]:
    """Return how our end of a connection tests a silent server, as libpq has it."""
    with engine_of(town.accesses[0]).connect() as connection:
        known = driver_of(connection).info.get_parameters()
    return {name: value for name, value in known.items() if name.startswith("keepalives_")}


def test_a_run_ends_after_its_time(town: Town) -> None:
    """While a table is locked a run waits for its snapshot, but no longer than it was given; the record says why."""
    with town.consumer.begin() as connection:
        connection.exec_driver_sql("LOCK TABLE outbox.consumer_message IN ACCESS EXCLUSIVE MODE")
        with pytest.raises(ReconcileError, match=r"longer than max_time = 200ms; mend: allow more"):
            town.reconcile(max_time=0.2)
    assert "max_time" in str(town.rows("SELECT error FROM outbox.reconciliation_run"))


@pytest.mark.parametrize(
    "value",
    [
        None, True, False, 7, -7, "", "it's", "a\\b'c", "ü→", FIRST_ID,
        ["a", "it's", 'q"q', "b\\", "", "NULL", "a,b{}"], [FIRST_ID, None], [1, -2], [],
    ],
)  # fmt: skip
def test_what_is_written_into_a_statement_is_what_the_server_reads(town: Town, value: object) -> None:
    """A value as a literal is the value, whatever quotes and backslashes it has."""
    kind = {str: "text", UUID: "uuid", bool: "bool", int: "int8"}
    first = value[0] if isinstance(value, list) and value else value
    cast = kind.get(type(first), "text") + ("[]" if isinstance(value, list) else "")
    with town.consumer.connect() as connection:
        for strings in ("on", "off"):
            connection.exec_driver_sql(f"SET standard_conforming_strings = {strings}")
            (read,) = connection.exec_driver_sql(f"SELECT {literal(value)}::{cast}".replace("%", "%%")).one()
            assert read == value


@pytest.mark.slow
def test_many_ids_equal_but_for_one(town: Town) -> None:
    """One difference among 200,000 messages is found, by digests that read next to nothing, and none is invented."""
    ids = town.plant_bulk(200_000)
    odd = random.choice(ids)  # noqa: S311
    town.run("UPDATE outbox.consumer_message SET body_digest = '\\x00' WHERE message_id = :id", id=odd)

    result = town.reconcile(tier=Tier.AUTO)

    assert result.plan.tier is Tier.DIGEST
    assert kinds(result) == {odd: Outcome.DIGEST_MISMATCH}
    assert counted(result) == {Outcome.CONSUMED: 199_999, Outcome.DIGEST_MISMATCH: 1}
    assert result.plan.differing == 1
    assert result.plan.rows_read < 10_000
