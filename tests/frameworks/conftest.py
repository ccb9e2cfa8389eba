"""A shop whose COMMIT can fail, and a server for the applications that sell in it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import uvicorn
from sqlalchemy import Engine, create_engine, text

from tests.kit import Tables, wait_until

#: The same number twice is refused, but only by the COMMIT.
_TABLES = """
CREATE TABLE IF NOT EXISTS public.sale (number int, UNIQUE (number) DEFERRABLE INITIALLY DEFERRED);
CREATE TABLE IF NOT EXISTS public.effect (number int NOT NULL);
"""
SELL = text("INSERT INTO public.sale VALUES (:number)")
NOTE = text("INSERT INTO public.effect VALUES (:number)")


@dataclass
class Shop(Tables):
    """What the databases of an application show."""

    url: str
    observer: Engine

    def sales(self) -> list[int]:
        """Return the numbers that were sold."""
        return sorted(self.rows("SELECT number FROM public.sale"))

    def sent(self) -> list[str]:
        """Return the bodies that were sent."""
        return self.rows("SELECT convert_from(body, 'UTF8') FROM outbox.half_message ORDER BY 1")

    def effects(self) -> list[int]:
        """Return the numbers that handlers noted."""
        return sorted(self.rows("SELECT number FROM public.effect"))

    def wait_for_effects(self, count: int) -> list[int]:
        """Wait until handlers have noted so many numbers; return them."""
        wait_until(lambda: len(self.effects()) >= count, "the handlers are done")
        return self.effects()


@pytest.fixture
def shop(new_database: Callable[[], str]) -> Iterator[Shop]:
    """A migrated database with the tables of a shop."""
    url = new_database()
    observer = create_engine(url, isolation_level="AUTOCOMMIT")
    with observer.connect() as connection:
        connection.execute(text(_TABLES))
    yield Shop(url, observer)
    observer.dispose()


@contextmanager
def serving(app: Any) -> Iterator[httpx.Client]:
    """Serve an ASGI application by uvicorn, and give a client; at the end the server stops as after SIGTERM."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, ws="none", log_config=None, lifespan="on"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: server.started or not thread.is_alive(), "the server is up")
        assert server.started, "the application didn't start"
        (listening,) = server.servers[0].sockets
        # uvicorn closes the connection of a request that failed, after the answer.
        fresh = {"Connection": "close"}
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        with httpx.Client(base_url=url, headers=fresh, timeout=60) as client:
            yield client
    finally:
        server.should_exit = True
        thread.join()
