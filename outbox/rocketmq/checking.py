"""Ask remote producers about their halves: by a client's telemetry stream, and its EndTransaction is the answer.

The check itself is that of workers (`outbox.check.check_pass`), with a checker for each topic of which a producer is
connected to this process; it leases halves of this asker alone, so that a checker in Python of the same topic and a
remote producer never race, and several servers share the work. While no producer of a topic is connected, none of its
halves is leased, and no check is used up.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from uuid import UUID

from outbox.check.asker import Asker, Checker, QuestionDropped
from outbox.check.check_pass import check_once
from outbox.database.engines import EngineRunner
from outbox.database.execute import Backoff, execute
from outbox.database.sql import nudge
from outbox.message.model import Counts, Orphan, Resolution
from outbox.rocketmq.clients import Clients, CommandStream
from outbox.rocketmq.mapping import CLIENT_HEADER, wire_message
from outbox.rocketmq.sending import ASKER, OPS
from outbox.rocketmq.tables import Tables
from outbox.rocketmq.wire import new
from outbox.telemetry.events import HalfChecked
from outbox.telemetry.hooks import TelemetryEvent, add_hook
from outbox.text import storable, summary_of

if TYPE_CHECKING:
    from sqlalchemy import Connection

#: The part of a checker's time that a client has for its answer: the rest is for its record.
_FOR_CLIENT = 0.9
#: How long (seconds) an EndTransaction waits for the check to record it, before it decides by itself.
_RECORD_WITHIN = 3.0
_STOP_WITHIN = 10.0


class NoVerdict(Exception):
    """No producer answered a question in time."""


@dataclass(eq=False, slots=True)
class ClientQuestion:
    """A question to a client about a half of a topic, by a stream: the verdict, and what waits for it to be recorded.

    ``resolution`` is None if it has ended without an answer that could come: the stream has, or the server stops.
    """

    topic: str
    stream: CommandStream
    answered: threading.Event = field(default_factory=threading.Event)
    resolution: Resolution | None = None
    recorded: asyncio.Event = field(default_factory=asyncio.Event)


class Questions:
    """The questions that wait for an answer, by their halves; each for ``timeout`` seconds.

    ``decided`` finds the verdict on a half that another server was given.
    """

    def __init__(
        self,
        clients: Clients,
        loop: asyncio.AbstractEventLoop,
        timeout: float,
        decided: Callable[[UUID], Resolution | None],
    ) -> None:
        self._clients = clients
        self._loop = loop
        self._timeout = timeout
        self._decided = decided
        self._open: dict[UUID, ClientQuestion] = {}
        self._ended = False
        clients.closed = self._close

    def ask(self, orphan: Orphan) -> Resolution:
        """Ask a producer about a half, in the thread of its check; return the verdict.

        Raises:
            NoVerdict: it doesn't answer in time.
            QuestionDropped: none is connected, or not for long enough to answer.
        """
        candidates = self._clients.producers(orphan.topic, orphan.headers.get(CLIENT_HEADER))
        streams = [(client, client.streams[-1:]) for client in candidates]
        client, stream = next(((client, stream[0]) for client, stream in streams if stream), (None, None))
        if client is None or stream is None:
            raise QuestionDropped(f"no producer of topic {orphan.topic!r} is connected any more")
        question = self._open[orphan.id] = ClientQuestion(orphan.topic, stream)
        message = wire_message(orphan, client.resource(orphan.topic))
        asking = new("RecoverOrphanedTransactionCommand", message=message, transaction_id=str(orphan.id))
        stream.put(new("TelemetryCommand", recover_orphaned_transaction_command=asking))
        # One that has closed before the question was known here tells it of nothing.
        if stream not in client.streams or self._ended:
            question.answered.set()
        if question.answered.wait(self._timeout):
            if question.resolution is None:
                self._drop(orphan.id, question)
                raise QuestionDropped(f"client {client.id} had no time to answer: it is gone, or this server stops")
            client.unanswered_at = None
            return question.resolution
        self._drop(orphan.id, question)
        if (decided := self._decided(orphan.id)) is not None:
            return decided
        self._clients.unanswered(client, stream)
        raise NoVerdict(f"client {client.id} gave no answer within {self._timeout:g} s")

    def _drop(self, half_id: UUID, question: ClientQuestion) -> None:
        if self._open.get(half_id) is question:
            del self._open[half_id]

    def _close(self, stream: CommandStream) -> None:
        """End the questions that were put by a stream."""
        for question in list(self._open.values()):
            if question.stream is stream:
                question.answered.set()

    def end(self) -> None:
        """End all questions, and put none any more: the server stops."""
        self._ended = True
        for question in list(self._open.values()):
            question.answered.set()

    def hand_over(self, half_id: UUID, topic: str, resolution: Resolution) -> Awaitable[object] | None:
        """Give a client's verdict to the check that waits for it; return what to await until it is recorded.

        None: no check waits for a half of this topic, of which the client may decide. To be called in the loop.
        """
        question = self._open.get(half_id)
        if question is None or question.topic != topic or question.answered.is_set():
            return None
        question.resolution = resolution
        question.answered.set()
        return asyncio.wait({asyncio.ensure_future(question.recorded.wait())}, timeout=_RECORD_WITHIN)

    def tell(self, event: TelemetryEvent) -> None:
        """Note that the answer to a question was recorded: a hook."""
        if isinstance(event, HalfChecked) and (question := self._open.pop(event.half_id, None)) is not None:
            self._loop.call_soon_threadsafe(question.recorded.set)


class LiveCheckers(dict[str, Checker]):
    """The checkers of the topics of which a producer is connected at the moment."""

    def __init__(self, tables: Tables, clients: Clients, questions: Questions) -> None:
        super().__init__()
        self._tables = tables
        self._clients = clients
        self._questions = questions
        self._made: dict[str, Checker] = {}

    def renew(self) -> None:
        """Have those that are connected now."""
        topics = self._clients.topics_with_producers()
        for topic in topics - self._made.keys():
            outbox, settings = self._tables.outbox, self._tables.settings
            checker = Checker.declare(
                settings, topic, self._questions.ask, None, outbox.codecs, beside=outbox.functions
            )
            self._made[topic] = checker
        for topic in self._made.keys() - topics:
            del self._made[topic]
        self.clear()
        self.update((topic, self._made[topic]) for topic in topics)

    def get(self, topic: str, default: Checker | None = None) -> Checker | None:  # type: ignore[override]
        """Return the checker of a topic of which a producer is connected still."""
        return super().get(topic, default) if topic in self._clients.topics_with_producers() else default


class Checking:
    """The check of remote producers' halves, in a thread of its own."""

    def __init__(self, tables: Tables, clients: Clients, loop: asyncio.AbstractEventLoop) -> None:
        self._tables = tables
        timeout = tables.settings.check_timeout * _FOR_CLIENT
        self.questions: Questions = Questions(clients, loop, timeout, self._decided)
        self._checkers = LiveCheckers(tables, clients, self.questions)
        self._asker = Asker(lambda _: EngineRunner(tables.engine), tables.settings.checks_in_flight, ASKER)
        #: How its last pass fared, as workers tell of their duties.
        self.health: Mapping[str, Any] = {"failures": 0, "last_error": None}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="outbox-rocketmq-check", daemon=True)

    def start(self) -> None:
        """Begin to check."""
        self._forget = add_hook(self.questions.tell)
        self._thread.start()

    def stop(self, within: float) -> None:
        """Begin no new check; end those that wait for an answer, at no check's cost; return in so many seconds."""
        self._stopping.set()
        self.questions.end()
        self._thread.join(min(_STOP_WITHIN, within))
        self._asker.end()
        self._forget()

    def _run(self) -> None:
        settings, failures = self._tables.settings, 0
        backoff = Backoff(min(1.0, settings.reconnect_cap), settings.reconnect_cap)
        pause = 0.0
        while not self._stopping.wait(pause):
            try:
                more = self.once().more
            except Exception as error:
                failures, pause = failures + 1, backoff.next()
                self.health = {"failures": failures, "last_error": storable(summary_of(error)).partition("\n")[0]}
                self._tables.tell_failure("rocketmq check", error, failures)
            else:
                backoff.reset()
                failures, pause = 0, 0.0 if more else settings.check_interval
                self.health = {"failures": 0, "last_error": None}

    def _decided(self, half_id: UUID) -> Resolution | None:
        (rows,) = self._tables.do(lambda connection: execute(connection, OPS(self._tables.schema, [half_id])))
        return Resolution(rows[0][1]) if rows else None

    def once(self) -> Counts:
        """Make one pass."""
        self._checkers.renew()
        with self._tables.outbox.active():
            counts = EngineRunner(self._tables.engine).run(self._pass)
        if counts.done:
            self._tables.do(lambda connection: execute(connection, nudge(self._tables.schema)))
        return counts

    def _pass(self, connection: Connection, _: Connection) -> Counts:
        stopping = self._stopping.is_set
        return check_once(connection, self._tables.settings, self._checkers, self._asker, stopping=stopping)
