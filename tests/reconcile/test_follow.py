"""A follower finds what differs once, tells it once, and tells when it is gone."""

from __future__ import annotations

from collections.abc import Callable
from uuid import UUID

import pytest

from outbox.reconcile.job import Effect, Outcome, Pair
from outbox.reconcile.tables import InboxState, ProducerState
from tests.reconcile.following import Watched
from tests.reconcile.test_settled import failure, park
from tests.reconcile.town import HOUR, IN_SYNC, Fate, Town, fate, ids_at

Follow = Callable[..., Watched]
NONE = InboxState.NONE

DIFFERENT: dict[Outcome, Fate] = {
    Outcome.CONSUMED_THOUGH_ROLLED_BACK: fate(state=ProducerState.ROLLED_BACK),
    Outcome.PHANTOM: fate(state=None),
    Outcome.DIGEST_MISMATCH: fate(same_body=False),
    Outcome.NO_EFFECT: fate(effects=0),
    Outcome.DUPLICATE_EFFECT: fate(effects=2),
    Outcome.UNRECORDED: fate(status=NONE, effects=1),
    Outcome.STATUS_MISMATCH: fate(status=InboxState.PARKED, effects=1),
    Outcome.UNCOMPENSATED: fate(status=InboxState.QUARANTINED),
    Outcome.UNDISPATCHED: fate(state=ProducerState.COMMITTED, status=NONE),
    Outcome.RESEND_EXHAUSTED: fate(status=NONE, sends=4),
    Outcome.MISSING: fate(status=NONE),
    Outcome.PARKED: fate(status=InboxState.PARKED),
    Outcome.FAILED: fate(status=InboxState.FAILED),
    Outcome.UNDECIDED: fate(state=ProducerState.UNDECIDED, status=NONE),
}


def consume(town: Town, *ids: UUID) -> None:
    """Write inbox rows as a consumer would have."""
    town.run(
        "INSERT INTO {s}.consumer_message (consumer_group, message_id, topic, queue, position, status, attempts,"
        " body_digest) SELECT 'g', id, 't', 0, 1, 'consumed', 1, substr(sha256(uuid_send(id)), 1, 16)"
        " FROM unnest(CAST(:ids AS uuid[])) id",
        ids=list(ids),
    )


def read_all(town: Town) -> None:
    """Have the group read past all there is."""
    town.run(
        "INSERT INTO {s}.consumer_offset (consumer_group, topic, queue, position, starts)"
        " SELECT 'g', 't', q, 1000, 0 FROM generate_series(0, 7) q"
    )


def test_what_is_in_sync_is_counted_and_nothing_told(town: Town, follow: Follow) -> None:
    """All is judged once; the next pass judges nothing."""
    town.plant([IN_SYNC] * 50, ids=ids_at(HOUR, 50))
    watched = follow()

    watched.pass_()
    judged = sum(result.judged for result in watched.results)
    watched.pass_()

    assert (judged, watched.results[-1].judged) == (50, 0)
    assert (watched.found, watched.gone, watched.open) == ({}, {}, {})


def test_a_difference_is_told_once_and_when_it_is_gone(town: Town, follow: Follow) -> None:
    """It is found past its grace period, stays open, and is gone once the consumer has it."""
    ids = town.plant([IN_SYNC] * 20 + [fate(status=NONE)] + [IN_SYNC] * 20, ids=ids_at(HOUR, 41))
    watched = follow()

    watched.pass_()
    watched.pass_()
    assert [len(result.found) for result in watched.results if result.found] == [1]
    assert (watched.found, watched.open) == ({ids[20]: Outcome.MISSING}, {Outcome.MISSING: 1})

    consume(town, ids[20])
    watched.pass_()
    watched.pass_()
    assert (watched.gone, watched.open) == ({ids[20]: Outcome.MISSING}, {})
    assert town.rows("SELECT result FROM outbox.reconciliation_finding") == ["healed"]
    assert sum(len(result.gone) for result in watched.results) == 1


def test_every_kind_is_found(town: Town, follow: Follow) -> None:
    """Among many in sync, each with its kind, and nothing else; a second pass tells nothing more."""
    fates = [each for kind in DIFFERENT for each in [fate(effects=1)] * 5 + [DIFFERENT[kind]]]
    ids = town.plant(fates, ids=ids_at(HOUR, len(fates)))
    with_effects = {Outcome.NO_EFFECT, Outcome.DUPLICATE_EFFECT, Outcome.UNRECORDED, Outcome.STATUS_MISMATCH}
    expected = dict(zip(ids[5::6], DIFFERENT, strict=True))
    for id_, kind in expected.items():
        if kind not in with_effects and DIFFERENT[kind].status is InboxState.CONSUMED:
            town.run("INSERT INTO ledger (message_id) VALUES (:id)", id=id_)
    watched = follow(Pair("t", "g", effect=Effect("ledger")))

    watched.pass_()
    watched.pass_()

    assert watched.found == expected
    assert sum(len(result.found) for result in watched.results) == len(expected)


def late_commit(town: Town, ids: list[UUID]) -> dict[UUID, Outcome]:
    """Commit a message whose id is old."""
    (one,) = town.plant([fate(state=ProducerState.COMMITTED, status=NONE)], ids=[after(ids[15])])
    return {one: Outcome.UNDISPATCHED}


def old_half_prepared(town: Town, ids: list[UUID]) -> dict[UUID, Outcome]:
    """Prepare a half whose id is old."""
    (one,) = town.plant([fate(state=ProducerState.UNDECIDED, status=NONE)], ids=[after(ids[15])])
    return {one: Outcome.UNDECIDED}


def late_rollback(town: Town, ids: list[UUID]) -> dict[UUID, Outcome]:
    """Roll a half back whose id is old."""
    town.plant([fate(state=ProducerState.ROLLED_BACK, status=NONE)], ids=[after(ids[15])])
    return {}


def late_dispatch(town: Town, ids: list[UUID]) -> dict[UUID, Outcome]:
    """Commit and dispatch a message whose id is old; the group passes it by."""
    (one,) = town.plant([fate(status=NONE)], ids=[after(ids[15])])
    return {one: Outcome.MISSING}


def ahead_of_the_clock(town: Town, ids: list[UUID]) -> dict[UUID, Outcome]:
    """Send a message from a host whose clock is an hour ahead; the group passes it by."""
    (one,) = town.plant([fate(status=NONE)], ids=ids_at(-HOUR))
    return {one: Outcome.MISSING}


def overdue(town: Town, ids: list[UUID]) -> dict[UUID, Outcome]:
    """Have a scheduled message's time come, without anything that releases it."""
    (one,) = town.plant([fate(state=ProducerState.SCHEDULED, status=NONE, due_in=HOUR)], ids=[after(ids[15])])
    town.at_producer("UPDATE {s}.scheduled_message SET deliver_at = now() - interval '1 hour'")
    return {one: Outcome.UNDISPATCHED}


def wait(town: Town, ids: list[UUID]) -> dict[UUID, Outcome]:
    """Have an inbox row wait for an earlier one of its key, as after a reset."""
    town.run(
        """UPDATE {s}.consumer_message SET status = 'waiting', order_key = 'k', turn = 1, follows = true
            WHERE message_id = :id""",
        id=ids[15],
    )
    return {ids[15]: Outcome.FAILED}


def compensation(town: Town, ids: list[UUID]) -> dict[UUID, Outcome]:
    """Compensate a message that was consumed."""
    town.at_producer(
        "INSERT INTO {s}.compensation (half_id, function, requested_by, reason) VALUES (:id, 'f', 'me', 'test')",
        id=ids[15],
    )
    return {ids[15]: Outcome.CONSUMED_THOUGH_ROLLED_BACK}


def resend(town: Town, ids: list[UUID]) -> dict[UUID, Outcome]:
    """Resend a message that the inbox has forgotten; the group passes it by."""
    town.forget(ids[15])  # behind the framework's back; that it is resent brings it to light
    town.resend(ids[15])
    town.at_producer("UPDATE {s}.message SET visible_at = visible_at - interval '1 hour'")
    read_all(town)
    return {ids[15]: Outcome.MISSING}


def after(id_: UUID) -> UUID:
    """Return the next id."""
    return UUID(int=id_.int + 1)


@pytest.mark.parametrize(
    "act",
    [
        *(late_commit, old_half_prepared, late_rollback, late_dispatch, ahead_of_the_clock, overdue),
        *(failure, park, wait, compensation, resend),
    ],
)
def test_what_is_written_where_all_was_judged_is_found(
    town: Town, follow: Follow, act: Callable[[Town, list[UUID]], dict[UUID, Outcome]]
) -> None:
    """Whatever the ids say: what was written since the last pass is judged, when its own grace period is over."""
    ids = town.plant([IN_SYNC] * 50, ids=ids_at(HOUR, 50))
    watched = follow()
    watched.pass_()
    expected = act(town, ids)

    watched.pass_()
    watched.later()
    watched.pass_()

    assert watched.found == expected
    assert sum(len(result.found) for result in watched.results) == len(expected)


def test_a_transaction_that_was_held_open(town: Town, follow: Follow) -> None:
    """A message whose transaction was open over many passes is found once it is committed, by its own grace period."""
    town.plant([IN_SYNC] * 10, ids=ids_at(HOUR, 10))
    watched = follow()
    (old,) = ids_at(HOUR / 2)
    half = (
        "INSERT INTO outbox.half_message (id, producer_group, topic, content_type, body) VALUES (%s, 'p', 't', '', '')"
    )
    op = "INSERT INTO outbox.op_message (half_id, resolution, decided_by) VALUES (%s, 'commit', 'producer')"
    with town.producer.begin() as connection:
        for sql in (half, op):
            connection.exec_driver_sql(sql, (old,))
        for _ in range(3):
            watched.later()
            watched.pass_()
    watched.pass_()
    assert watched.found == {}
    town.at_producer(
        "UPDATE {s}.op_message SET decided_at = decided_at - interval '1 hour' WHERE half_id = :id", id=old
    )
    watched.later()

    watched.pass_()

    assert watched.found == {old: Outcome.UNDISPATCHED}


def test_messages_on_their_way_are_no_difference(town: Town, follow: Follow) -> None:
    """What is younger than the grace period is told only when it is older, and not if it has come by then."""
    ids = town.plant([fate(status=NONE, age=10.0)] * 4, ids=ids_at(HOUR, 4))
    watched = follow()
    watched.pass_()
    assert (watched.found, watched.results[-1].watched) == ({}, 4)

    consume(town, *ids[:3])
    town.at_producer("UPDATE {s}.message SET visible_at = visible_at - interval '1 hour'")
    watched.later()
    watched.pass_()

    assert watched.found == {ids[3]: Outcome.MISSING}
    assert watched.results[-1].watched == 0


def test_scheduled_messages_are_not_watched(town: Town, follow: Follow) -> None:
    """However many there are: each is judged when it becomes a message, or is overdue."""
    town.plant([fate(state=ProducerState.SCHEDULED, status=NONE, due_in=HOUR)] * 5, ids=ids_at(HOUR, 5))
    watched = follow()

    watched.pass_()

    assert (watched.found, watched.results[-1].watched) == ({}, 0)


def test_it_begins_where_it_is_declared(town: Town, follow: Follow) -> None:
    """Without `since` nothing of before is judged: that is left to a run."""
    town.plant([fate(status=NONE)] * 5, ids=ids_at(HOUR, 5))
    watched = follow(since=None)

    watched.pass_()
    watched.pass_()

    assert (watched.found, watched.open) == ({}, {})


def test_a_known_difference_becomes_another(town: Town, follow: Follow) -> None:
    """It is told with its new kind; the record has it once."""
    (one,) = town.plant([fate(status=InboxState.FAILED)], ids=ids_at(HOUR))
    watched = follow()
    watched.pass_()
    town.set_inbox(InboxState.PARKED, one)

    watched.pass_()

    assert [each.outcome for result in watched.results for each in result.found] == [Outcome.FAILED, Outcome.PARKED]
    assert watched.gone == {}
    assert town.rows("SELECT kind FROM outbox.reconciliation_finding") == ["parked"]


def test_what_differs_again_is_told_again(town: Town, follow: Follow) -> None:
    """A finding that was gone is open again."""
    (one,) = town.plant([fate(status=NONE)], ids=ids_at(HOUR))
    watched = follow()
    watched.pass_()
    consume(town, one)
    watched.pass_()
    town.forget(one)
    town.resend(one)
    town.at_producer("UPDATE {s}.message SET visible_at = visible_at - interval '1 hour'")
    read_all(town)
    watched.pass_()
    watched.later()

    watched.pass_()

    assert [len(result.found) for result in watched.results if result.found] == [1, 1]
    assert town.rows("SELECT coalesce(result, 'open') FROM outbox.reconciliation_finding") == ["open"]
