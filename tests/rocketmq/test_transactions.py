"""A half is decided once, by its client or by the check, which asks clients that are connected, and no one else."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import Engine
from sqlalchemy import text as sql

from outbox import Orphan, Outbox, Resolution, Settings
from outbox.check.asker import Asker
from outbox.check.check_pass import check_once
from outbox.database.engines import EngineRunner
from outbox.operator.health.examine import examine
from outbox.rocketmq.sending import EndItem
from outbox.rocketmq.server import RocketmqServer
from outbox.telemetry.events import CheckerMissing, HalfChecked, ProducerMissing
from outbox.telemetry.hooks import TelemetryEvent
from tests.kit import wait_until
from tests.rocketmq.conftest import NewServer
from tests.rocketmq.raw import RawClient, Telemetry, body_of, client_id, code, message, text

#: Halves are orphans at once, and asked about often.
EAGER = Settings(immunity=0, check_interval=0.3, check_timeout=2)


def half(topic: str = "paid", **system: Any) -> dict[str, Any]:
    """Return a message that begins a transaction."""
    return message(topic, b"half", {"a": "b"}, message_type="TRANSACTION", **system)


def begin(raw: RawClient, topic: str = "paid", **system: Any) -> str:
    """Send a half; return its transaction's id."""
    (entry,) = raw.send(half(topic, **system))["entries"]
    return str(entry["transaction_id"])


def decisions(engine: Engine) -> list[tuple[str, str, str]]:
    """Return the decided halves with their verdicts, and what decided them."""
    with engine.connect() as connection:
        rows = connection.execute(
            sql("SELECT half_id, resolution, decided_by FROM outbox.op_message ORDER BY sequence")
        )
        return [(str(half_id), resolution, by) for half_id, resolution, by in rows]


def checks(engine: Engine) -> list[Any]:
    """Return the halves that wait for a check."""
    with engine.connect() as connection:
        return list(connection.execute(sql("SELECT * FROM outbox.half_check ORDER BY half_id")))


@pytest.fixture
def eager(new_server: NewServer) -> RocketmqServer:
    """A server that asks soon and often."""
    return new_server(EAGER)


@pytest.fixture
def producer(eager: RocketmqServer) -> Iterator[tuple[RawClient, Telemetry]]:
    """A producer that is connected to it, and its stream."""
    with RawClient(eager.addresses[0]) as raw:
        yield raw, raw.telemetry(raw.producing("paid"))


def asked(stream: Telemetry) -> tuple[str, dict[str, Any]]:
    """Return the transaction that the server asks about next, and its message."""
    command = stream.get()
    assert command is not None
    question = command["recover_orphaned_transaction_command"]
    return question["transaction_id"], question["message"]


# --- verdicts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verdict", ["COMMIT", "ROLLBACK"])
def test_a_verdict_counts_once(raw: RawClient, engine: Engine, verdict: str) -> None:
    """The same one again is in order, the other one is refused; the first has won."""
    transaction = begin(raw)
    assert decisions(engine) == []
    assert [code(raw.end("paid", transaction, verdict)) for _ in range(2)] == [20000, 20000]
    other = raw.end("paid", transaction, "ROLLBACK" if verdict == "COMMIT" else "COMMIT")
    assert code(other) == 42800
    assert "was already" in text(other)
    assert decisions(engine) == [(transaction, verdict.lower(), "producer")]


def test_halves_of_one_id_are_two(raw: RawClient, rocketmq: RocketmqServer, engine: Engine) -> None:
    """Clients make the same ids by chance: each decides its own half."""
    sent = client_id()
    with RawClient(rocketmq.addresses[0]) as other:
        one, two = (begin(each, message_id=sent) for each in (raw, other))
        assert one != two
        assert begin(raw, message_id=sent) == one
        assert code(other.end("paid", two, "ROLLBACK")) == code(raw.end("paid", one, "COMMIT")) == 20000
        assert decisions(engine) == [(two, "rollback", "producer"), (one, "commit", "producer")]


def test_an_unknown_verdict_decides_nothing(raw: RawClient, engine: Engine) -> None:
    """Go and Python say so; a COMMIT after it counts, whatever source it names."""
    transaction = begin(raw)
    assert code(raw.end("paid", transaction, "TRANSACTION_RESOLUTION_UNSPECIFIED")) == 20000
    assert decisions(engine) == []
    assert code(raw.end("paid", transaction, "COMMIT", "SOURCE_SERVER_CHECK")) == 20000
    assert decisions(engine) == [(transaction, "commit", "producer")]


def test_unknown_transactions(raw: RawClient, engine: Engine) -> None:
    """No id, one that is none, one of no half, of another topic, and a half that no client has sent."""
    outbox = Outbox(engine, settings=Settings())
    with engine.begin() as connection:
        native = outbox.prepare(connection, "paid", {"by": "python"})
    transaction = begin(raw)
    for id_, words in (
        ("", "transaction id cannot be empty"),
        (" ", "transaction id cannot be empty"),
        ("0123", "no transaction of this id and topic is known"),
        (str(uuid4()), "no transaction of this id and topic is known"),
        (str(native), "no transaction of this id and topic is known"),
    ):
        answer = raw.end("paid", id_, "COMMIT")
        assert (code(answer), text(answer)) == (40008, words)
    assert code(raw.end("others", transaction, "COMMIT")) == 40008
    assert decisions(engine) == []


def test_a_half_that_is_sent_again_is_the_same(raw: RawClient, engine: Engine) -> None:
    """Its answer was lost: the transaction is the same one, also once it is decided."""
    sent = half()
    first, second = (raw.send(sent)["entries"][0]["transaction_id"] for _ in range(2))
    assert first == second
    assert len(checks(engine)) == 1
    raw.end("paid", first, "COMMIT")
    assert raw.send(sent)["entries"][0]["transaction_id"] == first
    assert checks(engine) == []
    assert decisions(engine) == [(first, "commit", "producer")]


def test_the_recovery_duration_is_the_immunity(raw: RawClient, engine: Engine) -> None:
    """Else it is that of the settings; the half says what asks about it."""
    begin(raw, orphaned_transaction_recovery_duration="1800s")
    begin(raw)
    with engine.connect() as connection:
        waits = connection.execute(
            sql("SELECT asker, extract(epoch FROM next_check_at - clock_timestamp()) FROM outbox.half_check ORDER BY 2")
        ).all()
    assert [asker for asker, _ in waits] == ["rocketmq", "rocketmq"]
    assert 0 < waits[0][1] <= 6
    assert 1700 < waits[1][1] <= 1800


def test_verdicts_on_one_half_that_come_together(rocketmq: RocketmqServer, raw: RawClient) -> None:
    """The first one counts; one that names another topic is of no half, and takes nothing from the right one."""
    transaction = UUID(begin(raw))
    commit, rollback = Resolution.COMMIT, Resolution.ROLLBACK
    named = [("other", rollback), ("paid", commit), ("paid", rollback), ("other", commit)]
    items = [EndItem("c", topic, transaction, verdict) for topic, verdict in named]
    rocketmq.tables.do(lambda connection: rocketmq._sending._decide(items, connection))
    assert [item.earlier for item in items] == [None, (commit, "producer"), (commit, "producer"), None]


# --- the check -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verdict", ["COMMIT", "ROLLBACK"])
def test_an_orphan_is_asked_about(producer: tuple[RawClient, Telemetry], engine: Engine, verdict: str) -> None:
    """By the stream of its producer, whose EndTransaction is recorded as the answer, and answered after that."""
    raw, stream = producer
    transaction = begin(raw, tag="t", keys=["k"], message_group="g")
    about, orphan = asked(stream)
    assert about == transaction
    assert body_of(orphan) == b"half"
    system = orphan["system_properties"]
    assert [system[name] for name in ("tag", "keys", "message_group", "message_type")] == [
        "t",
        ["k"],
        "g",
        "TRANSACTION",
    ]
    assert orphan["user_properties"] == {"a": "b"}
    assert "receipt_handle" not in system
    assert code(raw.end("paid", transaction, verdict, "SOURCE_SERVER_CHECK")) == 20000
    assert decisions(engine) == [(transaction, verdict.lower(), "check")]
    with engine.connect() as connection:
        answers = connection.execute(sql("SELECT asked, answer FROM outbox.check_history")).all()
    assert answers == [("checker", verdict.lower())]


def test_unknown_is_asked_again(producer: tuple[RawClient, Telemetry], engine: Engine) -> None:
    """UNKNOWN ends the question at once; a time-out counts as one."""
    raw, stream = producer
    transaction = begin(raw)
    asked(stream)
    raw.end("paid", transaction, "TRANSACTION_RESOLUTION_UNSPECIFIED", "SOURCE_SERVER_CHECK")
    assert asked(stream)[0] == transaction
    # No answer to the second question.
    assert asked(stream)[0] == transaction
    raw.end("paid", transaction, "COMMIT", "SOURCE_SERVER_CHECK")
    assert decisions(engine) == [(transaction, "commit", "check")]
    (spent,) = [count_checks(engine)]
    assert spent == 3


def count_checks(engine: Engine) -> int:
    """Return how often halves were asked about."""
    with engine.connect() as connection:
        return int(connection.execute(sql("SELECT count(*) FROM outbox.check_history")).scalar_one())


def test_a_late_answer_counts(producer: tuple[RawClient, Telemetry], engine: Engine) -> None:
    """After the time-out of its question a verdict is the first all the same."""
    raw, stream = producer
    transaction = begin(raw)
    asked(stream)
    wait_until(lambda: [each for each in checks(engine) if each.last_error], "the question has timed out")
    assert code(raw.end("paid", transaction, "COMMIT", "SOURCE_SERVER_CHECK")) == 20000
    assert [(half_id, verdict) for half_id, verdict, _ in decisions(engine)] == [(transaction, "commit")]


def test_no_check_is_used_up_while_no_producer_is_there(
    eager: RocketmqServer, engine: Engine, heard: list[TelemetryEvent]
) -> None:
    """The halves wait, and the lack is told once; the first producer of the topic is asked."""
    with RawClient(eager.addresses[0]) as raw:
        transaction = begin(raw)
        wait_until(lambda: [each for each in heard if isinstance(each, ProducerMissing)], "the lack is told")
        time.sleep(1)
        assert [(each.topic, each.asker) for each in heard if isinstance(each, ProducerMissing)] == [
            ("paid", "rocketmq")
        ]
        assert [each.check_times for each in checks(engine)] == [0]
        assert not [each for each in heard if isinstance(each, CheckerMissing)]
        with RawClient(eager.addresses[0]) as other:
            stream = other.telemetry(other.producing("paid"))
            assert asked(stream)[0] == transaction
            assert code(other.end("paid", transaction, "COMMIT", "SOURCE_SERVER_CHECK")) == 20000


def test_a_half_is_parked_after_its_checks(new_server: NewServer, engine: Engine) -> None:
    """A producer that never knows: asked as often as the settings say; a verdict counts still."""
    server = new_server(Settings(immunity=0, check_interval=0.1, max_checks=2, check_timeout=5))
    with RawClient(server.addresses[0]) as raw:
        stream = raw.telemetry(raw.producing("paid"))
        transaction = begin(raw)
        for _ in range(2):
            asked(stream)
            raw.end("paid", transaction, "TRANSACTION_RESOLUTION_UNSPECIFIED", "SOURCE_SERVER_CHECK")
        wait_until(lambda: [each for each in checks(engine) if each.parked_at], "it is parked")
        assert stream.nothing(0.5)
        assert code(raw.end("paid", transaction, "COMMIT")) == 20000


def test_checkers_in_python_and_remote_producers_do_not_race(
    producer: tuple[RawClient, Telemetry], engine: Engine, heard: list[TelemetryEvent]
) -> None:
    """Of one topic, each is asked about its own halves alone, and neither is missed for the other's."""
    raw, stream = producer
    asked_here: list[UUID] = []
    outbox = Outbox(engine, settings=Settings(immunity=0))

    @outbox.checker("paid")
    def check(orphan: Orphan) -> Resolution:
        asked_here.append(orphan.id)
        return Resolution.ROLLBACK

    with engine.begin() as connection:
        native = outbox.prepare(connection, "paid", {"by": "python"})
    remote = begin(raw)
    asker = Asker(lambda _: EngineRunner(engine), 5)
    with engine.connect() as connection:
        check_once(connection, outbox.settings, outbox.checkers, asker)
        assert asked_here == [native]
        check_once(connection, outbox.settings, {}, asker)
    assert asked(stream)[0] == remote
    raw.end("paid", remote, "COMMIT", "SOURCE_SERVER_CHECK")
    assert stream.nothing(0.7)
    assert decisions(engine) == [(str(native), "rollback", "check"), (remote, "commit", "check")]
    assert not [each for each in heard if isinstance(each, CheckerMissing | ProducerMissing)]


def test_the_sender_is_asked_first(eager: RocketmqServer, engine: Engine) -> None:
    """Then another one that has sent halves; one that let a question time out comes last; one that left is out."""
    with RawClient(eager.addresses[0]) as first, RawClient(eager.addresses[0]) as second:
        streams = {each.id: each.telemetry(each.producing("paid")) for each in (first, second)}
        for sender in (second, first, second):
            transaction = begin(sender)
            assert asked(streams[sender.id])[0] == transaction
            sender.end("paid", transaction, "COMMIT", "SOURCE_SERVER_CHECK")
        third = RawClient(eager.addresses[0])
        third.telemetry(third.producing("paid"))
        names = [each.id for each in eager.clients.producers("paid", second.id)]
        assert names == [second.id, first.id, third.id]
        transaction = begin(second)
        asked(streams[second.id])  # no answer: the other one is asked next
        assert asked(streams[first.id])[0] == transaction
        first.end("paid", transaction, "COMMIT", "SOURCE_SERVER_CHECK")
        first.call("NotifyClientTermination", {})
        names = [each.id for each in eager.clients.producers("paid", second.id)]
        assert names == [third.id, second.id]
        third.channel.close()


def test_another_process_of_the_producer_is_asked_after_a_crash(eager: RocketmqServer, engine: Engine) -> None:
    """A producer dies between half and commit; the one that comes after it is asked."""
    with RawClient(eager.addresses[0]) as dead:
        stream = dead.telemetry(dead.producing("others"))
        transaction = begin(dead)
        stream.cut()
    with RawClient(eager.addresses[0]) as reborn:
        stream = reborn.telemetry(reborn.producing("paid"))
        assert asked(stream)[0] == transaction
        reborn.end("paid", transaction, "ROLLBACK", "SOURCE_SERVER_CHECK")
    assert decisions(engine) == [(transaction, "rollback", "check")]


def test_two_servers_share_the_halves(new_server: NewServer, engine: Engine, heard: list[TelemetryEvent]) -> None:
    """Each half is asked about by one of them at a time, and decided once."""
    servers = [new_server(EAGER) for _ in range(2)]
    clients = [RawClient(server.addresses[0]) for server in servers]
    streams = [client.telemetry(client.producing("paid")) for client in clients]
    transactions = {begin(clients[0]) for _ in range(10)}
    answering = [_answer_all(client, stream) for client, stream in zip(clients, streams, strict=True)]
    wait_until(lambda: len(decisions(engine)) == 10, "all are decided")
    for stream, thread in zip(streams, answering, strict=True):
        stream.half_close()
        thread.join()
    assert {half_id for half_id, _, by in decisions(engine) if by == "check"} == transactions
    assert len([each for each in heard if isinstance(each, HalfChecked)]) == 10
    for client in clients:
        client.channel.close()


def _answer_all(client: RawClient, stream: Telemetry) -> threading.Thread:
    """Start a thread that commits all that is asked about, until the stream ends."""

    def answer() -> None:
        while (command := stream.get()) is not None:
            question = command["recover_orphaned_transaction_command"]
            client.end("paid", question["transaction_id"], "COMMIT", "SOURCE_SERVER_CHECK")

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    return thread


def test_the_doctor_tells_remote_halves_apart(raw: RawClient, engine: Engine) -> None:
    """No checker is missing for them; that no producer is connected is said so."""
    begin(raw)
    with engine.begin() as connection:
        connection.execute(sql("UPDATE outbox.half_check SET next_check_at = clock_timestamp() - interval '1 h'"))
    found = {finding.code: finding for finding in examine(engine).findings}
    assert "checker.missing" not in found
    assert "no RocketMQ client is connected" in found["check.late"].sentence
    assert "outbox rocketmq serve" in found["check.late"].mend


def test_topics_that_are_none_stop_no_check(eager: RocketmqServer, engine: Engine) -> None:
    """A client that names topics which can't be keeps nobody else's halves from being asked about."""
    with RawClient(eager.addresses[0]) as odd, RawClient(eager.addresses[0]) as raw:
        odd.telemetry(odd.producing("a\0b", "", " ", "x" * 1000, "a b", "\U0001f600", "outbox.parked"))
        stream = raw.telemetry(raw.producing("paid"))
        transaction = begin(raw)
        assert asked(stream)[0] == transaction
