"""Handlers that fail and workers that die where the test wants it; and handlers that mustn't be run twice."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from outbox import Message, Outbox
from outbox.errors import InvalidHandler
from outbox.testing import NotIdempotent, drain, failing, killing, on_loop, rolling_back, running_twice
from tests.kit import Tables, python
from tests.testing.shop import add_points, add_points_async, points, send


@pytest.mark.parametrize("point", ["before_handler", "after_handler"])
def test_a_handler_fails_as_often_as_wanted(
    point: Literal["before_handler", "after_handler"], shop: Outbox, engine: Engine
) -> None:
    """What it has done is undone; after so many times, and after the block, it is itself again."""
    ran: list[int] = []

    @shop.consumer("order", group="points")
    def handle(message: Message, session: Session) -> None:
        ran.append(message.attempt)
        add_points(message, session)

    send(shop, engine, "alice")
    with failing(shop, "order", error=ValueError("no"), point=point, times=2):
        assert drain(shop).failed == 1
        assert points(engine) == []
        assert drain(shop, failed=True).done == 1
    assert points(engine) == ["alice"]
    assert ran == ([3] if point == "before_handler" else [1, 2, 3])
    send(shop, engine, "bob")
    with failing(shop, "order", group="points"):
        assert drain(shop, failed=True).parked == 1
    with pytest.raises(InvalidHandler, match="no consumer of 'mail' in group 'g'"), failing(shop, "mail", group="g"):
        pass


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("point", ["before_handler", "after_handler", "after_commit"])
def test_a_worker_dies(
    point: Literal["before_handler", "after_handler", "after_commit"], kind: str, shop: Outbox, engine: Engine
) -> None:
    """What it had not committed is undone, what it had is kept: the next worker brings the effect to exactly one."""
    ran: list[int] = []

    def handle(message: Message, session: Session) -> None:
        ran.append(1)
        add_points(message, session)

    async def handle_async(message: Message, session: AsyncSession) -> None:
        ran.append(1)
        await add_points_async(message, session)

    shop.consumer("order", group="points")(handle if kind == "sync" else handle_async)

    def run() -> Any:
        return drain(shop) if kind == "sync" else asyncio.run(on_loop(drain, shop))

    send(shop, engine, "alice")
    with killing(shop, "order", point=point):
        run()
        pytest.fail("the worker is dead")
    assert points(engine) == (["alice"] if point == "after_commit" else [])
    assert run().done == (0 if point == "after_commit" else 1)
    assert points(engine) == ["alice"]
    assert len(ran) == {"before_handler": 1, "after_handler": 2, "after_commit": 1}[point]
    expected = pytest.raises(AssertionError, match=f"no handler of topic 'order' came to '{point}'")
    with expected, killing(shop, "order", point=point):
        run()


def test_nothing_dies_in_a_transaction_that_is_rolled_back(shop: Outbox) -> None:
    """The test's own data would go with it."""
    shop.consumer("order", group="points")(add_points)
    with rolling_back(shop), pytest.raises(InvalidHandler, match="commit in this test"), killing(shop, "order"):
        pass


def test_a_process_is_killed(shop: Outbox, engine: Engine) -> None:
    """By SIGKILL, where a child process asks for it; what it did is undone."""
    shop.consumer("order", group="points")(add_points)
    send(shop, engine, "alice")
    with python("tests.testing.dying", engine) as process:
        assert process.wait(120) == -9
    Tables(engine).cut("query LIKE '%points%'")
    assert points(engine) == []
    assert drain(shop).done == 1
    assert points(engine) == ["alice"]


# --- run twice -------------------------------------------------------------------------------------------


def test_a_handler_that_stays_in_the_database_may_run_twice(shop: Outbox, engine: Engine, tmp_path: Path) -> None:
    """The first run is undone, with all that it has sent; one that looks before it does something is let alone too."""
    ran: list[int] = []

    @shop.consumer("order", group="points", batch=10)
    def handle(message: Message, session: Session) -> None:
        ran.append(message.attempt)
        add_points(message, session)
        shop.send(session, "mail", message.body)
        if not (marker := tmp_path / str(message.id)).exists():
            marker.write_text("once")

    send(shop, engine, "alice")
    send(shop, engine, "bob")
    with running_twice(shop, outside=lambda: sorted(path.name for path in tmp_path.iterdir())):
        assert drain(shop).done == 2
    assert ran == [1, 1, 1, 1]
    assert points(engine) == ["alice", "bob"]
    assert Tables(engine).value("SELECT count(*) FROM outbox.half_message WHERE topic = 'mail'") == 2


def test_what_a_handler_does_outside_is_pointed_out(shop: Outbox, engine: Engine, tmp_path: Path) -> None:
    """By what a stand-in has, and by what the interpreter tells; what is ignored may be repeated."""
    mails: list[str] = []

    @shop.consumer("order", group="mail")
    def mail(message: Message, session: Session) -> None:
        mails.append(f"to {message.body['customer']}")
        (tmp_path / "log").open("a").close()
        subprocess.run([sys.executable, "-c", ""], check=True)

    send(shop, engine, "alice")
    with pytest.raises(NotIdempotent) as found, running_twice(shop, outside=lambda: mails):
        drain(shop)
    report = str(found.value)
    assert "test_what_a_handler_does_outside_is_pointed_out.<locals>.mail (group 'mail' of topic 'order')" in report
    assert f"done in both runs: open('{tmp_path}/log', 'a')" in report.replace(
        repr(str(tmp_path / "log"))[:80], f"'{tmp_path}/log'"
    )
    assert "done in both runs: subprocess.Popen(" in report
    assert "      - ['to alice']\n      + ['to alice', 'to alice']" in report
    send(shop, engine, "bob")
    with running_twice(shop, ignore=["open(*)", "subprocess.Popen(*)"]):
        drain(shop)


def test_a_handler_that_cannot_run_again(shop: Outbox, engine: Engine) -> None:
    """An async handler that fails when it is run again is pointed out; one that always fails just fails."""
    used: set[str] = set()

    @shop.consumer("order", group="points")
    async def handle(message: Message, session: AsyncSession) -> None:
        await add_points_async(message, session)
        if message.body["customer"] == "mallory":
            raise ValueError("always")
        if str(message.id) in used:
            raise KeyError("used up")
        used.add(str(message.id))

    send(shop, engine, "mallory")
    with running_twice(shop):
        assert asyncio.run(on_loop(drain, shop)).failed == 1
    send(shop, engine, "alice")
    expected = pytest.raises(NotIdempotent, match=r"the first run returned, the second raised KeyError\('used up'\)")
    with expected, running_twice(shop):
        asyncio.run(on_loop(drain, shop))
    assert points(engine) == []


def test_in_a_transaction_that_is_rolled_back(shop: Outbox) -> None:
    """Two runs are possible there too."""
    shop.consumer("order", group="points")(add_points)
    with rolling_back(shop) as connection, running_twice(shop):
        send(shop, connection, "alice")
        drain(shop)
        assert points(connection) == ["alice"]
    with pytest.raises(InvalidHandler, match="this Outbox has no consumer"), running_twice(Outbox(shop.engine)):
        pass


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_handlers_outside_of_transactions(kind: str, shop: Outbox, engine: Engine) -> None:
    """They fail and are run twice as others are; an effect that has an idempotency key is the same after both runs."""
    keys: set[Any] = set()
    charges: list[Any] = []

    def charge(message: Message) -> None:
        keys.add(message.id)
        charges.append(message.id)

    async def charge_async(message: Message) -> None:
        charge(message)

    shop.consumer("order", group="payments", transactional=False)(charge if kind == "sync" else charge_async)
    send(shop, engine, "alice")
    with failing(shop, "order", point="after_handler", times=1):
        assert drain(shop).failed == 1
    with running_twice(shop, outside=lambda: sorted(map(str, keys))):
        assert drain(shop, failed=True).done == 1
    assert (len(keys), len(charges)) == (1, 3)
    send(shop, engine, "bob")
    with pytest.raises(NotIdempotent, match="outside, the second"), running_twice(shop, outside=lambda: len(charges)):
        drain(shop)
    with pytest.raises(InvalidHandler, match="outside of transactions"), killing(shop, "order"):
        pass
