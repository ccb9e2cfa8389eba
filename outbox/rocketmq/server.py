"""Serve RocketMQ's clients: gRPC on a loop of its own, calls and their answers, and an end in good order.

Every answer has a status in its body: a code of the protocol's, never an exception of gRPC, which clients take for a
broken connection. gRPC has a thread for its event loop here; the database is used in threads of a pool
(`outbox.rocketmq.tables`).
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from outbox.database.engines import start_loop
from outbox.database.sql import REPORT_INTERVAL
from outbox.errors import InvalidSettings
from outbox.message.model import uuid7
from outbox.operator.health.workers import SERVER_ROLE
from outbox.rocketmq.checking import Checking
from outbox.rocketmq.clients import Client, Clients
from outbox.rocketmq.options import RocketmqOptions, UserGuard
from outbox.rocketmq.receiving import ReceiveCalls
from outbox.rocketmq.routes import NoSettings, Routes
from outbox.rocketmq.rules import Refused, check_bounds, refusal_of
from outbox.rocketmq.sending import SendCalls
from outbox.rocketmq.tables import Tables
from outbox.rocketmq.wire import SERVICE, WIRE, WireCode, new, status_of
from outbox.telemetry.events import ClientCallEnded, ClientRefused, RocketmqServing, RocketmqStopped
from outbox.telemetry.hooks import emit, listeners
from outbox.text import process_name, storable
from outbox.worker.report import Facts, beat, leave

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from outbox.app import Outbox
    from outbox.settings import Settings

#: A request may have 32 bodies of 4 MiB. Idle clients ping each five minutes, which is as often as gRPC allows by
#: itself; it would send them away.
_OPTIONS = (
    ("grpc.max_receive_message_length", 130 * 1024 * 1024),
    ("grpc.max_send_message_length", 130 * 1024 * 1024),
    ("grpc.http2.min_ping_interval_without_data_ms", 60_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.so_reuseport", 1),
)
#: For how long (seconds) calls may run on when the server stops, after those that wait were answered.
_GRACE = 5.0
_BEAT = 1.0
#: What is told of a duty that nothing hinders.
_WELL: Mapping[str, Any] = {"failures": 0, "last_error": None}

Serve = Callable[[Any, Client], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class Listen:
    """An address to listen at; with the files of a certificate and its key by TLS, else in plain text."""

    host: str = "127.0.0.1"
    port: int = 8081
    cert: str | None = None
    key: str | None = None

    @property
    def address(self) -> str:
        """The address as gRPC takes it."""
        host = self.host or "[::]"  # every address, as `outbox run --http` has it
        return f"[{host}]:{self.port}" if ":" in self.host else f"{host}:{self.port}"

    def credentials(self) -> Any:
        """Return what gRPC needs for TLS; None for plain text.

        Raises:
            InvalidSettings: a file can't be read, or one of the two is missing.
        """
        if self.cert is None and self.key is None:
            return None
        if self.cert is None or self.key is None:
            raise InvalidSettings("TLS needs a certificate and its key: give both")
        files = []
        for path in (self.key, self.cert):
            try:
                with open(path, "rb") as file:  # noqa: PTH123 - a path as the user wrote it
                    files.append(file.read())
            except OSError as error:
                raise InvalidSettings(f"{path} can't be read: {error.strerror}") from None
        return grpc.ssl_server_credentials([(files[0], files[1])])


class RocketmqServer:
    """Takes RocketMQ's clients for the database of an `Outbox`, as ``options`` say, at some addresses.

    It has what a supervised worker has, so that several processes can share a port. What is sent needs a worker that
    dispatches it: `outbox run`.
    """

    def __init__(self, outbox: Outbox, options: RocketmqOptions, listen: Sequence[Listen]) -> None:
        self.settings: Settings = outbox.settings
        self.options = options
        self._outbox = outbox
        self._listen = tuple(listen)
        #: The ports that it listens at, in the order of the addresses.
        self.ports: list[int] = []
        self._id = uuid7()
        self._stopping = threading.Event()
        self._ending = threading.Lock()
        self._running = False
        self._beat_at = 0.0
        self.clients: Clients

    # --- its life ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Listen, and take calls from now on.

        Raises:
            InvalidSettings: an address can't be listened at, or a certificate can't be read.
        """
        credentials = [each.credentials() for each in self._listen]
        self._loop, self._thread = start_loop("outbox-rocketmq-loop")
        self.tables: Tables = Tables(self._outbox, self.options, self.settings.checks_in_flight + 2)
        try:
            self.tables.declare(self.options.topics)
            self._in_loop(self._start(credentials))
        except BaseException:
            self._end_loop(self.drain_timeout)
            raise
        self._checking.start()
        self._running = True
        emit(RocketmqServing(addresses=tuple(self.addresses)))

    @property
    def addresses(self) -> list[str]:
        """Where it listens, with the ports that were free where 0 was asked for."""
        return [
            f"{each.address.rpartition(':')[0]}:{port}" for each, port in zip(self._listen, self.ports, strict=True)
        ]

    async def _start(self, credentials: Sequence[Any]) -> None:
        self.clients = Clients(self._loop)
        self._guard = UserGuard(self.options)
        self._checking = Checking(self.tables, self.clients, self._loop)
        self._sending = SendCalls(self.tables, self._checking.questions.hand_over)
        self._routes = Routes(self.tables, self.clients)
        self._receiving = ReceiveCalls(self.tables, self.clients)
        self.tables.listen(self._wake)
        self._server: Any = grpc.aio.server(options=_OPTIONS)
        self._server.add_generic_rpc_handlers((self._handlers(),))
        for each, tls in zip(self._listen, credentials, strict=True):
            try:
                port = (
                    self._server.add_insecure_port(each.address)
                    if tls is None
                    else self._server.add_secure_port(each.address, tls)
                )
            except RuntimeError as error:
                raise InvalidSettings(f"can't listen at {each.address}: {error}") from None
            if not port:
                raise InvalidSettings(f"can't listen at {each.address}: the address is in use, or not this machine's")
            self.ports.append(port)
        await self._server.start()
        self._tasks = [asyncio.create_task(work) for work in (self._beat(), self._report(), self._receiving.renew())]

    def _wake(self, topic: str | None) -> None:
        self._loop.call_soon_threadsafe(self._receiving.wake, topic)

    async def _beat(self) -> None:
        while True:
            self._beat_at = time.monotonic()
            await asyncio.sleep(_BEAT)

    async def _report(self) -> None:
        """Tell, as workers do, that it lives, which groups it serves, and which clients are there.

        Every few seconds, and soon after a client has come or gone.
        """
        from outbox import __version__  # noqa: PLC0415 - the package itself

        failures = 0
        while True:
            self.clients.news.clear()
            duties = {f"consume {topic} of {group}": _WELL for group, topic in self._receiving.consumed()}
            duties |= {"rocketmq check": self._checking.health}
            facts = Facts(self._id, process_name(), __version__, [SERVER_ROLE], self.clients.handlers(), duties)
            try:
                await self.tables.run(partial(_tell, self.settings, facts))
                failures = 0
            except Exception as error:  # a later one may reach the database again
                failures += 1
                self.tables.tell_failure("rocketmq report", error, failures)
            await asyncio.sleep(_BEAT)
            with suppress(TimeoutError):  # none has come or gone
                await asyncio.wait_for(self.clients.news.wait(), REPORT_INTERVAL - _BEAT)

    def _in_loop(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def stop(self) -> None:
        """End in good order: answer what waits, finish what writes, end the streams; return when that is done.

        What isn't done within the setting ``drain_timeout``, such as a write that waits for another transaction's row,
        loses its connection: it is rolled back, and its client tries again elsewhere.
        """
        self._stopping.set()
        with self._ending:
            if self._running:
                self._running = False
                deadline = time.monotonic() + self.drain_timeout
                self._checking.stop(self.drain_timeout)
                self._in_loop(self._stop(deadline))
                # A database that is away forgets it as it forgets a worker that died.
                gone = partial(leave, settings=self.settings, worker_id=self._id)
                self._end_loop(max(deadline - time.monotonic(), 0), gone)
                emit(RocketmqStopped())

    async def _stop(self, deadline: float) -> None:
        self._receiving.end()
        self.clients.end_streams()
        await self._server.stop(min(_GRACE, max(deadline - time.monotonic(), 0)))
        for task in self._tasks:
            task.cancel()
        await self._receiving.drain(max(deadline - time.monotonic(), 0))

    def _end_loop(self, within: float, last: Callable[[Connection], object] | None = None) -> None:
        self.tables.end(within, last)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def run(self) -> int:
        """Serve until SIGTERM or SIGINT; return the exit code. A second signal ends the process at once."""

        def obey(number: int, _: object) -> None:
            if self._stopping.is_set():
                os._exit(128 + number)
            self._stopping.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, obey)
        self.start()
        while not self._stopping.wait(_BEAT):
            pass
        self.stop()
        return 0

    # --- as a supervisor sees it, and what asks if it lives --------------------------------------------------------

    @property
    def is_running(self) -> bool:
        """Does it take calls?"""
        return self._running

    @property
    def drain_timeout(self) -> float:
        """How long (seconds) its end may take."""
        return self.settings.drain_timeout

    @property
    def hang_timeout(self) -> float:
        """After how long (seconds) a process that hangs is to be ended."""
        return self.settings.hang_timeout

    def is_alive(self) -> bool:
        """Does its loop go round?"""
        return not self._running or time.monotonic() - self._beat_at < self.hang_timeout

    def is_ready(self) -> bool:
        """Does it take calls now?"""
        return self._running and not self._stopping.is_set()

    def health(self) -> Mapping[str, Any]:
        """Return no duties: it has none."""
        return {}

    # --- calls -----------------------------------------------------------------------------------------------------

    def _handlers(self) -> Any:
        unary: dict[str, Serve] = {
            "QueryRoute": self._routes.query_route,
            "QueryAssignment": self._routes.query_assignment,
            "Heartbeat": self._routes.heartbeat,
            "SendMessage": self._sending.send_message,
            "EndTransaction": self._sending.end_transaction,
            "RecallMessage": self._sending.recall_message,
            "AckMessage": self._receiving.ack_message,
            "ChangeInvisibleDuration": self._receiving.change_invisible_duration,
            "ForwardMessageToDeadLetterQueue": self._receiving.forward_to_dead_letters,
            "NotifyClientTermination": self._receiving.terminated,
        }
        handlers = {
            name: self._handler(name, grpc.unary_unary_rpc_method_handler, partial(self._answer, name, serve))
            for name, serve in unary.items()
        }
        handlers["ReceiveMessage"] = self._handler(
            "ReceiveMessage", grpc.unary_stream_rpc_method_handler, self._receive
        )
        handlers["Telemetry"] = self._handler("Telemetry", grpc.stream_stream_rpc_method_handler, self._telemetry)
        return grpc.method_handlers_generic_handler(SERVICE, handlers)

    def _handler(self, name: str, make: Any, function: Any) -> Any:
        request, response, *_ = WIRE.calls[name]
        read, write = WIRE.classes[request].FromString, WIRE.classes[response].SerializeToString
        return make(function, request_deserializer=read, response_serializer=write)

    def _enter(self, context: Any, request: Any = None) -> Client:
        """Return the client of a call; raise Refused if it isn't let in, or asks for too much at once."""
        metadata = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
        user = self._guard.user_of(metadata)
        id_ = storable(metadata.get("x-mq-client-id", "")).strip()[:255]
        if not id_:
            raise Refused(WireCode.CLIENT_ID_REQUIRED, "client id cannot be empty")
        if request is not None:
            check_bounds(request)
        return self.clients.heard(id_, user, metadata, _host_of(context.peer()))

    async def _answer(self, name: str, serve: Serve, request: Any, context: Any) -> Any:
        with _measured(name) as answered:
            try:
                answer = await serve(request, self._enter(context, request))
            except Exception as error:
                answer = new(WIRE.calls[name][1], status=self._refused(name, error, request, context))
            answered(answer.status)
        return answer

    def _refused(self, name: str, error: Exception, request: Any, context: Any) -> Any:
        """Return the status of a call that failed, and tell what an operator should know of."""
        refused = refusal_of(error)
        id_ = next((value for key, value in context.invocation_metadata() or () if key == "x-mq-client-id"), "")
        client = storable(id_)[:255]
        if refused.code is WireCode.INTERNAL_SERVER_ERROR and refused is not error:
            topic = storable(getattr(getattr(request, "topic", None), "name", ""))[:255]
            self.tables.tell_call_failed(name, client, topic, error)
        elif refused.code in {WireCode.UNAUTHORIZED, WireCode.FORBIDDEN}:
            emit(ClientRefused(call=name, client=client, reason=str(refused)))
        return status_of(refused.code, str(refused))

    async def _receive(self, request: Any, context: Any) -> AsyncIterator[Any]:
        remaining = context.time_remaining()
        with _measured("ReceiveMessage") as answered:
            try:
                client = self._enter(context, request)
                parts = await self._receiving.receive_message(request, client, remaining, context.add_done_callback)
            except Exception as error:
                status = self._refused("ReceiveMessage", error, request.message_queue, context)
                parts = iter([new("ReceiveMessageResponse", status=status)])
            answered((first := next(parts)).status)
        yield first
        for part in parts:
            yield part

    async def _telemetry(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        """Answer a client's settings, and send it commands, until it ends its half of the stream."""
        try:
            client = self._enter(context)
        except Refused as refused:
            yield new("TelemetryCommand", status=self._refused("Telemetry", refused, None, context))
            return
        stream = self.clients.open(client)
        hearing = asyncio.create_task(self._routes.hear(requests, client, stream))
        hearing.add_done_callback(lambda _: stream.end())
        try:
            while (command := await stream.next()) is not None:
                yield command
            if hearing.done() and isinstance(error := hearing.exception(), NoSettings):
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        finally:
            self.clients.close(client, stream)
            hearing.cancel()
            with suppress(asyncio.CancelledError, Exception):  # the client is gone, or was told
                await hearing


def _tell(settings: Settings, facts: Facts, connection: Connection) -> None:
    beat(connection, settings, facts)


@contextmanager
def _measured(call: str) -> Iterator[Callable[[Any], None]]:
    """Tell of a call when it ends, with the status that it is given; of one that is cut off, too."""
    began, status = time.perf_counter(), ["CANCELLED"]
    try:
        yield lambda answered: status.append(WireCode(answered.code).name)
    finally:
        if listeners.hooks:
            emit(ClientCallEnded(call=call, status=status[-1], seconds=time.perf_counter() - began))


def _host_of(peer: str) -> str:
    """Return the host of a client by gRPC's name of its peer, such as ``ipv4:10.0.0.7:51312``."""
    _, _, address = peer.partition(":")
    return address.rpartition(":")[0].replace("%5B", "").replace("%5D", "")
