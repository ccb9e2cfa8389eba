"""A question that no client could answer is no check, an answer counts wherever it was given; a stop waits for none."""

from __future__ import annotations

import threading
from contextlib import suppress

import grpc
import pytest
from sqlalchemy import Engine, create_engine
from sqlalchemy import text as sql

from outbox import Settings
from outbox.telemetry.events import CheckSkipped, HalfChecked
from outbox.telemetry.hooks import TelemetryEvent
from tests.kit import wait_until
from tests.rocketmq.conftest import NewServer
from tests.rocketmq.raw import RawClient, code, message
from tests.rocketmq.test_transactions import asked, begin, decisions

#: Halves are orphans at once and are asked about often; a question waits for longer than a test may last.
PATIENT = Settings(immunity=0, check_interval=0.2, check_timeout=1000, check_time_limit=1000, max_checks=1)


def checked(engine: Engine) -> list[int]:
    """Return how many checks the undecided halves have used."""
    with engine.connect() as connection:
        return list(connection.execute(sql("SELECT check_times FROM outbox.half_check")).scalars())


@pytest.mark.parametrize("end", ["cut", "half_close", "goodbye"])
def test_a_producer_that_goes_away_while_it_is_asked(
    end: str, new_server: NewServer, engine: Engine, heard: list[TelemetryEvent]
) -> None:
    """Its question ends at once, and costs no check, of which there is one: the next producer is asked."""
    server = new_server(PATIENT)
    with RawClient(server.addresses[0]) as raw:
        transaction = begin(raw)
        for _ in range(3):
            with RawClient(server.addresses[0]) as dying:
                stream = dying.telemetry(dying.producing("paid"))
                assert asked(stream)[0] == transaction
                if end == "goodbye":
                    dying.call("NotifyClientTermination", {})
                else:
                    getattr(stream, end)()
                wait_until(lambda: checked(engine) == [0], "the question is taken back")
        asked(raw.telemetry(raw.producing("paid")))
        assert code(raw.end("paid", transaction, "COMMIT")) == 20000
    assert decisions(engine) == [(transaction, "commit", "check")]
    assert len([each for each in heard if isinstance(each, CheckSkipped)]) == 3
    assert [each.resolution for each in heard if isinstance(each, HalfChecked)] == ["commit"]


def test_an_answer_at_another_server(new_server: NewServer, engine: Engine, heard: list[TelemetryEvent]) -> None:
    """The one that has asked finds the verdict, and doesn't rank the client behind others."""
    asker = new_server(Settings(immunity=0, check_interval=0.3, check_timeout=5))
    other = new_server(Settings(immunity=3600, check_interval=3600))
    with RawClient(asker.addresses[0]) as raw, RawClient(other.addresses[0]) as elsewhere:
        stream = raw.telemetry(raw.producing("paid"))
        transaction = begin(raw)
        assert asked(stream)[0] == transaction
        assert code(elsewhere.end("paid", transaction, "COMMIT", source="SOURCE_SERVER_CHECK")) == 20000
        wait_until(lambda: any(isinstance(each, HalfChecked) for each in heard), "the question has ended")
        assert [each.unanswered_at for each in asker.clients._clients.values()] == [None]
    told = [each for each in heard if isinstance(each, HalfChecked)]
    assert [(each.resolution, each.error) for each in told] == [("commit", None)]
    assert decisions(engine) == [(transaction, "commit", "producer")]


def test_of_several_streams_the_one_that_was_spoken_by(new_server: NewServer) -> None:
    """A stream that is opened beside it, and says nothing, gets no question: which one comes first is chance."""
    server = new_server(PATIENT)
    with RawClient(server.addresses[0]) as raw:
        stream, silent = raw.telemetry(raw.producing("paid")), raw.telemetry()
        (client,) = server.clients._clients.values()
        wait_until(lambda: len(client.streams) == 2, "both are open")
        stream.send({"settings": raw.producing("paid")})
        assert stream.get() is not None
        transaction = begin(raw)
        assert asked(stream)[0] == transaction
        assert silent.nothing(0)


def test_a_stream_that_answers_nothing_is_not_the_only_one(new_server: NewServer) -> None:
    """The next question goes by another one of that client: a stream may be dead, and not known to be."""
    server = new_server(Settings(immunity=0, check_interval=0.2, check_timeout=1))
    with RawClient(server.addresses[0]) as raw:
        stream = raw.telemetry(raw.producing("paid"))
        dead = raw.telemetry(raw.producing("paid"))
        transaction = begin(raw)
        assert [asked(each)[0] for each in (dead, stream)] == [transaction] * 2


def test_a_stop_takes_its_questions_back(new_server: NewServer, engine: Engine) -> None:
    """It doesn't wait for their answers, and they cost no check."""
    server = new_server(PATIENT)
    with RawClient(server.addresses[0]) as raw:
        stream = raw.telemetry(raw.producing("paid"))
        begin(raw)
        asked(stream)
        server.stop()
        assert stream.get() is None
    assert checked(engine) == [0]


@pytest.mark.parametrize("sends", [1, 20])
def test_a_stop_waits_for_no_lock(sends: int, new_server: NewServer, engine: Engine) -> None:
    """While another transaction holds a table, what waits for it is rolled back, and the server's report is gone."""
    server, holder = new_server(Settings(drain_timeout=1)), create_engine(engine.url)
    with RawClient(server.addresses[0]) as raw:
        raw.send(message("orders"))

        def send() -> None:
            with suppress(grpc.RpcError):  # cut off, or answered by a failure
                raw.send(message("orders"))

        with holder.connect() as connection, connection.begin():
            connection.execute(sql("LOCK TABLE outbox.half_message IN SHARE MODE"))
            threads = [threading.Thread(target=send, daemon=True) for _ in range(sends)]
            for thread in threads:
                thread.start()
            wait_until(lambda: waiting(engine), "they wait for the table")
            server.stop()
            for thread in threads:
                thread.join()
            with engine.connect() as other:
                assert not other.execute(sql("SELECT count(*) FROM outbox.worker")).scalar_one()
    holder.dispose()
    wait_until(lambda: waiting(engine) == 0, "PostgreSQL has seen that they are gone")
    with engine.connect() as connection:
        assert connection.execute(sql("SELECT count(*) FROM outbox.half_message")).scalar_one() == 1


def waiting(engine: Engine) -> int:
    """Return how many sessions wait for a lock."""
    query = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    with engine.connect() as connection:
        return int(connection.execute(sql(query)).scalar_one())
