"""Consoles over real databases: one that all tests look at, and one for each test that acts."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal
from sqlalchemy import Engine

from outbox.console import connections
from outbox.embedded import ServerLike
from tests.console.visitor import Visitor
from tests.console.web import Asker, Http, Shop, asker, console_of
from tests.kit.databases import clones


@pytest.fixture(scope="session")
def opened() -> Iterator[list[Engine]]:
    """The engines that consoles have made."""
    engines: list[Engine] = []
    original = connections.own_engine

    def remembered(*given: Any, **options: Any) -> Engine:
        engines.append(original(*given, **options))
        return engines[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connections, "own_engine", remembered)
        yield engines


@pytest.fixture(scope="module", autouse=True)
def closed(opened: list[Engine]) -> Iterator[None]:
    """No test leaves connections behind, whatever consoles it made."""
    yield
    for engine in opened:
        engine.dispose()


@pytest.fixture(scope="session")
def portal() -> Iterator[BlockingPortal]:
    """An event loop in a thread."""
    with start_blocking_portal() as running:
        yield running


@pytest.fixture(scope="session")
def ask(portal: BlockingPortal) -> Asker:
    """A function that makes an `Http` for an application."""
    return asker(portal)


@pytest.fixture(scope="session")
def museum(server: ServerLike, template: str) -> Iterator[Shop]:
    """A shop in which a bit of everything has happened; tests only look at it."""
    with clones(server, template, "console_museum") as (engine,):
        shop = Shop(engine)
        shop.orders(*range(1, 8))
        shop.parked(11, 12, 13)
        shop.order(21, trouble="the bank is closed")
        shop.drain()
        shop.order(31, send={"delay": 86_400})
        shop.drain()
        shop.half(41)
        shop.half(42)
        yield shop


@pytest.fixture(scope="session")
def looking(museum: Shop, ask: Asker) -> Http:
    """The console over the museum, asked by its admin."""
    return ask(console_of(museum.outbox), "admin")


@pytest.fixture(scope="module")
def shop(server: ServerLike, template: str) -> Iterator[Shop]:
    """An empty shop for the tests of a module, each of which acts on messages of its own."""
    with clones(server, template, f"console_{uuid.uuid4().hex}") as (engine,):
        yield Shop(engine)


@pytest.fixture(scope="session")
def make_console(ask: Asker) -> Callable[..., Http]:
    """A function that makes a console over a source and returns its asker, as the admin."""
    return lambda source, **options: ask(console_of(source, **options), "admin")


@pytest.fixture(scope="module")
def acting(shop: Shop, make_console: Callable[..., Http]) -> Http:
    """The console over the shop of this module, asked by its admin."""
    return make_console(shop.outbox)


@pytest.fixture
def visitor(acting: Http) -> Visitor:
    """The admin of the shop."""
    return Visitor(acting)
