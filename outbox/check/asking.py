"""Ask checkers, several at a time, and give up those that take too long."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Protocol

from outbox.check.interview import Interview, unanswered
from outbox.model import Answer, Counts

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine

Act = Callable[["Connection", "Connection"], Counts]


class Room(Protocol):
    """Where an interview takes place: a connection of its own (the worker's lanes are rooms)."""

    def run(self, act: Act) -> Counts:
        """Run an act on the room's connection, given twice; may refuse silently when everything is to end."""

    def end(self) -> None:
        """Close the connection, or cut it off under an act that runs on: what that did is rolled back."""


class EngineRoom:
    """A room on an engine, for sync checkers; its connection goes back to the pool after each act."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def run(self, act: Act) -> Counts:
        """Run an act on a connection of the pool."""
        with self._engine.connect() as connection:
            return act(connection, connection)

    def end(self) -> None:
        """Do nothing: an act that runs on keeps its connection until it ends."""


@dataclass(slots=True, eq=False)
class _Running:
    """An interview under way."""

    interview: Interview
    room: Room
    deadline: float
    ended: bool = False


class Asker:
    """Holds interviews in threads of their own, at most ``in_flight`` at a time. Used by one thread.

    A thread can't be ended from outside. A checker that doesn't answer in time is given up: its question is closed, so
    that a late answer can't be recorded, it loses its connection, and its thread is left behind. While ``in_flight``
    threads of a topic are left behind, the topic rests, and the others go on.
    """

    def __init__(self, open_room: Callable[[bool], Room], in_flight: int) -> None:
        self._open_room = open_room
        self._in_flight = in_flight
        self._idle: dict[bool, list[Room]] = {False: [], True: []}
        self._running: dict[Interview, _Running] = {}
        self._ended: SimpleQueue[tuple[Interview, BaseException | None]] = SimpleQueue()
        self._left_behind: Counter[str] = Counter()
        self._unasked: set[str] = set()
        self._guard = threading.Lock()

    @property
    def free(self) -> int:
        """How many interviews may begin now."""
        return self._in_flight - len(self._running)

    @property
    def busy(self) -> bool:
        """Is an interview under way, or ended and not looked at?"""
        return bool(self._running)

    def rests(self, topic: str) -> bool:
        """Tell whether too many of a topic's checkers hang."""
        with self._guard:
            return self._left_behind[topic] >= self._in_flight

    def newly_unasked(self, topics: set[str]) -> list[str]:
        """Remember the topics that nobody can be asked about; return those that the last pass didn't have."""
        new, self._unasked = sorted(topics - self._unasked), topics
        return new

    def make_room(self, *, is_async: bool) -> None:
        """See that there is a room for the next interview; raises what refuses one."""
        if not self._idle[is_async]:
            self._idle[is_async].append(self._open_room(is_async))

    def begin(self, interview: Interview) -> None:
        """Begin an interview in a thread of its own."""
        self.make_room(is_async=interview.checker.is_async)
        room = self._idle[interview.checker.is_async].pop()
        running = _Running(interview, room, time.monotonic() + interview.checker.timeout)
        self._running[interview] = running
        name = f"outbox-check-{interview.checker.topic}"
        thread = threading.Thread(target=self._hold, args=(running,), name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the process has no threads left
            self._end(running, error)

    def next_ended(self, *, wait: bool) -> tuple[Interview, Answer | None] | None:
        """Return an interview that has ended or was given up, with its answer if it could not record one itself.

        None: none is running, or, unless it may ``wait``, none has ended so far.
        """
        while self._running:
            soonest = min(self._running.values(), key=lambda running: running.deadline)
            left = soonest.deadline - time.monotonic()
            try:
                # Before anything is given up: what has ended may have waited for this look.
                interview, error = self._ended.get(wait and left > 0, max(left, 0))
            except Empty:
                if left <= 0 and self._give_up(soonest):
                    return soonest.interview, unanswered(None, soonest.interview.checker.timeout)
                if left <= 0 or wait:
                    continue
                return None
            running = self._running.pop(interview)
            self._idle[interview.checker.is_async].append(running.room)
            if error is None or interview.answer is not None:
                return interview, None
            seconds = interview.checker.timeout - (running.deadline - time.monotonic())
            return interview, unanswered(error, seconds)
        return None

    def rest(self) -> None:
        """Close the connections that nobody uses, but for one."""
        for rooms in self._idle.values():
            while len(rooms) > 1:
                rooms.pop().end()

    def end(self) -> None:
        """Close all connections, also under interviews that run on."""
        for rooms in self._idle.values():
            while rooms:
                rooms.pop().end()
        for running in list(self._running.values()):
            running.room.end()

    def _hold(self, running: _Running) -> None:
        error: BaseException | None = None
        try:
            running.room.run(running.interview.hold)
        except BaseException as raised:  # a checker may raise whatever it likes; it is recorded as its answer
            error = raised
        self._end(running, error)

    def _end(self, running: _Running, error: BaseException | None) -> None:
        with self._guard:
            running.ended = True
            if running.interview.given_up:
                self._left_behind[running.interview.checker.topic] -= 1
            else:
                self._ended.put((running.interview, error))

    def _give_up(self, running: _Running) -> bool:
        """Give an interview up, unless it has just ended."""
        with self._guard:
            if running.ended:
                return False
            running.interview.give_up()
            self._left_behind[running.interview.checker.topic] += 1
        del self._running[running.interview]
        running.room.end()
        return True
