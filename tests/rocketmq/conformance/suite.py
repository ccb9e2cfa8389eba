"""Checks of conformance: what each is, what a server was seen to do, and what of it isn't as declared.

A check has a number, what the real server answers and, where ours is to answer otherwise, what and why. Its functions,
one for each kind of client, drive a client (`bridge`) or the raw one (`raw`) and state facts; one that isn't so fails
the test.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tests.rocketmq.conformance.bridge import Bridge, ClientRaised, ClientThing, Handler
from tests.rocketmq.conformance.raw import Answer, CheckClient, next_command, status
from tests.rocketmq.conformance.servers import CheckedServer
from tests.rocketmq.raw import Telemetry, code

T = TypeVar("T")
Run = Callable[["CheckRun"], None]

#: The official clients: Python's, Node's, Java's, Go's. R is the raw one.
OFFICIAL = "PNJG"


@dataclass
class Check:
    """A check; ``topic`` is the type of its topic, ``group`` what is said of its group, if it has one.

    ``needs`` names what a server must be started with beside the defaults of tests. ``ours`` is empty where ours
    answers as the real one does.
    """

    number: int
    name: str
    real: str
    ours: str = ""
    why: str = ""
    topic: str = ""
    group: str | None = None
    needs: str = ""
    #: About how long it takes (seconds): the long ones begin first.
    seconds: float = 10.0
    #: The clients that another test than the suite's own drives.
    elsewhere: str = ""
    runs: dict[str, Run] = field(default_factory=dict)
    night: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        assert self.number not in CHECKS, f"check {self.number} is declared twice"
        assert bool(self.ours) == bool(self.why), f"check {self.number} says what ours answers, but not why"
        CHECKS[self.number] = self

    @property
    def clients(self) -> str:
        """The letters of all its clients."""
        return "".join(self.runs) + self.elsewhere

    def by(self, clients: str, *, night: bool = False) -> Callable[[Run], Run]:
        """Declare the function for some clients; ``night``: it takes too long for a push."""

        def note(function: Run) -> Run:
            for client in clients:
                assert client not in self.runs, f"check {self.number} has two functions for {client}"
                self.runs[client] = function
                if night:
                    self.night.add(client)
            return function

        return note

    def topic_of(self, client: str) -> str:
        """Return the name of its topic."""
        return f"t{self.number}{client.lower()}"

    def group_of(self, client: str) -> str:
        """Return the name of its group."""
        return f"g{self.number}{client.lower()}"


#: All checks by their numbers.
CHECKS: dict[int, Check] = {}


class CheckRun:
    """A check while it runs with one client: what it has open, what it saw, and what of that isn't as it should be."""

    def __init__(
        self, check: Check, client: str, server: CheckedServer, shared: Bridge | None, new: Callable[[], Bridge]
    ) -> None:
        self.check, self.client, self.server = check, client, server
        self.topic, self.group = check.topic_of(client), check.group_of(client)
        self.ours = server.ours
        self.raw = self.another_raw()
        self.seen: list[str] = []
        self.wrong: list[str] = []
        self._shared, self._new = shared, new
        self._things: list[ClientThing] = []
        self._own: list[Bridge | Telemetry] = []
        self._began = time.monotonic()

    def another_raw(self, key: str | None = None) -> CheckClient:
        """Return a raw client with an id of its own; ``key``: not that of the server."""
        return CheckClient(self.server.endpoints, self.server.key if key is None else key)

    def either(self, *, real: T, ours: T) -> T:
        """Return what this server is to answer."""
        return ours if self.ours else real

    # --- clients

    def bridge(self, *, own: bool = False) -> Bridge:
        """Return the process that the checks of this client share, or one of this check's own, which it may kill."""
        if not own:
            assert self._shared
            return self._shared
        self._own.append(self._new())
        return self._own[-1]  # type: ignore[return-value]

    def _thing(self, op: str, bridge: Bridge, handler: Handler | None, request: dict[str, Any]) -> ClientThing:
        name = f"{op}{next(_NAMES)}-{self.check.number}"
        if handler:
            bridge.handlers[name] = handler
        access, _, secret = self.server.key.partition(":")
        made: dict[str, Any] = {"endpoints": self.server.endpoints, "ak": access, "sk": secret}
        bridge.call(op, **{"as": name, **made, **request})
        thing = ClientThing(bridge, name)
        self._things.append(thing)
        return thing

    def producer(self, *, own: bool = False, handler: Handler | None = None, **request: Any) -> ClientThing:
        """Start a producer; the handler is its checker."""
        request = {"topics": [self.topic], "check": handler is not None, **request}
        return self._thing("producer", self.bridge(own=own), handler, request)

    def simple(self, *, own: bool = False, filter_: str = "*", wait: int = 5, **request: Any) -> ClientThing:
        """Start a simple consumer, which waits so many seconds for messages."""
        request = {"group": self.group, "subs": {self.topic: filter_}, "await": wait, **request}
        return self._thing("simple", self.bridge(own=own), None, request)

    def push(self, handler: Handler, *, own: bool = False, **request: Any) -> ClientThing:
        """Start a push consumer; the handler is its listener."""
        request = {"group": self.group, "subs": {self.topic: "*"}, **request}
        return self._thing("push", self.bridge(own=own), handler, request)

    def half(self, producer: ClientThing, body: str = "a", **more: Any) -> tuple[ClientThing, dict[str, Any]]:
        """Begin a transaction and send its message; return both."""
        transaction = producer.begin()
        return transaction, producer.send(topic=self.topic, body=body, tx=transaction.name, **more)

    def raw_half(self, **system: Any) -> tuple[str, str]:
        """Send a half by the raw client; return its message id and transaction id."""
        answer = self.raw.send(self.raw.message(self.topic, message_type="TRANSACTION", **system))
        [entry] = answer["entries"]
        return entry["message_id"], entry["transaction_id"]

    def settle(
        self,
        kind: str = "SIMPLE_CONSUMER",
        raw: CheckClient | None = None,
        topics: list[str] | None = None,
        group: str | None = None,
    ) -> tuple[Telemetry, Answer | None]:
        """Send settings by a raw telemetry stream, which the real server wants before a receive."""
        raw = raw or self.raw
        stream = raw.telemetry(raw.settings(kind, topics or [self.topic], group or self.group))
        self._own.append(stream)
        return stream, next_command(stream)

    def drain(self, consumer: ClientThing, count: int, seconds: float = 30, **request: Any) -> list[dict[str, Any]]:
        """Receive and ack until so many messages came or time is over."""
        found: list[dict[str, Any]] = []
        end = time.monotonic() + seconds
        while len(found) < count and time.monotonic() < end:
            for message in consumer.receive(**request):
                consumer.ack(ref=message["ref"])
                found.append(message)
        return found

    # --- facts

    def clock(self) -> float:
        """Return the seconds since the check began."""
        return time.monotonic() - self._began

    def say(self, fact: object) -> None:
        """Note what was seen, and expect nothing."""
        self.seen.append(f"{self.clock():.1f} s: {fact}")

    def expect(self, condition: bool, fact: object) -> None:
        """Note what was seen; it is wrong unless the condition holds."""
        self.say(fact)
        if not condition:
            self.wrong.append(str(fact))

    def refused(self, function: Callable[[], object], *allowed: int | str, what: str = "") -> None:
        """Run what has to be refused: each of ``allowed`` is a code, or a part of the error's type or text."""
        try:
            result = function()
        except ClientRaised as raised:
            good = not allowed or any(raised.code == each or str(each) in str(raised) for each in allowed)
            self.expect(good, f"{what} {raised}".strip())
        else:
            self.expect(False, f"{what} was accepted: {result}".strip())

    def accepted(self, function: Callable[[], object], what: str) -> None:
        """Run what no client may refuse."""
        try:
            self.say(f"{what} {function() or 'OK'}")
        except ClientRaised as raised:
            self.expect(False, f"{what} {raised}")

    def answers(self, answer: Answer, expected: int, what: str = "") -> None:
        """Expect the code of an answer."""
        entries = [status(entry) for entry in answer.get("entries", ())]
        fact = f"{what} {status(answer)}".strip() + (f" entries {entries}" if entries else "")
        self.expect(code(answer) == expected, f"{fact}; wanted {expected}" if code(answer) != expected else fact)

    def close(self) -> None:
        """Close what is open; nothing waits for it, since some clients take half a minute."""
        for thing in self._things:
            if thing.bridge.process.poll() is None:
                with contextlib.suppress(OSError, ValueError):  # it has ended by now
                    thing.bridge.start("close", on=thing.name)
        for each in self._own:
            (each.kill if isinstance(each, Bridge) else each.cut)()
        self.raw.close()


_NAMES: Iterator[int] = itertools.count(1)


def text(message: dict[str, Any]) -> str:
    """Return the body of a message that a client got."""
    return base64.b64decode(message["body"]).decode()


class Asked:
    """A checker that notes when it is asked, and answers by the list; the last answer stays."""

    def __init__(self, *verdicts: str) -> None:
        self._verdicts = list(verdicts)
        self.began = time.monotonic()
        self.times: list[float] = []
        self.last: dict[str, Any] = {}

    def __call__(self, message: dict[str, Any]) -> str:
        self.times.append(round(time.monotonic() - self.began, 1))
        self.last = message
        return self._verdicts.pop(0) if len(self._verdicts) > 1 else self._verdicts[0]


class Heard:
    """A listener that notes body, attempt and time of what came, and answers by the list; the last answer stays."""

    def __init__(self, *verdicts: str, wait: float = 0.0) -> None:
        self._verdicts, self._wait = list(verdicts), wait
        self._lock = threading.Lock()
        self.began = time.monotonic()
        self.messages: list[tuple[str, int, float]] = []

    def __call__(self, message: dict[str, Any]) -> str:
        with self._lock:
            self.messages.append((text(message), message["attempt"], round(time.monotonic() - self.began, 1)))
            verdict = self._verdicts.pop(0) if len(self._verdicts) > 1 else self._verdicts[0]
        time.sleep(self._wait)
        return verdict

    @property
    def bodies(self) -> list[str]:
        """The bodies, in the order in which they came."""
        return [found for found, _, _ in self.messages]

    @property
    def attempts(self) -> list[int]:
        """The attempts, in the order in which they came."""
        return [found for _, found, _ in self.messages]

    def until(self, count: int, seconds: float) -> list[tuple[str, int, float]]:
        """Wait for so many, or until time is over; return what came."""
        end = time.monotonic() + seconds
        while len(self.messages) < count and time.monotonic() < end:
            time.sleep(0.05)
        return self.messages
