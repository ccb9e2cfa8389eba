"""Random worlds: both tiers, both ways of hashing and any number of workers agree with one plain SQL full join."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest import mock
from uuid import UUID

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from sqlalchemy import text

from outbox import Settings
from outbox.reconcile import pairing, plan
from outbox.reconcile import sql as reconcile_sql
from outbox.reconcile.job import Effect, Outcome, Pair, Tier
from outbox.reconcile.record import settled
from outbox.reconcile.rows import PairResult
from outbox.reconcile.tables import InboxState, ProducerState, Torn
from tests.kit import tries
from tests.reconcile.town import HOUR, Fate, Place, Town, fate, ids_at, ids_in, kinds

NONE, CONSUMED, FAILED, PARKED, QUARANTINED = InboxState

#: Written from what `Outcome` says, in its order, with nothing from the package. ``:grace`` etc. are seconds.
ORACLE = """
WITH p AS (
    SELECT h.id, h.body_digest, h.born_at, o.resolution, o.decided_at, m.queue, m.position, m.send_number, m.visible_at,
           d.deliver_at, d.recalled_at, d.half_id IS NOT NULL AS was_scheduled, m.half_id IS NOT NULL AS is_message,
           c.half_id IS NOT NULL AS compensated,
           (CAST(:tags AS text[]) IS NULL OR coalesce(h.tag = ANY (CAST(:tags AS text[])), false)) AS for_group
      FROM outbox.half_message h
      LEFT JOIN outbox.op_message o ON o.half_id = h.id
      LEFT JOIN outbox.message m ON m.half_id = h.id AND NOT EXISTS (
           SELECT FROM outbox.message n WHERE n.half_id = m.half_id AND n.send_number > m.send_number)
      LEFT JOIN outbox.scheduled_message d ON d.half_id = h.id
      LEFT JOIN outbox.compensation c ON c.half_id = h.id
     WHERE h.topic = 't'
), torn AS (
    SELECT m.half_id AS id
      FROM outbox.message m LEFT JOIN outbox.half_message h ON h.id = m.half_id
      LEFT JOIN outbox.op_message o ON o.half_id = m.half_id
     WHERE 't' IN (m.topic, h.topic)
       AND (h.id IS NULL OR h.topic <> m.topic OR o.half_id IS NULL OR o.resolution = 'rollback')
    UNION
    SELECT half_id FROM outbox.op_message o
     WHERE NOT EXISTS (SELECT FROM outbox.half_message h WHERE h.id = o.half_id)
       AND NOT EXISTS (SELECT FROM outbox.message m WHERE m.half_id = o.half_id AND m.topic <> 't')
), i AS (
    SELECT * FROM outbox.consumer_message WHERE consumer_group = 'g' AND topic = 't'
), e AS (
    SELECT message_id, count(*) AS n FROM ledger GROUP BY message_id
), pair AS (
    SELECT coalesce(p.id, i.message_id, torn.id) AS message, torn.id IS NOT NULL AS is_torn, p.*,
           i.status, i.body_digest AS handled, i.last_error,
           i.received_at, i.changed_at, CASE WHEN :effects THEN coalesce(e.n, 0) END AS effects,
           CASE WHEN p.id IS NULL THEN 'unknown'
                WHEN p.resolution = 'rollback' OR p.compensated
                     OR (p.resolution = 'commit' AND p.recalled_at IS NOT NULL AND NOT p.is_message) THEN 'withdrawn'
                WHEN p.resolution IS NULL THEN 'undecided' ELSE 'live' END AS fate,
           p.id IS NOT NULL AND (p.resolution IS NULL OR (p.resolution = 'commit' AND p.was_scheduled
                                 AND p.recalled_at IS NULL AND NOT p.is_message)) AS is_to_come,
           (SELECT max(position) FROM outbox.consumer_offset f
             WHERE f.consumer_group = 'g' AND f.topic = 't' AND f.queue = p.queue) AS read_up_to,
           (SELECT position FROM outbox.consumer_start f
             WHERE f.consumer_group = 'g' AND f.topic = 't' AND f.queue = p.queue) AS began_at
      FROM p FULL OUTER JOIN i ON i.message_id = p.id LEFT JOIN e ON e.message_id = coalesce(p.id, i.message_id)
      FULL OUTER JOIN torn ON torn.id = coalesce(p.id, i.message_id)
), facts AS (
    SELECT *, status = 'consumed' AND last_error IS NULL AS handled_it,
           coalesce(for_group, true) AND coalesce(position > coalesce(began_at, 0), true) AS meant,
           now() - make_interval(secs => :grace) AS lately
      FROM pair
)
SELECT message, CASE
  WHEN is_torn THEN 'torn'
  WHEN fate = 'unknown' AND message < CAST(:horizon AS uuid) THEN 'unjudged'
  WHEN fate = 'withdrawn' AND (handled_it OR effects > 0) THEN 'consumed_though_rolled_back'
  WHEN effects > 1 THEN 'duplicate_effect'
  WHEN fate = 'unknown' OR (is_to_come AND (status IS NOT NULL OR effects > 0))
  THEN CASE WHEN received_at > lately THEN 'in_flight' ELSE 'phantom' END
  WHEN fate = 'live' AND status <> 'quarantined' AND handled <> body_digest THEN 'digest_mismatch'
  WHEN fate = 'live' AND handled_it AND effects = 0 THEN 'no_effect'
  WHEN fate = 'live' AND status IS NULL AND effects = 1 THEN 'unrecorded'
  WHEN fate = 'live' AND status <> 'consumed' AND effects = 1 THEN 'status_mismatch'
  WHEN fate = 'withdrawn' AND status IN ('failed', 'parked') THEN 'status_mismatch'
  WHEN fate = 'withdrawn' AND resolution = 'commit' AND is_message AND status IS NULL AND meant THEN 'status_mismatch'
  WHEN fate = 'withdrawn' THEN 'rolled_back'
  WHEN fate = 'live' AND status = 'quarantined' THEN CASE WHEN changed_at <= lately THEN 'uncompensated'
                                                          ELSE 'in_flight' END
  WHEN fate = 'live' AND NOT is_message THEN CASE WHEN coalesce(deliver_at, decided_at) <= lately THEN 'undispatched'
                                                  ELSE 'in_flight' END
  WHEN fate = 'undecided' THEN CASE WHEN born_at <= lately THEN 'undecided' ELSE 'in_flight' END
  WHEN status = 'consumed' THEN 'consumed'
  WHEN status = 'parked' THEN 'parked'
  WHEN status = 'failed' THEN CASE WHEN received_at <= lately THEN 'failed' ELSE 'in_flight' END
  WHEN NOT meant THEN 'left_out'
  WHEN visible_at > lately THEN 'in_flight'
  WHEN position > coalesce(read_up_to, 0) THEN 'unconsumed'
  WHEN send_number - 1 >= :resends THEN 'resend_exhausted'
  ELSE 'missing' END
  FROM facts
"""

ages = st.sampled_from([0.0, HOUR])
tags = st.sampled_from([None, "mine", "other"])
odd_fates = st.builds(
    Fate,
    state=st.sampled_from([None, *ProducerState]),
    status=st.sampled_from(list(InboxState)),
    sends=st.integers(1, 5),
    place=st.sampled_from(list(Place)),
    compensated=st.booleans(),
    skipped=st.booleans(),
    same_body=st.sampled_from([True, True, False, None]),
    effects=st.integers(0, 2),
    age=ages,
    inbox_age=ages,
    received=ages,
    due_in=st.sampled_from([-HOUR, HOUR]),
    tag=tags,
)
torn_fates = st.builds(
    Fate,
    state=st.just(ProducerState.DISPATCHED),
    status=st.sampled_from([NONE, CONSUMED]),
    sends=st.integers(1, 2),
    effects=st.integers(0, 1),
    age=ages,
    tag=st.just("mine"),
    torn=st.sampled_from(Torn),
) | st.builds(
    Fate,
    state=st.sampled_from([ProducerState.COMMITTED, ProducerState.ROLLED_BACK]),
    status=st.just(NONE),
    torn=st.just(Torn.OP_WITHOUT_HALF),
)
in_sync = st.one_of(
    st.builds(Fate, effects=st.just(1), tag=st.just("mine"), age=ages),
    st.builds(Fate, state=st.just(ProducerState.ROLLED_BACK), status=st.just(NONE), tag=tags),
    st.builds(Fate, status=st.just(NONE), tag=st.just("other")),
)
#: Of another topic, whose group writes the same ledger.
noise = st.builds(
    Fate,
    state=st.sampled_from([None, *ProducerState]),
    status=st.sampled_from([NONE, CONSUMED]),
    sends=st.integers(1, 2),
    compensated=st.booleans(),
    effects=st.integers(0, 2),
    age=ages,
)
#: Mostly in sync, so that there are ranges to settle.
rows = st.lists(st.one_of(*[in_sync] * 4, odd_fates, torn_fates), max_size=60)


@dataclass(frozen=True)
class World:
    """A drawn world: its rows, which of them are older than the retention, and how it is cut, sampled and compared."""

    rows: list[Fate]
    noise: list[Fate]
    old: int
    bucket: int
    pair: Pair
    range_cost: float
    free_digests: bool
    sampled: bool
    rows_of_range: int
    seed: int


worlds = st.builds(
    World,
    rows=rows,
    noise=st.lists(noise, max_size=10),
    old=st.integers(0, 10),
    bucket=st.integers(1, 12),
    pair=st.builds(
        Pair,
        st.just("t"),
        st.just("g"),
        tags=st.sampled_from([None, ["mine"]]),
        effect=st.sampled_from([None, Effect("ledger")]),
    ),
    range_cost=st.sampled_from([plan.RANGE, 0.0]),
    free_digests=st.booleans(),
    sampled=st.booleans(),
    rows_of_range=st.sampled_from([1, 20]),
    seed=st.integers(0, 2**32),
)


# --- legal steps of time ----------------------------------------------------------------------------------

Step = Callable[[Town, random.Random, list[UUID]], None]


def one_of(town: Town, chance: random.Random, sql: str) -> UUID | None:
    """Return one of the ids that a query finds, or None."""
    ids = sorted(town.rows(sql))
    return chance.choice(ids) if ids else None


def late(town: Town, chance: random.Random, ids: list[UUID]) -> None:
    """Commit a message with an old id, in whatever state."""
    drawn = chance.choice(
        [
            fate(status=NONE),
            fate(effects=1, tag="mine", age=0.0),
            fate(status=NONE, state=ProducerState.COMMITTED),
            fate(status=NONE, state=ProducerState.ROLLED_BACK, tag="mine"),
            fate(status=NONE, state=ProducerState.UNDECIDED),
        ]
    )
    place = UUID(int=(chance.choice(ids).int if ids else 2**100) + 1)
    if place not in ids:
        ids += town.plant([drawn], ids=[place])
        # What is planted as decided looks as if dispatch had seen it long ago; this rollback is of a new transaction.
        town.at_producer(
            "UPDATE outbox.op_message SET xid = pg_current_xact_id() WHERE half_id = :id AND resolution = 'rollback'",
            id=place,
        )


def resend(town: Town, chance: random.Random, ids: list[UUID]) -> None:
    """Resend any message but a compensated one, and one whose rows are torn."""
    sql = """SELECT half_id FROM outbox.message m JOIN outbox.op_message o USING (half_id)
               JOIN outbox.half_message h ON h.id = m.half_id AND h.topic = m.topic
              WHERE o.resolution = 'commit'
                AND NOT EXISTS (SELECT FROM outbox.compensation c WHERE c.half_id = m.half_id)"""
    if (one := one_of(town, chance, sql)) is not None:
        town.resend(one)


def retry(town: Town, chance: random.Random, ids: list[UUID]) -> None:
    """Have a retry succeed."""
    sql = "SELECT message_id FROM outbox.consumer_message WHERE status = 'failed'"
    if (one := one_of(town, chance, sql)) is not None:
        town.run(
            "UPDATE outbox.consumer_message SET status = 'consumed', next_attempt_at = NULL, last_error = NULL,"
            " changed_at = clock_timestamp() WHERE message_id = :id",
            id=one,
        )
        town.run("INSERT INTO ledger (message_id) VALUES (:id)", id=one)


def park(town: Town, chance: random.Random, ids: list[UUID]) -> None:
    """Have a failed message parked."""
    sql = "SELECT message_id FROM outbox.consumer_message WHERE status = 'failed'"
    if (one := one_of(town, chance, sql)) is not None:
        town.set_inbox(PARKED, one)


def resume(town: Town, chance: random.Random, ids: list[UUID]) -> None:
    """Resume a parked message."""
    sql = "SELECT message_id FROM outbox.consumer_message WHERE status = 'parked'"
    if (one := one_of(town, chance, sql)) is not None:
        town.sink.operator.retry(one, group="g", by="me", why="test")


def consume(town: Town, chance: random.Random, ids: list[UUID]) -> None:
    """Have a message consumed that the inbox doesn't know; the group never comes back to one that it left out."""
    sql = """SELECT half_id FROM outbox.message m JOIN outbox.half_message h ON h.id = m.half_id
              WHERE tag = 'mine' AND NOT EXISTS (SELECT FROM outbox.consumer_start s
                                                  WHERE s.queue = m.queue AND s.position >= m.position)
                AND NOT EXISTS (SELECT FROM outbox.consumer_message c WHERE c.message_id = m.half_id)"""
    if (one := one_of(town, chance, sql)) is not None:
        town.run(
            "INSERT INTO outbox.consumer_message (consumer_group, message_id, topic, queue, position, status, attempts,"
            " body_digest)"
            " SELECT 'g', id, 't', 0, 1, 'consumed', 1, body_digest FROM outbox.half_message WHERE id = :id",
            id=one,
        )
        town.run("INSERT INTO ledger (message_id) VALUES (:id)", id=one)


def dispatch(town: Town, chance: random.Random, ids: list[UUID]) -> None:
    """Dispatch and release all that is due."""
    town.dispatch()


def compensate(town: Town, chance: random.Random, ids: list[UUID]) -> None:
    """Quarantine a parked message, and compensate it."""
    sql = "SELECT message_id FROM outbox.consumer_message WHERE status = 'parked'"
    if (one := one_of(town, chance, sql)) is not None:
        town.set_inbox(QUARANTINED, one)
        town.run(
            "INSERT INTO outbox.compensation (half_id, function, requested_by, reason) VALUES (:id, 'f', 'me', 'test')"
            " ON CONFLICT DO NOTHING",
            id=one,
        )


def decide(town: Town, chance: random.Random, ids: list[UUID]) -> None:
    """Commit or roll back an undecided half."""
    if (one := one_of(town, chance, "SELECT half_id FROM outbox.half_check")) is not None:
        chance.choice([town.app.commit, town.app.rollback])(one)


STEPS: list[Step] = [late, late, resend, retry, park, resume, consume, dispatch, compensate, decide]


# --- the comparison ---------------------------------------------------------------------------------------


def oracle(town: Town, pair: Pair) -> dict[UUID, Outcome]:
    """Return the outcome of each message, by one query over both sides."""
    values: dict[str, Any] = {
        "tags": None if pair.tags is None else list(pair.tags),
        "effects": pair.effect is not None,
        "horizon": str(ids_at(Settings().retention)[0]),
        "grace": 60.0,
        "resends": 3,
    }
    with town.producer.connect() as connection:
        return {row[0]: Outcome[row[1].upper()] for row in connection.execute(text(ORACLE), values)}


def agrees(result: PairResult, expected: dict[UUID, Outcome]) -> None:
    """Check findings, messages in flight, and counts."""
    assert kinds(result) == {id_: outcome for id_, outcome in expected.items() if outcome.differs}
    assert ids_in(result.open) == {id_ for id_, outcome in expected.items() if outcome is Outcome.IN_FLIGHT}
    assert result.counts == Counter(expected.values())


def compare_in_all_ways(town: Town, pair: Pair) -> None:
    """Compare both sides by each tier, engine size and hash; the last run keeps what is settled."""
    expected = oracle(town, pair)
    agrees(town.reconcile(pair, tier=Tier.FULL, workers=1, record=False), expected)
    with mock.patch.object(plan, "ROWS_OF_TASK", 3), mock.patch.object(plan, "_RANGES_OF_TASK", 2):
        agrees(town.reconcile(pair, tier=Tier.FULL, workers=3, record=False), expected)
        agrees(town.reconcile(pair, tier=Tier.DIGEST, workers=3, record=False), expected)
    with mock.patch.object(pairing, "mixing_of", lambda snapshots: reconcile_sql.PORTABLE):
        agrees(town.reconcile(pair, tier=Tier.DIGEST, record=False), expected)
    agrees(town.reconcile(pair, tier=Tier.DIGEST), expected)


@settings(
    max_examples=tries(2),
    # Shrinking runs dozens of comparisons for each row less; the seed and the drawn rows are enough to find a fault.
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(world=worlds)
def test_all_ways_agree_with_one_plain_query(village: Town, world: World) -> None:
    """Whatever both sides say, and whatever happens after the first night: the same findings, and the same counts."""
    town, chance = village, random.Random(world.seed)  # noqa: S311
    empty(town)
    old = ids_at(Settings().retention + HOUR, min(world.old, len(world.rows)))
    ids = [*old, *ids_at(HOUR, len(world.rows) - len(old))]
    town.plant(world.rows, ids=ids)
    beside = chance.sample(ids, min(len(world.noise), len(ids)))
    town.plant(world.noise[: len(beside)], topic="noise", group="h", ids=[UUID(int=id_.int - 1) for id_ in beside])
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(plan, "RANGE", world.range_cost))
        if world.free_digests:  # ranges as small as there are any
            stack.enter_context(mock.patch.multiple(plan, SCANNED=0.0, BUCKET=0.0))
        if world.sampled:
            stack.enter_context(mock.patch.multiple(plan, _MESSAGES_OF_SAMPLE=5, _FEWEST_SAMPLES=1, SAMPLE_ROWS=2))
        stack.enter_context(mock.patch.object(settled, "ROWS_OF_RANGE", world.rows_of_range))
        for points in ("points", "points_between"):
            stack.enter_context(mock.patch.object(plan, points, lambda *_: sorted(ids)[:: world.bucket]))
        compare_in_all_ways(town, world.pair)
        for step in chance.choices(STEPS, k=6):
            step(town, chance, ids)
        agrees(town.reconcile(world.pair, tier=Tier.DIGEST), oracle(town, world.pair))
        for step in chance.choices(STEPS, k=3):
            step(town, chance, ids)
        compare_in_all_ways(town, world.pair)


@pytest.mark.parametrize("pair", [Pair("t", "g"), Pair("t", "g", tags=["mine"], effect=Effect("ledger"))])
def test_every_combination_agrees_with_one_plain_query(village: Town, pair: Pair) -> None:
    """Every state of the producer beside every state of the inbox, with and without effects, young and old."""
    every = [
        Fate(
            state=state,
            status=status,
            sends=sends,
            place=place,
            compensated=compensated,
            skipped=skipped,
            same_body=same_body,
            effects=effects,
            age=age,
            inbox_age=inbox_age,
            tag=tag,
        )
        for state in (None, *ProducerState)
        for status in InboxState
        for sends, place in ((1, Place.READ), (4, Place.READ), (1, Place.AHEAD), (2, Place.BEFORE))
        for compensated in (False, True)
        for skipped in ((False, True) if status is CONSUMED else (False,))
        for same_body in ((True, False) if status is not NONE else (True,))
        for effects in (0, 1, 2)
        for age, inbox_age in ((0.0, 0.0), (HOUR, 0.0), (HOUR, HOUR))
        for tag in ("mine", "other")
        if state is ProducerState.DISPATCHED or (sends, place) == (1, Place.READ)
    ]
    village.plant(every)
    expected = oracle(village, pair)
    for tier in (Tier.FULL, Tier.DIGEST):
        agrees(village.reconcile(pair, tier=tier, record=False), expected)


def empty(town: Town) -> None:
    """Empty all tables that a comparison reads or writes."""
    town.run(
        "TRUNCATE outbox.half_message, outbox.half_check, outbox.op_message, outbox.message, outbox.scheduled_message,"
        " outbox.compensation, outbox.consumer_message, outbox.consumer_offset, outbox.consumer_start,"
        " outbox.reconciliation_settled, outbox.reconciliation_mark, outbox.dispatch_cursor, ledger"
    )
    # The first pass of all takes every op for one of before, and forgets its transaction.
    town.dispatch()
