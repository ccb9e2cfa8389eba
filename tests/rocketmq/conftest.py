"""Fixtures of the server: one on a free port of this process, and raw clients of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from sqlalchemy import Engine

from outbox import Outbox, Settings
from outbox.rocketmq.options import GroupOptions, RocketmqOptions
from outbox.rocketmq.server import Listen, RocketmqServer
from tests.rocketmq.raw import RawClient

NewServer = Callable[..., RocketmqServer]
#: Group `ordered` keeps the order of keys.
FIFO_GROUP = {"ordered": GroupOptions(fifo=True)}


def options_of(**tables: Any) -> RocketmqOptions:
    """Return options with topics that are made by their first use unless they say otherwise."""
    return RocketmqOptions(**{"auto_create": True, **tables})


@pytest.fixture
def new_server(engine: Engine) -> Iterator[NewServer]:
    """A function that starts a server, by default on the database of the test; it takes settings and options."""
    with ExitStack() as stack:

        def start(
            settings: Settings | None = None, outbox: Outbox | None = None, port: int = 0, **options: Any
        ) -> RocketmqServer:
            served = outbox or Outbox(engine, settings=settings or Settings())
            server = RocketmqServer(served, options_of(**options), [Listen(port=port)])
            server.start()
            stack.callback(server.stop)
            return server

        yield start


@pytest.fixture
def rocketmq(new_server: NewServer) -> RocketmqServer:
    """A server on the database of the test."""
    return new_server()


@pytest.fixture
def raw(rocketmq: RocketmqServer) -> Iterator[RawClient]:
    """A client of that server."""
    with RawClient(rocketmq.addresses[0]) as client:
        yield client
