"""Start what stands between the banks in a run of the demo, and count what went through it.

The banks' relays reach it through a `Proxy` where things are to go wrong, and the intakes as it is.
"""

from __future__ import annotations

import base64
import os
import socket
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from outbox.errors import pip_install

from . import brokers, destinations
from .brokers import KafkaServers, Missing, Server
from .message import OUTCOMES, TOPIC
from .options import Via
from .proxy import Proxy
from .via import Between

#: What bank A relays, and what bank B does.
_TOPICS = (TOPIC, OUTCOMES)
_SERVERS = {Via.NATS: brokers.nats_server, Via.REDIS: brokers.redis_server, Via.RABBITMQ: brokers.rabbit_server}
_ADDRESSES = {
    Via.KAFKA: "127.0.0.1:{port}",
    Via.NATS: "nats://127.0.0.1:{port}",
    Via.REDIS: "redis://127.0.0.1:{port}",
    Via.RABBITMQ: "amqp://guest:guest@127.0.0.1:{port}/",
    Via.WEBHOOK: "http://127.0.0.1:{port}/",
}
#: The library of each kind, and the extra that brings it.
_LIBRARIES = {
    Via.KAFKA: ("confluent_kafka", "kafka"),
    Via.NATS: ("nats", "nats"),
    Via.REDIS: ("redis", "redis"),
    Via.RABBITMQ: ("aio_pika", "rabbitmq"),
    Via.WEBHOOK: ("httpx", "http"),
    Via.ROCKETMQ: ("rocketmq", "rocketmq"),
}


@dataclass(frozen=True, slots=True)
class Carried:
    """What went through the exchange.

    ``published``: the messages there, ``ids`` how often it has each; ``taken``: how often one was taken from it.
    ``cuts`` and ``dropped`` are the connections that the proxy cut, and those in which it kept an answer back.
    """

    kind: Via
    published: int
    taken: int
    cuts: int
    dropped: int
    ids: Counter[str] = field(repr=False)


@dataclass(slots=True)
class Exchange:
    """What stands between the banks.

    ``between`` is what their processes must know of it. ``broker`` is its server, where there is one. Webhooks have
    ``endpoints``, sockets that stay open while the process of one is killed.
    """

    between: Between
    broker: KafkaServers | Server | None
    proxies: list[Proxy]
    endpoints: Mapping[str, socket.socket]

    def carried(self, taken: int) -> Carried:
        """Return what went through it; the processes took so many messages."""
        kind, ids = self.between.kind, Counter[str]()
        if self.broker is not None:
            ids = destinations.published(kind, self.between.take_at[TOPIC], _TOPICS)
        cuts, dropped = (sum(getattr(each, what) for each in self.proxies) for what in ("cuts", "dropped"))
        return Carried(kind, ids.total() or taken, taken, cuts, dropped, ids)


@contextmanager
def opened(kind: Via, seed: int, *, disturbed: bool) -> Iterator[Exchange]:
    """Run what is between the banks; ``disturbed``: with a proxy that loses answers.

    Raises:
        Missing: a program or a library isn't there; says how to get it.
        ServerDied: a server doesn't start.
    """
    library, extra = _LIBRARIES[kind]
    if find_spec(library) is None:
        # The client is no part of what serves it.
        client = " rocketmq-python-client" if kind is Via.ROCKETMQ else ""
        raise Missing(library, pip_install(extra) + client)
    with ExitStack() as stack:

        def proxy() -> Proxy | None:
            return stack.enter_context(Proxy(seed)) if disturbed else None

        if kind.has_broker:
            yield _broker(kind, stack, proxy())
        else:
            proxies = {topic: proxy() for topic in _TOPICS}
            yield _endpoints(stack, proxies) if kind is Via.WEBHOOK else _gateways(stack, proxies)


def _folder(kind: Via) -> tempfile.TemporaryDirectory[str]:
    # A helper of a server that was killed may write a last line while it is emptied.
    return tempfile.TemporaryDirectory(prefix=f"{kind}-", ignore_cleanup_errors=True)


def _broker(kind: Via, stack: ExitStack, proxy: Proxy | None) -> Exchange:
    server: KafkaServers | Server
    if kind is Via.KAFKA:
        server = kafka = stack.enter_context(brokers.kafka_servers(proxy=proxy.port if proxy else 0))
        port, behind = int(kafka.bootstrap.rpartition(":")[2]), kafka.proxied
    else:
        server = stack.enter_context(_SERVERS[kind](Path(stack.enter_context(_folder(kind)))))
        port = behind = server.port
    if proxy:
        proxy.to = behind
    direct, there = (_ADDRESSES[kind].format(port=each) for each in (port, proxy.port if proxy else port))
    destinations.make(kind, direct, _TOPICS)
    between = Between(kind, dict.fromkeys(_TOPICS, there), dict.fromkeys(_TOPICS, direct))
    return Exchange(between, server, [proxy] if proxy else [], {})


def _gateways(stack: ExitStack, proxies: Mapping[str, Proxy | None]) -> Exchange:
    serve, take = dict[str, str](), dict[str, str]()
    for topic, proxy in proxies.items():
        # Bound, and not listened at: the port is the gateway's, also while its process is killed.
        held = stack.enter_context(socket.socket())
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))
        port = int(held.getsockname()[1])
        if proxy:
            proxy.to = port
        serve[topic] = f"127.0.0.1:{port}"
        take[topic] = f"127.0.0.1:{proxy.port if proxy else port}"
    return Exchange(Between(Via.ROCKETMQ, serve, take), None, [each for each in proxies.values() if each], {})


def _endpoints(stack: ExitStack, proxies: Mapping[str, Proxy | None]) -> Exchange:
    sockets, urls, secrets = dict[str, socket.socket](), dict[str, str](), dict[str, str]()
    for topic, proxy in proxies.items():
        sockets[topic] = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=200))
        port = int(sockets[topic].getsockname()[1])
        if proxy:
            proxy.to = port
        urls[topic] = _ADDRESSES[Via.WEBHOOK].format(port=proxy.port if proxy else port)
        secrets[topic] = "whsec_" + base64.b64encode(os.urandom(32)).decode()
    between = Between(Via.WEBHOOK, urls, secrets=secrets)
    return Exchange(between, None, [each for each in proxies.values() if each], sockets)
