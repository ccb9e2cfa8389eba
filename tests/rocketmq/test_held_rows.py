"""Rows that another transaction has, such as a service's that settles a message in SQL, hold up nothing else."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import Connection, Engine
from sqlalchemy import text as sql
from sqlalchemy.exc import DBAPIError

from outbox.consumer.leased import settlement
from outbox.rocketmq import receiving, sending
from outbox.rocketmq.options import GroupOptions
from outbox.rocketmq.server import RocketmqServer
from outbox.rocketmq.tables import THREADS, Tables
from tests.kit import wait_until
from tests.rocketmq.conftest import NewServer
from tests.rocketmq.raw import RawClient, bodies, body_of, code, handle_of, message
from tests.rocketmq.test_receiving import statuses, store

PUSH: dict[str, Any] = {"auto_renew": True, "invisible_duration": None}


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Held rows are tried again once, soon; polls that find nothing end soon."""
    monkeypatch.setattr(receiving, "_AGAIN", (0.01,))
    monkeypatch.setattr(receiving, "_LEAST_POLLING", 0.5)
    monkeypatch.setattr(RawClient, "polling", "1s")


@contextmanager
def held(engine: Engine, call: str, **values: Any) -> Iterator[Connection]:
    """Run a function of the schema in a transaction that stays open; it commits at the end unless it has ended."""
    with engine.connect() as connection:
        connection.execute(sql(f"SELECT outbox.{call}"), values)
        yield connection
        connection.commit()


def seconds_left(engine: Engine) -> list[float]:
    """Return in how many seconds leases end, the longest first."""
    with engine.connect() as connection:
        left = "SELECT extract(epoch FROM next_attempt_at - clock_timestamp()) FROM outbox.consumer_message"
        rows = connection.execute(sql(f"{left} WHERE status = 'taken' ORDER BY 1 DESC"))
        return [float(seconds) for (seconds,) in rows]


def nearly_ended(engine: Engine) -> None:
    """Have all leases end in five seconds."""
    soon = "clock_timestamp() + interval '5 s'"
    with engine.begin() as connection:
        connection.execute(sql(f"UPDATE outbox.consumer_message SET next_attempt_at = {soon} WHERE status = 'taken'"))


def renew(server: RocketmqServer) -> None:
    """Renew what the server holds."""
    server._in_loop(server._receiving.renewals.once())


def settle(raw: RawClient, act: str, handle: str) -> int:
    """Say a client's word on a message; return the code."""
    if act == "ack":
        return code(raw.ack("orders", "mail", handle))
    if act == "change":
        return code(raw.change("orders", "mail", handle, "60s"))
    named = {"group": {"name": "mail"}, "topic": {"name": "orders"}, "receipt_handle": handle}
    return code(raw.call("ForwardMessageToDeadLetterQueue", named))


ACTS = [("ack", "SIMPLE_CONSUMER"), ("change", "SIMPLE_CONSUMER"), ("change", "PUSH_CONSUMER"),
        ("forward", "PUSH_CONSUMER")]  # fmt: skip


@pytest.mark.parametrize(("act", "kind"), ACTS)
@pytest.mark.parametrize("ends", ["commit", "rollback"])
def test_no_word_on_a_held_row_holds_up_others(
    rocketmq: RocketmqServer, raw: RawClient, engine: Engine, act: str, kind: str, ends: str
) -> None:
    """More of them than there are threads are told to come again, others go on; then it counts or is late."""
    raw.telemetry(raw.consuming("mail", "orders", kind=kind))
    store(raw, engine, b"1", b"2")
    _, got = raw.receive("orders", "mail")
    one, two = map(handle_of, got)
    with held(engine, "acknowledge(:handle)", handle=one) as connection:
        with ThreadPoolExecutor(2 * THREADS) as pool:
            codes = list(pool.map(lambda _: settle(raw, act, one), range(2 * THREADS)))
            assert set(codes) == {42900}
        both = raw.ack("orders", "mail", one, two)
        assert [code(entry) for entry in both["entries"]] == [42900, 20000]
        assert code(raw.send(message("others"))) == 20000
        assert code(raw.call("NotifyClientTermination", {"group": {"name": "mail"}})) == 20000
        if ends == "rollback":
            connection.rollback()
    late = 20000 if act in {"ack", "forward"} else 40013
    assert settle(raw, act, one) == (late if ends == "commit" else 20000)


def test_a_renewal_leaves_a_held_row_alone(rocketmq: RocketmqServer, raw: RawClient, engine: Engine) -> None:
    """It renews all others, of the same group and of others; and the held one too, once it is free again."""
    store(raw, engine, b"1", b"2")
    _, got = raw.receive("orders", "mail", **PUSH)
    assert len(raw.receive("orders", "bill", **PUSH)[1]) == len(got) == 2
    nearly_ended(engine)
    with held(engine, "acknowledge(:handle)", handle=handle_of(got[0])) as connection:
        renew(rocketmq)
        left = seconds_left(engine)
        assert [seconds > 50 for seconds in left] == [True, True, True, False]
        connection.rollback()
    renew(rocketmq)
    assert all(seconds > 50 for seconds in seconds_left(engine))
    with held(engine, "acknowledge(:handle)", handle=handle_of(got[0])):
        pass
    renew(rocketmq)
    assert sorted(map(len, rocketmq._receiving.renewals._held.values())) == [1, 2]


def test_a_group_that_is_not_through_leaves_the_others_their_rounds(
    rocketmq: RocketmqServer, raw: RawClient, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round doesn't wait for the one before; a group has one at a time."""
    rounds, goes_on, original = list[str](), threading.Event(), settlement.renew

    def slow(connection: Any, schema: str, leases: Any, seconds: float) -> Any:
        rounds.append(leases[0].group)
        if leases[0].group == "slow":
            goes_on.wait(60)
        return original(connection, schema, leases, seconds)

    store(raw, engine, b"1")
    for group in ("slow", "fast"):
        assert raw.receive("orders", group, **PUSH)[0] == 20000
    monkeypatch.setattr(settlement, "renew", slow)
    monkeypatch.setattr(receiving, "_RENEW_EVERY", 0.01)
    renewing = asyncio.run_coroutine_threadsafe(rocketmq._receiving.renew(), rocketmq._loop)
    try:
        wait_until(lambda: rounds.count("fast") > 2, "others have had their rounds")
        assert rounds.count("slow") == 1
    finally:
        goes_on.set()
    wait_until(lambda: rounds.count("slow") > 1, "it has the next one")
    renewing.cancel()


def test_an_attempt_that_is_repeated_has_what_is_not_held(new_server: NewServer, engine: Engine) -> None:
    """Its other messages come again; the held one is being settled."""
    with RawClient(new_server(groups={"mail": GroupOptions(fifo=True)}).addresses[0]) as raw:
        store(raw, engine, b"a", message_group="a")
        store(raw, engine, b"b", message_group="b")
        _, got = raw.receive("orders", "mail", attempt_id="A")
        first = next(each for each in got if body_of(each) == b"a")
        with held(engine, "acknowledge(:handle)", handle=handle_of(first)):
            _, again = raw.receive("orders", "mail", attempt_id="A")
            assert list(bodies(again)) == [b"b"]


def test_a_verdict_waits_for_no_transaction(raw: RawClient, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """One on a half that another transaction has is to come again; those that came with it count."""
    monkeypatch.setattr(sending, "_BRIEFLY", 0.05)
    sent = [raw.send(message("orders", message_type="TRANSACTION"))["entries"][0] for _ in range(4)]
    ids = [each["transaction_id"] for each in sent]
    with engine.begin() as connection, ThreadPoolExecutor(4) as pool:
        connection.execute(sql("SELECT FROM outbox.half_check WHERE half_id = :id FOR UPDATE"), {"id": ids[0]})
        codes = list(pool.map(lambda id_: code(raw.end("orders", id_, "COMMIT")), ids))
        assert codes == [42900, 20000, 20000, 20000]
    assert code(raw.end("orders", ids[0], "ROLLBACK")) == 20000


# --- more time, asked for in SQL ------------------------------------------------------------------------------------


def test_more_time_in_sql_is_kept(rocketmq: RocketmqServer, raw: RawClient, engine: Engine) -> None:
    """The server's renewal cuts nothing off, nor does the goodbye of the client that handed the handle on."""
    raw.telemetry(raw.consuming("mail", "orders", kind="PUSH_CONSUMER"))
    store(raw, engine, b"1", b"2")
    _, got = raw.receive("orders", "mail", **PUSH)
    with held(engine, "extend(:handle, 3600)", handle=handle_of(got[0])):
        pass
    nearly = [True, False]
    renew(rocketmq)
    assert [seconds > 3500 for seconds in seconds_left(engine)] == nearly
    assert code(raw.call("NotifyClientTermination", {"group": {"name": "mail"}})) == 20000
    assert [seconds > 3500 for seconds in seconds_left(engine)][:1] == nearly[:1]
    assert code(raw.ack("orders", "mail", handle_of(got[0]))) == 20000


# --- answers to a COMMIT that are lost ------------------------------------------------------------------------------


@pytest.fixture
def loses_answers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Has as many COMMITs as the list is long be done, and their answers be lost."""
    lost, original = list[int](), Tables._do

    def do(self: Tables, work: Any) -> Any:
        found = original(self, work)
        if lost:
            lost.pop()
            raise DBAPIError("COMMIT", {}, Exception("gone"), connection_invalidated=True)
        return found

    monkeypatch.setattr(Tables, "_do", do)
    return lost


@pytest.mark.parametrize("duration", ["0s", "600s"])
def test_a_change_whose_answer_was_lost(
    raw: RawClient, engine: Engine, loses_answers: list[int], duration: str
) -> None:
    """It is done again under the same number, and the client's new handle is good."""
    store(raw, engine, b"1")
    _, (got,) = raw.receive("orders", "mail")
    loses_answers.append(1)
    changed = raw.change("orders", "mail", handle_of(got), duration)
    assert code(changed) == 20000
    assert changed["receipt_handle"] != handle_of(got)
    assert code(raw.change("orders", "mail", handle_of(got), "30s")) == 40013
    if duration != "0s":
        assert code(raw.ack("orders", "mail", changed["receipt_handle"])) == 20000


@pytest.mark.parametrize(("act", "kind"), ACTS)
def test_a_word_whose_answer_was_lost(
    raw: RawClient, engine: Engine, loses_answers: list[int], act: str, kind: str
) -> None:
    """It has counted, once, and is answered so."""
    raw.telemetry(raw.consuming("mail", "orders", kind=kind))
    store(raw, engine, b"1")
    _, (got,) = raw.receive("orders", "mail")
    loses_answers.append(1)
    assert settle(raw, act, handle_of(got)) == 20000
    of = {"ack": ("consumed", 1), "forward": ("parked", 1)}
    of["change"] = ("failed", 1) if kind == "PUSH_CONSUMER" else ("taken", 0)
    assert statuses(engine) == [of[act]]
