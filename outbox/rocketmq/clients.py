"""Know the clients that are connected to this process: what they are, and which of them can be asked.

A client is known by its id from its first request on. It can be told something while it has a telemetry stream open
here. All is by this process's own sight: another server on the same port has other clients.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from outbox.message.content import MAX_TOPIC
from outbox.rocketmq.options import NamedUser, must
from outbox.rocketmq.rules import check_group, check_topic, is_topic
from outbox.rocketmq.wire import WIRE
from outbox.text import storable

T = TypeVar("T")

#: For so long (seconds) a client without a stream is remembered after it was heard last, and so many of them at most.
_REMEMBERED, _MOST = 600.0, 50_000
#: So many of those that were heard the longest ago a new client has looked at.
_AT_ONCE = 3
#: A client that was heard within so many seconds is there, also without a stream: it sends a heartbeat each 10 s.
_THERE = 30.0
#: So many commands may wait for a client that doesn't take them.
_MOST_COMMANDS = 1_000
#: So many rows a server reports of its clients; they are written anew when one comes or goes.
MOST_ROWS = 1_000
#: So many topics of its settings are noted of a client.
_MOST_TOPICS = 1_000
#: What a client tells of itself in the metadata of a request, behind ``x-mq-``.
_ABOUT_ITSELF = ("language", "client-version")
_KINDS = {number: name for name, number in WIRE.enums["ClientType"].items()}
_PRODUCER = WIRE.enums["ClientType"]["PRODUCER"]
PUSH_CONSUMER: int = WIRE.enums["ClientType"]["PUSH_CONSUMER"]
SIMPLE_CONSUMER: int = WIRE.enums["ClientType"]["SIMPLE_CONSUMER"]


class CommandStream:
    """The server's half of a client's telemetry stream: commands go in by any thread, and come out in the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._commands: deque[Any] = deque(maxlen=_MOST_COMMANDS)
        self._news, self._taken = asyncio.Event(), asyncio.Event()
        self._ended = False

    def put(self, command: Any) -> None:
        """Have a command sent; the oldest one is left out where a client doesn't take any."""
        self._loop.call_soon_threadsafe(self._put, command)

    def _put(self, command: Any) -> None:
        self._commands.append(command)
        self._news.set()

    async def sent(self) -> None:
        """Return once the stream has taken all commands: a client that takes none is read no further."""
        while self._commands and not self._ended:
            self._taken.clear()
            await self._taken.wait()

    def end(self) -> None:
        """End the stream once its commands are sent; to be called in the loop."""
        self._ended = True
        self._news.set()
        self._taken.set()

    async def next(self) -> Any:
        """Return the next command; None at the end."""
        while not self._commands:
            if self._ended:
                return None
            self._news.clear()
            await self._news.wait()
        self._taken.set()
        return self._commands.popleft()


@dataclass(eq=False, slots=True)
class Client:
    """A client, as its requests have told of it; times are of `time.monotonic`.

    ``user`` is the one that signs its requests. ``namespace`` is that of topics and groups which it names without one.
    ``topics`` are those that its settings name, ``transactions`` those to which it has sent halves. It let a question
    time out at ``unanswered_at`` last.
    """

    id: str
    language: str
    version: str
    host: str
    since: float
    user: NamedUser
    kind: int = 0
    group: str | None = None
    topics: frozenset[str] = frozenset()
    transactions: set[str] = field(default_factory=set)
    heard_at: float = 0.0
    unanswered_at: float | None = None
    has_left: bool = False
    namespace: str = ""
    streams: list[CommandStream] = field(default_factory=list)

    def name_of(self, resource: Any) -> str:
        """Return the name of a topic or group here: ``namespace%name``, as RocketMQ writes it where they are joined."""
        namespace = resource.resource_namespace or self.namespace
        return f"{namespace}%{resource.name}" if namespace and resource.name.strip() else resource.name

    def topic_of(self, resource: Any) -> str:
        """Return the name of a topic; raise Refused if it is none that a client may use."""
        return check_topic(self.name_of(resource))

    def group_of(self, resource: Any) -> str:
        """Return the name of a group; raise Refused if it is none, or none that its user may consume for."""
        group = check_group(self.name_of(resource))
        must(self.user.may_join(group), f"consume for group {group}")
        return group

    def pair_of(self, group: Any, topic: Any) -> tuple[str, str]:
        """Return the names of a group and its topic; raise Refused if its user may not receive for it."""
        pair = check_group(self.name_of(group)), self.topic_of(topic)
        must(self.user.may_receive(pair[1], pair[0]), f"receive from topic {pair[1]} for group {pair[0]}")
        return pair

    def resource(self, name: str) -> dict[str, str]:
        """Return a name as this client knows it: in its namespace, or as it is."""
        if self.namespace and name.startswith(f"{self.namespace}%"):
            return {"resource_namespace": self.namespace, "name": name[len(self.namespace) + 1 :]}
        return {"name": name}

    @property
    def taker(self) -> str:
        """Its name at what it takes: of each user by itself, since an id can be any client's."""
        return f"{self.user.name}/{self.id}" if self.user.name else self.id

    @property
    def is_reachable(self) -> bool:
        """Is there a stream of a producer that hasn't said goodbye? One that is stopped may keep its stream open."""
        return bool(self.streams) and not self.has_left

    @property
    def is_there(self) -> bool:
        """Is it connected, or was it heard lately?"""
        return not self.has_left and (bool(self.streams) or time.monotonic() - self.heard_at < _THERE)

    @property
    def is_push(self) -> bool:
        """Is it a push consumer, as far as it has said?"""
        return self.kind == PUSH_CONSUMER

    def handlers(self) -> list[dict[str, Any]]:
        """Return what an operator sees of it, for each of its topics, as workers tell of their handlers."""
        options = {
            "type": _KINDS.get(self.kind, str(self.kind)) if self.kind else None,
            "language": self.language,
            "version": self.version,
            "host": self.host,
            "connected": self.is_reachable,
        }
        named = {"kind": "client", "group": self.group, "name": self.id, "options": options}
        return [{**named, "topic": topic} for topic in sorted(self.topics | self.transactions) or [""]]


class Clients:
    """The clients of a process, by their users and ids. Safe to be used by several threads."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._guard = threading.Lock()
        #: By the user too: what one user does under an id isn't what another one's client has said.
        self._clients: OrderedDict[tuple[NamedUser, str], Client] = OrderedDict()
        self._turn = itertools.count()
        #: Has a client come, gone, or told of itself? Of the loop.
        self.news: asyncio.Event = asyncio.Event()
        #: To be told of each stream by which its client can't be asked any more.
        self.closed: Callable[[CommandStream], None] = lambda _: None

    def heard(self, id_: str, user: NamedUser, metadata: Mapping[str, str], host: str) -> Client:
        """Return the client that a request is of, and note that it was heard: it is there, also after a goodbye."""
        now = time.monotonic()
        with self._guard:
            if (client := self._clients.get((user, id_))) is None:
                self._forget(now)
                language, version = (storable(metadata.get(f"x-mq-{name}", ""))[:80] for name in _ABOUT_ITSELF)
                client = self._clients[user, id_] = Client(id_, language, version, host, now, user)
            client.heard_at, client.has_left = now, False
            client.namespace = storable(metadata.get("x-mq-namespace", client.namespace))[:MAX_TOPIC]
            self._clients.move_to_end((user, id_))
            return client

    def _forget(self, now: float) -> None:
        """Forget a client or two that are gone, or, of too many, the one that was heard the longest ago.

        The lock is held. They stand in the order in which they were heard; those that are connected go to the end.
        """
        for _ in range(_AT_ONCE):
            key, each = next(iter(self._clients.items()), (None, None))
            if key is None or each is None:
                return
            if each.streams:
                self._clients.move_to_end(key)
            elif len(self._clients) >= _MOST or now - each.heard_at > _REMEMBERED:
                del self._clients[key]
            else:
                return

    def open(self, client: Client) -> CommandStream:
        """Return a stream of commands to a client."""
        stream = CommandStream(self._loop)
        with self._guard:
            client.streams.append(stream)
        return stream

    def close(self, client: Client, stream: CommandStream) -> None:
        """Note that a stream has ended."""
        with self._guard:
            client.streams.remove(stream)
        self.closed(stream)
        self.news.set()

    def spoke(self, client: Client, stream: CommandStream) -> None:
        """Note that a client has spoken by a stream: it is asked by that one, also if another was opened later."""
        with self._guard:
            client.streams.sort(key=lambda each: each is stream)

    def unanswered(self, client: Client, stream: CommandStream) -> None:
        """Note that a client let a question time out: others are asked before it, and it by its other streams."""
        with self._guard:
            client.unanswered_at = time.monotonic()
            client.streams.sort(key=lambda each: each is not stream)

    def settle(self, client: Client, settings: Any) -> None:
        """Note what a client's settings say of it: the topics, and the group, for which its user has the right.

        Raises:
            Refused: the group is none, or none of its user's; nothing of its subscription is noted.
        """
        if settings.HasField("client_type"):
            client.kind = settings.client_type
        if settings.HasField("publishing"):
            client.kind = client.kind or _PRODUCER
            client.topics = _topics(map(client.name_of, settings.publishing.topics), client.user.may_send)
        elif settings.HasField("subscription"):
            client.topics, client.group = frozenset(), None
            if client.name_of(settings.subscription.group):
                client.group = client.group_of(settings.subscription.group)
            named = (client.name_of(entry.topic) for entry in settings.subscription.subscriptions)
            client.topics = _topics(named, lambda topic: client.user.may_receive(topic, client.group or ""))
        if language := settings.user_agent.language:
            names = {number: name for name, number in WIRE.enums["Language"].items()}
            client.language = names.get(language, client.language)
        self.news.set()

    def leave(self, client: Client) -> None:
        """Note that a client has said goodbye: it isn't asked any more, for none of its topics."""
        with self._guard:
            client.has_left = True
            client.transactions.clear()
            streams = list(client.streams)
        for stream in streams:
            self.closed(stream)
        self.news.set()

    def end_streams(self) -> None:
        """End all streams; to be called in the loop."""
        with self._guard:
            for stream in [each for client in self._clients.values() for each in client.streams]:
                stream.end()

    def topics_with_producers(self) -> set[str]:
        """Return the topics of which a producer is connected that can be asked."""
        with self._guard:
            producers = [each for each in self._clients.values() if each.is_reachable and each.kind == _PRODUCER]
            named = {(each.user.may_send, topic) for each in producers for topic in each.topics | each.transactions}
        return {topic for may_send, topic in named if may_send(topic)}

    def producers(self, topic: str, sender: str | None) -> list[Client]:
        """Return those to ask about a half of a topic, the best first.

        The sender, then those that have sent halves to the topic (they have a checker), then those whose settings name
        it, in turn; those that let the last question time out come behind all others.
        """
        with self._guard:
            able = [each for each in self._clients.values() if each.is_reachable and each.kind == _PRODUCER]
            known = [each for each in able if each.id == sender or topic in each.topics | each.transactions]
        known = [each for each in known if each.user.may_send(topic)]
        turn = next(self._turn)
        known = known[turn % len(known) :] + known[: turn % len(known)] if known else known

        def rank(each: Client) -> tuple[bool, bool, bool]:
            return each.unanswered_at is not None, each.id != sender, topic not in each.transactions

        return sorted(known, key=rank)

    def handlers(self) -> list[dict[str, Any]]:
        """Return what an operator sees of those that are there, at most `MOST_ROWS` of it.

        Of each user as much as of the others, and of each of its clients: none hides another by its many topics.
        """
        with self._guard:
            found = list(self._clients.values())
        of_users: dict[NamedUser, list[list[dict[str, Any]]]] = {}
        for each in sorted(found, key=lambda each: each.since):
            if each.is_there:
                of_users.setdefault(each.user, []).append(each.handlers())
        return list(itertools.islice(_in_turn(map(_in_turn, of_users.values())), MOST_ROWS))


def _in_turn(several: Iterable[Iterable[T]]) -> Iterator[T]:
    """Yield the first ones of several, then the second ones, and so on."""
    left = deque(map(iter, several))
    while left:
        for one in left[0]:
            yield one
            left.rotate(-1)
            break
        else:
            left.popleft()


def _topics(names: Iterable[str], allowed: Callable[[str], bool]) -> frozenset[str]:
    """Return those of the names that a topic can have, and so many of them at most that a client can't fill memory."""
    fit = (name for name in names if is_topic(name) and allowed(name))
    return frozenset(itertools.islice(fit, _MOST_TOPICS))
