"""Check 72: our server is ended and started again, in good order and by SIGKILL, while clients send and receive."""

from __future__ import annotations

import signal
import threading
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from tests.kit import wait_until
from tests.kit.effort import EFFORT
from tests.rocketmq.conformance.bridge import Bridge, ClientRaised, ClientThing, command
from tests.rocketmq.conformance.checks import CHECKS
from tests.rocketmq.conformance.servers import REAL, ServerProcess
from tests.rocketmq.conformance.suite import OFFICIAL, Asked, CheckRun, Heard

#: Go's client opens no telemetry stream before its next sync, five minutes after its start, and Python's may fail to
#: (5.1.2: "There is no current event loop in thread"). Their halves wait: the next producer that starts is asked.
_RETURNS = "NJ"


class LoadedClient:
    """A client that sends a message each half second and receives by push, while its server comes and goes."""

    def __init__(self, run: CheckRun) -> None:
        self.run = run
        self.heard, self.asked = Heard("SUCCESS"), Asked("COMMIT")
        self.accepted: list[str] = []
        self.failed: list[str] = []
        self._stop = threading.Event()
        run.push(self.heard)
        self.producer: ClientThing = run.producer(handler=self.asked)
        self._thread = threading.Thread(target=self._send)
        self._thread.start()

    def _send(self) -> None:
        number = 0
        while not self._stop.wait(0.5):
            number += 1
            try:
                self.producer.send(topic=self.run.topic, body=str(number))
                self.accepted.append(str(number))
            except ClientRaised as raised:
                self.failed.append(str(raised)[:200])

    def until_works(self) -> tuple[float, float]:
        """Wait for a send that is accepted from now on, and for its delivery; return how long it took (seconds)."""
        began, sent = time.monotonic(), len(self.accepted)
        wait_until(lambda: len(self.accepted) > sent, f"{self.run.client} sends")
        sends, body = time.monotonic() - began, self.accepted[sent]
        wait_until(lambda: body in self.heard.bodies, f"{self.run.client} receives")
        return sends, time.monotonic() - began

    def end(self) -> None:
        """Stop sending."""
        self._stop.set()
        self._thread.join()


@pytest.mark.skipif(EFFORT < 10 or bool(REAL), reason="of the night, and of ours: OUTBOX_TEST_EFFORT=10")
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_clients_get_over_a_restart(how: signal.Signals, url: str, tmp_path: Path) -> None:
    """Each client sends and receives again in seconds; all that was accepted is delivered, once but for crashes."""
    with ExitStack() as stack:
        errors = stack.enter_context((tmp_path / "errors-of-clients").open("w"))
        process = ServerProcess(url, CHECKS.values(), "", tmp_path)
        server = process.start()
        stack.callback(process.end)
        clients = []
        for letter in OFFICIAL:
            new = partial(Bridge, letter, command(letter, tmp_path), tmp_path, errors)
            bridge = new()
            stack.callback(bridge.kill)
            run = CheckRun(CHECKS[72], letter, server, bridge, new)
            stack.callback(run.close)
            clients.append(LoadedClient(run))
            stack.callback(clients[-1].end)
        for client in clients:
            client.until_works()
        process.end(how)
        time.sleep(5)
        process.start()
        times = {client.run.client: client.until_works() for client in clients}
        halves = {client.run.client: client.run.half(client.producer, "half") for client in clients}
        for client in clients:
            if client.run.client not in _RETURNS:
                client.run.producer(own=True, handler=client.asked)
            wait_until(lambda client=client: "half" in client.heard.bodies, f"{client.run.client} is asked")  # type: ignore[misc]
        for client in clients:
            client.end()
            wait_until(lambda client=client: {*client.accepted} <= {*client.heard.bodies}, "all came")  # type: ignore[misc]
        print(f"{how.name}: first send and receive after the restart, in s: {times}; halves: {len(halves)}")  # noqa: T201
        for client in clients:
            bodies, name = client.heard.bodies, client.run.client
            twice = len(bodies) - len(set(bodies))
            assert len(client.asked.times) == 1, f"{name} was asked {client.asked.times}"
            # A client whose ack was cut off may get its message again, never as another message.
            assert twice == 0 or how is signal.SIGKILL, f"{name} got {twice} twice"
