"""An answer that is cut off keeps nothing from others: what wasn't sent is due again, at no attempt's cost."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
from sqlalchemy import Engine

from outbox.rocketmq import receiving
from outbox.rocketmq.receiving import ReceiveCalls, SharedTaker
from outbox.rocketmq.server import RocketmqServer
from tests.kit import wait_until
from tests.rocketmq.raw import RawClient
from tests.rocketmq.test_receiving import statuses, store


def test_behind_its_first_part(rocketmq: RocketmqServer, raw: RawClient, engine: Engine) -> None:
    """A client that reads no further is sent the first ones at most; the server renews none of them."""
    store(raw, engine, *(os.urandom(3 << 20) for _ in range(8)))
    call = raw.poll("orders", "mail", auto_renew=True, invisible_duration=None, batch_size=8)
    assert next(iter(call)).HasField("status")
    call.cancel()
    wait_until(lambda: statuses(engine)[0] == ("failed", 0), "the last ones are given back")
    assert {attempts for _, attempts in statuses(engine)} == {0}
    assert rocketmq._receiving.renewals._held == {}
    with RawClient(rocketmq.addresses[0]) as other:
        _, received = other.receive("orders", "mail")
    assert {each["system_properties"]["delivery_attempt"] for each in received} == {1}


def test_while_it_is_made(
    rocketmq: RocketmqServer, raw: RawClient, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that goes away before its answer begins is sent nothing of it."""
    making, go_on = threading.Event(), threading.Event()
    original = ReceiveCalls._parts

    def parts(self: ReceiveCalls, taken: Any, topic: Any) -> Any:
        if taken:
            making.set()
            assert go_on.wait(60)
        return original(self, taken, topic)

    monkeypatch.setattr(ReceiveCalls, "_parts", parts)
    monkeypatch.setattr(receiving, "_SMALL", 0)
    store(raw, engine, b"1", b"2")
    call = raw.poll("orders", "mail", invisible_duration="3600s")
    assert making.wait(60)
    call.cancel()
    try:
        wait_until(lambda: statuses(engine) == [("failed", 0)] * 2, "they are given back")
    finally:
        go_on.set()
    assert rocketmq._receiving.renewals._held == {}


def test_at_the_moment_at_which_it_has_messages(
    rocketmq: RocketmqServer, raw: RawClient, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The take has handed them over, and the poll that is told of them doesn't come to it any more."""
    original = SharedTaker.poll
    cancelled = threading.Event()

    async def poll(self: SharedTaker, one: Any, seconds: float) -> Any:
        await original(self, one, seconds)
        cancelled.set()
        await one.done.get_loop().create_future()

    monkeypatch.setattr(SharedTaker, "poll", poll)
    store(raw, engine, b"1")
    call = raw.poll("orders", "mail", invisible_duration="3600s")
    assert cancelled.wait(60)
    assert statuses(engine) == [("taken", 0)]
    call.cancel()
    wait_until(lambda: statuses(engine) == [("failed", 0)], "it is given back")
    assert not rocketmq._receiving.renewals._held
