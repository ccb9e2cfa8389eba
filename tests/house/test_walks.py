"""How many modules a reader has to open to follow a message, or an operator's act."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import pytest
from anyio.from_thread import start_blocking_portal
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from outbox import Message, Outbox, Settings
from outbox.cli.output import Code
from outbox.console import connections
from outbox.consumer.consumer import Consumer
from outbox.dispatch.dispatch_pass import dispatch_once
from outbox.reconcile.tables import InboxState
from tests.cli.conftest import Result, run_cli
from tests.console.web import Http, Shop, console_of
from tests.house.limits import difference_of_walk
from tests.house.walk import modules_of
from tests.reconcile.town import Town, fate, url_of


def keep_to(walks: Mapping[str, list[str]]) -> None:
    """Fail unless as many modules were passed on each walk as `tests/house/limits.toml` says."""
    said = [text for walk, passed in walks.items() if (text := difference_of_walk(walk, passed))]
    assert not said, "\n".join(said)


def test_a_message_passes_few_modules(engine: Engine) -> None:
    """From `Outbox.send` to the handler: a send and its COMMIT, one pass of dispatch, one of the consumer.

    On its way to the handler it passes the gate that may hold its group back.
    The thread in which a worker calls the two passes is another story, which is not the message's.
    """
    # A notification for a dispatcher that may be asleep comes now and then only.
    outbox = Outbox(engine, settings=Settings(listen=False))
    handled: list[object] = []

    @outbox.consumer("t", group="g")
    def handle(message: Message, _: Session) -> None:
        handled.append(message.body)

    consumer = Consumer(outbox.subscriptions["t", "g"], outbox.settings)
    with engine.connect() as connection:
        consumer.start(connection, connection)

        def send() -> None:
            with Session(engine) as session, session.begin():
                outbox.send(session, "t", {"n": len(handled)}, key="k")

        steps: dict[str, Callable[[], object]] = {
            "send": send,
            "dispatch": lambda: dispatch_once(connection, outbox.settings),
            "consume": lambda: consumer.consume_once(connection, connection),
        }
        for _ in range(3):  # the first dispatch in a database finds out where it is
            for step in steps.values():
                step()
        rounds = [{name: modules_of(step) for name, step in steps.items()} for _ in range(3)]
    # What a process reports of itself, once a minute, goes along with one of them.
    passed = {name: min((each[name] for each in rounds), key=len) for name in steps}
    assert [body["n"] for body in handled if isinstance(body, dict)] == list(range(len(handled)))
    assert len(handled) >= 2
    keep_to(passed | {"send to handler": list(dict.fromkeys(chain(*passed.values())))})


def test_an_operators_act_passes_few_modules(engine: Engine) -> None:
    """From the act that pages, endpoints, commands and `Outbox.operator` share to its statements and its audit row."""
    shop = Shop(engine)
    (message_id,) = shop.orders(1)
    shop.drain()
    operator = shop.outbox.operator

    def act() -> None:
        operator.resend(message_id, by="ann", why="ticket 4711")

    act()
    keep_to({"act": modules_of(act)})


def test_a_command_adds_its_options_and_its_answer(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same act by ``outbox messages resend``."""
    monkeypatch.setenv("OUTBOX_DATABASE_URL", url_of(engine))
    shop = Shop(engine)
    (message_id,) = shop.orders(1)
    shop.drain()
    results: list[Result] = []

    def act() -> None:
        results.append(run_cli("messages", "resend", str(message_id), "--reason", "ticket 4711", "--yes"))

    act()
    passed = modules_of(act)
    assert [each.code for each in results] == [Code.DONE, Code.DONE], results[0].err
    keep_to({"act by a command": passed})


def test_a_reconciliation_passes_few_modules(new_engine: Callable[[], Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    """From ``outbox reconcile`` to its one finding, which nobody repairs."""
    with Town(new_engine(), new_engine(), Settings()) as town:
        monkeypatch.setenv("OUTBOX_PRODUCER_URL", url_of(town.producer))
        monkeypatch.setenv("OUTBOX_CONSUMER_URL", url_of(town.consumer))
        town.plant([fate()] * 5)
        town.plant([fate(status=InboxState.NONE)])
        results: list[Result] = []

        def reconcile() -> None:
            results.append(run_cli("reconcile", "--topic", "t", "--group", "g"))

        reconcile()
        passed = modules_of(reconcile)
    assert [each.code for each in results] == [Code.PROBLEMS, Code.PROBLEMS], results[-1].err
    keep_to({"reconcile to a finding": passed})


def test_the_console_adds_its_guards_and_its_answer(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The same act by the endpoint: the caller is identified, the request read, and the message shown as it is now.

    The console tells its log of each act, by three modules: its event, and two of telemetry.
    """
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
    keep_to({"act in the console": passed})
