"""A connection pooler in miniature: real connections to the server, shared among real clients.

In transaction mode a client has a server connection from the first message of a transaction to its end, and the one
that was given back last is given out first, as PgBouncer does. With ``tracking`` it manages prepared statements as
PgBouncer 1.21 and later do: under names of its own, and prepared anew on server connections that lack them.
"""

from __future__ import annotations

import itertools
import os
import secrets
import socket
import struct
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from sqlalchemy import URL, make_url

from tests.doctor.support import raw

_REFUSED = {80877103, 80877104}  # requests for TLS and for GSS encryption
_CANCEL = 80877102
_SETTINGS = {
    "server_version": "15.0", "client_encoding": "UTF8", "standard_conforming_strings": "on", "integer_datetimes": "on",
    "DateStyle": "ISO, MDY", "TimeZone": "UTC",
}  # fmt: skip


class _Backend:
    """A server connection that is logged in; from then on only its socket is used."""

    def __init__(self, url: URL) -> None:
        self._connection = raw(url, autocommit=True)
        self.socket = socket.socket(fileno=os.dup(self._connection.fileno()))
        self.socket.setblocking(True)
        self.statements: set[bytes] = set()

    def close(self) -> None:
        self.socket.close()
        self._connection.close()


@dataclass
class _Client:
    """A client's socket, and what it has prepared: the message without the name."""

    socket: socket.socket
    number: int
    statements: dict[bytes, bytes] = field(default_factory=dict)
    backend: _Backend | None = None
    # Of each Parse under way: is it the client's own, so that it waits for the answer?
    parsing: deque[bool] = field(default_factory=deque)


class Relay:
    """The pooler; ``url`` is where clients connect."""

    def __init__(self, server: URL | str, *, transaction: bool, tracking: bool) -> None:
        self._server = make_url(server)
        self._transaction = transaction
        self._tracking = tracking
        self._free: list[_Backend] = []
        self._all: list[_Backend] = []
        self._sockets: list[socket.socket] = []
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    @property
    def url(self) -> URL:
        """The address of the pooler."""
        return self._server.set(host="127.0.0.1", port=self._listener.getsockname()[1])

    def close(self) -> None:
        """Cut everybody off, and wait for all threads."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads[0].join()
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads[1:]:
            thread.join()
        for backend in self._all:
            backend.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                accepted, _ = self._listener.accept()
                accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._sockets.append(accepted)
                thread = threading.Thread(target=self._serve, args=(_Client(accepted, next(self._numbers)),))
                self._threads.append(thread)
                thread.start()

    def _serve(self, client: _Client) -> None:
        with client.socket, suppress(OSError, EOFError):
            if _greet(client.socket):
                while (message := _read(client.socket))[0] != b"X":
                    self._forward(client, *message)
        if client.backend is not None and not self._transaction:
            client.backend.close()
            self._all.remove(client.backend)

    def _forward(self, client: _Client, kind: bytes, body: bytes) -> None:
        if client.backend is None:
            client.backend = self._take()
        if self._tracking:
            body = _renamed(client, client.backend, kind, body)
        client.backend.socket.sendall(_message(kind, body))
        if kind in {b"Q", b"S"}:
            idle = _answer(client, client.backend)
            if idle and self._transaction:
                with self._lock:
                    self._free.append(client.backend)
                client.backend = None

    def _take(self) -> _Backend:
        with self._lock:
            if self._free:
                return self._free.pop()
            self._all.append(_Backend(self._server))
            return self._all[-1]


@contextmanager
def relay(server: URL | str, *, transaction: bool = True, tracking: bool = False) -> Iterator[URL]:
    """Yield the address of a pooler in front of a server."""
    pooler = Relay(server, transaction=transaction, tracking=tracking)
    try:
        yield pooler.url
    finally:
        pooler.close()


def _greet(client: socket.socket) -> bool:
    """Let a client in without asking, and invent its process number."""
    while True:
        (length, code) = struct.unpack("!II", _exactly(client, 8))
        _exactly(client, length - 8)
        if code == _CANCEL:
            return False
        if code not in _REFUSED:
            break
        client.sendall(b"N")
    client.sendall(_message(b"R", struct.pack("!I", 0)))
    for name, value in _SETTINGS.items():
        client.sendall(_message(b"S", f"{name}\0{value}\0".encode()))
    client.sendall(_message(b"K", secrets.token_bytes(8)))
    client.sendall(_message(b"Z", b"I"))
    return True


def _renamed(client: _Client, backend: _Backend, kind: bytes, body: bytes) -> bytes:
    """Return a message with the pooler's own name of a prepared statement, which is there when it is used."""
    before = b""
    if kind == b"B":
        portal, _, body = body.partition(b"\0")
        before = portal + b"\0"
    elif kind in {b"D", b"C"}:
        before, body = body[:1], body[1:]
    if kind not in {b"P", b"B", b"D", b"C"} or before == b"P":
        return before + body
    name, _, rest = body.partition(b"\0")
    if kind == b"P":
        client.parsing.append(True)
    if not name:
        return before + body
    own = b"POOL_%d_%s" % (client.number, name)
    if kind == b"P":
        client.statements[name] = rest
    elif kind == b"C":
        client.statements.pop(name, None)
        backend.statements.discard(own)
    elif own not in backend.statements and name in client.statements:
        client.parsing.append(False)
        backend.socket.sendall(_message(b"P", own + b"\0" + client.statements[name]))
    if kind != b"C":
        backend.statements.add(own)
    return before + own + b"\0" + rest


def _answer(client: _Client, backend: _Backend) -> bool:
    """Pass on what the server answers; tell whether it isn't in a transaction any more."""
    while True:
        kind, body = _read(backend.socket)
        if kind == b"1" and client.parsing and not client.parsing.popleft():
            continue
        client.socket.sendall(_message(kind, body))
        if kind == b"Z":
            client.parsing.clear()
            return body == b"I"


def _message(kind: bytes, body: bytes) -> bytes:
    return kind + struct.pack("!I", len(body) + 4) + body


def _read(source: socket.socket) -> tuple[bytes, bytes]:
    kind = _exactly(source, 1)
    (length,) = struct.unpack("!I", _exactly(source, 4))
    return kind, _exactly(source, length - 4)


def _exactly(source: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = source.recv(size - len(data))
        if not part:
            raise EOFError
        data += part
    return data
