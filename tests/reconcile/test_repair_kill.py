"""Repairs that are killed, after each of their round trips and at random: run again, they come to the same end."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from uuid import UUID

import pytest
from sqlalchemy import make_url, text

from outbox.message.model import uuid7
from outbox.reconcile.job import Access, Job, Outcome, Repair
from outbox.reconcile.rows import Finding
from tests.kit import stride, tries, wait_until
from tests.kit.bench import Bench
from tests.reconcile.repair_process import Repairer
from tests.reconcile.repairing import Night

pytestmark = pytest.mark.slow

NAME = "outbox-repair"


@pytest.fixture
def repairers() -> Iterator[list[Repairer]]:
    """Two that fork repairs."""
    both = [Repairer(), Repairer()]
    yield both
    for each in both:
        each.close()


@dataclass(frozen=True)
class Broken:
    """Messages that were put out of step, by what is to become of them, and what is found of them."""

    ids: dict[Repair, list[UUID]]
    by_dispatch: list[UUID]
    findings: list[Finding]

    @property
    def consumers(self) -> list[UUID]:
        """Those that the consumer has handled in the end."""
        return [*self.ids[Repair.RESEND], *self.ids[Repair.DISPATCH], *self.by_dispatch, *self.ids[Repair.RETRY]]


def broken(night: Night, each: int) -> Broken:
    """Break so many messages in every way that can be repaired."""
    ids = night.consumed(*range(6 * each))
    # The phantoms aren't the last of their queue: positions must not begin again below the group's offset.
    phantom, missing, unrecorded, mismatch, withdrawn, parked = (ids[n * each : n * each + each] for n in range(6))
    night.forget(*missing)
    night.forget(*withdrawn)
    night.forget(*unrecorded, ledger=False)
    night.set_status("quarantined", *mismatch)
    night.set_status("parked", *parked)
    night.set_status("failed", *phantom)
    night.run("DELETE FROM ledger WHERE message_id = ANY (:ids)", ids=[*parked, *phantom])
    night.compensate(*withdrawn)
    for table, column in (("message", "half_id"), ("op_message", "half_id"), ("half_message", "id")):
        night.run_at_producer(f"DELETE FROM outbox.{table} WHERE {column} = ANY (:ids)", ids=phantom)
    undispatched, backlog = night.passed(*range(each)), night.send_only(*range(each))
    with night.producer.begin() as connection:
        undecided = [night.app.prepare(connection, "t", n, immunity=3600) for n in range(each)]
    acts = {
        Repair.RESEND: missing,
        Repair.DISPATCH: undispatched,
        Repair.SYNC_STATUS: [*unrecorded, *mismatch, *withdrawn],
        Repair.RETRY: parked,
        Repair.PARK: phantom,
        Repair.CHECK: undecided,
    }
    mine = {*backlog, *itertools.chain.from_iterable(acts.values())}
    findings = [finding for finding in night.found() if finding.id in mine]
    assert len(findings) == 9 * each
    return Broken(acts, backlog, findings)


def named(job: Job) -> Job:
    """Return the job with connections that can be told from others."""
    producer, consumer = (
        make_url(access.url).update_query_dict({"application_name": NAME}).render_as_string(hide_password=False)
        for access in (job.producer, job.consumer)
    )
    return replace(
        job, producer=Access(producer, job.producer.settings), consumer=Access(consumer, job.consumer.settings)
    )


def nobody_repairs(night: Bench) -> bool:
    """Has the server noticed the end of every repair?"""
    with night.consumer.begin() as connection:
        sql = "SELECT count(*) FROM pg_stat_activity WHERE application_name = :name"
        return bool(connection.execute(text(sql), {"name": NAME}).scalar_one() == 0)


def assert_mended(night: Night, what: Broken) -> None:
    """Each act was done once, and recorded once; what is consumed took effect once; nothing else is left."""
    for action, ids in what.ids.items():
        acts = Counter(UUID(target.removeprefix("g/")) for _, target, _ in night.acts(action))
        assert {half_id: acts[half_id] for half_id in ids} == dict.fromkeys(ids, 1), action
    assert night.sends(*what.ids[Repair.RESEND]) == [2] * len(what.ids[Repair.RESEND])
    assert night.sends(*what.ids[Repair.DISPATCH], *what.by_dispatch) == [1] * 2 * len(what.by_dispatch)
    night.settle()
    assert set(night.status(*what.consumers)) == {"consumed"}
    effects = dict(night.rows("SELECT message_id, count(*) FROM ledger GROUP BY 1"))
    assert {half_id: effects.get(half_id) for half_id in what.consumers} == dict.fromkeys(what.consumers, 1)
    assert set(night.kinds()) == {Outcome.UNDECIDED, Outcome.PHANTOM}


def test_killed_after_each_round_trip(night: Night, repairers: list[Repairer]) -> None:
    """A repair that is killed after a round trip (any, at night), and run again, has done each thing once."""
    job = named(night.job())
    what = broken(night, 2)
    for kind in sorted({finding.outcome for finding in what.findings}):
        findings = [finding for finding in what.findings if finding.outcome is kind]
        # Until one comes to its end, each is killed later than the one before.
        for after in itertools.count(1, stride(2)):
            said, pid = repairers[0].start((job, uuid7(), findings, 500, after))
            if said == "ended":
                repairers[0].wait()
                break
            assert repairers[0].kill(pid)
            wait_until(lambda: nobody_repairs(night), "the server has noticed the end")
        assert after > 5, "a repair has more round trips than that"
    assert_mended(night, what)


def test_two_repairs_killed_at_random(night: Night, repairers: list[Repairer]) -> None:
    """Two repairs of the same differences, killed over and over, come to an end at which each thing is done once."""
    chance = random.Random(4)  # noqa: S311
    kills = 0
    # On a busy machine the two get further before each kill: then there is more for them to mend.
    while kills < tries(5):
        what = broken(night, 40)
        kills += killed_until_mended(night, repairers, what, chance)
        assert night.repair(what.findings)
        assert_mended(night, what)


def killed_until_mended(night: Night, repairers: list[Repairer], what: Broken, chance: random.Random) -> int:
    """Kill repairs at any moment until all is done; return how many were at work."""
    job = named(night.job())

    def left() -> int:
        acts = {action: {target.removeprefix("g/") for _, target, _ in night.acts(action)} for action in what.ids}
        return sum(str(half_id) not in acts[action] for action, ids in what.ids.items() for half_id in ids)

    kills = 0
    while (before := left()) > 0:
        order = (job, uuid7(), what.findings, chance.randint(1, 9), 0)
        running = [each.start(order)[1] for each in repairers]
        goal = max(before - chance.randint(1, 8), 0)
        wait_until(lambda goal=goal: left() <= goal, "the repairs get on")  # type: ignore[misc]
        kills += sum(each.kill(pid) for each, pid in zip(repairers, running, strict=True))
        wait_until(lambda: nobody_repairs(night), "the server has noticed the end")
    return kills
