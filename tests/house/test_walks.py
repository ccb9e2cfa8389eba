"""How many modules a reader has to open to follow a message, or an operator's act."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from anyio.from_thread import start_blocking_portal
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from outbox import Message, Outbox, Settings
from outbox.console import connections
from outbox.consumer.consumer import Consumer
from outbox.dispatch.once import dispatch_once
from tests.console.web import Http, Shop, console_of
from tests.house.walk import modules_of

# A message passes the gate that may hold its group back. The console tells its log of each act, by three modules: its
# event, and two of telemetry.
MESSAGE, ACT, CONSOLE = 16, 12, 30


def test_a_message_passes_few_modules(engine: Engine) -> None:
    """From `Outbox.send` to the handler: a send and its COMMIT, one pass of dispatch, one of the consumer.

    The thread in which a worker calls the two passes is another story, which is not the message's.
    """
    outbox = Outbox(engine, settings=Settings())
    handled: list[object] = []

    @outbox.consumer("t", group="g")
    def handle(message: Message, _: Session) -> None:
        handled.append(message.body)

    consumer = Consumer(outbox.subscriptions["t", "g"], outbox.settings)
    with engine.connect() as connection:
        consumer.start(connection, connection)

        def pass_on() -> None:
            with Session(engine) as session, session.begin():
                outbox.send(session, "t", {"n": len(handled)}, key="k")
            dispatch_once(connection, outbox.settings)
            consumer.consume_once(connection, connection)

        for _ in range(3):  # the first dispatch in a database finds out where it is
            pass_on()
        passed = modules_of(pass_on)
    assert [body["n"] for body in handled if isinstance(body, dict)] == list(range(len(handled)))
    assert len(handled) >= 2
    print(len(passed), *passed, sep="\n")  # noqa: T201 - shown with -s
    assert len(passed) <= MESSAGE, passed


def test_an_operators_act_passes_few_modules(engine: Engine) -> None:
    """From the act that pages, endpoints, commands and `Outbox.operator` share to its statements and its audit row."""
    shop = Shop(engine)
    (message_id,) = shop.orders(1)
    shop.drain()
    operator = shop.outbox.operator

    def act() -> None:
        operator.resend(message_id, by="ann", why="ticket 4711")

    act()
    passed = modules_of(act)
    print(len(passed), *passed, sep="\n")  # noqa: T201 - shown with -s
    assert len(passed) <= ACT, passed


def test_the_console_adds_its_guards_and_its_answer(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The same act by the endpoint: the caller is identified, the request read, and the message shown as it is now."""
    caplog.set_level(logging.INFO, "outbox")
    opened: list[Engine] = []
    own_engine = connections.own_engine

    def remembered(*args: Any, **options: Any) -> Engine:
        opened.append(own_engine(*args, **options))
        return opened[-1]

    monkeypatch.setattr(connections, "own_engine", remembered)
    shop = Shop(engine)
    (message_id,) = shop.orders(1)
    shop.drain()
    app = console_of(engine)
    answers: list[int] = []

    def act() -> None:
        with start_blocking_portal() as portal:
            http = Http(portal, app, "operator")
            answers.append(http.post(f"/messages/{message_id}/resend", {"reason": "ticket 4711"}).status_code)

    act()  # the first one opens connections
    passed = modules_of(act)
    for each in opened:
        each.dispose()
    assert answers == [200, 200]
    print(len(passed), *passed, sep="\n")  # noqa: T201 - shown with -s
    assert len(passed) <= CONSOLE, passed
