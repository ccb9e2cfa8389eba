"""A server that is killed at any step of a call: the client repeats it at another one, and all is as if it lived."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from sqlalchemy import Engine, create_engine, text

from outbox import Outbox, Settings
from outbox.database import migration
from outbox.embedded import Server
from outbox.rocketmq.server import Listen, RocketmqServer
from tests.kit.effort import stride
from tests.kit.passes import dispatch_all
from tests.kit.processes import python
from tests.kit.waiting import wait_until
from tests.rocketmq.conftest import FIFO_GROUP, NewServer, options_of
from tests.rocketmq.raw import RawClient, body_of, code, handle_of, message

_APART = [("grpc.use_local_subchannel_pool", 1)]
_NAMED: dict[str, Any] = {"topic": {"name": "orders"}, "group": {"name": "ordered"}}


@pytest.fixture
def survivor(new_server: NewServer) -> Iterator[RawClient]:
    """A client of a server of this process, which lives on."""
    with RawClient(new_server(groups=FIFO_GROUP).addresses[0]) as client:
        yield client


def rows(engine: Engine, query: str) -> list[Any]:
    """Return rows."""
    with engine.connect() as connection:
        return [tuple(row) for row in connection.execute(text(query))]


class Victims:
    """Servers that are killed at a point; ``survivor`` is the client of the one that lives on."""

    def __init__(self, engine: Engine, survivor: RawClient) -> None:
        self.engine, self.survivor = engine, survivor

    def call(self, point: int, name: str, request: dict[str, Any]) -> bool:
        """Make a call at a server that dies at this point; tell whether it was answered with OK before."""
        with (
            python("tests.rocketmq.dying", self.engine) as process,
            RawClient(self._start(process), options=_APART) as raw,
        ):
            raw.id = self.survivor.id  # it is one client, which comes to the other server then
            assert process.stdin
            assert process.stdout
            process.stdin.write(f"{point}\n")
            process.stdin.flush()
            assert process.stdout.readline() == "armed\n"
            try:
                answer = raw.call(name, request, timeout=60)
            except grpc.RpcError:
                assert process.wait(60) == -9
                return False
            status = answer[0] if isinstance(answer, list) else answer
            assert code(status) == 20000
            return True

    def _start(self, process: subprocess.Popen[str]) -> str:
        assert process.stdout
        return f"127.0.0.1:{int(process.stdout.readline())}"

    def take(self) -> dict[str, Any]:
        """Send a message, and take it at the survivor."""
        self.survivor.send(message("orders", b"1", message_group="g"))
        dispatch_all(self.engine)
        _, (received,) = self.survivor.receive("orders", "ordered")
        return received

    # --- the acts: each makes its call at a victim, repeats it at the survivor, and looks -----------------------------

    def send(self, point: int) -> bool:
        """Of a message that is sent twice there is one."""
        request = {"messages": [message("orders", b"1")]}
        answered = self.call(point, "SendMessage", request)
        assert code(self.survivor.call("SendMessage", request)) == 20000
        id_ = request["messages"][0]["system_properties"]["message_id"]
        dispatch_all(self.engine)
        found = f"""SELECT count(DISTINCT h.id), count(*) FROM outbox.half_message h
                      JOIN outbox.message m ON m.half_id = h.id WHERE headers ->> 'rocketmq-id' = '{id_}'"""
        assert rows(self.engine, found) == [(1, 1)]
        return answered

    def transaction(self, point: int) -> bool:
        """A verdict that is given twice counts once."""
        (entry,) = self.survivor.send(message("orders", message_type="TRANSACTION"))["entries"]
        request = {"topic": {"name": "orders"}, "message_id": "any", "resolution": "COMMIT"}
        request["transaction_id"] = entry["transaction_id"]
        answered = self.call(point, "EndTransaction", request)
        assert code(self.survivor.call("EndTransaction", request)) == 20000
        assert code(self.survivor.call("EndTransaction", request | {"resolution": "ROLLBACK"})) == 42800
        return answered

    def receive(self, point: int) -> bool:
        """What a receive has taken comes again to the one that repeats it, and to no other, as the same attempt."""
        self.survivor.send(message("orders", b"1", message_group="g"))
        dispatch_all(self.engine)
        request = _NAMED | {"message_queue": {"topic": {"name": "orders"}}, "batch_size": 32, "attempt_id": f"A{point}",
                            "invisible_duration": "60s", "long_polling_timeout": "5s"}  # fmt: skip
        del request["topic"]
        answered = self.call(point, "ReceiveMessage", request)
        _, (received,) = self.survivor.receive("orders", "ordered", attempt_id=f"A{point}")
        assert received["system_properties"]["delivery_attempt"] == 1
        assert code(self.survivor.ack("orders", "ordered", handle_of(received))) == 20000
        return answered

    def ack(self, point: int) -> bool:
        """A message that is acknowledged twice is consumed once."""
        request = _NAMED | {"entries": [{"receipt_handle": handle_of(self.take())}]}
        answered = self.call(point, "AckMessage", request)
        assert code(self.survivor.call("AckMessage", request)) == 20000
        assert set(rows(self.engine, "SELECT status, attempts FROM outbox.consumer_message")) == {("consumed", 1)}
        return answered

    def change(self, point: int) -> bool:
        """The lease is changed or it isn't: the handle of before tells, and the message isn't lost."""
        handle = handle_of(self.take())
        answered = self.call(
            point, "ChangeInvisibleDuration", _NAMED | {"receipt_handle": handle, "invisible_duration": "0s"}
        )
        found = code(self.survivor.ack("orders", "ordered", handle))
        assert found in {20000, 40013}
        if found == 40013:
            _, (again,) = self.survivor.receive("orders", "ordered")
            assert code(self.survivor.ack("orders", "ordered", handle_of(again))) == 20000
        assert {status for (status,) in rows(self.engine, "SELECT status FROM outbox.consumer_message")} == {"consumed"}
        return answered

    def forward(self, point: int) -> bool:
        """It is parked, and counted once."""
        received = self.take()
        request = _NAMED | {"receipt_handle": handle_of(received), "delivery_attempt": 1, "max_delivery_attempts": 1}
        answered = self.call(point, "ForwardMessageToDeadLetterQueue", request)
        assert code(self.survivor.call("ForwardMessageToDeadLetterQueue", request)) == 20000
        states = "SELECT status, attempts FROM outbox.consumer_message"
        assert set(rows(self.engine, states)) == {("parked", 1)}
        counts = "SELECT count(*) FROM outbox.attempt_history GROUP BY message_id"
        assert set(rows(self.engine, counts)) == {(1,)}
        return answered


_ACTS: dict[str, Callable[[Victims, int], bool]] = {
    "send": Victims.send,
    "transaction": Victims.transaction,
    "receive": Victims.receive,
    "ack": Victims.ack,
    "change": Victims.change,
    "forward": Victims.forward,
}


@pytest.mark.parametrize("act", list(_ACTS))
def test_killed_at_any_step(act: str, engine: Engine, survivor: RawClient) -> None:
    """Before and after what is sent to PostgreSQL, of which a night tries all, until the call comes to its end."""
    Outbox(engine).declare_topic("orders", 1)
    victims = Victims(engine, survivor)
    died = 0
    for point in range(1, 200, stride(3)):
        if _ACTS[act](victims, point):
            break
        died += 1
    assert died > 0
    assert point < 100


def test_postgresql_is_restarted(tmp_path: Path) -> None:
    """Handles and polls of before are good after it; the server reconnects by itself."""
    with Server(folder=tmp_path / "data") as database:
        database.create_database("shop")
        migration.upgrade(database.url("shop"))
        engine = create_engine(database.url("shop"), pool_pre_ping=True)
        server = RocketmqServer(Outbox(engine, settings=Settings()), options_of(), [Listen(port=0)])
        server.start()
        try:
            with RawClient(server.addresses[0]) as raw:
                for number in range(3):
                    assert code(raw.send(message("orders", b"%d" % number))) == 20000
                dispatch_all(engine)
                _, got = raw.receive("orders", "mail")
                database.kill()
                assert code(raw.ack("orders", "mail", handle_of(got[0]))) in {50001, 40013}
                assert code(raw.send(message("orders"))) == 50001
                database.start()
                sent = message("orders", b"after")
                wait_until(lambda: code(raw.send(sent)) == 20000, "it sends again")
                assert code(raw.ack("orders", "mail", *map(handle_of, got))) == 20000
                dispatch_all(engine)
                wait_until(
                    lambda: [body_of(each) for each in raw.receive("orders", "mail")[1]] == [b"after"], "it comes"
                )
        finally:
            server.stop()
            engine.dispose()
