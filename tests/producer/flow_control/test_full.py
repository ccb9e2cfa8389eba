"""Producers are refused while too much of a topic waits: at which limit, in which transaction."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest
from sqlalchemy import Engine, create_engine, insert
from sqlalchemy.orm import Session

from outbox import Outbox, Settings
from outbox.embedded import ServerLike
from outbox.errors import OutboxBusy, SchemaMissing
from tests.kit import dispatch_all
from tests.producer.backlog import prepare_many, send_many
from tests.producer.bank import KINDS, Databases, Kind, change, changes, drive, halves, messages, opened, settle, write
from tests.producer.conftest import SECOND_SCHEMA
from tests.producer.flow_control.limits import limited, tell

#: Which limits concern what is sent, and what is prepared.
CONCERNED = (("send", "max_undispatched"), ("prepare", "max_undispatched"), ("prepare", "max_undecided"))
FILL: dict[str, Callable[..., None]] = {"max_undispatched": send_many, "max_undecided": prepare_many}
WHAT = {"max_undispatched": "undispatched messages", "max_undecided": "undecided halves"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("how", "setting"), CONCERNED)
def test_full_topic(how: str, setting: str, kind: Kind, url: str, engine: Engine, counted_once: None) -> None:
    """The commit that finds the topic full writes nothing, change included; from then on, sending itself is refused."""
    FILL[setting](engine, 3)

    async def act(databases: Databases) -> None:
        outbox = Outbox(databases.engine_for(kind), settings=Settings(**{setting: 3}))  # type: ignore[arg-type]
        refused = f"topic 't' has reached its limit of 3 {WHAT[setting]} .setting {setting}; 3 counted.: nothing"
        async with opened(kind, databases) as carrier:
            await write(carrier, 1)
            getattr(outbox, how)(carrier, "t", {"number": 1})
            with pytest.raises(OutboxBusy, match=refused) as caught:
                await settle(carrier.commit())
            busy = caught.value
            assert (busy.topic, busy.what, busy.waiting, busy.limit, busy.setting) == (
                "t",
                WHAT[setting],
                3,
                3,
                setting,
            )
            await settle(carrier.rollback())

            await write(carrier, 2)
            with pytest.raises(OutboxBusy, match=refused):
                getattr(outbox, how)(carrier, "t", {"number": 2})
            await settle(carrier.commit())

            # Of another topic, on the same connection.
            await write(carrier, 3)
            getattr(outbox, how)(carrier, "other", {"number": 3})
            await settle(carrier.commit())

    before = len(halves(engine))
    drive(url, act)
    assert changes(engine) == {2, 3}
    assert [half.body["number"] for half in halves(engine) if half.topic == "other"] == [3]
    assert len(halves(engine)) == before + 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("how", "setting"), CONCERNED)
def test_topic_below_its_limit(how: str, setting: str, kind: Kind, url: str, engine: Engine) -> None:
    """One less than the limit: the message is written, and the count leaves the transaction as it was."""
    FILL[setting](engine, 2)

    async def act(databases: Databases) -> None:
        outbox = Outbox(databases.engine_for(kind), settings=Settings(**{setting: 3}))  # type: ignore[arg-type]
        async with opened(kind, databases) as carrier:
            await write(carrier, 1)
            getattr(outbox, how)(carrier, "t", {"number": 1})
            await settle(carrier.commit())

    drive(url, act)
    assert changes(engine) == {1}
    assert len(halves(engine)) == 3


def test_undecided_halves_refuse_no_sends(engine: Engine, always_counted: None) -> None:
    """A limit on undecided halves concerns what is prepared: a message that is sent adds none."""
    prepare_many(engine, 5)
    outbox = limited(engine, "max_undecided")
    tell(outbox, engine, 1)
    with pytest.raises(OutboxBusy), engine.begin() as connection:
        outbox.prepare(connection, "t", {"number": 2})
    with pytest.raises(OutboxBusy), engine.begin() as connection:
        outbox.send(connection, "t", {"number": 3})
        outbox.prepare(connection, "t", {"number": 4})
    assert messages(engine) == [1]


def test_send_beside_a_prepared_half(engine: Engine, counted_once: None) -> None:
    """Where a topic is full of undecided halves, a message to it is sent, also beside a half of another topic."""
    prepare_many(engine, 3)
    outbox = limited(engine, "max_undecided")
    for number in (1, 2):
        with engine.begin() as connection:
            outbox.send(connection, "t", {"number": number})
            outbox.prepare(connection, "other", {"number": number})
    assert messages(engine) == [1, 2]


def test_parked_halves_do_not_count(engine: Engine, always_counted: None) -> None:
    """Parked halves wait for a human, however many: producers aren't to blame for them."""
    prepare_many(engine, 50, parked=True)
    prepare_many(engine, 2)
    outbox = limited(engine, "max_undecided")
    with engine.begin() as connection:
        outbox.prepare(connection, "t", {"number": 1})
    with pytest.raises(OutboxBusy), engine.begin() as connection:
        outbox.prepare(connection, "t", {"number": 2})


def test_scheduled_messages_do_not_count(engine: Engine, always_counted: None) -> None:
    """A message that dispatch has put aside for later isn't undispatched."""
    outbox = limited(engine)
    for number in range(3):
        with engine.begin() as connection:
            outbox.send(connection, "t", {"number": number}, delay=3600)
    with pytest.raises(OutboxBusy):
        tell(outbox, engine, 3)
    dispatch_all(engine, outbox.settings)
    tell(outbox, engine, 4)
    assert changes(engine) == {4}


def test_both_limits(engine: Engine, always_counted: None) -> None:
    """With both limits, the one that is reached is named."""
    outbox = limited(engine, max_undecided=2)
    prepare_many(engine, 2)
    tell(outbox, engine, 1)
    with pytest.raises(OutboxBusy, match="max_undecided"), engine.begin() as connection:
        outbox.prepare(connection, "t", {"number": 2})
    send_many(engine, 2)
    with pytest.raises(OutboxBusy, match="max_undispatched"):
        tell(outbox, engine, 3)


def test_one_full_topic_of_several(engine: Engine, always_counted: None) -> None:
    """A transaction that sends to several topics is refused as a whole, and told which one is full."""
    send_many(engine, 3, "full")
    outbox = limited(engine)
    with pytest.raises(OutboxBusy, match="'full'"), engine.begin() as connection:
        connection.execute(insert(change).values(number=1))
        for topic in ("a", "full", "b"):
            outbox.send(connection, topic, {"number": 1})
    assert (changes(engine), {half.topic for half in halves(engine)}) == (set(), {"full"})


def test_two_schemas(engine: Engine, always_counted: None) -> None:
    """Each schema has its own topics; a transaction over both is refused as a whole."""
    send_many(engine, 3, schema=SECOND_SCHEMA)
    first, second = limited(engine), limited(engine, schema=SECOND_SCHEMA)
    tell(first, engine, 1)
    with pytest.raises(OutboxBusy), engine.begin() as connection:
        connection.execute(insert(change).values(number=2))
        first.send(connection, "t", {"number": 2})
        second.send(connection, "t", {"number": 2})
    assert (changes(engine), messages(engine), len(messages(engine, SECOND_SCHEMA))) == ({1}, [1], 3)


def test_engines_that_share_a_pool(engine: Engine, counts: list[int], counted_once: None) -> None:
    """An engine with options of its own leads to the same database: it isn't counted anew for each."""
    outbox = limited(engine, limit=10)
    for number in range(5):
        tell(outbox, engine.execution_options(isolation_level="READ COMMITTED"), number)
    assert len(counts) == 1
    assert len(messages(engine)) == 5


def test_unknown_carrier_is_refused_as_ever(engine: Engine) -> None:
    """A limit changes nothing in what is said to somebody who passes no session."""
    outbox = limited(engine)
    for carrier in (None, "session", Session, engine):
        with pytest.raises(ValueError, match="is sent with a Session"):
            outbox.send(carrier, "t", {})  # type: ignore[call-overload]


def test_database_without_tables(server: ServerLike) -> None:
    """Where the tables are missing, a limit that can't be counted says so as a send does."""
    server.create_database("flow_empty")
    engine = create_engine(server.url("flow_empty"))
    try:
        outbox = limited(engine, max_undecided=3)
        with pytest.raises(SchemaMissing, match="outbox db upgrade"), engine.begin() as connection:
            outbox.prepare(connection, "t", {"number": 1})
    finally:
        engine.dispose()
        server.drop_database("flow_empty")


def test_error_survives_pickling() -> None:
    """A process pool hands the error on with all that it says."""
    busy = OutboxBusy("t", "undecided halves", 7, 5, "max_undecided")
    again = pickle.loads(pickle.dumps(busy))  # noqa: S301
    assert (str(again), vars(again)) == (str(busy), vars(busy))
