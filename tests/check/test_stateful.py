"""Any order of acts by producers, checks, dispatch, consumers, prune and operators, on a real database."""

from __future__ import annotations

import itertools
import math
import random
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule, run_state_machine_as_test
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from outbox import Park, Retry
from outbox.consumer import consumer as consumer_module
from outbox.errors import ActRefused, NotFound
from tests.check.stateful_calls import Death
from tests.check.stateful_checking import Checking
from tests.check.stateful_model import EXT, LONE, Half
from tests.check.stateful_script import COMMIT, ROLLBACK
from tests.check.stateful_world import DOOM, GROUP, WHO, State, World
from tests.check.stateful_writing import picks, rarely
from tests.kit import tries

LONG_AGO = "interval '30 days'"

reactions = st.lists(
    st.sampled_from(["done", "done", "done", "raise", "retry", "park", "undo", "doom"]), min_size=1, max_size=4
)


class Machine(Checking):
    """Adds delivery, and says what must be true after each step and in the end."""

    # --- delivery ----------------------------------------------------------------------------------------

    @precondition(lambda self: any(row.resolution and not row.sends for row in self.state.halves.values()))
    @rule(limit=st.sampled_from([1, 2, None]))
    def dispatch(self, limit: int | None) -> None:
        """Make a pass of the dispatch, perhaps with a small batch."""
        self.world.dispatch(limit)

    @precondition(lambda self: any(half.delayed for half in self.model.halves.values()))
    @rule(due=st.booleans())
    def release(self, due: bool) -> None:
        """Release what is due, perhaps after everything has become due."""
        if due:
            self.world.run("UPDATE outbox.half_message SET deliver_at = now() WHERE deliver_at IS NOT NULL")
            self.world.run("UPDATE outbox.scheduled_message SET deliver_at = now()")
        self.world.release()

    @precondition(lambda self: any(row.resolution for row in self.state.halves.values()))
    @rule(reactions=reactions, restart=rarely, queues=st.sets(st.sampled_from([0, 1])))
    def consume(self, reactions: list[str], restart: bool, queues: Collection[int] = ()) -> None:
        """Dispatch and consume what there is; handlers fail in their turn, or lose their connection."""
        while self.world.dispatch().more:
            pass
        if restart:
            self.world.restart_consumers()
        self._handle(reactions, lambda: self.world.consume(sorted(queues)))

    @precondition(lambda self: "failed" in self.state.inbox.values())
    @rule(reactions=reactions)
    def retry(self, reactions: list[str]) -> None:
        """Retry all that has failed."""
        self.world.run_on_sink(
            "UPDATE outbox.consumer_message SET next_attempt_at = now() - interval '2 s'"
            " WHERE next_attempt_at IS NOT NULL"
        )
        self._handle(reactions, self.world.retry)

    def _handle(self, reactions: Sequence[str], act: Callable[[], None]) -> None:
        turns = itertools.cycle(reactions)
        # A handler that dies each time would never come to an end.
        deaths = iter(["doom"])

        def handle(number: int, session: Session) -> Any:
            match next(turns):
                case "raise":
                    raise ValueError("the handler's own error")
                case "retry":
                    return Retry()
                case "park":
                    return Park("for a human")
                case "undo":
                    session.rollback()
                case "doom" if next(deaths, None):
                    session.execute(DOOM)
            return None

        self.world.handle = handle
        with suppress(OperationalError):
            act()

    @precondition(lambda self: self.halves)
    @rule(pick=picks, waiting=st.booleans())
    def recall(self, pick: int, waiting: bool) -> None:
        """Take back a message that isn't out yet."""
        found = [half for half in self.halves if waiting and half.delayed and half.verdict == COMMIT]
        half = self.pick(pick, found or self.halves)
        row = self.state.halves.get(half.number)
        if row is not None and half.delayed and half.verdict == COMMIT and not row.sends and not half.recalled:
            self.outbox.operator.recall(half.id, **WHO)
            self.model.audits += 1
            half.recalled = True
        else:
            with pytest.raises(NotFound if row is None else ActRefused):
                self.outbox.operator.recall(half.id, **WHO)

    @precondition(lambda self: any(row.sends for row in self.state.halves.values()))
    @rule(picks=st.lists(picks, min_size=1, max_size=3))
    def resend(self, picks: list[int]) -> None:
        """Append messages once more; what isn't a message doesn't become one."""
        halves = list({id(half): half for half in (self.pick(pick, self.halves) for pick in picks)}.values())
        rows = self.state.halves
        sent = [half for half in halves if half.number in rows and rows[half.number].sends]
        for half in halves:
            if half in sent:
                self.outbox.operator.resend(half.id, **WHO)
            else:
                with pytest.raises((ActRefused, NotFound)):
                    self.outbox.operator.resend(half.id, **WHO)
        self.model.audits += len(sent)

    @precondition(lambda self: self.state.inbox)
    @rule(pick=picks, parked=st.booleans())
    def resume(self, pick: int, parked: bool) -> None:
        """Give a parked message back to its group."""
        found = [half for half in self.halves if parked and self.state.inbox.get(half.id) == "parked"]
        self._resume(self.pick(pick, found or self.halves))

    def _resume(self, half: Half) -> None:
        if self.state.inbox.get(half.id) in {"parked", "failed"}:
            self.world.sink.operator.retry(half.id, group=GROUP, **WHO)
            self.model.audits += 1
        else:
            with pytest.raises((ActRefused, NotFound)):
                self.world.sink.operator.retry(half.id, group=GROUP, **WHO)

    @precondition(lambda self: "consumed" in self.state.inbox.values() or self.model.ended())
    @rule()
    def prune(self) -> None:
        """Prune when everything is old: only what is settled on both sides may go."""
        state, unread = self.state, self.world.unread()
        settled = [half for half in self.model.halves.values() if self._settled(half, state, unread)]
        self.world.run(f"UPDATE outbox.half_message SET born_at = born_at - {LONG_AGO}")
        self.world.run(f"UPDATE outbox.op_message SET decided_at = decided_at - {LONG_AGO}")
        self.world.run(
            f"UPDATE outbox.message SET visible_at = visible_at - {LONG_AGO} WHERE half_id = ANY (:ids)",
            ids=[half.id for half in settled],
        )
        self.world.run_on_sink(f"UPDATE outbox.consumer_message SET changed_at = changed_at - {LONG_AGO}")
        self.world.prune()
        left = self.world.state().halves
        for half in self.model.halves.values():
            half.pruned = half.number not in left
            assert not half.pruned or half in settled or half.number not in state.halves, f"needed: {half}"
            assert half.pruned or half not in settled or half.verdict == COMMIT, f"left: {half}"

    def _settled(self, half: Half, state: State, unread: set[Any]) -> bool:
        row = state.halves.get(half.number)
        if row is None or half.undecided:
            return False
        if half.verdict == ROLLBACK or half.recalled:
            return True
        return bool(row.sends) and state.inbox.get(half.id) == "consumed" and half.id not in unread

    # --- what must be true -------------------------------------------------------------------------------

    @invariant()
    def everything_is_as_expected(self) -> None:
        """Every row of every table is one that the acts so far account for, and none is missing."""
        state = self.state = self.world.state()
        kept = {number: half for number, half in self.model.halves.items() if not half.pruned}
        assert state.halves.keys() == kept.keys()
        for number, half in kept.items():
            row = state.halves[number]
            assert row.id == half.id
            assert (row.resolution, row.decided_by) == (half.verdict, half.by), half
            assert row.waits == half.undecided, half
            if row.waits:
                seen = row.fenced, row.check_times, row.parked, row.due
                assert seen == (half.fenced, half.checks, half.parked, half.due), half
            assert (row.asked, row.fences, row.unanswered) == (half.asked, half.fences, half.unanswered), half
            assert row.recalled == half.recalled, half
            assert not row.sends or (half.verdict == COMMIT and not half.recalled and not row.scheduled), half
        assert state.strays == []
        assert state.changes == self.model.changes
        assert state.notes == +self.model.noted
        assert state.audits == self.model.audits
        self._effects(state)

    def _effects(self, state: State) -> None:
        """A message has its effect once if its inbox row says so, and else none; without a message there is neither."""
        for number, half in self.model.halves.items():
            status, effects = state.inbox.get(half.id), state.effects[number]
            forgotten = half.pruned and half.verdict == COMMIT and not half.recalled
            assert effects == (forgotten or status == "consumed"), half
            assert status is None or half.pruned or state.halves[number].sends, half
        assert state.effects.keys() <= self.model.halves.keys()

    def teardown(self) -> None:
        """Let everything come to its end, and see that nothing is lost, doubled, or left over."""
        failed = sys.exc_info()[0] is not None
        try:
            if not failed:
                failed = True
                self._settle()
                failed = False
        finally:
            if failed:
                self._clean_up()

    def _clean_up(self) -> None:
        for call, _ in self.calls:
            while call.where != "ended":
                call.tell(Death())
        for transaction in self.open:
            with suppress(Exception):
                transaction.session.close()
        self.world.recover()

    def _settle(self) -> None:
        for transaction in self.open[:]:
            self.open.remove(transaction)
            self._end(transaction, "commit")
        for call, half in self.calls:
            while call.where != "ended":
                self._go_on(call, half, "go")
        self.calls.clear()
        for half in self.model.undecided():
            if half.topic == LONE and not half.fenced:
                self._decide(half, COMMIT, "producer", lambda half=half: self.outbox.commit(half.id))  # type: ignore[misc]
            elif half.parked or half.spent:
                self.outbox.operator.reset(half.id, **WHO)
                self.model.audits += 1
                half.reset()
        self._age(self.model.undecided())
        self._check(["commit", "rollback"], 3)
        assert self.model.undecided() == []
        self._deliver()
        self.everything_is_as_expected()
        for half in self.model.halves.values():
            delivered = half.verdict == COMMIT and not half.recalled
            assert self.state.effects[half.number] == delivered, half
        assert self.world.open_transactions() == []

    def _deliver(self) -> None:
        self.release(due=True)
        while self.world.dispatch().more:
            pass
        self.consume(["done"], restart=True)
        self.state = self.world.state()
        for half in self.model.halves.values():
            if self.state.inbox.get(half.id) == "parked":
                self._resume(half)
        self.retry(["done"])
        self.retry(["done"])


@pytest.fixture(scope="module", params=["one database", "two databases"])
def world(request: pytest.FixtureRequest, server: Any, template: str) -> Iterator[World]:
    """A world in databases that all examples share: making them takes longer than an example."""
    names = [f"stateful_{number}" for number in range(1 if request.param == "one database" else 2)]
    for name in names:
        server.create_database(name, template=template)
    world = World(server.url(names[0]), server.url(names[-1]))
    with pytest.MonkeyPatch.context() as patch:
        # Whether a pass looks at all queues depends on what it was told, and not on the time.
        patch.setattr(consumer_module, "ALL_QUEUES_EVERY", math.inf)
        yield world
    world.close()
    for name in names:
        server.drop_database(name)


def test_an_example_goes_the_same_way_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an example comes to doesn't depend on those before it: else a failing one can't be found again."""
    # Consumers look at their queues in any order, which Hypothesis seeds.
    monkeypatch.setattr(random, "shuffle", lambda queues: None)
    outcomes = []
    for _ in range(2):
        world.empty()
        with Session(world.engine) as session, session.begin():
            for number in range(3):
                world.outbox.send(session, EXT, {"number": number})
        while world.dispatch().more:
            pass
        reactions = iter([Park("for a human")])
        world.handle = lambda number, session, reactions=reactions: next(reactions, None)  # type: ignore[misc]
        world.consume()
        state = world.state()
        outcomes.append({number: state.inbox[row.id] for number, row in state.halves.items()})
    assert outcomes[0] == outcomes[1]
    assert sorted(outcomes[0].values()) == ["consumed", "consumed", "parked"]


@pytest.mark.timeout(900)
def test_any_order(world: World) -> None:
    """Whatever happens in whatever order: one verdict a half, nothing lost, nothing doubled, nobody guessed."""
    run_state_machine_as_test(
        type("Machine", (Machine,), {"world": world}),
        settings=settings(
            max_examples=tries(5), stateful_step_count=50, print_blob=True, suppress_health_check=list(HealthCheck)
        ),
    )
