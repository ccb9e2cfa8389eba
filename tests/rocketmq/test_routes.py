"""Clients find their way, are told how to behave, and are heard."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from outbox.rocketmq.options import GroupOptions, ServedTopic
from outbox.rocketmq.server import RocketmqServer
from tests.kit import wait_until
from tests.rocketmq.conftest import NewServer
from tests.rocketmq.raw import RawClient, code, text


def test_a_route_is_at_the_address_that_was_asked(raw: RawClient) -> None:
    """Every queue is at the endpoints of the request, whatever they are, and takes all types."""
    asked = {"scheme": "DOMAIN_NAME", "addresses": [{"host": "mq.example", "port": 1234}]}
    answer = raw.call("QueryRoute", {"topic": {"name": "orders"}, "endpoints": asked})
    assert code(answer) == 20000
    assert [queue.get("id", 0) for queue in answer["message_queues"]] == [*range(8)]
    for queue in answer["message_queues"]:
        assert queue["broker"] == {"name": "outbox", "endpoints": asked}
        assert queue["permission"] == "READ_WRITE"
        assert queue["accept_message_types"] == ["NORMAL", "FIFO", "DELAY", "TRANSACTION"]


def test_a_route_of_a_declared_topic(new_server: NewServer) -> None:
    """It has the type and the queues that were declared; of an unknown topic there is none."""
    server = new_server(auto_create=False, topics={"fifo": ServedTopic("FIFO", 2)})
    with RawClient(server.addresses[0]) as raw:
        answer = raw.call("QueryRoute", {"topic": {"name": "fifo"}})
        assert [queue["accept_message_types"] for queue in answer["message_queues"]] == [["FIFO"], ["FIFO"]]
        assert code(raw.call("QueryRoute", {"topic": {"name": "unknown"}})) == 40402
        assert code(raw.call("QueryAssignment", {"topic": {"name": "unknown"}, "group": {"name": "g"}})) == 40402


def test_assignments(new_server: NewServer) -> None:
    """One queue stands for all; a group that keeps the order has each."""
    server = new_server(groups={"ordered": GroupOptions(fifo=True)})
    with RawClient(server.addresses[0]) as raw:

        def numbers(group: str) -> list[int]:
            request = {"topic": {"name": "orders"}, "group": {"name": group}, "endpoints": raw.endpoints()}
            answer = raw.call("QueryAssignment", request)
            return [each["message_queue"].get("id", 0) for each in answer["assignments"]]

        assert numbers("any") == [-1]
        assert numbers("ordered") == [*range(8)]


def test_no_client_id(raw: RawClient) -> None:
    """Each call says so in its body, the stream in a command."""
    topic = {"topic": {"name": "orders"}}
    for call, request in (("SendMessage", {}), ("QueryRoute", topic), ("Heartbeat", {}), ("EndTransaction", topic)):
        answer = raw.call(call, request, x_mq_client_id=None)
        assert (code(answer), text(answer)) == (40017, "client id cannot be empty")
    command = raw.telemetry(x_mq_client_id=None).get()
    assert command is not None
    assert (code(command), text(command)) == (40017, "client id cannot be empty")


def test_calls_that_no_client_makes(raw: RawClient) -> None:
    """They aren't there, as at the proxy."""
    for call in ("PullMessage", "UpdateOffset", "GetOffset", "QueryOffset", "SyncLiteSubscription"):
        with pytest.raises(grpc.RpcError) as error:
            raw.call(call, {})
        assert error.value.code() == grpc.StatusCode.UNIMPLEMENTED


def test_settings_of_a_producer(raw: RawClient) -> None:
    """What a client sent comes back, with what the server says of it."""
    sent = raw.producing("orders") | {"request_timeout": "3s"}
    answer = raw.telemetry().send({"settings": sent}).get()
    assert answer is not None
    assert code(answer) == 20000
    settings = answer["settings"]
    assert settings["request_timeout"] == "3s"
    assert settings["access_point"] == raw.endpoints()
    backoff = {"initial": "0.010s", "max": "1s", "multiplier": 2.0}
    assert settings["backoff_policy"] == {"max_attempts": 3, "exponential_backoff": backoff}
    publishing = {"topics": [{"name": "orders"}], "max_body_size": 4194304, "validate_message_type": True}
    assert settings["publishing"] == publishing
    assert settings["metric"] == {}


def test_settings_of_a_consumer(new_server: NewServer) -> None:
    """The group's retries and order, and the numbers without which a push consumer never receives."""
    server = new_server(groups={"ordered": GroupOptions(fifo=True, max_attempts=3, retry_delays=(1, 2.5))})
    with RawClient(server.addresses[0]) as raw:
        stream = raw.telemetry()
        for group, fifo, backoff in (
            ("ordered", True, {"max_attempts": 3, "customized_backoff": {"next": ["1s", "2.500s"]}}),
            ("any", False, None),
        ):
            answer = stream.send({"settings": raw.consuming(group, "orders", kind="PUSH_CONSUMER")}).get()
            assert answer is not None
            subscription = answer["settings"]["subscription"]
            assert subscription["fifo"] is fifo
            assert subscription["receive_batch_size"] == 32
            assert subscription["long_polling_timeout"] == "20s"
            assert subscription["subscriptions"][0]["topic"] == {"name": "orders"}
            policy = answer["settings"]["backoff_policy"]
            assert policy == backoff or (policy["max_attempts"], len(policy["customized_backoff"]["next"])) == (17, 18)


def test_settings_of_neither(raw: RawClient) -> None:
    """They end the stream with INVALID_ARGUMENT; a command that says nothing doesn't."""
    stream = raw.telemetry().send({})
    assert stream.nothing(0.3)
    stream.send({"settings": {"client_type": "PRODUCER"}})
    assert stream.get() is None
    assert stream.failure.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert stream.failure.details() == "there is no publishing or subscription data in settings"


def test_a_stream_ends_when_its_client_half_closes(raw: RawClient, rocketmq: RocketmqServer) -> None:
    """Java's close() waits for that, for ever."""
    stream = raw.telemetry(raw.producing("orders"))
    assert rocketmq.clients.producers("orders", None)
    stream.half_close()
    assert stream.get() is None
    assert stream.failure is None
    wait_until(lambda: not rocketmq.clients.producers("orders", None), "the producer is gone")


def test_clients_are_known(raw: RawClient, rocketmq: RocketmqServer) -> None:
    """By what their requests and settings say; one that was cut off is one that can't be asked."""
    stream = raw.telemetry(raw.consuming("mail", "orders") | {"user_agent": {"language": "NODE_JS"}})

    def facts() -> dict[str, Any]:
        (client,) = rocketmq.clients.handlers()
        return client

    known = facts()
    assert (known["name"], known["group"], known["topic"]) == (raw.id, "mail", "orders")
    options = {"type": "SIMPLE_CONSUMER", "language": "NODE_JS", "version": "5.1.2", "host": "127.0.0.1"}
    assert known["options"] == options | {"connected": True}
    stream.cut()
    wait_until(lambda: not facts()["options"]["connected"], "the client isn't connected")
    assert code(raw.call("NotifyClientTermination", {"group": {"name": "mail"}})) == 20000
    assert rocketmq.clients.handlers() == []


def test_a_heartbeat_needs_no_settings(raw: RawClient, rocketmq: RocketmqServer) -> None:
    """A client whose settings the server doesn't have, such as after its restart, is there all the same."""
    assert code(raw.call("Heartbeat", {"client_type": "PUSH_CONSUMER", "group": {"name": "mail"}})) == 20000
    (client,) = rocketmq.clients.handlers()
    told = client["options"]["type"], client["group"], client["topic"], client["options"]["connected"]
    assert told == ("PUSH_CONSUMER", "mail", "", False)


def test_the_server_ends_in_good_order(rocketmq: RocketmqServer, raw: RawClient) -> None:
    """Streams end without an error, and the port is free again."""
    stream = raw.telemetry(raw.producing("orders"))
    assert rocketmq.is_ready()
    assert rocketmq.is_alive()
    rocketmq.stop()
    assert stream.get() is None
    assert stream.failure is None
    assert not rocketmq.is_ready()
    with pytest.raises(grpc.RpcError):
        raw.call("Heartbeat", {}, timeout=2)


def test_two_servers_share_a_port(new_server: NewServer) -> None:
    """As several processes do; each takes a part of the connections."""
    first = new_server()
    second = new_server(port=first.ports[0])
    assert first.ports == second.ports
    # Else the channels of one process share a connection.
    apart = [("grpc.use_local_subchannel_pool", 1)]
    clients = [RawClient(first.addresses[0], options=apart) for _ in range(16)]
    for client in clients:
        assert code(client.call("Heartbeat", {"client_type": "PRODUCER"})) == 20000
    there = [len(server.clients.handlers()) for server in (first, second)]
    for client in clients:
        client.channel.close()
    assert sum(there) == 16
    assert min(there) > 0
