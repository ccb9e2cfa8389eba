"""A proxy before the test's server: it counts round trips, and loses a COMMIT on its way or its answer."""

from __future__ import annotations

import select
import socket
import threading
from typing import Literal


class Proxy:
    """Passes bytes between one client after another and the server; counts how often the client had to wait.

    ``cut``: at the next COMMIT the client's connection is lost, ``before`` it has reached the server, ``after`` the
    server has done it, or ``behind`` the server's word that it has.
    """

    def __init__(self, host: str, port: int) -> None:
        self._server = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.round_trips = 0
        self.cut: Literal["before", "after", "behind"] | None = None
        self._asking = False
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(self._server)
            threading.Thread(target=self._pass, args=(client, server), daemon=True).start()

    def _pass(self, client: socket.socket, server: socket.socket) -> None:
        with client, server:
            while True:
                for ready in select.select([client, server], [], [])[0]:
                    try:
                        data = ready.recv(65536)
                    except OSError:
                        return
                    if not data:
                        return
                    if ready is server and self._asking:
                        self.round_trips += 1
                    self._asking = ready is client
                    if ready is client and self.cut and b"COMMIT" in data:
                        if self.cut != "before":
                            server.sendall(data)
                            answer = server.recv(65536)
                        if self.cut == "behind":
                            client.sendall(answer[: answer.index(b"COMMIT\0") + len(b"COMMIT\0")])
                        return
                    (server if ready is client else client).sendall(data)
