"""What the server tells of its calls: spans, measurements, and the trace of a client's message."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from sqlalchemy import Engine, text

from outbox import Message, Outbox, Settings
from outbox.errors import ActRefused
from outbox.rocketmq import clients
from outbox.rocketmq.server import RocketmqServer
from outbox.telemetry.events import ClientCallEnded
from outbox.telemetry.hooks import TelemetryEvent
from outbox.testing import drain
from outbox.worker.worker import Worker
from tests.kit import wait_until
from tests.kit.passes import dispatch_all
from tests.rocketmq.raw import RawClient, code, message
from tests.telemetry.test_otel import Telescope, context_of

_TRACE, _SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
_PARENT = f"00-{_TRACE}-{_SPAN}-01"


@pytest.fixture
def telescope() -> Iterator[Telescope]:
    """Instrumented, with exporters in memory."""
    made = Telescope()
    yield made
    made.end()
    for shut_down in made.shut_down:
        shut_down()


def test_each_call_is_told_with_its_answer(
    rocketmq: RocketmqServer, raw: RawClient, heard: list[TelemetryEvent]
) -> None:
    """Also one that is refused, and one whose client goes away."""
    raw.send(message("orders"))
    raw.send(message("no topic"))
    raw.receive("orders", "mail", batch_size=0)
    raw.call("Heartbeat", {}, x_mq_client_id=None)
    told = [(each.call, each.status) for each in heard if isinstance(each, ClientCallEnded)]
    assert told == [
        ("SendMessage", "OK"),
        ("SendMessage", "ILLEGAL_TOPIC"),
        ("ReceiveMessage", "MESSAGE_NOT_FOUND"),
        ("Heartbeat", "CLIENT_ID_REQUIRED"),
    ]
    poll = raw.poll("orders", "mail", long_polling_timeout="20s")
    wait_until(lambda: any(not each.is_idle for each in rocketmq._receiving._takers.values()), "the poll waits")
    poll.cancel()
    wait_until(
        lambda: any(isinstance(each, ClientCallEnded) and each.status == "CANCELLED" for each in heard), "it ends"
    )


def test_its_report_is_a_workers(rocketmq: RocketmqServer, raw: RawClient, engine: Engine) -> None:
    """Its clients are handlers, which keep topic and group; a group that they poll is consumed; it is no worker."""
    raw.send(message("orders"))
    dispatch_all(engine)
    raw.receive("orders", "mail")
    raw.send(message("orders"), message("orders"))
    dispatch_all(engine)
    raw.telemetry(raw.consuming("mail", "orders"))
    operator = Outbox(engine).operator
    wait_until(lambda: [each.name for each in operator.handlers() if each.kind == "client"] == [raw.id], "it is told")
    (server,) = operator.workers()
    assert (server.roles, server.alive) == (["rocketmq"], True)
    overview = operator.overview()
    assert (overview.workers, "worker.none" in {each.code for each in overview.findings}) == ([], True)
    named = re.escape(f"consumes for it (1 RocketMQ client: {raw.id}); take its consumer out of the application, or")
    with pytest.raises(ActRefused, match=named):
        operator.delete_group("mail", topic="orders", by="me", why="test")
    with Worker(Outbox(engine), roles=["dispatch"]):
        wait_until(lambda: len(operator.workers()) == 2, "a worker has reported")
        assert not {"worker.none", "group.unconsumed"} & {each.code for each in operator.overview().findings}


def test_a_group_is_served_whose_clients_are_not_listed(
    raw: RawClient, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a client has received for a moment ago isn't deleted, however full the list of clients is."""
    monkeypatch.setattr(clients, "MOST_ROWS", 0)
    raw.send(message("orders"))
    dispatch_all(engine)
    raw.receive("orders", "mail")
    raw.telemetry(raw.consuming("mail", "orders"))
    operator = Outbox(engine).operator
    wait_until(lambda: any("consume orders of mail" in each.duties for each in operator.workers()), "it is told")
    assert operator.handlers() == []
    assert operator.preview_delete("mail", "orders").refusal.endswith("or stop its RocketMQ clients, first")
    with pytest.raises(ActRefused, match="consumes for it; take"):
        operator.delete_group("mail", topic="orders", by="me", why="test")


def test_a_server_that_died(rocketmq: RocketmqServer, engine: Engine) -> None:
    """The doctor says how such a server is started, beside a worker that lives."""
    outbox = Outbox(engine)
    wait_until(outbox.operator.workers, "it has reported")
    rocketmq._in_loop(end_reports(rocketmq))
    with engine.begin() as connection:
        connection.execute(text("UPDATE outbox.worker SET seen_at = seen_at - interval '5 minutes'"))
    with Worker(outbox, roles=["dispatch"]):
        wait_until(lambda: len(outbox.operator.workers()) == 2, "a worker has reported")
        (found,) = [each for each in outbox.operator.overview().findings if each.code == "worker.lost"]
    assert found.sentence.startswith("Server ")
    assert "outbox rocketmq serve" in str(found.mend)


async def end_reports(server: RocketmqServer) -> None:
    """Have a server report no more, as one that was killed."""
    for task in server._tasks:
        task.cancel()


def test_spans_and_measurements(raw: RawClient, telescope: Telescope) -> None:
    """Each call has a span of its own, and is measured by its answer."""
    assert code(raw.send(message("orders"))) == 20000
    (span,) = telescope.spans("rocketmq SendMessage")
    assert span.parent is None
    assert dict(span.attributes or {})["outbox.rocketmq.status"] == "OK"
    (metric,) = [each for each in telescope.metrics() if each.name == "outbox.rocketmq.duration"]
    (point,) = metric.data.data_points
    assert dict(point.attributes or {})["rpc.method"] == "SendMessage"


def test_a_clients_trace_leads_to_the_handler(raw: RawClient, engine: Engine, telescope: Telescope) -> None:
    """The context of its message is the parent of the handler's span, and linked by that of the send."""
    got: list[Message] = []
    outbox = Outbox(engine, settings=Settings())
    outbox.consumer("orders", group="py")(lambda message, session: got.append(message))
    raw.send(message("orders", trace_context=_PARENT))
    drain(outbox)
    (process,) = telescope.spans("process orders")
    assert process.parent is not None
    assert (f"{process.parent.trace_id:032x}", f"{process.parent.span_id:016x}") == (_TRACE, _SPAN)
    (send,) = telescope.spans("send orders")
    assert [f"{link.context.trace_id:032x}" for link in send.links] == [_TRACE]
    _, (received,) = raw.receive("orders", "mail")
    assert received["system_properties"]["trace_context"] == _PARENT
    assert "user_properties" not in received


@pytest.mark.parametrize("context", ["", "no context", _PARENT + "\n", _PARENT.upper()])
def test_what_is_no_context_is_kept_as_it_came(context: str, raw: RawClient, engine: Engine) -> None:
    """It is no parent of ours, and goes to the consumer unchanged."""
    assert code(raw.send(message("orders", trace_context=context))) == 20000
    with engine.connect() as connection:
        (headers,) = connection.execute(text("SELECT headers FROM outbox.half_message")).scalars()
    assert "traceparent" not in headers
    dispatch_all(engine)
    _, (received,) = raw.receive("orders", "mail")
    assert received["system_properties"].get("trace_context", "") == context


def test_a_python_senders_trace_comes_to_the_client(raw: RawClient, engine: Engine, telescope: Telescope) -> None:
    """The context that our send has written is the trace context of what a client receives."""
    outbox = Outbox(engine, settings=Settings())
    outbox.declare_topic("orders", 1)
    with engine.begin() as connection:
        outbox.send(connection, "orders", {"order": 7})
    dispatch_all(engine)
    _, (received,) = raw.receive("orders", "mail")
    (send,) = telescope.spans("send orders")
    assert f"{context_of(send).trace_id:032x}" in received["system_properties"]["trace_context"]
