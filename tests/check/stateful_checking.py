"""Rules of the stateful test: passes of the check with any answers, and what operators do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from sqlalchemy.exc import OperationalError

from outbox import Resolution
from outbox.errors import ActRefused, CheckRefused, HalfNotFound, NotFound
from tests.check.stateful_model import ASKABLE, Half
from tests.check.stateful_script import COMMIT, PLAIN, ROLLBACK, ROUGH, UNKNOWN, Script
from tests.check.stateful_world import WHO
from tests.check.stateful_writing import Writing, picks, rarely, verdicts

answers = st.lists(st.sampled_from(PLAIN + ROUGH), min_size=1, max_size=4)


class Checking(Writing):
    """Adds the check and the operators."""

    # --- the check ---------------------------------------------------------------------------------------

    @precondition(lambda self: self.model.undecided())
    @rule(pick=picks, everything=st.booleans())
    def age(self, pick: int, everything: bool) -> None:
        """Let time pass: what waits for a check is due."""
        undecided = self.model.undecided()
        self._age(undecided if everything else [self.pick(pick, undecided)])

    def _age(self, halves: list[Half]) -> None:
        self.world.age_checks([half.id for half in halves])
        for half in halves:
            half.due, half.leased = True, False

    @precondition(lambda self: self.model.due())
    @rule(answers=answers)
    def check(self, answers: list[str]) -> None:
        """Make a pass of the check; everything that is due gets its verdict, or is asked about."""
        in_flight = 1 if set(answers).intersection(ROUGH) else 3
        self._check(answers, in_flight)

    @precondition(lambda self: self.model.undecided())
    @rule(answers=answers)
    def age_and_check(self, answers: list[str]) -> None:
        """Do so when everything is due."""
        self._age(self.model.undecided())
        self.check(answers)

    @precondition(lambda self: self.model.undecided())
    @rule(times=st.integers(1, 4))
    def nobody_knows(self, times: int) -> None:
        """Ask in vain, until there are no questions left."""
        for _ in range(times):
            self._age(self.model.undecided())
            self._check(["unknown"], 3)

    def _check(self, answers: Sequence[str], in_flight: int) -> None:
        script = Script(self.world, self.model, answers, self._begin_pass)
        self.world.ask = script.ask
        self._begin_pass()
        self.world.check(in_flight)
        assert not script.wrong, script.wrong
        assert self.model.due() == []

    def _begin_pass(self) -> None:
        """Do to the model what a pass does without asking: try fences, and park what has no question left."""
        for half in self.model.due():
            if half.fenced:
                half.fences += 1
                half.due = False
                if not self._runs(half):
                    half.decide(ROLLBACK, "check")
            elif half.spent:
                half.parked = True

    @precondition(lambda self: any(not half.fenced for half in self.model.due()))
    @rule()
    def check_dies(self) -> None:
        """Begin a pass that is ended, with all its connections, in the middle of its first question."""
        due = [half for half in self.model.due() if not half.fenced]
        asked = {half.number: half.asked for half in due}
        script = Script(self.world, self.model, ["unknown"], self._begin_pass, dies=True)
        self.world.ask = script.ask
        self._begin_pass()
        if any(not half.parked for half in due):
            with pytest.raises(OperationalError):
                self.world.check(1)
        else:
            self.world.check(1)
        assert not script.wrong, script.wrong
        assert sum(half.asked - asked[half.number] for half in due) <= 1
        for half in due:
            row = self.world.state().halves[half.number]
            if half.parked and not row.parked:
                half.parked = False  # the pass didn't come so far

    # --- operators ---------------------------------------------------------------------------------------

    @precondition(lambda self: self.halves)
    @rule(pick=picks, resolution=verdicts, force=rarely)
    def resolve(self, pick: int, resolution: Resolution, force: bool) -> None:
        """Decide a half by hand; a fenced one, whose change was never made, isn't committed without force."""
        half = self.pick(pick, self.halves)

        def act() -> Any:
            if resolution is COMMIT:
                return self.outbox.operator.commit(half.id, force=force, **WHO)
            return self.outbox.operator.rollback(half.id, **WHO)

        if half in self.model.lost or not half.undecided or (half.fenced and resolution is COMMIT and not force):
            with pytest.raises((ActRefused, NotFound)):
                act()
        else:
            act()
            half.decide(resolution, "operator")
            self.model.audits += 1

    @precondition(lambda self: self.halves)
    @rule(pick=picks, reset=st.booleans())
    def ask_for_check(self, pick: int, reset: bool) -> None:
        """Set a counter back, or have a half checked by the next pass."""
        half = self.pick(pick, self.halves)
        if half.undecided and half.fenced and not reset:
            return  # a fence is tried at once: see `check_now`
        act = self.outbox.operator.reset if reset else self.outbox.operator.check
        if half in self.model.lost or half.error is not None:
            with pytest.raises((ActRefused, NotFound)):
                act(half.id, **WHO)
            return
        act(half.id, **WHO)
        self.model.audits += 1
        (half.reset if reset else half.once_more)()

    @precondition(lambda self: self.halves)
    @rule(pick=picks, answer=st.sampled_from(PLAIN + ROUGH))
    def check_now(self, pick: int, answer: str) -> None:
        """Check a half here and now, parked or not."""
        half = self.pick(pick, self.halves)
        script = Script(self.world, self.model, [answer], self._begin_pass, by_hand=True)
        self.world.ask = script.ask
        gone = half.pruned or half in self.model.lost
        error = HalfNotFound if gone else CheckRefused if half.error else None
        if error is None and not half.fenced and (half.topic not in ASKABLE or half.leased):
            error = CheckRefused
        if error is not None:
            with pytest.raises(error):
                self.world.check_now(half.id)
            return
        if half.fenced:
            half.fences += 1
            half.due = False
            if not self._runs(half):
                half.decide(ROLLBACK, "check")
        found = self.world.check_now(half.id)
        self.model.audits += 1
        assert not script.wrong, script.wrong
        assert found.resolution == (half.verdict or UNKNOWN)
