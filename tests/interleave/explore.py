"""All orders of the steps of some flows, each run from the same tables; a kill and a lost connection at each point.

The search goes depth first over choices (which flow takes its next step), and runs each order anew. Of orders that
differ only in steps which don't meet (`Footprint.meets`) it runs one: the one in which no step stands directly before a
step of an earlier flow that it doesn't meet. A kill counts as the earliest of all, and its footprint is the transaction
that it undoes.

A flow whose statement waits for a lock is found by ``pg_blocking_pids`` from a connection of its own, never by the time
that it takes; it goes on by itself when the others have let go.

Orders with few switches between flows that could go on come first, so that a limit cuts off only what is rare.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import psycopg
from sqlalchemy import Engine

from outbox.database.execute import sqlstate
from outbox.telemetry.events import BatchTooLarge
from outbox.telemetry.hooks import add_hook
from tests.interleave.stepping import SNAPSHOT, Command, Death, Flow, Footprint, State

#: How long (seconds) a flow may be silent before it is looked at; and before it is taken for hanging.
_LOOK, _HANGS = 0.002, 60.0
_BLOCKED = "SELECT pid FROM unnest(%s::int[]) pid WHERE pg_blocking_pids(pid) <> '{}'"
_TERMINATE = "SELECT pg_terminate_backend(pid) FROM unnest(%s::int[]) pid"
_THERE = "SELECT count(*) FROM pg_stat_activity WHERE pid = ANY (%s)"

#: What may be done to a flow that has stopped, beside letting it go on.
HURTS = (Command.KILL, Command.LOSE)


class Choice(NamedTuple):
    """Which flow is told what."""

    flow: int
    command: Command = Command.GO

    def __str__(self) -> str:
        return f"{'ABC'[self.flow]}{'' if self.command is Command.GO else ' ' + self.command.name}"


class Violation(AssertionError):
    """An order of steps after which something isn't true that must be."""


class Hanging(Exception):
    """A flow neither goes on nor waits for a lock."""


@dataclass(frozen=True, slots=True)
class Act:
    """A flow's code, and what it is called."""

    name: str
    run: Callable[[Engine], Any]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a flow has ended."""

    name: str
    result: Any
    error: BaseException | None
    hurt: Command | None

    @property
    def killed(self) -> bool:
        """Was its process killed?"""
        return isinstance(self.error, Death)


@dataclass(slots=True)
class Trail:
    """What a run has come by: the choices, those that were possible at each, and the steps."""

    choices: list[Choice] = field(default_factory=list)
    others: list[list[Choice]] = field(default_factory=list)
    stopped: list[list[int]] = field(default_factory=list)
    switches: list[int] = field(default_factory=list)
    steps: list[str] = field(default_factory=list)
    redundant: bool = False
    outcomes: list[Outcome] = field(default_factory=list)
    deadlock: bool = False

    def __str__(self) -> str:
        return "\n".join(f"  {number:2} {step}" for number, step in enumerate(self.steps, 1))


@dataclass(slots=True)
class Found:
    """What came of an exploration."""

    schedules: int = 0
    kills: int = 0
    pruned: int = 0
    seconds: float = 0.0
    #: Up to how many switches every order was tried; None: all orders were.
    switches: int | None = None
    violations: list[str] = field(default_factory=list)


class Explorer:
    """Explores orders of up to three flows in one database."""

    def __init__(self, url: str, flows: int = 2) -> None:
        self._events: SimpleQueue[Flow] = SimpleQueue()
        self._flows = [Flow(number, url, self._events) for number in range(flows)]
        plain = self._flows[0]._conninfo
        self._observer = psycopg.connect(plain, autocommit=True)
        #: Rules of the tables that a batch broke: done again with fewer rows, it would hide what went wrong.
        self._broken: list[str] = []
        self._unhook = add_hook(self._note)

    @property
    def engines(self) -> list[Engine]:
        """The engines on which flows run, one each."""
        return [flow.engine for flow in self._flows]

    def close(self) -> None:
        """Close all connections."""
        self._unhook()
        for flow in self._flows:
            flow.end(clean=False)
        self._observer.close()

    def explore(
        self,
        begin: Callable[[], Sequence[Act]],
        judge: Callable[[list[Outcome]], list[str]],
        *,
        kills: bool = False,
        schedules: int = 10**6,
        hurts: int = 10**6,
        violations: int = 1,
    ) -> Found:
        """Try all orders of the flows that ``begin`` returns after it has put the tables back.

        ``judge`` lets the system come to rest and returns what isn't true then. Ends after so many ``schedules``
        without and ``hurts`` with a kill or a lost connection, or so many ``violations``.
        """
        began, found, numbers = time.monotonic(), Found(), itertools.count()
        usual: list[tuple[int, int, list[Choice]]] = [(0, next(numbers), [])]
        hurt: list[tuple[int, int, list[Choice]]] = []
        while usual and found.schedules < schedules:
            switches, _, prefix = heapq.heappop(usual)
            found.switches = switches - 1
            trail = self._attempt(begin, judge, prefix, kills, found)
            for depth in range(len(prefix), len(trail.choices)):
                for other in trail.others[depth]:
                    branch = [*trail.choices[:depth], other]
                    if other.command is Command.GO:
                        more = _is_switch(trail, depth, other)
                        heapq.heappush(usual, (trail.switches[depth] + more, next(numbers), branch))
                    else:
                        heapq.heappush(hurt, (trail.switches[depth], next(numbers), branch))
                        if other.command is not Command.KILL:
                            # Its next try comes before what the other flows do, or after.
                            rivals = [Choice(each) for each in trail.stopped[depth] if each != other.flow]
                            for rival in rivals:
                                heapq.heappush(hurt, (trail.switches[depth] + 1, next(numbers), [*branch, rival]))
            if len(found.violations) >= violations:
                break
        if not usual:
            found.switches = None
        while hurt and found.kills < hurts and len(found.violations) < violations:
            _, _, prefix = heapq.heappop(hurt)
            trail = self._attempt(begin, judge, prefix, True, found)
        found.seconds = time.monotonic() - began
        return found

    def _attempt(
        self,
        begin: Callable[[], Sequence[Act]],
        judge: Callable[[list[Outcome]], list[str]],
        prefix: list[Choice],
        kills: bool,
        found: Found,
    ) -> Trail:
        for attempt in range(3):
            self._broken.clear()
            try:
                trail = self.run(begin(), prefix, kills=kills)
                break
            except Hanging:
                # A busy machine may let the server's own time-outs end what the order should have ended.
                if attempt == 2:
                    raise
        if any(choice.command is not Command.GO for choice in prefix):
            found.kills += 1
        elif trail.redundant:
            found.pruned += 1
            return trail
        else:
            found.schedules += 1
        wrong = judge(trail.outcomes) + self._broken
        if trail.deadlock:
            wrong.append("the flows wait for each other")
        if wrong:
            ends = [f"  {each.name}: {each.error!r}" if each.error else f"  {each.name}: {each.result!r}"
                    for each in trail.outcomes]  # fmt: skip
            found.violations.append("\n".join([*wrong, *ends, str(trail)]))
        return trail

    def _note(self, event: object) -> None:
        if isinstance(event, BatchTooLarge) and sqlstate(event.error).startswith("23"):
            self._broken.append(f"a batch ({event.batch}) broke a rule of the table: {event.reason}")

    # --- one run -----------------------------------------------------------------------------------------

    def run(self, acts: Sequence[Act], prefix: Sequence[Choice], *, kills: bool = False) -> Trail:
        """Run flows in an order that begins with these choices."""
        trail, flows = Trail(), self._flows[: len(acts)]
        for flow, act in zip(flows, acts, strict=True):
            flow.start(act.name, act.run)
        hurt: dict[int, Command] = {}
        last: tuple[int, Footprint] | None = None
        switches = 0
        try:
            while True:
                self._settle(flows, trail)
                stopped = [flow for flow in flows if flow.state is State.STOPPED]
                if not stopped:
                    if all(flow.state is State.ENDED for flow in flows):
                        break
                    # The server will end one of them. (One alone waits for the server itself, such as for a vacuum.)
                    waiting = [flow.waits(False) for flow in flows]
                    trail.deadlock = trail.deadlock or waiting.count(True) > 1
                    continue
                choice, others = self._choose(trail, prefix, stopped, last, kills=kills, hurt=bool(hurt))
                if choice is None:
                    trail.redundant = True
                    self._run_on(flows)
                    break
                trail.others.append(others)
                trail.stopped.append([flow.number for flow in stopped])
                trail.switches.append(switches)
                if last and choice.flow != last[0] and flows[last[0]].state is State.STOPPED:
                    switches += 1
                alone = bool(hurt) and len(trail.choices) >= len(prefix)
                last = self._take(flows[choice.flow], choice, trail, hurt, alone=alone)
        except BaseException:
            self._end_all(flows)
            raise
        finally:
            for flow in flows:
                trail.outcomes.append(Outcome(flow.name, flow.result, flow.error, hurt.get(flow.number)))
                flow.end(clean=flow.state is State.ENDED and not hurt)
        return trail

    def _choose(
        self,
        trail: Trail,
        prefix: Sequence[Choice],
        stopped: Sequence[Flow],
        last: tuple[int, Footprint] | None,
        *,
        kills: bool,
        hurt: bool,
    ) -> tuple[Choice | None, list[Choice]]:
        """Return what comes next (None: nothing that isn't tried in another order), and what else could."""
        depth = len(trail.choices)
        if depth < len(prefix):
            if prefix[depth].flow not in {flow.number for flow in stopped}:
                raise Hanging(f"flow {prefix[depth]} isn't where it was before:\n{trail}")
            return prefix[depth], []
        go = [Choice(flow.number) for flow in stopped if hurt or not _swaps(flow, last)]
        if not go:
            return None, []
        # Whoever went on last goes on, so that a branch is a switch.
        choice = next((each for each in go if last and each.flow == last[0]), go[0])
        if hurt:
            return choice, []
        others = [each for each in go if each != choice]
        return choice, others + (_hurts(stopped, last) if kills else [])

    def _terminate(self, pids: Sequence[int]) -> None:
        """End backends, and wait until what they had in hand is undone."""
        self._observer.execute(_TERMINATE, [list(pids)])
        deadline = time.monotonic() + _HANGS
        while self._observer.execute(_THERE, [list(pids)]).fetchone() != (0,):
            if time.monotonic() > deadline:
                raise Hanging(f"the server doesn't end {pids}")
            time.sleep(_LOOK / 4)

    def _take(
        self, flow: Flow, choice: Choice, trail: Trail, hurt: dict[int, Command], *, alone: bool
    ) -> tuple[int, Footprint] | None:
        step = flow.step
        assert step is not None
        trail.choices.append(choice)
        trail.steps.append(f"{choice} {flow.name}: {step}")
        waited = [each for each in self._flows if each.waits(False)]
        if choice.command is not Command.GO:
            hurt[flow.number] = choice.command
        if choice.command is Command.KILL:
            self._terminate(flow.pids)
        elif choice.command is Command.LOSE:
            self._terminate([step.pid])
        elif SNAPSHOT in step.footprint.reads:
            # As on a busy server: transactions begin and end all the time, so that those of flows are not the newest.
            self._observer.execute("SELECT pg_current_xact_id()")
        if alone:
            # Nothing is left to choose: what comes next isn't stopped any more.
            flow.run_on()
            trail.steps[-1] += " … and all that follows"
        flow.tell(choice.command)
        # Who was let go of has done a step as well: what comes next stands after both.
        return None if waited else (flow.number, step.footprint)

    def _settle(self, flows: Sequence[Flow], trail: Trail) -> None:
        """Wait until each flow has stopped, waits for a lock, or has ended."""
        deadline = time.monotonic() + _HANGS
        while running := [flow for flow in flows if flow.state is State.RUNNING]:
            try:
                self._events.get(timeout=_LOOK)
            except Empty:
                rows = self._observer.execute(_BLOCKED, [[flow.pid for flow in running]]).fetchall()
                # Only if all of them wait: one that is running may let go of the others at any moment.
                if {flow.pid for flow in running} <= {pid for (pid,) in rows}:
                    trail.steps += [f"{'ABC'[flow.number]} waits" for flow in running if flow.waits(True)]
                if time.monotonic() > deadline:
                    where = ", ".join(f"{flow.name}: {flow.step}" for flow in running)
                    raise Hanging(f"neither goes on nor waits for a lock: {where}\n{trail}") from None

    def _end_all(self, flows: Sequence[Flow]) -> None:
        """End flows of which nothing is known."""
        for flow in flows:
            if flow.state is not State.ENDED:
                flow.dead = True
                self._terminate(flow.pids)
                flow.tell(Command.KILL)

    def _run_on(self, flows: Sequence[Flow]) -> None:
        for flow in flows:
            flow.run_on()
        for flow in flows:
            if flow.state is State.STOPPED:
                flow.tell(Command.RUN_ON)
        deadline = time.monotonic() + _HANGS
        while any(flow.state is not State.ENDED for flow in flows):
            try:
                self._events.get(timeout=1)
            except Empty:
                if time.monotonic() > deadline:
                    raise Hanging("a flow that may run on doesn't end") from None


def _swaps(flow: Flow, last: tuple[int, Footprint] | None) -> bool:
    """Tell whether the flow's next step could as well come before the last one, and does in another order."""
    assert flow.step is not None
    return last is not None and flow.number < last[0] and not flow.step.footprint.meets(last[1])


def _hurts(stopped: Sequence[Flow], last: tuple[int, Footprint] | None) -> list[Choice]:
    """Return the ways to hurt a flow here, which nobody could as well do before the last step."""
    ways = []
    for flow in stopped:
        assert flow.step is not None
        if last is None or last[0] == flow.number or flow.step.undone.meets(last[1]):
            ways += [Choice(flow.number, command) for command in HURTS]
            if flow.step.commits:
                ways.append(Choice(flow.number, Command.LOSE_ANSWER))
    return ways


def _is_switch(trail: Trail, depth: int, other: Choice) -> bool:
    """Tell whether a choice takes over from a flow that could have gone on."""
    if not depth or trail.choices[depth - 1].flow == other.flow:
        return False
    return trail.choices[depth].flow == trail.choices[depth - 1].flow
