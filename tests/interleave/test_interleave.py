"""The exploration itself: a small share of it, and that it finds what is wrong."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from outbox.database import decision
from outbox.dispatch import sql as dispatch_sql
from outbox.embedded import ServerLike
from tests.interleave.flows import FLOWS, meetings_of
from tests.interleave.mutants import MUTANTS, ROOT
from tests.interleave.stepping import SNAPSHOT, Footprint, footprint_of
from tests.interleave.weaver import Weaver, weaver
from tests.kit import tries

#: Each order of a pair has that many kills, at least.
HURTS = min(15, tries(8))
#: Pairs of which all orders are tried, and each of their kills up to a limit.
FEW = (
    ("send", "dispatch@committed"),
    ("commit", "rollback"),
    ("rollback", "check@orphan"),
    ("recall", "release@due"),
    ("retry", "park"),
    ("prune", "resend@settled"),
    ("confirm", "consume@dispatched"),
    ("dispatch", "consume_woken"),
    ("commit_repeatable", "rewrite"),
    ("commit_repeatable", "make_segment"),
    ("advance", "fall_back@booked"),
)


@pytest.fixture(scope="module")
def one(server: ServerLike) -> Iterator[Weaver]:
    """A weaver for two flows."""
    with weaver(server, flows=2) as one:
        yield one


@pytest.mark.parametrize("pair", FEW, ids=" ".join)
def test_nothing_breaks_in_any_order(one: Weaver, pair: tuple[str, str]) -> None:
    """Of these pairs; of all pairs, and with all kills: ``python -m tests.interleave --kills``."""
    for meeting in meetings_of(*pair):
        found = one.explore(meeting, kills=True, schedules=tries(12), hurts=HURTS)
        assert found.violations == []
        assert found.schedules > 1
        assert found.kills == HURTS


def test_it_finds_a_message_that_is_lost(one: Weaver, monkeypatch: pytest.MonkeyPatch) -> None:
    """If dispatch forgets who was in flight, one order of a send and a dispatch loses the message."""
    remembered = "ELSE ARRAY(SELECT pg_snapshot_xip(pg_current_snapshot())) END"
    without = dispatch_sql._DISPATCH_FRESH.replace(remembered, "ELSE '{}'::xid8[] END")
    assert without != dispatch_sql._DISPATCH_FRESH
    monkeypatch.setattr(dispatch_sql, "_DISPATCH_FRESH", without)
    (meeting,) = meetings_of("send", "dispatch@committed")
    found = one.explore(meeting, kills=False, schedules=100, hurts=0)
    assert any("lost: committed, and no message" in violation for violation in found.violations)


def test_it_finds_a_deadlock(one: Weaver, monkeypatch: pytest.MonkeyPatch) -> None:
    """If who decides doesn't lock the check first, two of them may wait for each other."""
    template = decision._DECIDE
    without = template.sql.replace(" FOR UPDATE\n", "\n")
    assert without != template.sql
    monkeypatch.setattr(template, "sql", without)
    (meeting,) = meetings_of("commit", "refuse@undecided")
    found = one.explore(meeting, kills=False, schedules=100, hurts=0)
    assert any("wait for each other" in violation for violation in found.violations)


def test_each_flow_makes_the_steps_of_its_statements(one: Weaver) -> None:
    """A pipeline counts as its statements, those that nobody can notice aside."""
    (meeting,) = meetings_of("commit", "rollback")
    found = one.explore(meeting, kills=False, schedules=100, hurts=0)
    # Two of one statement and a COMMIT, the second of which waits for the first, or begins after it.
    assert (found.schedules, found.switches) == (4, None)


def test_steps_that_touch_different_things_do_not_meet() -> None:
    """Reading doesn't meet writing, but for the commit; the snapshot as a value meets all that write."""
    written = footprint_of('INSERT INTO "outbox".op_message SELECT 1', ())
    read = footprint_of('SELECT FROM "outbox".op_message o JOIN "outbox".message m ON true', ())
    assert written.writes == {"op_message", SNAPSHOT}
    assert read.reads == {"op_message", "message"}
    assert not written.meets(read)
    assert Footprint(publishes=written.writes).meets(read)
    assert written.meets(footprint_of("SELECT pg_current_snapshot()", ()))
    assert footprint_of('SELECT FROM "outbox".half_check FOR UPDATE SKIP LOCKED', ()).writes == {"half_check", SNAPSHOT}
    locks = footprint_of("SELECT pg_try_advisory_xact_lock(%s)", (2**40,))
    assert locks.meets(footprint_of("SELECT pg_advisory_xact_lock(%s)", (2**40,)))
    assert not locks.meets(footprint_of("SELECT pg_advisory_xact_lock(%s)", (2**41,)))
    assert not footprint_of("BEGIN ISOLATION LEVEL READ COMMITTED", ())


def test_mutants_know_the_rules_that_they_take_out() -> None:
    """Each text stands in the package exactly once, and who has to notice exists."""
    assert len(MUTANTS) >= 40
    for mutant in MUTANTS:
        assert (ROOT / "outbox" / mutant.module).read_text().count(mutant.text) == 1, mutant.rule
        if mutant.by.startswith("tests/"):
            assert all((ROOT / path).exists() for path in mutant.by.split()), mutant.rule
        else:
            for pair in mutant.by.split(":"):
                assert meetings_of(*pair.split(",")), mutant.rule


def test_every_flow_of_the_house_plan_is_there() -> None:
    """Each has something to do somewhere."""
    assert len(FLOWS) >= 14
    assert all(flow.stages for flow in FLOWS.values())
