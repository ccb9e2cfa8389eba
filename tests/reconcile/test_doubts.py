"""What can't be true of a comparison is told; mends are those that the sides have."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console
from sqlalchemy import text

from outbox.database.duty import PARTS
from outbox.reconcile.job import KINDS, Outcome, Pair, Repair, Tier
from outbox.reconcile.plan import doubts_of
from outbox.reconcile.report import as_json, print_report
from outbox.reconcile.rows import JobResult, PairResult, Rules
from outbox.reconcile.tables import InboxState
from tests.reconcile.town import IN_SYNC, PAIR, Progress, Town, fate, url_of


def doubts(result: PairResult) -> str:
    """Return the doubts of a result in one text."""
    return "\n".join(result.plan.doubts)


@pytest.mark.parametrize("tier", [Tier.FULL, Tier.DIGEST])
def test_sides_that_agree_leave_no_doubt(town: Town, tier: Tier) -> None:
    """Also where some messages are missing, or the consumer has some that the producer has pruned."""
    town.plant([*[IN_SYNC] * 20, fate(status=InboxState.NONE), fate(state=None)])
    assert not doubts(town.reconcile(tier=tier))


@pytest.mark.parametrize("tier", [Tier.FULL, Tier.DIGEST])
def test_sides_that_have_nothing_are_told(town: Town, tier: Tier) -> None:
    """A wrong topic, group or database reads nothing of a side, or of both, which would look like agreement."""
    assert "neither the producer" in doubts(town.reconcile(tier=tier))
    town.plant([IN_SYNC] * 5)
    progress = Progress()
    wrong_topic = town.reconcile(Pair("no-such-topic", "g"), tier=tier, progress=progress)
    assert "has a message of topic 'no-such-topic'" in doubts(wrong_topic)
    assert any("no-such-topic" in said and "neither" in said for said in progress.said)
    wrong_group = doubts(town.reconcile(Pair("t", "no.such.group"), tier=tier))
    assert "has none of 5 messages, in which group 'no.such.group' has no offset" in wrong_group
    assert url_of(town.consumer) not in wrong_group
    town.at_producer("TRUNCATE outbox.half_message, outbox.op_message, outbox.message")
    assert "see that it is the producer of topic 't'" in doubts(town.reconcile(tier=tier, record=False))


def test_what_took_effect_before_it_was_sent_is_told(town: Town) -> None:
    """As by a clock that is behind, or in another time zone; what was sent again took effect before, rightly."""
    town.plant([*[IN_SYNC] * 3, fate(sends=2, age=0.0, inbox_age=3600.0)])
    assert not doubts(town.reconcile())
    town.run("UPDATE outbox.consumer_message SET changed_at = changed_at - interval '2 hours' WHERE position < 3")
    result = town.reconcile()
    assert "3 messages took effect before it was sent" in doubts(result)
    assert result.in_sync
    (shown,) = as_json(JobResult(result.begun_at, [result], []))["pairs"]
    assert shown["plan"]["doubts"] == list(result.plan.doubts)
    console = Console(record=True, width=200, file=io.StringIO())
    print_report(JobResult(result.begun_at, [result], []), console)
    assert "took effect before it was sent" in console.export_text()
    with town.consumer.connect() as connection:
        plan = connection.execute(
            text("SELECT plan FROM outbox.reconciliation_run WHERE id = :id"), {"id": result.run_id}
        ).scalar_one()
    assert plan["doubts"] == list(result.plan.doubts)


def test_clocks_that_differ_are_told(town: Town) -> None:
    """By more than the time between two snapshots."""
    rules = Rules(producer_now=7_200_000_000, consumer_now=0, grace=60_000_000, offsets={0: 1})
    counts = {Outcome.CONSUMED: 1}
    (told,) = doubts_of(town.job(), PAIR, rules, counts, 0)
    assert told.startswith("the producer's clock is 2h00m ahead of the other's")
    assert not list(doubts_of(town.job(), PAIR, replace(rules, consumer_now=7_190_000_000), counts, 0))


@pytest.mark.parametrize("kind", [each for each in KINDS if each is not Outcome.OPINION_DIFFERS])
def test_mends_are_those_that_a_foreign_pair_has(kind: Outcome) -> None:
    """No repair, and no command of ours about a side that isn't; of the other side they stay."""
    policy = dict.fromkeys([kind], kind.repairs[-1])
    assert kind.repair(policy, PARTS[1:]) is Repair.ALERT
    both = kind.mend(policy, PARTS)
    assert both
    assert "--apply" not in both
    assert "policy" not in both
    assert "`outbox" not in both
    if kind is Outcome.PARKED:
        assert "outbox dead retry" in kind.mend(policy, PARTS[:1])
