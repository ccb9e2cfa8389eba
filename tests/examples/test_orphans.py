"""Tellers that die or linger at each step of an order with a half message: what the check makes of it, to the cent."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path

import pytest

from examples.bank_transfer.bank_a_tcc import CONFIRM_WITHIN
from examples.bank_transfer.banks import Banks
from examples.bank_transfer.options import Mode
from tests.examples.scene import GOOD, LISTED, Scene, deliver

FULL, DEBITED = Decimal("1000.00"), Decimal("970.00")
LATE = [{"line": 2, "late": True}]
OBJECTION = [{"line": 2, "refused": "receiver AB-71000013 is on the watch list"}]
ROLLED_BACK, COMMITTED = ("rollback", "check"), ("commit", "producer")

NewScene = Callable[..., Scene]


@pytest.fixture
def new_scene(banks: Banks, tmp_path: Path) -> NewScene:
    """A function that opens the accounts for one order, which is to be executed in one of the ways."""

    def make(mode: Mode, order: str = GOOD) -> Scene:
        return Scene.of(banks, mode, tmp_path, order)

    return make


def settle(scene: Scene, *, executed: int = 1) -> None:
    """Deliver, and audit."""
    deliver(scene.banks)
    assert scene.audit(executed=executed).faults == ()


# --- half message, then debit: the fence ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "point",
    ["after_commit:1", "before_commit:2", "decided:1"],
    ids=["between", "in the function", "decided, not committed"],
)
def test_the_fence_rolls_back_what_a_killed_teller_left(new_scene: NewScene, point: str) -> None:
    """No checker is asked: the fence is free, so the debit was not committed; the next teller executes the order."""
    scene = new_scene(Mode.TWO_PHASE)
    scene.kill_at(point)
    assert (scene.halves(), scene.account()[0]) == ([(None, None)], FULL)
    scene.check()
    assert scene.halves() == [ROLLED_BACK]
    assert scene.answers() == [("fence", "rollback", None)]
    assert scene.work() == []
    assert (scene.halves(), scene.account()[0]) == ([ROLLED_BACK, COMMITTED], DEBITED)
    settle(scene)


def test_a_new_half_does_not_wait_for_the_orphan(new_scene: NewScene) -> None:
    """The next teller executes the order at once; the orphan is decided later, and wrongs nobody."""
    scene = new_scene(Mode.TWO_PHASE)
    scene.kill_at("before_commit:2")
    assert scene.work() == []
    assert scene.halves() == [(None, None), COMMITTED]
    scene.check()
    assert scene.halves() == [ROLLED_BACK, COMMITTED]
    settle(scene)


def test_killed_before_the_half_is_committed_there_is_nothing(new_scene: NewScene) -> None:
    """No half, no debit; nothing to check."""
    scene = new_scene(Mode.TWO_PHASE)
    scene.kill_at("before_commit:1")
    assert (scene.halves(), scene.account()[0]) == ([], FULL)
    assert not scene.check()
    assert scene.work() == []
    settle(scene)


def test_killed_after_the_commit_all_is_done(new_scene: NewScene) -> None:
    """The decision is in the transaction that debits; the next teller has nothing to do."""
    scene = new_scene(Mode.TWO_PHASE)
    scene.kill_at("after_commit:2")
    assert (scene.halves(), scene.account()[0]) == ([COMMITTED], DEBITED)
    assert not scene.check()
    assert scene.work() == []
    assert scene.halves() == [COMMITTED]
    settle(scene)


def test_a_slow_function_is_checked_and_left_alone(new_scene: NewScene) -> None:
    """However long after its immunity, and however often: while it runs the answer is UNKNOWN, and then it commits."""
    scene = new_scene(Mode.TWO_PHASE)
    with scene.paused("before_commit:2") as teller:
        for _ in range(3):
            scene.check(after=dt.timedelta(hours=1))
        assert scene.halves() == [(None, None)]
        assert scene.answers() == [("fence", "unknown", "its transaction is still running")] * 3
        assert scene.go_on(teller) == []
    assert (scene.halves(), scene.account()[0]) == ([COMMITTED], DEBITED)
    settle(scene)
    assert scene.audit(executed=1).halves.outlived == 1


def test_a_teller_that_was_too_slow_to_begin_begins_anew(new_scene: NewScene) -> None:
    """Rolled back by the check before its function began: that fails as a whole, and the order gets another half."""
    scene = new_scene(Mode.TWO_PHASE)
    with scene.paused("after_commit:1") as teller:
        scene.check()
        assert scene.halves() == [ROLLED_BACK]
        assert scene.go_on(teller) == LATE
    assert (scene.halves(), scene.account()[0]) == ([ROLLED_BACK, COMMITTED], DEBITED)
    settle(scene)


# --- try, confirm or cancel: the checker -----------------------------------------------------------------------


@pytest.mark.parametrize("point", ["before_commit:1", "after_flush:1"], ids=["nothing written", "reserved"])
def test_killed_in_try_there_is_neither_reservation_nor_half(new_scene: NewScene, point: str) -> None:
    """Both or neither; nothing to check."""
    scene = new_scene(Mode.TCC)
    scene.kill_at(point)
    assert (scene.halves(), scene.reservations(), scene.account()) == ([], [], (FULL, Decimal(0)))
    assert not scene.check(after=CONFIRM_WITHIN)
    assert scene.work() == []
    settle(scene)


@pytest.mark.parametrize("order", [GOOD, LISTED], ids=["to be confirmed", "to be cancelled"])
@pytest.mark.parametrize(
    "point",
    ["after_commit:1", "before_commit:2", "decided:1"],
    ids=["between", "in the second step", "decided, not committed"],
)
def test_the_checker_releases_what_a_killed_teller_reserved(new_scene: NewScene, point: str, order: str) -> None:
    """While the teller may still come back the answer is UNKNOWN; then release and rollback go together."""
    scene = new_scene(Mode.TCC, order)
    scene.kill_at(point)
    assert (scene.halves(), scene.reservations()) == ([(None, None)], ["reserved"])
    assert scene.account() == (FULL, Decimal("30.00"))
    scene.check()
    assert (scene.halves(), scene.reservations()) == ([(None, None)], ["reserved"])
    scene.check(after=CONFIRM_WITHIN)
    assert (scene.halves(), scene.reservations()) == ([ROLLED_BACK], ["abandoned"])
    assert scene.account() == (FULL, Decimal(0))
    assert scene.answers() == [("checker", "unknown", None), ("checker", "rollback", None)]

    if order == GOOD:
        assert scene.work() == []
        assert (scene.halves(), scene.reservations()) == ([ROLLED_BACK, COMMITTED], ["abandoned", "confirmed"])
        assert scene.account() == (DEBITED, Decimal(0))
    else:
        assert scene.work() == OBJECTION
        assert scene.halves() == [ROLLED_BACK, ("rollback", "producer")]
        assert scene.reservations() == ["abandoned", "cancelled"]
        assert scene.account() == (FULL, Decimal(0))
    settle(scene, executed=int(order == GOOD))


def test_killed_after_confirm_all_is_done(new_scene: NewScene) -> None:
    """Debit, reservation and op are committed together; the next teller has nothing to do."""
    scene = new_scene(Mode.TCC)
    scene.kill_at("after_commit:2")
    assert (scene.halves(), scene.reservations()) == ([COMMITTED], ["confirmed"])
    assert not scene.check(after=CONFIRM_WITHIN)
    assert scene.work() == []
    assert scene.halves() == [COMMITTED]
    settle(scene)


def test_killed_after_cancel_the_objection_stands(new_scene: NewScene) -> None:
    """The next teller reports the same refusal, and tries nothing."""
    scene = new_scene(Mode.TCC, LISTED)
    scene.kill_at("after_commit:2")
    assert (scene.halves(), scene.reservations()) == ([("rollback", "producer")], ["cancelled"])
    assert scene.work() == OBJECTION
    assert scene.reservations() == ["cancelled"]
    settle(scene, executed=0)


@pytest.mark.parametrize("order", [GOOD, LISTED], ids=["confirm", "cancel"])
def test_who_comes_late_fails_as_a_whole_and_tries_anew(new_scene: NewScene, order: str) -> None:
    """The check has released the reservation: a late confirm debits nothing, a late cancel releases nothing twice."""
    scene = new_scene(Mode.TCC, order)
    with scene.paused("after_commit:1") as teller:
        scene.check(after=CONFIRM_WITHIN)
        assert (scene.halves(), scene.account()) == ([ROLLED_BACK], (FULL, Decimal(0)))
        facts = scene.go_on(teller)
    executed = int(order == GOOD)
    assert facts == (LATE if executed else LATE + OBJECTION)
    assert scene.reservations() == ["abandoned", "confirmed" if executed else "cancelled"]
    assert scene.account() == (DEBITED if executed else FULL, Decimal(0))
    settle(scene, executed=executed)


def test_a_teller_that_is_just_confirming_is_not_disturbed(new_scene: NewScene) -> None:
    """It has the branch: the checker's patience with locks is short, its answer is UNKNOWN."""
    scene = new_scene(Mode.TCC)
    with scene.paused("before_commit:2") as teller:
        scene.check(after=CONFIRM_WITHIN)
        ((asked, answer, error),) = scene.answers()
        assert (asked, answer) == ("checker", "unknown")
        assert error is not None
        assert "lock timeout" in error
        assert scene.go_on(teller) == []
    assert (scene.halves(), scene.account()) == ([COMMITTED], (DEBITED, Decimal(0)))
    settle(scene)


def test_the_next_teller_waits_for_the_verdict(new_scene: NewScene) -> None:
    """No order is reserved twice at a time: who finds the reservation of an earlier life leaves it to the check."""
    scene = new_scene(Mode.TCC)
    scene.kill_at("after_commit:1")
    with scene.paused("after_rollback:3") as teller:  # it has looked in vain, several times
        assert scene.reservations() == ["reserved"]
        scene.check(after=CONFIRM_WITHIN)
        assert scene.go_on(teller) == []
    assert (scene.halves(), scene.reservations()) == ([ROLLED_BACK, COMMITTED], ["abandoned", "confirmed"])
    settle(scene)
