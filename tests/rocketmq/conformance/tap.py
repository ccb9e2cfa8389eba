"""A proxy between a client and a server that loses answers: what the server did, the client isn't told.

It passes all on as bytes, but for routes: these name the proxy itself, so that the client stays with it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import grpc

from outbox.rocketmq.wire import SERVICE, WIRE

#: So long (seconds) an answer that is lost takes: longer than any client waits.
_LONG = 60.0


class Tap:
    """A proxy on a free port; ``calls`` counts what went through, by RPC."""

    def __init__(self, server: str) -> None:
        large = [("grpc.max_receive_message_length", 64 << 20), ("grpc.max_send_message_length", 64 << 20)]
        self._channel = grpc.insecure_channel(server, large)
        self._server = grpc.server(ThreadPoolExecutor(64), options=large)
        self.port: int = self._server.add_insecure_port("127.0.0.1:0")
        self.endpoints = f"127.0.0.1:{self.port}"
        self.calls: Counter[str] = Counter()
        self._losing: Counter[str] = Counter()
        self._ended = threading.Event()
        methods = {name: self._method(name) for name in WIRE.calls}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._server.stop(None)
        self._channel.close()

    def lose(self, name: str, count: int) -> None:
        """Lose the next so many answers of an RPC."""
        self._losing[name] += count

    def _method(self, name: str) -> Any:
        _, _, many_in, many_out = WIRE.calls[name]
        kind = f"{'stream' if many_in else 'unary'}_{'stream' if many_out else 'unary'}"
        call = getattr(self._channel, kind)(f"/{SERVICE}/{name}")

        def arguments(context: Any) -> dict[str, Any]:
            kept = [each for each in context.invocation_metadata() if each.key.startswith(("x-mq-", "authorization"))]
            return {"metadata": kept, "timeout": None if many_in else context.time_remaining()}

        def unary(request: Any, context: Any) -> Any:
            self.calls[name] += 1
            lost = self._losing[name] > 0
            self._losing[name] -= lost
            answer = call(request, **arguments(context))
            if lost:
                self._ended.wait(_LONG)
            return self._here(answer) if name == "QueryRoute" else answer

        def stream(request: Any, context: Any) -> Iterator[Any]:
            self.calls[name] += 1
            parts = call(request, **arguments(context))
            context.add_callback(parts.cancel)
            yield from parts

        return getattr(grpc, f"{kind}_rpc_method_handler")(stream if many_out else unary)

    def _here(self, answer: bytes) -> bytes:
        """Return a route that names this proxy."""
        route = WIRE.classes["QueryRouteResponse"].FromString(answer)
        for queue in route.message_queues:
            for address in queue.broker.endpoints.addresses:
                address.host, address.port = "127.0.0.1", self.port
        return bytes(route.SerializeToString())
