"""Each kind of difference, planted in both databases: found exactly, alone and by the hundred, and none invented."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from outbox import Settings, message_id
from outbox.reconcile.job import Outcome, Pair, Tier, Window
from outbox.reconcile.rows import to_findings
from outbox.reconcile.tables import InboxState, ProducerState, Torn
from tests.reconcile.town import HOUR, IN_SYNC, WITH_EFFECT, Fate, Place, Town, counted, fate, ids_at, ids_in, kinds

UNDECIDED, ROLLED_BACK, COMMITTED, SCHEDULED, RECALLED, DISPATCHED = ProducerState
NONE, CONSUMED, FAILED, PARKED, QUARANTINED = InboxState

#: A name, what is planted, what it is; with a business table that has one row of each message that took effect.
EFFECT = fate(effects=1)


def unread(**changes: Any) -> Fate:
    """Return a message that the inbox doesn't know, and that had no effect."""
    return fate(status=NONE, **changes)


#: What is planted, and what it comes to. All of it an hour old, but for what says otherwise.
CASES: dict[str, tuple[Fate, Outcome]] = {
    "consumed": (EFFECT, Outcome.CONSUMED),
    "consumed, resent since": (fate(effects=1, sends=3), Outcome.CONSUMED),
    "consumed, no digest kept": (fate(effects=1, same_body=None), Outcome.CONSUMED),
    "consumed just now": (fate(effects=1, age=0), Outcome.CONSUMED),
    "consumed before the group began": (fate(effects=1, place=Place.BEFORE), Outcome.CONSUMED),
    "consumed, though behind the offset": (fate(effects=1, place=Place.AHEAD), Outcome.CONSUMED),
    "consumed, against the filter": (fate(effects=1, tag="other"), Outcome.CONSUMED),
    "skipped": (fate(skipped=True), Outcome.CONSUMED),
    "skipped, another body": (fate(skipped=True, same_body=False), Outcome.DIGEST_MISMATCH),
    "rolled back": (unread(state=ROLLED_BACK), Outcome.ROLLED_BACK),
    "rolled back just now": (unread(state=ROLLED_BACK, age=0), Outcome.ROLLED_BACK),
    "rolled back, and quarantined": (fate(state=ROLLED_BACK, status=QUARANTINED), Outcome.ROLLED_BACK),
    "rolled back, skipped": (fate(state=ROLLED_BACK, skipped=True), Outcome.ROLLED_BACK),
    "recalled": (unread(state=RECALLED), Outcome.ROLLED_BACK),
    "compensated, and quarantined": (fate(compensated=True, status=QUARANTINED), Outcome.ROLLED_BACK),
    "compensated, never dispatched": (unread(compensated=True, state=COMMITTED), Outcome.ROLLED_BACK),
    "compensated, left out by the filter": (unread(compensated=True, tag="other"), Outcome.ROLLED_BACK),
    "compensated, before the group": (unread(compensated=True, place=Place.BEFORE), Outcome.ROLLED_BACK),
    "left out by the filter": (unread(tag="other"), Outcome.LEFT_OUT),
    "left out by the filter, without a tag": (unread(tag=None), Outcome.LEFT_OUT),
    "before the group began": (unread(place=Place.BEFORE), Outcome.LEFT_OUT),
    "left out, just dispatched": (unread(tag="other", age=0), Outcome.LEFT_OUT),
    "undecided, young": (unread(state=UNDECIDED, age=0), Outcome.IN_FLIGHT),
    "committed, young": (unread(state=COMMITTED, age=0), Outcome.IN_FLIGHT),
    "scheduled for later": (unread(state=SCHEDULED, due_in=HOUR), Outcome.IN_FLIGHT),
    "scheduled, due just now": (unread(state=SCHEDULED, due_in=-1), Outcome.IN_FLIGHT),
    "dispatched just now": (unread(age=0), Outcome.IN_FLIGHT),
    "dispatched just now, not read yet": (unread(age=0, place=Place.AHEAD), Outcome.IN_FLIGHT),
    "failed just now": (fate(status=FAILED, inbox_age=0), Outcome.IN_FLIGHT),
    "quarantined just now": (fate(status=QUARANTINED, inbox_age=0), Outcome.IN_FLIGHT),
    "torn: no half": (fate(effects=1, torn=Torn.MESSAGE_WITHOUT_HALF), Outcome.TORN),
    "torn: an op alone": (unread(state=COMMITTED, torn=Torn.OP_WITHOUT_HALF), Outcome.TORN),
    "torn: a rollback alone": (unread(state=ROLLED_BACK, torn=Torn.OP_WITHOUT_HALF), Outcome.TORN),
    "torn: rolled back, consumed": (fate(effects=1, torn=Torn.MESSAGE_THOUGH_ROLLED_BACK), Outcome.TORN),
    "torn: rolled back, just now": (unread(torn=Torn.MESSAGE_THOUGH_ROLLED_BACK, age=0), Outcome.TORN),
    "torn: undecided": (unread(torn=Torn.MESSAGE_THOUGH_UNDECIDED), Outcome.TORN),
    "torn: of another topic, consumed": (fate(effects=1, torn=Torn.MESSAGE_IN_OTHER_TOPIC), Outcome.TORN),
    "torn: of another topic": (unread(torn=Torn.MESSAGE_IN_OTHER_TOPIC, sends=2), Outcome.TORN),
    "consumed though rolled back": (fate(state=ROLLED_BACK, effects=1), Outcome.CONSUMED_THOUGH_ROLLED_BACK),
    "consumed though recalled": (fate(state=RECALLED, effects=1), Outcome.CONSUMED_THOUGH_ROLLED_BACK),
    "consumed though compensated": (fate(compensated=True, effects=1), Outcome.CONSUMED_THOUGH_ROLLED_BACK),
    "effect though rolled back": (unread(state=ROLLED_BACK, effects=1), Outcome.CONSUMED_THOUGH_ROLLED_BACK),
    "inbox says so though rolled back": (fate(state=ROLLED_BACK), Outcome.CONSUMED_THOUGH_ROLLED_BACK),
    "rolled back just now, consumed": (fate(state=ROLLED_BACK, effects=1, age=0), Outcome.CONSUMED_THOUGH_ROLLED_BACK),
    "quarantined, compensated, effect": (
        fate(compensated=True, status=QUARANTINED, effects=1),
        Outcome.CONSUMED_THOUGH_ROLLED_BACK,
    ),
    "parked, rolled back, effect": (
        fate(state=ROLLED_BACK, status=PARKED, effects=1),
        Outcome.CONSUMED_THOUGH_ROLLED_BACK,
    ),
    "rolled back, two effects": (fate(state=ROLLED_BACK, effects=2), Outcome.CONSUMED_THOUGH_ROLLED_BACK),
    "two effects": (fate(effects=2), Outcome.DUPLICATE_EFFECT),
    "two effects, unknown to the inbox": (unread(effects=2), Outcome.DUPLICATE_EFFECT),
    "two effects of a phantom": (fate(state=None, effects=2), Outcome.DUPLICATE_EFFECT),
    "two effects, another body": (fate(effects=2, same_body=False), Outcome.DUPLICATE_EFFECT),
    "never written": (fate(state=None, effects=1), Outcome.PHANTOM),
    "never written, parked": (fate(state=None, status=PARKED), Outcome.PHANTOM),
    "never written, quarantined": (fate(state=None, status=QUARANTINED), Outcome.PHANTOM),
    "never written, failed just now": (fate(state=None, status=FAILED, age=0), Outcome.IN_FLIGHT),
    "never decided, consumed": (fate(state=UNDECIDED, effects=1), Outcome.PHANTOM),
    "never decided, took effect": (unread(state=UNDECIDED, effects=1), Outcome.PHANTOM),
    "never decided, failed, young": (fate(state=UNDECIDED, status=FAILED, age=0), Outcome.IN_FLIGHT),
    "never decided, failed again just now": (
        fate(state=UNDECIDED, status=FAILED, inbox_age=0, received=HOUR),
        Outcome.PHANTOM,
    ),
    "consumed before it is due": (fate(state=SCHEDULED, due_in=HOUR, effects=1), Outcome.PHANTOM),
    "took effect before it is due": (unread(state=SCHEDULED, due_in=HOUR, effects=1), Outcome.PHANTOM),
    "another body": (fate(effects=1, same_body=False), Outcome.DIGEST_MISMATCH),
    "another body, parked": (fate(status=PARKED, same_body=False), Outcome.DIGEST_MISMATCH),
    "another body, no effect": (fate(same_body=False), Outcome.DIGEST_MISMATCH),
    "consumed, no effect": (fate(), Outcome.NO_EFFECT),
    "took effect, unknown": (unread(effects=1), Outcome.UNRECORDED),
    "took effect, unknown, not read yet": (unread(effects=1, place=Place.AHEAD), Outcome.UNRECORDED),
    "failed, took effect": (fate(status=FAILED, effects=1), Outcome.STATUS_MISMATCH),
    "parked, took effect": (fate(status=PARKED, effects=1), Outcome.STATUS_MISMATCH),
    "quarantined, took effect": (fate(status=QUARANTINED, effects=1), Outcome.STATUS_MISMATCH),
    "failed, rolled back": (fate(status=FAILED, state=ROLLED_BACK), Outcome.STATUS_MISMATCH),
    "parked, compensated": (fate(status=PARKED, compensated=True), Outcome.STATUS_MISMATCH),
    "compensated, not quarantined": (unread(compensated=True), Outcome.STATUS_MISMATCH),
    "quarantined": (fate(status=QUARANTINED), Outcome.UNCOMPENSATED),
    "quarantined, never dispatched": (fate(status=QUARANTINED, state=COMMITTED), Outcome.UNCOMPENSATED),
    "ahead of the clock, not read": (unread(age=-HOUR), Outcome.AHEAD_OF_CLOCK),
    "ahead of the clock, consumed": (fate(effects=1, age=-HOUR), Outcome.AHEAD_OF_CLOCK),
    "ahead of the clock, undecided": (unread(state=UNDECIDED, age=-HOUR), Outcome.AHEAD_OF_CLOCK),
    "ahead of the clock, committed": (unread(state=COMMITTED, age=-HOUR), Outcome.AHEAD_OF_CLOCK),
    "ahead of the clock, left out": (unread(tag="other", age=-HOUR), Outcome.AHEAD_OF_CLOCK),
    "failed ahead of the clock": (fate(status=FAILED, inbox_age=-HOUR), Outcome.AHEAD_OF_CLOCK),
    "consumed ahead of the clock": (fate(effects=1, inbox_age=-HOUR), Outcome.AHEAD_OF_CLOCK),
    "never written, ahead of the clock": (fate(state=None, status=FAILED, age=-HOUR), Outcome.PHANTOM),
    "quarantined ahead of the clock": (fate(status=QUARANTINED, inbox_age=-HOUR), Outcome.UNCOMPENSATED),
    "rolled back, ahead of the clock": (unread(state=ROLLED_BACK, age=-HOUR), Outcome.ROLLED_BACK),
    "committed, not dispatched": (unread(state=COMMITTED), Outcome.UNDISPATCHED),
    "scheduled, overdue": (unread(state=SCHEDULED), Outcome.UNDISPATCHED),
    "committed, consumed, no message": (fate(state=COMMITTED, effects=1), Outcome.UNDISPATCHED),
    "resent three times": (unread(sends=4), Outcome.RESEND_EXHAUSTED),
    "missing": (unread(), Outcome.MISSING),
    "missing, resent twice": (unread(sends=3), Outcome.MISSING),
    "not read yet": (unread(place=Place.AHEAD), Outcome.UNCONSUMED),
    "not read yet, resent often": (unread(place=Place.AHEAD, sends=5), Outcome.UNCONSUMED),
    "parked": (fate(status=PARKED), Outcome.PARKED),
    "parked just now": (fate(status=PARKED, age=0), Outcome.PARKED),
    "failed": (fate(status=FAILED), Outcome.FAILED),
    "failed again just now": (fate(status=FAILED, inbox_age=0, received=HOUR), Outcome.FAILED),
    "undecided": (unread(state=UNDECIDED), Outcome.UNDECIDED),
}
#: The group of the cases takes what has this tag.
FILTERED = Pair("t", "g", tags=["mine"], effect=WITH_EFFECT.effect)


def _case(name: str) -> tuple[Fate, Outcome]:
    planted, outcome = CASES[name]
    from dataclasses import replace

    keeps_tag = planted.tag is not None or name.endswith("without a tag")
    return (planted if keeps_tag else replace(planted, tag="mine")), outcome


@pytest.mark.parametrize("tier", [Tier.FULL, Tier.DIGEST])
def test_every_case_alone_beside_messages_in_sync(town: Town, tier: Tier) -> None:
    """Each case among messages in sync is told by its id, and nothing else is."""
    planted = {name: _case(name) for name in CASES}
    neighbours = [fate(effects=1, tag="mine") for _ in range(50)]
    town.plant(neighbours)
    ids = dict(zip(planted, town.plant(each for each, _ in planted.values()), strict=True))
    town.plant(neighbours)

    result = town.reconcile(FILTERED, tier=tier)

    names = {id_: name for name, id_ in ids.items()}
    expected = {name: outcome for name, (_, outcome) in planted.items()}
    found = {names.get(id_, "a neighbour"): kind for id_, kind in kinds(result).items()}
    assert found == {name: outcome for name, outcome in expected.items() if outcome.differs}
    assert {names.get(id_, "a neighbour") for id_ in ids_in(result.open)} == {
        name for name, outcome in expected.items() if outcome is Outcome.IN_FLIGHT
    }
    assert counted(result) == Counter(expected.values()) + Counter({Outcome.CONSUMED: 100})


@pytest.mark.parametrize("tier", [Tier.FULL, Tier.DIGEST])
def test_every_case_by_the_hundred(town: Town, tier: Tier) -> None:
    """A hundred of each case, shuffled, are found one by one."""
    drawn = [_case(name) for name in CASES for _ in range(100)]
    random.Random(7).shuffle(drawn)  # noqa: S311
    ids = town.plant(each for each, _ in drawn)

    result = town.reconcile(FILTERED, tier=tier)

    expected = {id_: outcome for id_, (_, outcome) in zip(ids, drawn, strict=True)}
    assert kinds(result) == {id_: outcome for id_, outcome in expected.items() if outcome.differs}
    assert ids_in(result.open) == {id_ for id_, outcome in expected.items() if outcome is Outcome.IN_FLIGHT}
    assert counted(result) == Counter(expected.values())


def test_the_cases_cover_every_outcome() -> None:
    """There is a case of every outcome but those that need a retention, a log that went back, a producer's opinion."""
    elsewhere = {Outcome.UNJUDGED, Outcome.LOST, Outcome.OPINION_DIFFERS}
    assert {outcome for _, outcome in CASES.values()} == set(Outcome) - elsewhere


@pytest.mark.parametrize("tier", [Tier.FULL, Tier.DIGEST])
@pytest.mark.parametrize("late", ["message", "inbox"])
def test_a_clock_that_was_set_back(town: Town, tier: Tier, late: str) -> None:
    """What both sides agree on is told by digests, too, if its time can't be."""
    ids = town.plant([fate(effects=1)] * 20)
    if late == "message":
        town.at_producer("UPDATE {s}.message SET visible_at = visible_at + interval '8 hours'")
    else:
        town.run("UPDATE {s}.consumer_message SET changed_at = changed_at + interval '8 hours'")
    assert kinds(town.reconcile(WITH_EFFECT, tier=tier)) == dict.fromkeys(ids, Outcome.AHEAD_OF_CLOCK)


@pytest.mark.parametrize("tier", [Tier.FULL, Tier.DIGEST])
def test_what_a_group_found_to_be_lost(town: Town, tier: Tier) -> None:
    """What the group's worker saw the producer lose isn't taken for what the producer never sent."""
    phantom, lost, undecided, here = town.plant(
        [fate(state=None), fate(state=None), fate(state=UNDECIDED, effects=1), fate(effects=1)]
    )
    town.run(
        "INSERT INTO {s}.log_loss (consumer_group, topic, queue, position, agreed, message_ids)"
        " SELECT consumer_group, topic, 0, 9, 5, :ids FROM {s}.consumer_offset LIMIT 1",
        ids=[lost, undecided, here],
    )

    result = town.reconcile(tier=tier)

    assert kinds(result) == {phantom: Outcome.PHANTOM, lost: Outcome.LOST, undecided: Outcome.LOST}


@pytest.mark.parametrize("tier", [Tier.FULL, Tier.DIGEST])
def test_without_a_business_table_effects_are_not_judged(town: Town, tier: Tier) -> None:
    """What only the business table tells isn't told by a pair that names none."""
    consumed, phantom, unrecorded, parked = town.plant(
        [fate(effects=0), fate(state=None, effects=2), fate(status=NONE, effects=1), fate(status=PARKED, effects=1)]
    )

    result = town.reconcile(tier=tier)

    assert kinds(result) == {phantom: Outcome.PHANTOM, unrecorded: Outcome.MISSING, parked: Outcome.PARKED}
    assert counted(result)[Outcome.CONSUMED] == 1
    assert consumed not in kinds(result)


@pytest.mark.parametrize("tier", [Tier.FULL, Tier.DIGEST])
def test_what_the_producer_may_have_pruned_is_not_judged(town: Town, tier: Tier) -> None:
    """A message that only the consumer has is a phantom within the producer's retention, and not judged beyond it."""
    retention = Settings().retention
    pruned = ids_at(retention + 60, 30)
    kept = ids_at(retention - 60, 3)
    town.plant([fate(state=None)] * 28 + [fate(state=None, status=PARKED)] * 2, ids=pruned)
    town.plant([fate(state=None)] * 3, ids=kept)
    known = town.plant([IN_SYNC] * 2, ids=ids_at(retention + 120, 2))

    result = town.reconcile(tier=tier)

    assert kinds(result) == dict.fromkeys(kept, Outcome.PHANTOM)
    assert counted(result) == {Outcome.UNJUDGED: 30, Outcome.PHANTOM: 3, Outcome.CONSUMED: 2}
    assert known[0] not in kinds(result)


@pytest.mark.parametrize("tier", [Tier.FULL, Tier.DIGEST])
def test_ids_of_business_strings_say_no_time(town: Town, tier: Tier) -> None:
    """What both sides have, or the producer alone, is judged; what only the consumer has may have been pruned."""
    ids = [message_id("t", f"order-{number}") for number in range(5)]
    consumed, expired, other_body, missing, pruned = town.plant(
        [IN_SYNC, fate(), fate(same_body=False), fate(status=NONE), fate(state=None)], ids=ids
    )
    town.run("UPDATE {s}.consumer_message SET status = 'expired' WHERE message_id = :id", id=expired)

    result = town.reconcile(tier=tier)

    assert kinds(result) == {other_body: Outcome.DIGEST_MISMATCH, missing: Outcome.MISSING}
    assert counted(result)[Outcome.CONSUMED] == 2
    assert counted(result)[Outcome.UNJUDGED] == 1
    assert not {consumed, pruned} & kinds(result).keys()


def test_how_often_is_resent_is_the_policys_affair(town: Town) -> None:
    """A missing message was resent as often as is allowed when it was sent once more than that."""
    once, twice = town.plant([fate(status=NONE), fate(status=NONE, sends=2)])
    assert kinds(town.reconcile(max_resends=0)) == dict.fromkeys([once, twice], Outcome.RESEND_EXHAUSTED)
    assert kinds(town.reconcile(max_resends=1)) == {once: Outcome.MISSING, twice: Outcome.RESEND_EXHAUSTED}
    assert kinds(town.reconcile(max_resends=2)) == dict.fromkeys([once, twice], Outcome.MISSING)


def test_a_finding_says_what_both_sides_know(town: Town) -> None:
    """Numbers, times and digests of a difference are those of its rows; what a side lacks is None."""
    mismatch, missing, phantom = town.plant(
        [fate(same_body=False, sends=2, effects=1), fate(status=NONE), fate(state=None, effects=1)]
    )

    result = town.reconcile(WITH_EFFECT)

    found = {finding.id: finding for finding in to_findings(result.findings)}
    one = found[mismatch]
    assert (one.state, one.sends, one.queue, one.position, one.compensated) == (DISPATCHED, 2, 0, 2, False)
    assert (one.status, one.attempts, one.effects, one.consumer_digest) == (CONSUMED, 1, 1, bytes(1))
    assert one.producer_digest not in {None, bytes(1)}
    (row,) = town.rows("SELECT received_at, changed_at FROM outbox.consumer_message WHERE message_id = :i", i=mismatch)
    assert (one.received_at, one.changed_at) == row
    with town.producer.connect() as connection:
        visible = connection.exec_driver_sql(
            "SELECT visible_at FROM outbox.message WHERE half_id = %s AND send_number = 2", (mismatch,)
        ).scalar_one()
    assert one.at == visible
    two = found[missing]
    assert (two.status, two.attempts, two.received_at, two.changed_at, two.consumer_digest) == (None,) * 5
    three = found[phantom]
    assert (three.state, three.sends, three.queue, three.position, three.at, three.compensated) == (None,) * 6
    assert (three.producer_digest, three.effects) == (None, 1)


def test_the_grace_period_is_the_jobs(town: Town) -> None:
    """The same message is in flight under a longer grace period, and missing under a shorter one."""
    (missing,) = town.plant([fate(status=NONE, age=100)])
    assert kinds(town.reconcile(window=Window(grace=90))) == {missing: Outcome.MISSING}
    result = town.reconcile(window=Window(grace=3600))
    assert result.in_sync
    assert ids_in(result.open) == {missing}
    town.at_producer("UPDATE outbox.message SET visible_at = visible_at - interval '1 hour'")
    assert kinds(town.reconcile(window=Window(grace=3600))) == {missing: Outcome.MISSING}
