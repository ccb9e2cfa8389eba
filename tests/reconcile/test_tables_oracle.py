"""Random worlds told in foreign tables: what is found is what one plain query finds in our own, by any tier and id."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from unittest import mock
from uuid import UUID

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from sqlalchemy import text

from outbox.reconcile import pairing, plan
from outbox.reconcile import sql as reconcile_sql
from outbox.reconcile.job import Effect, Job, Outcome, Pair, Part, Tier
from outbox.reconcile.rows import PairResult, to_findings
from outbox.reconcile.run import reconcile
from outbox.reconcile.tables import InboxState
from tests.kit import tries
from tests.reconcile.foreign import IDS, foreign_job, tell
from tests.reconcile.test_oracle import in_sync, odd_fates, oracle
from tests.reconcile.town import Fate, Place, Town, empty, ids_in

PAIRS = [Pair("t", "g"), Pair("t", "g", tags=["mine"]), Pair("t", "g", effect=Effect("ledger"))]


WORDS = [each.name.lower() for each in InboxState]

#: What the producer believes beside what the inbox says, and whether either said so lately; written from the docs.
_OPINIONS = """
SELECT h.id, b.word <> coalesce(c.status, 'none') AND NOT coalesce(greatest(
           coalesce(m.visible_at, d.recalled_at, d.deliver_at, o.decided_at, h.born_at), c.changed_at)
           > now() - interval '1 minute', false)
  FROM jsonb_each_text(CAST(:opinions AS jsonb)) b (id, word)
  JOIN outbox.half_message h ON h.id = CAST(b.id AS uuid)
  LEFT JOIN outbox.op_message o ON o.half_id = h.id
  LEFT JOIN outbox.message m ON m.half_id = h.id AND NOT EXISTS (
       SELECT FROM outbox.message n WHERE n.half_id = m.half_id AND n.send_number > m.send_number)
  LEFT JOIN outbox.scheduled_message d ON d.half_id = h.id
  LEFT JOIN outbox.consumer_message c ON c.message_id = h.id AND c.consumer_group = 'g'
 WHERE b.word <> 'no_opinion'
"""


def believed(town: Town, pair: Pair) -> dict[UUID, Outcome]:
    """Return the outcome of each message where the producer tells what it believes, too."""
    plain = oracle(town, pair)
    with town.producer.connect() as connection:
        opinions = json.dumps({str(id_): word for id_, word in town.opinions.items()})
        wrong = {id_ for id_, is_wrong in connection.execute(text(_OPINIONS), {"opinions": opinions}) if is_wrong}
    heard = {Outcome.CONSUMED, Outcome.ROLLED_BACK, Outcome.LEFT_OUT, Outcome.PARKED, Outcome.FAILED}
    return {
        id_: Outcome.OPINION_DIFFERS if id_ in wrong and outcome in heard else outcome for id_, outcome in plain.items()
    }


def of_side(pair: Pair, *parts: Part) -> Pair:
    """Return a pair without what a foreign side says in columns of its own."""
    return Pair(
        pair.topic,
        pair.group,
        tags=None if "producer" in parts else pair.tags,
        effect=None if "consumer" in parts else pair.effect,
    )


def agrees(result: PairResult, expected: dict[str, Outcome]) -> None:
    """Check findings, what is in flight, and counts; ids are those of the tables."""
    found = {each.name: each.outcome for each in to_findings(result.findings)}
    assert found == {id_: outcome for id_, outcome in expected.items() if outcome.differs}
    in_flight = {each.name for each in to_findings(result.open)}
    assert in_flight == {id_ for id_, outcome in expected.items() if outcome is Outcome.IN_FLIGHT}
    assert len(in_flight) == len(ids_in(result.open))
    assert result.counts == Counter(expected.values())


def in_all_ways(job: Job, expected: dict[str, Outcome]) -> None:
    """Compare by each tier, and each way to hash."""
    for tier in (Tier.FULL, Tier.DIGEST):
        agrees(reconcile(replace(job, tier=tier)).pairs[0], expected)
    with (
        mock.patch.object(plan, "RANGE", 0.0),
        mock.patch.object(plan, "ROWS_OF_TASK", 3),
        mock.patch.object(pairing, "mixing_of", lambda _: reconcile_sql.PORTABLE),
    ):
        agrees(reconcile(replace(job, tier=Tier.DIGEST)).pairs[0], expected)


@pytest.mark.parametrize("parts", [("producer",), ("consumer",), ("producer", "consumer")])
@settings(
    max_examples=tries(1),
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    rows=st.lists(
        st.builds(
            lambda each, opinion: replace(each, opinion=opinion),
            st.one_of(*[in_sync] * 3, odd_fates),
            st.sampled_from([None, None, None, "no_opinion", *WORDS]),
        ),
        max_size=50,
    ),
    pair=st.sampled_from(PAIRS),
    ids=st.sampled_from(list(IDS)),
    bucket=st.integers(1, 10),
)
def test_told_by_foreign_tables_it_comes_to_the_same(
    village: Town, parts: tuple[Part, ...], rows: list[Fate], pair: Pair, ids: str, bucket: int
) -> None:
    """Whatever both sides say, and whatever their ids are."""
    both = len(parts) == 2
    if not both and ids in {"string", "raw"}:
        ids = "text"  # ours are uuids
    if "consumer" in parts:  # which tells neither offsets nor a beginning: it has read everything
        rows = [each for each in rows if each.place is Place.READ]
    empty(village)
    village.run("TRUNCATE ledger")
    village.plant(rows)
    tell(village, pair, ids, hex_digests=both)
    found = believed(village, pair) if "producer" in parts else oracle(village, pair)
    expected = {named(id_, ids): outcome for id_, outcome in found.items()}
    with mock.patch.object(pairing, "_ROWS_OF_FOREIGN_BUCKET", bucket):
        in_all_ways(foreign_job(village, *parts, pairs=(of_side(pair, *parts),)), expected)


def named(id_: UUID, ids: str) -> str:
    """Return an id of a town as people read it in a foreign table."""
    return {"string": f"order/{id_}", "raw": str(id_).encode().hex()}.get(ids, str(id_))
