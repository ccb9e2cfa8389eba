"""One PostgreSQL for the whole run; each test gets databases of its own, cloned from a migrated template."""

from __future__ import annotations

import itertools
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest
from sqlalchemy import Engine, create_engine

from outbox import Settings, embedded
from outbox.database import migration
from outbox.embedded import ServerLike

# A parent that ignores SIGINT, such as a shell that runs the suite in the background, has its children ignore it too.
# The processes that tests start must have the disposition that they would have at a terminal.
if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

T = TypeVar("T")
_number = itertools.count()


@pytest.fixture(scope="session")
def server() -> Iterator[ServerLike]:
    """A server that is fast and forgets everything when the machine loses power."""
    with embedded.server([], durable=False) as running:
        yield running


@pytest.fixture(scope="session")
def template(server: ServerLike) -> str:
    """The name of a database with all tables of both sides."""
    server.create_database("template_outbox")
    migration.upgrade(server.url("template_outbox"))
    return "template_outbox"


@pytest.fixture
def new_database(server: ServerLike, template: str) -> Iterator[Callable[[], str]]:
    """A function that makes another migrated database and returns its URL."""
    names: list[str] = []

    def make() -> str:
        name = f"test_{next(_number)}"
        server.create_database(name, template=template)
        names.append(name)
        return server.url(name)

    yield make
    for name in names:
        server.drop_database(name)


@pytest.fixture
def new_engine(new_database: Callable[[], str]) -> Iterator[Callable[..., Engine]]:
    """A function that makes another migrated database and returns an engine on it."""
    engines: list[Engine] = []

    def make(**options: Any) -> Engine:
        engine = create_engine(new_database(), **options)
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.dispose()


@pytest.fixture
def url(new_database: Callable[[], str]) -> str:
    """The URL of a migrated database of this test's own."""
    return new_database()


@pytest.fixture
def engine(new_engine: Callable[..., Engine]) -> Engine:
    """An engine on a migrated database of this test's own."""
    return new_engine()


@pytest.fixture
def settings() -> Settings:
    """The defaults, whatever the environment says."""
    return Settings()
