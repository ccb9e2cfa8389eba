"""Namespaces: what differs in them is kept apart, in each call, and comes back by the name that its client knows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, text

from outbox import Settings
from outbox.rocketmq.options import GroupOptions, ServedTopic, UserOptions
from outbox.rocketmq.server import RocketmqServer
from tests.kit.passes import dispatch_all
from tests.rocketmq.conformance.raw import utc
from tests.rocketmq.conftest import NewServer
from tests.rocketmq.raw import RawClient, body_of, code, handle_of, message

_SPACES = ("", "blue", "green")


@pytest.fixture
def checked(new_server: NewServer) -> Iterator[RawClient]:
    """A client of a server that checks orphans at once."""
    server: RocketmqServer = new_server(Settings(check_interval=0.1))
    with RawClient(server.addresses[0]) as client:
        yield client


def named(namespace: str, name: str) -> dict[str, str]:
    """Return a Resource."""
    return {"name": name, "resource_namespace": namespace} if namespace else {"name": name}


def of(namespace: str, group: str = "mail") -> dict[str, Any]:
    """Return the group and topic of a call."""
    return {"topic": named(namespace, "orders"), "group": named(namespace, group)}


def put(raw: RawClient, namespace: str, body: bytes, **system: Any) -> dict[str, Any]:
    """Send a message to the topic of a namespace."""
    made = message("orders", body, **system)
    made["topic"] = named(namespace, "orders")
    return raw.send(made)


def get(raw: RawClient, namespace: str, **more: Any) -> list[dict[str, Any]]:
    """Receive the messages of a namespace."""
    asked = {"group": named(namespace, "mail"), "message_queue": {"topic": named(namespace, "orders")}, **more}
    return [part["message"] for part in raw.parts("orders", "mail", **asked) if "message" in part]


def test_each_has_its_topic_and_its_groups(raw: RawClient, engine: Engine) -> None:
    """Messages, handles and groups of one namespace are none of another; a name in none has no other either."""
    for namespace in _SPACES:
        assert code(put(raw, namespace, namespace.encode() or b"none")) == 20000
    with engine.connect() as connection:
        topics = set(connection.execute(text("SELECT topic FROM outbox.half_message")).scalars())
    assert topics == {"orders", "blue%orders", "green%orders"}
    dispatch_all(engine)
    handles = {}
    for namespace in _SPACES:
        (received,) = get(raw, namespace)
        assert (received["topic"], body_of(received)) == (named(namespace, "orders"), namespace.encode() or b"none")
        handles[namespace] = handle_of(received)

    def settled(call: str, namespace: str, handle: str) -> int:
        more: dict[str, dict[str, Any]] = {
            "AckMessage": {"entries": [{"receipt_handle": handle}]},
            "ChangeInvisibleDuration": {"receipt_handle": handle, "invisible_duration": "30s"},
        }
        return code(raw.call(call, of(namespace) | more.get(call, {"receipt_handle": handle})))

    for call in ("AckMessage", "ChangeInvisibleDuration", "ForwardMessageToDeadLetterQueue"):
        for namespace in _SPACES:
            assert settled(call, namespace, handles["blue" if namespace != "blue" else "green"]) == 40013, call
    for namespace in _SPACES:
        assert settled("AckMessage", namespace, handles[namespace]) == 20000
    assert [get(raw, namespace) for namespace in _SPACES] == [[], [], []]


def test_routes_and_assignments_name_it_as_it_was_asked(new_server: NewServer) -> None:
    """A topic that is there in one namespace is unknown in another."""
    options = {"blue%orders": ServedTopic(queues=3)}
    server = new_server(auto_create=False, topics=options, groups={"blue%mail": GroupOptions(fifo=True)})
    with RawClient(server.addresses[0]) as raw:
        asked = {**of("blue"), "endpoints": raw.endpoints()}
        route = raw.call("QueryRoute", {name: asked[name] for name in ("topic", "endpoints")})
        assert [each["topic"] for each in route["message_queues"]] == [asked["topic"]] * 3
        assignments = raw.call("QueryAssignment", asked)["assignments"]
        assert [each["message_queue"]["topic"] for each in assignments] == [asked["topic"]] * 3
        assert code(raw.call("QueryRoute", {"topic": named("green", "orders")})) == 40402
        assert code(raw.call("QueryRoute", {"topic": named("", "orders")})) == 40402
        # Node's client says in its metadata alone where it is.
        assert code(raw.call("QueryRoute", {"topic": named("", "orders")}, x_mq_namespace="blue")) == 20000
        settings = raw.consuming("mail", "orders")
        settings["subscription"]["group"] = named("blue", "mail")
        answer = raw.telemetry().send({"settings": settings}).get()
        assert answer is not None
        assert answer["settings"]["subscription"]["fifo"] is True
        assert answer["settings"]["subscription"]["group"] == named("blue", "mail")


def test_transactions_are_decided_and_asked_about_in_theirs(checked: RawClient, engine: Engine) -> None:
    """The question names the topic as its producer does; a verdict under another namespace's topic is of no half."""
    stream = checked.telemetry(
        {"client_type": "PRODUCER", "publishing": {"topics": [named("blue", "orders")]}}, x_mq_namespace="blue"
    )
    (entry,) = put(checked, "blue", b"1", message_type="TRANSACTION",
                   orphaned_transaction_recovery_duration="1s")["entries"]  # fmt: skip
    decide = {"transaction_id": entry["transaction_id"], "message_id": "any", "resolution": "COMMIT"}
    assert code(checked.call("EndTransaction", decide | {"topic": named("green", "orders")})) == 40008
    question = stream.get()
    assert question is not None
    asked = question["recover_orphaned_transaction_command"]
    assert asked["message"]["topic"] == named("blue", "orders")
    assert code(checked.call("EndTransaction", decide | {"topic": asked["message"]["topic"]})) == 20000
    dispatch_all(engine)
    assert [body_of(each) for each in get(checked, "blue")] == [b"1"]


def test_recalls_and_ends_are_of_one_namespace(raw: RawClient, engine: Engine) -> None:
    """A handle of one is garbage in another; a client that ends gives back what it has taken in its own."""
    (entry,) = put(raw, "blue", b"later", delivery_timestamp=utc(3600))["entries"]
    handle = entry["recall_handle"]
    assert code(raw.call("RecallMessage", {"topic": named("", "orders"), "recall_handle": handle})) == 50001
    assert code(raw.call("RecallMessage", {"topic": named("blue", "orders"), "recall_handle": handle})) == 20000
    for namespace in ("blue", "green"):
        put(raw, namespace, b"1")
    dispatch_all(engine)
    assert [len(get(raw, namespace)) for namespace in ("blue", "green")] == [1, 1]
    assert code(raw.call("NotifyClientTermination", {"group": named("blue", "mail")})) == 20000
    assert [len(get(raw, "blue")), len(get(raw, "green"))] == [1, 0]


def test_rights_are_of_the_whole_name(new_server: NewServer) -> None:
    """A user of one namespace has no rights in another, nor in none."""
    users = {"shop": UserOptions("s", send=("blue%*",), receive=("blue%*",), groups=("blue%*",))}
    server = new_server(users=users)
    with RawClient(server.addresses[0], "shop", "s") as raw:
        assert [code(put(raw, namespace, b"1")) for namespace in ("blue", "green", "")] == [20000, 40300, 40300]


@pytest.mark.parametrize(
    ("namespace", "name", "expected"),
    [("blue", " ", 40002), ("b l", "orders", 40002), ("b" * 120, "orders-1", 40002), ("b" * 120, "orders", 20000)],
)
def test_names_are_checked_whole(namespace: str, name: str, expected: int, raw: RawClient) -> None:
    """The namespace counts for the characters and the length that a topic may have."""
    made = message("x")
    made["topic"] = named(namespace, name)
    assert code(raw.send(made)) == expected
