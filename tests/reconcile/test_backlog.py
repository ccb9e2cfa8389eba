"""A group that is far behind: what lies beyond its offset is counted by queue, and only some of it is listed."""

from __future__ import annotations

import json
from typing import Any
from uuid import UUID

import pytest

from outbox.operator.databases import Databases, open_database
from outbox.operator.model import PageRequest
from outbox.reconcile import pairing
from outbox.reconcile.job import KINDS, EngineName, Job, Outcome, Pair, Repair, Tier
from outbox.reconcile.measure import Measure
from outbox.reconcile.record.views import FindingFilter, Reconciliations
from outbox.reconcile.report import as_json
from outbox.reconcile.rows import JobResult, to_findings
from outbox.reconcile.run import reconcile
from outbox.reconcile.tables import InboxState
from tests.reconcile.town import HOUR, IN_SYNC, Place, Progress, Town, fate, ids_at

MISSING = fate(status=InboxState.NONE)
AHEAD = fate(status=InboxState.NONE, place=Place.AHEAD)
MOST = len(KINDS)


def listed(result: JobResult) -> dict[UUID, Outcome]:
    """Return the findings of the only pair."""
    (pair,) = result.pairs
    return {finding.id: finding.outcome for finding in to_findings(pair.findings)}


@pytest.fixture
def read_again(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many messages each read of the second look has read."""
    numbers: list[int] = []
    real = pairing.read_again

    def spy(job: Job, pair: Pair, ids: list[UUID], **more: Any) -> object:
        numbers.append(len(ids))
        return real(job, pair, ids, **more)

    monkeypatch.setattr(pairing, "read_again", spy)
    return numbers


@pytest.mark.parametrize("tier", [Tier.FULL, Tier.DIGEST])
def test_a_backlog_is_counted_by_queue_and_not_read_again(town: Town, tier: Tier, read_again: list[int]) -> None:
    """Of messages that nobody has consumed as many are listed as the job says, first ids first; the report tells."""
    ids = town.plant([AHEAD] * 60, ids=ids_at(HOUR, 60))
    progress = Progress()

    result = reconcile(town.job(tier=tier, max_findings=MOST), progress)

    (pair,) = result.pairs
    assert pair.counts == {Outcome.UNCONSUMED: 60}
    assert listed(result) == dict.fromkeys(ids[:MOST], Outcome.UNCONSUMED)
    assert (pair.left_out, pair.backlog) == (60 - MOST, {int(Place.AHEAD): 60})
    assert read_again == []
    assert any(f"{MOST} of 60 differences are listed" in said for said in progress.said)
    (told,) = json.loads(json.dumps(as_json(result, 10)))["pairs"]
    assert (len(told["findings"]), told["findings_left_out"]) == (10, 50)
    assert (told["left_out"], told["backlog"]) == (60 - MOST, {str(int(Place.AHEAD)): 60})


def test_what_the_group_has_come_to_meanwhile_is_read_again(town: Town, read_again: list[int]) -> None:
    """The offset moves between the looks: what it has passed is judged once more, listed or not; others are counted."""
    ids = town.plant([AHEAD] * 60, ids=ids_at(HOUR, 60))
    consumed, passed = ids[:25], ids[25:30]

    def consume(title: str) -> None:
        if "second look" in title:
            town.run(
                "INSERT INTO {s}.consumer_message (consumer_group, message_id, topic, queue, position, status,"
                " attempts, body_digest) SELECT 'g', id, 't', 1, 1, 'consumed', 1, substr(sha256(uuid_send(id)), 1, 16)"
                " FROM unnest(CAST(:ids AS uuid[])) id",
                ids=consumed,
            )
            town.run("INSERT INTO {s}.consumer_offset (consumer_group, topic, queue, position, starts)"
                     " VALUES ('g', 't', 1, 30, 0)")  # fmt: skip

    result = reconcile(town.job(max_findings=MOST), Progress(consume))

    (pair,) = result.pairs
    assert pair.counts == {Outcome.CONSUMED: 25, Outcome.MISSING: 5, Outcome.UNCONSUMED: 30}
    assert {id_ for id_, kind in listed(result).items() if kind is Outcome.MISSING} == set(passed)
    assert set(listed(result)) <= {*passed, *ids[30:]}
    assert (pair.healed, pair.backlog) == (25, {1: 30})
    assert read_again[0] == 30


def test_each_kind_has_its_share_of_what_is_listed(town: Town) -> None:
    """A backlog doesn't hide the only parked message, and what is not listed is neither repaired nor forgotten."""
    backlog = town.plant([AHEAD] * 40, ids=ids_at(HOUR, 40))
    (parked,) = town.plant([fate(status=InboxState.PARKED)])
    missing = town.plant([MISSING] * 40)

    result = reconcile(town.job(max_findings=MOST, policy={Outcome.MISSING: Repair.RESEND}, apply=True))

    found = listed(result)
    assert len(found) == MOST
    assert found[parked] is Outcome.PARKED
    assert set(found) & set(backlog)
    assert len(result.pairs[0].repairs) == len(set(found) & set(missing))
    assert result.pairs[0].counts == {Outcome.UNCONSUMED: 40, Outcome.PARKED: 1, Outcome.MISSING: 40}


def test_the_record_has_what_is_listed_and_counts_the_rest(town: Town) -> None:
    """Of a bounded run the console tells the whole number of each kind, what is left of it, and what is listed."""
    town.plant([AHEAD] * 40 + [IN_SYNC])
    result = reconcile(town.job(max_findings=MOST, engine=EngineName.LOCAL))
    views = Reconciliations(Databases([open_database("b", town.consumer, town.settings)]))

    view = views.run(result.pairs[0].run_id)

    ((kind,),) = [view.kinds]
    assert (kind.kind, kind.number, kind.left) == ("unconsumed", 40, 40)
    assert (view.run.differences, view.run.left) == (40, 40)
    assert view.run.plan is not None
    assert (view.run.plan["left_out"], view.run.plan["backlog"]) == (40 - MOST, {"1": 40})
    assert len(views.findings(view.run.id, FindingFilter(), PageRequest(100)).items) == MOST


def test_a_backlog_is_under_way_for_the_measures(town: Town) -> None:
    """What lies beyond the offset is a message under way for a measure, whether it is listed or not."""
    town.plant([AHEAD] * 40)
    measure = Measure(
        "n",
        "t",
        "g",
        by=(),
        values=("n",),
        producer="SELECT 40 AS n",
        consumer="SELECT count(*) AS n FROM ledger",
        in_flight={"n": "*"},
    )
    result = reconcile(town.job(Pair("t", "g"), max_findings=MOST, measures=(measure,)))
    (row,) = result.measures[0].rows
    assert row.in_flight == 40
    assert not row.unexplained
