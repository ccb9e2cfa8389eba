"""What a group hasn't come to is known by its number, and judged when the group has come there."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from outbox.reconcile.follow import survey
from outbox.reconcile.job import Outcome
from outbox.reconcile.tables import InboxState, ProducerState
from tests.reconcile.following import Watched
from tests.reconcile.test_follow import consume
from tests.reconcile.town import HOUR, IN_SYNC, Place, Town, fate, ids_at

Follow = Callable[..., Watched]
AHEAD = fate(status=InboxState.NONE, place=Place.AHEAD)


def test_a_backlog_is_a_number_and_isnt_read_again(town: Town, follow: Follow) -> None:
    """A group that is paused: what lies ahead of it is counted once, and no pass after that reads it."""
    town.plant([IN_SYNC] * 5 + [AHEAD] * 30, ids=ids_at(HOUR, 35))
    watched = follow()
    watched.pass_()
    assert (watched.found, watched.open) == ({}, {Outcome.UNCONSUMED: 30})
    town.plant([AHEAD] * 7, ids=ids_at(HOUR / 2, 7))

    watched.pass_()
    watched.later()
    watched.pass_()

    assert watched.open == {Outcome.UNCONSUMED: 37}
    assert town.rows("SELECT count(*) FROM outbox.reconciliation_finding") == [0]


def test_what_a_group_leaves_out_of_its_backlog_is_found(town: Town, follow: Follow) -> None:
    """Once it has come to the end of what was ahead of it, what it doesn't know is missing; the rest is in sync."""
    ids = town.plant([AHEAD] * 30, ids=ids_at(HOUR, 30))
    watched = follow()
    watched.pass_()
    consume(town, *ids[:12], *ids[13:])
    town.run("INSERT INTO {s}.consumer_offset VALUES ('g', 't', 1, 30, 0)")

    watched.pass_()

    assert (watched.found, watched.open) == ({ids[12]: Outcome.MISSING}, {Outcome.MISSING: 1})


def test_where_the_group_is_at_work_it_is_looked_at(town: Town, follow: Follow) -> None:
    """What a slow group leaves out isn't found only when it has come to the end of a range."""
    ids = town.plant([AHEAD] * 30, ids=ids_at(HOUR, 30))
    watched = follow()
    watched.pass_()
    consume(town, *ids[1:5])
    town.run("INSERT INTO {s}.consumer_offset VALUES ('g', 't', 1, 5, 0)")

    watched.pass_()

    assert watched.found == {ids[0]: Outcome.MISSING}
    assert watched.open == {Outcome.MISSING: 1, Outcome.UNCONSUMED: 25}


def test_many_in_flight_are_judged_together(town: Town, follow: Follow, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where dispatch was away for long, the range is watched, and not each of its messages."""
    monkeypatch.setattr(survey, "_MOST_IN_FLIGHT", 10)
    ids = town.plant([fate(age=10.0, status=InboxState.NONE)] * 20, ids=ids_at(HOUR, 20))
    watched = follow()
    watched.pass_()
    assert (watched.found, watched.results[-1].watched) == ({}, 0)
    consume(town, *ids[1:])
    town.at_producer("UPDATE {s}.message SET visible_at = visible_at - interval '1 hour'")
    watched.later()

    watched.pass_()

    assert watched.found == {ids[0]: Outcome.MISSING}


def test_more_differences_than_are_listed(town: Town, follow: Follow, monkeypatch: pytest.MonkeyPatch) -> None:
    """All are counted, some are listed; the others are, when there is room."""
    monkeypatch.setattr("outbox.reconcile.follow.follower.MOST_OPEN", 4)
    ids = town.plant([fate(status=InboxState.NONE)] * 10, ids=ids_at(HOUR, 10))
    watched = follow()
    watched.pass_()
    assert (len(watched.found), watched.open) == (4, {Outcome.MISSING: 10})
    consume(town, *ids[:9])
    watched.later()
    watched.pass_()
    watched.later()

    watched.pass_()

    assert watched.open == {Outcome.MISSING: 1}


def test_a_late_commit_of_many_is_a_range(town: Town, follow: Follow) -> None:
    """A transaction that was open for long, with thousands of messages, isn't watched one by one."""
    town.plant([IN_SYNC] * 5, ids=ids_at(HOUR, 5))
    watched = follow()
    watched.pass_()
    ids = town.plant([fate(state=ProducerState.COMMITTED, status=InboxState.NONE)] * 200, ids=ids_at(HOUR / 2, 200))

    watched.pass_()
    assert watched.results[-1].watched < 50
    watched.later()
    watched.pass_()

    assert watched.found == dict.fromkeys(ids, Outcome.UNDISPATCHED)


def test_the_log_falls_back(town: Town, follow: Follow) -> None:
    """Storage that was put back: what the consumer has of what is lost is found, though all had been in sync."""
    ids = town.plant([IN_SYNC] * 20, ids=ids_at(HOUR, 20))
    watched = follow()
    watched.pass_()
    lost = ids[15:]
    for table, column in (("half_message", "id"), ("op_message", "half_id"), ("message", "half_id")):
        town.at_producer(f"DELETE FROM {{s}}.{table} WHERE {column} = ANY (:ids)", ids=lost)

    watched.pass_()

    assert watched.found == dict.fromkeys(lost, Outcome.PHANTOM)
    assert any(result.fell_back for result in watched.results)
